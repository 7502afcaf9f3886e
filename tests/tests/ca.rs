//! The mesh while its certificate authority changes: new connections and requests go on through every rotation, and what
//! was withdrawn is refused.

use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::symlink;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use prost::Message;
use prost_types::value::Kind;
use rustls::AlertDescription;
use serde_json::Value;
use testbed::{
    AUDIENCE, Authority, Behaviour, HboneClient, ISSUER, Mesh, MeshOptions, Pod, Server, Shop, TokenSpec, TunnelError,
    wait_for, wait_for_within,
};
use ztunnel::identity::PrivateKey;
use ztunnel::proto::citadel::{IstioCertificateRequest, IstioCertificateResponse};

/// Certificates live this long: long enough for a slow machine to renew them in time, short enough for a test.
const LIFE: Duration = Duration::from_secs(16);
/// For what takes a life or two.
const LIVES: Duration = Duration::from_secs(90);
const PEER: &str = "spiffe://cluster.local/ns/legacy/sa/default";

fn options() -> MeshOptions {
    let life = format!("{}s", LIFE.as_secs());
    MeshOptions::default()
        .control_arg("--leaf-ttl")
        .control_arg(&life)
        .control_arg("--renewal-window")
        .control_arg("1s")
}

/// Connections and requests that go on until they are told to stop. Each failure is kept.
#[derive(Default)]
struct Traffic {
    stop: AtomicBool,
    done: AtomicU64,
    failures: Mutex<Vec<String>>,
    /// Connections that were made to have many requests, by where they go.
    opened: [AtomicU64; 2],
}

impl Traffic {
    /// Runs it beside what a test does.
    fn beside(shop: &Shop, during: impl FnOnce(&Self)) {
        let traffic = Self::default();
        let near: SocketAddr = shop.near_service.at(80);
        let far: SocketAddr = shop.far_service.at(80);
        std::thread::scope(|scope| {
            for (number, (what, to)) in [("near", near), ("far", far)].into_iter().enumerate() {
                let traffic = &traffic;
                scope.spawn(move || traffic.new_connections(shop, what, to));
                scope.spawn(move || traffic.requests(shop, number, what, to));
            }
            let stop = StopOnDrop(&traffic.stop);
            during(&traffic);
            drop(stop);
        });
        let failures = traffic.failures.into_inner().unwrap();
        assert!(failures.is_empty(), "{} of {:?} failed: {failures:#?}", failures.len(), traffic.done);
        assert!(traffic.done.into_inner() > 100);
    }

    /// One connection after another, each with one request.
    fn new_connections(&self, shop: &Shop, what: &str, to: SocketAddr) {
        while !self.stop.load(Ordering::Relaxed) {
            let asked = shop.client.connect(to).map_err(|e| format!("connect: {e}")).and_then(|mut s| ask(&mut s));
            self.count(&format!("a new connection to {what}"), asked);
        }
    }

    /// One connection with many requests. It is ended and made anew from time to time: a withdrawn root ends what is
    /// older than its replacement.
    fn requests(&self, shop: &Shop, number: usize, what: &str, to: SocketAddr) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut stream = match shop.client.connect(to) {
                Ok(stream) => stream,
                Err(e) => {
                    self.count(&format!("connect to {what}"), Err(e.to_string()));
                    continue;
                }
            };
            self.opened[number].fetch_add(1, Ordering::Relaxed);
            let opened = std::time::Instant::now();
            while opened.elapsed() < LIFE / 4 && !self.stop.load(Ordering::Relaxed) {
                let asked = ask(&mut stream);
                let failed = asked.is_err();
                self.count(&format!("a request to {what}"), asked);
                if failed {
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn count(&self, what: &str, result: Result<(), String>) {
        self.done.fetch_add(1, Ordering::Relaxed);
        if let Err(reason) = result {
            self.failures.lock().unwrap().push(format!("{what}: {reason}"));
        }
    }

    /// Waits until no connection from before now is open.
    #[track_caller]
    fn wait_all_new(&self) {
        let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
        for opened in &self.opened {
            let before = count(opened);
            wait_for("connections to be made anew", || (count(opened) > before).then_some(()));
        }
    }

    /// Traffic has gone on, without a failure so far.
    #[track_caller]
    fn assert_well(&self, step: &str) {
        let before = self.done.load(Ordering::Relaxed);
        wait_for(&format!("traffic after {step}"), || (self.done.load(Ordering::Relaxed) > before + 20).then_some(()));
        let failures = self.failures.lock().unwrap();
        assert!(failures.is_empty(), "after {step}: {failures:#?}");
    }
}

/// So that a test that fails ends its traffic too.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn ask(stream: &mut TcpStream) -> Result<(), String> {
    stream.write_all(b"ping").map_err(|e| format!("send: {e}"))?;
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).map_err(|e| format!("receive: {e}"))?;
    if answer == *b"ping" { Ok(()) } else { Err(format!("received {answer:?}")) }
}

fn serve(shop: &Shop) -> [Server; 2] {
    [&shop.near, &shop.far].map(|pod| pod.serve(8080, Behaviour::Echo))
}

/// Runs `control ca` on the mesh's folder; its JSON, or what it says against it.
fn control_ca(mesh: &Mesh, args: &[&str]) -> Result<Value, String> {
    let output = mesh.control_ca(args);
    if output.status.success() {
        return Ok(serde_json::from_slice(&output.stdout).expect("JSON"));
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Takes the next step as soon as it is allowed.
#[track_caller]
fn rotate_when_allowed(mesh: &Mesh, step: u64) -> Value {
    wait_for_within(LIVES, &format!("step {step} of the rotation to be allowed"), || {
        match control_ca(mesh, &["rotate", "--output", "json"]) {
            Ok(done) => {
                assert_eq!(done["step"], step, "{done}");
                Some(done)
            }
            Err(reason) => {
                assert!(reason.contains("refused:") && reason.contains("--force"), "{reason}");
                None
            }
        }
    })
}

/// Waits until every certificate of every proxy is shown with this intermediate.
#[track_caller]
fn wait_intermediate(mesh: &Mesh, name: &str) {
    wait_for_within(LIVES, &format!("{name} to sign"), || {
        (mesh.control_admin("/debug/ca")["signs"]["name"] == format!("CN={name}")).then_some(())
    });
    let serial = |dump: &Value| -> Option<Vec<Value>> {
        let certificates = dump["certificates"].as_array()?;
        certificates.iter().map(|c| c["certChain"].get(1).map(|cert| cert["serialNumber"].clone())).collect()
    };
    let wanted = mesh.control_admin("/debug/ca")["signs"]["serialNumber"].clone();
    for node in mesh.nodes() {
        wait_for_within(LIVES, &format!("the certificates on {} to be signed by {name}", node.name()), || {
            let serials = serial(&node.config_dump())?;
            (!serials.is_empty() && serials.iter().all(|serial| *serial == wanted)).then_some(())
        });
    }
}

/// What a tunnel with this authority's certificate comes to.
fn is_refused(shop: &Shop, plain: &Pod, authority: &Authority) -> bool {
    match HboneClient::open(plain, shop.far.at(15008), Some(&authority.issue(PEER))) {
        Ok(_) => false,
        Err(TunnelError::Alert(alert)) => {
            assert_eq!(alert, AlertDescription::UnknownCA);
            true
        }
        Err(other) => panic!("no alert, but {other}"),
    }
}

/// Field cases B129 and B133.
#[test]
fn a_root_is_rotated_by_command_under_traffic_and_the_old_one_is_refused_then() {
    let shop = Shop::in_mesh_with(options());
    let _servers = serve(&shop);
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    let old = mesh.authority();
    assert!(!is_refused(&shop, &plain, &old), "a good certificate is taken, or the rest shows nothing");
    let mut oldest = shop.client.connect(shop.far_service.at(80)).expect("connect");
    ask(&mut oldest).expect("an answer");
    Traffic::beside(&shop, |traffic| {
        mesh.wait_roots(1, LIVES);
        rotate_when_allowed(mesh, 1);
        mesh.wait_roots(2, LIVES);
        traffic.assert_well("the new root is trusted");

        let refused = control_ca(mesh, &["rotate"]).unwrap_err();
        assert!(refused.contains("three quarters of the longest certificate life"), "{refused}");
        let done = rotate_when_allowed(mesh, 2);
        assert_eq!(done["status"]["rotation"]["stage"], "new-signs");
        traffic.assert_well("the new root signs");
        mesh.control().kill9();
        traffic.assert_well("control is away");
        mesh.start_control();
        mesh.wait_control_ready();
        mesh.wait_roots(2, LIVES);
        traffic.assert_well("control is back");
        ask(&mut oldest).expect("a connection from before the rotation goes on");

        let refused = control_ca(mesh, &["rotate"]).unwrap_err();
        assert!(refused.contains("may live until"), "{refused}");
        assert!(!is_refused(&shop, &plain, &old), "while certificates of the old root live, it is trusted");
        let done = rotate_when_allowed(mesh, 3);
        assert_eq!(done["status"]["rotation"]["stage"], "settled");
        mesh.wait_roots(1, LIVES);
        traffic.assert_well("the old root is withdrawn");
    });
    assert!(ask(&mut oldest).is_err(), "a connection that rests on the old root is ended with it");
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &mesh.authority()), "those of the new one are taken");
    // The link to control follows too: a new connection to it, and a certificate by it.
    mesh.control().kill9();
    mesh.start_control();
    mesh.wait_control_ready();
    let late = shop.tb.pod("shop/late").service_account("late").start();
    mesh.wait_in_mesh(&[&late]);
    let mut stream = late.connect(shop.far_service.at(80)).expect("connect");
    ask(&mut stream).expect("a certificate of the new root, over a link of the new root");
    let metrics = mesh.control_metrics();
    assert!(metrics.sum("understory_ca_certificate_left_seconds", &[("certificate", "root")]) > 1e8);
    let status = control_ca(mesh, &["status", "--output", "json"]).unwrap();
    assert_eq!(status["roots"].as_array().map(Vec::len), Some(1));
    let ending = control_ca(mesh, &["status", "--fail-within", "4000d"]).unwrap_err();
    assert!(ending.contains("root certificate"), "{ending}");
}

/// Nobody waits for half of a day: proxies are told of new roots and of which one signs, and renew at once. Whoever leaves
/// them the time for it hurts no connection but those that are older than the renewal.
#[test]
fn a_stolen_root_is_replaced_by_force_within_seconds_although_certificates_live_for_a_day() {
    let shop = Shop::in_mesh_with(MeshOptions::default().control_arg("--renewal-window").control_arg("1s"));
    let _servers = serve(&shop);
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    let old = mesh.authority();
    mesh.wait_roots(1, LIVES);
    let force = |step: u64| {
        let done = control_ca(mesh, &["rotate", "--force", "--output", "json"]).expect("a forced step");
        assert_eq!(done["step"], step);
    };
    let mut oldest = shop.client.connect(shop.far_service.at(80)).expect("connect");
    ask(&mut oldest).expect("an answer");
    Traffic::beside(&shop, |traffic| {
        force(1);
        mesh.wait_roots(2, LIVES);
        traffic.assert_well("the new root is trusted");
        let before = mesh.serial_numbers();
        force(2);
        mesh.wait_renewed(&before, LIVES);
        ask(&mut oldest).expect("a connection from before the rotation goes on");
        traffic.wait_all_new();
        traffic.assert_well("the new root signs");
        assert!(!is_refused(&shop, &plain, &old));
        force(3);
        mesh.wait_roots(1, LIVES);
        traffic.assert_well("the old root is withdrawn");
    });
    assert!(ask(&mut oldest).is_err(), "what rests on the old root is ended");
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &mesh.authority()));
}

/// First another folder with another intermediate, of which only a look can tell; then files replaced one after the other,
/// as a person with an editor does: broken ones, and another root with all that belongs to it at once.
#[test]
fn plugged_in_files_are_replaced_under_traffic_and_control_takes_the_time_that_proxies_need() {
    let shop = Shop::without_mesh();
    let (old, new) = (Authority::root("old"), Authority::root("new"));
    let (ca, folder) = (shop.tb.path("ca"), |version: &str| shop.tb.path(&format!("ca-{version}")));
    old.below("first").plug_into(&folder("first"), &[&old]);
    symlink(folder("first"), &ca).expect("link");
    shop.tb.start_mesh_with(options());
    shop.enrol();
    let _servers = serve(&shop);
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    wait_intermediate(mesh, "first");
    Traffic::beside(&shop, |traffic| {
        old.below("second").plug_into(&folder("second"), &[&old]);
        symlink(folder("second"), shop.tb.path("ca-next")).expect("link");
        fs::rename(shop.tb.path("ca-next"), &ca).expect("rename");
        wait_intermediate(mesh, "second");
        traffic.assert_well("another intermediate signs");

        fs::write(ca.join("ca-cert.pem"), "half of a cert").expect("write");
        wait_for("control to say what is wrong", || mesh.control_admin("/debug/ca")["problem"].as_str().map(drop));
        mesh.control().wait_log(&["ca-cert.pem", "those before stay in force"]);
        traffic.assert_well("a broken file");

        new.below("third").plug_into(&ca, &[&new]);
        mesh.wait_roots(2, LIVES);
        assert_eq!(mesh.control_admin("/debug/ca")["waits"]["cert"]["name"], "CN=third");
        assert!(!is_refused(&shop, &plain, &old));
        wait_intermediate(mesh, "third");
        traffic.assert_well("the new root signs");
        mesh.wait_roots(1, LIVES);
        traffic.assert_well("the old root is withdrawn");
    });
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &new));
}

/// Asks control for a certificate as a proxy with this token would; how many parts it has, or the status and its message.
fn certificate(from: &Pod, shop: &Shop, token: &str, identity: &str) -> Result<usize, (String, String)> {
    let key = PrivateKey::generate().expect("make a key");
    let kind = Some(Kind::StringValue(identity.to_owned()));
    let fields = [("ImpersonatedIdentity".to_owned(), prost_types::Value { kind })].into();
    let request = IstioCertificateRequest {
        csr: key.certificate_request(&identity.parse().expect("an identity")).expect("a request"),
        validity_duration: 60,
        metadata: Some(prost_types::Struct { fields }),
    };
    let control = SocketAddr::new(shop.tb.control_ip(), 15012);
    let mut client = HboneClient::open(from, control, None).expect("control takes the connection");
    let head = http::Request::post("https://control/istio.v1.auth.IstioCertificateService/CreateCertificate")
        .version(http::Version::HTTP_2)
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .header("authorization", format!("Bearer {token}"))
        .body(())
        .expect("a request");
    let mut answer = client.request_with(head, &grpc_frame(&request.encode_to_vec())).expect("an answer");
    if let Some(status) = answer.headers.get("grpc-status") {
        let text = |value: &http::HeaderValue| value.to_str().expect("text").to_owned();
        let message = answer.headers.get("grpc-message").map(text).unwrap_or_default();
        return Err((text(status), message));
    }
    let body = client.hear(&mut answer, usize::MAX).expect("a body");
    let answer = IstioCertificateResponse::decode(&body[5..]).expect("an answer that can be read");
    Ok(answer.cert_chain.len())
}

/// One message, not compressed.
fn grpc_frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("a small message").to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// Whoever has a node's token, or a workload's, gets no certificate for what that node does not run; each refusal is told
/// with caller, identity and reason, and counted.
#[test]
fn a_token_is_good_for_its_own_nodes_pods_only_and_each_refusal_is_told() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    let token_of = |index: usize| fs::read_to_string(mesh.node(index).token_file()).expect("a token");
    let [client, near, far] = shop.pods().map(Pod::identity);
    let count = |reason: &str| mesh.control_metrics().sum("understory_ca_refused_total", &[("reason", reason)]);
    let signed = || mesh.control_metrics().sum("understory_ca_signing_seconds_count", &[]);
    let before = signed();
    for (node, identity) in [(0, &client), (0, &near), (1, &far)] {
        assert_eq!(certificate(&plain, &shop, &token_of(node), identity), Ok(2), "{identity}");
    }
    assert!(signed() >= before + 3.0);

    let spec = TokenSpec {
        issuer: ISSUER.to_owned(),
        audience: AUDIENCE.to_owned(),
        namespace: "shop".to_owned(),
        service_account: "client".to_owned(),
        pod: Some((shop.client.pod_name().to_owned(), shop.client.uid().to_owned())),
        node: Some("node0".to_owned()),
        valid_for: Some(Duration::from_secs(600)),
    };
    let system = "understory-system";
    let proxy = TokenSpec { namespace: system.into(), service_account: "ztunnel".into(), ..spec.clone() };
    let other_uid = "00000000-0000-4000-8000-00000000beef".to_owned();
    let mint = |spec: &TokenSpec| shop.tb.token_key().mint(spec);
    let proxys = "understory-system/ztunnel";
    for (what, token, identity, reason, caller) in [
        ("node0 asks for node1's", token_of(0), &far, "not_on_node", proxys),
        ("node1 asks for node0's", token_of(1), &client, "not_on_node", proxys),
        ("a workload asks for itself", mint(&spec), &client, "not_trusted", "shop/client"),
        ("a workload asks for another", mint(&spec), &far, "not_trusted", "shop/client"),
        (
            "a proxy's pod that is another one by now",
            mint(&TokenSpec { pod: Some(("ztunnel-node0".into(), other_uid)), ..proxy.clone() }),
            &client,
            "other_caller",
            proxys,
        ),
        (
            "a proxy's pod that is not known",
            mint(&TokenSpec { pod: Some(("ztunnel-node9".into(), "uid".into())), ..proxy.clone() }),
            &client,
            "unknown_caller",
            proxys,
        ),
        ("an unbound token", mint(&TokenSpec { pod: None, ..proxy.clone() }), &client, "not_bound", proxys),
        ("an old token", mint(&TokenSpec { valid_for: None, ..proxy.clone() }), &client, "expired", "unknown"),
        (
            "a token for another audience",
            mint(&TokenSpec { audience: "other".into(), ..proxy.clone() }),
            &client,
            "audience",
            "unknown",
        ),
        ("a token of another cluster", testbed::TokenKey::generate().mint(&proxy), &client, "signature", "unknown"),
        ("no token", String::new(), &client, "malformed", "unknown"),
    ] {
        let (before, log) = (count(reason), mesh.control().log_mark());
        let refused = certificate(&plain, &shop, &token, identity).expect_err(what);
        // As istiod does: unauthenticated, whatever it was.
        assert_eq!(refused.0, "16", "{what}: {refused:?}");
        let identity = if caller == "unknown" { "unknown" } else { identity };
        let line = log.wait(&["refused a certificate", caller, identity]);
        assert!(line.contains("reason="), "{what}: {line}");
        assert!(line.contains(&plain.ip().to_string()) || line.contains(&plain.ip6().to_string()), "{what}: {line}");
        assert_eq!(count(reason), before + 1.0, "{what}: {line}");
    }
    assert_eq!(signed(), mesh.control_metrics().sum("understory_ca_signing_seconds_count", &[]));
}

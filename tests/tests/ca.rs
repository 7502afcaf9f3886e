//! The mesh while its certificate authority changes: new connections and requests go on through every rotation, and what
//! was withdrawn is refused.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustls::AlertDescription;
use serde_json::Value;
use testbed::{
    Authority, Behaviour, HboneClient, Mesh, MeshOptions, Server, Shop, TunnelError, wait_for, wait_for_within,
};

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
}

impl Traffic {
    /// Runs it beside what a test does.
    fn beside(shop: &Shop, during: impl FnOnce(&Self)) {
        let traffic = Self::default();
        let near: SocketAddr = shop.near_service.at(80);
        let far: SocketAddr = shop.far_service.at(80);
        std::thread::scope(|scope| {
            for (what, to) in [("near", near), ("far", far)] {
                let traffic = &traffic;
                scope.spawn(move || traffic.new_connections(shop, what, to));
                scope.spawn(move || traffic.requests(shop, what, to));
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
    fn requests(&self, shop: &Shop, what: &str, to: SocketAddr) {
        while !self.stop.load(Ordering::Relaxed) {
            let mut stream = match shop.client.connect(to) {
                Ok(stream) => stream,
                Err(e) => {
                    self.count(&format!("connect to {what}"), Err(e.to_string()));
                    continue;
                }
            };
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

/// Waits until every certificate of every proxy came with so many roots.
#[track_caller]
fn wait_roots(mesh: &Mesh, count: usize) {
    for node in mesh.nodes() {
        wait_for_within(LIVES, &format!("the certificates on {} to come with {count} roots", node.name()), || {
            let dump = node.config_dump();
            let certificates = dump["certificates"].as_array()?;
            let has = |c: &Value| c["rootCerts"].as_array().is_some_and(|roots| roots.len() == count);
            (!certificates.is_empty() && certificates.iter().all(has)).then_some(())
        });
    }
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
fn is_refused(shop: &Shop, plain: &testbed::Pod, authority: &Authority) -> bool {
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
    Traffic::beside(&shop, |traffic| {
        wait_roots(mesh, 1);
        rotate_when_allowed(mesh, 1);
        wait_roots(mesh, 2);
        traffic.assert_well("the new root is trusted");

        let refused = control_ca(mesh, &["rotate"]).unwrap_err();
        assert!(refused.contains("three quarters of the longest certificate life"), "{refused}");
        let done = rotate_when_allowed(mesh, 2);
        assert_eq!(done["status"]["rotation"]["stage"], "new-signs");
        traffic.assert_well("the new root signs");

        let refused = control_ca(mesh, &["rotate"]).unwrap_err();
        assert!(refused.contains("may live until"), "{refused}");
        assert!(!is_refused(&shop, &plain, &old), "while certificates of the old root live, it is trusted");
        let done = rotate_when_allowed(mesh, 3);
        assert_eq!(done["status"]["rotation"]["stage"], "settled");
        wait_roots(mesh, 1);
        traffic.assert_well("the old root is withdrawn");
    });
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &mesh.authority()), "those of the new one are taken");
    let metrics = mesh.control_metrics();
    assert!(metrics.sum("understory_ca_certificate_left_seconds", &[("certificate", "root")]) > 1e8);
    let status = control_ca(mesh, &["status", "--output", "json"]).unwrap();
    assert_eq!(status["roots"].as_array().map(Vec::len), Some(1));
    let ending = control_ca(mesh, &["status", "--fail-within", "4000d"]).unwrap_err();
    assert!(ending.contains("root certificate"), "{ending}");
}

/// Nobody waits for half of a day: proxies are told of new roots, and renew at once.
#[test]
fn a_stolen_root_is_replaced_by_force_within_seconds_although_certificates_live_for_a_day() {
    let shop = Shop::in_mesh_with(MeshOptions::default().control_arg("--renewal-window").control_arg("1s"));
    let _servers = serve(&shop);
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    let old = mesh.authority();
    wait_roots(mesh, 1);
    let signer = || mesh.control_admin("/debug/ca")["signs"]["fingerprint"].clone();
    let before = signer();
    let force = |step: u64| {
        let done = control_ca(mesh, &["rotate", "--force", "--output", "json"]).expect("a forced step");
        assert_eq!(done["step"], step);
    };
    force(1);
    wait_roots(mesh, 2);
    force(2);
    wait_for("the new root to sign", || (signer() != before).then_some(()));
    force(3);
    wait_roots(mesh, 1);
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &mesh.authority()));
    for service in [&shop.near_service, &shop.far_service] {
        let mut stream = shop.client.connect(service.at(80)).expect("connect");
        ask(&mut stream).expect("all have new certificates");
    }
}

/// Files replaced one after the other, as a person with an editor does: first another intermediate, then another root
/// with all that belongs to it at once.
#[test]
fn plugged_in_files_are_replaced_under_traffic_and_control_takes_the_time_that_proxies_need() {
    let shop = Shop::without_mesh();
    let (old, new) = (Authority::root("old"), Authority::root("new"));
    let ca = shop.tb.path("ca");
    old.below("first").plug_into(&ca, &[&old]);
    shop.tb.start_mesh_with(options());
    shop.enrol();
    let _servers = serve(&shop);
    let plain = shop.tb.pod("legacy/plain").start();
    let mesh = shop.mesh();
    wait_intermediate(mesh, "first");
    Traffic::beside(&shop, |traffic| {
        old.below("second").plug_into(&ca, &[&old]);
        wait_intermediate(mesh, "second");
        traffic.assert_well("another intermediate signs");

        std::fs::write(ca.join("ca-cert.pem"), "half of a cert").expect("write");
        wait_for("control to say what is wrong", || mesh.control_admin("/debug/ca")["problem"].as_str().map(drop));
        mesh.control().wait_log(&["ca-cert.pem", "those before stay in force"]);
        traffic.assert_well("a broken file");

        new.below("third").plug_into(&ca, &[&new]);
        wait_roots(mesh, 2);
        assert_eq!(mesh.control_admin("/debug/ca")["waits"]["cert"]["name"], "CN=third");
        assert!(!is_refused(&shop, &plain, &old));
        wait_intermediate(mesh, "third");
        traffic.assert_well("the new root signs");
        wait_roots(mesh, 1);
        traffic.assert_well("the old root is withdrawn");
    });
    wait_for("certificates of the old root to be refused", || is_refused(&shop, &plain, &old).then_some(()));
    assert!(!is_refused(&shop, &plain, &new));
}

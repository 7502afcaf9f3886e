//! Certificates in the proxy: whatever their authority does, clocks that are wrong, roots that change, revocation.

use std::fs;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use rustls::AlertDescription;
use testbed::{
    AccessLine, Authority, Behaviour, End, FakeCa, HboneClient, Manner, MeshOptions, Outside, Pod, Shop, StreamExt,
    TunnelError, wait_for, wait_until,
};

const CANARY: &[u8] = b"canary-before-the-certificate";

/// The shop with a certificate service of the test's own.
struct Rig {
    ca: FakeCa,
    shop: Shop,
    _place: Outside,
}

impl Rig {
    /// Nobody is in the mesh yet.
    fn new(settings: &[(&str, &str)]) -> Self {
        let options = MeshOptions::default();
        let options = settings.iter().fold(options, |options, (name, value)| options.proxy_env(name, value));
        Self::with(Shop::without_mesh(), options)
    }

    fn with(shop: Shop, options: MeshOptions) -> Self {
        let place = shop.tb.outside("ca");
        let ca = FakeCa::start(&place);
        shop.tb.start_mesh_with(options.proxy_env("CA_ADDRESS", ca.address()));
        Self { ca, shop, _place: place }
    }

    fn enrolled(settings: &[(&str, &str)], life: Duration) -> Self {
        let rig = Self::new(settings);
        rig.ca.set_life(life);
        rig.shop.enrol();
        rig
    }

    /// Waits until an account has been given so many certificates.
    fn wait_issued(&self, account: &str, least: usize) {
        wait_for(&format!("certificate number {least} for {account}"), || {
            (self.ca.issued(account) >= least).then_some(())
        });
    }
}

/// One question over a new connection; the end of it otherwise.
fn asks(pod: &Pod, shop: &Shop) -> Result<(), End> {
    let mut stream = pod.connect(shop.far_service.at(80)).expect("the proxy accepts");
    answers(&mut stream)
}

fn answers(stream: &mut TcpStream) -> Result<(), End> {
    use std::io::{Read, Write};
    let mut answer = [0; 5];
    match stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut answer)) {
        Ok(()) => Ok(()),
        Err(_) => Err(End::Reset),
    }
}

/// Each pod's authority does something else wrong. Each is refused with the reason, nobody else notices, and all recover
/// by themselves once the authority does.
#[test]
fn whatever_the_authority_does_wrong_concerns_one_identity_and_passes_by_itself() {
    let rig = Rig::new(&[("CERTIFICATE_WAIT", "1s")]);
    let cases = [
        (Manner::Denies, "denies", "the fake authority denies it"),
        (Manner::Hangs, "hangs", "no answer"),
        (Manner::Garbage, "garbage", "certificate number 1 in it is broken"),
        (Manner::Nothing, "nothing", "a leaf and the trust roots are needed"),
        (Manner::OnlyLeaf, "only-leaf", "a leaf and the trust roots are needed"),
        (Manner::OtherIdentity, "other-identity", "sa/somebody-else, asked was for"),
        (Manner::OtherKey, "other-key", "the leaf is not for our key"),
        (Manner::Expired, "expired", "is a clock wrong?"),
        (Manner::NotYetValid, "not-yet-valid", "is a clock wrong?"),
        (Manner::OtherRoot, "other-root", "does not lead to the roots that came with it"),
    ];
    cases.iter().for_each(|(manner, account, _)| rig.ca.set(account, *manner));
    let pods: Vec<Pod> = cases
        .iter()
        .map(|(_, account, _)| rig.shop.tb.pod(&format!("shop/{account}")).service_account(account).start())
        .collect();
    rig.shop.enrol();
    rig.shop.mesh().wait_in_mesh(&pods.iter().collect::<Vec<_>>());
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    let node = rig.shop.mesh().node(0);
    for (pod, (_, account, reason)) in pods.iter().zip(&cases) {
        assert_eq!(asks(pod, &rig.shop), Err(End::Reset), "{account}");
        let line = node.wait_access_line(account, |line| line.get("src.workload") == *account);
        for part in [*reason, &format!("spiffe://cluster.local/ns/shop/sa/{account}"), rig.ca.address()] {
            assert!(line.get("error").contains(part), "{account}: {part:?} in {}", line.text);
        }
        assert_eq!(line.get("response_flags"), "IDENTITY_ERROR", "{}", line.text);
        assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()), "another identity beside {account}");
    }
    // To one that has no certificate nobody gets through either, and nothing reaches the app.
    let server = pods[0].serve(8080, Behaviour::Echo);
    let mut stream = rig.shop.client.connect(pods[0].at(8080)).expect("the proxy accepts");
    assert_eq!(answers(&mut stream), Err(End::Reset));
    assert!(server.seen().is_empty());

    cases.iter().for_each(|(_, account, _)| rig.ca.set(account, Manner::Good));
    for (pod, (_, account, _)) in pods.iter().zip(&cases) {
        wait_for(&format!("{account} to recover"), || asks(pod, &rig.shop).ok());
    }
}

#[test]
fn certificates_are_there_before_the_first_connection() {
    let rig = Rig::enrolled(&[], Duration::from_secs(3600));
    ["client", "near", "far"].iter().for_each(|account| rig.wait_issued(account, 1));
    let server = rig.shop.far.serve(8080, Behaviour::Echo);
    assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()));
    assert_eq!(server.seen().len(), 1);
    assert_eq!(["client", "near", "far"].map(|account| rig.ca.issued(account)), [1, 1, 1], "one for each, no more");
}

/// B48: on either end the first connection is held until there is a certificate, however early it comes.
#[test]
fn the_first_connection_of_a_pod_waits_for_its_certificate_on_either_end() {
    let rig = Rig::enrolled(&[], Duration::from_secs(3600));
    let (shop, wire) = (&rig.shop, rig.shop.tb.wire());
    let _server = shop.far.serve(8080, Behaviour::Echo);
    rig.ca.set("early", Manner::Held);
    let early = shop.tb.pod("shop/early").service_account("early").start();
    wait_for("the agent to have captured the pod", || {
        (shop.mesh().status(&early)?["redirection"] == "enabled").then_some(())
    });
    let mut stream = early.connect(shop.far_service.at(80)).expect("the proxy accepts");
    stream.say(CANARY);
    assert_eq!(rig.ca.issued("early"), 0);
    rig.ca.set("early", Manner::Good);
    assert_eq!(stream.hear(CANARY.len()), CANARY);
    drop(stream);
    shop.mesh().node(1).wait_access_line("its identity", |line| line.get("src.identity") == early.identity());

    rig.ca.set("served", Manner::Held);
    let served = shop.tb.pod("shop/served").service_account("served").start();
    let server = served.serve(8080, Behaviour::Echo);
    shop.mesh().wait_in_mesh(&[&served]);
    let mut stream = shop.far.connect(served.at(8080)).expect("the proxy accepts");
    stream.say(CANARY);
    assert_eq!((rig.ca.issued("served"), server.seen().len()), (0, 0));
    rig.ca.set("served", Manner::Good);
    assert_eq!(stream.hear(CANARY.len()), CANARY);
    assert!(!wire.contains(CANARY), "nothing went in the clear meanwhile");
}

/// Certificates that live for seconds: renewals cut nothing, and no tunnel is used beyond its certificates' end.
#[test]
fn certificates_of_seconds_under_load_fail_no_request_and_cut_no_connection() {
    let rig = Rig::enrolled(&[], Duration::from_secs(4));
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    let mut long = rig.shop.client.connect(rig.shop.far_service.at(80)).expect("connect");
    long.ask(b"hello");
    let (before_client, before_far) = (rig.ca.issued("client"), rig.ca.issued("far"));
    let mut requests = 0;
    while rig.ca.issued("client") < before_client + 4 || rig.ca.issued("far") < before_far + 4 {
        assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()), "request {requests}");
        requests += 1;
    }
    assert!(requests > 20, "{requests} requests are no load");
    long.ask(b"a connection that is older than all certificates");
}

/// A root is added, signs, and the old one is withdrawn: nothing fails before that, and after it whoever has the old one
/// only is out, with open connections.
#[test]
fn roots_overlap_without_a_failed_request_and_a_withdrawn_one_ends_its_connections() {
    let rig = Rig::enrolled(&[], Duration::from_secs(6));
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    let accounts = ["client", "near", "far"];
    let (old, new) = (rig.ca.signer(), Arc::new(Authority::root("fake root 2")));
    let plain = rig.shop.tb.pod("legacy/plain").start();
    let stranger = |root: &Authority| {
        let leaf = root.issue("spiffe://cluster.local/ns/legacy/sa/default");
        HboneClient::open(&plain, rig.shop.far.at(15008), Some(&leaf))
    };
    let mut of_old = rig.shop.client.connect(rig.shop.far_service.at(80)).expect("connect");
    of_old.ask(b"hello");
    let under_load = |change: &dyn Fn(), settled: &dyn Fn() -> bool| {
        change();
        let done = wait_until(Duration::from_secs(30), || {
            assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()));
            assert_eq!(asks(&rig.shop.near, &rig.shop), Ok(()));
            settled().then_some(())
        });
        assert!(done.is_some(), "every account has a newer certificate");
    };
    let renewed = |change: &dyn Fn()| {
        let before = accounts.map(|account| rig.ca.issued(account));
        under_load(change, &|| accounts.iter().zip(before).all(|(account, n)| rig.ca.issued(account) > n + 1));
    };
    assert!(matches!(stranger(&new), Err(TunnelError::Alert(AlertDescription::UnknownCA))));
    renewed(&|| rig.ca.set_roots(&[&old, &new]));
    renewed(&|| rig.ca.set_signer(&new));
    stranger(&old).expect("both roots are trusted while they overlap");
    let mut of_new = rig.shop.client.connect(rig.shop.far_service.at(80)).expect("connect");
    of_new.ask(b"hello");
    of_old.ask(b"an old connection goes on");

    rig.ca.set_roots(&[&new]);
    assert_eq!(of_old.hear_end().1, End::Reset);
    let mesh = rig.shop.mesh();
    let line = wait_for("a line that says why", || {
        let lines = mesh.nodes().iter().flat_map(|node| node.access_log());
        lines.into_iter().find(|line| line.get("error").contains("no longer trusted"))
    });
    assert!(line.get("error").contains("CN=fake root 1"), "{}", line.text);
    wait_for("the old root to be out on the other node as well", || {
        matches!(stranger(&old), Err(TunnelError::Alert(AlertDescription::UnknownCA))).then_some(())
    });
    of_new.ask(b"what rests on the new root is not touched");
    assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()));
}

/// B129: no overlap, no announcement, certificates that have an hour to live. Whoever meets a peer of the new root asks.
#[test]
fn a_root_that_is_replaced_at_once_is_found_out_by_the_first_failure() {
    let rig = Rig::enrolled(&[], Duration::from_secs(3600));
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    ["client", "near", "far"].iter().for_each(|account| rig.wait_issued(account, 1));
    assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()));
    let new = Arc::new(Authority::root("fake root 2"));
    rig.ca.set_signer(&new);
    rig.ca.set_roots(&[&new]);
    // By which the first node learns of it; nothing tells the second.
    let fresh = rig.shop.tb.pod("shop/fresh").service_account("fresh").start();
    rig.shop.mesh().wait_in_mesh(&[&fresh]);
    rig.wait_issued("fresh", 1);
    for pod in [&fresh, &rig.shop.client, &rig.shop.near] {
        wait_for(&format!("{} to reach the other node", pod.name()), || asks(pod, &rig.shop).ok());
    }
    assert_eq!(rig.ca.issued("far"), 2, "asked once more");
}

/// The authority decides against an identity, and is out of reach for another: the open connections of the first end
/// with its certificate, those of the second go on. Neither gets new ones.
#[test]
fn a_denied_renewal_ends_open_connections_with_the_certificate_and_a_missing_answer_does_not() {
    let rig = Rig::enrolled(&[("CERTIFICATE_WAIT", "1s")], Duration::from_secs(3600));
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    ["client", "near", "far"].iter().for_each(|account| rig.wait_issued(account, 1));
    // Certificates of those that come now are short; the server's is not.
    rig.ca.set_life(Duration::from_secs(8));
    let denied = rig.shop.tb.pod("shop/denied").service_account("denied").start();
    let hanging = rig.shop.tb.pod("shop/hanging").service_account("hanging").start();
    rig.shop.mesh().wait_in_mesh(&[&denied, &hanging]);
    let mut streams = [&denied, &hanging].map(|pod| {
        let mut stream = pod.connect(rig.shop.far_service.at(80)).expect("connect");
        stream.ask(b"hello");
        stream
    });
    rig.ca.set("denied", Manner::Denies);
    rig.ca.set("hanging", Manner::Hangs);
    let node = rig.shop.mesh().node(0);
    node.wait_proxy_count(1.0, "understory_certificates_denied", &[]);
    assert_eq!(streams[0].hear_end().1, End::Reset);
    let line = node.wait_access_line("the denied one", |line| line.get("src.workload") == "denied");
    for part in ["closed because the renewal", "sa/denied", "its renewal is denied"] {
        assert!(line.get("error").contains(part), "{part:?} in {}", line.text);
    }
    assert_eq!(line.get("response_flags"), "IDENTITY_ERROR", "{}", line.text);
    wait_for("the other certificate to end", || (asks(&hanging, &rig.shop) == Err(End::Reset)).then_some(()));
    streams[1].ask(b"this one goes on");
    assert_eq!(asks(&denied, &rig.shop), Err(End::Reset));
    assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()), "others are untouched");
}

#[test]
fn connections_end_with_the_certificate_where_that_is_set() {
    let rig = Rig::enrolled(&[("CERTIFICATE_EXPIRY_CONNECTIONS", "cut")], Duration::from_secs(4));
    let _server = rig.shop.far.serve(8080, Behaviour::Echo);
    let mut stream = rig.shop.client.connect(rig.shop.far_service.at(80)).expect("connect");
    stream.ask(b"hello");
    rig.wait_issued("client", rig.ca.issued("client") + 1);
    stream.ask(b"a renewal ends nothing");
    assert_eq!(stream.hear_end().1, End::Reset);
    let line = wait_for("a line that says why", || {
        let lines = rig.shop.mesh().nodes().iter().flat_map(|node| node.access_log());
        lines.into_iter().find(|line| line.get("error").contains("closed because a certificate ended"))
    });
    assert_eq!(line.get("response_flags"), "TLS_FAILURE", "{}", line.text);
    assert_eq!(asks(&rig.shop.client, &rig.shop), Ok(()));
}

#[test]
fn a_revoked_peer_is_cut_off_and_a_broken_file_forgets_nothing() {
    let shop = Shop::without_mesh();
    let file = shop.tb.path("revoked.pem");
    shop.tb.start_mesh_with(MeshOptions::default().proxy_env("CRL_PATH", file.to_str().expect("ASCII")));
    shop.enrol();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node_of(&shop.far);
    // A file that is not there: whether anybody is revoked is not known, so nobody is let in.
    assert_eq!(asks(&shop.client, &shop), Err(End::Reset));
    shop.mesh().node(0).wait_access_line("the reason", |line| line.get("error").contains("no revocation list of"));

    let authority = shop.mesh().authority();
    let replace = |text: &str| {
        let next = file.with_extension("next");
        fs::write(&next, text).expect("write a list");
        fs::rename(&next, &file).expect("put the list in place");
    };
    replace(&authority.revoke(&[]));
    wait_for("the list to be read by both proxies", || asks(&shop.client, &shop).ok());
    let plain = shop.tb.pod("legacy/plain").start();
    let [stolen, good] = [(); 2].map(|()| authority.issue("spiffe://cluster.local/ns/legacy/sa/default"));
    let authority_of = format!("{}:8080", shop.far.ip());
    let mut tunnels =
        [&stolen, &good].map(|leaf| HboneClient::open(&plain, shop.far.at(15008), Some(leaf)).expect("a tunnel"));
    let mut streams = tunnels.each_mut().map(|tunnel| tunnel.connect(&authority_of, &[]).expect("an answer"));
    for (tunnel, stream) in tunnels.iter().zip(&mut streams) {
        assert_eq!(stream.status, 200);
        tunnel.say(stream, b"hello", false).expect("say");
        assert_eq!(tunnel.hear(stream, 5).expect("hear"), b"hello");
    }
    let mut own = shop.client.connect(shop.far_service.at(80)).expect("connect");
    own.ask(b"hello");

    replace(&authority.revoke(&[&stolen]));
    assert!(tunnels[0].hear(&mut streams[0], 1).is_err(), "its stream ends, and not in order");
    let closed = |line: &AccessLine| line.get("error").contains("closed because a certificate was revoked");
    let line = node.wait_access_line("the revoked peer", closed);
    assert_eq!(line.get("response_flags"), "CERT_REVOKED", "{}", line.text);
    assert!(line.get("error").contains("ns/legacy/sa/default"), "{}", line.text);
    node.wait_proxy_count(1.0, "istio_crl_policy_rejections_total", &[("reporter", "destination")]);
    tunnels[1].say(&mut streams[1], b"again", false).expect("say");
    assert_eq!(tunnels[1].hear(&mut streams[1], 5).expect("hear"), b"again");
    own.ask(b"nobody else is touched");
    let seen = server.seen().len();
    let refused = || HboneClient::open(&plain, shop.far.at(15008), Some(&stolen));
    assert!(matches!(refused(), Err(TunnelError::Alert(AlertDescription::CertificateRevoked))));

    replace("-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n");
    node.wait_proxy_count(1.0, "understory_crl_file_broken", &[]);
    assert!(matches!(refused(), Err(TunnelError::Alert(AlertDescription::CertificateRevoked))));
    fs::remove_file(&file).expect("remove the list");
    node.wait_proxy_count(2.0, "understory_crl_loads_total", &[("result", "failed")]);
    assert!(matches!(refused(), Err(TunnelError::Alert(AlertDescription::CertificateRevoked))));
    assert_eq!(server.seen().len(), seen);
    own.ask(b"still there");
}

#[test]
fn a_peer_of_an_aliased_trust_domain_counts_as_of_the_own_one() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("TRUST_DOMAIN_ALIASES", "old.example"));
    let server = shop.far.serve(8080, Behaviour::Echo);
    let plain = shop.tb.pod("legacy/plain").start();
    let open = |domain: &str| {
        let leaf = shop.mesh().authority().issue(&format!("spiffe://{domain}/ns/legacy/sa/default"));
        HboneClient::open(&plain, shop.far.at(15008), Some(&leaf))
    };
    assert!(matches!(open("elsewhere"), Err(TunnelError::Alert(AlertDescription::CertificateUnknown))));
    let mut tunnel = open("old.example").expect("an alias is taken");
    let mut stream = tunnel.connect(&format!("{}:8080", shop.far.ip()), &[]).expect("an answer");
    assert_eq!(stream.status, 200);
    tunnel.say(&mut stream, b"hello", true).expect("say");
    assert_eq!(tunnel.hear(&mut stream, 5).expect("hear"), b"hello");
    drop((stream, tunnel, server));
    let node = shop.mesh().node_of(&shop.far);
    node.wait_access_line("the name of the own trust domain", |line| {
        line.get("src.identity") == "spiffe://cluster.local/ns/legacy/sa/default"
    });
}

/// Debian's place; `cargo xtask setup` installs it.
fn libfaketime() -> String {
    let file = format!("/usr/lib/{}-linux-gnu/faketime/libfaketimeMT.so.1", std::env::consts::ARCH);
    assert!(fs::exists(&file).unwrap_or(false), "no {file}: `cargo xtask setup` installs it");
    file
}

#[test]
fn a_clock_that_is_off_works_within_the_backdating_and_else_says_both_times() {
    let libfaketime = libfaketime();
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(1);
    let restart = |offset| {
        node.proxy.terminate();
        let mark = node.proxy.log_mark();
        // The clock that timers run by is left alone.
        let env = [("LD_PRELOAD", &*libfaketime), ("FAKETIME", offset), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")];
        shop.mesh().start_proxy_with(node, &env);
        mark
    };
    for offset in ["-90s", "+10m"] {
        restart(offset);
        node.wait_proxy_ready();
        shop.mesh().wait_in_mesh(&[&shop.far]);
        wait_for(&format!("connections with a clock that is off by {offset}"), || asks(&shop.client, &shop).ok());
    }
    // Behind by more than certificates are back-dated: not even control's own is valid yet.
    let mark = restart("-10m");
    let line = mark.wait(&["is valid from", "but here it is", "is a clock wrong?"]);
    let times: Vec<&str> = line.split_whitespace().filter(|word| word.contains('T') && word.contains("Z")).collect();
    assert!(times.len() >= 3, "the line's own time and both others: {line}");
    assert_eq!(asks(&shop.client, &shop), Err(End::Reset));
}

/// The discovery link holds by control's back-dating, the clock's own pod by that of its authority; a peer's certificate
/// that was not back-dated does not. Both ends say all times.
#[test]
fn a_peer_whose_certificate_is_not_valid_by_the_own_clock_is_refused_with_all_times_at_both_ends() {
    let libfaketime = libfaketime();
    let shop = Shop::without_mesh();
    // An authority that is older than the wrong time.
    let root = Authority::root("of control");
    root.below("signer of control").plug_into(&shop.tb.path("ca"), &[&root]);
    let rig = Rig::with(shop, MeshOptions::default().control_arg("--leaf-backdate=20m"));
    rig.ca.set("far", Manner::Backdated);
    rig.ca.set("near", Manner::Backdated);
    rig.shop.enrol();
    let (shop, node) = (&rig.shop, rig.shop.mesh().node(1));
    let server = shop.far.serve(8080, Behaviour::Echo);
    node.proxy.terminate();
    let env = [("LD_PRELOAD", &*libfaketime), ("FAKETIME", "-10m"), ("FAKETIME_DONT_FAKE_MONOTONIC", "1")];
    shop.mesh().start_proxy_with(node, &env);
    node.wait_proxy_ready();
    shop.mesh().wait_in_mesh(&[&shop.far]);
    wait_for("connections within the back-dating", || asks(&shop.near, shop).ok());
    let count = server.seen().len();

    assert_eq!(asks(&shop.client, shop), Err(End::Reset));
    let refused = |line: &AccessLine| line.get("error").contains("sa/client");
    let line = node.wait_access_line("the server's side", refused);
    let parts = ["the certificate of spiffe://cluster.local/ns/shop/sa/client is valid from", "but here it is"];
    for part in parts.into_iter().chain([" to ", "is a clock wrong?"]) {
        assert!(line.get("error").contains(part), "{part:?} in {}", line.text);
    }
    let line = shop.mesh().node(0).wait_access_line("the client's side", refused);
    let parts = ["the peer does not take our certificate as valid at its time", "is valid from", "and here it is"];
    for part in parts.into_iter().chain(["is a clock wrong?"]) {
        assert!(line.get("error").contains(part), "{part:?} in {}", line.text);
    }
    assert_eq!(server.seen().len(), count, "nothing came to the app");
}

/// The link to control in the clear, so that only the certificate of the workload has a wrong time.
#[test]
fn a_certificate_that_begins_later_than_now_refuses_its_pod_with_both_times() {
    let rig = Rig::new(&[("CERTIFICATE_WAIT", "1s")]);
    rig.ca.set("far", Manner::NotYetValid);
    rig.shop.enrol();
    let server = rig.shop.far.serve(8080, Behaviour::Echo);
    assert_eq!(asks(&rig.shop.client, &rig.shop), Err(End::Reset));
    let line = rig.shop.mesh().node(1).wait_access_line("the reason", |line| line.get("direction") == "inbound");
    for part in ["sa/far", "the leaf is valid from", "but here it is", "is a clock wrong?"] {
        assert!(line.get("error").contains(part), "{part:?} in {}", line.text);
    }
    assert!(server.seen().is_empty());
}

//! The control plane is away: what is known goes on, what is not known is refused inside the cluster and passed
//! outside of it; and when it is back, everything is compared.

use std::time::Duration;

use testbed::{Behaviour, End, MeshOptions, Shop, StreamExt, wait_for};

const CANARY: &[u8] = b"canary-without-control";

#[test]
fn everything_known_goes_on_and_stale_entries_leave_afterwards() {
    let shop = Shop::in_mesh();
    let gone = shop.tb.pod("shop/gone").on(shop.tb.node(1)).start();
    let unused = shop.tb.pod("shop/unused").on(shop.tb.node(1)).start();
    shop.mesh().wait_in_mesh(&[&gone, &unused]);
    let _servers = [shop.far.serve(8080, Behaviour::Echo), unused.serve(8080, Behaviour::Echo)];
    let mut old = shop.client.connect(shop.far_service.at(80)).expect("connect");
    old.ask(CANARY);
    let wire = shop.tb.wire();
    shop.mesh().control().kill9();
    old.ask(CANARY);
    for _ in 0..10 {
        shop.client.connect(shop.far_service.at(80)).expect("connect").ask(CANARY);
        // One that no connection has gone to before: its identity is known all the same.
        shop.client.connect(unused.at(8080)).expect("connect").ask(CANARY);
    }
    assert!(!wire.contains(CANARY));
    // The proxies stay ready; the cluster changes meanwhile.
    for node in shop.mesh().nodes() {
        assert_eq!(node.readiness().expect("an answer").status, 200);
    }
    gone.delete();
    let new = shop.tb.pod("shop/new").on(shop.tb.node(1)).start();
    shop.mesh().start_control();
    shop.mesh().wait_control_ready();
    // B13, B125: found again without help, and what is gone is gone.
    let node = shop.mesh().node(0);
    wait_for("the stale entry to leave", || testbed::workload_of(&node.config_dump(), &gone).is_none().then_some(()));
    shop.mesh().wait_in_mesh(&[&new]);
    old.ask(CANARY);
}

#[test]
fn on_demand_an_unknown_destination_is_refused_inside_the_cluster_and_passed_outside() {
    let shop = Shop::in_mesh_with(MeshOptions { on_demand: true, ..MeshOptions::default() });
    let stranger = shop.tb.pod("other/stranger").on(shop.tb.node(1)).start();
    let outside = shop.tb.outside("db");
    let _servers = [
        shop.far.serve(8080, Behaviour::Echo),
        stranger.serve(8080, Behaviour::Echo),
        outside.serve(8080, Behaviour::Echo),
    ];
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"known from now on");
    shop.mesh().control().kill9();
    let wire = shop.tb.wire();
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"still known");
    shop.client.connect((outside.ip4(), 8080).into()).expect("connect").ask(b"outside passes");
    shop.client.connect((outside.ip6(), 8080).into()).expect("connect").ask(b"outside passes");
    let service = shop.tb.service("other/stranger").port(80, 8080).create();
    for to in [stranger.at(8080), stranger.at6(8080), service.at(80)] {
        let mut stream = shop.client.connect(to).expect("the proxy accepts");
        stream.set_read_timeout(Some(Duration::from_secs(15))).expect("set a timeout");
        assert_eq!(stream.say_in_vain(CANARY), (Vec::new(), End::Reset), "{to}");
        let line = shop.mesh().node(0).wait_access_line("the refusal", |line| line.get("dst.addr") == to.to_string());
        assert_ne!(line.get("error"), "", "{}", line.text);
    }
    assert!(!wire.contains(CANARY), "an unknown destination in the cluster was dialled in the clear");
    shop.mesh().start_control();
    shop.mesh().wait_control_ready();
    wait_for("the stranger to be reached once control is back", || {
        let mut stream = shop.client.connect(stranger.at(8080)).ok()?;
        use std::io::{Read, Write};
        stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut [0; 5])).ok()
    });
}

#[test]
fn a_broken_manifest_takes_nothing_down_and_is_named() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mark = shop.mesh().control().log_mark();
    let text = std::fs::read_to_string(shop.tb.path("manifests/pod-shop-far.yaml")).expect("the pod's manifest");
    shop.tb.put_manifest("pod-shop-far.yaml", &text.replace("podIP:", "podIP: [broken"));
    let line = mark.wait(&["pod-shop-far.yaml"]);
    assert!(line.contains("line"), "the line in the file is named: {line}");
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"the last good version stays");
    let new = shop.tb.pod("shop/new").start();
    shop.mesh().wait_in_mesh(&[&new]);
    shop.tb.put_manifest("pod-shop-far.yaml", &text);
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"mended");
}

#[test]
fn a_proxy_started_while_control_is_away_becomes_ready_when_it_is_back() {
    // B55: no help is needed, however long it takes.
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.mesh().control().terminate();
    let node = shop.mesh().node(0);
    node.proxy.terminate();
    shop.mesh().start_proxy(node);
    wait_for("the proxy to say what it waits for", || {
        let answer = node.readiness().ok()?;
        (answer.status == 500 && answer.body.contains("state manager")).then_some(())
    });
    shop.mesh().start_control();
    node.wait_proxy_ready();
    shop.mesh().wait_in_mesh(&shop.pods());
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"hello");
}

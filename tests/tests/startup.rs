//! No connection of a pod is decided before the proxy has the pod's own record and all policies that it names: it waits
//! within a bound, and is refused with the reason then.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, MeshOptions, Place, Pod, Shop, StreamExt, holds_for, wait_for};

const CANARY: &[u8] = b"canary-at-startup";

/// Waits until a pod's connections are captured; its record may be anywhere.
fn captured(shop: &Shop, pod: &Pod) {
    wait_for("the agent to have captured the pod", || {
        (shop.mesh().status(pod)?["redirection"] == "enabled").then_some(())
    });
}

fn put_policy(shop: &Shop, name: &str, spec: &str) {
    let head = "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy";
    let text = format!("{head}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n");
    shop.tb.put_manifest(&format!("{name}.yaml"), &text);
}

fn wait_policy(shop: &Shop, node: usize, name: &str) {
    wait_for(&format!("the proxy to hold the policy {name}"), || {
        let dump = shop.mesh().node(node).config_dump();
        dump["policies"].as_array()?.iter().any(|policy| policy["name"] == name).then_some(())
    });
}

/// B48: without a pause between the moment of capture and the first connection, and without a second try.
#[test]
fn the_first_connection_in_the_moment_of_enrolment_needs_no_retry() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    for i in 0..8 {
        let job = shop.tb.pod(&format!("shop/job-{i}")).service_account(&format!("job-{i}")).start();
        let captured = || shop.mesh().status(&job).is_some_and(|status| status["redirection"] == "enabled");
        let deadline = Instant::now() + Duration::from_secs(30);
        while !captured() {
            assert!(Instant::now() < deadline, "the agent captures the pod");
            std::thread::yield_now();
        }
        job.connect(shop.far_service.at(80)).expect("connect").ask(CANARY);
        assert_eq!(server.seen().len(), i + 1, "one connection of each");
        shop.mesh().node(1).wait_access_line("its identity", |line| line.get("src.identity") == job.identity());
    }
    assert!(!wire.contains(CANARY), "nothing went in the clear meanwhile");
}

/// B50: control knows of the pods later than their apps connect.
#[test]
fn connections_of_a_pod_and_to_it_wait_for_its_record() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("OWN_WORKLOAD_WAIT", "60s"));
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let (plain, wire) = (shop.tb.pod("legacy/plain").start(), shop.tb.wire());
    shop.mesh().control().freeze();
    let new = shop.tb.pod("shop/new").service_account("new").on(shop.tb.node(1)).start();
    let server = new.serve(8080, Behaviour::Echo);
    captured(&shop, &new);
    let mut out = new.connect(shop.near.at(9090)).expect("the proxy accepts");
    let mut to_far = new.connect(shop.far_service.at(80)).expect("the proxy accepts");
    let mut to_it = plain.connect(new.at(8080)).expect("the proxy accepts");
    to_far.say(CANARY);
    to_it.say(b"hello");
    let lines = || shop.mesh().node(1).access_log().len();
    let before = lines();
    holds_for(Duration::from_millis(500), "nothing is decided without the record", || {
        lines() == before && server.seen().is_empty()
    });
    shop.mesh().control().thaw();
    assert_eq!(to_far.hear(CANARY.len()), CANARY);
    assert_eq!(to_it.hear(5), b"hello");
    assert_eq!(out.hear_end(), (Vec::new(), End::Reset), "nobody listens there");
    drop((to_far, to_it));
    shop.mesh().node(1).wait_access_line("its identity", |line| line.get("src.identity") == new.identity());
    assert!(!wire.contains(CANARY), "nothing went in the clear meanwhile");
}

#[test]
fn where_the_record_never_comes_connections_are_refused_with_the_reason() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("OWN_WORKLOAD_WAIT", "1s"));
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let plain = shop.tb.pod("legacy/plain").start();
    shop.mesh().control().freeze();
    let new = shop.tb.pod("shop/new").service_account("new").on(shop.tb.node(1)).start();
    let server = new.serve(8080, Behaviour::Echo);
    captured(&shop, &new);
    let mut streams = [
        new.connect(shop.far_service.at(80)).expect("the proxy accepts"),
        plain.connect(new.at(8080)).expect("the proxy accepts"),
        // Whoever dials its tunnel waits the same way.
        plain.connect(new.at(15008)).expect("the proxy accepts"),
    ];
    for stream in &mut streams {
        assert_eq!(stream.hear_end().0, b"");
    }
    assert!(server.seen().is_empty());
    let node = shop.mesh().node(1);
    let reason = "no workload record for pod shop/new with service account new from the control plane within 1s";
    wait_for("a line for each", || {
        let lines = node.access_log();
        (lines.iter().filter(|line| line.get("error").contains(reason)).count() == 3).then_some(())
    });
    // Others are untouched, and it recovers by itself.
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"others are well");
    shop.mesh().control().thaw();
    shop.mesh().wait_in_mesh(&[&new]);
    plain.connect(new.at(8080)).expect("connect").ask(b"hello");
}

/// The record and the policy that it names come after the connection.
#[test]
fn a_connection_that_is_older_than_the_pods_policies_is_judged_by_them() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("OWN_WORKLOAD_WAIT", "60s"));
    let plain = shop.tb.pod("legacy/plain").start();
    shop.mesh().control().freeze();
    put_policy(
        &shop,
        "guard",
        "{selector: {matchLabels: {app: new}}, rules: [{from: [{source: {namespaces: [shop]}}]}]}",
    );
    let new = shop.tb.pod("shop/new").service_account("new").on(shop.tb.node(1)).start();
    let server = new.serve(8080, Behaviour::Echo);
    captured(&shop, &new);
    let mut streams = [new.at(8080), new.at6(8080)].map(|to| {
        let mut stream = plain.connect(to).expect("the proxy accepts");
        stream.say(b"hello");
        stream
    });
    shop.mesh().control().thaw();
    for stream in &mut streams {
        assert_eq!(stream.hear_end(), (Vec::new(), End::Reset));
    }
    let line = shop.mesh().node(1).wait_access_line("the denial", |line| line.get("response_flags") == "DENY");
    assert!(line.get("error").contains("closest: shop/guard rule 0"), "{}", line.text);
    shop.mesh().wait_in_mesh(&[&new]);
    shop.client.connect(new.at(8080)).expect("connect").ask(b"who may gets through");
    assert_eq!(server.seen().len(), 1);
}

/// Clients that never may: also while the proxy is killed, starts, and has half of what it needs.
#[test]
fn a_proxy_that_starts_lets_nobody_through_whom_its_policies_refuse() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("OWN_WORKLOAD_WAIT", "300ms"));
    let plain = shop.tb.pod("legacy/plain").start();
    let server = shop.far.serve(8080, Behaviour::Echo);
    put_policy(&shop, "nobody", "{selector: {matchLabels: {app: far}}}");
    wait_policy(&shop, 1, "nobody");
    let node = shop.mesh().node(1);
    let (stop, tries, answers) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    let hammer = |from: &Place, to: SocketAddr| {
        while !stop.load(Ordering::Relaxed) {
            let Ok(mut stream) = from.dial(to).timeout(Duration::from_secs(5)).connect() else { continue };
            let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
            let answered = stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut [0; 5]));
            tries.fetch_add(1, Ordering::Relaxed);
            answers.fetch_add(u64::from(answered.is_ok()), Ordering::Relaxed);
        }
    };
    let some_more = |what: &str| {
        let before = tries.load(Ordering::Relaxed);
        wait_for(what, || (tries.load(Ordering::Relaxed) >= before + 20).then_some(()));
    };
    std::thread::scope(|scope| {
        let stop = StopOnDrop(&stop);
        let hammer = &hammer;
        for (from, to) in
            [(&plain, shop.far.at(8080)), (&plain, shop.far.at6(8080)), (&shop.client, shop.far_service.at(80))]
        {
            scope.spawn(move || hammer(from, to));
        }
        some_more("attempts before");
        for frozen in [false, true] {
            // The second time everything but discovery is there first.
            if frozen {
                shop.mesh().control().freeze();
            }
            node.proxy.kill9();
            shop.mesh().start_proxy(node);
            if frozen {
                some_more("attempts while control says nothing");
                shop.mesh().control().thaw();
            }
            node.wait_proxy_ready();
            wait_policy(&shop, 1, "nobody");
            some_more("attempts after the start");
        }
        drop(stop);
    });
    assert_eq!((answers.load(Ordering::Relaxed), server.seen().len()), (0, 0));
    shop.tb.remove_manifest("nobody.yaml");
    wait_for("the way to be free", || {
        let mut stream = plain.connect(shop.far.at(8080)).ok()?;
        stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut [0; 5])).ok()
    });
}

/// So that a test that fails ends its clients too.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

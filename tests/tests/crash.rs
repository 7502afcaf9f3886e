//! Crashes and restarts of proxy and agent: nothing goes in the clear, and pods notice as little as can be.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, Place, Shop, StreamExt, wait_for};

const CANARY: &[u8] = b"canary-while-a-process-is-down";

/// One attempt: did the echo come back?
fn attempt(from: &Place, to: SocketAddr, timeout: Duration) -> bool {
    let Ok(mut stream) = from.dial(to).timeout(timeout).connect() else { return false };
    let _ = stream.set_read_timeout(Some(timeout));
    let mut back = vec![0; CANARY.len()];
    stream.write_all(CANARY).and_then(|()| stream.read_exact(&mut back)).is_ok() && back == CANARY
}

#[test]
fn connections_made_while_the_proxy_is_dead_wait_for_its_successor() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    let node = shop.mesh().node(0);
    let client = &shop.client;
    for round in 0..3 {
        node.proxy.kill9();
        std::thread::scope(|scope| {
            let waiting: Vec<_> = [shop.far_service.at(80), shop.far.at(8080), shop.far.at6(8080)]
                .into_iter()
                .map(|to| scope.spawn(move || attempt(client, to, Duration::from_secs(9))))
                .collect();
            shop.mesh().start_proxy(node);
            for (i, attempt) in waiting.into_iter().enumerate() {
                assert!(attempt.join().expect("a thread"), "round {round}: connection {i} was lost");
            }
        });
    }
    assert!(!wire.contains(CANARY));
}

#[test]
fn without_a_successor_a_connection_ends_after_ten_seconds_and_never_goes_in_the_clear() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let inbound = shop.client.serve(9090, Behaviour::Echo);
    let plain = shop.tb.pod("legacy/plain").on(shop.tb.node(1)).start();
    let wire = shop.tb.wire();
    shop.mesh().node(0).proxy.kill9();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Outbound of a pod on that node.
            let start = Instant::now();
            match shop.client.connect(shop.far_service.at(80)) {
                Ok(mut stream) => {
                    let _ = stream.write_all(CANARY);
                    assert_eq!(stream.hear_end().1, End::Reset);
                }
                Err(e) => assert_ne!(e.kind(), std::io::ErrorKind::TimedOut, "{e}"),
            }
            assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
        });
        scope.spawn(|| {
            // Inbound to a pod on that node.
            let start = Instant::now();
            if let Ok(mut stream) = plain.connect(shop.client.at(9090)) {
                let _ = stream.write_all(CANARY);
                assert_eq!(stream.hear_end().1, End::Reset);
            }
            assert!(start.elapsed() < Duration::from_secs(13), "{:?}", start.elapsed());
        });
    });
    assert_eq!((server.seen().len(), inbound.seen().len()), (0, 0), "no app was reached past the mesh");
    assert!(wire.flows_to_port(8080).is_empty());
}

#[test]
fn the_other_node_is_untouched_by_a_dead_proxy() {
    let shop = Shop::in_mesh();
    let pods = ["a", "b"].map(|name| shop.tb.pod(&format!("shop/{name}")).on(shop.tb.node(1)).start());
    shop.mesh().wait_in_mesh(&[&pods[0], &pods[1]]);
    let _server = pods[1].serve(8080, Behaviour::Echo);
    shop.mesh().node(0).proxy.kill9();
    for _ in 0..10 {
        assert!(attempt(&pods[0], pods[1].at(8080), Duration::from_secs(5)));
    }
}

/// B63: a restart of the agent never touches running pods. B85: nor does it open a way past the mesh.
#[test]
fn an_agent_that_is_killed_and_started_again_adopts_what_is_there() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    let mut old = shop.client.connect(shop.far_service.at(80)).expect("connect");
    old.ask(CANARY);
    let pins = |node: usize| {
        let mut names = Vec::new();
        list(shop.mesh().node(node).bpf_dir(), &mut names);
        names.sort();
        names
    };
    let before = [pins(0), pins(1)];
    assert!(!before[0].is_empty());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let steady = scope.spawn(|| {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                assert!(attempt(&shop.client, shop.far_service.at(80), Duration::from_secs(5)), "after {count}");
                count += 1;
            }
            count
        });
        for node in shop.mesh().nodes() {
            node.agent.kill9();
        }
        let served = server.seen().len();
        server.wait_seen(served + 20);
        for node in shop.mesh().nodes() {
            shop.mesh().start_agent(node);
        }
        shop.mesh().nodes().iter().for_each(|node| node.wait_agent_ready());
        let served = server.seen().len();
        server.wait_seen(served + 20);
        stop.store(true, Ordering::Relaxed);
        assert!(steady.join().expect("no connection failed") > 40);
    });
    old.ask(CANARY);
    assert_eq!([pins(0), pins(1)], before, "the same pins");
    for pod in shop.pods() {
        let status = shop.mesh().status(pod).expect("a status");
        assert_eq!(status["redirection"], "enabled");
    }
    // It is in charge again: a new pod is enrolled, an old one can leave.
    let new = shop.tb.pod("shop/new").start();
    shop.mesh().wait_in_mesh(&[&new]);
    assert!(attempt(&new, shop.far_service.at(80), Duration::from_secs(5)));
    assert!(!wire.contains(CANARY));
    shop.unenrol();
}

#[test]
fn with_agent_and_proxy_both_dead_nothing_passes_in_the_clear_and_both_recover() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    let node = shop.mesh().node(0);
    node.agent.kill9();
    node.proxy.kill9();
    for to in [shop.far_service.at(80), shop.far.at(8080), shop.far.at6(8080)] {
        assert!(!attempt(&shop.client, to, Duration::from_secs(2)));
    }
    assert_eq!(server.seen().len(), 0);
    shop.mesh().start_agent(node);
    shop.mesh().start_proxy(node);
    node.wait_ready();
    shop.mesh().wait_in_mesh(&shop.pods());
    wait_for("connections to work again", || {
        attempt(&shop.client, shop.far_service.at(80), Duration::from_secs(3)).then_some(())
    });
    assert!(!wire.contains(CANARY));
}

#[test]
fn a_proxy_that_is_told_to_end_finishes_what_it_has() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.ask(b"hello");
    let node = shop.mesh().node(0);
    let start = Instant::now();
    node.proxy.signal(rustix::process::Signal::TERM);
    node.proxy.wait_log(&["stopping"]);
    stream.ask(b"still there");
    stream.half_close();
    stream.hear_end();
    node.proxy.wait_end();
    assert!(start.elapsed() < Duration::from_secs(20), "it does not wait for nothing: {:?}", start.elapsed());
}

/// All files below a directory.
fn list(dir: &std::path::Path, names: &mut Vec<String>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&entry.path(), names);
        } else {
            names.push(entry.path().display().to_string());
        }
    }
}

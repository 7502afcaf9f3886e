//! The ways in which apps make connections: none of them escapes the mesh or notices it.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, Shop, StreamExt, wait_for};

const CANARY: &[u8] = b"canary-of-an-unusual-socket";

#[test]
fn blocking_nonblocking_and_threaded_clients_are_captured() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    let to = shop.far_service.at(80);
    shop.client.dial(to).connect().expect("blocking").ask(CANARY);
    shop.client.dial(to).nonblocking().connect().expect("non-blocking").ask(CANARY);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..8 {
                    shop.client.connect(to).expect("threaded").ask(CANARY);
                }
            });
        }
    });
    assert_eq!(server.seen().len(), 2 + 16 * 8);
    assert!(!wire.contains(CANARY));
}

#[test]
fn an_app_that_is_gone_before_the_proxy_wakes_still_reaches_its_destination() {
    let shop = Shop::in_mesh();
    let servers = [shop.far.serve(8080, Behaviour::Sink), shop.near.serve(8080, Behaviour::Sink)];
    shop.client.connect(shop.far_service.at(80)).expect("connect").half_close();
    servers[0].wait_last_end();
    let proxy = &shop.mesh().node(0).proxy;
    proxy.freeze();
    for (i, to) in [shop.far_service.at(80), shop.near_service.at(80), shop.far.at6(8080)].into_iter().enumerate() {
        let mut stream = shop.client.connect(to).expect("the listener's backlog takes it");
        stream.say(format!("last words {i}").as_bytes());
        drop(stream);
    }
    proxy.thaw();
    let far = servers[0].wait_seen(3);
    let near = servers[1].wait_seen(1);
    for server in &servers {
        assert_eq!(server.wait_last_end(), End::Fin);
    }
    wait_for("all last words to arrive", || {
        let received: u64 = servers.iter().flat_map(testbed::Server::seen).map(|seen| seen.received).sum();
        (received == 3 * b"last words 0".len() as u64).then_some(())
    });
    assert!(far[1..].iter().chain(&near).all(|seen| [shop.client.ip(), shop.client.ip6()].contains(&seen.peer.ip())));
}

#[test]
fn tcp_fast_open_is_captured() {
    let shop = Shop::in_mesh();
    shop.client.netns().sysctl("net/ipv4/tcp_fastopen", "1");
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    for to in [shop.far_service.at(80), shop.far.at6(8080)] {
        let mut stream = shop.client.dial(to).fast_open(CANARY).connect().expect("fast open");
        assert_eq!(stream.hear(CANARY.len()), CANARY);
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
    assert_eq!(server.seen().len(), 2);
    assert!(!wire.contains(CANARY));
}

#[test]
fn mptcp_is_captured_or_refused_with_a_reason_but_never_in_the_clear() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    for to in [shop.far.at(8080), shop.far.at6(8080), shop.far_service.at(80)] {
        match shop.client.dial(to).mptcp().timeout(Duration::from_secs(5)).connect() {
            Ok(mut stream) => stream.ask(CANARY),
            Err(e) if e.raw_os_error() == Some(libc::EPROTONOSUPPORT) => {
                panic!("this kernel has no MPTCP, the test shows nothing: {e}")
            }
            Err(e) => {
                assert_eq!(e.kind(), ErrorKind::PermissionDenied, "refused, not lost: {e}");
                let metrics = shop.mesh().node(0).agent_metrics();
                let refused: f64 = metrics
                    .samples()
                    .iter()
                    .filter(|s| s.labels.iter().any(|(_, value)| value.contains("refused") || value.contains("mptcp")))
                    .map(|s| s.value)
                    .sum();
                assert!(refused > 0.0, "the refusal is counted: {:?}", metrics.samples());
            }
        }
    }
    assert!(!wire.contains(CANARY), "never in the clear");
    assert!(wire.flows_to_port(8080).is_empty(), "not even a SYN to the server's own port");
    drop(server);
}

#[test]
fn a_socket_mark_does_not_lead_past_the_mesh() {
    // A pod with NET_RAW or NET_ADMIN can set any mark, so a mark must never exempt.
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    let marks = shop.client.netns().ip_output(&["rule", "show"]);
    let used = marks.lines().filter_map(|line| line.split("fwmark ").nth(1)?.split([' ', '/']).next());
    let used: Vec<u32> = used.filter_map(|mark| u32::from_str_radix(mark.trim_start_matches("0x"), 16).ok()).collect();
    assert!(!used.is_empty(), "the capture uses a mark in the pod: {marks}");
    for mark in used.into_iter().chain([1, 1337, 0x539, u32::MAX]) {
        let dial = shop.client.dial(shop.far.at(8080)).mark(mark).timeout(Duration::from_secs(2));
        if let Ok(mut stream) = dial.connect() {
            stream.ask(CANARY);
        }
    }
    assert!(!wire.contains(CANARY));
    assert!(wire.flows_to_port(8080).is_empty(), "{:?}", wire.flows_to_port(8080));
    drop(server);
}

#[test]
fn connecting_costs_a_client_little_time() {
    // The app's handshake is with its own node's proxy; it must not wait for the tunnel.
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"warm up");
    let start = Instant::now();
    for _ in 0..20 {
        shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"hello");
    }
    let each = start.elapsed() / 20;
    assert!(each < Duration::from_millis(100), "{each:?} for a connection and an answer");
}

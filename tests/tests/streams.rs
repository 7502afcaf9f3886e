//! What happens inside a connection: who speaks first, small writes, ends of every kind, all told truly to the other
//! side.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, Server, Shop, StreamExt, wait_for};

/// A shop with one server at each distance, and the addresses that lead to them.
fn both_ways(shop: &Shop, behaviour: Behaviour) -> Vec<(Server, SocketAddr)> {
    vec![
        (shop.near.serve(8080, behaviour.clone()), shop.near_service.at(80)),
        (shop.far.serve(8080, behaviour), shop.far_service.at(80)),
    ]
}

fn connect(shop: &Shop, to: SocketAddr) -> TcpStream {
    shop.client.connect(to).unwrap_or_else(|e| panic!("connect to {to}: {e}"))
}

/// B136: a proxy that waits for the client's first bytes makes mail servers and databases hang.
#[test]
fn a_server_that_speaks_first_is_heard_at_once() {
    let shop = Shop::in_mesh();
    for (_server, to) in both_ways(&shop, Behaviour::Banner("220 ready\r\n")) {
        connect(&shop, to).hear(11);
        let start = Instant::now();
        let mut stream = connect(&shop, to);
        assert_eq!(stream.hear(11), b"220 ready\r\n");
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        stream.ask(b"EHLO client");
    }
}

/// B11: many small frames on one tunnel must not trip a limit against abuse and take the whole tunnel down.
#[test]
fn single_byte_writes_of_many_streams_all_arrive() {
    let shop = Shop::in_mesh();
    for (_server, to) in both_ways(&shop, Behaviour::Echo) {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut stream = connect(&shop, to);
                    stream.set_nodelay(true).expect("set TCP_NODELAY");
                    let mut reader = stream.try_clone().expect("duplicate");
                    let sent: Vec<u8> = (0..4000u32).map(|i| i as u8).collect();
                    let expected = sent.clone();
                    let heard = scope.spawn(move || reader.hear(4000));
                    for byte in &sent {
                        stream.write_all(&[*byte]).expect("write");
                    }
                    assert_eq!(heard.join().expect("the reader"), expected);
                });
            }
        });
    }
}

#[test]
fn the_client_can_end_first_and_still_hear_the_rest() {
    let shop = Shop::in_mesh();
    for (server, to) in both_ways(&shop, Behaviour::Sink) {
        let mut stream = connect(&shop, to);
        stream.say(&[7; 100_000]);
        stream.half_close();
        let (answer, end) = stream.hear_end();
        assert_eq!(answer.len(), 16, "the server's count and checksum");
        assert_eq!(u64::from_be_bytes(answer[..8].try_into().unwrap()), 100_000);
        assert_eq!(end, End::Fin);
        assert_eq!(server.seen().last().unwrap().received, 100_000);
    }
}

#[test]
fn the_server_can_end_first_and_still_hear_the_rest() {
    let shop = Shop::in_mesh();
    for (server, to) in both_ways(&shop, Behaviour::Source(50_000)) {
        let mut stream = connect(&shop, to);
        let (bytes, end) = stream.hear_end();
        assert_eq!((bytes.len(), end), (50_000, End::Fin));
        assert_eq!(server.seen().last().unwrap().end, None, "the server still listens");
        stream.say(b"the client's last words after the server's end");
        stream.half_close();
        assert_eq!(server.wait_last_end(), End::Fin);
    }
}

#[test]
fn a_half_open_connection_stays_open() {
    let shop = Shop::in_mesh();
    for (server, to) in both_ways(&shop, Behaviour::Echo) {
        let mut stream = connect(&shop, to);
        stream.ask(b"one");
        testbed::holds_for(Duration::from_secs(1), "an idle connection stays", || {
            server.seen().last().unwrap().end.is_none()
        });
        stream.ask(b"two");
        stream.half_close();
        assert_eq!(stream.hear_end(), (Vec::new(), End::Fin));
    }
}

#[test]
fn a_reset_of_the_client_reaches_the_server_as_a_reset() {
    let shop = Shop::in_mesh();
    for (server, to) in both_ways(&shop, Behaviour::Echo) {
        let mut stream = connect(&shop, to);
        stream.ask(b"hello");
        stream.reset();
        assert_eq!(server.wait_last_end(), End::Reset);
    }
}

#[test]
fn a_reset_of_the_server_reaches_the_client_as_a_reset() {
    let shop = Shop::in_mesh();
    let behaviour = Behaviour::custom(|mut stream| {
        let mut first = [0; 5];
        stream.read_exact(&mut first).expect("the client speaks");
        stream.reset();
    });
    for (_server, to) in both_ways(&shop, behaviour) {
        let mut stream = connect(&shop, to);
        stream.say(b"hello");
        assert_eq!(stream.hear_end(), (Vec::new(), End::Reset));
    }
}

#[test]
fn a_reset_after_bytes_were_sent_is_never_dressed_up_as_an_orderly_end() {
    // Bytes that are cut off must not look complete.
    let shop = Shop::in_mesh();
    let behaviour = Behaviour::custom(|mut stream| {
        stream.write_all(&[1; 10_000]).expect("send");
        // Wait until the client has them, then cut.
        let mut go = [0];
        stream.read_exact(&mut go).expect("the client has heard");
        stream.reset();
    });
    for (_server, to) in both_ways(&shop, behaviour) {
        let mut stream = connect(&shop, to);
        stream.hear(10_000);
        stream.say(b"g");
        assert_eq!(stream.hear_end().1, End::Reset);
    }
}

/// Who does not read finds the reset all the same, as without a mesh: it does not stand behind the bytes.
#[test]
fn a_reset_behind_bytes_that_nobody_reads_reaches_the_other_side() {
    let shop = Shop::in_mesh();
    let fill_and_reset = |mut stream: TcpStream| {
        stream.set_write_timeout(Some(Duration::from_secs(1))).expect("set a timeout");
        let full = loop {
            if let Err(error) = stream.write(&[1; 65_536]) {
                break error;
            }
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock, "the sender is held");
        stream.reset();
    };
    let reset_of = |stream: &TcpStream| {
        let error = wait_for("a reset without a read", || stream.take_error().expect("ask for an error"));
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    };
    let (tell, told) = std::sync::mpsc::channel();
    let holds = Behaviour::custom(move |stream| {
        reset_of(&stream);
        tell.send(()).expect("the test waits");
    });
    for (_server, to) in both_ways(&shop, holds) {
        fill_and_reset(connect(&shop, to));
        told.recv_timeout(Duration::from_secs(30)).expect("the server is told");
    }
    for (_server, to) in both_ways(&shop, Behaviour::custom(fill_and_reset)) {
        reset_of(&connect(&shop, to));
    }
}

/// B60: `connect` has succeeded before the proxy dials, so a failed dial must become a RST at once.
#[test]
fn a_dial_to_a_closed_port_ends_with_a_reset_at_once() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    // The tunnel is there already: what is timed is the failed dial.
    connect(&shop, shop.far.at(8080)).ask(b"warm up");
    for to in [shop.far.at(9999), shop.far.at6(9999), shop.near.at(9999)] {
        let mut stream = connect(&shop, to);
        let (end, took) = stream.time_to_end();
        assert_eq!(end, End::Reset, "{to}");
        assert!(took < Duration::from_millis(600), "{to}: {took:?} after the connect");
    }
    let node = shop.mesh().node_of(&shop.client);
    let line = node.wait_access_line("the failed dial", |line| {
        line.get("direction") == "outbound" && line.get("dst.hbone_addr") == shop.far.at(9999).to_string()
    });
    assert_ne!(line.get("error"), "", "{}", line.text);
    node.wait_proxy_count(3.0, "istio_tcp_connections_failed_total", &[("response_flags", "CONNECT")]);
}

#[test]
fn a_dial_to_an_unreachable_host_ends_with_a_reset_soon_after_the_kernel_gives_up() {
    let shop = Shop::in_mesh();
    // An address of the network between the nodes that nobody has: the neighbour look-up fails after some 3 s.
    let mut stream = connect(&shop, "172.18.9.9:80".parse().unwrap());
    let (end, took) = stream.time_to_end();
    assert_eq!(end, End::Reset);
    assert!(took < Duration::from_secs(6), "{took:?}");
    let line = shop.mesh().node(0).wait_access_line("the failed dial", |line| line.get("dst.addr") == "172.18.9.9:80");
    assert_ne!(line.get("error"), "", "{}", line.text);
}

/// B27: a client that goes away in mid-download must take its stream with it on every hop.
#[test]
fn aborted_downloads_leave_no_streams_behind() {
    let shop = Shop::in_mesh();
    let open = || -> f64 {
        let nodes = shop.mesh().nodes().iter();
        nodes.map(|node| node.proxy_metrics().sum("istio_tcp_sockets_open", &[])).sum()
    };
    for (server, to) in both_ways(&shop, Behaviour::Source(1 << 30)) {
        connect(&shop, to).hear(65_536);
        let start = server.seen().len();
        for _ in 0..100 {
            let mut stream = connect(&shop, to);
            stream.hear(65_536);
            stream.reset();
        }
        server.wait_seen(start + 100);
        wait_for("every server side to be reset", || {
            server.seen().iter().all(|seen| seen.end == Some(End::Reset)).then_some(())
        });
    }
    let node = shop.mesh().node(0);
    wait_for("all connections to be gone from the dump", || {
        let dump = node.config_dump();
        let states = dump["workloadState"].as_object()?.values();
        let open: usize = states
            .map(|state| {
                let list = |side: &str| state["connections"][side].as_array().map_or(0, Vec::len);
                list("inbound") + list("outbound")
            })
            .sum();
        (open == 0).then_some(())
    });
    // Pooled tunnels may stay.
    wait_for("the open sockets to go down", || (open() <= 16.0).then_some(()));
}

/// Who takes a burst in must not give all of it to one other worker that looked idle.
#[test]
fn a_burst_of_connections_is_spread_over_the_workers() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    node.proxy.freeze();
    let mut burst: Vec<_> = (0..64).map(|_| connect(&shop, shop.far.at(8080))).collect();
    node.proxy.thaw();
    for stream in &mut burst {
        stream.ask(b"a burst");
    }
    let metrics = node.proxy_metrics();
    let by_worker = metrics.samples().iter().filter(|sample| sample.name == "understory_worker_connections");
    let counts: Vec<f64> = by_worker.map(|sample| sample.value).collect();
    assert_eq!(counts.iter().sum::<f64>(), 64.0, "{counts:?}");
    let even = 64.0 / counts.len() as f64;
    assert!(counts.iter().all(|count| (count - even).abs() <= 8.0), "{counts:?}");
    drop(server);
}

/// B149: the log says which side ended a connection, and how.
#[test]
fn the_log_tells_who_ended_a_connection_and_how() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    let lines = |node: &testbed::NodeMesh| {
        let lines = node.access_log().into_iter();
        lines.filter(|line| line.get("direction") == "outbound").map(|line| line.text).collect::<Vec<_>>()
    };
    let mut orderly = connect(&shop, shop.far_service.at(80));
    orderly.ask(b"hello");
    orderly.half_close();
    orderly.hear_end();
    drop(orderly);
    wait_for("a line", || (lines(node).len() == 1).then_some(()));
    let mut cut = connect(&shop, shop.far_service.at(80));
    cut.ask(b"hello");
    cut.reset();
    wait_for("a second line", || (lines(node).len() == 2).then_some(()));
    let lines = lines(node);
    assert!(lines[0].contains("FIN") && !lines[0].contains("RST"), "{}", lines[0]);
    assert!(lines[1].contains("RST"), "{}", lines[1]);
}

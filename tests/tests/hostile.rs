//! Clients and peers that mean no good: what they do costs them their own connections, and nobody else's.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::Duration;

use testbed::{
    Behaviour, Leaf, MeshOptions, Pod, RawTunnel, Shop, StreamExt, frame, frame_bytes, wait_for, wait_for_within,
};

const PEER: &str = "spiffe://cluster.local/ns/legacy/sa/default";
const ACK: u8 = 1;
const MB: u64 = 1 << 20;

/// The shop, a pod outside the mesh to dial from, and a good certificate for it.
fn set_up(options: MeshOptions) -> (Shop, Pod, Leaf) {
    let shop = Shop::in_mesh_with(options);
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue(PEER);
    (shop, plain, leaf)
}

/// Whether the other side has reset the connection.
fn is_reset(stream: &TcpStream) -> bool {
    let mut stream = stream.try_clone().expect("duplicate a descriptor");
    stream.set_read_timeout(Some(Duration::from_millis(1))).expect("set a timeout");
    std::io::Read::read(&mut stream, &mut [0]).is_err_and(|e| e.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn handshakes_that_never_end_take_little_memory() {
    let options =
        MeshOptions::default().proxy_env("HANDSHAKE_TIMEOUT", "60s").proxy_env("POD_MAX_HANDSHAKES", "100000");
    let (shop, plain, _) = set_up(options);
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let proxy = &shop.mesh().node(1).proxy;
    let before = proxy.pss();
    // The most of a record that is not whole yet.
    let mut record = vec![22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f, 0xfb, 3, 3];
    record.resize(16_000, 0);
    let held: Vec<_> = (0..1000)
        .map(|_| {
            let mut stream = plain.connect(shop.far.at(15008)).expect("connect");
            stream.write_all(&record).expect("send");
            stream
        })
        .collect();
    shop.client.connect(shop.far.at(8080)).expect("connect").ask(b"served meanwhile");
    let taken = proxy.pss().saturating_sub(before);
    assert!(taken < 100 * MB, "{} handshakes take {} MB", held.len(), taken / MB);
}

#[test]
fn a_client_with_too_many_handshakes_under_way_is_refused_and_others_are_not() {
    let options = MeshOptions::default().proxy_env("HANDSHAKE_TIMEOUT", "60s").proxy_env("POD_MAX_HANDSHAKES", "64");
    let (shop, plain, _) = set_up(options);
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(1);
    let mut held: Vec<_> = (0..10).map(|_| plain.connect(shop.far.at(15008)).expect("connect")).collect();
    wait_for("all but a sixteenth to be reset", || {
        (held.iter().filter(|stream| is_reset(stream)).count() == 6).then_some(())
    });
    node.wait_proxy_count(6.0, "understory_connections_failed_total", &[("step", "limit")]);
    node.wait_proxy_count(6.0, "understory_connections_shed_total", &[("limit", "client_handshakes")]);
    shop.client.connect(shop.far.at(8080)).expect("connect").ask(b"another client");
    held.clear();
    // There is room again.
    let open = || RawTunnel::open(&plain, shop.far.at(15008), &shop.mesh().authority().issue(PEER), &[]);
    wait_for("a tunnel of the same client", || open().ok()?.read().ok());
}

#[test]
fn a_pod_with_too_many_connections_is_refused_more_and_others_are_not() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("POD_MAX_CONNECTIONS", "20"));
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let node = shop.mesh().node(0);
    let outside = shop.tb.outside("db");
    let _database = outside.serve(5432, Behaviour::Echo);
    let to = (outside.ip4(), 5432).into();
    let mut held: Vec<_> = (0..20).map(|_| shop.client.connect(to).expect("connect")).collect();
    held.iter_mut().for_each(|stream| stream.ask(b"one of those that it may have"));
    for to in [to, shop.far.at(8080)] {
        assert!(shop.client.is_refused(to));
    }
    node.wait_proxy_count(2.0, "understory_connections_failed_total", &[("step", "limit")]);
    node.wait_proxy_count(2.0, "understory_connections_shed_total", &[("limit", "pod_connections")]);
    shop.near.connect(shop.far.at(8080)).expect("connect").ask(b"another pod of the node");
    drop(held);
    wait_for("the pod to be served again", || {
        let mut stream = shop.client.connect(to).ok()?;
        stream.write_all(b"hello").ok()?;
        std::io::Read::read_exact(&mut stream, &mut [0; 5]).ok()
    });
}

/// B26: a proxy that runs out of descriptors is not ready, yet never restarts, and nobody can ask it why.
#[test]
fn a_flood_of_connections_leaves_descriptors_for_what_must_go_on() {
    const MOST: u64 = 192;
    let options = MeshOptions::default().proxy_descriptors(MOST).proxy_env("POD_MAX_CONNECTIONS", "1000");
    let shop = Shop::in_mesh_with(options);
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let (node, outside) = (shop.mesh().node(0), shop.tb.outside("db"));
    let _database = outside.serve(5432, Behaviour::Echo);
    let mut older: Vec<_> = [shop.far.at(8080), shop.near.at(8080), (outside.ip4(), 5432).into()]
        .map(|to| shop.client.connect(to).expect("connect"))
        .into();
    older.iter_mut().for_each(|stream| stream.ask(b"before the flood"));

    // Each takes two descriptors of the proxy: more than it may have.
    let mut early = 0;
    let mut flood = Vec::new();
    for _ in 0..200 {
        match shop.client.connect((outside.ip4(), 5432).into()) {
            Ok(stream) => flood.push(stream),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => early += 1,
            Err(error) => panic!("connect: {error}"),
        }
    }
    let refused = || early + flood.iter().filter(|stream| is_reset(stream)).count();
    wait_for("what is too much to be reset", || (refused() > 100).then_some(()));
    node.wait_proxy_count(100.0, "understory_connections_failed_total", &[("step", "limit")]);
    node.wait_proxy_count(100.0, "understory_connections_shed_total", &[("limit", "descriptors")]);
    assert!(node.proxy.open_fds() as u64 <= MOST - 16, "{} are open", node.proxy.open_fds());
    assert_eq!(node.readiness().expect("an answer").status, 200);
    older.iter_mut().for_each(|stream| stream.ask(b"established work goes on"));
    // So does what the proxy itself has to do.
    shop.mesh().control().kill9();
    shop.mesh().start_control();
    shop.mesh().wait_control_ready();
    let cart = shop.tb.pod("shop/cart").start();
    shop.mesh().wait_in_mesh(&[&cart]);
    older.iter_mut().for_each(|stream| stream.ask(b"and after a change"));

    drop(flood);
    wait_for("new connections to be taken again", || {
        let mut stream = shop.client.connect(shop.far.at(8080)).ok()?;
        stream.write_all(b"hello").ok()?;
        std::io::Read::read_exact(&mut stream, &mut [0; 5]).ok()
    });
}

/// What is too much for the process's memory is not begun; what is established goes on, and so does the rest later.
#[test]
fn when_memory_is_short_new_work_is_refused_and_established_work_goes_on() {
    let (shop, plain, _) = set_up(MeshOptions::default());
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let (mesh, node) = (shop.mesh(), shop.mesh().node(1));
    shop.client.connect(shop.far.at(8080)).expect("connect").ask(b"what a connection takes");
    // Room for some hundred handshakes beside what it takes when idle.
    let limit = (node.proxy_metrics().sum("process_resident_memory_bytes", &[]) as u64 + 16 * MB) / 9 * 10;
    node.proxy.terminate();
    let most = [("MEMORY_LIMIT", limit.to_string()), ("HANDSHAKE_TIMEOUT", "60s".to_owned())];
    let most = most.each_ref().map(|(key, value)| (*key, value.as_str()));
    mesh.start_proxy_with(node, &[&most[..], &[("POD_MAX_HANDSHAKES", "100000")]].concat());
    node.wait_proxy_ready();
    mesh.wait_in_mesh(&[&shop.far]);
    let mut older = wait_for("a connection through the new proxy", || {
        let mut stream = shop.client.connect(shop.far.at(8080)).ok()?;
        stream.write_all(b"old").ok()?;
        std::io::Read::read_exact(&mut stream, &mut [0; 3]).ok()?;
        Some(stream)
    });

    let mut held = Vec::new();
    let mut record = vec![22, 3, 1, 0x3f, 0xff, 1, 0, 0x3f, 0xfb, 3, 3];
    record.resize(16_000, 0);
    let shed = || node.proxy_metrics().sum("understory_connections_shed_total", &[("limit", "memory")]);
    while shed() == 0.0 {
        for _ in 0..100 {
            let mut stream = plain.connect(shop.far.at(15008)).expect("connect");
            // Refused or not.
            let _ = stream.write_all(&record);
            held.push(stream);
        }
        assert!(held.len() < 5000, "{} handshakes and no end", held.len());
    }
    older.ask(b"established work goes on");
    assert!(shop.client.is_refused(shop.far.at(8080)));
    assert_eq!(node.readiness().expect("an answer").status, 200);
    node.proxy.wait_log(&["memory is short"]);

    drop(held);
    wait_for_within(Duration::from_secs(60), "new work to be taken again", || {
        let mut stream = shop.client.connect(shop.far.at(8080)).ok()?;
        stream.write_all(b"new").ok()?;
        std::io::Read::read_exact(&mut stream, &mut [0; 3]).ok()
    });
    older.ask(b"and after that");
}

/// An app that reads nothing costs memory by its windows: at some point its pod gets no more of them.
#[test]
fn a_pod_whose_apps_do_not_read_gets_no_new_connections_and_others_do() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("POD_MAX_BUFFER", "1Mi"));
    let listener = shop.far.listen(8080);
    let other = shop.tb.pod("shop/other").on(shop.tb.node(1)).start();
    let _server = other.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(1);
    shop.mesh().wait_in_mesh(&[&other]);
    let mut older = shop.client.connect(other.at(8080)).expect("connect");
    older.ask(b"before");
    let mut stuffed = Vec::new();
    wait_for("the pod to be refused more", || {
        if let Ok(mut stream) = shop.client.connect(shop.far.at(8080)) {
            stream.set_nonblocking(true).expect("set non-blocking");
            while stream.write(&[0; 64 << 10]).is_ok() {}
            stuffed.push(stream);
        }
        // Those that are open go on to fill their windows.
        for mut stream in &stuffed {
            while stream.write(&[0; 64 << 10]).is_ok() {}
        }
        (node.proxy_metrics().sum("understory_connections_shed_total", &[("limit", "pod_buffer")]) > 0.0).then_some(())
    });
    assert!(node.proxy_metrics().sum("understory_buffered_bytes", &[]) > 1e6);
    shop.client.connect(other.at(8080)).expect("connect").ask(b"another pod");
    older.ask(b"and what was open");
    drop((stuffed, listener));
    let _server = shop.far.serve(8080, Behaviour::Echo);
    wait_for("the pod to be served again", || {
        let mut stream = shop.client.connect(shop.far.at(8080)).ok()?;
        stream.write_all(b"hello").ok()?;
        std::io::Read::read_exact(&mut stream, &mut [0; 5]).ok()
    });
    wait_for("nothing to wait", || (node.proxy_metrics().sum("understory_buffered_bytes", &[]) == 0.0).then_some(()));
}

/// Turns are fair: however many connections one pod opens, another pod has its answers in between.
#[test]
fn a_pod_that_floods_connections_leaves_another_pod_its_turns() {
    const FLOOD: usize = 4000;
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let outside = shop.tb.outside("db");
    let _database = outside.serve(5432, Behaviour::Close);
    let mut other = shop.near.connect(shop.far.at(8080)).expect("connect");
    other.ask(b"before the flood");
    let to = (outside.ip4(), 5432).into();
    let answers = std::thread::scope(|scope| {
        let flood: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    for _ in 0..FLOOD / 8 {
                        shop.client.connect(to).expect("connect").hear_end();
                    }
                })
            })
            .collect();
        let mut answers = 0;
        while flood.iter().any(|thread| !thread.is_finished()) {
            other.ask(b"in between");
            answers += 1;
        }
        answers
    });
    assert!(answers > FLOOD / 100, "{answers} answers while {FLOOD} connections of another pod were served");
}

/// What a burst took is given back soon after it: buffers, connections, streams, tunnels.
#[test]
fn memory_falls_back_after_a_hundredfold_burst() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let burst = |connections: usize| {
        let mut held: Vec<_> = (0..connections)
            .map(|_| {
                let mut stream = shop.client.connect(shop.far.at(8080)).expect("connect");
                stream.say(&[b'b'; 8 * 1024]);
                stream
            })
            .collect();
        held.iter_mut().for_each(|stream| assert_eq!(stream.hear(8 * 1024).len(), 8 * 1024));
        shop.mesh().nodes().iter().map(|node| node.proxy.pss()).collect::<Vec<_>>()
    };
    let few = burst(20);
    let many = burst(2000);
    wait_for_within(Duration::from_secs(60), "the memory of both proxies to fall back", || {
        let now = shop.mesh().nodes().iter().map(|node| node.proxy.pss());
        now.zip(few.iter().zip(&many)).all(|(now, (few, many))| now < few + (many - few) / 4 + 2 * MB).then_some(())
    });
}

/// Frames that mean nothing: answers to pings that were not sent, window for streams that are over.
#[test]
fn frames_without_sense_do_not_fill_the_log() {
    let (shop, plain, leaf) = set_up(MeshOptions::default());
    let proxy = &shop.mesh().node(1).proxy;
    let mut tunnel = RawTunnel::open(&plain, shop.far.at(15008), &leaf, &[]).expect("a tunnel");
    tunnel.connect(1, &shop.far.at(9999).to_string()).expect("send a CONNECT");
    tunnel.read_until(frame::HEADERS).expect("an answer");
    let before = proxy.log().len();
    let senseless = [frame_bytes(frame::PING, ACK, 0, &[7; 8]), frame_bytes(frame::WINDOW_UPDATE, 0, 1, &[0, 0, 0, 1])];
    for bytes in senseless {
        tunnel.write(&bytes.repeat(10_000)).expect("send");
    }
    // Answered last: all before it has been read.
    tunnel.frame(frame::PING, 0, 0, &[9; 8]).expect("send a ping");
    while tunnel.read_until(frame::PING).expect("an answer").3 != [9; 8] {}
    wait_for_within(Duration::from_secs(5), "few lines", || (proxy.log().len() - before < 4096).then_some(()));
}

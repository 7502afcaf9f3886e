//! Connections that come to a pod.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use ebpf::{Counter, Node, PASS_TTL_NS, Tuple};
use socket2::{Domain, Protocol, Socket};
use ztunnel::capture::bpf::monotonic_ns;
use ztunnel::capture::listeners::{ListenerPorts, PodListeners};
use ztunnel::capture::maps::endpoint;

use crate::ground::*;

#[test]
fn what_comes_to_a_pod_goes_to_its_listeners() {
    let ground = Ground::new("in");
    let _app = ground.listen_in_pod("[::]:7000");
    // With an app behind the port, without one, and to a port that is somebody's elsewhere.
    for to in ["10.99.0.2:7000", "[fd99::2]:7000", "10.99.0.2:7001", "[fd99::2]:22"] {
        ground.assert_steered(&ground.connect_from_outside(to).unwrap());
    }
    for to in ["10.99.0.2:15008", "[fd99::2]:15008"] {
        let _tunnel = ground.connect_from_outside(to).unwrap();
        let (stream, _) = accept(&ground.pod_listeners().hbone);
        assert_eq!(canonical(stream.local_addr().unwrap()).to_string(), to);
    }
    assert_eq!(ground.capture().counter(Counter::Steered).unwrap(), 6);
    for to in ["10.99.0.2:15001", "10.99.0.2:15006", "[fd99::2]:15001", "[fd99::2]:15006"] {
        let error = ground.connect_from_outside(to).expect_err(to);
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}");
    }
    assert_eq!(ground.capture().counter(Counter::CapturePort).unwrap(), 4);
}

#[test]
fn a_connection_that_was_there_before_is_untouched() {
    let mut ground = Ground::new("before");
    ground.release();
    let app = ground.listen_in_pod("10.99.0.2:7000");
    let mut client = ground.connect_from_outside("10.99.0.2:7000").unwrap();
    let (mut server, _) = app.accept().unwrap();
    let there = ground.listen_outside("10.99.0.1:7000");
    let mut out = ground.connect_from_pod("10.99.0.1:7000").unwrap();
    let (mut out_server, _) = there.accept().unwrap();
    ground.enrol();
    for (from, to) in [(&mut client, &mut server), (&mut out, &mut out_server)] {
        from.write_all(b"ping").unwrap();
        let mut text = [0; 4];
        to.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"ping");
    }
    assert_eq!(out.peer_addr().unwrap().to_string(), "10.99.0.1:7000");
}

/// A socket outside that dials the pod's app from this port.
fn dial_from(ground: &Ground, port: u16) -> TcpStream {
    let socket = socket(&ground.outside, Domain::IPV4, None);
    socket.bind(&at(OUTSIDE, port).into()).unwrap();
    let to: SocketAddr = "10.99.0.2:7000".parse().unwrap();
    socket.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
    TcpStream::from(socket)
}

#[test]
fn only_the_proxys_own_dial_passes_to_the_app() {
    let ground = Ground::new("pass");
    let cookie = ground.pod.cookie();
    let app = ground.listen_in_pod("10.99.0.2:7000");
    let local: SocketAddr = "10.99.0.2:7000".parse().unwrap();
    ground.pass.insert(cookie, at(OUTSIDE, 40001), local).unwrap();
    let _passed = dial_from(&ground, 40001);
    assert_eq!(app.accept().unwrap().1, at(OUTSIDE, 40001));
    assert_eq!(ground.capture().counter(Counter::ProxyDial).unwrap(), 1);
    ground.pass.remove(cookie, at(OUTSIDE, 40001), local).unwrap();
    ground.assert_steered(&dial_from(&ground, 40002));
    // An entry of another pod opens nothing here.
    ground.pass.insert(ground.outside.cookie(), at(OUTSIDE, 40003), local).unwrap();
    ground.assert_steered(&dial_from(&ground, 40003));
    // Nor does one to another port.
    ground.pass.insert(cookie, at(OUTSIDE, 40004), at(POD, 7001)).unwrap();
    ground.assert_steered(&dial_from(&ground, 40004));
    assert_nobody_at(&app);
}

#[test]
fn an_entry_that_was_left_behind_opens_nothing_for_long() {
    let ground = Ground::new("ttl");
    let app = ground.listen_in_pod("10.99.0.2:7000");
    let map = ground.map::<Tuple, u64>("PASS");
    let entry = |port| Tuple {
        remote: endpoint(at(OUTSIDE, port)),
        local: endpoint(at(POD, 7000)),
        netns: ground.pod.cookie(),
    };
    map.set(&entry(40001), &(monotonic_ns() - PASS_TTL_NS + 5_000_000_000)).unwrap();
    let _passed = dial_from(&ground, 40001);
    app.accept().unwrap();
    map.set(&entry(40002), &(monotonic_ns() - PASS_TTL_NS)).unwrap();
    ground.assert_steered(&dial_from(&ground, 40002));
    assert_nobody_at(&app);
}

#[test]
fn the_proxys_dial_in_the_clients_name_reaches_the_app() {
    // What the proxy does: inside the pod's netns, from the client's address.
    let ground = Ground::new("dial");
    let app = ground.listen_in_pod("[::]:7000");
    let id = ground.cgroup_id("proxy");
    ground.capture().exempt(id).unwrap();
    ip(&ground.pod, "rule add fwmark 1337 lookup 100");
    ip(&ground.pod, "route add local default dev lo table 100");
    sysctl(&ground.pod, "net/ipv4/tcp_fwmark_accept", "1");
    let client = at([10, 50, 0, 9], 41000);
    let dial = socket(&ground.pod, Domain::IPV4, None);
    dial.set_mark(1337).unwrap();
    dial.set_ip_transparent_v4(true).unwrap();
    dial.bind(&client.into()).unwrap();
    let to: SocketAddr = "10.99.0.2:7000".parse().unwrap();
    ground.pass.insert(ground.pod.cookie(), client, to).unwrap();
    ground.inside_cgroup("proxy", || dial.connect_timeout(&to.into(), Duration::from_secs(2))).unwrap();
    ground.pass.remove(ground.pod.cookie(), client, to).unwrap();
    let (_stream, from) = app.accept().unwrap();
    assert_eq!(canonical(from), client);
}

#[test]
fn an_mptcp_server_in_a_pod_works_on() {
    let ground = Ground::new("mpserver");
    let server = socket(&ground.pod, Domain::IPV4, Some(Protocol::MPTCP));
    server.bind(&at(POD, 7000).into()).unwrap();
    server.listen(8).unwrap();
    // From outside through the proxy, also if the client speaks MPTCP.
    let client = socket(&ground.outside, Domain::IPV4, Some(Protocol::MPTCP));
    client.connect(&at(POD, 7000).into()).unwrap();
    let (_steered, from) = accept(&ground.pod_listeners().plaintext);
    assert_eq!(canonical(from), client.local_addr().unwrap().as_socket().unwrap());
    // And from the proxy to the app.
    ground.pass.insert(ground.pod.cookie(), at(OUTSIDE, 40001), at(POD, 7000)).unwrap();
    let _passed = dial_from(&ground, 40001);
    assert_eq!(server.accept().unwrap().1.as_socket(), Some(at(OUTSIDE, 40001)));
}

/// The outside is the node: its processes are host processes but for those below kubepods.
fn node(ground: &Ground) {
    let kubepods = ground.cgroup_id("kubepods");
    let node = Node { netns: ground.outside.cookie(), kubepods, kubepods_level: 2, _pad: 0 };
    ground.capture().set_node(&node).unwrap();
}

#[test]
fn a_host_process_reaches_the_app_and_a_host_network_pod_does_not() {
    let ground = Ground::new("host");
    node(&ground);
    let app = ground.listen_in_pod("[::]:7000");
    for to in ["10.99.0.2:7000", "[fd99::2]:7000", "[::ffff:10.99.0.2]:7000"] {
        let probe = ground.connect_from_outside(to).unwrap();
        assert_eq!(canonical(app.accept().unwrap().1), canonical(probe.local_addr().unwrap()));
        assert_eq!(probe.peer_addr().unwrap().to_string(), to);
        let hbone = ground.inside_cgroup("kubepods/pod1", || ground.connect_from_outside(to).unwrap());
        ground.assert_steered(&hbone);
    }
    assert_eq!(ground.capture().counter(Counter::HostConn).unwrap(), 3);
    assert_nobody_at(&app);
}

#[test]
fn a_host_process_is_known_by_its_connection_not_by_its_address() {
    let ground = Ground::new("tuple");
    node(&ground);
    let app = ground.listen_in_pod("[::]:7000");
    let probe = ground.connect_from_outside("10.99.0.2:7000").unwrap();
    app.accept().unwrap();
    assert_eq!(ground.host_conns(), 1);
    // The port is free again, and somebody else comes from it, with the node's address.
    let mine = probe.local_addr().unwrap();
    drop(probe);
    wait("the closed connection to be forgotten", || (ground.host_conns() == 0).then_some(()));
    let other = ground.inside_cgroup("kubepods/pod1", || {
        let other = socket(&ground.outside, Domain::IPV4, None);
        other.set_reuse_address(true).unwrap();
        other.bind(&mine.into()).unwrap();
        let to: SocketAddr = "10.99.0.2:7000".parse().unwrap();
        other.connect_timeout(&to.into(), Duration::from_secs(2)).map(|()| TcpStream::from(other))
    });
    match other {
        Ok(other) => ground.assert_steered(&other),
        // The kernel keeps the port back while the old connection rests.
        Err(e) => assert_eq!(e.kind(), io::ErrorKind::AddrNotAvailable),
    }
    assert_nobody_at(&app);
}

#[test]
fn a_refused_or_failed_host_connection_leaves_no_entry() {
    let ground = Ground::new("refused");
    node(&ground);
    assert_eq!(
        ground.connect_from_outside("10.99.0.2:7000").unwrap_err().kind(),
        io::ErrorKind::ConnectionRefused,
        "passed to the app, which is not there"
    );
    wait("the failed connection to be forgotten", || (ground.host_conns() == 0).then_some(()));
}

#[test]
fn host_connections_hold_under_forced_syn_cookies() {
    let ground = Ground::new("hostcookie");
    node(&ground);
    sysctl(&ground.pod, "net/ipv4/tcp_syncookies", "2");
    let app = ground.listen_in_pod("[::]:7000");
    for to in ["10.99.0.2:7000", "[fd99::2]:7000"] {
        let probe = ground.connect_from_outside(to).unwrap();
        assert_eq!(canonical(app.accept().unwrap().1), probe.local_addr().unwrap());
    }
}

#[test]
fn a_pod_with_a_neighbours_address_gets_nothing_of_the_neighbours() {
    let ground = Ground::new("takeover");
    node(&ground);
    let capture = ground.capture();
    // The neighbour, its listeners and its entries; its address is put on the first pod's interface.
    let neighbour = fresh_netns();
    let listeners = PodListeners::open(&neighbour, &ListenerPorts::default()).unwrap();
    use std::os::fd::AsFd;
    let record = ebpf::Pod { v4: [10, 99, 0, 3], ..Default::default() };
    capture.set_pod(neighbour.cookie(), &ebpf::Pod { flags: ebpf::Pod::HAS_V4, ..record }).unwrap();
    capture.set_pod_ip([10, 99, 0, 3].into(), neighbour.cookie()).unwrap();
    for (port, listener) in [(ebpf::PLAINTEXT_PORT, &listeners.plaintext), (ebpf::HBONE_PORT, &listeners.hbone)] {
        capture.set_listener(neighbour.cookie(), port, listener.as_fd()).unwrap();
    }
    capture.attach_inbound(neighbour.as_fd(), neighbour.cookie()).unwrap();
    ip(&ground.pod, "addr add 10.99.0.3/24 dev eth0");
    let app = ground.listen_in_pod("10.99.0.3:7000");

    // A host process means the neighbour; the thief's app does not get the connection past its own proxy.
    let probe = ground.connect_from_outside("10.99.0.3:7000").unwrap();
    ground.assert_steered(&probe);
    let to: SocketAddr = "10.99.0.3:7000".parse().unwrap();
    ground.pass.insert(neighbour.cookie(), at(OUTSIDE, 40001), to).unwrap();
    let dial = socket(&ground.outside, Domain::IPV4, None);
    dial.bind(&at(OUTSIDE, 40001).into()).unwrap();
    ground.inside_cgroup("kubepods/pod1", || dial.connect_timeout(&to.into(), Duration::from_secs(2))).unwrap();
    ground.assert_steered(&TcpStream::from(dial));
    let _tunnel = ground.connect_from_outside("10.99.0.3:15008").unwrap();
    let _ = accept(&ground.pod_listeners().hbone);
    assert_nobody_at(&app);
    for listener in [&listeners.plaintext, &listeners.hbone, &listeners.outbound] {
        assert_nobody_at(&listener.try_clone().unwrap().into());
    }
}

#[test]
fn a_half_open_flood_of_an_apps_port_stays_with_the_proxy() {
    let ground = Ground::new("backlog");
    let app: Socket = socket(&ground.pod, Domain::IPV4, None);
    app.bind(&at(POD, 7000).into()).unwrap();
    app.listen(1).unwrap();
    // More connections than the app's own backlog takes: none of them is the app's.
    let clients: Vec<_> = (0..32).map(|_| ground.connect_from_outside("10.99.0.2:7000").unwrap()).collect();
    for _ in &clients {
        accept(&ground.pod_listeners().plaintext);
    }
}

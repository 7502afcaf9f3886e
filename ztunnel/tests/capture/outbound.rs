//! Connections that a pod opens.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::fd::AsRawFd;
use std::time::Duration;

use ebpf::{Counter, Pod};
use socket2::{Domain, Protocol, Socket};

use crate::ground::*;

#[test]
fn a_pods_connection_goes_to_the_proxy_and_names_are_the_apps_own() {
    let ground = Ground::new("out");
    for (dial, mine) in [("10.1.2.3:80", POD.to_string()), ("[fd01::5]:443", POD6.to_string())] {
        let app = ground.connect_from_pod(dial).unwrap();
        assert_eq!(app.peer_addr().unwrap().to_string(), dial);
        assert_eq!(app.local_addr().unwrap().ip().to_string(), mine);
        let (_proxy, original) = ground.accept_outbound();
        assert_eq!(original.unwrap().to_string(), dial);
    }
    // An IPv4-mapped IPv6 socket.
    let mapped = socket(&ground.pod, Domain::IPV6, None);
    let to: SocketAddr = "[::ffff:10.1.2.3]:81".parse().unwrap();
    mapped.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
    let mapped = TcpStream::from(mapped);
    assert_eq!(mapped.peer_addr().unwrap(), to);
    assert_eq!(mapped.local_addr().unwrap().ip(), POD.to_ipv6_mapped());
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:81");
    assert_eq!(ground.capture().counter(Counter::Captured).unwrap(), 3);
    assert_eq!(ground.orig_dst_entries(), 0);
}

#[test]
fn an_app_that_writes_and_closes_before_the_accept_keeps_its_destination() {
    let ground = Ground::new("early");
    let mut app = ground.connect_from_pod("10.1.2.3:80").unwrap();
    app.write_all(b"hello").unwrap();
    drop(app);
    let (mut proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:80");
    let mut text = String::new();
    proxy.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn capture_holds_under_forced_syn_cookies() {
    let ground = Ground::new("cookies");
    sysctl(&ground.pod, "net/ipv4/tcp_syncookies", "2");
    for dial in ["10.1.2.3:80", "[fd01::5]:443"] {
        let _app = ground.connect_from_pod(dial).unwrap();
        assert_eq!(ground.accept_outbound().1.unwrap().to_string(), dial);
    }
}

#[test]
fn loopback_the_pod_itself_and_udp_are_left_alone() {
    let ground = Ground::new("local");
    let app = ground.listen_in_pod("[::]:7000");
    for to in ["127.0.0.1:7000", "127.3.4.5:7000", "0.0.0.0:7000", "10.99.0.2:7000", "[::1]:7000", "[fd99::2]:7000"] {
        let client = ground.connect_from_pod(to).unwrap();
        let (_, from) = app.accept().unwrap();
        assert_eq!(from.port(), client.local_addr().unwrap().port(), "{to}");
    }
    let there = ground.outside.run(|| UdpSocket::bind("10.99.0.1:5000").unwrap()).unwrap();
    let udp = ground.pod.run(|| UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    udp.connect("10.99.0.1:5000").unwrap();
    udp.send(b"x").unwrap();
    there.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    let (_, from) = there.recv_from(&mut [0; 8]).unwrap();
    assert_eq!(from.ip(), POD);
    let inbound = ground.pod.run(|| UdpSocket::bind("10.99.0.2:15006").unwrap()).unwrap();
    there.send_to(b"y", "10.99.0.2:15006").unwrap();
    inbound.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(inbound.recv(&mut [0; 8]).unwrap(), 1);
}

#[test]
fn an_exempt_cgroup_is_not_captured() {
    let ground = Ground::new("exempt");
    let there = ground.listen_outside("10.99.0.1:7000");
    let id = ground.cgroup_id("exempt");
    ground.capture().exempt(id).unwrap();
    assert_eq!(ground.capture().exempted().unwrap(), [id]);
    ground.inside_cgroup("exempt", || ground.connect_from_pod("10.99.0.1:7000")).unwrap();
    assert_eq!(there.accept().unwrap().1.ip(), POD);
    // The exemption is that cgroup's alone, and ends.
    let _app = ground.connect_from_pod("10.99.0.1:7000").unwrap();
    ground.accept_outbound().1.unwrap();
    ground.capture().unexempt(id).unwrap();
    let _app = ground.inside_cgroup("exempt", || ground.connect_from_pod("10.99.0.1:7000")).unwrap();
    ground.accept_outbound().1.unwrap();
    assert_nobody_at(&there);
}

#[test]
fn what_an_app_can_set_on_its_socket_exempts_it_from_nothing() {
    let ground = Ground::new("options");
    let there = ground.listen_outside("10.99.0.1:7000");
    let to: SocketAddr = "10.99.0.1:7000".parse().unwrap();
    for mark in [1, 0x539, u32::MAX] {
        let app = socket(&ground.pod, Domain::IPV4, None);
        app.set_mark(mark).unwrap();
        app.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
        assert_eq!(ground.accept_outbound().1, Some(to));
    }
    let app = socket(&ground.pod, Domain::IPV4, None);
    app.bind_device(Some(b"eth0")).unwrap();
    app.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
    assert_eq!(ground.accept_outbound().1, Some(to));
    let app = socket(&ground.pod, Domain::IPV4, None);
    app.set_ip_transparent_v4(true).unwrap();
    app.bind(&at([10, 77, 0, 1], 0).into()).unwrap();
    let _ = app.connect_timeout(&to.into(), Duration::from_millis(200));
    assert_nobody_at(&there);
}

#[test]
fn link_local_destinations_are_captured_too() {
    let ground = Ground::new("link");
    let link_local = ground.outside.run(|| {
        let out =
            std::process::Command::new("ip").args(["-6", "-br", "addr", "show", "dev", "veth0"]).output().unwrap();
        let text = String::from_utf8(out.stdout).unwrap();
        text.split_whitespace().find(|word| word.starts_with("fe80")).unwrap().split('/').next().unwrap().to_owned()
    });
    let ip: std::net::Ipv6Addr = link_local.unwrap().parse().unwrap();
    let there = ground.listen_outside("[::]:7000");
    let eth0 = ground.pod.run(|| std::fs::read_to_string("/proc/net/if_inet6").unwrap()).unwrap();
    let eth0 = eth0.lines().find(|line| line.ends_with("eth0")).unwrap().split_whitespace().nth(1).unwrap();
    let scope = u32::from_str_radix(eth0, 16).unwrap();
    let to = SocketAddr::V6(std::net::SocketAddrV6::new(ip, 7000, 0, scope));
    let _app = ground.pod.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2))).unwrap();
    let original = ground.accept_outbound().1.unwrap();
    assert_eq!((original.ip(), original.port()), (ip.into(), 7000));
    assert_nobody_at(&there);
}

#[test]
fn fast_open_is_captured() {
    let ground = Ground::new("tfo");
    for (domain, to) in [(Domain::IPV4, "10.1.2.3:80"), (Domain::IPV6, "[fd01::5]:80")] {
        let to: SocketAddr = to.parse().unwrap();
        // TCP_FASTOPEN_CONNECT: the SYN leaves with the first write.
        let deferred = socket(&ground.pod, domain, None);
        set_fast_open_connect(&deferred);
        deferred.connect(&to.into()).unwrap();
        let mut deferred = TcpStream::from(deferred);
        deferred.write_all(b"first").unwrap();
        let (_proxy, original) = ground.accept_outbound();
        assert_eq!(original, Some(to));
        assert_eq!(deferred.peer_addr().unwrap(), to);
        // sendto with MSG_FASTOPEN and no connect at all.
        let sent = socket(&ground.pod, domain, None);
        sent.send_to_with_flags(b"first", &to.into(), libc::MSG_FASTOPEN).unwrap();
        let (_proxy, original) = ground.accept_outbound();
        assert_eq!(original, Some(to));
        assert_eq!(TcpStream::from(sent).peer_addr().unwrap(), to);
    }
}

#[test]
fn mptcp_is_captured_as_tcp_and_its_peer_name_is_the_apps_own() {
    let ground = Ground::new("mptcp");
    let there = ground.listen_outside("[::]:7000");
    for (domain, to) in
        [(Domain::IPV4, "10.99.0.1:7000"), (Domain::IPV6, "[fd99::1]:7000"), (Domain::IPV6, "[::ffff:10.99.0.1]:7000")]
    {
        let to: SocketAddr = to.parse().unwrap();
        let app = socket(&ground.pod, domain, Some(MPTCP));
        app.connect(&to.into()).unwrap();
        let (mut proxy, original) = ground.accept_outbound();
        assert_eq!(original, Some(canonical(to)));
        assert_eq!(app.peer_addr().unwrap().as_socket(), Some(to));
        let mut app = TcpStream::from(app);
        app.write_all(b"hello").unwrap();
        let mut text = [0; 5];
        proxy.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"hello");
    }
    let to: SocketAddr = "10.99.0.1:7000".parse().unwrap();
    let fast = socket(&ground.pod, Domain::IPV4, Some(MPTCP));
    fast.send_to_with_flags(b"first", &to.into(), libc::MSG_FASTOPEN).unwrap();
    assert_eq!(ground.accept_outbound().1, Some(to));
    let waits = socket(&ground.pod, Domain::IPV4, Some(MPTCP));
    waits.set_nonblocking(true).unwrap();
    let _ = waits.connect(&to.into());
    assert_eq!(ground.accept_outbound().1, Some(to));
    assert_nobody_at(&there);
}

#[test]
fn an_address_that_the_agent_does_not_know_is_a_source_like_any_other() {
    let ground = Ground::new("second");
    ip(&ground.pod, "addr add 10.99.7.7/24 dev eth0");
    let to: SocketAddr = "10.1.2.3:80".parse().unwrap();
    let app = socket(&ground.pod, Domain::IPV4, None);
    app.bind(&at([10, 99, 7, 7], 0).into()).unwrap();
    app.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
    let (proxy, original) = ground.accept_outbound();
    assert_eq!(original, Some(to));
    assert_eq!(canonical(proxy.peer_addr().unwrap()).ip().to_string(), "10.99.7.7");
}

#[test]
fn a_neighbours_address_does_not_lead_to_the_neighbours_record() {
    let ground = Ground::new("steal");
    let neighbour = fresh_netns();
    ip(&ground.pod, "addr add 10.99.0.3/24 dev eth0");
    let to: SocketAddr = "10.1.2.3:80".parse().unwrap();
    let app = socket(&ground.pod, Domain::IPV4, None);
    app.bind(&at([10, 99, 0, 3], 0).into()).unwrap();
    app.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
    let (_stream, client) = accept(&ground.pod_listeners().outbound);
    assert_eq!(ground.orig_dst.take(neighbour.cookie(), client).unwrap(), None);
    assert_eq!(ground.orig_dst.take(ground.pod.cookie(), client).unwrap(), Some(to));
}

#[test]
fn a_socket_that_connects_again_shows_its_new_peer() {
    let ground = Ground::new("again");
    let app = ground.listen_in_pod("127.0.0.1:7000");
    // Two captured connections cannot share a source port: the second connect fails after the hook has seen it.
    let first = socket(&ground.pod, Domain::IPV4, None);
    let second = socket(&ground.pod, Domain::IPV4, None);
    for shared in [&first, &second] {
        shared.set_reuse_address(true).unwrap();
        shared.bind(&at([0, 0, 0, 0], 40010).into()).unwrap();
    }
    let dial = |socket: &Socket, to: &str| {
        let to: SocketAddr = to.parse().unwrap();
        socket.connect_timeout(&to.into(), Duration::from_secs(2))
    };
    dial(&first, "10.1.2.3:80").unwrap();
    let error = dial(&second, "10.1.2.4:80").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
    dial(&second, "127.0.0.1:7000").unwrap();
    assert_eq!(second.peer_addr().unwrap().as_socket().unwrap().to_string(), "127.0.0.1:7000");
    app.accept().unwrap();
    assert_eq!(ground.accept_outbound().1.unwrap().to_string(), "10.1.2.3:80");
    assert_eq!(ground.orig_dst_entries(), 0);
}

#[test]
fn a_pod_that_dials_the_capture_ports_itself_is_refused() {
    let ground = Ground::new("self");
    for to in [
        "10.99.0.2:15001",
        "127.0.0.1:15001",
        "[fd99::2]:15001",
        "[::1]:15001",
        "10.99.0.2:15006",
        "127.0.0.1:15006",
        "[fd99::2]:15006",
    ] {
        let error = ground.connect_from_pod(to).expect_err(to);
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}");
    }
    assert_eq!(ground.capture().counter(Counter::CapturePort).unwrap(), 7);
}

#[test]
fn a_family_that_the_pod_lacks_is_unreachable() {
    let ground = Ground::new("family");
    let there = ground.listen_outside("[::]:7000");
    let cookie = ground.pod.cookie();
    ground.capture().set_pod(cookie, &Pod { flags: Pod::HAS_V4, ..ground.record(0) }).unwrap();
    let error = ground.connect_from_pod("[fd99::1]:7000").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable);
    ground.capture().set_pod(cookie, &Pod { flags: Pod::HAS_V6, ..ground.record(0) }).unwrap();
    for to in ["10.99.0.1:7000", "[::ffff:10.99.0.1]:7000"] {
        let error = ground.connect_from_pod(to).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NetworkUnreachable, "{to}");
    }
    assert_eq!(ground.capture().counter(Counter::NoFamily).unwrap(), 3);
    assert_nobody_at(&there);
    // Unless the pod is to fail open.
    ground.capture().set_pod(cookie, &Pod { flags: Pod::HAS_V6 | Pod::FAIL_OPEN, ..ground.record(0) }).unwrap();
    ground.connect_from_pod("10.99.0.1:7000").unwrap();
    there.accept().unwrap();
}

#[test]
fn without_a_listener_a_pod_is_closed_unless_it_fails_open() {
    let mut ground = Ground::new("fail");
    let cookie = ground.pod.cookie();
    let app = ground.listen_in_pod("[::]:7000");
    let there = ground.listen_outside("[::]:7000");
    let open = ground.record(Pod::FAIL_OPEN);
    // To fail open changes nothing as long as there is a proxy.
    ground.capture().set_pod(cookie, &open).unwrap();
    for to in ["10.99.0.1:7000", "[fd99::1]:7000"] {
        let _client = ground.connect_from_pod(to).unwrap();
        assert_eq!(ground.accept_outbound().1.unwrap().to_string(), to);
    }
    ground.assert_steered(&ground.connect_from_outside("10.99.0.2:7000").unwrap());

    // All descriptors of the listeners go, as when proxy and agent are killed.
    ground.listeners = None;
    ground.capture().set_pod(cookie, &ground.record(0)).unwrap();
    for to in ["10.99.0.1:7000", "[fd99::1]:7000"] {
        assert_eq!(ground.connect_from_pod(to).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
    for to in ["10.99.0.2:7000", "[fd99::2]:7000", "10.99.0.2:15008"] {
        assert_eq!(ground.connect_from_outside(to).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    }
    assert_nobody_at(&app);
    assert_nobody_at(&there);
    assert_eq!(ground.capture().counter(Counter::NoListener).unwrap(), 3);

    ground.capture().set_pod(cookie, &open).unwrap();
    for (from_pod, to_pod) in [("10.99.0.1:7000", "10.99.0.2:7000"), ("[fd99::1]:7000", "[fd99::2]:7000")] {
        ground.connect_from_pod(from_pod).unwrap();
        there.accept().unwrap();
        ground.connect_from_outside(to_pod).unwrap();
        app.accept().unwrap();
    }
    assert_eq!(ground.capture().counter(Counter::FailedOpen).unwrap(), 4);
}

#[test]
fn a_probe_is_seen_and_never_sent() {
    let ground = Ground::new("probe");
    let cookie = ground.pod.cookie();
    assert_eq!(ground.capture().probed(cookie).unwrap(), 0);
    for to in ["240.0.0.1:1", "[100::1]:1"] {
        assert_eq!(ground.connect_from_pod(to).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }
    assert_eq!(ground.capture().probed(cookie).unwrap(), 2);
    assert_eq!(ground.capture().counter(Counter::Captured).unwrap(), 0);
}

fn set_fast_open_connect(socket: &Socket) {
    let on: libc::c_int = 1;
    // SAFETY: `on` outlives the call and its size is passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_FASTOPEN_CONNECT,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as u32,
        )
    };
    assert_eq!(result, 0);
}

pub const MPTCP: Protocol = Protocol::MPTCP;

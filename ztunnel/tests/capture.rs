//! The eBPF programs in the kernel, shown by real sockets: this process joins a cgroup of its own, makes network
//! namespaces of its own, and leaves nothing behind. Needs root.

use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use ebpf::{Counter, HBONE_PORT, PLAINTEXT_PORT, Pod};
use ztunnel::capture::listeners::{ListenerPorts, PodListeners};
use ztunnel::capture::maps::{OrigDstMap, PassMap};
use ztunnel::capture::netns::Netns;
use ztunnel::capture::programs::{Capture, CaptureConfig};

/// The process is in one cgroup at a time, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Ground {
    capture: Option<Capture>,
    config: CaptureConfig,
    cgroup: PathBuf,
    home: PathBuf,
    pod: Netns,
    pod_listeners: PodListeners,
    outside: Netns,
    orig_dst: OrigDstMap,
    pass: PassMap,
    _turn: std::sync::MutexGuard<'static, ()>,
}

const POD: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const POD6: &str = "fd99::2";
const OUTSIDE6: &str = "fd99::1";

impl Ground {
    /// A pod and an outside joined by a veth pair; the pod is captured.
    fn new(name: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        let unique = format!("us-capture-{name}-{}", std::process::id());
        let root = ztunnel_cgroup2();
        let home = root.join(own_cgroup().trim_start_matches('/'));
        let cgroup = root.join(&unique);
        fs::create_dir_all(cgroup.join("app")).expect("needs root");
        fs::write(cgroup.join("app/cgroup.procs"), "0").unwrap();
        let config = CaptureConfig::new(PathBuf::from(format!("/sys/fs/bpf/{unique}")), cgroup.clone());
        let pod = fresh_netns();
        let outside = fresh_netns();
        join(&pod, &outside);
        let capture = Capture::open(config.clone()).unwrap();
        let pod_listeners = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
        let cookie = pod.cookie();
        capture.set_pod(cookie, &Pod { v4: POD.octets(), v6: ip6(POD6), flags: Pod::HAS_V4 | Pod::HAS_V6 }).unwrap();
        capture.set_pod_ip(POD.into(), cookie).unwrap();
        capture.set_listener(cookie, PLAINTEXT_PORT, pod_listeners.plaintext.as_fd()).unwrap();
        capture.set_listener(cookie, HBONE_PORT, pod_listeners.hbone.as_fd()).unwrap();
        capture.attach_inbound(pod.as_fd(), cookie).unwrap();
        let fds = capture.map_fds().unwrap();
        Self {
            capture: Some(capture),
            config,
            cgroup,
            home,
            pod,
            pod_listeners,
            outside,
            orig_dst: OrigDstMap::new(fds.orig_dst).unwrap(),
            pass: PassMap::new(fds.pass).unwrap(),
            _turn: turn,
        }
    }

    fn capture(&self) -> &Capture {
        self.capture.as_ref().unwrap()
    }

    fn connect_from_pod(&self, to: &str) -> io::Result<TcpStream> {
        let to: SocketAddr = to.parse().unwrap();
        self.pod.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2))).unwrap()
    }

    fn connect_from_outside(&self, to: &str) -> io::Result<TcpStream> {
        let to: SocketAddr = to.parse().unwrap();
        self.outside.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2))).unwrap()
    }

    /// What the proxy does with a connection that the outbound listener accepted.
    fn accept_outbound(&self) -> (TcpStream, Option<SocketAddr>) {
        let (stream, client) = accept(&self.pod_listeners.outbound);
        (stream, self.orig_dst.take(self.pod.cookie(), client).unwrap())
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = fs::write(self.home.join("cgroup.procs"), "0");
        self.capture = None;
        let _ = Capture::remove_all(&self.config.bpf_dir);
        let _ = fs::remove_dir(self.cgroup.join("exempt"));
        let _ = fs::remove_dir(self.cgroup.join("app"));
        let _ = fs::remove_dir(&self.cgroup);
    }
}

fn accept(listener: &std::os::fd::OwnedFd) -> (TcpStream, SocketAddr) {
    let listener = TcpListener::from(listener.try_clone().unwrap());
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    loop {
        match listener.accept() {
            Ok((stream, client)) => {
                stream.set_nonblocking(false).unwrap();
                return (stream, client);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock && std::time::Instant::now() < deadline => {
                std::thread::yield_now();
            }
            Err(e) => panic!("nothing to accept: {e}"),
        }
    }
}

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
    let mapped = ground.pod.run(|| {
        let socket = socket2::Socket::new(socket2::Domain::IPV6, socket2::Type::STREAM, None).unwrap();
        let to: SocketAddr = "[::ffff:10.1.2.3]:81".parse().unwrap();
        socket.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
        TcpStream::from(socket)
    });
    let mapped = mapped.unwrap();
    assert_eq!(mapped.peer_addr().unwrap().to_string(), "[::ffff:10.1.2.3]:81");
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:81");
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
fn loopback_the_pod_itself_and_udp_are_left_alone() {
    let ground = Ground::new("local");
    let app = ground.pod.run(|| TcpListener::bind("[::]:7000").unwrap()).unwrap();
    for to in ["127.0.0.1:7000", "10.99.0.2:7000", "[::1]:7000", "[fd99::2]:7000"] {
        let client = ground.connect_from_pod(to).unwrap();
        let (_, from) = app.accept().unwrap();
        assert_eq!(from.port(), client.local_addr().unwrap().port(), "{to}");
    }
    let udp = ground.pod.run(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
    let there = ground.outside.run(|| std::net::UdpSocket::bind("10.99.0.1:5000").unwrap()).unwrap();
    udp.connect("10.99.0.1:5000").unwrap();
    udp.send(b"x").unwrap();
    there.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(there.recv(&mut [0; 8]).unwrap(), 1);
}

#[test]
fn an_exempt_cgroup_is_not_captured() {
    let ground = Ground::new("exempt");
    let there = ground.outside.run(|| TcpListener::bind("10.99.0.1:7000").unwrap()).unwrap();
    let exempt = ground.cgroup.join("exempt");
    fs::create_dir_all(&exempt).unwrap();
    use std::os::unix::fs::MetadataExt;
    ground.capture().exempt(fs::metadata(&exempt).unwrap().ino()).unwrap();
    fs::write(exempt.join("cgroup.procs"), "0").unwrap();
    let direct = ground.connect_from_pod("10.99.0.1:7000");
    fs::write(ground.cgroup.join("app/cgroup.procs"), "0").unwrap();
    direct.unwrap();
    assert_eq!(there.accept().unwrap().1.ip(), POD);
}

#[test]
fn mptcp_is_refused_and_fast_open_is_captured() {
    let ground = Ground::new("mptcp");
    let refused = ground
        .pod
        .run(|| {
            let mptcp = socket2::Protocol::from(262);
            socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, Some(mptcp)).err()
        })
        .unwrap();
    assert_eq!(refused.map(|e| e.kind()), Some(io::ErrorKind::PermissionDenied));
    assert_eq!(ground.capture().counter(Counter::Refused).unwrap(), 1);

    let to: SocketAddr = "10.1.2.3:80".parse().unwrap();
    // TCP_FASTOPEN_CONNECT: the SYN leaves with the first write.
    let deferred = ground.pod.run(|| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        set_fast_open_connect(&socket);
        socket.connect(&to.into()).unwrap();
        let mut stream = TcpStream::from(socket);
        stream.write_all(b"first").unwrap();
        stream
    });
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original, Some(to));
    assert_eq!(deferred.unwrap().peer_addr().unwrap(), to);
    // sendto with MSG_FASTOPEN and no connect at all.
    let sent = ground.pod.run(|| {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.send_to_with_flags(b"first", &to.into(), libc::MSG_FASTOPEN).map(|_| socket)
    });
    let sent = TcpStream::from(sent.unwrap().unwrap());
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original, Some(to));
    assert_eq!(sent.peer_addr().unwrap(), to);
}

#[test]
fn what_comes_to_a_pod_goes_to_its_listeners() {
    let ground = Ground::new("in");
    for to in ["10.99.0.2:7000", "[fd99::2]:7001"] {
        let client = ground.connect_from_outside(to).unwrap();
        let (stream, from) = accept(&ground.pod_listeners.plaintext);
        assert_eq!(canonical(stream.local_addr().unwrap()).to_string(), to);
        assert_eq!(canonical(from), client.local_addr().unwrap());
    }
    let _tunnel = ground.connect_from_outside("10.99.0.2:15008").unwrap();
    let (stream, _) = accept(&ground.pod_listeners.hbone);
    assert_eq!(canonical(stream.local_addr().unwrap()).to_string(), "10.99.0.2:15008");
    for to in ["10.99.0.2:15001", "10.99.0.2:15006", "[fd99::2]:15006"] {
        let error = ground.connect_from_outside(to).expect_err(to);
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused, "{to}");
    }
}

#[test]
fn only_the_proxys_own_dial_passes_to_the_app() {
    let ground = Ground::new("pass");
    let app = ground.pod.run(|| TcpListener::bind("10.99.0.2:7000").unwrap()).unwrap();
    let dial = |port: u16| {
        let from = SocketAddr::new(OUTSIDE.into(), port);
        ground
            .outside
            .run(|| {
                let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
                socket.bind(&from.into()).unwrap();
                let to: SocketAddr = "10.99.0.2:7000".parse().unwrap();
                socket.connect_timeout(&to.into(), Duration::from_secs(2)).unwrap();
                TcpStream::from(socket)
            })
            .unwrap()
    };
    let remote = SocketAddr::new(OUTSIDE.into(), 40001);
    let local = "10.99.0.2:7000".parse().unwrap();
    ground.pass.insert(ground.pod.cookie(), remote, local).unwrap();
    let _passed = dial(40001);
    assert_eq!(app.accept().unwrap().1, remote);
    ground.pass.remove(ground.pod.cookie(), remote, local).unwrap();
    let _captured = dial(40002);
    assert_eq!(canonical(accept(&ground.pod_listeners.plaintext).1).port(), 40002);
    // An entry of another pod opens nothing here.
    ground.pass.insert(ground.outside.cookie(), SocketAddr::new(OUTSIDE.into(), 40003), local).unwrap();
    let _captured = dial(40003);
    assert_eq!(canonical(accept(&ground.pod_listeners.plaintext).1).port(), 40003);
}

#[test]
fn a_host_process_reaches_the_app_and_a_host_network_pod_does_not() {
    let ground = Ground::new("host");
    use std::os::unix::fs::MetadataExt;
    let app = ground.pod.run(|| TcpListener::bind("[::]:7000").unwrap()).unwrap();
    let kubepods = ground.cgroup.join("kubepods");
    fs::create_dir_all(kubepods.join("pod1")).unwrap();
    let node = ebpf::Node {
        netns: ground.outside.cookie(),
        kubepods: fs::metadata(&kubepods).unwrap().ino(),
        kubepods_level: 2,
        _pad: 0,
    };
    ground.capture().set_node(&node).unwrap();
    let probe = ground.connect_from_outside("10.99.0.2:7000").unwrap();
    assert_eq!(canonical(app.accept().unwrap().1), probe.local_addr().unwrap());
    fs::write(kubepods.join("pod1/cgroup.procs"), "0").unwrap();
    let client = ground.connect_from_outside("10.99.0.2:7000").unwrap();
    fs::write(ground.cgroup.join("app/cgroup.procs"), "0").unwrap();
    fs::remove_dir(kubepods.join("pod1")).unwrap();
    fs::remove_dir(&kubepods).unwrap();
    assert_eq!(canonical(accept(&ground.pod_listeners.plaintext).1), client.local_addr().unwrap());
}

#[test]
fn without_a_listener_a_pod_is_closed_unless_it_fails_open() {
    let mut ground = Ground::new("fail");
    let app = ground.pod.run(|| TcpListener::bind("10.99.0.2:7000").unwrap()).unwrap();
    let there = ground.outside.run(|| TcpListener::bind("10.99.0.1:7000").unwrap()).unwrap();
    // All descriptors of the listeners go, as when proxy and agent are killed.
    let other = PodListeners::open(&ground.outside, &ListenerPorts { outbound: 1, plaintext: 2, hbone: 3 }).unwrap();
    drop(std::mem::replace(&mut ground.pod_listeners, other));
    assert_eq!(ground.connect_from_outside("10.99.0.2:7000").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(ground.connect_from_pod("10.99.0.1:7000").unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
    let pod = ground.capture().pod(ground.pod.cookie()).unwrap().unwrap();
    ground.capture().set_pod(ground.pod.cookie(), &Pod { flags: pod.flags | Pod::FAIL_OPEN, ..pod }).unwrap();
    ground.connect_from_outside("10.99.0.2:7000").unwrap();
    app.accept().unwrap();
    ground.connect_from_pod("10.99.0.1:7000").unwrap();
    there.accept().unwrap();
}

#[test]
fn a_family_that_the_pod_lacks_is_refused_not_passed() {
    let ground = Ground::new("family");
    let there = ground.outside.run(|| TcpListener::bind("[fd99::1]:7000").unwrap()).unwrap();
    there.set_nonblocking(true).unwrap();
    ground.capture().set_pod(ground.pod.cookie(), &Pod { v4: POD.octets(), v6: [0; 16], flags: Pod::HAS_V4 }).unwrap();
    let error = ground.connect_from_pod("[fd99::1]:7000").unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(there.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_probe_is_seen_and_never_sent() {
    let ground = Ground::new("probe");
    let cookie = ground.pod.cookie();
    assert_eq!(ground.capture().probed(cookie).unwrap(), 0);
    assert!(ground.connect_from_pod("240.0.0.1:1").is_err());
    assert!(ground.connect_from_pod("[100::1]:1").is_err());
    assert_eq!(ground.capture().probed(cookie).unwrap(), 2);
}

#[test]
fn capture_outlives_its_owner_and_a_successor_adopts_it() {
    let mut ground = Ground::new("adopt");
    ground.capture = None;
    let app = ground.connect_from_pod("10.1.2.3:80").unwrap();
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:80");
    // A crash of the predecessor between pinning and renaming.
    let links = ground.config.bpf_dir.join(format!("v{}/links", ebpf::LAYOUT_VERSION));
    fs::rename(links.join("us_connect4"), links.join("new-us_connect4")).unwrap();
    ground.capture = Some(Capture::open(ground.config.clone()).unwrap());
    assert_eq!(ground.capture().pods().unwrap(), [ground.pod.cookie()]);
    assert_eq!(ground.capture().inbound_links().unwrap(), [ground.pod.cookie()]);
    assert_eq!(app.peer_addr().unwrap().to_string(), "10.1.2.3:80");
    let _again = ground.connect_from_pod("10.1.2.4:80").unwrap();
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.4:80");
    let names: Vec<_> = fs::read_dir(&links).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert!(names.iter().all(|n| !n.to_string_lossy().starts_with("new-")), "{names:?}");
}

#[test]
fn a_released_pod_is_as_before() {
    let ground = Ground::new("release");
    let cookie = ground.pod.cookie();
    ground.capture().detach_inbound(cookie).unwrap();
    ground.capture().remove_pod(cookie).unwrap();
    ground.capture().clear_listeners(cookie).unwrap();
    ground.capture().remove_pod_ip(POD.into(), cookie).unwrap();
    let app = ground.pod.run(|| TcpListener::bind("10.99.0.2:7000").unwrap()).unwrap();
    ground.connect_from_outside("10.99.0.2:7000").unwrap();
    app.accept().unwrap();
    let there = ground.outside.run(|| TcpListener::bind("10.99.0.1:7000").unwrap()).unwrap();
    ground.connect_from_pod("10.99.0.1:7000").unwrap();
    assert_eq!(there.accept().unwrap().1.ip(), POD);
    for (name, entries, _) in ground.capture().fill().unwrap() {
        assert_eq!(entries, 0, "{name}");
    }
    assert!(ground.capture().inbound_links().unwrap().is_empty());
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn ip6(text: &str) -> [u8; 16] {
    text.parse::<std::net::Ipv6Addr>().unwrap().octets()
}

fn set_fast_open_connect(socket: &socket2::Socket) {
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

fn fresh_netns() -> Netns {
    std::thread::spawn(|| {
        // SAFETY: only this short-lived thread's network namespace changes.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.expect("needs root");
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

/// A veth pair between the two, with addresses and routes.
fn join(pod: &Netns, outside: &Netns) {
    let (pod_fd, outside_fd) = (pod.as_fd().as_raw_fd(), outside.as_fd().as_raw_fd());
    let parent = std::process::id();
    let ip = |netns: &Netns, args: &str| {
        let status = netns.run(|| Command::new("ip").args(args.split(' ')).status().unwrap()).unwrap();
        assert!(status.success(), "ip {args}");
    };
    ip(outside, "link set lo up");
    ip(pod, "link set lo up");
    ip(outside, &format!("link add veth0 type veth peer name eth0 netns /proc/{parent}/fd/{pod_fd}"));
    let _ = outside_fd;
    for (netns, link, v4, v6) in
        [(outside, "veth0", OUTSIDE.to_string(), OUTSIDE6), (pod, "eth0", POD.to_string(), POD6)]
    {
        ip(netns, &format!("addr add {v4}/24 dev {link}"));
        ip(netns, &format!("addr add {v6}/64 dev {link} nodad"));
        ip(netns, &format!("link set {link} up"));
    }
    ip(pod, &format!("route add default via {OUTSIDE}"));
    ip(pod, &format!("-6 route add default via {OUTSIDE6}"));
}

fn own_cgroup() -> String {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    text.lines().find_map(|l| l.strip_prefix("0::")).unwrap().to_owned()
}

fn ztunnel_cgroup2() -> PathBuf {
    ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        .into_iter()
        .map(PathBuf::from)
        .find(|p| p.join("cgroup.procs").exists())
        .expect("cgroup v2 is mounted nowhere")
}

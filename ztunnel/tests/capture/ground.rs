//! A pod and an outside, joined by a veth pair, in network namespaces and a cgroup of this process's own.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ebpf::{HBONE_PORT, PLAINTEXT_PORT, Pod};
use socket2::{Domain, Protocol, Socket, Type};
use ztunnel::capture::bpf::{BpfMap, Plain, open_pin};
use ztunnel::capture::listeners::{ListenerPorts, PodListeners};
use ztunnel::capture::maps::{OrigDstMap, PassMap};
use ztunnel::capture::netns::Netns;
use ztunnel::capture::programs::{Capture, CaptureConfig};

/// The process is in one cgroup at a time, so tests take turns.
static TURN: Mutex<()> = Mutex::new(());

pub struct Ground {
    pub capture: Option<Capture>,
    pub config: CaptureConfig,
    pub cgroup: PathBuf,
    pub pod: Netns,
    pub listeners: Option<PodListeners>,
    pub outside: Netns,
    pub orig_dst: OrigDstMap,
    pub pass: PassMap,
    home: PathBuf,
    _turn: MutexGuard<'static, ()>,
}

pub const POD: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
pub const OUTSIDE: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
pub const POD6: &str = "fd99::2";
pub const OUTSIDE6: &str = "fd99::1";

impl Ground {
    /// The pod is captured.
    pub fn new(name: &str) -> Self {
        let turn = TURN.lock().unwrap_or_else(|e| e.into_inner());
        assert!(rustix::process::geteuid().is_root(), "this test makes namespaces and loads programs: run it as root");
        let root = cgroup2();
        sweep(&root);
        let unique = format!("{PREFIX}{name}-{}", std::process::id());
        let home = root.join(own_cgroup().trim_start_matches('/'));
        let cgroup = root.join(&unique);
        fs::create_dir_all(cgroup.join("app")).unwrap();
        fs::write(cgroup.join("app/cgroup.procs"), "0").unwrap();
        let config = CaptureConfig::new(PathBuf::from(format!("/sys/fs/bpf/{unique}")), cgroup.clone());
        let (pod, outside) = (fresh_netns(), fresh_netns());
        join(&pod, &outside);
        let capture = Capture::open(config.clone()).unwrap();
        let fds = capture.map_fds().unwrap();
        let mut ground = Self {
            capture: Some(capture),
            config,
            cgroup,
            home,
            pod,
            listeners: None,
            outside,
            orig_dst: OrigDstMap::new(fds.orig_dst).unwrap(),
            pass: PassMap::new(fds.pass).unwrap(),
            _turn: turn,
        };
        ground.enrol();
        ground
    }

    pub fn capture(&self) -> &Capture {
        self.capture.as_ref().unwrap()
    }

    /// What the agent does for a pod.
    pub fn enrol(&mut self) {
        let listeners = PodListeners::open(&self.pod, &ListenerPorts::default()).unwrap();
        let (capture, cookie) = (self.capture(), self.pod.cookie());
        capture.set_pod(cookie, &self.record(0)).unwrap();
        capture.set_pod_ip(POD.into(), cookie).unwrap();
        capture.set_pod_ip(POD6.parse().unwrap(), cookie).unwrap();
        capture.set_listener(cookie, PLAINTEXT_PORT, listeners.plaintext.as_fd()).unwrap();
        capture.set_listener(cookie, HBONE_PORT, listeners.hbone.as_fd()).unwrap();
        capture.attach_inbound(self.pod.as_fd(), cookie).unwrap();
        self.listeners = Some(listeners);
    }

    /// What the agent does when a pod leaves.
    pub fn release(&mut self) {
        let (capture, cookie) = (self.capture(), self.pod.cookie());
        capture.detach_inbound(cookie).unwrap();
        capture.remove_pod(cookie).unwrap();
        capture.clear_listeners(cookie).unwrap();
        capture.remove_pod_ip(POD.into(), cookie).unwrap();
        capture.remove_pod_ip(POD6.parse().unwrap(), cookie).unwrap();
        self.listeners = None;
    }

    pub fn orig_dst_entries(&self) -> usize {
        self.map::<ebpf::ConnKey, ebpf::Endpoint>("ORIG_DST").entries().unwrap()
    }

    pub fn host_conns(&self) -> usize {
        self.map::<ebpf::Tuple, u64>("HOST_CONNS").entries().unwrap()
    }

    /// The pod's record, with both families and these flags.
    pub fn record(&self, flags: u32) -> Pod {
        Pod { v4: POD.octets(), v6: ip6(POD6), flags: Pod::HAS_V4 | Pod::HAS_V6 | flags }
    }

    pub fn connect_from_pod(&self, to: &str) -> io::Result<TcpStream> {
        connect(&self.pod, to)
    }

    pub fn connect_from_outside(&self, to: &str) -> io::Result<TcpStream> {
        connect(&self.outside, to)
    }

    pub fn listen_in_pod(&self, at: &str) -> TcpListener {
        self.pod.run(|| TcpListener::bind(at).unwrap()).unwrap()
    }

    pub fn listen_outside(&self, at: &str) -> TcpListener {
        self.outside.run(|| TcpListener::bind(at).unwrap()).unwrap()
    }

    pub fn pod_listeners(&self) -> &PodListeners {
        self.listeners.as_ref().unwrap()
    }

    /// What the proxy does with a connection that the outbound listener accepted.
    pub fn accept_outbound(&self) -> (TcpStream, Option<SocketAddr>) {
        let (stream, client) = accept(&self.pod_listeners().outbound);
        (stream, self.orig_dst.take(self.pod.cookie(), client).unwrap())
    }

    /// The plaintext listener has accepted the connection that `client` opened.
    pub fn assert_steered(&self, client: &TcpStream) {
        let (stream, from) = accept(&self.pod_listeners().plaintext);
        assert_eq!(canonical(from), canonical(client.local_addr().unwrap()));
        assert_eq!(canonical(stream.local_addr().unwrap()), canonical(client.peer_addr().unwrap()));
    }

    /// Runs `work` with this process in another cgroup below the ground's.
    pub fn inside_cgroup<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let cgroup = self.cgroup.join(name);
        fs::create_dir_all(&cgroup).unwrap();
        fs::write(cgroup.join("cgroup.procs"), "0").unwrap();
        let done = work();
        fs::write(self.cgroup.join("app/cgroup.procs"), "0").unwrap();
        done
    }

    pub fn cgroup_id(&self, name: &str) -> u64 {
        fs::create_dir_all(self.cgroup.join(name)).unwrap();
        fs::metadata(self.cgroup.join(name)).unwrap().ino()
    }

    pub fn pins(&self) -> PathBuf {
        self.config.bpf_dir.join(format!("v{}", ebpf::LAYOUT_VERSION))
    }

    pub fn map<K: Plain, V: Plain>(&self, name: &str) -> BpfMap<K, V> {
        BpfMap::open(&self.pins().join("maps").join(name)).unwrap()
    }

    /// Each link's pin with the kernel's numbers of link and program.
    pub fn links(&self) -> Vec<(String, u32, u32)> {
        let dir = self.pins().join("links");
        let names = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut links: Vec<_> = names
            .map(|name| {
                let link = open_pin(&dir.join(&name)).unwrap();
                let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", link.as_raw_fd())).unwrap();
                let number = |field: &str| {
                    let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
                    line.trim().parse().unwrap()
                };
                (name, number("link_id:"), number("prog_id:"))
            })
            .collect();
        links.sort();
        links
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        let _ = fs::write(self.home.join("cgroup.procs"), "0");
        self.capture = None;
        let _ = Capture::remove_all(&self.config.bpf_dir);
        remove_cgroup(&self.cgroup);
    }
}

pub fn connect(netns: &Netns, to: &str) -> io::Result<TcpStream> {
    let to: SocketAddr = to.parse().unwrap();
    netns.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(2))).unwrap()
}

pub fn accept(listener: &OwnedFd) -> (TcpStream, SocketAddr) {
    let listener = TcpListener::from(listener.try_clone().unwrap());
    let accepted = wait("a connection to accept", || match listener.accept() {
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => None,
        accepted => Some(accepted.unwrap()),
    });
    accepted.0.set_nonblocking(false).unwrap();
    accepted
}

/// Nobody waits to be accepted, of those who have connected by now.
pub fn assert_nobody_at(listener: &TcpListener) {
    listener.set_nonblocking(true).unwrap();
    assert_eq!(listener.accept().map(|(_, from)| from).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    listener.set_nonblocking(false).unwrap();
}

pub fn wait<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match ready() {
            Some(value) => return value,
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
            None => panic!("waited in vain for {what}"),
        }
    }
}

/// A socket made in this netns.
pub fn socket(netns: &Netns, domain: Domain, protocol: Option<Protocol>) -> Socket {
    netns.run(|| Socket::new(domain, Type::STREAM, protocol).unwrap()).unwrap()
}

pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

pub fn ip6(text: &str) -> [u8; 16] {
    text.parse::<Ipv6Addr>().unwrap().octets()
}

pub fn at(ip: impl Into<IpAddr>, port: u16) -> SocketAddr {
    SocketAddr::new(ip.into(), port)
}

pub fn fresh_netns() -> Netns {
    std::thread::spawn(|| {
        // SAFETY: only this short-lived thread's network namespace changes.
        unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }.unwrap();
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

pub fn ip(netns: &Netns, args: &str) {
    let status = netns.run(|| Command::new("ip").args(args.split(' ')).status().unwrap()).unwrap();
    assert!(status.success(), "ip {args}");
}

/// Sets a sysctl of the netns, for example `net/ipv4/tcp_syncookies`.
pub fn sysctl(netns: &Netns, name: &str, value: &str) {
    netns.run(|| fs::write(Path::new("/proc/sys").join(name), value).unwrap()).unwrap();
}

/// A veth pair between the two, with addresses and routes.
fn join(pod: &Netns, outside: &Netns) {
    ip(outside, "link set lo up");
    ip(pod, "link set lo up");
    let pod_netns = format!("/proc/{}/fd/{}", std::process::id(), pod.as_fd().as_raw_fd());
    ip(outside, &format!("link add veth0 type veth peer name eth0 netns {pod_netns}"));
    for (netns, link, v4, v6) in [(outside, "veth0", OUTSIDE, OUTSIDE6), (pod, "eth0", POD, POD6)] {
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

fn cgroup2() -> PathBuf {
    ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
        .into_iter()
        .map(PathBuf::from)
        .find(|p| p.join("cgroup.procs").exists())
        .expect("cgroup v2 is mounted nowhere")
}

/// Removes what runs that were killed have left.
fn sweep(cgroups: &Path) {
    for place in [cgroups, Path::new("/sys/fs/bpf")] {
        for entry in fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap_or_default();
            let owner = name.strip_prefix(PREFIX).and_then(|n| n.rsplit_once('-'));
            if owner.is_some_and(|(_, pid)| !Path::new("/proc").join(pid).exists()) {
                let _ = Capture::remove_all(&Path::new("/sys/fs/bpf").join(&name));
                remove_cgroup(&cgroups.join(&name));
            }
        }
    }
}

fn remove_cgroup(path: &Path) {
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_cgroup(&entry.path());
        }
    }
    let _ = fs::remove_dir(path);
}

const PREFIX: &str = "us-capture-";

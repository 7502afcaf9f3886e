//! A node and its pods out of real namespaces and cgroups, the real agent as a process, and a proxy that the test
//! plays. Everything has a name of its own and goes at the end.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::thread::{UnshareFlags, unshare_unsafe};
use ztunnel::capture::listeners::{ListenerPorts, PodListeners};
use ztunnel::capture::netns::Netns;
use ztunnel::capture::programs::Capture;
use ztunnel::zds::{AddedPod, CaptureMapFds, Client, ClientConfig, DrainState, PodManager, Removal};

pub const NODE: &str = "node-a";

/// One node.
pub struct Ground {
    pub name: String,
    pub folder: PathBuf,
    pub cgroup: PathBuf,
    pub bpf: PathBuf,
    pub netns: Arc<Netns>,
    pub flags: Vec<String>,
    agent: Option<Child>,
    pods: u32,
    _outside: Vec<OwnedFd>,
}

/// One pod: a namespace joined to the node, with a process in kubelet's cgroup.
pub struct Pod {
    pub name: String,
    pub uid: String,
    pub number: u32,
    pub netns: Option<Netns>,
    pub leader: Child,
    pub cgroup: PathBuf,
}

impl Ground {
    pub fn new(name: &str) -> Ground {
        let name = format!("us-agent-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(&name);
        for sub in ["manifests", "status", "run"] {
            fs::create_dir_all(folder.join(sub)).unwrap();
        }
        let cgroup = cgroup2().join(&name);
        fs::create_dir_all(cgroup.join("kubepods/burstable")).expect("these tests need root");
        let netns = Arc::new(fresh_netns());
        ip(&netns, "link set lo up");
        let bpf = PathBuf::from("/sys/fs/bpf").join(&name);
        // No waits of the field's length where a test waits for their end.
        let flags =
            ["--verify-interval", "300ms", "--follow-timeout", "2s", "--drain-timeout", "5s", "--retry-max", "1s"];
        let flags = flags.map(str::to_owned).to_vec();
        Ground { name, folder, cgroup, bpf, netns, flags, agent: None, pods: 0, _outside: Vec::new() }
    }

    /// A cgroup beside the node's.
    pub fn elsewhere(&self) -> PathBuf {
        self.cgroup.with_file_name(format!("{}-elsewhere", self.name))
    }

    pub fn manifests(&self) -> PathBuf {
        self.folder.join("manifests")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.join("run/zds.sock")
    }

    /// Labels the namespace "shop", or takes the label away.
    pub fn label(&self, ambient: bool) {
        let labels = if ambient { "istio.io/dataplane-mode: ambient" } else { "" };
        let text = format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: shop, labels: {{{labels}}}}}\n");
        self.write("shop.yaml", &text);
    }

    pub fn write(&self, file: &str, text: &str) {
        let hidden = self.manifests().join(format!(".{file}"));
        fs::write(&hidden, text).unwrap();
        fs::rename(hidden, self.manifests().join(file)).unwrap();
    }

    pub fn start_agent(&mut self) {
        assert!(self.agent.is_none());
        let mut command = Command::new(env!("CARGO_BIN_EXE_ztunnel"));
        command.arg("agent").args(["--node-name", NODE]);
        command.arg("--manifests").arg(self.manifests()).arg("--status-dir").arg(self.folder.join("status"));
        command.arg("--run-dir").arg(self.folder.join("run")).arg("--bpf-dir").arg(&self.bpf);
        command.arg("--zds-socket").arg(self.socket()).arg("--cgroup-root").arg(&self.cgroup);
        command.args(["--admin-addr", "127.0.0.1:15014"]).args(&self.flags);
        command.env_remove("RUST_LOG").stdin(Stdio::null());
        let log = fs::OpenOptions::new().create(true).append(true).open(self.folder.join("agent.log")).unwrap();
        command.stdout(log.try_clone().unwrap()).stderr(log);
        self.agent = Some(self.netns.run(|| command.spawn().unwrap()).unwrap());
        wait("the agent is ready", || self.get("/readyz").is_some_and(|text| text.trim() == "ready"));
    }

    /// `kill -9`, or SIGTERM.
    pub fn stop_agent(&mut self, kill: bool) {
        let mut agent = self.agent.take().unwrap();
        if kill {
            agent.kill().unwrap();
        } else {
            let pid = rustix::process::Pid::from_child(&agent);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        }
        let status = agent.wait().unwrap();
        assert!(kill || status.success(), "the agent ended with {status}");
    }

    pub fn agent_pid(&self) -> u32 {
        self.agent.as_ref().unwrap().id()
    }

    /// The body of one of the agent's pages, if it answers with success.
    pub fn get(&self, path: &str) -> Option<String> {
        let mut stream = self.netns.run(|| TcpStream::connect("127.0.0.1:15014")).unwrap().ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        write!(stream, "GET {path} HTTP/1.0\r\nhost: agent\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        head.starts_with("HTTP/1.0 200").then(|| body.to_owned())
    }

    /// A pod's line of `/status`.
    pub fn status(&self, pod: &Pod) -> serde_json::Value {
        let all: serde_json::Value =
            self.get("/status").and_then(|text| serde_json::from_str(&text).ok()).unwrap_or_default();
        let found = all.as_array().into_iter().flatten().find(|view| view["uid"] == pod.uid.as_str());
        found.cloned().unwrap_or_default()
    }

    pub fn wait_state(&self, pod: &Pod, state: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.status(pod)["state"] != state {
            assert!(
                Instant::now() < deadline,
                "{} is not {state:?} but {}\n{}",
                pod.name,
                self.status(pod),
                self.log()
            );
            std::thread::sleep(TICK);
        }
    }

    pub fn metric(&self, line: &str) -> f64 {
        let text = self.get("/metrics").unwrap_or_default();
        let value = text.lines().find_map(|found| found.strip_prefix(line)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("agent.log")).unwrap_or_default()
    }

    pub fn status_file(&self, pod: &Pod) -> Option<String> {
        fs::read_to_string(self.folder.join("status").join(format!("{}.yaml", pod.uid))).ok()
    }

    pub fn is_enabled(&self, pod: &Pod) -> bool {
        self.status_file(pod).is_some_and(|text| text.contains("redirection: enabled"))
    }

    /// Makes a pod and its object.
    pub fn pod(&mut self, name: &str) -> Pod {
        let pod = self.pod_without_object(name, true);
        self.write_pod(&pod, "");
        pod
    }

    pub fn pod_without_object(&mut self, name: &str, v6: bool) -> Pod {
        self.pods += 1;
        let number = self.pods;
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let (process, pod) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let uid = format!("00000000-0000-4000-8000-{process:08x}{pod:04x}");
        let netns = fresh_netns();
        let cgroup = self.cgroup.join(format!("kubepods/burstable/pod{uid}/container"));
        fs::create_dir_all(&cgroup).unwrap();
        let leader = self.furnish(&netns, number, v6, &cgroup);
        Pod { name: name.to_owned(), uid, number, netns: Some(netns), leader, cgroup }
    }

    /// Joins a namespace to the node, and starts a process in it.
    pub fn furnish(&self, netns: &Netns, number: u32, v6: bool, cgroup: &Path) -> Child {
        let mut pause = netns.run(sleeper).unwrap();
        let pid = pause.id();
        ip(&self.netns, &format!("link add v{number} type veth peer name eth0 netns {pid}"));
        for (netns, device, host) in [(&*self.netns, format!("v{number}"), 1), (netns, "eth0".into(), 2)] {
            ip(netns, &format!("addr add 10.88.{number}.{host}/24 dev {device}"));
            if v6 {
                ip(netns, &format!("addr add fd88:{number}::{host}/64 dev {device} nodad"));
            }
            ip(netns, &format!("link set {device} up"));
        }
        ip(netns, "link set lo up");
        ip(netns, &format!("route add default via 10.88.{number}.1"));
        if let Err(error) = fs::write(cgroup.join("cgroup.procs"), pid.to_string()) {
            pause.kill().unwrap();
            panic!("move {pid} to {}: {error}", cgroup.display());
        }
        pause
    }

    /// Writes the pod's object; `meta` is put into its metadata.
    pub fn write_pod(&self, pod: &Pod, meta: &str) {
        self.write_pod_as(pod, pod.number, meta);
    }

    /// The same with the addresses of another pod.
    pub fn write_pod_as(&self, pod: &Pod, number: u32, meta: &str) {
        let (name, uid) = (&pod.name, &pod.uid);
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, namespace: shop, uid: {uid}{meta}}}\n\
             spec: {{nodeName: {NODE}, serviceAccountName: cart, containers: [{{name: c}}]}}\n\
             status: {{phase: Running, podIP: 10.88.{number}.2, podIPs: [{{ip: 10.88.{number}.2}}, {{ip: 'fd88:{number}::2'}}]}}\n"
        );
        self.write(&format!("{name}.yaml"), &text);
    }

    pub fn delete_object(&self, pod: &Pod) {
        fs::remove_file(self.manifests().join(format!("{}.yaml", pod.name))).unwrap();
    }

    pub fn pins(&self) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(self.bpf.join(format!("v{}/links", ebpf::LAYOUT_VERSION)))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// Files that the agent has open.
    pub fn agent_fds(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.agent_pid())).unwrap().count()
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- agent of {}:\n{}", self.name, self.log());
        }
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
        let _ = Capture::remove_all(&self.bpf);
        let _ = fs::remove_dir_all(&self.folder);
        remove_cgroup(&self.cgroup);
        remove_cgroup(&self.elsewhere());
    }
}

impl Pod {
    pub fn netns(&self) -> &Netns {
        self.netns.as_ref().unwrap()
    }

    pub fn ip(&self) -> String {
        format!("10.88.{}.2", self.number)
    }

    /// Dials from inside the pod, as a process of its cgroup would: the test process itself must have joined it.
    pub fn dial(&self, to: &str) -> std::io::Result<TcpStream> {
        let to: SocketAddr = to.parse().unwrap();
        let (cgroup, netns) = (self.cgroup.clone(), self.netns().try_clone().unwrap());
        in_cgroup(&cgroup, move || netns.run(|| TcpStream::connect_timeout(&to, Duration::from_secs(3))).unwrap())
    }

    /// What enrolment could have changed in the namespace.
    pub fn picture(&self) -> String {
        let commands = ["-4 rule", "-6 rule", "-4 route show table all", "-6 route show table all"];
        let text: String = commands.iter().map(|command| ip(self.netns(), command)).collect();
        // Link-local addresses come a moment later, by themselves.
        let lines = text.lines().filter(|line| !line.contains("fe80:"));
        let mut text: String = lines.flat_map(|line| [line, "\n"]).collect();
        for name in ["ipv4/tcp_fwmark_accept", "ipv4/tcp_tw_reuse", "ipv4/fwmark_reflect", "ipv6/fwmark_reflect"] {
            text += &self.netns().run(|| fs::read_to_string(format!("/proc/sys/net/{name}")).unwrap()).unwrap();
        }
        text += &listening(self.netns());
        text
    }

    /// The pod's processes end, and its namespace with them.
    pub fn vanish(&mut self) {
        let _ = self.leader.kill();
        let _ = self.leader.wait();
        self.netns = None;
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        self.vanish();
    }
}

/// A proxy that the test plays.
pub struct Proxy {
    pub manager: Arc<Manager>,
    runtime: Option<tokio::runtime::Runtime>,
}

/// What a proxy knows.
#[derive(Default)]
pub struct Manager {
    pub pods: Mutex<BTreeMap<String, AddedPod>>,
    pub maps: Mutex<Option<CaptureMapFds>>,
    pub events: Mutex<Vec<String>>,
    /// What it says of every drain.
    pub drain: Mutex<DrainState>,
}

impl Proxy {
    pub fn start(ground: &Ground) -> Proxy {
        let mut proxy = Proxy { manager: Arc::default(), runtime: None };
        proxy.manager.drain.lock().unwrap().followed = true;
        proxy.connect(ground);
        proxy
    }

    pub fn connect(&mut self, ground: &Ground) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut config = ClientConfig::new(ground.socket());
        config.reconnect.1 = Duration::from_millis(200);
        let manager = self.manager.clone();
        runtime.spawn(async move { Client::new(config).run(manager).await });
        self.runtime = Some(runtime);
    }

    pub fn disconnect(&mut self) {
        self.runtime = None;
    }

    pub fn has(&self, pod: &Pod) -> bool {
        self.manager.pods.lock().unwrap().contains_key(&pod.uid)
    }

    pub fn events(&self) -> Vec<String> {
        self.manager.events.lock().unwrap().clone()
    }

    /// A connection that one of the pod's listeners accepts, and whose it is.
    pub fn accept(&self, pod: &Pod, which: fn(&PodListeners) -> &OwnedFd) -> (TcpStream, SocketAddr) {
        let listener = {
            let pods = self.manager.pods.lock().unwrap();
            std::net::TcpListener::from(which(pods[&pod.uid].listeners.as_ref().unwrap()).try_clone().unwrap())
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match listener.accept() {
                Ok(accepted) => return accepted,
                Err(error) => assert!(Instant::now() < deadline, "nothing to accept: {error}"),
            }
            std::thread::sleep(TICK);
        }
    }
}

impl PodManager for Manager {
    fn capture_maps(&self, maps: CaptureMapFds) -> Result<(), String> {
        *self.maps.lock().unwrap() = Some(maps);
        self.events.lock().unwrap().push("maps".to_owned());
        Ok(())
    }

    fn add(&self, pod: AddedPod) -> Result<(), String> {
        let netns = Netns::from_fd(pod.netns.try_clone().unwrap()).map_err(|error| error.to_string())?;
        let listeners = pod.listeners.as_ref().ok_or("no listeners")?;
        // Without the maps it could not serve a single connection of the pod.
        assert!(self.maps.lock().unwrap().is_some());
        listeners.check(netns.cookie(), &ListenerPorts::default()).map_err(|error| error.to_string())?;
        self.events.lock().unwrap().push(format!("add {}", pod.name));
        self.pods.lock().unwrap().entry(pod.uid.clone()).or_insert(pod);
        Ok(())
    }

    fn remove(&self, uid: &str, how: Removal) {
        if let Some(pod) = self.pods.lock().unwrap().remove(uid) {
            self.events.lock().unwrap().push(format!("remove {} {how:?}", pod.name));
        }
    }

    fn listeners(&self, uid: &str) -> Option<PodListeners> {
        self.pods.lock().unwrap().get(uid)?.listeners.as_ref()?.try_clone().ok()
    }

    fn drain(&self, uid: &str) -> DrainState {
        let name = self.pods.lock().unwrap().get(uid).map(|pod| pod.name.clone()).unwrap_or_default();
        let event = format!("drain {name}");
        let mut events = self.events.lock().unwrap();
        if events.last() != Some(&event) {
            events.push(event);
        }
        *self.drain.lock().unwrap()
    }

    fn pods(&self) -> Vec<String> {
        self.pods.lock().unwrap().keys().cloned().collect()
    }
}

pub fn wait(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "did not come to pass: {what}");
        std::thread::sleep(TICK);
    }
}

pub fn ip(netns: &Netns, command: &str) -> String {
    let output = netns.run(|| Command::new("ip").args(command.split(' ')).output().unwrap()).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {command}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Inodes of the sockets that a process has open.
pub fn sockets_of(pid: u32) -> Vec<String> {
    let links =
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter_map(|link| Some(link.to_str()?.strip_prefix("socket:")?.to_owned())).collect()
}

pub fn socket_inode(socket: &impl AsFd) -> String {
    format!("[{}]", rustix::fs::fstat(socket).unwrap().st_ino)
}

pub fn fresh_netns() -> Netns {
    std::thread::spawn(|| {
        // SAFETY: only the network namespace of this short-lived thread changes.
        unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("these tests need root");
        Netns::current().unwrap()
    })
    .join()
    .unwrap()
}

/// Runs `work` with the whole test process in a cgroup: its threads share one, so callers take turns.
pub fn in_cgroup<T>(cgroup: &Path, work: impl FnOnce() -> T) -> T {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let home = fs::read_to_string("/proc/self/cgroup").unwrap();
    let home = home.lines().find_map(|line| line.strip_prefix("0::")).unwrap().trim_start_matches('/').to_owned();
    fs::write(cgroup.join("cgroup.procs"), "0").unwrap();
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    fs::write(cgroup2().join(home).join("cgroup.procs"), "0").unwrap();
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

pub fn cgroup2() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = mounts.lines().find(|line| line.contains(" - cgroup2 ")).expect("a cgroup v2 mount");
    PathBuf::from(line.split(' ').nth(4).unwrap())
}

fn listening(netns: &Netns) -> String {
    let read = |name: &str| fs::read_to_string(format!("/proc/thread-self/net/{name}")).unwrap();
    let text = netns.run(|| read("tcp") + &read("tcp6")).unwrap();
    // State 0A: listening.
    let lines = text.lines().filter(|line| line.split_whitespace().nth(3) == Some("0A"));
    lines.map(|line| line.split_whitespace().nth(1).unwrap().to_owned() + "\n").collect()
}

fn sleeper() -> Child {
    Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

fn remove_cgroup(dir: &Path) {
    let folders = fs::read_dir(dir).into_iter().flatten().flatten();
    for entry in folders.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        remove_cgroup(&entry.path());
    }
    // Processes that were just killed leave it a moment later.
    for _ in 0..100 {
        match fs::remove_dir(dir) {
            Err(error) if error.raw_os_error() == Some(16) => std::thread::sleep(TICK),
            _ => return,
        }
    }
}

const PATIENCE: Duration = Duration::from_secs(20);
const TICK: Duration = Duration::from_millis(10);

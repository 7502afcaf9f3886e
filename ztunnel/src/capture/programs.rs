//! Loads the eBPF programs, attaches them to the node and to pods, and pins all of it, so that capture outlives the
//! agent.
//!
//! Must never leave a moment in which a captured pod's connections pass uncaptured: a program is replaced by attaching
//! the new one before the old one goes (both together do the same as one).

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use aya::programs::links::FdLink;
use aya::programs::{CgroupAttachMode, CgroupSock, CgroupSockAddr, ProgramError, SkLookup, SockOps};
use aya::{Ebpf, EbpfError, EbpfLoader};
use ebpf::{Addr, COUNTERS, Counter, LAYOUT_VERSION, ListenerKey, Node, Pod, Tuple};

use super::bpf::{BpfMap, open_pin};

/// Where and how large.
#[derive(Debug, Clone)]
pub struct CaptureConfig {
    /// A folder in a bpffs, for example `/sys/fs/bpf/understory`; pins go below `v<layout version>/`.
    pub bpf_dir: PathBuf,
    /// Root of the node's cgroup v2 hierarchy.
    pub cgroup_root: PathBuf,
    /// Enrolled pods of the node at most.
    pub max_pods: u32,
    /// Captured connections that wait for the proxy at most; the oldest go first.
    pub max_waiting: u32,
    /// Open captured sockets that `getpeername` is right for.
    pub max_sockets: u32,
}

/// Capture of a node, loaded and pinned.
#[derive(Debug)]
pub struct Capture {
    dir: PathBuf,
    config: CaptureConfig,
    pods: BpfMap<u64, Pod>,
    pod_ips: BpfMap<Addr, u64>,
    exempt: BpfMap<u64, u8>,
    node: BpfMap<u32, Node>,
    listeners: BpfMap<ListenerKey, u32>,
    counters: BpfMap<u32, u64>,
    probed: BpfMap<u64, u64>,
}

/// Descriptors of the maps that the proxy works with.
#[derive(Debug)]
pub struct CaptureMapFds {
    pub orig_dst: OwnedFd,
    pub pass: OwnedFd,
    pub counters: OwnedFd,
}

/// Why capture could not be set up, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error("{0} is not in a bpffs and none could be mounted there ({1}); mount one: mount -t bpf bpf /sys/fs/bpf")]
    NoBpffs(PathBuf, io::Error),
    #[error("{0} is not in a cgroup v2 hierarchy; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")]
    NoCgroup2(PathBuf),
    #[error("{step} {path}: {source}")]
    Pin { step: &'static str, path: PathBuf, source: io::Error },
    #[error("map {name}: {source}")]
    Map { name: &'static str, source: io::Error },
    #[error("loading the eBPF object: {0}")]
    Object(#[source] Box<EbpfError>),
    #[error("program {name}: {source}; Linux 5.15 or later with CONFIG_BPF_SYSCALL and CONFIG_CGROUP_BPF is needed")]
    Program { name: &'static str, source: Box<ProgramError> },
    #[error("attaching program {name}: {reason}")]
    Attach { name: &'static str, reason: String },
}

impl CaptureConfig {
    pub fn new(bpf_dir: PathBuf, cgroup_root: PathBuf) -> Self {
        Self { bpf_dir, cgroup_root, max_pods: 4096, max_waiting: 65536, max_sockets: 262_144 }
    }
}

impl Capture {
    /// Loads the programs and attaches them to the node, adopting maps that are pinned already. What was captured
    /// stays captured meanwhile. Mends what a crash has left half-done.
    pub fn open(config: CaptureConfig) -> Result<Self, CaptureError> {
        need_bpffs(&config.bpf_dir)?;
        need_cgroup2(&config.cgroup_root)?;
        let dir = config.bpf_dir.join(format!("v{LAYOUT_VERSION}"));
        for sub in ["maps", "links"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path).map_err(|source| CaptureError::Pin { step: "making", path, source })?;
        }
        remove_unfinished(&dir.join("links"))?;
        let mut object = load(&dir, &config, 0)?;
        let cgroup = fs::File::open(&config.cgroup_root).map_err(|source| CaptureError::Pin {
            step: "opening",
            path: config.cgroup_root.clone(),
            source,
        })?;
        for name in ["us_connect4", "us_connect6", "us_getpeername4", "us_getpeername6"] {
            let program: &mut CgroupSockAddr = program(&mut object, name)?;
            program.load().map_err(|e| program_error(name, e))?;
            let link = program.attach(&cgroup, CgroupAttachMode::Single).map_err(|e| program_error(name, e))?;
            let link = program.take_link(link).map_err(|e| program_error(name, e))?;
            pin(&dir, name, link.try_into().map_err(|e| attach_error(name, e))?)?;
        }
        {
            let name = "us_sock_create";
            let program: &mut CgroupSock = program(&mut object, name)?;
            program.load().map_err(|e| program_error(name, e))?;
            let link = program.attach(&cgroup, CgroupAttachMode::Single).map_err(|e| program_error(name, e))?;
            let link = program.take_link(link).map_err(|e| program_error(name, e))?;
            pin(&dir, name, link.try_into().map_err(|e| attach_error(name, e))?)?;
        }
        {
            let name = "us_sock_ops";
            let program: &mut SockOps = program(&mut object, name)?;
            program.load().map_err(|e| program_error(name, e))?;
            let link = program.attach(&cgroup, CgroupAttachMode::Single).map_err(|e| program_error(name, e))?;
            let link = program.take_link(link).map_err(|e| program_error(name, e))?;
            pin(&dir, name, link.try_into().map_err(|e| attach_error(name, e))?)?;
        }
        Ok(Self {
            pods: map(&dir, "PODS")?,
            pod_ips: map(&dir, "POD_IPS")?,
            exempt: map(&dir, "EXEMPT_CGROUPS")?,
            node: map(&dir, "NODE")?,
            listeners: map(&dir, "LISTENERS")?,
            counters: map(&dir, "COUNTERS")?,
            probed: map(&dir, "PROBED")?,
            dir,
            config,
        })
    }

    pub fn set_node(&self, node: &Node) -> Result<(), CaptureError> {
        self.node.set(&0, node).map_err(|source| CaptureError::Map { name: "NODE", source })
    }

    /// From now on the pod's new outbound connections are captured.
    pub fn set_pod(&self, netns: u64, pod: &Pod) -> Result<(), CaptureError> {
        self.pods.set(&netns, pod).map_err(|source| CaptureError::Map { name: "PODS", source })
    }

    pub fn pod(&self, netns: u64) -> Result<Option<Pod>, CaptureError> {
        self.pods.get(&netns).map_err(|source| CaptureError::Map { name: "PODS", source })
    }

    pub fn remove_pod(&self, netns: u64) -> Result<(), CaptureError> {
        self.pods.remove(&netns).map_err(|source| CaptureError::Map { name: "PODS", source })?;
        self.probed.remove(&netns).map_err(|source| CaptureError::Map { name: "PROBED", source })?;
        Ok(())
    }

    /// The netns cookies of all captured pods.
    pub fn pods(&self) -> Result<Vec<u64>, CaptureError> {
        self.pods.keys().map_err(|source| CaptureError::Map { name: "PODS", source })
    }

    /// An enrolled pod's address: host processes of the node reach it past the proxy.
    pub fn set_pod_ip(&self, ip: std::net::IpAddr, netns: u64) -> Result<(), CaptureError> {
        let map_error = |source| CaptureError::Map { name: "POD_IPS", source };
        self.pod_ips.set(&super::maps::addr(ip), &netns).map_err(map_error)
    }

    /// Removes an address, if it still is that pod's.
    pub fn remove_pod_ip(&self, ip: std::net::IpAddr, netns: u64) -> Result<(), CaptureError> {
        let map_error = |source| CaptureError::Map { name: "POD_IPS", source };
        let key = super::maps::addr(ip);
        if self.pod_ips.get(&key).map_err(map_error)? == Some(netns) {
            self.pod_ips.remove(&key).map_err(map_error)?;
        }
        Ok(())
    }

    /// Addresses with the netns cookies that they are noted for.
    pub fn pod_ips(&self) -> Result<Vec<(std::net::IpAddr, u64)>, CaptureError> {
        let map_error = |source| CaptureError::Map { name: "POD_IPS", source };
        let mut ips = Vec::new();
        for key in self.pod_ips.keys().map_err(map_error)? {
            if let Some(netns) = self.pod_ips.get(&key).map_err(map_error)? {
                ips.push((std::net::Ipv6Addr::from(key).to_canonical(), netns));
            }
        }
        Ok(ips)
    }

    /// Connections of processes in this cgroup are left alone: a proxy's.
    pub fn exempt(&self, cgroup: u64) -> Result<(), CaptureError> {
        self.exempt.set(&cgroup, &1).map_err(|source| CaptureError::Map { name: "EXEMPT_CGROUPS", source })
    }

    pub fn unexempt(&self, cgroup: u64) -> Result<(), CaptureError> {
        self.exempt.remove(&cgroup).map_err(|source| CaptureError::Map { name: "EXEMPT_CGROUPS", source })?;
        Ok(())
    }

    pub fn exempted(&self) -> Result<Vec<u64>, CaptureError> {
        self.exempt.keys().map_err(|source| CaptureError::Map { name: "EXEMPT_CGROUPS", source })
    }

    /// From now on connections to the pod go to its listeners; its record must be set before.
    pub fn attach_inbound(&self, netns: BorrowedFd<'_>, cookie: u64) -> Result<(), CaptureError> {
        let name = "us_inbound";
        let mut object = load(&self.dir, &self.config, cookie)?;
        let program: &mut SkLookup = program(&mut object, name)?;
        program.load().map_err(|e| program_error(name, e))?;
        let link = program.attach(netns).map_err(|e| program_error(name, e))?;
        let link = program.take_link(link).map_err(|e| program_error(name, e))?;
        pin(&self.dir, &inbound_pin(cookie), link.into())
    }

    /// New connections to the pod reach its apps again.
    pub fn detach_inbound(&self, cookie: u64) -> Result<(), CaptureError> {
        unpin(&self.dir.join("links").join(inbound_pin(cookie)))
    }

    /// The netns cookies of pods with a pinned inbound program.
    pub fn inbound_links(&self) -> Result<Vec<u64>, CaptureError> {
        let path = self.dir.join("links");
        let entries =
            fs::read_dir(&path).map_err(|source| CaptureError::Pin { step: "listing", path: path.clone(), source })?;
        let names = entries.filter_map(|e| e.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|n| n.strip_prefix(INBOUND)?.parse().ok()).collect())
    }

    /// Whether the pod's inbound program is attached to this very netns.
    pub fn inbound_attached(&self, cookie: u64) -> bool {
        // A netns that ends takes its links' attachments with it; its cookie is never used again.
        open_pin(&self.dir.join("links").join(inbound_pin(cookie))).is_ok()
    }

    /// The socket to which connections of this kind (15006 or 15008) go.
    pub fn set_listener(&self, netns: u64, port: u16, socket: BorrowedFd<'_>) -> Result<(), CaptureError> {
        use std::os::fd::AsRawFd;
        let key = ListenerKey { netns, port: port.into(), _pad: 0 };
        let fd = socket.as_raw_fd() as u32;
        self.listeners.set(&key, &fd).map_err(|source| CaptureError::Map { name: "LISTENERS", source })
    }

    /// Which listeners are in place: (netns cookie, port). An entry ends with its socket.
    pub fn listeners(&self) -> Result<Vec<(u64, u16)>, CaptureError> {
        let keys = self.listeners.keys().map_err(|source| CaptureError::Map { name: "LISTENERS", source })?;
        Ok(keys.into_iter().map(|k| (k.netns, k.port as u16)).collect())
    }

    pub fn clear_listeners(&self, netns: u64) -> Result<(), CaptureError> {
        for port in [ebpf::PLAINTEXT_PORT, ebpf::HBONE_PORT] {
            let key = ListenerKey { netns, port: port.into(), _pad: 0 };
            self.listeners.remove(&key).map_err(|source| CaptureError::Map { name: "LISTENERS", source })?;
        }
        Ok(())
    }

    pub fn map_fds(&self) -> Result<CaptureMapFds, CaptureError> {
        let open = |name: &'static str| {
            open_pin(&self.dir.join("maps").join(name)).map_err(|source| CaptureError::Map { name, source })
        };
        Ok(CaptureMapFds { orig_dst: open("ORIG_DST")?, pass: open("PASS")?, counters: open("COUNTERS")? })
    }

    /// All counters since the maps were made, by their index.
    pub fn counters(&self) -> Result<[u64; COUNTERS as usize], CaptureError> {
        let mut all = [0; COUNTERS as usize];
        for (index, value) in (0..).zip(&mut all) {
            *value =
                self.counters.sum_per_cpu(index).map_err(|source| CaptureError::Map { name: "COUNTERS", source })?;
        }
        Ok(all)
    }

    pub fn counter(&self, counter: Counter) -> Result<u64, CaptureError> {
        self.counters.sum_per_cpu(counter as u32).map_err(|source| CaptureError::Map { name: "COUNTERS", source })
    }

    /// Probes seen from inside a pod.
    pub fn probed(&self, netns: u64) -> Result<u64, CaptureError> {
        let seen = self.probed.get(&netns).map_err(|source| CaptureError::Map { name: "PROBED", source })?;
        Ok(seen.unwrap_or(0))
    }

    /// Entries of the maps that only ever grow by our doing: (map, entries, room).
    pub fn fill(&self) -> Result<[(&'static str, usize, u32); 3], CaptureError> {
        let map_error = |name| move |source| CaptureError::Map { name, source };
        Ok([
            (
                "PODS",
                self.pods.keys().map_err(map_error("PODS"))?.len(),
                self.pods.max_entries().map_err(map_error("PODS"))?,
            ),
            (
                "POD_IPS",
                self.pod_ips.keys().map_err(map_error("POD_IPS"))?.len(),
                self.pod_ips.max_entries().map_err(map_error("POD_IPS"))?,
            ),
            (
                "LISTENERS",
                self.listeners.keys().map_err(map_error("LISTENERS"))?.len(),
                self.listeners.max_entries().map_err(map_error("LISTENERS"))?,
            ),
        ])
    }

    /// Removes connections of host processes that are noted since before `oldest` (nanoseconds of CLOCK_MONOTONIC),
    /// whose end was not seen.
    pub fn forget_host_conns(&self, oldest: u64) -> Result<(), CaptureError> {
        let map_error = |source| CaptureError::Map { name: "HOST_CONNS", source };
        let conns: BpfMap<Tuple, u64> = map(&self.dir, "HOST_CONNS")?;
        for key in conns.keys().map_err(map_error)? {
            if conns.get(&key).map_err(map_error)?.is_some_and(|since| since < oldest) {
                conns.remove(&key).map_err(map_error)?;
            }
        }
        Ok(())
    }

    /// Ends capture on the node: all links, maps and pins go.
    pub fn remove_all(bpf_dir: &Path) -> Result<(), CaptureError> {
        if !bpf_dir.exists() {
            return Ok(());
        }
        fs::remove_dir_all(bpf_dir).map_err(|source| CaptureError::Pin {
            step: "removing",
            path: bpf_dir.to_owned(),
            source,
        })
    }
}

fn inbound_pin(cookie: u64) -> String {
    format!("{INBOUND}{cookie}")
}

fn load(dir: &Path, config: &CaptureConfig, netns: u64) -> Result<Ebpf, CaptureError> {
    let mut loader = EbpfLoader::new();
    for name in MAPS {
        loader.map_pin_path(name, dir.join("maps").join(name));
    }
    loader
        .map_max_entries("PODS", config.max_pods)
        .map_max_entries("POD_IPS", config.max_pods * 2)
        .map_max_entries("LISTENERS", config.max_pods * 2)
        .map_max_entries("ORIG_DST", config.max_waiting)
        .map_max_entries("PEERS", config.max_sockets)
        .override_global("POD_NETNS", &netns, true);
    loader.load(ebpf::OBJECT).map_err(|e| CaptureError::Object(Box::new(e)))
}

fn program<'a, P>(object: &'a mut Ebpf, name: &'static str) -> Result<&'a mut P, CaptureError>
where
    &'a mut P: TryFrom<&'a mut aya::programs::Program, Error = ProgramError>,
{
    let found = object
        .program_mut(name)
        .ok_or_else(|| CaptureError::Attach { name, reason: "it is not in the object".into() })?;
    found.try_into().map_err(|e| program_error(name, e))
}

fn program_error(name: &'static str, source: ProgramError) -> CaptureError {
    CaptureError::Program { name, source: Box::new(source) }
}

fn attach_error(name: &'static str, error: impl std::fmt::Display) -> CaptureError {
    CaptureError::Attach { name, reason: error.to_string() }
}

/// Pins a new link and lets the one that was there go. Both are attached for a moment, never none.
fn pin(dir: &Path, name: &str, link: FdLink) -> Result<(), CaptureError> {
    let path = dir.join("links").join(name);
    let fresh = dir.join("links").join(format!("{UNFINISHED}{name}"));
    link.pin(&fresh).map_err(|e| CaptureError::Pin {
        step: "pinning",
        path: fresh.clone(),
        source: io::Error::other(e),
    })?;
    unpin(&path)?;
    fs::rename(&fresh, &path).map_err(|source| CaptureError::Pin { step: "renaming to", path, source })
}

fn unpin(path: &Path) -> Result<(), CaptureError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(CaptureError::Pin { step: "removing", path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}

/// A crash between pinning and renaming leaves the new link under its first name: it takes its place, unless the old
/// one still stands.
fn remove_unfinished(links: &Path) -> Result<(), CaptureError> {
    let listing = |source| CaptureError::Pin { step: "listing", path: links.to_owned(), source };
    for entry in fs::read_dir(links).map_err(listing)? {
        let path = entry.map_err(listing)?.path();
        let Some(name) = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix(UNFINISHED)) else {
            continue;
        };
        let place = links.join(name);
        if place.exists() {
            unpin(&path)?;
        } else {
            fs::rename(&path, &place).map_err(|source| CaptureError::Pin {
                step: "renaming to",
                path: place,
                source,
            })?;
        }
    }
    Ok(())
}

fn map<K: super::bpf::Plain, V: super::bpf::Plain>(
    dir: &Path,
    name: &'static str,
) -> Result<BpfMap<K, V>, CaptureError> {
    BpfMap::open(&dir.join("maps").join(name)).map_err(|source| CaptureError::Map { name, source })
}

fn need_cgroup2(root: &Path) -> Result<(), CaptureError> {
    match rustix::fs::statfs(root) {
        Ok(stat) if stat.f_type as u64 == CGROUP2_MAGIC => Ok(()),
        _ => Err(CaptureError::NoCgroup2(root.to_owned())),
    }
}

/// Makes the folder; mounts a bpffs at `/sys/fs/bpf` where that is what is missing.
fn need_bpffs(dir: &Path) -> Result<(), CaptureError> {
    let no_bpffs = |e: io::Error| CaptureError::NoBpffs(dir.to_owned(), e);
    let above = dir.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let is_bpffs = |path: &Path| rustix::fs::statfs(path).is_ok_and(|s| s.f_type as u64 == BPF_MAGIC);
    if !is_bpffs(above) {
        if !dir.starts_with(BPFFS) {
            return Err(no_bpffs(io::Error::other("it is not below /sys/fs/bpf")));
        }
        let none: Option<&std::ffi::CStr> = None;
        rustix::mount::mount("bpf", BPFFS, "bpf", rustix::mount::MountFlags::empty(), none)
            .map_err(|e| no_bpffs(e.into()))?;
    }
    fs::create_dir_all(dir).map_err(no_bpffs)
}

const MAPS: [&str; 11] = [
    "PODS",
    "POD_IPS",
    "EXEMPT_CGROUPS",
    "NODE",
    "ORIG_DST",
    "PEERS",
    "PASS",
    "HOST_CONNS",
    "LISTENERS",
    "COUNTERS",
    "PROBED",
];
const INBOUND: &str = "inbound-";
const UNFINISHED: &str = "new-";
const BPFFS: &str = "/sys/fs/bpf";
const BPF_MAGIC: u64 = 0xcafe_4a11;
const CGROUP2_MAGIC: u64 = 0x6367_7270;

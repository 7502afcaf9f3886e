//! Loads the eBPF programs, attaches them to the node and to pods, and pins all of it, so that capture outlives the
//! agent.
//!
//! Must never leave a moment in which a captured pod's connections pass uncaptured: a program that changes is exchanged
//! inside its link, and a link that must be made anew is attached before the old one goes.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ebpf::{Addr, COUNTERS, ConnKey, Counter, Endpoint, ListenerKey, Node, Pod, Tuple};

use super::attach::{self, Hook};
use super::bpf::{self, BpfMap, open_pin};
use super::object::{InboundProgram, MAPS, NODE_PROGRAMS, NodeObject};
use super::pins::{Pins, Target, need_cgroup2};

pub use super::error::CaptureError;

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
}

/// Capture of a node, loaded and pinned. Maps and links are also held, so that capture goes on where somebody removes
/// pins.
#[derive(Debug)]
pub struct Capture {
    pins: Pins,
    cgroup: u64,
    maps: Vec<(&'static str, OwnedFd)>,
    links: Mutex<HashMap<String, OwnedFd>>,
    inbound: InboundProgram,
    pods: BpfMap<u64, Pod>,
    pod_ips: BpfMap<Addr, u64>,
    exempt: BpfMap<u64, u8>,
    node: BpfMap<u32, Node>,
    listeners: BpfMap<ListenerKey, u32>,
    counters: BpfMap<u32, u64>,
    probed: BpfMap<u64, u64>,
    orig_dst: BpfMap<ConnKey, Endpoint>,
    pass: BpfMap<Tuple, u64>,
    host_conns: BpfMap<Tuple, u64>,
}

/// Descriptors of the maps that the proxy works with.
#[derive(Debug)]
pub struct CaptureMapFds {
    pub orig_dst: OwnedFd,
    pub pass: OwnedFd,
    pub counters: OwnedFd,
}

impl CaptureConfig {
    pub fn new(bpf_dir: PathBuf, cgroup_root: PathBuf) -> Self {
        Self { bpf_dir, cgroup_root, max_pods: 4096, max_waiting: 65536 }
    }
}

impl Capture {
    /// Loads the programs and attaches them to the node. Adopts what is pinned already: maps with what is in them,
    /// links with their program, which is exchanged if the object has another. Mends what a crash has left half-done.
    pub fn open(config: CaptureConfig) -> Result<Self, CaptureError> {
        Self::open_after(config, None)
    }

    /// The same while `before` is there: pins that somebody has removed are put back first, so that nothing is made
    /// anew that is there.
    pub fn open_again(config: CaptureConfig, before: &Self) -> Result<Self, CaptureError> {
        Self::open_after(config, Some(before))
    }

    fn open_after(config: CaptureConfig, before: Option<&Self>) -> Result<Self, CaptureError> {
        need_cgroup2(&config.cgroup_root)?;
        let (pins, _turn) = Pins::open(&config.bpf_dir)?;
        if let Some(before) = before {
            before.put_back(&pins)?;
        }
        let sizes = [
            ("PODS", config.max_pods),
            ("POD_IPS", config.max_pods * 2),
            ("PROBED", config.max_pods),
            ("LISTENERS", config.max_pods * 2),
            ("ORIG_DST", config.max_waiting),
        ];
        let object = NodeObject::load(&pins.maps(), &sizes)?;
        let opening = |e| CaptureError::pin("opening", &config.cgroup_root, e);
        let cgroup = File::open(&config.cgroup_root).map_err(opening)?;
        let cgroup_id = cgroup.metadata().map_err(opening)?.ino();
        let held = MAPS.into_iter().map(|name| {
            let fd = open_pin(&pins.maps().join(name)).map_err(|source| CaptureError::Map { name, source })?;
            Ok((name, fd))
        });
        let capture = Self {
            cgroup: cgroup_id,
            maps: held.collect::<Result<_, CaptureError>>()?,
            links: Mutex::default(),
            inbound: InboundProgram::parse(&pins.maps())?,
            pods: pins.map("PODS")?,
            pod_ips: pins.map("POD_IPS")?,
            exempt: pins.map("EXEMPT_CGROUPS")?,
            node: pins.map("NODE")?,
            listeners: pins.map("LISTENERS")?,
            counters: pins.map("COUNTERS")?,
            probed: pins.map("PROBED")?,
            orig_dst: pins.map("ORIG_DST")?,
            pass: pins.map("PASS")?,
            host_conns: pins.map("HOST_CONNS")?,
            pins,
        };
        // A change of programs that belong together begins with those that only read what others write.
        for (name, hook) in NODE_PROGRAMS {
            let target = Target { fd: cgroup.as_fd(), id: cgroup_id, name: &config.cgroup_root.to_string_lossy() };
            let link = capture.pins.attach(name, hook, object.program(name)?, target)?;
            capture.hold(name, link);
        }
        capture.renew_inbound()?;
        Ok(capture)
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
        let pin = inbound_pin(cookie);
        let name = format!("netns {cookie}");
        let meta = rustix::fs::fstat(netns).map_err(|e| CaptureError::attach(&pin, &name, e.into()))?;
        let program = self.inbound.load(cookie)?;
        let target = Target { fd: netns, id: meta.st_ino, name: &name };
        if let Some(link) = self.held().get(&pin) {
            self.pins.put_back_link(&pin, link.as_fd())?;
        }
        let link = self.pins.attach(&pin, Hook::SkLookup, program.as_fd(), target)?;
        self.hold(&pin, link);
        Ok(())
    }

    /// New connections to the pod reach its apps again.
    pub fn detach_inbound(&self, cookie: u64) -> Result<(), CaptureError> {
        let pin = inbound_pin(cookie);
        self.pins.remove_link(&pin)?;
        self.held().remove(&pin);
        Ok(())
    }

    /// What of the node's own programs and maps is not in its place any more: gone, or another.
    pub fn missing(&self) -> Vec<&'static str> {
        let is_there = |name: &str| {
            let link = self.pins.link(name).ok().flatten()?;
            attach::link_state(link.as_fd()).ok().filter(|state| state.target == self.cgroup)
        };
        let links = NODE_PROGRAMS.into_iter().map(|(name, _)| name).filter(|name| is_there(name).is_none());
        let is_same = |name: &str, held: &OwnedFd| {
            let pinned = open_pin(&self.pins.maps().join(name))?;
            io::Result::Ok(bpf::map_id(pinned.as_fd())? == bpf::map_id(held.as_fd())?)
        };
        let maps = self.maps.iter().filter(|(name, held)| !is_same(name, held).unwrap_or(false));
        links.chain(maps.map(|(name, _)| *name)).collect()
    }

    /// Whether a proxy that has the other's maps has ours.
    pub fn has_maps_of(&self, other: &Self) -> bool {
        let ids = |capture: &Self| -> io::Result<Vec<u32>> {
            capture.maps.iter().map(|(_, map)| bpf::map_id(map.as_fd())).collect()
        };
        ids(self).is_ok_and(|own| ids(other).is_ok_and(|others| own == others))
    }

    /// The netns cookies of pods with a pinned inbound program.
    pub fn inbound_links(&self) -> Result<Vec<u64>, CaptureError> {
        let names = self.pins.links()?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(INBOUND_PIN)?.parse().ok()).collect())
    }

    /// Whether the pod's inbound program is attached, and its netns still there.
    pub fn inbound_attached(&self, cookie: u64) -> bool {
        let link = self.pins.link(&inbound_pin(cookie)).ok().flatten();
        link.is_some_and(|link| attach::link_state(link.as_fd()).is_ok_and(|state| state.target != 0))
    }

    /// The socket to which connections of this kind (15006 or 15008) go.
    pub fn set_listener(&self, netns: u64, port: u16, socket: BorrowedFd<'_>) -> Result<(), CaptureError> {
        let key = ListenerKey { netns, port: port.into(), _pad: 0 };
        let fd = socket.as_raw_fd() as u32;
        self.listeners.set(&key, &fd).map_err(|source| CaptureError::Map { name: "LISTENERS", source })
    }

    /// Which listeners are in place: (netns cookie, port). An entry ends with its socket.
    pub fn listeners(&self) -> Result<Vec<(u64, u16)>, CaptureError> {
        let keys = self.listeners.keys().map_err(|source| CaptureError::Map { name: "LISTENERS", source })?;
        Ok(keys.into_iter().map(|k| (k.netns, k.port as u16)).collect())
    }

    pub fn has_listener(&self, netns: u64, port: u16) -> Result<bool, CaptureError> {
        Ok(self.listeners()?.contains(&(netns, port)))
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
            open_pin(&self.pins.maps().join(name)).map_err(|source| CaptureError::Map { name, source })
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

    /// How full the maps are: (map, entries, room). `ORIG_DST`, `PASS` and `HOST_CONNS` drop the oldest when full.
    pub fn fill(&self) -> Result<Vec<(&'static str, usize, u32)>, CaptureError> {
        Ok(vec![
            fill("PODS", &self.pods)?,
            fill("POD_IPS", &self.pod_ips)?,
            fill("ORIG_DST", &self.orig_dst)?,
            fill("PASS", &self.pass)?,
            fill("HOST_CONNS", &self.host_conns)?,
            ("LISTENERS", self.listeners()?.len(), room("LISTENERS", &self.listeners)?),
        ])
    }

    /// Removes what versions with other map layouts have pinned. Their programs capture until then, so this comes
    /// after all pods are enrolled anew.
    pub fn remove_other_versions(&self) -> Result<(), CaptureError> {
        self.pins.remove_other_versions()
    }

    /// Ends capture on the node: all links, maps and pins go.
    pub fn remove_all(bpf_dir: &Path) -> Result<(), CaptureError> {
        if !bpf_dir.exists() {
            return Ok(());
        }
        fs::remove_dir_all(bpf_dir).map_err(|e| CaptureError::pin("removing", bpf_dir, e))
    }

    /// Brings the pods' inbound programs up to date, and removes those of netns that are gone.
    fn renew_inbound(&self) -> Result<(), CaptureError> {
        for cookie in self.inbound_links()? {
            let pin = inbound_pin(cookie);
            let error = |e| CaptureError::attach(&pin, &format!("netns {cookie}"), e);
            let Some(link) = self.pins.link(&pin)? else { continue };
            let state = attach::link_state(link.as_fd()).map_err(error)?;
            if state.target == 0 {
                self.pins.remove_link(&pin)?;
                continue;
            }
            let program = self.inbound.load(cookie)?;
            self.pins.exchange(&link, state.program, program.as_fd()).map_err(error)?;
            self.hold(&pin, link);
        }
        Ok(())
    }

    fn put_back(&self, pins: &Pins) -> Result<(), CaptureError> {
        for (name, map) in &self.maps {
            pins.put_back_map(name, map.as_fd())?;
        }
        for (name, link) in self.held().iter() {
            pins.put_back_link(name, link.as_fd())?;
        }
        Ok(())
    }

    fn hold(&self, name: &str, link: OwnedFd) {
        self.held().insert(name.to_owned(), link);
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, OwnedFd>> {
        // Every change is one insert or remove: a panic leaves the table whole.
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn inbound_pin(cookie: u64) -> String {
    format!("{INBOUND_PIN}{cookie}")
}

fn fill<K: bpf::Plain, V: bpf::Plain>(
    name: &'static str,
    map: &BpfMap<K, V>,
) -> Result<(&'static str, usize, u32), CaptureError> {
    let entries = map.entries().map_err(|source| CaptureError::Map { name, source })?;
    Ok((name, entries, room(name, map)?))
}

fn room<K: bpf::Plain, V: bpf::Plain>(name: &'static str, map: &BpfMap<K, V>) -> Result<u32, CaptureError> {
    map.max_entries().map_err(|source| CaptureError::Map { name, source })
}

const INBOUND_PIN: &str = "inbound-";

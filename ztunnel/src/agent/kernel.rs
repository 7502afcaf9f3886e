//! What the kernel holds for the node's pods: one step for all maps and links of a pod, in the order that leaves no
//! gap.
//!
//! Must never take away an entry that belongs to another pod, also when both had the same address.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use ebpf::{Counter, Node, Pod};
use tracing::{info, warn};

use super::verify::Part;
use crate::capture::listeners::PodListeners;
use crate::capture::netns::Netns;
use crate::capture::programs::{Capture, CaptureConfig, CaptureError};
use crate::zds::CaptureMapFds;

/// Capture of the node.
#[derive(Debug)]
pub struct Kernel {
    capture: ArcSwap<Capture>,
    config: CaptureConfig,
    node: Mutex<Node>,
    /// When the programs were last loaded anew.
    reloaded: Mutex<Instant>,
}

/// What the kernel is told of a pod.
#[derive(Clone, Debug)]
pub struct Captured {
    pub cookie: u64,
    pub addresses: Vec<IpAddr>,
    pub fail_open: bool,
    pub listeners: Option<Arc<PodListeners>>,
}

/// How full a map is.
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub map: &'static str,
    pub entries: u32,
    pub capacity: u32,
}

/// Whether loading the programs anew brought other maps: then every proxy needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reload {
    /// It was done a moment ago.
    NotNow,
    SameMaps,
    NewMaps,
}

pub type KernelError = CaptureError;

impl Kernel {
    /// Adopts what an earlier agent pinned, or sets it up.
    pub fn open(config: CaptureConfig, node: Node) -> Result<Kernel, KernelError> {
        let capture = Capture::open(config.clone())?;
        capture.set_node(&node)?;
        Ok(Kernel {
            capture: ArcSwap::from_pointee(capture),
            config,
            node: Mutex::new(node),
            reloaded: Mutex::new(Instant::now()),
        })
    }

    /// Tells the programs what the node is like, if that is new.
    pub fn set_node(&self, node: Node) -> Result<(), KernelError> {
        let mut known = lock(&self.node);
        if *known != node {
            self.capture.load().set_node(&node)?;
            info!(?node, "the node's pods are below another cgroup than known before");
            *known = node;
        }
        Ok(())
    }

    /// Captures the pod's new connections. Whatever is in place already stays, unless `anew`. Blocks for some
    /// milliseconds where the inbound program has to be loaded.
    pub fn put(&self, pod: &Captured, netns: &Netns, anew: bool) -> Result<(), KernelError> {
        let capture = self.capture.load();
        if let Some(listeners) = &pod.listeners {
            capture.set_listener(pod.cookie, ebpf::PLAINTEXT_PORT, listeners.plaintext.as_fd())?;
            capture.set_listener(pod.cookie, ebpf::HBONE_PORT, listeners.hbone.as_fd())?;
        }
        capture.set_pod(pod.cookie, &pod.record())?;
        if anew || !capture.inbound_attached(pod.cookie) {
            capture.attach_inbound(netns.as_fd(), pod.cookie)?;
        }
        // Last: host processes are only told apart where the inbound program asks for it.
        for address in &pod.addresses {
            capture.set_pod_ip(*address, pod.cookie)?;
        }
        Ok(())
    }

    /// What of [`Kernel::put`] is not in place.
    pub fn missing(&self, pod: &Captured) -> Result<Vec<(Part, String)>, KernelError> {
        let capture = self.capture.load();
        let mut missing: Vec<_> =
            capture.missing().into_iter().map(|name| (Part::Outbound, format!("the pin of {name}"))).collect();
        if capture.pod(pod.cookie)? != Some(pod.record()) {
            missing.push((Part::Maps, "the pod's record".to_owned()));
        }
        let noted = capture.pod_ips()?;
        for address in &pod.addresses {
            if !noted.contains(&(*address, pod.cookie)) {
                missing.push((Part::Maps, format!("address {address}")));
            }
        }
        let listeners = capture.listeners()?;
        for port in [ebpf::PLAINTEXT_PORT, ebpf::HBONE_PORT] {
            if !listeners.contains(&(pod.cookie, port)) {
                missing.push((Part::Maps, format!("the listener for port {port}")));
            }
        }
        if !capture.inbound_attached(pod.cookie) {
            missing.push((Part::Inbound, "the link of the inbound program".to_owned()));
        }
        Ok(missing)
    }

    /// Lets the pod's new connections pass.
    pub fn take(&self, cookie: u64, addresses: &[IpAddr]) -> Result<(), KernelError> {
        let capture = self.capture.load();
        for address in addresses {
            capture.remove_pod_ip(*address, cookie)?;
        }
        // Inbound before the record that its program reads: without it, it would refuse.
        capture.detach_inbound(cookie)?;
        capture.remove_pod(cookie)?;
        capture.clear_listeners(cookie)
    }

    /// For the self-test: a namespace that is no pod's, known to the connect hooks.
    pub fn put_stand_in(&self, cookie: u64) -> Result<(), KernelError> {
        self.capture.load().set_pod(cookie, &Pod::default())
    }

    pub fn take_stand_in(&self, cookie: u64) -> Result<(), KernelError> {
        self.capture.load().remove_pod(cookie)
    }

    pub fn is_captured(&self, cookie: u64) -> Result<bool, KernelError> {
        Ok(self.capture.load().pod(cookie)?.is_some())
    }

    /// All namespaces that anything is noted for, with the addresses that are.
    pub fn known(&self) -> Result<BTreeMap<u64, Vec<IpAddr>>, KernelError> {
        let capture = self.capture.load();
        let mut known: BTreeMap<u64, Vec<IpAddr>> = BTreeMap::new();
        let others = capture.listeners()?.into_iter().map(|(cookie, _)| cookie);
        for cookie in capture.pods()?.into_iter().chain(capture.inbound_links()?).chain(others) {
            known.entry(cookie).or_default();
        }
        for (address, cookie) in capture.pod_ips()? {
            known.entry(cookie).or_default().push(address);
        }
        Ok(known)
    }

    /// Loads and attaches the node's programs anew, if their pins are gone, or if it was not done a moment ago. What
    /// is captured stays so.
    pub fn reload(&self) -> Result<Reload, KernelError> {
        // One pod's task does it for all.
        let mut reloaded = lock(&self.reloaded);
        let before = self.capture.load_full();
        let missing = before.missing();
        if missing.is_empty() && reloaded.elapsed() < RELOAD_INTERVAL {
            return Ok(Reload::NotNow);
        }
        *reloaded = Instant::now();
        let capture = Capture::open_again(self.config.clone(), &before)?;
        capture.set_node(&lock(&self.node))?;
        let same_maps = capture.has_maps_of(&before);
        self.capture.store(Arc::new(capture));
        warn!(missing = missing.join(", "), same_maps, "the capture programs were loaded anew");
        Ok(if same_maps { Reload::SameMaps } else { Reload::NewMaps })
    }

    /// Puts back what somebody has taken of the node's own programs and maps, pods or no pods.
    pub fn mend(&self) -> Result<Reload, KernelError> {
        if self.capture.load().missing().is_empty() { Ok(Reload::NotNow) } else { self.reload() }
    }

    /// Ends the capture of versions with other map layouts, once this one has taken over all pods.
    pub fn remove_other_versions(&self) -> Result<(), KernelError> {
        self.capture.load().remove_other_versions()
    }

    pub fn exempt(&self, cgroup: u64) -> Result<(), KernelError> {
        self.capture.load().exempt(cgroup)
    }

    pub fn unexempt(&self, cgroup: u64) -> Result<(), KernelError> {
        self.capture.load().unexempt(cgroup)
    }

    pub fn exempted(&self) -> Result<Vec<u64>, KernelError> {
        self.capture.load().exempted()
    }

    pub fn probed(&self, cookie: u64) -> Result<u64, KernelError> {
        self.capture.load().probed(cookie)
    }

    /// The maps that a proxy works with.
    pub fn map_fds(&self) -> Result<CaptureMapFds, KernelError> {
        let fds = self.capture.load().map_fds()?;
        Ok(CaptureMapFds {
            layout_version: ebpf::LAYOUT_VERSION,
            orig_dst: fds.orig_dst,
            pass: fds.pass,
            counters: fds.counters,
        })
    }

    /// What the programs counted, by name; empty if it cannot be read.
    pub fn events(&self) -> Vec<(&'static str, u64)> {
        let counters = self.capture.load().counters().unwrap_or_default();
        EVENTS.iter().map(|(counter, name)| (*name, counters[*counter as usize])).collect()
    }

    /// How full the maps are; empty if it cannot be read.
    pub fn fills(&self) -> Vec<Fill> {
        let fill = self.capture.load().fill();
        let fills = fill.iter().flatten();
        fills.map(|(map, entries, capacity)| Fill { map, entries: *entries as u32, capacity: *capacity }).collect()
    }
}

impl Captured {
    fn record(&self) -> Pod {
        let mut record = Pod::default();
        // The first of each family is the one that connections come from.
        for address in self.addresses.iter().rev() {
            match address {
                IpAddr::V4(v4) => {
                    record.v4 = v4.octets();
                    record.flags |= Pod::HAS_V4;
                }
                IpAddr::V6(v6) => {
                    record.v6 = v6.octets();
                    record.flags |= Pod::HAS_V6;
                }
            }
        }
        if self.fail_open {
            record.flags |= Pod::FAIL_OPEN;
        }
        record
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

const RELOAD_INTERVAL: Duration = Duration::from_secs(10);

const EVENTS: [(Counter, &str); ebpf::COUNTERS as usize] = [
    (Counter::Captured, "captured"),
    (Counter::OrigDstFull, "original_destination_lost"),
    (Counter::NoFamily, "refused_no_address_of_family"),
    (Counter::Refused, "refused_socket_kind"),
    (Counter::Steered, "steered"),
    (Counter::NoListener, "dropped_no_listener"),
    (Counter::CapturePort, "dropped_capture_port"),
    (Counter::ProxyDial, "passed_proxy"),
    (Counter::HostConn, "passed_host_process"),
    (Counter::FailedOpen, "passed_fail_open"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_has_the_first_address_of_each_family() {
        let addresses = ["10.0.0.1", "fd00::1", "10.0.0.2"].map(|text| text.parse().unwrap()).to_vec();
        let pod = Captured { cookie: 1, addresses, fail_open: true, listeners: None };
        let record = pod.record();
        assert_eq!(record.v4, [10, 0, 0, 1]);
        assert_eq!(record.v6[15], 1);
        assert_eq!(record.flags, Pod::HAS_V4 | Pod::HAS_V6 | Pod::FAIL_OPEN);
        let none = Captured { cookie: 1, addresses: vec![], fail_open: false, listeners: None };
        assert_eq!(none.record(), Pod::default());
    }

    #[test]
    fn every_counter_has_its_name() {
        for (index, (counter, _)) in EVENTS.iter().enumerate() {
            assert_eq!(*counter as usize, index);
        }
    }
}

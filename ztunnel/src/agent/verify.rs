//! Shows that a pod's capture works, from outside and from inside the pod, and names what does not.
//!
//! Must never say yes because something could not be looked at.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use super::cgroups::{self, CgroupRoot};
use super::kernel::{Captured, Kernel};
use super::probe::{self, Dial};
use super::procs::Process;
use crate::capture::netns::Netns;
use crate::capture::pod_network::{self, Families};

/// A part of a pod's capture that can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Entries of the maps.
    Maps,
    /// The `sk_lookup` link of the namespace, and that it steers.
    Inbound,
    /// Rules, routes and sysctls.
    Network,
    /// The connect hooks, as a probe from inside the pod sees them.
    Outbound,
    /// Where the pod's processes lie.
    Cgroup,
}

/// What is broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defect {
    pub part: Part,
    pub reason: String,
}

/// What there is to be verified.
#[derive(Debug)]
pub struct Subject<'a> {
    pub captured: Captured,
    pub netns: &'a Netns,
    pub families: Families,
    /// All processes of the pod.
    pub processes: &'a [Process],
    /// The process that stands for it.
    pub leader: Option<&'a Process>,
}

/// Does the verifying.
#[derive(Debug)]
pub struct Verifier {
    pub root: CgroupRoot,
    /// This program's own executable.
    pub program: PathBuf,
    /// How long a probe, or a dial to the pod, may take.
    pub limit: Duration,
    /// Bounds the probe processes that run at a time.
    pub probes: Semaphore,
}

impl Part {
    pub fn name(self) -> &'static str {
        match self {
            Part::Maps => "maps",
            Part::Inbound => "inbound",
            Part::Network => "network",
            Part::Outbound => "outbound",
            Part::Cgroup => "cgroup",
        }
    }
}

impl fmt::Display for Defect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.part.name(), self.reason)
    }
}

impl Verifier {
    /// What is broken. First what can be read; only if that is whole, what must be tried.
    pub async fn defects(&self, kernel: &Kernel, subject: &Subject<'_>) -> Vec<Defect> {
        let mut defects = Vec::new();
        let mut found = |part, reason: String| defects.push(Defect { part, reason });
        match kernel.missing(&subject.captured) {
            Ok(missing) => missing.into_iter().for_each(|(part, what)| found(part, format!("{what} is missing"))),
            Err(error) => found(Part::Maps, error.to_string()),
        }
        match pod_network::missing(subject.netns, subject.families).await {
            Ok(missing) => missing.into_iter().for_each(|part| found(Part::Network, format!("{part} is missing"))),
            Err(error) => found(Part::Network, error.to_string()),
        }
        let exempt = kernel.exempted().unwrap_or_default();
        for process in subject.processes {
            if let Err(reason) = self.lies_under_root(process, &exempt) {
                found(Part::Cgroup, reason);
                // One of them tells enough.
                break;
            }
        }
        if defects.is_empty() {
            defects.extend(self.probe(kernel, subject).await);
            let dials = subject.captured.addresses.iter().map(|address| self.steering(*address));
            defects.extend(futures_util::future::join_all(dials).await.into_iter().flatten());
        }
        defects
    }

    /// Whether the connect hooks work at all: the same probe from a namespace and a cgroup made for it.
    pub async fn self_test(&self, kernel: &Kernel) -> Result<(), String> {
        let netns = Netns::make().map_err(|error| format!("cannot make a network namespace: {error}"))?;
        let cgroup = self.root.dir.join(format!("understory-self-test-{}", std::process::id()));
        std::fs::create_dir_all(&cgroup).map_err(|error| format!("cannot make {}: {error}", cgroup.display()))?;
        let result = match kernel.put_stand_in(netns.cookie()) {
            Ok(()) => self.dial_inside(kernel, netns.cookie(), &netns, &cgroup).await,
            Err(error) => Err(error.to_string()),
        };
        // What stays behind of these two is swept, and harms nobody.
        let _ = kernel.take_stand_in(netns.cookie());
        let _ = std::fs::remove_dir(&cgroup);
        result
    }

    fn lies_under_root(&self, process: &Process, exempt: &[u64]) -> Result<(), String> {
        let Some(unified) = &process.place.unified else {
            return Err(format!("process {} is in no cgroup v2", process.pid));
        };
        let Some(dir) = self.root.dir_of(unified) else {
            let (pid, root) = (process.pid, &self.root.path);
            return Err(format!(
                "process {pid} is in cgroup {unified}, which is not under {root}, where capture is attached"
            ));
        };
        match cgroups::id_of(&dir) {
            Ok(id) if exempt.contains(&id) => {
                Err(format!("process {} is in cgroup {unified}, which is exempt for a proxy", process.pid))
            }
            // It may have ended meanwhile.
            _ => Ok(()),
        }
    }

    async fn probe(&self, kernel: &Kernel, subject: &Subject<'_>) -> Option<Defect> {
        let unified = subject.leader.and_then(|leader| leader.place.unified.as_deref());
        let cgroup = unified.and_then(|unified| self.root.dir_of(unified)).filter(|dir| dir.is_dir());
        let cgroup = cgroup.unwrap_or_else(|| self.root.dir.clone());
        let result = self.dial_inside(kernel, subject.captured.cookie, subject.netns, &cgroup).await;
        result.err().map(|reason| Defect { part: Part::Outbound, reason })
    }

    /// Dials from inside a namespace and a cgroup; the hooks must have counted each dial and refused it.
    async fn dial_inside(&self, kernel: &Kernel, cookie: u64, netns: &Netns, cgroup: &Path) -> Result<(), String> {
        // The semaphore is never closed.
        let _slot = self.probes.acquire().await;
        let before = kernel.probed(cookie).map_err(|error| error.to_string())?;
        let seen = probe::run(&self.program, netns, cgroup, self.limit).await.map_err(|error| error.to_string())?;
        let after = kernel.probed(cookie).map_err(|error| error.to_string())?;
        let passed = |name, dial| (dial == Dial::Passed).then_some(name);
        let passed: Vec<&str> = [passed("IPv4", seen.v4), passed("IPv6", seen.v6)].into_iter().flatten().collect();
        if !passed.is_empty() {
            let (families, cgroup) = (passed.join(", "), cgroup.display());
            return Err(format!("a probe in cgroup {cgroup} got past the connect hooks ({families})"));
        }
        let (counted, dials) = (after.saturating_sub(before), seen.dials());
        if counted < dials {
            return Err(format!("the connect hooks saw {counted} of {dials} probes in cgroup {}", cgroup.display()));
        }
        Ok(())
    }

    /// A dial from the node to a capture port must be refused; the listener behind it would accept it.
    async fn steering(&self, address: IpAddr) -> Option<Defect> {
        let dial = TcpStream::connect(SocketAddr::new(address, ebpf::PLAINTEXT_PORT));
        match tokio::time::timeout(self.limit.min(STEERING), dial).await {
            Ok(Ok(_)) => Some(Defect {
                part: Part::Inbound,
                reason: format!("a dial from the node to {address}:{} was accepted", ebpf::PLAINTEXT_PORT),
            }),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => None,
            // The node may not be let through to the pod, or the pod's link is down: nothing is shown either way,
            // and the link that does the steering was seen to be there.
            Ok(Err(error)) => {
                tracing::debug!(%address, %error, "the node cannot try whether the pod's inbound capture works");
                None
            }
            Err(_) => {
                tracing::debug!(%address, "the node's dial to the pod got no answer");
                None
            }
        }
    }
}

/// A pod of the own node answers in far less.
const STEERING: Duration = Duration::from_millis(500);

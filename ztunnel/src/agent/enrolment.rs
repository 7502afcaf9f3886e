//! The stages between "not in the mesh" and "captured", each with what it holds, and the single steps forward and
//! back. Who calls them when is `pod.rs`' affair.
//!
//! Every step can be done again. Must never leave a stage without undoing what it had done.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tracing::{info, warn};

use super::decision::PodFacts;
use super::kernel::{Captured, Kernel, KernelError, Reload};
use super::metrics::AgentMetrics;
use super::procs::{self, FindError};
use super::proxies::{Offer, OfferError, Proxies};
use super::record::{Record, RecordError, Records};
use super::report::Reports;
use super::sandbox::Sandboxes;
use super::scanner::Scanner;
use super::verify::{Defect, Part, Subject, Verifier};
use crate::capture::listeners::{ListenerError, ListenerPorts, PodListeners};
use crate::capture::netns::{Netns, NetnsId};
use crate::capture::pod_network::{self, Before, Families, PodNetworkError};
use crate::manifests::{PodRef, Redirection, StatusError};
use crate::zds::PodInfo;

/// How far a pod is.
#[derive(Debug)]
pub enum Stage {
    /// Nothing is held.
    Out,
    /// Its namespace is known.
    Found(Arc<Netns>),
    /// Its listeners and its network are ready, and it is on offer.
    Prepared(Held),
    /// A proxy has taken it.
    Served(Held),
    /// The kernel sends its connections to the listeners; not shown yet.
    Captured(Held),
    /// Captured, and its status says so.
    Enrolled(Held),
    /// On its way out: the status is cleared, peers learn of it. Until when they may take.
    Following(Held, Instant),
    /// New connections pass; old ones may end by themselves until then.
    Draining(Held, Instant),
}

/// What a pod in the mesh holds.
#[derive(Debug)]
pub struct Held {
    pub netns: Arc<Netns>,
    pub listeners: Arc<PodListeners>,
    pub record: Record,
}

/// A step that did not succeed; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum Trouble {
    #[error("it has no address yet")]
    NoAddress,
    #[error("its network namespace is not known: {0}")]
    Find(#[from] FindError),
    #[error("its listeners: {0}")]
    Listeners(#[from] ListenerError),
    #[error("its network: {0}")]
    Network(#[from] PodNetworkError),
    #[error("its record: {0}")]
    Record(#[from] RecordError),
    #[error("the proxy: {0}")]
    Proxy(#[from] OfferError),
    #[error("capture: {0}")]
    Kernel(#[from] KernelError),
    #[error("not captured: {}", list(.0))]
    NotCaptured(Vec<Defect>),
    #[error("its status: {0}")]
    Status(#[from] StatusError),
}

/// What all pods' tasks share.
#[derive(Debug)]
pub struct Context {
    pub node: String,
    /// The namespaces of the node itself.
    pub node_netns: Vec<NetnsId>,
    /// The cookie of the namespace that the agent and the node's processes are in.
    pub node_cookie: u64,
    pub kernel: Arc<Kernel>,
    pub proxies: Arc<Proxies>,
    pub scanner: Scanner,
    pub records: Records,
    pub sandboxes: Sandboxes,
    pub reports: Reports,
    pub verifier: Verifier,
    pub metrics: Arc<AgentMetrics>,
    pub ports: ListenerPorts,
    pub fail_open: bool,
    pub timings: Timings,
    /// Bounds the pods that are worked on at a time.
    pub slots: Semaphore,
}

/// The agent's times.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// How often each pod's capture is verified.
    pub verify: Duration,
    /// How long peers may take to learn that a pod leaves the mesh.
    pub follow: Duration,
    /// How long the connections of a pod that leaves the mesh may live on.
    pub drain: Duration,
    /// First and longest wait after a step that failed.
    pub retry: (Duration, Duration),
    /// How long connections wait for a proxy.
    pub backlog: Duration,
}

impl Context {
    /// `Out` → `Found`.
    pub async fn find(&self, facts: &PodFacts) -> Result<Arc<Netns>, Trouble> {
        if facts.addresses.is_empty() {
            return Err(Trouble::NoAddress);
        }
        if let Some(sandbox) = &facts.sandbox {
            // Until its start is over there is nothing to be seen of it.
            if !sandbox.is_awaited() && self.has_left(facts, sandbox.netns.id(), Duration::ZERO).await {
                self.sandboxes.forget(&facts.uid);
                return Err(FindError::OtherSandbox.into());
            }
            procs::require_address(&sandbox.netns, &facts.addresses).await?;
            return Ok(sandbox.netns.clone());
        }
        let scan = self.scanner.within(Duration::ZERO).await;
        let leader = scan.leader(&facts.cgroup_uid, &self.node_netns).ok_or(FindError::NoProcess)?;
        Ok(Arc::new(procs::open(leader, &facts.addresses).await?))
    }

    /// Whether the pod's processes run in other namespaces than this one. A container may have some of its own inside
    /// the pod: only when all have left the pod's has it moved. Those from before its present sandbox do not count.
    pub async fn has_left(&self, facts: &PodFacts, netns: NetnsId, scan_age: Duration) -> bool {
        let scan = self.scanner.within(scan_age).await;
        let since = facts.sandbox.as_ref().map_or(0, |sandbox| sandbox.since);
        let own = scan.processes(&facts.cgroup_uid).iter().filter(|process| !self.node_netns.contains(&process.netns));
        own.filter(|process| process.started >= since).count() > 0 && !scan.runs_in(&facts.cgroup_uid, netns)
    }

    /// Writes down what is about to be done to a pod. `earlier` is what was written before, if anything.
    pub fn note(&self, facts: &PodFacts, netns: &Netns, earlier: Option<&Record>) -> Result<Record, Trouble> {
        let mut before = Before::read(netns, Families::of(&facts.addresses))?;
        if let Some(earlier) = earlier.filter(|earlier| earlier.netns_cookie == netns.cookie()) {
            before.keep(&earlier.before);
        }
        let record = Record {
            uid: facts.uid.clone(),
            cgroup_uid: facts.cgroup_uid.clone(),
            name: facts.name.clone(),
            namespace: facts.namespace.clone(),
            service_account: Some(facts.service_account.clone()),
            netns_cookie: netns.cookie(),
            addresses: facts.addresses.clone(),
            before,
            boot: self.records.boot().to_owned(),
        };
        self.records.write(&record)?;
        Ok(record)
    }

    /// `Found` → `Prepared`.
    pub async fn prepare(
        &self,
        facts: &PodFacts,
        netns: Arc<Netns>,
        listeners: PodListeners,
        record: Record,
    ) -> Result<Held, Trouble> {
        pod_network::install(&netns, &record.before).await?;
        let listeners = Arc::new(listeners);
        let info = PodInfo {
            uid: facts.uid.clone(),
            name: facts.name.clone(),
            namespace: facts.namespace.clone(),
            service_account: facts.service_account.clone(),
        };
        self.proxies.offer(Offer { info, netns: netns.clone(), listeners: listeners.clone() });
        Ok(Held { netns, listeners, record })
    }

    /// New listeners, or those that a proxy still holds from before the agent's restart.
    pub async fn listeners(&self, uid: &str, netns: &Netns) -> Result<PodListeners, Trouble> {
        let taken = match PodListeners::open(netns, &self.ports) {
            Err(taken @ ListenerError::PortTaken { .. }) => taken,
            other => return Ok(other?),
        };
        match self.proxies.return_listeners(uid).await {
            Some(returned) => {
                if let Err(foreign) = returned.check(netns.cookie(), &self.ports) {
                    // Those of a namespace that the pod had before: the proxy gets the new one.
                    self.proxies.delete(uid).await;
                    return Err(foreign.into());
                }
                Ok(returned)
            }
            None => Err(taken.into()),
        }
    }

    /// `Prepared` → `Served`. A pod that is captured already must not wait for a proxy to be known as such.
    pub async fn serve(&self, held: &Held) -> Result<(), Trouble> {
        match self.proxies.add(&held.record.uid).await {
            Err(OfferError::NoProxy) if self.kernel.is_captured(held.record.netns_cookie)? => Ok(()),
            other => Ok(other?),
        }
    }

    /// `Served` → `Captured`.
    pub async fn capture(&self, held: &Held, anew: bool) -> Result<(), Trouble> {
        let (kernel, captured, netns) = (self.kernel.clone(), held.captured(self.fail_open), held.netns.clone());
        blocking(move || kernel.put(&captured, &netns, anew)).await
    }

    /// Verifies, repairs once what can be repaired, and verifies again.
    pub async fn verify(&self, held: &Held, scan_age: Duration) -> Result<(), Trouble> {
        self.metrics.verifications.add(1);
        let defects = self.defects(held, scan_age).await;
        if defects.is_empty() {
            return Ok(());
        }
        let repaired = self.repair(held, &defects).await;
        let left = self.defects(held, Duration::ZERO).await;
        for defect in defects.iter().filter(|defect| left.iter().all(|other| other.part != defect.part)) {
            self.metrics.repaired(defect.part);
            warn!(
                pod = held.record.pod(),
                part = defect.part.name(),
                was = defect.reason,
                "capture was broken and is repaired"
            );
        }
        repaired?;
        if left.is_empty() { Ok(()) } else { Err(Trouble::NotCaptured(left)) }
    }

    async fn defects(&self, held: &Held, scan_age: Duration) -> Vec<Defect> {
        let scan = self.scanner.within(scan_age).await;
        let subject = Subject {
            captured: held.captured(self.fail_open),
            netns: &held.netns,
            families: held.record.before.families,
            processes: scan.processes(&held.record.cgroup_uid),
            leader: scan.leader(&held.record.cgroup_uid, &self.node_netns),
        };
        self.verifier.defects(&self.kernel, &subject).await
    }

    async fn repair(&self, held: &Held, defects: &[Defect]) -> Result<(), Trouble> {
        let broken = |part| defects.iter().any(|defect| defect.part == part);
        if broken(Part::Network) {
            pod_network::install(&held.netns, &held.record.before).await?;
        }
        if broken(Part::Outbound) || broken(Part::Inbound) || broken(Part::Maps) {
            let kernel = self.kernel.clone();
            if blocking(move || kernel.reload()).await? == Reload::NewMaps {
                self.proxies.reconnect_all();
            }
        }
        self.capture(held, broken(Part::Inbound)).await
    }

    /// `Captured` → `Enrolled`: peers may use HBONE from now on.
    pub fn announce(&self, held: &Held) -> Result<(), Trouble> {
        Ok(self.reports.set(held.record.reference(), Redirection::Enabled, "")?)
    }

    /// Whether there is a status of the pod.
    pub fn is_announced(&self, uid: &str) -> bool {
        self.reports.is_set(uid)
    }

    /// Tells that a pod is wanted and why it is not there yet. Never takes back that it was captured.
    pub fn announce_pending(&self, facts: &PodFacts, reason: &str) -> Result<(), Trouble> {
        Ok(self.reports.set(facts.reference(), Redirection::Pending, reason)?)
    }

    /// `Enrolled` → `Following`: peers stop using HBONE.
    pub fn renounce(&self, facts: &PodFacts) -> Result<(), Trouble> {
        Ok(self.reports.clear(facts)?)
    }

    /// `Following` → `Draining`: new connections pass by the proxy.
    pub fn release(&self, held: &Held) -> Result<(), Trouble> {
        Ok(self.kernel.take(held.record.netns_cookie, &held.record.addresses)?)
    }

    /// `Served` and later → `Prepared`: no proxy serves the pod, what was still open is cut.
    pub async fn unserve(&self, held: &Held) {
        self.proxies.withdraw(&held.record.uid);
        self.proxies.delete(&held.record.uid).await;
    }

    /// `Prepared` → `Out`: nothing of ours is left in the pod.
    pub async fn dismantle(&self, held: &Held) -> Result<(), Trouble> {
        self.proxies.withdraw(&held.record.uid);
        self.undo(&held.netns, &held.record).await
    }

    /// Undoes in a pod's namespace what the record tells.
    pub async fn undo(&self, netns: &Netns, record: &Record) -> Result<(), Trouble> {
        pod_network::remove(netns, &record.before).await?;
        Ok(self.records.remove(&record.uid)?)
    }

    /// Puts a pod's network back. What cannot be, went with its namespace.
    pub async fn restore(&self, held: &Held) {
        if let Err(error) = pod_network::remove(&held.netns, &held.record.before).await {
            info!(pod = held.record.pod(), %error, "the pod's network could not be put back");
        }
    }

    /// Undoes in the kernel what a record tells of a namespace that is no longer the pod's.
    pub fn forget(&self, record: &Record) -> Result<(), Trouble> {
        self.kernel.take(record.netns_cookie, &record.addresses)?;
        Ok(self.records.remove(&record.uid)?)
    }
}

impl Held {
    fn captured(&self, fail_open: bool) -> Captured {
        Captured {
            cookie: self.record.netns_cookie,
            addresses: self.record.addresses.clone(),
            fail_open,
            listeners: Some(self.listeners.clone()),
        }
    }
}

impl Stage {
    pub fn held(&self) -> Option<&Held> {
        match self {
            Stage::Out | Stage::Found(_) => None,
            Stage::Prepared(held)
            | Stage::Served(held)
            | Stage::Captured(held)
            | Stage::Enrolled(held)
            | Stage::Following(held, _)
            | Stage::Draining(held, _) => Some(held),
        }
    }

    pub fn is_leaving(&self) -> bool {
        matches!(self, Stage::Following(..) | Stage::Draining(..))
    }

    /// Hands what is held to another stage; a stage that holds nothing stays.
    pub fn advance(&mut self, to: impl FnOnce(Held) -> Stage) {
        *self = match std::mem::replace(self, Stage::Out) {
            Stage::Prepared(held)
            | Stage::Served(held)
            | Stage::Captured(held)
            | Stage::Enrolled(held)
            | Stage::Following(held, _)
            | Stage::Draining(held, _) => to(held),
            nothing @ (Stage::Out | Stage::Found(_)) => nothing,
        };
    }

    pub fn name(&self) -> &'static str {
        match self {
            Stage::Out => "out",
            Stage::Found(_) => "found",
            Stage::Prepared(_) => "prepared",
            Stage::Served(_) => "served",
            Stage::Captured(_) => "captured",
            Stage::Enrolled(_) => "enrolled",
            Stage::Following(..) => "following",
            Stage::Draining(..) => "draining",
        }
    }
}

impl Record {
    /// Namespace and name.
    pub fn pod(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    pub fn reference(&self) -> PodRef {
        PodRef { namespace: self.namespace.clone(), name: self.name.clone(), uid: self.uid.clone() }
    }

    /// The pod as it was when this was written; nothing if an earlier version wrote too little.
    pub fn facts(&self) -> Option<PodFacts> {
        Some(PodFacts {
            uid: self.uid.clone(),
            cgroup_uid: self.cgroup_uid.clone(),
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone()?,
            addresses: self.addresses.clone(),
            leaving: false,
            sandbox: None,
        })
    }
}

/// Loading a program takes some milliseconds, which no other task is to wait for.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, KernelError> + Send + 'static,
) -> Result<T, Trouble> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => Ok(result?),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

fn list(defects: &[Defect]) -> String {
    defects.iter().map(Defect::to_string).collect::<Vec<_>>().join("; ")
}

//! Where the model comes from: Istio's workload discovery as a delta stream, of the whole mesh or on demand.
//!
//! Must never take silence for an answer: with the control plane away the last state goes on, and what was never
//! asked is refused inside the cluster's own address ranges.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::{mpsc, watch};

mod apply;
mod client;
mod demand;
mod status;
#[cfg(test)]
mod tests;

use crate::identity::{ControlPlane, LinkTimings};
use crate::mesh::{Mesh, NetworkAddress};
use crate::random;
use demand::{Answer, Demand};
use status::Shared;
pub use status::{DiscoveryStatus, Termination};

/// Settings of discovery.
#[derive(Debug, Clone)]
pub struct DiscoverySettings {
    pub pod_name: String,
    pub pod_namespace: String,
    pub instance_ip: Option<IpAddr>,
    pub node_name: String,
    pub cluster_id: String,
    /// Further metadata of the xDS node.
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// Ask only for what the node's pods talk to.
    pub on_demand: bool,
    /// The cluster's address ranges: while the control plane is away, an unknown destination outside them passes.
    /// None: every destination counts as inside.
    pub cluster_cidrs: Vec<IpNet>,
    /// How long a connection waits for an answer about its destination.
    pub wait: Duration,
    /// Shortest and longest pause between two attempts to connect.
    pub backoff: (Duration, Duration),
    pub timings: LinkTimings,
}

/// A running discovery. Cheap to clone.
#[derive(Clone)]
pub struct Discovery {
    mesh: Arc<Mesh>,
    shared: Arc<Shared>,
    demand: Arc<Demand>,
    settings: Arc<DiscoverySettings>,
    ask: mpsc::Sender<String>,
}

/// What is known of a destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Need {
    /// The model has it.
    Known,
    /// The control plane does not know it: it is not of the mesh.
    Unknown,
    /// The control plane cannot be asked, and the address is outside the cluster's ranges.
    Outside,
    /// It may be of the mesh, and the control plane cannot be asked: refuse, for this reason.
    Unreachable(String),
}

impl Default for DiscoverySettings {
    fn default() -> Self {
        Self {
            pod_name: "ztunnel".into(),
            pod_namespace: "understory-system".into(),
            instance_ip: None,
            node_name: String::new(),
            cluster_id: "Kubernetes".into(),
            metadata: BTreeMap::new(),
            on_demand: false,
            cluster_cidrs: Vec::new(),
            wait: Duration::from_secs(5),
            backoff: (Duration::from_millis(10), Duration::from_secs(15)),
            timings: LinkTimings::default(),
        }
    }
}

impl Discovery {
    /// Starts the stream on the present runtime; it goes on for as long as that lives.
    pub fn start(control_plane: ControlPlane, settings: DiscoverySettings, mesh: Arc<Mesh>) -> Self {
        let (ask, asked) = mpsc::channel(ASK_QUEUE);
        let this = Self { mesh, shared: Arc::default(), demand: Arc::default(), settings: Arc::new(settings), ask };
        tokio::spawn(client::run(control_plane, this.clone(), asked));
        this
    }

    /// Whether the first answer for each type has been applied.
    pub fn is_synced(&self) -> bool {
        *self.shared.synced.borrow()
    }

    pub async fn synced(&self) {
        let mut synced = self.shared.synced.subscribe();
        // The sender lives in `self`.
        let _ = synced.wait_for(|s| *s).await;
    }

    pub fn status(&self) -> DiscoveryStatus {
        self.shared.status()
    }

    /// Sees to it that what can be known of an address is in the model, within a bound.
    pub async fn need(&self, address: &NetworkAddress) -> Need {
        let known = {
            let mesh = self.mesh.load();
            mesh.workload_at(address).is_some() || mesh.has_service_at(address)
        };
        if !self.settings.on_demand {
            return self.need_of_all(known, address.address).await;
        }
        let name = format!("{}/{}", address.network, address.address);
        if known {
            // A sample is enough to tell what is in use.
            if random::below(TOUCH_SAMPLE) == 0 {
                self.demand.touch(&name);
            }
            return Need::Known;
        }
        self.ask(&name, Some(address.address)).await
    }

    /// The same for a name: `namespace/hostname` or a workload's uid.
    pub async fn need_name(&self, name: &str) -> Need {
        let known = {
            let mesh = self.mesh.load();
            mesh.service(name).is_some() || mesh.workload(name).is_some()
        };
        match (known, self.settings.on_demand) {
            (true, _) => Need::Known,
            (false, true) => self.ask(name, None).await,
            (false, false) => Need::Unknown,
        }
    }

    /// In full mode the model is the answer, once it has been filled.
    async fn need_of_all(&self, known: bool, address: IpAddr) -> Need {
        if known {
            return Need::Known;
        }
        if self.is_synced() || tokio::time::timeout(self.settings.wait, self.synced()).await.is_ok() {
            return Need::Unknown;
        }
        self.away(Some(address))
    }

    async fn ask(&self, name: &str, address: Option<IpAddr>) -> Need {
        let connected = self.shared.is_connected();
        if !connected && matches!(self.away(address), Need::Outside) {
            return Need::Outside;
        }
        let (mut answer, is_new) = self.demand.want(name);
        if is_new && self.ask.try_send(name.to_owned()).is_err() {
            self.demand.forget(name);
            return Need::Unreachable(format!("too many destinations are being asked for, {name} among them"));
        }
        let answered = tokio::time::timeout(self.settings.wait, answer.wait_for(|a| *a != Answer::Pending)).await;
        match answered {
            Ok(Ok(answer)) if *answer == Answer::Known => Need::Known,
            Ok(Ok(_)) if self.shared.is_connected() => Need::Unknown,
            _ => self.away(address),
        }
    }

    /// What an unknown destination is while the control plane does not answer.
    fn away(&self, address: Option<IpAddr>) -> Need {
        let cidrs = &self.settings.cluster_cidrs;
        let inside = address.is_none_or(|ip| cidrs.is_empty() || cidrs.iter().any(|c| c.contains(&ip)));
        if !inside {
            return Need::Outside;
        }
        let reason = self.shared.status().last_error.unwrap_or_else(|| "no answer yet".into());
        let hint = if cidrs.is_empty() { " (--cluster-cidrs would tell what is outside the cluster)" } else { "" };
        let what = address.map(|ip| ip.to_string()).unwrap_or_else(|| "the name".into());
        Need::Unreachable(format!("{what} is not known and the control plane does not answer: {reason}{hint}"))
    }

    fn is_on_demand(&self) -> bool {
        self.settings.on_demand
    }
}

impl std::fmt::Debug for Discovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Discovery").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// A wanted name's answer, watched by those who wait.
type Watched = watch::Receiver<Answer>;

/// Names that may wait to be asked for.
const ASK_QUEUE: usize = 4096;
/// One of so many uses of a known destination is noted.
const TOUCH_SAMPLE: u64 = 16;

//! Where the model comes from: Istio's workload discovery as a delta stream, of the whole mesh or on demand.
//!
//! Must never take silence for an answer: with the control plane away the last state goes on, and what was never
//! asked is refused inside the cluster's own address ranges.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch;
use tokio::time::Instant;

mod apply;
mod client;
mod demand;
mod messages;
mod status;
mod subscriptions;
#[cfg(test)]
mod tests;
mod trust;
mod version;

use crate::identity::{ControlPlane, LinkTimings};
use crate::mesh::{Mesh, NetworkAddress};
use demand::{Answer, Demand, Full, Key};
pub use messages::MORE;
use status::Shared;
pub use status::{DiscoveryStatus, Termination};
pub use trust::AnnouncedRoots;

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
    /// A server that leaves a question unanswered for longer is asked on a new stream.
    pub answer_limit: Duration,
    /// A stream is opened anew, and everything compared, at least this often (±10 %).
    pub max_stream_age: Duration,
    /// Bytes of names and versions in a first request. istiod takes messages of 4 MiB.
    pub versions_limit: usize,
    /// What a stream that was not told all that we hold has not mentioned is gone after such a pause.
    pub quiet: Duration,
    /// On demand: how long the answer that an address is unknown is good for, inside and outside the cluster's ranges.
    pub absent_for: (Duration, Duration),
    /// On demand: what nobody has used for so long is no longer watched.
    pub forget_after: Duration,
    /// Hear which roots are in force. Only for a control plane that signs the certificates too.
    pub hear_roots: bool,
}

/// A running discovery. Cheap to clone.
#[derive(Clone)]
pub struct Discovery {
    mesh: Arc<Mesh>,
    shared: Arc<Shared>,
    demand: Arc<Demand>,
    roots: watch::Sender<Option<AnnouncedRoots>>,
    settings: Arc<DiscoverySettings>,
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
            answer_limit: Duration::from_secs(60),
            max_stream_age: Duration::from_secs(3600),
            versions_limit: 3 << 20,
            quiet: Duration::from_secs(10),
            absent_for: (Duration::from_secs(5), Duration::from_secs(60)),
            forget_after: Duration::from_secs(1800),
            hear_roots: false,
        }
    }
}

impl Discovery {
    /// Starts the stream on the present runtime; it goes on for as long as that lives.
    pub fn start(control_plane: ControlPlane, settings: DiscoverySettings, mesh: Arc<Mesh>) -> Self {
        let roots = watch::Sender::new(None);
        let this = Self { mesh, shared: Arc::default(), demand: Arc::default(), roots, settings: Arc::new(settings) };
        tokio::spawn(client::run(control_plane, this.clone()));
        this
    }

    /// Whether the first answer for each type has been applied.
    pub fn is_synced(&self) -> bool {
        self.shared.is_synced()
    }

    pub async fn synced(&self) {
        let mut synced = self.shared.watch_synced();
        // The sender lives in `self`.
        let _ = synced.wait_for(|s| *s).await;
    }

    /// The roots in force as the control plane announced them last; nothing from one that does not announce any.
    pub fn announced_roots(&self) -> watch::Receiver<Option<AnnouncedRoots>> {
        self.roots.subscribe()
    }

    pub fn status(&self) -> DiscoveryStatus {
        let (names, pending_names) = self.demand.counts();
        DiscoveryStatus { names, pending_names, ..self.shared.status() }
    }

    /// Sees to it that what can be known of an address is in the model, within a bound. Takes no lock for one that the
    /// model has.
    pub async fn need(&self, address: &NetworkAddress) -> Need {
        self.find(&Key::Address(address.clone())).await
    }

    /// The same for a name: `namespace/hostname` or a workload's uid.
    pub async fn need_name(&self, name: &str) -> Need {
        self.find(&Key::Name(name.into())).await
    }

    async fn find(&self, key: &Key) -> Need {
        match (self.has(key), self.settings.on_demand) {
            (true, false) => Need::Known,
            (true, true) => {
                self.demand.touch(key);
                Need::Known
            }
            (false, true) => self.ask(key).await,
            // The model is the answer, once it has been filled.
            (false, false) if self.is_synced() => Need::Unknown,
            (false, false) => match tokio::time::timeout(self.settings.wait, self.synced()).await {
                Ok(()) if self.has(key) => Need::Known,
                Ok(()) => Need::Unknown,
                Err(_) => self.away(key),
            },
        }
    }

    fn has(&self, key: &Key) -> bool {
        key.is_in(&self.mesh.load())
    }

    async fn ask(&self, key: &Key) -> Need {
        let (is_connected, is_inside) = (self.shared.is_connected(), self.is_inside(key));
        // A control plane that has been away for longer than the bound is not waited for; but a stream is renewed now
        // and then, and in that moment a name of the mesh must not pass for one outside.
        let limit = if is_connected || is_inside { self.settings.wait } else { self.settings.wait.min(RENEWAL) };
        let wait = limit.saturating_sub(self.shared.away_for());
        if wait.is_zero() && !is_inside {
            return Need::Outside;
        }
        let deadline = Instant::now() + wait;
        let (inside, outside) = self.settings.absent_for;
        let absent_for = match (is_inside, is_connected) {
            (false, _) => outside,
            (true, true) => inside,
            (true, false) => Duration::ZERO,
        };
        let mut answer = match self.demand.want(key, absent_for, || self.has(key)) {
            Ok(answer) => answer,
            Err(Full) => {
                return Need::Unreachable(format!("too many destinations are being asked for, {} too", key.wire()));
            }
        };
        let answered = tokio::time::timeout_at(deadline, answer.wait_for(|a| *a != Answer::Pending)).await;
        match answered.as_ref().map(|answer| answer.as_deref()) {
            Ok(Ok(Answer::Absent(_))) => Need::Unknown,
            Ok(Ok(Answer::Unusable(_, reason))) => {
                Need::Unreachable(format!("what the control plane says of {} cannot be used: {reason}", key.wire()))
            }
            Ok(Ok(Answer::Known | Answer::Pending)) => Need::Known,
            Ok(Err(_)) | Err(_) => self.away(key),
        }
    }

    fn is_inside(&self, key: &Key) -> bool {
        let cidrs = &self.settings.cluster_cidrs;
        match key {
            Key::Address(at) => cidrs.is_empty() || cidrs.iter().any(|c| c.contains(&at.address)),
            Key::Name(_) => true,
        }
    }

    /// What an unknown destination is while the control plane does not answer.
    fn away(&self, key: &Key) -> Need {
        if !self.is_inside(key) {
            return Need::Outside;
        }
        let reason = self.shared.status().last_error.unwrap_or_else(|| "no answer yet".into());
        let no_cidrs = self.settings.cluster_cidrs.is_empty();
        let hint = if no_cidrs { " (--cluster-cidrs would tell what is outside the cluster)" } else { "" };
        let what = match key {
            Key::Address(at) => at.address.to_string(),
            Key::Name(name) => name.to_string(),
        };
        Need::Unreachable(format!("{what} is not known and the control plane does not answer: {reason}{hint}"))
    }
}

impl std::fmt::Debug for Discovery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Discovery").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// How long the renewal of a stream takes at most with a control plane that is well.
const RENEWAL: Duration = Duration::from_millis(200);

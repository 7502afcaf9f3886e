//! What all threads of the proxy share, and what it knows of each pod.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::watch;

use super::config::ProxyConfig;
use super::guard::TrustCounters;
use super::neighbour::Dials;
use super::overload::Overload;
use super::share::Share;
use super::worker::WorkerHandle;
use crate::capture::listeners::PodListeners;
use crate::capture::maps::{OrigDstMap, PassMap};
use crate::capture::netns::Netns;
use crate::capture::sockets::TcpSettings;
use crate::discovery::Discovery;
use crate::hbone;
use crate::identity::Store;
use crate::lifecycle::Shutdown;
use crate::mesh::{Mesh, Workload};
use crate::telemetry::flow::{CloseReason, Failure, Flow, ResponseFlag};
use crate::telemetry::{Connection, Telemetry};

/// Shared by all threads.
pub struct Shared {
    pub config: ProxyConfig,
    pub hbone: hbone::Settings,
    pub tcp: TcpSettings,
    pub overload: Overload,
    pub mesh: Arc<Mesh>,
    pub discovery: Discovery,
    pub certificates: Store,
    pub telemetry: Arc<Telemetry>,
    pub shutdown: Shutdown,
    pub trust_counters: TrustCounters,
    /// The agent's maps; nothing under an agent that captures in another way.
    pub maps: ArcSwapOption<Maps>,
    pods: Mutex<HashMap<String, Arc<Pod>>>,
    leaving: Mutex<Vec<Arc<Pod>>>,
    /// The pods by namespace and name, for a look without a lock.
    by_name: ArcSwap<ByName>,
    /// Changes with each pod that comes or goes.
    pub pods_changed: watch::Sender<u64>,
    /// Pods that were ever served, and that no longer are.
    pub pods_started: AtomicU64,
    pub pods_stopped: AtomicU64,
    /// Connections to pods that are older than their pod's place in the mesh, and how many of them were ended.
    pub older_connections: AtomicU64,
    pub older_ended: AtomicU64,
    /// Dials to pods of this node that reached another one with the same address.
    pub unattested: AtomicU64,
    pub dials: Dials,
    pub workers: OnceLock<Vec<WorkerHandle>>,
}

type ByName = HashMap<String, HashMap<String, Arc<Pod>>>;

#[derive(Debug)]
pub struct Maps {
    pub orig_dst: OrigDstMap,
    pub pass: Arc<PassMap>,
}

/// A pod that is served.
pub struct Pod {
    pub uid: Arc<str>,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    pub netns: Netns,
    pub listeners: PodListeners,
    /// The agent captures with eBPF and has handed over the listeners; otherwise iptables redirect.
    pub by_ebpf: bool,
    pub phase: watch::Sender<Phase>,
    /// How often it was wanted again before it had left: connections may have passed by the proxy in between.
    pub returns: AtomicU64,
    pub share: Share,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Serving,
    /// Peers are told to leave; what comes is still served.
    Draining,
    /// Nothing new is accepted; what is open may finish.
    Leaving,
    /// Everything is cut.
    Gone,
}

impl Shared {
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        config: ProxyConfig,
        mesh: Arc<Mesh>,
        discovery: Discovery,
        certificates: Store,
        telemetry: Arc<Telemetry>,
        shutdown: Shutdown,
    ) -> Arc<Self> {
        let (limits, timeouts) = (&config.limits, &config.timeouts);
        let hbone = hbone::Settings {
            stream_window: limits.stream_window,
            connection_window: limits.connection_window,
            frame_size: limits.frame_size,
            max_streams: limits.max_streams,
            streams_per_tunnel: limits.pool_max_streams,
            handshake_timeout: timeouts.handshake,
            // The peer answers when it has reached the app.
            response_timeout: timeouts.connect + timeouts.handshake,
            ping_after: timeouts.ping_after,
            dead_after: timeouts.ping_after + timeouts.ping_timeout,
            idle_timeout: timeouts.tunnel_idle,
        };
        let tcp = TcpSettings {
            connect_timeout: timeouts.connect,
            keepalive_time: timeouts.keepalive_time,
            keepalive_interval: timeouts.keepalive_interval,
            user_timeout: timeouts.user_timeout,
            descriptors: config.limits.descriptors.dialled,
        };
        Arc::new(Self {
            hbone,
            tcp,
            overload: Overload::new(limits),
            mesh,
            discovery,
            certificates,
            telemetry,
            shutdown,
            trust_counters: TrustCounters::default(),
            maps: ArcSwapOption::empty(),
            pods: Mutex::default(),
            leaving: Mutex::default(),
            by_name: ArcSwap::default(),
            pods_changed: watch::Sender::new(0),
            pods_started: AtomicU64::new(0),
            pods_stopped: AtomicU64::new(0),
            older_connections: AtomicU64::new(0),
            older_ended: AtomicU64::new(0),
            unattested: AtomicU64::new(0),
            dials: Dials::default(),
            workers: OnceLock::new(),
            config,
        })
    }

    /// The pods that are served no longer and still have connections.
    pub fn leaving(&self) -> MutexGuard<'_, Vec<Arc<Pod>>> {
        self.leaving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pods(&self) -> MutexGuard<'_, HashMap<String, Arc<Pod>>> {
        // Every change is one insert or remove: a panic leaves the table whole.
        self.pods.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection of a pod is established.
    pub fn open(&self, pod: &Pod, flow: Flow) -> Connection {
        let connection = self.telemetry.open(flow);
        if *pod.phase.borrow() == Phase::Gone {
            // Whoever cuts the pod's connections may not have seen this one.
            connection.live().close(CloseReason::PodRemoved);
        }
        connection
    }

    /// Pods have come or gone.
    pub fn publish_pods(&self) {
        let mut by_name = ByName::new();
        let pods = self.pods();
        for pod in pods.values() {
            by_name.entry(pod.namespace.clone()).or_default().insert(pod.name.clone(), pod.clone());
        }
        self.by_name.store(Arc::new(by_name));
        drop(pods);
        self.pods_changed.send_modify(|n| *n += 1);
    }

    /// The pod that is served here and that a record is of.
    pub fn pod_of(&self, workload: &Workload) -> Option<Arc<Pod>> {
        let by_name = self.by_name.load();
        let pod = by_name.get(&*workload.common.namespace)?.get(workload.name())?;
        (pod.service_account == *workload.common.service_account).then(|| pod.clone())
    }

    /// The record of a pod of this node; waits for it, within a bound.
    pub async fn own_workload(&self, pod: &Pod) -> Result<Arc<Workload>, Failure> {
        let find = || self.mesh.load().local_workload(&pod.namespace, &pod.name, &pod.service_account).cloned();
        if let Some(workload) = find() {
            return Ok(workload);
        }
        let limit = self.config.timeouts.own_workload;
        let mut changes = self.mesh.changes();
        let found = tokio::time::timeout(limit, async {
            loop {
                if let Some(workload) = find() {
                    return workload;
                }
                // The mesh lives as long as we do.
                let _ = changes.changed().await;
            }
        });
        found.await.map_err(|_| {
            Failure::new(
                ResponseFlag::Connect,
                "source",
                format!(
                    "no workload record for pod {}/{} with service account {} from the control plane within {limit:?}",
                    pod.namespace, pod.name, pod.service_account
                ),
            )
        })
    }
}

impl Pod {
    /// Moves on; never back, but for [`Self::resume`].
    pub fn advance(&self, to: Phase) {
        self.phase.send_if_modified(|phase| {
            let forward = to > *phase;
            if forward {
                *phase = to;
            }
            forward
        });
    }

    /// It is wanted again; whether it was about to leave.
    pub fn resume(&self) -> bool {
        self.phase.send_if_modified(|phase| {
            let drains = *phase == Phase::Draining;
            if drains {
                *phase = Phase::Serving;
                self.returns.fetch_add(1, Ordering::Relaxed);
            }
            drains
        })
    }

    /// Waits for a phase or a later one.
    pub async fn reached(&self, phase: Phase) {
        let mut phases = self.phase.subscribe();
        // The sender lives as long as the pod.
        let _ = phases.wait_for(|p| *p >= phase).await;
    }
}

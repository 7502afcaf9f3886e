//! What the agent counts, and the page of each pod's state.
//!
//! Must never show a pod as captured that was not verified.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::kernel::Kernel;
use super::proxies::Proxies;
use super::verify::Part;
use crate::telemetry::metrics::Metrics;

/// The agent's own counters.
#[derive(Debug, Default)]
pub struct AgentMetrics {
    pub backlog_resets: Counter,
    pub enrolments: Counter,
    pub unenrolments: Counter,
    pub failed_steps: Counter,
    pub verifications: Counter,
    repairs: Mutex<BTreeMap<Part, u64>>,
    board: Mutex<BTreeMap<String, PodView>>,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

/// Where a pod stands, as `/status` shows it.
#[derive(Clone, Debug, Serialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PodView {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub state: PodState,
    /// When capture was last shown to work, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub captured_verified: Option<u64>,
    /// Whether a connected proxy has taken the pod.
    pub served: bool,
    /// Why it is so.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

/// The states of `/status` and of the metric `understory_agent_pods`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum PodState {
    #[serde(rename = "out")]
    Out,
    #[serde(rename = "pending")]
    Pending,
    #[serde(rename = "enrolled")]
    Enrolled,
    #[serde(rename = "enrolled but not captured")]
    NotCaptured,
    #[serde(rename = "leaving")]
    Leaving,
    #[serde(rename = "ending")]
    Ending,
}

impl Counter {
    pub fn add(&self, count: u64) {
        self.0.fetch_add(count, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl AgentMetrics {
    pub fn repaired(&self, part: Part) {
        *lock(&self.repairs).entry(part).or_default() += 1;
    }

    pub fn show(&self, view: PodView) {
        lock(&self.board).insert(view.uid.clone(), view);
    }

    pub fn forget(&self, uid: &str) {
        lock(&self.board).remove(uid);
    }

    pub fn view(&self, uid: &str) -> Option<PodView> {
        lock(&self.board).get(uid).cloned()
    }

    /// All pods of the node, by namespace and name.
    pub fn views(&self) -> Vec<PodView> {
        let mut views: Vec<PodView> = lock(&self.board).values().cloned().collect();
        views.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        views
    }

    /// Whether all of so many pods have been looked at, and none is on its way into the mesh.
    pub fn all_settled(&self, pods: usize) -> bool {
        let board = lock(&self.board);
        board.len() >= pods
            && board.values().all(|view| !matches!(view.state, PodState::Pending | PodState::NotCaptured))
    }

    /// Puts everything into the registry.
    pub fn register(self: &Arc<Self>, registry: &Metrics, proxies: &Arc<Proxies>, kernel: &Arc<Kernel>) {
        let own = || self.clone();
        let counter = |name, help, read: fn(&AgentMetrics) -> &Counter| {
            let metrics = own();
            registry.counter(name, help, move || read(&metrics).get());
        };
        counter("understory_agent_enrolments", "Pods that got into the mesh", |m| &m.enrolments);
        counter("understory_agent_unenrolments", "Pods that left the mesh while they ran", |m| &m.unenrolments);
        counter("understory_agent_failed_steps", "Steps of an enrolment that failed and are tried again", |m| {
            &m.failed_steps
        });
        counter("understory_agent_verifications", "Checks whether a pod's capture works", |m| &m.verifications);
        counter("understory_agent_backlog_resets", "Connections reset because no proxy took them in time", |m| {
            &m.backlog_resets
        });
        let metrics = own();
        registry.counters("understory_agent_repairs", "Parts of a pod's capture that were put back", move |samples| {
            for (part, count) in lock(&metrics.repairs).iter() {
                samples.add(&[("part", part.name())], *count as f64);
            }
        });
        let metrics = own();
        registry.gauges("understory_agent_pods", "Pods of the node by state", move |samples| {
            let mut states = STATES.map(|state| (state, 0u32));
            for view in lock(&metrics.board).values() {
                states[view.state as usize].1 += 1;
            }
            for (state, count) in states {
                samples.add(&[("state", &state.to_string())], count.into());
            }
        });
        let metrics = own();
        registry.gauge(
            "understory_agent_pods_not_captured",
            "Pods in the mesh whose capture does not work",
            move || {
                let board = lock(&metrics.board);
                board.values().filter(|view| view.state == PodState::NotCaptured).count() as f64
            },
        );
        let connected = proxies.clone();
        registry.gauge("understory_agent_proxies", "Connected proxies", move || connected.connected() as f64);
        let connected = proxies.clone();
        registry.gauge("ztunnel_connected", "Whether a proxy is connected", move || {
            f64::from(u8::from(connected.connected() > 0))
        });
        let counting = kernel.clone();
        registry.counters("understory_capture_events", "What the capture programs did", move |samples| {
            for (event, count) in counting.events() {
                samples.add(&[("event", event)], count as f64);
            }
        });
        let counting = kernel.clone();
        registry.gauges("understory_capture_map_entries", "Entries of the capture maps", move |samples| {
            for fill in counting.fills() {
                samples.add(&[("map", fill.map)], fill.entries.into());
            }
        });
        let counting = kernel.clone();
        registry.gauges("understory_capture_map_capacity", "Most entries of the capture maps", move |samples| {
            for fill in counting.fills() {
                samples.add(&[("map", fill.map)], fill.capacity.into());
            }
        });
    }
}

impl fmt::Display for PodState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PodState::Out => "out",
            PodState::Pending => "pending",
            PodState::Enrolled => "enrolled",
            PodState::NotCaptured => "not_captured",
            PodState::Leaving => "leaving",
            PodState::Ending => "ending",
        })
    }
}

pub fn unix_seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In the order of their numbers.
const STATES: [PodState; 6] =
    [PodState::Out, PodState::Pending, PodState::Enrolled, PodState::NotCaptured, PodState::Leaving, PodState::Ending];

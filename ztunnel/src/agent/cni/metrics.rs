//! What the agent counts of the CNI plugin's calls.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use crate::cni::install::InstallState;
use crate::telemetry::metrics::Metrics;

type Outcome = [(&'static str, &'static str); 1];

/// Counters of calls, and how long ADDs took.
pub struct CniMetrics {
    calls: Mutex<BTreeMap<(&'static str, &'static str), u64>>,
    adds: Family<Outcome, Histogram>,
}

impl Default for CniMetrics {
    fn default() -> CniMetrics {
        CniMetrics { calls: Mutex::default(), adds: Family::new_with_constructor(|| Histogram::new(SECONDS)) }
    }
}

impl CniMetrics {
    pub fn count(&self, command: &'static str, outcome: &'static str) {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        *calls.entry((command, outcome)).or_default() += 1;
    }

    pub fn time_add(&self, outcome: &'static str, took: Duration) {
        self.adds.get_or_create(&[("outcome", outcome)]).observe(took.as_secs_f64());
    }

    pub fn register(self: &Arc<Self>, registry: &Metrics, install: Option<Arc<InstallState>>) {
        let own = self.clone();
        registry.counters("understory_agent_cni_requests", "Calls of the CNI plugin", move |samples| {
            let calls = own.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
            for ((command, outcome), count) in calls {
                samples.add(&[("command", command), ("outcome", outcome)], count as f64);
            }
        });
        let help = "How long the agent took for an ADD of the CNI plugin";
        registry.register("understory_agent_cni_add_seconds", help, self.adds.clone());
        let Some(install) = install else { return };
        let state = install.clone();
        registry.gauge(
            "understory_agent_cni_installed",
            "Whether the CNI plugin is in the chain that the runtime uses",
            move || f64::from(u8::from(state.in_place())),
        );
        registry.counter(
            "understory_agent_cni_installations",
            "How often the CNI plugin was put into a chain",
            move || install.puts(),
        );
    }
}

impl fmt::Debug for CniMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CniMetrics")
    }
}

/// The mark for what a pod's start may cost is 50 ms.
const SECONDS: [f64; 11] = [0.005, 0.01, 0.02, 0.035, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0];

//! What the control plane counts.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use imbl::OrdMap;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use tokio::sync::watch;
use ztunnel::manifests::{ObjectKey, Objects, SecurityKind};
use ztunnel::telemetry::metrics::Metrics as Registry;

use crate::ca::Ca;
use crate::model::{PolicyStatus, Set, Snapshot};
use crate::policy::State;

/// Counters, shared by all parts.
#[derive(Debug)]
pub struct Metrics {
    streams: AtomicI64,
    connections: AtomicI64,
    responses: ByLabel,
    resources: ByLabel,
    nacks: ByLabel,
    streams_refused: ByLabel,
    streams_ended: ByLabel,
    push: Histogram,
    signed: Histogram,
    certificates_refused: ByLabel,
    handshakes_failed: ByLabel,
    policy_statuses_unwritten: AtomicI64,
    root_config_maps_unwritten: AtomicI64,
}

type ByLabel = Family<[(&'static str, &'static str); 1], Counter>;

/// Counts something that is open for as long as it lives.
#[derive(Debug)]
pub struct Open {
    metrics: Arc<Metrics>,
    gauge: fn(&Metrics) -> &AtomicI64,
}

impl Metrics {
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            streams: AtomicI64::new(0),
            connections: AtomicI64::new(0),
            responses: Family::default(),
            resources: Family::default(),
            nacks: Family::default(),
            streams_refused: Family::default(),
            streams_ended: Family::default(),
            push: Histogram::new([0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0]),
            signed: Histogram::new([0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0]),
            certificates_refused: Family::default(),
            handshakes_failed: Family::default(),
            policy_statuses_unwritten: AtomicI64::new(0),
            root_config_maps_unwritten: AtomicI64::new(0),
        })
    }

    pub fn stream(self: &Arc<Self>) -> Open {
        Open::new(self, |m| &m.streams)
    }

    pub fn connection(self: &Arc<Self>) -> Open {
        Open::new(self, |m| &m.connections)
    }

    /// A response of discovery.
    pub fn response(&self, kind: &'static str, resources: usize) {
        self.responses.get_or_create(&[("type", kind)]).inc();
        self.resources.get_or_create(&[("type", kind)]).inc_by(resources as u64);
    }

    pub fn nack(&self, kind: &'static str) {
        self.nacks.get_or_create(&[("type", kind)]).inc();
    }

    pub fn stream_refused(&self, reason: &'static str) {
        self.streams_refused.get_or_create(&[("reason", reason)]).inc();
    }

    pub fn stream_ended(&self, reason: &'static str) {
        self.streams_ended.get_or_create(&[("reason", reason)]).inc();
    }

    /// From a change of the model to its last byte on the way to a node.
    pub fn pushed(&self, after: Duration) {
        self.push.observe(after.as_secs_f64());
    }

    pub fn signed(&self, after: Duration) {
        self.signed.observe(after.as_secs_f64());
    }

    pub fn certificate_refused(&self, reason: &'static str) {
        self.certificates_refused.get_or_create(&[("reason", reason)]).inc();
    }

    #[cfg(test)]
    pub fn refusals(&self, reason: &'static str) -> u64 {
        self.certificates_refused.get_or_create(&[("reason", reason)]).get()
    }

    pub fn handshake_failed(&self, reason: &'static str) {
        self.handshakes_failed.get_or_create(&[("reason", reason)]).inc();
    }

    /// Status files of policies that could not be written.
    pub fn policy_statuses_unwritten(&self, count: usize) {
        self.policy_statuses_unwritten.store(count as i64, Ordering::Relaxed);
    }

    /// ConfigMaps with the roots that could not be written.
    pub fn root_config_maps_unwritten(&self, count: usize) {
        self.root_config_maps_unwritten.store(count as i64, Ordering::Relaxed);
    }

    /// Puts all that can be scraped into a registry.
    pub fn register(
        self: &Arc<Self>,
        registry: &Registry,
        ca: Arc<Ca>,
        snapshots: watch::Receiver<Snapshot>,
        objects: watch::Receiver<Arc<Objects>>,
    ) {
        let of = self.clone();
        registry.gauge("understory_xds_streams", "Open discovery streams", move || read(&of.streams));
        let of = self.clone();
        registry.gauge("understory_control_connections", "Open TLS connections", move || read(&of.connections));
        registry.register("understory_xds_responses", "Discovery responses sent", self.responses.clone());
        registry.register("understory_xds_resources", "Resources sent in them", self.resources.clone());
        registry.register("understory_xds_nacks", "Responses that a proxy could not use whole", self.nacks.clone());
        registry.register("understory_xds_refused", "Discovery streams refused", self.streams_refused.clone());
        registry.register("understory_xds_ended", "Discovery streams ended by us", self.streams_ended.clone());
        registry.register(
            "understory_xds_push_seconds",
            "From a change to its last response queued for a node",
            self.push.clone(),
        );
        registry.register(
            "understory_ca_signing_seconds",
            "Certificates signed, and how long each took",
            self.signed.clone(),
        );
        registry.register(
            "understory_ca_refused",
            "Requests for certificates refused",
            self.certificates_refused.clone(),
        );
        registry.register(
            "understory_control_handshakes_failed",
            "TLS handshakes that did not come to a connection",
            self.handshakes_failed.clone(),
        );
        let of = ca.clone();
        registry.gauges(
            "understory_ca_certificate_left_seconds",
            "Until each certificate of the authority ends",
            move |samples| {
                for (kind, cert) in of.report().certificates() {
                    let fingerprint = &cert.fingerprint[..16];
                    let labels = [("certificate", kind), ("name", &cert.name), ("fingerprint", fingerprint)];
                    samples.add(&labels, cert.seconds_left as f64);
                }
            },
        );
        let of = ca.clone();
        registry.gauge(
            "understory_ca_files_unusable",
            "1 while what is in the authority's folder cannot be used, and what was there before is",
            move || if of.report().problem.is_some() { 1.0 } else { 0.0 },
        );
        registry.gauge(
            "understory_ca_signer_waiting",
            "1 while another authority waits to sign until its root is known",
            move || if ca.report().waits.is_some() { 1.0 } else { 0.0 },
        );
        let of = snapshots.clone();
        registry.gauges("understory_resources", "Resources served", move |samples| {
            let snapshot = of.borrow().clone();
            for (kind, count) in snapshot.counts() {
                samples.add(&[("kind", kind)], count as f64);
            }
        });
        let of = snapshots.clone();
        registry.gauges("understory_policies", "Policies by what becomes of them", move |samples| {
            for ((kind, state), count) in policies(&of.borrow().policies) {
                samples.add(&[("kind", kind.name()), ("state", state.label())], count as f64);
            }
        });
        let of = self.clone();
        registry.gauge(
            "understory_policy_statuses_unwritten",
            "Status files of policies still to be written",
            move || read(&of.policy_statuses_unwritten),
        );
        let of = self.clone();
        registry.gauge(
            "understory_root_config_maps_unwritten",
            "ConfigMaps with the roots still to be written",
            move || read(&of.root_config_maps_unwritten),
        );
        let (of, objects_of) = (snapshots.clone(), objects.clone());
        registry.gauges(
            "understory_manifest_problems",
            "Objects that are not used, or not as they are",
            move |samples| {
                samples.add(&[("in", "files")], objects_of.borrow().problems().len() as f64);
                samples.add(&[("in", "objects")], of.borrow().problems.len() as f64);
            },
        );
    }
}

impl Open {
    fn new(metrics: &Arc<Metrics>, gauge: fn(&Metrics) -> &AtomicI64) -> Self {
        gauge(metrics).fetch_add(1, Ordering::Relaxed);
        Self { metrics: metrics.clone(), gauge }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        (self.gauge)(&self.metrics).fetch_sub(1, Ordering::Relaxed);
    }
}

impl Set {
    /// For metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Addresses => "address",
            Self::Workloads => "workload",
            Self::Authorizations => "authorization",
        }
    }
}

/// How many there are of each kind in each state, none included: an alert on one must not wait for its first.
fn policies(statuses: &OrdMap<ObjectKey, Arc<PolicyStatus>>) -> BTreeMap<(SecurityKind, State), usize> {
    let all = SecurityKind::ALL.into_iter().flat_map(|kind| State::ALL.map(|state| ((kind, state), 0)));
    let mut counts: BTreeMap<_, _> = all.collect();
    for (key, status) in statuses {
        if let Some((kind, _)) = SecurityKind::of(key) {
            *counts.entry((kind, status.state)).or_default() += 1;
        }
    }
    counts
}

fn read(gauge: &AtomicI64) -> f64 {
    gauge.load(Ordering::Relaxed) as f64
}

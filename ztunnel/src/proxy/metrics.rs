//! What the proxy shows of itself at each scrape, beside its connections.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use tokio::sync::watch;

use super::state::{Phase, Shared};
use super::worker;
use crate::identity::State;
use crate::lifecycle::Watchdog;
use crate::telemetry::metrics::Metrics;
use crate::zds;

/// Registers everything.
pub fn register(metrics: &Metrics, shared: &Arc<Shared>, agent: watch::Receiver<zds::Status>, watchdog: &Watchdog) {
    pods(metrics, shared, agent);
    workers(metrics, shared, watchdog);
    discovery(metrics, shared);
    mesh(metrics, shared);
    certificates(metrics, shared);
}

fn pods(metrics: &Metrics, shared: &Arc<Shared>, agent: watch::Receiver<zds::Status>) {
    let of = shared.clone();
    metrics.gauge("workload_manager_active_proxy_count", "Pods that are served", move || {
        of.pods().values().filter(|pod| *pod.phase.borrow() < Phase::Gone).count() as f64
    });
    let status = agent.clone();
    metrics.gauge("workload_manager_pending_proxy_count", "Pods whose start failed and is tried again", move || {
        status.borrow().pending as f64
    });
    metrics.gauge("understory_agent_connected", "1 while the node agent is connected", move || {
        f64::from(u8::from(agent.borrow().connected))
    });
    let of = shared.clone();
    metrics.counter("workload_manager_proxies_started", "Pods that were taken to be served", move || {
        of.pods_started.load(Ordering::Relaxed)
    });
    let of = shared.clone();
    metrics.counter("workload_manager_proxies_stopped", "Pods that are no longer served", move || {
        of.pods_stopped.load(Ordering::Relaxed)
    });
}

fn workers(metrics: &Metrics, shared: &Arc<Shared>, watchdog: &Watchdog) {
    let of = shared.clone();
    metrics.gauges("understory_worker_connections", "Connections under way, by worker", move |samples| {
        for (index, (connections, _)) in worker::loads(&of).into_iter().enumerate() {
            samples.add(&[("worker", &index.to_string())], connections.into());
        }
    });
    let of = shared.clone();
    metrics.gauges("understory_worker_tunnels", "Tunnels from peers, by worker", move |samples| {
        for (index, (_, tunnels)) in worker::loads(&of).into_iter().enumerate() {
            samples.add(&[("worker", &index.to_string())], tunnels.into());
        }
    });
    let watchdog = watchdog.clone();
    metrics.gauges("understory_worker_silence_seconds", "Time since the worker last moved", move |samples| {
        for (name, silence) in watchdog.silences() {
            samples.add(&[("worker", name.trim_start_matches("worker "))], silence.as_secs_f64());
        }
    });
}

fn discovery(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauge("understory_xds_connected", "1 while the discovery stream is open", move || {
        f64::from(u8::from(of.discovery.status().connected))
    });
    let of = shared.clone();
    metrics.gauges(
        "understory_xds_progress_age_seconds",
        "Time since the last message of discovery; missing before the first one",
        move |samples| {
            if let Some(last) = of.discovery.status().last_progress {
                samples.add(&[], last.elapsed().as_secs_f64());
            }
        },
    );
    let of = shared.clone();
    metrics.counters("istio_xds_connection_terminations", "Discovery streams that ended", move |samples| {
        let ended = of.discovery.status().terminations;
        for reason in ["ConnectionError", "Error", "Reconnect", "Complete"] {
            samples.add(&[("reason", reason)], ended.get(reason).copied().unwrap_or(0) as f64);
        }
    });
    let of = shared.clone();
    metrics.counters("istio_xds_message", "Messages of discovery", move |samples| {
        for (url, (messages, _)) in of.discovery.status().messages {
            samples.add(&[("url", &url)], messages as f64);
        }
    });
    let of = shared.clone();
    metrics.counters("istio_xds_message_bytes", "Bytes of resources in messages of discovery", move |samples| {
        for (url, (_, bytes)) in of.discovery.status().messages {
            samples.add(&[("url", &url)], bytes as f64);
        }
    });
}

fn mesh(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauges("understory_mesh_objects", "Objects of the mesh that this proxy knows", move |samples| {
        let mesh = of.mesh.load_full();
        samples.add(&[("kind", "workload")], mesh.workloads().count() as f64);
        samples.add(&[("kind", "service")], mesh.services().count() as f64);
        samples.add(&[("kind", "policy")], mesh.policies().len() as f64);
    });
}

fn certificates(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauges("understory_certificates", "Identities by the state of their certificate", move |samples| {
        let mut states = BTreeMap::from([("available", 0u32), ("initializing", 0), ("unavailable", 0)]);
        for entry in of.certificates.states() {
            let state = match entry.state {
                State::Available(_) => "available",
                State::Initializing => "initializing",
                State::Unavailable(_) => "unavailable",
            };
            *states.entry(state).or_default() += 1;
        }
        for (state, count) in states {
            samples.add(&[("state", state)], count.into());
        }
    });
    let of = shared.clone();
    metrics.gauges(
        "understory_certificate_seconds_left",
        "Time until the first of the certificates in use expires; missing without certificates",
        move |samples| {
            let states = of.certificates.states().into_iter();
            let ends = states.filter_map(|entry| match entry.state {
                State::Available(certificate) => Some(certificate.not_after()),
                State::Initializing | State::Unavailable(_) => None,
            });
            if let Some(first) = ends.min() {
                let left = first.duration_since(SystemTime::now()).unwrap_or_default();
                samples.add(&[], left.as_secs_f64());
            }
        },
    );
    let of = shared.clone();
    metrics.counter("understory_certificates_issued", "Certificates that the authority has issued to us", move || {
        of.certificates.counters().issued.load(Ordering::Relaxed)
    });
    let of = shared.clone();
    metrics.counter("understory_certificates_failed", "Requests for certificates that failed", move || {
        of.certificates.counters().failed.load(Ordering::Relaxed)
    });
    let of = shared.clone();
    metrics.counters(
        "understory_certificate_request_seconds",
        "Time spent waiting for answers of the authority, over all requests",
        move |samples| {
            let micros = of.certificates.counters().request_micros.load(Ordering::Relaxed);
            samples.add(&[], micros as f64 / 1e6);
        },
    );
    let of = shared.clone();
    metrics.gauge(
        "understory_certificate_requests_open",
        "Requests for certificates that are on their way",
        move || of.certificates.counters().in_flight.load(Ordering::Relaxed) as f64,
    );
}

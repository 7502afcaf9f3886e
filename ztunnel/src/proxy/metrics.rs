//! What the proxy shows of itself at each scrape, beside its connections.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use tokio::sync::watch;

use super::overload::Limit;
use super::state::{Phase, Shared};
use super::worker;
use crate::identity::{CrlFile, State};
use crate::lifecycle::Watchdog;
use crate::telemetry::flow::Direction;
use crate::telemetry::metrics::Metrics;
use crate::zds;

/// Registers everything.
pub fn register(
    metrics: &Metrics,
    shared: &Arc<Shared>,
    agent: watch::Receiver<zds::Status>,
    watchdog: &Watchdog,
    crl_file: Option<Arc<CrlFile>>,
) {
    pods(metrics, shared, agent);
    overload(metrics, shared);
    older(metrics, shared);
    neighbours(metrics, shared);
    workers(metrics, shared, watchdog);
    discovery(metrics, shared);
    mesh(metrics, shared);
    certificates(metrics, shared);
    trust(metrics, shared);
    if let Some(file) = crl_file {
        revocation(metrics, shared, file);
    }
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

fn overload(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.counters(
        "understory_connections_shed",
        "Connections and tunnels that were refused because of a limit, by the limit",
        move |samples| {
            for limit in Limit::ALL {
                samples.add(&[("limit", limit.as_str())], of.overload.shed(limit) as f64);
            }
        },
    );
    let of = shared.clone();
    metrics.gauge("understory_buffered_bytes", "Bytes that came for apps which have not taken them yet", move || {
        of.pods().values().map(|pod| pod.buffered() as f64).sum()
    });
    let of = shared.clone();
    metrics.gauges(
        "understory_memory_limit_bytes",
        "Memory of which less than nine tenths must be in use for a connection to begin; missing without a limit",
        move |samples| {
            if let Some(most) = of.overload.memory() {
                samples.add(&[], most as f64);
            }
        },
    );
}

fn older(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauge(
        "understory_older_connections",
        "Connections to pods of this node, in the clear, that are older than their pod's place in the mesh",
        move || of.older_connections.load(Ordering::Relaxed) as f64,
    );
    let of = shared.clone();
    metrics.counter(
        "understory_older_connections_ended",
        "Connections older than their pod's place in the mesh that the policies did not allow",
        move || of.older_ended.load(Ordering::Relaxed),
    );
}

fn neighbours(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.counter(
        "understory_unattested_dials",
        "Dials to a pod of this node that another one with the same address answered: a tunnel was used then",
        move || of.unattested.load(Ordering::Relaxed),
    );
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

fn trust(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauges("understory_trust_roots", "Roots that are trusted, by trust domain", move |samples| {
        for (domain, roots, _) in of.certificates.trust().bundles() {
            samples.add(&[("trust_domain", domain.as_str())], roots as f64);
        }
    });
    let of = shared.clone();
    metrics.gauges(
        "understory_trust_root_seconds_left",
        "Time until the first trusted root of a trust domain ends; negative once it has",
        move |samples| {
            for (domain, _, end) in of.certificates.trust().bundles() {
                let Some(end) = end else { continue };
                samples.add(&[("trust_domain", domain.as_str())], seconds_until(end));
            }
        },
    );
    let of = shared.clone();
    metrics.counters("understory_trust_root_changes", "Roots that were added and withdrawn", move |samples| {
        let counts = of.certificates.trust().counts();
        samples.add(&[("change", "added")], counts.added as f64);
        samples.add(&[("change", "withdrawn")], counts.withdrawn as f64);
    });
    let of = shared.clone();
    metrics.counter(
        "understory_trust_tunnels_ended",
        "Tunnels with open connections that were ended for their certificates' sake",
        move || of.trust_counters.ended().0,
    );
    let of = shared.clone();
    metrics.counter(
        "understory_trust_connections_ended",
        "Connections that ended with their tunnel for its certificates' sake",
        move || of.trust_counters.ended().1,
    );
    let of = shared.clone();
    metrics.counters(
        "istio_crl_policy_rejections",
        "Handshakes refused and tunnels ended because of certificate revocation lists (unstable)",
        move |samples| {
            for direction in [Direction::Inbound, Direction::Outbound] {
                let count = of.trust_counters.revoked(direction);
                samples.add(&[("reporter", direction.reporter())], count as f64);
            }
        },
    );
}

fn revocation(metrics: &Metrics, shared: &Arc<Shared>, file: Arc<CrlFile>) {
    let of = shared.clone();
    metrics.gauge("understory_crl_lists", "Certificate revocation lists in force", move || {
        of.certificates.trust().crls().len() as f64
    });
    let of = shared.clone();
    metrics.gauges(
        "understory_crl_seconds_left",
        "Time until the first revocation list ends; negative once it has, missing without lists",
        move |samples| {
            if let Some(end) = of.certificates.trust().crls().next_update() {
                samples.add(&[], seconds_until(end));
            }
        },
    );
    let of = file.clone();
    metrics.gauge("understory_crl_file_broken", "1 while the file with revocation lists cannot be used", move || {
        f64::from(u8::from(of.is_broken()))
    });
    metrics.counters("understory_crl_loads", "Readings of the file with revocation lists", move |samples| {
        let (good, failed) = file.counts();
        samples.add(&[("result", "ok")], good as f64);
        samples.add(&[("result", "failed")], failed as f64);
    });
}

fn seconds_until(time: SystemTime) -> f64 {
    match time.duration_since(SystemTime::now()) {
        Ok(left) => left.as_secs_f64(),
        Err(past) => -past.duration().as_secs_f64(),
    }
}

fn certificates(metrics: &Metrics, shared: &Arc<Shared>) {
    let of = shared.clone();
    metrics.gauge(
        "understory_certificates_denied",
        "Identities that the authority has decided against since it last issued a certificate for them",
        move || of.certificates.states().iter().filter(|entry| entry.denied).count() as f64,
    );
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

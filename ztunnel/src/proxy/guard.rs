//! Watches over a worker's tunnels: ends them when their peers are no longer trusted, and sees to those whose
//! certificates have ended.

use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use super::config::AtExpiry;
use super::neighbour;
use super::worker::Worker;
use crate::hbone::{Ended, Round, TlsError};
use crate::identity::{Certificate, PeerError, describe_alert};
use crate::telemetry::flow::{CloseReason, Direction, How, Outcome, ResponseFlag};

/// What trust has ended or refused, for the metrics.
#[derive(Debug, Default)]
pub struct TrustCounters {
    /// Handshakes refused and tunnels ended because of a revocation list: peers that are clients, and servers.
    revoked_clients: AtomicU64,
    revoked_servers: AtomicU64,
    /// Tunnels with open connections that were ended, and their connections.
    tunnels: AtomicU64,
    connections: AtomicU64,
}

impl TrustCounters {
    /// For the metric that has the reporter as its label.
    pub fn revoked(&self, direction: Direction) -> u64 {
        self.of(direction).load(Ordering::Relaxed)
    }

    /// Tunnels, and connections on them.
    pub fn ended(&self) -> (u64, u64) {
        (self.tunnels.load(Ordering::Relaxed), self.connections.load(Ordering::Relaxed))
    }

    /// Connections without a tunnel that were ended.
    pub fn ended_connections(&self, count: u64) {
        self.connections.fetch_add(count, Ordering::Relaxed);
    }

    fn of(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::Inbound => &self.revoked_clients,
            Direction::Outbound => &self.revoked_servers,
        }
    }
}

/// Runs for as long as the worker.
pub async fn run(worker: Rc<Worker>) {
    let shared = worker.shared.clone();
    let cut = shared.config.trust.expiry_connections == AtExpiry::Cut;
    let mut trust = shared.certificates.trust().changes();
    let mut settled = shared.certificates.settled();
    loop {
        let denied = |identity: &_| shared.certificates.is_denied(identity);
        let now = SystemTime::now();
        let (round, next) = worker.tunnels.tend(now, cut, denied);
        note(&worker, &round);
        let (ended, sooner) = worker.attested.tend(now, cut, denied);
        neighbour::note(&worker, ended);
        let next = next.min(sooner);
        tokio::select! {
            // The trust lives as long as the store.
            _ = trust.changed() => {
                let round = worker.tunnels.judge().await;
                note(&worker, &round);
                let ended = worker.attested.judge(shared.certificates.trust(), &shared.trust_counters);
                neighbour::note(&worker, ended);
            }
            // So does this.
            _ = settled.changed() => worker.tunnels.retire_ours(),
            () = tokio::time::sleep(next) => {}
        }
    }
}

fn note(worker: &Worker, round: &Round) {
    let Some(first) = &round.first else { return };
    let counters = &worker.shared.trust_counters;
    counters.revoked_clients.fetch_add(round.revoked_clients, Ordering::Relaxed);
    counters.revoked_servers.fetch_add(round.revoked_servers, Ordering::Relaxed);
    counters.tunnels.fetch_add(round.tunnels as u64, Ordering::Relaxed);
    counters.connections.fetch_add(round.streams.into(), Ordering::Relaxed);
    tracing::warn!(
        tunnels = round.tunnels,
        connections = round.streams,
        first_reason = %first,
        "tunnels were ended, with the connections in them"
    );
}

/// How a connection ended, if its tunnel was ended by us.
pub fn outcome(relayed: Outcome, tunnel: Option<Ended>) -> Outcome {
    let Some(ended) = tunnel.filter(|_| relayed.how == How::Rst) else { return relayed };
    let reason = match &ended {
        Ended::Closed | Ended::Dead(_) | Ended::Failed(_) | Ended::Alert(_) => return relayed,
        Ended::Distrusted(error) if error.is_revocation() => CloseReason::CertificateRevoked,
        Ended::Distrusted(_) => CloseReason::TrustWithdrawn,
        Ended::Expired { .. } => CloseReason::CertificateExpired,
        Ended::RenewalDenied { .. } => CloseReason::RenewalDenied,
    };
    Outcome::closed_because(reason, &ended.to_string())
}

/// The flag and the words of a handshake that failed; `own` is what the peer was shown.
pub fn handshake_failure(
    worker: &Worker,
    direction: Direction,
    error: &TlsError,
    own: Option<&Certificate>,
) -> (ResponseFlag, String) {
    match error {
        TlsError::Peer(reason) => {
            if let (PeerError::Untrusted { .. }, Some(own)) = (reason, own) {
                worker.shared.certificates.doubt_roots(own.identity());
            }
            (refusal_flag(&worker.shared.trust_counters, direction, reason), reason.to_string())
        }
        TlsError::Protocol(rustls::Error::AlertReceived(alert)) => alert_failure(worker, *alert, own),
        error => (ResponseFlag::TlsFailure, error.to_string()),
    }
}

/// The same for an alert by which the peer ended TLS.
pub fn alert_failure(
    worker: &Worker,
    alert: rustls::AlertDescription,
    own: Option<&Certificate>,
) -> (ResponseFlag, String) {
    if let (rustls::AlertDescription::UnknownCA, Some(own)) = (alert, own) {
        worker.shared.certificates.doubt_roots(own.identity());
    }
    let flag = match alert {
        rustls::AlertDescription::CertificateRevoked => ResponseFlag::CertRevoked,
        _ => ResponseFlag::TlsFailure,
    };
    let words = own.and_then(|own| describe_alert(alert, own));
    (flag, words.unwrap_or_else(|| format!("the peer ended TLS with alert {alert:?}")))
}

/// The flag for a peer that is not taken; revocations are counted.
pub fn refusal_flag(counters: &TrustCounters, direction: Direction, reason: &PeerError) -> ResponseFlag {
    if !reason.is_revocation() {
        return ResponseFlag::TlsFailure;
    }
    counters.of(direction).fetch_add(1, Ordering::Relaxed);
    ResponseFlag::CertRevoked
}

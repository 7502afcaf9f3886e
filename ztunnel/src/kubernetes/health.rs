//! Whether the API server is heard, kind by kind: for the log, the metrics and the readiness page.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio::sync::watch;

use super::api::ApiError;
use super::kind::Kind;
use crate::telemetry::metrics::Metrics as Registry;

#[derive(Debug)]
pub struct Health {
    kinds: Mutex<BTreeMap<Kind, Entry>>,
    complete: watch::Sender<bool>,
    errors: Family<[(&'static str, &'static str); 2], Counter>,
}

#[derive(Debug, Clone)]
struct Entry {
    state: State,
    since: Instant,
    /// All objects have been read once.
    whole: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// Not heard from yet.
    Starting,
    Connected,
    /// What was known stays.
    Failed(ApiError),
    /// The cluster does not have the kind.
    Missing,
}

impl Health {
    pub(super) fn new(kinds: impl Iterator<Item = Kind>) -> Arc<Self> {
        let entry = Entry { state: State::Starting, since: Instant::now(), whole: false };
        let kinds = kinds.map(|kind| (kind, entry.clone())).collect();
        Arc::new(Self { kinds: Mutex::new(kinds), complete: watch::Sender::new(false), errors: Family::default() })
    }

    /// Returns once every kind has been read whole.
    pub async fn complete(&self) {
        // It cannot be closed while we hold it.
        let _ = self.complete.subscribe().wait_for(|complete| *complete).await;
    }

    /// The kinds that are not followed now, one a line: nothing to say is an empty text. Anybody may read it; what the
    /// server said is in the log alone.
    pub fn detail(&self) -> String {
        let mut text = String::new();
        for (kind, entry) in &*self.kinds() {
            let (name, since) = (kind.name(), entry.since.elapsed().as_secs());
            let _ = match &entry.state {
                State::Connected => Ok(()),
                State::Starting => writeln!(text, "{name}: not read yet ({since} s)"),
                State::Failed(error) if entry.whole => {
                    writeln!(text, "{name}: as known {since} s ago: {}", error.brief())
                }
                State::Failed(error) => writeln!(text, "{name}: not read yet ({since} s): {}", error.brief()),
                State::Missing => writeln!(text, "{name}: the cluster has no such kind"),
            };
        }
        text
    }

    pub fn register(self: &Arc<Self>, registry: &Registry) {
        let of = self.clone();
        registry.gauges(
            "understory_kubernetes_connected",
            "1 while changes of the kind are heard of, or the cluster does not have it",
            move |samples| {
                for (kind, entry) in &*of.kinds() {
                    let good = matches!(entry.state, State::Connected | State::Missing);
                    samples.add(&[("kind", kind.name())], if good { 1.0 } else { 0.0 });
                }
            },
        );
        let of = self.clone();
        registry.gauges(
            "understory_kubernetes_behind_seconds",
            "For how long changes of the kind may have been missed",
            move |samples| {
                for (kind, entry) in &*of.kinds() {
                    let good = matches!(entry.state, State::Connected | State::Missing);
                    let behind = if good { Duration::ZERO } else { entry.since.elapsed() };
                    samples.add(&[("kind", kind.name())], behind.as_secs_f64());
                }
            },
        );
        let of = self.clone();
        registry.gauges(
            "understory_kubernetes_missing",
            "1 while the cluster does not have the kind",
            move |samples| {
                for (kind, entry) in of.kinds().iter().filter(|(kind, _)| kind.optional().is_some()) {
                    samples.add(&[("kind", kind.name())], if entry.state == State::Missing { 1.0 } else { 0.0 });
                }
            },
        );
        registry.register(
            "understory_kubernetes_errors",
            "Requests to the API server for the objects of a kind that failed",
            self.errors.clone(),
        );
    }

    pub(super) fn whole(&self, kind: Kind) {
        let mut kinds = self.kinds();
        if let Some(entry) = kinds.get_mut(&kind) {
            entry.whole = true;
        }
        if kinds.values().all(|entry| entry.whole) {
            self.complete.send_replace(true);
        }
    }

    pub(super) fn connected(&self, kind: Kind) {
        let Some(before) = self.turn(kind, State::Connected) else { return };
        let after = before.since.elapsed();
        match before.state {
            State::Failed(_) => tracing::info!(kind = kind.name(), ?after, "the API server is heard again"),
            State::Missing => tracing::info!(kind = kind.name(), "the cluster has the kind now"),
            State::Starting | State::Connected => {}
        }
    }

    pub(super) fn failed(&self, kind: Kind, error: &ApiError) {
        self.errors.get_or_create(&[("kind", kind.name()), ("reason", error.label())]).inc();
        // Too old to go on from there: all is read again, which is no fault of anybody.
        if matches!(error, ApiError::Refused { code: 410, .. }) {
            return tracing::info!(kind = kind.name(), "changes were missed, all objects are read again");
        }
        let Some(before) = self.turn(kind, State::Failed(error.clone())) else { return };
        if !matches!(before.state, State::Failed(_)) {
            tracing::warn!(kind = kind.name(), %error, "the API server is not heard, what is known stays");
        }
    }

    pub(super) fn missing(&self, kind: Kind) {
        let before = self.turn(kind, State::Missing);
        if before.is_some_and(|entry| entry.state != State::Missing) {
            tracing::info!(kind = kind.name(), "the cluster has no such kind, it is looked for again and again");
        }
        self.whole(kind);
    }

    /// Another state, if it is one; what was before.
    fn turn(&self, kind: Kind, state: State) -> Option<Entry> {
        let mut kinds = self.kinds();
        let entry = kinds.get_mut(&kind).filter(|entry| entry.state != state)?;
        let before = entry.clone();
        // Failing for another reason is still failing.
        if !matches!((&before.state, &state), (State::Failed(_), State::Failed(_))) {
            entry.since = Instant::now();
        }
        entry.state = state;
        Some(before)
    }

    fn kinds(&self) -> std::sync::MutexGuard<'_, BTreeMap<Kind, Entry>> {
        // A panic of a holder left whole entries.
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

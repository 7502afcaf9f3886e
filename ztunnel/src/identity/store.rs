//! The node's certificates: fetched before they are needed, renewed at half of their life, forgotten with the last
//! workload that had the identity. Each answer also says which roots are trusted, for all identities.
//!
//! Must never hand out an expired certificate, and one identity's trouble must never slow another.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rustls::pki_types::CertificateDer;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

mod doubts;
mod worker;

use super::{Certificate, CertificateAuthority, Identity, IssueError, Learned, Trust};
use crate::random;
use doubts::Doubts;

/// All certificates of this proxy. Cheap to clone.
#[derive(Clone)]
pub struct Store(Arc<Shared>);

#[derive(Debug, Clone)]
pub struct StoreSettings {
    /// Requests to the authority at a time. One that has no answer for a second no longer counts, so that identities
    /// that the authority never answers for leave room for others.
    pub in_flight: usize,
    /// Wait after the first failure of an identity; doubles with each further one, ±20 %.
    pub first_backoff: Duration,
    pub longest_backoff: Duration,
    /// Bound of one request, for authorities that have none of their own.
    pub request_timeout: Duration,
}

/// What an identity's state is, for the dump.
#[derive(Debug, Clone)]
pub struct IdentityState {
    pub identity: Identity,
    pub state: State,
    /// The last failure since the last success, also while an older certificate is still good.
    pub last_error: Option<String>,
    /// Failures since the last success.
    pub failures: u32,
    /// The authority has decided against this identity since the last success.
    pub denied: bool,
}

#[derive(Debug, Clone)]
pub enum State {
    Initializing,
    Available(Arc<Certificate>),
    Unavailable(String),
}

/// Why a caller did not get a certificate.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    #[error("{0}")]
    Unavailable(String),
    #[error("no certificate for {identity} within {waited:?}: {reason}")]
    Timeout { identity: Identity, waited: Duration, reason: String },
    #[error("no certificate for {0}: the workload that had this identity is gone")]
    Forgotten(Identity),
}

/// Counters for the metrics.
#[derive(Debug, Default)]
pub struct StoreCounters {
    pub issued: AtomicU64,
    pub failed: AtomicU64,
    /// Sum over all answered requests, in microseconds.
    pub request_micros: AtomicU64,
    /// Requests that are on their way now.
    pub in_flight: AtomicU64,
}

/// Later is more urgent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    Renewal,
    Prefetch,
    Waiting,
}

struct Shared {
    settings: StoreSettings,
    /// For error texts.
    authority: String,
    trust: Trust,
    /// The generation of the trust by which our own certificates were last checked.
    checked: AtomicU64,
    entries: Mutex<HashMap<Identity, Entry>>,
    /// What `get` reads.
    available: ArcSwap<HashMap<Identity, Arc<Certificate>>>,
    changes: watch::Sender<u64>,
    /// Raised when another root has begun to sign and everybody's certificates should be below it.
    settled: watch::Sender<u64>,
    /// The roots that fresh certificates should come with, if that is known.
    expected: Mutex<Option<Expected>>,
    doubts: Mutex<Doubts>,
    /// Wakes the worker.
    wake: Arc<Notify>,
    counters: StoreCounters,
}

/// Roots that are said to be in force.
struct Expected {
    roots: Vec<CertificateDer<'static>>,
    /// The one that fresh certificates lead to, if that is known.
    signs: Option<CertificateDer<'static>>,
    /// Certificates that came with others or lead to another are renewed within this time.
    within: Duration,
    /// When everybody should have done so, after another root has begun to sign.
    settles: Option<Instant>,
}

struct Entry {
    /// How many times `want` is ahead of `forget`.
    wanted: usize,
    certificate: Option<Arc<Certificate>>,
    last_error: Option<String>,
    failures: u32,
    /// Certificates in a row that came with other roots than expected.
    behind: u32,
    /// Answers in a row that left roots in doubt.
    doubtful: u32,
    denied: bool,
    /// The last failure was that the authority could not be reached.
    unreached: bool,
    priority: Priority,
    in_flight: bool,
    /// Tells an answer that comes after the entry was forgotten and made again.
    generation: u64,
    next_try: Instant,
    /// Told about each change of this identity.
    news: watch::Sender<()>,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            in_flight: 8,
            first_backoff: Duration::from_millis(250),
            longest_backoff: Duration::from_secs(150),
            request_timeout: Duration::from_secs(15),
        }
    }
}

impl Store {
    /// Starts the worker on the current runtime. It ends with the last clone of the store.
    pub fn start(authority: Arc<dyn CertificateAuthority>, trust: Trust, settings: StoreSettings) -> Self {
        let shared = Arc::new(Shared {
            settings,
            authority: authority.address(),
            trust,
            checked: AtomicU64::new(0),
            entries: Mutex::default(),
            available: ArcSwap::default(),
            changes: watch::Sender::new(0),
            settled: watch::Sender::new(0),
            expected: Mutex::default(),
            doubts: Mutex::default(),
            wake: Arc::default(),
            counters: StoreCounters::default(),
        });
        tokio::spawn(worker::work(Arc::downgrade(&shared), shared.wake.clone(), authority));
        Self(shared)
    }

    /// The certificate, if there is one that has not expired. Takes no lock.
    pub fn get(&self, identity: &Identity) -> Option<Arc<Certificate>> {
        self.0.available.load().get(identity).filter(|certificate| certificate.is_valid()).cloned()
    }

    /// The certificate; waits for it if it is on its way or can be fetched again within `limit`. An identity that
    /// nobody has asked for is fetched, with precedence.
    ///
    /// The error tells what the authority said last. It comes at once if the next try would be too late.
    pub async fn wait(&self, identity: &Identity, limit: Duration) -> Result<Arc<Certificate>, StoreError> {
        if let Some(certificate) = self.get(identity) {
            return Ok(certificate);
        }
        let deadline = Instant::now() + limit;
        let mut news = self.0.raise(identity);
        loop {
            // One look, under the lock, at all that the news may be about: it cannot change in between.
            let waiting_for = match self.0.lock().get(identity) {
                None => return Err(StoreError::Forgotten(identity.clone())),
                Some(entry) => match (entry.valid(), &entry.last_error) {
                    (Some(certificate), _) => return Ok(certificate.clone()),
                    (None, Some(error)) if !entry.in_flight && entry.next_try > deadline => {
                        return Err(StoreError::Unavailable(error.clone()));
                    }
                    (None, Some(error)) => error.clone(),
                    (None, None) => format!("no answer yet from {}", self.0.authority),
                },
            };
            match tokio::time::timeout_at(deadline, news.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(StoreError::Forgotten(identity.clone())),
                Err(_) => {
                    let identity = identity.clone();
                    return Err(StoreError::Timeout { identity, waited: limit, reason: waiting_for });
                }
            }
        }
    }

    /// A workload with this identity runs here: fetch and renew its certificate. Counts; see [`Self::forget`].
    pub fn want(&self, identity: &Identity) {
        let mut entries = self.0.lock();
        entries.entry(identity.clone()).or_insert_with(|| Entry::new(Priority::Prefetch)).wanted += 1;
        drop(entries);
        self.0.wake.notify_one();
    }

    /// One workload less with this identity. After the last one the certificate and its key are dropped.
    pub fn forget(&self, identity: &Identity) {
        let mut entries = self.0.lock();
        let Some(entry) = entries.get_mut(identity) else { return };
        entry.wanted = entry.wanted.saturating_sub(1);
        if entry.wanted == 0 {
            entries.remove(identity);
            self.0.publish(&entries);
        }
    }

    /// These roots are in force now, and fresh certificates lead to `signs`: certificates that came with others or lead
    /// to another are renewed, the first at once, so that its answer changes the trust, and the rest spread over
    /// `within`. Nothing is trusted for the announcement alone.
    pub fn expect_roots(
        &self,
        roots: Vec<CertificateDer<'static>>,
        signs: Option<CertificateDer<'static>>,
        within: Duration,
    ) {
        let mut entries = self.0.lock();
        let mut held = self.0.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let before = held.take();
        let is_other = |before: &Expected| before.signs.is_some() && before.signs != signs;
        let settles = match &before {
            // Peers hear of it at other moments, and are as slow as we are.
            Some(before) if is_other(before) => Some(now + 2 * within.max(LEAST_WITHIN)),
            before => before.as_ref().and_then(|before| before.settles),
        };
        let expected = Expected { roots, signs, within, settles };
        let mut early = 0;
        for entry in entries.values_mut() {
            entry.behind = 0;
            if entry.certificate.as_ref().is_some_and(|certificate| !expected.is_met_by(certificate)) {
                let wait = if early == 0 { Duration::ZERO } else { within.mul_f64(random::factor(1.0) / 2.0) };
                entry.next_try = entry.next_try.min(now + wait);
                early += 1;
            }
        }
        tracing::info!(roots = expected.roots.len(), early, ?within, "certificates of other roots are renewed early");
        *held = Some(expected);
        drop(held);
        drop(entries);
        self.0.wake.notify_one();
    }

    /// A peer was met that leads to none of the roots, or that does not trust ours: they may have changed without our
    /// knowledge. Asks the authority for this identity anew, ever more rarely while that changes nothing.
    pub fn doubt_roots(&self, identity: &Identity) {
        let now = Instant::now();
        let mut entries = self.0.lock();
        // One that fails, or is on its way, is asked for anyway.
        let Some(entry) = entries.get_mut(identity).filter(|entry| entry.failures == 0 && !entry.in_flight) else {
            return;
        };
        if entry.next_try <= now || !self.0.doubts.lock().unwrap_or_else(PoisonError::into_inner).ask(now) {
            return;
        }
        entry.next_try = now;
        drop(entries);
        tracing::info!(%identity, "a peer is not of our roots: asking the authority whether they have changed");
        self.0.wake.notify_one();
    }

    /// Whom our certificates take for peers.
    pub fn trust(&self) -> &Trust {
        &self.0.trust
    }

    /// Changes when another root has begun to sign and the certificates of all proxies should have been renewed.
    pub fn settled(&self) -> watch::Receiver<u64> {
        self.0.settled.subscribe()
    }

    /// Whether the authority has decided against this identity since it last issued a certificate for it.
    pub fn is_denied(&self, identity: &Identity) -> bool {
        self.0.lock().get(identity).is_some_and(|entry| entry.denied)
    }

    /// What is known of an identity.
    pub fn state(&self, identity: &Identity) -> Option<IdentityState> {
        self.0.lock().get(identity).map(|entry| entry.state(identity))
    }

    /// All identities that are known here, in order.
    pub fn states(&self) -> Vec<IdentityState> {
        let entries = self.0.lock();
        let mut states: Vec<_> = entries.iter().map(|(identity, entry)| entry.state(identity)).collect();
        states.sort_by(|a, b| a.identity.cmp(&b.identity));
        states
    }

    /// Changes with each new, lost or renewed certificate.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changes.subscribe()
    }

    pub fn counters(&self) -> &StoreCounters {
        &self.0.counters
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, HashMap<Identity, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody waits: this identity goes first.
    fn raise(&self, identity: &Identity) -> watch::Receiver<()> {
        let mut entries = self.lock();
        let entry = entries.entry(identity.clone()).or_insert_with(|| Entry::new(Priority::Waiting));
        entry.priority = Priority::Waiting;
        if entry.certificate.as_ref().is_some_and(|c| !c.is_valid()) && entry.failures == 0 {
            // It expired unseen, as after a suspended machine.
            entry.next_try = Instant::now();
        }
        let news = entry.news.subscribe();
        drop(entries);
        self.wake.notify_one();
        news
    }

    fn publish(&self, entries: &HashMap<Identity, Entry>) {
        let valid = entries.iter().filter_map(|(id, entry)| Some((id.clone(), entry.certificate.clone()?)));
        self.available.store(Arc::new(valid.collect()));
        self.changes.send_modify(|n| *n += 1);
    }

    /// The most urgent identity whose time has come, marked as on its way.
    fn next_due(&self) -> Option<(Identity, u64)> {
        let mut entries = self.lock();
        let now = Instant::now();
        let (identity, entry) = entries
            .iter_mut()
            .filter(|(_, entry)| entry.due().is_some_and(|due| due <= now))
            .max_by_key(|(_, entry)| (entry.priority, std::cmp::Reverse(entry.next_try)))?;
        entry.in_flight = true;
        Some((identity.clone(), entry.generation))
    }

    /// Drops what has expired, and tells when something is due next.
    fn sweep(&self) -> Instant {
        let mut entries = self.lock();
        let generation = self.trust.generation();
        if self.checked.swap(generation, Ordering::Relaxed) != generation {
            for (identity, entry) in entries.iter_mut() {
                if entry.certificate.as_ref().is_some_and(|c| !c.is_trusted()) && entry.failures == 0 {
                    tracing::info!(%identity, "the root of this certificate was withdrawn: renewing it now");
                    entry.priority = entry.priority.max(Priority::Prefetch);
                    entry.next_try = Instant::now();
                }
            }
        }
        let now = SystemTime::now();
        let mut changed = false;
        entries.retain(|_, entry| {
            if entry.certificate.as_ref().is_some_and(|c| !c.valid_at(now)) {
                entry.certificate = None;
                entry.last_error.get_or_insert_with(|| "the certificate has expired".to_owned());
                entry.news.send_replace(());
                changed = true;
            }
            // Asked for by a connection only, and no longer: nothing would ever forget it.
            let idle = entry.wanted == 0 && entry.certificate.is_none() && entry.news.receiver_count() == 0;
            !idle || entry.in_flight
        });
        if changed {
            self.publish(&entries);
        }
        // The clock may have been changed: look again at least this often.
        let latest = Instant::now() + LOOK_AGAIN;
        entries.values().filter_map(Entry::due).chain(self.settle()).min().map_or(latest, |next| next.min(latest))
    }

    /// Tells when a change of the root that signs should be over; before that, when it will be.
    fn settle(&self) -> Option<Instant> {
        let mut expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let settles = &mut expected.as_mut()?.settles;
        if settles.is_some_and(|at| at <= Instant::now()) {
            *settles = None;
            tracing::info!("another root signs: new connections are kept off tunnels from before");
            self.settled.send_modify(|n| *n += 1);
        }
        *settles
    }

    /// Whether a certificate came with other roots than those that are said to be in force.
    fn is_behind(&self, certificate: &Certificate) -> bool {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        expected.as_ref().is_some_and(|expected| !expected.has_roots_of(certificate))
    }

    /// When to ask again for a certificate that did not come with the roots that are in force, as from a replica of the
    /// authority that is behind.
    fn sooner(&self, entry: &mut Entry, certificate: &Certificate) -> Option<Duration> {
        let expected = self.expected.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(expected) = expected.as_ref().filter(|expected| !expected.is_met_by(certificate)) else {
            entry.behind = 0;
            return None;
        };
        let wait = expected.within.max(self.settings.first_backoff).saturating_mul(1 << entry.behind.min(20));
        entry.behind = entry.behind.saturating_add(1);
        Some(wait.mul_f64(random::factor(0.2)))
    }

    fn finish(&self, identity: &Identity, generation: u64, asked: Instant, result: Result<Certificate, IssueError>) {
        // Also of an answer that comes too late for its identity.
        let learned = match &result {
            Ok(certificate) => {
                let roots = certificate.roots();
                self.trust.learn(identity.trust_domain(), roots, asked, self.is_behind(certificate))
            }
            Err(_) => Learned::default(),
        };
        // A replica that is behind says the same again and again, and that is no news.
        if learned.changed {
            self.doubts.lock().unwrap_or_else(PoisonError::into_inner).confirmed();
        }
        let mut entries = self.lock();
        if result.is_ok() {
            // The authority is back: those that wait for it need not wait longer.
            for entry in entries.values_mut().filter(|entry| entry.unreached && !entry.in_flight) {
                let soon = RECOVERY.mul_f64(random::factor(1.0) / 2.0);
                entry.next_try = entry.next_try.min(Instant::now() + soon);
            }
        }
        let Some(entry) = entries.get_mut(identity).filter(|entry| entry.generation == generation) else {
            // Somebody else has to ask.
            let of_domain = |(other, entry): &(&Identity, &mut Entry)| {
                other.trust_domain() == identity.trust_domain() && !entry.in_flight
            };
            if learned.doubtful
                && let Some((_, entry)) = entries.iter_mut().find(of_domain)
            {
                entry.next_try = entry.next_try.min(Instant::now() + self.settings.first_backoff);
            }
            return;
        };
        entry.in_flight = false;
        entry.priority = Priority::Renewal;
        match result {
            Ok(certificate) => {
                tracing::debug!(%identity, serial = certificate.serial(), "certificate issued");
                let renewal = renew_in(&certificate, SystemTime::now());
                // One that is behind the announcement has pauses of its own.
                let pause = self.settings.first_backoff.saturating_mul(1 << entry.doubtful.min(MOST_DOUBLED));
                let again = learned.doubtful.then_some(pause);
                entry.doubtful = again.map_or(0, |_| entry.doubtful.saturating_add(1));
                let early = self.sooner(entry, &certificate).or(again).unwrap_or(renewal);
                entry.next_try = Instant::now() + early.min(renewal);
                entry.certificate = Some(Arc::new(certificate));
                entry.last_error = None;
                entry.failures = 0;
                entry.denied = false;
                entry.unreached = false;
            }
            Err(error) => {
                let reason = error.to_string();
                let wait = self.settings.backoff(entry.failures);
                tracing::warn!(
                    %identity,
                    reason,
                    retry_in_ms = wait.as_millis() as u64,
                    has_valid_certificate = entry.certificate.as_ref().is_some_and(|c| c.is_valid()),
                    "no certificate issued"
                );
                entry.failures = entry.failures.saturating_add(1);
                entry.denied |= error.is_denial();
                entry.unreached = matches!(error, IssueError::Link { .. });
                entry.last_error = Some(reason);
                let until_expiry = entry
                    .certificate
                    .as_ref()
                    .and_then(|c| c.not_after().duration_since(SystemTime::now()).ok())
                    .unwrap_or(wait);
                entry.next_try = Instant::now() + wait.min(until_expiry.max(self.settings.first_backoff));
            }
        }
        // The fact before its news: who is woken finds it.
        self.publish(&entries);
        if let Some(entry) = entries.get(identity) {
            entry.news.send_replace(());
        }
    }
}

impl Expected {
    fn is_met_by(&self, certificate: &Certificate) -> bool {
        self.has_roots_of(certificate) && self.signs.as_ref().is_none_or(|root| certificate.leads_to(root))
    }

    fn has_roots_of(&self, certificate: &Certificate) -> bool {
        let theirs = certificate.roots();
        self.roots.iter().all(|root| theirs.contains(root)) && theirs.iter().all(|root| self.roots.contains(root))
    }
}

impl Entry {
    fn new(priority: Priority) -> Self {
        static GENERATION: AtomicU64 = AtomicU64::new(0);
        Self {
            wanted: 0,
            certificate: None,
            last_error: None,
            failures: 0,
            behind: 0,
            doubtful: 0,
            denied: false,
            unreached: false,
            priority,
            in_flight: false,
            generation: GENERATION.fetch_add(1, Ordering::Relaxed),
            next_try: Instant::now(),
            news: watch::Sender::new(()),
        }
    }

    /// The certificate, unless it has expired.
    fn valid(&self) -> Option<&Arc<Certificate>> {
        self.certificate.as_ref().filter(|certificate| certificate.is_valid())
    }

    /// When to ask next. Never while an answer is on its way, nor for a renewal that nobody needs.
    fn due(&self) -> Option<Instant> {
        let needed = self.wanted > 0 || self.news.receiver_count() > 0 || self.certificate.is_none();
        (needed && !self.in_flight).then_some(self.next_try)
    }

    fn state(&self, identity: &Identity) -> IdentityState {
        let state = match (self.valid(), &self.last_error) {
            (Some(certificate), _) => State::Available(certificate.clone()),
            (None, Some(error)) => State::Unavailable(error.clone()),
            (None, None) if self.certificate.is_some() => State::Unavailable("the certificate has expired".to_owned()),
            (None, None) => State::Initializing,
        };
        IdentityState {
            identity: identity.clone(),
            state,
            last_error: self.last_error.clone(),
            failures: self.failures,
            denied: self.denied,
        }
    }
}

impl StoreSettings {
    fn backoff(&self, failures: u32) -> Duration {
        let doubled = self.first_backoff.saturating_mul(1u32 << failures.min(20));
        doubled.min(self.longest_backoff).mul_f64(random::factor(0.2))
    }
}

/// At half of what is left on arrival (half of its life, but for back-dating), up to a tenth of it earlier or later,
/// so that a node's certificates do not come all at once.
fn renew_in(certificate: &Certificate, now: SystemTime) -> Duration {
    let left = certificate.not_after().duration_since(now).unwrap_or_default();
    left.mul_f64(0.5 * random::factor(0.2)).max(SOONEST_RENEWAL)
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The worker sees that it is no longer needed.
        self.wake.notify_one();
    }
}

/// A change of the root that signs is given at least this time, for control planes that are not told at once.
const LEAST_WITHIN: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// The pause before a further answer about roots that are in doubt is doubled so often at the most.
const MOST_DOUBLED: u32 = 6;
/// Within which those that could not reach the authority ask again once somebody has.
const RECOVERY: Duration = Duration::from_secs(1);
/// An authority that gives ever shorter lives, as one that is about to end, is not asked ever more often.
const SOONEST_RENEWAL: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests;

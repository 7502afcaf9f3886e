//! What can be seen of discovery from outside.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

/// Where discovery stands.
#[derive(Debug, Clone, Default)]
pub struct DiscoveryStatus {
    pub connected: bool,
    /// When the last message came.
    pub last_progress: Option<Instant>,
    pub last_error: Option<String>,
    /// Type → (messages, bytes of their resources).
    pub messages: BTreeMap<String, (u64, u64)>,
    /// Reason → ended streams.
    pub terminations: BTreeMap<&'static str, u64>,
    /// Resources that could not be used.
    pub refused: u64,
    /// On demand: names that are watched, and how many of them have no answer yet.
    pub names: usize,
    pub pending_names: usize,
}

/// Why a stream ended, as the metric names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Termination {
    /// No connection could be made.
    ConnectionError,
    Error,
    /// The server asked us to come again.
    Reconnect,
    /// The server ended the stream in order.
    Complete,
}

impl Termination {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ConnectionError => "ConnectionError",
            Self::Error => "Error",
            Self::Reconnect => "Reconnect",
            Self::Complete => "Complete",
        }
    }
}

pub(super) struct Shared {
    synced: watch::Sender<bool>,
    connected: AtomicBool,
    responses: AtomicU64,
    /// When the last stream ended; at first when this was made.
    away_since: Mutex<Instant>,
    rest: Mutex<DiscoveryStatus>,
}

impl Default for Shared {
    fn default() -> Self {
        Self {
            synced: watch::Sender::new(false),
            connected: AtomicBool::new(false),
            responses: AtomicU64::new(0),
            away_since: Mutex::new(Instant::now()),
            rest: Mutex::default(),
        }
    }
}

impl Shared {
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    pub fn is_synced(&self) -> bool {
        *self.synced.borrow()
    }

    pub fn watch_synced(&self) -> watch::Receiver<bool> {
        self.synced.subscribe()
    }

    /// Every type has had its first answer.
    pub fn synced(&self) {
        self.synced.send_if_modified(|synced| !std::mem::replace(synced, true));
    }

    pub fn status(&self) -> DiscoveryStatus {
        DiscoveryStatus { connected: self.is_connected(), ..self.lock().clone() }
    }

    /// Nothing while the stream is open.
    pub fn away_for(&self) -> Duration {
        match self.is_connected() {
            true => Duration::ZERO,
            false => self.away_since.lock().unwrap_or_else(PoisonError::into_inner).elapsed(),
        }
    }

    pub fn connected(&self) {
        self.connected.store(true, Ordering::Release);
    }

    /// Responses so far, on all streams.
    pub fn responses(&self) -> u64 {
        self.responses.load(Ordering::Relaxed)
    }

    pub fn message(&self, type_url: &str, bytes: u64) {
        self.responses.fetch_add(1, Ordering::Relaxed);
        let mut status = self.lock();
        status.last_progress = Some(Instant::now());
        status.last_error = None;
        // Unknown types come from the network: their number is bounded.
        let is_counted = status.messages.len() < MAX_TYPES || status.messages.contains_key(type_url);
        let key = if is_counted { type_url } else { "other" };
        let count = status.messages.entry(key.to_owned()).or_default();
        count.0 += 1;
        count.1 += bytes;
    }

    pub fn refused(&self, resources: u64) {
        self.lock().refused += resources;
    }

    /// A stream ended. Whether the reason is a new one.
    pub fn ended(&self, why: Termination, error: Option<String>) -> bool {
        if self.connected.swap(false, Ordering::AcqRel) {
            *self.away_since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
        let mut status = self.lock();
        *status.terminations.entry(why.as_str()).or_default() += 1;
        let is_new = status.last_error != error;
        if error.is_some() {
            status.last_error = error;
        }
        is_new
    }

    fn lock(&self) -> MutexGuard<'_, DiscoveryStatus> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

const MAX_TYPES: usize = 16;

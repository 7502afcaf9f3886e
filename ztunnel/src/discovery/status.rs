//! What can be seen of discovery from outside.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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
    pub synced: watch::Sender<bool>,
    connected: AtomicBool,
    rest: Mutex<DiscoveryStatus>,
}

impl Default for Shared {
    fn default() -> Self {
        Self { synced: watch::Sender::new(false), connected: AtomicBool::new(false), rest: Mutex::default() }
    }
}

impl Shared {
    pub fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    pub fn status(&self) -> DiscoveryStatus {
        DiscoveryStatus { connected: self.is_connected(), ..self.lock().clone() }
    }

    pub fn connected(&self) {
        self.connected.store(true, Ordering::Release);
    }

    pub fn message(&self, type_url: &str, bytes: u64) {
        let mut status = self.lock();
        status.last_progress = Some(Instant::now());
        status.last_error = None;
        // Unknown types come from the network: their number is bounded.
        let key = if status.messages.len() < MAX_TYPES { type_url } else { "other" };
        let count = status.messages.entry(key.to_owned()).or_default();
        count.0 += 1;
        count.1 += bytes;
    }

    /// A stream ended. Whether the reason is a new one.
    pub fn ended(&self, why: Termination, error: Option<String>) -> bool {
        self.connected.store(false, Ordering::Release);
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

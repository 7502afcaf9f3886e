//! What bounds new work, and what of it was not begun: the process's descriptors and memory, and each pod's share.
//!
//! Must never touch what is established: a limit only says no to what is new, with a reason.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::config::Limits;
use super::state::Shared;
use crate::lifecycle::Memory;
use crate::telemetry::flow::{Failure, ResponseFlag};

/// A limit that refuses new work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    Descriptors,
    Memory,
    PodConnections,
    PodTunnels,
    PodHandshakes,
    /// One client's part of a pod's handshakes.
    ClientHandshakes,
    /// What waits for a pod's apps.
    PodBuffer,
}

/// What the process as a whole may begin, and what each limit has refused.
#[derive(Debug, Default)]
pub struct Overload {
    memory: Option<Memory>,
    is_memory_short: AtomicBool,
    shed: [AtomicU64; Limit::ALL.len()],
}

impl Limit {
    pub const ALL: [Self; 7] = [
        Self::Descriptors,
        Self::Memory,
        Self::PodConnections,
        Self::PodTunnels,
        Self::PodHandshakes,
        Self::ClientHandshakes,
        Self::PodBuffer,
    ];

    /// For a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Descriptors => "descriptors",
            Self::Memory => "memory",
            Self::PodConnections => "pod_connections",
            Self::PodTunnels => "pod_tunnels",
            Self::PodHandshakes => "pod_handshakes",
            Self::ClientHandshakes => "client_handshakes",
            Self::PodBuffer => "pod_buffer",
        }
    }
}

impl Overload {
    pub fn new(limits: &Limits) -> Self {
        Self { memory: limits.memory.map(Memory::of).or_else(Memory::of_cgroup), ..Self::default() }
    }

    /// Counts what a limit has refused, and says so.
    pub fn refuse(&self, limit: Limit, text: String) -> Failure {
        self.shed[limit as usize].fetch_add(1, Ordering::Relaxed);
        Failure::new(ResponseFlag::Connect, "limit", text)
    }

    /// What a limit has refused so far.
    pub fn shed(&self, limit: Limit) -> u64 {
        self.shed[limit as usize].load(Ordering::Relaxed)
    }

    /// The memory that the process may use, in bytes, if that is bounded.
    pub fn memory(&self) -> Option<u64> {
        self.memory.as_ref().map(Memory::most)
    }

    /// Whether the process has memory for one more connection.
    pub fn check_memory(&self) -> Result<(), Failure> {
        if !self.is_memory_short.load(Ordering::Relaxed) {
            return Ok(());
        }
        let most = self.memory().unwrap_or_default() >> 20;
        Err(self.refuse(Limit::Memory, format!("the process uses nine tenths of its memory, {most} MiB, or more")))
    }

    /// Whether there is a descriptor for a socket that came in, beside those that are kept for what must go on. Without
    /// this the process would run out of them, and nobody could reach it any more, nor would it reach its control plane.
    pub fn check_descriptor(&self, socket: &impl AsRawFd, limits: &Limits) -> Result<(), Failure> {
        let most = limits.descriptors.accepted;
        if socket.as_raw_fd().unsigned_abs() < most {
            return Ok(());
        }
        let text = format!("the proxy has {most} descriptors open already, the most that connections may take");
        Err(self.refuse(Limit::Descriptors, text))
    }

    /// Why a dial failed: one that would have taken a descriptor of those that are kept was refused by us.
    pub fn dial_failure(&self, error: &io::Error, what: &str) -> Failure {
        let text = format!("{what}: {error}");
        if error.raw_os_error() == Some(libc::EMFILE) {
            return self.refuse(Limit::Descriptors, text);
        }
        Failure::new(ResponseFlag::Connect, "dial", text)
    }
}

/// Keeps an eye on the memory.
pub async fn watch_memory(shared: Arc<Shared>) {
    let overload = &shared.overload;
    let Some(memory) = &overload.memory else { return };
    loop {
        let is_short = memory.is_short();
        if overload.is_memory_short.swap(is_short, Ordering::Relaxed) != is_short {
            let (used, most) = (memory.used(), memory.most());
            if is_short {
                tracing::warn!(used, most, "memory is short: new connections are reset");
            } else {
                tracing::info!(used, most, "there is memory for new connections again");
            }
        }
        tokio::time::sleep(MEMORY_LOOK).await;
    }
}

const MEMORY_LOOK: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_a_name_and_a_count_of_its_own() {
        let overload = Overload { is_memory_short: AtomicBool::new(true), ..Overload::default() };
        let names: std::collections::HashSet<_> = Limit::ALL.map(Limit::as_str).into_iter().collect();
        assert_eq!(names.len(), Limit::ALL.len());
        for (index, limit) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, index);
        }
        assert_eq!(overload.check_memory().unwrap_err().step, "limit");
        assert_eq!((overload.shed(Limit::Memory), overload.shed(Limit::Descriptors)), (1, 0));
    }
}

//! Are the worker threads alive? Each one says so every second, from its own runtime; one that is silent for long is
//! stuck, and its connections with it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Watches the workers of a process. Clones are handles of the same one.
#[derive(Clone)]
pub struct Watchdog {
    start: Instant,
    limit: Duration,
    workers: Arc<Mutex<Vec<Worker>>>,
}

/// A worker's way to say that it moves. Dropped when the worker ends in order.
pub struct Beat {
    watchdog: Watchdog,
    last: Arc<AtomicU64>,
}

struct Worker {
    name: String,
    /// Milliseconds since the start.
    last: Arc<AtomicU64>,
}

impl Watchdog {
    /// A worker that is silent for longer than `limit` counts as stuck.
    pub fn new(limit: Duration) -> Self {
        Self { start: Instant::now(), limit, workers: Arc::default() }
    }

    /// Starts to watch a worker; run [`Beat::run`] on its thread.
    pub fn worker(&self, name: impl Into<String>) -> Beat {
        let last = Arc::new(AtomicU64::new(self.now()));
        self.lock().push(Worker { name: name.into(), last: last.clone() });
        Beat { watchdog: self.clone(), last }
    }

    /// Each worker's name and silence.
    pub fn silences(&self) -> Vec<(String, Duration)> {
        let now = self.now();
        let silence = |last: &AtomicU64| Duration::from_millis(now.saturating_sub(last.load(Ordering::Relaxed)));
        self.lock().iter().map(|worker| (worker.name.clone(), silence(&worker.last))).collect()
    }

    /// The workers that are stuck, with their silence.
    pub fn stuck(&self) -> Vec<(String, Duration)> {
        self.silences().into_iter().filter(|(_, silence)| *silence > self.limit).collect()
    }

    fn now(&self) -> u64 {
        self.start.elapsed().as_millis() as u64
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Worker>> {
        self.workers.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Beat {
    pub fn beat(&self) {
        self.last.store(self.watchdog.now(), Ordering::Relaxed);
    }

    /// Beats every second, for ever.
    pub async fn run(self) {
        loop {
            self.beat();
            tokio::time::sleep(EVERY).await;
        }
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The worker is gone, but not in order: it stays on the list and will be found stuck.
            return;
        }
        self.watchdog.lock().retain(|worker| !Arc::ptr_eq(&worker.last, &self.last));
    }
}

const EVERY: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_silent_worker_is_stuck_until_it_moves_or_ends() {
        let watchdog = Watchdog::new(Duration::from_millis(20));
        let (silent, moving) = (watchdog.worker("worker-0"), watchdog.worker("worker-1"));
        while watchdog.silences()[0].1 <= Duration::from_millis(20) {
            std::thread::yield_now();
        }
        moving.beat();
        let stuck = watchdog.stuck();
        assert!(stuck.iter().any(|(name, _)| name == "worker-0"), "{stuck:?}");
        silent.beat();
        assert!(watchdog.silences()[0].1 < Duration::from_secs(1));
        drop(silent);
        assert_eq!(watchdog.silences().len(), 1);
    }

    #[tokio::test]
    async fn a_running_beat_keeps_its_worker_alive_and_a_blocked_thread_does_not() {
        let watchdog = Watchdog::new(Duration::from_millis(1500));
        let beat = tokio::spawn(watchdog.worker("worker-0").run());
        tokio::task::yield_now().await;
        assert!(watchdog.stuck().is_empty());
        // This blocks the runtime's only thread, as a stuck worker would be.
        while watchdog.silences()[0].1 <= Duration::from_millis(1500) {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(watchdog.stuck()[0].0, "worker-0");
        beat.abort();
    }
}

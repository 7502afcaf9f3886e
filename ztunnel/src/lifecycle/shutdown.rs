//! Stopping: one order to stop, a time for open work to end, then the end.
//!
//! Must never hang: work that outlasts the deadline is cut, and a second signal ends the process at once.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// The order to stop, and the work that is still open. Clones are handles of the same one; it works across runtimes.
#[derive(Clone)]
pub struct Shutdown {
    /// Why it was ordered.
    order: Arc<watch::Sender<Option<&'static str>>>,
    /// Pieces of open work.
    work: Arc<watch::Sender<usize>>,
}

/// A piece of work that should end before the process does: a connection, a listener. Dropped when it is over.
pub struct Work(Arc<watch::Sender<usize>>);

/// How a drain ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drained {
    /// All work was over in time.
    Whole,
    /// So many pieces of work were still open at the deadline.
    Cut(usize),
}

impl std::fmt::Display for Drained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Whole => f.write_str("all connections were over"),
            Self::Cut(1) => f.write_str("1 connection is cut"),
            Self::Cut(count) => write!(f, "{count} connections are cut"),
        }
    }
}

impl Shutdown {
    pub fn new() -> Self {
        Self { order: Arc::new(watch::Sender::new(None)), work: Arc::new(watch::Sender::new(0)) }
    }

    /// Orders the stop. Later orders change nothing.
    pub fn order(&self, why: &'static str) {
        let first = self.order.send_if_modified(|order| order.is_none() && order.replace(why).is_none());
        if first {
            tracing::info!(target: "lifecycle", why, open = self.open_work(), "stopping");
        }
    }

    /// Why the stop was ordered, if it was.
    pub fn is_ordered(&self) -> Option<&'static str> {
        *self.order.borrow()
    }

    /// Waits for the order; gives its reason.
    pub async fn ordered(&self) -> &'static str {
        let mut order = self.order.subscribe();
        // The sender lives as long as `self`, so the wait cannot fail.
        match order.wait_for(Option::is_some).await.map(|why| *why) {
            Ok(Some(why)) => why,
            _ => std::future::pending().await,
        }
    }

    /// Registers a piece of work.
    pub fn work(&self) -> Work {
        self.work.send_modify(|open| *open += 1);
        Work(self.work.clone())
    }

    pub fn open_work(&self) -> usize {
        *self.work.borrow()
    }

    /// Waits until no work is open, at most `deadline`.
    pub async fn drained(&self, deadline: Duration) -> Drained {
        let mut work = self.work.subscribe();
        let over = tokio::time::timeout(deadline, work.wait_for(|open| *open == 0)).await.is_ok();
        if over { Drained::Whole } else { Drained::Cut(self.open_work()) }
    }

    /// Turns SIGTERM and SIGINT into the order; the second signal ends the process at once (`before_exit` is called
    /// first, to write what is left of the log). Returns only if signals cannot be received.
    pub async fn on_signals(&self, before_exit: impl FnOnce()) -> io::Result<()> {
        let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        let mut next = async || {
            tokio::select! {
                _ = terminate.recv() => "SIGTERM",
                _ = interrupt.recv() => "SIGINT",
            }
        };
        self.order(next().await);
        let name = next().await;
        tracing::warn!(target: "lifecycle", signal = name, open = self.open_work(), "second signal, ending at once");
        before_exit();
        std::process::exit(EXIT_BY_SIGNAL);
    }
}

impl Default for Shutdown {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

/// As a shell shows the end by SIGINT.
const EXIT_BY_SIGNAL: i32 = 130;

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_order_counts_and_reaches_who_waits_and_who_comes_later() {
        let shutdown = Shutdown::new();
        assert_eq!(shutdown.is_ordered(), None);
        let waiting = tokio::spawn({
            let shutdown = shutdown.clone();
            async move { shutdown.ordered().await }
        });
        tokio::task::yield_now().await;
        shutdown.order("SIGTERM");
        shutdown.order("quitquitquit");
        assert_eq!(waiting.await.unwrap(), "SIGTERM");
        assert_eq!(shutdown.ordered().await, "SIGTERM");
    }

    #[tokio::test]
    async fn a_drain_ends_with_its_work_or_at_its_deadline() {
        let shutdown = Shutdown::new();
        assert_eq!(shutdown.drained(Duration::from_secs(5)).await, Drained::Whole);
        let (long, short) = (shutdown.work(), shutdown.work());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            drop(short);
        });
        while shutdown.open_work() == 2 {
            assert!(matches!(shutdown.drained(Duration::from_millis(1)).await, Drained::Cut(1 | 2)));
        }
        let from_another_runtime = std::thread::spawn(move || drop(long));
        assert_eq!(shutdown.drained(Duration::from_secs(60)).await, Drained::Whole);
        from_another_runtime.join().unwrap();
    }
}

//! One look at the node's processes for all pods that ask at the same time.
//!
//! Must never scan more often than its shortest interval, however many pods ask.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};
use tracing::warn;

use super::procs::Scan;

/// Hands out scans.
#[derive(Clone, Debug)]
pub struct Scanner {
    asked: Arc<Notify>,
    latest: watch::Receiver<Option<Look>>,
}

/// A scan and when it began.
#[derive(Clone, Debug)]
struct Look {
    begun: Instant,
    scan: Arc<Scan>,
}

impl Scanner {
    /// The scanner, and what must be run for it.
    pub fn new(proc: PathBuf) -> (Scanner, impl Future<Output = ()> + Send) {
        let asked = Arc::new(Notify::new());
        let (sender, latest) = watch::channel(None);
        (Scanner { asked: asked.clone(), latest }, scan_when_asked(proc, asked, sender))
    }

    /// A scan that is not older than this.
    pub async fn within(&self, age: Duration) -> Arc<Scan> {
        let oldest = Instant::now().checked_sub(age);
        let mut latest = self.latest.clone();
        loop {
            if let Some(look) = &*latest.borrow_and_update()
                && oldest.is_none_or(|oldest| look.begun >= oldest)
            {
                return look.scan.clone();
            }
            self.asked.notify_one();
            if latest.changed().await.is_err() {
                // The agent is ending.
                return Arc::default();
            }
        }
    }
}

async fn scan_when_asked(proc: PathBuf, asked: Arc<Notify>, sender: watch::Sender<Option<Look>>) {
    loop {
        asked.notified().await;
        let begun = Instant::now();
        let proc = proc.clone();
        match tokio::task::spawn_blocking(move || Scan::take(&proc)).await {
            Ok(Ok(scan)) => {
                sender.send_replace(Some(Look { begun, scan: Arc::new(scan) }));
            }
            Ok(Err(error)) => {
                warn!(%error, "cannot read the processes of the node");
                asked.notify_one();
            }
            Err(_) => return,
        }
        tokio::time::sleep(SHORTEST_INTERVAL).await;
    }
}

const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

//! The file with revocation lists: read at the start, and again whenever it has changed.
//!
//! Must never forget what was revoked because the file is broken or gone: the lists that were read last stay.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{CrlSet, Trust, rfc3339};
use crate::files::read_small;

/// A watched file. By polling: it sees every way in which a file can be replaced.
#[derive(Debug)]
pub struct CrlFile {
    path: PathBuf,
    trust: Trust,
    broken: AtomicBool,
    loads: AtomicU64,
    failures: AtomicU64,
}

/// What tells one version of the file from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl CrlFile {
    /// Reads the file now, and follows it for as long as the present runtime lives.
    pub fn start(path: PathBuf, trust: Trust) -> Arc<Self> {
        let this = Arc::new(Self { path, trust, broken: false.into(), loads: 0.into(), failures: 0.into() });
        let first = this.version();
        this.load(&first);
        tokio::spawn(this.clone().follow(first));
        this
    }

    /// Whether the file as it is now cannot be used.
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// How often lists were read from it, and how often that failed.
    pub fn counts(&self) -> (u64, u64) {
        (self.loads.load(Ordering::Relaxed), self.failures.load(Ordering::Relaxed))
    }

    async fn follow(self: Arc<Self>, first: Result<Version, String>) {
        let (mut taken, mut before) = (first.clone(), first);
        let mut tried = Instant::now();
        loop {
            tokio::time::sleep(POLL).await;
            let now = self.version();
            // What could not be read may have been this process's trouble.
            let is_due = self.is_broken() && tried.elapsed() >= RETRY;
            // One that is being written is not whole yet: it must be the same at two looks.
            if (now != taken || is_due) && now == before {
                tried = Instant::now();
                let (this, version) = (self.clone(), now.clone());
                // Large lists take a while; discovery and certificates run on this thread.
                let _ = tokio::task::spawn_blocking(move || this.load(&version)).await;
                taken = now.clone();
            }
            before = now;
        }
    }

    fn version(&self) -> Result<Version, String> {
        std::fs::metadata(&self.path).map(|m| Version::of(&m)).map_err(|e| e.to_string())
    }

    fn load(&self, version: &Result<Version, String>) {
        let path = self.path.display();
        match version.clone().and_then(|_| read(&self.path)) {
            Ok(lists) => {
                let ends = lists.next_update().map(rfc3339);
                tracing::info!(%path, lists = lists.len(), revoked = lists.revoked(), ends, "revocation lists are read");
                self.trust.revoke(lists);
                self.broken.store(false, Ordering::Relaxed);
                self.loads.fetch_add(1, Ordering::Relaxed);
            }
            Err(reason) => {
                let held = self.trust.crls().len();
                tracing::error!(%path, reason, held, "the revocation lists cannot be read; those held before stay");
                self.broken.store(true, Ordering::Relaxed);
                self.failures.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

impl Version {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

fn read(path: &Path) -> Result<CrlSet, String> {
    let text = read_small(path, MAX_SIZE).map_err(|e| e.to_string())?;
    CrlSet::read(&text).map_err(|e| e.to_string())
}

const POLL: Duration = Duration::from_millis(500);
/// From a failed reading to the next one of the same file.
const RETRY: Duration = Duration::from_secs(30);
/// Bytes: some hundred thousand revoked certificates.
const MAX_SIZE: usize = 16 << 20;

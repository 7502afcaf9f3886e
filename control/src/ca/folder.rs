//! Hears that something in the authority's folder has changed. Who waits here must look by himself now and then as well:
//! not every file system tells.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use notify::event::{AccessKind, AccessMode, EventKind};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;

use super::files::LOCK;

/// A folder that is listened to. Files in a mounted Secret change by a symlink in it.
pub struct FolderWatch {
    dir: PathBuf,
    heard: Arc<Notify>,
    watcher: Option<RecommendedWatcher>,
    /// Device and inode that are listened to.
    at: Option<(u64, u64)>,
}

impl FolderWatch {
    pub fn new(dir: &Path) -> Self {
        let heard = Arc::new(Notify::new());
        let tell = heard.clone();
        let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            if event.as_ref().map_or(true, is_change) {
                tell.notify_one();
            }
        });
        let watcher = watcher.inspect_err(|error| {
            tracing::warn!(folder = %dir.display(), %error, "changes are not heard of, only looked for");
        });
        let mut this = Self { dir: dir.to_owned(), heard, watcher: watcher.ok(), at: None };
        this.listen();
        this
    }

    /// Returns once something has changed since it was asked last.
    pub async fn changed(&self) {
        self.heard.notified().await;
    }

    /// Makes sure that the folder of today is listened to, after it was replaced.
    pub fn listen(&mut self) {
        let Some(watcher) = &mut self.watcher else { return };
        let there = std::fs::metadata(&self.dir).ok().map(|meta| (meta.dev(), meta.ino()));
        if there == self.at {
            return;
        }
        if self.at.take().is_some() {
            // Fails if the folder went away, and with it the watch.
            let _ = watcher.unwatch(&self.dir);
        }
        if watcher.watch(&self.dir, RecursiveMode::NonRecursive).is_ok() {
            self.at = there;
        }
    }
}

impl std::fmt::Debug for FolderWatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FolderWatch({})", self.dir.display())
    }
}

fn is_change(event: &notify::Event) -> bool {
    let is_read = match event.kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write)) => false,
        EventKind::Access(_) => true,
        _ => false,
    };
    let is_own = !event.paths.is_empty() && event.paths.iter().all(|path| path.file_name().is_some_and(|n| n == LOCK));
    !is_read && !is_own
}

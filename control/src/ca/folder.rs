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

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::time::Duration;

    use notify::event::{AccessKind, AccessMode, CreateKind, ModifyKind, RenameMode};

    use super::super::files::write_whole;
    use super::super::tests::Dir;
    use super::*;

    async fn heard(watch: &FolderWatch) {
        tokio::time::timeout(Duration::from_secs(20), watch.changed()).await.expect("a change is heard of");
    }

    #[tokio::test]
    async fn a_file_put_in_place_is_heard_of() {
        let dir = Dir::new("heard");
        fs::create_dir(&dir.0).unwrap();
        let watch = FolderWatch::new(&dir.0);
        write_whole(&dir.path("ca-cert.pem"), b"text", 0o600).unwrap();
        heard(&watch).await;
    }

    /// So the files of a mounted Secret change.
    #[tokio::test]
    async fn a_link_that_points_elsewhere_is_heard_of() {
        let dir = Dir::new("heard-link");
        for version in ["1", "2"] {
            fs::create_dir_all(dir.path(version)).unwrap();
            fs::write(dir.path(version).join("ca-cert.pem"), version).unwrap();
        }
        symlink("1", dir.path("..data")).unwrap();
        symlink("..data/ca-cert.pem", dir.path("ca-cert.pem")).unwrap();
        symlink("2", dir.path("..data_tmp")).unwrap();
        let watch = FolderWatch::new(&dir.0);
        fs::rename(dir.path("..data_tmp"), dir.path("..data")).unwrap();
        heard(&watch).await;
        assert_eq!(fs::read_to_string(dir.path("ca-cert.pem")).unwrap(), "2");
    }

    #[tokio::test]
    async fn a_folder_that_was_replaced_or_comes_later_is_listened_to() {
        let dir = Dir::new("heard-later");
        let mut watch = FolderWatch::new(&dir.0);
        assert_eq!(watch.at, None);
        for _ in 0..2 {
            fs::create_dir(&dir.0).unwrap();
            watch.listen();
            let is = fs::metadata(&dir.0).unwrap();
            assert_eq!(watch.at, Some((is.dev(), is.ino())));
            fs::write(dir.path("ca-cert.pem"), "text").unwrap();
            heard(&watch).await;
            fs::remove_dir_all(&dir.0).unwrap();
            watch.listen();
            assert_eq!(watch.at, None);
        }
    }

    #[test]
    fn what_control_does_itself_at_each_look_is_no_change() {
        let event = |kind, file: &str| notify::Event::new(kind).add_path(Path::new("/ca").join(file));
        let close = |mode| EventKind::Access(AccessKind::Close(mode));
        for (kind, file, expected) in [
            (EventKind::Access(AccessKind::Open(AccessMode::Any)), "root-key.pem", false),
            (close(AccessMode::Read), "root-key.pem", false),
            (EventKind::Create(CreateKind::File), ".lock", false),
            (close(AccessMode::Write), ".lock", false),
            (close(AccessMode::Write), "root-key.pem", true),
            (EventKind::Modify(ModifyKind::Name(RenameMode::To)), "root-cert.pem", true),
            (EventKind::Create(CreateKind::File), "next-key.pem", true),
        ] {
            assert_eq!(is_change(&event(kind, file)), expected, "{kind:?} of {file}");
        }
        assert!(is_change(&notify::Event::new(EventKind::Other)), "the queue ran over: anything may have changed");
    }
}

//! The folder as a source of objects: a thread that hears of changes (inotify) and also looks by itself.
//!
//! Must never stop publishing because it no longer hears: what inotify misses, the next look finds.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use notify::event::{AccessKind, AccessMode, EventKind, ModifyKind, RenameMode};
use notify::{RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::watch;

use super::folder::{Content, FileChange, Folder, Hint};
use super::merge::Merge;
use super::objects::{ObjectKey, Objects, Problem};

/// Where to read from. Only the files directly in the folders count: `*.yaml`, `*.yml`, `*.json`, not hidden ones.
#[derive(Debug, Clone)]
pub struct Folders {
    pub manifests: PathBuf,
    /// Status files of pods, as [`StatusFolder`](super::StatusFolder) writes them. The folder may come later.
    pub status: Option<PathBuf>,
}

/// The watched folders. Dropping it ends the watching; what was published stays with the receivers.
#[derive(Debug)]
pub struct Watch {
    objects: watch::Receiver<Arc<Objects>>,
    inbox: Arc<Inbox>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    #[error("manifests folder {folder}: {source}")]
    Unreadable { folder: PathBuf, source: io::Error },
    #[error("no thread for watching {folder}: {source}")]
    Thread { folder: PathBuf, source: io::Error },
}

/// Reads the folders once, then goes on watching them. Blocks until the first reading is done; broken manifests are
/// no error but [problems](Objects::problems).
pub fn watch(folders: Folders) -> Result<Watch, WatchError> {
    let unreadable = |source| WatchError::Unreadable { folder: folders.manifests.clone(), source };
    let mut worker = Worker::new(&folders);
    let changes = worker.folders[0].folder.load().map_err(unreadable)?;
    worker.apply(0, changes);
    if let Some(statuses) = worker.folders.get_mut(1) {
        // Agents make the folder; until then nothing is captured.
        let changes = statuses.folder.load().unwrap_or_default();
        worker.apply(1, changes);
    }
    let (sender, objects) = watch::channel(Arc::new(Objects::default()));
    let inbox = Arc::clone(&worker.inbox);
    worker.publish(&sender, true);
    let thread = std::thread::Builder::new()
        .name("manifests".into())
        .spawn(move || worker.run(&sender))
        .map_err(|source| WatchError::Thread { folder: folders.manifests.clone(), source })?;
    Ok(Watch { objects, inbox, thread: Some(thread) })
}

impl Watch {
    /// The objects, now and from now on. The first value is complete.
    pub fn objects(&self) -> watch::Receiver<Arc<Objects>> {
        self.objects.clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.inbox.put(|heard| heard.stop = true);
        if let Some(thread) = self.thread.take() {
            // A panic over there has been reported by its hook.
            let _ = thread.join();
        }
    }
}

/// What was heard and not yet looked at: bounded, since a name is in it once.
#[derive(Debug, Default)]
struct Inbox {
    heard: Mutex<Heard>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct Heard {
    files: HashMap<PathBuf, Hint>,
    /// Look at everything.
    all: bool,
    stop: bool,
}

struct Worker {
    folders: Vec<Watched>,
    merge: Merge,
    inbox: Arc<Inbox>,
    notifier: Option<RecommendedWatcher>,
    problems: Vec<Problem>,
    generation: u64,
}

struct Watched {
    folder: Folder,
    /// Device and inode of the folder that inotify looks at.
    heard_at: Option<(u64, u64)>,
}

impl Inbox {
    fn put(&self, change: impl FnOnce(&mut Heard)) {
        change(&mut self.heard.lock().unwrap_or_else(PoisonError::into_inner));
        self.more.notify_one();
    }

    /// Waits until something is heard or the time has come; gathers what belongs to one burst.
    fn wait(&self, until: Instant) -> Heard {
        let guard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = until.saturating_duration_since(Instant::now());
        let quiet = |heard: &mut Heard| heard.files.is_empty() && !heard.all && !heard.stop;
        let (guard, timeout) =
            self.more.wait_timeout_while(guard, patience, quiet).unwrap_or_else(PoisonError::into_inner);
        drop(guard);
        if !timeout.timed_out() {
            std::thread::sleep(GATHER);
        }
        let mut guard = self.heard.lock().unwrap_or_else(PoisonError::into_inner);
        let stop = guard.stop;
        Heard { stop, ..std::mem::take(&mut *guard) }
    }

    fn hear(&self, event: notify::Result<notify::Event>) {
        let Ok(event) = event else { return self.put(|heard| heard.all = true) };
        if event.need_rescan() {
            return self.put(|heard| heard.all = true);
        }
        let hint = match event.kind {
            EventKind::Access(AccessKind::Close(AccessMode::Write)) => Hint::Complete,
            EventKind::Modify(ModifyKind::Name(RenameMode::To)) => Hint::Complete,
            EventKind::Modify(ModifyKind::Data(_)) => Hint::Writing,
            // Our own reading is heard as well.
            EventKind::Access(_) => return,
            // With both names; each was also told by itself.
            EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => return,
            EventKind::Any | EventKind::Create(_) | EventKind::Modify(_) | EventKind::Remove(_) | EventKind::Other => {
                Hint::Look
            }
        };
        self.put(|heard| {
            for path in event.paths {
                // The target of symlinks was swapped (as the kubelet does with ConfigMaps): any file may be another.
                let hidden = path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(".."));
                if hidden || heard.files.len() >= MAX_HEARD {
                    heard.all = true;
                    continue;
                }
                let known = heard.files.entry(path).or_insert(hint);
                // Written to again after it was closed: not complete any more.
                *known = if hint == Hint::Writing { hint } else { hint.max(*known) };
            }
        });
    }
}

impl Worker {
    fn new(folders: &Folders) -> Self {
        let watched = |dir: &Path, content| Watched { folder: Folder::new(dir, content), heard_at: None };
        let mut list = vec![watched(&folders.manifests, Content::Manifests)];
        list.extend(folders.status.as_deref().map(|dir| watched(dir, Content::Statuses)));
        let inbox = Arc::new(Inbox::default());
        let handler = Arc::clone(&inbox);
        let notifier = notify::recommended_watcher(move |event| handler.hear(event))
            .inspect_err(|e| tracing::warn!(error = %e, "no inotify: the folder of manifests is only polled"))
            .ok();
        let mut worker =
            Self { folders: list, merge: Merge::default(), inbox, notifier, problems: Vec::new(), generation: 0 };
        worker.listen();
        worker
    }

    fn run(mut self, sender: &watch::Sender<Arc<Objects>>) {
        let mut next_look = Instant::now() + self.patience();
        loop {
            let due = self.folders.iter().filter_map(|w| w.folder.next_due()).chain(self.merge.next_due()).min();
            let mut heard = self.inbox.wait(due.map_or(next_look, |at| at.min(next_look)));
            if heard.stop {
                return;
            }
            let now = Instant::now();
            for (path, hint) in heard.files {
                self.heard(&path, hint, now, &mut heard.all);
            }
            let look = heard.all || now >= next_look;
            if look {
                self.listen();
                next_look = now + self.patience();
            }
            for index in 0..self.folders.len() {
                let folder = &mut self.folders[index].folder;
                let mut changes = if look { folder.scan(now) } else { Vec::new() };
                changes.extend(folder.due(now));
                self.apply(index, changes);
            }
            self.merge.expire(now);
            self.publish(sender, false);
        }
    }

    fn heard(&mut self, path: &Path, hint: Hint, now: Instant, all: &mut bool) {
        let name = path.file_name().and_then(|n| n.to_str());
        let index = self.folders.iter().position(|w| path.parent() == Some(w.folder.dir()));
        let (Some(name), Some(index)) = (name, index) else {
            // The folder itself.
            *all = true;
            return;
        };
        let change = self.folders[index].folder.heard(name, hint, now);
        self.apply(index, change);
    }

    fn apply(&mut self, index: usize, changes: impl IntoIterator<Item = FileChange>) {
        let now = Instant::now();
        for mut change in changes {
            // Names of the two folders are told apart; they never give objects of one kind.
            if index > 0 {
                change.file = format!("status {}", change.file).into();
            }
            self.merge.apply(change, now);
        }
    }

    /// Makes sure that inotify looks at the folders that are there now.
    fn listen(&mut self) {
        let Some(notifier) = &mut self.notifier else { return };
        for watched in &mut self.folders {
            let dir = watched.folder.dir();
            let there = std::fs::metadata(dir).ok().map(|m| (m.dev(), m.ino()));
            if there == watched.heard_at {
                continue;
            }
            if watched.heard_at.take().is_some() {
                // Fails if the folder went away, and with it the watch.
                let _ = notifier.unwatch(dir);
            }
            match notifier.watch(dir, RecursiveMode::NonRecursive) {
                Ok(()) => watched.heard_at = there,
                Err(_) if there.is_none() => {}
                Err(e) => tracing::warn!(folder = %dir.display(), error = %e, "not heard by inotify, only polled"),
            }
        }
    }

    fn patience(&self) -> Duration {
        let hears = self.notifier.is_some() && self.folders.iter().all(|w| w.heard_at.is_some());
        if hears { LOOK_HEARING } else { LOOK_DEAF }
    }

    fn publish(&mut self, sender: &watch::Sender<Arc<Objects>>, first: bool) {
        let mut problems = Vec::new();
        for watched in &self.folders {
            watched.folder.problems(&mut problems);
        }
        let path = |key: &ObjectKey, file: &str| {
            let index = usize::from(matches!(key, ObjectKey::Status(_)));
            let dir = self.folders.get(index).map_or(Path::new(""), |w| w.folder.dir());
            dir.join(file.strip_prefix("status ").unwrap_or(file))
        };
        self.merge.problems(path, &mut problems);
        let others = problems != self.problems;
        if others {
            // There may be thousands of each.
            let before: HashSet<&Problem> = self.problems.iter().collect();
            let now: HashSet<&Problem> = problems.iter().collect();
            for problem in problems.iter().filter(|p| !before.contains(p)) {
                tracing::warn!(
                    file = %problem.file.display(),
                    line = problem.line,
                    object = problem.object.as_ref().map(tracing::field::display),
                    reason = &*problem.reason,
                    "a manifest is not used, the last good version stays"
                );
            }
            for problem in self.problems.iter().filter(|p| !now.contains(p)) {
                tracing::info!(file = %problem.file.display(), "a manifest is right again");
            }
            self.problems = problems;
        }
        if self.merge.take_changed() || others || first {
            self.generation += 1;
            let mut objects = self.merge.objects().clone();
            (objects.generation, objects.problems) = (self.generation, self.problems.as_slice().into());
            sender.send_replace(Arc::new(objects));
        }
    }
}

/// How often every file is looked at when changes are also heard of; finds changes behind symlinks.
const LOOK_HEARING: Duration = Duration::from_secs(5);
/// The same when they are not heard of.
const LOOK_DEAF: Duration = Duration::from_millis(500);
/// How long to gather what belongs to one burst.
const GATHER: Duration = Duration::from_millis(5);
/// Past so many names, everything is looked at.
const MAX_HEARD: usize = 4096;

//! Keeps program and entry in place while the agent runs: hears of changes (inotify), and looks by itself as well.
//!
//! Must never fight: with another program that keeps taking the entry out, it is put back ever more rarely.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tracing::{error, info, warn};

use super::super::PLUGIN;
use super::{Install, InstallError, Standing, install_entry, install_program};

/// What is told of the installation by metrics.
#[derive(Debug, Default)]
pub struct InstallState {
    in_place: AtomicBool,
    puts: AtomicU64,
}

impl InstallState {
    /// Whether the chain in use has the entry, and the program is there.
    pub fn in_place(&self) -> bool {
        self.in_place.load(Ordering::Relaxed)
    }

    /// How often the entry was put into a chain.
    pub fn puts(&self) -> u64 {
        self.puts.load(Ordering::Relaxed)
    }
}

/// Installs, and keeps it so for ever. Dropping the future leaves everything installed.
pub async fn keep(install: Install, state: Arc<InstallState>) {
    let changed = Arc::new(Notify::new());
    let mut ear = Ear::new(&install.dirs.conf, changed.clone());
    let mut patience = Patience::default();
    let mut said = String::new();
    let mut program = None;
    loop {
        ear.listen();
        let wait = patience.wait(Instant::now());
        let (asked, seen) = (install.clone(), program);
        let look = tokio::task::spawn_blocking(move || look(&asked, seen, wait.is_zero())).await;
        let Ok((look, seen)) = look else { return };
        program = seen;
        let in_place = matches!(look, Ok(Standing::InPlace(_) | Standing::Put(_)));
        state.in_place.store(in_place, Ordering::Relaxed);
        // One line for each change of how things stand.
        let says = match &look {
            Ok(Standing::Put(path) | Standing::InPlace(path)) => format!("in {}", path.display()),
            Ok(standing) => format!("{standing:?}"),
            Err(error) => error.to_string(),
        };
        let (news, is_failed) = (says != said, look.is_err());
        said = says;
        match look {
            Ok(Standing::Put(path)) => {
                state.puts.fetch_add(1, Ordering::Relaxed);
                patience.put(Instant::now());
                info!(file = %path.display(), "the CNI plugin is in the chain");
                continue;
            }
            Ok(Standing::InPlace(path)) if news => info!(file = %path.display(), "the CNI plugin stands in the chain"),
            Ok(Standing::NoChain) if news => {
                let dir = install.dirs.conf.display();
                warn!(%dir, "there is no CNI configuration yet: pods start without the plugin");
            }
            Ok(Standing::Missing(path)) if news => error!(
                file = %path.display(),
                wait = ?wait,
                "another program keeps taking the CNI plugin out of the chain: pods start without it until it is put back"
            ),
            Ok(_) => {}
            Err(error) if news => error!(%error, "the CNI plugin cannot be installed: pods start without it"),
            Err(_) => {}
        }
        // What a failed attempt did in the folder is heard as well.
        let gather = if is_failed { AFTER_FAILURE } else { GATHER };
        let look = if ear.hears() { LOOK } else { LOOK_DEAF };
        let sleep = if wait.is_zero() { look } else { wait.min(look) };
        tokio::select! {
            () = changed.notified() => tokio::time::sleep(gather).await,
            () = tokio::time::sleep(sleep) => {}
        }
    }
}

/// The installed program as it was seen to be right: device, inode, size, and time of its last change.
type Seen = Option<(u64, u64, u64, (i64, i64))>;

/// The program first: a chain must not name one that is not there. Its content is compared only when it is another file
/// than the one seen before.
fn look(install: &Install, seen: Seen, write: bool) -> (Result<Standing, InstallError>, Seen) {
    let see = || {
        let meta = std::fs::metadata(install.dirs.bin.join(PLUGIN)).ok()?;
        Some((meta.dev(), meta.ino(), meta.len(), (meta.ctime(), meta.ctime_nsec())))
    };
    if seen.is_none() || see() != seen {
        match install_program(&install.program, &install.dirs.bin) {
            Ok(true) => info!(dir = %install.dirs.bin.display(), "the CNI plugin's program is installed"),
            Ok(false) => {}
            Err(error) => return (Err(error), None),
        }
    }
    (install_entry(install, write), see())
}

/// Hears of what happens in a folder, which may come later or be replaced.
struct Ear {
    dir: std::path::PathBuf,
    notifier: Option<RecommendedWatcher>,
    /// Device and inode of the folder that is listened to.
    at: Option<(u64, u64)>,
}

impl Ear {
    fn new(dir: &Path, changed: Arc<Notify>) -> Ear {
        let hear = move |event: notify::Result<notify::Event>| {
            // Our own reading is heard as well.
            if !event.is_ok_and(|event| matches!(event.kind, EventKind::Access(notify::event::AccessKind::Open(_)))) {
                changed.notify_one();
            }
        };
        let notifier = notify::recommended_watcher(hear);
        let notifier = notifier.inspect_err(|error| warn!(%error, "no inotify: the CNI configuration is only polled"));
        Ear { dir: dir.to_owned(), notifier: notifier.ok(), at: None }
    }

    fn hears(&self) -> bool {
        self.at.is_some()
    }

    fn listen(&mut self) {
        let Some(notifier) = &mut self.notifier else { return };
        let there = std::fs::metadata(&self.dir).ok().map(|meta| (meta.dev(), meta.ino()));
        if there == self.at {
            return;
        }
        if self.at.take().is_some() {
            // Fails if the folder went away, and with it the watch.
            let _ = notifier.unwatch(&self.dir);
        }
        if there.is_some() && notifier.watch(&self.dir, RecursiveMode::NonRecursive).is_ok() {
            self.at = there;
        }
    }
}

/// How long to leave things as they are, by how often the entry had to be put back of late.
#[derive(Debug, Default)]
struct Patience {
    puts: Vec<Instant>,
}

impl Patience {
    fn put(&mut self, now: Instant) {
        self.puts.retain(|put| now.saturating_duration_since(*put) < MEMORY);
        self.puts.push(now);
    }

    fn wait(&self, now: Instant) -> Duration {
        let recent = self.puts.iter().filter(|put| now.saturating_duration_since(**put) < MEMORY).count();
        let (Some(last), Some(beyond)) = (self.puts.last(), recent.checked_sub(FREE_PUTS)) else {
            return Duration::ZERO;
        };
        let pause = FIRST_PAUSE.saturating_mul(1 << beyond.min(16)).min(LONGEST_PAUSE);
        (*last + pause).saturating_duration_since(now)
    }
}

/// How often to look without having heard anything.
const LOOK: Duration = Duration::from_secs(10);
/// The same while the folder is not there, or there is no inotify.
const LOOK_DEAF: Duration = Duration::from_millis(500);
/// How long to gather what belongs to one change.
const GATHER: Duration = Duration::from_millis(10);
const AFTER_FAILURE: Duration = Duration::from_secs(1);
/// So many times in [`MEMORY`] the entry is put back at once.
const FREE_PUTS: usize = 5;
const MEMORY: Duration = Duration::from_secs(600);
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_is_put_back_at_once_a_few_times_then_ever_more_rarely() {
        let mut patience = Patience::default();
        let start = Instant::now();
        let mut waits = Vec::new();
        for _ in 0..14 {
            waits.push(patience.wait(start).as_secs());
            patience.put(start);
        }
        assert_eq!(waits, [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(patience.wait(start + LONGEST_PAUSE), Duration::ZERO);
        let calm = start + MEMORY;
        assert_eq!(patience.wait(calm), Duration::ZERO);
        patience.put(calm);
        assert_eq!(patience.wait(calm), Duration::ZERO, "what is long ago counts no more");
    }
}

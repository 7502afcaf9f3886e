//! What the container runtime has told of the pods' sandboxes, by the CNI plugin: a pod's namespace and its addresses,
//! before any process runs in it and before its object tells any.
//!
//! Must never hold a namespace longer than the pod: it would keep its network alive.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::watch;

use crate::capture::netns::Netns;

/// A pod's sandbox. Equal are those of one container and one namespace.
#[derive(Debug)]
pub struct Sandbox {
    /// The runtime's number of it.
    pub container: String,
    pub netns: Arc<Netns>,
    pub addresses: Vec<IpAddr>,
    /// When it was told, in clock ticks since boot, as the start of processes is: what ran before is not of this sandbox.
    pub since: u64,
    told: Instant,
    progress: watch::Sender<Progress>,
}

/// How far the pod is on its way into the mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Begun,
    /// What the last step failed for; it is tried again.
    Stuck(String),
    Captured,
}

/// The sandboxes of the node's pods, by the uid of the pod's object.
#[derive(Debug, Default)]
pub struct Sandboxes {
    known: Mutex<HashMap<String, Arc<Sandbox>>>,
    changed: watch::Sender<()>,
}

impl Sandbox {
    pub fn new(container: String, netns: Arc<Netns>, addresses: Vec<IpAddr>) -> Sandbox {
        let boot = clock_gettime(ClockId::Boottime);
        let since = boot.tv_sec as u64 * TICKS + boot.tv_nsec as u64 / (1_000_000_000 / TICKS);
        Sandbox {
            container,
            netns,
            addresses,
            since,
            told: Instant::now(),
            progress: watch::Sender::new(Progress::Begun),
        }
    }

    /// For who waits until the pod is captured.
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// The runtime waits for it: there is no process in it yet.
    pub fn is_awaited(&self) -> bool {
        self.progress.receiver_count() > 0
    }

    pub fn report(&self, progress: Progress) {
        self.progress.send_if_modified(|held| {
            let news = *held != progress;
            *held = progress;
            news
        });
    }
}

impl PartialEq for Sandbox {
    fn eq(&self, other: &Sandbox) -> bool {
        self.container == other.container && self.netns == other.netns
    }
}

impl Eq for Sandbox {}

impl Sandboxes {
    /// Tells when there are others.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    pub fn get(&self, uid: &str) -> Option<Arc<Sandbox>> {
        self.lock().get(uid).cloned()
    }

    /// The sandbox of a pod from now on. One that is known already stays.
    pub fn put(&self, uid: &str, sandbox: Sandbox) -> Arc<Sandbox> {
        let kept = {
            let mut known = self.lock();
            match known.get(uid) {
                Some(held) if **held == sandbox => return held.clone(),
                _ => {}
            }
            let kept = Arc::new(sandbox);
            known.insert(uid.to_owned(), kept.clone());
            kept
        };
        self.changed.send_replace(());
        kept
    }

    /// Whether it was there.
    pub fn forget(&self, uid: &str) -> bool {
        self.retain(|other, _| other != uid) > 0
    }

    /// The container's sandbox is gone.
    pub fn forget_container(&self, container: &str) -> bool {
        self.retain(|_, sandbox| sandbox.container != container) > 0
    }

    /// Forgets those of pods that are not among these.
    pub fn keep_pods(&self, is_known: impl Fn(&str) -> bool) -> usize {
        self.retain(|uid, _| is_known(uid))
    }

    /// Forgets those that the runtime does not have any more. What it told of a moment ago may not be on its list yet.
    pub fn keep_containers(&self, is_valid: impl Fn(&str) -> bool) -> usize {
        self.retain(|_, sandbox| {
            is_valid(&sandbox.container) || sandbox.is_awaited() || sandbox.told.elapsed() < LIST_AGE
        })
    }

    fn retain(&self, keep: impl Fn(&str, &Sandbox) -> bool) -> usize {
        let forgotten = {
            let mut known = self.lock();
            let before = known.len();
            known.retain(|uid, sandbox| keep(uid, sandbox));
            before - known.len()
        };
        if forgotten > 0 {
            self.changed.send_replace(());
        }
        forgotten
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Sandbox>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Clock ticks of a second in what the kernel tells to user space, on all machines that we run on.
const TICKS: u64 = 100;
/// How old a runtime's list of its attachments may be.
const LIST_AGE: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::netns::tests::fresh;

    #[test]
    fn a_pod_has_the_sandbox_that_was_told_last() {
        let sandboxes = Sandboxes::default();
        let mut changes = sandboxes.changes();
        let netns = Arc::new(fresh());
        let first = sandboxes.put("u", Sandbox::new("c1".into(), netns.clone(), vec![]));
        assert!(changes.has_changed().unwrap());
        changes.mark_unchanged();
        let again = sandboxes.put("u", Sandbox::new("c1".into(), netns.clone(), vec![]));
        assert!(Arc::ptr_eq(&first, &again) && !changes.has_changed().unwrap());
        let second = sandboxes.put("u", Sandbox::new("c2".into(), Arc::new(fresh()), vec![]));
        assert_eq!(sandboxes.get("u").unwrap(), second);
        assert!(!sandboxes.forget_container("c1"), "that of another sandbox is none of this one's");
        assert!(sandboxes.forget_container("c2") && sandboxes.get("u").is_none());
    }

    #[test]
    fn a_list_of_the_runtime_spares_what_it_cannot_know_yet() {
        let sandboxes = Sandboxes::default();
        let mut old = Sandbox::new("old".into(), Arc::new(fresh()), vec![]);
        old.told -= LIST_AGE;
        let mut valid = Sandbox::new("valid".into(), Arc::new(fresh()), vec![]);
        valid.told -= LIST_AGE;
        let mut awaited = Sandbox::new("awaited".into(), Arc::new(fresh()), vec![]);
        awaited.told -= LIST_AGE;
        let _waits = awaited.progress();
        let new = Sandbox::new("new".into(), Arc::new(fresh()), vec![]);
        for (uid, sandbox) in [("o", old), ("v", valid), ("a", awaited), ("n", new)] {
            sandboxes.put(uid, sandbox);
        }
        assert_eq!(sandboxes.keep_containers(|container| container == "valid"), 1);
        assert!(sandboxes.get("o").is_none());
        assert_eq!(sandboxes.keep_pods(|uid| uid == "v"), 2);
    }

    #[test]
    fn progress_is_told_once_for_each_change() {
        let sandbox = Sandbox::new("c".into(), Arc::new(fresh()), vec![]);
        assert!(!sandbox.is_awaited());
        let mut progress = sandbox.progress();
        assert!(sandbox.is_awaited());
        sandbox.report(Progress::Begun);
        assert!(!progress.has_changed().unwrap());
        sandbox.report(Progress::Captured);
        assert_eq!(*progress.borrow_and_update(), Progress::Captured);
    }

    #[test]
    fn a_process_started_after_it_was_told_is_seen_as_later() {
        let sandbox = Sandbox::new("c".into(), Arc::new(fresh()), vec![]);
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        let started: u64 = stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!((sandbox.since..sandbox.since + 60 * TICKS).contains(&started), "{} {started}", sandbox.since);
    }
}

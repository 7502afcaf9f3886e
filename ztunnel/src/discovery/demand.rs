//! On demand: which names have been asked for, what was answered, and who still uses them.
//!
//! Must never call something known that the model does not have.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};

use crate::mesh::{NetworkAddress, Snapshot};

/// What a connection can need to know.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    Address(NetworkAddress),
    /// `namespace/hostname` or a workload's uid.
    Name(Arc<str>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    Pending,
    /// The model has it.
    Known,
    /// Since then the control plane does not know it.
    Absent(Instant),
    /// Since then the control plane knows it, and what it says cannot be used, for this reason.
    Unusable(Instant, Arc<str>),
}

/// Too many names are asked for, or wait for an answer.
#[derive(Debug)]
pub struct Full;

/// Read by every connection without a lock; whoever changes `entries` holds `work`.
#[derive(Default)]
pub struct Demand {
    entries: ArcSwap<Entries>,
    work: Mutex<Work>,
    /// Tells the stream that there is something to ask.
    pub news: Notify,
}

type Entries = imbl::HashMap<Key, Arc<Entry>>;

#[derive(Default)]
struct Work {
    /// Wire names without an answer, and when they were asked.
    pending: HashMap<Arc<str>, (Key, Instant)>,
    /// Wire names that the stream has not been told yet.
    to_ask: Vec<Arc<str>>,
    /// Wire names that were given up to make room.
    to_drop: Vec<Arc<str>>,
    /// When room was looked for.
    shed: Option<Instant>,
}

struct Entry {
    answer: watch::Sender<Answer>,
    /// Milliseconds since `START`.
    used: AtomicU64,
}

impl Key {
    /// The name on the wire.
    pub fn wire(&self) -> Arc<str> {
        match self {
            Self::Address(at) => format!("{}/{}", at.network, at.address).into(),
            Self::Name(name) => name.clone(),
        }
    }

    /// A range around an address says nothing of who has it: there may be a pod that has not been asked for.
    pub fn is_in(&self, mesh: &Snapshot) -> bool {
        match self {
            Self::Address(at) => mesh.workload_at(at).is_some() || mesh.has_service_at(at),
            Self::Name(name) => mesh.service(name).is_some() || mesh.workload(name).is_some(),
        }
    }
}

impl Demand {
    /// The answer to a key, which is asked for unless there is one; one that says absent is good for `absent_for`.
    /// `is_known` looks into the model: the answer may have come since the caller has looked.
    pub fn want(
        &self,
        key: &Key,
        absent_for: Duration,
        is_known: impl FnOnce() -> bool,
    ) -> Result<watch::Receiver<Answer>, Full> {
        if let Some(entry) = self.entries.load().get(key) {
            entry.touch();
            if entry.is_good(absent_for) {
                return Ok(entry.answer.subscribe());
            }
        }
        let now = Instant::now();
        let mut work = self.lock();
        let found = self.entries.load().get(key).cloned();
        if let Some(entry) = found.iter().find(|e| e.is_good(absent_for)) {
            return Ok(entry.answer.subscribe());
        }
        let is_known = is_known();
        if !is_known && work.pending.len() >= MAX_PENDING {
            return Err(Full);
        }
        let answer = if is_known { Answer::Known } else { Answer::Pending };
        let entry = match found {
            Some(entry) => entry,
            None => {
                self.make_room(&mut work)?;
                self.insert(key, answer.clone())
            }
        };
        entry.answer.send_replace(answer);
        if is_known {
            return Ok(entry.answer.subscribe());
        }
        let watched = entry.answer.subscribe();
        let wire = key.wire();
        work.pending.insert(wire.clone(), (key.clone(), now));
        work.to_ask.push(wire);
        drop(work);
        self.news.notify_one();
        Ok(watched)
    }

    /// It was found in the model and is used. Noted also where nobody had to ask for it, so that it stays.
    pub fn touch(&self, key: &Key) {
        if let Some(entry) = self.entries.load().get(key) {
            return entry.touch();
        }
        let mut work = self.lock();
        if !self.entries.load().contains_key(key) && self.make_room(&mut work).is_ok() {
            self.insert(key, Answer::Known);
        }
    }

    fn insert(&self, key: &Key, answer: Answer) -> Arc<Entry> {
        let entry = Arc::new(Entry { answer: watch::Sender::new(answer), used: AtomicU64::new(now()) });
        let mut entries = Entries::clone(&self.entries.load());
        entries.insert(key.clone(), entry.clone());
        self.entries.store(Arc::new(entries));
        entry
    }

    /// At the bound, absent names make room that nobody has used lately.
    fn make_room(&self, work: &mut Work) -> Result<(), Full> {
        if self.entries.load().len() < MAX_NAMES {
            return Ok(());
        }
        if work.shed.is_none_or(|at| at.elapsed() >= SHED_PAUSE) {
            work.shed = Some(Instant::now());
            let absent = |entry: &Entry| matches!(*entry.answer.borrow(), Answer::Absent(_));
            let gone = self.remove(|entry| absent(entry) && entry.unused_for() >= SHED_AFTER);
            work.to_drop.extend(gone);
        }
        if self.entries.load().len() < MAX_NAMES { Ok(()) } else { Err(Full) }
    }

    /// Removes entries; their names on the wire.
    fn remove(&self, is_gone: impl Fn(&Entry) -> bool) -> Vec<Arc<str>> {
        let mut entries = Entries::clone(&self.entries.load());
        let gone: Vec<Key> = entries.iter().filter(|(_, e)| is_gone(e)).map(|(key, _)| key.clone()).collect();
        if gone.is_empty() {
            return Vec::new();
        }
        for key in &gone {
            entries.remove(key);
        }
        self.entries.store(Arc::new(entries));
        gone.iter().map(Key::wire).collect()
    }

    /// Names to ask for now, and names that were given up.
    pub fn take_to_ask(&self) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        let mut work = self.lock();
        if work.to_ask.is_empty() {
            return Default::default();
        }
        (std::mem::take(&mut work.to_ask), std::mem::take(&mut work.to_drop))
    }

    /// A new stream starts: the names that it has to ask for. What was absent is asked when it is needed again.
    pub fn restart(&self) -> Vec<Arc<str>> {
        let mut work = self.lock();
        work.to_ask.clear();
        work.to_drop.clear();
        let now = Instant::now();
        work.pending.values_mut().for_each(|(_, since)| *since = now);
        let entries = self.entries.load();
        let live = entries.iter().filter(|(_, e)| !matches!(*e.answer.borrow(), Answer::Absent(_)));
        live.map(|(key, _)| key.wire()).collect()
    }

    /// A response has been applied to the model; `mentioned` are the names and aliases in it, each with the reason why
    /// it could not be used if so.
    ///
    /// What was known and is gone from the model is asked for again when it is needed: whether it is absent is not
    /// said, for a server may merely have stopped watching it.
    pub fn applied<'a>(&self, mesh: &Snapshot, mentioned: impl Iterator<Item = (&'a str, Option<&'a str>)>) {
        let now = Instant::now();
        let mut work = self.lock();
        if work.pending.is_empty() {
            return;
        }
        let entries = self.entries.load();
        let answer = |key: &Key, answer: Answer| {
            if let Some(entry) = entries.get(key) {
                entry.answer.send_replace(answer);
            }
        };
        for (name, reason) in mentioned {
            let Some((key, _)) = work.pending.remove(name) else { continue };
            let of = match reason {
                _ if key.is_in(mesh) => Answer::Known,
                Some(reason) => Answer::Unusable(now, reason.into()),
                None => Answer::Absent(now),
            };
            answer(&key, of);
        }
        // An answer may come under another name, for example the service's in place of its address.
        work.pending.retain(|_, (key, _)| {
            let known = key.is_in(mesh);
            if known {
                answer(key, Answer::Known);
            }
            !known
        });
    }

    /// How long the oldest question has been without an answer.
    pub fn oldest_pending(&self) -> Option<Duration> {
        self.lock().pending.values().map(|(_, since)| since.elapsed()).max()
    }

    /// Names that are asked for, and how many of them without an answer yet.
    pub fn counts(&self) -> (usize, usize) {
        (self.entries.load().len(), self.lock().pending.len())
    }

    /// Forgets what nobody has used for `limit`; gives their names on the wire, and the keys that remain.
    pub fn forget_unused(&self, limit: Duration) -> (Vec<Arc<str>>, Vec<Key>) {
        let _work = self.lock();
        let gone = self.remove(|e| *e.answer.borrow() != Answer::Pending && e.unused_for() >= limit);
        (gone, self.entries.load().keys().cloned().collect())
    }

    fn lock(&self) -> MutexGuard<'_, Work> {
        // No step between two changes can panic, so the lists are whole.
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn touch(&self) {
        self.used.store(now(), Ordering::Relaxed);
    }

    fn unused_for(&self) -> Duration {
        Duration::from_millis(now().saturating_sub(self.used.load(Ordering::Relaxed)))
    }

    fn is_good(&self, absent_for: Duration) -> bool {
        match *self.answer.borrow() {
            Answer::Pending => true,
            // The caller has looked into the model and not found it: it went away without our being told.
            Answer::Known => false,
            Answer::Absent(since) | Answer::Unusable(since, _) => since.elapsed() < absent_for,
        }
    }
}

fn now() -> u64 {
    START.elapsed().as_millis() as u64
}

static START: LazyLock<Instant> = LazyLock::new(Instant::now);
/// A node whose pods talk to more destinations at a time is being used for a scan.
const MAX_NAMES: usize = 50_000;
/// At the bound, an absent name that was not used for so long makes room.
const SHED_AFTER: Duration = Duration::from_secs(60);
/// At the bound, room is looked for this often.
const SHED_PAUSE: Duration = Duration::from_secs(1);
/// Names that may wait for an answer at a time.
const MAX_PENDING: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86_400);

    fn name(index: usize) -> Key {
        Key::Name(index.to_string().into())
    }

    #[test]
    fn there_is_a_bound_to_what_is_asked_for_and_what_is_known_keeps_its_place() {
        let demand = Demand::default();
        let mesh = crate::mesh::Mesh::new("n", "Kubernetes");
        let mut full = false;
        for index in 0..MAX_NAMES {
            full |= demand.want(&name(index), DAY, || false).is_err();
            demand.applied(&mesh.load(), [(index.to_string().as_str(), None)].into_iter());
        }
        assert!(!full && demand.counts() == (MAX_NAMES, 0));
        assert!(demand.want(&name(MAX_NAMES), DAY, || false).is_err());
        demand.touch(&name(MAX_NAMES));
        assert_eq!(demand.counts().0, MAX_NAMES);
        assert!(demand.want(&name(7), DAY, || false).is_ok());
    }

    #[test]
    fn only_so_many_names_wait_for_an_answer() {
        let demand = Demand::default();
        assert!((0..MAX_PENDING).all(|index| demand.want(&name(index), DAY, || false).is_ok()));
        assert!(demand.want(&name(MAX_PENDING), DAY, || false).is_err());
        assert!(demand.want(&name(0), DAY, || false).is_ok(), "it is asked for already");
        assert_eq!(demand.take_to_ask().0.len(), MAX_PENDING);
    }
}

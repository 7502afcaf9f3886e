//! On demand: which names have been asked for, what was answered, and who still uses them.
//!
//! Must never call something known that the model does not have.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, watch};

use crate::mesh::{NetworkAddress, Snapshot};

/// What a connection can need to know.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Key {
    Address(NetworkAddress),
    /// `namespace/hostname` or a workload's uid.
    Name(Arc<str>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Pending,
    /// The model has it.
    Known,
    /// Since then the control plane does not know it.
    Absent(Instant),
}

/// Too many names wait for an answer.
#[derive(Debug)]
pub struct Full;

#[derive(Default)]
pub struct Demand {
    names: Mutex<Names>,
    /// Tells the stream that there is something to ask.
    pub news: Notify,
}

#[derive(Default)]
struct Names {
    entries: HashMap<Key, Entry>,
    /// Wire names without an answer, and when they were asked.
    pending: HashMap<Arc<str>, (Key, Instant)>,
    /// Wire names that the stream has not been told yet.
    to_ask: Vec<Arc<str>>,
}

struct Entry {
    answer: watch::Sender<Answer>,
    used: Instant,
}

impl Key {
    /// The name on the wire.
    pub fn wire(&self) -> Arc<str> {
        match self {
            Self::Address(at) => format!("{}/{}", at.network, at.address).into(),
            Self::Name(name) => name.clone(),
        }
    }

    pub fn is_in(&self, mesh: &Snapshot) -> bool {
        match self {
            Self::Address(at) => mesh.workload_at(at).is_some() || mesh.has_service_at(at),
            Self::Name(name) => mesh.service(name).is_some() || mesh.workload(name).is_some(),
        }
    }
}

impl Demand {
    /// The answer to a key, which is asked for unless there is one; one that says absent is good for `absent_for`.
    pub fn want(&self, key: &Key, absent_for: Duration) -> Result<watch::Receiver<Answer>, Full> {
        let now = Instant::now();
        let mut names = self.lock();
        let is_good = |answer: Answer| match answer {
            Answer::Pending => true,
            // The caller has looked into the model and not found it: it went away without our being told.
            Answer::Known => false,
            Answer::Absent(since) => since + absent_for > now,
        };
        if let Some(entry) = names.entries.get_mut(key) {
            entry.used = now;
            if is_good(*entry.answer.borrow()) {
                return Ok(entry.answer.subscribe());
            }
        }
        if names.pending.len() >= MAX_PENDING {
            return Err(Full);
        }
        let entry = names.entries.entry(key.clone());
        let entry = entry.or_insert_with(|| Entry { answer: watch::Sender::new(Answer::Pending), used: now });
        entry.answer.send_replace(Answer::Pending);
        let watched = entry.answer.subscribe();
        let wire = key.wire();
        names.pending.insert(wire.clone(), (key.clone(), now));
        names.to_ask.push(wire);
        drop(names);
        self.news.notify_one();
        Ok(watched)
    }

    /// It was found in the model and is used. Noted also where nobody had to ask for it, so that it stays.
    pub fn touch(&self, key: &Key) {
        let now = Instant::now();
        let mut names = self.lock();
        match names.entries.get_mut(key) {
            Some(entry) => entry.used = now,
            None => {
                let entry = Entry { answer: watch::Sender::new(Answer::Known), used: now };
                names.entries.insert(key.clone(), entry);
            }
        }
    }

    /// Names to ask for now.
    pub fn take_to_ask(&self) -> Vec<Arc<str>> {
        std::mem::take(&mut self.lock().to_ask)
    }

    /// A new stream starts: the names that it has to ask for. What was absent is asked when it is needed again.
    pub fn restart(&self) -> Vec<Arc<str>> {
        let mut names = self.lock();
        names.to_ask.clear();
        let now = Instant::now();
        names.pending.values_mut().for_each(|(_, since)| *since = now);
        let live = names.entries.iter().filter(|(_, e)| !matches!(*e.answer.borrow(), Answer::Absent(_)));
        live.map(|(key, _)| key.wire()).collect()
    }

    /// A response has been applied to the model; `mentioned` are the names and aliases in it.
    ///
    /// What was known and is gone from the model is asked for again when it is needed: whether it is absent is not
    /// said, for a server may merely have stopped watching it.
    pub fn applied<'a>(&self, mesh: &Snapshot, mentioned: impl Iterator<Item = &'a str>) {
        let now = Instant::now();
        let mut guard = self.lock();
        let names = &mut *guard;
        if names.pending.is_empty() {
            return;
        }
        let entries = &names.entries;
        let answer = |key: &Key, answer: Answer| {
            if let Some(entry) = entries.get(key) {
                entry.answer.send_replace(answer);
            }
        };
        for name in mentioned {
            let Some((key, _)) = names.pending.remove(name) else { continue };
            answer(&key, if key.is_in(mesh) { Answer::Known } else { Answer::Absent(now) });
        }
        // An answer may come under another name, for example the service's in place of its address.
        names.pending.retain(|_, (key, _)| {
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
        let names = self.lock();
        (names.entries.len(), names.pending.len())
    }

    /// Forgets what nobody has used for `limit`; gives their names on the wire, and the keys that remain.
    pub fn forget_unused(&self, limit: Duration) -> (Vec<Arc<str>>, Vec<Key>) {
        let mut gone = Vec::new();
        let mut names = self.lock();
        names.entries.retain(|key, entry| {
            let keep = *entry.answer.borrow() == Answer::Pending || entry.used.elapsed() < limit;
            if !keep {
                gone.push(key.wire());
            }
            keep
        });
        (gone, names.entries.keys().cloned().collect())
    }

    fn lock(&self) -> MutexGuard<'_, Names> {
        // No step between two changes can panic, so the table is whole.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Names that may wait for an answer at a time.
const MAX_PENDING: usize = 4096;

//! On demand: which names have been asked for, and what was answered.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::Watched;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Pending,
    Known,
    /// The control plane does not know the name.
    Absent,
}

#[derive(Default)]
pub struct Demand(Mutex<HashMap<String, Wanted>>);

struct Wanted {
    answer: watch::Sender<Answer>,
    used: Instant,
}

impl Demand {
    /// The answer to a name, and whether nobody has asked for it yet.
    pub fn want(&self, name: &str) -> (Watched, bool) {
        let mut names = self.lock();
        if let Some(wanted) = names.get_mut(name) {
            wanted.used = Instant::now();
            return (wanted.answer.subscribe(), false);
        }
        let answer = watch::Sender::new(Answer::Pending);
        let watched = answer.subscribe();
        names.insert(name.to_owned(), Wanted { answer, used: Instant::now() });
        (watched, true)
    }

    pub fn touch(&self, name: &str) {
        if let Some(wanted) = self.lock().get_mut(name) {
            wanted.used = Instant::now();
        }
    }

    pub fn forget(&self, name: &str) {
        self.lock().remove(name);
    }

    /// All names, for a new stream. What was absent is asked again.
    pub fn names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    /// Takes an answer from the stream, if anybody has asked.
    pub fn answer(&self, name: &str, answer: Answer) {
        if let Some(wanted) = self.lock().get(name) {
            wanted.answer.send_replace(answer);
        }
    }

    /// A stream has ended: an absent name may be known to the next one.
    pub fn doubt_absent(&self) {
        for wanted in self.lock().values() {
            wanted.answer.send_if_modified(|answer| {
                let absent = *answer == Answer::Absent;
                if absent {
                    *answer = Answer::Pending;
                }
                absent
            });
        }
    }

    /// Names that the control plane does not know and nobody has asked for lately: they need no place here.
    pub fn unused_absent(&self, limit: Duration) -> Vec<String> {
        let names = self.lock();
        let unused = names.iter().filter(|(_, w)| *w.answer.borrow() == Answer::Absent && w.used.elapsed() > limit);
        unused.map(|(name, _)| name.clone()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Wanted>> {
        // Every change is one insert or remove: a panic leaves the table whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

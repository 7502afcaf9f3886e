//! From the objects of many files to the objects of the cluster.
//!
//! Must never let the order of events decide: of two files that give one object, the first by name wins. An object
//! that nobody gives any more is kept for a moment, since its file may be on the way from one name to another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::folder::{FileChange, GRACE};
use super::objects::{Object, ObjectKey, Objects, Problem};

#[derive(Debug, Default)]
pub(super) struct Merge {
    objects: Objects,
    givers: HashMap<ObjectKey, BTreeMap<Place, Given>>,
    duplicates: BTreeSet<ObjectKey>,
    leaving: BTreeMap<ObjectKey, Instant>,
    changed: bool,
}

/// Where an object is given: file, and which of the file's objects of that name.
type Place = (Arc<str>, usize);

#[derive(Debug)]
struct Given {
    object: Object,
    line: usize,
}

impl Merge {
    pub fn apply(&mut self, change: FileChange, now: Instant) {
        let mut touched: BTreeSet<ObjectKey> = BTreeSet::new();
        for key in change.before {
            if let Some(places) = self.givers.get_mut(&key) {
                places.retain(|(file, _), _| *file != change.file);
            }
            touched.insert(key);
        }
        for (index, (key, object, line)) in change.after.into_iter().enumerate() {
            let places = self.givers.entry(key.clone()).or_default();
            places.insert((change.file.clone(), index), Given { object, line });
            touched.insert(key);
        }
        for key in touched {
            self.settle(key, if change.settled { now } else { now + GRACE });
        }
        self.expire(now);
    }

    /// Lets go of the objects that have been given by nobody for long enough.
    pub fn expire(&mut self, now: Instant) {
        let due: Vec<_> = self.leaving.iter().filter(|(_, at)| **at <= now).map(|(key, _)| key.clone()).collect();
        for key in due {
            self.leaving.remove(&key);
            self.changed |= self.objects.remove(&key);
        }
    }

    /// When [`expire`](Self::expire) has something to do next.
    pub fn next_due(&self) -> Option<Instant> {
        self.leaving.values().min().copied()
    }

    /// The objects, if they are others than at the last call.
    pub fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Objects that are given more than once.
    pub fn problems(&self, path: impl Fn(&ObjectKey, &str) -> PathBuf, into: &mut Vec<Problem>) {
        for key in &self.duplicates {
            let Some(places) = self.givers.get(key) else { continue };
            let mut places = places.iter();
            let Some(((winner, _), first)) = places.next() else { continue };
            let winner = path(key, winner);
            for ((file, _), given) in places {
                into.push(Problem {
                    file: path(key, file),
                    line: Some(given.line).filter(|l| *l > 0),
                    object: Some(key.clone()),
                    reason: format!("given twice, the one in {} line {} is used", winner.display(), first.line),
                });
            }
        }
    }

    fn settle(&mut self, key: ObjectKey, leave_at: Instant) {
        let places = self.givers.get(&key).filter(|places| !places.is_empty());
        let Some(places) = places else {
            self.givers.remove(&key);
            self.duplicates.remove(&key);
            let at = self.leaving.entry(key).or_insert(leave_at);
            *at = leave_at.min(*at);
            return;
        };
        if places.len() > 1 {
            self.duplicates.insert(key.clone());
        } else {
            self.duplicates.remove(&key);
        }
        if let Some(given) = places.values().next() {
            let object = given.object.clone();
            self.leaving.remove(&key);
            self.put(key, object);
        }
    }

    fn put(&mut self, key: ObjectKey, object: Object) {
        self.changed |= self.objects.put(key, object);
    }
}

//! From the objects of many files to the objects of the cluster.
//!
//! Must never let the order of events decide: of two files that give one object, the first by name wins. An object
//! that nobody gives any more is kept for a moment, since its file may be on the way from one name to another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::document::Object;
use super::folder::{FileChange, GRACE};
use super::objects::{ObjectKey, Objects, Problem};

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
            self.remove(&key);
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
        if self.get(&key).is_some_and(|held| held.same(&object)) {
            return;
        }
        let o = &mut self.objects;
        match (key, object) {
            (ObjectKey::Namespace(key), Object::Namespace(object)) => drop(o.namespaces.insert(key, object)),
            (ObjectKey::Node(key), Object::Node(object)) => drop(o.nodes.insert(key, object)),
            (ObjectKey::Pod(key), Object::Pod(object)) => drop(o.pods.insert(key, object)),
            (ObjectKey::ServiceAccount(key), Object::ServiceAccount(object)) => {
                drop(o.service_accounts.insert(key, object));
            }
            (ObjectKey::Service(key), Object::Service(object)) => drop(o.services.insert(key, object)),
            (ObjectKey::EndpointSlice(key), Object::EndpointSlice(object)) => {
                drop(o.endpoint_slices.insert(key, object));
            }
            (ObjectKey::PeerAuthentication(key), Object::PeerAuthentication(object)) => {
                drop(o.peer_authentications.insert(key, object));
            }
            (ObjectKey::AuthorizationPolicy(key), Object::AuthorizationPolicy(object)) => {
                drop(o.authorization_policies.insert(key, object));
            }
            (ObjectKey::Status(key), Object::Status(object)) => drop(o.statuses.insert(key, object)),
            (key, object) => unreachable!("{key} made from the kind of {object:?}"),
        }
        self.changed = true;
    }

    fn get(&self, key: &ObjectKey) -> Option<Object> {
        let o = &self.objects;
        match key {
            ObjectKey::Namespace(key) => o.namespaces.get(key).cloned().map(Object::Namespace),
            ObjectKey::Node(key) => o.nodes.get(key).cloned().map(Object::Node),
            ObjectKey::Pod(key) => o.pods.get(key).cloned().map(Object::Pod),
            ObjectKey::ServiceAccount(key) => o.service_accounts.get(key).cloned().map(Object::ServiceAccount),
            ObjectKey::Service(key) => o.services.get(key).cloned().map(Object::Service),
            ObjectKey::EndpointSlice(key) => o.endpoint_slices.get(key).cloned().map(Object::EndpointSlice),
            ObjectKey::PeerAuthentication(key) => {
                o.peer_authentications.get(key).cloned().map(Object::PeerAuthentication)
            }
            ObjectKey::AuthorizationPolicy(key) => {
                o.authorization_policies.get(key).cloned().map(Object::AuthorizationPolicy)
            }
            ObjectKey::Status(key) => o.statuses.get(key).cloned().map(Object::Status),
        }
    }

    fn remove(&mut self, key: &ObjectKey) {
        let o = &mut self.objects;
        let was_there = match key {
            ObjectKey::Namespace(key) => o.namespaces.remove(key).is_some(),
            ObjectKey::Node(key) => o.nodes.remove(key).is_some(),
            ObjectKey::Pod(key) => o.pods.remove(key).is_some(),
            ObjectKey::ServiceAccount(key) => o.service_accounts.remove(key).is_some(),
            ObjectKey::Service(key) => o.services.remove(key).is_some(),
            ObjectKey::EndpointSlice(key) => o.endpoint_slices.remove(key).is_some(),
            ObjectKey::PeerAuthentication(key) => o.peer_authentications.remove(key).is_some(),
            ObjectKey::AuthorizationPolicy(key) => o.authorization_policies.remove(key).is_some(),
            ObjectKey::Status(key) => o.statuses.remove(key).is_some(),
        };
        self.changed |= was_there;
    }
}

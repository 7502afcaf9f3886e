//! Follows the objects of one kind: reads them all, then hears of changes, and again from where it left off.
//!
//! Must never take an object away that the server has not said to be gone.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use kube::core::WatchEvent;
use serde_json::Value;
use tokio::sync::watch;

use super::api::{Api, ApiError, EVENTS_METADATA, ITEMS_METADATA, JSON, encode};
use super::health::Health;
use super::kind::{Kind, Place};
use super::source::{Reader, Wanted};
use crate::manifests::{Object, ObjectKey, Objects, Problem, SecurityKind, SecurityPolicy};

pub(super) struct Follower {
    api: Api,
    kind: Kind,
    /// What of it is asked for. Encoded.
    filter: String,
    /// For a list and for a watch.
    accept: (&'static str, &'static str),
    read: Reader,
    objects: Arc<watch::Sender<Arc<Objects>>>,
    health: Arc<Health>,
    /// Where changes are heard of next; nothing while all must be read.
    at: Option<At>,
    /// Objects that cannot be read. Those without a name count as one.
    bad: Bad,
    /// Since when the cluster does not have the kind.
    absent: Option<Instant>,
    pause: Duration,
}

struct At {
    place: Place,
    version: String,
}

/// What became known of one object.
enum Found {
    Good(ObjectKey, Object),
    Bad(Option<ObjectKey>, String),
    Gone(ObjectKey),
}

impl Follower {
    pub fn new(
        api: Api,
        wanted: Wanted,
        read: Reader,
        objects: Arc<watch::Sender<Arc<Objects>>>,
        health: Arc<Health>,
    ) -> Self {
        let Wanted { kind, filter, metadata_only } = wanted;
        let accept = if metadata_only { (ITEMS_METADATA, EVENTS_METADATA) } else { (JSON, JSON) };
        let (at, bad, absent, pause) = (None, BTreeMap::new(), None, SHORTEST);
        Self { api, kind, filter, accept, read, objects, health, at, bad, absent, pause }
    }

    pub async fn run(mut self) {
        loop {
            let began = Instant::now();
            let error = match self.at.take() {
                None => match self.read_all().await {
                    Ok(()) if self.at.is_none() => {
                        tokio::time::sleep(LOOK_FOR_MISSING).await;
                        continue;
                    }
                    // That all can be read says nothing of changes: the pauses stay as long as they are.
                    Ok(()) => continue,
                    Err(error) => Some(error),
                },
                Some(at) => self.hear(at).await.err(),
            };
            if let Some(error) = &error {
                self.health.failed(self.kind, error);
            } else if began.elapsed() > SHORTEST {
                // A watch ends after its time. One that ends at once would only be asked for again and again.
                self.pause = SHORTEST;
                continue;
            }
            // What was missed is read at once, if it is not missed again and again.
            let missed = matches!(error, Some(ApiError::Refused { code: 410, .. }));
            if !(missed && self.pause == SHORTEST) {
                tokio::time::sleep(self.pause.mul_f64(spread())).await;
            }
            self.pause = (self.pause * 2).min(LONGEST);
        }
    }

    /// Reads all objects of the kind. What was known of it stays until all are there.
    async fn read_all(&mut self) -> Result<(), ApiError> {
        let Some(place) = self.kind.place(&self.api).await? else {
            self.is_absent();
            return Ok(());
        };
        self.absent = None;
        let (mut found, mut more) = (Vec::new(), String::new());
        let version = loop {
            let from = if more.is_empty() { String::new() } else { format!("&continue={}", encode(&more)) };
            let query = format!("limit={PAGE}{from}{}", self.filter);
            let page = self.api.page(&place.path, &query, self.accept.0).await?;
            found.extend(page.items.into_iter().map(|item| self.read(&place, item)));
            more = page.metadata.r#continue;
            if more.is_empty() {
                break page.metadata.resource_version;
            }
        };
        let there = found.iter().filter_map(|f| match f {
            Found::Good(key, _) | Found::Bad(Some(key), _) => Some(key.clone()),
            Found::Bad(None, _) | Found::Gone(_) => None,
        });
        let there: BTreeSet<ObjectKey> = there.collect();
        let before = std::mem::take(&mut self.bad);
        let gone = self.kind.keys(&self.objects.borrow()).into_iter().filter(|key| !there.contains(key));
        found.extend(gone.map(Found::Gone).collect::<Vec<_>>());
        self.publish(&place.path, found, before);
        self.health.whole(self.kind);
        self.at = Some(At { place, version });
        Ok(())
    }

    /// The cluster does not have the kind (any more). Its objects went before it, which may not have been heard of; they
    /// are let go if it stays so: one of several servers may know less than the others.
    fn is_absent(&mut self) {
        let since = *self.absent.get_or_insert_with(Instant::now);
        let held = self.kind.keys(&self.objects.borrow());
        if !held.is_empty() && since.elapsed() < ABSENT_FOR {
            return;
        }
        if !held.is_empty() {
            tracing::warn!(
                kind = self.kind.name(),
                objects = held.len(),
                "the kind is gone from the cluster, and with it its objects"
            );
            let before = std::mem::take(&mut self.bad);
            self.publish("", held.into_iter().map(Found::Gone).collect(), before);
        }
        self.health.missing(self.kind);
    }

    /// Hears of changes until the server ends it, which it does after some time. Only where it is known that nothing was
    /// missed it goes on from there.
    async fn hear(&mut self, mut at: At) -> Result<(), ApiError> {
        let heard = self.hear_from(&mut at).await;
        let missed = match &heard {
            Ok(()) | Err(ApiError::Away(_) | ApiError::Slow(_)) => false,
            // It is busy, or just starts.
            Err(ApiError::Refused { code: 429 | 503, .. }) => false,
            Err(ApiError::Refused { .. } | ApiError::Unreadable(_)) => true,
        };
        if !missed {
            self.at = Some(at);
        }
        heard
    }

    async fn hear_from(&mut self, at: &mut At) -> Result<(), ApiError> {
        let time = WATCH.mul_f64(spread());
        let query = format!(
            "watch=true&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={}{}",
            encode(&at.version),
            time.as_secs(),
            self.filter
        );
        let events = self.api.watch(&at.place.path, &query, self.accept.1).await?;
        self.health.connected(self.kind);
        let mut events = pin!(events.ready_chunks(BATCH));
        // A server that is gone without a word does not end it.
        let mut overdue = pin!(tokio::time::sleep(time + OVERDUE));
        loop {
            let batch = tokio::select! {
                batch = events.next() => batch,
                () = &mut overdue => return Err(ApiError::Slow(time + OVERDUE)),
            };
            let Some(batch) = batch else { return Ok(()) };
            if batch.first().is_some_and(|event| !matches!(event, Ok(WatchEvent::Error(_)) | Err(_))) {
                self.pause = SHORTEST;
            }
            let (mut found, mut end) = (Vec::new(), Ok(()));
            for event in batch {
                match event {
                    Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => {
                        at.version = version_of(&object).unwrap_or(&at.version).to_owned();
                        found.push(self.read(&at.place, object));
                    }
                    Ok(WatchEvent::Deleted(object)) => {
                        at.version = version_of(&object).unwrap_or(&at.version).to_owned();
                        found.extend(self.kind.key_of(&object).map(Found::Gone));
                    }
                    Ok(WatchEvent::Bookmark(mark)) => at.version = mark.metadata.resource_version,
                    Ok(WatchEvent::Error(status)) => {
                        end = Err(ApiError::Refused { code: status.code, message: status.message.clone() });
                        break;
                    }
                    Err(error) => {
                        end = Err(error);
                        break;
                    }
                }
            }
            let before = self.bad.clone();
            self.publish(&at.place.path, found, before);
            end?;
        }
    }

    fn read(&self, place: &Place, value: Value) -> Found {
        let Some(key) = self.kind.key_of(&value) else {
            return Found::Bad(None, "metadata.name is missing".into());
        };
        match (self.read)(self.kind, &place.version, value) {
            Ok(object) => Found::Good(key, object),
            Err(reason) => Found::Bad(Some(key), reason),
        }
    }

    /// `before`: what could not be read until then, as it was published.
    fn publish(&mut self, path: &str, found: Vec<Found>, before: Bad) {
        let (kind, bad) = (self.kind, &mut self.bad);
        self.objects.send_if_modified(|held| {
            let mut next = Objects::clone(held);
            let mut changed = false;
            for found in found {
                match found {
                    Found::Good(key, object) => {
                        bad.remove(&Some(key.clone()));
                        changed |= next.put(key, object);
                    }
                    // The last good one stays, if there is one.
                    Found::Bad(key, reason) => {
                        let replace = |key: &ObjectKey| next.get(key).is_none_or(|held| held.is_stand_in());
                        let stand_in = key.as_ref().filter(|key| replace(key)).and_then(|key| stand_in(key, &reason));
                        if let (Some(key), Some(object)) = (&key, stand_in) {
                            changed |= next.put(key.clone(), object);
                        }
                        if bad.len() < MAX_BAD {
                            bad.insert(key, reason);
                        }
                    }
                    Found::Gone(key) => {
                        changed |= next.remove(&key);
                        bad.remove(&Some(key));
                    }
                }
            }
            if *bad != before {
                let others = next.problems.iter().filter(|p| p.file.as_os_str() != kind.name()).cloned();
                next.problems = others.chain(problems(kind, bad)).collect();
                changed = true;
            }
            if changed {
                next.generation += 1;
                *held = Arc::new(next);
            }
            changed
        });
        for (key, reason) in self.bad.iter().filter(|(key, reason)| before.get(*key) != Some(reason)) {
            let object = key.as_ref().map(tracing::field::display);
            tracing::warn!(
                kind = kind.name(),
                path,
                object,
                reason,
                "an object is not used, the last good version stays"
            );
        }
    }
}

fn problems(kind: Kind, bad: &Bad) -> impl Iterator<Item = Problem> {
    let problem = move |(object, reason): (&Option<ObjectKey>, &String)| Problem {
        file: kind.name().into(),
        line: None,
        object: object.clone(),
        reason: reason.clone(),
    };
    bad.iter().map(problem)
}

/// What could not be read, and why.
type Bad = BTreeMap<Option<ObjectKey>, String>;

/// What takes the place of a policy that cannot be read; of other kinds nothing does.
fn stand_in(key: &ObjectKey, reason: &str) -> Option<Object> {
    let (kind, name) = SecurityKind::of(key)?;
    Some(Object::policy(kind, SecurityPolicy::stand_in(name, reason)))
}

fn version_of(object: &Value) -> Option<&str> {
    object["metadata"]["resourceVersion"].as_str().filter(|version| !version.is_empty())
}

/// Around 1, so that not all that waits ends at one moment.
fn spread() -> f64 {
    0.8 + (RandomState::new().hash_one(0) % 1000) as f64 / 2500.0
}

/// Objects in an answer.
const PAGE: u32 = 500;
/// Changes that are taken in at once, if so many are there.
const BATCH: usize = 512;
/// How long a watch lasts. It tells for how long the server can be gone without a word.
const WATCH: Duration = Duration::from_secs(60);
/// How much longer it may last.
const OVERDUE: Duration = Duration::from_secs(15);
/// Between two tries.
const SHORTEST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(8);
/// How often it is looked whether the cluster has a kind by now.
const LOOK_FOR_MISSING: Duration = Duration::from_secs(5);
const ABSENT_FOR: Duration = Duration::from_secs(30);
/// Objects of a kind that are told one by one.
const MAX_BAD: usize = 1000;

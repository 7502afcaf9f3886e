//! The annotation `ambient.istio.io/redirection` of the node's pods: by it the control plane knows that a pod is
//! captured. Each pod's task says what it should be; here it is brought to that, and kept there.
//!
//! Must never hold up a pod's task, nor write to a pod that has taken the name of another.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::kubernetes::{Api, ApiError};
use crate::manifests::{ObjectName, Objects, REDIRECTION, Redirection};
use crate::random;

#[derive(Debug)]
pub struct Annotations {
    api: Api,
    objects: watch::Receiver<Arc<Objects>>,
    /// By the pod's uid.
    entries: Mutex<BTreeMap<String, Entry>>,
    changed: Notify,
}

#[derive(Debug)]
struct Entry {
    pod: ObjectName,
    wanted: Option<Redirection>,
    /// How long to wait after the next write until it is written again, if it has not come true by then.
    pause: Duration,
    next: Instant,
    writing: bool,
    /// When a write was begun last: what it says may come true, and be heard of, later than something else is wanted.
    written: Option<Instant>,
}

/// What came of one write.
struct Written {
    pod: ObjectName,
    uid: String,
    result: Result<(), ApiError>,
}

impl Annotations {
    pub fn new(api: Api, objects: watch::Receiver<Arc<Objects>>) -> Arc<Self> {
        Arc::new(Self { api, objects, entries: Mutex::default(), changed: Notify::new() })
    }

    /// What a pod's annotation is to say from now on; nothing: it is to have none.
    pub fn set(&self, uid: &str, pod: ObjectName, wanted: Option<Redirection>) {
        let mut entries = self.lock();
        match entries.get(uid) {
            Some(entry) if entry.wanted == wanted => return,
            // Most pods of most nodes.
            None if wanted.is_none() && self.is_without(uid, &pod) => return,
            _ => {}
        }
        let (writing, written) = entries.get(uid).map_or((false, None), |entry| (entry.writing, entry.written));
        let entry = Entry { pod, wanted, pause: FIRST_PAUSE, next: Instant::now(), writing, written };
        entries.insert(uid.to_owned(), entry);
        self.changed.notify_one();
    }

    /// The pod is gone.
    pub fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Annotations that are not yet what they should be.
    pub fn unwritten(&self) -> usize {
        let objects = self.objects.borrow().clone();
        self.lock().iter().filter(|(uid, entry)| entry.differs(uid, &objects)).count()
    }

    /// Nothing is being written.
    #[cfg(test)]
    pub fn is_at_rest(&self) -> bool {
        self.lock().values().all(|entry| !entry.writing)
    }

    /// Writes for ever.
    pub async fn keep(self: Arc<Self>) {
        let (mut objects, mut writes, mut failing) = (self.objects.clone(), JoinSet::new(), false);
        loop {
            let now = objects.borrow_and_update().clone();
            let wait = self.begin(&now, &mut writes);
            tokio::select! {
                // After the source has ended nothing new is heard, what is known is still written.
                Ok(()) = objects.changed() => {}
                () = self.changed.notified() => {}
                Some(Ok(written)) = writes.join_next() => self.is_written(written, &mut failing),
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Begins what is due; how long until more is.
    fn begin(&self, objects: &Objects, writes: &mut JoinSet<Written>) -> Duration {
        let (mut wait, now) = (LONGEST_PAUSE, Instant::now());
        let mut entries = self.lock();
        entries.retain(|uid, entry| {
            if entry.writing {
                return true;
            }
            let Some(held) = pod_of(objects, uid, &entry.pod) else { return true };
            if redirection_of(held) == entry.wanted.map(text) {
                (entry.pause, entry.next) = (FIRST_PAUSE, now);
                // There is nothing to keep at it, once nothing of before can come.
                return entry.wanted.is_some() || entry.written.is_some_and(|at| at.elapsed() < LONGEST_PAUSE);
            }
            if entry.next > now {
                wait = wait.min(entry.next - now);
            } else if writes.len() < AT_A_TIME {
                (entry.writing, entry.written) = (true, Some(now));
                entry.next = now + entry.pause.mul_f64(random::factor(0.2));
                entry.pause = (entry.pause * 2).min(LONGEST_PAUSE);
                writes.spawn(write(self.api.clone(), entry.pod.clone(), uid.clone(), entry.wanted));
            }
            true
        });
        wait
    }

    fn is_written(&self, written: Written, failing: &mut bool) {
        let Written { pod, uid, result } = written;
        if let Some(entry) = self.lock().get_mut(&uid) {
            entry.writing = false;
        }
        match result {
            // It is gone, or another pod has its name by now.
            Ok(()) | Err(ApiError::Refused { code: 404 | 409 | 422, .. }) => {
                if std::mem::take(failing) {
                    info!("annotations of pods are written again");
                }
            }
            Err(error) => {
                if !std::mem::replace(failing, true) {
                    warn!(%pod, %error, "annotations of pods cannot be written, it is tried again");
                }
            }
        }
    }

    fn is_without(&self, uid: &str, pod: &ObjectName) -> bool {
        let objects = self.objects.borrow();
        pod_of(&objects, uid, pod).is_some_and(|held| redirection_of(held).is_none())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // A panic of a holder left whole entries.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn differs(&self, uid: &str, objects: &Objects) -> bool {
        pod_of(objects, uid, &self.pod).is_some_and(|held| redirection_of(held) != self.wanted.map(text))
    }
}

async fn write(api: Api, pod: ObjectName, uid: String, wanted: Option<Redirection>) -> Written {
    let result = patch(&api, &pod, &uid, wanted).await;
    Written { pod, uid, result }
}

/// Sets or removes the annotation of one pod. Refused if another pod has its name by now.
pub async fn patch(api: &Api, pod: &ObjectName, uid: &str, wanted: Option<Redirection>) -> Result<(), ApiError> {
    // The status' path lets nobody change what the pod runs.
    let path = format!("/api/v1/namespaces/{}/pods/{}/status", pod.namespace, pod.name);
    let change = json!({"metadata": {"uid": uid, "annotations": {REDIRECTION: wanted.map(text)}}});
    api.merge(&path, &change).await.map(drop)
}

fn pod_of<'a>(objects: &'a Objects, uid: &str, name: &ObjectName) -> Option<&'a Pod> {
    objects.pods.get(name).map(Arc::as_ref).filter(|pod| pod.metadata.uid.as_deref() == Some(uid))
}

fn redirection_of(pod: &Pod) -> Option<&str> {
    pod.metadata.annotations.as_ref()?.get(REDIRECTION).map(String::as_str)
}

fn text(redirection: Redirection) -> &'static str {
    match redirection {
        Redirection::Enabled => "enabled",
        Redirection::Pending => "pending",
    }
}

/// Requests at a time.
const AT_A_TIME: usize = 8;
/// Between two writes for one pod, growing.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

//! Kubernetes Events of pods that cannot be captured, for whoever asks `kubectl describe` why.
//!
//! Must never flood the API server: of one pod ever more rarely, of all pods of the node a bounded number. What repeats is
//! counted in one Event.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing::debug;

use crate::identity::rfc3339;
use crate::kubernetes::{Api, ApiError};
use crate::manifests::PodRef;
use crate::random;

/// Where pods' tasks tell their trouble. Never waits.
#[derive(Debug)]
pub struct Events {
    sender: mpsc::Sender<(PodRef, String)>,
    writer: Mutex<Option<Writer>>,
    left_out: Arc<AtomicU64>,
}

#[derive(Debug)]
struct Writer {
    api: Api,
    node: String,
    told: mpsc::Receiver<(PodRef, String)>,
    /// By the pod's uid.
    pods: HashMap<String, Told>,
    /// How many may be written now, and when that was reckoned.
    budget: (f64, Instant),
    left_out: Arc<AtomicU64>,
}

/// The last Event of a pod.
#[derive(Debug)]
struct Told {
    name: String,
    message: String,
    count: u32,
    pause: Duration,
    next: Instant,
}

impl Events {
    pub fn new(api: Api, node: String) -> Events {
        let (sender, told) = mpsc::channel(QUEUE);
        let (left_out, budget) = (Arc::new(AtomicU64::new(0)), (BURST, Instant::now()));
        let writer = Writer { api, node, told, pods: HashMap::new(), budget, left_out: left_out.clone() };
        Events { sender, writer: Mutex::new(Some(writer)), left_out }
    }

    pub fn capture_failed(&self, pod: PodRef, reason: &str) {
        if self.sender.try_send((pod, shortened(reason))).is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Troubles of which no Event was written, for there were too many.
    pub fn left_out(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    /// Writes for as long as troubles can be told. May be called once.
    pub async fn keep(self: Arc<Self>) {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut writer) = writer else { return std::future::pending().await };
        while let Some((pod, message)) = writer.told.recv().await {
            writer.tell(pod, message, Instant::now()).await;
        }
    }
}

impl Writer {
    async fn tell(&mut self, pod: PodRef, message: String, now: Instant) {
        if self.pods.len() >= MOST_PODS {
            self.pods.retain(|_, told| now.saturating_duration_since(told.next) < FORGOTTEN_AFTER);
        }
        let held = self.pods.get_mut(&pod.uid);
        if let Some(told) = held {
            told.count = told.count.saturating_add(u32::from(told.message == message));
            if now < told.next {
                return;
            }
        }
        if !self.take_one(now) {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let uid = pod.uid.clone();
        let before = self.pods.remove(&uid);
        let pause = before.as_ref().map_or(FIRST_PAUSE, |told| (told.pause * 2).min(LONGEST_PAUSE));
        match self.write(&pod, message, before.as_ref()).await {
            Ok((name, message, count)) => {
                let told = Told { name, message, count, pause, next: now + pause };
                self.pods.insert(uid, told);
            }
            // It is told again as long as it lasts, no sooner for that.
            Err(error) => {
                debug!(pod = pod.name, %error, "the Event of a pod cannot be written");
                self.pods.extend(before.map(|told| (uid, Told { pause, next: now + pause, ..told })));
            }
        }
    }

    async fn write(
        &self,
        pod: &PodRef,
        message: String,
        before: Option<&Told>,
    ) -> Result<(String, String, u32), ApiError> {
        let folder = format!("/api/v1/namespaces/{}/events", pod.namespace);
        let now = rfc3339(SystemTime::now());
        if let Some(told) = before.filter(|told| told.message == message) {
            let change = json!({"count": told.count, "lastTimestamp": now});
            match self.api.merge(&format!("{folder}/{}", told.name), &change).await {
                Ok(_) => return Ok((told.name.clone(), message, told.count)),
                // Events are kept for an hour or so.
                Err(ApiError::Refused { code: 404, .. }) => {}
                Err(error) => return Err(error),
            }
        }
        let event = self.event(pod, &message, &now);
        let name = event["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        self.api.create(&folder, &event).await?;
        Ok((name, message, 1))
    }

    fn event(&self, pod: &PodRef, message: &str, now: &str) -> Value {
        // With what makes it unique it is a name like a pod's, and no longer.
        let of: String = pod.name.chars().take(LONGEST_NAME - 17).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": format!("{of}.{:016x}", random::next_u64()), "namespace": pod.namespace},
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid,
            },
            "type": "Warning",
            "reason": "CaptureFailed",
            "message": message,
            "count": 1,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "source": {"component": COMPONENT, "host": self.node},
            "reportingComponent": COMPONENT,
            "reportingInstance": self.node,
        })
    }

    fn take_one(&mut self, now: Instant) -> bool {
        let (left, since) = self.budget;
        let left = (left + now.saturating_duration_since(since).as_secs_f64() / REFILL.as_secs_f64()).min(BURST);
        let granted = left >= 1.0;
        self.budget = (if granted { left - 1.0 } else { left }, now);
        granted
    }
}

/// What an Event may hold.
fn shortened(text: &str) -> String {
    if text.len() <= LONGEST_MESSAGE {
        return text.to_owned();
    }
    let end = (0..=LONGEST_MESSAGE).rev().find(|end| text.is_char_boundary(*end)).unwrap_or_default();
    format!("{}…", &text[..end])
}

const COMPONENT: &str = "understory-agent";
const QUEUE: usize = 256;
/// Events of the node at once, and after that one in this time.
const BURST: f64 = 25.0;
const REFILL: Duration = Duration::from_secs(12);
/// Between two writes for one pod, growing.
const FIRST_PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(30 * 60);
/// Pods that are remembered without looking for some to forget.
const MOST_PODS: usize = 256;
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30 * 60);
/// Letters of an object's name.
const LONGEST_NAME: usize = 253;
/// Bytes; the API server takes 1,024.
const LONGEST_MESSAGE: usize = 1000;

#[cfg(test)]
mod tests {
    use apistub::ApiStub;

    use super::*;

    #[tokio::test]
    async fn a_trouble_that_lasts_is_counted_ever_more_rarely() {
        let server = ApiStub::start().await;
        let events = Events::new(Api::unprotected(server.address).unwrap(), "node".into());
        let mut writer = events.writer.lock().unwrap().take().unwrap();
        let pod = PodRef { namespace: "shop".into(), name: "a".into(), uid: "u".into() };
        let start = Instant::now();
        let held = || server.state().all("/api/v1/events");
        for (second, written) in [(0, 1), (10, 1), (30, 3), (40, 3), (60, 3), (90, 6)] {
            writer.tell(pod.clone(), "why".into(), start + Duration::from_secs(second)).await;
            assert_eq!((held().len(), held()[0]["count"].as_u64()), (1, Some(written)), "after {second} s");
        }
        // Another reason has an Event of its own; one that the server has forgotten is made anew.
        writer.tell(pod.clone(), "another".into(), start + Duration::from_secs(1000)).await;
        assert_eq!(held().len(), 2);
        let name = held().iter().find(|event| event["message"] == "another").unwrap()["metadata"]["name"].clone();
        server.state().delete("/api/v1/events", &format!("shop/{}", name.as_str().unwrap()));
        writer.tell(pod, "another".into(), start + Duration::from_secs(9000)).await;
        assert_eq!(held().iter().filter(|event| event["message"] == "another").count(), 1);
    }

    #[test]
    fn a_long_reason_is_cut_between_letters() {
        assert_eq!(shortened("short"), "short");
        let long = shortened(&"ä".repeat(600));
        assert!(long.len() <= 1003 && long.ends_with("ä…"), "{}", long.len());
    }
}

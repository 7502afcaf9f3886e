//! Which of several replicas does what must be done once: the one that holds a Lease.
//!
//! Must never let two believe at one time that they hold it: who cannot renew it stops believing before others may take
//! it.

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use serde_json::json;
use tokio::sync::watch;
use ztunnel::kubernetes::{Api, ApiError};

/// A replica that would lead.
#[derive(Debug)]
pub struct Candidate {
    api: Api,
    namespace: String,
    name: &'static str,
    /// Of this replica, unlike all others.
    me: String,
    leads: watch::Sender<bool>,
    /// When it was renewed last by us.
    renewed: Option<Instant>,
    /// What others do with it, and since when nothing else: clocks are not compared.
    seen: Option<(LeaseSpec, Instant)>,
}

/// What to do with a lease.
#[derive(Debug, PartialEq)]
enum Step {
    Create,
    Renew,
    /// Its holder is gone or has let go of it.
    TakeOver,
    Wait,
}

impl Candidate {
    pub fn new(api: Api, namespace: String, name: &'static str, me: String) -> Self {
        Self { api, namespace, name, me, leads: watch::Sender::new(false), renewed: None, seen: None }
    }

    /// Whether this replica leads.
    pub fn leads(&self) -> watch::Receiver<bool> {
        self.leads.subscribe()
    }

    /// Tries to lead until `stop`, then lets go, so that another need not wait.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        let mut stop = std::pin::pin!(stop);
        let mut told = None;
        loop {
            let tried = tokio::time::timeout(TRY, self.try_once()).await.unwrap_or(Err(ApiError::Slow(TRY)));
            match &tried {
                Ok(()) => told = None,
                // Somebody else was faster.
                Err(ApiError::Refused { code: 409, .. }) => {}
                Err(error) => {
                    if told.as_ref() != Some(error) {
                        tracing::warn!(lease = self.name, %error, "the lease cannot be looked after");
                    }
                    told = Some(error.clone());
                }
            }
            if self.renewed.is_some_and(|at| at.elapsed() > DEADLINE) {
                self.renewed = None;
            }
            self.tell(self.renewed.is_some());
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = &mut stop => break,
            }
        }
        if self.renewed.take().is_some() {
            self.tell(false);
            let _ = tokio::time::timeout(TRY, self.let_go()).await;
        }
    }

    fn tell(&self, leads: bool) {
        let changed = self.leads.send_if_modified(|now| std::mem::replace(now, leads) != leads);
        if changed {
            tracing::info!(lease = self.name, me = self.me, leads, "whether this replica leads has changed");
        }
    }

    async fn try_once(&mut self) -> Result<(), ApiError> {
        let began = Instant::now();
        let held = self.held().await?;
        let mut lease = held.clone().unwrap_or_default();
        let step = self.decide(held.as_ref().map(|lease| lease.spec.clone().unwrap_or_default()), began);
        let now = MicroTime(Timestamp::now());
        let spec = lease.spec.get_or_insert_default();
        match step {
            Step::Wait => {
                self.renewed = None;
                return Ok(());
            }
            Step::Renew => {}
            Step::Create | Step::TakeOver => {
                spec.holder_identity = Some(self.me.clone());
                spec.acquire_time = Some(now.clone());
                spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |n| n + 1));
            }
        }
        spec.lease_duration_seconds = Some(DURATION.as_secs() as i32);
        spec.renew_time = Some(now);
        if step == Step::Create {
            lease.metadata = ObjectMeta {
                name: Some(self.name.into()),
                namespace: Some(self.namespace.clone()),
                ..ObjectMeta::default()
            };
            self.api.create(&self.folder(), &json!(lease)).await?;
        } else {
            // Refused if somebody has changed it since we looked.
            self.api.replace(&self.path(), &json!(lease)).await?;
        }
        // Counted from before the request: it may have been long on its way.
        self.renewed = Some(began);
        Ok(())
    }

    fn decide(&mut self, held: Option<LeaseSpec>, now: Instant) -> Step {
        let Some(spec) = held else { return Step::Create };
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if holder == self.me {
            return Step::Renew;
        }
        if holder.is_empty() {
            return Step::TakeOver;
        }
        let seconds = spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok());
        let life = seconds.map_or(DURATION, Duration::from_secs);
        match &self.seen {
            Some((seen, since)) if *seen == spec => {
                if now.saturating_duration_since(*since) > life {
                    Step::TakeOver
                } else {
                    Step::Wait
                }
            }
            _ => {
                self.seen = Some((spec, now));
                Step::Wait
            }
        }
    }

    async fn held(&self) -> Result<Option<Lease>, ApiError> {
        let Some(value) = self.api.find(&self.path()).await? else { return Ok(None) };
        serde_json::from_value(value).map(Some).map_err(|e| ApiError::Unreadable(e.to_string()))
    }

    async fn let_go(&self) -> Result<(), ApiError> {
        let Some(mut lease) = self.held().await? else { return Ok(()) };
        let spec = lease.spec.get_or_insert_default();
        if spec.holder_identity.as_deref() != Some(&self.me) {
            return Ok(());
        }
        spec.holder_identity = None;
        spec.lease_duration_seconds = Some(1);
        self.api.replace(&self.path(), &json!(lease)).await.map(drop)
    }

    fn folder(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.namespace)
    }

    fn path(&self) -> String {
        format!("{}/{}", self.folder(), self.name)
    }
}

/// How long a lease holds without being renewed.
const DURATION: Duration = Duration::from_secs(15);
/// How long after the last renewal its holder believes in it: with one more try and its pause, less than that.
const DEADLINE: Duration = Duration::from_secs(8);
const TRY: Duration = Duration::from_secs(3);
const PERIOD: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_stops_believing_before_another_may_take_over() {
        assert!(DEADLINE + TRY + PERIOD < DURATION);
    }

    #[tokio::test]
    async fn of_two_one_leads_and_the_other_follows_it() {
        let server = apistub::ApiStub::start().await;
        let candidate = |me: &str| Candidate::new(super::super::tests::api(&server), "ns".into(), "lease", me.into());
        let (first, second) = (candidate("first"), candidate("second"));
        let (mut first_leads, mut second_leads) = (first.leads(), second.leads());
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let first = tokio::spawn(first.run(async { drop(stopped.await) }));
        first_leads.wait_for(|leads| *leads).await.unwrap();
        let second = tokio::spawn(second.run(std::future::pending()));
        let looked = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/lease".to_owned();
        let before = server.state().requests.len();
        while server.state().requests[before..].iter().filter(|r| **r == looked).count() < 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(*first_leads.borrow() && !*second_leads.borrow());
        stop.send(()).unwrap();
        first.await.unwrap();
        second_leads.wait_for(|leads| *leads).await.unwrap();
        second.abort();
        let held = server.state().get("/apis/coordination.k8s.io/v1/leases", "ns/lease").unwrap().clone();
        assert_eq!((&held["spec"]["holderIdentity"], &held["spec"]["leaseTransitions"]), (&json!("second"), &json!(1)));
    }

    #[tokio::test]
    async fn a_lease_is_taken_over_only_after_its_time_without_a_sign_of_life() {
        let api = Api::unprotected("127.0.0.1:1".parse().unwrap()).unwrap();
        let mut candidate = Candidate::new(api, "ns".into(), "lease", "me".into());
        let spec = |holder: &str, transitions: i32| LeaseSpec {
            holder_identity: Some(holder.into()),
            lease_duration_seconds: Some(15),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        };
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(candidate.decide(None, start), Step::Create);
        assert_eq!(candidate.decide(Some(spec("me", 1)), start), Step::Renew);
        assert_eq!(candidate.decide(Some(spec("", 1)), start), Step::TakeOver);
        assert_eq!(candidate.decide(Some(spec("other", 1)), start), Step::Wait);
        assert_eq!(candidate.decide(Some(spec("other", 1)), at(14)), Step::Wait);
        assert_eq!(candidate.decide(Some(spec("other", 2)), at(16)), Step::Wait, "it was renewed");
        assert_eq!(candidate.decide(Some(spec("other", 2)), at(30)), Step::Wait);
        assert_eq!(candidate.decide(Some(spec("other", 2)), at(32)), Step::TakeOver);
    }
}

//! One pod's task: brings the pod to where it is wanted, keeps it there, and cleans up after it.
//!
//! Must never wait without a bound, nor let one pod's trouble become another's.

mod leave;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::decision::{Decision, PodFacts};
use super::enrolment::{Context, Stage, Trouble};
use super::metrics::{PodState, PodView, unix_seconds};
use super::procs::FindError;
use super::proxies::OfferError;
use super::record::Record;
use super::sandbox::Progress;
use crate::capture::listeners::ListenerError;

/// What the objects say of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    Pod(PodFacts, Decision),
    /// The pod no longer exists.
    Gone,
}

/// The task of one pod; ends when the pod is gone and cleaned up.
pub struct PodTask {
    context: Arc<Context>,
    wish: watch::Receiver<Wish>,
    uid: String,
    stage: Stage,
    /// What was done to the pod, by us or by an earlier agent.
    record: Option<Record>,
    /// An earlier agent had the pod captured: its status says so, and stays.
    adopted: bool,
    /// A proxy may have been told to keep or to serve the pod.
    known_to_proxy: bool,
    /// The proxy has been told that the pod is ending.
    farewell: bool,
    /// Since when the object is gone while processes run.
    gone_since: Option<Instant>,
    verified: Option<SystemTime>,
    next_verification: Instant,
    trouble: Option<String>,
    /// The trouble is the proxy's alone: capture works.
    unserved: bool,
    /// Steps in a row that failed.
    failures: u32,
}

/// When to do the next step.
enum Next {
    Now,
    /// After this time, or when something changes.
    After(Duration),
    /// When something changes.
    Idle,
    /// Never: the task is done.
    End,
}

impl PodTask {
    /// `known_to_proxy`: the pod was put on offer, or kept, before.
    pub fn new(
        context: Arc<Context>,
        uid: String,
        wish: watch::Receiver<Wish>,
        record: Option<Record>,
        known_to_proxy: bool,
    ) -> PodTask {
        PodTask {
            context,
            wish,
            uid,
            stage: Stage::Out,
            record,
            adopted: false,
            known_to_proxy,
            farewell: false,
            gone_since: None,
            verified: None,
            next_verification: Instant::now(),
            trouble: None,
            unserved: false,
            failures: 0,
        }
    }

    pub async fn run(mut self) {
        let context = self.context.clone();
        let mut proxies = context.proxies.changes();
        loop {
            let wish = self.wish.borrow_and_update().clone();
            proxies.mark_unchanged();
            let next = {
                // A pod whose start waits for it does not queue behind checks. The semaphore is never closed.
                let _slot = match self.is_awaited(&wish) {
                    true => None,
                    false => context.slots.acquire().await.ok(),
                };
                match self.step(&wish).await {
                    // One step may succeed again and again on the way to the one that fails.
                    Ok(Next::Now) => Next::Now,
                    Ok(next) => {
                        self.failures = 0;
                        self.trouble = None;
                        next
                    }
                    Err(trouble) => self.stumbled(&wish, &trouble),
                }
            };
            self.show(&wish);
            let wait = match next {
                Next::Now => continue,
                Next::End => {
                    context.sandboxes.forget(&self.uid);
                    return context.metrics.forget(&self.uid);
                }
                Next::After(wait) => Some(wait),
                Next::Idle => None,
            };
            tokio::select! {
                changed = self.wish.changed() => if changed.is_err() {
                    // The agent is ending; capture stays as it is.
                    return;
                },
                Ok(()) = proxies.changed() => {}
                () = sleep(wait) => {}
            }
        }
    }

    async fn step(&mut self, wish: &Wish) -> Result<Next, Trouble> {
        match wish {
            Wish::Gone => {
                if let Some(wait) = self.outlives_its_object().await {
                    return Ok(Next::After(wait));
                }
                self.bury().await?;
                Ok(Next::End)
            }
            Wish::Pod(_, Decision::Ended) => {
                self.bury().await?;
                Ok(Next::Idle)
            }
            // What has begun to leave leaves, and comes back from outside.
            Wish::Pod(facts, Decision::In) if !self.stage.is_leaving() => self.forward(facts).await,
            Wish::Pod(facts, Decision::In | Decision::Out(_)) => self.back(facts).await,
        }
    }

    /// One step into the mesh, or a check that all is well there.
    async fn forward(&mut self, facts: &PodFacts) -> Result<Next, Trouble> {
        let context = self.context.clone();
        if self.has_moved(facts).await {
            info!(pod = format!("{}/{}", facts.namespace, facts.name), "the pod has another network than before");
            self.bury().await?;
            context.renounce(facts)?;
        }
        match &self.stage {
            Stage::Out if facts.leaving && self.record.is_none() => return Ok(Next::Idle),
            Stage::Out => {
                // A proxy that still serves the pod must not drop it while we look for it.
                context.proxies.keep(&self.uid);
                self.known_to_proxy = true;
                self.find(facts).await?;
            }
            Stage::Found(_) => self.prepare(facts).await?,
            Stage::Prepared(held) => {
                context.serve(held).await?;
                self.stage.advance(Stage::Served);
            }
            Stage::Served(held) => {
                context.capture(held, false).await?;
                self.stage.advance(Stage::Captured);
            }
            Stage::Captured(held) => {
                context.verify(held, Duration::ZERO).await?;
                context.announce(held)?;
                if self.adopted {
                    info!(pod = held.record.pod(), "the pod was in the mesh already, and still is");
                } else {
                    context.metrics.enrolments.add(1);
                    info!(pod = held.record.pod(), addresses = ?held.record.addresses, "the pod is in the mesh");
                }
                self.stage.advance(Stage::Enrolled);
                return Ok(self.is_captured());
            }
            Stage::Enrolled(held) => {
                if facts.leaving && !self.farewell {
                    info!(pod = held.record.pod(), "the pod is ending, its peers are told");
                    context.proxies.drain(&self.uid).await;
                    self.farewell = true;
                }
                let wait = self.next_verification.saturating_duration_since(Instant::now());
                let next = if wait.is_zero() || self.failures > 0 {
                    context.verify(held, SCAN_AGE).await?;
                    if !context.is_announced(&self.uid) {
                        context.announce(held)?;
                    }
                    self.is_captured()
                } else {
                    Next::After(wait)
                };
                if context.proxies.wants(&self.uid) {
                    context.proxies.add(&self.uid).await?;
                }
                return Ok(next);
            }
            Stage::Following(..) | Stage::Draining(..) => return self.back(facts).await,
        }
        Ok(Next::Now)
    }

    async fn find(&mut self, facts: &PodFacts) -> Result<(), Trouble> {
        let netns = self.context.find(facts).await?;
        if let Some(record) = self.record.take_if(|record| record.netns_cookie != netns.cookie()) {
            info!(pod = record.pod(), "the pod has another network namespace than before");
            self.context.forget(&record)?;
        }
        self.stage = Stage::Found(netns);
        Ok(())
    }

    async fn prepare(&mut self, facts: &PodFacts) -> Result<(), Trouble> {
        // On failure the stage is `Out` again: the namespace may have been the trouble.
        let Stage::Found(netns) = std::mem::replace(&mut self.stage, Stage::Out) else { return Ok(()) };
        self.adopted = self.context.kernel.is_captured(netns.cookie())?;
        let listeners = self.context.listeners(&self.uid, &netns).await?;
        // From here on there is something to undo, whatever becomes of the next step.
        let record = self.context.note(facts, &netns, self.record.as_ref())?;
        self.record = Some(record.clone());
        self.known_to_proxy = true;
        self.stage = Stage::Prepared(self.context.prepare(facts, netns, listeners, record).await?);
        Ok(())
    }

    /// Whether the pod's processes are in another namespace, or its addresses are others, than what is held.
    async fn has_moved(&self, facts: &PodFacts) -> bool {
        let Some(held) = self.stage.held() else { return false };
        if facts.sandbox.as_ref().is_some_and(|sandbox| sandbox.netns != held.netns) {
            return true;
        }
        // An object that tells no address is no news of one, and their order is none.
        if facts.addresses.iter().any(|address| !held.record.addresses.contains(address)) {
            return true;
        }
        if facts.sandbox.as_ref().is_some_and(|sandbox| sandbox.is_awaited()) {
            return false;
        }
        self.context.has_left(facts, held.netns.id(), SCAN_AGE).await
    }

    fn is_captured(&mut self) -> Next {
        self.verified = Some(SystemTime::now());
        let random = RandomState::new().hash_one(&self.uid) as f64 / u64::MAX as f64;
        let wait = self.context.timings.verify.mul_f64(0.9 + 0.2 * random);
        self.next_verification = Instant::now() + wait;
        Next::After(wait)
    }

    fn stumbled(&mut self, wish: &Wish, trouble: &Trouble) -> Next {
        let context = &self.context;
        context.metrics.failed_steps.add(1);
        let text = trouble.to_string();
        let new = self.trouble.as_ref() != Some(&text);
        // A pod that is just being made has no address and no process for a moment, and after a start of the agent
        // its proxies are not back yet.
        let passing = matches!(
            trouble,
            Trouble::NoAddress
                | Trouble::Find(FindError::NoProcess)
                | Trouble::Listeners(ListenerError::PortTaken { .. })
                | Trouble::Proxy(OfferError::NoProxy)
        );
        let early = passing && self.failures < 5;
        let (name, uid) = (self.name(wish), &self.uid);
        if !early && (new || self.failures == 5) {
            warn!(pod = name, uid, stage = self.stage.name(), reason = text, "a step of the pod's enrolment failed");
        } else {
            debug!(pod = name, uid, stage = self.stage.name(), reason = text, "a step of the pod's enrolment failed");
        }
        if let Wish::Pod(facts, Decision::In) = wish
            && !early
            && self.is_worth_an_event(trouble)
        {
            context.reports.capture_failed(facts, &text);
        }
        if let Wish::Pod(facts, Decision::In) = wish
            && new
            && !self.was_announced()
            && let Err(error) = context.announce_pending(facts, &text)
        {
            warn!(pod = name, %error, "the pod's status cannot be written");
        }
        self.trouble = Some(text);
        self.unserved = matches!(trouble, Trouble::Proxy(_));
        let (first, longest) = context.timings.retry;
        let wait = first.saturating_mul(1 << self.failures.min(16)).min(longest);
        self.failures += 1;
        Next::After(wait)
    }

    /// A pod without an address is only being made, and whether a captured one is served is the proxy's affair.
    fn is_worth_an_event(&self, trouble: &Trouble) -> bool {
        match trouble {
            Trouble::NoAddress => false,
            Trouble::Proxy(_) => !self.was_announced(),
            _ => true,
        }
    }

    /// Peers were told that the pod is in the mesh.
    fn was_announced(&self) -> bool {
        self.adopted || self.stage.is_leaving() || matches!(self.stage, Stage::Enrolled(_))
    }

    fn show(&self, wish: &Wish) {
        let Wish::Pod(facts, decision) = wish else { return };
        self.report(facts);
        let state = match (&self.stage, decision) {
            (Stage::Following(..) | Stage::Draining(..), _) => PodState::Leaving,
            (_, Decision::Out(_)) if self.record.is_some() => PodState::Leaving,
            (_, Decision::Out(_) | Decision::Ended) => PodState::Out,
            (Stage::Enrolled(_), Decision::In) if facts.leaving => PodState::Ending,
            (Stage::Enrolled(_), Decision::In) if self.trouble.is_none() || self.unserved => PodState::Enrolled,
            (_, Decision::In) if self.was_announced() => PodState::NotCaptured,
            (_, Decision::In) => PodState::Pending,
        };
        let reason = match (&self.trouble, decision) {
            (Some(trouble), _) => trouble.clone(),
            (None, Decision::Out(exclusion)) => exclusion.to_string(),
            (None, Decision::Ended) => "its containers have ended".into(),
            (None, Decision::In) => String::new(),
        };
        self.context.metrics.show(PodView {
            namespace: facts.namespace.clone(),
            name: facts.name.clone(),
            uid: self.uid.clone(),
            state,
            captured_verified: self.verified.filter(|_| state != PodState::Out).map(unix_seconds),
            served: self.context.proxies.has_taken(&self.uid),
            reason,
        });
    }

    /// Whether a pod's start waits for it to be captured.
    fn is_awaited(&self, wish: &Wish) -> bool {
        let Wish::Pod(PodFacts { sandbox: Some(sandbox), .. }, Decision::In) = wish else { return false };
        sandbox.is_awaited() && !matches!(self.stage, Stage::Captured(_) | Stage::Enrolled(_))
    }

    /// Tells who waits for the pod's sandbox how far it is.
    fn report(&self, facts: &PodFacts) {
        let Some(sandbox) = &facts.sandbox else { return };
        match (&self.stage, &self.trouble) {
            (Stage::Captured(held) | Stage::Enrolled(held), _) if held.netns == sandbox.netns => {
                sandbox.report(Progress::Captured);
            }
            (_, Some(trouble)) => sandbox.report(Progress::Stuck(trouble.clone())),
            (_, None) => {}
        }
    }

    fn name(&self, wish: &Wish) -> String {
        match (wish, &self.record) {
            (Wish::Pod(facts, _), _) => format!("{}/{}", facts.namespace, facts.name),
            (Wish::Gone, Some(record)) => record.pod(),
            (Wish::Gone, None) => "unknown".into(),
        }
    }
}

async fn sleep(wait: Option<Duration>) {
    match wait {
        Some(wait) => tokio::time::sleep(wait).await,
        None => std::future::pending().await,
    }
}

/// A look at the node's processes may be this old for what is only watched.
const SCAN_AGE: Duration = Duration::from_secs(5);

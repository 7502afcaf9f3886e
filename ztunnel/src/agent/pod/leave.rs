//! A pod's way out of the mesh: step by step when it runs on without, at once when it is gone.
//!
//! Must never open a way past the proxy while peers still take the pod for one of the mesh, nor forget a thing that
//! was done to it.

use std::time::{Duration, Instant};

use tracing::{info, warn};

use super::super::decision::PodFacts;
use super::super::enrolment::{Stage, Trouble};
use super::super::procs::FindError;
use super::{Next, PodTask};

impl PodTask {
    /// One step out of the mesh.
    pub(super) async fn back(&mut self, facts: &PodFacts) -> Result<Next, Trouble> {
        let context = self.context.clone();
        match &self.stage {
            Stage::Out if self.record.is_some() => match self.find(facts).await {
                // An earlier agent left the pod in the mesh: take it up where it is, then out.
                Ok(()) => {}
                Err(Trouble::Find(FindError::NoProcess)) => self.bury().await?,
                Err(trouble) => return Err(trouble),
            },
            Stage::Out => {
                self.leave_proxies().await;
                context.renounce(facts)?;
                return Ok(Next::Idle);
            }
            Stage::Found(netns) if self.record.is_some() => {
                if context.kernel.is_captured(netns.cookie())? {
                    self.prepare(facts).await?;
                    self.stage.advance(Stage::Enrolled);
                    return Ok(Next::Now);
                }
                // It did not get so far, or had left further than that.
                let netns = netns.clone();
                self.leave_proxies().await;
                if let Some(record) = &self.record {
                    context.undo(&netns, record).await?;
                }
                self.record = None;
                self.stage = Stage::Out;
            }
            Stage::Found(_) => self.stage = Stage::Out,
            Stage::Prepared(_) | Stage::Served(_) => self.depart().await?,
            Stage::Captured(held) if !self.adopted => {
                context.release(held)?;
                self.stage.advance(Stage::Served);
            }
            Stage::Captured(held) | Stage::Enrolled(held) => {
                context.renounce(facts)?;
                info!(pod = held.record.pod(), "the pod leaves the mesh: peers are to follow");
                let until = Instant::now() + context.timings.follow;
                self.stage.advance(|held| Stage::Following(held, until));
            }
            Stage::Following(held, until) => {
                let followed = context.proxies.drain(&self.uid).await.is_some_and(|drain| drain.followed);
                let late = Instant::now() >= *until;
                if !followed && !late {
                    return Ok(Next::After(POLL));
                }
                if !followed {
                    warn!(pod = held.record.pod(), "peers may not have noticed that the pod leaves the mesh");
                }
                context.release(held)?;
                let until = Instant::now() + context.timings.drain;
                self.stage.advance(|held| Stage::Draining(held, until));
            }
            Stage::Draining(held, until) => {
                let open = context.proxies.drain(&self.uid).await.map_or(0, |drain| drain.open);
                if open > 0 && Instant::now() < *until {
                    return Ok(Next::After(POLL));
                }
                if open > 0 {
                    warn!(pod = held.record.pod(), open, "connections outlived the drain and are cut");
                }
                // Whole, in one step: a proxy that has drained the pod must not be left with it if it comes back.
                self.depart().await?;
                context.metrics.unenrolments.add(1);
                info!(pod = format!("{}/{}", facts.namespace, facts.name), "the pod is out of the mesh");
            }
        }
        Ok(Next::Now)
    }

    /// Nothing in the kernel leads to the pod's listeners any more: takes it from the proxies, then undoes the rest. Can
    /// be done again where it failed.
    async fn depart(&mut self) -> Result<(), Trouble> {
        if let Some(held) = self.stage.held() {
            self.context.unserve(held).await;
            self.known_to_proxy = false;
            self.context.dismantle(held).await?;
        }
        self.stage = Stage::Out;
        self.record = None;
        self.adopted = false;
        Ok(())
    }

    /// How long to wait on because the pod's processes still run, though the object was deleted by force: what they
    /// open must not go in the clear. Bounded, because nobody else may ever end them.
    pub(super) async fn outlives_its_object(&mut self) -> Option<Duration> {
        let (Stage::Captured(held) | Stage::Enrolled(held)) = &self.stage else { return None };
        let since = *self.gone_since.get_or_insert_with(Instant::now);
        let scan = self.context.scanner.within(GONE_POLL).await;
        if since.elapsed() >= GONE_GRACE || !scan.runs_in(&held.record.cgroup_uid, held.netns.id()) {
            return None;
        }
        if !self.farewell {
            warn!(pod = held.record.pod(), "the pod's object is gone but its processes run: it stays captured");
            self.context.proxies.drain(&self.uid).await;
            self.farewell = true;
        }
        Some(GONE_POLL)
    }

    /// The pod is gone, or in another namespace: undoes everything at once.
    pub(super) async fn bury(&mut self) -> Result<(), Trouble> {
        let context = self.context.clone();
        context.reports.forget(&self.uid)?;
        if let Some(record) = &self.record {
            context.forget(record)?;
        }
        self.leave_proxies().await;
        if let Some(held) = self.stage.held() {
            context.restore(held).await;
        }
        self.stage = Stage::Out;
        self.record = None;
        self.verified = None;
        (self.adopted, self.farewell, self.gone_since) = (false, false, None);
        Ok(())
    }

    async fn leave_proxies(&mut self) {
        if std::mem::take(&mut self.known_to_proxy) {
            self.context.proxies.withdraw(&self.uid);
            self.context.proxies.delete(&self.uid).await;
        }
    }
}

/// How often the proxy is asked how far a drain is.
const POLL: Duration = Duration::from_millis(200);
/// How long a pod whose object is gone stays captured while its processes run, and how often that is looked at.
const GONE_GRACE: Duration = Duration::from_secs(60);
const GONE_POLL: Duration = Duration::from_millis(500);

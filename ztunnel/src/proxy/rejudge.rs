//! Connections that are open are judged again whenever the policies of their pod change, and ended where they are no
//! longer allowed.
//!
//! Must never leave a connection open that the present policies would refuse, longer than a change takes to settle;
//! nor touch one that they allow.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::Instant;

use super::neighbour;
use super::older::Older;
use super::state::{Phase, Pod, Shared};
use crate::mesh::TunnelProtocol;
use crate::policy::{Connection, PolicySet, evaluate};
use crate::telemetry::flow::{CloseReason, Direction, Flow};
use crate::telemetry::{self, LiveConnection};

/// Runs as long as the proxy.
pub async fn run(shared: Arc<Shared>) {
    let (mut changes, mut pods) = (shared.mesh.changes(), shared.pods_changed.subscribe());
    let mut watched = Watched::default();
    loop {
        changes.borrow_and_update();
        pods.borrow_and_update();
        let again = watched.pass(&shared).await;
        let changed = async {
            // Both live as long as the process.
            tokio::select! {
                _ = changes.changed() => {}
                _ = pods.changed() => {}
            }
        };
        match again {
            Some(at) => tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(at) => {}
            },
            None => changed.await,
        }
        // Changes come in bursts.
        tokio::time::sleep(SETTLE).await;
    }
}

/// A connection has just been established that was judged by `judged_by`: if the policies have changed since, it is
/// judged again, because [`run`] may not have seen it. What cannot be decided then ends: nobody would look again.
pub fn established(shared: &Shared, pod: &Pod, connection: &telemetry::Connection, judged_by: &Arc<PolicySet>) {
    let policies = {
        let mesh = shared.mesh.load();
        match mesh.local(&pod.namespace, &pod.name, &pod.service_account) {
            Some(local) if !Arc::ptr_eq(&local.policies, judged_by) => local.policies.clone(),
            _ => return,
        }
    };
    judge(shared, &connection.live(), &policies, true);
}

/// The pods, and what their connections were last judged by.
#[derive(Default)]
struct Watched(HashMap<Arc<str>, WatchedPod>);

struct WatchedPod {
    pod: Weak<Pod>,
    returns: u64,
    policies: Arc<PolicySet>,
    /// Nothing until the pod is in the mesh for its peers too.
    older: Option<Older>,
    /// Since when a decision has been waiting.
    undecided: Option<Instant>,
    /// An older connection has to be looked at again.
    again: bool,
}

impl WatchedPod {
    fn new(pod: &Arc<Pod>) -> Self {
        let returns = pod.returns.load(Ordering::Relaxed);
        let pod = Arc::downgrade(pod);
        Self { pod, returns, policies: Arc::default(), older: None, undecided: None, again: false }
    }

    /// Whether it is this pod, and without a time out of the mesh since.
    fn is_of(&self, pod: &Arc<Pod>) -> bool {
        std::ptr::eq(self.pod.as_ptr(), Arc::as_ptr(pod)) && self.returns == pod.returns.load(Ordering::Relaxed)
    }
}

impl Watched {
    /// Judges what has to be judged. When the next pass is due, if nothing changes before.
    async fn pass(&mut self, shared: &Arc<Shared>) -> Option<Instant> {
        let pods: HashMap<Arc<str>, Arc<Pod>> = {
            let leaving = shared.leaving().clone();
            let pods = shared.pods();
            // One that has left and come back counts as it is now.
            let all = leaving.iter().chain(pods.values()).filter(|pod| *pod.phase.borrow() < Phase::Gone);
            all.map(|pod| (pod.uid.clone(), pod.clone())).collect()
        };
        // What a pod took in while it was out of the mesh is found when it is in again.
        self.0.retain(|uid, watched| pods.get(uid).is_some_and(|pod| watched.is_of(pod)));
        let mut affected = HashMap::new();
        let mut with_older = Vec::new();
        {
            let mesh = shared.mesh.load();
            for (uid, pod) in &pods {
                // Without a record the pod is leaving: its connections end in their own time.
                let Some(local) = mesh.local(&pod.namespace, &pod.name, &pod.service_account) else { continue };
                let watched = self.0.entry(uid.clone()).or_insert_with(|| WatchedPod::new(pod));
                let is_new = !Arc::ptr_eq(&watched.policies, &local.policies);
                if is_new {
                    // Others are waited for, and for as long again.
                    (watched.policies, watched.undecided) = (local.policies.clone(), None);
                }
                if is_new || watched.undecided.is_some() {
                    affected.insert(uid.clone(), (local.policies.clone(), watched.undecided));
                }
                let is_found = watched.older.is_some();
                let is_in_mesh = pod.by_ebpf && local.workload.common.protocol == TunnelProtocol::Hbone;
                if if is_found { is_new || watched.again || watched.undecided.is_some() } else { is_in_mesh } {
                    with_older.push(pod.clone());
                }
            }
        }
        let mut undecided: HashSet<Arc<str>> = HashSet::new();
        if !affected.is_empty() {
            for connection in shared.telemetry.connections() {
                let flow = connection.flow();
                if flow.direction != Direction::Inbound {
                    continue;
                }
                let Some((policies, since)) = affected.get(&flow.pod) else { continue };
                if !judge(shared, &connection, policies, is_late(shared, *since)) {
                    undecided.insert(flow.pod.clone());
                }
            }
        }
        for pod in with_older {
            if self.judge_older(shared, &pod).await {
                undecided.insert(pod.uid.clone());
            }
        }
        let now = Instant::now();
        let mut next = None;
        let mut due = |at: Instant| next = Some(next.map_or(at, |next: Instant| next.min(at)));
        for (uid, watched) in &mut self.0 {
            watched.undecided = undecided.contains(uid).then(|| watched.undecided.unwrap_or(now));
            if let Some(since) = watched.undecided {
                due(since + shared.config.timeouts.policy);
            }
            if watched.again {
                due(now + AGAIN);
            }
        }
        let older = self.0.values().filter_map(|watched| watched.older.as_ref()).map(|older| older.count() as u64);
        shared.older_connections.store(older.sum(), Ordering::Relaxed);
        next
    }

    /// Whether a decision waits for something.
    async fn judge_older(&mut self, shared: &Arc<Shared>, pod: &Arc<Pod>) -> bool {
        let Some(watched) = self.0.get_mut(&pod.uid) else { return false };
        let (older, policies) = (watched.older.take(), watched.policies.clone());
        let is_last_call = is_late(shared, watched.undecided);
        let (inside, of) = (pod.clone(), shared.clone());
        let work = tokio::task::spawn_blocking(move || {
            let find = || Older::find(&inside.netns, || neighbour::ends(&of));
            let mut older = older.map_or_else(find, Ok)?;
            let looked = older.judge(&inside.netns, &policies, is_last_call)?;
            std::io::Result::Ok((older, looked))
        });
        let result = work.await.map_err(std::io::Error::other).and_then(|result| result);
        match result {
            Ok((older, looked)) => {
                watched.older = Some(older);
                watched.again = looked.unaccepted;
                for (peer, local, decision) in &looked.ended {
                    shared.older_ended.fetch_add(1, Ordering::Relaxed);
                    tracing::info!(
                        pod = pod.name, namespace = pod.namespace, %peer, %local, reason = %decision.verdict,
                        "ended a connection that is older than the pod's place in the mesh"
                    );
                }
                looked.undecided
            }
            Err(error) => {
                // Nothing is known of them any more: they are looked for anew.
                watched.older = None;
                watched.again = true;
                tracing::warn!(
                    pod = pod.name, namespace = pod.namespace, %error,
                    "cannot judge the connections that are older than the pod's place in the mesh"
                );
                false
            }
        }
    }
}

/// Judges an open connection and orders its end if it is not allowed. `false`: undecided, and not `is_last_call`.
fn judge(shared: &Shared, connection: &LiveConnection, policies: &PolicySet, is_last_call: bool) -> bool {
    let flow = connection.flow();
    let decision = evaluate(policies, &judged(flow));
    if decision.is_allowed() {
        return true;
    }
    if decision.verdict.is_undecided() && !is_last_call {
        return false;
    }
    if connection.close_because(CloseReason::PolicyChange, &decision.verdict.to_string()) {
        shared.telemetry.judged(flow, &decision);
    }
    true
}

/// What is judged of an inbound connection.
fn judged(flow: &Flow) -> Connection {
    Connection { identity: flow.source.identity.clone(), source: flow.src.ip(), destination: flow.dst }
}

fn is_late(shared: &Shared, since: Option<Instant>) -> bool {
    since.is_some_and(|since| since.elapsed() >= shared.config.timeouts.policy)
}

/// From a change to the pass that follows: many changes are one pass.
const SETTLE: Duration = Duration::from_millis(50);
/// To the next look at a connection that nobody has accepted yet.
const AGAIN: Duration = Duration::from_secs(1);

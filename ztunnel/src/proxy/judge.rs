//! Whether a connection to a pod may pass: what that needs and has not come yet is waited for, within a bound.
//!
//! Must never let pass what is not decided.

use std::sync::Arc;
use std::time::Duration;

use super::state::Pod;
use super::worker::Worker;
use crate::mesh::Mesh;
use crate::policy::{Connection, Decision, PolicySet, evaluate};
use crate::telemetry::flow::{Failure, Flow, ResponseFlag};

/// A pod of this node, by all three names.
#[derive(Clone, Copy)]
struct Names<'a> {
    namespace: &'a str,
    name: &'a str,
    service_account: &'a str,
}

/// What became of the wait for a decision.
struct Judged {
    /// Nothing: the pod's record is missing.
    decision: Option<(Decision, Arc<PolicySet>)>,
    /// The wait had an end without one.
    in_vain: bool,
}

/// Judges by the present policies and the pod's present record. Gives the policies that it was judged by.
pub async fn judge(
    worker: &Worker,
    pod: &Pod,
    connection: &Connection,
    flow: &Flow,
) -> Result<Arc<PolicySet>, Failure> {
    let shared = &worker.shared;
    let names = Names { namespace: &pod.namespace, name: &pod.name, service_account: &pod.service_account };
    let limit = shared.config.timeouts.policy;
    let judged = decide(&shared.mesh, names, connection, limit).await;
    if let Some((decision, _)) = &judged.decision {
        shared.telemetry.judged(flow, decision);
    }
    judged.outcome(limit).map_err(|text| Failure::new(ResponseFlag::Deny, "policy", text))
}

async fn decide(mesh: &Mesh, pod: Names<'_>, connection: &Connection, limit: Duration) -> Judged {
    let decide = || {
        let snapshot = mesh.load();
        let own = snapshot.local(pod.namespace, pod.name, pod.service_account)?;
        Some((evaluate(&own.policies, connection), own.policies.clone()))
    };
    let is_open = |decision: &Option<(Decision, _)>| decision.as_ref().is_none_or(|(d, _)| d.verdict.is_undecided());
    let mut decision = decide();
    if !is_open(&decision) {
        return Judged { decision, in_vain: false };
    }
    let mut changes = mesh.changes();
    let settled = async {
        loop {
            decision = decide();
            if !is_open(&decision) {
                return;
            }
            // The mesh lives as long as the process.
            let _ = changes.changed().await;
        }
    };
    let in_vain = tokio::time::timeout(limit, settled).await.is_err();
    Judged { decision, in_vain }
}

impl Judged {
    /// What let the connection pass, or why it may not.
    fn outcome(self, limit: Duration) -> Result<Arc<PolicySet>, String> {
        let why = match self.decision {
            Some((decision, policies)) if decision.is_allowed() => return Ok(policies),
            Some((decision, _)) => decision.verdict.to_string(),
            None => "denied: the pod's own record is gone".to_owned(),
        };
        Err(if self.in_vain { format!("{why} (waited {limit:?})") } else { why })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::convert_workload;
    use crate::policy::{self, Policy};
    use crate::proto::{security, workload};

    const POD: Names<'static> = Names { namespace: "shop", name: "a", service_account: "default" };
    const LONG: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(20);

    fn record(mesh: &Mesh, policies: &[&str]) {
        let wire = workload::Workload {
            uid: "Kubernetes//Pod/shop/a".into(),
            name: "a".into(),
            namespace: "shop".into(),
            node: "n1".into(),
            authorization_policies: policies.iter().map(|p| (*p).to_owned()).collect(),
            ..Default::default()
        };
        mesh.update(|u| {
            let workload = convert_workload(&wire, u.strings()).unwrap();
            u.workload(workload);
        });
    }

    /// A policy of the pods that name it, with one rule that matches everything.
    fn policy(name: &str, action: i32) -> Policy {
        let wire = security::Authorization {
            name: name.into(),
            namespace: "shop".into(),
            scope: security::Scope::WorkloadSelector as i32,
            action,
            rules: vec![security::Rule::default()],
            ..Default::default()
        };
        policy::convert(&wire.into()).unwrap()
    }

    fn connection() -> Connection {
        Connection { identity: None, source: [10, 0, 0, 9].into(), destination: ([10, 0, 0, 1], 80).into() }
    }

    async fn refusal(mesh: &Mesh, limit: Duration) -> Option<String> {
        decide(mesh, POD, &connection(), limit).await.outcome(limit).err()
    }

    /// Asks in a task of its own, changes something once the task waits, and gives the outcome.
    async fn with_change(mesh: &Arc<Mesh>, change: impl FnOnce(&Mesh)) -> Option<String> {
        let asked = mesh.clone();
        let waiting = tokio::spawn(async move { refusal(&asked, LONG).await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        change(mesh);
        waiting.await.unwrap()
    }

    #[tokio::test]
    async fn a_policy_that_is_missing_is_waited_for() {
        let mesh = Mesh::new("n1", "Kubernetes");
        record(&mesh, &["shop/p"]);
        // The first answer of the control plane, then the policy.
        let refused = with_change(&mesh, |mesh| {
            mesh.update(|u| u.policies_complete());
            mesh.update(|u| u.policy(policy("p", 0)));
        });
        assert_eq!(refused.await, None);
        record(&mesh, &["shop/p", "shop/q"]);
        let refused = with_change(&mesh, |mesh| mesh.update(|u| assert!(u.policy(policy("q", 1)))));
        assert_eq!(refused.await.as_deref(), Some("denied by shop/q rule 0: it matches everything"));
        // Or the pod no longer names it.
        mesh.update(|u| u.remove_policy("shop/q"));
        assert_eq!(with_change(&mesh, |mesh| record(mesh, &["shop/p"])).await, None);
    }

    #[tokio::test]
    async fn what_does_not_come_is_refused_with_the_reason() {
        let mesh = Mesh::new("n1", "Kubernetes");
        let reason = refusal(&mesh, SHORT).await.unwrap();
        assert_eq!(reason, "denied: the pod's own record is gone (waited 20ms)");
        record(&mesh, &["shop/p"]);
        let reason = refusal(&mesh, SHORT).await.unwrap();
        assert_eq!(reason, "denied: the control plane has not sent its policies yet (waited 20ms)");
        mesh.update(|u| u.policies_complete());
        let reason = refusal(&mesh, SHORT).await.unwrap();
        assert_eq!(reason, "denied: policy shop/p, which the workload names, is not known (waited 20ms)");
        mesh.update(|u| u.policy(policy("p", 7)));
        let reason = refusal(&mesh, SHORT).await.unwrap();
        assert_eq!(reason, "denied: policy shop/p cannot be understood: unknown action 7 (waited 20ms)");
    }

    #[tokio::test]
    async fn what_is_denied_anyway_does_not_wait() {
        let mesh = Mesh::new("n1", "Kubernetes");
        record(&mesh, &["shop/deny", "shop/never"]);
        mesh.update(|u| u.policy(policy("deny", 1)));
        let reason = refusal(&mesh, LONG).await.unwrap();
        assert_eq!(reason, "denied by shop/deny rule 0: it matches everything");
    }
}

//! What becomes of policies, in their own status on the API server.
//!
//! Must never run on two replicas at a time, nor take away a condition that somebody else has set.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Value, json};
use tokio::sync::watch;
use ztunnel::identity::rfc3339;
use ztunnel::kubernetes::{Api, ApiError, Kind, Place};
use ztunnel::manifests::{ObjectKey, SecurityKind};

use super::{RETRY, Statuses, differences};
use crate::metrics::Metrics;
use crate::model::{PolicyStatus, Snapshot};

/// What is needed to write them.
#[derive(Debug)]
pub struct PolicyConditions {
    pub api: Api,
    pub snapshots: watch::Receiver<Snapshot>,
    /// Whether this replica does it.
    pub leads: watch::Receiver<bool>,
    pub metrics: Arc<Metrics>,
}

impl PolicyConditions {
    /// Writes them for as long as there are snapshots.
    pub async fn keep(mut self) {
        let (mut told, mut pending, mut complaint) = (Statuses::new(), BTreeSet::new(), None);
        loop {
            if !*self.leads.borrow() {
                // Another replica has written since: all is looked at again.
                (told, pending) = (Statuses::new(), BTreeSet::new());
                if self.leads.wait_for(|leads| *leads).await.is_err() {
                    return;
                }
            }
            let now = self.snapshots.borrow_and_update().policies.clone();
            pending.extend(differences(&told, &now));
            told = now;
            let failed = self.write_all(&told, &mut pending).await;
            self.metrics.policy_statuses_unwritten(pending.len());
            if let Some(reason) = failed.as_ref().filter(|_| failed != complaint) {
                tracing::warn!(
                    reason,
                    policies = pending.len(),
                    "the status of policies cannot be written, it is tried again"
                );
            }
            complaint = failed;
            let retry = async {
                match pending.is_empty() {
                    true => std::future::pending().await,
                    false => tokio::time::sleep(RETRY).await,
                }
            };
            tokio::select! {
                changed = self.snapshots.changed() => if changed.is_err() { return },
                changed = self.leads.changed() => if changed.is_err() { return },
                () = retry => {}
            }
        }
    }

    /// Why the first of those that stay pending could not be written.
    async fn write_all(&self, now: &Statuses, pending: &mut BTreeSet<ObjectKey>) -> Option<String> {
        let mut places = BTreeMap::new();
        let mut first = None;
        for key in pending.clone() {
            // With it goes what was written.
            let Some((status, (kind, name))) = now.get(&key).zip(SecurityKind::of(&key)) else {
                pending.remove(&key);
                continue;
            };
            if !*self.leads.borrow() {
                break;
            }
            let place = match places.get(&kind) {
                Some(place) => place,
                None => match Kind::Security(kind).place(&self.api).await {
                    // Of a version that is not read here nothing is written either.
                    Ok(place) => places.entry(kind).or_insert(place.filter(is_known)),
                    Err(error) => {
                        first.get_or_insert_with(|| format!("{key}: {error}"));
                        continue;
                    }
                },
            };
            let Some(place) = place else {
                pending.remove(&key);
                continue;
            };
            match self.write(&place.object(&name.namespace, &name.name), status).await {
                Ok(()) => drop(pending.remove(&key)),
                Err(error) => drop(first.get_or_insert_with(|| format!("{key}: {error}"))),
            }
        }
        first
    }

    async fn write(&self, path: &str, status: &PolicyStatus) -> Result<(), ApiError> {
        // Gone by now: nothing is left to write to.
        let Some(held) = self.api.find(path).await? else { return Ok(()) };
        let conditions = conditions(&held["status"]["conditions"], status, &rfc3339(SystemTime::now()));
        let wanted = json!({"conditions": conditions, "observedGeneration": status.observed_generation});
        let same = |field: &str| held["status"][field] == wanted[field];
        if same("conditions") && same("observedGeneration") {
            return Ok(());
        }
        // Refused if somebody else has written meanwhile.
        let version = &held["metadata"]["resourceVersion"];
        let patch = json!({"metadata": {"resourceVersion": version}, "status": wanted});
        match self.api.merge(&format!("{path}/status"), &patch).await {
            Ok(_) | Err(ApiError::Refused { code: 404, .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

fn is_known(place: &Place) -> bool {
    SecurityKind::VERSIONS.contains(&place.version.as_str())
}

/// Ours beside those of others. The time of one that stays as it was is that from before.
fn conditions(held: &Value, status: &PolicyStatus, now: &str) -> Vec<Value> {
    let held = held.as_array().cloned().unwrap_or_default();
    let others = held.iter().filter(|h| status.conditions.iter().all(|c| h["type"] != c.kind)).cloned();
    let ours = status.conditions.iter().map(|condition| {
        let mut value = json!(condition);
        let before = held.iter().find(|h| h["type"] == condition.kind && h["status"] == condition.status);
        value["lastTransitionTime"] = before.map_or_else(|| json!(now), |before| before["lastTransitionTime"].clone());
        value
    });
    others.chain(ours).collect()
}

#[cfg(test)]
mod tests {
    use apistub::ApiStub;

    use super::*;
    use crate::kubernetes::tests::api;
    use crate::model::tests::{Cluster, policy};

    const POLICIES: &str = "/apis/security.istio.io/v1/authorizationpolicies";

    #[tokio::test]
    async fn a_policy_carries_what_becomes_of_it_beside_what_others_say() {
        let server = ApiStub::start().await;
        server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
        let mut object = policy("AuthorizationPolicy", "shop/p", json!({"rules": [{}]}));
        object["status"] = json!({"conditions": [{"type": "WaypointAccepted", "status": "True"}]});
        server.state().put(POLICIES, object);
        let mut cluster = Cluster::new();
        cluster.put(policy("AuthorizationPolicy", "shop/p", json!({"rules": [{}]})));
        let (publish, snapshots) = watch::channel(cluster.snapshot());
        let (lead, leads) = watch::channel(false);
        let keeper = PolicyConditions { api: api(&server), snapshots, leads, metrics: Metrics::new() };
        let keeper = tokio::spawn(keeper.keep());
        tokio::task::yield_now().await;
        assert!(server.state().requests.is_empty(), "another replica leads");
        lead.send_replace(true);
        let held = || server.state().get(POLICIES, "shop/p").unwrap()["status"]["conditions"].clone();
        let of = |kind: &str| held().as_array().unwrap().iter().find(|c| c["type"] == kind).cloned();
        let wait = async |status: &str| {
            while of("ZtunnelAccepted").is_none_or(|c| c["status"] != status) {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        wait("True").await;
        assert!(of("WaypointAccepted").is_some());
        let accepted = of("ZtunnelAccepted").unwrap();
        assert!(accepted["lastTransitionTime"].is_string());
        let writes = |server: &ApiStub| server.state().requests.iter().filter(|r| r.starts_with("PATCH")).count();
        assert_eq!(writes(&server), 1);
        // The next leader finds it as it should be.
        lead.send_replace(false);
        lead.send_replace(true);
        let path = json!({"rules": [{"to": [{"operation": {"paths": ["/x"]}}]}]});
        cluster.put(policy("AuthorizationPolicy", "shop/p", path));
        publish.send_replace(cluster.snapshot());
        while writes(&server) < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        keeper.abort();
        assert_eq!(of("ZtunnelAccepted").unwrap()["lastTransitionTime"], accepted["lastTransitionTime"]);
        assert!(of("WaypointAccepted").is_some());
    }
}

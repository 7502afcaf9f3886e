//! The roots for the proxies' own TLS to the control plane: a ConfigMap in each namespace, as istiod keeps it.
//!
//! Must never run on two replicas at a time, nor touch a ConfigMap of another name.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use ztunnel::kubernetes::{Api, ApiError};
use ztunnel::manifests::Objects;

use crate::ca::Ca;
use crate::metrics::Metrics;

/// What is needed to keep them.
#[derive(Debug)]
pub struct RootConfigMaps {
    pub api: Api,
    pub ca: Arc<Ca>,
    pub objects: watch::Receiver<Arc<Objects>>,
    /// Whether this replica does it.
    pub leads: watch::Receiver<bool>,
    pub metrics: Arc<Metrics>,
}

impl RootConfigMaps {
    /// Keeps them for as long as there are objects.
    pub async fn keep(mut self) {
        let mut bundles = self.ca.bundles();
        let mut told = None;
        loop {
            if self.leads.wait_for(|leads| *leads).await.is_err() {
                return;
            }
            bundles.borrow_and_update();
            let names = namespaces(&self.objects.borrow());
            let left = self.bring_up_to_date(&names).await;
            self.metrics.root_config_maps_unwritten(left.as_ref().map_or(1, |left| left.0));
            let now = match left {
                Ok((0, _)) => None,
                Ok((left, error)) => Some(format!("{left} of them, first: {error}")),
                Err(error) => Some(error.to_string()),
            };
            if let Some(reason) = now.as_ref().filter(|_| now != told) {
                tracing::warn!(reason, "ConfigMaps {NAME} cannot be written, it is tried again");
            }
            let pause = if now.is_some() { RETRY } else { LOOK };
            told = now;
            let others = self.objects.wait_for(|objects| namespaces(objects) != names);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                changed = bundles.changed() => if changed.is_err() { return },
                ended = others => if ended.is_err() { return },
            }
        }
    }

    /// How many could not be written, and why the first could not.
    async fn bring_up_to_date(&self, namespaces: &[String]) -> Result<(usize, String), ApiError> {
        let roots = self.ca.roots_pem();
        let mut held = BTreeMap::new();
        for item in self.api.list(ALL, "&fieldSelector=metadata.name%3Distio-ca-root-cert").await? {
            let namespace = item["metadata"]["namespace"].as_str().unwrap_or_default().to_owned();
            held.insert(namespace, item["data"][KEY].as_str().map(str::to_owned));
        }
        let (mut left, mut first) = (0, String::new());
        for namespace in namespaces {
            if !*self.leads.borrow() {
                break;
            }
            let folder = format!("/api/v1/namespaces/{namespace}/configmaps");
            let done = match held.get(namespace) {
                Some(Some(content)) if **content == *roots => continue,
                Some(_) => self.api.merge(&format!("{folder}/{NAME}"), &json!({"data": {KEY: &*roots}})).await,
                None => self.api.create(&folder, &config_map(&roots)).await,
            };
            match done {
                // Another one was faster, or the namespace is on its way out.
                Ok(_) | Err(ApiError::Refused { code: 404 | 409, .. }) => {}
                Err(error) => {
                    left += 1;
                    if first.is_empty() {
                        first = format!("in namespace {namespace}: {error}");
                    }
                }
            }
        }
        Ok((left, first))
    }
}

fn namespaces(objects: &Objects) -> Vec<String> {
    let there = objects.namespaces.iter().filter(|(_, n)| n.metadata.deletion_timestamp.is_none());
    there.map(|(name, _)| name.to_string()).collect()
}

fn config_map(roots: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": {KEY: roots},
        "metadata": {"name": NAME, "labels": {"istio.io/config": "true"}},
    })
}

const ALL: &str = "/api/v1/configmaps";
/// As istiod calls it, for whoever mounts it.
pub const NAME: &str = "istio-ca-root-cert";
const KEY: &str = "root-cert.pem";
/// How often it is looked whether somebody else has changed one.
const LOOK: Duration = Duration::from_secs(30);
const RETRY: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use apistub::ApiStub;

    use super::*;
    use crate::ca::CaSettings;
    use crate::kubernetes::tests::api;
    use k8s_openapi::api::core::v1::Namespace;
    use ztunnel::identity::TrustDomain;
    use ztunnel::manifests::{Object, ObjectKey};

    #[tokio::test]
    async fn each_namespace_has_the_roots_and_only_a_leader_writes_them() {
        let server = ApiStub::start().await;
        let dir = std::env::temp_dir().join(format!("understory-config-maps-{}", std::process::id()));
        let ca = Ca::open(CaSettings {
            dir: dir.clone(),
            trust_domain: TrustDomain::default(),
            longest_life: Duration::from_secs(3600),
            backdate: Duration::from_secs(60),
        });
        let (ca, metrics) = (Arc::new(ca.unwrap()), Metrics::new());
        let roots = ca.roots_pem();
        let with = |names: &[&str]| {
            let mut objects = Objects::default();
            for name in names {
                objects.put(ObjectKey::Namespace((*name).into()), Object::Namespace(Arc::new(Namespace::default())));
            }
            Arc::new(objects)
        };
        let others = json!({"metadata": {"name": NAME, "namespace": "b"}, "data": {KEY: "old", "more": "kept"}});
        server.state().put(ALL, others);
        let (objects, receiver) = watch::channel(with(&["a", "b"]));
        let (lead, leads) = watch::channel(false);
        let api = api(&server);
        let keeper = tokio::spawn(RootConfigMaps { api, ca, objects: receiver, leads, metrics }.keep());
        objects.send_replace(with(&["a", "b", "c"]));
        tokio::task::yield_now().await;
        assert!(server.state().requests.is_empty());
        lead.send_replace(true);
        let held = |namespace: &str| server.state().get(ALL, &format!("{namespace}/{NAME}")).cloned();
        let whole = |namespace: &str| held(namespace).is_some_and(|map| map["data"][KEY] == *roots);
        let wait = async |namespaces: &[&str]| {
            while !namespaces.iter().all(|namespace| whole(namespace)) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        wait(&["a", "b", "c"]).await;
        assert_eq!(held("b").unwrap()["data"]["more"], "kept");
        objects.send_replace(with(&["a", "b", "c", "d"]));
        wait(&["d"]).await;
        keeper.abort();
        std::fs::remove_dir_all(dir).unwrap();
    }
}

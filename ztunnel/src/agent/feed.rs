//! Where the agent's objects come from: a folder of manifests, or the API server, of which it asks for the pods of its
//! own node and for all namespaces.
//!
//! Must never pass for whole before everything has been read once: who is not known yet is not gone.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Pod, PodSpec, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::watch;

use super::decision::{SIDECAR, STATIC_POD};
use crate::kubernetes::{Api, Health, Kind, Source, Wanted};
use crate::manifests::{Object, Objects, REDIRECTION, Watch};

/// Ends when it is dropped.
#[derive(Debug)]
pub enum Feed {
    Folder(Watch),
    Kubernetes(Source),
}

impl Feed {
    /// Begins to read. Must be called on a runtime.
    pub fn kubernetes(api: &Api, node: &str) -> Feed {
        let pods = format!("spec.nodeName={node},status.phase!=Succeeded,status.phase!=Failed");
        let wanted = vec![Wanted::all(Kind::Pod).with_fields(&pods), Wanted::all(Kind::Namespace).only_metadata()];
        Feed::Kubernetes(Source::start(api, wanted, read))
    }

    pub fn objects(&self) -> watch::Receiver<Arc<Objects>> {
        match self {
            Feed::Folder(watch) => watch.objects(),
            Feed::Kubernetes(source) => source.objects(),
        }
    }

    pub fn health(&self) -> Option<Arc<Health>> {
        match self {
            Feed::Folder(_) => None,
            Feed::Kubernetes(source) => Some(source.health()),
        }
    }

    /// Returns once the objects are whole.
    pub fn complete(&self) -> impl Future<Output = ()> + Send + use<> {
        let health = self.health();
        async move {
            if let Some(health) = health {
                health.complete().await;
            }
        }
    }
}

/// What the agent looks at of an object.
fn read(kind: Kind, _version: &str, mut value: Value) -> Result<Object, String> {
    match kind {
        Kind::Namespace => {
            let meta = ObjectMeta { annotations: None, ..pruned(part(&mut value, "metadata")?) };
            Ok(Object::Namespace(Arc::new(Namespace { metadata: meta, ..Namespace::default() })))
        }
        Kind::Pod => Ok(Object::Pod(Arc::new(pod(value)?))),
        other => Err(format!("{} is not what was asked for", other.name())),
    }
}

fn pod(mut value: Value) -> Result<Pod, String> {
    let metadata = pruned(part(&mut value, "metadata")?);
    let spec: PodSpec = serde_json::from_value(value["spec"].take()).map_err(|e| format!("spec: {e}"))?;
    let status: Option<PodStatus> = part(&mut value, "status")?;
    let spec = PodSpec {
        node_name: spec.node_name,
        service_account_name: spec.service_account_name,
        host_network: spec.host_network,
        ..PodSpec::default()
    };
    let status = status.map(|status| PodStatus {
        phase: status.phase,
        pod_ip: status.pod_ip.filter(|_| status.pod_ips.is_none()),
        pod_ips: status.pod_ips,
        ..PodStatus::default()
    });
    Ok(Pod { metadata, spec: Some(spec), status })
}

fn part<T: DeserializeOwned>(value: &mut Value, name: &str) -> Result<T, String> {
    let mut part = value[name].take();
    // Half of most objects, and of no use here.
    if let Some(fields) = part.as_object_mut() {
        fields.remove("managedFields");
    }
    serde_json::from_value(part).map_err(|e| format!("{name}: {e}"))
}

fn pruned(meta: ObjectMeta) -> ObjectMeta {
    let annotations = meta.annotations.into_iter().flatten().filter_map(|(key, value)| match key.as_str() {
        // That it is there tells; what it says is long.
        SIDECAR => Some((key, String::new())),
        STATIC_POD | REDIRECTION => Some((key, value)),
        _ => None,
    });
    ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        labels: meta.labels,
        annotations: Some(annotations.collect()).filter(|a: &std::collections::BTreeMap<_, _>| !a.is_empty()),
        deletion_timestamp: meta.deletion_timestamp,
        ..ObjectMeta::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_a_pod_only_what_the_agent_looks_at_is_kept() {
        let whole = json!({
            "metadata": {
                "name": "a", "namespace": "shop", "uid": "u", "labels": {"app": "a"}, "managedFields": [{"manager": "x"}],
                "annotations": {
                    "sidecar.istio.io/status": "{\"a\": 1}", "kubernetes.io/config.hash": "h",
                    "ambient.istio.io/redirection": "enabled", "kubectl.kubernetes.io/last-applied-configuration": "{}",
                },
            },
            "spec": {"nodeName": "n", "serviceAccountName": "sa", "hostNetwork": true, "containers": [{"name": "c", "image": "i"}]},
            "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}], "hostIP": "10.1.0.1"},
        });
        let Ok(Object::Pod(kept)) = read(Kind::Pod, "v1", whole) else { panic!("no pod") };
        assert_eq!(
            serde_json::to_value(&*kept).unwrap(),
            json!({
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": "a", "namespace": "shop", "uid": "u", "labels": {"app": "a"},
                    "annotations": {
                        "sidecar.istio.io/status": "", "kubernetes.io/config.hash": "h",
                        "ambient.istio.io/redirection": "enabled",
                    },
                },
                "spec": {"nodeName": "n", "serviceAccountName": "sa", "hostNetwork": true, "containers": []},
                "status": {"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}]},
            })
        );
        let broken = json!({"metadata": {"name": "a"}, "spec": {"nodeName": 7}});
        assert!(read(Kind::Pod, "v1", broken).unwrap_err().starts_with("spec: "));
        let meta = json!({"metadata": {"name": "shop", "labels": {"istio.io/dataplane-mode": "ambient"}, "annotations": {"a": "b"}}});
        let Ok(Object::Namespace(kept)) = read(Kind::Namespace, "v1", meta) else { panic!("no namespace") };
        assert_eq!((kept.metadata.labels.as_ref().unwrap().len(), &kept.metadata.annotations), (1, &None));
    }
}

//! Namespaces and their labels.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::json;

use super::Cluster;

/// Label that puts a namespace or a pod into the mesh.
pub const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";

/// A namespace. Made with the first thing in it.
#[derive(Debug, Clone)]
pub struct Namespace {
    cluster: Arc<Cluster>,
    name: String,
}

impl Namespace {
    pub(crate) fn new(cluster: Arc<Cluster>, name: &str) -> Self {
        let namespace = Self { cluster, name: name.to_owned() };
        let new = {
            let mut namespaces = namespace.cluster.namespaces.lock().unwrap();
            let known = namespaces.contains_key(name);
            namespaces.entry(name.to_owned()).or_default();
            !known
        };
        if new {
            namespace.write();
            namespace.service_account("default");
        }
        namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Puts the namespace into the mesh. See `Testbed::wait_in_mesh` for waiting until it has happened.
    pub fn enrol(&self) {
        self.set_label(DATAPLANE_MODE, Some("ambient"));
    }

    /// Takes the namespace out of the mesh.
    pub fn unenrol(&self) {
        self.set_label(DATAPLANE_MODE, None);
    }

    pub fn set_label(&self, key: &str, value: Option<&str>) {
        {
            let mut namespaces = self.cluster.namespaces.lock().unwrap();
            set(namespaces.get_mut(&self.name).expect("made with the handle"), key, value);
        }
        self.write();
    }

    pub(crate) fn service_account(&self, account: &str) {
        self.cluster.manifests.put(json!({
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": { "name": account, "namespace": self.name, "uid": format!("sa-{}-{account}", self.name) },
        }));
    }

    fn write(&self) {
        let labels = {
            let namespaces = self.cluster.namespaces.lock().unwrap();
            let mut labels = namespaces[&self.name].clone();
            labels.insert("kubernetes.io/metadata.name".to_owned(), self.name.clone());
            labels
        };
        self.cluster.manifests.put(json!({
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": { "name": self.name, "uid": format!("ns-{}", self.name), "labels": labels },
            "status": { "phase": "Active" },
        }));
    }
}

pub(crate) fn set(map: &mut BTreeMap<String, String>, key: &str, value: Option<&str>) {
    match value {
        Some(value) => map.insert(key.to_owned(), value.to_owned()),
        None => map.remove(key),
    };
}

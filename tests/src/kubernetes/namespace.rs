//! A namespace of one test, and pods in it that only the API server knows.

use serde_json::{Value, json};

use super::{Account, ApiServer};
use crate::wait::wait_for;

/// A namespace that is removed when it is dropped.
#[derive(Debug)]
pub struct Namespace<'a> {
    server: &'a ApiServer,
    name: String,
}

impl<'a> Namespace<'a> {
    #[track_caller]
    pub(super) fn create(server: &'a ApiServer, name: String) -> Self {
        server.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": name } }).to_string());
        let namespace = Self { server, name };
        // Without its default account, pods are refused.
        wait_for(&format!("the default account of namespace {}", namespace.name), || {
            let args = ["get", "serviceaccount", "default", "-n", &namespace.name];
            server.try_kubectl(&server.kubeconfig(), &args).status.success().then_some(())
        });
        namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sets a label of the namespace.
    #[track_caller]
    pub fn label(&self, key: &str, value: &str) {
        self.server.kubectl(&["label", "--overwrite", "namespace", &self.name, &format!("{key}={value}")]);
    }

    /// Runs kubectl as admin in this namespace; what it prints. Panics if it fails.
    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.server.kubectl(&[&["-n", &self.name], args].concat())
    }

    /// As [`ApiServer::apply`], for manifests that name no namespace.
    #[track_caller]
    pub fn apply(&self, manifests: &str) {
        let args = ["-n", &self.name, "apply", "--server-side", "--force-conflicts", "-f", "-"];
        self.server.feed(&args, manifests);
    }

    /// As [`ApiServer::get`], in this namespace.
    #[track_caller]
    pub fn get(&self, args: &[&str]) -> Value {
        self.server.get(&[&["-n", &self.name], args].concat())
    }

    /// A service account of this namespace; made if it is not there.
    #[track_caller]
    pub fn account(&self, name: &str) -> Account<'a> {
        self.server.account(&self.name, name)
    }

    /// Creates a pod (and its node, if that is not there), and says of it what a kubelet says of one that runs and is
    /// ready. Returns it.
    #[track_caller]
    pub fn run_pod(&self, name: &str, node: &str, ip: &str, labels: &[(&str, &str)]) -> Value {
        self.run_pod_with(name, node, ip, labels, |_| {})
    }

    /// As [`Namespace::run_pod`], with particulars: what is created is what the closure leaves.
    #[track_caller]
    pub fn run_pod_with(
        &self,
        name: &str,
        node: &str,
        ip: &str,
        labels: &[(&str, &str)],
        change: impl FnOnce(&mut Value),
    ) -> Value {
        let labels: serde_json::Map<_, _> = labels.iter().map(|&(key, value)| (key.to_owned(), json!(value))).collect();
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "name": name, "namespace": self.name, "labels": labels },
            "spec": { "nodeName": node, "containers": [{ "name": "app", "image": "app" }] },
        });
        change(&mut pod);
        self.server.node(node);
        self.server.apply(&pod.to_string());
        self.set_pod_status(name, &running(ip));
        self.get(&["pod", name])
    }

    /// Sets a pod's status, as a kubelet does.
    #[track_caller]
    pub fn set_pod_status(&self, name: &str, status: &Value) {
        let patch = json!({ "status": status }).to_string();
        self.kubectl(&["patch", "pod", name, "--subresource", "status", "--type", "merge", "-p", &patch]);
    }

    /// Deletes a pod at once: no kubelet is there to end it first.
    #[track_caller]
    pub fn delete_pod(&self, name: &str) {
        self.kubectl(&["delete", "pod", name, "--grace-period", "0", "--force"]);
    }
}

impl Drop for Namespace<'_> {
    fn drop(&mut self) {
        let admin = self.server.kubeconfig();
        // A test may have ended the server before; and pods would wait for a kubelet.
        for args in [
            &["-n", &self.name, "delete", "pods", "--all", "--grace-period", "0", "--force", "--wait=false"][..],
            &["delete", "namespace", &self.name, "--wait=false"],
        ] {
            if self.server.apiserver.runs() {
                let _ = self.server.try_kubectl(&admin, &[&["--request-timeout", "10s"], args].concat());
            }
        }
    }
}

/// The status of a pod that runs and is ready.
fn running(ip: &str) -> Value {
    let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"];
    json!({
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{ "ip": ip }],
        "conditions": conditions.map(|kind| json!({ "type": kind, "status": "True" })),
    })
}

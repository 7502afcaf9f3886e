//! Service accounts: their rights, tokens and kubeconfigs.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::ApiServer;

/// A service account.
#[derive(Debug)]
pub struct Account<'a> {
    server: &'a ApiServer,
    namespace: String,
    name: String,
}

impl<'a> Account<'a> {
    #[track_caller]
    pub(super) fn create(server: &'a ApiServer, namespace: &str, name: &str) -> Self {
        let metadata = json!({ "name": name, "namespace": namespace });
        server.apply(&json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata }).to_string());
        Self { server, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// Lets it do what the rules of a ClusterRole say, in the whole cluster.
    #[track_caller]
    pub fn allow(&self, rules: Value) {
        let name = format!("{}.{}", self.namespace, self.name);
        let group = "rbac.authorization.k8s.io";
        let objects = json!({
            "apiVersion": "v1",
            "kind": "List",
            "items": [
                {
                    "apiVersion": format!("{group}/v1"),
                    "kind": "ClusterRole",
                    "metadata": { "name": name },
                    "rules": rules,
                },
                {
                    "apiVersion": format!("{group}/v1"),
                    "kind": "ClusterRoleBinding",
                    "metadata": { "name": name },
                    "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": name },
                    "subjects": [{ "kind": "ServiceAccount", "name": self.name, "namespace": self.namespace }],
                },
            ],
        });
        self.server.apply(&objects.to_string());
    }

    /// A token by TokenRequest, for an audience.
    #[track_caller]
    pub fn token(&self, audience: &str) -> String {
        self.request_token(&["--audience", audience])
    }

    /// A token that is bound to a pod that runs with this account, as kubelet asks for them.
    #[track_caller]
    pub fn token_of_pod(&self, audience: &str, pod: &Value) -> String {
        let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_else(|| panic!("the pod has no {field}"));
        let (name, uid) = (text("name"), text("uid"));
        let bound = ["--bound-object-kind", "Pod", "--bound-object-name", name, "--bound-object-uid", uid];
        self.request_token(&[&["--audience", audience], &bound[..]].concat())
    }

    /// A kubeconfig with a token of it.
    #[track_caller]
    pub fn kubeconfig(&self) -> PathBuf {
        let token = self.request_token(&[]);
        self.server.write_kubeconfig(&format!("{}.{}", self.namespace, self.name), &token)
    }

    fn request_token(&self, args: &[&str]) -> String {
        let all = [&["create", "token", &self.name, "-n", &self.namespace], args].concat();
        self.server.kubectl(&all).trim().to_owned()
    }
}

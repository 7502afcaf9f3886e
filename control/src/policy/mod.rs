//! From Kubernetes policies to what node proxies enforce, and what becomes of each on the way. Pure: objects in,
//! resources and words out.
//!
//! Must never enforce less than is written without saying so, and never let pass what it does not understand: what
//! cannot be translated denies where it would apply.

mod authorization;
mod describe;
mod peer;
mod read;
mod status;
#[cfg(test)]
pub(crate) mod tests;
mod values;

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use ztunnel::manifests::{FieldPath, SecurityPolicy};
use ztunnel::proto::security as wire;

pub use authorization::authorization_policy;
pub use describe::json;
pub use peer::PeerAuthentications;
pub use read::{Finding, FindingKind};
pub use status::{Condition, Outcome, State, enrolment};

use read::{Findings, Node};

/// What a policy's meaning depends on beside itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshNames {
    /// The namespace whose policies are for the whole mesh.
    pub root_namespace: String,
    pub trust_domain: String,
}

/// What became of a policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Translation {
    /// What node proxies get; nothing if it is not for them.
    pub resource: Option<wire::Authorization>,
    /// The pods that it applies to.
    pub target: Target,
    pub outcome: Outcome,
}

/// The pods that a policy applies to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Of the mesh, if the policy is in the root namespace (and, for a PeerAuthentication, has no labels).
    pub everywhere: bool,
    pub namespace: String,
    /// All of these; none: all pods.
    pub labels: BTreeMap<String, String>,
}

impl Target {
    pub fn selects(&self, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        (self.everywhere || self.namespace == namespace)
            && self.labels.iter().all(|(key, value)| labels.get(key) == Some(value))
    }

    fn scope(&self) -> wire::Scope {
        match (self.labels.is_empty(), self.everywhere) {
            (false, _) => wire::Scope::WorkloadSelector,
            (true, true) => wire::Scope::Global,
            (true, false) => wire::Scope::Namespace,
        }
    }
}

impl std::fmt::Display for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.labels.is_empty() {
            f.write_str("all pods")?;
        } else {
            let labels: Vec<_> = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
            write!(f, "pods with {}", labels.join(", "))?;
        }
        if self.everywhere { f.write_str(" in all namespaces") } else { write!(f, " in namespace {}", self.namespace) }
    }
}

/// `spec.selector`: labels that all must be there. What is wrong in it is left out, so that more is selected, not less.
fn selector(spec: &Node<'_>, out: &mut Findings) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::new();
    let Some(selector) = spec.get("selector") else { return labels };
    if !selector.expect_fields(&["matchLabels"], out) {
        return labels;
    }
    let Some(wanted) = selector.get("matchLabels") else { return labels };
    for (key, value) in wanted.entries(out) {
        let Some(text) = value.text(out) else { continue };
        if key.is_empty() || key.contains('*') || text.contains('*') {
            out.invalid(&value.path, "a label is matched as it is, without *");
        } else {
            labels.insert(key.to_owned(), text.to_owned());
        }
    }
    labels
}

/// Name and namespace.
fn name_of(meta: &ObjectMeta) -> (&str, &str) {
    (meta.name.as_deref().unwrap_or_default(), meta.namespace.as_deref().unwrap_or("default"))
}

/// The spec, if the document could be read.
fn spec_of<'a>(policy: &'a SecurityPolicy, out: &mut Findings) -> Option<Node<'a>> {
    let path = FieldPath::default().field("spec");
    match &policy.spec {
        Ok(serde_json::Value::Null) => Some(Node { path, value: &EMPTY }),
        Ok(value) => Some(Node { path, value }),
        Err(reason) => {
            out.invalid(&FieldPath::default(), format!("cannot be read: {reason}"));
            None
        }
    }
}

static EMPTY: std::sync::LazyLock<serde_json::Value> = std::sync::LazyLock::new(|| serde_json::json!({}));

//! Who a stream says it is from, checked against its token.

use std::collections::BTreeSet;

use prost_types::value::Kind;
use tonic::Status;
use ztunnel::proto::Node;

use crate::model::Feature;
use crate::tokens::Caller;

/// The proxy at the other end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Proxy {
    pub kind: String,
    /// `name.namespace` of its pod.
    pub pod: String,
    /// Kubernetes name of its node; empty if it does not say.
    pub node: String,
    /// What it says that it knows, beyond what all do.
    pub features: BTreeSet<Feature>,
}

/// Why a node is not served.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NodeError {
    #[error("the first request must say which node it is from")]
    Missing,
    #[error("node id {0:?} is malformed: expected type~address~pod.namespace~namespace.svc.domain")]
    Form(String),
    #[error("node type {0:?} is unknown: expected one of ztunnel, waypoint, sidecar, router, agentgateway")]
    Kind(String),
    #[error("node id has {0:?} in the place of an address")]
    Address(String),
    #[error("the node is of {what} {said:?}, its token of {token:?}")]
    Token { what: &'static str, said: String, token: String },
}

impl Proxy {
    pub fn check(node: Option<&Node>, caller: &Caller) -> Result<Self, NodeError> {
        let node = node.ok_or(NodeError::Missing)?;
        let parts: Vec<&str> = node.id.split('~').collect();
        let [kind, address, pod, domain] = parts[..] else { return Err(NodeError::Form(short(&node.id))) };
        if !["ztunnel", "waypoint", "sidecar", "router", "agentgateway"].contains(&kind) {
            return Err(NodeError::Kind(short(kind)));
        }
        if address.parse::<std::net::IpAddr>().is_err() {
            return Err(NodeError::Address(short(address)));
        }
        let field = |name: &str| match node.metadata.as_ref()?.fields.get(name)?.kind.as_ref()? {
            Kind::StringValue(text) => Some(text.as_str()),
            _ => None,
        };
        let of_id = domain.split('.').next().unwrap_or_default();
        let claims = [
            ("namespace", Some(of_id), &caller.namespace),
            ("namespace", field("NAMESPACE"), &caller.namespace),
            ("service account", field("SERVICE_ACCOUNT"), &caller.service_account),
        ];
        for (what, said, token) in claims {
            if let Some(said) = said.filter(|said| said != token) {
                return Err(NodeError::Token { what, said: short(said), token: token.clone() });
            }
        }
        let dry_run = field("ISTIO_VERSION").and_then(istio_version).is_some_and(|version| version >= DRY_RUN_SINCE);
        let audit = field("UNDERSTORY_FEATURES").is_some_and(|list| list.split(',').any(|f| f == "audit"));
        let features = [(dry_run, Feature::DryRun), (audit, Feature::Audit)];
        Ok(Self {
            kind: kind.to_owned(),
            pod: short(pod),
            node: field("NODE_NAME").map(short).unwrap_or_default(),
            features: features.into_iter().filter(|(knows, _)| *knows).map(|(_, feature)| feature).collect(),
        })
    }
}

impl NodeError {
    /// For metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Missing => "no_node",
            Self::Form(_) | Self::Address(_) => "node_id",
            Self::Kind(_) => "node_type",
            Self::Token { .. } => "not_the_tokens",
        }
    }
}

impl From<NodeError> for Status {
    /// Codes as at istiod.
    fn from(error: NodeError) -> Self {
        let text = error.to_string();
        match error {
            NodeError::Token { .. } => Status::permission_denied(text),
            _ => Status::invalid_argument(text),
        }
    }
}

/// Major and minor.
fn istio_version(text: &str) -> Option<(u32, u32)> {
    let (major, rest) = text.split_once('.')?;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    Some((major.parse().ok()?, rest[..end].parse().ok()?))
}

fn short(text: &str) -> String {
    text.chars().take(253).collect()
}

/// Istio's node proxies know the field from here on.
const DRY_RUN_SINCE: (u32, u32) = (1, 29);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_proxy_knows_what_it_says() {
        let caller = Caller { namespace: "understory-system".into(), service_account: "ztunnel".into(), pod: None };
        for (metadata, expected) in [
            (vec![], vec![]),
            (vec![("ISTIO_VERSION", "1.28.9")], vec![]),
            (vec![("ISTIO_VERSION", "1.29-dev")], vec![Feature::DryRun]),
            (vec![("ISTIO_VERSION", "2.0")], vec![Feature::DryRun]),
            (vec![("ISTIO_VERSION", "new")], vec![]),
            (vec![("UNDERSTORY_FEATURES", "x,audit")], vec![Feature::Audit]),
        ] {
            let value = |text: &str| prost_types::Value { kind: Some(Kind::StringValue(text.to_owned())) };
            let fields: BTreeMap<_, _> = metadata.iter().map(|(k, v)| ((*k).to_owned(), value(v))).collect();
            let node = Node {
                id: "ztunnel~10.0.0.1~z.understory-system~understory-system.svc.cluster.local".into(),
                metadata: Some(prost_types::Struct { fields }),
                ..Default::default()
            };
            let proxy = Proxy::check(Some(&node), &caller).unwrap();
            assert_eq!(proxy.features.into_iter().collect::<Vec<_>>(), expected, "{metadata:?}");
        }
    }
}

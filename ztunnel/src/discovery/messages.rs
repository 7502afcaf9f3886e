//! What we send: who we are, what we want and hold, and what we think of a response.

use std::collections::HashMap;
use std::sync::Arc;

use prost_types::value::Kind as ValueKind;
use prost_types::{Struct, Value};
use tonic::Code;

use super::DiscoverySettings;
use super::apply::Kind;
use super::subscriptions::Change;
use crate::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::proto::{Node, Status as WireStatus};

/// The first request for a type on a stream. `names`: on demand, what to subscribe to; else the whole type is meant.
pub fn first(
    kind: Kind,
    settings: &DiscoverySettings,
    held: HashMap<String, String>,
    names: Option<Vec<Arc<str>>>,
) -> DeltaDiscoveryRequest {
    let mut request = DeltaDiscoveryRequest {
        node: Some(node(settings)),
        type_url: kind.url().into(),
        initial_resource_versions: held.into_iter().collect(),
        ..Default::default()
    };
    if let Some(names) = names {
        // Both in one message open the type without the whole mesh.
        request.resource_names_subscribe = vec!["*".into()];
        request.resource_names_subscribe.extend(names.iter().map(ToString::to_string));
        request.resource_names_unsubscribe = vec!["*".into()];
    }
    request
}

pub fn change(change: &Change) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        type_url: Kind::Address.url().into(),
        resource_names_subscribe: change.subscribe.iter().map(ToString::to_string).collect(),
        resource_names_unsubscribe: change.unsubscribe.iter().map(ToString::to_string).collect(),
        ..Default::default()
    }
}

/// The answer to a response, with name and reason of what in it cannot be used.
pub fn answer(response: &DeltaDiscoveryResponse, refused: &[(String, String)]) -> DeltaDiscoveryRequest {
    let error_detail = (!refused.is_empty()).then(|| WireStatus {
        code: Code::InvalidArgument as i32,
        message: reasons(refused),
        details: Vec::new(),
    });
    DeltaDiscoveryRequest {
        type_url: response.type_url.clone(),
        response_nonce: response.nonce.clone(),
        error_detail,
        ..Default::default()
    }
}

/// Whether what this response belongs to goes on in the next one.
pub fn goes_on(response: &DeltaDiscoveryResponse) -> bool {
    response.system_version_info == MORE
}

/// The first of the reasons, and how many more there are.
pub fn reasons(refused: &[(String, String)]) -> String {
    let shown = refused.iter().take(MAX_REASONS).map(|(name, reason)| format!("{name}: {reason}"));
    let mut text = shown.collect::<Vec<_>>().join("; ");
    if refused.len() > MAX_REASONS {
        text.push_str(&format!("; and {} more", refused.len() - MAX_REASONS));
    }
    text
}

pub fn node(settings: &DiscoverySettings) -> Node {
    let ip = settings.instance_ip.map_or_else(|| "1.1.1.1".to_owned(), |ip| ip.to_string());
    let namespace = &settings.pod_namespace;
    let id = format!("ztunnel~{ip}~{}.{namespace}~{namespace}.svc.cluster.local", settings.pod_name);
    let text = |text: &str| Value { kind: Some(ValueKind::StringValue(text.to_owned())) };
    let mut fields: std::collections::BTreeMap<String, Value> =
        settings.metadata.iter().map(|(key, value)| (key.clone(), proto_value(value))).collect();
    for (key, value) in [
        ("NAME", settings.pod_name.as_str()),
        ("NAMESPACE", namespace),
        ("INSTANCE_IPS", &ip),
        ("NODE_NAME", &settings.node_name),
        ("CLUSTER_ID", &settings.cluster_id),
        ("ISTIO_VERSION", ISTIO_VERSION),
        ("UNDERSTORY_FEATURES", FEATURES),
    ] {
        fields.insert(key.to_owned(), text(value));
    }
    Node { id, cluster: String::new(), metadata: Some(Struct { fields }) }
}

fn proto_value(from: &serde_json::Value) -> Value {
    let kind = match from {
        serde_json::Value::Null => ValueKind::NullValue(0),
        serde_json::Value::Bool(value) => ValueKind::BoolValue(*value),
        serde_json::Value::Number(value) => ValueKind::NumberValue(value.as_f64().unwrap_or_default()),
        serde_json::Value::String(value) => ValueKind::StringValue(value.clone()),
        serde_json::Value::Array(values) => {
            ValueKind::ListValue(prost_types::ListValue { values: values.iter().map(proto_value).collect() })
        }
        serde_json::Value::Object(map) => ValueKind::StructValue(Struct {
            fields: map.iter().map(|(key, value)| (key.clone(), proto_value(value))).collect(),
        }),
    };
    Value { kind: Some(kind) }
}

/// `system_version_info`, free text on the wire, of a response of our own control plane that is not the last of its
/// answer, or of those that follow from one change.
pub const MORE: &str = "more";
/// From 1.29 on istiod sends dry-run policies.
const ISTIO_VERSION: &str = "1.29.0";
/// What our own control plane may send beyond what Istio's proxies know: policies with action AUDIT.
const FEATURES: &str = "audit";
/// Reasons in one message.
const MAX_REASONS: usize = 20;

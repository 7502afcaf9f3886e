//! The delta stream: opened, kept, and opened again for as long as the process lives.

use std::pin::pin;
use std::time::{Duration, Instant};

use prost::Message;
use prost_types::value::Kind as ValueKind;
use prost_types::{Struct, Value};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use super::apply::{Held, Kind};
use super::status::Termination;
use super::{Discovery, DiscoverySettings};
use crate::identity::{ControlPlane, describe_status};
use crate::proto::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use crate::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::proto::{Node, Status as WireStatus};
use crate::random;

/// How a session ended.
struct End {
    why: Termination,
    /// For the log; nothing where the server ended the stream as planned.
    error: Option<String>,
    /// The server could not take what we told it that we hold.
    too_large: bool,
    /// Something was received: the next attempt starts with the shortest pause.
    progressed: bool,
}

/// Keeps the stream open. Names to ask for come by `asked`.
pub async fn run(control_plane: ControlPlane, discovery: Discovery, mut asked: mpsc::Receiver<String>) {
    let (shortest, longest) = discovery.settings.backoff;
    let mut pause = shortest;
    let mut held = Held::default();
    let mut omit_versions = false;
    let mut last_warning: Option<Instant> = None;
    loop {
        let end = session(&control_plane, &discovery, &mut held, &mut asked, omit_versions).await;
        omit_versions = end.too_large;
        if end.progressed {
            pause = shortest;
        }
        let is_new = discovery.shared.ended(end.why, end.error.clone());
        discovery.demand.doubt_absent();
        match &end.error {
            None => {
                tracing::info!(address = %control_plane.address, "the control plane ended the stream, connecting again")
            }
            // Once for each reason, and now and then while it stays so.
            Some(reason) if is_new || last_warning.is_none_or(|at| at.elapsed() > REMIND) => {
                last_warning = Some(Instant::now());
                tracing::warn!(address = %control_plane.address, reason, "no discovery stream, trying again");
            }
            Some(reason) => tracing::debug!(address = %control_plane.address, reason, "no discovery stream"),
        }
        tokio::time::sleep(pause.mul_f64(random::factor(0.2))).await;
        pause = (pause * 2).min(longest);
    }
}

async fn session(
    control_plane: &ControlPlane,
    discovery: &Discovery,
    held: &mut Held,
    asked: &mut mpsc::Receiver<String>,
    omit_versions: bool,
) -> End {
    let not_connected = |error: String| End {
        why: Termination::ConnectionError,
        error: Some(error),
        too_large: false,
        progressed: false,
    };
    let settings = &discovery.settings;
    let roots = match control_plane.load_roots() {
        Ok(roots) => roots,
        Err(error) => return not_connected(error.to_string()),
    };
    let channel = match control_plane.connect(&roots, settings.timings).await {
        Ok(channel) => channel,
        Err(error) => return not_connected(error.to_string()),
    };
    let (requests, queue) = mpsc::channel(REQUESTS);
    for kind in [Kind::Address, Kind::Authorization] {
        let first = first_request(kind, discovery, held, omit_versions);
        // The queue is empty and larger than this.
        let _ = requests.try_send(first);
    }
    let mut call = Request::new(ReceiverStream::new(queue));
    if let Err(error) = control_plane.authorize(call.metadata_mut()) {
        return not_connected(error.to_string());
    }
    let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let opening = tokio::time::timeout(OPEN_LIMIT, client.delta_aggregated_resources(call)).await;
    let stream = match opening {
        Ok(Ok(stream)) => stream.into_inner(),
        Ok(Err(status)) => return ended(&status, false),
        Err(_) => return not_connected(format!("the discovery stream was not opened within {OPEN_LIMIT:?}")),
    };
    discovery.shared.connected();
    tracing::info!(address = %control_plane.address, on_demand = settings.on_demand, "discovery stream is open");
    serve(control_plane, &roots, discovery, held, asked, &requests, stream).await
}

#[allow(clippy::too_many_arguments)]
async fn serve(
    control_plane: &ControlPlane,
    roots: &crate::identity::Roots,
    discovery: &Discovery,
    held: &mut Held,
    asked: &mut mpsc::Receiver<String>,
    requests: &mpsc::Sender<DeltaDiscoveryRequest>,
    stream: Streaming<DeltaDiscoveryResponse>,
) -> End {
    let mut stream = pin!(stream);
    let mut progressed = false;
    let mut first: Vec<Kind> = Vec::new();
    let mut last_message = Instant::now();
    let mut tick = tokio::time::interval(TICK);
    let overrun = |progressed| End {
        why: Termination::Error,
        error: Some("the control plane does not read our requests".into()),
        too_large: false,
        progressed,
    };
    loop {
        tokio::select! {
            message = stream.message() => {
                let response = match message {
                    Ok(Some(response)) => response,
                    Ok(None) => {
                        return End { why: Termination::Complete, error: None, too_large: false, progressed };
                    }
                    Err(status) => return ended(&status, progressed),
                };
                progressed = true;
                last_message = Instant::now();
                let bytes = response.resources.iter().map(|r| r.encoded_len() as u64).sum();
                discovery.shared.message(&response.type_url, bytes);
                let answer = answer(discovery, held, response, &mut first);
                if requests.try_send(answer).is_err() {
                    return overrun(progressed);
                }
                if first.len() == 2 {
                    discovery.shared.synced.send_if_modified(|synced| !std::mem::replace(synced, true));
                }
            }
            name = asked.recv() => {
                // The sender lives in the discovery that we hold.
                let Some(name) = name else { continue };
                let mut names = vec![name];
                while let Ok(name) = asked.try_recv() {
                    names.push(name);
                }
                // A name that nobody needs any more leaves together with one that comes: a request that only
                // unsubscribes is answered as if everything were gone (istiod).
                let gone = discovery.demand.unused_absent(ABSENT_LIMIT);
                for name in &gone {
                    discovery.demand.forget(name);
                }
                let request = DeltaDiscoveryRequest {
                    type_url: Kind::Address.url().into(),
                    resource_names_subscribe: names,
                    resource_names_unsubscribe: gone,
                    ..Default::default()
                };
                if requests.try_send(request).is_err() {
                    return overrun(progressed);
                }
            }
            _ = tick.tick() => {
                if held.has_stale() && first.len() == 2 && last_message.elapsed() > QUIET {
                    let purged = held.purge(&discovery.mesh);
                    tracing::info!(purged, "removed what the control plane no longer mentions");
                }
                if control_plane.load_roots().is_ok_and(|now| now != *roots) {
                    let error = None;
                    tracing::info!("the control plane's roots have changed, connecting again");
                    return End { why: Termination::Reconnect, error, too_large: false, progressed };
                }
            }
        }
    }
}

/// Applies a response and says so to the server.
fn answer(
    discovery: &Discovery,
    held: &mut Held,
    response: DeltaDiscoveryResponse,
    first: &mut Vec<Kind>,
) -> DeltaDiscoveryRequest {
    let mut answer = DeltaDiscoveryRequest {
        type_url: response.type_url.clone(),
        response_nonce: response.nonce.clone(),
        ..Default::default()
    };
    let Some(kind) = Kind::of(&response.type_url) else {
        tracing::debug!(type_url = response.type_url, "a type that is not used here");
        return answer;
    };
    let refused = held.apply(kind, response, &discovery.mesh, &discovery.demand);
    if !first.contains(&kind) {
        first.push(kind);
    }
    if !refused.is_empty() {
        let texts: Vec<String> = refused.iter().map(|(name, reason)| format!("{name}: {reason}")).collect();
        let message = texts.join("; ");
        tracing::warn!(kind = kind.url(), refused = refused.len(), reason = message, "resources cannot be used");
        answer.error_detail = Some(WireStatus { code: Code::InvalidArgument as i32, message, details: Vec::new() });
    }
    answer
}

fn first_request(kind: Kind, discovery: &Discovery, held: &mut Held, omit_versions: bool) -> DeltaDiscoveryRequest {
    let mut request = DeltaDiscoveryRequest {
        node: Some(node(&discovery.settings)),
        type_url: kind.url().into(),
        initial_resource_versions: held.versions(kind, omit_versions).into_iter().collect(),
        ..Default::default()
    };
    if kind == Kind::Address && discovery.is_on_demand() {
        // Both in one message open the type without the whole mesh.
        request.resource_names_subscribe = vec!["*".into()];
        request.resource_names_subscribe.extend(discovery.demand.names());
        request.resource_names_unsubscribe = vec!["*".into()];
    }
    request
}

fn node(settings: &DiscoverySettings) -> Node {
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

/// A status that ended the stream: what is planned recycling is no error.
fn ended(status: &Status, progressed: bool) -> End {
    let text = describe_status(status);
    let recycled = progressed
        && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable)
        && RECYCLING.iter().any(|part| text.to_ascii_lowercase().contains(part));
    End {
        why: if recycled { Termination::Reconnect } else { Termination::Error },
        too_large: status.code() == Code::ResourceExhausted,
        error: (!recycled).then_some(text),
        progressed,
    }
}

/// How often the operator is told again what is wrong.
const REMIND: Duration = Duration::from_secs(10);
/// What servers say when they merely want us to come again.
const RECYCLING: [&str; 4] = ["goaway", "go away", "transport is closing", "no error"];
/// From 1.29 on istiod sends dry-run policies.
const ISTIO_VERSION: &str = "1.29.0";
/// Bytes of one message; a mesh of 100,000 workloads is some 20 MB.
const MAX_MESSAGE: usize = 200 << 20;
/// Requests that may wait for the server.
const REQUESTS: usize = 1024;
const OPEN_LIMIT: Duration = Duration::from_secs(15);
/// How often roots and stale entries are looked at.
const TICK: Duration = Duration::from_secs(2);
/// Without a message for so long, a stream that was not told what we hold has sent everything.
const QUIET: Duration = Duration::from_secs(10);
/// A name that the control plane does not know is kept for so long after its last use.
const ABSENT_LIMIT: Duration = Duration::from_secs(300);

//! From what the API server sends to the objects that are kept: only what the mesh looks at, so that memory is what it
//! needs.
//!
//! Must never lose a policy: one that cannot be read gives a stand-in that says why, and denies.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    Container, Namespace, Node, Pod, PodSpec, PodStatus, Service, ServicePort, ServiceSpec,
};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointSlice};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::de::DeserializeOwned;
use serde_json::Value;
use ztunnel::kubernetes::Kind;
use ztunnel::manifests::{EntryKind, Object, SecurityKind, SecurityPolicy, ServiceEntry, WorkloadEntry};

/// An object of a kind, read and pruned. `version` is that of the API that it came from.
pub fn read(kind: Kind, version: &str, mut value: Value) -> Result<Object, String> {
    let known = kind.versions();
    if !known.contains(&version) {
        return Err(format!("{} of version {version:?} is not known, only {known:?}", kind.name()));
    }
    match kind {
        // Of these only the metadata is asked for.
        Kind::Namespace => metadata(&mut value).map(|meta| Object::Namespace(Arc::new(namespace_of(meta)))),
        Kind::Node => metadata(&mut value).map(|meta| Object::Node(Arc::new(node(meta)))),
        Kind::Pod => parse(value).map(|object| Object::Pod(Arc::new(pod(object)))),
        Kind::Service => parse(value).map(|object| Object::Service(Arc::new(service(object)))),
        Kind::EndpointSlice => parse(value).map(|object| Object::EndpointSlice(Arc::new(slice(object)))),
        Kind::Entry(EntryKind::ServiceEntry) => {
            parse(value).map(|object| Object::ServiceEntry(Arc::new(service_entry(object))))
        }
        Kind::Entry(EntryKind::WorkloadEntry) => {
            parse(value).map(|object| Object::WorkloadEntry(Arc::new(workload_entry(object))))
        }
        Kind::Security(kind) => policy(kind, value),
    }
}

fn policy(kind: SecurityKind, mut value: Value) -> Result<Object, String> {
    let meta = metadata(&mut value)?;
    let generation = meta.generation;
    let metadata = ObjectMeta { generation, ..with_age(meta, |key| key == DRY_RUN) };
    Ok(Object::policy(kind, SecurityPolicy { metadata, spec: Ok(value["spec"].take()) }))
}

fn parse<T: DeserializeOwned>(mut value: Value) -> Result<T, String> {
    // Half of most objects, and of no use here.
    if let Some(meta) = value.get_mut("metadata").and_then(Value::as_object_mut) {
        meta.remove("managedFields");
    }
    serde_json::from_value(value).map_err(|e| e.to_string())
}

fn metadata(value: &mut Value) -> Result<ObjectMeta, String> {
    parse(value["metadata"].take()).map_err(|e| format!("metadata: {e}"))
}

/// With those annotations only that are looked at.
fn pruned(meta: ObjectMeta, annotation: impl Fn(&str) -> bool) -> ObjectMeta {
    let annotations: BTreeMap<_, _> =
        meta.annotations.into_iter().flatten().filter(|(key, _)| annotation(key)).collect();
    ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        labels: meta.labels,
        annotations: Some(annotations).filter(|a| !a.is_empty()),
        deletion_timestamp: meta.deletion_timestamp,
        ..ObjectMeta::default()
    }
}

/// Where which of several counts depends on their age.
fn with_age(meta: ObjectMeta, annotation: impl Fn(&str) -> bool) -> ObjectMeta {
    let creation_timestamp = meta.creation_timestamp.clone();
    ObjectMeta { creation_timestamp, ..pruned(meta, annotation) }
}

fn service_entry(entry: ServiceEntry) -> ServiceEntry {
    ServiceEntry { metadata: with_age(entry.metadata, of_the_mesh), ..entry }
}

fn workload_entry(entry: WorkloadEntry) -> WorkloadEntry {
    WorkloadEntry { metadata: pruned(entry.metadata, of_the_mesh), ..entry }
}

fn namespace_of(meta: ObjectMeta) -> Namespace {
    Namespace { metadata: pruned(meta, of_the_mesh), ..Namespace::default() }
}

fn node(meta: ObjectMeta) -> Node {
    let mut metadata = pruned(meta, |_| false);
    // Others come and go, such as those of autoscalers.
    if let Some(labels) = &mut metadata.labels {
        labels.retain(|key, _| key.starts_with("topology."));
    }
    Node { metadata, ..Node::default() }
}

fn pod(pod: Pod) -> Pod {
    let owner = |owner: OwnerReference| OwnerReference {
        kind: owner.kind,
        name: owner.name,
        controller: owner.controller,
        ..OwnerReference::default()
    };
    let owners = pod.metadata.owner_references.clone();
    let owners: Vec<_> = owners.into_iter().flatten().filter(|o| o.controller == Some(true)).map(owner).collect();
    let metadata =
        ObjectMeta { owner_references: Some(owners).filter(|o| !o.is_empty()), ..pruned(pod.metadata, of_the_mesh) };
    let spec = pod.spec.map(|spec| PodSpec {
        node_name: spec.node_name,
        service_account_name: spec.service_account_name,
        service_account: spec.service_account,
        host_network: spec.host_network,
        containers: spec.containers.into_iter().filter_map(container).collect(),
        init_containers: Some(spec.init_containers.into_iter().flatten().filter_map(container).collect())
            .filter(|list: &Vec<_>| !list.is_empty()),
        ..PodSpec::default()
    });
    let status = pod.status.map(|status| PodStatus {
        phase: status.phase,
        pod_ip: status.pod_ip.filter(|_| status.pod_ips.is_none()),
        pod_ips: status.pod_ips,
        conditions: Some(ready(status.conditions)).filter(|c| !c.is_empty()),
        ..PodStatus::default()
    });
    Pod { metadata, spec, status }
}

/// Its named ports: others are found by their number.
fn container(container: Container) -> Option<Container> {
    let ports: Vec<_> = container.ports.into_iter().flatten().filter(|port| port.name.is_some()).collect();
    (!ports.is_empty()).then(|| Container {
        name: container.name,
        restart_policy: container.restart_policy,
        ports: Some(ports),
        ..Container::default()
    })
}

type PodConditions = Vec<k8s_openapi::api::core::v1::PodCondition>;

fn ready(conditions: Option<PodConditions>) -> PodConditions {
    let ready = conditions.into_iter().flatten().filter(|c| c.type_ == "Ready");
    ready
        .map(|c| k8s_openapi::api::core::v1::PodCondition { type_: c.type_, status: c.status, ..Default::default() })
        .collect()
}

fn service(service: Service) -> Service {
    let port = |port: ServicePort| ServicePort { node_port: None, ..port };
    let spec = service.spec.map(|spec| ServiceSpec {
        type_: spec.type_,
        selector: spec.selector,
        cluster_ip: spec.cluster_ip,
        cluster_ips: spec.cluster_ips,
        ip_families: spec.ip_families,
        ports: spec.ports.map(|ports| ports.into_iter().map(port).collect()),
        internal_traffic_policy: spec.internal_traffic_policy,
        traffic_distribution: spec.traffic_distribution,
        publish_not_ready_addresses: spec.publish_not_ready_addresses,
        ..ServiceSpec::default()
    });
    Service { metadata: pruned(service.metadata, of_the_mesh), spec, ..Service::default() }
}

fn slice(slice: EndpointSlice) -> EndpointSlice {
    let endpoint = |endpoint: Endpoint| Endpoint {
        // Kubernetes defines one for each endpoint.
        addresses: endpoint.addresses.into_iter().take(1).collect(),
        conditions: endpoint
            .conditions
            .filter(|c| c.ready.is_some())
            .map(|c| EndpointConditions { ready: c.ready, ..EndpointConditions::default() }),
        target_ref: endpoint.target_ref.map(|target| k8s_openapi::api::core::v1::ObjectReference {
            kind: target.kind,
            name: target.name,
            ..Default::default()
        }),
        ..Endpoint::default()
    };
    let mut metadata = pruned(slice.metadata, |_| false);
    if let Some(labels) = &mut metadata.labels {
        labels.retain(|key, _| key == SERVICE_NAME);
    }
    EndpointSlice {
        metadata,
        address_type: slice.address_type,
        endpoints: slice.endpoints.map(|list| list.into_iter().map(endpoint).collect()),
        ports: slice.ports,
    }
}

/// Annotations that the mesh reads, on whatever object.
fn of_the_mesh(key: &str) -> bool {
    key.split_once('/').is_some_and(|(domain, _)| DOMAINS.contains(&domain))
}

const DOMAINS: [&str; 3] = ["istio.io", "ambient.istio.io", "networking.istio.io"];
const DRY_RUN: &str = "istio.io/dry-run";
const SERVICE_NAME: &str = "kubernetes.io/service-name";

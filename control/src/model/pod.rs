//! From a pod to the workload that proxies see.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use ztunnel::manifests::Redirection;
use ztunnel::proto::workload as wire;

use super::service::{is_mesh_service, selector, selects, tcp_ports};
use super::{Context, Problems, entry};

/// The workload, or `None` while the pod has no address or after it has ended.
pub(super) fn from_pod(context: &Context<'_>, pod: &Pod, problems: &mut Problems) -> Option<wire::Workload> {
    let (name, namespace) = super::name_of(&pod.metadata);
    let status = pod.status.as_ref()?;
    if is_terminal(pod) {
        return None;
    }
    let addresses = addresses(pod, problems);
    if addresses.is_empty() {
        return None;
    }
    let spec = pod.spec.as_ref();
    let no_labels = BTreeMap::new();
    let labels = pod.metadata.labels.as_ref().unwrap_or(&no_labels);
    let ready = status.conditions.iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    let healthy = ready && pod.metadata.deletion_timestamp.is_none();
    let native = labels.get("networking.istio.io/tunnel").is_some_and(|v| v == "http");
    let host_network = spec.and_then(|s| s.host_network) == Some(true);
    // An agent never captures a pod that shares its node's network: whoever says so is wrong.
    let captured = !host_network && context.objects.redirection(pod) == Some(Redirection::Enabled);
    let node = spec.and_then(|s| s.node_name.as_deref()).unwrap_or_default();
    let owner = owner_name(pod, labels).unwrap_or_else(|| name.to_owned());
    let (canonical_name, canonical_revision) = canonical(labels, &owner);
    Some(wire::Workload {
        uid: context.settings.pod_uid(name, namespace),
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        addresses,
        network: context.network.to_string(),
        tunnel_protocol: if captured || native { wire::TunnelProtocol::Hbone } else { wire::TunnelProtocol::None }
            .into(),
        trust_domain: context.settings.wire_trust_domain(),
        service_account: service_account(pod).to_owned(),
        node: node.to_owned(),
        canonical_name,
        canonical_revision,
        workload_type: wire::WorkloadType::Pod.into(),
        workload_name: owner,
        native_tunnel: native,
        status: if healthy { wire::WorkloadStatus::Healthy } else { wire::WorkloadStatus::Unhealthy }.into(),
        cluster_id: context.settings.cluster_id.clone(),
        authorization_policies: context.policies.of_pod(namespace, labels),
        services: services(context, pod, labels),
        locality: locality(context, node),
        network_mode: if host_network { wire::NetworkMode::HostNetwork } else { wire::NetworkMode::Standard }.into(),
        ..Default::default()
    })
}

/// Whether the pod has run to its end.
pub fn is_terminal(pod: &Pod) -> bool {
    matches!(pod.status.as_ref().and_then(|s| s.phase.as_deref()), Some("Succeeded" | "Failed"))
}

/// The pod's service account, with Kubernetes' default.
pub fn service_account(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|s| s.service_account_name.as_deref().or(s.service_account.as_deref()))
        .filter(|name| !name.is_empty())
        .unwrap_or("default")
}

fn addresses(pod: &Pod, problems: &mut Problems) -> Vec<bytes::Bytes> {
    let Some(status) = &pod.status else { return Vec::new() };
    let list: Vec<&str> = status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str()).collect();
    let list = if list.is_empty() { status.pod_ip.as_deref().into_iter().collect() } else { list };
    let mut addresses = Vec::new();
    for text in list.into_iter().filter(|text| !text.is_empty()) {
        match text.parse::<IpAddr>() {
            Ok(address) => addresses.push(super::address_bytes(address)),
            Err(_) => problems.push(format!("pod IP {text:?} is not an address, it is left out")),
        }
    }
    addresses
}

/// The services that the pod is behind, with the port that stands for each service port.
fn services(context: &Context<'_>, pod: &Pod, labels: &BTreeMap<String, String>) -> BTreeMap<String, wire::PortList> {
    let (name, namespace) = super::name_of(&pod.metadata);
    let mut services = services_of(context, namespace, labels, |wanted| container_port(pod, wanted));
    for slice_name in context.links.slices_with(namespace, name) {
        let Some(slice) = context.objects.endpoint_slices.get(slice_name) else { continue };
        let Some((service_name, service)) = slice_service(context, slice) else { continue };
        // Where pods are selected, the selector is the truth and the slice its echo.
        if selector(service).is_some() {
            continue;
        }
        let ports = slice_ports(service, slice);
        let key = context.settings.service_key(service_name, namespace);
        let known: &mut wire::PortList = services.entry(key).or_default();
        for port in ports {
            if !known.ports.iter().any(|p| p.service_port == port.service_port) {
                known.ports.push(port);
            }
        }
    }
    for list in services.values_mut() {
        list.ports.sort_by_key(|p| p.service_port);
    }
    services
}

/// The services whose selectors a workload's labels match. `named` finds the workload's own port of a name.
pub(super) fn services_of(
    context: &Context<'_>,
    namespace: &str,
    labels: &BTreeMap<String, String>,
    named: impl Fn(&str) -> Option<u16>,
) -> BTreeMap<String, wire::PortList> {
    let mut services = BTreeMap::new();
    let selecting = context.objects.services_in(namespace).filter(|(_, s)| is_mesh_service(s) && selects(s, labels));
    for (key, service) in selecting {
        let ports = tcp_ports(service).filter_map(|port| {
            let target = match &port.target_port {
                Some(IntOrString::String(wanted)) => named(wanted)?.into(),
                Some(IntOrString::Int(0)) | None => port.port,
                Some(IntOrString::Int(number)) => *number,
            };
            wire_port(port.port, target)
        });
        services.insert(context.settings.service_key(&key.name, namespace), wire::PortList { ports: ports.collect() });
    }
    for (name, entry) in context.objects.service_entries_in(namespace).filter(|(_, e)| entry::selects(e, labels)) {
        for host in entry::hosts(entry).filter(|host| context.gives(name, host).is_ok()) {
            services.insert(format!("{namespace}/{host}"), entry::ports(entry, &named));
        }
    }
    for list in services.values_mut() {
        list.ports.sort_by_key(|p| p.service_port);
    }
    services
}

/// Canonical name and revision by what labels say, the name else that of what people deployed.
pub(super) fn canonical(labels: &BTreeMap<String, String>, owner: &str) -> (String, String) {
    let label = |keys: &[&str]| keys.iter().find_map(|key| labels.get(*key).filter(|v| !v.is_empty()).cloned());
    let name = label(&["service.istio.io/canonical-name", "app.kubernetes.io/name", "app"]);
    let revision = label(&["service.istio.io/canonical-revision", "app.kubernetes.io/version", "version"]);
    (name.unwrap_or_else(|| owner.to_owned()), revision.unwrap_or_else(|| "latest".to_owned()))
}

/// The service that a slice belongs to.
pub(super) fn slice_service<'a>(context: &Context<'a>, slice: &'a EndpointSlice) -> Option<(&'a str, &'a Service)> {
    let name = slice_service_name(slice)?;
    let service = context.objects.service(super::name_of(&slice.metadata).1, name)?;
    is_mesh_service(service).then_some((name, &**service))
}

pub(super) fn slice_service_name(slice: &EndpointSlice) -> Option<&str> {
    slice.metadata.labels.as_ref()?.get("kubernetes.io/service-name").map(String::as_str)
}

/// Service port → the slice's port of the same name.
pub(super) fn slice_ports(service: &Service, slice: &EndpointSlice) -> Vec<wire::Port> {
    let own = slice.ports.as_deref().unwrap_or_default();
    let named = |name: &Option<String>| name.clone().unwrap_or_default();
    let target = |port: &k8s_openapi::api::core::v1::ServicePort| {
        let same = own.iter().filter(|p| p.protocol.as_deref().is_none_or(|p| p == "TCP"));
        same.filter(|p| named(&p.name) == named(&port.name)).find_map(|p| p.port)
    };
    tcp_ports(service).filter_map(|port| wire_port(port.port, target(port)?)).collect()
}

fn wire_port(service_port: i32, target_port: i32) -> Option<wire::Port> {
    Some(wire::Port {
        service_port: super::port(service_port)?.into(),
        target_port: super::port(target_port)?.into(),
        ..Default::default()
    })
}

/// The TCP port of that name, of a container or of a sidecar container (an init container that keeps running).
fn container_port(pod: &Pod, name: &str) -> Option<u16> {
    let spec = pod.spec.as_ref()?;
    let sidecars = spec.init_containers.iter().flatten().filter(|c| c.restart_policy.as_deref() == Some("Always"));
    let ports = spec.containers.iter().chain(sidecars).flat_map(|c| c.ports.iter().flatten());
    let mut tcp = ports.filter(|p| p.protocol.as_deref().is_none_or(|p| p == "TCP"));
    super::port(tcp.find(|p| p.name.as_deref() == Some(name))?.container_port)
}

fn locality(context: &Context<'_>, node: &str) -> Option<wire::Locality> {
    let [region, zone, subzone] = super::links::locality_labels(context.objects.node(node)?);
    let locality = wire::Locality { region: region.into(), zone: zone.into(), subzone: subzone.into() };
    (locality != wire::Locality::default()).then_some(locality)
}

/// The name of what people deployed: the Deployment behind a ReplicaSet, the CronJob behind a Job, else the owner.
fn owner_name(pod: &Pod, labels: &BTreeMap<String, String>) -> Option<String> {
    let owners = pod.metadata.owner_references.iter().flatten();
    let owner = owners.clone().find(|o| o.controller == Some(true))?;
    let name = owner.name.as_str();
    Some(match owner.kind.as_str() {
        "ReplicaSet" => match labels.get("pod-template-hash").and_then(|hash| name.strip_suffix(hash.as_str())) {
            Some(deployment) => deployment.strip_suffix('-').unwrap_or(name).to_owned(),
            None => name.to_owned(),
        },
        "Job" => match name.rsplit_once('-') {
            // A CronJob adds the minutes since 1970.
            Some((cron, stamp)) if stamp.len() >= 8 && stamp.bytes().all(|b| b.is_ascii_digit()) => cron.to_owned(),
            _ => name.to_owned(),
        },
        // A static pod belongs to its node, which is no workload.
        "Node" => return None,
        _ => name.to_owned(),
    })
}

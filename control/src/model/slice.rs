//! Workloads from endpoint slices: addresses behind a service that are no pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use ztunnel::proto::workload as wire;

use super::pod::{slice_ports, slice_service};
use super::{Context, Problems};

/// One workload for each address that no pod stands behind. Nothing is known of them: no identity, no locality, and
/// their addresses may be anybody's.
pub(super) fn from_slice(context: &Context<'_>, slice: &EndpointSlice, problems: &mut Problems) -> Vec<wire::Workload> {
    let (name, namespace) = super::name_of(&slice.metadata);
    let Some((service_name, service)) = slice_service(context, slice) else { return Vec::new() };
    if slice.address_type == "FQDN" {
        return Vec::new();
    }
    let ports = wire::PortList { ports: slice_ports(service, slice) };
    let mut seen = BTreeSet::new();
    let mut workloads = Vec::new();
    for endpoint in slice.endpoints.iter().flatten().filter(|e| target_pod(e).is_none()) {
        // Kubernetes defines one address for each endpoint; two families are two slices.
        let Some(text) = endpoint.addresses.first() else { continue };
        let Ok(address) = text.parse::<IpAddr>() else {
            problems.push(format!("endpoint address {text:?} is not an address, it is left out"));
            continue;
        };
        if !seen.insert(address) {
            continue;
        }
        let ready = endpoint.conditions.as_ref().and_then(|c| c.ready) != Some(false);
        workloads.push(wire::Workload {
            uid: format!("{}/discovery.k8s.io/EndpointSlice/{namespace}/{name}/{address}", context.settings.cluster_id),
            name: name.to_owned(),
            namespace: namespace.to_owned(),
            addresses: vec![super::address_bytes(address)],
            network: context.network.to_string(),
            trust_domain: context.settings.wire_trust_domain(),
            workload_type: wire::WorkloadType::Pod.into(),
            status: if ready { wire::WorkloadStatus::Healthy } else { wire::WorkloadStatus::Unhealthy }.into(),
            cluster_id: context.settings.cluster_id.clone(),
            services: BTreeMap::from([(context.settings.service_key(service_name, namespace), ports.clone())]),
            network_mode: wire::NetworkMode::HostNetwork.into(),
            ..Default::default()
        });
    }
    workloads
}

/// The name of the pod that an endpoint is.
pub(super) fn target_pod(endpoint: &Endpoint) -> Option<&str> {
    let target = endpoint.target_ref.as_ref()?;
    (target.kind.as_deref() == Some("Pod")).then_some(target.name.as_deref()?)
}

//! Workloads and services in the dump's form. Enum texts are compared literally by istioctl.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::net::IpAddr;

use serde::Serialize;

use crate::mesh::{
    Destination, GatewayAddress, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode, Scope, Service,
    TunnelProtocol, Visibility, Workload,
};

/// Whose model of the mesh it is.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub name: String,
    pub cluster: String,
    /// The control plane has sent all policies; before that nothing is decided.
    pub policies_complete: bool,
    pub unusable: Vec<Unusable>,
}

/// What the control plane has sent and cannot be used: its addresses are refused.
#[derive(Debug, Clone, Serialize)]
pub struct Unusable {
    pub name: String,
    /// `network/address`.
    pub addresses: Vec<String>,
    pub reason: String,
}

/// A workload as an endpoint of a service.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    pub workload_uid: String,
    /// Service port → target port.
    pub port: BTreeMap<u16, u16>,
    #[serde(serialize_with = "health")]
    #[serde(rename = "status")]
    pub healthy: bool,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct WorkloadDump<'a> {
    uid: &'a str,
    workload_ips: &'a [IpAddr],
    #[serde(skip_serializing_if = "Option::is_none")]
    waypoint: Option<Gateway>,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_gateway: Option<Gateway>,
    protocol: &'static str,
    name: &'a str,
    namespace: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    trust_domain: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    service_account: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    workload_name: &'a str,
    workload_type: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    canonical_name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    canonical_revision: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    hostname: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    network: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    node: &'a str,
    status: &'static str,
    #[serde(skip_serializing_if = "str::is_empty")]
    cluster_id: &'a str,
    locality: Locality<'a>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    native_tunnel: bool,
    capacity: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    application_tunnel: Option<Tunnel>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    authorization_policies: Vec<&'a str>,
    network_mode: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    services: Vec<&'a str>,
}

#[derive(Serialize)]
struct Locality<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    region: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    zone: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    subzone: &'a str,
}

#[derive(Serialize)]
struct Tunnel {
    protocol: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Gateway {
    destination: String,
    hbone_mtls_port: u16,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ServiceDump<'a> {
    name: &'a str,
    namespace: &'a str,
    hostname: &'a str,
    vips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    cidr_vips: Vec<CidrVip<'a>>,
    ports: BTreeMap<u16, u16>,
    endpoints: BTreeMap<String, Endpoint>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    subject_alt_names: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waypoint: Option<Gateway>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    weighted_waypoints: Vec<Weighted>,
    #[serde(skip_serializing_if = "Option::is_none")]
    load_balancer: Option<Balancer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ip_families: Option<&'static str>,
    canonical: bool,
    visibility: &'static str,
}

#[derive(Serialize)]
struct CidrVip<'a> {
    network: &'a str,
    cidr: String,
}

#[derive(Serialize)]
struct Weighted {
    #[serde(flatten)]
    destination: Gateway,
    weight: u32,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Balancer {
    routing_preferences: Vec<&'static str>,
    mode: &'static str,
    health_policy: &'static str,
}

impl<'a> From<&'a Workload> for WorkloadDump<'a> {
    fn from(w: &'a Workload) -> Self {
        Self {
            uid: &w.uid,
            workload_ips: &w.addresses,
            waypoint: w.common.waypoint.as_deref().map(Gateway::from),
            network_gateway: w.place.network_gateway.as_deref().map(Gateway::from),
            protocol: match w.common.protocol {
                TunnelProtocol::None => "TCP",
                TunnelProtocol::Hbone => "HBONE",
            },
            name: w.name(),
            namespace: &w.common.namespace,
            trust_domain: w.common.trust_domain.as_str(),
            service_account: &w.common.service_account,
            workload_name: &w.common.workload_name,
            workload_type: w.common.workload_type,
            canonical_name: &w.common.canonical_name,
            canonical_revision: &w.common.canonical_revision,
            hostname: &w.common.hostname,
            network: &w.place.network,
            node: &w.place.node,
            status: status(w.healthy),
            cluster_id: &w.place.cluster,
            locality: Locality {
                region: &w.place.locality.region,
                zone: &w.place.locality.zone,
                subzone: &w.place.locality.subzone,
            },
            native_tunnel: w.common.native_tunnel,
            capacity: w.capacity,
            application_tunnel: w.common.application_tunnel.as_ref().map(|tunnel| Tunnel {
                protocol: if tunnel.proxy_protocol { "PROXY" } else { "NONE" },
                port: (tunnel.port != 0).then_some(tunnel.port),
            }),
            authorization_policies: w.common.policies.iter().map(|name| &**name).collect(),
            network_mode: if w.common.host_network { "HostNetwork" } else { "Standard" },
            services: w.services.iter().map(|service| &*service.service).collect(),
        }
    }
}

impl<'a> ServiceDump<'a> {
    pub(super) fn new(s: &'a Service, endpoints: Vec<Endpoint>) -> Self {
        Self {
            name: &s.name,
            namespace: &s.namespace,
            hostname: &s.hostname,
            vips: s.vips.iter().map(|vip| in_network(&vip.network, &vip.address)).collect(),
            cidr_vips: s
                .cidr_vips
                .iter()
                .map(|vip| CidrVip { network: &vip.network, cidr: vip.cidr.to_string() })
                .collect(),
            ports: s.ports.iter().map(|port| (port.service_port, port.target_port)).collect(),
            endpoints: endpoints.into_iter().map(|endpoint| (endpoint.workload_uid.clone(), endpoint)).collect(),
            subject_alt_names: s.subject_alt_names.iter().map(ToString::to_string).collect(),
            waypoint: s.waypoint.as_deref().map(Gateway::from),
            weighted_waypoints: s
                .weighted_waypoints
                .iter()
                .map(|w| Weighted { destination: (&w.destination).into(), weight: w.weight })
                .collect(),
            load_balancer: (s.load_balancing != LoadBalancing::default()).then(|| Balancer::from(&s.load_balancing)),
            ip_families: match s.ip_families {
                IpFamilies::Automatic => None,
                IpFamilies::V4Only => Some("IPv4"),
                IpFamilies::V6Only => Some("IPv6"),
                IpFamilies::Dual => Some("Dual"),
            },
            canonical: s.canonical,
            visibility: match s.visibility {
                Visibility::Public => "Public",
                Visibility::Namespace => "Namespace",
            },
        }
    }
}

impl From<&LoadBalancing> for Balancer {
    fn from(balancing: &LoadBalancing) -> Self {
        let scope = |scope: &Scope| match scope {
            Scope::Region => "Region",
            Scope::Zone => "Zone",
            Scope::Subzone => "Subzone",
            Scope::Node => "Node",
            Scope::Cluster => "Cluster",
            Scope::Network => "Network",
        };
        Self {
            routing_preferences: balancing.preference.iter().map(scope).collect(),
            mode: match balancing.mode {
                LoadBalancingMode::Standard => "Standard",
                LoadBalancingMode::Strict => "Strict",
                LoadBalancingMode::Failover => "Failover",
                LoadBalancingMode::Passthrough => "Passthrough",
            },
            health_policy: match balancing.health {
                HealthPolicy::OnlyHealthy => "OnlyHealthy",
                HealthPolicy::AllowAll => "AllowAll",
            },
        }
    }
}

impl From<&GatewayAddress> for Gateway {
    fn from(gateway: &GatewayAddress) -> Self {
        let destination = match &gateway.destination {
            Destination::Hostname(name) => format!("{}/{}", name.namespace, name.hostname),
            Destination::Address(address) => in_network(&address.network, &address.address),
        };
        Self { destination, hbone_mtls_port: gateway.hbone_port }
    }
}

fn in_network(network: &str, address: &impl Display) -> String {
    format!("{network}/{address}")
}

fn health<S: serde::Serializer>(healthy: &bool, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(status(*healthy))
}

fn status(healthy: bool) -> &'static str {
    if healthy { "Healthy" } else { "Unhealthy" }
}

//! From a Kubernetes Service to the service that proxies see.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use ztunnel::proto::workload as wire;
use ztunnel::proto::workload::load_balancing::{HealthPolicy, Mode, Scope};

use super::{Context, Problems};

/// The service, or `None` if proxies need not know of it (ExternalName).
pub(super) fn from_service(context: &Context<'_>, service: &Service, problems: &mut Problems) -> Option<wire::Service> {
    let (name, namespace) = super::name_of(&service.metadata);
    if !is_mesh_service(service) {
        return None;
    }
    let spec = service.spec.as_ref();
    let mut addresses = Vec::new();
    for text in cluster_ips(service) {
        match text.parse::<IpAddr>() {
            Ok(address) => addresses.push(wire::NetworkAddress {
                network: context.network.to_string(),
                address: super::address_bytes(address),
                length: None,
            }),
            Err(_) => problems.push(format!("clusterIP {text:?} is not an address, it is left out")),
        }
    }
    let mut ports = Vec::new();
    for port in tcp_ports(service) {
        let target = match &port.target_port {
            Some(IntOrString::String(_)) => 0,
            Some(IntOrString::Int(0)) | None => port.port,
            Some(IntOrString::Int(number)) => *number,
        };
        match (super::port(port.port), u16::try_from(target)) {
            (Some(service_port), Ok(target_port)) => ports.push(wire::Port {
                service_port: service_port.into(),
                target_port: target_port.into(),
                app_protocol: app_protocol(port).into(),
            }),
            _ => problems.push(format!("port {} → {target} is out of range, it is left out", port.port)),
        }
    }
    let families = spec.and_then(|s| s.ip_families.as_deref()).unwrap_or_default();
    let (v4, v6) = (families.iter().any(|f| f == "IPv4"), families.iter().any(|f| f == "IPv6"));
    let ip_families = match (v4, v6) {
        (true, true) => wire::IpFamilies::Dual,
        (true, false) => wire::IpFamilies::Ipv4Only,
        (false, true) => wire::IpFamilies::Ipv6Only,
        (false, false) => wire::IpFamilies::Automatic,
    };
    Some(wire::Service {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        hostname: context.settings.hostname(name, namespace),
        addresses,
        ports,
        load_balancing: load_balancing(context, service, problems),
        ip_families: ip_families.into(),
        // A Kubernetes Service is preferred over whatever else defines its host name.
        canonical: true,
        ..Default::default()
    })
}

/// Whether proxies know this service at all.
pub(super) fn is_mesh_service(service: &Service) -> bool {
    service.spec.as_ref().and_then(|s| s.type_.as_deref()) != Some("ExternalName")
}

/// Which pods are behind it; `None` if that is said by endpoint slices instead.
pub(super) fn selector(service: &Service) -> Option<&BTreeMap<String, String>> {
    service.spec.as_ref()?.selector.as_ref().filter(|s| !s.is_empty())
}

pub(super) fn selects(service: &Service, labels: &BTreeMap<String, String>) -> bool {
    selector(service).is_some_and(|selector| selector.iter().all(|(key, value)| labels.get(key) == Some(value)))
}

/// The ports that the mesh carries.
pub(super) fn tcp_ports(service: &Service) -> impl Iterator<Item = &ServicePort> {
    let ports = service.spec.as_ref().and_then(|s| s.ports.as_deref()).unwrap_or_default();
    ports.iter().filter(|p| p.protocol.as_deref().is_none_or(|p| p == "TCP"))
}

/// Its virtual addresses, those that are addresses.
pub(super) fn addresses(service: &Service) -> BTreeSet<IpAddr> {
    cluster_ips(service).into_iter().filter_map(|text| text.parse().ok()).collect()
}

/// `None` and empty stand for a headless service.
fn cluster_ips(service: &Service) -> Vec<&str> {
    let Some(spec) = &service.spec else { return Vec::new() };
    let list = spec.cluster_ips.as_deref().unwrap_or_default();
    let all: Vec<&str> = match list {
        [] => spec.cluster_ip.as_deref().into_iter().collect(),
        list => list.iter().map(String::as_str).collect(),
    };
    all.into_iter().filter(|ip| !ip.is_empty() && *ip != "None").collect()
}

/// `spec.trafficDistribution`, else the annotation of the service, else that of its namespace; `internalTrafficPolicy:
/// Local` is stronger than all of them.
fn load_balancing(context: &Context<'_>, service: &Service, problems: &mut Problems) -> Option<wire::LoadBalancing> {
    let spec = service.spec.as_ref();
    let namespace = super::name_of(&service.metadata).1;
    let said = spec.and_then(|s| s.traffic_distribution.as_deref());
    let distribution = distribution(context, namespace, said, &service.metadata, problems);
    let local = spec.and_then(|s| s.internal_traffic_policy.as_deref()) == Some("Local");
    let (mode, preference) = if local { (Mode::Strict, vec![Scope::Node]) } else { distribution };
    let all = spec.and_then(|s| s.publish_not_ready_addresses) == Some(true);
    balancing(mode, preference, if all { HealthPolicy::AllowAll } else { HealthPolicy::OnlyHealthy })
}

/// Where traffic is to stay: what the spec says, else the annotation of the object, else that of its namespace.
pub(super) fn distribution(
    context: &Context<'_>,
    namespace: &str,
    said: Option<&str>,
    meta: &ObjectMeta,
    problems: &mut Problems,
) -> (Mode, Vec<Scope>) {
    fn annotation(meta: &ObjectMeta) -> Option<&str> {
        meta.annotations.as_ref()?.get(TRAFFIC_DISTRIBUTION).map(String::as_str)
    }
    let of_namespace = || annotation(&context.objects.namespace(namespace)?.metadata);
    match said.or_else(|| annotation(meta)).or_else(of_namespace) {
        Some("PreferClose" | "PreferSameZone") => (Mode::Failover, vec![Scope::Network, Scope::Region, Scope::Zone]),
        Some("PreferSameNode") => {
            (Mode::Failover, vec![Scope::Network, Scope::Region, Scope::Zone, Scope::Subzone, Scope::Node])
        }
        None | Some("" | "Any") => (Mode::UnspecifiedMode, Vec::new()),
        Some(other) => {
            let expected = "PreferClose, PreferSameZone, PreferSameNode or Any";
            problems.push(format!("traffic distribution {other:?} is unknown, expected {expected}: it is ignored"));
            (Mode::UnspecifiedMode, Vec::new())
        }
    }
}

/// Nothing where it would say what is so anyway.
pub(super) fn balancing(mode: Mode, preference: Vec<Scope>, health: HealthPolicy) -> Option<wire::LoadBalancing> {
    (mode != Mode::UnspecifiedMode || health != HealthPolicy::OnlyHealthy).then(|| wire::LoadBalancing {
        routing_preference: preference.into_iter().map(Into::into).collect(),
        mode: mode.into(),
        health_policy: health.into(),
    })
}

fn app_protocol(port: &ServicePort) -> wire::AppProtocol {
    let named = port.name.as_deref().map(|name| name.split('-').next().unwrap_or(name));
    protocol(port.app_protocol.as_deref().or(named).unwrap_or_default())
}

/// By its name in whatever case.
pub(super) fn protocol(name: &str) -> wire::AppProtocol {
    match name.to_ascii_lowercase().as_str() {
        "http" => wire::AppProtocol::Http11,
        "http2" | "kubernetes.io/h2c" => wire::AppProtocol::Http2,
        "grpc" => wire::AppProtocol::Grpc,
        "tcp" => wire::AppProtocol::Tcp,
        "tls" | "https" => wire::AppProtocol::Tls,
        _ => wire::AppProtocol::Unknown,
    }
}

const TRAFFIC_DISTRIBUTION: &str = "networking.istio.io/traffic-distribution";

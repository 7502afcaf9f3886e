//! From the wire to the model: every resource is checked whole before it is taken.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::intern::Interner;
use super::service::{
    CidrVip, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode, Scope, Service, ServicePort, Visibility,
    WeightedWaypoint,
};
use super::workload::{
    ApplicationTunnel, Common, Destination, GatewayAddress, Locality, NamespacedHostname, NetworkAddress, Place,
    TunnelProtocol, Workload, WorkloadService, name_in,
};
use crate::identity::TrustDomain;
use crate::proto::workload as wire;

/// Why a resource is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct ConvertError {
    field: &'static str,
    reason: String,
}

pub fn workload(from: &wire::Workload, strings: &mut Interner) -> Result<Workload, ConvertError> {
    if from.uid.is_empty() {
        return Err(fail("uid", "is empty"));
    }
    let protocol = match wire::TunnelProtocol::try_from(from.tunnel_protocol) {
        Ok(wire::TunnelProtocol::None) => TunnelProtocol::None,
        Ok(wire::TunnelProtocol::Hbone) => TunnelProtocol::Hbone,
        Ok(wire::TunnelProtocol::LegacyIstioMtls) => return Err(fail("tunnel_protocol", "LEGACY_ISTIO_MTLS")),
        Err(_) => return Err(unknown("tunnel_protocol", from.tunnel_protocol)),
    };
    let workload_type = match wire::WorkloadType::try_from(from.workload_type) {
        Ok(wire::WorkloadType::Deployment) => "deployment",
        Ok(wire::WorkloadType::Cronjob) => "cronjob",
        Ok(wire::WorkloadType::Pod) => "pod",
        Ok(wire::WorkloadType::Job) => "job",
        Err(_) => return Err(unknown("workload_type", from.workload_type)),
    };
    let healthy = match wire::WorkloadStatus::try_from(from.status) {
        Ok(wire::WorkloadStatus::Healthy) => true,
        Ok(wire::WorkloadStatus::Unhealthy) => false,
        Err(_) => return Err(unknown("status", from.status)),
    };
    let host_network = match wire::NetworkMode::try_from(from.network_mode) {
        Ok(wire::NetworkMode::Standard) => false,
        Ok(wire::NetworkMode::HostNetwork) => true,
        Err(_) => return Err(unknown("network_mode", from.network_mode)),
    };
    let application_tunnel = match &from.application_tunnel {
        None => None,
        Some(tunnel) => Some(ApplicationTunnel {
            proxy_protocol: match wire::application_tunnel::Protocol::try_from(tunnel.protocol) {
                Ok(wire::application_tunnel::Protocol::None) => false,
                Ok(wire::application_tunnel::Protocol::Proxy) => true,
                Err(_) => return Err(unknown("application_tunnel.protocol", tunnel.protocol)),
            },
            port: port("application_tunnel.port", tunnel.port)?,
        }),
    };
    let mut services = Vec::with_capacity(from.services.len());
    for (key, ports) in &from.services {
        if key.split_once('/').is_none_or(|(ns, host)| ns.is_empty() || host.is_empty()) {
            return Err(fail("services", format!("{key:?} is not namespace/hostname")));
        }
        let ports = ports
            .ports
            .iter()
            .map(|p| Ok((port("service_port", p.service_port)?, port("target_port", p.target_port)?)))
            .collect::<Result<_, ConvertError>>()?;
        services.push(WorkloadService { service: strings.get(key), ports });
    }
    services.sort_by(|a, b| a.service.cmp(&b.service));
    let common = Common {
        namespace: strings.get(&from.namespace),
        service_account: strings.get(or(&from.service_account, "default")),
        trust_domain: match from.trust_domain.as_str() {
            "" => TrustDomain::default(),
            name => strings.get(name).into(),
        },
        protocol,
        hostname: strings.get(&from.hostname),
        workload_name: strings.get(&from.workload_name),
        workload_type,
        canonical_name: strings.get(&from.canonical_name),
        canonical_revision: strings.get(&from.canonical_revision),
        waypoint: shared_gateway("waypoint", from.waypoint.as_ref(), strings)?,
        native_tunnel: from.native_tunnel,
        host_network,
        application_tunnel,
        policies: from.authorization_policies.iter().map(|p| strings.get(p)).collect(),
        identity: Default::default(),
    };
    let locality = match &from.locality {
        None => Locality::default(),
        Some(locality) => Locality {
            region: strings.get(&locality.region),
            zone: strings.get(&locality.zone),
            subzone: strings.get(&locality.subzone),
        },
    };
    let place = Place {
        node: strings.get(&from.node),
        cluster: strings.get(or(&from.cluster_id, "Kubernetes")),
        network: strings.get(&from.network),
        network_gateway: shared_gateway("network_gateway", from.network_gateway.as_ref(), strings)?,
        locality,
    };
    Ok(Workload {
        uid: from.uid.as_str().into(),
        own_name: (name_in(&from.uid) != from.name).then(|| from.name.as_str().into()),
        addresses: from.addresses.iter().map(|a| ip("addresses", a)).collect::<Result<_, _>>()?,
        common: strings.common(common),
        place: strings.place(place),
        services: strings.services(services),
        capacity: from.capacity.unwrap_or(1),
        healthy,
    })
}

pub fn service(from: &wire::Service, strings: &mut Interner) -> Result<Service, ConvertError> {
    if from.hostname.is_empty() {
        return Err(fail("hostname", "is empty"));
    }
    let mut vips = Vec::new();
    let mut cidr_vips = Vec::new();
    for address in &from.addresses {
        let network = strings.get(&address.network);
        let ip = ip("addresses", &address.address)?;
        let full = if ip.is_ipv4() { 32 } else { 128 };
        match address.length {
            None => vips.push(NetworkAddress { network, address: ip }),
            Some(length) if length == full => vips.push(NetworkAddress { network, address: ip }),
            Some(length) => {
                let cidr = u8::try_from(length).ok().and_then(|l| IpNet::new(ip, l).ok());
                let cidr = cidr.ok_or_else(|| fail("addresses", format!("{ip}/{length} is not a range")))?;
                cidr_vips.push(CidrVip { network, cidr: cidr.trunc() });
            }
        }
    }
    let mut ports = Vec::with_capacity(from.ports.len());
    for p in &from.ports {
        if wire::AppProtocol::try_from(p.app_protocol).is_err() {
            return Err(unknown("app_protocol", p.app_protocol));
        }
        ports.push(ServicePort {
            service_port: port("service_port", p.service_port)?,
            target_port: port("target_port", p.target_port)?,
            app_protocol: p.app_protocol,
        });
    }
    let mut weighted_waypoints = Vec::new();
    for weighted in &from.weighted_waypoints {
        if let Some(destination) = gateway("weighted_waypoints", weighted.destination.as_ref(), strings)? {
            weighted_waypoints.push(WeightedWaypoint { destination, weight: weighted.weight });
        }
    }
    Ok(Service {
        key: strings.get(&format!("{}/{}", from.namespace, from.hostname)),
        name: strings.get(&from.name),
        namespace: strings.get(&from.namespace),
        hostname: strings.get(&from.hostname),
        vips: vips.into(),
        cidr_vips: cidr_vips.into(),
        ports: ports.into(),
        // Names of other forms are allowed on the wire and can never match a peer.
        subject_alt_names: from.subject_alt_names.iter().filter_map(|n| n.parse().ok()).collect(),
        waypoint: shared_gateway("waypoint", from.waypoint.as_ref(), strings)?,
        weighted_waypoints: weighted_waypoints.into(),
        load_balancing: load_balancing(from.load_balancing.as_ref())?,
        ip_families: match wire::IpFamilies::try_from(from.ip_families) {
            Ok(wire::IpFamilies::Automatic) => IpFamilies::Automatic,
            Ok(wire::IpFamilies::Ipv4Only) => IpFamilies::V4Only,
            Ok(wire::IpFamilies::Ipv6Only) => IpFamilies::V6Only,
            Ok(wire::IpFamilies::Dual) => IpFamilies::Dual,
            Err(_) => return Err(unknown("ip_families", from.ip_families)),
        },
        canonical: from.canonical,
        // An unknown value is public (xDS §3).
        visibility: match wire::Visibility::try_from(from.visibility) {
            Ok(wire::Visibility::Namespace) => Visibility::Namespace,
            Ok(wire::Visibility::Public) | Err(_) => Visibility::Public,
        },
    })
}

fn load_balancing(from: Option<&wire::LoadBalancing>) -> Result<LoadBalancing, ConvertError> {
    use wire::load_balancing as lb;
    let Some(from) = from else { return Ok(LoadBalancing::default()) };
    let scope = |s: &i32| match lb::Scope::try_from(*s) {
        Ok(lb::Scope::Region) => Ok(Scope::Region),
        Ok(lb::Scope::Zone) => Ok(Scope::Zone),
        Ok(lb::Scope::Subzone) => Ok(Scope::Subzone),
        Ok(lb::Scope::Node) => Ok(Scope::Node),
        Ok(lb::Scope::Cluster) => Ok(Scope::Cluster),
        Ok(lb::Scope::Network) => Ok(Scope::Network),
        Ok(lb::Scope::UnspecifiedScope) | Err(_) => Err(unknown("load_balancing.routing_preference", *s)),
    };
    Ok(LoadBalancing {
        preference: from.routing_preference.iter().map(scope).collect::<Result<_, _>>()?,
        mode: match lb::Mode::try_from(from.mode) {
            Ok(lb::Mode::UnspecifiedMode) => LoadBalancingMode::Standard,
            Ok(lb::Mode::Strict) => LoadBalancingMode::Strict,
            Ok(lb::Mode::Failover) => LoadBalancingMode::Failover,
            Ok(lb::Mode::Passthrough) => LoadBalancingMode::Passthrough,
            Err(_) => return Err(unknown("load_balancing.mode", from.mode)),
        },
        health: match lb::HealthPolicy::try_from(from.health_policy) {
            Ok(lb::HealthPolicy::OnlyHealthy) => HealthPolicy::OnlyHealthy,
            Ok(lb::HealthPolicy::AllowAll) => HealthPolicy::AllowAll,
            Err(_) => return Err(unknown("load_balancing.health_policy", from.health_policy)),
        },
    })
}

fn shared_gateway(
    field: &'static str,
    from: Option<&wire::GatewayAddress>,
    strings: &mut Interner,
) -> Result<Option<Arc<GatewayAddress>>, ConvertError> {
    let gateway = gateway(field, from, strings)?;
    Ok(gateway.map(|gateway| strings.gateway(gateway)))
}

fn gateway(
    field: &'static str,
    from: Option<&wire::GatewayAddress>,
    strings: &mut Interner,
) -> Result<Option<GatewayAddress>, ConvertError> {
    use wire::gateway_address::Destination as To;
    let Some(from) = from else { return Ok(None) };
    let destination = match &from.destination {
        Some(To::Hostname(name)) => Destination::Hostname(NamespacedHostname {
            namespace: strings.get(&name.namespace),
            hostname: strings.get(&name.hostname),
        }),
        Some(To::Address(address)) => Destination::Address(NetworkAddress {
            network: strings.get(&address.network),
            address: ip(field, &address.address)?,
        }),
        None => return Err(fail(field, "has neither a host name nor an address")),
    };
    Ok(Some(GatewayAddress { destination, hbone_port: port(field, from.hbone_mtls_port)? }))
}

fn ip(field: &'static str, bytes: &[u8]) -> Result<IpAddr, ConvertError> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Ok(Ipv4Addr::from(v4).into());
    }
    match <[u8; 16]>::try_from(bytes) {
        Ok(v6) => Ok(Ipv6Addr::from(v6).to_canonical()),
        Err(_) => Err(fail(field, format!("{} bytes are not an address", bytes.len()))),
    }
}

fn port(field: &'static str, value: u32) -> Result<u16, ConvertError> {
    u16::try_from(value).map_err(|_| fail(field, format!("{value} is not a port")))
}

fn or<'a>(text: &'a str, default: &'a str) -> &'a str {
    if text.is_empty() { default } else { text }
}

fn unknown(field: &'static str, value: i32) -> ConvertError {
    fail(field, format!("unknown value {value}"))
}

fn fail(field: &'static str, reason: impl Into<String>) -> ConvertError {
    ConvertError { field, reason: reason.into() }
}

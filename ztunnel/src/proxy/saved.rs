//! The mesh as a saved `/config_dump` tells it, through the same checks as what comes over the wire, so that questions
//! are answered as the proxy would have answered them.
//!
//! Must never take what it does not understand for something harmless: such a dump is refused.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde::Deserialize;

use super::explain::{BadQuestion, CertificateState, Explanation, NodeFacts, Question, explain};
use super::state::Phase;
use crate::identity::Identity;
use crate::mesh::{Mesh, NetworkAddress, Unusable, Workload, convert_service, convert_workload};
use crate::policy::{self, PolicyAction};
use crate::proto::security as policy_wire;
use crate::proto::workload as wire;

/// A dump that was read.
pub struct Saved {
    mesh: Arc<Mesh>,
    pods: Vec<(PodInfo, Phase)>,
    certificates: HashMap<String, String>,
}

/// Why a dump cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    #[error("it is no config_dump of this proxy: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{kind} {name}: {reason}")]
    Resource { kind: &'static str, name: String, reason: String },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Dump {
    node: Node,
    workloads: Vec<WorkloadText>,
    services: Vec<ServiceText>,
    policies: Vec<PolicyText>,
    staged_services: BTreeMap<String, Vec<EndpointText>>,
    certificates: Vec<CertificateText>,
    workload_state: HashMap<String, PodText>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    name: String,
    cluster: String,
    policies_complete: bool,
    unusable: Vec<UnusableText>,
}

#[derive(Deserialize)]
struct UnusableText {
    name: String,
    addresses: Vec<String>,
    reason: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct WorkloadText {
    uid: String,
    workload_ips: Vec<IpAddr>,
    waypoint: Option<GatewayText>,
    network_gateway: Option<GatewayText>,
    protocol: String,
    name: String,
    namespace: String,
    #[serde(default)]
    trust_domain: String,
    #[serde(default)]
    service_account: String,
    #[serde(default)]
    workload_name: String,
    #[serde(default)]
    hostname: String,
    #[serde(default)]
    network: String,
    #[serde(default)]
    node: String,
    status: String,
    #[serde(default)]
    cluster_id: String,
    locality: LocalityText,
    #[serde(default)]
    native_tunnel: bool,
    capacity: u32,
    application_tunnel: Option<TunnelText>,
    #[serde(default)]
    authorization_policies: Vec<String>,
    network_mode: String,
}

#[derive(Deserialize)]
struct LocalityText {
    #[serde(default)]
    region: String,
    #[serde(default)]
    zone: String,
    #[serde(default)]
    subzone: String,
}

#[derive(Deserialize)]
struct TunnelText {
    protocol: String,
    port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct GatewayText {
    destination: String,
    hbone_mtls_port: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ServiceText {
    name: String,
    namespace: String,
    hostname: String,
    vips: Vec<String>,
    #[serde(default)]
    cidr_vips: Vec<RangeText>,
    ports: BTreeMap<u16, u16>,
    endpoints: BTreeMap<String, EndpointText>,
    #[serde(default)]
    subject_alt_names: Vec<String>,
    waypoint: Option<GatewayText>,
    #[serde(default)]
    weighted_waypoints: Vec<WeightedText>,
    load_balancer: Option<BalancerText>,
    ip_families: Option<String>,
    canonical: bool,
    visibility: String,
}

#[derive(Deserialize)]
struct RangeText {
    network: String,
    cidr: IpNet,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EndpointText {
    workload_uid: String,
    port: BTreeMap<u16, u16>,
}

#[derive(Deserialize)]
struct WeightedText {
    #[serde(flatten)]
    destination: GatewayText,
    weight: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct BalancerText {
    routing_preferences: Vec<String>,
    mode: String,
    health_policy: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PolicyText {
    name: String,
    namespace: String,
    scope: String,
    action: String,
    dry_run: bool,
    not_understood: Option<String>,
    rules: Vec<Vec<Vec<MatchText>>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
struct MatchText {
    namespaces: Vec<Text>,
    not_namespaces: Vec<Text>,
    service_accounts: Vec<AccountText>,
    not_service_accounts: Vec<AccountText>,
    principals: Vec<Text>,
    not_principals: Vec<Text>,
    source_ips: Vec<IpNet>,
    not_source_ips: Vec<IpNet>,
    destination_ips: Vec<IpNet>,
    not_destination_ips: Vec<IpNet>,
    destination_ports: Vec<u32>,
    not_destination_ports: Vec<u32>,
    not_understood: bool,
}

#[derive(Deserialize)]
enum Text {
    Exact(String),
    Prefix(String),
    Suffix(String),
    Presence(),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AccountText {
    namespace: String,
    service_account: String,
}

#[derive(Deserialize)]
struct CertificateText {
    identity: String,
    state: String,
}

#[derive(Deserialize)]
struct PodText {
    state: String,
    info: PodInfo,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodInfo {
    name: String,
    namespace: String,
    service_account: String,
}

impl Saved {
    /// Reads a dump.
    pub fn read(text: &str) -> Result<Self, SavedError> {
        let dump: Dump = serde_json::from_str(text)?;
        let mesh = Mesh::new(&dump.node.name, &dump.node.cluster);
        let mut shares = shares(&dump);
        mesh.update(|update| {
            for workload in &dump.workloads {
                let services = shares.remove(&*workload.uid).unwrap_or_default();
                let wire = read_workload(workload, services)?;
                let fail = |reason: String| fail("workload", &workload.uid, reason);
                let workload = convert_workload(&wire, update.strings()).map_err(|e| fail(e.to_string()))?;
                update.workload(workload);
            }
            for service in &dump.services {
                let wire = read_service(service)?;
                let fail = |reason: String| fail("service", &service.hostname, reason);
                let service = convert_service(&wire, update.strings()).map_err(|e| fail(e.to_string()))?;
                update.service(service);
            }
            for policy in &dump.policies {
                update.policy(read_policy(policy)?);
            }
            for unusable in dump.node.unusable {
                let addresses = unusable.addresses.iter().map(|text| network_address(text));
                let addresses = addresses
                    .collect::<Option<_>>()
                    .ok_or_else(|| fail("unusable", &unusable.name, "its addresses cannot be read".to_owned()))?;
                update.unusable(Unusable { name: unusable.name.as_str().into(), addresses, reason: unusable.reason });
            }
            if dump.node.policies_complete {
                update.policies_complete();
            }
            Ok::<(), SavedError>(())
        })?;
        let pods = dump.workload_state.into_values().map(|pod| {
            let phase = if pod.state == "Up" { Phase::Serving } else { Phase::Draining };
            (pod.info, phase)
        });
        let certificates = dump.certificates.into_iter().map(|c| (c.identity, c.state));
        Ok(Self { mesh, pods: pods.collect(), certificates: certificates.collect() })
    }

    /// Answers a question.
    pub fn explain(&self, question: &Question) -> Result<Explanation, BadQuestion> {
        explain(&self.mesh.load(), self, question)
    }
}

impl NodeFacts for Saved {
    fn phase(&self, workload: &Workload) -> Option<Phase> {
        let is_it = |pod: &PodInfo| {
            pod.name == *workload.name
                && pod.namespace == *workload.namespace
                && pod.service_account == *workload.service_account
        };
        self.pods.iter().find(|(pod, _)| is_it(pod)).map(|(_, phase)| *phase)
    }

    fn certificate(&self, identity: &Identity) -> Option<CertificateState> {
        let state = self.certificates.get(&identity.to_string())?;
        Some(CertificateState { is_usable: state == "Available", text: format!("its certificate was: {state}") })
    }
}

fn fail(kind: &'static str, name: &str, reason: String) -> SavedError {
    SavedError::Resource { kind, name: name.to_owned(), reason }
}

/// What stands with the services in the dump and with the workloads on the wire: by workload, by service.
fn shares(dump: &Dump) -> HashMap<String, HashMap<String, wire::PortList>> {
    let known = dump.services.iter().flat_map(|s| {
        let key = format!("{}/{}", s.namespace, s.hostname);
        s.endpoints.values().map(move |e| (key.clone(), e))
    });
    let staged = dump.staged_services.iter().flat_map(|(key, list)| list.iter().map(|e| (key.clone(), e)));
    let mut shares: HashMap<String, HashMap<String, wire::PortList>> = HashMap::new();
    for (key, endpoint) in known.chain(staged) {
        let port = |(service, target): (&u16, &u16)| wire::Port {
            service_port: (*service).into(),
            target_port: (*target).into(),
            ..Default::default()
        };
        let ports = wire::PortList { ports: endpoint.port.iter().map(port).collect() };
        shares.entry(endpoint.workload_uid.clone()).or_default().insert(key, ports);
    }
    shares
}

fn read_workload(from: &WorkloadText, services: HashMap<String, wire::PortList>) -> Result<wire::Workload, SavedError> {
    let fail = |what: &str, text: &str| fail("workload", &from.uid, format!("unknown {what} {text:?}"));
    Ok(wire::Workload {
        uid: from.uid.clone(),
        name: from.name.clone(),
        namespace: from.namespace.clone(),
        addresses: from.workload_ips.iter().map(|ip| octets(*ip).into()).collect(),
        network: from.network.clone(),
        tunnel_protocol: match &*from.protocol {
            "TCP" => wire::TunnelProtocol::None.into(),
            "HBONE" => wire::TunnelProtocol::Hbone.into(),
            other => return Err(fail("protocol", other)),
        },
        trust_domain: from.trust_domain.clone(),
        service_account: from.service_account.clone(),
        waypoint: gateway(from.waypoint.as_ref()).map_err(|text| fail("waypoint", text))?,
        network_gateway: gateway(from.network_gateway.as_ref()).map_err(|text| fail("network gateway", text))?,
        node: from.node.clone(),
        workload_name: from.workload_name.clone(),
        native_tunnel: from.native_tunnel,
        authorization_policies: from.authorization_policies.clone(),
        status: match &*from.status {
            "Healthy" => wire::WorkloadStatus::Healthy.into(),
            "Unhealthy" => wire::WorkloadStatus::Unhealthy.into(),
            other => return Err(fail("status", other)),
        },
        cluster_id: from.cluster_id.clone(),
        hostname: from.hostname.clone(),
        services: services.into_iter().collect(),
        application_tunnel: match &from.application_tunnel {
            None => None,
            Some(tunnel) => Some(wire::ApplicationTunnel {
                protocol: match &*tunnel.protocol {
                    "NONE" => wire::application_tunnel::Protocol::None.into(),
                    "PROXY" => wire::application_tunnel::Protocol::Proxy.into(),
                    other => return Err(fail("application tunnel", other)),
                },
                port: tunnel.port.unwrap_or_default().into(),
            }),
        },
        locality: Some(wire::Locality {
            region: from.locality.region.clone(),
            zone: from.locality.zone.clone(),
            subzone: from.locality.subzone.clone(),
        }),
        network_mode: match &*from.network_mode {
            "Standard" => wire::NetworkMode::Standard.into(),
            "HostNetwork" => wire::NetworkMode::HostNetwork.into(),
            other => return Err(fail("network mode", other)),
        },
        capacity: Some(from.capacity),
        ..Default::default()
    })
}

fn read_service(from: &ServiceText) -> Result<wire::Service, SavedError> {
    let fail = |what: &str, text: &str| fail("service", &from.hostname, format!("unknown {what} {text:?}"));
    let vips = from.vips.iter().map(|text| {
        let at = network_address(text).ok_or_else(|| fail("address", text))?;
        Ok(wire::NetworkAddress {
            network: at.network.to_string(),
            address: octets(at.address).into(),
            ..Default::default()
        })
    });
    let ranges = from.cidr_vips.iter().map(|range| {
        Ok(wire::NetworkAddress {
            network: range.network.clone(),
            address: octets(range.cidr.addr()).into(),
            length: Some(range.cidr.prefix_len().into()),
        })
    });
    let weighted = from.weighted_waypoints.iter().map(|w| {
        let destination = gateway(Some(&w.destination)).map_err(|text| fail("waypoint", text))?;
        Ok(wire::WeightedWaypoint { destination, weight: w.weight })
    });
    Ok(wire::Service {
        name: from.name.clone(),
        namespace: from.namespace.clone(),
        hostname: from.hostname.clone(),
        addresses: vips.chain(ranges).collect::<Result<_, SavedError>>()?,
        ports: from
            .ports
            .iter()
            .map(|(service, target)| wire::Port {
                service_port: (*service).into(),
                target_port: (*target).into(),
                ..Default::default()
            })
            .collect(),
        subject_alt_names: from.subject_alt_names.clone(),
        waypoint: gateway(from.waypoint.as_ref()).map_err(|text| fail("waypoint", text))?,
        load_balancing: match &from.load_balancer {
            None => None,
            Some(balancer) => Some(read_balancer(balancer).map_err(|text| fail("load balancing", text))?),
        },
        ip_families: match from.ip_families.as_deref() {
            None => wire::IpFamilies::Automatic.into(),
            Some("IPv4") => wire::IpFamilies::Ipv4Only.into(),
            Some("IPv6") => wire::IpFamilies::Ipv6Only.into(),
            Some("Dual") => wire::IpFamilies::Dual.into(),
            Some(other) => return Err(fail("address families", other)),
        },
        canonical: from.canonical,
        weighted_waypoints: weighted.collect::<Result<_, SavedError>>()?,
        visibility: match &*from.visibility {
            "Public" => wire::Visibility::Public.into(),
            "Namespace" => wire::Visibility::Namespace.into(),
            other => return Err(fail("visibility", other)),
        },
        ..Default::default()
    })
}

/// The text that is not understood, if one is not.
fn read_balancer(from: &BalancerText) -> Result<wire::LoadBalancing, &str> {
    use wire::load_balancing::{HealthPolicy, Mode, Scope};
    let scope = |text: &'_ String| match &**text {
        "Region" => Some(Scope::Region.into()),
        "Zone" => Some(Scope::Zone.into()),
        "Subzone" => Some(Scope::Subzone.into()),
        "Node" => Some(Scope::Node.into()),
        "Cluster" => Some(Scope::Cluster.into()),
        "Network" => Some(Scope::Network.into()),
        _ => None,
    };
    let mut preference = Vec::new();
    for text in &from.routing_preferences {
        preference.push(scope(text).ok_or(&**text)?);
    }
    Ok(wire::LoadBalancing {
        routing_preference: preference,
        mode: match &*from.mode {
            "Standard" => Mode::UnspecifiedMode.into(),
            "Strict" => Mode::Strict.into(),
            "Failover" => Mode::Failover.into(),
            "Passthrough" => Mode::Passthrough.into(),
            other => return Err(other),
        },
        health_policy: match &*from.health_policy {
            "OnlyHealthy" => HealthPolicy::OnlyHealthy.into(),
            "AllowAll" => HealthPolicy::AllowAll.into(),
            other => return Err(other),
        },
    })
}

fn read_policy(from: &PolicyText) -> Result<policy::Policy, SavedError> {
    let name = format!("{}/{}", from.namespace, from.name);
    let unknown = |what: &str, text: &str| fail("policy", &name, format!("unknown {what} {text:?}"));
    let rule = |clauses: &Vec<Vec<MatchText>>| policy_wire::Rule {
        clauses: clauses
            .iter()
            .map(|matches| policy_wire::Clause { matches: matches.iter().map(read_match).collect() })
            .collect(),
    };
    let wire = policy_wire::Authorization {
        name: from.name.clone(),
        namespace: from.namespace.clone(),
        scope: match &*from.scope {
            "Global" => policy_wire::Scope::Global.into(),
            "Namespace" => policy_wire::Scope::Namespace.into(),
            "WorkloadSelector" => policy_wire::Scope::WorkloadSelector.into(),
            other => return Err(unknown("scope", other)),
        },
        action: match &*from.action {
            "Allow" => policy_wire::Action::Allow.into(),
            "Deny" => policy_wire::Action::Deny.into(),
            "Audit" => policy_wire::Action::Audit.into(),
            other => return Err(unknown("action", other)),
        },
        rules: from.rules.iter().map(rule).collect(),
        dry_run: from.dry_run,
        ..Default::default()
    };
    let mut policy = policy::convert(&wire.into()).map_err(|e| fail("policy", &name, e.to_string()))?;
    if let Some(reason) = &from.not_understood {
        policy.action = PolicyAction::NotUnderstood(reason.as_str().into());
    }
    Ok(policy)
}

fn read_match(from: &MatchText) -> policy_wire::Match {
    let texts = |list: &[Text]| list.iter().map(read_text).collect();
    let ranges = |list: &[IpNet]| {
        let range =
            |net: &IpNet| policy_wire::Address { address: octets(net.addr()).into(), length: net.prefix_len().into() };
        list.iter().map(range).collect()
    };
    let accounts = |list: &[AccountText]| {
        let account = |a: &AccountText| policy_wire::ServiceAccountMatch {
            namespace: a.namespace.clone(),
            service_account: a.service_account.clone(),
        };
        list.iter().map(account).collect()
    };
    // What it was the dump does not tell; that there is something is what counts.
    let unknown = policy_wire::Extension { name: "not understood".to_owned(), config: None };
    policy_wire::Match {
        namespaces: texts(&from.namespaces),
        not_namespaces: texts(&from.not_namespaces),
        principals: texts(&from.principals),
        not_principals: texts(&from.not_principals),
        source_ips: ranges(&from.source_ips),
        not_source_ips: ranges(&from.not_source_ips),
        destination_ips: ranges(&from.destination_ips),
        not_destination_ips: ranges(&from.not_destination_ips),
        destination_ports: from.destination_ports.clone(),
        not_destination_ports: from.not_destination_ports.clone(),
        service_accounts: accounts(&from.service_accounts),
        not_service_accounts: accounts(&from.not_service_accounts),
        extensions: if from.not_understood { vec![unknown] } else { Vec::new() },
    }
}

fn read_text(from: &Text) -> policy_wire::StringMatch {
    use policy_wire::string_match::MatchType;
    let kind = match from {
        Text::Exact(text) => MatchType::Exact(text.clone()),
        Text::Prefix(text) => MatchType::Prefix(text.clone()),
        Text::Suffix(text) => MatchType::Suffix(text.clone()),
        Text::Presence() => MatchType::Presence(()),
    };
    policy_wire::StringMatch { match_type: Some(kind) }
}

/// The text that is not understood, if it is not.
fn gateway(from: Option<&GatewayText>) -> Result<Option<wire::GatewayAddress>, &str> {
    use wire::gateway_address::Destination;
    let Some(from) = from else { return Ok(None) };
    let destination = match network_address(&from.destination) {
        Some(at) => Destination::Address(wire::NetworkAddress {
            network: at.network.to_string(),
            address: octets(at.address).into(),
            ..Default::default()
        }),
        None => {
            let (namespace, hostname) = from.destination.split_once('/').ok_or(&*from.destination)?;
            let (namespace, hostname) = (namespace.to_owned(), hostname.to_owned());
            Destination::Hostname(wire::NamespacedHostname { namespace, hostname })
        }
    };
    Ok(Some(wire::GatewayAddress { destination: Some(destination), hbone_mtls_port: from.hbone_mtls_port }))
}

/// `network/address`.
fn network_address(text: &str) -> Option<NetworkAddress> {
    let (network, address) = text.rsplit_once('/')?;
    Some(NetworkAddress { network: network.into(), address: address.parse().ok()? })
}

fn octets(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use prost::Message;

    use super::*;
    use crate::proxy::dump::MeshDump;
    use crate::telemetry::Telemetry;
    use crate::telemetry::config_dump::{Pod, Sources};
    use crate::telemetry::metrics::Metrics;

    fn address(text: &str) -> wire::NetworkAddress {
        let ip = text.parse().unwrap();
        wire::NetworkAddress { network: "net".into(), address: octets(ip).into(), ..Default::default() }
    }

    fn by_host(hostname: &str) -> wire::GatewayAddress {
        let host = wire::NamespacedHostname { namespace: "shop".into(), hostname: hostname.into() };
        let destination = Some(wire::gateway_address::Destination::Hostname(host));
        wire::GatewayAddress { destination, hbone_mtls_port: 15008 }
    }

    /// One with every field of a workload, one with as little as there can be.
    fn workloads() -> Vec<wire::Workload> {
        let ports =
            wire::PortList { ports: vec![wire::Port { service_port: 80, target_port: 8080, ..Default::default() }] };
        let at = Some(wire::gateway_address::Destination::Address(address("10.9.9.9")));
        vec![
            wire::Workload {
                uid: "c1//Pod/shop/full".into(),
                name: "full".into(),
                namespace: "shop".into(),
                addresses: vec![octets("10.0.0.1".parse().unwrap()).into(), octets("fd00::1".parse().unwrap()).into()],
                network: "net".into(),
                tunnel_protocol: wire::TunnelProtocol::Hbone.into(),
                trust_domain: "td.example".into(),
                service_account: "sa".into(),
                waypoint: Some(by_host("waypoint.shop.svc")),
                node: "n1".into(),
                canonical_name: "full".into(),
                canonical_revision: "v1".into(),
                workload_type: wire::WorkloadType::Pod.into(),
                workload_name: "full".into(),
                authorization_policies: vec!["shop/p".into(), "shop/never".into()],
                status: wire::WorkloadStatus::Unhealthy.into(),
                cluster_id: "c1".into(),
                network_gateway: Some(wire::GatewayAddress { destination: at, hbone_mtls_port: 15009 }),
                hostname: "full.example".into(),
                services: HashMap::from([
                    ("shop/web.shop.svc".to_owned(), ports.clone()),
                    ("shop/unknown.svc".to_owned(), ports),
                ])
                .into_iter()
                .collect(),
                application_tunnel: Some(wire::ApplicationTunnel {
                    protocol: wire::application_tunnel::Protocol::Proxy.into(),
                    port: 9000,
                }),
                locality: Some(wire::Locality { region: "r".into(), zone: "z".into(), subzone: "s".into() }),
                network_mode: wire::NetworkMode::Standard.into(),
                capacity: Some(3),
                ..Default::default()
            },
            wire::Workload {
                uid: "c1//Pod/yard/bare".into(),
                name: "bare".into(),
                namespace: "yard".into(),
                native_tunnel: true,
                network_mode: wire::NetworkMode::HostNetwork.into(),
                ..Default::default()
            },
        ]
    }

    fn services() -> Vec<wire::Service> {
        use wire::load_balancing::{HealthPolicy, Mode, Scope};
        let range = wire::NetworkAddress { length: Some(24), ..address("10.7.7.0") };
        vec![
            wire::Service {
                name: "web".into(),
                namespace: "shop".into(),
                hostname: "web.shop.svc".into(),
                addresses: vec![address("10.1.0.1"), address("fd01::1"), range],
                ports: vec![
                    wire::Port { service_port: 80, target_port: 8080, ..Default::default() },
                    wire::Port { service_port: 443, ..Default::default() },
                ],
                subject_alt_names: vec!["spiffe://td.example/ns/shop/sa/other".into()],
                waypoint: Some(by_host("waypoint.shop.svc")),
                load_balancing: Some(wire::LoadBalancing {
                    routing_preference: vec![Scope::Network.into(), Scope::Region.into(), Scope::Node.into()],
                    mode: Mode::Failover.into(),
                    health_policy: HealthPolicy::AllowAll.into(),
                }),
                ip_families: wire::IpFamilies::Dual.into(),
                canonical: true,
                weighted_waypoints: vec![wire::WeightedWaypoint {
                    destination: Some(by_host("other.shop.svc")),
                    weight: 7,
                }],
                visibility: wire::Visibility::Namespace.into(),
                ..Default::default()
            },
            wire::Service {
                name: "bare".into(),
                namespace: "yard".into(),
                hostname: "bare".into(),
                ..Default::default()
            },
        ]
    }

    /// Every kind of condition; one policy of which a part is not understood, and one that is not at all.
    fn policies() -> Vec<policy::Policy> {
        use policy_wire::string_match::MatchType;
        let text = |kind| policy_wire::StringMatch { match_type: Some(kind) };
        let texts = vec![
            text(MatchType::Exact("a".into())),
            text(MatchType::Prefix("b".into())),
            text(MatchType::Suffix("c".into())),
            text(MatchType::Presence(())),
        ];
        let range = |ip: &str, length| policy_wire::Address { address: octets(ip.parse().unwrap()).into(), length };
        let ranges = vec![range("10.0.0.0", 8), range("fd00::", 16)];
        let account = policy_wire::ServiceAccountMatch { namespace: "shop".into(), service_account: "web".into() };
        let every = policy_wire::Match {
            namespaces: texts.clone(),
            not_namespaces: texts[..1].to_vec(),
            principals: texts.clone(),
            not_principals: texts[1..].to_vec(),
            source_ips: ranges.clone(),
            not_source_ips: ranges[..1].to_vec(),
            destination_ips: ranges[1..].to_vec(),
            not_destination_ips: ranges,
            destination_ports: vec![80, 443],
            not_destination_ports: vec![22],
            service_accounts: vec![account.clone()],
            not_service_accounts: vec![account],
            extensions: Vec::new(),
        };
        let strange = policy_wire::Match {
            extensions: vec![policy_wire::Extension { name: "new".into(), config: None }],
            ..Default::default()
        };
        let clause = |matches| policy_wire::Clause { matches };
        let wire = |name: &str, scope: policy_wire::Scope, action: i32, matches| policy_wire::Authorization {
            name: name.into(),
            namespace: "shop".into(),
            scope: scope.into(),
            action,
            rules: vec![
                policy_wire::Rule { clauses: vec![clause(matches), clause(vec![Default::default()])] },
                policy_wire::Rule::default(),
            ],
            dry_run: name == "dry",
            extensions: Vec::new(),
        };
        let (selected, space, global) =
            (policy_wire::Scope::WorkloadSelector, policy_wire::Scope::Namespace, policy_wire::Scope::Global);
        let all = [
            wire("p", selected, policy_wire::Action::Deny.into(), vec![every.clone(), Default::default()]),
            wire("dry", space, policy_wire::Action::Allow.into(), vec![every.clone()]),
            wire("audit", global, policy_wire::Action::Audit.into(), vec![]),
            wire("part", space, policy_wire::Action::Allow.into(), vec![strange, every]),
            wire("new", space, 7, vec![]),
        ];
        all.into_iter().map(|p| policy::convert(&p.into()).unwrap()).collect()
    }

    fn dump(mesh: &Arc<Mesh>) -> String {
        let mesh = mesh.clone();
        let sources = Sources {
            model: Box::new(move || Box::new(MeshDump(mesh.load_full()))),
            certificates: Box::new(Vec::new),
            pods: Box::new(|| {
                vec![Pod {
                    uid: "u".into(),
                    name: "full".into(),
                    namespace: "shop".into(),
                    service_account: "sa".into(),
                    up: true,
                }]
            }),
            telemetry: Telemetry::new(&Metrics::new(), 10, std::time::Duration::from_secs(60)),
            config: serde_json::json!({}),
        };
        let mut text = Vec::new();
        sources.write(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn a_dump_that_is_read_again_is_the_same_mesh() {
        let mesh = Mesh::new("n1", "c1");
        mesh.update(|update| {
            for workload in workloads() {
                // As it comes over the wire.
                let workload = wire::Workload::decode(&*workload.encode_to_vec()).unwrap();
                let workload = convert_workload(&workload, update.strings()).unwrap();
                update.workload(workload);
            }
            for service in services() {
                let service = convert_service(&service, update.strings()).unwrap();
                update.service(service);
            }
            for policy in policies() {
                update.policy(policy);
            }
            let addresses = vec![NetworkAddress { network: "net".into(), address: "10.3.3.3".parse().unwrap() }];
            update.unusable(Unusable { name: "shop/odd".into(), addresses, reason: "new".into() });
            update.policies_complete();
        });
        let saved = Saved::read(&dump(&mesh)).unwrap();
        let (before, after) = (mesh.load_full(), saved.mesh.load_full());
        for workload in before.workloads() {
            let again = after.workloads().find(|w| w.uid == workload.uid).expect("the workload");
            // Beside what only the access log shows.
            let shown = Workload {
                canonical_name: again.canonical_name.clone(),
                canonical_revision: again.canonical_revision.clone(),
                workload_type: again.workload_type,
                services: again.services.clone(),
                ..(**workload).clone()
            };
            assert_eq!(shown, **again);
            let mut services = [workload.services.clone(), again.services.clone()];
            services.iter_mut().for_each(|list| list.sort_by(|a, b| a.service.cmp(&b.service)));
            assert_eq!(services[0], services[1]);
        }
        for service in before.services() {
            let again = after.services().find(|s| s.key == service.key).expect("the service");
            assert_eq!(**service, **again);
        }
        let of = |snapshot: &crate::mesh::Snapshot| {
            let mut policies: Vec<policy::Policy> = snapshot.policies().iter().map(|p| (**p).clone()).collect();
            policies.sort_by(|a, b| a.key().cmp(b.key()));
            policies
        };
        assert_eq!(of(&before), of(&after));
        assert!(after.policies().is_complete());
        let odd = NetworkAddress { network: "net".into(), address: "10.3.3.3".parse().unwrap() };
        assert_eq!(after.unusable_at(&odd), before.unusable_at(&odd));
        assert!(after.unusable_at(&odd).is_some());
        let full = after.workloads().find(|w| &*w.name == "full").unwrap();
        assert_eq!(saved.phase(full), Some(Phase::Serving));
    }

    #[test]
    fn what_is_no_dump_or_holds_what_is_not_known_is_refused_with_the_place() {
        let reason = |text: &str| Saved::read(text).err().expect("an error").to_string();
        assert!(reason("{").contains("no config_dump"));
        assert!(reason("{\"workloads\": []}").contains("missing field `node`"));
        let mesh = Mesh::new("n1", "c1");
        let policy = policies().remove(0);
        mesh.update(|update| update.policy(policy));
        let whole = dump(&mesh);
        assert!(Saved::read(&whole).is_ok());
        let changed = whole.replace("\"Deny\"", "\"Forbid\"");
        assert_eq!(reason(&changed), "policy shop/p: unknown action \"Forbid\"");
    }
}

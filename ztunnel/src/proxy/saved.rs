//! The mesh as a saved `/config_dump` tells it, through the same checks as what comes over the wire, so that questions
//! are answered as the proxy would have answered them.
//!
//! Must never take what it does not understand for something harmless: such a dump is refused.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

use self::form::{
    AccountText, BalancerText, Dump, GatewayText, MatchText, PodInfo, PolicyText, ServiceText, Text, WorkloadText,
};
use super::explain::{BadQuestion, CertificateState, Explanation, NodeFacts, Question, explain};
use super::neighbour;
use super::route::Hop;
use super::state::Phase;
use crate::identity::{Identity, Trust, TrustDomain, TrustSettings};
use crate::mesh::{Mesh, NetworkAddress, Unusable, Workload, convert_service, convert_workload};
use crate::policy::{self, PolicyAction};
use crate::proto::security as policy_wire;
use crate::proto::workload as wire;

/// A dump that was read.
pub struct Saved {
    mesh: Arc<Mesh>,
    pods: Vec<(PodInfo, Phase)>,
    certificates: HashMap<String, String>,
    same_node_encryption: bool,
    trust: Trust,
}

/// Why a dump cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SavedError {
    #[error("it is no config_dump of this proxy: {0}")]
    Json(#[from] serde_json::Error),
    #[error("{kind} {name}: {reason}")]
    Resource { kind: &'static str, name: String, reason: String },
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
        Ok(Self {
            mesh,
            pods: pods.collect(),
            certificates: certificates.collect(),
            same_node_encryption: dump.config.same_node_encryption,
            trust: Trust::new(TrustSettings {
                domain: TrustDomain::new(&dump.config.mesh.trust_domain),
                aliases: dump.config.trust.trust_domain_aliases.iter().map(|alias| TrustDomain::new(alias)).collect(),
                ..TrustSettings::default()
            }),
        })
    }

    /// Answers a question.
    pub fn explain(&self, question: &Question) -> Result<Explanation, BadQuestion> {
        explain(&self.mesh.load(), self, question)
    }

    fn pod_of(&self, workload: &Workload) -> Option<&(PodInfo, Phase)> {
        self.pods.iter().find(|(pod, _)| {
            pod.name == *workload.name()
                && pod.namespace == *workload.common.namespace
                && pod.service_account == *workload.common.service_account
        })
    }
}

impl NodeFacts for Saved {
    fn phase(&self, workload: &Workload) -> Option<Phase> {
        self.pod_of(workload).map(|(_, phase)| *phase)
    }

    fn takes(&self, own: &TrustDomain, theirs: &TrustDomain) -> bool {
        self.trust.accepts(own, theirs)
    }

    fn attests(&self, source: &Workload, hop: &Hop) -> bool {
        let pod =
            neighbour::may_attest(source, hop, self.same_node_encryption).and_then(|workload| self.pod_of(workload));
        pod.is_some_and(|(pod, phase)| pod.by_ebpf && *phase == Phase::Serving)
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

mod form;
#[cfg(test)]
mod tests;

//! From a ServiceEntry to services and their workloads, from a WorkloadEntry to a workload.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use ztunnel::manifests::{
    EntryPort, ObjectName, Resolution, ServiceEntry, WorkloadEntry, WorkloadEntrySpec, WorkloadSelector,
};
use ztunnel::proto::workload as wire;
use ztunnel::proto::workload::load_balancing::{HealthPolicy, Mode};

use super::{Context, Problems, pod, service};

/// What a ServiceEntry gives.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub services: Vec<wire::Service>,
    /// Its own endpoints: those that are said in it, or found by its host names.
    pub workloads: Vec<wire::Workload>,
}

type Labels = BTreeMap<String, String>;

pub(super) fn from_service_entry(
    context: &Context<'_>,
    name: &ObjectName,
    entry: &ServiceEntry,
    problems: &mut Problems,
) -> Given {
    unusable(entry, problems);
    let addresses = addresses(context, entry, problems);
    let balancing = load_balancing(context, name, entry, problems);
    let ports = wire_ports(entry, problems);
    let (mut services, mut own) = (Vec::new(), Vec::new());
    for host in hosts(entry) {
        match context.gives(name, &host) {
            Ok(()) => own.push(host.clone()),
            Err(who) => {
                problems.push(format!("host {host} is given by {who}, this one counts for nothing there"));
                continue;
            }
        }
        let allocated = match addresses.is_empty() {
            true => virtual_addresses(context, name, entry, &host, problems),
            false => addresses.clone(),
        };
        services.push(wire::Service {
            name: name.name.to_string(),
            namespace: name.namespace.to_string(),
            hostname: host.to_string(),
            addresses: allocated,
            ports: ports.clone(),
            // Others are for those who look at certificates of servers outside the mesh.
            subject_alt_names: entry
                .spec
                .subject_alt_names
                .iter()
                .filter(|n| n.starts_with("spiffe://"))
                .cloned()
                .collect(),
            load_balancing: balancing.clone(),
            canonical: context.is_canonical(name, &host),
            visibility: if is_private(entry) { wire::Visibility::Namespace } else { wire::Visibility::Public }.into(),
            ..Default::default()
        });
    }
    Given { services, workloads: endpoints(context, name, entry, &own, problems) }
}

/// The workload, or `None` if nobody can be reached by it.
pub(super) fn from_workload_entry(
    context: &Context<'_>,
    name: &ObjectName,
    entry: &WorkloadEntry,
    problems: &mut Problems,
) -> Option<wire::Workload> {
    let labels = labels(entry);
    let uid = context.settings.workload_entry_uid(name);
    let services = pod::services_of(context, &name.namespace, &labels, |port| named(&entry.spec, port));
    let workload = workload(context, name, &entry.metadata, &entry.spec, &labels, problems)?;
    Some(wire::Workload { uid, services, ..workload })
}

/// Those of its host names that can be served.
pub(super) fn hosts(entry: &ServiceEntry) -> impl Iterator<Item = Arc<str>> {
    let to_nobody = entry.spec.export_to.iter().any(|to| to == "~");
    let hosts = entry.spec.hosts.iter().filter(|host| !to_nobody && host_problem(entry, host).is_none());
    let hosts: BTreeSet<Arc<str>> = hosts.map(|host| host.to_ascii_lowercase().into()).collect();
    hosts.into_iter().take(most_hosts(entry))
}

/// Each workload behind an entry carries each of its ports for each of its hosts.
fn most_hosts(entry: &ServiceEntry) -> usize {
    MAX_PORTS_BEHIND / entry.spec.ports.len().max(1)
}

/// Whether only its own namespace may use it.
pub(super) fn is_private(entry: &ServiceEntry) -> bool {
    let own = entry.metadata.namespace.as_deref().unwrap_or_default();
    let to = &entry.spec.export_to;
    !to.is_empty() && to.iter().all(|to| to == "." || to == own)
}

/// Whether it is for workloads with these labels.
pub(super) fn selects(entry: &ServiceEntry, labels: &Labels) -> bool {
    // Without labels it selects nobody, as a Service does.
    let selector = entry.spec.workload_selector.as_ref().filter(|selector| !selector.labels.is_empty());
    selector.is_some_and(|WorkloadSelector { labels: wanted }| wanted.iter().all(|(k, v)| labels.get(k) == Some(v)))
}

/// The labels of the object and those that it says the workload has.
pub(super) fn labels(entry: &WorkloadEntry) -> Cow<'_, Labels> {
    match &entry.metadata.labels {
        None => Cow::Borrowed(&entry.spec.labels),
        Some(labels) if entry.spec.labels.is_empty() => Cow::Borrowed(labels),
        Some(labels) => {
            let mut all = labels.clone();
            all.extend(entry.spec.labels.clone());
            Cow::Owned(all)
        }
    }
}

/// Addresses of a host that somebody has set aside and written into the object.
pub(super) fn allocated<'a>(entry: &'a ServiceEntry, host: &'a str) -> impl Iterator<Item = IpAddr> + 'a {
    let of_host = entry.status.addresses.iter().filter(move |a| a.host.is_empty() || a.host.eq_ignore_ascii_case(host));
    of_host.filter_map(|address| address.value.parse().ok())
}

/// Whether it names one of these addresses as its own.
pub(super) fn claims_one_of(entry: &ServiceEntry, addresses: &BTreeSet<IpAddr>) -> bool {
    let alone = |text: &String| match text.parse::<IpNet>() {
        Ok(range) => (range.prefix_len() == range.max_prefix_len()).then_some(range.addr()),
        Err(_) => text.parse().ok(),
    };
    let written = entry.status.addresses.iter().map(|address| &address.value);
    entry.spec.addresses.iter().chain(written).filter_map(alone).any(|address| addresses.contains(&address))
}

/// The ports of a workload behind it. `named` finds the workload's own port by the name of the service's.
pub(super) fn ports(entry: &ServiceEntry, named: impl Fn(&str) -> Option<u16>) -> wire::PortList {
    let port = |port: &EntryPort| {
        let target = named(&port.name).or_else(|| number(port.target_port)).or_else(|| number(port.number))?;
        Some(wire::Port { service_port: number(port.number)?.into(), target_port: target.into(), ..Default::default() })
    };
    let mut ports: Vec<_> = tcp_ports(entry).filter_map(port).collect();
    ports.sort_by_key(|port| port.service_port);
    wire::PortList { ports }
}

/// What of it is left out, in words.
fn unusable(entry: &ServiceEntry, problems: &mut Problems) {
    problems.extend(entry.spec.hosts.iter().filter_map(|host| host_problem(entry, host)));
    let (hosts, ports, most) = (entry.spec.hosts.len(), entry.spec.ports.len(), most_hosts(entry));
    if hosts > most {
        problems.push(format!("{hosts} hosts with {ports} ports each are too many, those beyond {most} are left out"));
    }
    let own = entry.metadata.namespace.as_deref().unwrap_or_default();
    let known = |to: &String| ["*", ".", "~", own].contains(&to.as_str());
    if !entry.spec.export_to.iter().all(known) {
        problems.push("exportTo: single namespaces cannot be told apart, all of them see it".into());
    }
    if entry.spec.workload_selector.is_some() && !entry.spec.endpoints.is_empty() {
        problems.push("endpoints are ignored where there is a workloadSelector".into());
    }
}

fn host_problem(entry: &ServiceEntry, host: &str) -> Option<String> {
    let below = host.strip_prefix("*.");
    if !is_host(below.unwrap_or(host)) {
        let shown: String = host.chars().take(64).collect();
        return Some(format!("host {shown:?} is not a host name, it is left out"));
    }
    let alone = below.is_some() && entry.spec.resolution != Resolution::DynamicDns;
    alone.then(|| format!("host {host}: a wildcard needs resolution DYNAMIC_DNS, it is left out"))
}

fn addresses(context: &Context<'_>, entry: &ServiceEntry, problems: &mut Problems) -> Vec<wire::NetworkAddress> {
    let mut addresses = Vec::new();
    for text in &entry.spec.addresses {
        // A range of one address is that address.
        let range = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        let Ok(range) = range else {
            problems.push(format!("address {text:?} is neither an address nor a range, it is left out"));
            continue;
        };
        let range = range.trunc();
        let whole = range.prefix_len() == range.max_prefix_len();
        if let Some(service) = context.links.service_at(range.addr()).filter(|_| whole) {
            problems.push(format!("address {text:?} is that of Service {service}, it is left out"));
            continue;
        }
        addresses.push(network_address(context, range.addr(), (!whole).then(|| range.prefix_len().into())));
    }
    addresses
}

/// Those that somebody has set aside, else ours.
fn virtual_addresses(
    context: &Context<'_>,
    name: &ObjectName,
    entry: &ServiceEntry,
    host: &str,
    problems: &mut Problems,
) -> Vec<wire::NetworkAddress> {
    if entry.spec.resolution == Resolution::None || !entry.spec.addresses.is_empty() {
        return Vec::new();
    }
    let set_aside = allocated(entry, host).filter(|address| context.links.service_at(*address).is_none());
    let set_aside: Vec<_> = set_aside.map(|address| network_address(context, address, None)).collect();
    if !set_aside.is_empty() {
        return set_aside;
    }
    let ours = context.hosts.addresses(&format!("{}/{host}", name.namespace));
    if ours.is_none() && context.hosts.is_full() {
        problems.push(format!("host {host}: all virtual addresses are taken"));
    }
    ours.into_iter().flatten().map(|address| network_address(context, address, None)).collect()
}

fn network_address(context: &Context<'_>, address: IpAddr, length: Option<u32>) -> wire::NetworkAddress {
    wire::NetworkAddress { network: context.network.to_string(), address: super::address_bytes(address), length }
}

fn load_balancing(
    context: &Context<'_>,
    name: &ObjectName,
    entry: &ServiceEntry,
    problems: &mut Problems,
) -> Option<wire::LoadBalancing> {
    if entry.spec.resolution == Resolution::None {
        return Some(wire::LoadBalancing {
            routing_preference: Vec::new(),
            mode: Mode::Passthrough.into(),
            health_policy: HealthPolicy::AllowAll.into(),
        });
    }
    let (mode, preference) = service::distribution(context, &name.namespace, None, &entry.metadata, problems);
    service::balancing(mode, preference, HealthPolicy::OnlyHealthy)
}

fn wire_ports(entry: &ServiceEntry, problems: &mut Problems) -> Vec<wire::Port> {
    let mut ports = Vec::new();
    for port in tcp_ports(entry) {
        let target = if port.target_port == 0 { port.number } else { port.target_port };
        match (number(port.number), number(target)) {
            (Some(service_port), Some(target_port)) => ports.push(wire::Port {
                service_port: service_port.into(),
                target_port: target_port.into(),
                app_protocol: service::protocol(&port.protocol).into(),
            }),
            _ => problems.push(format!("port {} → {target} is out of range, it is left out", port.number)),
        }
    }
    ports
}

fn tcp_ports(entry: &ServiceEntry) -> impl Iterator<Item = &EntryPort> {
    entry.spec.ports.iter().filter(|port| !port.protocol.eq_ignore_ascii_case("UDP"))
}

/// The workloads that it gives itself, behind those hosts that are its own.
fn endpoints(
    context: &Context<'_>,
    name: &ObjectName,
    entry: &ServiceEntry,
    hosts: &[Arc<str>],
    problems: &mut Problems,
) -> Vec<wire::Workload> {
    let spec = &entry.spec;
    let by_name = matches!(spec.resolution, Resolution::Dns | Resolution::DnsRoundRobin);
    if spec.workload_selector.is_some() || hosts.is_empty() || spec.resolution == Resolution::None {
        return Vec::new();
    }
    let uid =
        |address: &str| format!("{}/networking.istio.io/ServiceEntry/{name}/{address}", context.settings.cluster_id);
    let behind = |hosts: &[Arc<str>], endpoint: &WorkloadEntrySpec| {
        let key = |host: &Arc<str>| format!("{}/{host}", name.namespace);
        hosts.iter().map(|host| (key(host), ports(entry, |port| named(endpoint, port)))).collect()
    };
    // What is said of the entry is not said of its endpoints.
    let nothing = ObjectMeta::default();
    let mut workloads = BTreeMap::new();
    if spec.endpoints.is_empty() && by_name {
        for host in hosts {
            let endpoint = WorkloadEntrySpec { address: host.to_string(), ..Default::default() };
            let found = workload(context, name, &nothing, &endpoint, &endpoint.labels, problems);
            let services = behind(std::slice::from_ref(host), &endpoint);
            workloads.extend(found.map(|w| (uid(host), wire::Workload { uid: uid(host), services, ..w })));
        }
    }
    let most = MAX_PORTS_OF_ENDPOINTS / (hosts.len() * spec.ports.len()).max(1);
    if spec.endpoints.len() > most {
        let all = spec.endpoints.len();
        problems
            .push(format!("{all} endpoints are too many for its hosts and ports, those beyond {most} are left out"));
    }
    for endpoint in spec.endpoints.iter().take(most) {
        if !by_name && endpoint.address.parse::<IpAddr>().is_err() {
            problems.push(format!("endpoint {:?}: an address is expected with this resolution", endpoint.address));
            continue;
        }
        let Some(found) = workload(context, name, &nothing, endpoint, &endpoint.labels, problems) else { continue };
        let uid = uid(&endpoint.address);
        let services = behind(hosts, endpoint);
        workloads.entry(uid.clone()).or_insert(wire::Workload { uid, services, ..found });
    }
    workloads.into_values().collect()
}

/// What is said of a workload; its uid and services are the caller's.
fn workload(
    context: &Context<'_>,
    name: &ObjectName,
    meta: &ObjectMeta,
    spec: &WorkloadEntrySpec,
    labels: &Labels,
    problems: &mut Problems,
) -> Option<wire::Workload> {
    let (mut addresses, mut hostname) = (Vec::new(), String::new());
    match spec.address.parse::<IpAddr>() {
        Ok(address) => addresses.push(super::address_bytes(address)),
        Err(_) if is_host(&spec.address) => hostname = spec.address.to_ascii_lowercase(),
        Err(_) => {
            let shown: String = spec.address.chars().take(64).collect();
            problems.push(format!("{shown:?} is neither an address nor a host name, it is left out"));
            return None;
        }
    }
    let label = |key: &str| labels.get(key).filter(|value| !value.is_empty()).cloned();
    let network = Some(spec.network.clone()).filter(|n| !n.is_empty()).or_else(|| label("topology.istio.io/network"));
    let native = labels.get("networking.istio.io/tunnel").is_some_and(|value| value == "http");
    let captured = meta.annotations.as_ref().and_then(|a| a.get("ambient.istio.io/redirection"));
    let hbone = native || captured.is_some_and(|value| value == "enabled");
    let (canonical_name, canonical_revision) = pod::canonical(labels, &name.name);
    let mut place = spec.locality.splitn(3, '/').map(str::to_owned);
    let mut part = || place.next().unwrap_or_default();
    let locality = wire::Locality { region: part(), zone: part(), subzone: part() };
    Some(wire::Workload {
        name: name.name.to_string(),
        namespace: name.namespace.to_string(),
        addresses,
        hostname,
        network: network.unwrap_or_else(|| context.network.to_string()),
        tunnel_protocol: if hbone { wire::TunnelProtocol::Hbone } else { wire::TunnelProtocol::None }.into(),
        native_tunnel: native,
        trust_domain: context.settings.wire_trust_domain(),
        service_account: spec.service_account.clone(),
        canonical_name,
        canonical_revision,
        workload_type: wire::WorkloadType::Pod.into(),
        workload_name: name.name.to_string(),
        cluster_id: context.settings.cluster_id.clone(),
        authorization_policies: context.policies.of_pod(&name.namespace, labels),
        locality: (locality != wire::Locality::default()).then_some(locality),
        capacity: (spec.weight != 0).then_some(spec.weight),
        ..Default::default()
    })
}

/// A DNS name, which no address is.
fn is_host(text: &str) -> bool {
    let known = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    let is_label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(known);
    let is_number = |label: &str| label.bytes().all(|b| b.is_ascii_digit());
    text.len() <= 253 && text.split('.').all(is_label) && !text.rsplit('.').next().is_some_and(is_number)
}

/// The workload's own port for one of a service.
fn named(spec: &WorkloadEntrySpec, port: &str) -> Option<u16> {
    number(*spec.ports.get(port)?)
}

/// A port number of an object; 0 is none.
fn number(number: u32) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}

/// Ports of all hosts of an entry, at each workload behind it.
const MAX_PORTS_BEHIND: usize = 1 << 10;
/// The same at all endpoints that an entry gives itself.
const MAX_PORTS_OF_ENDPOINTS: usize = 1 << 17;

use std::collections::HashMap;

use prost::Message;

use super::*;
use crate::mesh::Common;
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
        wire::Service { name: "bare".into(), namespace: "yard".into(), hostname: "bare".into(), ..Default::default() },
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
                by_ebpf: true,
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
        let common = Common {
            canonical_name: again.common.canonical_name.clone(),
            canonical_revision: again.common.canonical_revision.clone(),
            workload_type: again.common.workload_type,
            ..(*workload.common).clone()
        };
        assert_eq!(Workload { common: common.into(), ..(**workload).clone() }, **again);
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
    let full = after.workloads().find(|w| w.name() == "full").unwrap();
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

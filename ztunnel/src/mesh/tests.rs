use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::proto::{security, workload as wire};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn bytes(ip: IpAddr) -> prost::bytes::Bytes {
    match ip {
        IpAddr::V4(v4) => v4.octets().to_vec().into(),
        IpAddr::V6(v6) => v6.octets().to_vec().into(),
    }
}

fn pod(name: &str, address: &str, services: &[(&str, u32)]) -> wire::Workload {
    wire::Workload {
        uid: format!("Kubernetes//Pod/shop/{name}"),
        name: name.into(),
        namespace: "shop".into(),
        addresses: vec![bytes(ip(address))],
        node: "n1".into(),
        services: services
            .iter()
            .map(|(service, target)| {
                let port = wire::Port { service_port: 80, target_port: *target, app_protocol: 0 };
                ((*service).into(), wire::PortList { ports: vec![port] })
            })
            .collect(),
        ..Default::default()
    }
}

fn svc(namespace: &str, vip: &str) -> wire::Service {
    wire::Service {
        name: "cart".into(),
        namespace: namespace.into(),
        hostname: "cart.svc".into(),
        addresses: vec![wire::NetworkAddress { address: bytes(ip(vip)), ..Default::default() }],
        ports: vec![wire::Port { service_port: 80, target_port: 8080, app_protocol: 0 }],
        ..Default::default()
    }
}

fn mesh(workloads: &[wire::Workload], services: &[wire::Service]) -> Arc<Mesh> {
    let mesh = Mesh::new("n1", "Kubernetes");
    mesh.update(|u| {
        for w in workloads {
            let w = convert_workload(w, u.strings()).unwrap();
            u.workload(w);
        }
        for s in services {
            let s = convert_service(s, u.strings()).unwrap();
            u.service(s);
        }
    });
    mesh
}

fn at(address: &str) -> NetworkAddress {
    NetworkAddress { network: "".into(), address: ip(address) }
}

fn choose(mesh: &Mesh, source: &str, tried: &[Arc<str>]) -> Result<Chosen, NoEndpoint> {
    let snapshot = mesh.load();
    let source = snapshot.workload_at(&at(source)).unwrap();
    let service = snapshot.service_at("shop", &at("10.96.0.1")).unwrap();
    snapshot.choose(&Request { service, port: 80, source, dialled: ip("10.96.0.1"), tried }, |_| 0)
}

#[test]
fn endpoints_come_from_workloads_also_when_they_come_before_their_service() {
    let mesh = mesh(&[pod("a", "10.0.0.1", &[("shop/cart.svc", 0)])], &[]);
    assert_eq!(mesh.load().staged().count(), 1);
    mesh.update(|u| {
        let s = convert_service(&svc("shop", "10.96.0.1"), u.strings()).unwrap();
        u.service(s);
    });
    let chosen = choose(&mesh, "10.0.0.1", &[]).unwrap();
    assert_eq!(chosen.address.to_string(), "10.0.0.1:8080");
    assert_eq!(mesh.load().staged().count(), 0);
}

#[test]
fn a_workloads_own_target_port_wins_and_tried_ones_are_left_out() {
    let key = "shop/cart.svc";
    let mesh =
        mesh(&[pod("a", "10.0.0.1", &[(key, 9090)]), pod("b", "10.0.0.2", &[(key, 0)])], &[svc("shop", "10.96.0.1")]);
    let first = choose(&mesh, "10.0.0.1", &[]).unwrap();
    let second = choose(&mesh, "10.0.0.1", std::slice::from_ref(&first.workload.uid)).unwrap();
    let both: BTreeSet<_> = [first.address.to_string(), second.address.to_string()].into();
    assert_eq!(both, BTreeSet::from(["10.0.0.1:9090".to_owned(), "10.0.0.2:8080".to_owned()]));
    let tried = [first.workload.uid.clone(), second.workload.uid.clone()];
    assert!(matches!(choose(&mesh, "10.0.0.1", &tried), Err(NoEndpoint::None { .. })));
}

#[test]
fn unhealthy_and_weightless_endpoints_are_not_chosen() {
    let key = "shop/cart.svc";
    let mut sick = pod("a", "10.0.0.1", &[(key, 0)]);
    sick.status = wire::WorkloadStatus::Unhealthy as i32;
    let mut weightless = pod("b", "10.0.0.2", &[(key, 0)]);
    weightless.capacity = Some(0);
    let mesh = mesh(&[sick, weightless], &[svc("shop", "10.96.0.1")]);
    assert!(matches!(choose(&mesh, "10.0.0.1", &[]), Err(NoEndpoint::None { unhealthy: 1, members: 2, .. })));
}

/// An address means nothing in another network, or somebody else.
#[test]
fn endpoints_in_other_networks_are_not_dialled_by_their_address() {
    let far = wire::Workload { network: "west".into(), ..pod("far", "10.0.0.2", &[("shop/cart.svc", 0)]) };
    let mesh = mesh(&[pod("client", "10.0.0.9", &[]), far], &[svc("shop", "10.96.0.1")]);
    let error = choose(&mesh, "10.0.0.9", &[]).unwrap_err();
    assert!(error.to_string().contains("1 in other networks"), "{error}");
}

#[test]
fn the_less_loaded_of_two_is_chosen_more_often() {
    let key = "shop/cart.svc";
    let pods: Vec<_> = (1..=20).map(|i| pod(&format!("p{i}"), &format!("10.0.0.{i}"), &[(key, 0)])).collect();
    let mesh = mesh(&pods, &[svc("shop", "10.96.0.1")]);
    let snapshot = mesh.load();
    let service = snapshot.service_at("shop", &at("10.96.0.1")).unwrap();
    let source = snapshot.workload_at(&at("10.0.0.1")).unwrap();
    let request = Request { service, port: 80, source, dialled: ip("10.96.0.1"), tried: &[] };
    let busy = |w: &Workload| u64::from(w.addresses[0] == ip("10.0.0.5"));
    let hits = (0..4000).filter(|_| snapshot.choose(&request, busy).unwrap().address.ip() == ip("10.0.0.5")).count();
    assert!(hits < 80, "a fair share would be 200, got {hits}");
}

#[test]
fn a_vip_of_several_namespaces_is_the_clients_own() {
    let mesh = mesh(&[], &[svc("shop", "10.96.0.1"), svc("other", "10.96.0.1")]);
    let of = |ns: &str| mesh.load().service_at(ns, &at("10.96.0.1")).map(|s| s.namespace.to_string());
    assert_eq!(of("shop").as_deref(), Some("shop"));
    assert_eq!(of("other").as_deref(), Some("other"));
    assert!(of("third").is_some());
}

#[test]
fn a_local_pod_is_known_by_all_three_names() {
    let mesh = mesh(&[pod("a", "10.0.0.1", &[])], &[]);
    assert!(mesh.load().local_workload("shop", "a", "default").is_some());
    assert!(mesh.load().local_workload("shop", "a", "other").is_none());
    assert!(mesh.load().local_workload("shop", "b", "default").is_none());
}

/// Else a pod would be judged by another's policies, and named by another's identity.
#[test]
fn a_pod_of_the_same_name_on_a_node_of_the_same_name_in_another_cluster_is_not_ours() {
    let twin = |cluster: &str, trust_domain: &str| wire::Workload {
        uid: format!("{cluster}//Pod/shop/a"),
        cluster_id: cluster.into(),
        trust_domain: trust_domain.into(),
        ..pod("a", "10.0.0.1", &[])
    };
    let (own, other) = (twin("Kubernetes", "own.example"), twin("west", "west.example"));
    for order in [[&own, &other], [&other, &own]] {
        let mesh = mesh(&order.map(Clone::clone), &[]);
        let local = mesh.load().local_workload("shop", "a", "default").cloned().unwrap();
        assert_eq!(local.common.trust_domain.as_str(), "own.example");
        assert_eq!(mesh.load().local_workloads().count(), 1);
        mesh.update(|u| u.remove_address("west//Pod/shop/a"));
        assert!(mesh.load().local_workload("shop", "a", "default").is_some());
    }
    assert!(mesh(&[other], &[]).load().local_workload("shop", "a", "default").is_none());
}

#[test]
fn what_pods_that_are_gone_had_in_common_is_forgotten() {
    let mesh = mesh(&[], &[]);
    let mut shared = 0;
    for i in 0..5000 {
        let job = wire::Workload { workload_name: format!("job-{i}"), ..pod("a", "10.0.0.1", &[]) };
        mesh.update(|u| {
            let job = convert_workload(&job, u.strings()).unwrap();
            u.workload(job);
            shared = u.strings().len();
        });
    }
    // Strings, and what has strings.
    assert!(shared <= 2 * 1000, "{shared} values for one pod");
}

#[test]
fn a_name_is_the_last_part_of_the_uid_or_is_kept() {
    let mut strings = Interner::default();
    let mut name = |uid: &str, name: &str| {
        let wire = wire::Workload { uid: uid.into(), name: name.into(), ..Default::default() };
        let workload = convert_workload(&wire, &mut strings).unwrap();
        assert_eq!(workload.name(), name);
        workload.own_name.is_some()
    };
    assert!(!name("Kubernetes//Pod/shop/web-0", "web-0"));
    assert!(!name("web-0", "web-0"));
    assert!(name("Kubernetes/networking.istio.io/ServiceEntry/shop/db/10.0.0.9", "db"));
    assert!(name("Kubernetes//Pod/shop/web-0", ""));
    assert!(name("Kubernetes//Pod/shop/", "shop/"));
}

#[test]
fn a_workload_of_both_families_is_found_by_either_address_until_it_goes() {
    let both =
        wire::Workload { addresses: vec![bytes(ip("10.0.0.1")), bytes(ip("fd00::1"))], ..pod("a", "10.0.0.1", &[]) };
    let mesh = mesh(&[both, pod("b", "10.0.0.2", &[])], &[svc("shop", "fd00::96")]);
    let found = |address: &str| mesh.load().workload_at(&at(address)).map(|w| w.name().to_owned());
    assert_eq!((found("10.0.0.1"), found("fd00::1")), (Some("a".into()), Some("a".into())));
    assert!(mesh.load().service_at("shop", &at("fd00::96")).is_some());
    mesh.update(|u| u.remove_address("Kubernetes//Pod/shop/a"));
    assert_eq!((found("10.0.0.1"), found("fd00::1"), found("10.0.0.2")), (None, None, Some("b".into())));
}

/// An address means something in its own network only, for services as for workloads.
#[test]
fn one_address_in_two_networks_is_two_services_and_two_workloads() {
    let in_network = |network: &str, namespace: &str| {
        let mut service = svc(namespace, "10.96.0.1");
        service.addresses[0].network = network.into();
        service
    };
    let of = |network: &str| wire::Workload {
        uid: format!("{network}//Pod/shop/a"),
        network: network.into(),
        ..pod("a", "10.0.0.1", &[])
    };
    let mesh = mesh(&[of("east"), of("west")], &[in_network("east", "a"), in_network("west", "b")]);
    let at = |network: &str, address: &str| NetworkAddress { network: network.into(), address: ip(address) };
    let found = |network: &str| {
        let mesh = mesh.load();
        let service = mesh.service_at("shop", &at(network, "10.96.0.1")).map(|s| s.namespace.to_string());
        let workload = mesh.workload_at(&at(network, "10.0.0.1")).map(|w| w.uid.to_string());
        (service.unwrap_or_default(), workload.unwrap_or_default())
    };
    assert_eq!(found("east"), ("a".into(), "east//Pod/shop/a".into()));
    assert_eq!(found("west"), ("b".into(), "west//Pod/shop/a".into()));
    assert_eq!(found("north"), Default::default());
    mesh.update(|u| u.remove_address("east//Pod/shop/a") && u.remove_address("a/cart.svc"));
    assert_eq!(found("east"), Default::default());
    assert_eq!(found("west"), ("b".into(), "west//Pod/shop/a".into()));
}

#[test]
fn bad_resources_are_refused_with_their_field() {
    let mut strings = Interner::default();
    let mut bad = pod("a", "10.0.0.1", &[]);
    bad.addresses = vec![vec![1, 2, 3].into()];
    assert!(convert_workload(&bad, &mut strings).unwrap_err().to_string().starts_with("addresses"));
    let mut legacy = pod("a", "10.0.0.1", &[]);
    legacy.tunnel_protocol = wire::TunnelProtocol::LegacyIstioMtls as i32;
    assert!(convert_workload(&legacy, &mut strings).is_err());
    let mut unknown = pod("a", "10.0.0.1", &[]);
    unknown.status = 9;
    assert!(convert_workload(&unknown, &mut strings).is_err());
}

#[derive(Debug, Clone)]
enum Change {
    Workload(u8, u8, Option<u8>),
    Service(u8),
    Remove(u8),
    RemoveService(u8),
    /// Name, scope and namespace, action.
    Policy(u8, i32, i32),
    RemovePolicy(u8),
    Complete,
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (0u8..6, 0u8..6, proptest::option::of(0u8..3)).prop_map(|(w, a, s)| Change::Workload(w, a, s)),
        (0u8..3).prop_map(Change::Service),
        (0u8..6).prop_map(Change::Remove),
        (0u8..3).prop_map(Change::RemoveService),
        (0u8..5, 0i32..3, 0i32..2).prop_map(|(p, scope, action)| Change::Policy(p, scope, action)),
        (0u8..5).prop_map(Change::RemovePolicy),
        Just(Change::Complete),
    ];
    proptest::collection::vec(change, 0..40)
}

fn apply(mesh: &Mesh, change: &Change) {
    mesh.update(|u| match change {
        Change::Workload(w, a, s) => {
            let key = s.map(|s| format!("ns{s}/cart.svc"));
            let services: Vec<_> = key.iter().map(|k| (k.as_str(), 0)).collect();
            let mut wire = pod(&format!("w{w}"), &format!("10.0.0.{a}"), &services);
            wire.authorization_policies = s.iter().map(|s| format!("shop/p{s}")).collect();
            let workload = convert_workload(&wire, u.strings()).unwrap();
            u.workload(workload);
        }
        Change::Service(s) => {
            let service = convert_service(&svc(&format!("ns{s}"), "10.96.0.1"), u.strings()).unwrap();
            u.service(service);
        }
        Change::Remove(w) => {
            u.remove_address(&format!("Kubernetes//Pod/shop/w{w}"));
        }
        Change::RemoveService(s) => {
            u.remove_address(&format!("ns{s}/cart.svc"));
        }
        Change::Policy(p, scope, action) => {
            let policy = security::Authorization {
                name: format!("p{p}"),
                namespace: if p % 2 == 0 { "shop" } else { "other" }.into(),
                scope: *scope,
                action: *action,
                ..Default::default()
            };
            u.policy(crate::policy::convert(&policy.into()).unwrap());
        }
        Change::RemovePolicy(p) => {
            u.remove_policy(&format!("{}/p{p}", if p % 2 == 0 { "shop" } else { "other" }));
        }
        Change::Complete => u.policies_complete(),
    });
}

/// Everything that can be asked, as text.
fn view(mesh: &Mesh) -> String {
    let s = mesh.load();
    let mut lines = Vec::new();
    for a in 0..6 {
        let found: BTreeSet<_> =
            s.workload_at(&at(&format!("10.0.0.{a}"))).map(|w| w.addresses.to_vec()).into_iter().collect();
        lines.push(format!("{a}: {found:?}"));
    }
    for i in 0..3 {
        let service = s.service(&format!("ns{i}/cart.svc"));
        let members = service.map(|s2| s.members(s2).iter().map(|w| w.uid.to_string()).collect::<Vec<_>>());
        let vip = s.service_at(&format!("ns{i}"), &at("10.96.0.1")).map(|s| s.key.clone());
        lines.push(format!("{i}: {members:?} {vip:?}"));
    }
    let mut names: Vec<_> = s.local_workloads().map(|w| w.name().to_string()).collect();
    names.sort();
    lines.push(format!("{names:?}"));
    for w in 0..6 {
        let local = s.local("shop", &format!("w{w}"), "default");
        lines.push(format!("{w}: {:?}", local.map(|local| &local.policies)));
    }
    lines.join("\n")
}

proptest! {
    #[test]
    fn any_order_of_changes_gives_what_a_rebuild_gives(changes in changes()) {
        let mesh = Mesh::new("n1", "Kubernetes");
        for change in &changes {
            apply(&mesh, change);
        }
        let rebuilt = Mesh::new("n1", "Kubernetes");
        let old = mesh.load();
        rebuilt.update(|u| {
            for w in old.workloads() { u.workload((**w).clone()); }
            for s in old.services() { u.service((**s).clone()); }
            for p in old.policies().iter() { u.policy((**p).clone()); }
            if old.policies().is_complete() { u.policies_complete(); }
        });
        prop_assert_eq!(view(&mesh), view(&rebuilt));
    }
}

/// The identity is kept once it was asked for; it must follow the fields that it is made of.
#[test]
fn a_copy_with_another_service_account_has_another_identity() {
    let one = convert_workload(&pod("one", "10.0.0.1", &[]), &mut Interner::default()).unwrap();
    let before = one.identity();
    let common = Common { service_account: "other".into(), ..(*one.common).clone() };
    let other = Workload { common: common.into(), ..one.clone() };
    assert_eq!(other.identity().service_account(), "other");
    assert_eq!(one.identity(), before);
    assert_ne!(*one.common, *other.common);
}

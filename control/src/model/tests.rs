//! Tables: objects in, what proxies are told out; and that an update gives what a fresh start would give.

use std::sync::Arc;

use apistub::merged;
use proptest::prelude::*;
use serde_json::{Value, json};
use ztunnel::kubernetes::Kind;
use ztunnel::manifests::{ObjectName, Objects, PodRef, PodStatus, Redirection, SecurityKind, SecurityPolicy};
use ztunnel::proto::workload as wire;

use super::*;
use crate::kubernetes;
use crate::policy::State;

#[test]
fn a_pod_becomes_a_workload() {
    let mut cluster = Cluster::new();
    cluster.node("node-a", json!({"topology.kubernetes.io/region": "r1", "topology.kubernetes.io/zone": "z1", "topology.istio.io/subzone": "s1"}));
    cluster.put(json!({
        "kind": "Pod",
        "metadata": {
            "name": "cart-7d4b9-x2x", "namespace": "shop", "uid": "u1",
            "labels": {"app": "cart", "version": "v2", "pod-template-hash": "7d4b9"},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "cart-7d4b9", "uid": "x", "controller": true}],
        },
        "spec": {"nodeName": "node-a", "serviceAccountName": "cart", "containers": []},
        "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.5"}, {"ip": "fd00::5"}], "conditions": [{"type": "Ready", "status": "True"}]},
    }));
    let snapshot = cluster.snapshot();
    let workload = workload(&snapshot, "Kubernetes//Pod/shop/cart-7d4b9-x2x");
    assert_eq!(
        workload,
        wire::Workload {
            uid: "Kubernetes//Pod/shop/cart-7d4b9-x2x".into(),
            name: "cart-7d4b9-x2x".into(),
            namespace: "shop".into(),
            addresses: vec![vec![10, 1, 0, 5].into(), [&[0xfd][..], &[0; 14], &[5]].concat().into()],
            service_account: "cart".into(),
            node: "node-a".into(),
            canonical_name: "cart".into(),
            canonical_revision: "v2".into(),
            workload_type: wire::WorkloadType::Pod as i32,
            workload_name: "cart".into(),
            cluster_id: "Kubernetes".into(),
            locality: Some(wire::Locality { region: "r1".into(), zone: "z1".into(), subzone: "s1".into() }),
            ..Default::default()
        }
    );
    let resource = snapshot.get(Set::Addresses, &workload.uid).unwrap();
    assert_eq!(&*resource.aliases, ["/10.1.0.5".into(), "/fd00::5".into()]);
}

/// What a change of the plain pod does to its workload.
#[test]
fn each_property_of_a_pod_has_its_effect() {
    type Check = fn(Option<wire::Workload>);
    let cases: &[(&str, Value, Check)] = &[
        ("not ready", json!({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}), |w| {
            assert_eq!(w.unwrap().status(), wire::WorkloadStatus::Unhealthy)
        }),
        ("being deleted", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), |w| {
            assert_eq!(w.unwrap().status(), wire::WorkloadStatus::Unhealthy)
        }),
        ("ended well", json!({"status": {"phase": "Succeeded"}}), |w| assert!(w.is_none())),
        ("ended badly", json!({"status": {"phase": "Failed"}}), |w| assert!(w.is_none())),
        ("pending with an address", json!({"status": {"phase": "Pending"}}), |w| assert!(w.is_some())),
        ("no address yet", json!({"status": {"podIP": null}}), |w| assert!(w.is_none())),
        ("host network", json!({"spec": {"hostNetwork": true}}), |w| {
            assert_eq!(w.unwrap().network_mode(), wire::NetworkMode::HostNetwork)
        }),
        ("captured", json!({"metadata": {"annotations": {"ambient.istio.io/redirection": "enabled"}}}), |w| {
            let w = w.unwrap();
            assert_eq!((w.tunnel_protocol(), w.native_tunnel), (wire::TunnelProtocol::Hbone, false))
        }),
        (
            "said to be captured on the host network",
            json!({"metadata": {"annotations": {"ambient.istio.io/redirection": "enabled"}}, "spec": {"hostNetwork": true}}),
            |w| assert_eq!(w.unwrap().tunnel_protocol(), wire::TunnelProtocol::None),
        ),
        ("capture pending", json!({"metadata": {"annotations": {"ambient.istio.io/redirection": "pending"}}}), |w| {
            assert_eq!(w.unwrap().tunnel_protocol(), wire::TunnelProtocol::None)
        }),
        ("terminates HBONE itself", json!({"metadata": {"labels": {"networking.istio.io/tunnel": "http"}}}), |w| {
            let w = w.unwrap();
            assert_eq!((w.tunnel_protocol(), w.native_tunnel), (wire::TunnelProtocol::Hbone, true))
        }),
        ("no service account", json!({"spec": {"serviceAccountName": null}}), |w| {
            assert_eq!(w.unwrap().service_account, "default")
        }),
        (
            "all canonical labels",
            json!({"metadata": {"labels": {
                "service.istio.io/canonical-name": "a", "app.kubernetes.io/name": "b", "app": "c",
                "service.istio.io/canonical-revision": "1", "app.kubernetes.io/version": "2", "version": "3",
            }}}),
            |w| {
                let w = w.unwrap();
                assert_eq!((&*w.canonical_name, &*w.canonical_revision), ("a", "1"))
            },
        ),
        (
            "standard labels",
            json!({"metadata": {"labels": {"app.kubernetes.io/name": "b", "app": "c", "app.kubernetes.io/version": "2"}}}),
            |w| {
                let w = w.unwrap();
                assert_eq!((&*w.canonical_name, &*w.canonical_revision), ("b", "2"))
            },
        ),
        ("no labels", json!({}), |w| {
            let w = w.unwrap();
            assert_eq!((&*w.canonical_name, &*w.canonical_revision, &*w.workload_name), ("p", "latest", "p"))
        }),
        (
            "owned by a CronJob's Job",
            json!({"metadata": {"ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "tidy-29000000", "uid": "x", "controller": true}]}}),
            |w| assert_eq!(w.unwrap().workload_name, "tidy"),
        ),
        (
            "owned by a StatefulSet",
            json!({"metadata": {"ownerReferences": [{"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "x", "controller": true}]}}),
            |w| assert_eq!(w.unwrap().workload_name, "db"),
        ),
        (
            "a static pod",
            json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "x", "controller": true}]}}),
            |w| assert_eq!(w.unwrap().workload_name, "p"),
        ),
        ("a broken address", json!({"status": {"podIP": "10.0.0.300"}}), |w| assert!(w.is_none())),
    ];
    for (what, change, check) in cases {
        println!("{what}");
        let mut cluster = Cluster::new();
        cluster.put(merged(pod("p", json!({})), change));
        let snapshot = cluster.snapshot();
        check(find(&snapshot, "Kubernetes//Pod/shop/p"));
        assert_eq!(snapshot.problems.len(), usize::from(*what == "a broken address"));
    }
}

#[test]
fn a_status_file_stands_in_place_of_the_annotation() {
    let mut cluster = Cluster::new();
    cluster.put(pod("p", json!({})));
    let mut status = PodStatus {
        pod: PodRef { namespace: "shop".into(), name: "p".into(), uid: "uid-p".into() },
        node: "node-a".into(),
        redirection: Redirection::Enabled,
        reason: String::new(),
    };
    let protocol = |cluster: &mut Cluster| workload(&cluster.snapshot(), "Kubernetes//Pod/shop/p").tunnel_protocol();
    assert_eq!(protocol(&mut cluster), wire::TunnelProtocol::None);
    cluster.objects.statuses.insert("uid-p".into(), Arc::new(status.clone()));
    assert_eq!(protocol(&mut cluster), wire::TunnelProtocol::Hbone);
    // A pod of that name that is another pod.
    cluster.put(merged(pod("p", json!({})), &json!({"metadata": {"uid": "other"}})));
    assert_eq!(protocol(&mut cluster), wire::TunnelProtocol::None);
    cluster.put(pod("p", json!({})));
    status.redirection = Redirection::Pending;
    cluster.objects.statuses.insert("uid-p".into(), Arc::new(status));
    assert_eq!(protocol(&mut cluster), wire::TunnelProtocol::None);
}

#[test]
fn a_service_becomes_a_service() {
    let mut cluster = Cluster::new();
    cluster.put(json!({
        "kind": "Service",
        "metadata": {"name": "cart", "namespace": "shop"},
        "spec": {
            "clusterIPs": ["10.96.0.7", "fd10::7"], "ipFamilies": ["IPv4", "IPv6"], "selector": {"app": "cart"},
            "ports": [
                {"name": "http", "port": 80, "targetPort": 8080},
                {"name": "grpc-x", "port": 81, "targetPort": "grpc"},
                {"port": 82},
                {"name": "dns", "protocol": "UDP", "port": 53},
            ],
        },
    }));
    let snapshot = cluster.snapshot();
    let port = |service_port, target_port, protocol: wire::AppProtocol| wire::Port {
        service_port,
        target_port,
        app_protocol: protocol as i32,
    };
    let address = |address: Vec<u8>| wire::NetworkAddress { address: address.into(), ..Default::default() };
    assert_eq!(
        service(&snapshot, "shop/cart.shop.svc.cluster.local"),
        wire::Service {
            name: "cart".into(),
            namespace: "shop".into(),
            hostname: "cart.shop.svc.cluster.local".into(),
            addresses: vec![address(vec![10, 96, 0, 7]), address([&[0xfd, 0x10][..], &[0; 13], &[7]].concat())],
            ports: vec![
                port(80, 8080, wire::AppProtocol::Http11),
                port(81, 0, wire::AppProtocol::Grpc),
                port(82, 82, wire::AppProtocol::Unknown)
            ],
            ip_families: wire::IpFamilies::Dual as i32,
            canonical: true,
            ..Default::default()
        }
    );
    for name in ["/10.96.0.7", "/fd10::7", "shop/cart.shop.svc.cluster.local"] {
        assert_eq!(snapshot.resolve(Set::Addresses, name).services, ["shop/cart.shop.svc.cluster.local".into()]);
    }
}

#[test]
fn each_property_of_a_service_has_its_effect() {
    use wire::load_balancing::{HealthPolicy, Mode, Scope};
    let balance = |mode: Mode, scopes: &[Scope], health: HealthPolicy| {
        Some(wire::LoadBalancing {
            routing_preference: scopes.iter().map(|s| *s as i32).collect(),
            mode: mode as i32,
            health_policy: health as i32,
        })
    };
    let zone = balance(Mode::Failover, &[Scope::Network, Scope::Region, Scope::Zone], HealthPolicy::OnlyHealthy);
    let all_five = [Scope::Network, Scope::Region, Scope::Zone, Scope::Subzone, Scope::Node];
    let node = balance(Mode::Failover, &all_five, HealthPolicy::OnlyHealthy);
    let annotated = |value: &str| json!({"networking.istio.io/traffic-distribution": value});
    // Namespace's annotations, change of the service, expected load balancing.
    let cases = [
        (json!({}), json!({}), None),
        (json!({}), json!({"spec": {"trafficDistribution": "PreferClose"}}), zone.clone()),
        (json!({}), json!({"spec": {"trafficDistribution": "PreferSameZone"}}), zone.clone()),
        (json!({}), json!({"spec": {"trafficDistribution": "PreferSameNode"}}), node.clone()),
        (json!({}), json!({"spec": {"trafficDistribution": "PreferTheMoon"}}), None),
        (annotated("PreferClose"), json!({}), zone.clone()),
        (annotated("PreferClose"), json!({"metadata": {"annotations": annotated("PreferSameNode")}}), node.clone()),
        (annotated("PreferClose"), json!({"metadata": {"annotations": annotated("Any")}}), None),
        (
            annotated("Any"),
            json!({"metadata": {"annotations": annotated("Any")}, "spec": {"trafficDistribution": "PreferClose"}}),
            zone,
        ),
        (
            json!({}),
            json!({"spec": {"internalTrafficPolicy": "Local", "trafficDistribution": "PreferClose"}}),
            balance(Mode::Strict, &[Scope::Node], HealthPolicy::OnlyHealthy),
        ),
        (
            json!({}),
            json!({"spec": {"publishNotReadyAddresses": true}}),
            balance(Mode::UnspecifiedMode, &[], HealthPolicy::AllowAll),
        ),
    ];
    for (annotations, change, expected) in cases {
        let mut cluster = Cluster::new();
        cluster.put(json!({"kind": "Namespace", "metadata": {"name": "shop", "annotations": annotations}}));
        cluster.put(merged(cart(json!([])), &change));
        let snapshot = cluster.snapshot();
        assert_eq!(service(&snapshot, CART).load_balancing, expected, "{change}");
    }
    for (change, addresses, families) in [
        (json!({"spec": {"clusterIP": "None"}}), 0, wire::IpFamilies::Automatic),
        (json!({"spec": {"clusterIP": "10.96.0.9", "ipFamilies": ["IPv4"]}}), 1, wire::IpFamilies::Ipv4Only),
        (json!({"spec": {"clusterIPs": ["fd10::9"], "ipFamilies": ["IPv6"]}}), 1, wire::IpFamilies::Ipv6Only),
        (json!({"spec": {"clusterIPs": ["10.96.0.9", "nonsense"]}}), 1, wire::IpFamilies::Automatic),
    ] {
        let mut cluster = Cluster::new();
        cluster.put(merged(cart(json!([])), &change));
        let service = service(&cluster.snapshot(), CART);
        assert_eq!((service.addresses.len(), service.ip_families()), (addresses, families), "{change}");
    }
    let mut cluster = Cluster::new();
    cluster.put(merged(cart(json!([])), &json!({"spec": {"type": "ExternalName", "externalName": "example.com"}})));
    assert!(cluster.snapshot().get(Set::Addresses, CART).is_none());
}

#[test]
fn endpoints_come_from_selectors_with_each_pods_own_ports() {
    let mut cluster = Cluster::new();
    cluster.put(cart(json!([
        {"name": "web", "port": 80, "targetPort": "http"},
        {"name": "raw", "port": 90, "targetPort": 9000},
        {"name": "same", "port": 70},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ])));
    let with_port = |name: &str, number: u32| {
        let ports =
            json!([{"name": "http", "containerPort": 1, "protocol": "UDP"}, {"name": "http", "containerPort": number}]);
        merged(
            pod(name, json!({"app": "cart", "x": "y"})),
            &json!({"spec": {"containers": [{"name": "c", "ports": ports}]}}),
        )
    };
    cluster.put(with_port("a", 8080));
    cluster.put(with_port("b", 8081));
    cluster.put(pod("c", json!({"app": "cart"})));
    let sidecar = json!([{"name": "s", "restartPolicy": "Always", "ports": [{"name": "http", "containerPort": 7}]}]);
    cluster.put(merged(pod("d", json!({"app": "cart"})), &json!({"spec": {"initContainers": sidecar}})));
    cluster.put(pod("other", json!({"app": "till"})));
    cluster.put(merged(pod("elsewhere", json!({"app": "cart"})), &json!({"metadata": {"namespace": "yard"}})));
    let snapshot = cluster.snapshot();
    assert_eq!(ports(&snapshot, "a", CART), Some(vec![(70, 70), (80, 8080), (90, 9000)]));
    assert_eq!(ports(&snapshot, "b", CART), Some(vec![(70, 70), (80, 8081), (90, 9000)]));
    assert_eq!(ports(&snapshot, "c", CART), Some(vec![(70, 70), (90, 9000)]));
    assert_eq!(ports(&snapshot, "d", CART), Some(vec![(70, 70), (80, 7), (90, 9000)]));
    assert_eq!(ports(&snapshot, "other", CART), None);
    let behind: Vec<_> = snapshot.endpoints(CART).map(|r| r.name.rsplit('/').next().unwrap().to_owned()).collect();
    assert_eq!(behind, ["a", "b", "c", "d"]);
}

#[test]
fn endpoints_of_a_service_without_selector_come_from_its_slices() {
    let mut cluster = Cluster::new();
    cluster
        .put(merged(cart(json!([{"name": "web", "port": 80, "targetPort": 1}])), &json!({"spec": {"selector": null}})));
    cluster.put(pod("a", json!({})));
    let slice = json!({
        "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": "cart-1", "namespace": "shop", "labels": {"kubernetes.io/service-name": "cart"}},
        "ports": [{"name": "web", "port": 8080}, {"name": "else", "port": 1}],
        "endpoints": [
            {"addresses": ["10.1.0.1"], "targetRef": {"kind": "Pod", "name": "a", "namespace": "shop"}},
            {"addresses": ["192.0.2.7"]},
            {"addresses": ["192.0.2.8"], "conditions": {"ready": false}},
            {"addresses": ["192.0.2.7"]},
            {"addresses": ["nowhere"]},
        ],
    });
    cluster.put(slice.clone());
    let snapshot = cluster.snapshot();
    assert_eq!(ports(&snapshot, "a", CART), Some(vec![(80, 8080)]));
    let external = workload(&snapshot, "Kubernetes/discovery.k8s.io/EndpointSlice/shop/cart-1/192.0.2.7");
    assert_eq!(
        external,
        wire::Workload {
            uid: "Kubernetes/discovery.k8s.io/EndpointSlice/shop/cart-1/192.0.2.7".into(),
            name: "cart-1".into(),
            namespace: "shop".into(),
            addresses: vec![vec![192, 0, 2, 7].into()],
            workload_type: wire::WorkloadType::Pod as i32,
            cluster_id: "Kubernetes".into(),
            services: [(
                CART.to_owned(),
                wire::PortList { ports: vec![wire::Port { service_port: 80, target_port: 8080, app_protocol: 0 }] }
            )]
            .into(),
            network_mode: wire::NetworkMode::HostNetwork as i32,
            ..Default::default()
        }
    );
    let sick = workload(&snapshot, "Kubernetes/discovery.k8s.io/EndpointSlice/shop/cart-1/192.0.2.8");
    assert_eq!(sick.status(), wire::WorkloadStatus::Unhealthy);
    assert_eq!(snapshot.endpoints(CART).count(), 3);
    assert_eq!(snapshot.problems.len(), 1);
    // Its address may be anybody's: it is never found by it.
    assert!(snapshot.resolve(Set::Addresses, "/192.0.2.7").resources.is_empty());

    // The slice's pods go when the slice goes, and the service with a selector no longer listens to it.
    cluster.put(merged(slice.clone(), &json!({"endpoints": [{"addresses": ["192.0.2.8"]}]})));
    let snapshot = cluster.snapshot();
    assert_eq!((ports(&snapshot, "a", CART), snapshot.endpoints(CART).count()), (None, 1));
    cluster.put(slice);
    cluster.put(cart(json!([{"name": "web", "port": 80, "targetPort": 1}])));
    let snapshot = cluster.snapshot();
    assert_eq!((ports(&snapshot, "a", CART), snapshot.endpoints(CART).count()), (None, 2));
}

#[test]
fn two_workloads_with_one_address_are_both_found() {
    let mut cluster = Cluster::new();
    cluster.put(pod("a", json!({})));
    cluster.put(pod("b", json!({})));
    for name in ["host-1", "host-2"] {
        cluster.put(merged(pod(name, json!({})), &json!({"spec": {"hostNetwork": true}})));
    }
    let snapshot = cluster.snapshot();
    let found = snapshot.resolve(Set::Addresses, "/10.1.0.1").resources;
    let names: Vec<_> = found.iter().map(|r| &*r.name).collect();
    assert_eq!(names, ["Kubernetes//Pod/shop/a", "Kubernetes//Pod/shop/b"]);
    assert_eq!(snapshot.on_node("node-a").count(), 4);
}

#[test]
fn the_label_of_the_system_namespace_names_the_network() {
    let mut cluster = Cluster::new();
    cluster.put(pod("a", json!({})));
    cluster.put(merged(cart(json!([])), &json!({"spec": {"clusterIP": "10.96.0.1"}})));
    cluster.snapshot();
    cluster.put(json!({"kind": "Namespace", "metadata": {"name": "understory-system", "labels": {"topology.istio.io/network": "east"}}}));
    let snapshot = cluster.snapshot();
    assert_eq!(snapshot.resolve(Set::Addresses, "east/10.1.0.1").resources.len(), 1);
    assert_eq!(snapshot.resolve(Set::Addresses, "east/10.96.0.1").services.len(), 1);
    assert!(snapshot.resolve(Set::Addresses, "/10.1.0.1").resources.is_empty());
}

#[test]
fn a_foreign_trust_domain_and_cluster_are_spelled_out() {
    let mut cluster = Cluster::new();
    let abroad = ModelSettings {
        cluster_id: "c2".into(),
        cluster_domain: "k8s.example".into(),
        trust_domain: TrustDomain::new("prod.example"),
        system_namespace: "understory-system".into(),
        root_namespace: "understory-system".into(),
    };
    (cluster.model, cluster.pruned) = (Model::new(abroad.clone()), Model::new(abroad));
    cluster.put(pod("a", json!({"app": "cart"})));
    cluster.put(cart(json!([])));
    let snapshot = cluster.snapshot();
    let workload = workload(&snapshot, "c2//Pod/shop/a");
    assert_eq!((&*workload.trust_domain, &*workload.cluster_id), ("prod.example", "c2"));
    assert!(workload.services.contains_key("shop/cart.shop.svc.k8s.example"));
}

#[test]
fn records_name_the_policies_that_select_them() {
    let mut cluster = Cluster::new();
    let of_app = |app: &str| json!({"selector": {"matchLabels": {"app": app}}});
    cluster.put(pod("a", json!({"app": "cart"})));
    cluster.put(pod("b", json!({"app": "till"})));
    cluster.put(merged(pod("host", json!({"app": "cart"})), &json!({"spec": {"hostNetwork": true}})));
    cluster.put(policy("AuthorizationPolicy", "shop/z", of_app("cart")));
    cluster.put(policy("AuthorizationPolicy", "shop/all", json!({})));
    cluster.put(policy("AuthorizationPolicy", "understory-system/y", of_app("cart")));
    cluster.put(policy("AuthorizationPolicy", "yard/x", of_app("cart")));
    cluster.put(policy("AuthorizationPolicy", "shop/audit", merged(of_app("cart"), &json!({"action": "AUDIT"}))));
    cluster.put(policy("AuthorizationPolicy", "shop/custom", merged(of_app("cart"), &json!({"action": "CUSTOM"}))));
    let snapshot = cluster.snapshot();
    let expected = ["shop/audit", "shop/z", "understory-system/y"];
    assert_eq!(
        (named(&snapshot, "a"), named(&snapshot, "host")),
        (expected.map(String::from).to_vec(), expected.map(String::from).to_vec())
    );
    assert_eq!(named(&snapshot, "b"), [""; 0]);
    let sent = |snapshot: &Snapshot| snapshot.all(Set::Authorizations).map(|r| r.name.to_string()).collect::<Vec<_>>();
    assert_eq!(sent(&snapshot), ["shop/all", "shop/audit", "shop/z", "understory-system/y", "yard/x"]);

    // Any PeerAuthentication brings the policy for STRICT pods; it is named where STRICT counts.
    cluster.put(policy("PeerAuthentication", "yard/n", json!({"mtls": {"mode": "STRICT"}})));
    let snapshot = cluster.snapshot();
    assert!(sent(&snapshot).contains(&"understory-system/istio_converted_static_strict".to_owned()));
    assert_eq!(named(&snapshot, "b"), [""; 0]);
    cluster.put(policy("PeerAuthentication", "shop/n", json!({"mtls": {"mode": "STRICT"}})));
    assert_eq!(named(&cluster.snapshot(), "b"), ["understory-system/istio_converted_static_strict"]);
    let ports = json!({"selector": {"matchLabels": {"app": "till"}}, "portLevelMtls": {"80": {"mode": "PERMISSIVE"}}});
    cluster.put(policy("PeerAuthentication", "shop/ports", ports));
    let snapshot = cluster.snapshot();
    assert_eq!(named(&snapshot, "b"), ["shop/converted_peer_authentication_ports"]);
    assert!(sent(&snapshot).contains(&"shop/converted_peer_authentication_ports".to_owned()));
    // Under a permissive parent it says nothing any more.
    cluster.put(policy("PeerAuthentication", "shop/n", json!({"mtls": {"mode": "PERMISSIVE"}})));
    let snapshot = cluster.snapshot();
    assert_eq!(named(&snapshot, "b"), [""; 0]);
    assert!(!sent(&snapshot).contains(&"shop/converted_peer_authentication_ports".to_owned()));
    cluster.objects.peer_authentications.clear();
    assert_eq!(sent(&cluster.snapshot()), ["shop/all", "shop/audit", "shop/z", "understory-system/y", "yard/x"]);
}

#[test]
fn a_changed_policy_touches_only_what_it_concerns() {
    let mut cluster = Cluster::new();
    for (name, app) in [("a", "cart"), ("b", "till")] {
        cluster.put(pod(name, json!({"app": app})));
        cluster.put(merged(pod(name, json!({"app": app})), &json!({"metadata": {"namespace": "yard"}})));
    }
    let mut before = cluster.snapshot();
    let mut step = |object: Value| {
        cluster.put(object);
        let now = cluster.snapshot();
        let names = |set: Set| {
            let name = |change: Change<'_>| match change {
                Change::Put { new, .. } => new.name.to_string(),
                Change::Gone(old) => format!("-{}", old.name),
            };
            now.changes_since(&before, set).map(name).collect::<Vec<_>>()
        };
        let changes = (names(Set::Authorizations), names(Set::Addresses));
        before = now;
        changes
    };
    let uid = |path: &str| format!("Kubernetes//Pod/{path}");
    let of_app = |app: &str, port: &str| json!({"selector": {"matchLabels": {"app": app}}, "rules": [{"to": [{"operation": {"ports": [port]}}]}]});
    let one = vec!["shop/p".to_owned()];
    assert_eq!(step(policy("AuthorizationPolicy", "shop/p", of_app("cart", "80"))), (one.clone(), vec![uid("shop/a")]));
    assert_eq!(step(policy("AuthorizationPolicy", "shop/p", of_app("cart", "81"))), (one.clone(), vec![]));
    let moved = vec![uid("shop/a"), uid("shop/b")];
    assert_eq!(
        step(policy("AuthorizationPolicy", "shop/p", of_app("till", "81"))),
        (vec![], moved),
        "who is selected is said by the records"
    );
    assert_eq!(step(policy("AuthorizationPolicy", "shop/p", json!({}))), (one, vec![uid("shop/b")]));
    let strict = "understory-system/istio_converted_static_strict".to_owned();
    let mode = |mode: &str| json!({"mtls": {"mode": mode}});
    let yard = vec![uid("yard/a"), uid("yard/b")];
    assert_eq!(step(policy("PeerAuthentication", "yard/n", mode("STRICT"))), (vec![strict], yard.clone()));
    let shop = vec![uid("shop/a"), uid("shop/b")];
    assert_eq!(step(policy("PeerAuthentication", "understory-system/m", mode("STRICT"))), (vec![], shop));
    assert_eq!(step(policy("PeerAuthentication", "yard/n", mode("PERMISSIVE"))), (vec![], yard));
    // The label is told of in the status alone.
    let namespace =
        json!({"kind": "Namespace", "metadata": {"name": "shop", "labels": {"istio.io/dataplane-mode": "ambient"}}});
    assert_eq!(step(namespace), (vec![], vec![]));
}

#[test]
fn each_policy_has_a_status_that_follows_it() {
    let mut cluster = Cluster::new();
    let path = json!({"action": "DENY", "rules": [{"to": [{"operation": {"paths": ["/x"]}}]}]});
    cluster.put(policy("AuthorizationPolicy", "shop/p", path));
    cluster.put(policy("PeerAuthentication", "shop/old", json!({"mtls": {"mode": "STRICT"}})));
    cluster.put(policy("PeerAuthentication", "shop/young", json!({"mtls": {"mode": "PERMISSIVE"}})));
    let of = |snapshot: &Snapshot, key: ObjectKey| snapshot.policies.get(&key).map(|s| (**s).clone());
    let p = || ObjectKey::AuthorizationPolicy(ObjectName::new("shop", "p"));
    let peer = |name: &str| ObjectKey::PeerAuthentication(ObjectName::new("shop", name));
    let snapshot = cluster.snapshot();
    let status = of(&snapshot, p()).unwrap();
    assert_eq!((status.state, &*status.applies_to), (State::Broader, "all pods in namespace shop"));
    assert_eq!(status.meaning, ["rule 0 denies every connection"]);
    let [.., enrolled] = &status.conditions[..] else { panic!() };
    assert_eq!((enrolled.kind, enrolled.status), ("NamespaceEnrolled", "False"));
    assert_eq!(of(&snapshot, peer("old")).unwrap().meaning, ["only mutual TLS is taken"]);
    assert_eq!(of(&snapshot, peer("young")).unwrap().state, State::NoEffect);

    let label = json!({"istio.io/dataplane-mode": "ambient"});
    cluster.put(json!({"kind": "Namespace", "metadata": {"name": "shop", "labels": label}}));
    cluster.objects.peer_authentications.remove(&ObjectName::new("shop", "old"));
    let snapshot = cluster.snapshot();
    assert_eq!(of(&snapshot, p()).unwrap().conditions[2].status, "True");
    assert_eq!((of(&snapshot, peer("old")), of(&snapshot, peer("young")).unwrap().state), (None, State::Enforced));
    cluster.objects.authorization_policies.clear();
    assert_eq!(of(&cluster.snapshot(), p()), None);
}

#[test]
fn what_does_not_matter_changes_nothing() {
    let mut cluster = Cluster::new();
    cluster.node("node-a", json!({"topology.kubernetes.io/zone": "z1"}));
    cluster.put(pod("a", json!({"app": "cart"})));
    cluster.put(cart(json!([])));
    assert!(cluster.update().is_some());
    cluster.put(merged(pod("a", json!({"app": "cart"})), &json!({"status": {"message": "hello"}})));
    cluster.put(json!({"kind": "Node", "metadata": {"name": "node-a", "labels": {"topology.kubernetes.io/zone": "z1", "beat": "1"}}}));
    assert!(cluster.update().is_none());
    cluster.node("node-a", json!({"topology.kubernetes.io/zone": "z2"}));
    assert_eq!(workload(&cluster.snapshot(), "Kubernetes//Pod/shop/a").locality.unwrap().zone, "z2");
}

#[test]
fn versions_are_the_same_after_a_restart() {
    let snapshots = [(); 2].map(|()| {
        let mut cluster = Cluster::new();
        cluster.put(pod("a", json!({"app": "cart", "tier": "x"})));
        for name in ["one", "two", "three", "four"] {
            cluster.put(merged(cart(json!([{"port": 80}])), &json!({"metadata": {"name": name}})));
        }
        cluster.snapshot()
    });
    let [first, second] = snapshots;
    assert_eq!(first.changes_since(&second, Set::Addresses).count(), 0);
    assert_eq!(workload(&first, "Kubernetes//Pod/shop/a").services.len(), 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever comes in whatever order: the incremental model is the one that a fresh start would build.
    #[test]
    fn an_update_gives_what_a_fresh_start_gives(steps in proptest::collection::vec((0..8u8, 0..4u8, 0..6u8), 1..40)) {
        let mut cluster = Cluster::new();
        for (kind, which, how) in steps {
            cluster.step(kind, which, how);
            cluster.update();
        }
        let mut fresh = Model::new(settings());
        fresh.update(Arc::new(cluster.objects.clone()));
        let (grown, fresh) = (cluster.model.snapshot(), fresh.snapshot());
        prop_assert_eq!(grown.changes_since(&fresh, Set::Addresses).count(), 0);
        prop_assert_eq!(grown.changes_since(&fresh, Set::Authorizations).count(), 0);
        prop_assert_eq!(&grown.policies, &fresh.policies);
        for (key, names) in &fresh.by_alias {
            prop_assert_eq!(Some(names), grown.by_alias.get(key));
        }
        prop_assert_eq!(&grown.by_alias, &fresh.by_alias);
        prop_assert_eq!(&grown.endpoints, &fresh.endpoints);
        prop_assert_eq!(&grown.by_node, &fresh.by_node);
        prop_assert_eq!(&grown.problems, &fresh.problems);
    }
}

pub(crate) const CART: &str = "shop/cart.shop.svc.cluster.local";

pub(crate) struct Cluster {
    pub(crate) objects: Objects,
    model: Model,
    /// The same objects as the API server's source keeps them: what is served must be the same.
    pruned: Model,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self { objects: Objects::default(), model: Model::new(settings()), pruned: Model::new(settings()) }
    }

    pub(crate) fn put(&mut self, object: Value) {
        let meta = &object["metadata"];
        let name: Arc<str> = meta["name"].as_str().unwrap().into();
        let key = ObjectName { namespace: meta["namespace"].as_str().unwrap_or("default").into(), name: name.clone() };
        let o = &mut self.objects;
        match object["kind"].as_str().unwrap() {
            "Namespace" => drop(o.namespaces.insert(name, Arc::new(serde_json::from_value(object).unwrap()))),
            "Node" => drop(o.nodes.insert(name, Arc::new(serde_json::from_value(object).unwrap()))),
            "Pod" => drop(o.pods.insert(key, Arc::new(serde_json::from_value(object).unwrap()))),
            "Service" => drop(o.services.insert(key, Arc::new(serde_json::from_value(object).unwrap()))),
            "EndpointSlice" => drop(o.endpoint_slices.insert(key, Arc::new(serde_json::from_value(object).unwrap()))),
            "PeerAuthentication" => drop(o.peer_authentications.insert(key, Arc::new(security_policy(object)))),
            "AuthorizationPolicy" => drop(o.authorization_policies.insert(key, Arc::new(security_policy(object)))),
            other => panic!("{other}"),
        }
    }

    fn node(&mut self, name: &str, labels: Value) {
        self.put(json!({"kind": "Node", "metadata": {"name": name, "labels": labels}}));
    }

    pub(crate) fn update(&mut self) -> Option<Snapshot> {
        let snapshot = self.model.update(Arc::new(self.objects.clone()));
        self.pruned.update(Arc::new(as_read_from_the_api_server(&self.objects)));
        let (whole, pruned) = (self.model.snapshot(), self.pruned.snapshot());
        for set in [Set::Addresses, Set::Authorizations] {
            assert_eq!(whole.changes_since(&pruned, set).count(), 0, "another source, other {set:?}");
        }
        assert_eq!((&whole.policies, &whole.problems), (&pruned.policies, &pruned.problems));
        snapshot
    }

    pub(crate) fn snapshot(&mut self) -> Snapshot {
        self.update();
        self.model.snapshot()
    }

    /// One arbitrary change of an arbitrary object.
    pub(crate) fn step(&mut self, kind: u8, which: u8, how: u8) {
        let name = format!("n{which}");
        let key = ObjectName::new("shop", &name);
        match (kind, how) {
            (0, 0) => drop(self.objects.pods.remove(&key)),
            (0, how) => self.put(merged(
                pod(&name, json!({"app": format!("n{}", how % 3), "v": how.to_string()})),
                &json!({"spec": {"nodeName": format!("n{}", how % 2), "hostNetwork": how == 5},
                    "status": {"podIP": format!("10.1.0.{}", how % 3), "phase": if how == 4 { "Failed" } else { "Running" }}}),
            )),
            (1, 0) => drop(self.objects.services.remove(&key)),
            (1, how) => {
                let selector = if how % 2 == 0 { Value::Null } else { json!({"app": format!("n{}", how % 3)}) };
                self.put(merged(
                    cart(json!([{"name": "web", "port": 80 + u32::from(how), "targetPort": "http"}])),
                    &json!({"metadata": {"name": name}, "spec": {"selector": selector, "clusterIP": format!("10.96.0.{how}"),
                        "type": if how == 5 { "ExternalName" } else { "ClusterIP" }}}),
                ));
            }
            (2, 0) => drop(self.objects.endpoint_slices.remove(&key)),
            (2, how) => self.put(json!({
                "kind": "EndpointSlice", "addressType": "IPv4",
                "metadata": {"name": name, "namespace": "shop", "labels": {"kubernetes.io/service-name": format!("n{}", how % 4)}},
                "ports": [{"name": "web", "port": 8000 + u32::from(how)}],
                "endpoints": [
                    {"addresses": ["10.1.0.1"], "targetRef": {"kind": "Pod", "name": format!("n{}", how % 3)}},
                    {"addresses": [format!("192.0.2.{}", how % 2)]},
                    {"addresses": [if how == 3 { "x" } else { "192.0.2.9" }]},
                ],
            })),
            (3, how) => self.node(&name, json!({"topology.kubernetes.io/zone": format!("z{how}")})),
            (4, how) => {
                let value = ["PreferClose", "Any", "x"][usize::from(how % 3)];
                let annotations = json!({"networking.istio.io/traffic-distribution": value});
                let labels = json!({"istio.io/dataplane-mode": if how < 3 { "ambient" } else { "none" }});
                self.put(json!({"kind": "Namespace", "metadata": {"name": "shop", "annotations": annotations, "labels": labels}}));
            }
            (6 | 7, how) => {
                let namespace = if which == 0 { "understory-system" } else { "shop" };
                let key = ObjectName::new(namespace, &name);
                let selector = if how % 2 == 0 { Value::Null } else { json!({"matchLabels": {"app": format!("n{}", how % 3)}}) };
                match (kind, how) {
                    (6, 0) => drop(self.objects.authorization_policies.remove(&key)),
                    (_, 0) => drop(self.objects.peer_authentications.remove(&key)),
                    (6, how) => {
                        let action = ["ALLOW", "DENY", "AUDIT", "CUSTOM", "x"][usize::from(how - 1)];
                        let spec = json!({"action": action, "selector": selector, "rules": [{}]});
                        self.put(policy("AuthorizationPolicy", &key.to_string(), spec));
                    }
                    (_, how) => {
                        let mode = ["STRICT", "PERMISSIVE", "UNSET", "STRICT", "x"][usize::from(how - 1)];
                        let ports = if how > 2 { json!({"80": {"mode": "PERMISSIVE"}, "81": {"mode": "STRICT"}}) } else { Value::Null };
                        let spec = json!({"mtls": {"mode": mode}, "selector": selector, "portLevelMtls": ports});
                        self.put(policy("PeerAuthentication", &key.to_string(), spec));
                    }
                }
            }
            (_, how) => {
                let labels = json!({"topology.istio.io/network": format!("net{}", how % 2)});
                self.put(json!({"kind": "Namespace", "metadata": {"name": "understory-system", "labels": labels}}));
            }
        }
    }
}

fn as_read_from_the_api_server(objects: &Objects) -> Objects {
    let mut kept = Objects { statuses: objects.statuses.clone(), ..Objects::default() };
    let mut keep = |kind: Kind, value| {
        let key = kind.key_of(&value).unwrap();
        kept.put(key, kubernetes::read(kind, "v1", value).unwrap());
    };
    objects.namespaces.values().for_each(|o| keep(Kind::Namespace, json!(**o)));
    objects.nodes.values().for_each(|o| keep(Kind::Node, json!(**o)));
    objects.pods.values().for_each(|o| keep(Kind::Pod, json!(**o)));
    objects.services.values().for_each(|o| keep(Kind::Service, json!(**o)));
    objects.endpoint_slices.values().for_each(|o| keep(Kind::EndpointSlice, json!(**o)));
    for (kind, policies) in [
        (SecurityKind::PeerAuthentication, &objects.peer_authentications),
        (SecurityKind::AuthorizationPolicy, &objects.authorization_policies),
    ] {
        for policy in policies.values() {
            keep(Kind::Security(kind), json!({"metadata": policy.metadata, "spec": policy.spec.clone().unwrap()}));
        }
    }
    kept
}

fn security_policy(mut object: Value) -> SecurityPolicy {
    SecurityPolicy {
        metadata: serde_json::from_value(object["metadata"].take()).unwrap(),
        spec: Ok(object["spec"].take()),
    }
}

/// `kind` is AuthorizationPolicy or PeerAuthentication, `path` namespace/name.
pub(crate) fn policy(kind: &str, path: &str, spec: Value) -> Value {
    let (namespace, name) = path.split_once('/').unwrap();
    json!({"kind": kind, "metadata": {"name": name, "namespace": namespace}, "spec": spec})
}

fn named(snapshot: &Snapshot, pod: &str) -> Vec<String> {
    workload(snapshot, &format!("Kubernetes//Pod/shop/{pod}")).authorization_policies
}

fn settings() -> ModelSettings {
    ModelSettings {
        cluster_id: "Kubernetes".into(),
        cluster_domain: "cluster.local".into(),
        trust_domain: TrustDomain::default(),
        system_namespace: "understory-system".into(),
        root_namespace: "understory-system".into(),
    }
}

pub(crate) fn pod(name: &str, labels: Value) -> Value {
    json!({
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}"), "labels": labels},
        "spec": {"nodeName": "node-a", "serviceAccountName": "sa", "containers": []},
        "status": {"phase": "Running", "podIP": "10.1.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

pub(crate) fn cart(ports: Value) -> Value {
    json!({
        "kind": "Service",
        "metadata": {"name": "cart", "namespace": "shop"},
        "spec": {"selector": {"app": "cart"}, "ports": ports},
    })
}

fn find(snapshot: &Snapshot, uid: &str) -> Option<wire::Workload> {
    match snapshot.get(Set::Workloads, uid)?.decode()? {
        Decoded::Workload(workload) => Some(*workload),
        other => panic!("{other:?}"),
    }
}

fn workload(snapshot: &Snapshot, uid: &str) -> wire::Workload {
    find(snapshot, uid).unwrap_or_else(|| panic!("no {uid} in {snapshot:?}"))
}

fn service(snapshot: &Snapshot, key: &str) -> wire::Service {
    match snapshot.get(Set::Addresses, key).and_then(|r| r.decode()) {
        Some(Decoded::Service(service)) => *service,
        other => panic!("{other:?}"),
    }
}

fn ports(snapshot: &Snapshot, pod: &str, service: &str) -> Option<Vec<(u32, u32)>> {
    let workload = workload(snapshot, &format!("Kubernetes//Pod/shop/{pod}"));
    let list = workload.services.get(service)?;
    Some(list.ports.iter().map(|p| (p.service_port, p.target_port)).collect())
}

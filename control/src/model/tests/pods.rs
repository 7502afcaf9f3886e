//! From pods to workloads.

use std::sync::Arc;

use serde_json::{Value, json};
use ztunnel::identity::TrustDomain;
use ztunnel::manifests::{PodRef, PodStatus, Redirection};
use ztunnel::proto::workload as wire;

use super::*;

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

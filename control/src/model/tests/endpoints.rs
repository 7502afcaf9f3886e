//! Which workloads are behind a Service, on which ports.

use serde_json::json;
use ztunnel::proto::workload as wire;

use super::*;

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

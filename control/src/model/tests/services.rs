//! From Services to services.

use serde_json::json;
use ztunnel::proto::workload as wire;

use super::*;

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

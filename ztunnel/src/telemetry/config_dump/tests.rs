use std::time::{Duration, Instant};

use serde_json::Value;

use super::policies::ServiceAccount;
use super::*;
use crate::mesh::{
    ApplicationTunnel, Common, Destination, GatewayAddress, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode,
    NamespacedHostname, NetworkAddress, Place, Scope, ServicePort, TunnelProtocol, Visibility, WeightedWaypoint,
    WorkloadService,
};
use crate::telemetry::connections::tests::{hbone, new, service, workload};

#[derive(Clone, Default)]
struct Fixed {
    workloads: Vec<Workload>,
    services: Vec<Service>,
    policies: Vec<Policy>,
}

impl Model for Fixed {
    fn node(&self) -> Node {
        Node { name: "n1".into(), cluster: "Kubernetes".into(), policies_complete: true, unusable: Vec::new() }
    }

    fn workloads(&self) -> Box<dyn Iterator<Item = &Workload> + '_> {
        Box::new(self.workloads.iter())
    }

    fn services(&self) -> Box<dyn Iterator<Item = &Service> + '_> {
        Box::new(self.services.iter())
    }

    fn endpoints(&self, service: &Service) -> Vec<Endpoint> {
        let backs = |w: &&Workload| w.services.iter().any(|s| s.service == service.key);
        self.workloads.iter().filter(backs).map(endpoint).collect()
    }

    fn policies(&self) -> Box<dyn Iterator<Item = Policy> + '_> {
        Box::new(self.policies.iter().cloned())
    }

    fn staged(&self) -> BTreeMap<String, Vec<Endpoint>> {
        let waiting = self.workloads.iter().take(1).map(endpoint).collect();
        BTreeMap::from([("shop/later.shop.svc.cluster.local".to_owned(), waiting)])
    }
}

fn endpoint(w: &Workload) -> Endpoint {
    Endpoint { workload_uid: w.uid.to_string(), port: [(80, 8080)].into(), healthy: w.healthy }
}

fn sources(model: Fixed, telemetry: Arc<Telemetry>) -> Sources {
    Sources {
        model: Box::new(move || Box::new(model.clone())),
        certificates: Box::new(|| {
            let certificate = CertificateDump {
                pem: "LS0t".into(),
                serial_number: "42".into(),
                valid_from: "2026-03-01T00:00:00Z".into(),
                expiration_time: "2026-03-02T00:00:00Z".into(),
            };
            vec![CertificatesDump {
                identity: "spiffe://cluster.local/ns/shop/sa/web".into(),
                state: "Available".into(),
                cert_chain: vec![certificate.clone()],
                root_certs: vec![certificate],
            }]
        }),
        pods: Box::new(|| {
            let pod = |uid: &str, name: &str, up| Pod {
                uid: uid.into(),
                name: name.into(),
                namespace: "shop".into(),
                service_account: "web".into(),
                by_ebpf: true,
                up,
            };
            vec![pod("uid-1", "web-0", true), pod("uid-2", "web-1", false)]
        }),
        telemetry,
        config: json!({"control": {"metadata": {"ISTIO_VERSION": "1.30.0"}}}),
    }
}

fn dump(sources: &Sources) -> Value {
    let mut text = Vec::new();
    sources.write(&mut text).unwrap();
    serde_json::from_slice(&text).unwrap()
}

fn full_workload() -> Workload {
    let bare = workload("cart");
    let by_address = NetworkAddress { network: "net1".into(), address: "10.1.0.9".parse().unwrap() };
    let by_name = NamespacedHostname { namespace: "istio-gateways".into(), hostname: "east.example".into() };
    let common = Common {
        protocol: TunnelProtocol::Hbone,
        waypoint: Some(GatewayAddress { destination: Destination::Address(by_address), hbone_port: 15008 }.into()),
        application_tunnel: Some(ApplicationTunnel { proxy_protocol: true, port: 15088 }),
        policies: ["shop/only-web".into()].into(),
        host_network: true,
        native_tunnel: true,
        ..(*bare.common).clone()
    };
    let place = Place {
        node: "node-a".into(),
        network: "net1".into(),
        network_gateway: Some(GatewayAddress { destination: Destination::Hostname(by_name), hbone_port: 15443 }.into()),
        ..(*bare.place).clone()
    };
    let share = WorkloadService { service: "shop/cart.shop.svc.cluster.local".into(), ports: [(80, 8080)].into() };
    Workload {
        addresses: vec!["10.0.1.2".parse().unwrap(), "fd00::2".parse().unwrap()].into(),
        common: common.into(),
        place: place.into(),
        services: [share].into(),
        healthy: false,
        ..(*bare).clone()
    }
}

#[test]
fn the_top_level_keys_are_those_of_the_field() {
    let dump = dump(&sources(Fixed::default(), new().1));
    let mut keys: Vec<&str> = dump.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    let mut expected = [
        "workloads",
        "services",
        "policies",
        "stagedServices",
        "staticConfig",
        "version",
        "config",
        "certificates",
        "workloadState",
        // Ours.
        "node",
    ];
    expected.sort_unstable();
    assert_eq!(keys, expected);
    for key in ["workloads", "services", "policies", "certificates"] {
        assert!(dump[key].is_array(), "{key}");
    }
    for key in
        ["version", "gitRevision", "rustVersion", "buildProfile", "buildStatus", "istioVersion", "cryptoProvider"]
    {
        assert!(dump["version"][key].is_string(), "{key}");
    }
    assert_eq!(dump["version"]["istioVersion"], "1.30.0");
}

#[test]
fn a_workload_has_the_keys_and_enum_texts_of_the_field() {
    let model = Fixed { workloads: vec![full_workload(), (*workload("web")).clone()], ..Fixed::default() };
    let dump = dump(&sources(model, new().1));
    assert_eq!(
        dump["workloads"][0],
        json!({
            "uid": "Kubernetes//Pod/shop/cart-0",
            "workloadIps": ["10.0.1.2", "fd00::2"],
            "waypoint": {"destination": "net1/10.1.0.9", "hboneMtlsPort": 15008},
            "networkGateway": {"destination": "istio-gateways/east.example", "hboneMtlsPort": 15443},
            "protocol": "HBONE",
            "name": "cart-0",
            "namespace": "shop",
            "trustDomain": "cluster.local",
            "serviceAccount": "default",
            "workloadName": "cart",
            "workloadType": "pod",
            "canonicalName": "cart",
            "canonicalRevision": "v1",
            "network": "net1",
            "node": "node-a",
            "status": "Unhealthy",
            "clusterId": "Kubernetes",
            "locality": {"region": "r1", "zone": "z1"},
            "nativeTunnel": true,
            "capacity": 1,
            "applicationTunnel": {"protocol": "PROXY", "port": 15088},
            "authorizationPolicies": ["shop/only-web"],
            "networkMode": "HostNetwork",
            "services": ["shop/cart.shop.svc.cluster.local"],
        })
    );
    let plain = dump["workloads"][1].as_object().unwrap();
    for empty in ["hostname", "network", "node", "waypoint", "applicationTunnel", "authorizationPolicies", "services"] {
        assert!(!plain.contains_key(empty), "{empty}");
    }
    assert_eq!(
        (&plain["protocol"], &plain["status"], &plain["networkMode"]),
        (&"TCP".into(), &"Healthy".into(), &"Standard".into())
    );
}

#[test]
fn a_service_has_the_keys_and_enum_texts_of_the_field() {
    let waypoint = full_workload().common.waypoint.clone();
    let full = Service {
        vips: NetworkAddress { network: "".into(), address: "10.96.0.7".parse().unwrap() }.into(),
        ports: ServicePort { service_port: 80, target_port: 8080, app_protocol: 0 }.into(),
        subject_alt_names: ["spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap()].into(),
        weighted_waypoints: [WeightedWaypoint { destination: (**waypoint.as_ref().unwrap()).clone(), weight: 7 }]
            .into(),
        waypoint,
        load_balancing: LoadBalancing {
            preference: [Scope::Network, Scope::Region].into(),
            mode: LoadBalancingMode::Failover,
            health: HealthPolicy::AllowAll,
        },
        ip_families: IpFamilies::Dual,
        visibility: Visibility::Namespace,
        ..(*service()).clone()
    };
    let model = Fixed { workloads: vec![full_workload()], services: vec![full], ..Fixed::default() };
    let dump = dump(&sources(model, new().1));
    let endpoint = json!({"workloadUid": "Kubernetes//Pod/shop/cart-0", "port": {"80": 8080}, "status": "Unhealthy"});
    assert_eq!(
        dump["services"][0],
        json!({
            "name": "cart",
            "namespace": "shop",
            "hostname": "cart.shop.svc.cluster.local",
            "vips": ["/10.96.0.7"],
            "ports": {"80": 8080},
            "endpoints": {"Kubernetes//Pod/shop/cart-0": endpoint},
            "subjectAltNames": ["spiffe://cluster.local/ns/shop/sa/cart"],
            "waypoint": {"destination": "net1/10.1.0.9", "hboneMtlsPort": 15008},
            "weightedWaypoints": [{"destination": "net1/10.1.0.9", "hboneMtlsPort": 15008, "weight": 7}],
            "loadBalancer": {
                "routingPreferences": ["Network", "Region"],
                "mode": "Failover",
                "healthPolicy": "AllowAll",
            },
            "ipFamilies": "Dual",
            "canonical": true,
            "visibility": "Namespace",
        })
    );
    assert_eq!(dump["stagedServices"]["shop/later.shop.svc.cluster.local"], json!([endpoint]));
}

#[test]
fn a_policy_is_or_of_and_of_or_with_one_key_for_each_text_match() {
    let each = Match {
        namespaces: vec![TextMatch::Exact("shop".into()), TextMatch::Prefix("te".into())],
        not_principals: vec![TextMatch::Suffix("/sa/bad".into()), TextMatch::Presence()],
        service_accounts: vec![ServiceAccount { namespace: "shop".into(), service_account: "web".into() }],
        source_ips: vec!["10.0.0.0/8".into()],
        destination_ports: vec![8080],
        ..Match::default()
    };
    let policy = Policy {
        not_understood: None,
        name: "only-web".into(),
        namespace: "shop".into(),
        scope: "WorkloadSelector",
        action: "Allow",
        dry_run: false,
        rules: vec![vec![vec![each]]],
    };
    let dump = dump(&sources(Fixed { policies: vec![policy], ..Fixed::default() }, new().1));
    assert_eq!(
        dump["policies"][0],
        json!({
            "name": "only-web",
            "namespace": "shop",
            "scope": "WorkloadSelector",
            "action": "Allow",
            "dryRun": false,
            "rules": [[[{
                "namespaces": [{"Exact": "shop"}, {"Prefix": "te"}],
                "notPrincipals": [{"Suffix": "/sa/bad"}, {"Presence": []}],
                "serviceAccounts": [{"namespace": "shop", "serviceAccount": "web"}],
                "sourceIps": ["10.0.0.0/8"],
                "destinationPorts": [8080],
            }]]],
        })
    );
}

#[test]
fn certificates_and_pods_have_their_keys() {
    let (_metrics, telemetry) = new();
    let mut to_cart = hbone(Direction::Outbound);
    to_cart.original_dst = Some("10.96.0.7:80".parse().unwrap());
    let held = [telemetry.open(to_cart), telemetry.open(hbone(Direction::Inbound))];
    let dump = dump(&sources(Fixed::default(), telemetry));
    assert_eq!(
        dump["certificates"][0],
        json!({
            "identity": "spiffe://cluster.local/ns/shop/sa/web",
            "state": "Available",
            "certChain": [{
                "pem": "LS0t",
                "serialNumber": "42",
                "validFrom": "2026-03-01T00:00:00Z",
                "expirationTime": "2026-03-02T00:00:00Z",
            }],
            "rootCerts": [{
                "pem": "LS0t",
                "serialNumber": "42",
                "validFrom": "2026-03-01T00:00:00Z",
                "expirationTime": "2026-03-02T00:00:00Z",
            }],
        })
    );
    assert_eq!(
        dump["workloadState"],
        json!({
            "uid-1": {
                "state": "Up",
                "info": {"name": "web-0", "namespace": "shop", "serviceAccount": "web", "byEbpf": true},
                "connections": {
                    "inbound": [{
                        "src": "10.0.0.1:4000",
                        "originalDst": "cart.shop.svc.cluster.local",
                        "actualDst": "10.0.1.2:8080",
                        "protocol": "HBONE",
                    }],
                    "outbound": [{
                        "src": "10.0.0.1:4000",
                        "originalDst": "10.96.0.7:80",
                        "actualDst": "10.0.1.2:15008",
                        "protocol": "HBONE",
                    }],
                },
            },
            "uid-2": {
                "state": "Pending",
                "info": {"name": "web-1", "namespace": "shop", "serviceAccount": "web", "byEbpf": true},
                "connections": {"inbound": [], "outbound": []},
            },
        })
    );
    drop(held);
}

/// A sink that notes how much is handed to it at once.
struct Measured {
    largest: usize,
    total: usize,
}

impl io::Write for Measured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.largest = self.largest.max(bytes.len());
        self.total += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_mesh_of_many_workloads_is_written_in_small_pieces() {
    /// One workload, many times, so that the test's own memory says nothing.
    #[derive(Clone)]
    struct Many(Workload, usize);
    impl Model for Many {
        fn node(&self) -> Node {
            Node { name: "n1".into(), cluster: "Kubernetes".into(), policies_complete: true, unusable: Vec::new() }
        }

        fn workloads(&self) -> Box<dyn Iterator<Item = &Workload> + '_> {
            Box::new(std::iter::repeat_n(&self.0, self.1))
        }
        fn services(&self) -> Box<dyn Iterator<Item = &Service> + '_> {
            Box::new(std::iter::empty())
        }
        fn endpoints(&self, _: &Service) -> Vec<Endpoint> {
            vec![]
        }
        fn policies(&self) -> Box<dyn Iterator<Item = Policy> + '_> {
            Box::new(std::iter::empty())
        }
        fn staged(&self) -> BTreeMap<String, Vec<Endpoint>> {
            BTreeMap::new()
        }
    }
    let mut sources = sources(Fixed::default(), new().1);
    sources.model = Box::new(|| Box::new(Many(full_workload(), 100_000)));
    let (mut out, began) = (Measured { largest: 0, total: 0 }, Instant::now());
    sources.write(&mut out).unwrap();
    assert!(out.total > 80_000_000 && out.largest < 1024, "{} bytes, {} at once", out.total, out.largest);
    assert!(began.elapsed() < Duration::from_secs(60));
}

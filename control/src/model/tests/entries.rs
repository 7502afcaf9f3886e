//! From ServiceEntries and WorkloadEntries to services and workloads.

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Value, json};
use ztunnel::proto::workload as wire;
use ztunnel::proto::workload::load_balancing::{HealthPolicy, Mode, Scope};

use super::*;

const KEY: &str = "shop/api.example.com";

/// One host, one port, one endpoint.
fn entry(name: &str) -> Value {
    json!({
        "kind": "ServiceEntry",
        "metadata": {"name": name, "namespace": "shop", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {
            "hosts": ["api.example.com"], "addresses": ["192.0.2.1"], "resolution": "STATIC",
            "ports": [{"number": 443, "name": "https", "protocol": "HTTPS"}],
            "endpoints": [{"address": "198.51.100.1"}],
        },
    })
}

fn machine(name: &str, spec: Value) -> Value {
    json!({"kind": "WorkloadEntry", "metadata": {"name": name, "namespace": "shop", "labels": {"app": "vm"}}, "spec": spec})
}

fn with(changes: &[Value]) -> Snapshot {
    let mut cluster = Cluster::new();
    let changed = changes.iter().fold(entry("api"), merged);
    cluster.put(changed);
    cluster.snapshot()
}

fn inline(address: &str) -> String {
    format!("Kubernetes/networking.istio.io/ServiceEntry/shop/api/{address}")
}

fn addresses(service: &wire::Service) -> Vec<String> {
    let text = |a: &wire::NetworkAddress| {
        let ip = match a.address.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(&*a.address).unwrap()),
            _ => IpAddr::from(<[u8; 16]>::try_from(&*a.address).unwrap()),
        };
        a.length.map_or(ip.to_string(), |length| format!("{ip}/{length}"))
    };
    service.addresses.iter().map(text).collect()
}

fn reasons(snapshot: &Snapshot) -> String {
    snapshot.problems.values().map(|text| text.to_string()).collect::<Vec<_>>().join("; ")
}

/// Whoever may write ServiceEntries in one namespace must not take another's connections.
#[test]
fn the_address_of_a_service_is_no_service_entrys() {
    let mut cluster = Cluster::new();
    let claims = json!({"spec": {"addresses": ["10.96.0.9", "192.0.2.1"]}});
    cluster.put(merged(entry("api"), &claims));
    assert_eq!(addresses(&service(&cluster.snapshot(), KEY)), ["10.96.0.9", "192.0.2.1"]);
    cluster.put(json!({
        "kind": "Service", "metadata": {"name": "db", "namespace": "prod"},
        "spec": {"clusterIP": "10.96.0.9", "clusterIPs": ["10.96.0.9"], "ports": [{"port": 443}]},
    }));
    let snapshot = cluster.snapshot();
    assert_eq!(addresses(&service(&snapshot, KEY)), ["192.0.2.1"]);
    assert!(
        reasons(&snapshot).contains("10.96.0.9") && reasons(&snapshot).contains("prod/db"),
        "{}",
        reasons(&snapshot)
    );
    cluster.put(merged(entry("api"), &json!({"spec": {"addresses": [], "resolution": "STATIC"}, "status": {"addresses": [{"value": "10.96.0.9"}, {"value": "240.240.7.7"}]}})));
    assert_eq!(addresses(&service(&cluster.snapshot(), KEY)), ["240.240.7.7"]);
    cluster.put(merged(entry("api"), &claims));
    cluster.objects.services.remove(&ObjectName::new("prod", "db"));
    assert_eq!(addresses(&service(&cluster.snapshot(), KEY)), ["10.96.0.9", "192.0.2.1"]);
}

#[test]
fn an_entry_of_very_many_hosts_ports_and_endpoints_is_bounded() {
    let hosts: Vec<_> = (0..300).map(|n| format!("h{n:03}.example.com")).collect();
    let ports: Vec<_> = (1..=100).map(|n| json!({"number": n, "name": format!("p{n}"), "protocol": "TCP"})).collect();
    let endpoints: Vec<_> =
        (0..2000).map(|n| json!({"address": format!("198.51.{}.{}", n / 250, n % 250 + 1)})).collect();
    let snapshot = with(&[json!({"spec": {"hosts": hosts, "ports": ports, "endpoints": endpoints}})]);
    let of_kind = |kind| snapshot.all(Set::Addresses).filter(|r| r.kind == kind).count();
    assert_eq!((of_kind(crate::model::Kind::Service), of_kind(crate::model::Kind::Workload)), (10, 131));
    assert!(reasons(&snapshot).contains("300 hosts") && reasons(&snapshot).contains("2000 endpoints"));
}

#[test]
fn a_service_entry_becomes_a_service_and_its_endpoints_workloads() {
    let snapshot = with(&[json!({"spec": {
        "ports": [
            {"number": 443, "name": "https", "protocol": "HTTPS"},
            {"number": 80, "name": "http", "protocol": "HTTP", "targetPort": 8080},
            {"number": 53, "name": "dns", "protocol": "UDP"},
        ],
        "subjectAltNames": ["api.example.com", "spiffe://cluster.local/ns/x/sa/y"],
        "endpoints": [
            {"address": "198.51.100.1", "ports": {"https": 8443}, "labels": {"app": "api", "version": "v2"},
             "locality": "r1/z1/s1", "network": "far", "weight": 3, "serviceAccount": "api"},
            {"address": "2001:db8::1"},
        ],
    }})]);
    let port = |service_port, target_port, protocol: wire::AppProtocol| wire::Port {
        service_port,
        target_port,
        app_protocol: protocol as i32,
    };
    assert_eq!(
        service(&snapshot, KEY),
        wire::Service {
            name: "api".into(),
            namespace: "shop".into(),
            hostname: "api.example.com".into(),
            addresses: vec![wire::NetworkAddress { address: vec![192, 0, 2, 1].into(), ..Default::default() }],
            ports: vec![port(443, 443, wire::AppProtocol::Tls), port(80, 8080, wire::AppProtocol::Http11)],
            subject_alt_names: vec!["spiffe://cluster.local/ns/x/sa/y".into()],
            canonical: true,
            ..Default::default()
        }
    );
    let ports = |https| wire::PortList {
        ports: vec![port(80, 8080, wire::AppProtocol::Unknown), port(443, https, wire::AppProtocol::Unknown)],
    };
    assert_eq!(
        workload(&snapshot, &inline("198.51.100.1")),
        wire::Workload {
            uid: inline("198.51.100.1"),
            name: "api".into(),
            namespace: "shop".into(),
            addresses: vec![vec![198, 51, 100, 1].into()],
            network: "far".into(),
            service_account: "api".into(),
            canonical_name: "api".into(),
            canonical_revision: "v2".into(),
            workload_type: wire::WorkloadType::Pod as i32,
            workload_name: "api".into(),
            cluster_id: "Kubernetes".into(),
            services: [(KEY.to_owned(), ports(8443))].into(),
            locality: Some(wire::Locality { region: "r1".into(), zone: "z1".into(), subzone: "s1".into() }),
            capacity: Some(3),
            ..Default::default()
        }
    );
    let plain = workload(&snapshot, &inline("2001:db8::1"));
    assert_eq!((plain.capacity, &plain.services[KEY]), (None, &ports(443)));
    assert_eq!(snapshot.endpoints(KEY).count(), 2);
    assert_eq!(snapshot.resolve(Set::Addresses, "/192.0.2.1").services, [KEY.into()]);
    assert_eq!(reasons(&snapshot), "");
}

#[test]
fn each_property_of_a_service_entry_has_its_effect() {
    type Check = fn(&Snapshot);
    let balance =
        |s: &Snapshot| service(s, KEY).load_balancing.map(|b| (b.mode(), b.health_policy(), b.routing_preference));
    let cases: &[(&str, Value, Check)] = &[
        ("ranges", json!({"spec": {"addresses": ["10.9.0.0/16", "10.8.0.1/32", "fd01::/64"]}}), |s| {
            assert_eq!(addresses(&service(s, KEY)), ["10.9.0.0/16", "10.8.0.1", "fd01::/64"]);
        }),
        ("what is no address", json!({"spec": {"addresses": ["10.9.0.0/33", "192.0.2.1"]}}), |s| {
            assert_eq!(addresses(&service(s, KEY)), ["192.0.2.1"]);
            assert!(reasons(s).contains("10.9.0.0/33"));
        }),
        (
            "DNS without endpoints",
            json!({"spec": {"resolution": "DNS", "endpoints": null, "hosts": ["api.example.com", "b.example.com"]}}),
            |s| {
                for host in ["api.example.com", "b.example.com"] {
                    let w = workload(s, &inline(host));
                    assert_eq!((&*w.hostname, w.addresses.len()), (host, 0));
                    assert_eq!(w.services.keys().collect::<Vec<_>>(), [&format!("shop/{host}")]);
                }
            },
        ),
        (
            "DNS with endpoints by name",
            json!({"spec": {"resolution": "DNS", "endpoints": [{"address": "Backend.example.com"}]}}),
            |s| {
                let w = workload(s, &inline("Backend.example.com"));
                assert_eq!((&*w.hostname, w.addresses.len()), ("backend.example.com", 0));
                assert!(find(s, &inline("api.example.com")).is_none());
            },
        ),
        ("static with endpoints by name", json!({"spec": {"endpoints": [{"address": "backend.example.com"}]}}), |s| {
            assert_eq!(s.endpoints(KEY).count(), 0);
            assert!(reasons(s).contains("backend.example.com"));
        }),
        (
            "an endpoint that is a socket",
            json!({"spec": {"resolution": "DNS", "endpoints": [{"address": "unix:///run/x"}]}}),
            |s| {
                assert_eq!(s.endpoints(KEY).count(), 0);
                assert!(reasons(s).contains("unix:///run/x"));
            },
        ),
        ("a wildcard", json!({"spec": {"hosts": ["*.example.com"]}}), |s| {
            assert_eq!(s.all(Set::Addresses).count(), 0);
            assert!(reasons(s).contains("DYNAMIC_DNS"));
        }),
        (
            "a wildcard that is looked up",
            json!({"spec": {"hosts": ["*.example.com"], "resolution": "DYNAMIC_DNS", "endpoints": null, "addresses": null}}),
            |s| {
                let wild = service(s, "shop/*.example.com");
                assert_eq!((&*wild.hostname, wild.addresses.len()), ("*.example.com", 2));
                assert_eq!(s.endpoints("shop/*.example.com").count(), 0);
            },
        ),
        ("what is no host name", json!({"spec": {"hosts": ["a/b", "*", "api.example.com", "API.example.com"]}}), |s| {
            assert_eq!(
                s.all(Set::Addresses).map(|r| &*r.name).filter(|n| n.starts_with("shop/")).collect::<Vec<_>>(),
                [KEY]
            );
            assert!(reasons(s).contains("\"a/b\"") && reasons(s).contains("\"*\""));
        }),
        (
            "a port out of range",
            json!({"spec": {"ports": [{"number": 70000, "name": "x"}, {"number": 1, "name": "y"}]}}),
            |s| {
                assert_eq!(service(s, KEY).ports.len(), 1);
                assert!(reasons(s).contains("70000"));
            },
        ),
        ("for its own namespace", json!({"spec": {"exportTo": ["."]}}), |s| {
            let s = service(s, KEY);
            assert_eq!((s.visibility(), s.canonical), (wire::Visibility::Namespace, false));
        }),
        ("for its own namespace by name", json!({"spec": {"exportTo": ["shop"]}}), |s| {
            assert_eq!(service(s, KEY).visibility(), wire::Visibility::Namespace);
        }),
        ("for some other namespace", json!({"spec": {"exportTo": ["yard"]}}), |s| {
            assert_eq!(service(s, KEY).visibility(), wire::Visibility::Public);
            assert!(reasons(s).contains("exportTo"));
        }),
        ("for nobody", json!({"spec": {"exportTo": ["~"]}}), |s| assert_eq!(s.all(Set::Addresses).count(), 0)),
        ("no spec at all", json!({"spec": null}), |s| assert_eq!(s.all(Set::Addresses).count(), 0)),
    ];
    for (what, change, check) in cases {
        println!("{what}");
        check(&with(std::slice::from_ref(change)));
    }
    let none = with(&[json!({"spec": {"resolution": "NONE", "addresses": ["10.9.0.0/16"], "endpoints": null}})]);
    assert_eq!(balance(&none), Some((Mode::Passthrough, HealthPolicy::AllowAll, vec![])));
    assert_eq!(none.endpoints(KEY).count(), 0);
    let near = vec![Scope::Network as i32, Scope::Region as i32, Scope::Zone as i32];
    let annotated =
        |value: &str| json!({"metadata": {"annotations": {"networking.istio.io/traffic-distribution": value}}});
    let expected = Some((Mode::Failover, HealthPolicy::OnlyHealthy, near));
    assert_eq!(balance(&with(&[annotated("PreferClose")])), expected);
    let mut cluster = Cluster::new();
    cluster.put(entry("api"));
    assert_eq!(balance(&cluster.snapshot()), None);
    cluster.put(merged(json!({"kind": "Namespace", "metadata": {"name": "shop"}}), &annotated("PreferSameZone")));
    assert_eq!(balance(&cluster.snapshot()), expected, "its namespace says so");
    cluster.put(merged(entry("api"), &annotated("Any")));
    assert_eq!(balance(&cluster.snapshot()), None, "it says otherwise itself");
}

#[test]
fn a_workload_entry_becomes_a_workload() {
    let mut cluster = Cluster::new();
    cluster.put(machine(
        "vm",
        json!({
            "address": "203.0.113.7", "labels": {"version": "v3"}, "locality": "r1/z1", "weight": 5, "network": "far",
            "serviceAccount": "vm",
        }),
    ));
    let uid = "Kubernetes/networking.istio.io/WorkloadEntry/shop/vm";
    let snapshot = cluster.snapshot();
    assert_eq!(
        workload(&snapshot, uid),
        wire::Workload {
            uid: uid.into(),
            name: "vm".into(),
            namespace: "shop".into(),
            addresses: vec![vec![203, 0, 113, 7].into()],
            network: "far".into(),
            service_account: "vm".into(),
            canonical_name: "vm".into(),
            canonical_revision: "v3".into(),
            workload_type: wire::WorkloadType::Pod as i32,
            workload_name: "vm".into(),
            cluster_id: "Kubernetes".into(),
            locality: Some(wire::Locality { region: "r1".into(), zone: "z1".into(), ..Default::default() }),
            capacity: Some(5),
            ..Default::default()
        }
    );
    assert_eq!(snapshot.resolve(Set::Addresses, "far/203.0.113.7").resources.len(), 1);
    type Check = fn(Option<wire::Workload>);
    let cases: &[(&str, Value, Check)] = &[
        ("a host name", json!({"spec": {"address": "vm.example.com"}}), |w| {
            let w = w.unwrap();
            assert_eq!((&*w.hostname, w.addresses.len()), ("vm.example.com", 0));
        }),
        ("nothing to reach it by", json!({"spec": {"address": null}}), |w| assert!(w.is_none())),
        ("what is almost an address", json!({"spec": {"address": "203.0.113.777"}}), |w| assert!(w.is_none())),
        ("the network by its label", json!({"metadata": {"labels": {"topology.istio.io/network": "east"}}}), |w| {
            assert_eq!(w.unwrap().network, "east")
        }),
        ("HBONE of its own", json!({"metadata": {"labels": {"networking.istio.io/tunnel": "http"}}}), |w| {
            let w = w.unwrap();
            assert_eq!((w.tunnel_protocol(), w.native_tunnel), (wire::TunnelProtocol::Hbone, true));
        }),
        ("captured", json!({"metadata": {"annotations": {"ambient.istio.io/redirection": "enabled"}}}), |w| {
            let w = w.unwrap();
            assert_eq!((w.tunnel_protocol(), w.native_tunnel), (wire::TunnelProtocol::Hbone, false));
        }),
        ("canonical labels", json!({"metadata": {"labels": {"service.istio.io/canonical-name": "c"}}}), |w| {
            assert_eq!(w.unwrap().canonical_name, "c")
        }),
        ("being deleted", json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}), |w| {
            assert_eq!(w.unwrap().status(), wire::WorkloadStatus::Healthy)
        }),
    ];
    for (what, change, check) in cases {
        println!("{what}");
        let mut cluster = Cluster::new();
        cluster.put(merged(machine("vm", json!({"address": "203.0.113.7"})), change));
        let snapshot = cluster.snapshot();
        check(find(&snapshot, uid));
        assert_eq!(snapshot.problems.len(), usize::from(find(&snapshot, uid).is_none()));
    }
}

#[test]
fn selectors_choose_among_pods_and_workload_entries() {
    let mut cluster = Cluster::new();
    let selecting = json!({"spec": {
        "workloadSelector": {"labels": {"app": "vm"}}, "endpoints": null,
        "ports": [{"number": 80, "name": "web"}, {"number": 81, "name": "raw", "targetPort": 8100}],
    }});
    cluster.put(merged(entry("api"), &selecting));
    let ports = json!([{"name": "web", "containerPort": 8080}]);
    cluster
        .put(merged(pod("a", json!({"app": "vm"})), &json!({"spec": {"containers": [{"name": "c", "ports": ports}]}})));
    cluster.put(pod("b", json!({"app": "vm"})));
    cluster.put(pod("c", json!({"app": "other"})));
    cluster.put(machine("vm", json!({"address": "203.0.113.7", "ports": {"web": 7000, "named": 7001}})));
    cluster.put(merged(machine("far", json!({"address": "203.0.113.8"})), &json!({"metadata": {"namespace": "yard"}})));
    // A Service selects WorkloadEntries as it does pods.
    cluster.put(merged(
        cart(json!([{"name": "x", "port": 1, "targetPort": "named"}, {"name": "y", "port": 2, "targetPort": "none"}, {"port": 3}])),
        &json!({"spec": {"selector": {"app": "vm"}}}),
    ));
    let snapshot = cluster.snapshot();
    let of_vm = |snapshot: &Snapshot, key: &str| -> Option<Vec<(u32, u32)>> {
        let vm = workload(snapshot, "Kubernetes/networking.istio.io/WorkloadEntry/shop/vm");
        Some(vm.services.get(key)?.ports.iter().map(|p| (p.service_port, p.target_port)).collect())
    };
    assert_eq!(super::ports(&snapshot, "a", KEY), Some(vec![(80, 8080), (81, 8100)]));
    assert_eq!(super::ports(&snapshot, "b", KEY), Some(vec![(80, 80), (81, 8100)]));
    assert_eq!(super::ports(&snapshot, "c", KEY), None);
    assert_eq!(of_vm(&snapshot, KEY), Some(vec![(80, 7000), (81, 8100)]));
    assert_eq!(of_vm(&snapshot, CART), Some(vec![(1, 7001), (3, 3)]));
    assert_eq!(snapshot.endpoints(KEY).count(), 3);
    // Its labels can also be said in the spec.
    cluster.put(merged(machine("vm", json!({"address": "203.0.113.7", "labels": {"app": "till"}})), &json!({})));
    assert_eq!(of_vm(&cluster.snapshot(), KEY), None);
    // The selector counts, not what is written beside it; an empty one selects nobody.
    cluster
        .put(merged(merged(entry("api"), &selecting), &json!({"spec": {"endpoints": [{"address": "198.51.100.1"}]}})));
    let snapshot = cluster.snapshot();
    assert_eq!(snapshot.endpoints(KEY).count(), 2);
    assert!(reasons(&snapshot).contains("workloadSelector"));
    cluster.put(merged(merged(entry("api"), &selecting), &json!({"spec": {"workloadSelector": {"labels": null}}})));
    assert_eq!(cluster.snapshot().endpoints(KEY).count(), 0);
}

#[test]
fn records_of_entries_name_the_policies_that_select_them() {
    let mut cluster = Cluster::new();
    cluster.put(machine("vm", json!({"address": "203.0.113.7"})));
    cluster.put(merged(
        entry("api"),
        &json!({"spec": {"endpoints": [{"address": "198.51.100.1", "labels": {"app": "vm"}}]}}),
    ));
    cluster.snapshot();
    cluster.put(policy("AuthorizationPolicy", "shop/p", json!({"selector": {"matchLabels": {"app": "vm"}}})));
    let snapshot = cluster.snapshot();
    for uid in ["Kubernetes/networking.istio.io/WorkloadEntry/shop/vm".to_owned(), inline("198.51.100.1")] {
        assert_eq!(workload(&snapshot, &uid).authorization_policies, ["shop/p"]);
    }
}

#[test]
fn of_several_that_give_one_host_the_service_counts_else_the_oldest() {
    let mut cluster = Cluster::new();
    let host = "cart.shop.svc.cluster.local";
    let named = |name: &str, namespace: &str, day: u8| {
        let created = format!("2026-01-{day:02}T00:00:00Z");
        merged(
            entry(name),
            &json!({
                "metadata": {"namespace": namespace, "creationTimestamp": created},
                "spec": {"hosts": [host], "workloadSelector": {"labels": {"app": "cart"}}, "endpoints": null},
            }),
        )
    };
    let giver = |cluster: &mut Cluster, namespace: &str| {
        let given = service(&cluster.snapshot(), &format!("{namespace}/{host}"));
        (given.name, given.canonical)
    };
    cluster.put(pod("a", json!({"app": "cart"})));
    cluster.put(named("young", "shop", 9));
    assert_eq!(giver(&mut cluster, "shop"), ("young".into(), true));
    cluster.put(named("old", "shop", 5));
    assert_eq!(giver(&mut cluster, "shop"), ("old".into(), true));
    assert!(reasons(&cluster.snapshot()).contains("ServiceEntry shop/old, which is older"));
    // Of several namespaces the oldest is the one for all others.
    cluster.put(named("oldest", "yard", 1));
    assert_eq!(giver(&mut cluster, "shop"), ("old".into(), false));
    assert_eq!(giver(&mut cluster, "yard"), ("oldest".into(), true));
    // It keeps to itself what is for its own namespace alone.
    cluster.put(merged(named("oldest", "yard", 1), &json!({"spec": {"exportTo": ["."]}})));
    assert_eq!((giver(&mut cluster, "shop").1, giver(&mut cluster, "yard").1), (true, false));
    // The Service takes its name over, endpoints and all, and gives it back.
    cluster.put(named("oldest", "yard", 1));
    cluster.put(cart(json!([{"port": 80, "targetPort": 8080}])));
    assert_eq!(giver(&mut cluster, "shop"), ("cart".into(), true));
    assert_eq!(giver(&mut cluster, "yard"), ("oldest".into(), false));
    let snapshot = cluster.snapshot();
    assert_eq!(ports(&snapshot, "a", CART), Some(vec![(80, 8080)]));
    assert!(reasons(&snapshot).contains("given by Service shop/cart"));
    cluster.objects.services.clear();
    assert_eq!(giver(&mut cluster, "shop"), ("old".into(), false));
    assert_eq!(ports(&cluster.snapshot(), "a", CART), Some(vec![(443, 443)]));
    cluster.objects.service_entries.remove(&ObjectName::new("shop", "old"));
    assert_eq!(giver(&mut cluster, "shop"), ("young".into(), false));
    cluster.objects.service_entries.clear();
    let snapshot = cluster.snapshot();
    assert!(snapshot.get(Set::Addresses, CART).is_none() && ports(&snapshot, "a", CART).is_none());
    assert_eq!(reasons(&snapshot), "");
}

#[test]
fn hosts_without_an_address_get_one_that_stays() {
    let mut cluster = Cluster::new();
    let bare = |name: &str, host: &str, day: usize| {
        let created = format!("2026-01-01T{:02}:{:02}:00Z", day / 60, day % 60);
        merged(
            entry(name),
            &json!({"metadata": {"creationTimestamp": created}, "spec": {"hosts": [host], "addresses": null}}),
        )
    };
    let host = |index: usize| format!("h{index}.example.com");
    let of = |snapshot: &Snapshot, index: usize| addresses(&service(snapshot, &format!("shop/{}", host(index))));
    // Enough for some to lead to the same address.
    let count = 1_000;
    for index in 0..count {
        cluster.put(bare(&format!("e{index}"), &host(index), index));
    }
    let first = cluster.snapshot();
    let all: BTreeSet<_> = (0..count).flat_map(|index| of(&first, index)).collect();
    assert_eq!(all.len(), 2 * count, "no two have the same");
    assert!(all.iter().all(|a| a.starts_with("240.240.") || a.starts_with("2001:2::")), "{all:?}");
    assert_eq!(
        first.resolve(Set::Addresses, &format!("/{}", of(&first, 7)[0])).services,
        ["shop/h7.example.com".into()]
    );
    // Whatever comes later, and in another order after a restart.
    let mut again = Cluster::new();
    for index in (0..count + 50).rev() {
        again.put(bare(&format!("e{index}"), &host(index), index));
        cluster.put(bare(&format!("e{index}"), &host(index), index));
        if index % 100 == 0 {
            again.update();
        }
    }
    let (grown, restarted) = (cluster.snapshot(), again.snapshot());
    for index in 0..count {
        assert_eq!((of(&grown, index), of(&restarted, index)), (of(&first, index), of(&first, index)));
    }
    assert_eq!(grown.changes_since(&restarted, Set::Addresses).count(), 0);
}

#[test]
fn addresses_that_are_set_aside_already_are_used_and_given_to_nobody_else() {
    let mut cluster = Cluster::new();
    let bare = json!({"spec": {"addresses": null}});
    cluster.put(merged(entry("api"), &bare));
    let ours = addresses(&service(&cluster.snapshot(), KEY));
    // Another entry holds the address that ours leads to.
    let status =
        json!({"addresses": [{"value": ours[0], "host": "other.example.com"}, {"value": "240.240.9.9", "host": "x"}]});
    let mut other = merged(merged(entry("other"), &bare), &json!({"spec": {"hosts": ["other.example.com"]}}));
    other["status"] = status;
    cluster.put(other);
    let snapshot = cluster.snapshot();
    assert_eq!(addresses(&service(&snapshot, "shop/other.example.com")), [ours[0].as_str()]);
    assert!(!addresses(&service(&snapshot, KEY)).contains(&ours[0]));
    for change in [
        json!({"metadata": {"labels": {"networking.istio.io/enable-autoallocate-ip": "false"}}}),
        json!({"spec": {"resolution": "NONE", "endpoints": null}}),
    ] {
        assert_eq!(addresses(&service(&with(&[bare.clone(), change]), KEY)), [""; 0]);
    }
}

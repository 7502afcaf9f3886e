//! Tables: objects in, what proxies are told out. One file for each kind of object; here is what they share.

mod endpoints;
mod entries;
mod pods;
mod policies;
mod services;
mod updates;

use std::sync::Arc;

use apistub::merged;
use serde_json::{Value, json};
use ztunnel::identity::TrustDomain;
use ztunnel::kubernetes::Kind;
use ztunnel::manifests::{EntryKind, ObjectName, Objects, SecurityKind, SecurityPolicy};
use ztunnel::proto::workload as wire;

use super::{Decoded, Model, ModelSettings, Set, Snapshot};
use crate::kubernetes;

pub(crate) const CART: &str = "shop/cart.shop.svc.cluster.local";

pub(crate) struct Cluster {
    pub(crate) objects: Objects,
    pub(super) model: Model,
    /// The same objects as the API server's source keeps them: what is served must be the same.
    pub(super) pruned: Model,
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
            "ServiceEntry" => drop(o.service_entries.insert(key, Arc::new(serde_json::from_value(object).unwrap()))),
            "WorkloadEntry" => drop(o.workload_entries.insert(key, Arc::new(serde_json::from_value(object).unwrap()))),
            "PeerAuthentication" => drop(o.peer_authentications.insert(key, Arc::new(security_policy(object)))),
            "AuthorizationPolicy" => drop(o.authorization_policies.insert(key, Arc::new(security_policy(object)))),
            other => panic!("{other}"),
        }
    }

    pub(super) fn node(&mut self, name: &str, labels: Value) {
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
            (8, 0) => drop(self.objects.service_entries.remove(&key)),
            (8, how) => {
                let host = ["one.example", "n1.shop.svc.cluster.local", "*.example"][usize::from(how % 3)];
                let resolution = ["STATIC", "STATIC", "DNS", "NONE", "DNS", "DYNAMIC_DNS"][usize::from(how)];
                self.put(json!({
                "kind": "ServiceEntry",
                "metadata": {"name": name, "namespace": if how == 1 { "yard" } else { "shop" },
                    "creationTimestamp": format!("2026-01-0{}T00:00:00Z", 1 + which)},
                "spec": {
                    "hosts": [host, "two.example"],
                    "addresses": if how == 4 { json!(["192.0.2.0/24", "x"]) } else { json!([]) },
                    "ports": [{"number": 80, "name": "web", "targetPort": 8000 + u32::from(how)}],
                    "resolution": resolution,
                    "workloadSelector": if how % 2 == 0 { json!({"labels": {"app": format!("n{}", how % 3)}}) } else { Value::Null },
                    "endpoints": if how == 1 { json!([{"address": "192.0.2.1", "labels": {"app": "n1"}}, {"address": "-"}]) } else { json!([]) },
                },
            }));
            }
            (9, 0) => drop(self.objects.workload_entries.remove(&key)),
            (9, how) => self.put(json!({
                "kind": "WorkloadEntry", "metadata": {"name": name, "namespace": "shop", "labels": {"app": format!("n{}", how % 3)}},
                "spec": {"address": if how == 4 { "x_y:".into() } else { format!("192.0.2.{}", how % 3) }, "weight": how, "ports": {"http": 70 + u32::from(how)}},
            })),
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
    objects.service_entries.values().for_each(|o| keep(Kind::Entry(EntryKind::ServiceEntry), json!(**o)));
    objects.workload_entries.values().for_each(|o| keep(Kind::Entry(EntryKind::WorkloadEntry), json!(**o)));
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

pub(super) fn named(snapshot: &Snapshot, pod: &str) -> Vec<String> {
    workload(snapshot, &format!("Kubernetes//Pod/shop/{pod}")).authorization_policies
}

pub(super) fn settings() -> ModelSettings {
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

pub(super) fn find(snapshot: &Snapshot, uid: &str) -> Option<wire::Workload> {
    match snapshot.get(Set::Workloads, uid)?.decode()? {
        Decoded::Workload(workload) => Some(*workload),
        other => panic!("{other:?}"),
    }
}

pub(super) fn workload(snapshot: &Snapshot, uid: &str) -> wire::Workload {
    find(snapshot, uid).unwrap_or_else(|| panic!("no {uid} in {snapshot:?}"))
}

pub(super) fn service(snapshot: &Snapshot, key: &str) -> wire::Service {
    match snapshot.get(Set::Addresses, key).and_then(|r| r.decode()) {
        Some(Decoded::Service(service)) => *service,
        other => panic!("{other:?}"),
    }
}

pub(super) fn ports(snapshot: &Snapshot, pod: &str, service: &str) -> Option<Vec<(u32, u32)>> {
    let workload = workload(snapshot, &format!("Kubernetes//Pod/shop/{pod}"));
    let list = workload.services.get(service)?;
    Some(list.ports.iter().map(|p| (p.service_port, p.target_port)).collect())
}

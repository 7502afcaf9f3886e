//! Policies in the records of pods, and their status.

use serde_json::{Value, json};
use ztunnel::manifests::{ObjectKey, ObjectName};

use super::*;
use crate::model::Change;
use crate::policy::State;

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

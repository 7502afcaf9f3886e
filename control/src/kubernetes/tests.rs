//! What control reads and keeps of an API server, and what it may do there.

use std::sync::Arc;
use std::time::Duration;

use apistub::{ApiStub, Rights, wait_for};
use serde_json::{Value, json};
use tokio::sync::watch;
use ztunnel::identity::TrustDomain;
use ztunnel::kubernetes::{Api, Kind, Source};
use ztunnel::manifests::{Object, ObjectKey, ObjectName, SecurityKind};

use super::{Candidate, read, source};
use crate::ca::CaSettings;
use crate::ca_secret::CaSecret;
use crate::metrics::Metrics;
use crate::model::tests::Cluster;
use crate::policy_status::PolicyConditions;
use crate::root_config_maps::RootConfigMaps;
use crate::serve::LEASE;
use crate::tokens::Reviews;
use crate::tokens::tests::Issuer;

const SYSTEM: &str = "understory-system";
const PEERS: &str = "/apis/security.istio.io/v1/peerauthentications";
const POLICIES: &str = "/apis/security.istio.io/v1/authorizationpolicies";

#[tokio::test]
async fn policies_of_an_unknown_version_are_stood_in_for() {
    let server = ApiStub::start().await;
    server.state().serve_kind("security.istio.io", "v3", "authorizationpolicies");
    server.state().put("/apis/security.istio.io/v3/authorizationpolicies", policy("p", json!({"x": 1})));
    let source = source(&api(&server));
    source.health().complete().await;
    let objects = source.objects().borrow().clone();
    let reason = objects.authorization_policies[&ObjectName::new("shop", "p")].spec.clone().unwrap_err();
    assert!(reason.contains("\"v3\" is not known"), "{reason}");
    assert_eq!(objects.problems().len(), 1);
}

#[tokio::test]
async fn control_asks_for_what_its_role_allows_and_for_all_of_it() {
    let server = ApiStub::start().await;
    for plural in ["authorizationpolicies", "peerauthentications"] {
        server.state().serve_kind("security.istio.io", "v1", plural);
    }
    for plural in ["serviceentries", "workloadentries"] {
        server.state().serve_kind("networking.istio.io", "v1", plural);
    }
    server.state().put("/api/v1/namespaces", json!({"metadata": {"name": "a"}}));
    server.state().put("/api/v1/namespaces", json!({"metadata": {"name": "b"}}));
    server.state().put("/api/v1/configmaps", json!({"metadata": {"name": "istio-ca-root-cert", "namespace": "b"}}));
    let api = api(&server);
    let source = source(&api);
    wait_connected(&source).await;
    let mut cluster = Cluster::new();
    for (kind, path) in [("AuthorizationPolicy", POLICIES), ("PeerAuthentication", PEERS)] {
        server.state().put(path, policy("p", json!({})));
        cluster.put(crate::model::tests::policy(kind, "shop/p", json!({})));
    }
    let (_publish, snapshots) = watch::channel(cluster.snapshot());
    let (metrics, leads) = (Metrics::new(), watch::channel(true).1);
    let told = tokio::spawn(PolicyConditions { api: api.clone(), snapshots, leads, metrics }.keep());
    let asked = |text: &str| server.state().requests.iter().any(|request| request.starts_with(text));
    wait_for(|| asked("PATCH /apis/security.istio.io/v1/namespaces/shop/authorizationpolicies/p/status")).await;
    wait_for(|| asked("PATCH /apis/security.istio.io/v1/namespaces/shop/peerauthentications/p/status")).await;
    told.abort();
    // A kind that is missing: then it matters whether the server has started.
    server.state().answers.insert("/apis/security.istio.io/v1".into(), (404, json!({"kind": "Status", "code": 404})));
    assert_eq!(Kind::Security(SecurityKind::AuthorizationPolicy).place(&api).await, Ok(None));
    let dir = std::env::temp_dir().join(format!("understory-roles-{}", std::process::id()));
    let secret =
        CaSecret { api: api.clone(), namespace: SYSTEM.into(), name: "understory-ca".into(), dir: dir.clone() };
    let ca = secret.open(CaSettings {
        dir: dir.clone(),
        trust_domain: TrustDomain::default(),
        longest_life: Duration::from_secs(3600),
        backdate: Duration::from_secs(60),
    });
    let ca = Arc::new(ca.await.unwrap());
    let reviewed = Reviews::new(api.clone()).verify(&Issuer::p256().token("a", "b", None), "istio-ca").await;
    assert!(reviewed.is_err(), "the fake says nothing of it");
    let candidate = Candidate::new(api.clone(), SYSTEM.into(), LEASE, "me".into());
    let (leads, objects, metrics) = (candidate.leads(), source.objects(), Metrics::new());
    let led = tokio::spawn(candidate.run(std::future::pending()));
    let kept = tokio::spawn(RootConfigMaps { api, ca, objects, leads, metrics }.keep());
    wait_for(|| asked("PATCH /api/v1/namespaces/b/configmaps/") && asked("POST /api/v1/namespaces/a/configmaps")).await;
    wait_for(|| asked("PUT /apis/coordination.k8s.io/")).await;
    led.abort();
    kept.abort();
    std::fs::remove_dir_all(dir).unwrap();
    let template = include_str!("../../../deploy/helm/templates/control-rbac.yaml");
    let rights = Rights::parse(&template.replace("{{ .Release.Namespace }}", SYSTEM));
    rights.must_fit(&server.state().requests);
}

#[test]
fn only_what_the_mesh_looks_at_is_kept() {
    let meta = |more: Value| {
        let mut meta = json!({
            "name": "a", "namespace": "shop", "uid": "u", "resourceVersion": "7", "labels": {"app": "x"},
            "managedFields": [{"manager": "kubectl", "operation": "Apply", "fieldsV1": {}}],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{}", "ambient.istio.io/redirection": "enabled"},
        });
        meta.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        meta
    };
    let owners = json!({"ownerReferences": [
        {"apiVersion": "v1", "kind": "ReplicaSet", "name": "r", "uid": "1", "controller": true},
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "c", "uid": "2"},
    ]});
    let whole = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": meta(owners),
        "spec": {
            "nodeName": "n", "serviceAccountName": "sa", "volumes": [{"name": "v"}],
            "containers": [
                {"name": "c", "image": "i", "env": [{"name": "SECRET", "value": "x"}], "ports": [{"name": "http", "containerPort": 80}, {"containerPort": 81}]},
                {"name": "d", "image": "j"},
            ],
        },
        "status": {"phase": "Running", "podIP": "10.1.0.1", "podIPs": [{"ip": "10.1.0.1"}], "hostIP": "10.0.0.1",
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}, {"type": "Initialized", "status": "True"}]},
    });
    assert_eq!(Kind::Pod.key_of(&whole), Some(ObjectKey::Pod(ObjectName::new("shop", "a"))));
    let Ok(Object::Pod(pod)) = read(Kind::Pod, "v1", whole) else { panic!() };
    assert_eq!(
        serde_json::to_value(&*pod).unwrap(),
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {
                "name": "a", "namespace": "shop", "uid": "u", "labels": {"app": "x"},
                "annotations": {"ambient.istio.io/redirection": "enabled"},
                "ownerReferences": [{"apiVersion": "", "kind": "ReplicaSet", "name": "r", "uid": "", "controller": true}],
            },
            "spec": {"nodeName": "n", "serviceAccountName": "sa", "containers": [{"name": "c", "ports": [{"name": "http", "containerPort": 80}]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.1.0.1"}], "conditions": [{"type": "Ready", "status": "True"}]},
        })
    );
    let labels = json!({"labels": {"topology.kubernetes.io/zone": "z", "beat": "1"}});
    let Ok(Object::Node(node)) =
        read(Kind::Node, "v1", json!({"kind": "PartialObjectMetadata", "metadata": meta(labels)}))
    else {
        panic!()
    };
    assert_eq!(serde_json::to_value(&node.metadata.labels).unwrap(), json!({"topology.kubernetes.io/zone": "z"}));
    let kind = Kind::Security(SecurityKind::AuthorizationPolicy);
    let when = json!({"creationTimestamp": "2026-01-01T00:00:00Z", "generation": 3, "annotations": {"istio.io/dry-run": "true"}});
    let Ok(Object::AuthorizationPolicy(policy)) =
        read(kind, "v1", json!({"metadata": meta(when), "spec": {"action": "DENY"}, "status": {}}))
    else {
        panic!()
    };
    assert_eq!((policy.metadata.generation, policy.metadata.creation_timestamp.is_some()), (Some(3), true));
    assert_eq!(policy.metadata.annotations.as_ref().unwrap()["istio.io/dry-run"], "true");
}

pub(crate) fn api(server: &ApiStub) -> Api {
    Api::unprotected(server.address).unwrap()
}

fn policy(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

/// Until nothing fails any more.
async fn wait_connected(source: &Source) {
    let health = source.health();
    wait_for(|| health.detail().lines().all(|line| line.ends_with("the cluster has no such kind"))).await;
}

//! What becomes of what an API server says, and of its silence.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use ztunnel::identity::TrustDomain;
use ztunnel::manifests::{Object, ObjectKey, ObjectName, Objects, SecurityKind};

use super::fake::FakeServer;
use super::{Api, Candidate, Kind, Source, read};
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
const PODS: &str = "/api/v1/pods";
const PEERS: &str = "/apis/security.istio.io/v1/peerauthentications";
const POLICIES: &str = "/apis/security.istio.io/v1/authorizationpolicies";

#[tokio::test]
async fn objects_are_read_in_pages_and_followed() {
    let server = FakeServer::start().await;
    for name in ["a", "b", "c", "d", "e"] {
        server.state().put(PODS, pod(name, "10.1.0.1"));
    }
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let mut objects = source.objects();
    assert_eq!(names(&objects.borrow()), ["a", "b", "c", "d", "e"]);
    wait_connected(&source).await;
    server.state().put(PODS, pod("f", "10.1.0.6"));
    server.state().put(PODS, pod("a", "10.1.0.9"));
    server.state().delete(PODS, "shop/b");
    let now = wait(&mut objects, |o| names(o) == ["a", "c", "d", "e", "f"]).await;
    assert_eq!(address(&now, "a"), "10.1.0.9");
    let requests = server.state().requests.clone();
    assert!(requests.iter().any(|r| r.starts_with(PODS) && r.contains("fieldSelector=status.phase%21%3DSucceeded")));
}

#[tokio::test]
async fn after_missed_changes_all_is_read_again_and_what_stayed_is_the_same() {
    let server = FakeServer::start().await;
    for name in ["a", "b", "c"] {
        server.state().put(PODS, pod(name, "10.1.0.1"));
    }
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let mut objects = source.objects();
    let before = objects.borrow_and_update().clone();
    wait_connected(&source).await;
    {
        let mut state = server.state();
        state.end_watches();
        state.delete(PODS, "shop/b");
        state.put(PODS, pod("c", "10.1.0.3"));
        state.compact();
    }
    let now = wait(&mut objects, |o| names(o) == ["a", "c"]).await;
    assert_eq!(address(&now, "c"), "10.1.0.3");
    assert!(Arc::ptr_eq(now.pod("shop", "a").unwrap(), before.pod("shop", "a").unwrap()));
    wait_connected(&source).await;
}

#[tokio::test]
async fn while_the_server_is_away_what_is_known_stays_and_it_is_said() {
    let server = FakeServer::start().await;
    server.state().put(PODS, pod("a", "10.1.0.1"));
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let mut objects = source.objects();
    wait_connected(&source).await;
    let (health, of) = (source.health(), objects.clone());
    let server = server
        .restart(async move |state| {
            wait_for(|| health.detail().contains("Pod: as known ") && health.detail().contains("cannot be reached"))
                .await;
            assert_eq!(names(&of.borrow()), ["a"]);
            state.lock().unwrap().put(PODS, pod("b", "10.1.0.2"));
        })
        .await;
    wait(&mut objects, |o| names(o) == ["a", "b"]).await;
    wait_connected(&source).await;
    // It went on from where it was.
    let lists = server.state().requests.iter().filter(|r| r.starts_with(PODS) && !r.contains("watch=")).count();
    assert_eq!(lists, 1);
}

#[tokio::test]
async fn nothing_is_whole_before_the_server_has_started() {
    let server = FakeServer::start().await;
    server.state().is_starting(true);
    let source = Source::start(&Api::at(server.address));
    let health = source.health();
    wait_for(|| health.detail().contains("AuthorizationPolicy: not read yet") && health.detail().contains("500")).await;
    server.state().put(POLICIES, policy("p", json!({})));
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    server.state().is_starting(false);
    health.complete().await;
    assert_eq!(source.objects().borrow().authorization_policies.len(), 1, "no moment without it");
}

#[tokio::test]
async fn kinds_that_the_cluster_lacks_are_named_and_taken_up_when_they_come() {
    let server = FakeServer::start().await;
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let detail = source.health().detail();
    assert!(detail.contains("PeerAuthentication: the cluster has no such kind"), "{detail}");
    let mut objects = source.objects();
    server.state().put(POLICIES, policy("p", json!({"action": "DENY"})));
    server.state().serve_kind("security.istio.io", "v1beta1", "authorizationpolicies");
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    let now = wait(&mut objects, |o| !o.authorization_policies.is_empty()).await;
    let held = &now.authorization_policies[&ObjectName::new("shop", "p")];
    assert_eq!(held.spec, Ok(json!({"action": "DENY"})));
}

#[tokio::test]
async fn policies_of_an_unknown_version_are_stood_in_for() {
    let server = FakeServer::start().await;
    server.state().serve_kind("security.istio.io", "v3", "authorizationpolicies");
    server.state().put("/apis/security.istio.io/v3/authorizationpolicies", policy("p", json!({"x": 1})));
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let objects = source.objects().borrow().clone();
    let reason = objects.authorization_policies[&ObjectName::new("shop", "p")].spec.clone().unwrap_err();
    assert!(reason.contains("\"v3\" is not known"), "{reason}");
    assert_eq!(objects.problems().len(), 1);
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_named_and_leaves_the_others_alone() {
    let server = FakeServer::start().await;
    let bad = |name: &str| json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"nodeName": 7}});
    server.state().put(PODS, bad("a"));
    server.state().put(PODS, pod("b", "10.1.0.2"));
    server.state().put(PODS, json!({"metadata": {"namespace": "shop"}}));
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    let broken = json!({"metadata": {"name": "p", "namespace": "shop", "labels": 7}, "spec": {}});
    server.state().put(POLICIES, broken);
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let mut objects = source.objects();
    let now = objects.borrow_and_update().clone();
    assert_eq!(names(&now), ["b"]);
    assert!(now.authorization_policies[&ObjectName::new("shop", "p")].spec.is_err(), "never open");
    let key = |p: &ztunnel::manifests::Problem| p.object.as_ref().map(ToString::to_string);
    let mut keys: Vec<_> = now.problems().iter().map(key).collect();
    keys.sort();
    let expected = [None, Some("AuthorizationPolicy shop/p".to_owned()), Some("Pod shop/a".to_owned())];
    assert_eq!(keys, expected);
    wait_connected(&source).await;
    // One that was good stays; one that becomes good is taken.
    server.state().put(PODS, bad("b"));
    server.state().put(PODS, pod("a", "10.1.0.1"));
    server.state().put(POLICIES, policy("p", json!({})));
    let holds = |o: &Objects| {
        let problems: Vec<_> = o.problems().iter().filter_map(key).collect();
        problems == ["Pod shop/b"] && names(o) == ["a", "b"]
    };
    let now = wait(&mut objects, holds).await;
    assert_eq!(address(&now, "b"), "10.1.0.2");
    assert_eq!(now.authorization_policies[&ObjectName::new("shop", "p")].spec, Ok(json!({})));
}

#[tokio::test]
async fn a_kind_that_goes_for_a_moment_takes_no_policy_away() {
    let server = FakeServer::start().await;
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    server.state().put(POLICIES, policy("p", json!({})));
    let source = Source::start(&Api::at(server.address));
    source.health().complete().await;
    let mut objects = source.objects();
    wait_connected(&source).await;
    let gone = (404, json!({"kind": "Status", "code": 404, "message": "gone"}));
    {
        let mut state = server.state();
        state.answers.insert("/apis/security.istio.io".into(), gone);
        state.compact();
        state.end_watches();
    }
    let asked =
        |server: &FakeServer| server.state().requests.iter().filter(|r| *r == "/apis/security.istio.io").count();
    let before = asked(&server);
    wait_for(|| asked(&server) > before + 1).await;
    assert_eq!(objects.borrow().authorization_policies.len(), 1);
    server.state().answers.clear();
    server.state().delete(POLICIES, "shop/p");
    wait(&mut objects, |o| o.authorization_policies.is_empty()).await;
}

#[tokio::test]
async fn control_asks_for_what_its_role_allows_and_for_all_of_it() {
    let server = FakeServer::start().await;
    for plural in ["authorizationpolicies", "peerauthentications"] {
        server.state().serve_kind("security.istio.io", "v1", plural);
    }
    server.state().put("/api/v1/namespaces", json!({"metadata": {"name": "a"}}));
    server.state().put("/api/v1/namespaces", json!({"metadata": {"name": "b"}}));
    server.state().put("/api/v1/configmaps", json!({"metadata": {"name": "istio-ca-root-cert", "namespace": "b"}}));
    let api = Api::at(server.address);
    let source = Source::start(&api);
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
    assert_eq!(Kind::ALL[6].place(&api).await, Ok(None));
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
    let all = granted();
    let mut used = std::collections::BTreeSet::new();
    for request in &server.state().requests {
        let wanted = wanted(request);
        let by: Vec<_> = all.iter().filter(|grant| grant.allows(&wanted)).collect();
        assert!(!by.is_empty(), "{request} is not allowed: {wanted:?}");
        used.extend(by);
    }
    let unused: Vec<_> = all.iter().filter(|grant| !used.contains(grant)).collect();
    assert!(unused.is_empty(), "never asked for: {unused:?}");
}

/// One verb on one resource, or on what is none: allowed by a role, or asked for. Empty is any name, any namespace.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    verb: String,
    group: String,
    resource: String,
    namespace: String,
    name: String,
    path: String,
}

impl Grant {
    fn allows(&self, wanted: &Self) -> bool {
        let fits = |of: &str, asked: &str| of.is_empty() || of == asked;
        let path = match self.path.strip_suffix('*') {
            Some(prefix) => wanted.path.starts_with(prefix),
            None => self.path == wanted.path,
        };
        (&self.verb, &self.group, &self.resource) == (&wanted.verb, &wanted.group, &wanted.resource)
            && fits(&self.namespace, &wanted.namespace)
            && fits(&self.name, &wanted.name)
            && path
    }
}

/// What the chart gives control.
fn granted() -> Vec<Grant> {
    let text =
        include_str!("../../../deploy/helm/templates/control-rbac.yaml").replace("{{ .Release.Namespace }}", SYSTEM);
    let mut all = Vec::new();
    for document in text.split("\n---\n") {
        let document: Value = serde_yaml_ng::from_str(document).unwrap();
        let namespace = document["metadata"]["namespace"].as_str().unwrap_or_default();
        for rule in document["rules"].as_array().into_iter().flatten() {
            let list = |key: &str| -> Vec<String> {
                rule[key].as_array().into_iter().flatten().map(|v| v.as_str().unwrap().to_owned()).collect()
            };
            let or_any = |list: Vec<String>| if list.is_empty() { vec![String::new()] } else { list };
            for verb in list("verbs") {
                for path in list("nonResourceURLs") {
                    all.push(Grant { verb: verb.clone(), path, ..Grant::default() });
                }
                for (group, resource) in
                    list("apiGroups").iter().flat_map(|g| list("resources").into_iter().map(|r| (g.clone(), r)))
                {
                    for name in or_any(list("resourceNames")) {
                        all.push(Grant {
                            verb: verb.clone(),
                            group: group.clone(),
                            resource: resource.clone(),
                            namespace: namespace.to_owned(),
                            name,
                            path: String::new(),
                        });
                    }
                }
            }
        }
    }
    all
}

/// What a request needs, as the API server sees it.
fn wanted(request: &str) -> Grant {
    let (method, target) = request.split_once(' ').unwrap_or(("GET", request));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (list, namespace, name) = super::fake::locate(path);
    let parts: Vec<&str> = list.split('/').collect();
    let (group, resource) = match parts[..] {
        ["", "api", _, resource] => ("", resource.to_owned()),
        ["", "apis", group, _, resource] if path.ends_with("/status") => (group, format!("{resource}/status")),
        ["", "apis", group, _, resource] => (group, resource.to_owned()),
        _ => return Grant { verb: "get".into(), path: path.into(), ..Grant::default() },
    };
    let verb = match method {
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        _ if query.contains("watch=true") => "watch",
        _ if name.is_empty() => "list",
        _ => "get",
    };
    // Kubernetes takes the selector of one name for that name.
    let selected = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D"));
    let name = selected.map_or(name, str::to_owned);
    let path = String::new();
    Grant { verb: verb.into(), group: group.into(), resource, namespace, name, path }
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
    let (key, Ok(Object::Pod(pod))) = read(Kind::Pod, "v1", whole) else { panic!() };
    assert_eq!(key, Some(ObjectKey::Pod(ObjectName::new("shop", "a"))));
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
    let (_, Ok(Object::Node(node))) =
        read(Kind::Node, "v1", json!({"kind": "PartialObjectMetadata", "metadata": meta(labels)}))
    else {
        panic!()
    };
    assert_eq!(serde_json::to_value(&node.metadata.labels).unwrap(), json!({"topology.kubernetes.io/zone": "z"}));
    let kind = Kind::Security(SecurityKind::AuthorizationPolicy);
    let when = json!({"creationTimestamp": "2026-01-01T00:00:00Z", "generation": 3, "annotations": {"istio.io/dry-run": "true"}});
    let (_, Ok(Object::AuthorizationPolicy(policy))) =
        read(kind, "v1", json!({"metadata": meta(when), "spec": {"action": "DENY"}, "status": {}}))
    else {
        panic!()
    };
    assert_eq!((policy.metadata.generation, policy.metadata.creation_timestamp.is_some()), (Some(3), true));
    assert_eq!(policy.metadata.annotations.as_ref().unwrap()["istio.io/dry-run"], "true");
}

fn pod(name: &str, address: &str) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "shop", "uid": format!("uid-{name}")},
        "spec": {"nodeName": "node-a", "containers": []},
        "status": {"phase": "Running", "podIP": address},
    })
}

fn policy(name: &str, spec: Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "shop"}, "spec": spec})
}

fn names(objects: &Objects) -> Vec<&str> {
    objects.pods.keys().map(|key| &*key.name).collect()
}

fn address(objects: &Objects, pod: &str) -> String {
    objects.pod("shop", pod).unwrap().status.clone().unwrap().pod_ip.unwrap()
}

async fn wait(objects: &mut watch::Receiver<Arc<Objects>>, holds: impl Fn(&Objects) -> bool) -> Arc<Objects> {
    let found = tokio::time::timeout(LIMIT, objects.wait_for(|objects| holds(objects))).await;
    found.expect("it comes to hold").unwrap().clone()
}

/// Until nothing fails any more.
async fn wait_connected(source: &Source) {
    let health = source.health();
    wait_for(|| health.detail().lines().all(|line| line.ends_with("the cluster has no such kind"))).await;
}

async fn wait_for(holds: impl Fn() -> bool) {
    let look = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LIMIT, look).await.expect("it comes to hold");
}

const LIMIT: Duration = Duration::from_secs(60);

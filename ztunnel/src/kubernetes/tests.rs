//! What becomes of what an API server says, and of its silence.

use std::sync::Arc;
use std::time::Duration;

use apistub::{ApiStub, wait_for};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::{Api, Kind, Source, Wanted};
use crate::manifests::{Object, ObjectName, Objects, SecurityKind, SecurityPolicy};

const PODS: &str = "/api/v1/pods";
const POLICIES: &str = "/apis/security.istio.io/v1/authorizationpolicies";

#[tokio::test]
async fn objects_are_read_in_pages_and_followed() {
    let server = ApiStub::start().await;
    for name in ["a", "b", "c", "d", "e"] {
        server.state().put(PODS, pod(name, "10.1.0.1"));
    }
    let source = source(&server);
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
    assert!(requests.iter().any(|r| r.starts_with(PODS) && r.contains("fieldSelector=status.phase%21%3DFailed")));
}

#[tokio::test]
async fn after_missed_changes_all_is_read_again_and_what_stayed_is_the_same() {
    let server = ApiStub::start().await;
    for name in ["a", "b", "c"] {
        server.state().put(PODS, pod(name, "10.1.0.1"));
    }
    let source = source(&server);
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
    let server = ApiStub::start().await;
    server.state().put(PODS, pod("a", "10.1.0.1"));
    let source = source(&server);
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
    let server = ApiStub::start().await;
    server.state().is_starting(true);
    let source = source(&server);
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
    let server = ApiStub::start().await;
    let source = source(&server);
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
async fn an_object_that_cannot_be_read_is_named_and_leaves_the_others_alone() {
    let server = ApiStub::start().await;
    let bad = |name: &str| json!({"metadata": {"name": name, "namespace": "shop"}, "spec": {"nodeName": 7}});
    server.state().put(PODS, bad("a"));
    server.state().put(PODS, pod("b", "10.1.0.2"));
    server.state().put(PODS, json!({"metadata": {"namespace": "shop"}}));
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    let broken = json!({"metadata": {"name": "p", "namespace": "shop", "labels": 7}, "spec": {}});
    server.state().put(POLICIES, broken);
    let source = source(&server);
    source.health().complete().await;
    let mut objects = source.objects();
    let now = objects.borrow_and_update().clone();
    assert_eq!(names(&now), ["b"]);
    assert!(now.authorization_policies[&ObjectName::new("shop", "p")].spec.is_err(), "never open");
    let key = |p: &crate::manifests::Problem| p.object.as_ref().map(ToString::to_string);
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
    // What became good while nothing was heard is no problem any more.
    {
        let mut state = server.state();
        state.end_watches();
        state.put(PODS, pod("b", "10.1.0.3"));
        state.compact();
    }
    wait(&mut objects, |o| o.problems().iter().filter_map(key).count() == 0 && address(o, "b") == "10.1.0.3").await;
}

#[tokio::test]
async fn a_kind_that_goes_for_a_moment_takes_no_policy_away() {
    let server = ApiStub::start().await;
    server.state().serve_kind("security.istio.io", "v1", "authorizationpolicies");
    server.state().put(POLICIES, policy("p", json!({})));
    let source = source(&server);
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
    let asked = |server: &ApiStub| server.state().requests.iter().filter(|r| *r == "/apis/security.istio.io").count();
    let before = asked(&server);
    wait_for(|| asked(&server) > before + 1).await;
    assert_eq!(objects.borrow().authorization_policies.len(), 1);
    server.state().answers.clear();
    server.state().delete(POLICIES, "shop/p");
    wait(&mut objects, |o| o.authorization_policies.is_empty()).await;
}

fn source(server: &ApiStub) -> Source {
    let wanted = vec![
        Wanted::all(Kind::Pod).with_fields("status.phase!=Failed"),
        Wanted::all(Kind::Security(SecurityKind::PeerAuthentication)),
        Wanted::all(Kind::Security(SecurityKind::AuthorizationPolicy)),
    ];
    Source::start(&Api::unprotected(server.address).unwrap(), wanted, read)
}

fn read(kind: Kind, _: &str, value: Value) -> Result<Object, String> {
    match kind {
        Kind::Pod => {
            serde_json::from_value::<Pod>(value).map(|pod| Object::Pod(Arc::new(pod))).map_err(|e| e.to_string())
        }
        Kind::Security(kind) => {
            let metadata = serde_json::from_value(value["metadata"].clone()).map_err(|e| e.to_string())?;
            Ok(Object::policy(kind, SecurityPolicy { metadata, spec: Ok(value["spec"].clone()) }))
        }
        other => unreachable!("{other:?} was not wanted"),
    }
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

const LIMIT: Duration = Duration::from_secs(60);

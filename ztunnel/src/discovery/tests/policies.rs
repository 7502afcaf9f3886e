//! Policies as they come: before, after or without what they belong to, and in forms that cannot be taken.

use super::server::Resource;
use super::*;
use crate::policy::{Connection, Verdict, evaluate};

/// A pod of this node that names policies.
fn local_pod(policies: &[&str]) -> Resource {
    let mut pod = pod("a", "10.0.0.1");
    let workload = pod.workload_mut();
    workload.node = "node-a".into();
    workload.authorization_policies = policies.iter().map(|p| (*p).to_owned()).collect();
    pod
}

fn verdict(mesh: &Mesh) -> Verdict {
    let snapshot = mesh.load();
    let local = snapshot.local("shop", "a", "default").expect("the pod's record");
    let connection = Connection {
        identity: None,
        source: "10.0.0.9".parse().unwrap(),
        destination: "10.0.0.1:8080".parse().unwrap(),
    };
    let verdict = evaluate(&local.policies, &connection).verdict;
    // What is ready for a pod of this node is what would be made for one elsewhere.
    let pod = &local.workload;
    let made = snapshot.policies().applying(&pod.common.namespace, &pod.common.policies);
    assert_eq!(verdict, evaluate(&made, &connection).verdict);
    verdict
}

fn result(mesh: &Mesh) -> &'static str {
    verdict(mesh).as_str()
}

#[tokio::test]
async fn nothing_is_decided_before_the_first_answer_on_policies_even_if_it_is_empty() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    stream.send(Kind::Address, vec![local_pod(&[])], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "policies_missing");
    stream.send(Kind::Authorization, vec![], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "allowed");
}

#[tokio::test]
async fn a_policy_may_come_before_its_workload_after_it_or_never_and_come_again() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let mut stream = open_with(&mut server, vec![local_pod(&["shop/p", "shop/never"])]).await;
    assert_eq!(result(&mesh), "unknown_policy");
    stream.send(Kind::Authorization, vec![authorization("p").selected()], &[]).await;
    stream.acked().await;
    assert!(verdict(&mesh).to_string().contains("policy shop/never"));
    stream.send(Kind::Address, vec![local_pod(&["shop/p"])], &[]).await;
    stream.acked().await;
    // It has no rules: it allows nothing.
    assert_eq!(result(&mesh), "not_allowed");
    stream.send(Kind::Authorization, vec![], &["shop/p"]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "unknown_policy");
    stream.send(Kind::Authorization, vec![authorization("p").selected()], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "not_allowed");
    stream.send(Kind::Address, vec![local_pod(&[])], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "allowed");
    // Under the same name, for the whole namespace.
    stream.send(Kind::Authorization, vec![authorization("p").of_namespace()], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "not_allowed");
    stream.send(Kind::Authorization, vec![authorization("p").selected()], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "allowed");
}

#[tokio::test]
async fn a_policy_that_cannot_be_taken_is_refused_and_denies_until_it_can_or_goes() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let mut stream = open_with(&mut server, vec![local_pod(&[])]).await;
    let mut misnamed = authorization("p");
    misnamed.name = "shop/other".into();
    for bad in [Resource::garbage("shop/x"), misnamed, authorization("y").with_port(70_000)] {
        let name = bad.name.clone();
        assert_eq!(result(&mesh), "allowed");
        stream.send(Kind::Authorization, vec![bad], &[]).await;
        let nack = stream.request().await.error_detail.expect("a refusal");
        assert!(nack.message.contains(&name), "{}", nack.message);
        let verdict = verdict(&mesh);
        assert!(verdict.is_undecided() && verdict.to_string().contains(&name), "{verdict}");
        stream.send(Kind::Authorization, vec![], &[&name]).await;
        stream.acked().await;
    }
    // What is held of it goes on.
    stream.send(Kind::Authorization, vec![authorization("z").of_namespace()], &[]).await;
    stream.acked().await;
    stream.send(Kind::Authorization, vec![authorization("z").of_namespace().with_port(70_000)], &[]).await;
    assert!(stream.request().await.error_detail.is_some());
    assert_eq!(result(&mesh), "not_allowed");
}

/// While nobody was told, a policy of some workloads became one of the namespace, or the other way round: in no order of
/// the answers does it apply to nobody in between.
#[tokio::test]
async fn a_policy_whose_scope_changed_while_the_stream_was_down_applies_all_the_time() {
    let selected = || (local_pod(&["shop/p"]), authorization("p").selected());
    let of_namespace = || (local_pod(&[]), authorization("p").of_namespace());
    for (before, after) in [(selected(), of_namespace()), (of_namespace(), selected())] {
        for records_first in [true, false] {
            let mut server = Server::start().await;
            let (_discovery, mesh) = start(&server, settings());
            let mut stream = open(&mut server).await;
            stream.answer(vec![before.0.clone()], vec![before.1.clone()]).await;
            assert_eq!(result(&mesh), "not_allowed");
            stream.end(Err(Status::unavailable("gone"))).await;

            let mut stream = open(&mut server).await;
            let mut answers = [(Kind::Address, after.0.clone()), (Kind::Authorization, after.1.clone())];
            if !records_first {
                answers.reverse();
            }
            let [(kind, resource), last] = answers;
            // In parts, of which only the last says that the answer is whole.
            stream.send_part(kind, vec![], &[], true).await;
            stream.send(kind, vec![resource], &[]).await;
            assert!(stream.is_silent().await, "{kind:?} waits for the other");
            assert_eq!(result(&mesh), "not_allowed");
            stream.send_part(last.0, vec![last.1], &[], true).await;
            assert!(stream.is_silent().await, "the answer goes on");
            stream.send(last.0, vec![], &[]).await;
            for _ in 0..4 {
                assert_eq!(stream.request().await.error_detail, None);
            }
            assert_eq!(result(&mesh), "not_allowed");
            let local = mesh.load().local("shop", "a", "default").expect("the pod's record").workload.clone();
            assert_eq!(local.common.policies.len(), after.0.clone().workload_mut().authorization_policies.len());
        }
    }
}

/// A control plane cuts what is long into parts: some of the policies are not all of them.
#[tokio::test]
async fn a_part_of_the_first_answer_decides_nothing() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    stream.send(Kind::Address, vec![local_pod(&[])], &[]).await;
    stream.acked().await;
    stream.send_part(Kind::Authorization, vec![authorization("q").selected()], &[], true).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "policies_missing");
    assert!(!discovery.is_synced());
    stream.send(Kind::Authorization, vec![authorization("p").of_namespace()], &[]).await;
    stream.acked().await;
    assert_eq!(result(&mesh), "not_allowed");
    assert!(discovery.is_synced());
}

/// One policy takes the place of another, and the control plane needs several messages to say so.
#[tokio::test]
async fn a_change_in_several_messages_takes_effect_at_once() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    stream.answer(vec![local_pod(&[])], vec![authorization("p").of_namespace()]).await;
    assert_eq!(result(&mesh), "not_allowed");
    stream.send_part(Kind::Authorization, vec![], &["shop/p"], true).await;
    stream.send_part(Kind::Address, vec![local_pod(&["shop/q"])], &[], true).await;
    assert!(stream.is_silent().await, "the change goes on");
    assert_eq!(result(&mesh), "not_allowed");
    stream.send(Kind::Authorization, vec![authorization("q").selected()], &[]).await;
    for _ in 0..3 {
        assert_eq!(stream.request().await.error_detail, None);
    }
    assert_eq!(result(&mesh), "not_allowed");
    let held = mesh.load();
    assert!(held.policies().get("shop/p").is_none() && held.policies().get("shop/q").is_some());
}

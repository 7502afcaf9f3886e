//! What a verdict and a change cost, counted: no allocation where a connection is allowed, bounded memory, and a change
//! that costs the change. (Times are in the bench.)

use std::net::SocketAddr;
use std::sync::Arc;

use counting::{allocated, held};
use ztunnel::identity::Identity;
use ztunnel::mesh::{Mesh, convert_workload};
use ztunnel::policy::{self, Connection};
use ztunnel::proto::{security, workload};

mod counting;

fn exact(text: String) -> security::StringMatch {
    security::StringMatch { match_type: Some(security::string_match::MatchType::Exact(text)) }
}

/// An ALLOW of two rules, each with callers and ports. The policies of `shop` apply to the pod, the others to nobody
/// here.
fn policy(number: usize, namespace: &str) -> security::Authorization {
    let rule = |part: usize| {
        let callers = (0..3).map(|i| exact(format!("cluster.local/ns/team-{number}/sa/caller-{part}-{i}")));
        let from = security::Match { principals: callers.collect(), ..Default::default() };
        let to = security::Match { destination_ports: vec![8080, 9090], ..Default::default() };
        let clause = |one| security::Clause { matches: vec![one] };
        security::Rule { clauses: vec![clause(from), clause(to)] }
    };
    security::Authorization {
        name: format!("allow-{number}"),
        namespace: namespace.into(),
        scope: security::Scope::Namespace as i32,
        rules: vec![rule(0), rule(1)],
        ..Default::default()
    }
}

fn converted(message: security::Authorization) -> policy::Policy {
    policy::convert(&message.into()).expect("a good policy")
}

/// A pod of this node, `applying` policies that apply to it and so many in all.
fn mesh(applying: usize, all: usize) -> Arc<Mesh> {
    let mesh = Mesh::new("n1", "Kubernetes");
    mesh.update(|update| {
        let pod = workload::Workload {
            uid: "Kubernetes//Pod/shop/web".into(),
            name: "web".into(),
            namespace: "shop".into(),
            node: "n1".into(),
            ..Default::default()
        };
        let pod = convert_workload(&pod, update.strings()).expect("a good workload");
        update.workload(pod);
        update.policies_complete();
    });
    mesh.update(|update| {
        for number in 0..all {
            let namespace = if number < applying { "shop".to_owned() } else { format!("team-{}", number % 100) };
            update.policy(converted(policy(number, &namespace)));
        }
    });
    mesh
}

#[test]
fn a_verdict_that_allows_allocates_nothing() {
    let mesh = mesh(20, 1000);
    let connection = |caller: &str| Connection {
        identity: Some(caller.parse::<Identity>().expect("an identity")),
        source: [10, 0, 0, 7].into(),
        destination: SocketAddr::from(([10, 0, 1, 9], 8080)),
    };
    let allowed = connection("spiffe://cluster.local/ns/team-19/sa/caller-1-2");
    let judge = |connection: &Connection| {
        let snapshot = mesh.load();
        let local = snapshot.local("shop", "web", "default").expect("the pod");
        policy::evaluate(&local.policies, connection)
    };
    // What a thread needs once.
    judge(&allowed);
    let (_, before) = allocated();
    let decision = judge(&allowed);
    let (_, after) = allocated();
    assert!(decision.verdict.is_allowed(), "{}", decision.verdict);
    assert_eq!(after - before, 0, "allocations");
    let refused = judge(&connection("spiffe://cluster.local/ns/nobody/sa/none")).verdict;
    assert!(refused.to_string().starts_with("not allowed by any of 20 policies"), "{refused}");
}

#[test]
fn ten_thousand_policies_need_at_most_20_mb_and_a_change_of_one_costs_little() {
    let before = held();
    let mesh = mesh(20, 10_000);
    let after = held();
    let bytes = after - before;
    assert!(bytes < 20_000_000, "{bytes} bytes");
    assert_eq!(mesh.load().policies().len(), 10_000);

    let change = |number: usize, namespace: &str, port: u32| {
        let mut message = policy(number, namespace);
        message.rules[0].clauses[1].matches[0].destination_ports = vec![port];
        let policy = converted(message);
        let (bytes, count) = allocated();
        mesh.update(|update| assert!(update.policy(policy)));
        (allocated().0 - bytes, allocated().1 - count)
    };
    // One of another namespace, then one that applies to the pod here.
    for (number, namespace) in [(5000, "team-0"), (7, "shop")] {
        for port in 1..=3 {
            let (bytes, allocations) = change(number, namespace, port);
            assert!(bytes < 64_000 && allocations < 300, "{namespace}: {bytes} bytes in {allocations} allocations");
        }
    }
    let (_, before) = allocated();
    mesh.update(|update| assert!(!update.policy(converted(policy(6000, "team-0")))));
    assert!(allocated().1 - before < 300, "the same policy again is no change");
}

//! What a verdict on a connection costs, and what policies cost in memory: measured in this process, without a cluster.

use std::fs;
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use ztunnel::identity::Identity;
use ztunnel::mesh::{Mesh, convert_workload};
use ztunnel::policy::{self, Connection, Decision};
use ztunnel::proto::security::{self, Action, Scope};
use ztunnel::proto::workload;

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::paths::Path;

/// Policies that apply to the pod that is connected to: of the mesh, of its namespace, and named by it.
const APPLYING: usize = 20;
pub const NAMES: [&str; 4] =
    ["policy_verdict_ns_1000", "policy_verdict_ns_10000", "policies_10k_mb", "policy_change_us_10000"];

/// It is the mesh's path that has policies.
fn wants(cli: &Cli, name: &str) -> bool {
    cli.paths.contains(&Path::Mesh) && cli.wants(&[name])
}

pub fn memory(cli: &Cli, figures: &mut Figures) {
    if wants(cli, "policies_10k_mb") {
        let before = resident();
        let mesh = mesh(10_000);
        figures.add(Path::Mesh, "policies_10k_mb", Unit::Mb, (resident() - before) / 1e6);
        drop(mesh);
    }
}

pub fn round(cli: &Cli, figures: &mut Figures) {
    for (name, all) in [("policy_verdict_ns_1000", 1000), ("policy_verdict_ns_10000", 10_000)] {
        if wants(cli, name) {
            let mesh = mesh(all);
            let allowed = connection(APPLYING - 1);
            figures.add(Path::Mesh, name, Unit::Ns, verdict_ns(&mesh, &allowed, Decision::is_allowed));
            let refused = verdict_ns(&mesh, &connection(all), |decision| !decision.is_allowed());
            eprintln!("  (a refusal, with the rule that came closest: {refused:.0} ns)");
        }
    }
    if wants(cli, "policy_change_us_10000") {
        let mesh = mesh(10_000);
        let changes = 1000;
        let start = Instant::now();
        for change in 0..changes {
            // Every other one applies to the pod.
            let mut message = message(if change % 2 == 0 { APPLYING - 2 } else { 5000 + change });
            message.rules[0].clauses[1].matches[0].destination_ports.push(change as u32 + 1);
            let policy = policy::convert(&message.into()).expect("a good policy");
            mesh.update(|update| update.policy(policy));
        }
        let each = start.elapsed().as_secs_f64() * 1e6 / changes as f64;
        figures.add(Path::Mesh, "policy_change_us_10000", Unit::Us, each);
    }
}

/// One verdict, from the look at the mesh on.
fn verdict_ns(mesh: &Mesh, connection: &Connection, expected: fn(&Decision) -> bool) -> f64 {
    let judge = || {
        let snapshot = mesh.load();
        let local = snapshot.local("shop", "web", "default").expect("the pod");
        policy::evaluate(&local.policies, black_box(connection))
    };
    assert!(expected(&judge()), "{:?}", judge());
    let times = 100_000;
    let start = Instant::now();
    for _ in 0..times {
        black_box(judge());
    }
    start.elapsed().as_nanos() as f64 / f64::from(times)
}

/// A pod, and so many policies, of which [`APPLYING`] apply to it.
fn mesh(all: usize) -> Arc<Mesh> {
    let mesh = Mesh::new("n1", "Kubernetes");
    mesh.update(|update| {
        let named = (0..APPLYING).map(message).filter(|m| m.scope == Scope::WorkloadSelector as i32);
        let pod = workload::Workload {
            uid: "Kubernetes//Pod/shop/web".into(),
            name: "web".into(),
            namespace: "shop".into(),
            node: "n1".into(),
            authorization_policies: named.map(|m| format!("{}/{}", m.namespace, m.name)).collect(),
            ..Default::default()
        };
        let pod = convert_workload(&pod, update.strings()).expect("a good workload");
        update.workload(pod);
        update.policies_complete();
        for number in 0..all {
            update.policy(policy::convert(&message(number).into()).expect("a good policy"));
        }
    });
    mesh
}

/// Two rules of three callers and two ports each; one in five denies.
fn message(number: usize) -> security::Authorization {
    let exact = |text| security::StringMatch { match_type: Some(security::string_match::MatchType::Exact(text)) };
    let rule = |part: usize| {
        let callers = (0..3).map(|i| exact(caller(number, part, i)));
        let from = security::Match { principals: callers.collect(), ..Default::default() };
        let to = security::Match { destination_ports: vec![8080, 9090], ..Default::default() };
        let clause = |one| security::Clause { matches: vec![one] };
        security::Rule { clauses: vec![clause(from), clause(to)] }
    };
    let (namespace, scope) = match number {
        0..APPLYING => ("shop".to_owned(), [Scope::Namespace, Scope::Global, Scope::WorkloadSelector][number % 3]),
        other => (format!("team-{}", other % 100), Scope::Namespace),
    };
    security::Authorization {
        name: format!("policy-{number}"),
        namespace,
        scope: scope as i32,
        action: if number.is_multiple_of(5) { Action::Deny } else { Action::Allow } as i32,
        rules: vec![rule(0), rule(1)],
        ..Default::default()
    }
}

fn caller(number: usize, part: usize, index: usize) -> String {
    format!("cluster.local/ns/team-{number}/sa/caller-{part}-{index}")
}

/// From the last caller that a policy lists.
fn connection(policy: usize) -> Connection {
    let identity: Identity = format!("spiffe://{}", caller(policy, 1, 2)).parse().expect("an identity");
    Connection {
        identity: Some(identity),
        source: [10, 0, 0, 7].into(),
        destination: SocketAddr::from(([10, 0, 1, 9], 8080)),
    }
}

/// Bytes of this process that are in memory.
fn resident() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kilobytes: f64 = line.and_then(|rest| rest.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap_or(0.0);
    kilobytes * 1024.0
}

//! What a stream is told, checked against a peer that keeps what it is told: step by step, and for any course of events.

use std::collections::{BTreeMap, BTreeSet};

use apistub::merged;
use proptest::prelude::*;
use prost::Message;
use serde_json::json;
use ztunnel::proto::discovery::DeltaDiscoveryRequest;
use ztunnel::proto::{security, workload};

use super::session::in_order;
use super::subscription::{Answer, Subscription};
use crate::model::tests::{CART, Cluster, cart, pod, policy};
use crate::model::{Feature, Set, Snapshot};

/// The other end of a stream.
#[derive(Debug, Default)]
struct Peer {
    held: BTreeMap<String, String>,
    /// Names that were answered, and whether there was something.
    answers: BTreeMap<String, bool>,
}

impl Peer {
    fn take(&mut self, answer: &Answer) {
        for resource in answer.resources.iter().chain(&answer.narrowed) {
            let wire = resource.to_wire(Set::Addresses, answer.aliases, |_| true);
            assert_eq!(wire.aliases.is_empty(), !answer.aliases || resource.aliases.is_empty());
            self.answers.extend(wire.aliases.into_iter().map(|alias| (alias, true)));
            self.answers.insert(wire.name.clone(), true);
            self.held.insert(wire.name, wire.version);
        }
        for name in &answer.removed {
            self.held.remove(name);
            self.answers.insert(name.clone(), false);
        }
    }

    fn names(&self) -> Vec<&str> {
        self.held.keys().map(|name| name.rsplit('/').next().unwrap_or(name)).collect()
    }
}

#[test]
fn a_wildcard_stream_is_told_everything_and_then_what_changes() {
    let mut cluster = shop();
    let (mut stream, answer) = open(&[], &[], &[], &cluster.snapshot());
    let mut peer = Peer::default();
    peer.take(&answer);
    assert_eq!(peer.names(), ["a", "b", "cart.shop.svc.cluster.local"]);
    assert!(!answer.aliases && answer.removed.is_empty());
    assert!(stream.push(&cluster.snapshot()).is_none());

    cluster.put(pod("c", json!({})));
    cluster.objects.pods.remove(&ztunnel::manifests::ObjectName::new("shop", "b"));
    let answer = stream.push(&cluster.snapshot()).unwrap();
    assert_eq!(told(&answer), (vec!["c"], vec!["Kubernetes//Pod/shop/b"]));
}

#[test]
fn a_stream_that_comes_again_is_told_only_the_difference() {
    let mut cluster = shop();
    let snapshot = cluster.snapshot();
    let mut held: Vec<(String, String)> =
        snapshot.all(Set::Addresses).map(|r| (r.name.to_string(), r.version_text())).collect();
    let pairs = |held: &[(String, String)]| held.iter().map(|(n, v)| (n.clone(), v.clone())).collect::<Vec<_>>();
    let (_, answer) = open(&[], &[], &pairs(&held), &snapshot);
    assert_eq!(told(&answer), (vec![], vec![]));
    held[0].1 = "0123456789abcdef".into();
    held[1].1 = "not ours".into();
    held.push(("Kubernetes//Pod/shop/gone".into(), "0000000000000001".into()));
    let (_, answer) = open(&[], &[], &pairs(&held), &snapshot);
    assert_eq!(told(&answer), (vec!["a", "b"], vec!["Kubernetes//Pod/shop/gone"]));
}

#[test]
fn on_demand_starts_with_the_nodes_own_workloads() {
    let mut cluster = shop();
    cluster.put(merged(pod("far", json!({})), &json!({"spec": {"nodeName": "node-b"}})));
    let (mut stream, answer) = open(&["*"], &["*"], &[], &cluster.snapshot());
    assert_eq!(told(&answer), (vec!["a", "b"], vec![]));
    assert!(answer.aliases);
    // New ones come unasked, others do not.
    cluster.put(pod("c", json!({})));
    cluster.put(merged(pod("far2", json!({})), &json!({"spec": {"nodeName": "node-b"}})));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["c"], vec![]));
}

#[test]
fn any_name_brings_what_it_stands_for() {
    for (name, expected) in [
        ("/10.96.0.7", vec!["a", "b", "cart.shop.svc.cluster.local"]),
        (CART, vec!["a", "b", "cart.shop.svc.cluster.local"]),
        ("/10.1.0.1", vec!["a"]),
        ("/fd00::2", vec!["b"]),
        ("Kubernetes//Pod/shop/b", vec!["b"]),
    ] {
        let mut cluster = shop();
        let (mut stream, answer) = open_at("elsewhere", &["*"], &["*"], &[], &cluster.snapshot());
        assert_eq!(told(&answer), (vec![], vec![]));
        let answer = stream.take(&request(&[name], &[], &[])).unwrap().unwrap();
        assert_eq!(told(&answer), (expected.clone(), vec![]), "{name}");
        // Asking again is answered again: at least with what the name itself is.
        let again = stream.take(&request(&[name], &[], &[])).unwrap().unwrap();
        assert!(!again.resources.is_empty() && again.removed.is_empty(), "{name}");
    }
}

#[test]
fn an_unknown_name_is_said_to_be_unknown_and_pushed_when_it_comes() {
    let mut cluster = shop();
    let (mut stream, _) = open_at("elsewhere", &["*"], &["*"], &[], &cluster.snapshot());
    let asked = ["/10.96.0.9", "shop/later.shop.svc.cluster.local", "/10.1.0.9", "Kubernetes//Pod/shop/late"];
    let answer = stream.take(&request(&asked, &[], &[])).unwrap().unwrap();
    assert_eq!((answer.resources.len(), answer.removed), (0, asked.map(String::from).to_vec()));

    cluster.put(merged(pod("late", json!({"app": "later"})), &json!({"status": {"podIP": "10.1.0.9"}})));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["late"], vec![]));
    cluster.put(merged(pod("late2", json!({"app": "later"})), &json!({"status": {"podIP": "10.1.0.10"}})));
    assert!(stream.push(&cluster.snapshot()).is_none());
    let later =
        json!({"metadata": {"name": "later"}, "spec": {"selector": {"app": "later"}, "clusterIP": "10.96.0.9"}});
    cluster.put(merged(cart(json!([{"port": 80}])), &later));
    let answer = stream.push(&cluster.snapshot()).unwrap();
    assert_eq!(told(&answer), (vec!["late", "late2", "later.shop.svc.cluster.local"], vec![]));
}

#[test]
fn an_address_in_a_range_of_a_service_brings_the_service() {
    let mut cluster = shop();
    let (mut stream, _) = open(&["*", "/10.9.1.1"], &["*"], &[], &cluster.snapshot());
    let range = |addresses: serde_json::Value| {
        json!({
            "kind": "ServiceEntry", "metadata": {"name": "api", "namespace": "shop"},
            "spec": {"hosts": ["api.example.com"], "addresses": addresses, "resolution": "STATIC", "endpoints": [{"address": "192.0.2.7"}]},
        })
    };
    cluster.put(range(json!(["10.9.0.0/16", "fd09::/64"])));
    let answer = stream.push(&cluster.snapshot()).unwrap();
    let (both, service) = (vec!["192.0.2.7", "api.example.com"], "shop/api.example.com");
    assert_eq!((told(&answer).0, told(&answer).1), (both, vec![]));
    let wire = answer.resources[1].to_wire(Set::Addresses, true, |_| true);
    assert_eq!((wire.name.as_str(), wire.aliases), (service, vec!["/10.9.0.0/16".into(), "/fd09::/64".into()]));
    // The same for who asks later, and hears that nobody has the address itself.
    let all = ["a", "b", "192.0.2.7", "api.example.com"];
    for name in ["/10.9.1.2", "/fd09::7", "/10.9.0.0/16"] {
        let removed = if name.ends_with("/16") { vec![] } else { vec![name] };
        let answer = open(&["*", name], &["*"], &[], &cluster.snapshot()).1;
        assert_eq!((told(&answer).0.as_slice(), told(&answer).1), (&all[..], removed));
        let answer = stream.take(&request(&[name], &[], &[])).unwrap().unwrap();
        assert_eq!(told(&answer).1, told(&open(&["*", name], &["*"], &[], &cluster.snapshot()).1).1);
    }
    let elsewhere = json!({"spec": {"nodeName": "node-b"}, "status": {"podIP": "10.9.1.3"}});
    cluster.put(merged(pod("c", json!({})), &elsewhere));
    // A pod in the range is told without it.
    let answer = open(&["*", "/10.9.1.3"], &["*"], &[], &cluster.snapshot()).1;
    assert_eq!(told(&answer), (vec!["a", "b", "c"], vec![]));
    // Out of its range the names stand for nothing again.
    cluster.put(range(json!(["10.8.0.0/16"])));
    let gone = ["/10.9.0.0/16", "/10.9.1.1", "/10.9.1.2", "/fd09::7"];
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()).1, gone);
}

#[test]
fn what_goes_away_is_removed_by_its_name_and_by_the_name_it_was_asked_by() {
    let mut cluster = shop();
    let (mut stream, _) = open_at("elsewhere", &["*"], &["*"], &[], &cluster.snapshot());
    stream.take(&request(&["/10.1.0.1", "/10.96.0.7"], &[], &[])).unwrap();
    cluster.objects.pods.remove(&ztunnel::manifests::ObjectName::new("shop", "a"));
    let answer = stream.push(&cluster.snapshot()).unwrap();
    assert_eq!(told(&answer), (vec![], vec!["/10.1.0.1", "Kubernetes//Pod/shop/a"]));
    // The address goes to another pod.
    cluster.put(merged(pod("new", json!({})), &json!({"status": {"podIP": "10.1.0.1"}})));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["new"], vec![]));
    cluster.objects.services.remove(&ztunnel::manifests::ObjectName::new("shop", "cart"));
    let answer = stream.push(&cluster.snapshot()).unwrap();
    assert_eq!(told(&answer), (vec!["b"], vec!["/10.96.0.7", CART]));
}

#[test]
fn a_name_that_is_let_go_brings_no_further_changes_and_nothing_is_taken_for_deleted() {
    let mut cluster = shop();
    let (mut stream, _) = open_at("elsewhere", &["*"], &["*"], &[], &cluster.snapshot());
    stream.take(&request(&["/10.96.0.7", "/10.1.0.2"], &[], &[])).unwrap();
    assert!(stream.take(&request(&[], &["/10.96.0.7"], &[])).unwrap().is_none());
    let sick = json!({"status": {"conditions": []}});
    cluster.put(merged(merged(pod("a", json!({"app": "cart"})), &addresses(1)), &sick));
    assert!(stream.push(&cluster.snapshot()).is_none());
    cluster.put(merged(merged(pod("b", json!({"app": "cart"})), &addresses(2)), &sick));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["b"], vec![]));
    // In one request with a new name, as clients of istiod must do it.
    let answer = stream.take(&request(&["/10.1.0.1"], &["/10.1.0.2"], &[])).unwrap().unwrap();
    assert_eq!(told(&answer), (vec!["a"], vec![]));
}

#[test]
fn an_on_demand_stream_that_comes_again_gets_the_difference_and_what_it_still_waits_for() {
    let mut cluster = shop();
    let snapshot = cluster.snapshot();
    let version = |name: &str| (name.to_owned(), snapshot.get(Set::Addresses, name).unwrap().version_text());
    let held = [version("Kubernetes//Pod/shop/a"), version(CART), version("Kubernetes//Pod/shop/b")];
    // Names and versions in one request, as our proxy does.
    let (_, answer) = open_at("elsewhere", &["*", "/10.96.0.7", "/10.9.9.9"], &["*"], &held, &snapshot);
    assert_eq!(told(&answer), (vec![], vec!["/10.9.9.9"]));
    // As ztunnel does: what is held with its version, what is awaited without.
    let mut some = held[..2].to_vec();
    some.extend([("/10.1.0.1".to_owned(), String::new()), ("/10.9.9.9".to_owned(), String::new())]);
    some.push(("Kubernetes//Pod/shop/gone".into(), "1".into()));
    let (mut stream, answer) = open_at("elsewhere", &["*"], &["*"], &some, &snapshot);
    assert_eq!(told(&answer), (vec!["a", "b"], vec!["/10.9.9.9", "Kubernetes//Pod/shop/gone"]));
    // What was held is subscribed to.
    cluster.put(merged(pod("c", json!({"app": "cart"})), &json!({"spec": {"nodeName": "x"}})));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["c"], vec![]));
}

#[test]
fn the_type_of_workloads_has_no_services_and_that_of_policies_no_workloads() {
    let mut cluster = shop();
    let snapshot = cluster.snapshot();
    let (mut stream, answer) = Subscription::open(Set::Workloads, request(&[], &[], &[]), &snapshot, "").unwrap();
    assert_eq!(told(&answer), (vec!["a", "b"], vec![]));
    let wire = answer.resources[0].to_wire(Set::Workloads, false, |_| true);
    assert_eq!(wire.resource.unwrap().type_url, "type.googleapis.com/istio.workload.Workload");
    cluster.put(merged(cart(json!([])), &json!({"metadata": {"name": "more"}, "spec": {"selector": null}})));
    assert!(stream.push(&cluster.snapshot()).is_none());
    let old = [("ns/policy".to_owned(), "1".to_owned())];
    let (_, answer) = Subscription::open(Set::Authorizations, request(&[], &[], &old), &snapshot, "").unwrap();
    assert_eq!(told(&answer), (vec![], vec!["ns/policy"]));
}

/// A policy that a stream is told of, as the proxy reads it.
fn policies(answer: &Answer, knows: &[Feature]) -> Vec<security::Authorization> {
    let wire =
        |r: &std::sync::Arc<crate::model::Resource>| r.to_wire(Set::Authorizations, false, |f| knows.contains(&f));
    let decode = |r| security::Authorization::decode(&*wire(r).resource.unwrap().value).unwrap();
    answer.resources.iter().chain(&answer.narrowed).map(decode).collect()
}

#[test]
fn a_changed_policy_reaches_every_stream_that_it_concerns_policies_before_records() {
    let of_app = |action: &str| json!({"action": action, "selector": {"matchLabels": {"app": "cart"}}, "rules": [{}]});
    for on_demand in [false, true] {
        let mut cluster = shop();
        let first = cluster.snapshot();
        let all: (&[&str], &[&str]) = if on_demand { (&["*", CART], &["*"]) } else { (&[], &[]) };
        let (mut addresses, _) = open_at("elsewhere", all.0, all.1, &[], &first);
        let (mut authorizations, answer) =
            Subscription::open(Set::Authorizations, request(&[], &[], &[]), &first, "node-a").unwrap();
        assert_eq!(told(&answer), (vec![], vec![]));
        let mut push = |cluster: &mut Cluster| {
            let newer = cluster.snapshot();
            let streams = [(Set::Addresses, &mut addresses), (Set::Authorizations, &mut authorizations)];
            in_order(streams.into_iter().filter_map(|(set, stream)| Some((set, stream.push(&newer)?))).collect())
        };
        cluster.put(policy("AuthorizationPolicy", "shop/p", of_app("DENY")));
        let answers = push(&mut cluster);
        let order: Vec<_> = answers.iter().map(|(set, answer)| (*set, told(answer))).collect();
        let records = (Set::Addresses, (vec!["a", "b"], vec![]));
        assert_eq!(order, [(Set::Authorizations, (vec!["p"], vec![])), records.clone()], "on demand: {on_demand}");
        let [policy_now] = &policies(&answers[0].1, &[])[..] else { panic!() };
        assert_eq!((policy_now.action(), policy_now.rules.len()), (security::Action::Deny, 1));
        let record = workload::Workload::decode(&*answers[1].1.resources[0].body).unwrap();
        assert_eq!(record.authorization_policies, ["shop/p"]);

        // What it says changes: no record does.
        cluster.put(policy("AuthorizationPolicy", "shop/p", of_app("ALLOW")));
        let answers = push(&mut cluster);
        assert_eq!(
            answers.iter().map(|(set, a)| (*set, told(a))).collect::<Vec<_>>(),
            [(Set::Authorizations, (vec!["p"], vec![]))]
        );

        // For the whole namespace: first the policy.
        cluster.put(policy("AuthorizationPolicy", "shop/p", json!({"rules": [{}]})));
        let answers = push(&mut cluster);
        let order: Vec<_> = answers.iter().map(|(set, answer)| (*set, told(answer))).collect();
        assert_eq!(order, [(Set::Authorizations, (vec!["p"], vec![])), records.clone()], "on demand: {on_demand}");
        // And again for some pods alone: they name it before it needs that, or it would apply to nobody meanwhile.
        cluster.put(policy("AuthorizationPolicy", "shop/p", of_app("ALLOW")));
        let answers = push(&mut cluster);
        let order: Vec<_> = answers.iter().map(|(set, answer)| (*set, told(answer))).collect();
        assert_eq!(order, [records.clone(), (Set::Authorizations, (vec!["p"], vec![]))], "on demand: {on_demand}");
        assert_eq!(policies(&answers[1].1, &[])[0].scope(), security::Scope::WorkloadSelector);

        // It goes: first out of the records.
        cluster.objects.authorization_policies.clear();
        let answers = push(&mut cluster);
        let order: Vec<_> = answers.iter().map(|(set, answer)| (*set, told(answer))).collect();
        assert_eq!(order, [records, (Set::Authorizations, (vec![], vec!["shop/p"]))]);
    }
}

#[test]
fn policies_that_are_asked_for_by_name_come_without_anything_else() {
    let mut cluster = shop();
    cluster.put(policy("AuthorizationPolicy", "shop/p", json!({})));
    cluster.put(policy("AuthorizationPolicy", "shop/q", json!({})));
    let open = |names: &[&str], snapshot: &Snapshot| {
        Subscription::open(Set::Authorizations, request(names, &[], &[]), snapshot, "node-a").unwrap()
    };
    let (mut stream, answer) = open(&["shop/p", "shop/later"], &cluster.snapshot());
    assert_eq!(told(&answer), (vec!["p"], vec!["shop/later"]));
    cluster.put(policy("AuthorizationPolicy", "shop/later", json!({})));
    cluster.put(policy("AuthorizationPolicy", "shop/q", json!({"action": "DENY"})));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["later"], vec![]));
    cluster.objects.authorization_policies.remove(&ztunnel::manifests::ObjectName::new("shop", "p"));
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec![], vec!["shop/p"]));
}

/// What a proxy would refuse, or enforce although it should not, is for it a policy that does nothing.
#[test]
fn a_proxy_that_does_not_know_audit_or_dry_run_gets_a_policy_that_does_nothing_in_its_place() {
    let mut cluster = shop();
    cluster.put(policy("AuthorizationPolicy", "shop/audit", json!({"action": "AUDIT", "rules": [{}]})));
    let mut dry = policy("AuthorizationPolicy", "shop/dry", json!({"action": "ALLOW", "rules": [{}]}));
    dry["metadata"]["annotations"] = json!({"istio.io/dry-run": "true"});
    cluster.put(dry);
    cluster.put(policy("AuthorizationPolicy", "shop/real", json!({"rules": [{}]})));
    let (_, answer) = Subscription::open(Set::Authorizations, request(&[], &[], &[]), &cluster.snapshot(), "").unwrap();
    let shown = |knows: &[Feature]| {
        policies(&answer, knows).iter().map(|p| (p.action(), p.rules.len(), p.dry_run)).collect::<Vec<_>>()
    };
    let (nothing, real) = ((security::Action::Deny, 0, false), (security::Action::Allow, 1, false));
    let (audit, dry) = ((security::Action::Audit, 1, false), (security::Action::Allow, 1, true));
    assert_eq!(shown(&[]), [nothing, nothing, real]);
    assert_eq!(shown(&[Feature::DryRun]), [nothing, dry, real]);
    assert_eq!(shown(&[Feature::DryRun, Feature::Audit]), [audit, dry, real]);
    let names: Vec<_> = policies(&answer, &[]).into_iter().map(|p| (p.namespace, p.name)).collect();
    assert_eq!(names[0], ("shop".to_owned(), "audit".to_owned()));
}

#[test]
fn a_stream_can_change_between_all_and_some() {
    let mut cluster = shop();
    cluster.put(merged(pod("far", json!({})), &json!({"spec": {"nodeName": "x"}, "status": {"podIP": "10.1.0.7"}})));
    let (mut stream, _) = open_at("elsewhere", &["*"], &["*"], &[], &cluster.snapshot());
    stream.take(&request(&["/10.1.0.1"], &[], &[])).unwrap();
    let answer = stream.take(&request(&["*"], &[], &[])).unwrap().unwrap();
    assert_eq!(told(&answer), (vec!["b", "far", "cart.shop.svc.cluster.local"], vec![]));
    assert!(stream.take(&request(&[], &["*"], &[])).unwrap().is_none());
    for name in ["far", "a"] {
        let stop = json!({"status": {"conditions": [], "podIP": if name == "a" { "10.1.0.1" } else { "10.1.0.7" }}});
        cluster.put(merged(pod(name, json!({"app": "cart"})), &stop));
    }
    assert_eq!(told(&stream.push(&cluster.snapshot()).unwrap()), (vec!["a"], vec![]));
}

#[test]
fn who_asks_for_too_much_is_told_so() {
    let cluster = &mut shop();
    let (mut stream, _) = open(&["*"], &["*"], &[], &cluster.snapshot());
    assert!(stream.take(&request(&[&"x".repeat(5000)], &[], &[])).is_err());
    let many: Vec<String> = (0..200_001).map(|n| n.to_string()).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(stream.take(&request(&many, &[], &[])).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Whatever happens: the peer holds what is, of all that it asks for, and knows what is not.
    #[test]
    fn a_peer_always_knows_what_it_asked_for(
        steps in proptest::collection::vec((0..9u8, 0..4u8, 0..6u8), 1..60),
        wildcard in any::<bool>(),
    ) {
        let mut cluster = Cluster::new();
        let first: &[&str] = if wildcard { &[] } else { &["*"] };
        let (mut stream, answer) = open_at("n0", first, first, &[], &cluster.snapshot());
        let (mut peer, mut names) = (Peer::default(), BTreeSet::new());
        peer.take(&answer);
        for (kind, which, how) in steps {
            if kind < 6 {
                cluster.step(kind, which, how);
                if let Some(answer) = stream.push(&cluster.snapshot()) {
                    peer.take(&answer);
                }
            } else if !wildcard {
                let name = [
                    format!("Kubernetes//Pod/shop/n{which}"), format!("/10.1.0.{which}"),
                    format!("shop/n{which}.shop.svc.cluster.local"), format!("/10.96.0.{how}"), format!("net1/10.96.0.{how}"),
                ][usize::from(how % 5)].clone();
                let (on, off): (&[&str], &[&str]) = if kind == 8 { (&[], &[&name]) } else { (&[&name], &[]) };
                if let Some(answer) = stream.take(&request(on, off, &[])).unwrap() {
                    peer.take(&answer);
                }
                if kind == 8 { names.remove(&name) } else { names.insert(name) };
            }
            if kind == 7 && how == 0 {
                // The stream breaks and comes again.
                let held: Vec<_> = peer.held.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
                let mut asked = first.to_vec();
                asked.extend(names.iter().map(String::as_str));
                let (again, answer) = open_at("n0", &asked, first, &held, &cluster.snapshot());
                stream = again;
                peer.take(&answer);
                // It is subscribed to what it holds from now on.
                if !wildcard { names.extend(peer.held.keys().cloned()); }
            }
            check(&peer, &names, wildcard, &cluster.snapshot())?;
        }
    }
}

fn check(
    peer: &Peer,
    names: &BTreeSet<String>,
    wildcard: bool,
    truth: &Snapshot,
) -> Result<(), proptest::test_runner::TestCaseError> {
    let wanted: Vec<_> = if wildcard { truth.all(Set::Addresses).collect() } else { truth.on_node("n0").collect() };
    for resource in wanted {
        prop_assert_eq!(peer.held.get(&*resource.name), Some(&resource.version_text()), "{}", resource.name);
    }
    if wildcard {
        prop_assert_eq!(peer.held.len(), truth.all(Set::Addresses).count());
        return Ok(());
    }
    for name in names {
        let resolved = truth.resolve(Set::Addresses, name);
        let behind = resolved.services.iter().flat_map(|s| truth.endpoints(s));
        for resource in resolved.resources.iter().chain(behind) {
            prop_assert_eq!(
                peer.held.get(&*resource.name),
                Some(&resource.version_text()),
                "{} by {}",
                resource.name,
                name
            );
        }
        prop_assert_eq!(peer.answers.get(name).copied(), Some(!resolved.resources.is_empty()), "{}", name);
    }
    Ok(())
}

/// Two pods behind a service, all on node-a.
fn shop() -> Cluster {
    let mut cluster = Cluster::new();
    cluster.put(merged(cart(json!([{"port": 80}])), &json!({"spec": {"clusterIP": "10.96.0.7"}})));
    cluster.put(merged(pod("a", json!({"app": "cart"})), &addresses(1)));
    cluster.put(merged(pod("b", json!({"app": "cart"})), &addresses(2)));
    cluster
}

fn addresses(last: u8) -> serde_json::Value {
    json!({"status": {"podIP": null, "podIPs": [{"ip": format!("10.1.0.{last}")}, {"ip": format!("fd00::{last}")}]}})
}

fn request(subscribe: &[&str], unsubscribe: &[&str], held: &[(String, String)]) -> DeltaDiscoveryRequest {
    DeltaDiscoveryRequest {
        resource_names_subscribe: subscribe.iter().map(ToString::to_string).collect(),
        resource_names_unsubscribe: unsubscribe.iter().map(ToString::to_string).collect(),
        initial_resource_versions: held.iter().cloned().collect(),
        ..Default::default()
    }
}

fn open(sub: &[&str], unsub: &[&str], held: &[(String, String)], snapshot: &Snapshot) -> (Subscription, Answer) {
    open_at("node-a", sub, unsub, held, snapshot)
}

fn open_at(
    node: &str,
    sub: &[&str],
    unsub: &[&str],
    held: &[(String, String)],
    snapshot: &Snapshot,
) -> (Subscription, Answer) {
    Subscription::open(Set::Addresses, request(sub, unsub, held), snapshot, node).unwrap()
}

/// Last parts of the names of resources, and removed names, in order.
fn told(answer: &Answer) -> (Vec<&str>, Vec<&str>) {
    let resources =
        answer.resources.iter().chain(&answer.narrowed).map(|r| r.name.rsplit('/').next().unwrap_or(&r.name)).collect();
    let mut removed: Vec<&str> = answer.removed.iter().map(String::as_str).collect();
    removed.sort_unstable();
    (resources, removed)
}

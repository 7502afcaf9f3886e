use super::*;
use crate::proto::security as wire;

fn identity() -> crate::identity::Identity {
    "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap()
}

fn exact(text: &str) -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Exact(text.into())) }
}

fn presence() -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Presence(())) }
}

/// One policy of one rule, each of whose clauses has one match.
fn policy(action: wire::Action, matches: Vec<wire::Match>) -> Arc<Policy> {
    let clauses = matches.into_iter().map(|m| wire::Clause { matches: vec![m] }).collect();
    with_rules(action, vec![wire::Rule { clauses }])
}

fn with_rules(action: wire::Action, rules: Vec<wire::Rule>) -> Arc<Policy> {
    let wire = wire::Authorization {
        name: "p".into(),
        namespace: "shop".into(),
        action: action as i32,
        rules,
        ..Default::default()
    };
    Arc::new(convert_policy(&wire).unwrap())
}

fn allowed(policies: &[Arc<Policy>], identity: Option<&crate::identity::Identity>) -> bool {
    let connection =
        Connection { identity, source: "10.0.0.7".parse().unwrap(), destination: "10.0.1.9:8080".parse().unwrap() };
    evaluate(policies, &[], &connection).is_allowed()
}

#[test]
fn without_policies_everything_passes_and_an_empty_allow_passes_nothing() {
    assert!(allowed(&[], None));
    assert!(!allowed(&[with_rules(wire::Action::Allow, vec![])], Some(&identity())));
    assert!(allowed(&[with_rules(wire::Action::Deny, vec![])], None));
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![wire::Rule::default()])], None));
    assert!(!allowed(&[with_rules(wire::Action::Deny, vec![wire::Rule::default()])], Some(&identity())));
}

#[test]
fn a_deny_beats_an_allow() {
    let all = wire::Rule::default();
    let both = [with_rules(wire::Action::Allow, vec![all.clone()]), with_rules(wire::Action::Deny, vec![all])];
    assert!(!allowed(&both, Some(&identity())));
}

#[test]
fn a_strict_policy_denies_exactly_those_without_identity() {
    let strict =
        policy(wire::Action::Deny, vec![wire::Match { not_principals: vec![presence()], ..Default::default() }]);
    assert!(allowed(std::slice::from_ref(&strict), Some(&identity())));
    assert!(!allowed(&[strict], None));
}

#[test]
fn each_field_matches_as_written() {
    let net = |a: [u8; 4], length| wire::Address { address: a.to_vec().into(), length };
    let account = wire::ServiceAccountMatch { namespace: "shop".into(), service_account: "cart".into() };
    let table = [
        (wire::Match { principals: vec![exact("cluster.local/ns/shop/sa/cart")], ..Default::default() }, true),
        (
            wire::Match { principals: vec![exact("spiffe://cluster.local/ns/shop/sa/cart")], ..Default::default() },
            false,
        ),
        (wire::Match { namespaces: vec![exact("shop")], ..Default::default() }, true),
        (wire::Match { not_namespaces: vec![exact("shop")], ..Default::default() }, false),
        (wire::Match { source_ips: vec![net([10, 0, 0, 0], 24)], ..Default::default() }, true),
        (wire::Match { source_ips: vec![net([10, 0, 1, 0], 24)], ..Default::default() }, false),
        (wire::Match { not_source_ips: vec![net([10, 0, 0, 0], 24)], ..Default::default() }, false),
        (wire::Match { destination_ips: vec![net([10, 0, 1, 9], 32)], ..Default::default() }, true),
        (wire::Match { destination_ports: vec![80, 8080], ..Default::default() }, true),
        (wire::Match { not_destination_ports: vec![8080], ..Default::default() }, false),
        (wire::Match { service_accounts: vec![account.clone()], ..Default::default() }, true),
        (wire::Match { not_service_accounts: vec![account], ..Default::default() }, false),
        // Two kinds of field are ANDed.
        (wire::Match { namespaces: vec![exact("shop")], destination_ports: vec![1], ..Default::default() }, false),
        // Says nothing: no match.
        (wire::Match::default(), false),
    ];
    for (m, expected) in table {
        let text = format!("{m:?}");
        assert_eq!(allowed(&[policy(wire::Action::Allow, vec![m])], Some(&identity())), expected, "{text}");
    }
}

#[test]
fn clauses_are_anded_rules_and_matches_are_ored() {
    let ns = |name: &str| wire::Match { namespaces: vec![exact(name)], ..Default::default() };
    assert!(!allowed(&[policy(wire::Action::Allow, vec![ns("shop"), ns("other")])], Some(&identity())));
    let either = wire::Rule { clauses: vec![wire::Clause { matches: vec![ns("other"), ns("shop")] }] };
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![either.clone()])], Some(&identity())));
    let never = wire::Rule { clauses: vec![wire::Clause { matches: vec![ns("other")] }] };
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![never, either])], Some(&identity())));
}

#[test]
fn what_is_not_understood_never_widens_access() {
    let extension = wire::Extension { name: "later".into(), config: None };
    let unknown = || wire::Match { extensions: vec![extension.clone()], ..Default::default() };
    assert!(!allowed(&[policy(wire::Action::Allow, vec![unknown()])], Some(&identity())));
    assert!(!allowed(&[policy(wire::Action::Deny, vec![unknown()])], Some(&identity())));
    let action = wire::Authorization { name: "p".into(), namespace: "n".into(), action: 7, ..Default::default() };
    assert!(!allowed(&[Arc::new(convert_policy(&action).unwrap())], Some(&identity())));
    let connection =
        Connection { identity: None, source: "10.0.0.7".parse().unwrap(), destination: "10.0.1.9:80".parse().unwrap() };
    assert_eq!(evaluate(&[], &["n/p".into()], &connection), Verdict::UnknownPolicy("n/p".into()));
}

#[test]
fn a_dry_run_is_not_enforced() {
    let mut deny = (*with_rules(wire::Action::Deny, vec![wire::Rule::default()])).clone();
    deny.dry_run = true;
    assert!(allowed(&[Arc::new(deny)], None));
}

#[test]
fn what_stands_for_a_policy_that_cannot_be_taken_denies_where_that_one_would_apply() {
    let port = wire::Match { destination_ports: vec![70_000], ..Default::default() };
    let rules = vec![wire::Rule { clauses: vec![wire::Clause { matches: vec![port] }] }];
    let mut wire = wire::Authorization {
        name: "p".into(),
        namespace: "shop".into(),
        scope: wire::Scope::Namespace as i32,
        action: wire::Action::Deny as i32,
        rules,
        ..Default::default()
    };
    let error = convert_policy(&wire).unwrap_err().to_string();
    let policy = stand_in(&wire, &error);
    assert_eq!((policy.scope, &*policy.key), (PolicyScope::Namespace, "shop/p"));
    assert!(!allowed(&[Arc::new(policy)], Some(&identity())));
    wire.scope = 9;
    assert_eq!(stand_in(&wire, &error).scope, PolicyScope::Global);
}

#[test]
fn an_audit_never_decides() {
    let all = wire::Rule::default();
    assert!(allowed(&[with_rules(wire::Action::Audit, vec![all.clone()])], None));
    let deny = [with_rules(wire::Action::Audit, vec![all.clone()]), with_rules(wire::Action::Deny, vec![all])];
    assert!(!allowed(&deny, None));
    assert!(!allowed(&[with_rules(wire::Action::Audit, vec![]), with_rules(wire::Action::Allow, vec![])], None));
}

mod generate;
mod oracle;
mod property;

use super::*;
use crate::identity::Identity;
use crate::proto::security as wire;

fn identity() -> Identity {
    "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap()
}

fn exact(text: &str) -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Exact(text.into())) }
}

fn presence() -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Presence(())) }
}

fn prefix(text: &str) -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Prefix(text.into())) }
}

fn suffix(text: &str) -> wire::StringMatch {
    wire::StringMatch { match_type: Some(wire::string_match::MatchType::Suffix(text.into())) }
}

fn account(namespace: &str, name: &str) -> wire::ServiceAccountMatch {
    wire::ServiceAccountMatch { namespace: namespace.into(), service_account: name.into() }
}

fn range(text: &str) -> wire::Address {
    let (address, length) = text.split_once('/').unwrap();
    let address = match address.parse().unwrap() {
        std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
        std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    wire::Address { address: address.into(), length: length.parse().unwrap() }
}

fn principals(list: &[&str]) -> wire::Match {
    wire::Match { principals: list.iter().map(|p| exact(p)).collect(), ..Default::default() }
}

fn rule(clauses: Vec<Vec<wire::Match>>) -> wire::Rule {
    wire::Rule { clauses: clauses.into_iter().map(|matches| wire::Clause { matches }).collect() }
}

fn message(name: &str, action: wire::Action, rules: Vec<wire::Rule>) -> wire::Authorization {
    wire::Authorization {
        name: name.into(),
        namespace: "shop".into(),
        action: action as i32,
        rules,
        ..Default::default()
    }
}

fn taken(message: wire::Authorization) -> Arc<Policy> {
    Arc::new(convert(&message.into()).unwrap())
}

/// One policy of one rule, each of whose clauses has one match.
fn policy(action: wire::Action, matches: Vec<wire::Match>) -> Arc<Policy> {
    with_rules(action, vec![rule(matches.into_iter().map(|m| vec![m]).collect())])
}

fn with_rules(action: wire::Action, rules: Vec<wire::Rule>) -> Arc<Policy> {
    taken(message("p", action, rules))
}

fn connection(identity: Option<&Identity>) -> Connection {
    Connection {
        identity: identity.cloned(),
        source: "10.0.0.7".parse().unwrap(),
        destination: "10.0.1.9:8080".parse().unwrap(),
    }
}

fn index(policies: &[Arc<Policy>]) -> PolicyIndex {
    let mut index = PolicyIndex::default();
    for (number, policy) in policies.iter().enumerate() {
        let taken = index.get(policy.key()).is_some();
        assert!(!taken, "policy {number} has the name of another one");
        index.insert(policy.clone());
    }
    index.complete();
    index
}

fn decide(policies: &[Arc<Policy>], identity: Option<&Identity>) -> Decision {
    evaluate(&index(policies).applying("shop", &[]), &connection(identity))
}

fn allowed(policies: &[Arc<Policy>], identity: Option<&Identity>) -> bool {
    decide(policies, identity).verdict.is_allowed()
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
    let all = || vec![wire::Rule::default()];
    let both = [taken(message("a", wire::Action::Allow, all())), taken(message("d", wire::Action::Deny, all()))];
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
    let m = wire::Match::default;
    let table = [
        (principals(&["cluster.local/ns/shop/sa/cart"]), true),
        (principals(&["spiffe://cluster.local/ns/shop/sa/cart"]), false),
        (principals(&["other.example/ns/shop/sa/cart"]), false),
        (wire::Match { principals: vec![prefix("cluster.local/ns/shop/")], ..m() }, true),
        (wire::Match { principals: vec![prefix("cluster.local/ns/bank/")], ..m() }, false),
        (wire::Match { principals: vec![suffix("/sa/cart")], ..m() }, true),
        (wire::Match { not_principals: vec![suffix("/sa/cart")], ..m() }, false),
        (wire::Match { principals: vec![exact("x"), presence()], ..m() }, true),
        (wire::Match { namespaces: vec![exact("shop")], ..m() }, true),
        (wire::Match { namespaces: vec![exact("sho")], ..m() }, false),
        (wire::Match { not_namespaces: vec![exact("shop")], ..m() }, false),
        (wire::Match { not_namespaces: vec![exact("bank")], ..m() }, true),
        (wire::Match { source_ips: vec![range("10.0.0.0/24")], ..m() }, true),
        (wire::Match { source_ips: vec![range("10.0.1.0/24")], ..m() }, false),
        (wire::Match { source_ips: vec![range("10.0.0.9/24")], ..m() }, true),
        (wire::Match { not_source_ips: vec![range("10.0.0.0/24")], ..m() }, false),
        (wire::Match { not_source_ips: vec![range("10.0.0.0/8"), range("10.9.0.0/16")], ..m() }, false),
        // IPv4 in its IPv6 form.
        (wire::Match { source_ips: vec![range("::ffff:10.0.0.0/120")], ..m() }, true),
        (wire::Match { source_ips: vec![range("::/0")], ..m() }, false),
        (wire::Match { destination_ips: vec![range("10.0.1.9/32")], ..m() }, true),
        (wire::Match { not_destination_ips: vec![range("10.0.1.9/32")], ..m() }, false),
        (wire::Match { destination_ports: vec![80, 8080], ..m() }, true),
        (wire::Match { destination_ports: vec![80], ..m() }, false),
        (wire::Match { not_destination_ports: vec![8080], ..m() }, false),
        (wire::Match { service_accounts: vec![account("shop", "cart")], ..m() }, true),
        (wire::Match { service_accounts: vec![account("bank", "cart")], ..m() }, false),
        (wire::Match { not_service_accounts: vec![account("shop", "cart")], ..m() }, false),
        // Two kinds of field are ANDed.
        (wire::Match { namespaces: vec![exact("shop")], destination_ports: vec![1], ..m() }, false),
        // Says nothing: no match.
        (m(), false),
    ];
    for (m, expected) in table {
        let text = format!("{m:?}");
        assert_eq!(allowed(&[policy(wire::Action::Allow, vec![m])], Some(&identity())), expected, "{text}");
    }
}

#[test]
fn a_mapped_address_is_judged_as_ipv4() {
    let only =
        policy(wire::Action::Allow, vec![wire::Match { source_ips: vec![range("10.0.0.0/24")], ..Default::default() }]);
    let mapped = Connection { source: "::ffff:10.0.0.7".parse().unwrap(), ..connection(None) };
    assert!(evaluate(&index(&[only]).applying("shop", &[]), &mapped).verdict.is_allowed());
}

#[test]
fn ranges_within_others_and_long_lists_are_found() {
    let nets = ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "9.0.0.0/30", "fd00::/8", "fd00::1/128", "0.0.0.0/32"];
    let nets = Nets::new(nets.map(|n| n.parse().unwrap()));
    assert_eq!(nets.as_slice().len(), 4, "{nets:?}");
    let many: Vec<String> = (0..500).map(|i| format!("cluster.local/ns/shop/sa/s{i}")).collect();
    let list: Vec<&str> = many.iter().map(String::as_str).collect();
    let policy = policy(wire::Action::Allow, vec![principals(&list)]);
    for (name, expected) in [("s0", true), ("s499", true), ("s500", false), ("s", false)] {
        let identity = format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap();
        assert_eq!(allowed(std::slice::from_ref(&policy), Some(&identity)), expected, "{name}");
    }
}

#[test]
fn clauses_are_anded_rules_and_matches_are_ored() {
    let ns = |name: &str| wire::Match { namespaces: vec![exact(name)], ..Default::default() };
    assert!(!allowed(&[policy(wire::Action::Allow, vec![ns("shop"), ns("other")])], Some(&identity())));
    let either = rule(vec![vec![ns("other"), ns("shop")]]);
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![either.clone()])], Some(&identity())));
    let never = rule(vec![vec![ns("other")]]);
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![never, either])], Some(&identity())));
    // A clause without matches holds; one with nothing but empty matches never does.
    assert!(allowed(&[with_rules(wire::Action::Allow, vec![rule(vec![vec![]])])], None));
    let inert = with_rules(wire::Action::Deny, vec![rule(vec![vec![ns("shop")], vec![wire::Match::default()]])]);
    assert!(allowed(std::slice::from_ref(&inert), Some(&identity())));
    assert_eq!(inert.inert_rules().collect::<Vec<_>>(), [0]);
}

#[test]
fn what_is_not_understood_never_widens_access() {
    let extension = wire::Extension { name: "later".into(), config: None };
    let unknown = || wire::Match { extensions: vec![extension.clone()], ..Default::default() };
    let undecided = |policies: &[Arc<Policy>]| {
        let verdict = decide(policies, Some(&identity())).verdict;
        assert!(!verdict.is_allowed());
        verdict.is_undecided()
    };
    assert!(undecided(&[policy(wire::Action::Allow, vec![unknown()])]));
    assert!(undecided(&[policy(wire::Action::Deny, vec![unknown()])]));
    // What is known may decide without the rest.
    let elsewhere = wire::Match { namespaces: vec![exact("bank")], ..unknown() };
    assert!(allowed(&[policy(wire::Action::Deny, vec![elsewhere.clone()])], Some(&identity())));
    assert!(!undecided(&[policy(wire::Action::Allow, vec![elsewhere])]));
    // One value of a list is not known: it might be the one that fits.
    let text = wire::StringMatch { match_type: None };
    let values = wire::Match { principals: vec![exact("a"), text], ..Default::default() };
    assert!(undecided(&[policy(wire::Action::Deny, vec![values])]));
    let mut action = message("p", wire::Action::Allow, vec![]);
    action.action = 7;
    assert!(undecided(&[taken(action)]));
    let mut extended = message("p", wire::Action::Allow, vec![wire::Rule::default()]);
    extended.extensions.push(extension);
    assert!(undecided(&[taken(extended)]));
}

#[test]
fn a_field_of_a_later_version_is_noticed_wherever_it_is() {
    let plain = message("p", wire::Action::Allow, vec![rule(vec![vec![principals(&["a"])]])]);
    let known = decode(&prost::Message::encode_to_vec(&plain)).unwrap();
    assert_eq!((known.unknown, known.unknown_matches.len()), (None, 0));
    let within = |numbers: &[u32], content: &[u8]| {
        let mut bytes = content.to_vec();
        for number in numbers.iter().rev() {
            let inner = std::mem::take(&mut bytes);
            generate::field(*number, &inner, &mut bytes);
        }
        decode(&bytes).unwrap()
    };
    assert!(within(&[8], b"x").unknown.unwrap().contains("the policy has field 8"));
    assert!(within(&[5, 2], b"x").unknown.unwrap().contains("a rule has field 2"));
    assert!(within(&[5, 1, 1], b"x").unknown.unwrap().contains("a clause has field 1"));
    let here = std::collections::BTreeSet::from([(0, 0, 0)]);
    // A match, and each kind of value in it.
    for path in [&[5, 1, 2, 14][..], &[5, 1, 2, 3, 5], &[5, 1, 2, 6, 3], &[5, 1, 2, 12, 3]] {
        assert_eq!(within(path, b"x").unknown_matches, here, "{path:?}");
    }
    assert!(within(&[5, 1, 2, 3, 1], b"x").unknown_matches.is_empty());
}

#[test]
fn nothing_is_decided_before_all_that_may_count_is_known() {
    let mut index = PolicyIndex::default();
    let judge = |index: &PolicyIndex, names: &[Arc<str>]| {
        evaluate(&index.applying("shop", names), &connection(Some(&identity()))).verdict
    };
    assert_eq!(judge(&index, &[]), Verdict::Undecided { missing: Undecided::Policies });
    assert!(evaluate(&PolicySet::default(), &connection(None)).verdict.is_undecided());
    index.complete();
    assert!(judge(&index, &[]).is_allowed());
    let named = ["shop/p".into()];
    assert_eq!(
        judge(&index, &named),
        Verdict::Undecided { missing: Undecided::UnknownPolicy { policy: "shop/p".into() } }
    );
    let mut selector = message("p", wire::Action::Allow, vec![wire::Rule::default()]);
    selector.scope = wire::Scope::WorkloadSelector as i32;
    index.insert(taken(selector));
    assert!(judge(&index, &named).is_allowed());
    // What denies anyway need not wait.
    index.insert(taken(message("d", wire::Action::Deny, vec![wire::Rule::default()])));
    assert!(matches!(judge(&index, &["shop/never".into()]), Verdict::Denied { .. }));
}

#[test]
fn policies_apply_by_scope_and_by_name() {
    let of = |name: &str, namespace: &str, scope: wire::Scope| {
        let mut message = message(name, wire::Action::Allow, vec![]);
        (message.namespace, message.scope) = (namespace.into(), scope as i32);
        taken(message)
    };
    let mut index = index(&[
        of("mesh", "root", wire::Scope::Global),
        of("own", "shop", wire::Scope::Namespace),
        of("other", "bank", wire::Scope::Namespace),
        of("named", "shop", wire::Scope::WorkloadSelector),
        of("unnamed", "shop", wire::Scope::WorkloadSelector),
    ]);
    let applying = |index: &PolicyIndex, names: &[&str]| {
        let names: Vec<Arc<str>> = names.iter().map(|n| (*n).into()).collect();
        let set = index.applying("shop", &names);
        let mut keys: Vec<_> = set.iter().map(|p| p.name().to_owned()).collect();
        keys.sort();
        assert_eq!(keys.len(), set.len());
        (keys.join(" "), set.unknown().len())
    };
    assert_eq!(applying(&index, &["shop/named", "shop/own"]), ("mesh named own".into(), 0));
    assert_eq!(applying(&index, &["shop/named", "shop/named", "shop/gone"]), ("mesh named own".into(), 1));
    // Another scope, then gone.
    index.insert(of("own", "shop", wire::Scope::WorkloadSelector));
    assert_eq!(applying(&index, &[]), ("mesh".into(), 0));
    assert!(index.remove("root/mesh").is_some() && index.remove("root/mesh").is_none());
    assert_eq!(applying(&index, &["root/mesh"]), ("".into(), 1));
}

#[test]
fn a_dry_run_is_evaluated_with_what_is_enforced_and_changes_nothing() {
    let dry = |name: &str, action, rules| taken(wire::Authorization { dry_run: true, ..message(name, action, rules) });
    let all = || vec![wire::Rule::default()];
    let decision = decide(&[dry("next", wire::Action::Deny, all())], None);
    assert!(decision.verdict.is_allowed());
    assert_eq!(decision.dry_run.unwrap().to_string(), "denied by shop/next rule 0: it matches everything");
    // An ALLOW on trial beside one that is enforced.
    let web = || vec![rule(vec![vec![principals(&["cluster.local/ns/shop/sa/web"])]])];
    let policies = [taken(message("now", wire::Action::Allow, web())), dry("next", wire::Action::Allow, all())];
    let decision = decide(&policies, Some(&identity()));
    assert!(!decision.verdict.is_allowed());
    assert_eq!(decision.dry_run.unwrap().to_string(), "allowed by shop/next rule 0");
    assert_eq!(decide(&[taken(message("now", wire::Action::Allow, all()))], None).dry_run, None);
}

#[test]
fn an_audit_never_decides_and_is_reported() {
    let all = || vec![wire::Rule::default()];
    let audit = |rules| taken(message("watch", wire::Action::Audit, rules));
    let decision = decide(&[audit(all())], None);
    assert!(decision.verdict.is_allowed());
    assert_eq!(decision.audited, [RuleRef { policy: "shop/watch".into(), rule: 0 }]);
    let decision = decide(&[audit(all()), taken(message("deny", wire::Action::Deny, all()))], None);
    assert!(!decision.verdict.is_allowed() && decision.audited.len() == 1);
    assert!(!allowed(&[audit(vec![]), taken(message("empty", wire::Action::Allow, vec![]))], None));
    let other = rule(vec![vec![principals(&["x"])]]);
    assert!(decide(&[audit(vec![other])], Some(&identity())).audited.is_empty());
    // Not even one that cannot be understood.
    let mut strange = message("watch", wire::Action::Audit, all());
    strange.extensions.push(wire::Extension { name: "later".into(), config: None });
    assert!(allowed(&[taken(strange.clone())], None));
    strange.scope = 9;
    let error = convert(&strange.clone().into()).unwrap_err().to_string();
    assert!(allowed(&[Arc::new(stand_in(&strange, &error))], None));
}

#[test]
fn what_stands_for_a_policy_that_cannot_be_taken_denies_where_that_one_would_apply() {
    let port = wire::Match { destination_ports: vec![70_000], ..Default::default() };
    let mut wire = message("p", wire::Action::Deny, vec![rule(vec![vec![port]])]);
    wire.scope = wire::Scope::Namespace as i32;
    let error = convert(&wire.clone().into()).unwrap_err().to_string();
    let policy = stand_in(&wire, &error);
    assert_eq!((policy.scope, &**policy.key()), (PolicyScope::Namespace, "shop/p"));
    assert!(!allowed(&[Arc::new(policy)], Some(&identity())));
    wire.scope = 9;
    assert_eq!(stand_in(&wire, &error).scope, PolicyScope::Global);
    let unreadable = stand_in_named("shop/p", "it cannot be read");
    assert_eq!((unreadable.namespace(), unreadable.name(), unreadable.scope), ("shop", "p", PolicyScope::Global));
    assert!(!allowed(&[Arc::new(unreadable)], Some(&identity())));
}

#[test]
fn a_refusal_says_which_rule_it_was_and_why() {
    let ports = |ports: &[u32]| wire::Match { destination_ports: ports.to_vec(), ..Default::default() };
    let deny = message(
        "no-db",
        wire::Action::Deny,
        vec![
            rule(vec![vec![principals(&["x"])]]),
            rule(vec![
                vec![
                    ports(&[1]),
                    wire::Match { service_accounts: vec![account("shop", "cart")], ..ports(&[8080, 9090]) },
                ],
                vec![wire::Match { not_source_ips: vec![range("192.168.0.0/16")], ..Default::default() }],
            ]),
        ],
    );
    assert_eq!(
        decide(&[taken(deny)], Some(&identity())).verdict.to_string(),
        "denied by shop/no-db rule 1: destinationPorts 8080 or 9090 matched 8080; serviceAccounts shop/cart matched \
         shop/cart; notSourceIps 192.168.0.0/16 matched 10.0.0.7"
    );
    let strict =
        policy(wire::Action::Deny, vec![wire::Match { not_principals: vec![presence()], ..Default::default() }]);
    assert_eq!(
        decide(&[strict], None).verdict.to_string(),
        "denied by shop/p rule 0: notPrincipals * matched none (no mTLS)"
    );
}

#[test]
fn what_allowed_can_be_said_in_words_too() {
    let web = principals(&["cluster.local/ns/shop/sa/cart", "cluster.local/ns/shop/sa/web"]);
    let policy = with_rules(wire::Action::Allow, vec![rule(vec![vec![principals(&["x"])]]), rule(vec![vec![web]])]);
    let verdict = decide(std::slice::from_ref(&policy), Some(&identity())).verdict;
    assert_eq!(verdict.to_string(), "allowed by shop/p rule 1");
    let (Some(key), Some(rule)) = verdict.policy() else { panic!("{verdict} names no rule") };
    assert_eq!(key, policy.key());
    assert_eq!(
        why(&policy, rule, &connection(Some(&identity()))),
        "principals cluster.local/ns/shop/sa/cart or cluster.local/ns/shop/sa/web matched cluster.local/ns/shop/sa/cart"
    );
}

#[test]
fn the_nearest_miss_is_the_rule_with_the_fewest_fields_that_failed() {
    let ports = |ports: &[u32]| wire::Match { destination_ports: ports.to_vec(), ..Default::default() };
    let far = message(
        "allow-db",
        wire::Action::Allow,
        vec![rule(vec![vec![principals(&["cluster.local/ns/bank/sa/db"])], vec![ports(&[5432])]])],
    );
    let near = message(
        "allow-web",
        wire::Action::Allow,
        vec![rule(vec![vec![ports(&[8080])], vec![principals(&["cluster.local/ns/shop/sa/web"])]])],
    );
    let policies = [taken(far.clone()), taken(near)];
    let Verdict::NotAllowed { policies: 2, closest } = decide(&policies, Some(&identity())).verdict else {
        panic!("not refused for want of an ALLOW")
    };
    assert_eq!((&*closest.policy, closest.rule, closest.failed.len()), ("shop/allow-web", Some(0), 1));
    assert_eq!(
        decide(&policies, Some(&identity())).verdict.to_string(),
        "not allowed by any of 2 policies; closest: shop/allow-web rule 0: principals wanted \
         cluster.local/ns/shop/sa/web, was cluster.local/ns/shop/sa/cart"
    );
    assert_eq!(
        decide(&[taken(far)], None).verdict.to_string(),
        "not allowed by 1 policy; closest: shop/allow-db rule 0: principals wanted cluster.local/ns/bank/sa/db, was none \
         (no mTLS); destinationPorts wanted 5432, was 8080"
    );
    let many: Vec<String> = (0..20).map(|i| format!("n{i}")).collect();
    let many = wire::Match { namespaces: many.iter().map(|n| exact(n)).collect(), ..Default::default() };
    assert_eq!(
        decide(&[policy(wire::Action::Allow, vec![many])], Some(&identity())).verdict.to_string(),
        "not allowed by 1 policy; closest: shop/p rule 0: namespaces wanted n0 or n1 or n10 or 17 more, was shop"
    );
    assert_eq!(
        decide(&[with_rules(wire::Action::Allow, vec![])], None).verdict.to_string(),
        "not allowed by 1 policy; closest: shop/p, which has no rules"
    );
}

#[test]
fn a_decision_can_be_written_as_json() {
    let web = rule(vec![vec![principals(&["cluster.local/ns/shop/sa/web"])]]);
    let decision = decide(&[taken(message("allow", wire::Action::Allow, vec![web]))], Some(&identity()));
    assert_eq!(
        serde_json::to_value(&decision).unwrap(),
        serde_json::json!({ "verdict": {
            "result": "notAllowed",
            "policies": 1,
            "closest": { "policy": "shop/allow", "rule": 0, "failed": [{
                "field": "principals",
                "wanted": "cluster.local/ns/shop/sa/web",
                "was": "cluster.local/ns/shop/sa/cart",
            }] },
        } })
    );
    assert_eq!(serde_json::to_value(decide(&[], None)).unwrap(), serde_json::json!({"verdict": {"result": "allowed"}}));
}

//! Tables: a policy in, what proxies get and what its author is told out.

mod safety;

use std::collections::BTreeMap;

use serde_json::{Value, json};
use ztunnel::manifests::{ObjectName, SecurityPolicy};
use ztunnel::proto::security as wire;

use super::*;

/// An object with a name, a namespace and a spec.
pub(crate) fn object(path: &str, spec: Value) -> SecurityPolicy {
    with_metadata(path, json!({}), spec)
}

pub(crate) fn with_metadata(path: &str, metadata: Value, spec: Value) -> SecurityPolicy {
    let (namespace, name) = path.split_once('/').unwrap();
    let mut full = json!({"name": name, "namespace": namespace});
    full.as_object_mut().unwrap().extend(metadata.as_object().unwrap().clone());
    SecurityPolicy { metadata: serde_json::from_value(full).unwrap(), spec: Ok(spec) }
}

pub(crate) fn mesh() -> MeshNames {
    MeshNames { root_namespace: "root".into(), trust_domain: "cluster.local".into() }
}

fn translate(path: &str, spec: Value) -> Translation {
    authorization_policy(&mesh(), &object(path, spec))
}

/// Action, scope and rules, as JSON.
fn sent(translation: &Translation) -> Option<(String, String, Value)> {
    let json = super::json(translation.resource.as_ref()?);
    let text = |name: &str| json[name].as_str().unwrap().to_owned();
    Some((text("action"), text("scope"), json["rules"].clone()))
}

fn findings(outcome: &Outcome) -> Vec<String> {
    outcome.findings.iter().map(ToString::to_string).collect()
}

#[test]
fn form_follows_selector_namespace_action_and_annotation() {
    let rules = json!([{"to": [{"operation": {"ports": ["80"]}}]}]);
    let spec = |more: Value| {
        let mut spec = json!({"rules": rules});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let app = json!({"matchLabels": {"app": "cart"}});
    let gateway = json!({"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": "waypoint"});
    let sent_as =
        |action: &str, scope: &str| Some((action.to_owned(), scope.to_owned(), json!([[[{"ports": ["80"]}]]])));
    for (what, path, more, expected, state, target) in [
        ("nothing", "shop/p", json!({}), sent_as("ALLOW", "NAMESPACE"), State::Enforced, "all pods in namespace shop"),
        (
            "root namespace",
            "root/p",
            json!({}),
            sent_as("ALLOW", "GLOBAL"),
            State::Enforced,
            "all pods in all namespaces",
        ),
        (
            "selector",
            "shop/p",
            json!({"selector": app}),
            sent_as("ALLOW", "WORKLOAD_SELECTOR"),
            State::Enforced,
            "pods with app=cart in namespace shop",
        ),
        (
            "selector in the root namespace",
            "root/p",
            json!({"selector": app}),
            sent_as("ALLOW", "WORKLOAD_SELECTOR"),
            State::Enforced,
            "pods with app=cart in all namespaces",
        ),
        (
            "empty selector",
            "shop/p",
            json!({"selector": {}}),
            sent_as("ALLOW", "NAMESPACE"),
            State::Enforced,
            "all pods in namespace shop",
        ),
        ("ALLOW", "shop/p", json!({"action": "ALLOW"}), sent_as("ALLOW", "NAMESPACE"), State::Enforced, ""),
        ("DENY", "shop/p", json!({"action": "DENY"}), sent_as("DENY", "NAMESPACE"), State::Enforced, ""),
        ("AUDIT", "shop/p", json!({"action": "AUDIT"}), sent_as("AUDIT", "NAMESPACE"), State::Reported, ""),
        ("CUSTOM", "shop/p", json!({"action": "CUSTOM", "provider": {"name": "x"}}), None, State::Unsupported, ""),
        ("targetRefs", "shop/p", json!({"targetRefs": [gateway]}), None, State::Waypoint, ""),
        ("targetRef", "shop/p", json!({"targetRef": gateway}), None, State::Waypoint, ""),
        ("no targetRefs", "shop/p", json!({"targetRefs": []}), sent_as("ALLOW", "NAMESPACE"), State::Enforced, ""),
    ] {
        let translation = translate(path, spec(more));
        assert_eq!((sent(&translation), translation.outcome.state), (expected, state), "{what}");
        assert!(target.is_empty() || translation.target.to_string() == target, "{what}: {}", translation.target);
    }
    for (value, dry_run, state) in [
        ("true", true, State::Reported),
        ("1", true, State::Reported),
        ("false", false, State::Enforced),
        ("yes", false, State::Invalid),
    ] {
        let metadata = json!({"annotations": {"istio.io/dry-run": value}});
        let translation =
            authorization_policy(&mesh(), &with_metadata("shop/p", metadata, spec(json!({"action": "DENY"}))));
        assert_eq!((translation.resource.unwrap().dry_run, translation.outcome.state), (dry_run, state), "{value}");
    }
}

#[test]
fn each_rule_becomes_a_rule_with_a_clause_for_to_one_for_from_and_one_for_each_condition() {
    let all_sources = json!({
        "principals": ["td/ns/a/sa/b", "spiffe://td/ns/a/*"], "notPrincipals": ["*/sa/c"], "namespaces": ["a", "*"],
        "notNamespaces": ["b*"], "ipBlocks": ["10.0.0.0/8", "fd00::1"], "notIpBlocks": ["::ffff:10.0.0.9", "10.0.0.77/24"],
    });
    let cases = [
        ("a rule with nothing matches all", json!([{}]), json!([[]])),
        ("no rules", json!([]), json!([])),
        (
            "to: one match for each item",
            json!([{"to": [{"operation": {"ports": ["80", "81"]}}, {"operation": {"notPorts": ["90"]}}]}]),
            json!([[[{"ports": ["80", "81"]}, {"notPorts": ["90"]}]]]),
        ),
        (
            "from: all kinds",
            json!([{"from": [{"source": all_sources}]}]),
            json!([[[{
                "principals": ["td/ns/a/sa/b", "td/ns/a/*"], "notPrincipals": ["*/sa/c"], "namespaces": ["a", "*"],
                "notNamespaces": ["b*"], "ipBlocks": ["10.0.0.0/8", "fd00::1"], "notIpBlocks": ["10.0.0.9", "10.0.0.0/24"],
            }]]]),
        ),
        (
            "service accounts are of the policy's namespace unless they name one",
            json!([{"from": [{"source": {"serviceAccounts": ["x", "a/y"]}}, {"source": {"notServiceAccounts": ["z"]}}]}]),
            json!([[[{"serviceAccounts": ["shop/x", "a/y"]}, {"notServiceAccounts": ["shop/z"]}]]]),
        ),
        (
            "when: one clause each",
            json!([{"when": [
                {"key": "source.ip", "values": ["10.0.0.1"], "notValues": ["10.0.0.2"]},
                {"key": "source.namespace", "values": ["a*"]},
                {"key": "source.principal", "notValues": ["*"]},
                {"key": "destination.ip", "values": ["10.1.0.0/16"]},
                {"key": "destination.port", "values": ["80"], "notValues": ["81"]},
            ]}]),
            json!([[
                [{"ipBlocks": ["10.0.0.1"], "notIpBlocks": ["10.0.0.2"]}],
                [{"namespaces": ["a*"]}],
                [{"notPrincipals": ["*"]}],
                [{"destinationIps": ["10.1.0.0/16"]}],
                [{"ports": ["80"], "notPorts": ["81"]}],
            ]]),
        ),
        (
            "several rules, each with all three",
            json!([
                {
                    "to": [{"operation": {"ports": ["80"]}}], "from": [{"source": {"namespaces": ["a"]}}],
                    "when": [{"key": "source.ip", "values": ["10.0.0.1"]}],
                },
                {"from": [{"source": {"namespaces": ["b"]}}]},
            ]),
            json!([[[{"ports": ["80"]}], [{"namespaces": ["a"]}], [{"ipBlocks": ["10.0.0.1"]}]], [[{"namespaces": ["b"]}]]]),
        ),
    ];
    for (what, rules, expected) in cases {
        for action in ["ALLOW", "DENY", "AUDIT"] {
            let translation = translate("shop/p", json!({"action": action, "rules": rules}));
            assert_eq!(sent(&translation).unwrap().2, expected, "{what}");
            let state = match action {
                "ALLOW" => State::Enforced,
                _ if rules == json!([]) => State::NoEffect,
                "DENY" => State::Enforced,
                _ => State::Reported,
            };
            assert_eq!(translation.outcome.state, state, "{what}");
        }
    }
    for spec in [json!({}), Value::Null] {
        let nothing = translate("shop/p", spec);
        assert_eq!(sent(&nothing).unwrap(), ("ALLOW".into(), "NAMESPACE".into(), json!([])), "it allows nothing");
        assert_eq!(nothing.outcome.state, State::Enforced);
    }
}

/// §6.3, with our own way for DENY: what cannot be judged is taken as met.
#[test]
fn what_only_a_waypoint_can_see_never_lets_more_pass() {
    let l7_operations = ["hosts", "notHosts", "methods", "notMethods", "paths", "notPaths"];
    let l7_sources = [
        "requestPrincipals",
        "notRequestPrincipals",
        "remoteIpBlocks",
        "notRemoteIpBlocks",
        "trustDomains",
        "notTrustDomains",
    ];
    let l7_keys = ["request.headers[x]", "request.auth.claims[a]", "remote.ip", "connection.sni", "source.trustDomain"];
    let ports = json!([[[{"ports": ["80"]}]]]);
    let from = |source: Value| json!([{"from": [{"source": source}]}]);
    let to = |operation: Value| json!([{"to": [{"operation": operation}]}]);
    // Rules, where the finding is, what DENY comes to.
    let mut cases = Vec::new();
    for field in l7_operations {
        let path = format!("spec.rules[0].to[0].operation.{field}");
        cases.push((to(json!({field: ["x"]})), path.clone(), json!([[]])));
        cases.push((to(json!({field: ["x"], "ports": ["80"]})), path, ports.clone()));
    }
    for field in l7_sources {
        let path = format!("spec.rules[0].from[0].source.{field}");
        cases.push((from(json!({field: ["x"]})), path.clone(), json!([[]])));
        cases.push((from(json!({field: ["x"], "namespaces": ["a"]})), path, json!([[[{"namespaces": ["a"]}]]])));
    }
    for key in l7_keys {
        let rules = json!([{"to": [{"operation": {"ports": ["80"]}}], "when": [{"key": key, "values": ["x"]}]}]);
        cases.push((rules, "spec.rules[0].when[0].key".into(), ports.clone()));
        cases.push((
            json!([{"when": [{"key": key, "values": ["x"]}]}]),
            "spec.rules[0].when[0].key".into(),
            json!([[]]),
        ));
    }
    // An item of HTTP beside one of L4: either may match, so the first may always.
    let either = json!([{
        "to": [{"operation": {"paths": ["/admin"]}}, {"operation": {"ports": ["80"]}}],
        "from": [{"source": {"namespaces": ["a"]}}],
    }]);
    cases.push((either, "spec.rules[0].to[0].operation.paths".into(), json!([[[{"namespaces": ["a"]}]]])));
    for (rules, path, denied) in cases {
        let deny = translate("shop/p", json!({"action": "DENY", "rules": rules}));
        assert_eq!(sent(&deny).unwrap().2, denied, "{rules}");
        assert_eq!(deny.outcome.state, State::Broader);
        assert!(findings(&deny.outcome)[0].starts_with(&format!("{path}: not at L4")), "{:?}", findings(&deny.outcome));

        // Another rule of the policy is as it was.
        let mut more = rules.clone();
        more.as_array_mut().unwrap().push(json!({"from": [{"source": {"namespaces": ["b"]}}]}));
        let allow = translate("shop/p", json!({"rules": more}));
        assert_eq!(sent(&allow).unwrap().2, json!([[[{"namespaces": ["b"]}]]]), "{rules}");
        assert_eq!(allow.outcome.state, State::Stricter);
        let alone = translate("shop/p", json!({"rules": rules}));
        assert_eq!(sent(&alone).unwrap().2, json!([]), "no rule is left, everything is denied: {rules}");
        let audit = translate("shop/p", json!({"action": "AUDIT", "rules": rules}));
        assert_eq!((sent(&audit).unwrap().2, audit.outcome.state), (denied, State::Broader));
    }
}

#[test]
fn a_value_that_is_not_understood_never_lets_more_pass() {
    let from = |source: Value| json!([{"from": [{"source": source}]}]);
    let to = |operation: Value| json!([{"to": [{"operation": operation}]}]);
    let when = |condition: Value| json!([{"when": [condition]}]);
    for (rules, path, denied) in [
        (to(json!({"ports": ["80", "http"]})), "to[0].operation.ports[1]", json!([[]])),
        (to(json!({"ports": [80]})), "to[0].operation.ports[0]", json!([[]])),
        (to(json!({"ports": "80"})), "to[0].operation.ports", json!([[]])),
        (to(json!({"ports": ["0"]})), "to[0].operation.ports[0]", json!([[]])),
        (to(json!({"ports": ["70000"]})), "to[0].operation.ports[0]", json!([[]])),
        (to(json!({"notPorts": ["80", "x"]})), "to[0].operation.notPorts[1]", json!([[[{"notPorts": ["80"]}]]])),
        (to(json!({"ports": ["80"], "prots": ["81"]})), "to[0].operation.prots", json!([[[{"ports": ["80"]}]]])),
        (to(json!({})), "to[0].operation", json!([[]])),
        (to(json!({"ports": []})), "to[0].operation", json!([[]])),
        (json!([{"to": [{}]}]), "to[0]", json!([[]])),
        (json!([{"to": []}]), "to", json!([[]])),
        (json!([{"to": {}}]), "to", json!([[]])),
        (json!([{"from": [null]}]), "from[0]", json!([[]])),
        (json!([{"form": [{"source": {"namespaces": ["a"]}}]}]), "form", json!([[]])),
        (json!([{"when": []}]), "when", json!([[]])),
        (from(json!({"principals": ["a*b"]})), "from[0].source.principals[0]", json!([[]])),
        (from(json!({"principals": ["*a*"]})), "from[0].source.principals[0]", json!([[]])),
        (from(json!({"principals": [""]})), "from[0].source.principals[0]", json!([[]])),
        (from(json!({"serviceAccounts": ["a/b/c"]})), "from[0].source.serviceAccounts[0]", json!([[]])),
        (from(json!({"serviceAccounts": ["a*"]})), "from[0].source.serviceAccounts[0]", json!([[]])),
        (
            from(json!({"serviceAccounts": ["a"], "namespaces": ["b"]})),
            "from[0].source.serviceAccounts",
            json!([[[{"namespaces": ["b"]}]]]),
        ),
        (from(json!({"ipBlocks": ["10.0.0.0/33"]})), "from[0].source.ipBlocks[0]", json!([[]])),
        (from(json!({"ipBlocks": ["example.com"]})), "from[0].source.ipBlocks[0]", json!([[]])),
        (when(json!({"key": "source.port", "values": ["1"]})), "when[0].key", json!([[]])),
        (when(json!({"values": ["1"]})), "when[0]", json!([[]])),
        (when(json!({"key": "destination.port"})), "when[0]", json!([[]])),
        (when(json!({"key": "destination.port", "values": []})), "when[0].values", json!([[]])),
        (
            when(json!({"key": "destination.port", "values": ["x"], "notValues": ["80"]})),
            "when[0].values[0]",
            json!([[[{"notPorts": ["80"]}]]]),
        ),
    ] {
        let deny = translate("shop/p", json!({"action": "DENY", "rules": rules}));
        assert_eq!((sent(&deny).unwrap().2, deny.outcome.state), (denied, State::Invalid), "{rules}");
        let expected = format!("spec.rules[0].{path}: invalid");
        assert!(
            findings(&deny.outcome).iter().any(|f| f.starts_with(&expected)),
            "{rules}: {:?}",
            findings(&deny.outcome)
        );
        let allow = translate("shop/p", json!({"rules": rules}));
        assert_eq!((sent(&allow).unwrap().2, allow.outcome.state), (json!([]), State::Invalid), "{rules}");
    }
}

#[test]
fn a_policy_that_is_not_understood_denies_where_it_would_apply() {
    let all = |scope: &str| Some(("DENY".to_owned(), scope.to_owned(), json!([[]])));
    let app = json!({"matchLabels": {"app": "cart"}});
    let gateway = json!({"kind": "Gateway", "name": "waypoint"});
    for (spec, path, scope) in [
        (json!({"action": "allow"}), "spec.action", "NAMESPACE"),
        (json!({"action": 1, "selector": app}), "spec.action", "WORKLOAD_SELECTOR"),
        (json!({"rule": [{}], "action": "DENY"}), "spec.rule", "NAMESPACE"),
        (json!({"rules": {}}), "spec.rules", "NAMESPACE"),
        (json!("DENY"), "spec", "NAMESPACE"),
        (json!({"provider": {"name": "x"}}), "spec.provider", "NAMESPACE"),
        (json!({"selector": app, "targetRefs": [gateway]}), "spec.targetRefs", "WORKLOAD_SELECTOR"),
        (json!({"targetRefs": [{"kind": "Gateway"}]}), "spec.targetRefs[0]", "NAMESPACE"),
        (json!({"targetRefs": "waypoint"}), "spec.targetRefs", "NAMESPACE"),
        // What is left of the selector selects more.
        (
            json!({"selector": {"matchLabels": {"app": "cart", "v": 2}}}),
            "spec.selector.matchLabels.v",
            "WORKLOAD_SELECTOR",
        ),
        (json!({"selector": {"matchLabels": {"app": "c*"}}}), "spec.selector.matchLabels.app", "NAMESPACE"),
        (json!({"selector": {"matchExpressions": []}}), "spec.selector.matchExpressions", "NAMESPACE"),
        (json!({"selector": []}), "spec.selector", "NAMESPACE"),
    ] {
        let translation = translate("shop/p", spec.clone());
        assert_eq!((sent(&translation), translation.outcome.state), (all(scope), State::Invalid), "{spec}");
        assert!(
            findings(&translation.outcome)[0].starts_with(&format!("{path}: invalid")),
            "{:?}",
            findings(&translation.outcome)
        );
        let [accepted, fully] = &translation.outcome.conditions()[..] else { panic!() };
        assert_eq!((accepted.status, accepted.reason, fully.status), ("False", "Invalid", "False"));
        assert!(accepted.message.contains(path), "{}", accepted.message);
    }
    let unreadable = SecurityPolicy::stand_in(&ObjectName::new("root", "p"), "a bad document");
    let translation = authorization_policy(&mesh(), &unreadable);
    assert_eq!((sent(&translation), translation.outcome.state), (all("GLOBAL"), State::Invalid));
    assert!(translation.outcome.message().contains("a bad document"));
    // What never decides does not start to.
    let audit = translate("shop/p", json!({"action": "AUDIT", "selector": []}));
    assert_eq!(sent(&audit).unwrap().0, "AUDIT");
    let metadata = json!({"annotations": {"istio.io/dry-run": "true"}});
    let dry = authorization_policy(&mesh(), &with_metadata("shop/p", metadata, json!({"action": "x"})));
    assert!(dry.resource.unwrap().dry_run);
    // For a waypoint to refuse.
    let at_waypoint =
        translate("shop/p", json!({"targetRefs": [gateway], "rules": [{"to": [{"operation": {"prots": []}}]}]}));
    assert_eq!((sent(&at_waypoint), at_waypoint.outcome.state), (None, State::Invalid));
}

#[test]
fn what_can_never_match_is_pointed_out() {
    for (source, noted) in [
        (json!({"principals": ["cluster.local/sa/x"]}), "spec.rules[0].from[0].source.principals[0]"),
        (json!({"principals": ["*", "other/ns/a/sa/b"]}), "spec.rules[0].from[0].source.principals[1]"),
        (json!({"principals": ["other/*"]}), "spec.rules[0].from[0].source.principals[0]"),
        (json!({"namespaces": ["Shop"]}), "spec.rules[0].from[0].source.namespaces[0]"),
        (json!({"namespaces": ["a"], "principals": []}), "spec.rules[0].from[0].source.principals"),
    ] {
        let translation = translate("shop/p", json!({"action": "DENY", "rules": [{"from": [{"source": source}]}]}));
        assert_eq!(translation.outcome.state, State::Enforced);
        assert!(findings(&translation.outcome)[0].starts_with(noted), "{:?}", findings(&translation.outcome));
    }
}

#[test]
fn conditions_say_what_becomes_of_a_policy() {
    let accepted = |spec: Value| {
        let outcome = translate("shop/p", spec).outcome;
        let conditions = outcome.conditions();
        let one = |kind: &str| {
            let found = conditions.iter().find(|c| c.kind == kind).unwrap();
            (found.status, found.reason)
        };
        (one("ZtunnelAccepted"), one("FullyEnforced"), conditions[0].message.clone())
    };
    let http = json!([{"to": [{"operation": {"paths": ["/x"]}}]}]);
    let refs = json!([{"kind": "Service", "name": "cart"}]);
    for (spec, ztunnel, fully, message) in [
        (json!({}), ("True", "Accepted"), ("True", "AsWritten"), "as written"),
        (json!({"action": "AUDIT", "rules": [{}]}), ("True", "Accepted"), ("True", "OnlyReported"), "decides nothing"),
        (json!({"rules": http}), ("True", "UnsupportedValue"), ("False", "StricterThanWritten"), "operation.paths"),
        (
            json!({"rules": http, "action": "DENY"}),
            ("True", "UnsupportedValue"),
            ("False", "BroaderThanWritten"),
            "operation.paths",
        ),
        (json!({"action": "DENY"}), ("True", "Accepted"), ("False", "NoEffect"), "no effect"),
        (json!({"action": "CUSTOM"}), ("False", "UnsupportedValue"), ("False", "NotEnforced"), "authorizer"),
        (json!({"targetRefs": refs}), ("False", "TargetsWaypoint"), ("Unknown", "TargetsWaypoint"), "waypoint"),
    ] {
        let (is_ztunnel, is_fully, text) = accepted(spec.clone());
        assert_eq!((is_ztunnel, is_fully), (ztunnel, fully), "{spec}");
        assert!(text.contains(message), "{spec}: {text}");
    }
    let many: Vec<_> = (0..40).map(|_| json!("x")).collect();
    let (.., text) = accepted(json!({"rules": [{"to": [{"operation": {"ports": many}}]}]}));
    assert!(text.ends_with("and 28 more"), "{text}");
}

#[test]
fn meaning_is_in_plain_words() {
    for (spec, expected) in [
        (json!({}), "allows nothing: every connection is denied unless another policy allows it"),
        (json!({"rules": [{}]}), "rule 0 allows every connection"),
        (
            json!({"action": "DENY", "rules": [{
                "to": [{"operation": {"ports": ["80"], "notPorts": ["81"]}}],
                "from": [{"source": {"namespaces": ["a", "b*"]}}, {"source": {"ipBlocks": ["10.0.0.0/8"]}}],
            }]}),
            "rule 0 denies connections where the app's port is 80 and the app's port is not 81, and \
             either (the peer's namespace is a or b*) or (the peer's address is 10.0.0.0/8)",
        ),
    ] {
        assert_eq!(translate("shop/p", spec).outcome.meaning, [expected]);
    }
    // Proxies count the rules that they get.
    let rules = json!([{"to": [{"operation": {"paths": ["/x"]}}]}, {}]);
    assert_eq!(
        translate("shop/p", json!({"rules": rules})).outcome.meaning,
        ["rule 0 (spec.rules[1]) allows every connection"]
    );
}

/// What a pod's record names, and the rules of the policy for its ports, given PeerAuthentications by
/// `namespace/name`.
fn peers(objects: &[(&str, Value)]) -> PeerAuthentications {
    let mut all = PeerAuthentications::new("root");
    for (index, (path, spec)) in objects.iter().enumerate() {
        let (namespace, name) = path.split_once('/').unwrap();
        // Older ones first.
        let metadata = json!({"creationTimestamp": format!("2026-01-01T00:00:{index:02}Z")});
        all.set(&ObjectName::new(namespace, name), Some(&with_metadata(path, metadata, spec.clone())));
    }
    all
}

fn labels(app: &str) -> BTreeMap<String, String> {
    BTreeMap::from([("app".to_owned(), app.to_owned()), ("tier".to_owned(), "x".to_owned())])
}

const STRICT: &str = "root/istio_converted_static_strict";

fn mtls(mode: &str) -> Value {
    json!({"mtls": {"mode": mode}})
}

fn of_app(app: &str, mode: Option<&str>, ports: Value) -> Value {
    let mut spec = json!({"selector": {"matchLabels": {"app": app}}, "portLevelMtls": ports});
    if let Some(mode) = mode {
        spec["mtls"] = json!({"mode": mode});
    }
    spec
}

#[test]
fn the_nearest_mode_that_is_set_counts_and_the_oldest_of_one_level() {
    let s = Some(STRICT);
    let none = None;
    for (what, objects, expected) in [
        ("nothing", vec![], none),
        ("mesh", vec![("root/m", mtls("STRICT"))], s),
        ("mesh, permissive", vec![("root/m", mtls("PERMISSIVE"))], none),
        ("mesh, disabled", vec![("root/m", mtls("DISABLE"))], none),
        ("mesh, unset", vec![("root/m", mtls("UNSET"))], none),
        ("namespace", vec![("shop/n", mtls("STRICT"))], s),
        ("another namespace", vec![("yard/n", mtls("STRICT"))], none),
        ("workload", vec![("shop/w", of_app("cart", Some("STRICT"), json!({})))], s),
        ("another workload", vec![("shop/w", of_app("till", Some("STRICT"), json!({})))], none),
        ("namespace over mesh", vec![("root/m", mtls("STRICT")), ("shop/n", mtls("PERMISSIVE"))], none),
        ("namespace unset: the mesh's", vec![("root/m", mtls("STRICT")), ("shop/n", mtls("UNSET"))], s),
        ("no mtls: the mesh's", vec![("root/m", mtls("STRICT")), ("shop/n", json!({}))], s),
        (
            "workload over namespace",
            vec![("shop/n", mtls("STRICT")), ("shop/w", of_app("cart", Some("DISABLE"), json!({})))],
            none,
        ),
        (
            "workload unset: the namespace's",
            vec![
                ("root/m", mtls("PERMISSIVE")),
                ("shop/n", mtls("STRICT")),
                ("shop/w", of_app("cart", None, json!({}))),
            ],
            s,
        ),
        ("the oldest of the mesh", vec![("root/z", mtls("STRICT")), ("root/a", mtls("PERMISSIVE"))], s),
        ("the oldest of a namespace", vec![("shop/z", mtls("PERMISSIVE")), ("shop/a", mtls("STRICT"))], none),
        ("an older one of a namespace, unset", vec![("shop/z", mtls("UNSET")), ("shop/a", mtls("STRICT"))], s),
        ("an older one of the mesh, empty", vec![("root/z", json!({})), ("root/a", mtls("STRICT"))], s),
        (
            "an older one of a workload, unset",
            vec![
                ("shop/z", of_app("cart", None, json!({"80": {}}))),
                ("shop/a", of_app("cart", Some("STRICT"), json!({}))),
            ],
            s,
        ),
        (
            "the oldest of a workload",
            vec![
                ("shop/z", of_app("cart", Some("STRICT"), json!({}))),
                ("shop/a", json!({"selector": {"matchLabels": {"tier": "x"}}, "mtls": {"mode": "PERMISSIVE"}})),
            ],
            s,
        ),
        (
            "labels in the root namespace are for its own pods",
            vec![("root/w", of_app("cart", Some("STRICT"), json!({})))],
            none,
        ),
    ] {
        assert_eq!(peers(&objects).policies_of("shop", &labels("cart")).as_deref(), expected, "{what}");
    }
    let root = peers(&[("root/m", mtls("PERMISSIVE")), ("root/w", of_app("cart", Some("STRICT"), json!({})))]);
    assert_eq!(root.policies_of("root", &labels("cart")).as_deref(), s);
    assert_eq!(root.policies_of("root", &labels("till")), None);
    // Without times: by name; with one before without.
    let mut timeless = PeerAuthentications::new("root");
    timeless.set(&ObjectName::new("shop", "b"), Some(&object("shop/b", mtls("PERMISSIVE"))));
    timeless.set(&ObjectName::new("shop", "a"), Some(&object("shop/a", mtls("STRICT"))));
    assert_eq!(timeless.policies_of("shop", &labels("cart")).as_deref(), s);
    let timed = with_metadata("shop/c", json!({"creationTimestamp": "2026-01-01T00:00:00Z"}), mtls("PERMISSIVE"));
    timeless.set(&ObjectName::new("shop", "c"), Some(&timed));
    assert_eq!(timeless.policies_of("shop", &labels("cart")), None);
}

#[test]
fn the_policy_for_strict_pods_denies_those_without_identity() {
    let strict = peers(&[("root/m", mtls("STRICT"))]).static_strict();
    assert_eq!(
        super::json(&strict),
        json!({
            "name": "istio_converted_static_strict", "namespace": "root", "scope": "WORKLOAD_SELECTOR", "action": "DENY",
            "dryRun": false, "rules": [[[{"notPrincipals": ["*"]}]]],
        })
    );
}

#[test]
fn ports_that_differ_from_their_pod_get_a_policy_of_their_own() {
    let converted = Some("shop/converted_peer_authentication_w");
    let no_one = json!({"notPrincipals": ["*"]});
    let port = |port: &str| json!([[{"ports": [port], "notPrincipals": ["*"]}]]);
    for (what, parents, mode, ports, named, rules) in [
        ("a STRICT port", vec![], None, json!({"80": mtls_of("STRICT")}), converted, json!([port("80")])),
        (
            "several STRICT ports: any of them",
            vec![],
            Some("PERMISSIVE"),
            json!({"80": mtls_of("STRICT"), "81": mtls_of("STRICT"), "82": mtls_of("PERMISSIVE")}),
            converted,
            json!([port("80"), port("81")]),
        ),
        (
            "STRICT ports under a permissive namespace under a STRICT mesh",
            vec![("root/m", "STRICT"), ("shop/n", "PERMISSIVE")],
            None,
            json!({"80": mtls_of("STRICT")}),
            converted,
            json!([port("80")]),
        ),
        (
            "a permissive port under STRICT",
            vec![],
            Some("STRICT"),
            json!({"80": mtls_of("PERMISSIVE")}),
            converted,
            json!([[[{"notPorts": ["80"]}], [no_one]]]),
        ),
        (
            "several permissive ports under STRICT: all of them",
            vec![],
            Some("STRICT"),
            json!({"80": mtls_of("PERMISSIVE"), "81": mtls_of("DISABLE"), "82": mtls_of("STRICT"), "83": {}}),
            converted,
            json!([[[{"notPorts": ["80"]}], [{"notPorts": ["81"]}], [no_one]]]),
        ),
        (
            "a permissive port under a STRICT namespace",
            vec![("shop/n", "STRICT")],
            None,
            json!({"80": mtls_of("DISABLE")}),
            converted,
            json!([[[{"notPorts": ["80"]}], [no_one]]]),
        ),
        (
            "a permissive port under a STRICT mesh",
            vec![("root/m", "STRICT"), ("shop/n", "UNSET")],
            Some("UNSET"),
            json!({"80": mtls_of("PERMISSIVE")}),
            converted,
            json!([[[{"notPorts": ["80"]}], [no_one]]]),
        ),
        (
            "STRICT ports under STRICT",
            vec![],
            Some("STRICT"),
            json!({"80": mtls_of("STRICT")}),
            Some(STRICT),
            Value::Null,
        ),
        (
            "STRICT ports, STRICT mesh",
            vec![("root/m", "STRICT")],
            None,
            json!({"80": mtls_of("STRICT")}),
            Some(STRICT),
            Value::Null,
        ),
        ("permissive ports", vec![], Some("DISABLE"), json!({"80": mtls_of("PERMISSIVE")}), None, Value::Null),
        (
            "unset ports",
            vec![("shop/n", "STRICT")],
            None,
            json!({"80": mtls_of("UNSET"), "81": {}}),
            Some(STRICT),
            Value::Null,
        ),
    ] {
        let mut objects: Vec<_> = parents.into_iter().map(|(path, mode)| (path, mtls(mode))).collect();
        objects.push(("shop/w", of_app("cart", mode, ports)));
        let all = peers(&objects);
        assert_eq!(all.policies_of("shop", &labels("cart")).as_deref(), named, "{what}");
        let translation = all.translate(&ObjectName::new("shop", "w")).unwrap();
        assert_eq!(translation.outcome.state, State::Enforced, "{what}");
        let got = translation.resource.as_ref().map_or(Value::Null, |resource| {
            let json = super::json(resource);
            assert_eq!((&json["action"], &json["scope"]), (&json!("DENY"), &json!("WORKLOAD_SELECTOR")), "{what}");
            json["rules"].clone()
        });
        assert_eq!(got, rules, "{what}");
    }
}

fn mtls_of(mode: &str) -> Value {
    json!({"mode": mode})
}

#[test]
fn ports_are_ignored_without_labels_and_in_the_root_namespace_and_the_status_says_so() {
    for (path, mode, port, selector, state) in [
        ("shop/p", "PERMISSIVE", "STRICT", false, State::Weaker),
        ("shop/p", "STRICT", "PERMISSIVE", false, State::Stricter),
        ("root/p", "PERMISSIVE", "STRICT", false, State::Weaker),
        ("root/p", "PERMISSIVE", "STRICT", true, State::Weaker),
        ("root/p", "STRICT", "STRICT", true, State::Enforced),
    ] {
        let mut spec = json!({"mtls": {"mode": mode}, "portLevelMtls": {"80": {"mode": port}}});
        if selector {
            spec["selector"] = json!({"matchLabels": {"app": "cart"}});
        }
        let all = peers(&[(path, spec)]);
        let (namespace, name) = path.split_once('/').unwrap();
        let translation = all.translate(&ObjectName::new(namespace, name)).unwrap();
        assert_eq!((translation.resource, translation.outcome.state), (None, state), "{path} {mode} {port}");
        assert!(translation.outcome.message().contains("spec.portLevelMtls: ignored"));
        let named = all.policies_of(namespace, &labels("cart"));
        assert_eq!(named.is_some(), mode == "STRICT", "{path} {mode} {port}");
    }
}

#[test]
fn a_peer_authentication_that_is_not_understood_makes_strict_wherever_it_would_apply() {
    for (spec, path) in [
        (mtls("strict"), "spec.mtls.mode"),
        (json!({"mtls": "STRICT"}), "spec.mtls"),
        (json!({"mtls": {"mod": "STRICT"}}), "spec.mtls.mod"),
        (json!({"mode": "STRICT"}), "spec.mode"),
        (of_app("cart", None, json!({"http": mtls_of("PERMISSIVE")})), "spec.portLevelMtls.http"),
        (of_app("cart", None, json!({"80": mtls_of("x")})), "spec.portLevelMtls[\"80\"].mode"),
        (
            of_app("cart", None, json!({"080": mtls_of("STRICT"), "80": mtls_of("PERMISSIVE")})),
            "spec.portLevelMtls[\"80\"]",
        ),
        (of_app("cart", None, json!([])), "spec.portLevelMtls"),
        (json!({"selector": {"labels": {"app": "other"}}}), "spec.selector.labels"),
    ] {
        // Older and nearer ones say otherwise.
        let objects = [
            ("root/m", mtls("PERMISSIVE")),
            ("shop/n", mtls("PERMISSIVE")),
            ("shop/w", of_app("cart", Some("PERMISSIVE"), json!({}))),
            ("shop/bad", spec),
        ];
        let all = peers(&objects);
        assert_eq!(all.policies_of("shop", &labels("cart")).as_deref(), Some(STRICT), "{path}");
        assert_eq!(all.policies_of("yard", &labels("cart")), None, "{path}");
        let outcome = all.translate(&ObjectName::new("shop", "bad")).unwrap().outcome;
        assert_eq!(outcome.state, State::Invalid);
        assert!(
            findings(&outcome)[0].contains(path.trim_start_matches("spec.").split(['.', '[']).next().unwrap()),
            "{:?}",
            findings(&outcome)
        );
    }
    let mut all = peers(&[("yard/n", mtls("PERMISSIVE"))]);
    let root = ObjectName::new("root", "m");
    all.set(&root, Some(&SecurityPolicy::stand_in(&root, "unreadable")));
    assert_eq!(all.policies_of("yard", &labels("cart")).as_deref(), Some(STRICT), "unreadable, in the root namespace");
}

#[test]
fn one_that_is_overruled_is_told_by_whom() {
    let all = peers(&[
        ("shop/old", mtls("PERMISSIVE")),
        ("shop/new", mtls("STRICT")),
        ("shop/w1", of_app("cart", Some("PERMISSIVE"), json!({}))),
        ("shop/w2", of_app("cart", Some("STRICT"), json!({}))),
        ("shop/w3", json!({"selector": {"matchLabels": {"tier": "x"}}, "mtls": {"mode": "STRICT"}})),
        ("shop/w4", of_app("till", Some("STRICT"), json!({}))),
    ]);
    let outcome = |name: &str| all.translate(&ObjectName::new("shop", name)).unwrap().outcome;
    for (name, state, by) in [
        ("old", State::Enforced, None),
        ("new", State::NoEffect, Some("shop/old")),
        ("w1", State::Enforced, None),
        ("w2", State::NoEffect, Some("shop/w1")),
        ("w3", State::Enforced, Some("shop/w1")),
        ("w4", State::Enforced, Some("shop/w3")),
    ] {
        let outcome = outcome(name);
        assert_eq!(outcome.state, state, "{name}");
        assert_eq!(by.is_some(), !outcome.findings.is_empty(), "{name}: {:?}", findings(&outcome));
        assert!(by.is_none_or(|by| outcome.message().contains(by)), "{name}: {}", outcome.message());
    }
}

/// Used by the checks of what proxies decide.
pub(crate) fn rules_of(translation: &Translation) -> &wire::Authorization {
    translation.resource.as_ref().unwrap()
}

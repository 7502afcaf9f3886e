//! Whatever is written: a slow reading of the policy itself, in which what a node proxy cannot judge may be so or not,
//! against what the translated policy decides.

use std::net::IpAddr;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use ztunnel::proto::security as wire;
use ztunnel::proto::security::string_match::MatchType;

use super::{mesh, object, rules_of};
use crate::policy::{State, authorization_policy};

#[derive(Debug, Clone, Copy)]
struct Connection {
    /// Namespace and service account.
    identity: Option<(&'static str, &'static str)>,
    source: IpAddr,
    port: u16,
}

/// True, false, or not to be known.
type Truth = Option<bool>;

fn and(all: impl IntoIterator<Item = Truth>) -> Truth {
    let all: Vec<Truth> = all.into_iter().collect();
    match (all.contains(&Some(false)), all.contains(&None)) {
        (true, _) => Some(false),
        (false, true) => None,
        (false, false) => Some(true),
    }
}

fn or(all: impl IntoIterator<Item = Truth>) -> Truth {
    and(all.into_iter().map(|t| t.map(|t| !t))).map(|t| !t)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn more_never_passes_than_is_written(rules in prop::collection::vec(rule(), 1..4), seed in 0..1000usize) {
        for connection in connections().into_iter().cycle().skip(seed).take(12) {
            let written = or(rules.iter().map(|r| says_rule(r, connection)));
            let spec = |action: &str| json!({"action": action, "rules": rules});
            let deny = authorization_policy(&mesh(), &object("a/p", spec("DENY")));
            prop_assert_eq!(matches(rules_of(&deny), connection), written != Some(false), "DENY {:?}", connection);
            let allow = authorization_policy(&mesh(), &object("a/p", spec("ALLOW")));
            let allowed = matches(rules_of(&allow), connection);
            prop_assert!(!allowed || written == Some(true), "ALLOW {:?}", connection);
            if allow.outcome.state == State::Enforced {
                prop_assert_eq!(Some(allowed), written, "ALLOW, as written {:?}", connection);
            }
            prop_assert_eq!(allow.outcome.state == State::Enforced, deny.outcome.state == State::Enforced);
        }
    }
}

fn connections() -> Vec<Connection> {
    let mut all = Vec::new();
    for identity in [None, Some(("a", "x")), Some(("b", "y")), Some(("ab", "x"))] {
        for source in ["10.0.0.1", "10.0.0.9", "10.1.0.1", "fd00::1"] {
            for port in [80, 90, 100] {
                all.push(Connection { identity, source: source.parse().unwrap(), port });
            }
        }
    }
    all
}

/// Some values of a list, seldom wrong ones.
fn some(good: &'static [&'static str], bad: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let values = subsequence(good, 0..=good.len().min(3));
    let wrong = prop::option::weighted(0.08, select(bad));
    (values, wrong, prop::bool::weighted(0.02)).prop_map(|(values, wrong, number)| {
        let mut list: Vec<Value> = values.into_iter().chain(wrong).map(|v| json!(v)).collect();
        if number {
            list.push(json!(80));
        }
        json!(list)
    })
}

/// Few of some fields.
fn fields(all: Vec<(&'static str, f64, BoxedStrategy<Value>)>) -> impl Strategy<Value = Value> {
    let fields: Vec<_> =
        all.into_iter().map(|(name, often, value)| (Just(name), prop::option::weighted(often, value))).collect();
    fields.prop_map(|fields| {
        Value::Object(fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect())
    })
}

const PRINCIPALS: [&str; 6] = [
    "cluster.local/ns/a/sa/x",
    "spiffe://cluster.local/ns/b/sa/y",
    "cluster.local/ns/a*",
    "*/sa/x",
    "*",
    "other/ns/a/sa/x",
];
const NAMESPACES: [&str; 5] = ["a", "b", "a*", "*b", "*"];
const ACCOUNTS: [&str; 3] = ["x", "b/y", "a/x"];
const RANGES: [&str; 5] = ["10.0.0.1", "10.0.0.0/24", "::ffff:10.1.0.0/112", "fd00::/8", "0.0.0.0/0"];
const PORTS: [&str; 3] = ["80", "90", "443"];

fn source() -> impl Strategy<Value = Value> {
    let principals = || some(&PRINCIPALS, &["a*b", ""]).boxed();
    let namespaces = || some(&NAMESPACES, &["*a*", ""]).boxed();
    let accounts = || some(&ACCOUNTS, &["a/b/c", "*"]).boxed();
    let ranges = || some(&RANGES, &["10.0.0.0/99", "host"]).boxed();
    fields(vec![
        ("principals", 0.2, principals()),
        ("notPrincipals", 0.1, principals()),
        ("namespaces", 0.2, namespaces()),
        ("notNamespaces", 0.1, namespaces()),
        ("serviceAccounts", 0.1, accounts()),
        ("notServiceAccounts", 0.05, accounts()),
        ("ipBlocks", 0.2, ranges()),
        ("notIpBlocks", 0.1, ranges()),
        ("requestPrincipals", 0.05, some(&["x"], &["y"]).boxed()),
        ("nonsense", 0.02, some(&["x"], &["y"]).boxed()),
    ])
    .prop_map(|source| json!({"source": source}))
}

fn operation() -> impl Strategy<Value = Value> {
    let ports = || some(&PORTS, &["http", "0"]).boxed();
    fields(vec![
        ("ports", 0.5, ports()),
        ("notPorts", 0.3, ports()),
        ("paths", 0.08, some(&["/x"], &["/y"]).boxed()),
        ("nonsense", 0.02, some(&["x"], &["y"]).boxed()),
    ])
    .prop_map(|operation| json!({"operation": operation}))
}

fn condition() -> impl Strategy<Value = Value> {
    let of = |key: &'static str, values: BoxedStrategy<Value>| {
        fields(vec![("values", 0.7, values.clone()), ("notValues", 0.3, values)]).prop_map(move |mut condition| {
            condition["key"] = json!(key);
            condition
        })
    };
    prop_oneof![
        4 => of("source.ip", some(&RANGES, &["host"]).boxed()),
        4 => of("source.namespace", some(&NAMESPACES, &[""]).boxed()),
        4 => of("source.principal", some(&PRINCIPALS, &[""]).boxed()),
        4 => of("destination.port", some(&PORTS, &["x"]).boxed()),
        1 => of("request.headers[x]", some(&["x"], &["y"]).boxed()),
        1 => of("nonsense", some(&["x"], &["y"]).boxed()),
    ]
}

fn rule() -> impl Strategy<Value = Value> {
    let list = |often: f64, item: BoxedStrategy<Value>| {
        prop::option::weighted(
            often,
            prop_oneof![
                1 => Just(json!([])),
                30 => prop::collection::vec(item, 1..4).prop_map(Value::Array),
            ],
        )
    };
    (
        list(0.7, source().boxed()),
        list(0.5, operation().boxed()),
        list(0.3, condition().boxed()),
        prop::bool::weighted(0.02),
    )
        .prop_map(|(from, to, when, nonsense)| {
            let mut rule = json!({});
            for (name, list) in [("from", from), ("to", to), ("when", when)] {
                if let Some(list) = list {
                    rule[name] = list;
                }
            }
            if nonsense {
                rule["nonsense"] = json!([]);
            }
            rule
        })
}

fn says_rule(rule: &Value, c: Connection) -> Truth {
    let items = |name: &str, says: fn(&Value, Connection) -> Truth| match rule.get(name).map(|l| l.as_array().unwrap())
    {
        None => Some(true),
        Some(list) if list.is_empty() => None,
        Some(list) => or(list.iter().map(|item| says(item, c))),
    };
    let when = match rule.get("when").map(|l| l.as_array().unwrap()) {
        None => Some(true),
        Some(list) if list.is_empty() => None,
        Some(list) => and(list.iter().map(|condition| says_condition(condition, c))),
    };
    let nonsense = if rule.get("nonsense").is_some() { None } else { Some(true) };
    and([items("from", says_source), items("to", says_operation), when, nonsense])
}

fn says_source(item: &Value, c: Connection) -> Truth {
    let source = &item["source"];
    let principal = |v: &str| says_text(v.strip_prefix("spiffe://").unwrap_or(v), principal_of(c).as_deref());
    let namespace = |v: &str| says_text(v, c.identity.map(|i| i.0));
    let account = |v: &str| match v.split('/').collect::<Vec<_>>()[..] {
        _ if v.contains('*') => None,
        [name] => Some(c.identity == Some(("a", name))),
        [ns, name] => Some(c.identity.is_some_and(|i| i == (ns, name))),
        _ => None,
    };
    let together = |accounts: &str, others: [&str; 2]| {
        let both = source.get(accounts).is_some() && others.iter().any(|o| source.get(o).is_some());
        if both { None } else { Some(true) }
    };
    let accounts = |name: &str, others: [&str; 2], positive: bool| {
        let clash = together(name, others);
        if clash.is_none() { None } else { says_list(source.get(name), positive, &account) }
    };
    and([
        says_list(source.get("principals"), true, &principal),
        says_list(source.get("notPrincipals"), false, &principal),
        says_list(source.get("namespaces"), true, &namespace),
        says_list(source.get("notNamespaces"), false, &namespace),
        accounts("serviceAccounts", ["principals", "namespaces"], true),
        accounts("notServiceAccounts", ["notPrincipals", "notNamespaces"], false),
        says_list(source.get("ipBlocks"), true, &|v| says_range(v, c.source)),
        says_list(source.get("notIpBlocks"), false, &|v| says_range(v, c.source)),
        unknown(source, &["requestPrincipals", "nonsense"]),
    ])
}

fn says_operation(item: &Value, c: Connection) -> Truth {
    let operation = &item["operation"];
    and([
        says_list(operation.get("ports"), true, &|v| says_port(v, c.port)),
        says_list(operation.get("notPorts"), false, &|v| says_port(v, c.port)),
        unknown(operation, &["paths", "nonsense"]),
    ])
}

/// What cannot be judged; and an item that says nothing may be meant as anything.
fn unknown(item: &Value, fields: &[&str]) -> Truth {
    let item = item.as_object().unwrap();
    let is_set = |name: &str| item.get(name).is_some_and(|l| name == "nonsense" || !l.as_array().unwrap().is_empty());
    let says_nothing = item.values().all(|list| list.as_array().unwrap().is_empty());
    if fields.iter().any(|f| is_set(f)) || says_nothing { None } else { Some(true) }
}

fn says_condition(condition: &Value, c: Connection) -> Truth {
    let says: Box<dyn Fn(&str) -> Truth> = match condition["key"].as_str().unwrap() {
        "source.ip" => Box::new(|v| says_range(v, c.source)),
        "source.namespace" => Box::new(|v| says_text(v, c.identity.map(|i| i.0))),
        "source.principal" => {
            Box::new(|v| says_text(v.strip_prefix("spiffe://").unwrap_or(v), principal_of(c).as_deref()))
        }
        "destination.port" => Box::new(|v| says_port(v, c.port)),
        _ => return None,
    };
    let lists = [condition.get("values"), condition.get("notValues")];
    if lists.iter().all(Option::is_none) {
        return None;
    }
    // Empty, it may be meant as any.
    let empty = |list: &Option<&Value>| list.is_some_and(|l| l.as_array().unwrap().is_empty());
    let doubt = if lists.iter().any(empty) { None } else { Some(true) };
    and([says_list(lists[0], true, &*says), says_list(lists[1], false, &*says), doubt])
}

fn says_list(list: Option<&Value>, positive: bool, says: &dyn Fn(&str) -> Truth) -> Truth {
    let values = list.map(|l| l.as_array().unwrap().clone()).unwrap_or_default();
    if values.is_empty() {
        return Some(true);
    }
    let any = or(values.iter().map(|v| v.as_str().and_then(says)));
    if positive { any } else { any.map(|t| !t) }
}

fn says_text(pattern: &str, value: Option<&str>) -> Truth {
    let stars = pattern.matches('*').count();
    if pattern.is_empty() || stars > 1 || (stars == 1 && !pattern.starts_with('*') && !pattern.ends_with('*')) {
        return None;
    }
    let Some(value) = value else { return Some(false) };
    Some(match (pattern.strip_prefix('*'), pattern.strip_suffix('*')) {
        (Some(""), _) => !value.is_empty(),
        (Some(end), _) => value.ends_with(end),
        (_, Some(start)) => value.starts_with(start),
        _ => value == pattern,
    })
}

fn says_port(text: &str, port: u16) -> Truth {
    text.parse::<u16>().ok().filter(|p| *p != 0).map(|p| p == port)
}

fn says_range(text: &str, ip: IpAddr) -> Truth {
    // The ranges of this test, one by one.
    let text = if text == "::ffff:10.1.0.0/112" { "10.1.0.0/16" } else { text };
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address == ip);
    }
    let net = text.parse::<ipnet::IpNet>().ok()?;
    Some(net.contains(&ip))
}

fn principal_of(c: Connection) -> Option<String> {
    c.identity.map(|(namespace, account)| format!("cluster.local/ns/{namespace}/sa/{account}"))
}

/// Whether a policy matches, by the rules of the wire: rules OR, clauses AND, matches OR, fields AND; a match that says
/// nothing is none, an empty clause or rule always matches.
fn matches(policy: &wire::Authorization, c: Connection) -> bool {
    let clause = |clause: &wire::Clause| {
        clause.matches.is_empty() || clause.matches.iter().any(|m| *m != wire::Match::default() && matches_one(m, c))
    };
    policy.rules.iter().any(|rule| rule.clauses.iter().all(clause))
}

fn matches_one(m: &wire::Match, c: Connection) -> bool {
    let text = |m: &wire::StringMatch, value: Option<&str>| {
        value.is_some_and(|value| match m.match_type.as_ref().unwrap() {
            MatchType::Exact(text) => value == text,
            MatchType::Prefix(text) => value.starts_with(text),
            MatchType::Suffix(text) => value.ends_with(text),
            MatchType::Presence(()) => !value.is_empty(),
        })
    };
    let range = |a: &wire::Address| {
        let ip = match a.address.len() {
            4 => IpAddr::from(<[u8; 4]>::try_from(&*a.address).unwrap()),
            _ => IpAddr::from(<[u8; 16]>::try_from(&*a.address).unwrap()),
        };
        ipnet::IpNet::new(ip, u8::try_from(a.length).unwrap()).unwrap().contains(&c.source)
    };
    let principal = principal_of(c);
    let namespace = c.identity.map(|i| i.0);
    let account = |a: &wire::ServiceAccountMatch| c.identity == Some((&*a.namespace, &*a.service_account));
    fn both<T>(positive: &[T], negative: &[T], matches: impl Fn(&T) -> bool) -> bool {
        (positive.is_empty() || positive.iter().any(&matches)) && !negative.iter().any(&matches)
    }
    both(&m.principals, &m.not_principals, |p| text(p, principal.as_deref()))
        && both(&m.namespaces, &m.not_namespaces, |n| text(n, namespace))
        && both(&m.service_accounts, &m.not_service_accounts, account)
        && both(&m.source_ips, &m.not_source_ips, range)
        && both(&m.destination_ports, &m.not_destination_ports, |p| *p == u32::from(c.port))
        && m.destination_ips.is_empty()
}

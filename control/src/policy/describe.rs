//! A policy as proxies get it, for people and as JSON.

use std::net::IpAddr;

use serde_json::{Value, json};
use ztunnel::proto::security as wire;
use ztunnel::proto::security::string_match::MatchType;

/// What a rule of a policy does.
pub(super) fn rule_meaning(policy: &wire::Authorization, rule: &wire::Rule) -> String {
    let verb = match (policy.action(), policy.dry_run) {
        (wire::Action::Allow, false) => "allows",
        (wire::Action::Deny, false) => "denies",
        (wire::Action::Audit, _) => "reports",
        (wire::Action::Allow, true) => "would allow (dry run)",
        (wire::Action::Deny, true) => "would deny (dry run)",
    };
    format!("{verb} {}", rule_text(rule))
}

/// What a policy without rules does.
pub(super) fn no_rules_meaning(policy: &wire::Authorization) -> String {
    match (policy.action(), policy.dry_run) {
        (wire::Action::Allow, false) => "allows nothing: every connection is denied unless another policy allows it",
        (wire::Action::Allow, true) => "would allow nothing (dry run)",
        (wire::Action::Deny, _) => "denies nothing",
        (wire::Action::Audit, _) => "reports nothing",
    }
    .into()
}

/// All that a policy says, with the values as Kubernetes writes them.
pub fn json(policy: &wire::Authorization) -> Value {
    let clause = |clause: &wire::Clause| {
        let fields = |m: &wire::Match| fields(m).map(|(name, values)| (name.to_owned(), json!(values))).collect();
        Value::Array(clause.matches.iter().map(|m| Value::Object(fields(m))).collect())
    };
    let rule = |rule: &wire::Rule| Value::Array(rule.clauses.iter().map(clause).collect());
    json!({
        "name": policy.name, "namespace": policy.namespace, "scope": policy.scope().as_str_name(),
        "action": policy.action().as_str_name(), "dryRun": policy.dry_run,
        "rules": policy.rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

fn rule_text(rule: &wire::Rule) -> String {
    if rule.clauses.is_empty() {
        return "every connection".into();
    }
    let one = |m: &wire::Match| {
        let parts = fields(m).map(|(name, values)| {
            let values = values.join(" or ");
            match name.strip_prefix("not") {
                Some(of) => format!("{} is not {values}", words(of)),
                None => format!("{} is {values}", words(name)),
            }
        });
        let parts: Vec<_> = parts.collect();
        if parts.is_empty() { "nothing".into() } else { parts.join(" and ") }
    };
    let clauses = rule.clauses.iter().map(|clause| {
        let matches: Vec<_> = clause.matches.iter().map(one).collect();
        if matches.len() > 1 { format!("either ({})", matches.join(") or (")) } else { matches.join("") }
    });
    format!("connections where {}", clauses.collect::<Vec<_>>().join(", and "))
}

/// The fields that are set, by the names of AuthorizationPolicy.
fn fields(m: &wire::Match) -> impl Iterator<Item = (&'static str, Vec<String>)> {
    let accounts = |list: &[wire::ServiceAccountMatch]| {
        list.iter().map(|a| format!("{}/{}", a.namespace, a.service_account)).collect::<Vec<_>>()
    };
    let texts = |list: &[wire::StringMatch]| list.iter().map(text).collect::<Vec<_>>();
    let ranges = |list: &[wire::Address]| list.iter().map(range).collect::<Vec<_>>();
    let ports = |list: &[u32]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    [
        ("ports", ports(&m.destination_ports)),
        ("notPorts", ports(&m.not_destination_ports)),
        ("destinationIps", ranges(&m.destination_ips)),
        ("notDestinationIps", ranges(&m.not_destination_ips)),
        ("principals", texts(&m.principals)),
        ("notPrincipals", texts(&m.not_principals)),
        ("namespaces", texts(&m.namespaces)),
        ("notNamespaces", texts(&m.not_namespaces)),
        ("serviceAccounts", accounts(&m.service_accounts)),
        ("notServiceAccounts", accounts(&m.not_service_accounts)),
        ("ipBlocks", ranges(&m.source_ips)),
        ("notIpBlocks", ranges(&m.not_source_ips)),
    ]
    .into_iter()
    .filter(|(_, values)| !values.is_empty())
}

fn words(field: &str) -> &'static str {
    match field {
        "ports" | "Ports" => "the app's port",
        "destinationIps" | "DestinationIps" => "the pod's address",
        "principals" | "Principals" => "the peer's identity",
        "namespaces" | "Namespaces" => "the peer's namespace",
        "serviceAccounts" | "ServiceAccounts" => "the peer's service account",
        _ => "the peer's address",
    }
}

fn text(m: &wire::StringMatch) -> String {
    match &m.match_type {
        Some(MatchType::Exact(text)) => text.clone(),
        Some(MatchType::Prefix(text)) => format!("{text}*"),
        Some(MatchType::Suffix(text)) => format!("*{text}"),
        Some(MatchType::Presence(())) => "*".into(),
        None => "?".into(),
    }
}

fn range(address: &wire::Address) -> String {
    let ip = <[u8; 4]>::try_from(&*address.address)
        .map(IpAddr::from)
        .or_else(|_| <[u8; 16]>::try_from(&*address.address).map(IpAddr::from));
    match ip {
        Ok(ip) if address.length == if ip.is_ipv4() { 32 } else { 128 } => ip.to_string(),
        Ok(ip) => format!("{ip}/{}", address.length),
        Err(_) => "?".into(),
    }
}

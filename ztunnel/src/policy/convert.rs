//! From the wire to a policy.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use super::{Clause, Condition, Decoded, Match, Nets, Pattern, Policy, PolicyAction, PolicyScope, Rule, Test, Texts};
use crate::proto::security as wire;

/// Why a policy is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct PolicyError {
    field: &'static str,
    reason: String,
}

/// Checks a policy and brings it into the form in which it is evaluated.
pub fn convert(from: &Decoded) -> Result<Policy, PolicyError> {
    let message = &from.message;
    if message.namespace.contains('/') {
        return Err(fail("namespace", format!("{:?} is none", message.namespace)));
    }
    let scope = match wire::Scope::try_from(message.scope) {
        Ok(wire::Scope::Global) => PolicyScope::Global,
        Ok(wire::Scope::Namespace) => PolicyScope::Namespace,
        Ok(wire::Scope::WorkloadSelector) => PolicyScope::WorkloadSelector,
        Err(_) => return Err(fail("scope", format!("unknown value {}", message.scope))),
    };
    let action = match wire::Action::try_from(message.action) {
        Ok(wire::Action::Allow) => PolicyAction::Allow,
        Ok(wire::Action::Deny) => PolicyAction::Deny,
        Ok(wire::Action::Audit) => PolicyAction::Audit,
        Err(_) => PolicyAction::NotUnderstood(format!("unknown action {}", message.action).into()),
    };
    let extension = message.extensions.first().map(|e| format!("it has the unknown extension {:?}", e.name));
    let action = match from.unknown.clone().or(extension) {
        // Whatever an audit means, it decides nothing.
        Some(reason) if action != PolicyAction::Audit => PolicyAction::NotUnderstood(reason.into()),
        Some(_) | None => action,
    };
    let rules = message.rules.iter().enumerate().map(|(r, from_rule)| {
        let clauses = from_rule.clauses.iter().enumerate().map(|(c, from_clause)| {
            let matches = from_clause.matches.iter().enumerate().map(|(m, one)| {
                let is_known = !from.unknown_matches.contains(&(r, c, m));
                convert_match(one, is_known)
            });
            Ok(Clause { matches: matches.collect::<Result<_, _>>()? })
        });
        Ok(Rule { clauses: clauses.collect::<Result<_, _>>()? })
    });
    let rules = rules.collect::<Result<_, _>>()?;
    Ok(Policy {
        scope,
        action,
        dry_run: message.dry_run,
        rules,
        ..named(&format!("{}/{}", message.namespace, message.name))
    })
}

/// What stands for a policy that cannot be taken, where nothing better is held: it applies where that one would, to
/// everything where that is not known either, and denies. An audit denies nothing, whatever is wrong with it.
pub fn stand_in(from: &wire::Authorization, reason: &str) -> Policy {
    let is_audit = from.action == wire::Action::Audit as i32;
    Policy {
        action: if is_audit { PolicyAction::Audit } else { PolicyAction::NotUnderstood(reason.into()) },
        scope: match wire::Scope::try_from(from.scope) {
            Ok(wire::Scope::Namespace) => PolicyScope::Namespace,
            Ok(wire::Scope::WorkloadSelector) => PolicyScope::WorkloadSelector,
            Ok(wire::Scope::Global) | Err(_) => PolicyScope::Global,
        },
        dry_run: from.dry_run,
        ..named(&format!("{}/{}", from.namespace, from.name))
    }
}

/// The same where nothing but the name (`namespace/name`) can be read.
pub fn stand_in_named(key: &str, reason: &str) -> Policy {
    Policy { action: PolicyAction::NotUnderstood(reason.into()), ..named(key) }
}

fn named(key: &str) -> Policy {
    Policy {
        key: key.into(),
        scope: PolicyScope::Global,
        action: PolicyAction::Deny,
        dry_run: false,
        rules: Box::default(),
    }
}

fn convert_match(from: &wire::Match, is_known: bool) -> Result<Match, PolicyError> {
    let mut not_understood = !is_known || !from.extensions.is_empty();
    let mut conditions = Vec::new();
    let mut add = |negative: bool, is_empty: bool, test: Option<Test>| match test {
        _ if is_empty => {}
        Some(test) => conditions.push(Condition { negative, test }),
        // One value that is not understood, and nobody knows whether the condition holds.
        None => not_understood = true,
    };
    // In the order of `Test`.
    for (negative, ports) in [(false, &from.destination_ports), (true, &from.not_destination_ports)] {
        let field = if negative { "not_destination_ports" } else { "destination_ports" };
        add(negative, ports.is_empty(), Some(Test::DestinationPorts(convert_ports(field, ports)?)));
    }
    for (negative, nets) in [(false, &from.source_ips), (true, &from.not_source_ips)] {
        let field = if negative { "not_source_ips" } else { "source_ips" };
        add(negative, nets.is_empty(), Some(Test::SourceIps(convert_nets(field, nets)?)));
    }
    for (negative, nets) in [(false, &from.destination_ips), (true, &from.not_destination_ips)] {
        let field = if negative { "not_destination_ips" } else { "destination_ips" };
        add(negative, nets.is_empty(), Some(Test::DestinationIps(convert_nets(field, nets)?)));
    }
    for (negative, list) in [(false, &from.namespaces), (true, &from.not_namespaces)] {
        add(negative, list.is_empty(), texts(list).map(Test::Namespaces));
    }
    for (negative, list) in [(false, &from.service_accounts), (true, &from.not_service_accounts)] {
        add(negative, list.is_empty(), Some(Test::ServiceAccounts(accounts(list))));
    }
    for (negative, list) in [(false, &from.principals), (true, &from.not_principals)] {
        add(negative, list.is_empty(), texts(list).map(Test::Principals));
    }
    Ok(Match { conditions: conditions.into(), not_understood })
}

/// Nothing where a value has a form that is not known.
fn texts(from: &[wire::StringMatch]) -> Option<Texts> {
    use wire::string_match::MatchType;
    let (mut exact, mut patterns) = (Vec::new(), Vec::new());
    for one in from {
        match one.match_type.as_ref()? {
            MatchType::Exact(text) => exact.push(text.as_str().into()),
            MatchType::Prefix(text) => patterns.push(Pattern::Prefix(text.as_str().into())),
            MatchType::Suffix(text) => patterns.push(Pattern::Suffix(text.as_str().into())),
            MatchType::Presence(()) => patterns.push(Pattern::Presence),
        }
    }
    Some(Texts::new(exact, patterns))
}

fn convert_nets(field: &'static str, from: &[wire::Address]) -> Result<Nets, PolicyError> {
    let nets = from.iter().map(|address| {
        let ip = if let Ok(v4) = <[u8; 4]>::try_from(&*address.address) {
            Ipv4Addr::from(v4).into()
        } else if let Ok(v6) = <[u8; 16]>::try_from(&*address.address) {
            Ipv6Addr::from(v6).into()
        } else {
            return Err(fail(field, format!("{} bytes are not an address", address.address.len())));
        };
        let length = u8::try_from(address.length).ok();
        let net = length.and_then(|length| IpNet::new(ip, length).ok());
        net.ok_or_else(|| fail(field, format!("{ip}/{} is not a range", address.length)))
    });
    Ok(Nets::new(nets.collect::<Result<Vec<_>, _>>()?))
}

fn convert_ports(field: &'static str, from: &[u32]) -> Result<Box<[u16]>, PolicyError> {
    let port = |p: &u32| u16::try_from(*p).map_err(|_| fail(field, format!("{p} is not a port")));
    let mut ports = from.iter().map(port).collect::<Result<Vec<_>, _>>()?;
    ports.sort_unstable();
    ports.dedup();
    Ok(ports.into())
}

fn accounts(from: &[wire::ServiceAccountMatch]) -> Box<[Box<str>]> {
    let account = |a: &wire::ServiceAccountMatch| format!("ns/{}/sa/{}", a.namespace, a.service_account).into();
    let mut accounts: Vec<Box<str>> = from.iter().map(account).collect();
    accounts.sort_unstable();
    accounts.dedup();
    accounts.into()
}

fn fail(field: &'static str, reason: String) -> PolicyError {
    PolicyError { field, reason }
}

//! From the wire to a policy.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;

use super::{Clause, Match, Policy, PolicyAction, PolicyScope, Rule, TextMatch};
use crate::proto::security as wire;

/// Why a policy is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}")]
pub struct PolicyError {
    field: &'static str,
    reason: String,
}

pub fn policy(from: &wire::Authorization) -> Result<Policy, PolicyError> {
    let scope = match wire::Scope::try_from(from.scope) {
        Ok(wire::Scope::Global) => PolicyScope::Global,
        Ok(wire::Scope::Namespace) => PolicyScope::Namespace,
        Ok(wire::Scope::WorkloadSelector) => PolicyScope::WorkloadSelector,
        Err(_) => return Err(fail("scope", format!("unknown value {}", from.scope))),
    };
    let action = match wire::Action::try_from(from.action) {
        Ok(wire::Action::Allow) => PolicyAction::Allow,
        Ok(wire::Action::Deny) => PolicyAction::Deny,
        Ok(wire::Action::Audit) => PolicyAction::Audit,
        Err(_) => PolicyAction::NotUnderstood(format!("unknown action {}", from.action).into()),
    };
    let rules = from.rules.iter().map(rule).collect::<Result<_, _>>()?;
    Ok(Policy {
        key: format!("{}/{}", from.namespace, from.name).into(),
        name: from.name.as_str().into(),
        namespace: from.namespace.as_str().into(),
        scope,
        action,
        dry_run: from.dry_run,
        rules,
    })
}

/// What stands for a policy that cannot be taken, where nothing better is held: it applies where that one would, to
/// everything where that is not known either, and denies.
pub fn stand_in(from: &wire::Authorization, reason: &str) -> Policy {
    Policy {
        key: format!("{}/{}", from.namespace, from.name).into(),
        name: from.name.as_str().into(),
        namespace: from.namespace.as_str().into(),
        scope: match wire::Scope::try_from(from.scope) {
            Ok(wire::Scope::Namespace) => PolicyScope::Namespace,
            Ok(wire::Scope::WorkloadSelector) => PolicyScope::WorkloadSelector,
            Ok(wire::Scope::Global) | Err(_) => PolicyScope::Global,
        },
        action: PolicyAction::NotUnderstood(reason.into()),
        dry_run: from.dry_run,
        rules: Vec::new(),
    }
}

fn rule(from: &wire::Rule) -> Result<Rule, PolicyError> {
    let clause = |c: &wire::Clause| Ok(Clause { matches: c.matches.iter().map(one).collect::<Result<_, _>>()? });
    Ok(Rule { clauses: from.clauses.iter().map(clause).collect::<Result<_, _>>()? })
}

fn one(from: &wire::Match) -> Result<Match, PolicyError> {
    let mut not_understood = !from.extensions.is_empty();
    let mut texts = |list: &[wire::StringMatch]| -> Vec<TextMatch> {
        list.iter()
            .filter_map(|m| {
                use wire::string_match::MatchType;
                match &m.match_type {
                    Some(MatchType::Exact(text)) => Some(TextMatch::Exact(text.as_str().into())),
                    Some(MatchType::Prefix(text)) => Some(TextMatch::Prefix(text.as_str().into())),
                    Some(MatchType::Suffix(text)) => Some(TextMatch::Suffix(text.as_str().into())),
                    Some(MatchType::Presence(_)) => Some(TextMatch::Presence),
                    None => {
                        not_understood = true;
                        None
                    }
                }
            })
            .collect()
    };
    Ok(Match {
        namespaces: texts(&from.namespaces),
        not_namespaces: texts(&from.not_namespaces),
        principals: texts(&from.principals),
        not_principals: texts(&from.not_principals),
        source_ips: nets("source_ips", &from.source_ips)?,
        not_source_ips: nets("not_source_ips", &from.not_source_ips)?,
        destination_ips: nets("destination_ips", &from.destination_ips)?,
        not_destination_ips: nets("not_destination_ips", &from.not_destination_ips)?,
        destination_ports: ports("destination_ports", &from.destination_ports)?,
        not_destination_ports: ports("not_destination_ports", &from.not_destination_ports)?,
        service_accounts: accounts(&from.service_accounts),
        not_service_accounts: accounts(&from.not_service_accounts),
        not_understood,
    })
}

fn nets(field: &'static str, from: &[wire::Address]) -> Result<Vec<IpNet>, PolicyError> {
    from.iter()
        .map(|address| {
            let ip = if let Ok(v4) = <[u8; 4]>::try_from(&*address.address) {
                Ipv4Addr::from(v4).into()
            } else if let Ok(v6) = <[u8; 16]>::try_from(&*address.address) {
                Ipv6Addr::from(v6).into()
            } else {
                return Err(fail(field, format!("{} bytes are not an address", address.address.len())));
            };
            let length = u8::try_from(address.length).ok();
            let net = length.and_then(|l| IpNet::new(ip, l).ok());
            net.map(|n| n.trunc()).ok_or_else(|| fail(field, format!("{ip}/{} is not a range", address.length)))
        })
        .collect()
}

fn ports(field: &'static str, from: &[u32]) -> Result<Vec<u16>, PolicyError> {
    from.iter().map(|p| u16::try_from(*p).map_err(|_| fail(field, format!("{p} is not a port")))).collect()
}

fn accounts(from: &[wire::ServiceAccountMatch]) -> Vec<(Arc<str>, Arc<str>)> {
    from.iter().map(|a| (a.namespace.as_str().into(), a.service_account.as_str().into())).collect()
}

fn fail(field: &'static str, reason: String) -> PolicyError {
    PolicyError { field, reason }
}

//! What the verdict has to be, said slowly: straight from the wire and from the words of the protocol, with nothing of
//! the evaluation's own code or form.

use std::net::IpAddr;

use super::generate::{Sent, Target};
use crate::policy::Connection;
use crate::proto::security as wire;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Answer {
    Allowed,
    Denied,
    NotAllowed,
    Undecided,
}

/// A policy that cannot be taken as it is: what stands for it is never understood.
pub fn is_invalid(sent: &Sent) -> bool {
    let bad_scope = ![0, 1, 2].contains(&sent.message.scope);
    let matches = sent.message.rules.iter().flat_map(|r| &r.clauses).flat_map(|c| &c.matches);
    bad_scope
        || sent.message.namespace.contains('/')
        || matches.into_iter().any(|m| {
            let ranges = [&m.source_ips, &m.not_source_ips, &m.destination_ips, &m.not_destination_ips];
            let bad_range = |a: &wire::Address| match a.address.len() {
                4 => a.length > 32,
                16 => a.length > 128,
                _ => true,
            };
            m.destination_ports.iter().chain(&m.not_destination_ports).any(|p| *p > 65_535)
                || ranges.into_iter().flatten().any(bad_range)
        })
}

/// The policies that apply, one for each name: the last.
pub fn applying<'a>(all: &'a [Sent], target: &Target) -> Vec<&'a Sent> {
    let key = |sent: &Sent| format!("{}/{}", sent.message.namespace, sent.message.name);
    let mut applying = Vec::new();
    for (at, sent) in all.iter().enumerate() {
        if all[at + 1..].iter().any(|later| key(later) == key(sent)) {
            continue;
        }
        let named = target.names.iter().any(|name| **name == *key(sent));
        // Of an unknown scope: everywhere.
        let by_scope = match sent.message.scope {
            1 => sent.message.namespace == target.namespace,
            2 => false,
            _ => true,
        };
        if named || by_scope {
            applying.push(sent);
        }
    }
    applying
}

/// `with_dry_runs`: as if they were enforced.
pub fn answer(all: &[Sent], target: &Target, connection: &Connection, with_dry_runs: bool) -> Answer {
    let applying = applying(all, target);
    let counted: Vec<_> = applying.into_iter().filter(|s| with_dry_runs || !s.message.dry_run).collect();
    let understood = |s: &&&Sent| is_understood(s);
    let with_action = |action: i32| counted.iter().filter(understood).filter(move |s| s.message.action == action);
    if with_action(1).any(|s| policy(s, connection) == Some(true)) {
        return Answer::Denied;
    }
    let known = |name: &str| all.iter().any(|s| format!("{}/{}", s.message.namespace, s.message.name) == name);
    if !target.complete
        || target.names.iter().any(|name| !known(name))
        || counted.iter().any(|s| !is_understood(s) && s.message.action != 1000)
        || with_action(1).any(|s| policy(s, connection).is_none())
    {
        return Answer::Undecided;
    }
    let allowing: Vec<_> = with_action(0).map(|s| policy(s, connection)).collect();
    if allowing.contains(&Some(true)) || allowing.is_empty() {
        Answer::Allowed
    } else if allowing.contains(&None) {
        Answer::Undecided
    } else {
        Answer::NotAllowed
    }
}

/// The AUDIT policies that match.
pub fn audited(all: &[Sent], target: &Target, connection: &Connection) -> Vec<String> {
    let applying = applying(all, target).into_iter().filter(|s| s.message.action == 1000 && !is_invalid(s));
    let matching = applying.filter(|s| policy(s, connection) == Some(true));
    let mut names: Vec<_> = matching.map(|s| format!("{}/{}", s.message.namespace, s.message.name)).collect();
    names.sort();
    names
}

fn is_understood(sent: &Sent) -> bool {
    !is_invalid(sent) && sent.message.extensions.is_empty() && [0, 1, 1000].contains(&sent.message.action)
}

/// Nothing: it depends on what is not understood.
fn policy(sent: &Sent, connection: &Connection) -> Option<bool> {
    any((0..sent.message.rules.len()).map(|r| rule(sent, r, connection)).collect())
}

pub fn rule(sent: &Sent, r: usize, connection: &Connection) -> Option<bool> {
    let clauses = &sent.message.rules[r].clauses;
    let clause = |c: usize| {
        let matches = &clauses[c].matches;
        if matches.is_empty() {
            return Some(true);
        }
        let one = |m: usize| {
            let fields = fields(&matches[m], sent.later_fields.contains(&(r, c, m)), connection);
            if fields.is_empty() { Some(false) } else { all(fields) }
        };
        any((0..matches.len()).map(one).collect())
    };
    all((0..clauses.len()).map(clause).collect())
}

/// How many fields keep a rule from matching, at the least.
pub fn missing(sent: &Sent, r: usize, connection: &Connection) -> usize {
    let clauses = sent.message.rules[r].clauses.iter().enumerate();
    let of_clause = |(c, clause): (usize, &wire::Clause)| {
        let matches = clause.matches.iter().enumerate();
        let of_match = |(m, one): (usize, &wire::Match)| {
            let fields = fields(one, sent.later_fields.contains(&(r, c, m)), connection);
            if fields.is_empty() { 1 } else { fields.iter().filter(|f| **f != Some(true)).count() }
        };
        matches.map(of_match).min().unwrap_or(0)
    };
    clauses.map(of_clause).sum()
}

/// Each field that says something. What is not understood counts as one.
fn fields(one: &wire::Match, has_later_field: bool, connection: &Connection) -> Vec<Option<bool>> {
    let uri = connection.identity.as_ref().map(ToString::to_string);
    let principal = uri.as_deref().map(|uri| uri.trim_start_matches("spiffe://"));
    let part = |at: usize| principal.and_then(|p| p.split('/').nth(at));
    let (namespace, account) = (part(2), part(4));
    let mut results = Vec::new();
    let mut unclear = has_later_field || !one.extensions.is_empty();
    for (list, value, negative) in [
        (&one.namespaces, namespace, false),
        (&one.not_namespaces, namespace, true),
        (&one.principals, principal, false),
        (&one.not_principals, principal, true),
    ] {
        if list.iter().any(|text| text.match_type.is_none()) {
            unclear = true;
        } else if !list.is_empty() {
            let fits = list.iter().filter(|pattern| value.is_some_and(|v| text_fits(pattern, v))).count() > 0;
            results.push(Some(if negative { !fits } else { fits }));
        }
    }
    for (list, address, negative) in [
        (&one.source_ips, connection.source, false),
        (&one.not_source_ips, connection.source, true),
        (&one.destination_ips, connection.destination.ip(), false),
        (&one.not_destination_ips, connection.destination.ip(), true),
    ] {
        if !list.is_empty() {
            let fits = list.iter().filter(|range| in_range(range, address)).count() > 0;
            results.push(Some(if negative { !fits } else { fits }));
        }
    }
    let port = u32::from(connection.destination.port());
    for (list, negative) in [(&one.destination_ports, false), (&one.not_destination_ports, true)] {
        if !list.is_empty() {
            results.push(Some(list.contains(&port) != negative));
        }
    }
    for (list, negative) in [(&one.service_accounts, false), (&one.not_service_accounts, true)] {
        if !list.is_empty() {
            let fits = |a: &wire::ServiceAccountMatch| {
                namespace == Some(a.namespace.as_str()) && account == Some(a.service_account.as_str())
            };
            results.push(Some(list.iter().any(fits) != negative));
        }
    }
    if unclear {
        results.push(None);
    }
    results
}

fn text_fits(pattern: &wire::StringMatch, value: &str) -> bool {
    use wire::string_match::MatchType;
    let (value, same) = (value.as_bytes(), |a: &[u8], b: &[u8]| a == b);
    match pattern.match_type.as_ref().unwrap() {
        MatchType::Exact(text) => same(text.as_bytes(), value),
        MatchType::Prefix(text) => text.len() <= value.len() && same(text.as_bytes(), &value[..text.len()]),
        MatchType::Suffix(text) => {
            text.len() <= value.len() && same(text.as_bytes(), &value[value.len() - text.len()..])
        }
        MatchType::Presence(()) => !value.is_empty(),
    }
}

/// Bit by bit, with IPv4 in its IPv6 form. A range of IPv6 that is wider than all of IPv4 is not meant for IPv4.
fn in_range(range: &wire::Address, address: IpAddr) -> bool {
    let bits = |octets: &[u8]| -> Vec<bool> {
        octets.iter().flat_map(|octet| (0..8).map(move |bit| octet & (0x80 >> bit) != 0)).collect()
    };
    let mapped = |v4: &[u8]| [&[0; 10][..], &[0xff, 0xff], v4].concat();
    let (range_bytes, length) = match range.address.len() {
        4 => (mapped(&range.address), range.length + 96),
        _ => (range.address.to_vec(), range.length),
    };
    let (bytes, is_v4) = match address.to_canonical() {
        IpAddr::V4(v4) => (mapped(&v4.octets()), true),
        IpAddr::V6(v6) => (v6.octets().to_vec(), false),
    };
    if is_v4 && length < 96 {
        return false;
    }
    bits(&range_bytes).iter().zip(bits(&bytes)).take(length as usize).all(|(a, b)| *a == b)
}

fn all(parts: Vec<Option<bool>>) -> Option<bool> {
    if parts.contains(&Some(false)) {
        Some(false)
    } else if parts.contains(&None) {
        None
    } else {
        Some(true)
    }
}

fn any(parts: Vec<Option<bool>>) -> Option<bool> {
    all(parts.into_iter().map(|part| part.map(|p| !p)).collect()).map(|p| !p)
}

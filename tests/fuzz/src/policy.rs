//! What must hold of every policy that comes over the wire, whatever its bytes are. Used by the fuzz target, and by a
//! test that goes through made-up ones without a fuzzer.

use std::sync::Arc;

use prost::Message;
use ztunnel::policy::{self, Connection, Policy, PolicyAction, PolicyIndex, PolicySet, evaluate};
use ztunnel::proto::security;

/// The namespace and name that the judged pod has.
const NAMESPACE: &str = "shop";

/// Panics where something does not hold.
pub fn check(bytes: &[u8]) {
    let Ok(decoded) = policy::decode(bytes) else { return };
    let message = decoded.message.clone();
    let converted = policy::convert(&decoded);
    let taken = converted.clone().unwrap_or_else(|error| policy::stand_in(&message, &error.to_string()));
    for connection in connections(&message) {
        let verdict = judged(&taken, &connection);
        // No text may fail to be written, and nothing may be allowed that is not understood.
        let _ = verdict.verdict.to_string();
        for rule in 0..taken.rules.len() {
            let _ = policy::why(&taken, rule, &connection);
        }
        let is_ignored = taken.dry_run || taken.action == PolicyAction::Audit || !applies(&taken);
        match &taken.action {
            PolicyAction::NotUnderstood(_) if !is_ignored => assert!(!verdict.is_allowed(), "{taken:?} allows"),
            _ if is_ignored => assert!(verdict.is_allowed(), "{taken:?} decides: {verdict:?}"),
            _ => {}
        }
        // A field more that nobody knows, at any place, never allows what was not allowed before.
        for strange in with_unknown_fields(&message) {
            let Ok(strange) = policy::decode(&strange) else { continue };
            let reason = |error: policy::PolicyError| policy::stand_in(&strange.message, &error.to_string());
            let strange = policy::convert(&strange).unwrap_or_else(reason);
            assert!(
                !judged(&strange, &connection).is_allowed() || verdict.is_allowed(),
                "an unknown field widens {message:?} for {connection:?}"
            );
        }
    }
    // What this version knows of it means the same when it is sent again.
    let again = policy::decode(&message.encode_to_vec()).expect("what was encoded is decoded");
    assert_eq!(policy::convert(&again), policy::convert(&message.into()));
}

fn applies(policy: &Policy) -> bool {
    judging(policy).iter().next().is_some()
}

fn judging(policy: &Policy) -> PolicySet {
    let mut index = PolicyIndex::default();
    index.insert(Arc::new(policy.clone()));
    index.complete();
    index.applying(NAMESPACE, std::slice::from_ref(policy.key()))
}

fn judged(policy: &Policy, connection: &Connection) -> policy::Decision {
    evaluate(&judging(policy), connection)
}

/// Of a client with and without an identity, and of what the policy itself speaks of.
fn connections(message: &security::Authorization) -> Vec<Connection> {
    use security::string_match::MatchType;
    let mut identities = vec![None, Some("spiffe://cluster.local/ns/shop/sa/web".to_owned())];
    let mut ports = vec![80];
    let matches = message.rules.iter().flat_map(|rule| &rule.clauses).flat_map(|clause| &clause.matches);
    for one in matches.take(3) {
        for principal in one.principals.iter().chain(&one.not_principals).take(2) {
            if let Some(MatchType::Exact(text)) = &principal.match_type {
                identities.push(Some(format!("spiffe://{text}")));
            }
        }
        let of_rule = one.destination_ports.iter().chain(&one.not_destination_ports);
        ports.extend(of_rule.filter_map(|port| u16::try_from(*port).ok()).take(2));
    }
    let mut connections = Vec::new();
    for identity in identities {
        let identity = match identity.map(|text| text.parse()) {
            None => None,
            Some(Ok(identity)) => Some(identity),
            Some(Err(_)) => continue,
        };
        for (source, destination) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            for port in ports.iter().take(4) {
                connections.push(Connection {
                    identity: identity.clone(),
                    source: source.parse().expect("an address"),
                    destination: (destination.parse::<std::net::IpAddr>().expect("an address"), *port).into(),
                });
            }
        }
    }
    connections
}

/// The message with an unknown field at its top, in its first rule, clause and match.
fn with_unknown_fields(message: &security::Authorization) -> Vec<Vec<u8>> {
    // Field 100, varint 1.
    const UNKNOWN: [u8; 3] = [0xa0, 0x06, 1];
    let mut all = vec![[&message.encode_to_vec()[..], &UNKNOWN].concat()];
    let field = |number: u8, content: Vec<u8>| {
        let mut bytes = vec![number << 3 | 2];
        prost::encoding::encode_varint(content.len() as u64, &mut bytes);
        bytes.extend(content);
        bytes
    };
    let Some(rule) = message.rules.first() else { return all };
    let without = security::Authorization { rules: message.rules[1..].to_vec(), ..message.clone() };
    // The rules come in another order, which changes no verdict.
    let put = |rule: Vec<u8>| [without.encode_to_vec(), field(5, rule)].concat();
    all.push(put([&rule.encode_to_vec()[..], &UNKNOWN].concat()));
    let Some(clause) = rule.clauses.first() else { return all };
    let other_clauses = security::Rule { clauses: rule.clauses[1..].to_vec() };
    let put_clause = |clause: Vec<u8>| put([other_clauses.encode_to_vec(), field(1, clause)].concat());
    all.push(put_clause([&clause.encode_to_vec()[..], &UNKNOWN].concat()));
    let Some(one) = clause.matches.first() else { return all };
    let other_matches = security::Clause { matches: clause.matches[1..].to_vec() };
    let strange = [&one.encode_to_vec()[..], &UNKNOWN].concat();
    all.push(put_clause([other_matches.encode_to_vec(), field(1, strange)].concat()));
    all
}

//! The decision on one connection (order and meaning: xDS §3, Evaluation).
//!
//! Must never allocate where it allows, nor look at a policy that does not apply.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::index::{Group, PolicySet};
use super::matching::{Facts, Truth};
use super::{Decision, Policy, PolicyAction, RuleRef, Undecided, Verdict, miss};
use crate::identity::Identity;

/// What is judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    /// Verified by mTLS; nothing for a plaintext peer.
    pub identity: Option<Identity>,
    /// Of the peer's TCP connection.
    pub source: IpAddr,
    /// Where the app listens, not the service.
    pub destination: SocketAddr,
}

/// Judges a connection by the policies that apply.
pub fn evaluate(policies: &PolicySet, connection: &Connection) -> Decision {
    let facts = Facts::of(connection);
    let audited = policies.audit.iter().filter_map(|policy| match first_match(policy, &facts) {
        Some((rule, Truth::Yes)) => Some(RuleRef { policy: policy.key().clone(), rule }),
        _ => None,
    });
    Decision {
        verdict: judge(policies, &[&policies.enforced], &facts),
        dry_run: match policies.dry_run.is_empty() {
            true => None,
            false => Some(judge(policies, &[&policies.enforced, &policies.dry_run], &facts)),
        },
        audited: audited.collect(),
    }
}

/// What of a rule that matches matched what, in words.
pub fn why(policy: &Policy, rule: usize, connection: &Connection) -> String {
    match policy.rules.get(rule) {
        Some(rule) => miss::in_words(rule, &Facts::of(connection)),
        None => String::new(),
    }
}

fn judge(policies: &PolicySet, groups: &[&Group], facts: &Facts<'_>) -> Verdict {
    let mut missing = None;
    for policy in groups.iter().flat_map(|group| &group.deny) {
        if let PolicyAction::NotUnderstood(reason) = &policy.action {
            missing.get_or_insert_with(|| not_understood(policy, None, reason));
            continue;
        }
        match first_match(policy, facts) {
            Some((rule, Truth::Yes)) => {
                let matched = miss::in_words(&policy.rules[rule], facts);
                return Verdict::Denied { by: RuleRef { policy: policy.key().clone(), rule }, matched };
            }
            Some((rule, Truth::Unclear | Truth::No)) => {
                missing.get_or_insert_with(|| not_understood(policy, Some(rule), CONDITION));
            }
            None => {}
        }
    }
    // What is missing may be a DENY: no ALLOW can stand against it.
    if !policies.is_complete {
        return Verdict::Undecided { missing: Undecided::Policies };
    }
    if let Some(policy) = policies.unknown.first() {
        return Verdict::Undecided { missing: Undecided::UnknownPolicy { policy: policy.clone() } };
    }
    if let Some(missing) = missing {
        return Verdict::Undecided { missing };
    }
    let mut missing = None;
    let allowing = || groups.iter().flat_map(|group| &group.allow);
    for policy in allowing() {
        match first_match(policy, facts) {
            Some((rule, Truth::Yes)) => {
                return Verdict::Allowed { by: Some(RuleRef { policy: policy.key().clone(), rule }) };
            }
            Some((rule, Truth::Unclear | Truth::No)) => {
                missing.get_or_insert_with(|| not_understood(policy, Some(rule), CONDITION));
            }
            None => {}
        }
    }
    if let Some(missing) = missing {
        return Verdict::Undecided { missing };
    }
    match miss::nearest(allowing(), facts) {
        None => Verdict::Allowed { by: None },
        Some(closest) => Verdict::NotAllowed { policies: allowing().count(), closest },
    }
}

/// The first rule that matches, else the first that might.
fn first_match(policy: &Policy, facts: &Facts<'_>) -> Option<(usize, Truth)> {
    let mut unclear = None;
    for (index, rule) in policy.rules.iter().enumerate() {
        match rule.matches(facts) {
            Truth::Yes => return Some((index, Truth::Yes)),
            Truth::Unclear => unclear = unclear.or(Some((index, Truth::Unclear))),
            Truth::No => {}
        }
    }
    unclear
}

#[cold]
fn not_understood(policy: &Arc<Policy>, rule: Option<usize>, reason: &str) -> Undecided {
    Undecided::NotUnderstood { policy: policy.key().clone(), rule, reason: reason.into() }
}

const CONDITION: &str = "it has a condition that this version does not know";

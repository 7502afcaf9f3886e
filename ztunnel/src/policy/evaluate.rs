//! The verdict on one connection (order and meaning: xDS §3, Evaluation).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::{Clause, Match, Policy, PolicyAction, Rule, contains};
use crate::identity::Identity;

/// What is judged.
#[derive(Debug, Clone, Copy)]
pub struct Connection<'a> {
    /// Verified by mTLS; nothing for a plaintext peer.
    pub identity: Option<&'a Identity>,
    pub source: IpAddr,
    /// Where the app listens.
    pub destination: SocketAddr,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// By this policy, or because no ALLOW policy applies.
    Allow(Option<Arc<str>>),
    /// A DENY policy matched.
    Denied { policy: Arc<str>, rule: usize },
    /// ALLOW policies apply and none of them matched.
    NotAllowed { policies: usize },
    /// The workload names a policy that is not known yet.
    UnknownPolicy(Arc<str>),
    /// A policy cannot be understood.
    NotUnderstood { policy: Arc<str>, reason: Box<str> },
}

impl Verdict {
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allow(_))
    }
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Allow(Some(policy)) => write!(f, "allowed by policy {policy}"),
            Self::Allow(None) => f.write_str("allowed: no policy says otherwise"),
            Self::Denied { policy, rule } => write!(f, "denied by policy {policy}, rule {rule}"),
            Self::NotAllowed { policies } => write!(f, "not allowed by any of {policies} policies"),
            Self::UnknownPolicy(policy) => write!(f, "denied: policy {policy} is not known yet"),
            Self::NotUnderstood { policy, reason } => {
                write!(f, "denied: policy {policy} cannot be understood: {reason}")
            }
        }
    }
}

/// Judges a connection by the policies that apply and the names of those that are not known.
pub fn evaluate(policies: &[Arc<Policy>], unknown: &[Arc<str>], connection: &Connection<'_>) -> Verdict {
    let enforced = || policies.iter().filter(|p| !p.dry_run);
    for policy in enforced() {
        match &policy.action {
            PolicyAction::Deny => {
                if let Some(rule) = first_match(policy, connection, true) {
                    return Verdict::Denied { policy: policy.key.clone(), rule };
                }
            }
            PolicyAction::NotUnderstood(reason) => {
                return Verdict::NotUnderstood { policy: policy.key.clone(), reason: reason.clone() };
            }
            PolicyAction::Allow | PolicyAction::Audit => {}
        }
    }
    if let Some(name) = unknown.first() {
        return Verdict::UnknownPolicy(name.clone());
    }
    let mut allowing = 0;
    for policy in enforced().filter(|p| p.action == PolicyAction::Allow) {
        allowing += 1;
        if first_match(policy, connection, false).is_some() {
            return Verdict::Allow(Some(policy.key.clone()));
        }
    }
    if allowing == 0 { Verdict::Allow(None) } else { Verdict::NotAllowed { policies: allowing } }
}

fn first_match(policy: &Policy, connection: &Connection<'_>, deny: bool) -> Option<usize> {
    policy.rules.iter().position(|rule| rule_matches(rule, connection, deny))
}

fn rule_matches(rule: &Rule, connection: &Connection<'_>, deny: bool) -> bool {
    rule.clauses.iter().all(|clause| clause_matches(clause, connection, deny))
}

fn clause_matches(clause: &Clause, connection: &Connection<'_>, deny: bool) -> bool {
    clause.matches.is_empty() || clause.matches.iter().any(|m| match_matches(m, connection, deny))
}

fn match_matches(m: &Match, connection: &Connection<'_>, deny: bool) -> bool {
    if m.not_understood {
        if !deny {
            return false;
        }
    } else if m.is_empty() {
        return false;
    }
    let identity = connection.identity;
    let namespace = identity.map(Identity::namespace);
    let principal = identity.map(|i| i.to_string());
    let principal = principal.as_deref().and_then(|p| p.strip_prefix("spiffe://"));
    let account = |list: &[(Arc<str>, Arc<str>)]| {
        identity.is_some_and(|i| list.iter().any(|(ns, sa)| **ns == *i.namespace() && **sa == *i.service_account()))
    };
    let text = |list: &[super::TextMatch], value: Option<&str>| {
        value.is_some_and(|value| list.iter().any(|t| t.matches(value)))
    };
    let positive = |empty: bool, matched: bool| empty || matched;
    positive(m.namespaces.is_empty(), text(&m.namespaces, namespace))
        && !text(&m.not_namespaces, namespace)
        && positive(m.principals.is_empty(), text(&m.principals, principal))
        && !text(&m.not_principals, principal)
        && positive(m.source_ips.is_empty(), contains(&m.source_ips, connection.source))
        && !contains(&m.not_source_ips, connection.source)
        && positive(m.destination_ips.is_empty(), contains(&m.destination_ips, connection.destination.ip()))
        && !contains(&m.not_destination_ips, connection.destination.ip())
        && positive(m.destination_ports.is_empty(), m.destination_ports.contains(&connection.destination.port()))
        && !m.not_destination_ports.contains(&connection.destination.port())
        && positive(m.service_accounts.is_empty(), account(&m.service_accounts))
        && !account(&m.not_service_accounts)
}

impl Match {
    /// A match that says nothing counts as no match.
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

//! L4 authorization: a pure function from the policies that apply and a connection to a verdict with its reason.
//!
//! Must never pass what it does not understand.

mod convert;
mod evaluate;
mod index;
mod matching;
mod miss;
#[cfg(test)]
mod tests;
mod verdict;
mod wire;

use std::sync::Arc;

pub use convert::{PolicyError, convert, stand_in, stand_in_named};
pub use evaluate::{Connection, evaluate, why};
pub use index::{PolicyIndex, PolicySet};
pub use matching::{Clause, Condition, Match, Nets, Pattern, Rule, Test, Texts};
pub use verdict::{Decision, Failed, NearestMiss, RuleRef, Undecided, Verdict};
pub use wire::{Decoded, decode};

/// A policy, checked and normalised from `istio.security.Authorization`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    key: Arc<str>,
    pub scope: PolicyScope,
    pub action: PolicyAction,
    /// Only reported, never enforced.
    pub dry_run: bool,
    /// One of them must match; without any the policy never does.
    pub rules: Box<[Rule]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyScope {
    /// Of the whole mesh.
    Global,
    /// Of one namespace.
    Namespace,
    /// Of the workloads that name it.
    WorkloadSelector,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PolicyAction {
    Allow,
    Deny,
    /// Reported where it matches, decides nothing.
    Audit,
    /// The policy cannot be understood, for this reason: it denies whatever it applies to.
    NotUnderstood(Box<str>),
}

impl Policy {
    /// `namespace/name`.
    pub fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub fn namespace(&self) -> &str {
        self.key.split_once('/').map_or("", |(namespace, _)| namespace)
    }

    pub fn name(&self) -> &str {
        self.key.split_once('/').map_or(&self.key, |(_, name)| name)
    }

    /// The rules that can match no connection, because one of their clauses holds nothing but empty matches. So the
    /// wire says it where a rule had conditions that L4 does not know.
    pub fn inert_rules(&self) -> impl Iterator<Item = usize> + '_ {
        self.rules.iter().enumerate().filter(|(_, rule)| rule.is_inert()).map(|(index, _)| index)
    }
}

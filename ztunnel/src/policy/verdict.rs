//! What was decided, and why: owned, so that it can be kept, compared, logged and written as JSON.

use std::fmt;
use std::sync::Arc;

use serde::{Serialize, Serializer};

/// All that the policies say about a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// What is enforced.
    pub verdict: Verdict,
    /// What the verdict would be if the dry-run policies were enforced too. Nothing where none applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dry_run: Option<Verdict>,
    /// The first matching rule of each AUDIT policy that has one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub audited: Vec<RuleRef>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "result", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Verdict {
    /// By this rule of an ALLOW policy, or because no ALLOW policy applies.
    Allowed {
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<RuleRef>,
    },
    /// By a rule of a DENY policy; what of it matched what.
    Denied { by: RuleRef, matched: String },
    /// ALLOW policies apply and none of them matched.
    NotAllowed {
        /// How many.
        policies: usize,
        closest: NearestMiss,
    },
    /// Something is missing: wait for it, within a bound, then refuse.
    Undecided { missing: Undecided },
}

/// A rule of a policy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct RuleRef {
    /// `namespace/name`.
    #[serde(serialize_with = "text")]
    pub policy: Arc<str>,
    /// From 0.
    pub rule: usize,
}

/// The rule that came closest to allowing: the fewest fields failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NearestMiss {
    #[serde(serialize_with = "text")]
    pub policy: Arc<str>,
    /// Nothing where the policies have no rules at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    /// What failed; of a clause's alternatives the one that came closest.
    pub failed: Vec<Failed>,
}

/// A field that did not match.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Failed {
    /// As the dump names it, for example `notNamespaces`.
    pub field: &'static str,
    /// The values, cut to the first few.
    pub wanted: String,
    pub was: String,
}

/// What a decision waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "what", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Undecided {
    /// The control plane has not sent its policies yet.
    Policies,
    /// The workload names a policy that is not known.
    UnknownPolicy {
        #[serde(serialize_with = "text")]
        policy: Arc<str>,
    },
    /// A policy, or the rule that would decide, cannot be understood.
    NotUnderstood {
        #[serde(serialize_with = "text")]
        policy: Arc<str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        rule: Option<usize>,
        reason: String,
    },
}

impl Decision {
    pub fn is_allowed(&self) -> bool {
        self.verdict.is_allowed()
    }
}

impl Verdict {
    pub fn is_allowed(&self) -> bool {
        matches!(self, Self::Allowed { .. })
    }

    /// Whether waiting can change it.
    pub fn is_undecided(&self) -> bool {
        matches!(self, Self::Undecided { .. })
    }

    /// For a metric's label.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Allowed { .. } => "allowed",
            Self::Denied { .. } => "denied",
            Self::NotAllowed { .. } => "not_allowed",
            Self::Undecided { missing: Undecided::Policies } => "policies_missing",
            Self::Undecided { missing: Undecided::UnknownPolicy { .. } } => "unknown_policy",
            Self::Undecided { missing: Undecided::NotUnderstood { .. } } => "not_understood",
        }
    }

    /// The policy that it rests on, and the rule; for what was not allowed the ones that came closest.
    pub fn policy(&self) -> (Option<&Arc<str>>, Option<usize>) {
        match self {
            Self::Allowed { by: Some(by) } | Self::Denied { by, .. } => (Some(&by.policy), Some(by.rule)),
            Self::NotAllowed { closest, .. } => (Some(&closest.policy), closest.rule),
            Self::Undecided { missing: Undecided::UnknownPolicy { policy } } => (Some(policy), None),
            Self::Undecided { missing: Undecided::NotUnderstood { policy, rule, .. } } => (Some(policy), *rule),
            Self::Allowed { by: None } | Self::Undecided { missing: Undecided::Policies } => (None, None),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allowed { by: Some(by) } => write!(f, "allowed by {by}"),
            Self::Allowed { by: None } => f.write_str("allowed: no ALLOW policy applies"),
            Self::Denied { by, matched } => write!(f, "denied by {by}: {matched}"),
            Self::NotAllowed { policies: 1, closest } => write!(f, "not allowed by 1 policy; closest: {closest}"),
            Self::NotAllowed { policies, closest } => {
                write!(f, "not allowed by any of {policies} policies; closest: {closest}")
            }
            Self::Undecided { missing } => write!(f, "denied: {missing}"),
        }
    }
}

impl fmt::Display for RuleRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rule {}", self.policy, self.rule)
    }
}

impl fmt::Display for NearestMiss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(rule) = self.rule else { return write!(f, "{}, which has no rules", self.policy) };
        write!(f, "{} rule {rule}: ", self.policy)?;
        for (index, failed) in self.failed.iter().take(MAX_FIELDS).enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{} wanted {}, was {}", failed.field, failed.wanted, failed.was)?;
        }
        match self.failed.len().saturating_sub(MAX_FIELDS) {
            0 => Ok(()),
            more => write!(f, "; {more} more"),
        }
    }
}

impl fmt::Display for Undecided {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policies => f.write_str("the control plane has not sent its policies yet"),
            Self::UnknownPolicy { policy } => write!(f, "policy {policy}, which the workload names, is not known"),
            Self::NotUnderstood { policy, rule: Some(rule), reason } => {
                write!(f, "policy {policy} rule {rule} cannot be understood: {reason}")
            }
            Self::NotUnderstood { policy, rule: None, reason } => {
                write!(f, "policy {policy} cannot be understood: {reason}")
            }
        }
    }
}

fn text<S: Serializer>(text: &Arc<str>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(text)
}

/// Failed fields that are shown in a line.
const MAX_FIELDS: usize = 3;

//! What became of a policy, for its author: one word for metrics, conditions in Kubernetes' form.

use serde::Serialize;

use super::read::{Finding, FindingKind, Findings};

/// How a policy is enforced by node proxies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// As it is written.
    Enforced,
    /// As it is written, which is that it only reports (AUDIT, dry run).
    Reported,
    /// Less is allowed than is written.
    Stricter,
    /// More is denied (of AUDIT: reported) than is written.
    Broader,
    /// A part is ignored, so that less is denied than is written.
    Weaker,
    /// Nothing follows from it.
    NoEffect,
    /// By a waypoint, not by node proxies.
    Waypoint,
    /// Not at all: node proxies cannot.
    Unsupported,
    /// Something in it is not understood; what that concerns is denied.
    Invalid,
}

/// What became of a policy, in words.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub state: State,
    /// In the order of reading.
    pub findings: Vec<Finding>,
    /// What node proxies do; the rules of a policy with the numbers that proxies give them.
    pub meaning: Vec<String>,
}

/// A condition as in the status of Kubernetes objects.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// `True`, `False` or `Unknown`.
    pub status: &'static str,
    pub reason: &'static str,
    pub message: String,
}

impl State {
    pub const ALL: [Self; 9] = [
        Self::Enforced,
        Self::Reported,
        Self::Stricter,
        Self::Broader,
        Self::Weaker,
        Self::NoEffect,
        Self::Waypoint,
        Self::Unsupported,
        Self::Invalid,
    ];

    /// For metrics and output.
    pub fn label(self) -> &'static str {
        match self {
            Self::Enforced => "enforced",
            Self::Reported => "reported",
            Self::Stricter => "stricter",
            Self::Broader => "broader",
            Self::Weaker => "weaker",
            Self::NoEffect => "no_effect",
            Self::Waypoint => "waypoint",
            Self::Unsupported => "unsupported",
            Self::Invalid => "invalid",
        }
    }

    /// Whether its author must change it: it is not understood, or protects less than it says.
    pub fn is_error(self) -> bool {
        matches!(self, Self::Weaker | Self::Unsupported | Self::Invalid)
    }

    /// Whether its author should look at it.
    pub fn is_warning(self) -> bool {
        matches!(self, Self::Stricter | Self::Broader | Self::NoEffect)
    }

    pub fn words(self) -> &'static str {
        match self {
            Self::Enforced => "enforced by node proxies as written",
            Self::Reported => "only reported, as written: it decides nothing",
            Self::Stricter => "stricter than written: node proxies cannot judge a part, so less is allowed",
            Self::Broader => "broader than written: node proxies cannot judge a part and take it as met",
            Self::Weaker => "weaker than written: a part is ignored",
            Self::NoEffect => "no effect",
            Self::Waypoint => "for a waypoint: node proxies do not enforce it",
            Self::Unsupported => "not enforced: node proxies cannot",
            Self::Invalid => "not understood: what that concerns is denied",
        }
    }
}

impl Outcome {
    pub(super) fn new(state: State, findings: Findings) -> Self {
        Self { state, findings: findings.0, meaning: Vec::new() }
    }

    /// `ZtunnelAccepted` is Istio's; `FullyEnforced` says whether what is written is what happens.
    pub fn conditions(&self) -> Vec<Condition> {
        let (accepted, reason) = match self.state {
            State::Enforced | State::Reported | State::NoEffect => ("True", "Accepted"),
            State::Stricter | State::Broader | State::Weaker => ("True", "UnsupportedValue"),
            State::Waypoint => ("False", "TargetsWaypoint"),
            State::Unsupported => ("False", "UnsupportedValue"),
            State::Invalid => ("False", "Invalid"),
        };
        let (fully, why) = match self.state {
            State::Enforced => ("True", "AsWritten"),
            State::Reported => ("True", "OnlyReported"),
            State::Stricter => ("False", "StricterThanWritten"),
            State::Broader => ("False", "BroaderThanWritten"),
            State::Weaker => ("False", "WeakerThanWritten"),
            State::NoEffect => ("False", "NoEffect"),
            State::Waypoint => ("Unknown", "TargetsWaypoint"),
            State::Unsupported => ("False", "NotEnforced"),
            State::Invalid => ("False", "Invalid"),
        };
        let message = self.message();
        vec![
            Condition { kind: "ZtunnelAccepted", status: accepted, reason, message: message.clone() },
            Condition { kind: "FullyEnforced", status: fully, reason: why, message },
        ]
    }

    /// One line: the state and what led to it.
    pub fn message(&self) -> String {
        let mut text = self.state.words().to_owned();
        // What matters most first; a long list is cut.
        let mut findings: Vec<&Finding> = self.findings.iter().collect();
        findings.sort_by_key(|f| std::cmp::Reverse(f.kind));
        for (index, finding) in findings.iter().take(SHOWN).enumerate() {
            text += if index == 0 { ": " } else { "; " };
            text += &finding.to_string();
        }
        if findings.len() > SHOWN {
            text += &format!("; and {} more", findings.len() - SHOWN);
        }
        text
    }
}

/// Whether the policy has proxies to enforce it: those of pods that are not in the mesh know nothing of it.
pub fn enrolment(namespace: &str, enrolled: bool) -> Condition {
    let (status, reason) = if enrolled { ("True", "Labelled") } else { ("False", "NotLabelled") };
    let message = if enrolled {
        format!("namespace {namespace} is in the mesh")
    } else {
        let label = "istio.io/dataplane-mode: ambient";
        format!("namespace {namespace} has not the label {label}: it is enforced only for pods that have it themselves")
    };
    Condition { kind: "NamespaceEnrolled", status, reason, message }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let path = self.path.to_string();
        let what = match self.kind {
            FindingKind::Note => "",
            FindingKind::Ignored | FindingKind::NotAtL4 | FindingKind::Invalid => self.kind.label(),
        };
        let separator = if what.is_empty() { "" } else { ", " };
        match path.as_str() {
            "" => write!(f, "{what}{separator}{}", self.text),
            path => write!(f, "{path}: {what}{separator}{}", self.text),
        }
    }
}

/// Findings in one message.
const SHOWN: usize = 12;

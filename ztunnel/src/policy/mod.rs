//! L4 authorization: a pure function from policies and a connection to a verdict with its reason.
//!
//! Must never pass what it does not understand.

mod convert;
mod evaluate;
#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;

pub use convert::{PolicyError, policy as convert_policy, stand_in};
pub use evaluate::{Connection, Verdict, evaluate};

/// A policy, checked and normalised from `istio.security.Authorization`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    /// `namespace/name`.
    pub key: Arc<str>,
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub scope: PolicyScope,
    pub action: PolicyAction,
    /// Only reported, never enforced.
    pub dry_run: bool,
    /// One of them must match.
    pub rules: Vec<Rule>,
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
    /// Decides nothing.
    Audit,
    /// The policy cannot be understood, for this reason: it denies whatever it applies to.
    NotUnderstood(Box<str>),
}

/// All clauses must match; none: everything does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    pub clauses: Vec<Clause>,
}

/// One of its matches must match; an empty list does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Clause {
    pub matches: Vec<Match>,
}

/// Every list that is not empty must match: a positive one by one of its values, a negative one by none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Match {
    pub namespaces: Vec<TextMatch>,
    pub not_namespaces: Vec<TextMatch>,
    pub principals: Vec<TextMatch>,
    pub not_principals: Vec<TextMatch>,
    pub source_ips: Vec<IpNet>,
    pub not_source_ips: Vec<IpNet>,
    pub destination_ips: Vec<IpNet>,
    pub not_destination_ips: Vec<IpNet>,
    pub destination_ports: Vec<u16>,
    pub not_destination_ports: Vec<u16>,
    /// Namespace and name.
    pub service_accounts: Vec<(Arc<str>, Arc<str>)>,
    pub not_service_accounts: Vec<(Arc<str>, Arc<str>)>,
    /// It holds a condition that this version does not know: in an ALLOW it matches nothing, in a DENY what else it
    /// says decides.
    pub not_understood: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TextMatch {
    Exact(Box<str>),
    Prefix(Box<str>),
    Suffix(Box<str>),
    /// Any text that is not empty.
    Presence,
}

impl TextMatch {
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Exact(exact) => **exact == *text,
            Self::Prefix(prefix) => text.starts_with(&**prefix),
            Self::Suffix(suffix) => text.ends_with(&**suffix),
            Self::Presence => !text.is_empty(),
        }
    }
}

fn contains(nets: &[IpNet], ip: IpAddr) -> bool {
    let ip = ip.to_canonical();
    nets.iter().any(|net| net.contains(&ip))
}

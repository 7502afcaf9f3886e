//! What rules are made of, in the form in which they are matched: sorted, without empty parts, little memory.
//!
//! Must never allocate while matching.

use std::net::IpAddr;

use ipnet::IpNet;

use super::Connection;
use crate::identity::Identity;

/// All clauses must match; none: everything does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rule {
    pub clauses: Box<[Clause]>,
}

/// One of its matches must match; an empty list does.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Clause {
    pub matches: Box<[Match]>,
}

/// All conditions must hold. Without any it matches nothing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Match {
    pub conditions: Box<[Condition]>,
    /// There is one more condition, which this version does not know: what depends on it cannot be decided.
    pub not_understood: bool,
}

/// Holds where one of the values fits; a negative one where none does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    pub negative: bool,
    pub test: Test,
}

/// A kind of field with its values. The cheapest comes first, and is looked at first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Test {
    /// Sorted.
    DestinationPorts(Box<[u16]>),
    SourceIps(Nets),
    DestinationIps(Nets),
    Namespaces(Texts),
    /// `ns/<namespace>/sa/<name>`, as in an identity. Sorted.
    ServiceAccounts(Box<[Box<str>]>),
    /// Without `spiffe://`.
    Principals(Texts),
}

/// Texts, some of them patterns.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Texts {
    /// Sorted.
    exact: Box<[Box<str>]>,
    patterns: Box<[Pattern]>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pattern {
    Prefix(Box<str>),
    Suffix(Box<str>),
    /// Any text that is not empty.
    Presence,
}

/// Address ranges: sorted, none within another. IPv4 addresses and ranges in their IPv6 form count as IPv4.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nets(Box<[IpNet]>);

/// Whether something matches, where a part of it may not be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Truth {
    No,
    Unclear,
    Yes,
}

/// What conditions look at, read from a connection once.
pub(super) struct Facts<'a> {
    pub identity: Option<&'a Identity>,
    pub source: IpAddr,
    pub destination: IpAddr,
    pub port: u16,
}

impl<'a> Facts<'a> {
    pub fn of(connection: &'a Connection) -> Self {
        Self {
            identity: connection.identity.as_ref(),
            source: connection.source.to_canonical(),
            destination: connection.destination.ip().to_canonical(),
            port: connection.destination.port(),
        }
    }
}

impl Rule {
    pub(super) fn matches(&self, facts: &Facts<'_>) -> Truth {
        let mut all = Truth::Yes;
        for clause in &self.clauses {
            all = all.min(clause.matches(facts));
            if all == Truth::No {
                break;
            }
        }
        all
    }

    pub(super) fn is_inert(&self) -> bool {
        self.clauses.iter().any(|clause| !clause.matches.is_empty() && clause.matches.iter().all(Match::is_empty))
    }
}

impl Clause {
    fn matches(&self, facts: &Facts<'_>) -> Truth {
        if self.matches.is_empty() {
            return Truth::Yes;
        }
        let mut any = Truth::No;
        for one in &self.matches {
            any = any.max(one.matches(facts));
            if any == Truth::Yes {
                break;
            }
        }
        any
    }
}

impl Match {
    pub(super) fn matches(&self, facts: &Facts<'_>) -> Truth {
        if self.is_empty() || !self.conditions.iter().all(|condition| condition.holds(facts)) {
            Truth::No
        } else if self.not_understood {
            Truth::Unclear
        } else {
            Truth::Yes
        }
    }

    /// A match that says nothing counts as no match.
    pub(super) fn is_empty(&self) -> bool {
        self.conditions.is_empty() && !self.not_understood
    }
}

impl Condition {
    pub(super) fn holds(&self, facts: &Facts<'_>) -> bool {
        let fits = match &self.test {
            Test::DestinationPorts(ports) => ports.binary_search(&facts.port).is_ok(),
            Test::SourceIps(nets) => nets.contains(facts.source),
            Test::DestinationIps(nets) => nets.contains(facts.destination),
            // Without an identity nothing fits.
            Test::Namespaces(texts) => facts.identity.is_some_and(|id| texts.matches(id.namespace())),
            Test::ServiceAccounts(accounts) => facts.identity.is_some_and(|id| has(accounts, id.path())),
            Test::Principals(texts) => facts.identity.is_some_and(|id| texts.matches(id.principal())),
        };
        fits != self.negative
    }
}

impl Texts {
    pub fn new(mut exact: Vec<Box<str>>, patterns: Vec<Pattern>) -> Self {
        exact.sort_unstable();
        exact.dedup();
        Self { exact: exact.into(), patterns: patterns.into() }
    }

    pub fn exact(&self) -> &[Box<str>] {
        &self.exact
    }

    pub fn patterns(&self) -> &[Pattern] {
        &self.patterns
    }

    fn matches(&self, text: &str) -> bool {
        has(&self.exact, text) || self.patterns.iter().any(|pattern| pattern.matches(text))
    }
}

impl Pattern {
    fn matches(&self, text: &str) -> bool {
        match self {
            Self::Prefix(prefix) => text.starts_with(&**prefix),
            Self::Suffix(suffix) => text.ends_with(&**suffix),
            Self::Presence => !text.is_empty(),
        }
    }
}

impl Nets {
    pub fn new(nets: impl IntoIterator<Item = IpNet>) -> Self {
        let mut nets: Vec<_> = nets.into_iter().map(|net| canonical(net).trunc()).collect();
        // A range comes before those within it.
        nets.sort_unstable_by_key(|net| (net.network(), net.prefix_len()));
        nets.dedup_by(|next, kept| kept.contains(&*next));
        Self(nets.into())
    }

    pub fn as_slice(&self) -> &[IpNet] {
        &self.0
    }

    /// `ip` is canonical.
    fn contains(&self, ip: IpAddr) -> bool {
        let after = self.0.partition_point(|net| net.network() <= ip);
        after > 0 && self.0[after - 1].contains(&ip)
    }
}

/// A range of IPv4 addresses in IPv6 form as one of IPv4.
fn canonical(net: IpNet) -> IpNet {
    let IpNet::V6(v6) = net else { return net };
    let length = v6.prefix_len().checked_sub(96);
    match (v6.addr().to_ipv4_mapped(), length) {
        (Some(v4), Some(length)) => IpNet::new(v4.into(), length).unwrap_or(net),
        _ => net,
    }
}

fn has(sorted: &[Box<str>], text: &str) -> bool {
    sorted.binary_search_by(|one| (**one).cmp(text)).is_ok()
}

//! Words for what matched, and for the rule that came closest to allowing.
//!
//! Must never be reached where a connection is allowed.

use std::cmp::Reverse;
use std::fmt::{Display, Write};
use std::sync::Arc;

use super::matching::{Clause, Condition, Facts, Match, Pattern, Rule, Test, Texts, Truth};
use super::{Failed, NearestMiss, Policy};

/// How far a rule is from matching: the fewest failed fields, then the most that matched.
type Distance = (usize, Reverse<usize>);

/// The rule of the given policies that is closest to matching; nothing without policies.
pub(super) fn nearest<'a>(
    policies: impl Iterator<Item = &'a Arc<Policy>> + Clone,
    facts: &Facts<'_>,
) -> Option<NearestMiss> {
    let first = policies.clone().next()?;
    let rules =
        policies.flat_map(|policy| policy.rules.iter().enumerate().map(move |(index, rule)| (policy, index, rule)));
    let Some((policy, index, rule)) = rules.min_by_key(|(_, _, rule)| distance(rule, facts)) else {
        return Some(NearestMiss { policy: first.key().clone(), rule: None, failed: Vec::new() });
    };
    let failed = rule.clauses.iter().filter_map(|clause| closest(clause, facts)).flat_map(|one| failed(one, facts));
    Some(NearestMiss { policy: policy.key().clone(), rule: Some(index), failed: failed.collect() })
}

/// What of a rule that matches matched what.
pub(super) fn in_words(rule: &Rule, facts: &Facts<'_>) -> String {
    let matching = |clause: &Clause| clause.matches.iter().position(|one| one.matches(facts) == Truth::Yes);
    let conditions = rule
        .clauses
        .iter()
        .filter_map(|clause| Some(&clause.matches[matching(clause)?]))
        .flat_map(|one| &one.conditions);
    let mut text = String::new();
    for condition in conditions {
        let separator = if text.is_empty() { "" } else { "; " };
        let (field, wanted, was) = (name(condition), wanted(condition), was(condition, facts));
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{field} {wanted} matched {was}");
    }
    if text.is_empty() {
        text.push_str("it matches everything");
    }
    text
}

fn distance(rule: &Rule, facts: &Facts<'_>) -> Distance {
    let mut all = (0, Reverse(0));
    for clause in &rule.clauses {
        if let Some(one) = closest(clause, facts) {
            let (failed, Reverse(matched)) = distance_of_match(one, facts);
            all = (all.0 + failed, Reverse(all.1.0 + matched));
        }
    }
    all
}

/// Nothing for a clause without matches, which matches.
fn closest<'a>(clause: &'a Clause, facts: &Facts<'_>) -> Option<&'a Match> {
    clause.matches.iter().min_by_key(|one| distance_of_match(one, facts))
}

fn distance_of_match(one: &Match, facts: &Facts<'_>) -> Distance {
    let matched = one.conditions.iter().filter(|condition| condition.holds(facts)).count();
    let unmet = one.conditions.len() - matched;
    (unmet + usize::from(one.not_understood || one.conditions.is_empty()), Reverse(matched))
}

fn failed(one: &Match, facts: &Facts<'_>) -> Vec<Failed> {
    let unmet = one.conditions.iter().filter(|condition| !condition.holds(facts));
    let mut failed: Vec<_> = unmet.map(|c| Failed { field: name(c), wanted: wanted(c), was: was(c, facts) }).collect();
    if one.not_understood {
        failed.push(Failed { field: "another condition", wanted: "one that is known".into(), was: "not known".into() });
    } else if one.conditions.is_empty() {
        failed.push(Failed { field: "the match", wanted: "a condition".into(), was: "empty".into() });
    }
    failed
}

/// As the dump names it.
fn name(condition: &Condition) -> &'static str {
    match (&condition.test, condition.negative) {
        (Test::DestinationPorts(_), false) => "destinationPorts",
        (Test::DestinationPorts(_), true) => "notDestinationPorts",
        (Test::SourceIps(_), false) => "sourceIps",
        (Test::SourceIps(_), true) => "notSourceIps",
        (Test::DestinationIps(_), false) => "destinationIps",
        (Test::DestinationIps(_), true) => "notDestinationIps",
        (Test::Namespaces(_), false) => "namespaces",
        (Test::Namespaces(_), true) => "notNamespaces",
        (Test::ServiceAccounts(_), false) => "serviceAccounts",
        (Test::ServiceAccounts(_), true) => "notServiceAccounts",
        (Test::Principals(_), false) => "principals",
        (Test::Principals(_), true) => "notPrincipals",
    }
}

fn wanted(condition: &Condition) -> String {
    match &condition.test {
        Test::DestinationPorts(ports) => list(ports.iter(), ports.len()),
        Test::SourceIps(nets) | Test::DestinationIps(nets) => list(nets.as_slice().iter(), nets.as_slice().len()),
        Test::Namespaces(texts) | Test::Principals(texts) => list_of_texts(texts),
        Test::ServiceAccounts(accounts) => list(accounts.iter().map(|path| account(path)), accounts.len()),
    }
}

fn was(condition: &Condition, facts: &Facts<'_>) -> String {
    match (&condition.test, facts.identity) {
        (Test::DestinationPorts(_), _) => facts.port.to_string(),
        (Test::SourceIps(_), _) => facts.source.to_string(),
        (Test::DestinationIps(_), _) => facts.destination.to_string(),
        (Test::Namespaces(_), Some(id)) => cut(id.namespace()).to_string(),
        (Test::ServiceAccounts(_), Some(id)) => account(id.path()),
        (Test::Principals(_), Some(id)) => cut(id.principal()).to_string(),
        (Test::Namespaces(_) | Test::ServiceAccounts(_) | Test::Principals(_), None) => "none (no mTLS)".into(),
    }
}

fn list_of_texts(texts: &Texts) -> String {
    let exact = texts.exact().iter().map(|text| cut(text).to_string());
    let patterns = texts.patterns().iter().map(|pattern| match pattern {
        Pattern::Prefix(text) => format!("{}*", cut(text)),
        Pattern::Suffix(text) => format!("*{}", cut(text)),
        Pattern::Presence => "*".into(),
    });
    list(exact.chain(patterns), texts.exact().len() + texts.patterns().len())
}

/// The first few.
fn list(values: impl Iterator<Item = impl Display>, count: usize) -> String {
    let mut text = String::new();
    for value in values.take(MAX_VALUES) {
        let separator = if text.is_empty() { "" } else { " or " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{value}");
    }
    if count > MAX_VALUES {
        let _ = write!(text, " or {} more", count - MAX_VALUES);
    }
    text
}

/// `ns/<namespace>/sa/<name>` as `<namespace>/<name>`.
fn account(path: &str) -> String {
    let parts = path.strip_prefix("ns/").and_then(|rest| rest.split_once("/sa/"));
    parts.map_or_else(|| cut(path).to_string(), |(namespace, name)| format!("{}/{}", cut(namespace), cut(name)))
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT)]
}

/// Values of a field that are shown.
const MAX_VALUES: usize = 3;
/// Bytes of a value that are shown; names of Kubernetes are shorter.
const MAX_TEXT: usize = 160;

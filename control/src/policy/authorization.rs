//! AuthorizationPolicy.
//!
//! A condition that a node proxy cannot judge, be it of HTTP or not understood, is handled so that never more passes
//! than is written: an ALLOW rule with it is left out, in a DENY rule it is taken as met.

use ztunnel::manifests::{FieldPath, SecurityPolicy};
use ztunnel::proto::security as wire;
use ztunnel::proto::security::string_match::MatchType;

use super::describe::{no_rules_meaning, rule_meaning};
use super::read::{FindingKind, Findings, Node};
use super::status::{Outcome, State};
use super::{MeshNames, Target, Translation, name_of, selector, spec_of, values};

/// Translates a policy.
pub fn authorization_policy(mesh: &MeshNames, policy: &SecurityPolicy) -> Translation {
    let (name, namespace) = name_of(&policy.metadata);
    let mut out = Findings::default();
    let everywhere = namespace == mesh.root_namespace;
    let mut target = Target { everywhere, namespace: namespace.to_owned(), labels: Default::default() };
    let dry_run = dry_run(policy, &mut out);
    let mut wire = wire::Authorization {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        action: wire::Action::Deny.into(),
        dry_run,
        ..Default::default()
    };
    let Some(spec) = spec_of(policy, &mut out) else {
        return deny_all(wire, target, out);
    };
    let mark = out.mark();
    spec.expect_fields(&["selector", "targetRef", "targetRefs", "rules", "action", "provider"], &mut out);
    target.labels = selector(&spec, &mut out);
    let action = action(&spec, &mut out);
    if action == Some(Action::Custom) {
        let text = "an external authorizer is not asked by node proxies: use targetRefs and a waypoint";
        out.add(&spec.path.field("action"), FindingKind::NotAtL4, text);
        return Translation { resource: None, target, outcome: Outcome::new(State::Unsupported, out) };
    }
    let targets = targets(&spec, &mut out);
    if let Some(Ok(refs)) = &targets
        && !target.labels.is_empty()
    {
        out.invalid(refs, "cannot be set together with selector");
    } else if let Some(Ok(_)) = targets {
        return for_waypoint(mesh, &spec, action, target, out);
    }
    if let Some(provider) = spec.get("provider") {
        out.invalid(&provider.path, "only has a meaning with action CUSTOM");
    }
    let rules = spec.get("rules").map_or(Some(Vec::new()), |rules| rules.items(&mut out));
    let (Some(action), Some(rules), false) = (action, rules, out.gap_since(mark)) else {
        // One that never decides does not start to when it is not understood.
        if action == Some(Action::Audit) {
            wire.action = wire::Action::Audit.into();
        }
        return deny_all(wire, target, out);
    };
    let written = rules.len();
    wire.action = action.wire().into();
    wire.scope = target.scope().into();
    let mut translator = Rules { mesh, action, namespace, out };
    let mut meaning = Vec::new();
    for (index, rule) in rules.iter().enumerate() {
        let Some(rule) = translator.rule(rule) else { continue };
        // Proxies count the rules that they get.
        let number = wire.rules.len();
        let written = if index == number { String::new() } else { format!(" (spec.rules[{index}])") };
        meaning.push(format!("rule {number}{written} {}", rule_meaning(&wire, &rule)));
        wire.rules.push(rule);
    }
    let mut out = translator.out;
    let state = match out.worst() {
        Some(FindingKind::Invalid) => State::Invalid,
        Some(FindingKind::NotAtL4) if action == Action::Allow => State::Stricter,
        Some(FindingKind::NotAtL4) => State::Broader,
        _ if written == 0 && action != Action::Allow => {
            out.add(
                &spec.path,
                FindingKind::Note,
                "without rules it never matches: write rules: [{}] for any connection",
            );
            State::NoEffect
        }
        _ if dry_run || action == Action::Audit => State::Reported,
        Some(FindingKind::Note | FindingKind::Ignored) | None => State::Enforced,
    };
    if wire.rules.is_empty() {
        meaning.push(no_rules_meaning(&wire));
    }
    Translation { resource: Some(wire), target, outcome: Outcome { meaning, ..Outcome::new(state, out) } }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Allow,
    Deny,
    Audit,
    Custom,
}

impl Action {
    fn wire(self) -> wire::Action {
        match self {
            Self::Allow => wire::Action::Allow,
            Self::Audit => wire::Action::Audit,
            // Never sent; if it were, it must not let pass.
            Self::Deny | Self::Custom => wire::Action::Deny,
        }
    }
}

/// For a policy of which it is not known what it says: matches every connection to what it would apply to, as far as
/// that is known.
fn deny_all(mut wire: wire::Authorization, target: Target, out: Findings) -> Translation {
    wire.scope = target.scope().into();
    let rule = wire::Rule::default();
    let meaning = vec![format!("rule 0 {}", rule_meaning(&wire, &rule))];
    wire.rules.push(rule);
    let outcome = Outcome { meaning, ..Outcome::new(State::Invalid, out) };
    Translation { resource: Some(wire), target, outcome }
}

fn action(spec: &Node<'_>, out: &mut Findings) -> Option<Action> {
    let Some(action) = spec.get("action") else { return Some(Action::Allow) };
    match action.text(out)? {
        "ALLOW" => Some(Action::Allow),
        "DENY" => Some(Action::Deny),
        "AUDIT" => Some(Action::Audit),
        "CUSTOM" => Some(Action::Custom),
        other => {
            out.invalid(&action.path, format!("{other:?}: expected ALLOW, DENY, AUDIT or CUSTOM"));
            None
        }
    }
}

/// `targetRefs`, or its older form, if something is in it: where they stand, or that they say nothing of use.
fn targets(spec: &Node<'_>, out: &mut Findings) -> Option<Result<FieldPath, ()>> {
    let mark = out.mark();
    let (path, targets) = if let Some(target) = spec.get("targetRef") {
        (target.path.clone(), vec![target])
    } else {
        let list = spec.get("targetRefs")?;
        let Some(targets) = list.items(out) else { return Some(Err(())) };
        if targets.is_empty() {
            out.add(&list.path, FindingKind::Note, "an empty list is as if it were not set");
            return None;
        }
        (list.path, targets)
    };
    for target in targets {
        if !target.expect_fields(&["group", "kind", "name", "namespace"], out) {
            continue;
        }
        for field in ["kind", "name"] {
            if target.get(field).and_then(|f| f.text(out)).is_none_or(str::is_empty) {
                out.invalid(&target.path, format!("{field} is missing"));
            }
        }
    }
    Some(if out.gap_since(mark) { Err(()) } else { Ok(path) })
}

/// Not for node proxies. It is read all the same, so that its author hears of what is wrong.
fn for_waypoint(
    mesh: &MeshNames,
    spec: &Node<'_>,
    action: Option<Action>,
    target: Target,
    mut out: Findings,
) -> Translation {
    let rules = spec.get("rules").and_then(|rules| rules.items(&mut out)).unwrap_or_default();
    let namespace = target.namespace.clone();
    let mut translator = Rules { mesh, action: action.unwrap_or(Action::Deny), namespace: &namespace, out };
    for rule in &rules {
        translator.rule(rule);
    }
    let mut out = translator.out;
    // A waypoint can see these.
    out.0.retain(|f| f.kind != FindingKind::NotAtL4);
    let state = if out.gap_since(0) { State::Invalid } else { State::Waypoint };
    Translation { resource: None, target, outcome: Outcome::new(state, out) }
}

fn dry_run(policy: &SecurityPolicy, out: &mut Findings) -> bool {
    let value = policy.metadata.annotations.as_ref().and_then(|a| a.get(DRY_RUN)).map_or("", String::as_str);
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => true,
        "" | "0" | "f" | "F" | "false" | "FALSE" | "False" => false,
        other => {
            let path = FieldPath::default().field("metadata").field("annotations").field(DRY_RUN);
            out.invalid(&path, format!("{other:?}: expected true or false, the policy is enforced"));
            false
        }
    }
}

struct Rules<'a> {
    mesh: &'a MeshNames,
    action: Action,
    namespace: &'a str,
    out: Findings,
}

impl Rules<'_> {
    /// Nothing for an ALLOW rule that cannot be judged as a whole.
    fn rule(&mut self, rule: &Node<'_>) -> Option<wire::Rule> {
        let mark = self.out.mark();
        let mut clauses = Vec::new();
        if rule.expect_fields(&["from", "to", "when"], &mut self.out) {
            clauses.extend(self.items(rule, "to", Self::operation));
            clauses.extend(self.items(rule, "from", Self::source));
            if let Some(conditions) = rule.get("when").and_then(|w| self.some_items(&w)) {
                clauses.extend(conditions.iter().filter_map(|condition| self.condition(condition)));
            }
        }
        let gap = self.out.gap_since(mark);
        (self.action != Action::Allow || !gap).then_some(wire::Rule { clauses })
    }

    /// `from` or `to`: one clause, of which one item must match; none if one of them always does.
    fn items(
        &mut self,
        rule: &Node<'_>,
        name: &str,
        read: fn(&mut Self, &Node<'_>) -> wire::Match,
    ) -> Option<wire::Clause> {
        let items = self.some_items(&rule.get(name)?)?;
        let matches: Vec<_> = items.iter().map(|item| read(self, item)).collect();
        let always = matches.contains(&wire::Match::default());
        (!always).then_some(wire::Clause { matches })
    }

    /// The items of a list that must not be empty: that could mean any, or none.
    fn some_items<'n>(&mut self, list: &Node<'n>) -> Option<Vec<Node<'n>>> {
        let items = list.items(&mut self.out)?;
        if items.is_empty() {
            self.out.invalid(&list.path, "an empty list: leave it out to mean any");
            return None;
        }
        Some(items)
    }

    fn operation(&mut self, item: &Node<'_>) -> wire::Match {
        let http = ["hosts", "notHosts", "methods", "notMethods", "paths", "notPaths"];
        let Some(operation) = self.inner(item, "operation", &["ports", "notPorts"], &http) else {
            return wire::Match::default();
        };
        wire::Match {
            destination_ports: self.values(&operation, "ports", values::port),
            not_destination_ports: self.values(&operation, "notPorts", values::port),
            ..Default::default()
        }
    }

    fn source(&mut self, item: &Node<'_>) -> wire::Match {
        let known = [
            "principals",
            "notPrincipals",
            "namespaces",
            "notNamespaces",
            "serviceAccounts",
            "notServiceAccounts",
            "ipBlocks",
            "notIpBlocks",
        ];
        let http = [
            "requestPrincipals",
            "notRequestPrincipals",
            "remoteIpBlocks",
            "notRemoteIpBlocks",
            "trustDomains",
            "notTrustDomains",
        ];
        let Some(source) = self.inner(item, "source", &known, &http) else { return wire::Match::default() };
        let own = self.namespace.to_owned();
        let account = move |text: &str| values::service_account(text, &own);
        let mut found = wire::Match {
            principals: self.values(&source, "principals", values::principal),
            not_principals: self.values(&source, "notPrincipals", values::principal),
            namespaces: self.values(&source, "namespaces", values::text),
            not_namespaces: self.values(&source, "notNamespaces", values::text),
            service_accounts: self.values(&source, "serviceAccounts", &account),
            not_service_accounts: self.values(&source, "notServiceAccounts", &account),
            source_ips: self.values(&source, "ipBlocks", values::range),
            not_source_ips: self.values(&source, "notIpBlocks", values::range),
            ..Default::default()
        };
        for (accounts, others) in [
            ("serviceAccounts", ["principals", "namespaces"]),
            ("notServiceAccounts", ["notPrincipals", "notNamespaces"]),
        ] {
            let Some(list) = source.get(accounts) else { continue };
            if others.iter().any(|other| source.get(other).is_some()) {
                self.out.invalid(&list.path, format!("cannot be set together with {} or {}", others[0], others[1]));
                if accounts == "serviceAccounts" {
                    found.service_accounts.clear();
                } else {
                    found.not_service_accounts.clear();
                }
            }
        }
        self.note_principals(&source, "principals", &found.principals);
        self.note_namespaces(&source, "namespaces", &found.namespaces);
        found
    }

    /// What is in an item of `from` or `to`. What is HTTP's is noted, and so is an item that says nothing.
    fn inner<'n>(&mut self, item: &Node<'n>, name: &str, known: &[&str], http: &[&str]) -> Option<Node<'n>> {
        if !item.expect_fields(&[name], &mut self.out) {
            return None;
        }
        let Some(inner) = item.get(name) else {
            self.out.invalid(&item.path, format!("{name} is missing"));
            return None;
        };
        let all: Vec<&str> = known.iter().chain(http).copied().collect();
        if !inner.expect_fields(&all, &mut self.out) {
            return None;
        }
        let mut says_something = false;
        for field in all.iter().filter_map(|name| inner.get(name)) {
            let empty = field.value.as_array().is_some_and(Vec::is_empty);
            says_something |= !empty;
            if empty {
                self.out.add(&field.path, FindingKind::Note, "an empty list is as if it were not set");
            }
        }
        if !says_something {
            self.out.invalid(&inner.path, "it says nothing: name at least one condition");
        }
        for name in http {
            let field = inner.get(name).filter(|f| f.value.as_array().is_none_or(|list| !list.is_empty()));
            if let Some(field) = field {
                self.out.add(&field.path, FindingKind::NotAtL4, "only a waypoint can see this");
            }
        }
        Some(inner)
    }

    fn condition(&mut self, condition: &Node<'_>) -> Option<wire::Clause> {
        if !condition.expect_fields(&["key", "values", "notValues"], &mut self.out) {
            return None;
        }
        let Some(key) = condition.get("key") else {
            self.out.invalid(&condition.path, "key is missing");
            return None;
        };
        let name = key.text(&mut self.out)?;
        if ["values", "notValues"].iter().all(|list| condition.get(list).is_none()) {
            self.out.invalid(&condition.path, "it says nothing: set values or notValues");
            return None;
        }
        for list in ["values", "notValues"].iter().filter_map(|list| condition.get(list)) {
            self.some_items(&list);
        }
        let mut found = wire::Match::default();
        match name {
            "source.ip" => {
                found.source_ips = self.values(condition, "values", values::range);
                found.not_source_ips = self.values(condition, "notValues", values::range);
            }
            "source.namespace" => {
                found.namespaces = self.values(condition, "values", values::text);
                found.not_namespaces = self.values(condition, "notValues", values::text);
            }
            "source.principal" => {
                found.principals = self.values(condition, "values", values::principal);
                found.not_principals = self.values(condition, "notValues", values::principal);
            }
            "destination.ip" => {
                found.destination_ips = self.values(condition, "values", values::range);
                found.not_destination_ips = self.values(condition, "notValues", values::range);
            }
            "destination.port" => {
                found.destination_ports = self.values(condition, "values", values::port);
                found.not_destination_ports = self.values(condition, "notValues", values::port);
            }
            other if HIGHER_KEYS.iter().any(|known| other.starts_with(known)) => {
                self.out.add(&key.path, FindingKind::NotAtL4, format!("only a waypoint can see {other}"));
            }
            other => self.out.invalid(&key.path, format!("unknown key {other:?}")),
        }
        self.note_principals(condition, "values", &found.principals);
        self.note_namespaces(condition, "values", &found.namespaces);
        (found != wire::Match::default()).then(|| wire::Clause { matches: vec![found] })
    }

    /// The values of a list. Of a positive list with a wrong value nothing is left, since what is left might be less;
    /// of a negative one the rest.
    fn values<T>(&mut self, of: &Node<'_>, name: &str, read: impl Fn(&str) -> Result<T, String>) -> Vec<T> {
        let items = of.get(name).and_then(|list| list.items(&mut self.out)).unwrap_or_default();
        let mark = self.out.mark();
        let mut found = Vec::with_capacity(items.len());
        for item in items {
            let Some(text) = item.text(&mut self.out) else { continue };
            match read(text) {
                Ok(value) => found.push(value),
                Err(expected) => self.out.invalid(&item.path, format!("{text:?}: {expected}")),
            }
        }
        if self.out.gap_since(mark) && !name.starts_with("not") {
            found.clear();
        }
        found
    }

    /// Notes identities that no peer can have, or none of this mesh: perhaps a slip of the pen.
    fn note_principals(&mut self, of: &Node<'_>, name: &str, values: &[wire::StringMatch]) {
        for (index, value) in values.iter().enumerate() {
            let text = match &value.match_type {
                Some(MatchType::Exact(text)) if !is_identity(text) => {
                    format!("{text:?}: no peer has such an identity, this never matches")
                }
                Some(MatchType::Exact(text) | MatchType::Prefix(text)) => match text.split_once('/') {
                    Some((domain, _)) if domain != self.mesh.trust_domain => {
                        format!("{text:?} is of another trust domain than the mesh, {}", self.mesh.trust_domain)
                    }
                    _ => continue,
                },
                Some(MatchType::Suffix(_) | MatchType::Presence(())) | None => continue,
            };
            self.out.add(&of.path.field(name).item(index), FindingKind::Note, text);
        }
    }

    fn note_namespaces(&mut self, of: &Node<'_>, name: &str, values: &[wire::StringMatch]) {
        for (index, value) in values.iter().enumerate() {
            if let Some(MatchType::Exact(text)) = &value.match_type
                && values::is_no_name(text)
            {
                let text = format!("{text:?}: no namespace has such a name, this never matches");
                self.out.add(&of.path.field(name).item(index), FindingKind::Note, text);
            }
        }
    }
}

/// `trust domain/ns/namespace/sa/account`.
fn is_identity(principal: &str) -> bool {
    format!("spiffe://{principal}").parse::<ztunnel::identity::Identity>().is_ok()
}

const DRY_RUN: &str = "istio.io/dry-run";
/// Beginnings of the keys that only a proxy of HTTP or TLS can judge.
const HIGHER_KEYS: [&str; 6] =
    ["request.", "remote.ip", "connection.sni", "source.trustDomain", "destination.user", "experimental."];

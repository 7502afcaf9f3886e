//! PeerAuthentication: which pods, and which of their ports, take only mutual TLS.
//!
//! Modes come from the mesh (root namespace), the namespace and the workload (by labels); the nearest that is set
//! counts, and of several at one level the oldest. STRICT becomes a policy that denies peers without an identity: one
//! for all, and one for each PeerAuthentication whose ports differ from the rest of their pod.

use std::collections::BTreeMap;
use std::sync::Arc;

use ztunnel::manifests::{FieldPath, ObjectName, SecurityPolicy};
use ztunnel::proto::security as wire;

use super::read::{FindingKind, Findings, Node};
use super::status::{Outcome, State};
use super::{Target, Translation, name_of, selector, spec_of, values};

/// All of a cluster, by name.
#[derive(Debug, Clone)]
pub struct PeerAuthentications {
    root: Arc<str>,
    all: BTreeMap<ObjectName, Peer>,
}

#[derive(Debug, Clone)]
struct Peer {
    /// The oldest counts; one without a time is younger than any with one.
    age: (bool, Option<k8s_openapi::jiff::Timestamp>, ObjectName),
    target: Target,
    /// Of the root namespace: modes of ports do not count there.
    in_root: bool,
    mode: Mode,
    ports: BTreeMap<u16, Mode>,
    /// Something in it is not understood: wherever it would apply, all ports are STRICT.
    invalid: bool,
    findings: Vec<super::Finding>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Unset,
    Disable,
    Permissive,
    Strict,
}

impl PeerAuthentications {
    pub fn new(root: &str) -> Self {
        Self { root: root.into(), all: BTreeMap::new() }
    }

    /// Takes in an object, or takes it out; the targets of what was there before and what is there now.
    pub fn set(&mut self, name: &ObjectName, object: Option<&SecurityPolicy>) -> Vec<Target> {
        let before = match object {
            Some(object) => self.all.insert(name.clone(), Peer::read(&self.root, object)),
            None => self.all.remove(name),
        };
        before.into_iter().map(|p| p.target).chain(self.all.get(name).map(|p| p.target.clone())).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn names(&self) -> impl Iterator<Item = &ObjectName> {
        self.all.keys()
    }

    /// `namespace/name` of the policy for the ports of one of them.
    pub fn resource_name(name: &ObjectName) -> String {
        format!("{}/{}", name.namespace, converted_name(&name.name))
    }

    /// `namespace/name` of the policy that denies peers without an identity.
    pub fn static_strict_key(&self) -> String {
        format!("{}/{STATIC_STRICT}", self.root)
    }

    /// That policy.
    pub fn static_strict(&self) -> wire::Authorization {
        let rule = wire::Rule { clauses: vec![clause(no_identity())] };
        policy(STATIC_STRICT, &self.root, vec![rule])
    }

    /// The policies that a pod's record must name.
    pub fn policies_of(&self, namespace: &str, labels: &BTreeMap<String, String>) -> Option<String> {
        let selecting = || self.near(namespace).filter(|p| p.target.selects(namespace, labels));
        if selecting().any(|p| p.invalid) {
            return Some(self.static_strict_key());
        }
        let labelled = selecting().filter(|p| !p.target.labels.is_empty() && p.says_something());
        let workload = labelled.min_by_key(|p| &p.age);
        let parent = self.mode_of_namespace(namespace);
        let Some(workload) = workload else { return (parent == Mode::Strict).then(|| self.static_strict_key()) };
        if workload.converted(parent).is_some() {
            return Some(Self::resource_name(&workload.age.2));
        }
        (workload.mode.or(parent) == Mode::Strict).then(|| self.static_strict_key())
    }

    /// What becomes of one of them among the others. The resource is the policy for its ports, if it needs one.
    pub fn translate(&self, name: &ObjectName) -> Option<Translation> {
        let peer = self.all.get(name)?;
        let mut out = Findings(peer.findings.clone());
        let parent = self.mode_of_namespace(&name.namespace);
        let rules = if peer.invalid { None } else { peer.converted(parent) };
        let resource = rules.map(|rules| policy(&converted_name(&name.name), &name.namespace, rules));
        let mut state = if peer.invalid { State::Invalid } else { State::Enforced };
        if !peer.invalid {
            self.note_others(peer, &mut out, &mut state);
        }
        if state == State::Enforced && peer.ignores_ports() {
            let path = FieldPath::default().field("spec").field("portLevelMtls");
            let why = if peer.target.labels.is_empty() { "without a selector" } else { "in the root namespace" };
            out.add(&path, FindingKind::Ignored, format!("{why} the modes of ports do not count, as in Istio"));
            let own = peer.mode.or(parent);
            if own != Mode::Strict && peer.ports.values().any(|mode| *mode == Mode::Strict) {
                state = State::Weaker;
            } else if own == Mode::Strict && peer.ports.values().any(|mode| mode.is_lax()) {
                state = State::Stricter;
            }
        }
        let modes = std::iter::once(peer.mode).chain(peer.ports.values().copied());
        if modes.into_iter().any(|mode| mode == Mode::Disable) {
            let path = FieldPath::default().field("spec");
            let text = "DISABLE is as PERMISSIVE: between pods of the mesh there is always mutual TLS";
            out.add(&path, FindingKind::Note, text);
        }
        let mut outcome = Outcome::new(state, out);
        outcome.meaning = peer.meaning(parent);
        Some(Translation { resource, target: peer.target.clone(), outcome })
    }

    /// Those of a namespace, and those of the mesh.
    fn near<'a>(&'a self, namespace: &str) -> impl Iterator<Item = &'a Peer> + use<'a> {
        let in_root = *namespace == *self.root;
        let of_mesh = self.of(&self.root).filter(move |p| p.target.everywhere && !in_root);
        self.of(namespace).chain(of_mesh)
    }

    fn of<'a>(&'a self, namespace: &str) -> impl Iterator<Item = &'a Peer> + use<'a> {
        let from = ObjectName::new(namespace, "");
        let wanted = from.namespace.clone();
        self.all.range(from..).take_while(move |(name, _)| name.namespace == wanted).map(|(_, peer)| peer)
    }

    /// The oldest without labels that says something.
    fn of_all_pods(&self, namespace: &str) -> Option<&Peer> {
        let all = self.of(namespace).filter(|p| p.target.labels.is_empty() && !p.invalid && p.says_something());
        all.min_by_key(|p| &p.age)
    }

    /// What counts where no labels match.
    fn mode_of_namespace(&self, namespace: &str) -> Mode {
        let mode = |namespace| self.of_all_pods(namespace).map_or(Mode::Unset, |p| p.mode);
        match mode(namespace).or(mode(&self.root)) {
            Mode::Unset => Mode::Permissive,
            set => set,
        }
    }

    /// Older ones for the same pods take the effect.
    fn note_others(&self, peer: &Peer, out: &mut Findings, state: &mut State) {
        let path = FieldPath::default().field("spec");
        let namespace = &peer.age.2.namespace;
        if peer.target.labels.is_empty() {
            let oldest = self.of_all_pods(namespace).filter(|oldest| oldest.age < peer.age);
            if let Some(oldest) = oldest {
                *state = State::NoEffect;
                out.add(
                    &path,
                    FindingKind::Note,
                    format!("{} is for the same pods and older: it counts", oldest.age.2),
                );
            }
            return;
        }
        let counts = |o: &&Peer| !o.target.labels.is_empty() && !o.invalid && o.says_something();
        for older in self.of(namespace).filter(|o| o.age < peer.age).filter(counts) {
            let (mine, theirs) = (&peer.target.labels, &older.target.labels);
            if theirs.iter().all(|(key, value)| mine.get(key) == Some(value)) {
                *state = State::NoEffect;
                out.add(&path, FindingKind::Note, format!("{} is for the same pods and older: it counts", older.age.2));
            } else if theirs.iter().all(|(key, value)| mine.get(key).is_none_or(|v| v == value)) {
                let text = format!("{} is older: it counts for pods that are selected by both", older.age.2);
                out.add(&path, FindingKind::Note, text);
            }
        }
    }
}

impl Peer {
    fn read(root: &str, object: &SecurityPolicy) -> Self {
        let (name, namespace) = name_of(&object.metadata);
        let name = ObjectName::new(namespace, name);
        let created = object.metadata.creation_timestamp.as_ref().map(|t| t.0);
        let mut out = Findings::default();
        let mut peer = Self {
            age: (created.is_none(), created, name),
            target: Target { everywhere: false, namespace: namespace.to_owned(), labels: BTreeMap::new() },
            in_root: namespace == root,
            mode: Mode::Unset,
            ports: BTreeMap::new(),
            invalid: false,
            findings: Vec::new(),
        };
        if let Some(spec) = spec_of(object, &mut out) {
            spec.expect_fields(&["selector", "mtls", "portLevelMtls"], &mut out);
            peer.target.labels = selector(&spec, &mut out);
            peer.mode = spec.get("mtls").map_or(Mode::Unset, |mtls| mode(&mtls, &mut out));
            for (key, value) in spec.get("portLevelMtls").map(|ports| ports.entries(&mut out)).unwrap_or_default() {
                match values::port(key).map(u16::try_from) {
                    Ok(Ok(port)) => {
                        if peer.ports.insert(port, mode(&value, &mut out)).is_some() {
                            out.invalid(&value.path, format!("port {port} is given twice"));
                        }
                    }
                    _ => out.invalid(&value.path, format!("{key:?}: expected a port from 1 to 65535")),
                }
            }
        }
        peer.target.everywhere = peer.in_root && peer.target.labels.is_empty();
        peer.invalid = out.gap_since(0);
        peer.findings = out.0;
        peer
    }

    /// Rules for ports that are not as the rest of the pod; nothing if there are none.
    fn converted(&self, parent: Mode) -> Option<Vec<wire::Rule>> {
        if self.ports_are_ignored() {
            return None;
        }
        let ports = |wanted: fn(Mode) -> bool| self.ports.iter().filter(move |(_, m)| wanted(**m)).map(|(p, _)| *p);
        let rules: Vec<_> = if self.mode.or(parent) == Mode::Strict {
            let mut clauses: Vec<_> = ports(Mode::is_lax)
                .map(|port| clause(wire::Match { not_destination_ports: vec![port.into()], ..Default::default() }))
                .collect();
            if clauses.is_empty() {
                return None;
            }
            clauses.push(clause(no_identity()));
            vec![wire::Rule { clauses }]
        } else {
            let rule = |port: u16| wire::Rule {
                clauses: vec![clause(wire::Match { destination_ports: vec![port.into()], ..no_identity() })],
            };
            // One rule each: any of them denies.
            ports(|mode| mode == Mode::Strict).map(rule).collect()
        };
        (!rules.is_empty()).then_some(rules)
    }

    /// What says nothing must not stand before one that does: an UNSET one would switch STRICT off.
    fn says_something(&self) -> bool {
        self.mode != Mode::Unset || (!self.ports_are_ignored() && self.ports.values().any(|mode| *mode != Mode::Unset))
    }

    fn ports_are_ignored(&self) -> bool {
        self.target.labels.is_empty() || self.in_root
    }

    fn ignores_ports(&self) -> bool {
        self.ports_are_ignored() && self.ports.values().any(|mode| *mode != Mode::Unset)
    }

    fn meaning(&self, parent: Mode) -> Vec<String> {
        if self.invalid {
            return vec!["only mutual TLS is taken, on all ports, since it is not understood".into()];
        }
        let words = |mode: Mode| match mode {
            Mode::Strict => "only mutual TLS is taken",
            Mode::Permissive | Mode::Disable | Mode::Unset => "plaintext is taken as well",
        };
        let inherited = if self.mode == Mode::Unset { " (not set here: as its parent says)" } else { "" };
        let mut lines = vec![format!("{}{inherited}", words(self.mode.or(parent)))];
        if !self.ports_are_ignored() {
            let set = self.ports.iter().filter(|(_, mode)| **mode != Mode::Unset);
            lines.extend(set.map(|(port, mode)| format!("port {port}: {}", words(*mode))));
        }
        lines
    }
}

impl Mode {
    fn or(self, parent: Self) -> Self {
        if self == Self::Unset { parent } else { self }
    }

    fn is_lax(self) -> bool {
        matches!(self, Self::Disable | Self::Permissive)
    }
}

fn mode(mtls: &Node<'_>, out: &mut Findings) -> Mode {
    if mtls.value.is_null() || !mtls.expect_fields(&["mode"], out) {
        return Mode::Unset;
    }
    let Some(mode) = mtls.get("mode") else { return Mode::Unset };
    match mode.text(out) {
        Some("UNSET") | None => Mode::Unset,
        Some("DISABLE") => Mode::Disable,
        Some("PERMISSIVE") => Mode::Permissive,
        Some("STRICT") => Mode::Strict,
        Some(other) => {
            out.invalid(&mode.path, format!("{other:?}: expected UNSET, DISABLE, PERMISSIVE or STRICT"));
            Mode::Unset
        }
    }
}

fn policy(name: &str, namespace: &str, rules: Vec<wire::Rule>) -> wire::Authorization {
    wire::Authorization {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        scope: wire::Scope::WorkloadSelector.into(),
        action: wire::Action::Deny.into(),
        rules,
        ..Default::default()
    }
}

fn clause(found: wire::Match) -> wire::Clause {
    wire::Clause { matches: vec![found] }
}

fn no_identity() -> wire::Match {
    let presence = wire::StringMatch { match_type: Some(wire::string_match::MatchType::Presence(())) };
    wire::Match { not_principals: vec![presence], ..Default::default() }
}

/// Underscores, which no object's name has.
fn converted_name(name: &str) -> String {
    format!("converted_peer_authentication_{name}")
}

/// Name of the policy that denies peers without an identity.
const STATIC_STRICT: &str = "istio_converted_static_strict";

//! All policies, found by what they apply to; and those that apply to a workload, ready to be evaluated.
//!
//! Copies share what has not changed: a change costs the change, however many policies there are.

use std::collections::HashSet;
use std::sync::Arc;

use imbl::{HashMap, OrdMap};

use super::{Policy, PolicyAction, PolicyScope};

/// All policies of the mesh.
#[derive(Debug, Clone, Default)]
pub struct PolicyIndex {
    by_key: HashMap<Arc<str>, Arc<Policy>>,
    /// Of the whole mesh. Sorted, so that of several policies that decide it is always the same one that is named.
    global: OrdMap<Arc<str>, Arc<Policy>>,
    by_namespace: HashMap<Box<str>, OrdMap<Arc<str>, Arc<Policy>>>,
    /// The control plane has sent all that it has, at least once.
    is_complete: bool,
}

/// The policies that apply to one workload. By default nothing is known yet, so nothing can be decided.
#[derive(Debug, Clone, Default)]
pub struct PolicySet {
    pub(super) enforced: Group,
    pub(super) dry_run: Group,
    pub(super) audit: Box<[Arc<Policy>]>,
    /// Names that no policy is known for.
    pub(super) unknown: Box<[Arc<str>]>,
    pub(super) is_complete: bool,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Group {
    /// With those that cannot be understood.
    pub deny: Box<[Arc<Policy>]>,
    pub allow: Box<[Arc<Policy>]>,
}

impl PolicyIndex {
    pub fn get(&self, key: &str) -> Option<&Arc<Policy>> {
        self.by_key.get(key)
    }

    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<Policy>> {
        self.by_key.values()
    }

    /// Whether the control plane has sent all that it has.
    pub fn is_complete(&self) -> bool {
        self.is_complete
    }

    pub fn complete(&mut self) {
        self.is_complete = true;
    }

    /// Takes a policy; the one that it replaces.
    pub fn insert(&mut self, policy: Arc<Policy>) -> Option<Arc<Policy>> {
        let old = self.remove(policy.key());
        match policy.scope {
            PolicyScope::Global => {
                self.global.insert(policy.key().clone(), policy.clone());
            }
            PolicyScope::Namespace => {
                let namespace = self.by_namespace.entry(policy.namespace().into()).or_default();
                namespace.insert(policy.key().clone(), policy.clone());
            }
            PolicyScope::WorkloadSelector => {}
        }
        self.by_key.insert(policy.key().clone(), policy);
        old
    }

    pub fn remove(&mut self, key: &str) -> Option<Arc<Policy>> {
        let policy = self.by_key.remove(key)?;
        match policy.scope {
            PolicyScope::Global => {
                self.global.remove(key);
            }
            PolicyScope::Namespace => {
                if let Some(namespace) = self.by_namespace.get_mut(policy.namespace()) {
                    namespace.remove(key);
                    if namespace.is_empty() {
                        self.by_namespace.remove(policy.namespace());
                    }
                }
            }
            PolicyScope::WorkloadSelector => {}
        }
        Some(policy)
    }

    /// What judges connections to a workload of this namespace that names these policies (xDS §3, Evaluation). For the
    /// pods of this node the mesh's snapshot has it ready.
    pub fn applying(&self, namespace: &str, names: &[Arc<str>]) -> PolicySet {
        let scoped = self.global.values().chain(self.by_namespace.get(namespace).into_iter().flat_map(OrdMap::values));
        let mut policies: Vec<&Arc<Policy>> = scoped.collect();
        let mut seen: HashSet<&str> = HashSet::new();
        let (mut unknown, mut named) = (Vec::new(), Vec::new());
        for name in names.iter().filter(|name| seen.insert(name)) {
            match self.by_key.get(name) {
                Some(policy) if self.is_scoped(policy, namespace) => {}
                Some(policy) => named.push(policy),
                None => unknown.push(name.clone()),
            }
        }
        named.sort_by_key(|policy| policy.key());
        policies.extend(named);
        PolicySet::new(policies, unknown, self.is_complete)
    }

    /// Whether a policy applies to all workloads of a namespace, without being named.
    fn is_scoped(&self, policy: &Policy, namespace: &str) -> bool {
        match policy.scope {
            PolicyScope::Global => true,
            PolicyScope::Namespace => policy.namespace() == namespace,
            PolicyScope::WorkloadSelector => false,
        }
    }
}

impl PolicySet {
    fn new(policies: Vec<&Arc<Policy>>, unknown: Vec<Arc<str>>, is_complete: bool) -> Self {
        let pick = |dry_run: bool, wanted: fn(&PolicyAction) -> bool| {
            policies.iter().filter(|p| p.dry_run == dry_run && wanted(&p.action)).map(|p| Arc::clone(p)).collect()
        };
        let group = |dry_run| Group {
            deny: pick(dry_run, |a| matches!(a, PolicyAction::Deny | PolicyAction::NotUnderstood(_))),
            allow: pick(dry_run, |a| *a == PolicyAction::Allow),
        };
        Self {
            enforced: group(false),
            dry_run: group(true),
            audit: policies.iter().filter(|p| p.action == PolicyAction::Audit).map(|p| Arc::clone(p)).collect(),
            unknown: unknown.into(),
            is_complete,
        }
    }

    /// How many policies apply.
    pub fn len(&self) -> usize {
        self.iter().count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The policies that apply, in no order that means anything.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let groups = [&self.enforced, &self.dry_run].into_iter();
        groups.flat_map(|group| group.deny.iter().chain(&group.allow)).chain(&self.audit)
    }

    /// Names on the workload that no policy is known for.
    pub fn unknown(&self) -> &[Arc<str>] {
        &self.unknown
    }
}

impl Group {
    pub fn is_empty(&self) -> bool {
        self.deny.is_empty() && self.allow.is_empty()
    }
}

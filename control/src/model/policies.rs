//! The policies of a cluster: their resources, their names in the records of pods, what became of each. A change works
//! out again what it concerns.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::Serialize;
use ztunnel::manifests::{Changes, ObjectKey, ObjectName, Objects, SecurityPolicy};

use super::Resource;
use crate::policy::{self, Condition, MeshNames, PeerAuthentications, State, Target, Translation};

/// What became of a policy, as it is told.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyStatus {
    /// The version of the object that this is about, if it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    #[serde(skip)]
    pub state: State,
    /// The pods that it applies to, in words.
    pub applies_to: String,
    /// What node proxies do, in words.
    pub meaning: Vec<String>,
    pub conditions: Vec<Condition>,
}

#[derive(Debug)]
pub(super) struct Policies {
    mesh: MeshNames,
    peers: PeerAuthentications,
    /// Policies that pods name.
    selecting: BTreeMap<ObjectName, Target>,
    /// The same by their namespace and one of the labels that they want: who has it not is not selected.
    by_label: HashMap<Label, BTreeSet<ObjectName>>,
}

/// Namespace of the policy, key and value.
type Label = (String, String, String);

/// What follows from a change.
#[derive(Debug, Default)]
pub(super) struct Update {
    /// By name; nothing stands for what is to be gone.
    pub resources: Vec<(String, Option<Resource>)>,
    pub statuses: Vec<(ObjectKey, Option<PolicyStatus>)>,
    /// The records of these pods may name other policies now.
    pub targets: Vec<Target>,
}

impl Policies {
    pub fn new(mesh: MeshNames) -> Self {
        let peers = PeerAuthentications::new(&mesh.root_namespace);
        Self { mesh, peers, selecting: BTreeMap::new(), by_label: HashMap::new() }
    }

    /// Names of the policies that a pod's record must name, in order.
    pub fn of_pod(&self, namespace: &str, labels: &BTreeMap<String, String>) -> Vec<String> {
        let root = self.mesh.root_namespace.as_str();
        let mut names = Vec::new();
        for of in [Some(namespace), (namespace != root).then_some(root)].into_iter().flatten() {
            for (key, value) in labels {
                let candidates = self.by_label.get(&(of.to_owned(), key.clone(), value.clone()));
                let selects = |name: &&ObjectName| self.selecting[*name].selects(namespace, labels);
                names.extend(candidates.into_iter().flatten().filter(selects).map(ToString::to_string));
            }
        }
        names.sort_unstable();
        names.extend(self.peers.policies_of(namespace, labels));
        names
    }

    /// Takes in a change of objects.
    pub fn update(&mut self, changes: &Changes, older: &Objects, newer: &Objects) -> Update {
        let mut update = Update::default();
        let mut policies: BTreeSet<&ObjectName> = changes.authorization_policies.iter().collect();
        // A label of the namespace is part of what is told of a policy, though not of what it does.
        let others = |name: &&std::sync::Arc<str>| is_enrolled(older, name) != is_enrolled(newer, name);
        let relabelled: BTreeSet<_> = changes.namespaces.iter().filter(others).collect();
        let of_relabelled = newer.authorization_policies.keys().filter(|name| relabelled.contains(&name.namespace));
        if !relabelled.is_empty() {
            policies.extend(of_relabelled);
        }
        for name in policies {
            self.take(name, newer, &mut update);
        }
        self.take_peers(changes, !relabelled.is_empty(), newer, &mut update);
        update
    }

    fn take(&mut self, name: &ObjectName, newer: &Objects, update: &mut Update) {
        let key = ObjectKey::AuthorizationPolicy(name.clone());
        let before = self.selecting.remove(name);
        if let Some(label) = before.as_ref().and_then(label_of)
            && let Some(names) = self.by_label.get_mut(&label)
        {
            names.remove(name);
            if names.is_empty() {
                self.by_label.remove(&label);
            }
        }
        let Some(object) = newer.authorization_policies.get(name) else {
            update.targets.extend(before);
            update.resources.push((name.to_string(), None));
            update.statuses.push((key, None));
            return;
        };
        let translation = policy::authorization_policy(&self.mesh, object);
        if let (Some(_), Some(label)) = (&translation.resource, label_of(&translation.target)) {
            self.selecting.insert(name.clone(), translation.target.clone());
            self.by_label.entry(label).or_default().insert(name.clone());
        }
        let now = self.selecting.get(name);
        if before.as_ref() != now {
            update.targets.extend(before.into_iter().chain(now.cloned()));
        }
        update.statuses.push((key, Some(self.status(object, &translation, newer))));
        update.resources.push((name.to_string(), translation.resource.as_ref().map(Resource::authorization)));
    }

    /// Those of a namespace depend on each other, and all on those of the root namespace.
    fn take_peers(&mut self, changes: &Changes, relabelled: bool, newer: &Objects, update: &mut Update) {
        if changes.peer_authentications.is_empty() && !relabelled {
            return;
        }
        let key = |name: &ObjectName| ObjectKey::PeerAuthentication(name.clone());
        for name in &changes.peer_authentications {
            let object = newer.peer_authentications.get(name);
            update.targets.extend(self.peers.set(name, object.map(|o| &**o)));
            if object.is_none() {
                update.statuses.push((key(name), None));
                update.resources.push((PeerAuthentications::resource_name(name), None));
            }
        }
        let concerned: BTreeSet<_> = changes.peer_authentications.iter().map(|name| &*name.namespace).collect();
        let all = relabelled || concerned.contains(&*self.mesh.root_namespace);
        for name in self.peers.names().filter(|name| all || concerned.contains(&*name.namespace)) {
            let Some(translation) = self.peers.translate(name) else { continue };
            let resource = translation.resource.as_ref().map(Resource::authorization);
            update.resources.push((PeerAuthentications::resource_name(name), resource));
            if let Some(object) = newer.peer_authentications.get(name) {
                update.statuses.push((key(name), Some(self.status(object, &translation, newer))));
            }
        }
        let strict = (!self.peers.is_empty()).then(|| Resource::authorization(&self.peers.static_strict()));
        update.resources.push((self.peers.static_strict_key(), strict));
    }

    fn status(&self, object: &SecurityPolicy, translation: &Translation, objects: &Objects) -> PolicyStatus {
        let outcome = &translation.outcome;
        let mut conditions = outcome.conditions();
        let namespace = &translation.target.namespace;
        // What has no namespace of its own to look at is left out, as is what is not enforced by node proxies.
        if *namespace != self.mesh.root_namespace && !matches!(outcome.state, State::Waypoint | State::Unsupported) {
            conditions.push(policy::enrolment(namespace, is_enrolled(objects, namespace)));
        }
        PolicyStatus {
            observed_generation: object.metadata.generation,
            state: outcome.state,
            applies_to: translation.target.to_string(),
            meaning: outcome.meaning.clone(),
            conditions,
        }
    }
}

/// One of the labels that a policy wants, if it wants any.
fn label_of(target: &Target) -> Option<Label> {
    let (key, value) = target.labels.first_key_value()?;
    Some((target.namespace.clone(), key.clone(), value.clone()))
}

/// Whether the pods of a namespace are in the mesh by its label.
pub fn is_enrolled(objects: &Objects, namespace: &str) -> bool {
    let labels = objects.namespace(namespace).and_then(|n| n.metadata.labels.as_ref());
    labels.and_then(|l| l.get("istio.io/dataplane-mode")).is_some_and(|mode| mode == "ambient")
}

//! What the cluster looks like at one moment: the objects that the mesh reads, in maps that are cheap to keep and to
//! compare.
//!
//! Must never change once published: a new moment is a new value that shares what stayed the same.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;

use super::entries::{ServiceEntry, WorkloadEntry};
use super::security::{SecurityKind, SecurityPolicy};
use super::status::{PodStatus, Redirection};

/// Everything that is known, at one moment. Cloning costs nothing worth mentioning.
///
/// Names are checked: lower case letters, digits, `-` and `.`. An object without a namespace that should have one
/// is in `default`.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    /// Counts the moments of one source.
    pub generation: u64,
    pub namespaces: OrdMap<Arc<str>, Arc<Namespace>>,
    pub nodes: OrdMap<Arc<str>, Arc<Node>>,
    pub pods: OrdMap<ObjectName, Arc<Pod>>,
    pub service_accounts: OrdMap<ObjectName, Arc<ServiceAccount>>,
    pub services: OrdMap<ObjectName, Arc<Service>>,
    pub endpoint_slices: OrdMap<ObjectName, Arc<EndpointSlice>>,
    pub service_entries: OrdMap<ObjectName, Arc<ServiceEntry>>,
    pub workload_entries: OrdMap<ObjectName, Arc<WorkloadEntry>>,
    pub peer_authentications: OrdMap<ObjectName, Arc<SecurityPolicy>>,
    pub authorization_policies: OrdMap<ObjectName, Arc<SecurityPolicy>>,
    /// What agents report about pods, by the pod's uid.
    pub statuses: OrdMap<Arc<str>, Arc<PodStatus>>,
    /// What is wrong with the source right now.
    pub problems: Arc<[Problem]>,
}

/// Namespace and name. Ordered by namespace first, so that a namespace is a range.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

/// Kind and name of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectKey {
    Namespace(Arc<str>),
    Node(Arc<str>),
    Pod(ObjectName),
    ServiceAccount(ObjectName),
    Service(ObjectName),
    EndpointSlice(ObjectName),
    ServiceEntry(ObjectName),
    WorkloadEntry(ObjectName),
    PeerAuthentication(ObjectName),
    AuthorizationPolicy(ObjectName),
    /// By the pod's uid.
    Status(Arc<str>),
}

/// An object of a kind that the mesh reads.
#[derive(Debug, Clone)]
pub enum Object {
    Namespace(Arc<Namespace>),
    Node(Arc<Node>),
    Pod(Arc<Pod>),
    ServiceAccount(Arc<ServiceAccount>),
    Service(Arc<Service>),
    EndpointSlice(Arc<EndpointSlice>),
    ServiceEntry(Arc<ServiceEntry>),
    WorkloadEntry(Arc<WorkloadEntry>),
    PeerAuthentication(Arc<SecurityPolicy>),
    AuthorizationPolicy(Arc<SecurityPolicy>),
    Status(Arc<PodStatus>),
}

/// Something in the source that could not be used. What was good before is still served.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Problem {
    pub file: PathBuf,
    /// Counted from 1.
    pub line: Option<usize>,
    /// As far as it could be made out.
    pub object: Option<ObjectKey>,
    pub reason: String,
}

/// Which objects were added, changed or removed between two moments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    pub namespaces: Vec<Arc<str>>,
    pub nodes: Vec<Arc<str>>,
    pub pods: Vec<ObjectName>,
    pub service_accounts: Vec<ObjectName>,
    pub services: Vec<ObjectName>,
    pub endpoint_slices: Vec<ObjectName>,
    pub service_entries: Vec<ObjectName>,
    pub workload_entries: Vec<ObjectName>,
    pub peer_authentications: Vec<ObjectName>,
    pub authorization_policies: Vec<ObjectName>,
    pub statuses: Vec<Arc<str>>,
}

impl Objects {
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    pub fn namespace(&self, name: &str) -> Option<&Arc<Namespace>> {
        self.namespaces.get(name)
    }

    pub fn node(&self, name: &str) -> Option<&Arc<Node>> {
        self.nodes.get(name)
    }

    pub fn pod(&self, namespace: &str, name: &str) -> Option<&Arc<Pod>> {
        self.pods.get(&ObjectName::new(namespace, name))
    }

    pub fn service(&self, namespace: &str, name: &str) -> Option<&Arc<Service>> {
        self.services.get(&ObjectName::new(namespace, name))
    }

    /// The pods of one namespace, by name.
    pub fn pods_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<Pod>)> {
        in_namespace(&self.pods, namespace)
    }

    /// The services of one namespace, by name.
    pub fn services_in<'a>(&'a self, namespace: &'a str) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<Service>)> {
        in_namespace(&self.services, namespace)
    }

    /// The ServiceEntries of one namespace, by name.
    pub fn service_entries_in<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<ServiceEntry>)> {
        in_namespace(&self.service_entries, namespace)
    }

    /// The WorkloadEntries of one namespace, by name.
    pub fn workload_entries_in<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<WorkloadEntry>)> {
        in_namespace(&self.workload_entries, namespace)
    }

    /// The endpoint slices of one namespace, by name.
    pub fn endpoint_slices_in<'a>(
        &'a self,
        namespace: &'a str,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<EndpointSlice>)> {
        in_namespace(&self.endpoint_slices, namespace)
    }

    /// What the pod's node reports about its capture: the status file of the agent, which stands in place of the
    /// annotation `ambient.istio.io/redirection`, else the annotation itself. A status that speaks of another pod or
    /// of another node than the pod's counts for nothing.
    pub fn redirection(&self, pod: &Pod) -> Option<Redirection> {
        let meta = &pod.metadata;
        let reported = meta.uid.as_deref().and_then(|uid| self.statuses.get(uid)).filter(|status| {
            Some(status.pod.name.as_str()) == meta.name.as_deref()
                && status.pod.namespace == meta.namespace.as_deref().unwrap_or("default")
                && Some(status.node.as_str()) == pod.spec.as_ref().and_then(|s| s.node_name.as_deref())
        });
        if let Some(status) = reported {
            return Some(status.redirection);
        }
        match meta.annotations.as_ref()?.get(REDIRECTION)?.as_str() {
            "enabled" => Some(Redirection::Enabled),
            "pending" => Some(Redirection::Pending),
            _ => None,
        }
    }

    /// What differs from an older moment of the same source. Costs what changed, not what there is.
    pub fn changes_since(&self, older: &Objects) -> Changes {
        Changes {
            namespaces: changed(&older.namespaces, &self.namespaces),
            nodes: changed(&older.nodes, &self.nodes),
            pods: changed(&older.pods, &self.pods),
            service_accounts: changed(&older.service_accounts, &self.service_accounts),
            services: changed(&older.services, &self.services),
            endpoint_slices: changed(&older.endpoint_slices, &self.endpoint_slices),
            service_entries: changed(&older.service_entries, &self.service_entries),
            workload_entries: changed(&older.workload_entries, &self.workload_entries),
            peer_authentications: changed(&older.peer_authentications, &self.peer_authentications),
            authorization_policies: changed(&older.authorization_policies, &self.authorization_policies),
            statuses: changed(&older.statuses, &self.statuses),
        }
    }

    /// Takes an object in, unless the same is there; whether something is another now. Key and object must be of one
    /// kind.
    pub fn put(&mut self, key: ObjectKey, object: Object) -> bool {
        if self.get(&key).is_some_and(|held| held.same(&object)) {
            return false;
        }
        match (key, object) {
            (ObjectKey::Namespace(key), Object::Namespace(object)) => drop(self.namespaces.insert(key, object)),
            (ObjectKey::Node(key), Object::Node(object)) => drop(self.nodes.insert(key, object)),
            (ObjectKey::Pod(key), Object::Pod(object)) => drop(self.pods.insert(key, object)),
            (ObjectKey::ServiceAccount(key), Object::ServiceAccount(object)) => {
                drop(self.service_accounts.insert(key, object));
            }
            (ObjectKey::Service(key), Object::Service(object)) => drop(self.services.insert(key, object)),
            (ObjectKey::EndpointSlice(key), Object::EndpointSlice(object)) => {
                drop(self.endpoint_slices.insert(key, object));
            }
            (ObjectKey::ServiceEntry(key), Object::ServiceEntry(object)) => {
                drop(self.service_entries.insert(key, object));
            }
            (ObjectKey::WorkloadEntry(key), Object::WorkloadEntry(object)) => {
                drop(self.workload_entries.insert(key, object));
            }
            (ObjectKey::PeerAuthentication(key), Object::PeerAuthentication(object)) => {
                drop(self.peer_authentications.insert(key, object));
            }
            (ObjectKey::AuthorizationPolicy(key), Object::AuthorizationPolicy(object)) => {
                drop(self.authorization_policies.insert(key, object));
            }
            (ObjectKey::Status(key), Object::Status(object)) => drop(self.statuses.insert(key, object)),
            (key, object) => unreachable!("{key} made from the kind of {object:?}"),
        }
        true
    }

    pub fn get(&self, key: &ObjectKey) -> Option<Object> {
        match key {
            ObjectKey::Namespace(key) => self.namespaces.get(key).cloned().map(Object::Namespace),
            ObjectKey::Node(key) => self.nodes.get(key).cloned().map(Object::Node),
            ObjectKey::Pod(key) => self.pods.get(key).cloned().map(Object::Pod),
            ObjectKey::ServiceAccount(key) => self.service_accounts.get(key).cloned().map(Object::ServiceAccount),
            ObjectKey::Service(key) => self.services.get(key).cloned().map(Object::Service),
            ObjectKey::EndpointSlice(key) => self.endpoint_slices.get(key).cloned().map(Object::EndpointSlice),
            ObjectKey::ServiceEntry(key) => self.service_entries.get(key).cloned().map(Object::ServiceEntry),
            ObjectKey::WorkloadEntry(key) => self.workload_entries.get(key).cloned().map(Object::WorkloadEntry),
            ObjectKey::PeerAuthentication(key) => {
                self.peer_authentications.get(key).cloned().map(Object::PeerAuthentication)
            }
            ObjectKey::AuthorizationPolicy(key) => {
                self.authorization_policies.get(key).cloned().map(Object::AuthorizationPolicy)
            }
            ObjectKey::Status(key) => self.statuses.get(key).cloned().map(Object::Status),
        }
    }

    /// Takes an object out; whether it was there.
    pub fn remove(&mut self, key: &ObjectKey) -> bool {
        match key {
            ObjectKey::Namespace(key) => self.namespaces.remove(key).is_some(),
            ObjectKey::Node(key) => self.nodes.remove(key).is_some(),
            ObjectKey::Pod(key) => self.pods.remove(key).is_some(),
            ObjectKey::ServiceAccount(key) => self.service_accounts.remove(key).is_some(),
            ObjectKey::Service(key) => self.services.remove(key).is_some(),
            ObjectKey::EndpointSlice(key) => self.endpoint_slices.remove(key).is_some(),
            ObjectKey::ServiceEntry(key) => self.service_entries.remove(key).is_some(),
            ObjectKey::WorkloadEntry(key) => self.workload_entries.remove(key).is_some(),
            ObjectKey::PeerAuthentication(key) => self.peer_authentications.remove(key).is_some(),
            ObjectKey::AuthorizationPolicy(key) => self.authorization_policies.remove(key).is_some(),
            ObjectKey::Status(key) => self.statuses.remove(key).is_some(),
        }
    }
}

impl ObjectName {
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Debug for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::Pod(name) => write!(f, "Pod {name}"),
            Self::ServiceAccount(name) => write!(f, "ServiceAccount {name}"),
            Self::Service(name) => write!(f, "Service {name}"),
            Self::EndpointSlice(name) => write!(f, "EndpointSlice {name}"),
            Self::ServiceEntry(name) => write!(f, "ServiceEntry {name}"),
            Self::WorkloadEntry(name) => write!(f, "WorkloadEntry {name}"),
            Self::PeerAuthentication(name) => write!(f, "PeerAuthentication {name}"),
            Self::AuthorizationPolicy(name) => write!(f, "AuthorizationPolicy {name}"),
            Self::Status(uid) => write!(f, "status of pod {uid}"),
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        if let Some(object) = &self.object {
            write!(f, ": {object}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

impl Object {
    /// Whether both are the same object with the same content.
    pub fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Namespace(a), Self::Namespace(b)) => a == b,
            (Self::Node(a), Self::Node(b)) => a == b,
            (Self::Pod(a), Self::Pod(b)) => a == b,
            (Self::ServiceAccount(a), Self::ServiceAccount(b)) => a == b,
            (Self::Service(a), Self::Service(b)) => a == b,
            (Self::EndpointSlice(a), Self::EndpointSlice(b)) => a == b,
            (Self::ServiceEntry(a), Self::ServiceEntry(b)) => a == b,
            (Self::WorkloadEntry(a), Self::WorkloadEntry(b)) => a == b,
            (Self::PeerAuthentication(a), Self::PeerAuthentication(b)) => a == b,
            (Self::AuthorizationPolicy(a), Self::AuthorizationPolicy(b)) => a == b,
            (Self::Status(a), Self::Status(b)) => a == b,
            _ => false,
        }
    }

    pub fn policy(kind: SecurityKind, policy: SecurityPolicy) -> Self {
        match kind {
            SecurityKind::PeerAuthentication => Self::PeerAuthentication(Arc::new(policy)),
            SecurityKind::AuthorizationPolicy => Self::AuthorizationPolicy(Arc::new(policy)),
        }
    }

    /// Whether it only stands for a policy that cannot be read.
    pub fn is_stand_in(&self) -> bool {
        match self {
            Self::PeerAuthentication(policy) | Self::AuthorizationPolicy(policy) => policy.spec.is_err(),
            _ => false,
        }
    }
}

impl Changes {
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

fn in_namespace<'a, T>(
    map: &'a OrdMap<ObjectName, Arc<T>>,
    namespace: &'a str,
) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<T>)> {
    // The empty name sorts before every name of the namespace.
    map.range(ObjectName::new(namespace, "")..).take_while(move |(key, _)| *key.namespace == *namespace)
}

fn changed<K: Ord + Clone, T: PartialEq>(older: &OrdMap<K, Arc<T>>, newer: &OrdMap<K, Arc<T>>) -> Vec<K> {
    let key = |item| match item {
        DiffItem::Add(key, _) | DiffItem::Remove(key, _) => Clone::clone(key),
        DiffItem::Update { new: (key, _), .. } => Clone::clone(key),
    };
    older.diff(newer).map(key).collect()
}

pub(crate) const REDIRECTION: &str = "ambient.istio.io/redirection";

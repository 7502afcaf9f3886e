//! One state of the mesh, whole and immutable: what a connection sees does not change while it looks.
//!
//! Copies share what has not changed, so a snapshot costs the change, not the mesh.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use imbl::{HashMap, OrdMap};

use super::index::{By, ByAddress, ByKey};
use super::service::{Service, Visibility};
use super::workload::{Destination, GatewayAddress, NetworkAddress, TunnelProtocol, Workload};
use crate::policy::{Policy, PolicyIndex, PolicyScope, PolicySet};

/// A state of the mesh.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    workloads: ByKey<Workload>,
    /// In each network the best workload first; two can claim one address for a while.
    by_address: ByAddress<Workload>,
    /// Of the own node: by namespace, by name.
    local: HashMap<Arc<str>, HashMap<Box<str>, Local>>,
    services: ByKey<Service>,
    by_host: By<Arc<str>, Service>,
    by_vip: ByAddress<Service>,
    with_ranges: ByKey<Service>,
    /// By service, known or not: a workload may come before its service. In the order of their uids.
    members: OrdMap<Arc<str>, Arc<Vec<Arc<Workload>>>>,
    policies: PolicyIndex,
    /// Resources that could not be used and of which no earlier version is held, by name and by address.
    unusable: HashMap<Arc<str>, Arc<Unusable>>,
    unusable_at: HashMap<NetworkAddress, Vec<Arc<Unusable>>>,
    node: Arc<str>,
    cluster: Arc<str>,
}

/// A workload or service that the control plane has told us of and that we cannot use: nobody knows whether its traffic
/// must be protected, so none may pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unusable {
    /// Its uid, or `namespace/hostname`.
    pub name: Arc<str>,
    pub addresses: Vec<NetworkAddress>,
    pub reason: String,
}

/// A pod of this node.
#[derive(Debug, Clone)]
pub struct Local {
    pub workload: Arc<Workload>,
    /// What connections to it are judged by.
    pub policies: Arc<PolicySet>,
}

/// What a gateway's address leads to.
#[derive(Debug, Clone)]
pub enum Gateway {
    Service(Arc<Service>),
    Workload(Arc<Workload>),
}

impl Snapshot {
    pub(super) fn new(node: Arc<str>, cluster: Arc<str>) -> Self {
        Self { node, cluster, ..Self::default() }
    }

    pub fn workload(&self, uid: &str) -> Option<&Arc<Workload>> {
        self.workloads.get(uid)
    }

    /// The workload that has this address; never one on a host's network.
    pub fn workload_at(&self, address: &NetworkAddress) -> Option<&Arc<Workload>> {
        self.workloads_at(address).next()
    }

    /// All workloads that claim this address, the preferred one first.
    pub fn workloads_at(&self, address: &NetworkAddress) -> impl Iterator<Item = &Arc<Workload>> {
        self.by_address.get(address.address).iter().filter(|w| w.place.network == address.network)
    }

    /// All services with this virtual address, not in a range.
    fn services_exactly_at(&self, address: &NetworkAddress) -> impl Iterator<Item = &Arc<Service>> {
        self.by_vip.get(address.address).iter().filter(|s| s.vips.contains(address))
    }

    /// A pod of this node, known by all three names so that none can be taken for another.
    pub fn local(&self, namespace: &str, name: &str, service_account: &str) -> Option<&Local> {
        let local = self.local.get(namespace)?.get(name)?;
        (*local.workload.common.service_account == *service_account).then_some(local)
    }

    /// Its record alone.
    pub fn local_workload(&self, namespace: &str, name: &str, service_account: &str) -> Option<&Arc<Workload>> {
        self.local(namespace, name, service_account).map(|local| &local.workload)
    }

    pub fn service(&self, key: &str) -> Option<&Arc<Service>> {
        self.services.get(key)
    }

    /// The service with this virtual address, as a client of that namespace sees it: its own namespace's first, then
    /// the canonical one, then any; ranges only where neither a service nor a workload has the address, the narrowest
    /// first: whoever writes a range must not take what is others' pods'.
    pub fn service_at(&self, client_namespace: &str, address: &NetworkAddress) -> Option<&Arc<Service>> {
        let exact = prefer(self.services_exactly_at(address), client_namespace);
        if exact.is_some() || self.workload_at(address).is_some() || self.unusable_at(address).is_some() {
            return exact;
        }
        let length = |s: &Service| {
            let fits = s.cidr_vips.iter().filter(|c| c.network == address.network && c.cidr.contains(&address.address));
            fits.map(|c| c.cidr.prefix_len()).max()
        };
        let fitting = self.with_ranges.iter().filter(|s| visible(s, client_namespace));
        fitting
            .filter_map(|s| Some((*s.namespace == *client_namespace, length(s)?, s.canonical, s)))
            .max_by_key(|(own, length, canonical, _)| (*own, *length, *canonical))
            .map(|(.., s)| s)
    }

    /// All services with this virtual address, alone or in a range, whoever may see them.
    pub fn services_at(&self, address: &NetworkAddress) -> impl Iterator<Item = &Arc<Service>> {
        let in_range = |s: &&Arc<Service>| {
            s.cidr_vips.iter().any(|c| c.network == address.network && c.cidr.contains(&address.address))
        };
        self.services_exactly_at(address).chain(self.with_ranges.iter().filter(in_range))
    }

    /// The own node's name, and that of its cluster.
    pub fn node(&self) -> &str {
        &self.node
    }

    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// All that could not be used.
    pub fn unusable(&self) -> impl Iterator<Item = &Unusable> {
        self.unusable.values().map(|unusable| &**unusable)
    }

    /// What could not be used and claims this address.
    pub fn unusable_at(&self, address: &NetworkAddress) -> Option<&Unusable> {
        self.unusable_at.get(address)?.first().map(|u| &**u)
    }

    /// Whether any service has exactly this virtual address, whoever may see it.
    pub fn has_service_at(&self, address: &NetworkAddress) -> bool {
        self.services_exactly_at(address).next().is_some()
    }

    pub fn service_by_host(&self, client_namespace: &str, hostname: &str) -> Option<&Arc<Service>> {
        prefer(self.by_host.get(hostname).iter(), client_namespace)
    }

    /// All workloads that say they are endpoints of the service, in a fixed order.
    pub fn members(&self, service: &Service) -> &[Arc<Workload>] {
        self.members.get(&service.key).map_or(&[], |m| m.as_slice())
    }

    pub fn gateway(&self, address: &GatewayAddress) -> Option<Gateway> {
        match &address.destination {
            Destination::Hostname(name) => {
                let key = format!("{}/{}", name.namespace, name.hostname);
                let service = self.services.get(key.as_str()).cloned().map(Gateway::Service);
                service.or_else(|| {
                    let named = self.workloads.iter().find(|w| {
                        let hostname = &w.common.hostname;
                        !hostname.is_empty() && *hostname == name.hostname
                    });
                    named.cloned().map(Gateway::Workload)
                })
            }
            Destination::Address(address) => {
                let service = self.services_exactly_at(address).next().cloned().map(Gateway::Service);
                service.or_else(|| self.workload_at(address).cloned().map(Gateway::Workload))
            }
        }
    }

    pub fn workloads(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.workloads.iter()
    }

    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.iter()
    }

    pub fn policies(&self) -> &PolicyIndex {
        &self.policies
    }

    /// Endpoints that wait for a service of this key to be known.
    pub fn staged(&self) -> impl Iterator<Item = (&Arc<str>, &[Arc<Workload>])> {
        let staged = self.members.iter().filter(|(key, _)| !self.services.contains(key));
        staged.map(|(key, members)| (key, members.as_slice()))
    }

    pub fn local_workloads(&self) -> impl Iterator<Item = &Arc<Workload>> {
        self.local.values().flat_map(HashMap::values).map(|local| &local.workload)
    }

    /// Takes note of a resource that cannot be used. An earlier version that is held goes on.
    pub(super) fn insert_unusable(&mut self, unusable: Unusable) {
        self.forget_unusable(&unusable.name);
        let unusable = Arc::new(unusable);
        for address in &unusable.addresses {
            self.unusable_at.entry(address.clone()).or_default().push(unusable.clone());
        }
        self.unusable.insert(unusable.name.clone(), unusable);
    }

    pub(super) fn forget_unusable(&mut self, name: &str) -> bool {
        let Some(unusable) = self.unusable.remove(name) else { return false };
        for address in &unusable.addresses {
            forget(&mut self.unusable_at, address, |u| *u.name == *name);
        }
        true
    }

    pub(super) fn insert_workload(&mut self, workload: Arc<Workload>) {
        self.forget_unusable(&workload.uid);
        self.remove_workload(&workload.uid);
        if !workload.common.host_network {
            for ip in &workload.addresses {
                self.by_address.insert(*ip, workload.clone(), |w| std::cmp::Reverse(precedence(w)));
            }
        }
        for share in &*workload.services {
            let members = Arc::make_mut(self.members.entry(share.service.clone()).or_default());
            let at = members.partition_point(|w| w.uid < workload.uid);
            // There are as many lists as services, most of them short.
            members.reserve_exact(1 + members.len() / SPARE);
            members.insert(at, workload.clone());
        }
        if self.is_local(&workload) {
            let local = Local { workload: workload.clone(), policies: Arc::default() };
            self.local.entry(workload.common.namespace.clone()).or_default().insert(workload.name().into(), local);
        }
        self.workloads.insert(workload);
    }

    pub(super) fn is_local(&self, workload: &Workload) -> bool {
        let place = &workload.place;
        !self.node.is_empty() && place.node == self.node && place.cluster == self.cluster
    }

    pub(super) fn remove_workload(&mut self, uid: &str) -> Option<Arc<Workload>> {
        let workload = self.workloads.remove(uid)?;
        for ip in &workload.addresses {
            self.by_address.remove(*ip, uid);
        }
        for share in &*workload.services {
            let Some(members) = self.members.get_mut(&share.service) else { continue };
            let members = Arc::make_mut(members);
            members.retain(|w| *w.uid != *uid);
            if members.is_empty() {
                self.members.remove(&share.service);
            }
        }
        if let Some(pods) = self.local.get_mut(&workload.common.namespace)
            && pods.get(workload.name()).is_some_and(|local| *local.workload.uid == *uid)
        {
            pods.remove(workload.name());
            if pods.is_empty() {
                self.local.remove(&workload.common.namespace);
            }
        }
        Some(workload)
    }

    pub(super) fn insert_service(&mut self, service: Arc<Service>) {
        self.forget_unusable(&service.key);
        self.remove_service(&service.key);
        for vip in &service.vips {
            self.by_vip.insert(vip.address, service.clone(), |_| ());
        }
        if !service.cidr_vips.is_empty() {
            self.with_ranges.insert(service.clone());
        }
        self.by_host.insert(service.hostname.clone(), service.clone(), |_| ());
        self.services.insert(service);
    }

    pub(super) fn remove_service(&mut self, key: &str) -> Option<Arc<Service>> {
        let service = self.services.remove(key)?;
        for vip in &service.vips {
            self.by_vip.remove(vip.address, key);
        }
        self.with_ranges.remove(key);
        self.by_host.remove(&service.hostname, key);
        Some(service)
    }

    pub(super) fn policies_mut(&mut self) -> &mut PolicyIndex {
        &mut self.policies
    }

    /// Brings the policies of this node's pods up to date with what has changed.
    pub(super) fn prepare(&mut self, changed: &PolicyChanges) {
        let affected: Vec<Arc<Workload>> = self.local_workloads().filter(|w| changed.affect(w)).cloned().collect();
        // Most pods of a namespace name the same policies.
        let mut made: BTreeMap<(&str, &[Arc<str>]), Arc<PolicySet>> = BTreeMap::new();
        for workload in &affected {
            let (namespace, names) = (&*workload.common.namespace, &*workload.common.policies);
            let make = || Arc::new(self.policies.applying(namespace, names));
            let policies = made.entry((namespace, names)).or_insert_with(make).clone();
            if let Some(local) = self.local.get_mut(namespace).and_then(|pods| pods.get_mut(workload.name())) {
                local.policies = policies;
            }
        }
    }
}

/// Of an update: whose policies it may have changed.
#[derive(Debug, Default)]
pub(super) struct PolicyChanges {
    all: bool,
    /// All pods of these.
    namespaces: HashSet<Box<str>>,
    /// The pods that name these.
    names: HashSet<Arc<str>>,
    /// By uid.
    workloads: HashSet<Arc<str>>,
}

impl PolicyChanges {
    pub fn all(&mut self) {
        self.all = true;
    }

    pub fn policy(&mut self, policy: &Policy) {
        match policy.scope {
            PolicyScope::Global => self.all = true,
            PolicyScope::Namespace => {
                self.namespaces.insert(policy.namespace().into());
            }
            PolicyScope::WorkloadSelector => {}
        }
        self.names.insert(policy.key().clone());
    }

    pub fn workload(&mut self, workload: &Workload) {
        self.workloads.insert(workload.uid.clone());
    }

    pub fn is_empty(&self) -> bool {
        !self.all && self.names.is_empty() && self.workloads.is_empty()
    }

    fn affect(&self, workload: &Workload) -> bool {
        self.all
            || self.workloads.contains(&workload.uid)
            || self.namespaces.contains(&*workload.common.namespace)
            || workload.common.policies.iter().any(|name| self.names.contains(name))
    }
}

/// A Kubernetes pod with HBONE, then any pod, then HBONE, then the rest (xDS §4).
fn precedence(workload: &Workload) -> (bool, bool) {
    (workload.uid.contains("//Pod/"), workload.common.protocol == TunnelProtocol::Hbone)
}

fn visible(service: &Service, client_namespace: &str) -> bool {
    service.visibility == Visibility::Public || *service.namespace == *client_namespace
}

fn prefer<'a>(services: impl Iterator<Item = &'a Arc<Service>>, client_namespace: &str) -> Option<&'a Arc<Service>> {
    services
        .filter(|s| visible(s, client_namespace))
        .min_by_key(|s| (*s.namespace != *client_namespace, !s.canonical, s.key.clone()))
}

fn forget<K: Clone + Eq + std::hash::Hash, T: Clone>(map: &mut HashMap<K, Vec<T>>, key: &K, gone: impl Fn(&T) -> bool) {
    let Some(list) = map.get_mut(key) else { return };
    list.retain(|item| !gone(item));
    if list.is_empty() {
        map.remove(key);
    }
}

/// Of so many members' lists that grow, one has room for one more.
const SPARE: usize = 8;

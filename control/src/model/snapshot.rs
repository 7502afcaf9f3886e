//! What is served at one moment: encoded resources by name, and the ways to find them.
//!
//! Must never change once published: streams compare an older snapshot with a newer one, which share what is the same.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use imbl::ordmap::DiffItem;
use imbl::{OrdMap, OrdSet};
use ipnet::IpNet;
use prost::Message;
use ztunnel::manifests::ObjectKey;
use ztunnel::proto::{security, workload};

use super::policies::PolicyStatus;

/// The resources of one moment. Cloning costs nothing worth mentioning.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pub generation: u64,
    /// When it was handed to the streams.
    pub published: Option<Instant>,
    /// Workloads and services, by uid or `namespace/hostname`.
    addresses: OrdMap<Arc<str>, Arc<Resource>>,
    authorizations: OrdMap<Arc<str>, Arc<Resource>>,
    /// Names of workloads and services, by `network/ip`.
    pub(super) by_alias: OrdMap<Arc<str>, OrdSet<Arc<str>>>,
    /// Uids of the workloads behind a service, by `namespace/hostname`.
    pub(super) endpoints: OrdMap<Arc<str>, OrdSet<Arc<str>>>,
    /// Uids of the workloads on a node.
    pub(super) by_node: OrdMap<Arc<str>, OrdSet<Arc<str>>>,
    /// Services that have whole ranges of addresses, by name.
    pub(super) ranged: OrdMap<Arc<str>, Arc<Resource>>,
    /// What in otherwise good objects cannot be served.
    pub problems: OrdMap<ObjectKey, Arc<str>>,
    /// What became of each policy.
    pub policies: OrdMap<ObjectKey, Arc<PolicyStatus>>,
}

/// One resource, encoded once for all streams.
#[derive(Debug, Clone)]
pub struct Resource {
    pub name: Arc<str>,
    pub kind: Kind,
    /// Hash of the content: the same on every replica and after a restart.
    pub version: u64,
    /// The encoded `Workload`, `Service` or `Authorization`.
    pub body: Box<[u8]>,
    /// In its place for peers that do not know what is special in it: harmless, and of the same name.
    pub plain: Option<Plain>,
    /// `network/ip` of each address that it can be found by, `network/ip/length` of each range.
    pub aliases: Box<[Arc<str>]>,
    /// Network and range of each range of addresses.
    pub ranges: Box<[(Arc<str>, IpNet)]>,
    /// The services that a workload is behind.
    pub services: Box<[Arc<str>]>,
    /// The node that a workload is on.
    pub node: Option<Arc<str>>,
    /// A policy that applies only to the workloads that name it.
    pub is_selective: bool,
}

/// What not every proxy knows, and what those get that do not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plain {
    pub unless: Feature,
    pub body: Box<[u8]>,
}

/// Of a proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Feature {
    /// Policies that are evaluated and not enforced. Who does not know the field enforces them.
    DryRun,
    /// Policies with action AUDIT, which is ours alone.
    Audit,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Workload,
    Service,
    Authorization,
}

/// Which resources a stream asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Set {
    /// Workloads and services, as `istio.workload.Address`.
    Addresses,
    /// Workloads alone, as `istio.workload.Workload`.
    Workloads,
    Authorizations,
}

/// The network and the address of a name `network/ip`.
fn address_of(name: &str) -> Option<(&str, IpAddr)> {
    let (network, ip) = name.rsplit_once('/')?;
    Some((network, ip.parse().ok()?))
}

/// What a name stands for.
#[derive(Debug, Default)]
pub struct Resolved {
    pub resources: Vec<Arc<Resource>>,
    /// One of them is just what was asked for, not a range around it.
    pub is_exact: bool,
    /// The services among them: all their workloads belong to the answer.
    pub services: Vec<Arc<str>>,
}

/// One difference between two snapshots.
#[derive(Debug)]
pub enum Change<'a> {
    Put { old: Option<&'a Arc<Resource>>, new: &'a Arc<Resource> },
    Gone(&'a Arc<Resource>),
}

impl Change<'_> {
    /// A policy that applied to whoever it is for without being named, and now must be named.
    pub fn is_narrowing(&self) -> bool {
        matches!(self, Self::Put { old: Some(old), new } if new.is_selective && !old.is_selective)
    }
}

impl Snapshot {
    pub fn get(&self, set: Set, name: &str) -> Option<&Arc<Resource>> {
        self.map(set).get(name).filter(|r| set.has(r))
    }

    pub fn all(&self, set: Set) -> impl Iterator<Item = &Arc<Resource>> {
        self.map(set).values().filter(move |r| set.has(r))
    }

    /// Finds what a name stands for: a resource's own name first, then a workload's address, then a service's. Services
    /// with ranges around the address come along, which does not make it exact.
    pub fn resolve(&self, set: Set, name: &str) -> Resolved {
        let mut resolved = Resolved::default();
        if let Some(resource) = self.get(set, name) {
            resolved.resources.push(resource.clone());
            resolved.is_exact = true;
        } else if set != Set::Authorizations {
            let found = self.by_alias.get(name).into_iter().flatten().filter_map(|name| self.get(set, name));
            let (workloads, services): (Vec<_>, Vec<_>) = found.cloned().partition(|r| r.kind == Kind::Workload);
            resolved.resources = if workloads.is_empty() { services } else { workloads };
            resolved.is_exact = !resolved.resources.is_empty();
            // Ranges count where nobody has the address itself (mesh::Snapshot::service_at).
            if let Some((network, ip)) = address_of(name).filter(|_| !resolved.is_exact) {
                let in_range = self.ranged.values().filter(|r| set.has(r) && r.ranges_have(network, ip));
                resolved.resources.extend(in_range.cloned());
            }
        }
        let services = resolved.resources.iter().filter(|r| r.kind == Kind::Service);
        resolved.services = services.map(|r| r.name.clone()).collect();
        resolved
    }

    /// The workloads behind a service.
    pub fn endpoints<'a>(&'a self, service: &str) -> impl Iterator<Item = &'a Arc<Resource>> {
        self.endpoints.get(service).into_iter().flatten().filter_map(|uid| self.addresses.get(uid))
    }

    /// The workloads on a node.
    pub fn on_node<'a>(&'a self, node: &str) -> impl Iterator<Item = &'a Arc<Resource>> {
        self.by_node.get(node).into_iter().flatten().filter_map(|uid| self.addresses.get(uid))
    }

    /// What differs from an older snapshot. Costs what changed, not what there is.
    pub fn changes_since<'a>(&'a self, older: &'a Snapshot, set: Set) -> impl Iterator<Item = Change<'a>> {
        older.map(set).diff(self.map(set)).filter_map(move |item| match item {
            DiffItem::Add(_, new) => set.has(new).then_some(Change::Put { old: None, new }),
            DiffItem::Update { old: (_, old), new: (_, new) } => {
                set.has(new).then_some(Change::Put { old: Some(old), new })
            }
            DiffItem::Remove(_, old) => set.has(old).then_some(Change::Gone(old)),
        })
    }

    /// How many workloads, services and authorizations there are.
    pub fn counts(&self) -> [(&'static str, usize); 3] {
        let workloads = self.all(Set::Workloads).count();
        [
            ("workload", workloads),
            ("service", self.addresses.len() - workloads),
            ("authorization", self.authorizations.len()),
        ]
    }

    /// Puts a policy in; whether that changed anything.
    pub(super) fn put_authorization(&mut self, resource: Resource) -> bool {
        if self.authorizations.get(&resource.name).is_some_and(|held| **held == resource) {
            return false;
        }
        self.authorizations.insert(resource.name.clone(), Arc::new(resource));
        true
    }

    /// Takes a policy out; whether it was there.
    pub(super) fn remove_authorization(&mut self, name: &str) -> bool {
        self.authorizations.remove(name).is_some()
    }

    /// Puts a workload or service in; whether that changed anything.
    pub(super) fn put(&mut self, resource: Resource) -> bool {
        if self.addresses.get(&resource.name).is_some_and(|held| **held == resource) {
            return false;
        }
        self.remove(&resource.name);
        let resource = Arc::new(resource);
        let name = &resource.name;
        index(&mut self.by_alias, &resource.aliases, name);
        index(&mut self.endpoints, &resource.services, name);
        index(&mut self.by_node, resource.node.as_slice(), name);
        if !resource.ranges.is_empty() {
            self.ranged.insert(name.clone(), resource.clone());
        }
        self.addresses.insert(name.clone(), resource);
        true
    }

    /// Takes a workload or service out; whether it was there.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let Some(resource) = self.addresses.remove(name) else { return false };
        unindex(&mut self.by_alias, &resource.aliases, name);
        unindex(&mut self.endpoints, &resource.services, name);
        unindex(&mut self.by_node, resource.node.as_slice(), name);
        self.ranged.remove(name);
        true
    }

    fn map(&self, set: Set) -> &OrdMap<Arc<str>, Arc<Resource>> {
        match set {
            Set::Addresses | Set::Workloads => &self.addresses,
            Set::Authorizations => &self.authorizations,
        }
    }
}

impl Set {
    pub const ALL: [Self; 3] = [Self::Addresses, Self::Workloads, Self::Authorizations];

    pub fn type_url(self) -> &'static str {
        match self {
            Self::Addresses => "type.googleapis.com/istio.workload.Address",
            Self::Workloads => "type.googleapis.com/istio.workload.Workload",
            Self::Authorizations => "type.googleapis.com/istio.security.Authorization",
        }
    }

    pub fn from_type_url(url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|set| set.type_url() == url)
    }

    fn has(self, resource: &Resource) -> bool {
        match self {
            Self::Addresses | Self::Authorizations => true,
            Self::Workloads => resource.kind == Kind::Workload,
        }
    }
}

impl Resource {
    pub fn workload(value: &workload::Workload) -> Self {
        let host_network = value.network_mode == workload::NetworkMode::HostNetwork as i32;
        // Several workloads share a host's address: found by it, each would be the wrong one.
        let addresses = value.addresses.iter().filter(|_| !host_network);
        Self {
            aliases: addresses.filter_map(|a| alias(&value.network, a)).collect(),
            services: value.services.keys().map(|key| key.as_str().into()).collect(),
            node: Some(value.node.as_str()).filter(|n| !n.is_empty()).map(Into::into),
            ..Self::encode(value.uid.as_str().into(), Kind::Workload, value)
        }
    }

    pub fn service(value: &workload::Service) -> Self {
        let name = format!("{}/{}", value.namespace, value.hostname);
        let range = |a: &workload::NetworkAddress| {
            let net = IpNet::new(ip(&a.address)?, a.length?.try_into().ok()?).ok()?;
            Some((Arc::<str>::from(a.network.as_str()), net))
        };
        let alias = |a: &workload::NetworkAddress| match range(a) {
            Some((network, net)) => Some(format!("{network}/{net}").into()),
            None => alias(&a.network, &a.address),
        };
        Self {
            aliases: value.addresses.iter().filter_map(alias).collect(),
            ranges: value.addresses.iter().filter_map(range).collect(),
            ..Self::encode(name.into(), Kind::Service, value)
        }
    }

    /// `namespace/name`. What not every proxy knows is, for those, a DENY without rules: it matches nothing.
    pub fn authorization(value: &security::Authorization) -> Self {
        let unless = match (value.action(), value.dry_run) {
            (security::Action::Audit, _) => Some(Feature::Audit),
            (security::Action::Allow | security::Action::Deny, true) => Some(Feature::DryRun),
            (security::Action::Allow | security::Action::Deny, false) => None,
        };
        let plain = unless.map(|unless| {
            let nothing = security::Authorization {
                action: security::Action::Deny.into(),
                rules: Vec::new(),
                dry_run: false,
                ..value.clone()
            };
            Plain { unless, body: nothing.encode_to_vec().into() }
        });
        let name = format!("{}/{}", value.namespace, value.name);
        let is_selective = value.scope() == security::Scope::WorkloadSelector;
        Self { plain, is_selective, ..Self::encode(name.into(), Kind::Authorization, value) }
    }

    /// The resource as the wire wants it in a set. `aliases`: whether to tell under which further names it is found.
    /// `knows`: what the proxy knows.
    pub fn to_wire(
        &self,
        set: Set,
        aliases: bool,
        knows: impl Fn(Feature) -> bool,
    ) -> ztunnel::proto::discovery::Resource {
        let plain = self.plain.as_ref().filter(|plain| !knows(plain.unless));
        let value = match set {
            Set::Workloads | Set::Authorizations => plain.map_or(&self.body, |p| &p.body).to_vec(),
            // `Address` holds a workload as field 1, a service as field 2.
            Set::Addresses => {
                let mut value = Vec::with_capacity(self.body.len() + 6);
                value.push(if self.kind == Kind::Service { 0x12 } else { 0x0a });
                prost::encoding::encode_varint(self.body.len() as u64, &mut value);
                value.extend_from_slice(&self.body);
                value
            }
        };
        ztunnel::proto::discovery::Resource {
            version: self.version_text(),
            resource: Some(prost_types::Any { type_url: set.type_url().to_owned(), value }),
            name: self.name.to_string(),
            aliases: if aliases { self.aliases.iter().map(ToString::to_string).collect() } else { Vec::new() },
            ttl: None,
        }
    }

    /// Whether a name is `network/ip` with an address in one of its ranges.
    pub fn has_in_range(&self, name: &str) -> bool {
        !self.ranges.is_empty() && address_of(name).is_some_and(|(network, ip)| self.ranges_have(network, ip))
    }

    fn ranges_have(&self, network: &str, ip: IpAddr) -> bool {
        self.ranges.iter().any(|(of, range)| **of == *network && range.contains(&ip))
    }

    pub fn version_text(&self) -> String {
        format!("{:016x}", self.version)
    }

    /// Roughly its length on the wire.
    pub fn wire_len(&self) -> usize {
        self.body.len() + self.name.len() + self.aliases.iter().map(|a| a.len() + 4).sum::<usize>() + 96
    }

    /// The decoded workload or service, for people.
    pub fn decode(&self) -> Option<Decoded> {
        match self.kind {
            Kind::Workload => workload::Workload::decode(&*self.body).ok().map(|m| Decoded::Workload(Box::new(m))),
            Kind::Service => workload::Service::decode(&*self.body).ok().map(|m| Decoded::Service(Box::new(m))),
            Kind::Authorization => {
                security::Authorization::decode(&*self.body).ok().map(|m| Decoded::Authorization(Box::new(m)))
            }
        }
    }

    fn encode(name: Arc<str>, kind: Kind, message: &impl Message) -> Self {
        let body = message.encode_to_vec().into_boxed_slice();
        let version = content_hash(&body);
        Self {
            name,
            kind,
            version,
            body,
            plain: None,
            aliases: Box::default(),
            ranges: Box::default(),
            services: Box::default(),
            node: None,
            is_selective: false,
        }
    }
}

/// A resource that was decoded again.
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded {
    Workload(Box<workload::Workload>),
    Service(Box<workload::Service>),
    Authorization(Box<security::Authorization>),
}

impl PartialEq for Resource {
    /// All else follows from the content.
    fn eq(&self, other: &Self) -> bool {
        self.version == other.version && self.name == other.name && self.body == other.body
    }
}

/// `network/ip`.
fn alias(network: &str, address: &[u8]) -> Option<Arc<str>> {
    Some(format!("{network}/{}", ip(address)?).into())
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => Some(<[u8; 4]>::try_from(bytes).ok()?.into()),
        16 => Some(<[u8; 16]>::try_from(bytes).ok()?.into()),
        _ => None,
    }
}

/// Never 0, which stands for no version.
pub(super) fn content_hash(body: &[u8]) -> u64 {
    let digest = aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, body);
    let mut first = [0; 8];
    first.copy_from_slice(&digest.as_ref()[..8]);
    u64::from_be_bytes(first).max(1)
}

fn index(map: &mut OrdMap<Arc<str>, OrdSet<Arc<str>>>, keys: &[Arc<str>], name: &Arc<str>) {
    for key in keys {
        map.entry(key.clone()).or_default().insert(name.clone());
    }
}

fn unindex(map: &mut OrdMap<Arc<str>, OrdSet<Arc<str>>>, keys: &[Arc<str>], name: &str) {
    for key in keys {
        if let Some(names) = map.get_mut(key) {
            names.remove(name);
            if names.is_empty() {
                map.remove(key);
            }
        }
    }
}

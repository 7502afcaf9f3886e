//! What the stream holds, and how a response changes it and the model.
//!
//! Must never drop a good resource because another one in the same response is bad.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use prost::Message;

use super::demand::{Demand, Key};
use super::messages::goes_on;
use super::subscriptions::Subscriptions;
use super::version::Version;
use crate::mesh::{Mesh, NetworkAddress, Snapshot, Unusable, Update, convert_service, convert_workload};
use crate::policy::{self, Policy, PolicyAction, stand_in, stand_in_named};
use crate::proto::discovery::{DeltaDiscoveryResponse, Resource};
use crate::proto::workload;

pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// Names and versions of what was taken, by type.
#[derive(Debug, Default)]
pub struct Held {
    addresses: HashMap<Arc<str>, Version>,
    authorizations: HashMap<Arc<str>, Version>,
    /// Held from an earlier stream, and not mentioned yet by this one, which was not told that we hold it.
    stale: HashSet<(Kind, Arc<str>)>,
    /// When the present stream last mentioned something that was stale.
    confirmed: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Address,
    Authorization,
}

/// What became of a response.
#[derive(Debug, Default)]
pub struct Applied {
    /// Name and reason of each resource that could not be taken.
    pub refused: Vec<(String, String)>,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::Address, Self::Authorization];

    pub fn of(type_url: &str) -> Option<Self> {
        match type_url {
            ADDRESS => Some(Self::Address),
            AUTHORIZATION => Some(Self::Authorization),
            _ => None,
        }
    }

    pub fn url(self) -> &'static str {
        match self {
            Self::Address => ADDRESS,
            Self::Authorization => AUTHORIZATION,
        }
    }
}

impl Held {
    fn of(&mut self, kind: Kind) -> &mut HashMap<Arc<str>, Version> {
        match kind {
            Kind::Address => &mut self.addresses,
            Kind::Authorization => &mut self.authorizations,
        }
    }

    /// What to tell a new stream that we hold: as much as goes into `limit` bytes, for the server may refuse larger
    /// messages. The rest is sent again, and what of it is not mentioned is stale.
    pub fn versions(&mut self, kind: Kind, limit: usize) -> HashMap<String, String> {
        // What was stale for the last stream is compared by the server again if it is told now.
        self.stale.retain(|(of, _)| *of != kind);
        let mut told = HashMap::new();
        let mut rest = Vec::new();
        let mut size = 0;
        for (name, version) in self.of(kind).iter() {
            let version = version.to_string();
            size += name.len() + version.len() + MAP_OVERHEAD;
            if size <= limit {
                told.insert(name.to_string(), version);
            } else {
                rest.push((kind, name.clone()));
            }
        }
        self.stale.extend(rest);
        self.confirmed = None;
        told
    }

    /// Applies responses as one change; what became of each.
    pub fn apply(
        &mut self,
        responses: &[(Kind, &DeltaDiscoveryResponse)],
        mesh: &Mesh,
        mut subscriptions: Option<&mut Subscriptions>,
    ) -> Vec<Applied> {
        // The first whole answer on policies, even an empty one, says that these are all.
        let is_of_policies = responses.iter().any(|(kind, r)| *kind == Kind::Authorization && !goes_on(r));
        let completes = is_of_policies && !mesh.load().policies().is_complete();
        let is_empty = |r: &DeltaDiscoveryResponse| r.resources.is_empty() && r.removed_resources.is_empty();
        if responses.iter().all(|(_, response)| is_empty(response)) && !completes {
            return responses.iter().map(|_| Applied::default()).collect();
        }
        mesh.update(|update| {
            let mut each = |(kind, response): &(Kind, &DeltaDiscoveryResponse)| {
                self.apply_one(*kind, response, update, subscriptions.as_deref_mut())
            };
            let applied = responses.iter().map(&mut each).collect();
            if completes {
                update.policies_complete();
            }
            applied
        })
    }

    fn apply_one(
        &mut self,
        kind: Kind,
        response: &DeltaDiscoveryResponse,
        update: &mut Update<'_>,
        mut subscriptions: Option<&mut Subscriptions>,
    ) -> Applied {
        let mut applied = Applied::default();
        for resource in &response.resources {
            match take(kind, resource, update) {
                Ok(name) => {
                    self.mentioned(kind, &name);
                    if let Some(subscriptions) = &mut subscriptions {
                        subscriptions.received(&name);
                    }
                    self.of(kind).insert(name, Version::from(&*resource.version));
                }
                Err(reason) => {
                    let name: Arc<str> = resource.name.as_str().into();
                    self.mentioned(kind, &name);
                    // With a version that no server has: the next stream sends the resource again, or says that it
                    // is gone.
                    self.of(kind).insert(name.clone(), Version::from(""));
                    if kind == Kind::Address {
                        update.unusable(unusable(resource, name, &reason));
                    }
                    applied.refused.push((resource.name.clone(), reason));
                }
            }
        }
        for name in &response.removed_resources {
            let name: Arc<str> = name.as_str().into();
            self.mentioned(kind, &name);
            self.of(kind).remove(&name);
            remove(kind, &name, update);
        }
        applied
    }

    /// Whether a response says that all addresses are gone, of which there are several: a server can be led to say so
    /// although nothing was deleted.
    pub fn says_all_is_gone(&self, response: &DeltaDiscoveryResponse) -> bool {
        let removed: HashSet<&str> = response.removed_resources.iter().map(String::as_str).collect();
        self.addresses.len() > 1
            && response.resources.is_empty()
            && self.addresses.keys().all(|name| removed.contains(&**name))
    }

    /// When something is held that the present stream has not mentioned: since when nothing more of it was.
    pub fn stale_since(&self, stream_start: Instant) -> Option<Instant> {
        (!self.stale.is_empty()).then(|| self.confirmed.unwrap_or(stream_start))
    }

    /// Removes what the present stream has not mentioned.
    pub fn purge(&mut self, mesh: &Mesh) -> usize {
        let stale = std::mem::take(&mut self.stale);
        let count = stale.len();
        mesh.update(|update| {
            for (kind, name) in stale {
                self.of(kind).remove(&name);
                remove(kind, &name, update);
            }
        });
        count
    }

    /// On demand: drops addresses that none of `used` needs, and tells their names.
    pub fn drop_unused(&mut self, used: &[Key], mesh: &Mesh) -> Vec<Arc<str>> {
        let needed = needed(used, &mesh.load());
        let unused: Vec<Arc<str>> = self.addresses.keys().filter(|name| !needed.contains(*name)).cloned().collect();
        if !unused.is_empty() {
            mesh.update(|update| {
                for name in &unused {
                    self.addresses.remove(name);
                    update.remove_address(name);
                }
            });
        }
        unused
    }

    fn mentioned(&mut self, kind: Kind, name: &Arc<str>) {
        if !self.stale.is_empty() && self.stale.remove(&(kind, name.clone())) {
            self.confirmed = Some(Instant::now());
        }
    }
}

/// The names of all resources that the keys stand for: services with their endpoints, workloads, and the own node's.
fn needed(used: &[Key], mesh: &Snapshot) -> HashSet<Arc<str>> {
    let mut needed: HashSet<Arc<str>> = mesh.local_workloads().map(|w| w.uid.clone()).collect();
    for key in used {
        let services: Vec<_> = match key {
            Key::Address(at) => mesh.services_at(at).collect(),
            Key::Name(name) => mesh.service(name).into_iter().collect(),
        };
        for service in services {
            needed.insert(service.key.clone());
            needed.extend(mesh.members(service).iter().map(|w| w.uid.clone()));
        }
        match key {
            Key::Address(at) => needed.extend(mesh.workloads_at(at).map(|w| w.uid.clone())),
            Key::Name(name) => {
                needed.insert(name.clone());
            }
        }
    }
    needed
}

/// Takes a resource into the model; its name.
fn take(kind: Kind, resource: &Resource, update: &mut Update<'_>) -> Result<Arc<str>, String> {
    match kind {
        Kind::Address => take_address(resource, update),
        Kind::Authorization => take_policy(resource, update),
    }
}

fn take_address(resource: &Resource, update: &mut Update<'_>) -> Result<Arc<str>, String> {
    let bytes = content(Kind::Address, resource)?;
    let address = workload::Address::decode(bytes).map_err(|e| e.to_string())?;
    match address.r#type {
        Some(workload::address::Type::Workload(wire)) => {
            let workload = convert_workload(&wire, update.strings()).map_err(|e| e.to_string())?;
            same_name(resource, &workload.uid)?;
            let name = workload.uid.clone();
            update.workload(workload);
            Ok(name)
        }
        Some(workload::address::Type::Service(wire)) => {
            let service = convert_service(&wire, update.strings()).map_err(|e| e.to_string())?;
            same_name(resource, &service.key)?;
            let name = service.key.clone();
            update.service(service);
            Ok(name)
        }
        None => Err("it is neither a workload nor a service".into()),
    }
}

fn content(kind: Kind, resource: &Resource) -> Result<&[u8], String> {
    let any = resource.resource.as_ref().ok_or("it has no content")?;
    if any.type_url != kind.url() {
        return Err(format!("its type is {:?}", any.type_url));
    }
    Ok(&any.value)
}

fn same_name(resource: &Resource, name: &str) -> Result<(), String> {
    match *resource.name == *name {
        true => Ok(()),
        false => Err(format!("its content is of {name:?}")),
    }
}

/// A policy that cannot be used must not be missing: one of a namespace or of the mesh is named by no workload, so nobody
/// would notice. An earlier version that is held goes on; else something stands in and denies.
fn take_policy(resource: &Resource, update: &mut Update<'_>) -> Result<Arc<str>, String> {
    let (policy, error) = match read_policy(resource) {
        Ok(policy) => (policy, None),
        Err((policy, error)) => (policy, Some(error)),
    };
    let name = policy.key().clone();
    let is_held = update.snapshot().policies().get(&name).is_some();
    if (error.is_none() || !is_held) && update.policy(policy) {
        warn_of(&name, update.snapshot());
    }
    match error {
        None => Ok(name),
        Some(error) => Err(error),
    }
}

/// The policy, or what stands in for it and why.
fn read_policy(resource: &Resource) -> Result<Policy, (Policy, String)> {
    let unreadable = |error: String| (stand_in_named(&resource.name, &error), error);
    let bytes = content(Kind::Authorization, resource).map_err(unreadable)?;
    let decoded = policy::decode(bytes).map_err(|e| unreadable(e.to_string()))?;
    let message = &decoded.message;
    same_name(resource, &format!("{}/{}", message.namespace, message.name)).map_err(unreadable)?;
    policy::convert(&decoded).map_err(|e| (stand_in(message, &e.to_string()), e.to_string()))
}

/// Tells the operator of a new policy that does not do what it seems to.
fn warn_of(name: &str, mesh: &Snapshot) {
    let Some(policy) = mesh.policies().get(name) else { return };
    if let PolicyAction::NotUnderstood(reason) = &policy.action {
        tracing::warn!(policy = name, %reason, "a policy cannot be understood: it denies all that it applies to");
    }
    if policy.action == PolicyAction::Deny
        && let Some(rule) = policy.inert_rules().next()
    {
        tracing::warn!(
            policy = name,
            rule,
            "a DENY rule can match nothing: one of its clauses has only empty matches, as where conditions of L7 were left \
             out"
        );
    }
}

/// What is known of an address resource that cannot be used: as much of its addresses as can be read.
fn unusable(resource: &Resource, name: Arc<str>, reason: &str) -> Unusable {
    let decoded = resource.resource.as_ref().and_then(|any| workload::Address::decode(&*any.value).ok());
    let pairs: Vec<(&str, &[u8])> = match decoded.as_ref().and_then(|a| a.r#type.as_ref()) {
        Some(workload::address::Type::Workload(wire)) => {
            wire.addresses.iter().map(|bytes| (wire.network.as_str(), &**bytes)).collect()
        }
        Some(workload::address::Type::Service(wire)) => {
            wire.addresses.iter().map(|a| (a.network.as_str(), &*a.address)).collect()
        }
        None => Vec::new(),
    };
    let address = |(network, bytes): (&str, &[u8])| {
        let address: IpAddr = match bytes.len() {
            4 => <[u8; 4]>::try_from(bytes).ok()?.into(),
            _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical(),
        };
        Some(NetworkAddress { network: network.into(), address })
    };
    Unusable { name, addresses: pairs.into_iter().filter_map(address).collect(), reason: reason.to_owned() }
}

fn remove(kind: Kind, name: &str, update: &mut Update<'_>) {
    match kind {
        Kind::Address => update.remove_address(name),
        Kind::Authorization => update.remove_policy(name),
    };
}

/// Answers the questions of connections that a response on addresses has settled.
pub fn settle(response: &DeltaDiscoveryResponse, applied: &Applied, mesh: &Mesh, demand: &Demand) {
    let refused: HashMap<&str, &str> =
        applied.refused.iter().map(|(n, reason)| (n.as_str(), reason.as_str())).collect();
    let resources = response.resources.iter().flat_map(|resource| {
        let reason = refused.get(resource.name.as_str()).copied();
        let aliases = resource.aliases.iter().map(String::as_str);
        aliases.chain([resource.name.as_str()]).map(move |name| (name, reason))
    });
    let removed = response.removed_resources.iter().map(|name| (name.as_str(), None));
    demand.applied(&mesh.load(), resources.chain(removed));
}

/// Bytes of protobuf around a name and a version.
const MAP_OVERHEAD: usize = 12;

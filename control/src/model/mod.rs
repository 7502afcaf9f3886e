//! From Kubernetes objects to what proxies are told, kept up to date by working out again only what a change touches.
//!
//! Must never serve a half-applied change: a snapshot is published when all that belongs to a change is in it.

mod entry;
mod hosts;
mod links;
mod pod;
mod policies;
mod service;
mod slice;
mod snapshot;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use ztunnel::identity::TrustDomain;
use ztunnel::manifests::{ObjectKey, ObjectName, Objects};

pub use pod::{is_terminal, service_account};
pub use policies::{PolicyStatus, is_enrolled};
pub use snapshot::{Change, Decoded, Feature, Kind, Resolved, Resource, Set, Snapshot};

use crate::policy::MeshNames;
use hosts::Hosts;
use links::{Links, Step, Touched};
use policies::Policies;

/// What the model must know beside the objects.
#[derive(Debug, Clone)]
pub struct ModelSettings {
    pub cluster_id: String,
    /// DNS suffix of the cluster's services.
    pub cluster_domain: String,
    pub trust_domain: TrustDomain,
    /// The namespace whose label `topology.istio.io/network` names the cluster's network.
    pub system_namespace: String,
    /// The namespace whose policies are for the whole mesh.
    pub root_namespace: String,
}

/// The model. One task owns it and publishes its snapshots.
#[derive(Debug)]
pub struct Model {
    settings: ModelSettings,
    objects: Arc<Objects>,
    network: Arc<str>,
    snapshot: Snapshot,
    links: Links,
    hosts: Hosts,
    policies: Policies,
    /// Names of the resources that a slice gave.
    by_slice: HashMap<ObjectName, BTreeSet<Arc<str>>>,
    /// The same of a ServiceEntry.
    by_entry: HashMap<ObjectName, BTreeSet<Arc<str>>>,
}

/// What is at hand when a resource is worked out.
struct Context<'a> {
    settings: &'a ModelSettings,
    objects: &'a Objects,
    network: &'a str,
    links: &'a Links,
    hosts: &'a Hosts,
    policies: &'a Policies,
}

/// What in one object cannot be served, in words.
type Problems = Vec<String>;

impl Model {
    pub fn new(settings: ModelSettings) -> Self {
        let mesh = MeshNames {
            root_namespace: settings.root_namespace.clone(),
            trust_domain: settings.trust_domain.to_string(),
        };
        Self {
            policies: Policies::new(mesh),
            settings,
            objects: Arc::default(),
            network: "".into(),
            snapshot: Snapshot::default(),
            links: Links::default(),
            hosts: Hosts::default(),
            by_slice: HashMap::new(),
            by_entry: HashMap::new(),
        }
    }

    /// Takes in the objects of a later moment; the new snapshot if anything that is served is another now.
    pub fn update(&mut self, objects: Arc<Objects>) -> Option<Snapshot> {
        let changes = objects.changes_since(&self.objects);
        let older = std::mem::replace(&mut self.objects, objects);
        let newer = self.objects.clone();
        let step = Step { changes: &changes, older: &older, newer: &newer };
        self.links.follow(&step);
        let elsewhere = self.hosts.follow(&step);
        let network = self.cluster_network();
        let mut touched = if network != self.network {
            tracing::info!(network = &*network, "the cluster's network has another name: everything is sent again");
            self.network = network;
            Touched::everything(&older, &newer)
        } else {
            self.links.touched(&step, &self.hosts, &self.settings)
        };
        touched.service_entries.extend(elsewhere);
        let mut changed = self.work_out_policies(&step, &mut touched);
        changed |= self.work_out_services(touched.services, touched.service_entries);
        for name in touched.pods {
            changed |= self.work_out_pod(&name);
        }
        for name in touched.slices {
            changed |= self.work_out_slice(&name);
        }
        for name in touched.workload_entries {
            changed |= self.work_out_workload_entry(&name);
        }
        if !changed {
            return None;
        }
        self.snapshot.generation += 1;
        Some(self.snapshot.clone())
    }

    /// The snapshot as it is.
    pub fn snapshot(&self) -> Snapshot {
        self.snapshot.clone()
    }

    fn cluster_network(&self) -> Arc<str> {
        let namespace = self.objects.namespace(&self.settings.system_namespace);
        let label = namespace.and_then(|n| n.metadata.labels.as_ref()?.get("topology.istio.io/network"));
        label.map_or("", String::as_str).into()
    }

    /// Policies first: the records of pods name them.
    fn work_out_policies(&mut self, step: &Step<'_>, touched: &mut Touched) -> bool {
        let update = self.policies.update(step.changes, step.older, step.newer);
        let mut changed = false;
        for (name, resource) in update.resources {
            changed |= match resource {
                Some(resource) => self.snapshot.put_authorization(resource),
                None => self.snapshot.remove_authorization(&name),
            };
        }
        for (key, status) in update.statuses {
            changed |= match status {
                Some(status) if self.snapshot.policies.get(&key).is_some_and(|held| **held == status) => false,
                Some(status) => {
                    self.snapshot.policies.insert(key, Arc::new(status));
                    true
                }
                None => self.snapshot.policies.remove(&key).is_some(),
            };
        }
        touched.targets(&update.targets, step.newer);
        changed
    }

    /// Services and ServiceEntries together: one takes a host name from the other.
    fn work_out_services(&mut self, services: BTreeSet<ObjectName>, entries: BTreeSet<ObjectName>) -> bool {
        let mut changed = false;
        let mut gone: BTreeSet<Arc<str>> = BTreeSet::new();
        for name in &entries {
            gone.extend(self.by_entry.remove(name).unwrap_or_default());
        }
        for name in services {
            let mut problems = Problems::new();
            let service = self.objects.services.get(&name).cloned();
            let resource = service.and_then(|s| service::from_service(&self.context(), &s, &mut problems));
            self.note(ObjectKey::Service(name.clone()), problems);
            match resource {
                Some(service) => changed |= self.snapshot.put(Resource::service(&service)),
                None => drop(gone.insert(self.settings.service_key(&name.name, &name.namespace).into())),
            }
        }
        for name in entries {
            let mut problems = Problems::new();
            let entry = self.objects.service_entries.get(&name).cloned();
            let given = entry.map(|e| entry::from_service_entry(&self.context(), &name, &e, &mut problems));
            self.note(ObjectKey::ServiceEntry(name.clone()), problems);
            let given = given.unwrap_or_default();
            let services = given.services.iter().map(Resource::service);
            let mut names = BTreeSet::new();
            for resource in services.chain(given.workloads.iter().map(Resource::workload)) {
                gone.remove(&resource.name);
                names.insert(resource.name.clone());
                changed |= self.snapshot.put(resource);
            }
            if !names.is_empty() {
                self.by_entry.insert(name, names);
            }
        }
        gone.retain(|name| !self.is_given(name));
        for name in gone {
            changed |= self.snapshot.remove(&name);
        }
        changed
    }

    /// Whether a Service gives the resource of that name, whatever a ServiceEntry gave.
    fn is_given(&self, key: &str) -> bool {
        let Some((namespace, host)) = key.split_once('/') else { return false };
        self.context().service_of(host).is_some_and(|name| *name.namespace == *namespace)
    }

    fn work_out_pod(&mut self, name: &ObjectName) -> bool {
        let mut problems = Problems::new();
        let pod = self.objects.pods.get(name).cloned();
        let workload = pod.and_then(|p| pod::from_pod(&self.context(), &p, &mut problems));
        self.note(ObjectKey::Pod(name.clone()), problems);
        match workload {
            Some(workload) => self.snapshot.put(Resource::workload(&workload)),
            None => self.snapshot.remove(&self.settings.pod_uid(&name.name, &name.namespace)),
        }
    }

    fn work_out_slice(&mut self, name: &ObjectName) -> bool {
        let mut problems = Problems::new();
        let slice = self.objects.endpoint_slices.get(name).cloned();
        let workloads = slice.map(|s| slice::from_slice(&self.context(), &s, &mut problems)).unwrap_or_default();
        self.note(ObjectKey::EndpointSlice(name.clone()), problems);
        let uids: BTreeSet<Arc<str>> = workloads.iter().map(|w| w.uid.as_str().into()).collect();
        let mut changed = false;
        for gone in self.by_slice.remove(name).unwrap_or_default().difference(&uids) {
            changed |= self.snapshot.remove(gone);
        }
        for workload in &workloads {
            changed |= self.snapshot.put(Resource::workload(workload));
        }
        if !uids.is_empty() {
            self.by_slice.insert(name.clone(), uids);
        }
        changed
    }

    fn work_out_workload_entry(&mut self, name: &ObjectName) -> bool {
        let mut problems = Problems::new();
        let entry = self.objects.workload_entries.get(name).cloned();
        let workload = entry.and_then(|e| entry::from_workload_entry(&self.context(), name, &e, &mut problems));
        self.note(ObjectKey::WorkloadEntry(name.clone()), problems);
        match workload {
            Some(workload) => self.snapshot.put(Resource::workload(&workload)),
            None => self.snapshot.remove(&self.settings.workload_entry_uid(name)),
        }
    }

    fn note(&mut self, object: ObjectKey, problems: Problems) {
        if problems.is_empty() {
            self.snapshot.problems.remove(&object);
            return;
        }
        let text: Arc<str> = problems.join("; ").into();
        if self.snapshot.problems.get(&object) != Some(&text) {
            tracing::warn!(%object, problem = &*text, "an object cannot be served as it is");
            self.snapshot.problems.insert(object, text);
        }
    }

    fn context(&self) -> Context<'_> {
        Context {
            settings: &self.settings,
            objects: &self.objects,
            network: &self.network,
            links: &self.links,
            hosts: &self.hosts,
            policies: &self.policies,
        }
    }
}

impl ModelSettings {
    fn hostname(&self, name: &str, namespace: &str) -> String {
        format!("{name}.{namespace}.svc.{}", self.cluster_domain)
    }

    /// `namespace/hostname`.
    fn service_key(&self, name: &str, namespace: &str) -> String {
        format!("{namespace}/{}", self.hostname(name, namespace))
    }

    /// The empty API group gives the two slashes.
    fn pod_uid(&self, name: &str, namespace: &str) -> String {
        format!("{}//Pod/{namespace}/{name}", self.cluster_id)
    }

    fn workload_entry_uid(&self, name: &ObjectName) -> String {
        format!("{}/networking.istio.io/WorkloadEntry/{name}", self.cluster_id)
    }

    /// The wire's default is not spelled out.
    fn wire_trust_domain(&self) -> String {
        if self.trust_domain == TrustDomain::default() { String::new() } else { self.trust_domain.to_string() }
    }
}

impl Context<'_> {
    /// Whether the word of a ServiceEntry counts for one of its hosts, else who gives it.
    fn gives(&self, entry: &ObjectName, host: &str) -> Result<(), String> {
        if let Some(service) = self.service_of(host).filter(|name| name.namespace == entry.namespace) {
            return Err(format!("Service {service}"));
        }
        match self.hosts.winner(&entry.namespace, host) {
            Some(winner) if winner != entry => Err(format!("ServiceEntry {winner}, which is older")),
            _ => Ok(()),
        }
    }

    /// Whether it is the one that counts where the namespace of the client has none.
    fn is_canonical(&self, entry: &ObjectName, host: &str) -> bool {
        self.service_of(host).is_none() && self.hosts.oldest(host) == Some(entry)
    }

    /// The Service that a host name is the name of.
    fn service_of(&self, host: &str) -> Option<ObjectName> {
        let names = host.strip_suffix(self.settings.cluster_domain.as_str())?.strip_suffix(".svc.")?;
        let (name, namespace) = names.split_once('.')?;
        let service = self.objects.service(namespace, name)?;
        service::is_mesh_service(service).then(|| ObjectName::new(namespace, name))
    }
}

/// Name and namespace; the source has checked that they are there.
fn name_of(meta: &ObjectMeta) -> (&str, &str) {
    (meta.name.as_deref().unwrap_or_default(), meta.namespace.as_deref().unwrap_or("default"))
}

fn address_bytes(address: IpAddr) -> bytes::Bytes {
    match address.to_canonical() {
        IpAddr::V4(v4) => bytes::Bytes::copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => bytes::Bytes::copy_from_slice(&v6.octets()),
    }
}

/// A port number of an object; 0 is none.
fn port(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|p| *p != 0)
}

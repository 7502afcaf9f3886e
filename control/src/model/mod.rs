//! From Kubernetes objects to what proxies are told, kept up to date by working out again only what a change touches.
//!
//! Must never serve a half-applied change: a snapshot is published when all that belongs to a change is in it.

mod pod;
mod policies;
mod service;
mod slice;
mod snapshot;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use ztunnel::identity::TrustDomain;
use ztunnel::manifests::{Changes, ObjectKey, ObjectName, Objects};

pub use pod::{is_terminal, service_account};
pub use policies::{PolicyStatus, is_enrolled};
pub use snapshot::{Change, Decoded, Feature, Kind, Resolved, Resource, Set, Snapshot};

use crate::policy::MeshNames;
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
    policies: Policies,
}

/// What depends on what, beyond what the objects' order gives.
#[derive(Debug, Default)]
struct Links {
    pods_on: HashMap<Arc<str>, BTreeSet<ObjectName>>,
    /// Slices by the service that they belong to.
    slices_of: HashMap<ObjectName, BTreeSet<ObjectName>>,
    /// Slices by the pods that they name.
    slices_with: HashMap<ObjectName, BTreeSet<ObjectName>>,
    /// Uids of the workloads that a slice gave.
    given_by: HashMap<ObjectName, BTreeSet<String>>,
}

/// What must be worked out again.
#[derive(Debug, Default)]
struct Touched {
    pods: BTreeSet<ObjectName>,
    services: BTreeSet<ObjectName>,
    slices: BTreeSet<ObjectName>,
}

/// What is at hand when a resource is worked out.
struct Context<'a> {
    settings: &'a ModelSettings,
    objects: &'a Objects,
    network: &'a str,
    links: &'a Links,
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
        }
    }

    /// Takes in the objects of a later moment; the new snapshot if anything that is served is another now.
    pub fn update(&mut self, objects: Arc<Objects>) -> Option<Snapshot> {
        let changes = objects.changes_since(&self.objects);
        let older = std::mem::replace(&mut self.objects, objects);
        self.links.follow(&changes, &older, &self.objects);
        let network = self.cluster_network();
        let mut touched = if network != self.network {
            tracing::info!(network = &*network, "the cluster's network has another name: everything is sent again");
            self.network = network;
            self.everything(&older)
        } else {
            self.touched(&changes, &older)
        };
        let mut changed = self.work_out_policies(&changes, &older, &mut touched);
        for name in touched.services {
            changed |= self.work_out_service(&name);
        }
        for name in touched.pods {
            changed |= self.work_out_pod(&name);
        }
        for name in touched.slices {
            changed |= self.work_out_slice(&name);
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

    fn everything(&self, older: &Objects) -> Touched {
        let mut touched = Touched::default();
        for objects in [older, &*self.objects] {
            touched.pods.extend(objects.pods.keys().cloned());
            touched.services.extend(objects.services.keys().cloned());
            touched.slices.extend(objects.endpoint_slices.keys().cloned());
        }
        touched
    }

    fn touched(&self, changes: &Changes, older: &Objects) -> Touched {
        let newer = &*self.objects;
        let mut touched = Touched::default();
        touched.pods.extend(changes.pods.iter().cloned());
        for uid in &changes.statuses {
            let statuses = [older, newer].into_iter().filter_map(|o| o.statuses.get(uid));
            touched.pods.extend(statuses.map(|s| ObjectName::new(&s.pod.namespace, &s.pod.name)));
        }
        for name in &changes.nodes {
            // Nodes change all the time (heartbeats); only where they are matters.
            let place = |objects: &Objects| objects.node(name).map(|n| locality_labels(n).map(str::to_owned));
            if place(older) != place(newer) {
                touched.pods.extend(self.links.pods_on.get(name).into_iter().flatten().cloned());
            }
        }
        for name in &changes.namespaces {
            let annotations = |objects: &Objects| objects.namespace(name).map(|n| n.metadata.annotations.clone());
            if annotations(older) != annotations(newer) {
                touched.services.extend(newer.services_in(name).map(|(name, _)| name.clone()));
            }
        }
        for name in &changes.services {
            touched.services.insert(name.clone());
            let slices = self.links.slices_of.get(name).into_iter().flatten();
            for slice in slices {
                touched.slice(slice, newer);
            }
            for service in [older, newer].into_iter().filter_map(|o| o.services.get(name)) {
                let nothing = BTreeMap::new();
                let selected = newer
                    .pods_in(&name.namespace)
                    .filter(|(_, pod)| service::selects(service, pod.metadata.labels.as_ref().unwrap_or(&nothing)));
                touched.pods.extend(selected.map(|(name, _)| name.clone()));
            }
        }
        for name in &changes.endpoint_slices {
            touched.slice(name, older);
            touched.slice(name, newer);
        }
        touched
    }

    /// Policies first: the records of pods name them.
    fn work_out_policies(&mut self, changes: &Changes, older: &Objects, touched: &mut Touched) -> bool {
        let update = self.policies.update(changes, older, &self.objects);
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
        let nothing = BTreeMap::new();
        let concerned = |name: &ObjectName, pod: &Pod| {
            let labels = pod.metadata.labels.as_ref().unwrap_or(&nothing);
            update.targets.iter().any(|target| target.selects(&name.namespace, labels))
        };
        if update.targets.iter().any(|target| target.everywhere) {
            let pods = self.objects.pods.iter().filter(|(name, pod)| concerned(name, pod));
            touched.pods.extend(pods.map(|(name, _)| name.clone()));
        } else {
            for namespace in update.targets.iter().map(|t| t.namespace.as_str()).collect::<BTreeSet<_>>() {
                let pods = self.objects.pods_in(namespace).filter(|(name, pod)| concerned(name, pod));
                touched.pods.extend(pods.map(|(name, _)| name.clone()));
            }
        }
        changed
    }

    fn work_out_service(&mut self, name: &ObjectName) -> bool {
        let mut problems = Problems::new();
        let service = self.objects.services.get(name).cloned();
        let resource = service.and_then(|s| service::from_service(&self.context(), &s, &mut problems));
        self.note(ObjectKey::Service(name.clone()), problems);
        match resource {
            Some(service) => self.snapshot.put(Resource::service(&service)),
            None => self.snapshot.remove(&self.settings.service_key(&name.name, &name.namespace)),
        }
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
        let uids: BTreeSet<String> = workloads.iter().map(|w| w.uid.clone()).collect();
        let mut changed = false;
        for gone in self.links.given_by.remove(name).unwrap_or_default().difference(&uids) {
            changed |= self.snapshot.remove(gone);
        }
        for workload in &workloads {
            changed |= self.snapshot.put(Resource::workload(workload));
        }
        if !uids.is_empty() {
            self.links.given_by.insert(name.clone(), uids);
        }
        changed
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

    /// The wire's default is not spelled out.
    fn wire_trust_domain(&self) -> String {
        if self.trust_domain == TrustDomain::default() { String::new() } else { self.trust_domain.to_string() }
    }
}

impl Context<'_> {
    /// Slices that name the pod as an endpoint.
    fn slices_with(&self, namespace: &str, pod: &str) -> impl Iterator<Item = ObjectName> {
        self.links.slices_with.get(&ObjectName::new(namespace, pod)).into_iter().flatten().cloned()
    }
}

impl Links {
    fn follow(&mut self, changes: &Changes, older: &Objects, newer: &Objects) {
        for name in &changes.pods {
            if let Some(node) = older.pods.get(name).and_then(|p| node_of(p)) {
                unlink(&mut self.pods_on, &Arc::from(node), name);
            }
            if let Some(node) = newer.pods.get(name).and_then(|p| node_of(p)) {
                self.pods_on.entry(node.into()).or_default().insert(name.clone());
            }
        }
        for name in &changes.endpoint_slices {
            if let Some(slice) = older.endpoint_slices.get(name) {
                if let Some(service) = pod::slice_service_name(slice) {
                    unlink(&mut self.slices_of, &ObjectName::new(&name.namespace, service), name);
                }
                for pod in slice_pods(slice, name) {
                    unlink(&mut self.slices_with, &pod, name);
                }
            }
            if let Some(slice) = newer.endpoint_slices.get(name) {
                if let Some(service) = pod::slice_service_name(slice) {
                    let service = ObjectName::new(&name.namespace, service);
                    self.slices_of.entry(service).or_default().insert(name.clone());
                }
                for pod in slice_pods(slice, name) {
                    self.slices_with.entry(pod).or_default().insert(name.clone());
                }
            }
        }
    }
}

impl Touched {
    /// A slice touches the workloads that it gives, and the pods that it names.
    fn slice(&mut self, name: &ObjectName, objects: &Objects) {
        self.slices.insert(name.clone());
        if let Some(slice) = objects.endpoint_slices.get(name) {
            self.pods.extend(slice_pods(slice, name));
        }
    }
}

fn slice_pods<'a>(slice: &'a EndpointSlice, name: &'a ObjectName) -> impl Iterator<Item = ObjectName> + 'a {
    slice.endpoints.iter().flatten().filter_map(slice::target_pod).map(|pod| ObjectName::new(&name.namespace, pod))
}

fn unlink<K: std::hash::Hash + Eq>(links: &mut HashMap<K, BTreeSet<ObjectName>>, key: &K, name: &ObjectName) {
    if let Some(names) = links.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            links.remove(key);
        }
    }
}

fn node_of(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

/// Region, zone, subzone.
fn locality_labels(node: &Node) -> [&str; 3] {
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|l| l.get(key)).map_or("", String::as_str);
    [label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone"), label("topology.istio.io/subzone")]
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

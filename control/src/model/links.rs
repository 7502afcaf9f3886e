//! What depends on what in the model, beyond what the objects' order gives, and what a change touches.
//!
//! Must never leave out what a change touches; what it adds needlessly costs time and nothing else.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use ztunnel::manifests::{Changes, ObjectName, Objects};

use super::hosts::Hosts;
use super::{ModelSettings, entry, pod, service, slice};
use crate::policy::Target;

/// What depends on what.
#[derive(Debug, Default)]
pub(super) struct Links {
    pods_on: HashMap<Arc<str>, BTreeSet<ObjectName>>,
    /// Slices by the service that they belong to.
    slices_of: HashMap<ObjectName, BTreeSet<ObjectName>>,
    /// Slices by the pods that they name.
    slices_with: HashMap<ObjectName, BTreeSet<ObjectName>>,
    /// Services by their virtual addresses.
    services_at: HashMap<IpAddr, BTreeSet<ObjectName>>,
}

/// What must be worked out again.
#[derive(Debug, Default)]
pub(super) struct Touched {
    pub pods: BTreeSet<ObjectName>,
    pub services: BTreeSet<ObjectName>,
    pub slices: BTreeSet<ObjectName>,
    pub service_entries: BTreeSet<ObjectName>,
    pub workload_entries: BTreeSet<ObjectName>,
}

/// Two moments, and what became different between them.
pub(super) struct Step<'a> {
    pub changes: &'a Changes,
    pub older: &'a Objects,
    pub newer: &'a Objects,
}

type Labels = BTreeMap<String, String>;

impl Links {
    /// Slices that name the pod.
    pub fn slices_with(&self, namespace: &str, pod: &str) -> impl Iterator<Item = &ObjectName> {
        self.slices_with.get(&ObjectName::new(namespace, pod)).into_iter().flatten()
    }

    /// The Service that has a virtual address.
    pub fn service_at(&self, address: IpAddr) -> Option<&ObjectName> {
        self.services_at.get(&address)?.first()
    }

    pub fn follow(&mut self, step: &Step<'_>) {
        for name in &step.changes.services {
            for address in step.older.services.get(name).into_iter().flat_map(|s| service::addresses(s)) {
                unlink(&mut self.services_at, &address, name);
            }
            for address in step.newer.services.get(name).into_iter().flat_map(|s| service::addresses(s)) {
                self.services_at.entry(address).or_default().insert(name.clone());
            }
        }
        for name in &step.changes.pods {
            if let Some(node) = step.older.pods.get(name).and_then(|p| node_of(p)) {
                unlink(&mut self.pods_on, &Arc::from(node), name);
            }
            if let Some(node) = step.newer.pods.get(name).and_then(|p| node_of(p)) {
                self.pods_on.entry(node.into()).or_default().insert(name.clone());
            }
        }
        for name in &step.changes.endpoint_slices {
            if let Some(slice) = step.older.endpoint_slices.get(name) {
                if let Some(service) = pod::slice_service_name(slice) {
                    unlink(&mut self.slices_of, &ObjectName::new(&name.namespace, service), name);
                }
                for pod in slice_pods(slice, name) {
                    unlink(&mut self.slices_with, &pod, name);
                }
            }
            if let Some(slice) = step.newer.endpoint_slices.get(name) {
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

    /// What a step touches. `hosts` are those of the newer moment.
    pub fn touched(&self, step: &Step<'_>, hosts: &Hosts, settings: &ModelSettings) -> Touched {
        let Step { changes, older, newer } = *step;
        let mut touched = Touched::default();
        touched.pods.extend(changes.pods.iter().cloned());
        touched.workload_entries.extend(changes.workload_entries.iter().cloned());
        for uid in &changes.statuses {
            let statuses = [older, newer].into_iter().filter_map(|o| o.statuses.get(uid));
            touched.pods.extend(statuses.map(|s| ObjectName::new(&s.pod.namespace, &s.pod.name)));
        }
        for name in &changes.nodes {
            // Nodes change all the time (heartbeats); only where they are matters.
            let place = |objects: &Objects| objects.node(name).map(|n| locality_labels(n).map(str::to_owned));
            if place(older) != place(newer) {
                touched.pods.extend(self.pods_on.get(name).into_iter().flatten().cloned());
            }
        }
        for name in &changes.namespaces {
            let annotations = |objects: &Objects| objects.namespace(name).map(|n| n.metadata.annotations.clone());
            if annotations(older) != annotations(newer) {
                touched.services.extend(newer.services_in(name).map(|(name, _)| name.clone()));
                touched.service_entries.extend(newer.service_entries_in(name).map(|(name, _)| name.clone()));
            }
        }
        for name in &changes.services {
            touched.services.insert(name.clone());
            for slice in self.slices_of.get(name).into_iter().flatten() {
                touched.slice(slice, newer);
            }
            for service in [older, newer].into_iter().filter_map(|o| o.services.get(name)) {
                touched.selected(newer, &name.namespace, |labels| service::selects(service, labels));
            }
            // It takes its address and its host name from whoever gave them before, and leaves them to them.
            let at = |objects: &Objects| objects.services.get(name).map(|s| service::addresses(s)).unwrap_or_default();
            let moved: BTreeSet<IpAddr> = at(older).symmetric_difference(&at(newer)).copied().collect();
            if !moved.is_empty() {
                let concerned = newer.service_entries.iter().filter(|(_, e)| entry::claims_one_of(e, &moved));
                touched.service_entries.extend(concerned.map(|(name, _)| name.clone()));
            }
            for claimant in hosts.claimants(&settings.hostname(&name.name, &name.namespace)) {
                touched.service_entry(claimant, step);
            }
        }
        for name in &changes.service_entries {
            touched.service_entry(name, step);
            for entry in [older, newer].into_iter().filter_map(|o| o.service_entries.get(name)) {
                for claimant in entry::hosts(entry).flat_map(|host| hosts.claimants(&host).cloned().collect::<Vec<_>>())
                {
                    touched.service_entry(&claimant, step);
                }
            }
        }
        for name in &changes.endpoint_slices {
            touched.slice(name, older);
            touched.slice(name, newer);
        }
        touched
    }
}

impl Touched {
    pub fn everything(older: &Objects, newer: &Objects) -> Self {
        let mut touched = Self::default();
        for objects in [older, newer] {
            touched.pods.extend(objects.pods.keys().cloned());
            touched.services.extend(objects.services.keys().cloned());
            touched.slices.extend(objects.endpoint_slices.keys().cloned());
            touched.service_entries.extend(objects.service_entries.keys().cloned());
            touched.workload_entries.extend(objects.workload_entries.keys().cloned());
        }
        touched
    }

    /// The workloads whose records may name other policies now.
    pub fn targets(&mut self, targets: &[Target], objects: &Objects) {
        if targets.is_empty() {
            return;
        }
        let concerns = |namespace: &str, labels: &Labels| targets.iter().any(|t| t.selects(namespace, labels));
        let everywhere = targets.iter().any(|target| target.everywhere);
        let namespaces: BTreeSet<&str> = match everywhere {
            true => objects.pods.keys().chain(objects.workload_entries.keys()).map(|name| &*name.namespace).collect(),
            false => targets.iter().map(|target| target.namespace.as_str()).collect(),
        };
        for namespace in namespaces {
            self.selected(objects, namespace, |labels| concerns(namespace, labels));
        }
        let inline = objects.service_entries.iter().filter(|(name, entry)| {
            let mut endpoints = entry.spec.endpoints.iter();
            endpoints.any(|endpoint| concerns(&name.namespace, &endpoint.labels))
        });
        self.service_entries.extend(inline.map(|(name, _)| name.clone()));
    }

    /// Pods and WorkloadEntries of a namespace with certain labels.
    fn selected(&mut self, objects: &Objects, namespace: &str, selects: impl Fn(&Labels) -> bool) {
        let nothing = Labels::new();
        let pods =
            objects.pods_in(namespace).filter(|(_, pod)| selects(pod.metadata.labels.as_ref().unwrap_or(&nothing)));
        self.pods.extend(pods.map(|(name, _)| name.clone()));
        let entries = objects.workload_entries_in(namespace).filter(|(_, entry)| selects(&entry::labels(entry)));
        self.workload_entries.extend(entries.map(|(name, _)| name.clone()));
    }

    /// A ServiceEntry touches its own resources, and whom it selects.
    fn service_entry(&mut self, name: &ObjectName, step: &Step<'_>) {
        if !self.service_entries.insert(name.clone()) {
            return;
        }
        for entry in [step.older, step.newer].into_iter().filter_map(|o| o.service_entries.get(name)) {
            if entry.spec.workload_selector.is_some() {
                self.selected(step.newer, &name.namespace, |labels| entry::selects(entry, labels));
            }
        }
    }

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
pub(super) fn locality_labels(node: &Node) -> [&str; 3] {
    let label = |key: &str| node.metadata.labels.as_ref().and_then(|l| l.get(key)).map_or("", String::as_str);
    [label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone"), label("topology.istio.io/subzone")]
}

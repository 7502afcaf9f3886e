//! The model of the mesh: workloads, services, policies and how they refer to each other, as snapshots that are
//! read without locks.
//!
//! Must never answer from a half-applied update.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard};
use tokio::sync::watch;

mod choose;
mod convert;
mod few;
mod index;
mod intern;
mod service;
mod snapshot;
#[cfg(test)]
mod tests;
mod workload;

pub use choose::{Chosen, LeftOut, NoEndpoint, Request};
pub use convert::{ConvertError, service as convert_service, workload as convert_workload};
pub use few::Few;
pub use intern::Interner;
pub use service::{
    CidrVip, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode, Scope, Service, ServicePort, Visibility,
    WeightedWaypoint,
};
use snapshot::PolicyChanges;
pub use snapshot::{Gateway, Local, Snapshot, Unusable};
pub use workload::{
    ApplicationTunnel, Common, Destination, GatewayAddress, Locality, NamespacedHostname, NetworkAddress, Place,
    TunnelProtocol, Workload, WorkloadService,
};

use crate::policy::Policy;

/// The mesh as this node knows it.
#[derive(Debug)]
pub struct Mesh {
    current: ArcSwap<Snapshot>,
    /// Writers take turns; readers never wait.
    writing: Mutex<Interner>,
    version: watch::Sender<u64>,
}

/// Changes that become visible together.
#[derive(Debug)]
pub struct Update<'a> {
    snapshot: Snapshot,
    strings: &'a mut Interner,
    changes: PolicyChanges,
}

impl Mesh {
    /// The own node's name, and the cluster that it belongs to: other clusters may have nodes and pods of the same names.
    pub fn new(node: &str, cluster: &str) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwap::from_pointee(Snapshot::new(node.into(), cluster.into())),
            writing: Mutex::default(),
            version: watch::Sender::new(0),
        })
    }

    /// The mesh as it is now.
    pub fn load(&self) -> Guard<Arc<Snapshot>> {
        self.current.load()
    }

    /// The same to keep.
    pub fn load_full(&self) -> Arc<Snapshot> {
        self.current.load_full()
    }

    /// Counts up with each update.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    /// Applies changes; readers see all of them or none.
    pub fn update<T>(&self, change: impl FnOnce(&mut Update<'_>) -> T) -> T {
        // A panic of an earlier writer left the snapshot as it was.
        let mut strings = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = (**self.current.load()).clone();
        let mut update = Update { snapshot, strings: &mut strings, changes: PolicyChanges::default() };
        let result = change(&mut update);
        let Update { mut snapshot, changes, .. } = update;
        if !changes.is_empty() {
            snapshot.prepare(&changes);
        }
        self.current.store(Arc::new(snapshot));
        strings.shrink_if_grown();
        drop(strings);
        self.version.send_modify(|v| *v += 1);
        result
    }
}

impl Update<'_> {
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub fn strings(&mut self) -> &mut Interner {
        self.strings
    }

    pub fn workload(&mut self, mut workload: Workload) {
        // Whoever holds the name of the one before holds that of this one too.
        if let Some(held) = self.snapshot.workload(&workload.uid) {
            workload.uid = held.uid.clone();
        }
        if self.snapshot.is_local(&workload) {
            self.changes.workload(&workload);
        }
        self.snapshot.insert_workload(Arc::new(workload));
    }

    pub fn service(&mut self, service: Service) {
        self.snapshot.insert_service(Arc::new(service));
    }

    /// Traffic to these addresses is refused until the resource comes in a form that can be used, or goes.
    pub fn unusable(&mut self, unusable: Unusable) {
        self.snapshot.insert_unusable(unusable);
    }

    /// Takes a policy; whether it is another one than what is held.
    pub fn policy(&mut self, policy: Policy) -> bool {
        let policies = self.snapshot.policies_mut();
        // After a reconnect all are sent again.
        if policies.get(policy.key()).is_some_and(|held| **held == policy) {
            return false;
        }
        self.changes.policy(&policy);
        if let Some(old) = policies.insert(Arc::new(policy)) {
            self.changes.policy(&old);
        }
        true
    }

    /// The control plane has sent all policies that it has. Before that nothing can be decided.
    pub fn policies_complete(&mut self) {
        if !self.snapshot.policies().is_complete() {
            self.snapshot.policies_mut().complete();
            self.changes.all();
        }
    }

    /// Removes a workload by uid, or else a service by `namespace/hostname`. Whether there was one.
    pub fn remove_address(&mut self, name: &str) -> bool {
        let unusable = self.snapshot.forget_unusable(name);
        self.snapshot.remove_workload(name).is_some() || self.snapshot.remove_service(name).is_some() || unusable
    }

    pub fn remove_policy(&mut self, name: &str) -> bool {
        let removed = self.snapshot.policies_mut().remove(name);
        if let Some(policy) = &removed {
            self.changes.policy(policy);
        }
        removed.is_some()
    }
}

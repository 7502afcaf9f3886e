//! The model of the mesh: workloads, services, policies and how they refer to each other, as snapshots that are
//! read without locks.
//!
//! Must never answer from a half-applied update.

use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::{ArcSwap, Guard};
use tokio::sync::watch;

mod choose;
mod convert;
mod service;
mod snapshot;
#[cfg(test)]
mod tests;
mod workload;

pub use choose::{Chosen, NoEndpoint, Request};
pub use convert::{ConvertError, Interner, service as convert_service, workload as convert_workload};
pub use service::{
    CidrVip, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode, Scope, Service, ServicePort, Visibility,
    WeightedWaypoint,
};
pub use snapshot::{Applicable, Gateway, Snapshot, Unusable};
pub use workload::{
    ApplicationTunnel, Destination, GatewayAddress, Locality, NamespacedHostname, NetworkAddress, TunnelProtocol,
    Workload, WorkloadService,
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
}

impl Mesh {
    /// `node`: the own node's name.
    pub fn new(node: &str) -> Arc<Self> {
        Arc::new(Self {
            current: ArcSwap::from_pointee(Snapshot::new(node.into())),
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
        let before = strings.len();
        let mut update = Update { snapshot: (**self.current.load()).clone(), strings: &mut strings };
        let result = change(&mut update);
        self.current.store(Arc::new(update.snapshot));
        if strings.len() > before + SHRINK_AFTER {
            strings.shrink();
        }
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

    pub fn workload(&mut self, workload: Workload) {
        self.snapshot.insert_workload(Arc::new(workload));
    }

    pub fn service(&mut self, service: Service) {
        self.snapshot.insert_service(Arc::new(service));
    }

    /// Traffic to these addresses is refused until the resource comes in a form that can be used, or goes.
    pub fn unusable(&mut self, unusable: Unusable) {
        self.snapshot.insert_unusable(unusable);
    }

    pub fn policy(&mut self, policy: Policy) {
        self.snapshot.insert_policy(Arc::new(policy));
    }

    /// Removes a workload by uid, or else a service by `namespace/hostname`. Whether there was one.
    pub fn remove_address(&mut self, name: &str) -> bool {
        let unusable = self.snapshot.forget_unusable(name);
        self.snapshot.remove_workload(name).is_some() || self.snapshot.remove_service(name).is_some() || unusable
    }

    pub fn remove_policy(&mut self, name: &str) -> bool {
        self.snapshot.remove_policy(name).is_some()
    }
}

/// New strings in one update after which unused ones are looked for.
const SHRINK_AFTER: usize = 1000;

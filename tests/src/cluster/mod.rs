//! What an API server, a kubelet and a CNI plugin do for a cluster: objects, addresses, sandboxes.

mod manifests;
mod namespace;
mod node;
mod pod;
mod service;
mod tokens;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

pub(crate) use manifests::Manifests;
pub use namespace::{DATAPLANE_MODE, Namespace};
pub use node::Node;
pub(crate) use node::{attach_to_lan, route_to_pods};
pub use pod::{Families, Pod, PodSpec, Qos};
pub(crate) use pod::{container_id, pod_cgroup};
pub use service::{Service, ServiceSpec, Target};
pub use tokens::{AUDIENCE, ISSUER, TokenKey, TokenSpec};

use crate::name::TestbedName;

/// Address ranges of pods and services: what lies outside is outside the cluster.
pub const CLUSTER_CIDRS: &str = "10.244.0.0/16,10.96.0.0/16,fd00:10:244::/48,fd00:10:96::/112";

/// The state that all handles of a testbed share.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) name: TestbedName,
    pub(crate) manifests: Manifests,
    /// Labels by name of the namespace.
    pub(crate) namespaces: Mutex<BTreeMap<String, BTreeMap<String, String>>>,
    pub(crate) pods: Mutex<Vec<Arc<pod::PodState>>>,
    pub(crate) services: Mutex<Vec<Arc<service::ServiceState>>>,
    counter: AtomicU32,
}

impl Cluster {
    pub(crate) fn new(name: TestbedName, manifests: Manifests) -> Self {
        Self {
            name,
            manifests,
            namespaces: Mutex::default(),
            pods: Mutex::default(),
            services: Mutex::default(),
            counter: AtomicU32::new(1),
        }
    }

    /// A number that nothing else of this testbed has.
    pub(crate) fn number(&self) -> u32 {
        self.counter.fetch_add(1, Ordering::Relaxed)
    }

    /// Writes the endpoint slices of a namespace's services, as the controller does after each change of pods.
    pub(crate) fn publish_endpoints(&self, namespace: &str) {
        let pods = self.pods.lock().unwrap().clone();
        let services = self.services.lock().unwrap().clone();
        for service in services.iter().filter(|service| service.namespace == namespace) {
            service.write_endpoints(&self.manifests, &pods);
        }
    }
}

/// Splits `namespace/name`.
#[track_caller]
pub(crate) fn split(path: &str) -> (&str, &str) {
    path.split_once('/').unwrap_or_else(|| panic!("{path:?} is not of the form namespace/name"))
}

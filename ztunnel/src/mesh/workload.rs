//! A workload: a pod, or something else that has addresses and an identity.

use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use super::few::Few;
use crate::identity::{Identity, TrustDomain};

/// A workload, checked and normalised from `istio.workload.Workload`. There can be 100,000 of them: what many have in
/// common is shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Primary key, for pods `<cluster>//Pod/<namespace>/<name>`.
    pub uid: Arc<str>,
    /// Its name, where that is not the last part of the uid.
    pub own_name: Option<Box<str>>,
    pub addresses: Few<IpAddr>,
    pub common: Arc<Common>,
    pub place: Arc<Place>,
    /// The services that it is an endpoint of, in the order of their names.
    pub services: Arc<[WorkloadService]>,
    /// Weight as an endpoint; 0 excludes it.
    pub capacity: u32,
    pub healthy: bool,
}

/// What the replicas of one Deployment have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Common {
    pub namespace: Arc<str>,
    pub service_account: Arc<str>,
    pub trust_domain: TrustDomain,
    pub protocol: TunnelProtocol,
    /// Resolved by DNS when there are no addresses.
    pub hostname: Arc<str>,
    pub workload_name: Arc<str>,
    /// Lower case: `deployment`, `cronjob`, `pod`, `job`.
    pub workload_type: &'static str,
    pub canonical_name: Arc<str>,
    pub canonical_revision: Arc<str>,
    pub waypoint: Option<Arc<GatewayAddress>>,
    /// The workload terminates HBONE itself; the node proxy must not.
    pub native_tunnel: bool,
    /// Never found by address.
    pub host_network: bool,
    pub application_tunnel: Option<ApplicationTunnel>,
    /// Names (`namespace/name`) of the selector policies that apply.
    pub policies: Box<[Arc<str>]>,
    pub identity: MadeIdentity,
}

/// The identity that other fields make up, once it was asked for. No part of what is compared, and never copied: a copy
/// may be given other fields.
#[derive(Debug, Default)]
pub struct MadeIdentity(OnceLock<Identity>);

/// What the workloads of one node have in common.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Place {
    pub node: Arc<str>,
    pub cluster: Arc<str>,
    pub network: Arc<str>,
    pub network_gateway: Option<Arc<GatewayAddress>>,
    pub locality: Locality,
}

/// A workload's share in a service.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct WorkloadService {
    /// `namespace/hostname`.
    pub service: Arc<str>,
    /// Service port → target port.
    pub ports: Box<[(u16, u16)]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TunnelProtocol {
    /// Plain TCP.
    #[default]
    None,
    Hbone,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Locality {
    pub region: Arc<str>,
    pub zone: Arc<str>,
    pub subzone: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ApplicationTunnel {
    /// Send a PROXY protocol header first.
    pub proxy_protocol: bool,
    /// 0: keep the target port.
    pub port: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NamespacedHostname {
    pub namespace: Arc<str>,
    pub hostname: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NetworkAddress {
    pub network: Arc<str>,
    pub address: IpAddr,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Destination {
    Hostname(NamespacedHostname),
    Address(NetworkAddress),
}

/// Where a waypoint or gateway is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GatewayAddress {
    pub destination: Destination,
    pub hbone_port: u16,
}

impl Workload {
    pub fn name(&self) -> &str {
        self.own_name.as_deref().unwrap_or_else(|| name_in(&self.uid))
    }

    pub fn identity(&self) -> Identity {
        let Common { trust_domain, namespace, service_account, identity, .. } = &*self.common;
        identity.0.get_or_init(|| Identity::new(trust_domain, namespace, service_account)).clone()
    }
}

impl Clone for MadeIdentity {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for MadeIdentity {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for MadeIdentity {}

impl Hash for MadeIdentity {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The last part of a uid, which is the name of a pod.
pub(super) fn name_in(uid: &str) -> &str {
    uid.rsplit_once('/').map_or(uid, |(_, name)| name)
}

//! A workload: a pod, or something else that has addresses and an identity.

use std::net::IpAddr;
use std::sync::Arc;

use crate::identity::{Identity, TrustDomain};

/// A workload, checked and normalised from `istio.workload.Workload`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    /// Primary key, for pods `<cluster>//Pod/<namespace>/<name>`.
    pub uid: Arc<str>,
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub addresses: Vec<IpAddr>,
    /// Resolved by DNS when there are no addresses.
    pub hostname: Arc<str>,
    pub network: Arc<str>,
    pub protocol: TunnelProtocol,
    pub trust_domain: TrustDomain,
    pub service_account: Arc<str>,
    pub waypoint: Option<GatewayAddress>,
    pub network_gateway: Option<GatewayAddress>,
    pub node: Arc<str>,
    pub workload_name: Arc<str>,
    /// Lower case: `deployment`, `cronjob`, `pod`, `job`.
    pub workload_type: &'static str,
    pub canonical_name: Arc<str>,
    pub canonical_revision: Arc<str>,
    pub cluster: Arc<str>,
    pub locality: Locality,
    pub healthy: bool,
    /// The workload terminates HBONE itself; the node proxy must not.
    pub native_tunnel: bool,
    /// Never found by address.
    pub host_network: bool,
    pub application_tunnel: Option<ApplicationTunnel>,
    /// Names (`namespace/name`) of the selector policies that apply.
    pub policies: Vec<Arc<str>>,
    /// The services that it is an endpoint of.
    pub services: Vec<WorkloadService>,
    /// Weight as an endpoint; 0 excludes it.
    pub capacity: u32,
}

/// A workload's share in a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkloadService {
    /// `namespace/hostname`.
    pub service: Arc<str>,
    /// Service port → target port.
    pub ports: Vec<(u16, u16)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TunnelProtocol {
    /// Plain TCP.
    #[default]
    None,
    Hbone,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Locality {
    pub region: Arc<str>,
    pub zone: Arc<str>,
    pub subzone: Arc<str>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
    pub fn identity(&self) -> Identity {
        Identity::new(&self.trust_domain, &self.namespace, &self.service_account)
    }
}

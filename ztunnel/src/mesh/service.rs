//! A service: virtual addresses and ports in front of workloads.

use std::sync::Arc;

use ipnet::IpNet;

use super::few::Few;
use super::workload::{GatewayAddress, NetworkAddress};
use crate::identity::Identity;

/// A service, checked and normalised from `istio.workload.Service`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// `namespace/hostname`, the primary key.
    pub key: Arc<str>,
    pub name: Arc<str>,
    pub namespace: Arc<str>,
    pub hostname: Arc<str>,
    /// Empty for a headless service.
    pub vips: Few<NetworkAddress>,
    pub cidr_vips: Box<[CidrVip]>,
    pub ports: Few<ServicePort>,
    /// Further identities that its endpoints may have.
    pub subject_alt_names: Box<[Identity]>,
    pub waypoint: Option<Arc<GatewayAddress>>,
    pub weighted_waypoints: Box<[WeightedWaypoint]>,
    pub load_balancing: LoadBalancing,
    pub ip_families: IpFamilies,
    pub canonical: bool,
    pub visibility: Visibility,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CidrVip {
    pub network: Arc<str>,
    pub cidr: IpNet,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServicePort {
    pub service_port: u16,
    /// 0: as resolved by each workload.
    pub target_port: u16,
    /// `AppProtocol` of the wire.
    pub app_protocol: i32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightedWaypoint {
    pub destination: GatewayAddress,
    pub weight: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadBalancing {
    pub preference: Box<[Scope]>,
    pub mode: LoadBalancingMode,
    pub health: HealthPolicy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    Region,
    Zone,
    Subzone,
    Node,
    Cluster,
    Network,
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Region => "region",
            Self::Zone => "zone",
            Self::Subzone => "subzone",
            Self::Node => "node",
            Self::Cluster => "cluster",
            Self::Network => "network",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadBalancingMode {
    /// Any usable endpoint.
    #[default]
    Standard,
    /// Only endpoints that match every scope.
    Strict,
    /// The endpoints that match most leading scopes.
    Failover,
    /// No choice: the address that the app dialled.
    Passthrough,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HealthPolicy {
    #[default]
    OnlyHealthy,
    AllowAll,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IpFamilies {
    #[default]
    Automatic,
    V4Only,
    V6Only,
    Dual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Visibility {
    #[default]
    Public,
    /// Only seen from its own namespace.
    Namespace,
}

//! The model of the mesh: workloads, services, policies and how they refer to each other, as snapshots that are
//! read without locks.
//!
//! Must never answer from a half-applied update.

mod service;
mod workload;

pub use service::{
    CidrVip, HealthPolicy, IpFamilies, LoadBalancing, LoadBalancingMode, Scope, Service, ServicePort, Visibility,
    WeightedWaypoint,
};
pub use workload::{
    ApplicationTunnel, Destination, GatewayAddress, Locality, NamespacedHostname, NetworkAddress, TunnelProtocol,
    Workload, WorkloadService,
};

//! The wire types, generated from `proto/`: packages, field names and numbers are those of the wire.

#[allow(clippy::all)]
mod wire {
    include!(concat!(env!("OUT_DIR"), "/wire.rs"));
}

pub use wire::envoy::config::core::v3::Node;
pub use wire::envoy::service::discovery::v3 as discovery;
pub use wire::google::rpc::Status;
pub use wire::istio::security;
pub use wire::istio::v1::auth as citadel;
pub use wire::istio::workload;
pub use wire::istio::workload::zds;
pub use wire::understory::trust;

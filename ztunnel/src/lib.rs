//! The node's part of the mesh as a library: lower modules know nothing of higher ones (ARCHITECTURE.md).

pub mod agent;
pub mod capture;
pub mod cni;
pub mod discovery;
pub mod files;
pub mod hbone;
pub mod identity;
pub mod kubernetes;
pub mod lifecycle;
pub mod manifests;
pub mod mesh;
pub mod operator;
pub mod policy;
pub mod proto;
pub mod proxy;
pub mod random;
pub mod telemetry;
pub mod zds;

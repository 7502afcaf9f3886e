//! The control plane for clusters without istiod: what the mesh consists of, and who is who in it.

pub mod admin;
pub mod ca;
pub mod ca_command;
pub mod ca_secret;
pub mod certificates;
pub mod check;
pub mod kubernetes;
pub mod limits;
pub mod metrics;
pub mod model;
pub mod policy;
pub mod policy_status;
pub mod root_config_maps;
pub mod serve;
pub mod settings;
pub mod tls;
pub mod tokens;
pub mod uninstall;
pub mod xds;

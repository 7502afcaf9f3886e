//! The control plane for clusters without istiod: what the mesh consists of, and who is who in it.

pub mod ads;
pub mod ca;
pub mod certificates;
pub mod model;
pub mod serve;
pub mod settings;
pub mod tokens;

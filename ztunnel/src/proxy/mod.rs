//! What a connection goes through.

pub mod config;
pub mod relay;

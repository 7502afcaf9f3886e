//! What a connection goes through: accepted from a pod's listener, looked up, judged, connected, relayed.

pub mod config;
mod dump;
mod finish;
mod guard;
mod inbound;
mod judge;
mod metrics;
mod outbound;
mod plaintext;
mod pods;
pub mod relay;
mod route;
mod run;
mod share;
mod state;
mod worker;

pub use run::{ProxyError, run};

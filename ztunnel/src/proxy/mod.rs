//! What a connection goes through: accepted from a pod's listener, looked up, judged, connected, relayed.

mod attested;
pub mod config;
mod dump;
pub mod explain;
mod finish;
mod guard;
mod inbound;
mod judge;
mod metrics;
mod neighbour;
mod older;
mod outbound;
mod overload;
mod plaintext;
mod pods;
mod rejudge;
pub mod relay;
mod route;
mod run;
pub mod saved;
mod share;
mod state;
mod worker;

pub use run::{ProxyError, run};

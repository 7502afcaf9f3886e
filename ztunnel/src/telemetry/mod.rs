//! What can be seen from outside: metrics, log lines, the admin, metrics and readiness servers.
//!
//! Must never slow down or stop the data path: each queue is bounded and lossy, nothing here is awaited by a
//! connection.

pub mod admin;
pub mod config_dump;
pub mod connections;
pub mod flow;
pub mod http;
pub mod log;
pub mod metrics;
pub mod time;

mod access_log;
mod policies;

pub use connections::{Closing, Connection, LiveConnection, Telemetry};

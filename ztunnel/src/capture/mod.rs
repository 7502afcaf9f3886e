//! How a pod's connections reach the proxy: its namespace, its listening sockets, the eBPF programs.
//!
//! Must never let a connection of a captured pod pass in the clear because a part of this is missing.

mod attach;
pub mod bpf;
mod error;
pub mod listeners;
pub mod maps;
pub mod netns;
mod object;
mod pins;
pub mod pod_network;
pub mod programs;
pub mod sock_diag;
pub mod sockets;

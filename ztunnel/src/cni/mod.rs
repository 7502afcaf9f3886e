//! `ztunnel cni`: the CNI plugin, which a container runtime runs last in the chain for each sandbox. It asks the node's
//! agent, so that a pod of the mesh is captured before its first process runs, and fails where it cannot be.
//!
//! Must never let a pod start that may belong into the mesh and is not captured, nor hold up one that the node needs to
//! come up.

mod client;
pub mod install;
mod plugin;
pub mod protocol;
mod spans;
mod types;

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub use client::{AskError, Patience, ask};
pub use plugin::main;
pub use types::{Attachment, PodName};

/// The plugin's type, which is the name of its file as well.
pub const PLUGIN: &str = "understory-cni";
/// The longest that the plugin waits for the agent's answer to an ADD.
pub const LONGEST_ANSWER_SECONDS: u64 = 300;

/// Runs the plugin if the program was called as one: by the plugin's name, or as `ztunnel cni`. Meant for the very
/// beginning of the program: a pod's start waits for it.
pub fn run_if_called() -> Option<ExitCode> {
    let mut args = std::env::args_os();
    let program = args.next()?;
    let by_name = Path::new(&program).file_name() == Some(OsStr::new(PLUGIN));
    let by_command = args.next().is_some_and(|first| first == "cni") && args.next().is_none();
    (by_name || by_command).then(main)
}

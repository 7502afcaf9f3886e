//! Commands for whoever looks after a node: they ask the running proxy and print what it says.

mod admin;
pub mod explain;

pub use admin::AskError;

//! `ztunnel agent`: enrols the node's pods.

mod cgroups;
mod decision;
mod procs;
mod record;
mod selector;

//! `ztunnel`: the proxy and the agent of a node, and its CNI plugin.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ztunnel::agent::{self, AgentArgs};
use ztunnel::cni;
use ztunnel::operator::explain::{self, ExplainArgs};
use ztunnel::proxy::{self, config::ProxyArgs};
use ztunnel::telemetry::log::Logging;

/// Freed memory goes back to the system while the proxy is idle.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Within a second or two, and not ten: what a burst has left is not kept.
// SAFETY: jemalloc reads a pointer to text that ends with a zero from this name; a slice begins with that pointer.
#[unsafe(export_name = "_rjem_malloc_conf")]
static ALLOCATOR_SETTINGS: &[u8] = b"dirty_decay_ms:1000,muzzy_decay_ms:0\0";

#[derive(Parser)]
#[command(name = "ztunnel", version, about = "The node's part of the Understory mesh")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Carries the traffic of the node's enrolled pods
    Proxy(Box<ProxyArgs>),
    /// Brings the node's labelled pods into the mesh
    Agent(Box<AgentArgs>),
    /// The CNI plugin, which container runtimes call; its configuration is docs/cni.md's matter
    Cni,
    /// Says what would happen to a connection, and why, as the proxy of this node knows it
    Explain(ExplainArgs),
}

fn main() -> ExitCode {
    if let Some(code) = cni::run_if_called() {
        return code;
    }
    let result = match Cli::parse().command {
        Command::Proxy(args) => run_proxy(*args),
        Command::Agent(args) => agent::main(*args).map_err(Into::into),
        Command::Cni => return cni::main(),
        Command::Explain(args) => explain::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Each error names its own cause.
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_proxy(args: ProxyArgs) -> anyhow::Result<()> {
    let config = args.check(std::env::vars())?;
    let log = &config.telemetry;
    let logging = Logging::start(log.log_format, log.log_levels.clone(), log.log_queue.0 as usize)?;
    proxy::run(config, logging)?;
    Ok(())
}

//! `control`: the control plane for clusters without istiod.

use std::process::ExitCode;

use clap::Parser;
use control::settings::{Cli, Command, ServeArgs};
use ztunnel::telemetry::log::Logging;

fn main() -> ExitCode {
    let Command::Serve(args) = Cli::parse().command;
    match serve(*args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    args.check()?;
    let logging = Logging::start(args.log_format, args.log_levels.clone(), LOG_QUEUE)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    runtime.block_on(control::serve::run(args, logging))?;
    Ok(())
}

const WORKERS: usize = 2;
/// Bytes of log lines that wait for a slow reader.
const LOG_QUEUE: usize = 4 << 20;

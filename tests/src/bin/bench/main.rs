//! `cargo xtask bench`: direct connections, two plain relays in the proxies' place, and the mesh, interleaved in one
//! run, as a table and as JSON.

mod figures;
mod measure;
mod paths;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use figures::Figures;
use paths::Bench;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask bench", about = "Measures direct connections, two plain relays and the mesh")]
pub struct Cli {
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds; every figure is the median of its rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Shorter measurements: good for a look, not for a comparison
    #[arg(long)]
    quick: bool,
    /// Only figures whose name contains one of these
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<String>,
    /// Only these paths
    #[arg(long, value_delimiter = ',', default_value = "direct,relay,mesh")]
    paths: Vec<String>,
}

impl Cli {
    /// Is a figure with one of these names asked for?
    fn wants(&self, names: &[&str]) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| names.iter().any(|name| name.contains(only.as_str())))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cfg!(debug_assertions) {
        eprintln!("warning: not a release build; `cargo xtask bench` makes one");
    }
    let bench = Bench::set_up(&cli);
    let mut figures = Figures::default();
    measure::memory(&bench, &cli, &mut figures);
    for round in 0..cli.rounds.max(1) {
        eprintln!("round {} of {}", round + 1, cli.rounds.max(1));
        measure::round(&bench, &cli, &mut figures);
    }
    figures.derive();
    figures.print();
    if let Some(path) = &cli.json {
        let text = serde_json::to_string_pretty(&figures.json()).expect("figures are plain data");
        if let Err(e) = std::fs::write(path, text + "\n") {
            eprintln!("error: write {}: {e}", path.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

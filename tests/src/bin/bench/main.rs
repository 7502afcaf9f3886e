//! `cargo xtask bench`: direct connections, two plain relays in the proxies' place, Envoy as sidecars and as HBONE pair,
//! and the mesh, interleaved in one run, as a table and as JSON.

mod figures;
mod identity;
mod machine;
mod marks;
mod measure;
mod memory;
mod paths;
mod policy;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use figures::Figures;
use paths::{Bench, Path};

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    about = "Measures direct connections, two plain relays, two sidecars, Envoy as HBONE pair, and the mesh"
)]
pub struct Cli {
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds; every figure is the median of its rounds
    #[arg(long, default_value_t = 3, default_value_if("quick", "true", "2"), value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Shorter measurements: good for a look, not for a comparison
    #[arg(long)]
    quick: bool,
    /// Only figures whose name contains one of these
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<String>,
    /// Only these ways from client to server
    #[arg(long, value_enum, value_delimiter = ',', default_value = "direct,relay,sidecar,hbone_envoy,mesh")]
    paths: Vec<Path>,
}

impl Cli {
    /// Is a figure with one of these names asked for?
    fn wants(&self, names: &[&str]) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| names.iter().any(|name| name.contains(only.as_str())))
    }

    /// Is any other figure asked for than these?
    fn wants_others(&self, names: &[&str]) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| !names.iter().any(|name| name.contains(only.as_str())))
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(reason) = testbed::can_run() {
        eprintln!("error: {reason}");
        return ExitCode::FAILURE;
    }
    // Not after minutes of measuring.
    if let Some(path) = &cli.json
        && let Err(e) = std::fs::File::create(path)
    {
        eprintln!("error: --json {}: {e}", path.display());
        return ExitCode::FAILURE;
    }
    if cfg!(debug_assertions) {
        eprintln!("warning: not a release build; `cargo xtask bench` makes one");
    }
    let mut figures = Figures::default();
    // First, while this process is small.
    policy::memory(&cli, &mut figures);
    let bench = cli.wants_others(&[&policy::NAMES[..], &identity::NAMES].concat()).then(|| Bench::set_up(&cli));
    if let Some(bench) = &bench {
        memory::memory(bench, &cli, &mut figures);
    }
    for round in 0..cli.rounds {
        eprintln!("round {} of {}", round + 1, cli.rounds);
        policy::round(&cli, &mut figures);
        if let Some(bench) = &bench {
            measure::round(bench, &cli, round, &mut figures);
        }
    }
    if let Some(bench) = &bench {
        for path in [Path::Sidecar, Path::HboneEnvoy] {
            let agreed = bench.negotiated(path);
            if !agreed.is_empty() {
                figures.negotiated.insert(path.name(), agreed);
            }
        }
    }
    drop(bench);
    if cli.paths.contains(&Path::Mesh) && cli.wants(&identity::NAMES) {
        let identities = identity::Identities::set_up();
        (0..cli.rounds).for_each(|round| identities.round(&cli, round, &mut figures));
    }
    if figures.is_empty() {
        eprintln!("error: no figure of the paths {:?} has a name with one of {:?} in it", cli.paths, cli.only);
        return ExitCode::FAILURE;
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

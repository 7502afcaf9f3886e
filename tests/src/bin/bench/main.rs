//! `cargo xtask bench`: direct connections, two plain relays in the proxies' place, Envoy as sidecars and as HBONE pair,
//! and the mesh, interleaved in one run: tables, JSON, a report with plots, and the bill of a cluster.

mod bill;
mod discovery;
mod figures;
mod fit;
mod flood;
mod identity;
mod large;
mod machine;
mod marks;
mod measure;
mod memory;
mod paths;
mod policy;
mod process;
mod report;
mod scale;

use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use bill::{Cluster, Model};
use clap::{Parser, Subcommand};
use figures::Figures;
use paths::{Bench, Path};
use scale::Scale;

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask bench",
    bin_name = "cargo xtask bench",
    about = "Measures direct connections, two plain relays, two sidecars, Envoy as HBONE pair, and the mesh",
    args_conflicts_with_subcommands = true
)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Write the figures as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Write a page with tables, plots and the bill, and the plots as SVG and PNG, into this folder
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,
    /// Rounds; every figure is the median of its rounds. Default 3, with --quick 1
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: Option<u32>,
    /// Shorter measurements: good for a look, not for a comparison
    #[arg(long)]
    quick: bool,
    /// Only figures whose name contains one of these; `scale` is the scale model
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<String>,
    /// Only these ways from client to server
    #[arg(long, value_enum, value_delimiter = ',', default_value = "direct,relay,sidecar,hbone_envoy,mesh")]
    paths: Vec<Path>,
    /// What the bill in the report is for
    #[command(flatten, next_help_heading = "The bill in the report")]
    cluster: Cluster,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// What a cluster needs, and what that costs, with sidecars and with the mesh
    Bill {
        /// A file that `--json` wrote; without it, the scale model is measured now
        #[arg(long, value_name = "FILE")]
        from: Option<PathBuf>,
        #[command(flatten)]
        cluster: Cluster,
    },
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

    /// Is the scale model asked for?
    fn wants_scale(&self) -> bool {
        self.wants(&[scale::NAME])
    }

    fn rounds(&self) -> u32 {
        self.rounds.unwrap_or(if self.quick { 1 } else { 3 })
    }

    /// To measure nothing but the scale model.
    fn only_scale() -> Self {
        Self::parse_from(["bench", "--quick", "--only", scale::NAME])
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        Some(Command::Bill { from, cluster }) => print_bill(from.as_deref(), cluster),
        None => bench(&cli),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn bench(cli: &Cli) -> Result<()> {
    // Not after minutes of measuring.
    if let Some(path) = &cli.json {
        fs::File::create(path).with_context(|| format!("--json {}", path.display()))?;
    }
    if let Some(dir) = &cli.report {
        report::check(dir).context("--report")?;
    }
    let (figures, scale) = measure_all(cli)?;
    if figures.is_empty() && scale.is_empty() {
        bail!("no figure of the paths {:?} has a name with one of {:?} in it", cli.paths, cli.only);
    }
    figures.print();
    scale.print();
    let model = Model::of(&scale);
    if let Ok(model) = &model {
        print!("\n{}", model.bill(&cli.cluster).text(&cli.cluster));
    }
    if let Some(path) = &cli.json {
        let mut all = figures.json();
        all["scale"] = scale.to_json();
        let text = serde_json::to_string_pretty(&all).expect("figures are plain data");
        fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))?;
    }
    if let Some(dir) = &cli.report {
        report::write(dir, &figures, &scale, &cli.cluster).context("--report")?;
        println!("\nreport: {}", dir.join("report.html").display());
    }
    Ok(())
}

fn measure_all(cli: &Cli) -> Result<(Figures, Scale)> {
    testbed::can_run().map_err(anyhow::Error::msg)?;
    if cfg!(debug_assertions) {
        eprintln!("warning: not a release build; `cargo xtask bench` makes one");
    }
    eprintln!("{}", machine::line());
    let (mut figures, mut scale) = (Figures::default(), Scale::default());
    // First, while this process is small.
    policy::memory(cli, &mut figures);
    let elsewhere = [&policy::NAMES[..], &identity::NAMES, &large::NAMES].concat();
    let bench = cli.wants_others(&elsewhere).then(|| Bench::set_up(cli));
    if let Some(bench) = &bench {
        memory::memory(bench, cli, &mut figures, &mut scale);
        scale::measure(bench, cli, &mut scale);
    }
    for round in 0..cli.rounds() {
        eprintln!("round {} of {}", round + 1, cli.rounds());
        policy::round(cli, &mut figures);
        if let Some(bench) = &bench {
            measure::round(bench, cli, round, &mut figures);
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
    if cli.paths.contains(&Path::Mesh) {
        if cli.wants(&large::NAMES) || cli.wants_scale() {
            eprintln!("a proxy that is told of a large cluster");
            large::measure(cli, &mut figures, &mut scale);
        }
        if cli.wants(&identity::NAMES) {
            let identities = identity::Identities::set_up();
            (0..cli.rounds()).for_each(|round| identities.round(cli, round, &mut figures));
        }
    }
    figures.derive();
    Ok((figures, scale))
}

fn print_bill(from: Option<&FilePath>, cluster: &Cluster) -> Result<()> {
    let scale = match from {
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
            let all: serde_json::Value =
                serde_json::from_str(&text).with_context(|| format!("{} is no JSON", path.display()))?;
            Scale::from_json(&all["scale"])
        }
        None => {
            let (_, scale) = measure_all(&Cli::only_scale())?;
            scale.print();
            scale
        }
    };
    let model = Model::of(&scale).map_err(anyhow::Error::msg).context("no bill can be made")?;
    print!("\n{}", model.bill(cluster).text(cluster));
    Ok(())
}

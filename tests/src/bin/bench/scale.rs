//! The scale model: memory and CPU at several sizes of what they grow with, for sidecars and for the mesh.
//!
//! Memory is a process' own (anonymous); what a node's processes share, the pages of their program, counts once a node.
//! PSS would depend on how many of a kind happen to run on this machine.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::load::Job;
use testbed::{Authority, wait_for};

use crate::Cli;
use crate::fit::{Fit, Series};
use crate::measure::run;
use crate::memory::{MB, rest};
use crate::paths::{Bench, Path, sidecar};

/// What `--only` calls the model.
pub const NAME: &str = "scale";
/// Requests per second through one pair of proxies.
const RATES: [u32; 4] = [250, 500, 1000, 2000];
const IDLE: Duration = Duration::from_secs(6);
/// Services that a sidecar is told of, and endpoints of each.
const SERVICES: [(usize, usize); 4] = [(0, 0), (100, 10), (300, 10), (300, 30)];

/// Path and name → measurements.
#[derive(Debug, Default)]
pub struct Scale {
    all: BTreeMap<(String, String), Series>,
}

impl Scale {
    pub fn add(&mut self, path: Path, name: &str, unit: &str, per: &[&str], size: &[f64], value: f64) {
        let series = self.all.entry((path.name().to_owned(), name.to_owned()));
        series.or_insert_with(|| Series::new(unit, per)).add(size, value);
    }

    /// CPU of all proxies of a path while requests come at a rate. Without any it is what was measured then: per request
    /// less is needed the more come at once, and a straight line would invent a base.
    fn add_cpu(&mut self, path: Path, per_second: f64, cores: f64) {
        let series = self.all.entry((path.name().to_owned(), "cpu_by_rate".to_owned()));
        series.or_insert_with(|| Series::anchored("cores", &["requests/s"])).add(&[per_second], cores);
    }

    pub fn get(&self, path: Path, name: &str) -> Option<&Series> {
        self.all.get(&(path.name().to_owned(), name.to_owned()))
    }

    pub fn fit(&self, path: Path, name: &str) -> Option<Fit> {
        self.get(path, name)?.fit()
    }

    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str, &Series)> {
        self.all.iter().map(|((path, name), series)| (path.as_str(), name.as_str(), series))
    }

    /// By path and name.
    pub fn to_json(&self) -> Value {
        let mut all = json!({});
        for (path, name, series) in self.iter() {
            all[path][name] = series.to_json();
        }
        all
    }

    /// What is not a series is left out.
    pub fn from_json(value: &Value) -> Self {
        let mut scale = Self::default();
        for (path, names) in value.as_object().into_iter().flatten() {
            for (name, series) in names.as_object().into_iter().flatten() {
                if let Some(series) = Series::from_json(series) {
                    scale.all.insert((path.clone(), name.clone()), series);
                }
            }
        }
        scale
    }

    /// The fits, one a line.
    pub fn print(&self) {
        if self.is_empty() {
            return;
        }
        println!("\nscale: least squares over what was measured at several sizes");
        for (path, name, series) in self.iter() {
            println!("{path:<11} {name:<24} {}", fit_text(series));
        }
    }
}

/// `7.3 MB + 12.3 KB per pod; off by 0.1 MB`, and so on.
pub fn fit_text(series: &Series) -> String {
    let Some(fit) = series.fit() else { return "too few sizes for a fit".to_owned() };
    let unit = &series.unit;
    let slopes =
        fit.slopes.iter().zip(&series.per).map(|(slope, per)| format!(" + {} {unit} × {per}", significant(*slope)));
    let largest = series.points.iter().map(|(_, value)| value.abs()).fold(0.0, f64::max);
    format!(
        "{} {unit}{}; off by {} {unit} ({:.1} % of the largest)",
        significant(fit.base),
        slopes.collect::<String>(),
        significant(fit.error),
        100.0 * fit.error / largest.max(f64::MIN_POSITIVE)
    )
}

/// Three digits that mean something, however small.
fn significant(value: f64) -> String {
    if value == 0.0 || value.abs() >= 0.01 { crate::figures::short(value) } else { format!("{value:.2e}") }
}

/// What is not a by-product of the figures: CPU by requests per second, a sidecar's memory by services.
pub fn measure(bench: &Bench, cli: &Cli, scale: &mut Scale) {
    if !cli.wants_scale() {
        return;
    }
    eprintln!("measuring at several sizes");
    let time = Duration::from_millis(if cli.quick { 1500 } else { 5000 });
    let paths: Vec<Path> = bench.paths.iter().copied().filter(|path| *path != Path::Direct).collect();
    // Nobody talks on any path: one window for all, and a long one, since a cluster multiplies what little this is.
    let before: Vec<Duration> = paths.iter().map(|path| bench.cpu(*path)).collect();
    std::thread::sleep(IDLE);
    for (path, before) in paths.iter().zip(before) {
        scale.add_cpu(*path, 0.0, (bench.cpu(*path) - before).as_secs_f64() / IDLE.as_secs_f64());
    }
    for per_second in RATES {
        for path in &paths {
            let (talk, port) = Bench::talk(*path);
            let to = bench.to(*path, port);
            let (got, cpu) = run(bench, *path, &Job::Rate { to, talk, connections: 16, per_second, time });
            scale.add_cpu(*path, f64::from(per_second), cpu / got.seconds);
        }
    }
}

/// Of a sidecar that nobody talks through, started anew for each size.
pub fn sidecar_memory(bench: &Bench, cli: &Cli, scale: &mut Scale) {
    if !cli.wants_scale() || !bench.paths.contains(&Path::Sidecar) {
        return;
    }
    let pod = bench.tb.pod("sidecar/size").start();
    let authority = Authority::root("sizes");
    let identity = pod.identity();
    let leaf = authority.issue(&identity);
    for (number, (services, endpoints)) in SERVICES.into_iter().enumerate() {
        let place = pod.beside(&format!("sidecar-{number}"));
        let name = format!("sidecar-size-{number}");
        let envoy = sidecar(&bench.tb, &name, &place, (&authority, &leaf, &identity), (services, endpoints));
        let memory = rest(&[envoy.daemon()]).anonymous / MB;
        let size = [services as f64, (services * endpoints) as f64];
        scale.add(Path::Sidecar, "memory_by_services", "MB", &["services", "endpoints"], &size, memory);
        envoy.daemon().kill9();
        // The next one makes it anew.
        place.netns().nft("delete table inet sidecar\n");
        wait_for("the sidecar to be gone", || (!envoy.daemon().runs()).then_some(()));
    }
    pod.delete();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_survives_the_file_and_is_told_in_words() {
        let mut scale = Scale::default();
        for pods in [0.0, 50.0, 100.0] {
            scale.add(Path::Mesh, "memory_by_pods", "MB", &["pods"], &[pods], 8.0 + 0.02 * pods);
        }
        let read = Scale::from_json(&scale.to_json());
        assert_eq!(read.get(Path::Mesh, "memory_by_pods"), scale.get(Path::Mesh, "memory_by_pods"));
        assert!(read.get(Path::Sidecar, "memory_by_pods").is_none());
        let text = fit_text(read.get(Path::Mesh, "memory_by_pods").expect("it was read"));
        assert!(text.starts_with("8.00 MB + 0.020 MB × pods; off by "), "{text}");
    }
}

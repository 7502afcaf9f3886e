//! The figures of a run: medians, the table, the JSON, and how the mesh stands to its marks.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};

use crate::paths::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    CpuMs,
    Ms,
    CpuS,
    Us,
    Ns,
    PerSecond,
    Gbit,
    Mb,
    Kb,
    Ratio,
}

impl Unit {
    fn name(self) -> &'static str {
        match self {
            Self::CpuMs => "CPU ms",
            Self::Ms => "ms",
            Self::CpuS => "CPU s",
            Self::Us => "µs",
            Self::Ns => "ns",
            Self::PerSecond => "1/s",
            Self::Gbit => "Gbit/s",
            Self::Mb => "MB",
            Self::Kb => "KB",
            Self::Ratio => "",
        }
    }
}

/// What a figure of the mesh is held against.
enum Mark {
    /// At most so many times the relay's.
    OfRelay(f64),
    /// At most so much more than another figure of the mesh, and so many times it.
    Beside(&'static str, f64, f64),
    AtMost(f64),
    AtLeast(f64),
}

const MARKS: &[(&str, Mark)] = &[
    ("cpu_ms_per_1k_saturation", Mark::OfRelay(1.0)),
    ("cpu_ms_per_1k_at_1000rps", Mark::OfRelay(2.0)),
    ("bulk_cpu_s_per_gb_1flow", Mark::OfRelay(2.5)),
    ("bulk_cpu_s_per_gb_8flows", Mark::OfRelay(2.5)),
    ("new_conn_cpu_ms_per_1k", Mark::OfRelay(1.2)),
    ("short_conn_per_s", Mark::AtLeast(3000.0)),
    ("rss_idle_mb", Mark::AtMost(20.0)),
    ("rss_per_pod_kb", Mark::AtMost(50.0)),
    ("rss_per_idle_conn_kb", Mark::AtMost(4.0)),
    ("policy_verdict_ns_1000", Mark::AtMost(1000.0)),
    ("policy_verdict_ns_10000", Mark::AtMost(2000.0)),
    ("policies_10k_mb", Mark::AtMost(20.0)),
    ("rate_with_20_policies_over_without", Mark::AtLeast(0.97)),
    ("cold_identity_ms", Mark::Beside("ca_round_trip_ms", 20.0, 1.0)),
    // What is measured twice differs by so much.
    ("prefetched_first_connection_ms", Mark::Beside("warm_first_connection_ms", 0.0, 1.25)),
];

/// Path and name → unit and one value per round.
#[derive(Debug, Default)]
pub struct Figures {
    values: BTreeMap<(&'static str, &'static str), (Unit, Vec<f64>)>,
    /// Names in the order of their first measurement.
    order: Vec<&'static str>,
}

impl Figures {
    pub fn add(&mut self, path: Path, name: &'static str, unit: Unit, value: f64) {
        eprintln!("  {:<7} {name:<34} {} {}", path.name(), short(value), unit.name());
        self.put(path.name(), name, unit, value);
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    fn put(&mut self, path: &'static str, name: &'static str, unit: Unit, value: f64) {
        if !self.order.contains(&name) {
            self.order.push(name);
        }
        self.values.entry((path, name)).or_insert((unit, Vec::new())).1.push(value);
    }

    /// What a path adds to the direct one, round by round.
    pub fn derive(&mut self) {
        for (of, name) in
            [("p50_us_at_1000rps", "p50_added_us_at_1000rps"), ("p99_us_at_1000rps", "p99_added_us_at_1000rps")]
        {
            for path in ["relay", "mesh"] {
                let (Some((_, direct)), Some((_, other))) =
                    (self.values.get(&("direct", of)), self.values.get(&(path, of)))
                else {
                    continue;
                };
                let added: Vec<f64> = other.iter().zip(direct).map(|(other, direct)| other - direct).collect();
                added.into_iter().for_each(|value| self.put(path, name, Unit::Us, value));
            }
        }
    }

    fn median_of(&self, path: &'static str, name: &'static str) -> Option<f64> {
        self.values.get(&(path, name)).map(|(_, values)| median(values))
    }

    /// The table, with the marks.
    pub fn print(&self) {
        println!("\n{}", machine_line());
        println!(
            "\n{:<34} {:>10} {:>10} {:>10} {:>8}  mark",
            "median of the rounds", "direct", "relay", "mesh", "÷ relay"
        );
        for name in &self.order {
            let cell = |path| self.median_of(path, name).map_or("–".to_owned(), short);
            let ratio = self.median_of("mesh", name).zip(self.median_of("relay", name));
            let ratio_text = ratio.map_or(String::new(), |(mesh, relay)| format!("{:.2}", mesh / relay));
            println!(
                "{:<34} {:>10} {:>10} {:>10} {ratio_text:>8}  {}",
                self.titled(name),
                cell("direct"),
                cell("relay"),
                cell("mesh"),
                self.mark(name)
            );
        }
    }

    fn titled(&self, name: &str) -> String {
        let unit = self.values.iter().find(|((_, n), _)| *n == name).map(|(_, (unit, _))| unit.name());
        match unit {
            None | Some("") => name.to_owned(),
            Some(unit) => format!("{name} [{unit}]"),
        }
    }

    fn mark(&self, name: &'static str) -> String {
        let Some((_, mark)) = MARKS.iter().find(|(n, _)| *n == name) else { return String::new() };
        let Some(mesh) = self.median_of("mesh", name) else { return String::new() };
        let (holds, text) = match mark {
            Mark::OfRelay(times) => match self.median_of("relay", name) {
                Some(relay) => (mesh <= relay * times, format!("≤ {times} × relay")),
                None => return String::new(),
            },
            Mark::Beside(other, more, times) => match self.median_of("mesh", other) {
                Some(value) => (mesh <= value * times + more, format!("≤ {times} × {other} + {more}")),
                None => return String::new(),
            },
            Mark::AtMost(most) => (mesh <= *most, format!("≤ {most}")),
            Mark::AtLeast(least) => (mesh >= *least, format!("≥ {least}")),
        };
        format!("{text} {}", if holds { "ok" } else { "MISSED" })
    }

    pub fn json(&self) -> Value {
        let mut paths = json!({});
        for ((path, name), (unit, values)) in &self.values {
            let min = values.iter().copied().fold(f64::INFINITY, f64::min);
            let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            paths[path][name] = json!({ "median": median(values), "min": min, "max": max, "unit": unit.name() });
        }
        json!({ "machine": machine(), "paths": paths })
    }
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Three significant digits.
fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

fn machine() -> Value {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": model.trim_start_matches([' ', '\t', ':']),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "tcp_congestion_control": read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
    })
}

fn machine_line() -> String {
    let machine = machine();
    let text = |key: &str| machine[key].as_str().unwrap_or_default().to_owned();
    format!(
        "{} cores, {}, Linux {}, TCP {}, {} build",
        machine["cores"],
        text("cpu"),
        text("kernel"),
        text("tcp_congestion_control"),
        text("build")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_marks() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        let mut figures = Figures::default();
        figures.put("relay", "cpu_ms_per_1k_saturation", Unit::CpuMs, 10.0);
        figures.put("mesh", "cpu_ms_per_1k_saturation", Unit::CpuMs, 12.0);
        assert!(figures.mark("cpu_ms_per_1k_saturation").ends_with("MISSED"));
        figures.put("direct", "p50_us_at_1000rps", Unit::Us, 40.0);
        figures.put("mesh", "p50_us_at_1000rps", Unit::Us, 140.0);
        figures.derive();
        assert_eq!(figures.median_of("mesh", "p50_added_us_at_1000rps"), Some(100.0));
        assert_eq!(figures.json()["paths"]["mesh"]["p50_added_us_at_1000rps"]["median"], 100.0);
    }
}

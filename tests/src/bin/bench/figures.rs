//! The figures of a run: one value per round, their medians and spread, the ratios, the tables, the JSON.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::machine;
use crate::marks::{Judged, judge};
use crate::paths::Path;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    CpuMs,
    Ms,
    CpuS,
    S,
    Us,
    CpuUs,
    Ns,
    PerSecond,
    Gbit,
    Mb,
    Kb,
    Ratio,
}

impl Unit {
    pub fn name(self) -> &'static str {
        match self {
            Self::CpuMs => "CPU ms",
            Self::Ms => "ms",
            Self::CpuS => "CPU s",
            Self::S => "s",
            Self::Us => "µs",
            Self::CpuUs => "CPU µs",
            Self::Ns => "ns",
            Self::PerSecond => "1/s",
            Self::Gbit => "Gbit/s",
            Self::Mb => "MB",
            Self::Kb => "KB",
            Self::Ratio => "",
        }
    }
}

/// The rounds' values in short.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// Path and name → unit and one value per round.
#[derive(Debug, Default)]
pub struct Figures {
    values: BTreeMap<(&'static str, &'static str), (Unit, Vec<f64>)>,
    /// Names in the order of their first measurement.
    order: Vec<&'static str>,
    /// What was agreed on in TLS: by path, name and count.
    pub negotiated: BTreeMap<&'static str, Vec<(String, u64)>>,
}

impl Figures {
    pub fn add(&mut self, path: Path, name: &'static str, unit: Unit, value: f64) {
        eprintln!("  {:<11} {name:<34} {} {}", path.name(), short(value), unit.name());
        self.put(path.name(), name, unit, value);
    }

    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub fn put(&mut self, path: &'static str, name: &'static str, unit: Unit, value: f64) {
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
            for path in Path::ALL.map(Path::name).into_iter().filter(|path| *path != Path::Direct.name()) {
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

    pub fn names(&self) -> &[&'static str] {
        &self.order
    }

    pub fn summary(&self, path: &str, name: &str) -> Option<Summary> {
        let (_, (_, values)) = self.values.iter().find(|((p, n), _)| *p == path && *n == name)?;
        let min = values.iter().copied().fold(f64::INFINITY, f64::min);
        let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        Some(Summary { median: median(values), min, max })
    }

    pub fn median_of(&self, path: &str, name: &str) -> Option<f64> {
        self.summary(path, name).map(|summary| summary.median)
    }

    /// The mesh's median over that of another path; nothing where that is lost in the noise.
    pub fn ratio(&self, name: &str, to: Path) -> Option<f64> {
        let (mesh, other) = (self.median_of(Path::Mesh.name(), name)?, self.median_of(to.name(), name)?);
        (other > 0.0 && mesh >= 0.0).then_some(mesh / other)
    }

    pub fn titled(&self, name: &str) -> String {
        let unit = self.values.iter().find(|((_, n), _)| *n == name).map(|(_, (unit, _))| unit.name());
        match unit {
            None | Some("") => name.to_owned(),
            Some(unit) => format!("{name} [{unit}]"),
        }
    }

    /// Both tables, for the terminal.
    pub fn print(&self) {
        println!("\n{}", machine::line());
        for (path, agreed) in &self.negotiated {
            println!("{path}: {}", negotiated_text(agreed));
        }
        print!("\n{}\n{}", self.mesh_table(), self.value_table());
    }

    /// The mesh over the others, and its marks.
    fn mesh_table(&self) -> String {
        let mut text = format!(
            "{:<40} {:>9} {:>8} {:>8} {:>8}  mark\n",
            "the mesh: ratios of medians", "mesh", "÷ relay", "÷ hbone", "÷ sidec."
        );
        for name in &self.order {
            let Some(mesh) = self.median_of(Path::Mesh.name(), name) else { continue };
            let ratio = |to| self.ratio(name, to).map_or(String::new(), |ratio| format!("{ratio:.2}"));
            let (musts, aim) = judge(self, name);
            let _ = writeln!(
                text,
                "{:<40} {:>9} {:>8} {:>8} {:>8}  {}",
                self.titled(name),
                short(mesh),
                ratio(Path::Relay),
                ratio(Path::HboneEnvoy),
                ratio(Path::Sidecar),
                marks_text(&musts, aim.as_ref())
            );
        }
        text
    }

    /// What was measured: medians, with the spread where there was more than one round.
    fn value_table(&self) -> String {
        let paths = Path::ALL.map(Path::name);
        let has = |path: &&str| self.values.keys().any(|(p, _)| p == path);
        let paths: Vec<&str> = paths.into_iter().filter(has).collect();
        let mut text = format!("{:<40}", "median (lowest–highest)");
        paths.iter().for_each(|path| _ = write!(text, " {path:>22}"));
        text.push('\n');
        for name in &self.order {
            let _ = write!(text, "{:<40}", self.titled(name));
            for path in &paths {
                let cell = self.summary(path, name).map_or("–".to_owned(), Summary::text);
                let _ = write!(text, " {cell:>22}");
            }
            text.push('\n');
        }
        text
    }

    pub fn json(&self) -> Value {
        let mut paths = json!({});
        for ((path, name), (unit, _)) in &self.values {
            let Some(Summary { median, min, max }) = self.summary(path, name) else { continue };
            paths[path][name] = json!({ "median": median, "min": min, "max": max, "unit": unit.name() });
        }
        let tls = |agreed: &Vec<(String, u64)>| agreed.iter().cloned().collect::<BTreeMap<String, u64>>();
        let tls: BTreeMap<_, _> = self.negotiated.iter().map(|(path, agreed)| (*path, tls(agreed))).collect();
        json!({ "machine": machine::machine(), "tls": tls, "paths": paths })
    }
}

impl Summary {
    pub fn text(self) -> String {
        let Self { median, min, max } = self;
        if min == max { short(median) } else { format!("{} ({}–{})", short(median), short(min), short(max)) }
    }
}

/// `≤ 0.8 × relay: met`, and so on.
pub fn marks_text(musts: &[Judged], aim: Option<&Judged>) -> String {
    let judged = |judged: &Judged| {
        let verdict = match judged.met {
            Some(true) => "met",
            Some(false) => "MISSED",
            None => "no verdict",
        };
        format!("{} {verdict}", judged.mark)
    };
    let mut parts: Vec<String> = musts.iter().map(judged).collect();
    parts.extend(aim.filter(|aim| aim.met == Some(true)).map(|aim| format!("aim {} met", aim.mark)));
    parts.join("; ")
}

/// What the handshakes of Envoy agreed on.
pub fn negotiated_text(agreed: &[(String, u64)]) -> String {
    let of = |prefix: &str| {
        let found = agreed.iter().filter_map(|(name, count)| Some(format!("{} ({count})", name.strip_prefix(prefix)?)));
        found.collect::<Vec<_>>().join(", ")
    };
    let count = |name: &str| agreed.iter().filter(|(n, _)| n == name).map(|(_, count)| count).sum::<u64>();
    format!(
        "{}, {}, key exchange {}, signatures {}, {} of {} handshakes resumed",
        of("versions."),
        of("ciphers."),
        of("curves."),
        of("sigalgs."),
        count("session_reused"),
        count("handshake")
    )
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Three significant digits.
pub fn short(value: f64) -> String {
    let digits = match value.abs() {
        v if v >= 100.0 || v == 0.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_spread_and_ratios() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0]), 2.5);
        let mut figures = Figures::default();
        for value in [10.0, 14.0, 11.0] {
            figures.put("relay", "rps_saturation", Unit::PerSecond, value);
        }
        figures.put("mesh", "rps_saturation", Unit::PerSecond, 22.0);
        let expected = Summary { median: 11.0, min: 10.0, max: 14.0 };
        assert_eq!(figures.summary("relay", "rps_saturation"), Some(expected));
        assert_eq!(expected.text(), "11.0 (10.0–14.0)");
        assert_eq!(figures.ratio("rps_saturation", Path::Relay), Some(2.0));
        assert_eq!(figures.ratio("rps_saturation", Path::Sidecar), None);
    }

    #[test]
    fn what_a_path_adds_is_taken_round_by_round() {
        let mut figures = Figures::default();
        for (direct, mesh) in [(40.0, 140.0), (90.0, 210.0), (50.0, 140.0)] {
            figures.put("direct", "p50_us_at_1000rps", Unit::Us, direct);
            figures.put("mesh", "p50_us_at_1000rps", Unit::Us, mesh);
        }
        figures.derive();
        assert_eq!(figures.median_of("mesh", "p50_added_us_at_1000rps"), Some(100.0));
        assert_eq!(figures.json()["paths"]["mesh"]["p50_added_us_at_1000rps"]["max"], 120.0);
    }

    #[test]
    fn what_was_agreed_on_is_told_in_a_line() {
        let agreed =
            [("versions.TLSv1.3", 4), ("ciphers.TLS_A", 4), ("curves.X", 4), ("session_reused", 1), ("handshake", 4)];
        let agreed: Vec<(String, u64)> = agreed.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect();
        let text = negotiated_text(&agreed);
        assert_eq!(text, "TLSv1.3 (4), TLS_A (4), key exchange X (4), signatures , 1 of 4 handshakes resumed");
    }
}

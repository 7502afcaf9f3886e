//! What the mesh's figures are held against.

use crate::figures::{Figures, short};
use crate::paths::Path;

/// What a figure must keep to.
#[derive(Debug, Clone, Copy)]
pub enum Mark {
    /// At most so many times the same figure of another path.
    Times(f64, Path),
    /// At most so many times another figure of the mesh, and so much more.
    Beside(f64, &'static str, f64),
    AtMost(f64),
    AtLeast(f64),
}

/// What became of a mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    pub mark: String,
    /// Nothing if what it is held against was not measured, or is lost in the noise: what a path adds can come out
    /// negative.
    pub met: Option<bool>,
}

/// A figure's marks, and what would be better still.
struct Marks {
    name: &'static str,
    musts: &'static [Mark],
    aim: Option<Mark>,
}

const fn marks(name: &'static str, musts: &'static [Mark], aim: Option<Mark>) -> Marks {
    Marks { name, musts, aim }
}

/// How the mesh stands to a figure's marks: those that it must reach, then the aim.
pub fn judge(figures: &Figures, name: &str) -> (Vec<Judged>, Option<Judged>) {
    let Some(marks) = MARKS.iter().find(|marks| marks.name == name) else { return (Vec::new(), None) };
    let judge = |mark: &Mark| judge_one(figures, name, *mark);
    (marks.musts.iter().map(judge).collect(), marks.aim.as_ref().map(judge))
}

fn judge_one(figures: &Figures, name: &str, mark: Mark) -> Judged {
    let (text, limit, is_most) = match mark {
        Mark::Times(times, path) => {
            (format!("≤ {times} × {}", path.name()), limit_of(figures, path, name).map(|value| value * times), true)
        }
        Mark::Beside(times, other, more) => {
            let value = figures.median_of(Path::Mesh.name(), other);
            let text = match (times, more) {
                (1.0, more) if more > 0.0 => format!("≤ {other} + {}", short(more)),
                _ => format!("≤ {times} × {other}"),
            };
            (text, value.map(|value| value * times + more), true)
        }
        Mark::AtMost(most) => (format!("≤ {most}"), Some(most), true),
        Mark::AtLeast(least) => (format!("≥ {least}"), Some(least), false),
    };
    let mesh = figures.median_of(Path::Mesh.name(), name);
    let met = mesh.zip(limit).map(|(mesh, limit)| if is_most { mesh <= limit } else { mesh >= limit });
    Judged { mark: text, met }
}

/// What the mesh is held against; nothing if either is lost in the noise.
fn limit_of(figures: &Figures, path: Path, name: &str) -> Option<f64> {
    let [mesh, other] = [Path::Mesh, path].map(|path| figures.median_of(path.name(), name));
    mesh.filter(|value| *value > 0.0).and(other).filter(|value| *value > 0.0)
}

const BULK_RELAY: Mark = Mark::Times(1.7, Path::Relay);
const BULK_ENVOY: Mark = Mark::Times(0.6, Path::HboneEnvoy);
const BULK: &[Mark] = &[BULK_RELAY, BULK_ENVOY];
const BULK_AIM: Option<Mark> = Some(Mark::Times(1.4, Path::Relay));
const ADDED: &[Mark] = &[Mark::Times(1.5, Path::Relay)];
const ADDED_AIM: Option<Mark> = Some(Mark::Times(1.2, Path::Relay));

const MARKS: &[Marks] = &[
    marks(
        "cpu_ms_per_1k_saturation",
        &[Mark::Times(0.8, Path::Relay), Mark::Times(0.65, Path::HboneEnvoy), Mark::Times(0.15, Path::Sidecar)],
        Some(Mark::Times(0.65, Path::Relay)),
    ),
    marks(
        "cpu_ms_per_1k_at_1000rps",
        &[Mark::Times(1.5, Path::Relay), Mark::Times(0.55, Path::HboneEnvoy)],
        Some(Mark::Times(1.2, Path::Relay)),
    ),
    marks("p50_added_us_at_1000rps", ADDED, ADDED_AIM),
    marks("p99_added_us_at_1000rps", ADDED, ADDED_AIM),
    marks("bulk_cpu_s_per_gb_1flow", BULK, BULK_AIM),
    marks(
        "bulk_cpu_s_per_gb_8flows",
        &[BULK_RELAY, BULK_ENVOY, Mark::Beside(1.0, "bulk_cpu_s_per_gb_1flow", 0.0)],
        BULK_AIM,
    ),
    marks("download_bulk_cpu_s_per_gb_1flow", BULK, BULK_AIM),
    marks(
        "download_bulk_cpu_s_per_gb_8flows",
        &[BULK_RELAY, BULK_ENVOY, Mark::Beside(1.0, "download_bulk_cpu_s_per_gb_1flow", 0.0)],
        BULK_AIM,
    ),
    marks("fairness_64flows_max_over_min", &[Mark::AtMost(2.0)], Some(Mark::AtMost(1.3))),
    marks("flood_p99_ratio_connections", &[Mark::AtMost(1.5)], None),
    marks("flood_p99_ratio_streams", &[Mark::AtMost(1.5)], None),
    marks("flood_p99_ratio_bytes", &[Mark::AtMost(1.5)], None),
    marks("new_conn_cpu_ms_per_1k", &[Mark::Times(0.8, Path::Relay)], Some(Mark::Times(0.65, Path::Relay))),
    marks("short_conn_per_s", &[Mark::AtLeast(5000.0)], Some(Mark::AtLeast(15_000.0))),
    marks("same_node_cpu_ms_per_1k", &[Mark::Times(0.6, Path::Relay)], None),
    marks("outside_rate_over_one_relay", &[Mark::AtLeast(0.95)], None),
    marks("rss_idle_mb", &[Mark::AtMost(12.0)], None),
    marks("rss_per_pod_kb", &[Mark::AtMost(15.0)], None),
    marks("rss_per_idle_conn_kb", &[Mark::AtMost(3.0)], None),
    marks("workloads_100k_mb", &[Mark::AtMost(60.0)], None),
    marks("workloads_100k_peak_mb", &[Mark::AtMost(120.0)], None),
    marks("workloads_ondemand_mb", &[Mark::AtMost(20.0)], None),
    marks("workload_change_cpu_us_100k", &[Mark::AtMost(50.0)], None),
    marks("config_dump_s_100k", &[Mark::AtMost(2.0)], None),
    marks("config_dump_growth_mb_100k", &[Mark::AtMost(10.0)], None),
    marks("policy_verdict_ns_1000", &[Mark::AtMost(1000.0)], None),
    marks("policy_verdict_ns_10000", &[Mark::AtMost(2000.0)], None),
    marks("policies_10k_mb", &[Mark::AtMost(20.0)], None),
    marks("rate_with_20_policies_over_without", &[Mark::AtLeast(0.97)], None),
    marks("cold_identity_ms", &[Mark::Beside(1.0, "ca_round_trip_ms", 20.0)], None),
    // What is measured twice differs by so much.
    marks("prefetched_first_connection_ms", &[Mark::Beside(1.25, "warm_first_connection_ms", 0.0)], None),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Unit;

    #[test]
    fn a_mark_is_met_missed_or_not_known() {
        let mut figures = Figures::default();
        let name = "cpu_ms_per_1k_saturation";
        figures.put("mesh", name, Unit::CpuMs, 7.0);
        figures.put("relay", name, Unit::CpuMs, 10.0);
        figures.put("hbone_envoy", name, Unit::CpuMs, 10.0);
        let (musts, aim) = judge(&figures, name);
        let met: Vec<_> = musts.iter().map(|judged| judged.met).collect();
        assert_eq!(met, [Some(true), Some(false), None], "{musts:?}");
        assert_eq!(aim.expect("it has an aim").met, Some(false));
        figures.put("mesh", "short_conn_per_s", Unit::PerSecond, 6000.0);
        assert_eq!(judge(&figures, "short_conn_per_s").0[0].met, Some(true));
        figures.put("mesh", "ca_round_trip_ms", Unit::Ms, 5.0);
        figures.put("mesh", "cold_identity_ms", Unit::Ms, 26.0);
        assert_eq!(judge(&figures, "cold_identity_ms").0[0].met, Some(false));
        assert!(judge(&figures, "rps_saturation").0.is_empty());
        figures.put("mesh", "p99_added_us_at_1000rps", Unit::Us, -20.0);
        figures.put("relay", "p99_added_us_at_1000rps", Unit::Us, -10.0);
        assert_eq!(judge(&figures, "p99_added_us_at_1000rps").0[0].met, None, "noise is no yardstick");
    }
}

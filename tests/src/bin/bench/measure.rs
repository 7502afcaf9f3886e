//! The measurements of traffic. Names and units are those of the JSON.

use std::time::Duration;

use testbed::load::{Job, Measured, REQUESTS_PORT, SINK_PORT, SOURCE_PORT, Talk};

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::flood;
use crate::paths::{Bench, Path};

const GB: f64 = 1e9;
const POLICIES: usize = 20;
/// What `only` may name beside the names of figures that come of the same measurement.
const RATE_NAMES: [&str; 5] = [
    "cpu_ms_per_1k_at_1000rps",
    "p50_us_at_1000rps",
    "p99_us_at_1000rps",
    "p50_added_us_at_1000rps",
    "p99_added_us_at_1000rps",
];

/// How long each measurement takes.
struct Times {
    usual: Duration,
    /// At a fixed rate, for a tail that means something.
    rate: Duration,
    /// Short connections, one after the other.
    sustained: Duration,
}

/// Everything but memory, once for each path, the paths by turns, and in the other order in every other round.
pub fn round(bench: &Bench, cli: &Cli, round: u32, figures: &mut Figures) {
    let seconds = Duration::from_secs;
    let times = if cli.quick {
        Times { usual: seconds(1), rate: seconds(2), sustained: seconds(15) }
    } else {
        Times { usual: seconds(5), rate: seconds(5), sustained: seconds(60) }
    };
    let mut paths = bench.paths.clone();
    if round % 2 == 1 {
        paths.reverse();
    }
    for path in &paths {
        requests(bench, cli, *path, &times, figures);
    }
    for path in &paths {
        bulk(bench, cli, *path, times.usual, figures);
    }
    for path in &paths {
        connections(bench, cli, *path, times.usual, figures);
    }
    outside(bench, cli, &paths, times.usual, figures);
    flood::round(bench, cli, &paths, times.rate, figures);
    if round == 0 && cli.wants(&["short_conn_per_s"]) {
        // One window of a minute says what several would say.
        paths.iter().for_each(|path| sustained(bench, *path, times.sustained, figures));
    }
}

/// Runs a job on a path: what the client measured, and the CPU time of what lies between.
pub fn run(bench: &Bench, path: Path, job: &Job) -> (Measured, f64) {
    let before = bench.cpu(path);
    let measured = bench.client(path).load(job);
    let cpu = (bench.cpu(path) - before).as_secs_f64();
    if measured.errors > 0 {
        let first = measured.first_error.as_deref().unwrap_or_default();
        eprintln!("warning: {}: {} errors in {job:?}, the first: {first}", path.name(), measured.errors);
    }
    (measured, cpu)
}

fn requests(bench: &Bench, cli: &Cli, path: Path, times: &Times, figures: &mut Figures) {
    let (talk, port) = Bench::talk(path);
    let to = bench.to(path, port);
    if cli.wants(&["cpu_ms_per_1k_saturation", "rps_saturation"]) {
        let (got, cpu) = run(bench, path, &Job::Saturate { to, talk, connections: 64, time: times.usual });
        figures.add(path, "rps_saturation", Unit::PerSecond, got.count as f64 / got.seconds);
        if path != Path::Direct {
            figures.add(path, "cpu_ms_per_1k_saturation", Unit::CpuMs, cpu * 1e6 / got.count as f64);
        }
    }
    if cli.wants(&RATE_NAMES) {
        let job = Job::Rate { to, talk, connections: 16, per_second: 1000, time: times.rate };
        let (got, cpu) = run(bench, path, &job);
        figures.add(path, "p50_us_at_1000rps", Unit::Us, got.p50_us);
        figures.add(path, "p99_us_at_1000rps", Unit::Us, got.p99_us);
        if path != Path::Direct {
            figures.add(path, "cpu_ms_per_1k_at_1000rps", Unit::CpuMs, cpu * 1e6 / got.count as f64);
        }
    }
    if let Some(to) = bench.to_near(path)
        && cli.wants(&["same_node_cpu_ms_per_1k"])
    {
        let job = Job::Saturate { to, talk: Talk::Bytes, connections: 64, time: times.usual };
        let (got, cpu) = run(bench, path, &job);
        figures.add(path, "same_node_cpu_ms_per_1k", Unit::CpuMs, cpu * 1e6 / got.count as f64);
    }
}

fn bulk(bench: &Bench, cli: &Cli, path: Path, time: Duration, figures: &mut Figures) {
    let (sink, source) = (bench.to(path, SINK_PORT), bench.to(path, SOURCE_PORT));
    for (name, flows, up) in [
        ("bulk_cpu_s_per_gb_1flow", 1, true),
        ("bulk_cpu_s_per_gb_8flows", 8, true),
        ("download_bulk_cpu_s_per_gb_1flow", 1, false),
        ("download_bulk_cpu_s_per_gb_8flows", 8, false),
    ] {
        let also = if name == "bulk_cpu_s_per_gb_8flows" { "bulk_gbit_8flows" } else { name };
        let is_cost = path != Path::Direct && cli.wants(&[name]);
        let is_rate = also != name && cli.wants(&[also]);
        if !(is_cost || is_rate) {
            continue;
        }
        let job = if up { Job::Upload { to: sink, flows, time } } else { Job::Download { to: source, flows, time } };
        let (got, cpu) = run(bench, path, &job);
        if path != Path::Direct {
            figures.add(path, name, Unit::CpuS, cpu * GB / got.bytes as f64);
        }
        if also != name {
            figures.add(path, also, Unit::Gbit, got.bytes as f64 * 8.0 / GB / got.seconds);
        }
    }
    if cli.wants(&["fairness_64flows_max_over_min"]) {
        // Long enough for every flow to have had its turn many times.
        let time = time.max(Duration::from_secs(4));
        let (got, _) = run(bench, path, &Job::Upload { to: sink, flows: 64, time });
        let flows = || got.bytes_by_flow.iter().copied();
        let (max, min) = (flows().max().unwrap_or(0), flows().min().unwrap_or(0));
        figures.add(path, "fairness_64flows_max_over_min", Unit::Ratio, max as f64 / min.max(1) as f64);
    }
}

fn connections(bench: &Bench, cli: &Cli, path: Path, time: Duration, figures: &mut Figures) {
    let to = bench.to(path, REQUESTS_PORT);
    if path != Path::Direct && cli.wants(&["new_conn_cpu_ms_per_1k"]) {
        let (got, cpu) = run(bench, path, &Job::NewConnections { to, at_once: 16, time });
        figures.add(path, "new_conn_cpu_ms_per_1k", Unit::CpuMs, cpu * 1e6 / got.count as f64);
    }
    if path == Path::Mesh && cli.wants(&["rate_with_20_policies_over_without"]) {
        with_policies(bench, time.max(Duration::from_secs(2)), figures);
    }
}

fn sustained(bench: &Bench, path: Path, time: Duration, figures: &mut Figures) {
    let (got, _) = run(bench, path, &Job::NewConnections { to: bench.to(path, REQUESTS_PORT), at_once: 16, time });
    figures.add(path, "short_conn_per_s", Unit::PerSecond, lowest_rate(&got.by_second));
}

/// Of all windows of 5 s, the one with the fewest, per second.
fn lowest_rate(by_second: &[u64]) -> f64 {
    let lowest = by_second.windows(5).map(|five| five.iter().sum::<u64>()).min().unwrap_or(0);
    lowest as f64 / 5.0
}

/// To a server that no proxy runs beside: what is left of the rate without a proxy, and of that with one relay.
fn outside(bench: &Bench, cli: &Cli, paths: &[Path], time: Duration, figures: &mut Figures) {
    let names = ["outside_share_of_direct", "outside_rate_over_one_relay"];
    if !cli.wants(&names) {
        return;
    }
    let rates: Vec<(Path, f64)> = paths
        .iter()
        .filter_map(|path| {
            let to = bench.to_outside(*path)?;
            let (got, _) = run(bench, *path, &Job::Saturate { to, talk: Talk::Bytes, connections: 64, time });
            Some((*path, got.count as f64 / got.seconds))
        })
        .collect();
    let rate = |of: Path| rates.iter().find(|(path, _)| *path == of).map(|(_, rate)| *rate);
    for (path, own) in rates.iter().filter(|(path, _)| *path != Path::Direct) {
        for (name, base) in names.into_iter().zip([Path::Direct, Path::Relay]) {
            if let Some(base) = rate(base).filter(|_| base != *path) {
                figures.add(*path, name, Unit::Ratio, own / base);
            }
        }
    }
}

/// The rate of connections with twenty policies, the last of which allows the client, over that without.
fn with_policies(bench: &Bench, time: Duration, figures: &mut Figures) {
    let rate = || {
        let job = Job::NewConnections { to: bench.to(Path::Mesh, REQUESTS_PORT), at_once: 16, time };
        let (got, _) = run(bench, Path::Mesh, &job);
        got.count as f64 / got.seconds
    };
    // What drifts in between falls on both sides.
    let first = rate();
    bench.set_policies(POLICIES);
    let with = rate() + rate();
    bench.set_policies(0);
    figures.add(Path::Mesh, "rate_with_20_policies_over_without", Unit::Ratio, with / (first + rate()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_window_counts() {
        assert_eq!(lowest_rate(&[10, 10, 10, 10, 10, 0, 10]), 8.0);
        assert_eq!(lowest_rate(&[10, 10]), 0.0);
    }
}

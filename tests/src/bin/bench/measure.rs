//! The measurements. Names and units are those of the JSON.

use std::time::Duration;

use testbed::load::{Job, Measured, REQUESTS_PORT, SINK_PORT, SOURCE_PORT};
use testbed::{Pod, wait_for};

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::paths::{Bench, Path};

const MB: f64 = 1e6;
const GB: f64 = 1e9;
const IDLE_CONNECTIONS: usize = 1000;
const EXTRA_PODS: usize = 100;
const POLICIES: usize = 20;

/// Everything but memory, once for each path, the paths by turns.
pub fn round(bench: &Bench, cli: &Cli, figures: &mut Figures) {
    let time = Duration::from_secs(if cli.quick { 2 } else { 5 });
    for path in &bench.paths {
        requests(bench, cli, *path, time, figures);
    }
    for path in &bench.paths {
        bulk(bench, cli, *path, time, figures);
    }
    for path in &bench.paths {
        connections(bench, cli, *path, time, figures);
    }
}

/// Runs a job on a path: what the client measured, and the CPU time of what lies between.
fn run(bench: &Bench, path: Path, job: &Job) -> (Measured, f64) {
    let before = bench.cpu(path);
    let measured = bench.client(path).load(job);
    let cpu = (bench.cpu(path) - before).as_secs_f64();
    if measured.errors > 0 {
        let first = measured.first_error.as_deref().unwrap_or_default();
        eprintln!("warning: {}: {} errors in {job:?}, the first: {first}", path.name(), measured.errors);
    }
    (measured, cpu)
}

fn requests(bench: &Bench, cli: &Cli, path: Path, time: Duration, figures: &mut Figures) {
    let to = bench.to(path, REQUESTS_PORT);
    if cli.wants(&["cpu_ms_per_1k_saturation", "rps_saturation"]) {
        let (got, cpu) = run(bench, path, &Job::Saturate { to, connections: 64, time });
        figures.add(path, "rps_saturation", Unit::PerSecond, got.count as f64 / got.seconds);
        if path != Path::Direct {
            figures.add(path, "cpu_ms_per_1k_saturation", Unit::CpuMs, cpu * 1e6 / got.count as f64);
        }
    }
    if cli.wants(&["cpu_ms_per_1k_at_1000rps", "p50_us_at_1000rps", "p99_us_at_1000rps", "added_us_at_1000rps"]) {
        let (got, cpu) = run(bench, path, &Job::Rate { to, connections: 16, per_second: 1000, time });
        figures.add(path, "p50_us_at_1000rps", Unit::Us, got.p50_us);
        figures.add(path, "p99_us_at_1000rps", Unit::Us, got.p99_us);
        if path != Path::Direct {
            figures.add(path, "cpu_ms_per_1k_at_1000rps", Unit::CpuMs, cpu * 1e6 / got.count as f64);
        }
    }
    if path == Path::Mesh && cli.wants(&["same_node_cpu_ms_per_1k"]) {
        let (got, cpu) = run(bench, path, &Job::Saturate { to: bench.near.at(REQUESTS_PORT), connections: 64, time });
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
        if !cli.wants(&[name, also]) {
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
    if cli.wants(&["short_conn_per_s"]) {
        let time = Duration::from_secs(if cli.quick { 15 } else { 60 });
        let (got, _) = run(bench, path, &Job::NewConnections { to, at_once: 16, time });
        let lowest = got.by_second.windows(5).map(|five| five.iter().sum::<u64>()).min().unwrap_or(0);
        figures.add(path, "short_conn_per_s", Unit::PerSecond, lowest as f64 / 5.0);
    }
    if path == Path::Mesh && cli.wants(&["rate_with_20_policies_over_without"]) {
        with_policies(bench, time, figures);
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

/// Memory of one proxy, before anything else has made it grow.
pub fn memory(bench: &Bench, cli: &Cli, figures: &mut Figures) {
    if !bench.paths.contains(&Path::Mesh) {
        return;
    }
    let mesh = bench.tb.mesh();
    // The proxies' larger one: which of the two sides costs more is not the reader's concern.
    let pss = || mesh.nodes().iter().map(|node| node.proxy.pss()).max().expect("two nodes") as f64;
    let rest = || {
        let mut last = pss();
        wait_for("the memory to come to rest", || {
            std::thread::sleep(Duration::from_millis(500));
            let now = pss();
            let quiet = (now - last).abs() < 64e3;
            last = now;
            quiet.then_some(now)
        })
    };
    if cli.wants(&["rss_idle_mb"]) {
        figures.add(Path::Mesh, "rss_idle_mb", Unit::Mb, rest() / MB);
    }
    bench.enrol();
    if cli.wants(&["rss_per_pod_kb"]) {
        let before = rest();
        let start = |i| bench.tb.pod(&format!("mesh/extra-{i}")).service_account(&format!("extra-{i}")).start();
        let pods: Vec<Pod> = (0..EXTRA_PODS).map(start).collect();
        mesh.wait_in_mesh(&pods.iter().collect::<Vec<_>>());
        let per_pod = (rest() - before).max(0.0) / EXTRA_PODS as f64;
        figures.add(Path::Mesh, "rss_per_pod_kb", Unit::Kb, per_pod / 1e3);
        pods.iter().for_each(Pod::delete);
    }
    if cli.wants(&["rss_per_idle_conn_kb"]) {
        let before = rest();
        let job = Job::Idle { to: bench.to(Path::Mesh, REQUESTS_PORT), connections: IDLE_CONNECTIONS };
        let held = bench.client(Path::Mesh).start_load(&job);
        let each = (rest() - before).max(0.0) / IDLE_CONNECTIONS as f64;
        figures.add(Path::Mesh, "rss_per_idle_conn_kb", Unit::Kb, each / 1e3);
        drop(held);
    }
}

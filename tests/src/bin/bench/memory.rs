//! Memory of one proxy of each path, before anything else has made it grow: idle, per pod, per connection.

use std::time::Duration;

use testbed::load::{Job, REQUESTS_PORT};
use testbed::{Daemon, Pod, wait_for};

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::paths::{Bench, Path};
use crate::process::{self, InMemory};
use crate::scale::{Scale, sidecar_memory};

pub const MB: f64 = 1e6;
const KB: f64 = 1e3;
/// How long the threads that wrote a dump stay, with what they have freed.
const DUMP_THREADS: Duration = Duration::from_secs(12);
/// Steps up to the number that the figure is taken over.
const PODS: [usize; 4] = [0, 25, 50, 100];
const CONNECTIONS: [usize; 4] = [0, 250, 500, 1000];

pub fn memory(bench: &Bench, cli: &Cli, figures: &mut Figures, scale: &mut Scale) {
    if cli.wants(&["rss_idle_mb", "rss_per_pod_kb"]) || cli.wants_scale() {
        for path in &bench.paths {
            if let Some(idle) = at_rest(bench, *path) {
                figures.add(*path, "rss_idle_mb", Unit::Mb, idle.pss / MB);
                scale.add(*path, "program_memory", "MB", &[], &[], idle.file / MB);
                if *path == Path::Sidecar {
                    // Every pod has a whole one.
                    figures.add(*path, "rss_per_pod_kb", Unit::Kb, idle.pss / KB);
                }
            }
        }
    }
    // Meanwhile what the agents' start needed goes back to the kernel.
    sidecar_memory(bench, cli, scale);
    if bench.paths.contains(&Path::Mesh) {
        bench.enrol();
        if cli.wants(&["rss_per_pod_kb"]) || cli.wants_scale() {
            pods(bench, figures, scale);
        }
    }
    if cli.wants(&["rss_per_idle_conn_kb"]) || cli.wants_scale() {
        bench.paths.iter().for_each(|path| connections(bench, *path, figures, scale));
    }
}

fn pods(bench: &Bench, figures: &mut Figures, scale: &mut Scale) {
    let start = |i| bench.tb.pod(&format!("mesh/extra-{i}")).service_account(&format!("extra-{i}")).start();
    let mut pods: Vec<Pod> = Vec::new();
    let mut points = Vec::new();
    for count in PODS {
        pods.extend((pods.len()..count).map(start));
        bench.tb.mesh().wait_in_mesh(&pods.iter().collect::<Vec<_>>());
        // The waiting reads the proxies' dumps, whose threads keep their memory for ten seconds.
        std::thread::sleep(DUMP_THREADS);
        let memory = at_rest(bench, Path::Mesh).expect("the mesh has proxies");
        scale.add(Path::Mesh, "memory_by_pods", "MB", &["pods"], &[count as f64], memory.anonymous / MB);
        let agent = rest(&[&bench.tb.mesh().node(0).agent]);
        scale.add(Path::Mesh, "agent_memory_by_pods", "MB", &["pods"], &[count as f64], agent.anonymous / MB);
        points.push((count, memory.pss));
    }
    figures.add(Path::Mesh, "rss_per_pod_kb", Unit::Kb, per_one(&points) / KB);
    pods.iter().for_each(Pod::delete);
}

fn connections(bench: &Bench, path: Path, figures: &mut Figures, scale: &mut Scale) {
    let to = bench.to(path, REQUESTS_PORT);
    let mut held = Vec::new();
    let mut points: Vec<(usize, f64)> = Vec::new();
    for count in CONNECTIONS {
        let more = count - points.last().map_or(0, |(count, _)| *count);
        if more > 0 {
            held.push(bench.client(path).start_load(&Job::Idle { to, connections: more }));
        }
        let Some(memory) = at_rest(bench, path) else { return };
        scale.add(path, "memory_by_connections", "MB", &["connections"], &[count as f64], memory.anonymous / MB);
        points.push((count, memory.pss));
    }
    figures.add(path, "rss_per_idle_conn_kb", Unit::Kb, per_one(&points) / KB);
}

/// From the first to the last.
fn per_one(points: &[(usize, f64)]) -> f64 {
    let ((first, before), (last, after)) = (points[0], points[points.len() - 1]);
    (after - before).max(0.0) / (last - first) as f64
}

/// Of the largest of the path's proxies; nothing where there is none.
fn at_rest(bench: &Bench, path: Path) -> Option<InMemory> {
    let proxies = bench.proxies(path);
    (!proxies.is_empty()).then(|| rest(&proxies))
}

/// What the largest of the processes has in memory, once it does not change any more: which of the sides costs more is
/// not the reader's concern.
pub fn rest(processes: &[&Daemon]) -> InMemory {
    let largest = || {
        let all = processes.iter().map(|process| process::in_memory(process.pid()));
        all.max_by(|a, b| a.pss.total_cmp(&b.pss)).expect("there is a process")
    };
    let mut last = largest();
    wait_for("the memory to come to rest", || {
        std::thread::sleep(Duration::from_millis(500));
        let now = largest();
        let quiet = (now.pss - last.pss).abs() < 64e3;
        last = now;
        quiet.then_some(now)
    })
}

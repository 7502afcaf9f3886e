//! What a pod that floods does to another pod of its node: the other's p99 at 1,000 requests per second with the flood
//! over that without, in one round. On a small machine the load processes themselves take a part of it, which the
//! direct path shows.

use std::thread;
use std::time::Duration;

use testbed::load::{Job, REQUESTS_PORT, SINK_PORT, Talk};

use crate::Cli;
use crate::figures::{Figures, Unit};
use crate::measure::run;
use crate::paths::{Bench, Path};

pub const NAMES: [&str; 3] = ["flood_p99_ratio_connections", "flood_p99_ratio_streams", "flood_p99_ratio_bytes"];
/// By how much a flood begins before what it is to disturb, and ends after it.
const LEAD: Duration = Duration::from_millis(500);

/// On the paths where both pods' traffic shares a proxy, and without one.
pub fn round(bench: &Bench, cli: &Cli, paths: &[Path], time: Duration, figures: &mut Figures) {
    if !cli.wants(&NAMES) {
        return;
    }
    let shares = |path: &Path| matches!(path, Path::Direct | Path::Relay | Path::Mesh);
    for path in paths.iter().copied().filter(shares) {
        let p99 = || {
            let to = bench.to(path, REQUESTS_PORT);
            let job = Job::Rate { to, talk: Talk::Bytes, connections: 16, per_second: 1000, time };
            run(bench, path, &job).0.p99_us
        };
        let quiet = p99();
        for name in NAMES.into_iter().filter(|name| cli.wants(&[name])) {
            let flood = flood(bench, path, name, time + 2 * LEAD);
            let flooded = thread::scope(|scope| {
                scope.spawn(|| bench.near(path).load(&flood));
                thread::sleep(LEAD);
                p99()
            });
            figures.add(path, name, Unit::Ratio, flooded / quiet);
        }
    }
}

fn flood(bench: &Bench, path: Path, name: &str, time: Duration) -> Job {
    let requests = bench.to(path, REQUESTS_PORT);
    match name {
        "flood_p99_ratio_connections" => Job::NewConnections { to: requests, at_once: 16, time },
        "flood_p99_ratio_streams" => Job::Saturate { to: requests, talk: Talk::Bytes, connections: 64, time },
        _ => Job::Upload { to: bench.to(path, SINK_PORT), flows: 8, time },
    }
}

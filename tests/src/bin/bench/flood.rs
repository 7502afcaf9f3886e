//! What a pod that floods does to another pod of its node: the other's p99 at 1,000 requests per second with the flood
//! over that without, in one round. The flood goes to a pod of its own, and its client and server leave the cores to
//! everybody else, so that what is seen is what the proxies do.

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

/// On the mesh's path, and on the direct one for what the machine alone does.
pub fn round(bench: &Bench, cli: &Cli, paths: &[Path], time: Duration, figures: &mut Figures) {
    if !cli.wants(&NAMES) {
        return;
    }
    for path in paths.iter().copied().filter(|path| matches!(path, Path::Direct | Path::Mesh)) {
        let p99 = || {
            let to = bench.to(path, REQUESTS_PORT);
            let job = Job::Rate { to, talk: Talk::Bytes, connections: 16, per_second: 1000, time };
            run(bench, path, &job).0.p99_us
        };
        let (from, to) = bench.others(path);
        let quiet = p99();
        for name in NAMES.into_iter().filter(|name| cli.wants(&[name])) {
            let time = time + 2 * LEAD;
            let flood = match name {
                "flood_p99_ratio_connections" => Job::NewConnections { to: to.at(REQUESTS_PORT), at_once: 16, time },
                "flood_p99_ratio_streams" => {
                    Job::Saturate { to: to.at(REQUESTS_PORT), talk: Talk::Bytes, connections: 64, time }
                }
                _ => Job::Upload { to: to.at(SINK_PORT), flows: 8, time },
            };
            let flooded = thread::scope(|scope| {
                scope.spawn(|| from.at_leisure().load(&flood));
                thread::sleep(LEAD);
                p99()
            });
            figures.add(path, name, Unit::Ratio, flooded / quiet);
        }
    }
}

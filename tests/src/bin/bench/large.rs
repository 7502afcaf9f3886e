//! A proxy that is told of a large cluster: memory while it loads and after, on demand, the cost of a change and of a
//! dump. A testbed of its own, with a discovery service that makes the cluster up.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use testbed::{Behaviour, FakeCa, MeshOptions, NodeMesh, Outside, Pod, Server, StreamExt, Testbed};

use crate::Cli;
use crate::discovery::{Size, Source};
use crate::figures::{Figures, Unit};
use crate::memory::{MB, rest};
use crate::paths::Path;
use crate::process;
use crate::scale::Scale;

pub const NAMES: [&str; 6] = [
    "workloads_100k_mb",
    "workloads_100k_peak_mb",
    "workloads_ondemand_mb",
    "workload_change_cpu_us_100k",
    "config_dump_s_100k",
    "config_dump_growth_mb_100k",
];
const LARGE: Size = Size { workloads: 100_000, services: 10_000 };
/// For the fit; the parts must not grow together.
const SIZES: [Size; 4] = [
    Size { workloads: 0, services: 0 },
    Size { workloads: 10_000, services: 1000 },
    Size { workloads: 20_000, services: 10_000 },
    LARGE,
];
/// Destinations of the pod that is there.
const DESTINATIONS: usize = 50;
const CHANGES: usize = 500;
const ADMIN: u16 = 15000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures once; what grows with the size of the cluster also goes into the scale model.
pub fn measure(cli: &Cli, figures: &mut Figures, scale: &mut Scale) {
    let tb = Testbed::new();
    let client = tb.pod("large/client").start();
    let start =
        |i: usize| tb.pod(&format!("large/server-{i}")).service_account(&format!("a-{i}")).on(tb.node(1)).start();
    let servers: Vec<Pod> = (0..DESTINATIONS).map(start).collect();
    let serving: Vec<Server> = servers.iter().map(|pod| pod.serve(8080, Behaviour::Echo)).collect();
    let place: Outside = tb.outside("source");
    let ca = FakeCa::start(&place);
    let pods: Vec<&Pod> = [&client].into_iter().chain(&servers).collect();
    let source = Source::start(&place, &pods, LARGE);
    let options = MeshOptions { on_demand: true, ..MeshOptions::default() };
    let options = options.proxy_env("XDS_ADDRESS", &source.address).proxy_env("CA_ADDRESS", ca.address());
    let mesh = tb.start_mesh_with(options);
    tb.namespace("large").enrol();
    mesh.wait_in_mesh(&pods);
    let node = mesh.node(0);
    if cli.wants(&["workloads_ondemand_mb"]) {
        let held: Vec<TcpStream> = servers
            .iter()
            .map(|server| {
                let mut stream = client.connect(server.at(8080)).unwrap_or_else(|e| panic!("{}: {e}", server.name()));
                stream.ask(b"hello");
                stream
            })
            .collect();
        figures.add(Path::Mesh, "workloads_ondemand_mb", Unit::Mb, rest(&[&node.proxy]).pss / MB);
        drop(held);
    }
    for size in SIZES.into_iter().filter(|size| cli.wants_scale() || *size == LARGE) {
        source.set_size(size);
        // Its ports are free only when it is gone.
        node.proxy.kill9();
        mesh.start_proxy_with(node, &[("XDS_ON_DEMAND", "false")]);
        node.wait_proxy_ready();
        source.wait_taken(node.name());
        let memory = rest(&[&node.proxy]);
        let parts = [size.workloads as f64, size.services as f64];
        scale.add(Path::Mesh, "memory_by_workloads", "MB", &["workloads", "services"], &parts, memory.anonymous / MB);
        if size == LARGE {
            figures.add(Path::Mesh, "workloads_100k_mb", Unit::Mb, memory.pss / MB);
            // Pages of files are shared and stay: what the set was larger at its peak, the share of this process was.
            let status = process::status(node.proxy.pid());
            let peak = memory.pss + (status.highest - status.resident);
            figures.add(Path::Mesh, "workloads_100k_peak_mb", Unit::Mb, peak / MB);
        }
    }
    if cli.wants(&["workload_change_cpu_us_100k"]) {
        figures.add(Path::Mesh, "workload_change_cpu_us_100k", Unit::CpuUs, change_us(node, &source));
    }
    if cli.wants(&["config_dump_s_100k", "config_dump_growth_mb_100k"]) {
        let (seconds, growth, bytes) = dump(&tb, node);
        eprintln!("  (the dump is {:.0} MB)", bytes as f64 / MB);
        figures.add(Path::Mesh, "config_dump_s_100k", Unit::S, seconds);
        figures.add(Path::Mesh, "config_dump_growth_mb_100k", Unit::Mb, growth / MB);
    }
    drop(serving);
}

/// CPU time of the proxy for one changed workload, the reading of its message and its answer included.
fn change_us(node: &NodeMesh, source: &Source) -> f64 {
    // What the proxy does anyway, in as much time as the changes take.
    let before = node.proxy_cpu();
    let started = Instant::now();
    source.change(node.name(), CHANGES);
    let (took, used) = (started.elapsed(), node.proxy_cpu() - before);
    let before = node.proxy_cpu();
    std::thread::sleep(took);
    let idle = node.proxy_cpu() - before;
    used.saturating_sub(idle).as_secs_f64() * 1e6 / CHANGES as f64
}

/// Seconds, growth of the resident set at its peak, and length of a dump that is read as fast as it comes.
fn dump(tb: &Testbed, node: &NodeMesh) -> (f64, f64, usize) {
    let pid = node.proxy.pid();
    process::forget_highest(pid);
    let before = process::status(pid).resident;
    let started = Instant::now();
    let bytes = tb.node(0).netns().run(|| {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, ADMIN)).expect("connect to the admin port");
        stream.set_read_timeout(Some(PATIENCE)).expect("set a timeout");
        stream
            .write_all(b"GET /config_dump HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .expect("ask for the dump");
        let (mut block, mut total) = (vec![0; 1 << 20], 0);
        loop {
            match stream.read(&mut block).expect("read the dump") {
                0 => return total,
                n => total += n,
            }
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    assert!(bytes > 10_000_000, "a dump of {bytes} bytes is not that of {} workloads", LARGE.workloads);
    let growth = process::status(pid).highest - before;
    (seconds, growth.max(0.0), bytes)
}

//! The ways from client to server that are compared, and the processes whose CPU time each of them costs.

use std::net::SocketAddr;
use std::time::Duration;

use testbed::load::{Job, LoadProcess, REQUESTS_PORT, SINK_PORT, SOURCE_PORT};
use testbed::{Pod, Testbed, wait_for};

use crate::Cli;

/// Offset of the relays' ports from the server's.
const RELAY: u16 = 1000;

/// A way from the client to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Path {
    /// No proxy at all.
    Direct,
    /// Two plain relays: one in the client's pod, one in the server's.
    Relay,
    /// The mesh.
    Mesh,
}

impl Path {
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Relay => "relay",
            Self::Mesh => "mesh",
        }
    }
}

/// The cluster: a pair of pods outside the mesh, a pair inside, each with a server.
pub struct Bench {
    pub paths: Vec<Path>,
    plain: Pair,
    mesh: Pair,
    pub near: Pod,
    _processes: Vec<LoadProcess>,
    pub tb: Testbed,
}

struct Pair {
    client: Pod,
    server: Pod,
}

impl Bench {
    pub fn set_up(cli: &Cli) -> Self {
        eprintln!("setting up two nodes, pods and the mesh");
        let tb = Testbed::new();
        let pair = |namespace: &str| Pair {
            client: tb.pod(&format!("{namespace}/client")).start(),
            server: tb.pod(&format!("{namespace}/server")).on(tb.node(1)).start(),
        };
        let (plain, mesh) = (pair("plain"), pair("mesh"));
        for pod in [&plain.client, &plain.server] {
            // Else what is measured on new connections is how long closed ones keep their source ports.
            pod.netns().sysctl("net/ipv4/tcp_tw_reuse", "1");
        }
        let near = tb.pod("mesh/near").start();
        let mut processes: Vec<_> =
            [&plain.server, &mesh.server, &near].iter().map(|pod| pod.start_load(&Job::Serve)).collect();
        for port in [REQUESTS_PORT, SINK_PORT, SOURCE_PORT] {
            let app = SocketAddr::from(([127, 0, 0, 1], port));
            let inner = Job::Relay { listen: port + RELAY, to: app };
            processes.push(plain.server.relay_place().start_load(&inner));
            let outer = Job::Relay { listen: port + RELAY, to: plain.server.at(port + RELAY) };
            processes.push(plain.client.relay_place().start_load(&outer));
        }
        let known = [Path::Direct, Path::Relay, Path::Mesh];
        let paths: Vec<Path> = known.into_iter().filter(|path| cli.paths.contains(path)).collect();
        if paths.contains(&Path::Mesh) {
            tb.start_mesh();
        }
        Self { paths, plain, mesh, near, _processes: processes, tb }
    }

    /// Puts the pods of the mesh's path into the mesh.
    pub fn enrol(&self) {
        self.tb.namespace("mesh").enrol();
        self.tb.mesh().wait_in_mesh(&[&self.mesh.client, &self.mesh.server, &self.near]);
    }

    /// Makes so many policies apply to the mesh's server; the last one allows the client.
    pub fn set_policies(&self, count: usize) {
        let file = "bench-policies.yaml";
        let policy = |number: usize| {
            let account = if number + 1 == count { "default".to_owned() } else { format!("other-{number}") };
            format!(
                "---\napiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
                 metadata: {{name: policy-{number}, namespace: mesh}}\n\
                 spec: {{rules: [{{from: [{{source: {{principals: [cluster.local/ns/mesh/sa/{account}]}}}}]}}]}}\n"
            )
        };
        match count {
            0 => self.tb.remove_manifest(file),
            _ => self.tb.put_manifest(file, &(0..count).map(policy).collect::<String>()),
        }
        for node in self.tb.mesh().nodes() {
            wait_for(&format!("{count} policies at the proxy on {}", node.name()), || {
                (node.config_dump()["policies"].as_array()?.len() == count).then_some(())
            });
        }
    }

    pub fn client(&self, path: Path) -> &Pod {
        match path {
            Path::Direct | Path::Relay => &self.plain.client,
            Path::Mesh => &self.mesh.client,
        }
    }

    /// Where the client dials to reach a port of the server.
    pub fn to(&self, path: Path, port: u16) -> SocketAddr {
        match path {
            Path::Direct => self.plain.server.at(port),
            Path::Relay => self.plain.client.at(port + RELAY),
            Path::Mesh => self.mesh.server.at(port),
        }
    }

    /// CPU time of everything between client and server, of both nodes together.
    pub fn cpu(&self, path: Path) -> Duration {
        match path {
            Path::Direct => Duration::ZERO,
            Path::Relay => {
                self.plain.client.relay_place().cgroup().cpu() + self.plain.server.relay_place().cgroup().cpu()
            }
            Path::Mesh => self.tb.mesh().cpu(),
        }
    }
}

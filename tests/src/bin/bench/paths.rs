//! The ways from client to server that are compared, and the processes whose CPU time each of them costs.

use std::net::SocketAddr;
use std::time::Duration;

use testbed::load::{HTTP_PORT, Job, LoadProcess, REQUESTS_PORT, SINK_PORT, SOURCE_PORT, Talk};
use testbed::{Authority, Daemon, Envoy, Leaf, Outside, Place, Pod, SidecarPorts, Testbed, wait_for};

use crate::Cli;

/// Offset of the relays' ports, and of Envoy's, from the server's.
const RELAY: u16 = 1000;
/// The relay to the server outside the mesh.
const TO_OUTSIDE: u16 = REQUESTS_PORT + 2 * RELAY;
/// The client's relay to the server on its own node.
const NEAR: u16 = REQUESTS_PORT + 3 * RELAY;
const PORTS: [u16; 4] = [REQUESTS_PORT, SINK_PORT, SOURCE_PORT, HTTP_PORT];
const HBONE: u16 = 15008;
/// Worker threads of every proxy that has such a setting.
pub const WORKERS: usize = 2;

/// A way from the client to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Path {
    /// No proxy at all.
    Direct,
    /// Two plain relays: one in the client's pod, one in the server's.
    Relay,
    /// Envoy as a sidecar in either pod.
    Sidecar,
    /// Envoy as HBONE client and HBONE server.
    #[value(name = "hbone_envoy")]
    HboneEnvoy,
    /// The mesh.
    Mesh,
}

impl Path {
    pub const ALL: [Self; 5] = [Self::Direct, Self::Relay, Self::Sidecar, Self::HboneEnvoy, Self::Mesh];

    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Relay => "relay",
            Self::Sidecar => "sidecar",
            Self::HboneEnvoy => "hbone_envoy",
            Self::Mesh => "mesh",
        }
    }
}

/// The cluster: pairs of pods, each with a server and what lies between on its path.
pub struct Bench {
    pub paths: Vec<Path>,
    plain: Pair,
    mesh: Pair,
    sidecar: Option<EnvoyPair>,
    hbone: Option<EnvoyPair>,
    outside: Outside,
    _processes: Vec<LoadProcess>,
    pub tb: Testbed,
}

/// A client, a server on another node, one beside the client, and one more on the server's node.
struct Pair {
    client: Pod,
    server: Pod,
    near: Pod,
    other: Pod,
}

struct EnvoyPair {
    pods: Pair,
    /// The client's and the server's.
    envoys: [Envoy; 2],
}

impl Bench {
    pub fn set_up(cli: &Cli) -> Self {
        eprintln!("setting up two nodes, pods, Envoys and the mesh");
        let tb = Testbed::new();
        let paths: Vec<Path> = Path::ALL.into_iter().filter(|path| cli.paths.contains(path)).collect();
        let (plain, mesh) = (Pair::start(&tb, "plain"), Pair::start(&tb, "mesh"));
        let outside = tb.outside("outside");
        let mut processes = vec![outside.start_load(&Job::Serve)];
        for pair in [&plain, &mesh] {
            processes.extend([&pair.server, &pair.near].map(|pod| pod.start_load(&Job::Serve)));
            processes.push(pair.other.at_leisure().start_load(&Job::Serve));
        }
        plain.reuse_ports();
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let relay_of = |pod: &Pod| pod.beside("relay");
        for port in PORTS {
            let mut relay =
                |pod: &Pod, listen, to| processes.push(relay_of(pod).start_load(&Job::Relay { listen, to }));
            relay(&plain.server, port + RELAY, local(port));
            relay(&plain.near, port + RELAY, local(port));
            relay(&plain.client, port + RELAY, plain.server.at(port + RELAY));
        }
        let near = Job::Relay { listen: NEAR, to: plain.near.at(REQUESTS_PORT + RELAY) };
        processes.push(relay_of(&plain.client).start_load(&near));
        let to_outside = Job::Relay { listen: TO_OUTSIDE, to: (outside.ip4(), REQUESTS_PORT).into() };
        processes.push(plain.client.beside("outer-relay").start_load(&to_outside));
        let authority = Authority::root("bench");
        let mut envoys = |path: Path, start: fn(&Testbed, &Pair, &Authority) -> [Envoy; 2]| {
            paths.contains(&path).then(|| {
                let pods = Pair::start(&tb, &path.name().replace('_', "-"));
                pods.reuse_ports();
                processes.push(pods.server.start_load(&Job::Serve));
                let envoys = start(&tb, &pods, &authority);
                EnvoyPair { pods, envoys }
            })
        };
        let sidecar = envoys(Path::Sidecar, start_sidecars);
        let hbone = envoys(Path::HboneEnvoy, start_hbone);
        if paths.contains(&Path::Mesh) {
            tb.start_mesh();
        }
        Self { paths, plain, mesh, sidecar, hbone, outside, _processes: processes, tb }
    }

    /// Puts the pods of the mesh's path into the mesh.
    pub fn enrol(&self) {
        self.tb.namespace("mesh").enrol();
        self.tb.mesh().wait_in_mesh(&[&self.mesh.client, &self.mesh.server, &self.mesh.near, &self.mesh.other]);
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
        &self.pair(path).client
    }

    /// The pod beside the client, and one beside the server.
    pub fn others(&self, path: Path) -> (&Pod, &Pod) {
        let pair = self.pair(path);
        (&pair.near, &pair.other)
    }

    /// Where the client dials to reach a port of the server.
    pub fn to(&self, path: Path, port: u16) -> SocketAddr {
        let pair = self.pair(path);
        match path {
            Path::Direct | Path::Sidecar | Path::Mesh => pair.server.at(port),
            Path::Relay | Path::HboneEnvoy => pair.client.at(port + RELAY),
        }
    }

    /// Where the client dials to reach the server on its own node, on the paths that have one.
    pub fn to_near(&self, path: Path) -> Option<SocketAddr> {
        match path {
            Path::Relay => Some(self.plain.client.at(NEAR)),
            Path::Mesh => Some(self.mesh.near.at(REQUESTS_PORT)),
            Path::Direct | Path::Sidecar | Path::HboneEnvoy => None,
        }
    }

    /// Where the client dials to reach the server outside the mesh; over one relay on the relays' path.
    pub fn to_outside(&self, path: Path) -> Option<SocketAddr> {
        match path {
            Path::Direct | Path::Sidecar | Path::Mesh => Some((self.outside.ip4(), REQUESTS_PORT).into()),
            Path::Relay => Some(self.plain.client.at(TO_OUTSIDE)),
            Path::HboneEnvoy => None,
        }
    }

    /// Requests are HTTP where a proxy on the path takes them apart as such, at the port for it.
    pub fn talk(path: Path) -> (Talk, u16) {
        match path {
            Path::Sidecar => (Talk::Http, HTTP_PORT),
            Path::Direct | Path::Relay | Path::HboneEnvoy | Path::Mesh => (Talk::Bytes, REQUESTS_PORT),
        }
    }

    /// CPU time of everything between client and server, of both nodes together.
    pub fn cpu(&self, path: Path) -> Duration {
        let relay = |pod: &Pod| pod.beside("relay").cgroup().cpu();
        let envoys = |pair: &Option<EnvoyPair>| pair.iter().flat_map(|pair| &pair.envoys).map(Envoy::cpu).sum();
        match path {
            Path::Direct => Duration::ZERO,
            Path::Relay => {
                let Pair { client, server, near, .. } = &self.plain;
                relay(client) + relay(server) + relay(near)
            }
            Path::Sidecar => envoys(&self.sidecar),
            Path::HboneEnvoy => envoys(&self.hbone),
            Path::Mesh => self.tb.mesh().cpu(),
        }
    }

    /// The proxies of a path whose memory counts.
    pub fn proxies(&self, path: Path) -> Vec<&Daemon> {
        let envoys = |pair| Option::as_ref(pair).map_or(Vec::new(), |p: &EnvoyPair| p.envoys.iter().collect());
        let envoys: Vec<&Envoy> = match path {
            Path::Direct | Path::Relay => Vec::new(),
            Path::Sidecar => envoys(&self.sidecar),
            Path::HboneEnvoy => envoys(&self.hbone),
            Path::Mesh => return self.tb.mesh().nodes().iter().map(|node| &node.proxy).collect(),
        };
        envoys.into_iter().map(Envoy::daemon).collect()
    }

    /// What the Envoys of a path say that their handshakes agreed on.
    pub fn negotiated(&self, path: Path) -> Vec<(String, u64)> {
        let pair = match path {
            Path::Sidecar => &self.sidecar,
            Path::HboneEnvoy => &self.hbone,
            Path::Direct | Path::Relay | Path::Mesh => &None,
        };
        let Some(pair) = pair else { return Vec::new() };
        // At the server's side: every handshake once.
        let stats = pair.envoys[1].stats("listener.*ssl");
        let wanted =
            ["ssl.ciphers.", "ssl.curves.", "ssl.sigalgs.", "ssl.versions.", "ssl.session_reused", "ssl.handshake"];
        let short = |(name, count): (String, u64)| {
            let at = wanted.iter().find_map(|part| name.find(part))?;
            Some((name[at + "ssl.".len()..].to_owned(), count))
        };
        stats.into_iter().filter_map(short).collect()
    }

    fn pair(&self, path: Path) -> &Pair {
        match path {
            Path::Direct | Path::Relay => &self.plain,
            Path::Mesh => &self.mesh,
            Path::Sidecar => &self.sidecar.as_ref().expect("the path was set up").pods,
            Path::HboneEnvoy => &self.hbone.as_ref().expect("the path was set up").pods,
        }
    }
}

impl Pair {
    fn start(tb: &Testbed, namespace: &str) -> Self {
        let pod = |name: &str| tb.pod(&format!("{namespace}/{name}"));
        let (client, near) = (pod("client").start(), pod("near").start());
        let (server, other) = (pod("server").on(tb.node(1)).start(), pod("other").on(tb.node(1)).start());
        Self { client, server, near, other }
    }

    /// Else what is measured on new connections is how long closed ones keep their source ports.
    fn reuse_ports(&self) {
        [&self.client, &self.server, &self.near, &self.other]
            .iter()
            .for_each(|pod| pod.netns().sysctl("net/ipv4/tcp_tw_reuse", "1"));
    }
}

fn start_sidecars(tb: &Testbed, pods: &Pair, authority: &Authority) -> [Envoy; 2] {
    let identity = pods.client.identity();
    let leaf = authority.issue(&identity);
    [("client", &pods.client), ("server", &pods.server)].map(|(name, pod)| {
        sidecar(tb, &format!("sidecar-{name}"), &pod.beside("sidecar"), (authority, &leaf, &identity), (0, 0))
    })
}

/// A sidecar that knows further services, each with so many endpoints.
pub fn sidecar(
    tb: &Testbed,
    name: &str,
    place: &Place,
    (authority, leaf, identity): (&Authority, &Leaf, &str),
    further: (usize, usize),
) -> Envoy {
    let material = (leaf, authority.root_pem.as_str(), identity);
    let ways = (("10.244.0.0", 16), SidecarPorts { http: &[HTTP_PORT] });
    Envoy::sidecar(place, &tb.path(""), name, material, ways, further, WORKERS)
}

fn start_hbone(tb: &Testbed, pods: &Pair, authority: &Authority) -> [Envoy; 2] {
    let identity = pods.client.identity();
    let leaf = authority.issue(&identity);
    let material = (&leaf, authority.root_pem.as_str(), identity.as_str());
    let (near, far) = (pods.client.beside("envoy"), pods.server.beside("envoy"));
    let apps = PORTS.map(|port| pods.server.at(port));
    let server = Envoy::hbone_server_of(&far, &tb.path(""), &apps, material, WORKERS);
    let ports = PORTS.map(|port| (port + RELAY, pods.server.at(port)));
    let client = Envoy::hbone_client_of(&near, &tb.path(""), pods.server.at(HBONE), &ports, material, WORKERS);
    [client, server]
}

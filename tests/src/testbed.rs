//! The testbed itself: the network between nodes, the nodes, places outside the cluster, and the clean-up.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use crate::capture::Capture;
use crate::cgroup::{Cgroup, cgroup2_root};
use crate::cleanup;
use crate::cluster::{
    Cluster, Manifests, Namespace, Node, PodSpec, ServiceSpec, TokenKey, attach_to_lan, route_to_pods,
};
use crate::mesh::{Mesh, MeshOptions};
use crate::name::{BPF_DIR, TestbedName};
use crate::netns::{self, Netns};
use crate::place::Place;

/// Number of the control plane's machine.
const CONTROL: u8 = 2;

/// A cluster of network namespaces on this machine. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct Testbed {
    // Ended before the rest: its processes live in what is removed below.
    pub(crate) mesh: OnceLock<Mesh>,
    name: TestbedName,
    cluster: Arc<Cluster>,
    nodes: Vec<Node>,
    lan: Netns,
    control: Place,
    cgroup: Cgroup,
    keys: TokenKey,
}

impl Default for Testbed {
    fn default() -> Self {
        Self::new()
    }
}

impl Testbed {
    /// Two nodes, no pods, no mesh yet.
    pub fn new() -> Self {
        Self::with_nodes(2)
    }

    /// So many nodes (up to 9), no pods, no mesh yet.
    pub fn with_nodes(count: usize) -> Self {
        assert!((1..=9).contains(&count), "a testbed has one to nine nodes");
        can_run().unwrap_or_else(|reason| panic!("{reason}"));
        cleanup::sweep();
        netns::prepare();
        let name = TestbedName::fresh();
        cleanup::register(&name);
        let dir = name.dir();
        for sub in ["logs", "status", "tokens", "run"] {
            fs::create_dir_all(dir.join(sub)).unwrap_or_else(|e| panic!("make {}/{sub}: {e}", dir.display()));
        }
        let manifests = Manifests::create(dir.join("manifests"), dir.join("staging"));
        let cgroup = Cgroup::create(name.cgroup(&cgroup2_root()));
        let lan = Netns::create(&name.netns("lan"), &[]);
        lan.ip("link add lan type bridge mcast_snooping 0\nlink set lan up\n");
        // The bridge only carries frames; on the nodes these stay as Kubernetes wants them.
        lan.sysctl("net/bridge/bridge-nf-call-iptables", "0");
        lan.sysctl("net/bridge/bridge-nf-call-ip6tables", "0");
        let nodes: Vec<Node> = (0..count).map(|index| Node::create(&name, &lan, &cgroup, index)).collect();
        for node in &nodes {
            route_to_pods(node.netns(), Some(node.index()), count);
            manifests.put(node.object());
        }
        let cluster = Arc::new(Cluster::new(name.clone(), manifests));
        let control = machine(&name, &lan, &cgroup, "control", CONTROL, count);
        let testbed =
            Self { mesh: OnceLock::new(), name, cluster, nodes, lan, control, cgroup, keys: TokenKey::generate() };
        testbed.keys.write_public(&testbed.path("service-account.pub"));
        testbed
    }

    pub fn name(&self) -> &TestbedName {
        &self.name
    }

    /// A path in the testbed's own directory.
    pub fn path(&self, file: &str) -> PathBuf {
        self.name.dir().join(file)
    }

    /// A node, counted from 0.
    pub fn node(&self, index: usize) -> &Node {
        &self.nodes[index]
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The place of the control plane: its own netns on the network between nodes.
    pub fn control_place(&self) -> &Place {
        &self.control
    }

    /// Address of the control plane.
    pub fn control_ip(&self) -> IpAddr {
        control_ip()
    }

    /// The cgroup of everything in this testbed.
    pub fn cgroup(&self) -> &Cgroup {
        &self.cgroup
    }

    /// The key that signs service account tokens, to mint some with particulars.
    pub fn token_key(&self) -> &TokenKey {
        &self.keys
    }

    /// A namespace; made if it is not there.
    pub fn namespace(&self, name: &str) -> Namespace {
        Namespace::new(self.cluster.clone(), name)
    }

    /// A pod to be started, on the first node unless told otherwise: `tb.pod("shop/web").on(tb.node(1)).start()`.
    #[track_caller]
    pub fn pod(&self, path: &str) -> PodSpec<'_> {
        PodSpec::new(self.cluster.clone(), &self.nodes[0], path)
    }

    /// A service to be made: `tb.service("shop/web").port(80, 8080).create()`.
    #[track_caller]
    pub fn service(&self, path: &str) -> ServiceSpec {
        ServiceSpec::new(self.cluster.clone(), path)
    }

    /// A machine outside the cluster, on the network between nodes.
    pub fn outside(&self, name: &str) -> Outside {
        let number = 100 + self.cluster.number() as u8;
        let place = machine(&self.name, &self.lan, &self.cgroup, name, number, self.nodes.len());
        Outside { place, number }
    }

    /// Records all frames between nodes, each once, from now on.
    pub fn wire(&self) -> Capture {
        Capture::between_nodes(&self.lan)
    }

    /// Cuts or mends a node's link to the others.
    pub fn set_link(&self, node: usize, up: bool) {
        self.lan.ip(&format!("link set n{node} {}\n", if up { "up" } else { "down" }));
    }

    /// The netns of the bridge between nodes; the port of node `i` is called `n<i>`.
    pub fn lan(&self) -> &Netns {
        &self.lan
    }

    /// Writes a file into the folder of manifests as it is, also one that is broken.
    pub fn put_manifest(&self, file: &str, text: &str) {
        self.cluster.manifests.put_text(file, text);
    }

    /// Removes a file from the folder of manifests.
    pub fn remove_manifest(&self, file: &str) {
        self.cluster.manifests.remove(file);
    }

    /// Starts the control plane, and an agent and a proxy per node, and waits until all are ready.
    pub fn start_mesh(&self) -> &Mesh {
        self.start_mesh_with(MeshOptions::default())
    }

    /// As [`Testbed::start_mesh`], with other settings.
    pub fn start_mesh_with(&self, options: MeshOptions) -> &Mesh {
        assert!(self.mesh.get().is_none(), "the mesh runs already");
        self.mesh.get_or_init(|| Mesh::start(self, options))
    }

    /// The running mesh.
    #[track_caller]
    pub fn mesh(&self) -> &Mesh {
        self.mesh.get().expect("call start_mesh first")
    }

    pub(crate) fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        cleanup::remove(&self.name);
    }
}

/// A machine outside the cluster.
#[derive(Debug)]
pub struct Outside {
    place: Place,
    number: u8,
}

impl Outside {
    pub fn ip4(&self) -> IpAddr {
        machine_ip4(self.number).into()
    }

    pub fn ip6(&self) -> IpAddr {
        machine_ip6(self.number).into()
    }
}

impl std::ops::Deref for Outside {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

pub(crate) fn control_ip() -> IpAddr {
    machine_ip4(CONTROL).into()
}

/// Whether this process can make a testbed here; else why not, and what helps.
pub fn can_run() -> Result<(), String> {
    if !rustix::process::geteuid().is_root() {
        return Err("a testbed makes network namespaces: run as root".into());
    }
    if !bpf_mounted() {
        return Err(format!("no BPF file system at {BPF_DIR}: `cargo xtask setup` mounts one"));
    }
    Ok(())
}

fn bpf_mounted() -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq([BPF_DIR, "bpf"]))
}

/// A netns on the network between nodes that is no node.
fn machine(testbed: &TestbedName, lan: &Netns, root: &Cgroup, name: &str, number: u8, nodes: usize) -> Place {
    let netns = Arc::new(Netns::create(&testbed.netns(name), &[]));
    attach_to_lan(lan, &netns, &format!("m{number}"), machine_ip4(number), machine_ip6(number));
    route_to_pods(&netns, None, nodes);
    Place::new(name, netns, root.child(name))
}

fn machine_ip4(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(172, 18, 1, number)
}

fn machine_ip6(number: u8) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 1, number.into())
}

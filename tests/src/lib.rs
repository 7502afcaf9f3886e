//! The testbed: a cluster of network namespaces on this machine, in which the real binaries run.
//!
//! Nodes are namespaces on a bridge (which has a namespace of its own, so that nothing of the host's network is
//! touched), pods are namespaces with a veth to their node and cgroups named as kubelet names them. The demo, the
//! end-to-end tests and the benches are its clients. Root is needed.
//!
//! ```no_run
//! use testbed::{Behaviour, StreamExt, Testbed};
//!
//! let tb = Testbed::new(); // two nodes; everything is removed when it is dropped, also on panic and signals
//! tb.start_mesh(); // control, and an agent and a proxy per node: the binaries beside this test's own
//! let client = tb.pod("shop/client").start();
//! let web = tb.pod("shop/web").on(tb.node(1)).port("http", 8080).start();
//! let service = tb.service("shop/web").port(80, "http").create();
//! tb.namespace("shop").enrol();
//! tb.mesh().wait_in_mesh(&[&client, &web]);
//!
//! let wire = tb.wire(); // records what passes between the nodes
//! let server = web.serve(8080, Behaviour::Echo); // a thread of the test on a socket of the pod
//! let mut stream = client.connect(service.at(80)).expect("connect"); // a real TcpStream, made by the pod's process
//! stream.ask(b"canary");
//! assert_eq!(server.seen()[0].peer.ip(), client.ip());
//! assert!(!wire.contains(b"canary"));
//! ```
//!
//! | to | use |
//! |---|---|
//! | dial with particulars | `pod.dial(addr).from(..).mapped().mptcp().fast_open(b"..").mark(7).connect()` |
//! | talk | [`StreamExt`]: `say`, `hear`, `ask`, `half_close`, `reset`, `hear_end` (tells FIN from RST) |
//! | serve | [`Behaviour`]; `server.seen()` has peer, local address, bytes and end of each connection |
//! | run a program in a pod | `pod.run("curl", &[..])`, `pod.command("curl")` |
//! | a host process of a node, a machine outside | `tb.node(0)` and `tb.outside("db")` are [`Place`]s like pods |
//! | look at the processes | `tb.mesh().node(0).proxy` is a [`Daemon`]: `kill9`, `freeze`, `thaw`, `log`, `pss` |
//! | read admin ports | `tb.mesh().node(0).config_dump()`, `.proxy_metrics()`, `.access_log()`, `.agent_status()` |
//! | restart | `mesh.start_proxy(node)`, `mesh.start_agent(node)`, `mesh.start_control()` |
//! | delete a pod step by step | `begin_deletion`, `destroy_sandbox`, `remove_object`; `delete` does all three |
//! | have a pod's sandbox before its processes, and call the CNI plugin as a runtime | `tb.pod(..).sandbox()`, [`Runtime`] |
//! | have the usual three pods and two services | [`Shop::in_mesh`] |
//! | send bad HBONE, or use a bad certificate | [`HboneClient`], `tb.mesh().authority()`, [`Authority::foreign`] |
//! | have a certificate service that misbehaves, or rotates its roots | [`FakeCa`] |
//! | have Envoy as the other side, or as a sidecar | [`Envoy::hbone_client`], [`Envoy::hbone_server`], [`Envoy::sidecar`] |
//! | have a real Kubernetes API server | [`kubernetes::ApiServer`] |
//! | wait | [`wait_for`] with words for what is waited for; never a fixed sleep |
//!
//! What the testbed itself cannot do panics with the thing and the step; what a test may expect to fail (`connect`)
//! is a `Result`. A failing test prints the ends of all logs. `UNDERSTORY_TEST_LOG=debug` makes the processes talk.
//! The binaries must be built first: `cargo build --workspace --bins`, or `cargo xtask test`, which does everything.

mod app;
mod capture;
mod certs;
mod cgroup;
mod cleanup;
mod cluster;
mod cni;
mod daemon;
mod envoy;
mod fake_ca;
mod grpc;
mod hbone;
mod http;
pub mod kubernetes;
pub mod load;
mod mesh;
mod metrics;
mod name;
mod netns;
mod place;
mod server;
mod shop;
mod stream;
mod testbed;
mod wait;

pub use app::ChurnReport;
pub use capture::{Capture, Flags, Flow, Packet, Records, TlsError, client_hello_key_shares};
pub use certs::{Authority, Leaf};
pub use cgroup::{Cgroup, cgroup2_root};
pub use cleanup::{sweep, traces};
pub use cluster::{
    AUDIENCE, CLUSTER_CIDRS, DATAPLANE_MODE, Families, ISSUER, Namespace, Node, Pod, PodSpec, Qos, Service,
    ServiceSpec, Target, TokenKey, TokenSpec,
};
pub use cni::{CniAnswer, CniCall, Runtime, first_configuration};
pub use daemon::{Daemon, LogMark, describe};
pub use envoy::{Envoy, SidecarPorts, envoy_version, h2spec_binary};
pub use fake_ca::{FakeCa, Manner};
pub use grpc::serve_grpc;
pub use hbone::{
    Begun, Connected, END_HEADERS, HboneClient, Plaintext, RawTunnel, TunnelError, connect_block, frame, frame_bytes,
};
pub use http::Response;
pub use mesh::{AccessLine, Mesh, MeshOptions, NodeMesh, SYSTEM_NAMESPACE, workload_of};
pub use metrics::{Metrics, Sample};
pub use name::TestbedName;
pub use netns::Netns;
pub use place::{Dial, Place, SOCKET_TIMEOUT, binary};
pub use server::{Behaviour, Checksum, Pattern, Seen, Server, canonical, read_checksum, send_pattern};
pub use shop::Shop;
pub use stream::{End, StreamExt};
pub use testbed::{Outside, Testbed, can_run};
pub use wait::{DEADLINE, holds_for, wait_for, wait_for_within, wait_until};

/// What the `testapp` binary runs.
pub mod testapp {
    pub use crate::app::{pause, run_executor};
}

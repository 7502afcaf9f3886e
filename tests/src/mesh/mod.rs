//! The mesh on a testbed: the real control plane, agents and proxies, started as in a cluster, and what tests want
//! to know of them.

mod access_log;
mod node;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use access_log::AccessLine;
pub use node::NodeMesh;
use rustix::process::{Resource, Rlimit, setrlimit};
use serde_json::Value;

use crate::certs::Authority;
use crate::cluster::{AUDIENCE, CLUSTER_CIDRS, ISSUER, Pod, container_id};
use crate::daemon::Daemon;
use crate::http::Response;
use crate::metrics::Metrics;
use crate::place::{Place, binary};
use crate::testbed::Testbed;
use crate::wait::{wait_for, wait_for_within};

/// Namespace and service account of the node proxies.
pub const SYSTEM_NAMESPACE: &str = "understory-system";
const CONTROL_NAME: &str = "control.understory-system.svc";
const CONTROL_PORT: u16 = 15012;
const PROXY_ADMIN: u16 = 15000;
const PROXY_METRICS: u16 = 15020;
const PROXY_READINESS: u16 = 15021;
const AGENT_ADMIN: u16 = 15014;

/// Settings of the mesh that differ from the defaults.
#[derive(Debug, Clone, Default)]
pub struct MeshOptions {
    /// Proxies ask for destinations as they are needed.
    pub on_demand: bool,
    /// Environment of the proxies.
    pub proxy_env: Vec<(String, String)>,
    /// Descriptors that a proxy may have, in the place of the machine's limit.
    pub proxy_descriptors: Option<u64>,
    /// Further arguments of the agents.
    pub agent_args: Vec<String>,
    /// Kubeconfig by which the agents read from an API server, in the place of the folder of manifests.
    pub agent_kubeconfig: Option<PathBuf>,
    /// Further arguments of the control plane.
    pub control_args: Vec<String>,
    /// Account that may act for a node's pods, in the place of the proxies' own: then every certificate is denied.
    pub trusted_node_account: Option<String>,
    /// Start nothing but the control plane; the rest by `Mesh::start_agent` and `Mesh::start_proxy`.
    pub control_only: bool,
}

impl MeshOptions {
    pub fn proxy_env(mut self, key: &str, value: &str) -> Self {
        self.proxy_env.push((key.to_owned(), value.to_owned()));
        self
    }

    pub fn proxy_descriptors(mut self, most: u64) -> Self {
        self.proxy_descriptors = Some(most);
        self
    }

    pub fn agent_arg(mut self, arg: &str) -> Self {
        self.agent_args.push(arg.to_owned());
        self
    }

    pub fn control_arg(mut self, arg: &str) -> Self {
        self.control_args.push(arg.to_owned());
        self
    }
}

/// The processes of a mesh.
#[derive(Debug)]
pub struct Mesh {
    options: MeshOptions,
    control: Daemon,
    control_place: Place,
    nodes: Vec<NodeMesh>,
    dir: PathBuf,
}

impl Mesh {
    pub(crate) fn start(testbed: &Testbed, options: MeshOptions) -> Self {
        let place = testbed.control_place();
        let nodes = testbed.nodes().iter().map(|node| NodeMesh::prepare(testbed, node)).collect();
        let mesh = Self {
            options,
            control: Daemon::new("control", &testbed.path("logs")),
            control_place: place.again(place.cgroup().child("control")),
            nodes,
            dir: testbed.name().dir(),
        };
        mesh.start_control();
        mesh.wait_control_ready();
        if !mesh.options.control_only {
            for node in &mesh.nodes {
                mesh.start_agent(node);
                mesh.start_proxy(node);
            }
            for node in &mesh.nodes {
                node.wait_ready();
            }
        }
        mesh
    }

    pub fn control(&self) -> &Daemon {
        &self.control
    }

    /// Agent and proxy of a node, counted from 0.
    pub fn node(&self, index: usize) -> &NodeMesh {
        &self.nodes[index]
    }

    pub fn nodes(&self) -> &[NodeMesh] {
        &self.nodes
    }

    /// Agent and proxy of the node that a pod runs on.
    pub fn node_of(&self, pod: &Pod) -> &NodeMesh {
        self.nodes.iter().find(|node| node.node == pod.node()).expect("a pod runs on a node of its testbed")
    }

    /// Starts the control plane, at first or again.
    pub fn start_control(&self) {
        let mut command = self.control_place.command(binary("control"));
        command.env("RUST_LOG", log_level());
        command.arg("serve");
        let path = |file: &str| self.dir.join(file).into_os_string();
        command.arg("--manifests").arg(path("manifests"));
        command.arg("--status-dir").arg(path("status"));
        command.arg("--ca-dir").arg(path("ca"));
        command.arg("--root-cert").arg(self.root_cert());
        command.arg("--service-account-key").arg(path("service-account.pub"));
        command.args(["--service-account-issuer", ISSUER, "--token-audience", AUDIENCE]);
        command.args(["--listen", "[::]:15012", "--admin-addr", "[::]:15014", "--server-name", CONTROL_NAME]);
        if let Some(account) = &self.options.trusted_node_account {
            command.args(["--trusted-node-account", account]);
        }
        command.args(&self.options.control_args);
        self.control.start(command);
    }

    /// Waits until the control plane serves.
    #[track_caller]
    pub fn wait_control_ready(&self) {
        let admin = (Ipv4Addr::LOCALHOST, AGENT_ADMIN).into();
        wait_ready_at("control", &self.control, || self.control_place.http_get(admin, "/readyz"));
    }

    pub fn control_metrics(&self) -> Metrics {
        let admin = (Ipv4Addr::LOCALHOST, AGENT_ADMIN).into();
        Metrics::parse(&expect_ok("control's metrics", self.control_place.http_get(admin, "/metrics")))
    }

    /// A page of control's admin port, as JSON.
    #[track_caller]
    pub fn control_admin(&self, path: &str) -> Value {
        let admin = (Ipv4Addr::LOCALHOST, AGENT_ADMIN).into();
        let body = expect_ok("control's admin page", self.control_place.http_get(admin, path));
        serde_json::from_str(&body).unwrap_or_else(|e| panic!("{path} is no JSON: {e}\n{body}"))
    }

    /// Runs `control ca` with these arguments on the control plane's own folder.
    pub fn control_ca(&self, args: &[&str]) -> std::process::Output {
        let mut command = self.control_place.command(binary("control"));
        command.arg("ca").args(args).arg("--ca-dir").arg(self.dir.join("ca"));
        command.output().unwrap_or_else(|e| panic!("run control ca: {e}"))
    }

    /// Waits until every certificate of every proxy came with so many roots.
    #[track_caller]
    pub fn wait_roots(&self, count: usize, within: Duration) {
        for node in &self.nodes {
            let what = format!("the certificates on {} to come with {count} roots", node.node);
            wait_for_within(within, &what, || {
                let dump = node.config_dump();
                let certificates = dump["certificates"].as_array()?;
                let has = |c: &Value| c["rootCerts"].as_array().is_some_and(|roots| roots.len() == count);
                (!certificates.is_empty() && certificates.iter().all(has)).then_some(())
            });
        }
    }

    /// Serial numbers of the certificates that the proxies hold for their pods.
    #[track_caller]
    pub fn serial_numbers(&self) -> Vec<Value> {
        let of = |node: &NodeMesh| node.config_dump()["certificates"].as_array().cloned().unwrap_or_default();
        self.nodes.iter().flat_map(of).map(|c| c["certChain"][0]["serialNumber"].clone()).collect()
    }

    /// Waits until none of these certificates is in use, and no new connection is put on a tunnel of theirs.
    #[track_caller]
    pub fn wait_renewed(&self, before: &[Value], within: Duration) {
        wait_for_within(within, "all certificates to be renewed", || {
            self.serial_numbers().iter().all(|serial| !before.contains(serial)).then_some(())
        });
        for node in &self.nodes {
            node.proxy.wait_log(&["new connections are kept off tunnels from before"]);
        }
    }

    /// The root certificate that control publishes.
    pub fn root_cert(&self) -> PathBuf {
        self.dir.join("root-cert.pem")
    }

    /// The control plane's certificate authority, to issue certificates for peers that are not ours.
    pub fn authority(&self) -> Authority {
        Authority::load(&self.dir.join("ca"))
    }

    /// Starts a node's agent, at first or again.
    pub fn start_agent(&self, node: &NodeMesh) {
        let place = node.host.again(node.agent_cgroup.clone());
        let mut command = place.command(binary("ztunnel"));
        command.env("RUST_LOG", log_level());
        command.arg("agent").args(["--node-name", &node.node]);
        match &self.options.agent_kubeconfig {
            Some(path) => command.args(["--source", "kubernetes", "--kubeconfig"]).arg(path),
            None => {
                command.arg("--manifests").arg(self.dir.join("manifests"));
                command.arg("--status-dir").arg(self.dir.join("status"))
            }
        };
        command.arg("--run-dir").arg(&node.run_dir);
        command.arg("--zds-socket").arg(node.zds_socket());
        command.arg("--bpf-dir").arg(&node.bpf_dir);
        command.arg("--cgroup-root").arg(node.node_cgroup.path());
        command.args(["--admin-addr", "[::]:15014"]);
        command.args(&self.options.agent_args);
        node.agent.start(command);
    }

    /// Starts a node's proxy, at first or again.
    pub fn start_proxy(&self, node: &NodeMesh) {
        self.start_proxy_with(node, &[]);
    }

    /// Starts a node's proxy with further environment.
    pub fn start_proxy_with(&self, node: &NodeMesh, env: &[(&str, &str)]) {
        node.proxy.start(self.proxy_command(node, env));
    }

    /// Starts a node's proxy with further environment and a log that nobody reads.
    pub fn start_proxy_unread(&self, node: &NodeMesh, env: &[(&str, &str)]) {
        node.proxy.start_unread(self.proxy_command(node, env));
    }

    /// The command that starts a node's proxy in its pod, with further environment: to try wrong settings.
    pub fn proxy_command(&self, node: &NodeMesh, env: &[(&str, &str)]) -> Command {
        // A restarted container has a cgroup of its own in the same pod.
        let number = node.proxy_starts.fetch_add(1, Ordering::Relaxed) + 1;
        let container = node.proxy_pod_cgroup.child(&container_id(&node.proxy_uid, number));
        let mut command = node.host.again(container).command(binary("ztunnel"));
        command.arg("proxy").env_clear();
        let control = format!("https://{}:{CONTROL_PORT}", crate::testbed::control_ip());
        // The names and values of the upstream chart and the downward API.
        command.envs([
            ("NODE_NAME", node.node.as_str()),
            ("POD_NAME", &node.proxy_pod_name()),
            ("POD_NAMESPACE", SYSTEM_NAMESPACE),
            ("SERVICE_ACCOUNT", "ztunnel"),
            ("INSTANCE_IP", &node.instance_ip),
            ("ISTIO_META_CLUSTER_ID", "Kubernetes"),
            ("XDS_ADDRESS", &control),
            ("CA_ADDRESS", &control),
            ("ALT_XDS_HOSTNAME", CONTROL_NAME),
            ("ALT_CA_HOSTNAME", CONTROL_NAME),
            ("RUST_LOG", &log_level()),
            ("ZTUNNEL_WORKER_THREADS", "2"),
            ("CLUSTER_CIDRS", CLUSTER_CIDRS),
        ]);
        command.env("XDS_ROOT_CA", self.root_cert()).env("CA_ROOT_CA", self.root_cert());
        command.env("AUTH_TOKEN", &node.token).env("INPOD_UDS", node.zds_socket());
        if self.options.on_demand {
            command.env("XDS_ON_DEMAND", "true");
        }
        command.envs(self.options.proxy_env.iter().map(|(key, value)| (key, value)));
        command.envs(env.iter().copied());
        if let Some(most) = self.options.proxy_descriptors {
            let limit = Rlimit { current: Some(most), maximum: Some(most) };
            // SAFETY: between fork and exec it makes one system call and touches no memory of others.
            unsafe { command.pre_exec(move || Ok(setrlimit(Resource::Nofile, limit)?)) };
        }
        command
    }

    /// Waits until the agents have enrolled the pods and every proxy knows that they speak HBONE.
    #[track_caller]
    pub fn wait_in_mesh(&self, pods: &[&Pod]) {
        self.wait_protocol(pods, "HBONE");
        for pod in pods {
            let node = self.node_of(pod);
            let what = format!("the proxy on {} to run pod {}", node.node, pod.name());
            wait_for(&what, || (node.pod_state(pod)?["state"] == "Up").then_some(()));
        }
    }

    /// Waits until the pods are out: no status, no listener, and every proxy knows that they speak plain TCP.
    #[track_caller]
    pub fn wait_out_of_mesh(&self, pods: &[&Pod]) {
        self.wait_protocol(pods, "TCP");
        for pod in pods {
            let node = self.node_of(pod);
            let what = format!("the proxy on {} to drop pod {}", node.node, pod.name());
            wait_for(&what, || node.pod_state(pod).is_none().then_some(()));
            wait_for(&format!("the status file of {} to go", pod.name()), || self.status(pod).is_none().then_some(()));
        }
    }

    #[track_caller]
    fn wait_protocol(&self, pods: &[&Pod], protocol: &str) {
        for node in self.nodes.iter().filter(|node| node.proxy.runs()) {
            // On demand a proxy holds only its own node's pods until it needs others.
            let held = |pod: &&&Pod| !self.options.on_demand || pod.node() == node.node;
            let pods: Vec<&Pod> = pods.iter().filter(held).copied().collect();
            let what = format!("the proxy on {} to see {protocol} for {:?}", node.node, names(&pods));
            wait_for(&what, || {
                let dump = node.try_config_dump().ok()?;
                let seen = |pod: &&Pod| workload_of(&dump, pod).is_some_and(|w| w["protocol"] == protocol);
                pods.iter().all(seen).then_some(())
            });
        }
    }

    /// What the agent wrote about a pod.
    pub fn status(&self, pod: &Pod) -> Option<Value> {
        let text = fs::read_to_string(self.dir.join(format!("status/{}.yaml", pod.uid()))).ok()?;
        Some(serde_yaml_ng::from_str(&text).unwrap_or_else(|e| panic!("status of {}: {e}\n{text}", pod.name())))
    }

    /// Waits until every proxy sees so many endpoints of a service.
    #[track_caller]
    pub fn wait_endpoints(&self, service: &crate::cluster::Service, count: usize) {
        for node in self.nodes.iter().filter(|node| node.proxy.runs()) {
            let what = format!("the proxy on {} to see {count} endpoints of {}", node.node, service.hostname());
            wait_for(&what, || {
                let dump = node.try_config_dump().ok()?;
                let services = dump["services"].as_array()?;
                let found = services.iter().find(|s| s["hostname"] == service.hostname())?;
                (found["endpoints"].as_object()?.len() == count).then_some(())
            });
        }
    }

    /// CPU time of all proxies, agents and the control plane.
    pub fn cpu(&self) -> Duration {
        let nodes = self.nodes.iter().map(|node| node.proxy_cpu() + node.agent_cgroup.cpu());
        nodes.sum::<Duration>() + self.control_place.cgroup().cpu()
    }
}

/// The entry of a pod in a config dump.
pub fn workload_of<'a>(dump: &'a Value, pod: &Pod) -> Option<&'a Value> {
    let workloads = dump["workloads"].as_array()?;
    workloads.iter().find(|w| w["namespace"] == pod.namespace() && w["name"] == pod.pod_name())
}

fn names(pods: &[&Pod]) -> Vec<String> {
    pods.iter().map(|pod| pod.name().to_owned()).collect()
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Log level of the processes; set `UNDERSTORY_TEST_LOG` for more.
fn log_level() -> String {
    std::env::var("UNDERSTORY_TEST_LOG").unwrap_or_else(|_| "info".to_owned())
}

#[track_caller]
fn wait_ready_at(what: &str, daemon: &Daemon, ask: impl Fn() -> io::Result<Response>) {
    wait_for(&format!("{what} to become ready"), || {
        assert!(daemon.runs(), "{what} ended before it was ready");
        (ask().ok()?.status == 200).then_some(())
    });
}

#[track_caller]
fn expect_ok(what: &str, answer: io::Result<Response>) -> String {
    match answer {
        Ok(answer) if answer.status == 200 => answer.body,
        other => panic!("{what}: {other:?}"),
    }
}

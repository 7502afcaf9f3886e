//! The mesh on a testbed: the real control plane, agents and proxies, started as in a cluster, and what tests want
//! to know of them.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::certs::Authority;
use crate::cgroup::Cgroup;
use crate::cluster::{AUDIENCE, CLUSTER_CIDRS, ISSUER, Node, Pod, Qos, TokenSpec, container_id, pod_cgroup};
use crate::daemon::Daemon;
use crate::http::Response;
use crate::metrics::Metrics;
use crate::place::{Place, binary};
use crate::testbed::Testbed;
use crate::wait::wait_for;

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
    /// Further arguments of the agents.
    pub agent_args: Vec<String>,
    /// Further arguments of the control plane.
    pub control_args: Vec<String>,
    /// Start nothing but the control plane; the rest by `Mesh::start_agent` and `Mesh::start_proxy`.
    pub control_only: bool,
}

impl MeshOptions {
    pub fn proxy_env(mut self, key: &str, value: &str) -> Self {
        self.proxy_env.push((key.to_owned(), value.to_owned()));
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

/// Agent and proxy of one node.
#[derive(Debug)]
pub struct NodeMesh {
    node: String,
    host: Place,
    pub agent: Daemon,
    pub proxy: Daemon,
    agent_cgroup: Cgroup,
    node_cgroup: Cgroup,
    proxy_pod_cgroup: Cgroup,
    proxy_uid: String,
    proxy_starts: AtomicU32,
    run_dir: PathBuf,
    bpf_dir: PathBuf,
    token: PathBuf,
    instance_ip: String,
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
        command.args(["--trusted-node-account", &format!("{SYSTEM_NAMESPACE}/ztunnel")]);
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
        command.arg("--manifests").arg(self.dir.join("manifests"));
        command.arg("--status-dir").arg(self.dir.join("status"));
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
            let what = format!("the proxy on {} to see {protocol} for {:?}", node.node, names(pods));
            wait_for(&what, || {
                let dump = node.try_config_dump().ok()?;
                let seen = |pod: &&&Pod| workload_of(&dump, pod).is_some_and(|w| w["protocol"] == protocol);
                (pods.iter().filter(seen).count() == pods.len()).then_some(())
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

impl NodeMesh {
    fn prepare(testbed: &Testbed, node: &Node) -> Self {
        let name = node.name().to_owned();
        let uid = testbed.name().uid(testbed.cluster().number());
        let token = testbed.path(&format!("tokens/{name}"));
        let minted = testbed.token_key().mint(&TokenSpec {
            issuer: ISSUER.to_owned(),
            audience: AUDIENCE.to_owned(),
            namespace: SYSTEM_NAMESPACE.to_owned(),
            service_account: "ztunnel".to_owned(),
            pod: Some((format!("ztunnel-{name}"), uid.clone())),
            node: Some(name.clone()),
            valid_for: Some(Duration::from_secs(43_200)),
        });
        fs::write(&token, minted).unwrap_or_else(|e| panic!("write {}: {e}", token.display()));
        let run_dir = testbed.path(&format!("run/{name}"));
        fs::create_dir_all(&run_dir).unwrap_or_else(|e| panic!("make {}: {e}", run_dir.display()));
        testbed.namespace(SYSTEM_NAMESPACE).service_account("ztunnel");
        testbed.cluster().manifests.put(proxy_pod(node, &uid));
        let host = node.again(node.cgroup());
        Self {
            agent: Daemon::new(&format!("agent-{name}"), &testbed.path("logs")),
            proxy: Daemon::new(&format!("proxy-{name}"), &testbed.path("logs")),
            agent_cgroup: node.cgroup_root().child("system.slice").child("agent"),
            node_cgroup: node.cgroup_root().clone(),
            proxy_pod_cgroup: pod_cgroup(node, Qos::Burstable, &uid),
            proxy_uid: uid,
            proxy_starts: AtomicU32::new(0),
            run_dir,
            bpf_dir: testbed.name().bpf_dir(&name),
            token,
            instance_ip: node.ip4().to_string(),
            node: name,
            host,
        }
    }

    /// Name of the node.
    pub fn name(&self) -> &str {
        &self.node
    }

    /// The ZDS socket between agent and proxy.
    pub fn zds_socket(&self) -> PathBuf {
        self.run_dir.join("zds.sock")
    }

    /// Directory of this node's pins.
    pub fn bpf_dir(&self) -> &PathBuf {
        &self.bpf_dir
    }

    /// The file with the proxy's service account token.
    pub fn token_file(&self) -> &PathBuf {
        &self.token
    }

    fn proxy_pod_name(&self) -> String {
        format!("ztunnel-{}", self.node)
    }

    /// Waits until agent and proxy are ready.
    #[track_caller]
    pub fn wait_ready(&self) {
        self.wait_agent_ready();
        self.wait_proxy_ready();
    }

    #[track_caller]
    pub fn wait_agent_ready(&self) {
        let what = format!("agent of {}", self.node);
        wait_ready_at(&what, &self.agent, || self.host.http_get(local(AGENT_ADMIN), "/readyz"));
    }

    #[track_caller]
    pub fn wait_proxy_ready(&self) {
        wait_ready_at(&format!("proxy of {}", self.node), &self.proxy, || self.readiness());
    }

    /// What the proxy's readiness endpoint says.
    pub fn readiness(&self) -> io::Result<Response> {
        self.host.http_get(local(PROXY_READINESS), "/healthz/ready")
    }

    #[track_caller]
    pub fn config_dump(&self) -> Value {
        self.try_config_dump().unwrap_or_else(|e| panic!("config dump of the proxy on {}: {e}", self.node))
    }

    fn try_config_dump(&self) -> io::Result<Value> {
        let answer = self.host.http_get(local(PROXY_ADMIN), "/config_dump")?;
        if answer.status != 200 {
            return Err(io::Error::other(format!("status {}", answer.status)));
        }
        serde_json::from_str(&answer.body).map_err(io::Error::other)
    }

    /// GET on the proxy's admin port.
    pub fn admin(&self, path: &str) -> io::Result<Response> {
        self.host.http_get(local(PROXY_ADMIN), path)
    }

    /// POST on the proxy's admin port.
    pub fn admin_post(&self, path: &str) -> io::Result<Response> {
        self.host.http_post(local(PROXY_ADMIN), path)
    }

    #[track_caller]
    pub fn proxy_metrics(&self) -> Metrics {
        Metrics::parse(&expect_ok("the proxy's metrics", self.host.http_get(local(PROXY_METRICS), "/metrics")))
    }

    #[track_caller]
    pub fn agent_metrics(&self) -> Metrics {
        Metrics::parse(&expect_ok("the agent's metrics", self.host.http_get(local(AGENT_ADMIN), "/metrics")))
    }

    /// The agent's list of pods.
    #[track_caller]
    pub fn agent_status(&self) -> Value {
        let body = expect_ok("the agent's status", self.host.http_get(local(AGENT_ADMIN), "/status"));
        serde_json::from_str(&body).unwrap_or_else(|e| panic!("agent status is no JSON: {e}\n{body}"))
    }

    /// The proxy's entry for a pod, if it has one.
    pub fn pod_state(&self, pod: &Pod) -> Option<Value> {
        self.try_config_dump().ok()?["workloadState"].get(pod.uid()).cloned()
    }

    /// CPU time of all lives of the proxy.
    pub fn proxy_cpu(&self) -> Duration {
        self.proxy_pod_cgroup.cpu()
    }

    /// Access-log lines of the proxy so far.
    pub fn access_log(&self) -> Vec<AccessLine> {
        self.proxy.log().lines().filter_map(AccessLine::parse).collect()
    }

    /// Waits for an access-log line for which the check holds.
    #[track_caller]
    pub fn wait_access_line(&self, what: &str, check: impl Fn(&AccessLine) -> bool) -> AccessLine {
        let what = format!("an access line of the proxy on {}: {what}", self.node);
        wait_for(&what, || self.access_log().into_iter().find(|line| check(line)))
    }
}

/// One line of a proxy's access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLine {
    pub text: String,
    pub fields: BTreeMap<String, String>,
}

impl AccessLine {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('\t');
        let scope = parts.nth(2)?;
        if scope != "access" && !scope.starts_with("access{") {
            return None;
        }
        let mut fields = BTreeMap::new();
        let mut rest = parts.next_back()?;
        while let Some((key, after)) = rest.trim_start().split_once('=') {
            let key = key.rsplit(' ').next().unwrap_or(key);
            let (value, left) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(' ').unwrap_or((after, "")),
            };
            fields.insert(key.to_owned(), value.to_owned());
            rest = left;
        }
        Some(Self { text: text.to_owned(), fields })
    }

    /// A field, or nothing.
    pub fn get(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
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

fn proxy_pod(node: &Node, uid: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": format!("ztunnel-{}", node.name()),
            "namespace": SYSTEM_NAMESPACE,
            "uid": uid,
            "labels": { "app": "ztunnel", "istio.io/dataplane-mode": "none" },
        },
        "spec": {
            "nodeName": node.name(),
            "serviceAccountName": "ztunnel",
            "hostNetwork": true,
            "containers": [{ "name": "istio-proxy", "image": "ztunnel" }],
        },
        "status": {
            "phase": "Running",
            "hostIP": node.ip4(),
            "podIP": node.ip4(),
            "podIPs": [{ "ip": node.ip4() }, { "ip": node.ip6() }],
            "conditions": [{ "type": "Ready", "status": "True" }],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_line_is_read_field_by_field() {
        let text = "2026-09-30T12:00:00.000000Z\tinfo\taccess{conn=1}\tconnection complete \
                    src.addr=10.244.0.10:1234 src.workload=\"a b\" direction=\"outbound\" bytes_sent=12";
        let line = AccessLine::parse(text).expect("an access line");
        assert_eq!(line.get("src.addr"), "10.244.0.10:1234");
        assert_eq!(line.get("src.workload"), "a b");
        assert_eq!(line.get("direction"), "outbound");
        assert_eq!(line.get("bytes_sent"), "12");
        assert_eq!(line.get("error"), "");
        assert_eq!(AccessLine::parse("2026-09-30T12:00:00Z\tinfo\tzds\tconnected"), None);
    }
}

//! Agent and proxy of one node: their places, and what they say of themselves.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use serde_json::{Value, json};

use super::{
    AGENT_ADMIN, AccessLine, PROXY_ADMIN, PROXY_METRICS, PROXY_READINESS, SYSTEM_NAMESPACE, expect_ok, local,
    wait_ready_at,
};
use crate::cgroup::Cgroup;
use crate::cluster::{AUDIENCE, ISSUER, Node, Pod, Qos, TokenSpec, pod_cgroup};
use crate::daemon::Daemon;
use crate::http::Response;
use crate::metrics::Metrics;
use crate::place::{Place, binary};
use crate::testbed::Testbed;
use crate::wait::wait_for;

/// Agent and proxy of one node.
#[derive(Debug)]
pub struct NodeMesh {
    pub(super) node: String,
    pub(super) host: Place,
    pub agent: Daemon,
    pub proxy: Daemon,
    pub(super) agent_cgroup: Cgroup,
    pub(super) node_cgroup: Cgroup,
    pub(super) proxy_pod_cgroup: Cgroup,
    pub(super) proxy_uid: String,
    pub(super) proxy_starts: AtomicU32,
    pub(super) run_dir: PathBuf,
    pub(super) bpf_dir: PathBuf,
    pub(super) token: PathBuf,
    pub(super) instance_ip: String,
}

impl NodeMesh {
    pub(super) fn prepare(testbed: &Testbed, node: &Node) -> Self {
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

    /// The CNI plugin's socket of the agent.
    pub fn cni_socket(&self) -> PathBuf {
        self.run_dir.join("cni.sock")
    }

    /// The agent's folder, which is gone when the node starts anew.
    pub fn run_dir(&self) -> &PathBuf {
        &self.run_dir
    }

    /// Directory of this node's pins.
    pub fn bpf_dir(&self) -> &PathBuf {
        &self.bpf_dir
    }

    /// The file with the proxy's service account token.
    pub fn token_file(&self) -> &PathBuf {
        &self.token
    }

    /// Runs a command of an operator on the node, such as `explain`: what it says, or its error.
    pub fn ztunnel(&self, args: &[&str]) -> Result<String, String> {
        let output = self.host.command(binary("ztunnel")).args(args).output();
        let output = output.unwrap_or_else(|e| panic!("run ztunnel {args:?}: {e}"));
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
    }

    pub(super) fn proxy_pod_name(&self) -> String {
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

    pub(super) fn try_config_dump(&self) -> io::Result<Value> {
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

    /// Waits until the proxy has counted at least `least`: a count may follow a moment after what it counts was seen.
    #[track_caller]
    pub fn wait_proxy_count(&self, least: f64, name: &str, labels: &[(&str, &str)]) {
        wait_for(&format!("{name}{labels:?} to reach {least} at the proxy on {}", self.node), || {
            (self.proxy_metrics().sum(name, labels) >= least).then_some(())
        });
    }

    /// Like [`Self::wait_proxy_count`], of the agent.
    #[track_caller]
    pub fn wait_agent_count(&self, least: f64, name: &str, labels: &[(&str, &str)]) {
        wait_for(&format!("{name}{labels:?} to reach {least} at the agent on {}", self.node), || {
            (self.agent_metrics().sum(name, labels) >= least).then_some(())
        });
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

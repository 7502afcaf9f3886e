//! The API server as tests see it: kubectl, objects, its processes.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use super::{Account, Namespace, tool};
use crate::cleanup;
use crate::daemon::Daemon;
use crate::name::TestbedName;
use crate::place::Place;
use crate::testbed::Testbed;

/// A real API server. Dropped, it leaves nothing behind.
#[derive(Debug)]
pub struct ApiServer {
    // Ended in this order: without its etcd, an API server takes most of a minute to end.
    pub controllers: Daemon,
    pub apiserver: Daemon,
    pub etcd: Daemon,
    pub(super) place: Place,
    pub(super) dir: PathBuf,
    pub(super) address: SocketAddr,
    /// What is removed with it, unless it is a testbed's.
    pub(super) owned: Option<TestbedName>,
    pub(super) namespaces: AtomicU32,
}

impl ApiServer {
    /// The one that all tests of this process share, with the kinds of Gateway API and Istio. It ends with the process.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<ApiServer> = OnceLock::new();
        SHARED.get_or_init(|| {
            let server = Self::start();
            server.install_gateway_api();
            server.install_istio();
            server
        })
    }

    /// One of this test alone, with Kubernetes' own kinds only.
    pub fn start() -> Self {
        super::start::alone()
    }

    /// One at `control_ip():6443` of a testbed, where its nodes and its control plane reach it.
    pub fn in_testbed(testbed: &Testbed) -> Self {
        super::start::in_testbed(testbed)
    }

    /// Where it listens; TLS.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The root of its certificate, PEM.
    pub fn ca(&self) -> PathBuf {
        self.dir.join("ca.crt")
    }

    /// A kubeconfig that may do everything.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("admin.kubeconfig")
    }

    /// The network namespace that it lives in, for programs that talk to it.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// A path in its own directory.
    pub fn path(&self, file: &str) -> PathBuf {
        self.dir.join(file)
    }

    /// Makes a namespace with a name that no other test has: the given one and a number.
    #[track_caller]
    pub fn namespace(&self, name: &str) -> Namespace<'_> {
        let number = self.namespaces.fetch_add(1, Ordering::Relaxed);
        Namespace::create(self, format!("{name}-{number}"))
    }

    /// A service account of any namespace; made if it is not there.
    #[track_caller]
    pub fn account(&self, namespace: &str, name: &str) -> Account<'_> {
        Account::create(self, namespace, name)
    }

    /// A node that is there and does nothing; made if it is not there. Endpoint slices leave pods of unknown nodes out.
    #[track_caller]
    pub fn node(&self, name: &str) {
        let admin = self.kubeconfig();
        if !self.try_kubectl(&admin, &["get", "node", name]).status.success() {
            self.apply(&json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } }).to_string());
        }
    }

    /// Runs kubectl as admin; what it prints. Panics if it fails.
    #[track_caller]
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.kubectl_as(&self.kubeconfig(), args)
    }

    /// As [`ApiServer::kubectl`], with another kubeconfig.
    #[track_caller]
    pub fn kubectl_as(&self, kubeconfig: &Path, args: &[&str]) -> String {
        printed("kubectl", args, &self.try_kubectl(kubeconfig, args))
    }

    /// Runs kubectl to its end, also where it fails.
    #[track_caller]
    pub fn try_kubectl(&self, kubeconfig: &Path, args: &[&str]) -> Output {
        let output = self.client("kubectl", kubeconfig).args(args).output();
        output.unwrap_or_else(|e| panic!("start kubectl: {e}"))
    }

    /// kubectl as admin, to be run in other ways: to watch, for example.
    pub fn kubectl_command(&self) -> Command {
        self.client("kubectl", &self.kubeconfig())
    }

    /// Runs helm as admin; what it prints. Panics if it fails.
    #[track_caller]
    pub fn helm(&self, args: &[&str]) -> String {
        printed("helm", args, &self.try_helm(args))
    }

    /// Runs helm as admin to its end, also where it fails.
    #[track_caller]
    pub fn try_helm(&self, args: &[&str]) -> Output {
        self.helm_command().args(args).output().unwrap_or_else(|e| panic!("start helm: {e}"))
    }

    /// helm as admin, to be run in other ways.
    pub fn helm_command(&self) -> Command {
        self.client("helm", &self.kubeconfig())
    }

    /// Creates or changes what the manifests say (YAML or JSON, any number of documents), with server-side apply.
    #[track_caller]
    pub fn apply(&self, manifests: &str) {
        self.feed(&["apply", "--server-side", "--force-conflicts", "-f", "-"], manifests);
    }

    /// Sets the status of objects that are there to what the manifests say.
    #[track_caller]
    pub fn apply_status(&self, manifests: &str) {
        self.feed(&["apply", "--server-side", "--force-conflicts", "--subresource", "status", "-f", "-"], manifests);
    }

    /// What `kubectl get` finds, as JSON: `get(&["pods", "-A"])`. Panics if there is no such object or kind.
    #[track_caller]
    pub fn get(&self, args: &[&str]) -> Value {
        let text = self.kubectl(&[&["get", "-o", "json"], args].concat());
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("kubectl get {args:?} printed no JSON: {e}\n{text}"))
    }

    /// Runs kubectl with manifests on its standard input; what it prints.
    #[track_caller]
    pub fn feed(&self, args: &[&str], manifests: &str) -> String {
        let mut command = self.kubectl_command();
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("start kubectl: {e}"));
        let mut stdin = child.stdin.take().expect("piped");
        // It says itself why it did not read everything.
        let _ = stdin.write_all(manifests.as_bytes());
        drop(stdin);
        let output = child.wait_with_output().unwrap_or_else(|e| panic!("wait for kubectl: {e}"));
        if !output.status.success() {
            eprintln!("{manifests}");
        }
        printed("kubectl", args, &output)
    }

    /// Adds the kinds of Gateway API, and waits until they are served.
    #[track_caller]
    pub fn install_gateway_api(&self) {
        self.install_kinds("gateway-api");
    }

    /// Adds the kinds of Istio, and waits until they are served.
    #[track_caller]
    pub fn install_istio(&self) {
        self.install_kinds("istio");
    }

    #[track_caller]
    fn install_kinds(&self, of: &str) {
        let dir = tool("crds").join(of);
        let dir = dir.to_str().expect("a path in UTF-8");
        self.kubectl(&["apply", "--server-side", "-f", dir]);
        self.kubectl(&["wait", "--for", "condition=Established", "--timeout", "60s", "crd", "--all"]);
    }

    fn client(&self, program: &str, kubeconfig: &Path) -> Command {
        let mut command = self.place.command(tool(program));
        // Caches and settings of whoever runs the tests are left alone.
        command.env("KUBECONFIG", kubeconfig).env("HOME", &self.dir);
        for variable in ["XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "KUBECACHEDIR"] {
            command.env_remove(variable);
        }
        command
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        for daemon in [&self.controllers, &self.apiserver, &self.etcd] {
            daemon.end();
        }
        if let Some(name) = &self.owned {
            cleanup::remove(name);
        }
    }
}

#[track_caller]
fn printed(program: &str, args: &[&str], output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {args:?}: {errors}{text}");
    text
}

//! `control serve` on a real API server, with the rights of its own role in the chart and no others.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::Value;

use super::{ApiServer, Namespace};
use crate::daemon::Daemon;
use crate::http::Response;
use crate::place::binary;
use crate::wait::wait_for;

/// One replica. It is ended when it is dropped.
#[derive(Debug)]
pub struct Replica<'a> {
    server: &'a ApiServer,
    daemon: Daemon,
    kubeconfig: PathBuf,
    system: String,
    name: String,
    listen: SocketAddr,
    admin: SocketAddr,
}

impl<'a> Replica<'a> {
    /// Starts one in the mesh's own namespace; all of an API server must be of the same.
    #[track_caller]
    pub fn start(server: &'a ApiServer, system: &Namespace<'_>, name: &str) -> Self {
        let account = system.account("control");
        server.apply(&ROLE.replace("{{ .Release.Namespace }}", system.name()));
        Self::with(server, account.kubeconfig(), system.name().to_owned(), name)
    }

    /// Starts another one beside this one, for which the API server need not be there.
    pub fn another(&self, name: &str) -> Self {
        Self::with(self.server, self.kubeconfig.clone(), self.system.clone(), name)
    }

    fn with(server: &'a ApiServer, kubeconfig: PathBuf, system: String, name: &str) -> Self {
        static PORTS: AtomicU16 = AtomicU16::new(15_100);
        let port = PORTS.fetch_add(2, Ordering::Relaxed);
        let replica = Self {
            server,
            daemon: Daemon::new(name, &server.path("../logs")),
            kubeconfig,
            system,
            name: name.to_owned(),
            listen: (Ipv4Addr::LOCALHOST, port).into(),
            admin: (Ipv4Addr::LOCALHOST, port + 1).into(),
        };
        replica.start_again();
        replica
    }

    /// Starts it, which may have been ended before.
    pub fn start_again(&self) {
        let mut command = self.server.place().command(binary("control"));
        command.args(["serve", "--source", "kubernetes", "--kubeconfig"]).arg(&self.kubeconfig);
        command.arg("--ca-dir").arg(self.ca_dir());
        command.args(["--ca-secret", "understory-ca", "--pod-name", &self.name, "--server-name", "localhost"]);
        command.args(["--system-namespace", &self.system]);
        command.args(["--trusted-node-account", &format!("{}/ztunnel", self.system)]);
        command.args(["--listen", &self.listen.to_string(), "--admin-addr", &self.admin.to_string()]);
        self.daemon.start(command);
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Where discovery and certificates are served.
    pub fn address(&self) -> SocketAddr {
        self.listen
    }

    /// The folder of its certificate authority.
    pub fn ca_dir(&self) -> PathBuf {
        self.server.path(&format!("{}-ca", self.name))
    }

    /// The page that says whether it serves, and what is not as it should be.
    #[track_caller]
    pub fn readiness(&self) -> Response {
        assert!(self.daemon.runs(), "{} has ended:\n{}", self.name, self.daemon.log());
        let page = self.server.place().http_get(self.admin, "/readyz");
        page.unwrap_or_else(|e| Response { status: 0, body: e.to_string() })
    }

    /// Waits until it serves.
    #[track_caller]
    pub fn wait_ready(&self) {
        wait_for(&format!("{} to be ready", self.name), || (self.readiness().status == 200).then_some(()));
    }

    /// A JSON page of its admin server.
    #[track_caller]
    pub fn admin(&self, path: &str) -> Value {
        let page = self.server.place().http_get(self.admin, path).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        serde_json::from_str(&page.body).unwrap_or_else(|e| panic!("{}{path}: {e}: {}", self.name, page.body))
    }

    /// What it serves under a name, as its admin server shows it.
    #[track_caller]
    pub fn served(&self, name: &str) -> Option<Value> {
        let page = self.admin("/debug/resources");
        page["resources"].as_array()?.iter().find(|resource| resource["name"] == name).cloned()
    }

    /// Waits until it serves something under a name that is as the closure says.
    #[track_caller]
    pub fn wait_served(&self, name: &str, is: impl Fn(&Value) -> bool) -> Value {
        wait_for(&format!("{} to serve {name}", self.name), || self.served(name).filter(|resource| is(resource)))
    }
}

impl Drop for Replica<'_> {
    fn drop(&mut self) {
        self.daemon.end();
    }
}

const ROLE: &str = include_str!("../../../deploy/helm/templates/control-rbac.yaml");

//! Starts etcd, the API server and the controllers, in the order in which they need each other.
//!
//! Must never listen anywhere but in a network namespace that tests made.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use rcgen::{DnType, ExtendedKeyUsagePurpose, KeyPair, SanType};

use super::{ApiServer, tool};
use crate::certs::Authority;
use crate::cgroup::{Cgroup, cgroup2_root};
use crate::cleanup;
use crate::daemon::Daemon;
use crate::name::TestbedName;
use crate::netns::{self, Netns};
use crate::place::Place;
use crate::testbed::{Testbed, can_run};
use crate::wait::wait_for_within;

const PORT: u16 = 6443;
const ETCD: &str = "127.0.0.1:2379";
const ETCD_PEERS: &str = "127.0.0.1:2380";
const SERVICE_CIDRS: &str = "10.96.0.0/16,fd00:10:96::/112";
/// First address of the services: the API server's own.
const OWN_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 0, 1);
/// Starting takes three to five seconds of an idle machine.
const READY: Duration = Duration::from_secs(120);

const CONTROLLERS: &str = "namespace-controller,serviceaccount-controller,root-ca-certificate-publisher-controller,\
     endpointslice-controller,deployment-controller,replicaset-controller,job-controller,garbage-collector-controller";

/// In a network namespace of its own.
pub(super) fn alone() -> ApiServer {
    can_run().unwrap_or_else(|reason| panic!("{reason}"));
    cleanup::sweep();
    netns::prepare();
    let name = TestbedName::fresh();
    cleanup::register(&name);
    let cgroup = Cgroup::create(name.cgroup(&cgroup2_root()));
    let netns = Netns::create(&name.netns("api"), &[]);
    let place = Place::new("api", Arc::new(netns), cgroup);
    let dir = name.dir();
    start(place, dir, Ipv4Addr::LOCALHOST.into(), Some(name))
}

/// On the machine of a testbed's control plane.
pub(super) fn in_testbed(testbed: &Testbed) -> ApiServer {
    let place = testbed.control_place().again(testbed.cgroup().child("api"));
    start(place, testbed.path("."), testbed.control_ip(), None)
}

fn start(place: Place, base: PathBuf, ip: IpAddr, owned: Option<TestbedName>) -> ApiServer {
    let (logs, dir) = (base.join("logs"), base.join("kubernetes"));
    for dir in [&logs, &dir] {
        fs::create_dir_all(dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
    }
    let server = ApiServer {
        controllers: Daemon::new("kube-controller-manager", &logs),
        apiserver: Daemon::new("kube-apiserver", &logs),
        etcd: Daemon::new("etcd", &logs),
        place,
        dir,
        address: SocketAddr::new(ip, PORT),
        owned,
        namespaces: AtomicU32::new(0),
    };
    server.write_credentials();
    server.start_etcd();
    server.start_apiserver();
    server.start_controllers();
    server
}

impl ApiServer {
    /// Starts etcd, or starts it again with what it had stored.
    pub fn start_etcd(&self) {
        let mut command = self.daemon("etcd");
        command.args(["--unsafe-no-fsync", "--log-level", "warn", "--data-dir"]).arg(self.dir.join("etcd"));
        let (clients, peers) = (format!("http://{ETCD}"), format!("http://{ETCD_PEERS}"));
        command.args(["--listen-client-urls", &clients, "--advertise-client-urls", &clients]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}")]);
        self.etcd.start(command);
    }

    /// Starts the API server, or starts it again, and waits until it is ready.
    #[track_caller]
    pub fn start_apiserver(&self) {
        let mut command = self.daemon("kube-apiserver");
        let listen = if self.address.ip().is_loopback() { "127.0.0.1" } else { "0.0.0.0" };
        let ip = self.address.ip().to_string();
        command.args(["--etcd-servers", &format!("http://{ETCD}"), "--bind-address", listen]);
        command.args(["--advertise-address", &ip, "--secure-port", &PORT.to_string()]);
        // Nothing in the default namespace points at it: it may listen on loopback, which no endpoint may be.
        command.args(["--endpoint-reconciler-type", "none", "--service-cluster-ip-range", SERVICE_CIDRS]);
        command.args(["--allow-privileged=true", "--anonymous-auth=false", "--authorization-mode", "RBAC"]);
        command.args(["--service-account-issuer", crate::cluster::ISSUER]);
        for (flag, file) in [
            ("--tls-cert-file", "server.crt"),
            ("--tls-private-key-file", "server.key"),
            ("--token-auth-file", "tokens.csv"),
            ("--service-account-key-file", "accounts.pub"),
            ("--service-account-signing-key-file", "accounts.key"),
        ] {
            command.arg(flag).arg(self.dir.join(file));
        }
        self.apiserver.start(command);
        wait_for_within(READY, "the API server to be ready", || {
            for daemon in [&self.etcd, &self.apiserver] {
                assert!(daemon.runs(), "{} has ended:\n{}", daemon.name(), daemon.log());
            }
            let output = self.try_kubectl(&self.kubeconfig(), &["get", "--raw", "/readyz"]);
            output.status.success().then_some(())
        });
    }

    /// Lets etcd forget all changes up to now, so that nobody can hear of them later.
    #[track_caller]
    pub fn forget_history(&self) {
        let ask = |path: &str, body: String| -> serde_json::Value {
            let output = self.place.run("curl", &["-s", &format!("http://{ETCD}/v3/kv/{path}"), "-d", &body]);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            serde_json::from_str(&text).unwrap_or_else(|e| panic!("etcd: {e}: {text}"))
        };
        // Any key will do: it is the header that tells the revision.
        let header = ask("range", serde_json::json!({ "key": "AA==" }).to_string())["header"].take();
        let revision = header["revision"].as_str().unwrap_or_else(|| panic!("no revision in {header}"));
        let done = ask("compaction", serde_json::json!({ "revision": revision, "physical": true }).to_string());
        assert!(done["header"].is_object(), "etcd: {done}");
    }

    /// Starts the controllers, or starts them again, and waits until namespaces get their default account.
    #[track_caller]
    pub fn start_controllers(&self) {
        let mut command = self.daemon("kube-controller-manager");
        command.args(["--leader-elect=false", "--secure-port", "0", "--controllers", CONTROLLERS]);
        for (flag, file) in [
            ("--kubeconfig", "admin.kubeconfig"),
            ("--service-account-private-key-file", "accounts.key"),
            ("--root-ca-file", "ca.crt"),
        ] {
            command.arg(flag).arg(self.dir.join(file));
        }
        self.controllers.start(command);
        wait_for_within(READY, "the controllers to work", || {
            assert!(self.controllers.runs(), "the controllers have ended:\n{}", self.controllers.log());
            let args = ["get", "serviceaccount", "default", "-n", "default"];
            self.try_kubectl(&self.kubeconfig(), &args).status.success().then_some(())
        });
    }

    fn daemon(&self, program: &str) -> Command {
        let mut command = self.place.command(tool(program));
        command.env("HOME", &self.dir).current_dir(&self.dir);
        command
    }

    /// Keys, certificates, and who may log in.
    fn write_credentials(&self) {
        let authority = Authority::root("kubernetes");
        let mut names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
            .map(|name| SanType::DnsName(name.try_into().expect("a name is ASCII")))
            .to_vec();
        let addresses = [self.address.ip(), Ipv4Addr::LOCALHOST.into(), OWN_SERVICE.into()];
        names.extend(addresses.map(SanType::IpAddress));
        let leaf = authority.issue_with("spiffe://kubernetes", |params| {
            params.subject_alt_names = names;
            params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        });
        let accounts = KeyPair::generate().expect("make a P-256 key");
        let admin = KeyPair::generate().expect("make a P-256 key");
        let token: String = admin.public_key_raw()[1..33].iter().map(|byte| format!("{byte:02x}")).collect();
        for (file, text) in [
            ("ca.crt", authority.root_pem.clone()),
            ("server.crt", leaf.chain_pem),
            ("server.key", leaf.key_pem),
            ("accounts.key", accounts.serialize_pem()),
            ("accounts.pub", accounts.public_key_pem()),
            ("tokens.csv", format!("{token},admin,admin,\"system:masters\"\n")),
        ] {
            write(&self.dir.join(file), &text);
        }
        self.write_kubeconfig("admin", &token);
    }

    /// A kubeconfig with a token, and what it is called: `<name>.kubeconfig`.
    pub(super) fn write_kubeconfig(&self, name: &str, token: &str) -> PathBuf {
        let config = serde_json::json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{
                "name": "tests",
                "cluster": {
                    "server": format!("https://{}", self.address),
                    "certificate-authority": self.ca(),
                },
            }],
            "users": [{ "name": name, "user": { "token": token } }],
            "contexts": [{ "name": "tests", "context": { "cluster": "tests", "user": name } }],
            "current-context": "tests",
        });
        let path = self.dir.join(format!("{name}.kubeconfig"));
        write(&path, &config.to_string());
        path
    }
}

/// Writes a file that only its owner can read.
fn write(path: &Path, text: &str) {
    use std::io::Write;
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(text.as_bytes()));
    written.unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}

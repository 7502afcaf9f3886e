//! Envoy as an HBONE peer and as a sidecar: implementations that share no code with ours. Configurations are static.

mod config;
mod sidecar;

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::certs::Leaf;
use crate::daemon::Daemon;
use crate::place::{Place, built_in};
use crate::wait::wait_for;

pub use sidecar::SidecarPorts;

/// Envoy's own admin port, on loopback of its place.
const ADMIN: u16 = 15000;
/// The port that HBONE has.
const HBONE: u16 = 15008;

/// A running Envoy.
#[derive(Debug)]
pub struct Envoy {
    daemon: Daemon,
    place: Place,
}

/// Certificate, key and root of an Envoy, in files.
struct Files {
    dir: PathBuf,
}

/// What a TLS peer must show, and which protocols are offered.
struct Peer<'a> {
    identity: &'a str,
    alpn: &'a [&'a str],
}

/// How an Envoy is started.
#[derive(Debug, Clone, Copy)]
struct Start<'a> {
    dir: &'a Path,
    /// Of its files and its log.
    name: &'a str,
    workers: usize,
    /// User and group that it runs as.
    user: Option<u32>,
}

impl Envoy {
    /// Takes plain TCP on `listen` of the place and sends it through HBONE: tunnel to `peer`, authority `target`.
    /// The peer must show `identity`.
    #[track_caller]
    pub fn hbone_client(
        place: &Place,
        dir: &Path,
        listen: u16,
        (peer, target): (SocketAddr, SocketAddr),
        material: (&Leaf, &str, &str),
    ) -> Self {
        Self::hbone_client_of(place, dir, peer, &[(listen, target)], material, 1)
    }

    /// As [`Envoy::hbone_client`], with many ports of the place, each for a target behind the same tunnel, and so many
    /// worker threads.
    #[track_caller]
    pub fn hbone_client_of(
        place: &Place,
        dir: &Path,
        peer: SocketAddr,
        ports: &[(u16, SocketAddr)],
        (leaf, root, identity): (&Leaf, &str, &str),
        workers: usize,
    ) -> Self {
        let files = Files::write(dir, "envoy-client", leaf, root);
        let tls = files.upstream(Peer { identity, alpn: &["h2"] });
        let listeners = ports.iter().map(|(port, target)| {
            let filter = config::tcp_proxy(
                "hbone",
                json!({ "cluster": "hbone", "tunneling_config": { "hostname": target.to_string() } }),
            );
            config::listener(*port, &[], vec![json!({ "filters": [filter] })])
        });
        let config = config::bootstrap(
            listeners.collect(),
            vec![config::with_tls(config::with_http2(config::cluster("hbone", peer)), tls)],
        );
        Self::start(place, Start { dir, name: "envoy-client", workers, user: None }, &config)
    }

    /// Terminates HBONE on port 15008 of the place and dials `app` there for every CONNECT. The client must show
    /// `identity`.
    #[track_caller]
    pub fn hbone_server(place: &Place, dir: &Path, app: SocketAddr, material: (&Leaf, &str, &str)) -> Self {
        let route = config::connect_route(&["*".to_owned()], "app");
        Self::hbone_server_with(place, dir, vec![route], vec![config::cluster("app", app)], material, 1)
    }

    /// As [`Envoy::hbone_server`], where the authority of a CONNECT says which of the apps is dialled.
    #[track_caller]
    pub fn hbone_server_of(
        place: &Place,
        dir: &Path,
        apps: &[SocketAddr],
        material: (&Leaf, &str, &str),
        workers: usize,
    ) -> Self {
        let name = |app: &SocketAddr| format!("app-{}", app.port());
        let routes = apps.iter().map(|app| config::connect_route(&[app.to_string()], &name(app))).collect();
        let clusters = apps.iter().map(|app| config::cluster(&name(app), *app)).collect();
        Self::hbone_server_with(place, dir, routes, clusters, material, workers)
    }

    #[track_caller]
    fn hbone_server_with(
        place: &Place,
        dir: &Path,
        routes: Vec<Value>,
        clusters: Vec<Value>,
        (leaf, root, identity): (&Leaf, &str, &str),
        workers: usize,
    ) -> Self {
        let files = Files::write(dir, "envoy-server", leaf, root);
        let chain = json!({
            "transport_socket": files.downstream(Peer { identity, alpn: &["h2"] }),
            "filters": [config::http_manager("hbone", json!({
                "codec_type": "HTTP2",
                "http2_protocol_options": { "allow_connect": true },
                "upgrade_configs": [{ "upgrade_type": "CONNECT" }],
                "route_config": { "virtual_hosts": routes },
            }))],
        });
        let config = config::bootstrap(vec![config::listener(HBONE, &[], vec![chain])], clusters);
        Self::start(place, Start { dir, name: "envoy-server", workers, user: None }, &config)
    }

    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// CPU time of everything in its cgroup. An Envoy that is measured needs one of its own.
    pub fn cpu(&self) -> Duration {
        self.place.cgroup().cpu()
    }

    /// Its counters and gauges that are not 0 and whose names match the regular expression.
    #[track_caller]
    pub fn stats(&self, pattern: &str) -> Vec<(String, u64)> {
        let path = format!("/stats?usedonly&filter={pattern}");
        let answer = self.place.http_get(admin(), &path).unwrap_or_else(|e| panic!("{}: {e}", self.daemon.name()));
        let line = |line: &str| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.trim().parse().ok()?))
        };
        answer.body.lines().filter_map(line).filter(|(_, value)| *value > 0).collect()
    }

    #[track_caller]
    fn start(place: &Place, start: Start<'_>, config: &Value) -> Self {
        let path = start.dir.join(format!("{}.json", start.name));
        fs::write(&path, config.to_string()).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
        let daemon = Daemon::new(start.name, &start.dir.join("logs"));
        let program = envoy_binary();
        let opened = File::open(&program)
            .unwrap_or_else(|e| panic!("open {}: {e}; `cargo xtask setup` fetches Envoy", program.display()));
        // By its descriptor: another user may not be able to get at it by its path.
        let mut command = place.command(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        command.arg0("envoy").arg("-c").arg(&path);
        command.args(["--disable-hot-restart", "-l", "warning", "--concurrency", &start.workers.to_string()]);
        if let Some(user) = start.user {
            become_user(&mut command, user);
        }
        daemon.start(command);
        drop(opened);
        wait_for(&format!("{} to be ready", start.name), || {
            assert!(daemon.runs(), "{} ended: {}", start.name, daemon.log());
            (place.http_get(admin(), "/ready").ok()?.status == 200).then_some(())
        });
        Self { daemon, place: place.again(place.cgroup()) }
    }
}

/// After all that needs root.
fn become_user(command: &mut Command, user: u32) {
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(move || {
            if libc::setgroups(0, std::ptr::null()) != 0
                || libc::setresgid(user, user, user) != 0
                || libc::setresuid(user, user, user) != 0
            {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

impl Files {
    fn write(dir: &Path, name: &str, leaf: &Leaf, root: &str) -> Self {
        let dir = dir.join(name);
        fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
        for (file, text) in [("cert.pem", leaf.chain_pem.as_str()), ("key.pem", &leaf.key_pem), ("root.pem", root)] {
            fs::write(dir.join(file), text).unwrap_or_else(|e| panic!("write {file} in {}: {e}", dir.display()));
        }
        Self { dir }
    }

    fn upstream(&self, peer: Peer<'_>) -> Value {
        config::tls_socket("UpstreamTlsContext", json!({ "common_tls_context": self.common(&peer) }))
    }

    fn downstream(&self, peer: Peer<'_>) -> Value {
        config::tls_socket(
            "DownstreamTlsContext",
            json!({ "require_client_certificate": true, "common_tls_context": self.common(&peer) }),
        )
    }

    fn common(&self, peer: &Peer<'_>) -> Value {
        let file = |name: &str| json!({ "filename": self.dir.join(name) });
        json!({
            "alpn_protocols": peer.alpn,
            "tls_params": { "tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3" },
            "tls_certificates": [{ "certificate_chain": file("cert.pem"), "private_key": file("key.pem") }],
            "validation_context": {
                "trusted_ca": file("root.pem"),
                "match_typed_subject_alt_names": [{ "san_type": "URI", "matcher": { "exact": peer.identity } }],
            },
        })
    }
}

fn admin() -> SocketAddr {
    (Ipv4Addr::LOCALHOST, ADMIN).into()
}

/// Where `cargo xtask setup`, `test` and `bench` put Envoy; `UNDERSTORY_ENVOY` names another.
fn envoy_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("UNDERSTORY_ENVOY") {
        return path.into();
    }
    built_in().parent().expect("a target directory").join("tools/envoy/envoy/_bin/envoy")
}

/// Where `cargo xtask setup` and `test` put h2spec.
pub fn h2spec_binary() -> PathBuf {
    built_in().parent().expect("a target directory").join("tools/h2spec")
}

/// What Envoy says of its version; nothing if there is no Envoy.
pub fn envoy_version() -> Option<String> {
    let output = Command::new(envoy_binary()).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split("version:").nth(1)?.trim();
    // <commit>/<version>/<state>/<build>/<TLS library>
    Some(match version.split('/').collect::<Vec<_>>()[..] {
        [_, number, _, build, library] => format!("{number} ({build}, {library})"),
        _ => version.to_owned(),
    })
}

//! Envoy as an HBONE peer: an implementation that shares no code with ours.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use crate::certs::Leaf;
use crate::daemon::Daemon;
use crate::place::{Place, binary};
use crate::wait::wait_for;

/// A running Envoy.
#[derive(Debug)]
pub struct Envoy {
    daemon: Daemon,
}

/// Certificate, key and root of an Envoy, in files.
struct Files {
    dir: PathBuf,
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
        (leaf, root, identity): (&Leaf, &str, &str),
    ) -> Self {
        let files = Files::write(dir, "client", leaf, root);
        let (address, port) = (peer.ip(), peer.port());
        let tls = files.tls(&format!(
            "match_typed_subject_alt_names: [{{ san_type: URI, matcher: {{ exact: \"{identity}\" }} }}]"
        ));
        let config = format!(
            "static_resources:
  listeners:
  - name: plain
    address: {{ socket_address: {{ address: \"::\", port_value: {listen}, ipv4_compat: true }} }}
    filter_chains:
    - filters:
      - name: tcp
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: hbone
          cluster: hbone
          tunneling_config: {{ hostname: \"{target}\" }}
  clusters:
  - name: hbone
    type: STATIC
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        \"@type\": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{ allow_connect: true }} }}
    load_assignment:
      cluster_name: hbone
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: \"{address}\", port_value: {port} }} }} }}
    transport_socket:
      name: tls
      typed_config:
        \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context:
{tls}"
        );
        Self::start(place, dir, "client", &config, listen)
    }

    /// Terminates HBONE on port 15008 of the place and dials `app` there for every CONNECT. The client must show
    /// `identity`.
    #[track_caller]
    pub fn hbone_server(
        place: &Place,
        dir: &Path,
        app: SocketAddr,
        (leaf, root, identity): (&Leaf, &str, &str),
    ) -> Self {
        let files = Files::write(dir, "server", leaf, root);
        let (address, port) = (app.ip(), app.port());
        let tls = files.tls(&format!(
            "match_typed_subject_alt_names: [{{ san_type: URI, matcher: {{ exact: \"{identity}\" }} }}]"
        ));
        let config = format!(
            "static_resources:
  listeners:
  - name: hbone
    address: {{ socket_address: {{ address: \"::\", port_value: 15008, ipv4_compat: true }} }}
    filter_chains:
    - transport_socket:
        name: tls
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext
          require_client_certificate: true
          common_tls_context:
{tls}
      filters:
      - name: http
        typed_config:
          \"@type\": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: hbone
          codec_type: HTTP2
          http2_protocol_options: {{ allow_connect: true }}
          upgrade_configs: [{{ upgrade_type: CONNECT }}]
          route_config:
            virtual_hosts:
            - name: any
              domains: [\"*\"]
              routes:
              - match: {{ connect_matcher: {{}} }}
                route:
                  cluster: app
                  timeout: 0s
                  upgrade_configs: [{{ upgrade_type: CONNECT, connect_config: {{}} }}]
          http_filters:
          - name: router
            typed_config:
              \"@type\": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: app
    type: STATIC
    connect_timeout: 5s
    load_assignment:
      cluster_name: app
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: \"{address}\", port_value: {port} }} }} }}
"
        );
        Self::start(place, dir, "server", &config, 15008)
    }

    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    #[track_caller]
    fn start(place: &Place, dir: &Path, role: &str, config: &str, port: u16) -> Self {
        let path = dir.join(format!("envoy-{role}.yaml"));
        fs::write(&path, config).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
        let daemon = Daemon::new(&format!("envoy-{role}"), &dir.join("logs"));
        let mut command = place.command(envoy_binary());
        command.arg("-c").arg(&path).args(["--concurrency", "1", "--disable-hot-restart", "-l", "warning"]);
        daemon.start(command);
        let ready = (IpAddr::from([127, 0, 0, 1]), port).into();
        wait_for(&format!("Envoy as HBONE {role} to listen on {port}"), || {
            assert!(daemon.runs(), "Envoy as {role} ended: {}", daemon.log());
            place.netns().run(|| std::net::TcpStream::connect::<SocketAddr>(ready).ok())
        });
        Self { daemon }
    }
}

impl Files {
    fn write(dir: &Path, role: &str, leaf: &Leaf, root: &str) -> Self {
        let dir = dir.join(format!("envoy-{role}"));
        fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
        for (file, text) in [("cert.pem", leaf.chain_pem.as_str()), ("key.pem", &leaf.key_pem), ("root.pem", root)] {
            fs::write(dir.join(file), text).unwrap_or_else(|e| panic!("write {file} in {}: {e}", dir.display()));
        }
        Self { dir }
    }

    fn tls(&self, validation: &str) -> String {
        let file = |name: &str| self.dir.join(name).display().to_string();
        let (cert, key, root) = (file("cert.pem"), file("key.pem"), file("root.pem"));
        format!(
            "            alpn_protocols: [h2]
            tls_params: {{ tls_minimum_protocol_version: TLSv1_3, tls_maximum_protocol_version: TLSv1_3 }}
            tls_certificates:
            - certificate_chain: {{ filename: \"{cert}\" }}
              private_key: {{ filename: \"{key}\" }}
            validation_context:
              trusted_ca: {{ filename: \"{root}\" }}
              {validation}"
        )
    }
}

/// Where `cargo xtask setup` and `cargo xtask test` put Envoy; `UNDERSTORY_ENVOY` names another.
fn envoy_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("UNDERSTORY_ENVOY") {
        return path.into();
    }
    let target = binary("testapp").parent().and_then(Path::parent).expect("a target directory").to_owned();
    let path = target.join("tools/envoy/envoy/_bin/envoy");
    assert!(path.exists(), "{} is not there: `cargo xtask setup` fetches Envoy", path.display());
    path
}

//! The settings of `ztunnel proxy`: read once from flags and environment, checked, then never changed.
//!
//! Must never let a wrong value through with a silent default: the error names the setting, the value and what would
//! be right.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser};
use ipnet::IpNet;
use serde::Serialize;

use crate::identity::TrustDomain;
use crate::lifecycle::DescriptorBounds;
use crate::telemetry::log::{Format, Levels};

mod check;
mod trust;
mod values;

pub use trust::{AtExpiry, TrustArgs};
pub use values::{Bytes, Endpoint, RootSource, TokenSource};
use values::{duration, endpoint, hostname, number, percent_or_count, positive_duration, size, words};

/// Flags and environment of `ztunnel proxy`. Turn them into a [`ProxyConfig`] with [`ProxyArgs::check`].
#[derive(Debug, Clone, Parser)]
#[command(name = "ztunnel proxy", about = "Carries the traffic of the node's enrolled pods")]
pub struct ProxyArgs {
    #[command(flatten)]
    pub node: Node,
    #[command(flatten)]
    pub mesh: MeshSettings,
    #[command(flatten)]
    pub control: ControlArgs,
    #[command(flatten)]
    pub trust: TrustArgs,
    /// Socket of the node agent.
    #[arg(long, env = "INPOD_UDS", value_name = "INPOD_UDS", default_value = "/var/run/ztunnel/ztunnel.sock")]
    pub zds_socket: PathBuf,
    /// Worker threads: a count, or a share of the machine's CPUs such as 50%. Default: one per CPU.
    #[arg(long, env = "ZTUNNEL_WORKER_THREADS", value_name = "ZTUNNEL_WORKER_THREADS", value_parser = percent_or_count)]
    pub threads: Option<usize>,
    #[command(flatten)]
    pub listen: Listen,
    #[command(flatten)]
    pub timeouts: TimeoutArgs,
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Encrypt between pods of this node too. Without it such connections go from pod to pod without a tunnel: the kernel
    /// attests both ends, and policies hold as ever.
    #[arg(
        long,
        env = "SAME_NODE_ENCRYPTION",
        value_name = "SAME_NODE_ENCRYPTION",
        default_value = "false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set,
        value_parser = values::boolean
    )]
    pub same_node_encryption: bool,
    #[command(flatten)]
    pub telemetry: TelemetrySettings,
}

/// The checked settings.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProxyConfig {
    pub node: Node,
    pub mesh: MeshSettings,
    pub control: ControlPlane,
    pub trust: TrustArgs,
    pub zds_socket: PathBuf,
    /// At least 1.
    pub threads: usize,
    pub listen: Listen,
    pub timeouts: Timeouts,
    pub limits: Limits,
    pub same_node_encryption: bool,
    pub telemetry: TelemetrySettings,
}

/// Which proxy this is.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    /// The Kubernetes node. Required.
    #[arg(long, env = "NODE_NAME", value_name = "NODE_NAME", value_parser = words)]
    pub node_name: String,
    /// The proxy's own pod.
    #[arg(long, env = "POD_NAME", value_name = "POD_NAME", default_value = "ztunnel", value_parser = words)]
    pub pod_name: String,
    /// Namespace of the own pod.
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_name = "POD_NAMESPACE",
        default_value = "understory-system",
        value_parser = words
    )]
    pub pod_namespace: String,
    /// Service account of the own pod.
    #[arg(long, env = "SERVICE_ACCOUNT", value_name = "SERVICE_ACCOUNT", default_value = "ztunnel", value_parser = words)]
    pub service_account: String,
    /// Address of the own pod. Default: none, the control plane is told 1.1.1.1.
    #[arg(long, env = "INSTANCE_IP", value_name = "INSTANCE_IP")]
    pub instance_ip: Option<IpAddr>,
}

/// Which mesh this is.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MeshSettings {
    /// Id of the cluster (also read from CLUSTER_ID). Default Kubernetes.
    #[arg(long, env = "ISTIO_META_CLUSTER_ID", value_name = "ISTIO_META_CLUSTER_ID", value_parser = words)]
    #[serde(serialize_with = "values::or_kubernetes")]
    cluster_id: Option<String>,
    /// Network of the node. Default: the unnamed one.
    #[arg(long, env = "NETWORK", value_name = "NETWORK", default_value = "")]
    pub network: String,
    /// DNS suffix of the cluster's services. Checked and shown in the dump; services come with their full names.
    #[arg(long, env = "CLUSTER_DOMAIN", value_name = "CLUSTER_DOMAIN", default_value = "cluster.local", value_parser = hostname)]
    pub cluster_domain: String,
    /// Trust domain of the mesh: what TRUST_DOMAIN_ALIASES stand for. The pods' own identities come with the workloads'
    /// records.
    #[arg(long, env = "TRUST_DOMAIN", value_name = "TRUST_DOMAIN", default_value = "cluster.local", value_parser = values::trust_domain)]
    #[serde(serialize_with = "values::display")]
    pub trust_domain: TrustDomain,
    /// The cluster's address ranges, comma separated. On demand, an unknown destination inside them is refused while
    /// the control plane is away; one outside passes. Default: none.
    #[arg(long, env = "CLUSTER_CIDRS", value_name = "CLUSTER_CIDRS", value_delimiter = ',', value_parser = values::cidr)]
    pub cluster_cidrs: Vec<IpNet>,
}

/// How to reach the control plane, as given.
#[derive(Debug, Clone, Args)]
pub struct ControlArgs {
    /// Where discovery is.
    #[arg(
        long,
        env = "XDS_ADDRESS",
        value_name = "XDS_ADDRESS",
        default_value = "https://control.understory-system.svc:15012",
        value_parser = endpoint
    )]
    pub xds_address: Endpoint,
    /// Where certificates are signed. Default: the discovery address.
    #[arg(long, env = "CA_ADDRESS", value_name = "CA_ADDRESS", value_parser = endpoint)]
    pub ca_address: Option<Endpoint>,
    /// What the discovery server's certificate is checked against: a file, SYSTEM, or PEM text.
    #[arg(
        long,
        env = "XDS_ROOT_CA",
        value_name = "XDS_ROOT_CA",
        default_value = "/var/run/secrets/istio/root-cert.pem",
        value_parser = RootSource::parse
    )]
    pub xds_root_ca: RootSource,
    /// The same for the certificate server. Default: as for discovery.
    #[arg(long, env = "CA_ROOT_CA", value_name = "CA_ROOT_CA", value_parser = RootSource::parse)]
    pub ca_root_ca: Option<RootSource>,
    /// A further name that the discovery server's certificate may carry. Default: none.
    #[arg(long, env = "ALT_XDS_HOSTNAME", value_name = "ALT_XDS_HOSTNAME", value_parser = hostname)]
    pub alt_xds_hostname: Option<String>,
    /// A further name that the certificate server's certificate may carry. Default: none.
    #[arg(long, env = "ALT_CA_HOSTNAME", value_name = "ALT_CA_HOSTNAME", value_parser = hostname)]
    pub alt_ca_hostname: Option<String>,
    /// The service account token that the control plane is shown: a file, or the token.
    #[arg(
        long,
        env = "AUTH_TOKEN",
        value_name = "AUTH_TOKEN",
        default_value = "/var/run/secrets/tokens/istio-token",
        value_parser = TokenSource::parse
    )]
    pub auth_token: TokenSource,
    /// Ask only for what the node's pods talk to, instead of the whole mesh.
    #[arg(
        long,
        env = "XDS_ON_DEMAND",
        value_name = "XDS_ON_DEMAND",
        default_value = "false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        action = clap::ArgAction::Set,
        value_parser = values::boolean
    )]
    pub xds_on_demand: bool,
    /// Lifetime that is asked for a workload's certificate.
    #[arg(long, env = "SECRET_TTL", value_name = "SECRET_TTL", default_value = "24h", value_parser = positive_duration)]
    pub secret_ttl: Duration,
}

/// How to reach the control plane.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ControlPlane {
    pub xds_address: Endpoint,
    pub ca_address: Endpoint,
    pub xds_root: RootSource,
    pub ca_root: RootSource,
    pub alt_xds_hostname: Option<String>,
    pub alt_ca_hostname: Option<String>,
    pub auth_token: TokenSource,
    pub on_demand: bool,
    #[serde(serialize_with = "values::seconds")]
    pub secret_ttl: Duration,
    /// Further metadata of the xDS node, from the environment `ISTIO_META_<key>` and `ISTIO_METAJSON_<key>`.
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// Further headers of each discovery call, from the environment `XDS_HEADER_<name>`. Values are not shown.
    #[serde(serialize_with = "values::names_only")]
    pub xds_headers: BTreeMap<String, String>,
    /// The same for certificate calls, `CA_HEADER_<name>`.
    #[serde(serialize_with = "values::names_only")]
    pub ca_headers: BTreeMap<String, String>,
}

/// Where the proxy's own servers listen.
#[derive(Debug, Clone, Copy, Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Listen {
    /// Admin server.
    #[arg(long, env = "ADMIN_ADDR", value_name = "ADMIN_ADDR", default_value = "127.0.0.1:15000", value_parser = values::socket_address)]
    pub admin_addr: SocketAddr,
    /// Metrics server (IPv4 too; IPv4 only where there is no IPv6).
    #[arg(long, env = "METRICS_ADDR", value_name = "METRICS_ADDR", default_value = "[::]:15020", value_parser = values::socket_address)]
    pub metrics_addr: SocketAddr,
    /// Readiness server.
    #[arg(long, env = "READINESS_ADDR", value_name = "READINESS_ADDR", default_value = "[::]:15021", value_parser = values::socket_address)]
    pub readiness_addr: SocketAddr,
}

/// Timeouts, as given. Texts such as 500ms, 10s, 5m, 24h; a plain number is seconds.
#[derive(Debug, Clone, Args)]
pub struct TimeoutArgs {
    /// Dial of an endpoint or an application.
    #[arg(long, env = "CONNECT_TIMEOUT", value_name = "CONNECT_TIMEOUT", default_value = "10s", value_parser = positive_duration)]
    pub connect_timeout: Duration,
    /// TLS and HTTP/2 handshake of a tunnel, either side.
    #[arg(long, env = "HANDSHAKE_TIMEOUT", value_name = "HANDSHAKE_TIMEOUT", default_value = "10s", value_parser = positive_duration)]
    pub handshake_timeout: Duration,
    /// Wait for the workload record of a pod on this node.
    #[arg(long, env = "OWN_WORKLOAD_WAIT", value_name = "OWN_WORKLOAD_WAIT", default_value = "5s", value_parser = positive_duration)]
    pub own_workload_wait: Duration,
    /// Wait for a certificate that is not there yet.
    #[arg(long, env = "CERTIFICATE_WAIT", value_name = "CERTIFICATE_WAIT", default_value = "10s", value_parser = positive_duration)]
    pub certificate_wait: Duration,
    /// Wait for a policy that a pod of this node names and that has not come yet, or that cannot be understood; then
    /// the connection is refused.
    #[arg(long, env = "POLICY_WAIT", value_name = "POLICY_WAIT", default_value = "5s", value_parser = positive_duration)]
    pub policy_wait: Duration,
    /// On demand: wait for the answer about an unknown destination.
    #[arg(long, env = "ON_DEMAND_WAIT", value_name = "ON_DEMAND_WAIT", default_value = "5s", value_parser = positive_duration)]
    pub on_demand_wait: Duration,
    /// How long open connections may go on after the order to stop. Default: derived from
    /// TERMINATION_GRACE_PERIOD_SECONDS, else 5s.
    #[arg(long, env = "CONNECTION_TERMINATION_DEADLINE", value_name = "CONNECTION_TERMINATION_DEADLINE", value_parser = duration)]
    pub drain_deadline: Option<Duration>,
    /// The pod's grace period: the drain deadline is 5 s less (1 s less up to 10 s; at least 1 s).
    #[arg(long, env = "TERMINATION_GRACE_PERIOD_SECONDS", value_name = "TERMINATION_GRACE_PERIOD_SECONDS", value_parser = duration)]
    pub termination_grace_period: Option<Duration>,
    /// Life of a tunnel that no connection uses.
    #[arg(
        long,
        env = "POOL_UNUSED_RELEASE_TIMEOUT",
        value_name = "POOL_UNUSED_RELEASE_TIMEOUT",
        default_value = "5m",
        value_parser = positive_duration
    )]
    pub tunnel_idle: Duration,
    /// How long a half-closed connection may stay without a byte in the direction that is still open.
    #[arg(long, env = "HALF_CLOSE_DEADLINE", value_name = "HALF_CLOSE_DEADLINE", default_value = "5m", value_parser = positive_duration)]
    pub half_close_deadline: Duration,
    /// Silence on a tunnel with open streams after which it is pinged.
    #[arg(long, env = "HBONE_PING_AFTER", value_name = "HBONE_PING_AFTER", default_value = "5s", value_parser = positive_duration)]
    pub ping_after: Duration,
    /// Silence after a ping that makes a tunnel dead.
    #[arg(long, env = "HBONE_PING_TIMEOUT", value_name = "HBONE_PING_TIMEOUT", default_value = "10s", value_parser = positive_duration)]
    pub ping_timeout: Duration,
    /// TCP: idle time before the first keepalive probe.
    #[arg(long, env = "KEEPALIVE_TIME", value_name = "KEEPALIVE_TIME", default_value = "180s", value_parser = positive_duration)]
    pub keepalive_time: Duration,
    /// TCP: time between keepalive probes.
    #[arg(long, env = "KEEPALIVE_INTERVAL", value_name = "KEEPALIVE_INTERVAL", default_value = "20s", value_parser = positive_duration)]
    pub keepalive_interval: Duration,
    /// TCP: how long sent data may stay without acknowledgement.
    #[arg(long, env = "TCP_USER_TIMEOUT", value_name = "TCP_USER_TIMEOUT", default_value = "20s", value_parser = positive_duration)]
    pub user_timeout: Duration,
}

/// Timeouts; see [`TimeoutArgs`] for what each is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Timeouts {
    #[serde(serialize_with = "values::seconds")]
    pub connect: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub handshake: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub own_workload: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub certificate: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub policy: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub on_demand: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub drain: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub tunnel_idle: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub half_close: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub ping_after: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub ping_timeout: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub keepalive_time: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub keepalive_interval: Duration,
    #[serde(serialize_with = "values::seconds")]
    pub user_timeout: Duration,
}

/// Bounds, as given. Sizes are bytes, or carry Ki, Mi or Gi.
#[derive(Debug, Clone, Args)]
pub struct LimitArgs {
    /// HTTP/2: window that a stream starts with. It grows up to four times of that while the app keeps up.
    #[arg(long, env = "HTTP2_STREAM_WINDOW_SIZE", value_name = "HTTP2_STREAM_WINDOW_SIZE", default_value = "256Ki", value_parser = size)]
    pub stream_window: Bytes,
    /// HTTP/2: window of the whole tunnel, given back as bytes come. Default: so much that the streams' windows are the limit.
    #[arg(long, env = "HTTP2_CONNECTION_WINDOW_SIZE", value_name = "HTTP2_CONNECTION_WINDOW_SIZE", value_parser = size)]
    pub connection_window: Option<Bytes>,
    /// HTTP/2: largest frame that is accepted, 16Ki to 16Mi-1.
    #[arg(long, env = "HTTP2_FRAME_SIZE", value_name = "HTTP2_FRAME_SIZE", default_value = "64Ki", value_parser = size)]
    pub frame_size: Bytes,
    /// HTTP/2: streams that a peer may open on one tunnel to us.
    #[arg(long, env = "HBONE_MAX_STREAMS", value_name = "HBONE_MAX_STREAMS", default_value = "200", value_parser = number)]
    pub max_streams: u32,
    /// Streams that we open on one tunnel before another one is dialled (the peer's limit holds too).
    #[arg(
        long,
        env = "POOL_MAX_STREAMS_PER_CONNECTION",
        value_name = "POOL_MAX_STREAMS_PER_CONNECTION",
        default_value = "100",
        value_parser = number
    )]
    pub pool_max_streams: u32,
    /// Connections that one pod may have open, and tunnels to it: more are reset. Default: a quarter of the descriptors
    /// that the process may have.
    #[arg(long, env = "POD_MAX_CONNECTIONS", value_name = "POD_MAX_CONNECTIONS", value_parser = number)]
    pub pod_max_connections: Option<u32>,
    /// Handshakes of tunnels to one pod at a time: more are reset. One client may have a sixteenth of them.
    #[arg(
        long,
        env = "POD_MAX_HANDSHAKES",
        value_name = "POD_MAX_HANDSHAKES",
        default_value = "4096",
        value_parser = number
    )]
    pub pod_max_handshakes: u32,
    /// Bytes that came for apps of one pod and that they have not taken yet, from which on the pod's new connections are
    /// reset. Those that are open may fill their windows beyond it.
    #[arg(long, env = "POD_MAX_BUFFER", value_name = "POD_MAX_BUFFER", default_value = "256Mi", value_parser = size)]
    pub pod_max_buffer: Bytes,
    /// Memory that the proxy may use, bytes: from nine tenths of it on, new connections are reset. Default: what its
    /// container may use, else no limit.
    #[arg(long, env = "MEMORY_LIMIT", value_name = "MEMORY_LIMIT", value_parser = size)]
    pub memory_limit: Option<Bytes>,
}

/// Bounds; see [`LimitArgs`] for what each is. Sizes are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    pub stream_window: u32,
    pub connection_window: u32,
    pub frame_size: u32,
    pub max_streams: u32,
    pub pool_max_streams: u32,
    pub pod_max_connections: u32,
    pub pod_max_handshakes: u32,
    pub pod_max_buffer: u64,
    pub descriptors: DescriptorBounds,
    /// If it is set.
    pub memory: Option<u64>,
}

/// Logs and metrics.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TelemetrySettings {
    /// Shape of log lines.
    #[arg(long, env = "LOG_FORMAT", value_name = "LOG_FORMAT", value_enum, default_value = "plain")]
    pub log_format: Format,
    /// Log levels: a level, or directives such as info,access=debug. The libraries h2, hyper and rustls speak only
    /// where they are named.
    #[arg(long, env = "RUST_LOG", value_name = "RUST_LOG", default_value = "info")]
    #[serde(serialize_with = "values::display")]
    pub log_levels: Levels,
    /// Log lines that wait for a slow reader of stdout; more are dropped and counted. Bytes.
    #[arg(long, env = "LOG_QUEUE", value_name = "LOG_QUEUE", default_value = "4Mi", value_parser = size)]
    pub log_queue: Bytes,
    /// Life of a metric series without traffic.
    #[arg(long, env = "METRIC_SERIES_IDLE", value_name = "METRIC_SERIES_IDLE", default_value = "10m", value_parser = positive_duration)]
    #[serde(serialize_with = "values::seconds")]
    pub series_idle: Duration,
    /// Metric label sets of connections; more share one overflow series.
    #[arg(long, env = "METRIC_SERIES_MAX", value_name = "METRIC_SERIES_MAX", default_value = "10000", value_parser = number)]
    pub series_max: u32,
}

/// A setting whose value is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid value {value:?} for '{setting}': {expected}")]
pub struct ConfigError {
    /// The flag and its environment variable.
    pub setting: String,
    pub value: String,
    /// What would be right.
    pub expected: String,
}

impl MeshSettings {
    pub fn cluster_id(&self) -> &str {
        self.cluster_id.as_deref().unwrap_or(DEFAULT_CLUSTER)
    }
}

const DEFAULT_CLUSTER: &str = "Kubernetes";
#[cfg(test)]
mod tests;

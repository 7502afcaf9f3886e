//! What depends on several settings, or is derived from them.

use std::collections::BTreeMap;
use std::time::Duration;

use super::values::{self, Bytes};
use super::{
    ConfigError, ControlArgs, ControlPlane, LimitArgs, Limits, Listen, ProxyArgs, ProxyConfig, TimeoutArgs, Timeouts,
};
use crate::lifecycle::{DescriptorBounds, descriptors};

impl ProxyArgs {
    /// Checks what depends on several settings, fills in what is derived. `environment` is the process's (it holds
    /// the open-ended settings `CLUSTER_ID`, `ISTIO_META_*`, `ISTIO_METAJSON_*`, `XDS_HEADER_*`, `CA_HEADER_*`).
    pub fn check(self, environment: impl IntoIterator<Item = (String, String)>) -> Result<ProxyConfig, ConfigError> {
        let environment: BTreeMap<String, String> = environment.into_iter().collect();
        let mut mesh = self.mesh;
        if mesh.cluster_id.is_none() {
            mesh.cluster_id = environment.get("CLUSTER_ID").filter(|id| !id.is_empty()).cloned();
        }
        self.listen.check()?;
        Ok(ProxyConfig {
            node: self.node,
            mesh,
            control: self.control.check(&environment)?,
            trust: self.trust,
            zds_socket: self.zds_socket,
            threads: self.threads.unwrap_or_else(values::cpus),
            listen: self.listen,
            timeouts: self.timeouts.check()?,
            limits: self.limits.check()?,
            same_node_encryption: self.same_node_encryption,
            telemetry: self.telemetry,
        })
    }
}

impl ControlArgs {
    fn check(self, environment: &BTreeMap<String, String>) -> Result<ControlPlane, ConfigError> {
        let mut metadata = BTreeMap::new();
        for (name, value) in environment {
            if let Some(key) = name.strip_prefix("ISTIO_METAJSON_") {
                let json = serde_json::from_str(value).map_err(|e| wrong(name, value, format!("not JSON: {e}")))?;
                metadata.insert(key.to_owned(), json);
            } else if let Some(key) = name.strip_prefix("ISTIO_META_") {
                metadata.insert(key.to_owned(), value.clone().into());
            }
        }
        Ok(ControlPlane {
            ca_address: self.ca_address.unwrap_or_else(|| self.xds_address.clone()),
            xds_address: self.xds_address,
            ca_root: self.ca_root_ca.unwrap_or_else(|| self.xds_root_ca.clone()),
            xds_root: self.xds_root_ca,
            alt_xds_hostname: self.alt_xds_hostname,
            alt_ca_hostname: self.alt_ca_hostname,
            auth_token: self.auth_token,
            on_demand: self.xds_on_demand,
            secret_ttl: self.secret_ttl,
            metadata,
            xds_headers: headers(environment, "XDS_HEADER_")?,
            ca_headers: headers(environment, "CA_HEADER_")?,
        })
    }
}

impl Listen {
    fn check(&self) -> Result<(), ConfigError> {
        let all = [
            ("--admin-addr (ADMIN_ADDR)", self.admin_addr),
            ("--metrics-addr (METRICS_ADDR)", self.metrics_addr),
            ("--readiness-addr (READINESS_ADDR)", self.readiness_addr),
        ];
        for (i, (setting, address)) in all.iter().enumerate() {
            let taken = all[..i].iter().find(|(_, other)| other.port() == address.port() && address.port() != 0);
            if let Some((other, _)) = taken {
                return Err(wrong(setting, address, format!("{other} has the same port, each server needs its own")));
            }
        }
        Ok(())
    }
}

impl TimeoutArgs {
    fn check(self) -> Result<Timeouts, ConfigError> {
        // Beyond this the pod's own listeners would get the dial, as one in the clear.
        let most = Duration::from_nanos(ebpf::PASS_TTL_NS);
        if self.connect_timeout >= most {
            let value = format!("{:?}", self.connect_timeout);
            return Err(wrong("--connect-timeout (CONNECT_TIMEOUT)", value, format!("expected less than {most:?}")));
        }
        Ok(Timeouts {
            connect: self.connect_timeout,
            handshake: self.handshake_timeout,
            own_workload: self.own_workload_wait,
            certificate: self.certificate_wait,
            policy: self.policy_wait,
            on_demand: self.on_demand_wait,
            drain: self.drain_deadline.unwrap_or_else(|| drain_within(self.termination_grace_period)),
            tunnel_idle: self.tunnel_idle,
            half_close: self.half_close_deadline,
            ping_after: self.ping_after,
            ping_timeout: self.ping_timeout,
            keepalive_time: self.keepalive_time,
            keepalive_interval: self.keepalive_interval,
            user_timeout: self.user_timeout,
        })
    }
}

impl LimitArgs {
    fn check(self) -> Result<Limits, ConfigError> {
        let window = |setting, value: Bytes| match u32::try_from(value.0) {
            Ok(bytes @ MIN_WINDOW..=MAX_WINDOW) => Ok(bytes),
            _ => Err(wrong(setting, value, "expected 64Ki to 2Gi-1, the largest window of HTTP/2")),
        };
        let stream_window = window("--stream-window (HTTP2_STREAM_WINDOW_SIZE)", self.stream_window)?;
        let connection_window = match self.connection_window {
            Some(bytes) => window("--connection-window (HTTP2_CONNECTION_WINDOW_SIZE)", bytes)?,
            None => stream_window.saturating_mul(self.max_streams.saturating_add(1)).min(MAX_WINDOW),
        };
        if connection_window <= stream_window {
            return Err(wrong(
                "--connection-window (HTTP2_CONNECTION_WINDOW_SIZE)",
                Bytes(connection_window.into()),
                format!(
                    "expected more than --stream-window, which is {}: else one stalled stream stalls all",
                    self.stream_window
                ),
            ));
        }
        let frame_size = match u32::try_from(self.frame_size.0) {
            Ok(bytes @ 16_384..=16_777_215) => bytes,
            _ => return Err(wrong("--frame-size (HTTP2_FRAME_SIZE)", self.frame_size, "expected 16Ki to 16Mi-1")),
        };
        if let Some(none @ Bytes(0)) = self.memory_limit {
            return Err(wrong(
                "--memory-limit (MEMORY_LIMIT)",
                none,
                "expected more than the proxy takes without work",
            ));
        }
        Ok(Limits {
            stream_window,
            connection_window,
            frame_size,
            max_streams: self.max_streams,
            pool_max_streams: self.pool_max_streams,
            pod_max_connections: self.pod_max_connections.unwrap_or_else(|| descriptors() / 4),
            pod_max_handshakes: self.pod_max_handshakes,
            pod_max_buffer: self.pod_max_buffer.0,
            descriptors: DescriptorBounds::of(descriptors()),
            memory: self.memory_limit.map(|bytes| bytes.0),
        })
    }
}

/// The drain deadline that a pod's grace period leaves.
fn drain_within(grace: Option<Duration>) -> Duration {
    let Some(grace) = grace else { return Duration::from_secs(5) };
    let kept_back = if grace > Duration::from_secs(10) { 5 } else { 1 };
    grace.saturating_sub(Duration::from_secs(kept_back)).max(Duration::from_secs(1))
}

fn headers(environment: &BTreeMap<String, String>, prefix: &str) -> Result<BTreeMap<String, String>, ConfigError> {
    let mut headers = BTreeMap::new();
    for (variable, value) in environment {
        let Some(name) = variable.strip_prefix(prefix) else { continue };
        let parsed = http::HeaderName::from_bytes(name.as_bytes());
        let parsed = parsed.map_err(|_| wrong(variable, name, format!("expected a header name after {prefix}")))?;
        if http::HeaderValue::from_str(value).is_err() {
            return Err(wrong(variable, "(not shown)", "expected printable ASCII, as in any header"));
        }
        headers.insert(parsed.as_str().to_owned(), value.clone());
    }
    Ok(headers)
}

fn wrong(setting: impl ToString, value: impl ToString, expected: impl ToString) -> ConfigError {
    ConfigError { setting: setting.to_string(), value: value.to_string(), expected: expected.to_string() }
}

/// HTTP/2's default; a smaller window would stall a peer that has not read our settings yet.
const MIN_WINDOW: u32 = 65_535;
const MAX_WINDOW: u32 = (1 << 31) - 1;

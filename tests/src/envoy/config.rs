//! The parts of Envoy's configuration, as JSON.

use std::net::{Ipv4Addr, SocketAddr};

use serde_json::{Value, json};

use super::ADMIN;

/// The whole.
pub(super) fn bootstrap(listeners: Vec<Value>, clusters: Vec<Value>) -> Value {
    json!({
        "admin": { "address": address((Ipv4Addr::LOCALHOST, ADMIN).into()) },
        "static_resources": { "listeners": listeners, "clusters": clusters },
    })
}

/// On a port of all addresses of both families.
pub(super) fn listener(port: u16, filters: &[Value], chains: Vec<Value>) -> Value {
    json!({
        "name": format!("port-{port}"),
        "address": { "socket_address": { "address": "::", "port_value": port, "ipv4_compat": true } },
        "tcp_backlog_size": 4096,
        "listener_filters": filters,
        "filter_chains": chains,
    })
}

/// Takes back what the redirect did to the destination.
pub(super) fn original_destination() -> Value {
    json!({
        "name": "original_dst",
        "typed_config": { "@type": format!("{EXTENSIONS}.filters.listener.original_dst.v3.OriginalDst") },
    })
}

/// Bytes, to a cluster.
pub(super) fn tcp_proxy(prefix: &str, particulars: Value) -> Value {
    let mut config = json!({
        "@type": format!("{EXTENSIONS}.filters.network.tcp_proxy.v3.TcpProxy"),
        "stat_prefix": prefix,
    });
    merge(&mut config, particulars);
    json!({ "name": "tcp", "typed_config": config })
}

/// HTTP, with the router as the only filter and no access log.
pub(super) fn http_manager(prefix: &str, particulars: Value) -> Value {
    let mut config = json!({
        "@type": format!("{EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": prefix,
        "http_filters": [{
            "name": "router",
            "typed_config": { "@type": format!("{EXTENSIONS}.filters.http.router.v3.Router") },
        }],
    });
    merge(&mut config, particulars);
    json!({ "name": "http", "typed_config": config })
}

/// CONNECT to these authorities leads to a cluster, as bytes.
pub(super) fn connect_route(authorities: &[String], cluster: &str) -> Value {
    json!({
        "name": cluster,
        "domains": authorities,
        "routes": [{
            "match": { "connect_matcher": {} },
            "route": {
                "cluster": cluster,
                "timeout": "0s",
                "upgrade_configs": [{ "upgrade_type": "CONNECT", "connect_config": {} }],
            },
        }],
    })
}

/// One endpoint.
pub(super) fn cluster(name: &str, endpoint: SocketAddr) -> Value {
    cluster_of(name, &[endpoint])
}

pub(super) fn cluster_of(name: &str, endpoints: &[SocketAddr]) -> Value {
    let endpoints: Vec<Value> = endpoints.iter().map(|e| json!({ "endpoint": { "address": address(*e) } })).collect();
    json!({
        "name": name,
        "type": "STATIC",
        "connect_timeout": "5s",
        "circuit_breakers": no_limits(),
        "load_assignment": { "cluster_name": name, "endpoints": [{ "lb_endpoints": endpoints }] },
    })
}

/// Wherever the connection was going.
pub(super) fn original_cluster(name: &str) -> Value {
    json!({
        "name": name,
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "connect_timeout": "5s",
        "circuit_breakers": no_limits(),
    })
}

pub(super) fn with_tls(mut cluster: Value, socket: Value) -> Value {
    cluster["transport_socket"] = socket;
    cluster
}

pub(super) fn with_http2(mut cluster: Value) -> Value {
    cluster["typed_extension_protocol_options"] = json!({
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": format!("{EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions"),
            "explicit_http_config": { "http2_protocol_options": { "allow_connect": true } },
        },
    });
    cluster
}

pub(super) fn tls_socket(context: &str, particulars: Value) -> Value {
    let mut config = json!({ "@type": format!("{EXTENSIONS}.transport_sockets.tls.v3.{context}") });
    merge(&mut config, particulars);
    json!({ "name": "tls", "typed_config": config })
}

/// The defaults of 1,024 would be what is measured.
fn no_limits() -> Value {
    let most = 1_000_000;
    json!({ "thresholds": [{
        "max_connections": most, "max_pending_requests": most, "max_requests": most, "max_retries": most,
    }] })
}

fn address(at: SocketAddr) -> Value {
    json!({ "socket_address": { "address": at.ip(), "port_value": at.port() } })
}

fn merge(into: &mut Value, particulars: Value) {
    if let (Value::Object(into), Value::Object(particulars)) = (into, particulars) {
        into.extend(particulars);
    }
}

const EXTENSIONS: &str = "type.googleapis.com/envoy.extensions";

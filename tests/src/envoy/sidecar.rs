//! Envoy as a sidecar: everything of the pod goes through it, in and out, by a redirect in the pod's own netns.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use super::{Envoy, Files, Peer, Start, config};
use crate::certs::Leaf;
use crate::place::Place;

/// The user of a sidecar, whose own connections are not redirected.
const USER: u32 = 1337;
const OUTBOUND: u16 = 15001;
const INBOUND: u16 = 15006;

/// What a sidecar takes apart as HTTP; everything else is bytes to it.
#[derive(Debug, Clone, Copy)]
pub struct SidecarPorts<'a> {
    pub http: &'a [u16],
}

impl Envoy {
    /// Puts a sidecar into a pod. `place` is the pod's netns with a cgroup for the sidecar. Destinations within
    /// `mesh` (a range of addresses) are reached over mutual TLS and must show `identity`, as must every client;
    /// others are passed on as they are. Beside the ways that it needs, it knows further services, each with so many
    /// endpoints, as a sidecar does that is told of the whole cluster.
    #[track_caller]
    pub fn sidecar(
        place: &Place,
        dir: &Path,
        name: &str,
        (leaf, root, identity): (&Leaf, &str, &str),
        (mesh, ports): ((&str, u8), SidecarPorts<'_>),
        further: (usize, usize),
        workers: usize,
    ) -> Self {
        let files = Files::write(dir, name, leaf, root);
        let peer = || Peer { identity, alpn: &["istio", "http/1.1"] };
        let range = json!([{ "address_prefix": mesh.0, "prefix_len": mesh.1 }]);
        let is_http = |port: u16| json!({ "destination_port": port, "prefix_ranges": range });
        let mut out: Vec<Value> = ports
            .http
            .iter()
            .map(|port| json!({ "filter_chain_match": is_http(*port), "filters": [http("out", "mesh", "outbound")] }))
            .collect();
        out.push(json!({ "filter_chain_match": { "prefix_ranges": range }, "filters": [tcp("out", "mesh")] }));
        out.push(json!({ "filters": [tcp("pass", "outside")] }));
        let secured = |matching: Value, filter: Value| {
            let mut chain = json!({ "transport_socket": files.downstream(peer()), "filters": [filter] });
            chain["filter_chain_match"] = matching;
            chain
        };
        let mut into: Vec<Value> = ports
            .http
            .iter()
            .map(|port| secured(json!({ "destination_port": port }), http("in", "app", "inbound")))
            .collect();
        into.push(secured(json!({}), tcp("in", "app")));
        let original = [config::original_destination()];
        let mut clusters = vec![
            config::with_tls(config::original_cluster("mesh"), files.upstream(peer())),
            config::original_cluster("outside"),
            config::original_cluster("app"),
        ];
        clusters.extend((0..further.0).map(|number| further_service(number, further.1, files.upstream(peer()))));
        let config = config::bootstrap(
            vec![config::listener(OUTBOUND, &original, out), config::listener(INBOUND, &original, into)],
            clusters,
        );
        let envoy = Self::start(place, Start { dir, name, workers, user: Some(USER) }, &config);
        place.netns().nft(&redirect());
        envoy
    }
}

fn tcp(prefix: &str, cluster: &str) -> Value {
    config::tcp_proxy(prefix, json!({ "cluster": cluster }))
}

fn http(prefix: &str, cluster: &str, route: &str) -> Value {
    config::http_manager(
        prefix,
        json!({
            "codec_type": "HTTP1",
            "route_config": { "name": route, "virtual_hosts": [{
                "name": "all",
                "domains": ["*"],
                "routes": [{ "match": { "prefix": "/" }, "route": { "cluster": cluster, "timeout": "0s" } }],
            }] },
        }),
    )
}

/// A service that nobody talks to. Its endpoints are of a range for documentation.
fn further_service(number: usize, endpoints: usize, tls: Value) -> Value {
    let at = |endpoint: usize| {
        let [_, a, b, c] = ((number * endpoints + endpoint) as u32).to_be_bytes();
        SocketAddr::from(([100, 64 | (a & 0x3f), b, c], 8080))
    };
    let endpoints: Vec<SocketAddr> = (0..endpoints).map(at).collect();
    config::with_tls(config::cluster_of(&format!("outbound|80||service-{number}"), &endpoints), tls)
}

/// As a sidecar's init container sets it up.
fn redirect() -> String {
    format!(
        "table inet sidecar {{
           chain out {{
             type nat hook output priority -100;
             meta skuid {USER} return
             oifname \"lo\" return
             meta l4proto tcp redirect to :{OUTBOUND}
           }}
           chain in {{
             type nat hook prerouting priority -100;
             iifname \"lo\" return
             meta l4proto tcp redirect to :{INBOUND}
           }}
         }}
         "
    )
}

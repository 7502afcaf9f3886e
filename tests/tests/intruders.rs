//! Attempts to get round an ALLOW policy and STRICT: whatever is claimed, spoofed or dialled, no byte reaches the app but
//! from whom the policy names. (Certificates for others' identities: `ca.rs`; bad certificates and authorities: `refused.rs`.)

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use testbed::{Behaviour, HboneClient, Leaf, Place, Pod, Server, Shop, StreamExt, TunnelError, wait_for};

const STRICT: &str = "\
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict, namespace: shop}
spec: {mtls: {mode: STRICT}}
";

const ONLY_CLIENT: &str = "\
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-client, namespace: shop}
spec: {rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/client]}}]}]}
";

/// The shop, where only `client` may, and a pod outside the mesh on each node.
struct Rig {
    shop: Shop,
    beside_client: Pod,
    beside_far: Pod,
    /// `far`'s and `near`'s apps.
    servers: [Server; 2],
}

impl Rig {
    fn new() -> Self {
        let shop = Shop::in_mesh();
        let beside_client = shop.tb.pod("legacy/beside-client").start();
        let beside_far = shop.tb.pod("legacy/beside-far").on(shop.tb.node(1)).start();
        let servers = [&shop.far, &shop.near].map(|pod| pod.serve(8080, Behaviour::Echo));
        let rig = Self { shop, beside_client, beside_far, servers };
        assert!(answered(rig.beside_far.connect(rig.shop.far.at(8080))), "it is served, or the rest shows nothing");
        rig.shop.tb.put_manifest("strict.yaml", STRICT);
        rig.shop.tb.put_manifest("only-client.yaml", ONLY_CLIENT);
        for pod in [&rig.shop.far, &rig.shop.near] {
            let node = rig.shop.mesh().node_of(pod);
            wait_for(&format!("both policies on {}", node.name()), || {
                let dump = node.config_dump();
                let policies = dump["policies"].as_array()?;
                let has = |part: &str| policies.iter().any(|p| p["name"].as_str().is_some_and(|n| n.contains(part)));
                (has("only-client") && has("strict")).then_some(())
            });
        }
        rig
    }

    /// Runs attempts; afterwards no connection has come to an app but those of `client`, who still may.
    #[track_caller]
    fn nothing_gets_through(&self, attempts: impl FnOnce()) {
        let before = self.servers.each_ref().map(|server| server.seen().len());
        attempts();
        // What was let through would be there before a later connection.
        for (pod, n) in [(&self.shop.far, 0), (&self.shop.near, 1)] {
            self.shop.client.connect(pod.at(8080)).expect("connect").ask(b"the client may");
            assert_eq!(self.servers[n].wait_seen(before[n] + 1).len(), before[n] + 1, "{}", pod.name());
        }
    }

    fn leaf(&self, identity: &str) -> Leaf {
        self.shop.mesh().authority().issue(identity)
    }
}

/// Whether anything comes back for what is sent. A connection that is not made, or is ended, is none.
#[track_caller]
fn answered(stream: std::io::Result<TcpStream>) -> bool {
    let Ok(mut stream) = stream else { return false };
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("set a timeout");
    match stream.write_all(b"hello").and_then(|()| stream.read(&mut [0; 5])) {
        Ok(n) => n > 0,
        Err(e) => {
            let refused = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe].contains(&e.kind());
            assert!(refused, "neither an answer nor an end: {e}");
            false
        }
    }
}

fn both_families(pod: &Pod, port: u16) -> [SocketAddr; 2] {
    [pod.at(port), pod.at6(port)]
}

#[test]
fn whoever_is_not_in_the_mesh_reaches_no_app_by_any_port() {
    let rig = Rig::new();
    let outside = rig.shop.tb.outside("laptop");
    let places: [&Place; 3] = [&rig.beside_client, &rig.beside_far, &outside];
    rig.nothing_gets_through(|| {
        for place in places {
            for pod in [&rig.shop.far, &rig.shop.near] {
                for to in both_families(pod, 8080) {
                    assert!(!answered(place.connect(to)), "{} → {to}", place.name());
                }
                let mapped = place.dial(pod.at(8080)).mapped().connect();
                assert!(!answered(mapped), "{} → {} as IPv4-mapped", place.name(), pod.at(8080));
                // The tunnel's port in the clear: an alert at most.
                for to in both_families(pod, 15008) {
                    let request = format!("CONNECT {} HTTP/1.1\r\n\r\nhello", pod.at(8080));
                    let mut stream = place.connect(to).expect("connect");
                    stream.say(request.as_bytes());
                    let (bytes, _) = stream.hear_end();
                    assert!(bytes.is_empty() || bytes[0] == ALERT, "{} → {to}: {bytes:?}", place.name());
                }
            }
            for service in [&rig.shop.far_service, &rig.shop.near_service] {
                for to in [service.at(80), service.at6(80)] {
                    assert!(
                        !answered(place.dial(to).timeout(Duration::from_secs(2)).connect()),
                        "{} → {to}",
                        place.name()
                    );
                }
            }
        }
    });
}

/// A neighbour in the mesh, by the service, the pod's address in each family, and IPv4-mapped.
#[test]
fn whoever_is_in_the_mesh_and_not_named_reaches_no_app_by_any_way() {
    let rig = Rig::new();
    rig.nothing_gets_through(|| {
        for (from, pod, service) in [
            (&rig.shop.near, &rig.shop.far, &rig.shop.far_service),
            (&rig.shop.far, &rig.shop.near, &rig.shop.near_service),
        ] {
            for to in both_families(pod, 8080).into_iter().chain([service.at(80), service.at6(80)]) {
                assert!(!answered(from.connect(to)), "{} → {to}", from.name());
            }
            assert!(!answered(from.dial(pod.at(8080)).mapped().connect()), "{} → {}", from.name(), pod.at(8080));
            // Past its own proxy, as a process with the capability to mark sockets may try.
            for mark in [1, 0x539, 1337] {
                let past = from.dial(pod.at(8080)).mark(mark).connect();
                assert!(!answered(past), "{} → {} with mark {mark}", from.name(), pod.at(8080));
            }
        }
    });
}

/// The source address of the allowed client, on its node and on another one.
#[test]
fn a_spoofed_address_of_an_allowed_client_gains_nothing() {
    let rig = Rig::new();
    let thieves = [&rig.beside_client, &rig.beside_far, &rig.shop.near];
    let stolen: [(IpAddr, u8); 2] = [(rig.shop.client.ip(), 32), (rig.shop.client.ip6(), 128)];
    let take = |what: &str| {
        for (thief, (ip, prefix)) in thieves.iter().flat_map(|thief| stolen.map(|address| (thief, address))) {
            let nodad = if ip.is_ipv6() && what == "add" { " nodad" } else { "" };
            thief.netns().ip(&format!("addr {what} {ip}/{prefix} dev eth0{nodad}\n"));
        }
    };
    let leaf = rig.leaf("spiffe://cluster.local/ns/legacy/sa/default");
    rig.nothing_gets_through(|| {
        take("add");
        for thief in thieves {
            for ((ip, _), to) in stolen.into_iter().zip(both_families(&rig.shop.far, 8080)) {
                let stream = thief.dial(to).from_ip(ip).timeout(Duration::from_secs(2)).connect();
                assert!(!answered(stream), "{} as {ip} → {to}", thief.name());
            }
        }
        // A certificate of the thief's own, over a connection that bears the client's address as far as it can.
        let mut tunnel = HboneClient::open(&rig.beside_far, rig.shop.far.at(15008), Some(&leaf)).expect("a tunnel");
        let claim = format!("for={};by={}", rig.shop.client.ip(), rig.shop.far.ip());
        let answer = tunnel.connect(&rig.shop.far.at(8080).to_string(), &[("forwarded", &claim)]).expect("an answer");
        assert_eq!(answer.status, 401);
        // A thief in the mesh cannot answer the client while it takes its address for its own.
        take("del");
    });
}

/// Only the certificate says who somebody is.
#[test]
fn headers_and_authorities_that_claim_anything_gain_nothing() {
    let rig = Rig::new();
    let leaf = rig.leaf("spiffe://cluster.local/ns/legacy/sa/default");
    let client = &rig.shop.client;
    let identity = client.identity();
    let by_address = format!("for={};proto=https", client.ip());
    let by_name = format!("for=\"{identity}\"");
    let baggage = "k8s.namespace.name=shop,k8s.pod.name=client,service.name=client,k8s.cluster.name=Kubernetes";
    let xfcc = format!("By={};URI={identity}", rig.shop.far.identity());
    let claims: [(&str, &str); 6] = [
        ("forwarded", &by_address),
        ("forwarded", &by_name),
        ("baggage", baggage),
        ("x-forwarded-client-cert", &xfcc),
        ("x-forwarded-for", "127.0.0.1"),
        ("authorization", "Bearer anything"),
    ];
    rig.nothing_gets_through(|| {
        for (at, other) in [(&rig.shop.far, &rig.shop.near), (&rig.shop.near, &rig.shop.far)] {
            let mut tunnel = HboneClient::open(&rig.beside_client, at.at(15008), Some(&leaf)).expect("a tunnel");
            let own = at.at(8080).to_string();
            for (name, value) in claims {
                let answer = tunnel.connect(&own, &[(name, value)]).expect("an answer");
                assert_eq!(answer.status, 401, "{name}: {value}");
            }
            let all: Vec<_> = claims.into_iter().skip(1).collect();
            assert_eq!(tunnel.connect(&own, &all).expect("an answer").status, 401, "all at once");
            for authority in [other.at(8080), other.at6(8080), at.at6(8080), ([127, 0, 0, 1], 8080).into()] {
                let answer = tunnel.connect(&authority.to_string(), &[]).expect("an answer");
                assert_eq!(answer.status, 400, "{authority} at {}", at.name());
            }
        }
        // The client's own name, signed by somebody else.
        let forged = testbed::Authority::foreign().issue(&identity);
        let refused = HboneClient::open(&rig.beside_client, rig.shop.far.at(15008), Some(&forged));
        assert!(matches!(refused, Err(TunnelError::Alert(rustls::AlertDescription::UnknownCA))));
    });
    // The same with the certificate that counts: what refuses above is the identity.
    let own = rig.leaf(&identity);
    let mut tunnel = HboneClient::open(&rig.beside_client, rig.shop.far.at(15008), Some(&own)).expect("a tunnel");
    assert_eq!(tunnel.connect(&rig.shop.far.at(8080).to_string(), &[]).expect("an answer").status, 200);
}

/// First byte of a TLS record with an alert.
const ALERT: u8 = 21;

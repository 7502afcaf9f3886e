//! Attempts to get round a policy: none of them brings a byte to the app.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use testbed::{Behaviour, Dial, HboneClient, Place, Server, Shop, StreamExt, wait_for};

const STRICT: &str = "\
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict, namespace: shop}
spec: {mtls: {mode: STRICT}}
";

const ONLY_NEAR: &str = "\
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: only-near, namespace: shop}
spec: {rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/near]}}]}]}
";

/// Only `near` may, on one port of `far`. Gives what has come to the app from others before that was enforced.
fn only_near() -> (Shop, Server, usize) {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    shop.tb.put_manifest(
        "only-near.yaml",
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: only-near, namespace: shop}\n\
         spec: {selector: {matchLabels: {app: far}}, rules: [{from: [{source: {serviceAccounts: [near]}}], to: [{operation: {ports: ['8080']}}]}]}\n",
    );
    wait_for("the policy to be enforced", || (!reaches(&shop.client, shop.far.at(8080), &[])).then_some(()));
    assert!(reaches(&shop.near, shop.far.at(8080), &[]), "it is served, or the rest shows nothing");
    let before = came(&server, &shop);
    (shop, server, before)
}

/// Whether anything comes back, from an own address or the one that is pretended.
fn reaches(from: &Place, to: SocketAddr, pretended: &[std::net::IpAddr]) -> bool {
    ends_with_an_answer(pretended.iter().fold(from.dial(to), |dial, ip| dial.from_ip(*ip)))
}

fn ends_with_an_answer(dial: Dial<'_>) -> bool {
    let Ok(mut stream) = dial.timeout(Duration::from_secs(2)).connect() else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").is_ok() && matches!(stream.read(&mut [0]), Ok(1))
}

/// What came to the app from others than `near`.
fn came(server: &Server, shop: &Shop) -> usize {
    let allowed = [shop.near.ip(), shop.near.ip6()];
    server.seen().iter().filter(|seen| !allowed.contains(&seen.peer.ip())).count()
}

#[test]
fn no_dial_gets_past_the_policy() {
    let (shop, server, before) = only_near();
    let plain = shop.tb.pod("legacy/plain").start();
    let plain_far = shop.tb.pod("legacy/beside").on(shop.tb.node(1)).start();
    for from in [&*shop.client, &*plain, &*plain_far] {
        for port in [8080, 15001, 15006, 15008] {
            for to in [shop.far.at(port), shop.far.at6(port)] {
                let what = format!("{} → {to}", from.name());
                // Of TLS an answer may come: an alert. It is none of the app.
                if port != 15008 {
                    assert!(!reaches(from, to, &[]), "{what}");
                } else if let Ok(mut stream) = from.connect(to) {
                    let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
                    let _ = stream.hear_end();
                }
            }
        }
    }
    // A port that the policy does not name is not allowed either.
    let other = shop.far.serve(8081, Behaviour::Echo);
    assert!(!reaches(&shop.near, shop.far.at(8081), &[]));
    assert_eq!((came(&server, &shop), other.seen().len()), (before, 0));
}

/// The address of the allowed client is no identity: neither on its own node, nor from another one, with or without it
/// being alive there.
#[test]
fn the_address_of_an_allowed_client_opens_nothing() {
    let (shop, server, before) = only_near();
    let plain = shop.tb.pod("legacy/plain").start();
    let plain_far = shop.tb.pod("legacy/beside").on(shop.tb.node(1)).start();
    for thief in [&*shop.client, &*plain, &*plain_far] {
        for (ip, prefix, to) in [(shop.near.ip(), 32, shop.far.at(8080)), (shop.near.ip6(), 128, shop.far.at6(8080))] {
            let nodad = if ip.is_ipv6() { " nodad" } else { "" };
            thief.netns().ip(&format!("addr add {ip}/{prefix} dev eth0{nodad}\n"));
            for to in [to, shop.far_service.at(80)].iter().filter(|to| to.is_ipv4() == ip.is_ipv4()) {
                assert!(!reaches(thief, *to, &[ip]), "{} as {ip} → {to}", thief.name());
            }
        }
    }
    let near = server.seen().len() - came(&server, &shop);
    assert_eq!((came(&server, &shop), near), (before, 1), "a connection came to the app");
}

/// Whoever has a certificate of the mesh is who it says, whatever his headers claim, and speaks to the pod whose port he
/// has dialled.
#[test]
fn claims_in_headers_and_authorities_of_neighbours_open_nothing() {
    let (shop, server, before) = only_near();
    let beside = shop.tb.pod("shop/beside").on(shop.tb.node(1)).service_account("beside").start();
    shop.mesh().wait_in_mesh(&[&beside]);
    let open = beside.serve(8080, Behaviour::Echo);
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue(&shop.client.identity());
    let near = shop.near.ip();
    let forwarded = format!("for={near};proto=https;by={near}");
    let claimed =
        format!("k8s.namespace.name=shop,k8s.pod.name=near,service.name=near,principal={}", shop.near.identity());
    let certificate = format!("By=x;URI={}", shop.near.identity());
    let claims: [(&str, &str); 5] = [
        ("forwarded", &forwarded),
        ("baggage", &claimed),
        ("x-forwarded-client-cert", &certificate),
        ("x-istio-source", "near"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ];
    let mut tunnel = HboneClient::open(&plain, shop.far.at(15008), Some(&leaf)).expect("a tunnel");
    let target = shop.far.at(8080).to_string();
    for claim in &claims {
        assert_eq!(tunnel.connect(&target, &[*claim]).expect("an answer").status, 401, "{claim:?}");
    }
    assert_eq!(tunnel.connect(&target, &claims).expect("an answer").status, 401);
    // By way of a neighbour on the same node that anybody may speak to.
    let mut by_neighbour = HboneClient::open(&plain, beside.at(15008), Some(&leaf)).expect("a tunnel");
    assert_eq!(by_neighbour.connect(&beside.at(8080).to_string(), &[]).expect("an answer").status, 200);
    assert_eq!(by_neighbour.connect(&target, &claims).expect("an answer").status, 400);
    let host = format!("{}:80", shop.far_service.hostname());
    assert_ne!(by_neighbour.connect(&host, &claims).expect("an answer").status, 200);
    assert_eq!(came(&server, &shop), before);
    assert_eq!(open.wait_seen(1).len(), 1);
    // The log tells who it was, not who it claimed to be.
    let line = shop.mesh().node(1).wait_access_line("a refusal", |line| line.get("response_flags") == "DENY");
    assert_eq!(line.get("src.identity"), shop.client.identity(), "{}", line.text);
}

/// STRICT, and only `near` may, anywhere in the namespace. Every way to the apps of `far` and `client`, for whoever is not
/// in the mesh, and for whoever is in it and not named.
#[test]
fn under_strict_no_way_leads_to_an_app_but_for_whom_the_policy_names() {
    let shop = Shop::in_mesh();
    let (plain, outside) = (shop.tb.pod("legacy/plain").start(), shop.tb.outside("laptop"));
    let plain_far = shop.tb.pod("legacy/beside").on(shop.tb.node(1)).start();
    let apps = [&shop.far, &shop.client];
    let servers = apps.map(|pod| pod.serve(8080, Behaviour::Echo));
    assert!(reaches(&plain_far, shop.far.at(8080), &[]), "it is served, or the rest shows nothing");
    shop.tb.put_manifest("strict.yaml", STRICT);
    shop.tb.put_manifest("only-near.yaml", ONLY_NEAR);
    for node in shop.mesh().nodes() {
        wait_for(&format!("both policies on {}", node.name()), || {
            let dump = node.config_dump();
            let policies = dump["policies"].as_array()?;
            let has = |part: &str| policies.iter().any(|p| p["name"].as_str().is_some_and(|n| n.contains(part)));
            (has("only-near") && has("strict")).then_some(())
        });
    }
    let before = servers.each_ref().map(|server| server.seen().len());
    let services = [shop.far_service.at(80), shop.far_service.at6(80)];
    for pod in apps {
        // A pod in the mesh that reaches itself is not in the way of any policy.
        let from: [&Place; 5] = [&plain, &plain_far, &outside, &shop.client, &shop.far];
        for from in from.into_iter().filter(|from| from.name() != pod.name()) {
            for to in [pod.at(8080), pod.at6(8080)] {
                assert!(!reaches(from, to, &[]), "{} → {to}", from.name());
            }
            let to = pod.at(8080);
            assert!(!ends_with_an_answer(from.dial(to).mapped()), "{} → {to}, IPv4-mapped", from.name());
            // Past its own proxy, as a process that may mark its sockets could try.
            for mark in [1, 0x539, 0x111] {
                assert!(!ends_with_an_answer(from.dial(to).mark(mark)), "{} → {to} with mark {mark}", from.name());
            }
        }
    }
    for (from, to) in [&*shop.client, &*plain, &*plain_far].into_iter().flat_map(|from| services.map(|to| (from, to))) {
        assert!(!reaches(from, to, &[]), "{} → {to}", from.name());
    }
    // What was let through would be there before a later connection.
    for (pod, (server, before)) in apps.iter().zip(servers.iter().zip(before)) {
        shop.near.connect(pod.at(8080)).expect("connect").ask(b"near may");
        assert_eq!(server.wait_seen(before + 1).len(), before + 1, "{}", pod.name());
    }
}

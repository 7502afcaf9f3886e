//! A connection's identity is that of the pod whose netns it comes from, whatever address it carries.

use std::io::{Read, Write};
use std::time::Duration;

use testbed::{Behaviour, HboneClient, Shop, StreamExt};

/// Identity that the server's node saw for the last connection to a pod.
fn seen_identity(shop: &Shop, after: usize) -> String {
    let node = shop.mesh().node_of(&shop.far);
    let lines = || {
        let inbound = |line: &testbed::AccessLine| line.get("direction") == "inbound";
        node.access_log().into_iter().filter(inbound).collect::<Vec<_>>()
    };
    testbed::wait_for("an inbound access line", || lines().get(after).map(|line| line.get("src.identity").to_owned()))
}

#[test]
fn peers_see_each_others_identities() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"hello");
    assert_eq!(seen_identity(&shop, 0), "spiffe://cluster.local/ns/shop/sa/client");
    shop.near.connect(shop.far_service.at(80)).expect("connect").ask(b"hello");
    assert_eq!(seen_identity(&shop, 1), "spiffe://cluster.local/ns/shop/sa/near");
    let line = shop.mesh().node(0).wait_access_line("outbound", |line| line.get("src.workload") == "client");
    assert_eq!(line.get("dst.identity"), "spiffe://cluster.local/ns/shop/sa/far", "{}", line.text);
}

/// B108: no identity from an address. A pod that takes a neighbour's address gets nothing by it.
#[test]
fn a_pod_with_a_neighbours_address_does_not_get_its_identity() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    // The neighbour that owns the addresses is on the same node and in the mesh.
    for (ip, prefix) in [(shop.near.ip(), 32), (shop.near.ip6(), 128)] {
        let nodad = if ip.is_ipv6() { " nodad" } else { "" };
        shop.client.netns().ip(&format!("addr add {ip}/{prefix} dev eth0{nodad}\n"));
    }
    for (from, to) in [(shop.near.ip(), shop.far_service.at(80)), (shop.near.ip6(), shop.far_service.at6(80))] {
        // It may also be refused; what it must not get is the other's name.
        if let Ok(mut stream) = shop.client.dial(to).from_ip(from).connect() {
            let _ = stream.set_read_timeout(Some(Duration::from_secs(2)));
            let _ = stream.write_all(b"hello").and_then(|()| stream.read(&mut [0; 5]));
        }
    }
    let node = shop.mesh().node_of(&shop.far);
    for line in node.access_log() {
        assert_ne!(line.get("src.identity"), "spiffe://cluster.local/ns/shop/sa/near", "{}", line.text);
    }
    // The attacker's own traffic still bears its own name.
    shop.client.dial(shop.far_service.at(80)).from_ip(shop.client.ip()).connect().expect("connect").ask(b"me");
    node.wait_access_line("its own name", |line| {
        line.get("src.identity") == "spiffe://cluster.local/ns/shop/sa/client"
    });
}

#[test]
fn each_pods_port_shows_that_pods_certificate() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue("spiffe://cluster.local/ns/legacy/sa/default");
    for (pod, account) in [(&shop.client, "client"), (&shop.near, "near"), (&shop.far, "far")] {
        for to in [pod.at(15008), pod.at6(15008)] {
            let tunnel = HboneClient::open(&plain, to, Some(&leaf)).unwrap_or_else(|e| panic!("{to}: {e}"));
            let wanted = format!("spiffe://cluster.local/ns/shop/sa/{account}");
            let shown = &tunnel.server_chain[0];
            assert!(shown.windows(wanted.len()).any(|part| part == wanted.as_bytes()), "{to} shows another identity");
        }
    }
}

//! Every way to a server in the mesh, and the addresses that both ends see.

use std::net::SocketAddr;

use testbed::{Behaviour, Pod, Server, Shop, StreamExt, canonical};

/// Dials, talks, and checks what both ends take each other for.
fn check(client: &Pod, server: &Server, to: SocketAddr, mapped: bool) {
    let before = server.seen().len();
    let dial = client.dial(to);
    let dial = if mapped { dial.mapped() } else { dial };
    let mut stream = dial.connect().unwrap_or_else(|e| panic!("{} → {to}: {e}", client.name()));
    stream.ask(b"hello");
    assert_eq!(canonical(stream.peer_addr().unwrap()), to, "the client's getpeername is what it dialled");
    if mapped {
        assert!(stream.peer_addr().unwrap().is_ipv6(), "a mapped socket shows a mapped address");
    }
    let own = if to.is_ipv6() { client.ip6() } else { client.ip() };
    assert_eq!(canonical(stream.local_addr().unwrap()).ip(), own, "the client's getsockname is its pod's address");
    let seen = &server.seen()[before];
    let addresses = [client.ip(), client.ip6()];
    assert!(addresses.contains(&seen.peer.ip()), "the server sees the client's pod, not {}", seen.peer);
}

fn all_ways(shop: &Shop) {
    for (pod, service) in [(&shop.near, &shop.near_service), (&shop.far, &shop.far_service)] {
        let server = pod.serve(8080, Behaviour::Echo);
        for to in [service.at(80), service.at6(80), pod.at(8080), pod.at6(8080)] {
            check(&shop.client, &server, to, false);
        }
        for to in [service.at(80), pod.at(8080)] {
            check(&shop.client, &server, to, true);
        }
    }
}

#[test]
fn services_and_pods_are_reached_in_both_families_with_true_addresses() {
    let shop = Shop::in_mesh();
    all_ways(&shop);
    for line in shop.mesh().node(0).access_log() {
        assert_eq!(line.get("error"), "", "{}", line.text);
    }
}

#[test]
fn the_servers_own_address_is_the_one_that_it_listens_on() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"hello");
    assert_eq!(server.seen()[0].local, shop.far.at(8080));
    // A server bound to its address alone, and one bound to IPv4 alone.
    let bound = shop.far.serve_on(shop.far.at(8081), Behaviour::Echo);
    shop.client.connect(shop.far.at(8081)).expect("connect").ask(b"hello");
    assert_eq!(bound.seen()[0].peer.ip(), shop.client.ip());
}

#[test]
fn addresses_are_true_after_a_restart_of_the_proxies_too() {
    let shop = Shop::in_mesh();
    all_ways(&shop);
    for node in shop.mesh().nodes() {
        node.proxy.terminate();
        shop.mesh().start_proxy(node);
    }
    shop.mesh().nodes().iter().for_each(|node| node.wait_proxy_ready());
    shop.mesh().wait_in_mesh(&shop.pods());
    all_ways(&shop);
}

#[test]
fn a_service_spreads_over_its_ready_pods_and_follows_changes() {
    let shop = Shop::in_mesh();
    let pod = |name: &str, node: usize| {
        let spec = shop.tb.pod(&format!("shop/{name}")).label("app", "many").port("tcp", 7000).on(shop.tb.node(node));
        spec.start()
    };
    let (a, b) = (pod("many-a", 0), pod("many-b", 1));
    let service = shop.tb.service("shop/many").port(80, "tcp").create();
    shop.mesh().wait_in_mesh(&[&a, &b]);
    shop.mesh().wait_endpoints(&service, 2);
    let servers = [&a, &b].map(|pod| pod.serve(7000, Behaviour::Echo));
    for _ in 0..64 {
        shop.client.connect(service.at(80)).expect("connect").ask(b"hello");
    }
    let counts = servers.each_ref().map(|server| server.seen().len());
    assert_eq!(counts.iter().sum::<usize>(), 64);
    assert!(counts.iter().all(|count| *count > 5), "both endpoints are used: {counts:?}");
    b.set_ready(false);
    testbed::wait_for("new connections to leave the pod that is not ready", || {
        let before = servers[1].seen().len();
        for _ in 0..8 {
            shop.client.connect(service.at(80)).expect("connect").ask(b"hello");
        }
        (servers[1].seen().len() == before).then_some(())
    });
}

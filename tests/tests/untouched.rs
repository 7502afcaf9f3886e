//! What the mesh leaves alone: loopback, a pod's own address, UDP, and the probes of the node's host processes.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use testbed::{Behaviour, Shop, StreamExt};

/// Connections that any proxy of the mesh has handled.
fn handled(shop: &Shop) -> f64 {
    let nodes = shop.mesh().nodes().iter();
    nodes.map(|node| node.proxy_metrics().sum("istio_tcp_connections_opened_total", &[])).sum()
}

#[test]
fn loopback_and_a_pods_own_addresses_stay_inside_the_pod() {
    let shop = Shop::in_mesh();
    let server = shop.near.serve(8080, Behaviour::Echo);
    let addresses: [SocketAddr; 4] = [
        (Ipv4Addr::LOCALHOST, 8080).into(),
        (Ipv6Addr::LOCALHOST, 8080).into(),
        shop.near.at(8080),
        shop.near.at6(8080),
    ];
    for to in addresses {
        shop.near.connect(to).unwrap_or_else(|e| panic!("{to}: {e}")).ask(b"hello");
        assert_eq!(server.seen().last().unwrap().peer.ip(), to.ip(), "from the address that was dialled");
    }
    let refused = shop.near.connect(shop.near.at(9999)).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused, "no proxy accepted first");
    assert_eq!(handled(&shop), 0.0);
}

#[test]
fn udp_goes_from_pod_to_pod_as_without_a_mesh() {
    let shop = Shop::in_mesh();
    for (server_ip, client_ip) in [(shop.far.ip(), shop.client.ip()), (shop.far.ip6(), shop.client.ip6())] {
        let server = shop.far.udp((server_ip, 5353).into());
        let client = shop.client.udp((client_ip, 0).into());
        client.send_to(b"question", (server_ip, 5353)).expect("send");
        let mut buffer = [0; 64];
        let (n, from) = server.recv_from(&mut buffer).expect("receive");
        assert_eq!((&buffer[..n], from), (&b"question"[..], client.local_addr().unwrap()));
        server.send_to(b"answer", from).expect("send back");
        let (n, from) = client.recv_from(&mut buffer).expect("receive");
        assert_eq!((&buffer[..n], from), (&b"answer"[..], (server_ip, 5353).into()));
    }
}

/// B66 to B69: kubelet's probes must work without a special address or mark on the node.
#[test]
fn probes_of_a_host_process_reach_the_app_untouched() {
    let shop = Shop::in_mesh();
    let kubelet = shop.tb.node(1);
    let server = shop.far.serve(8080, Behaviour::Echo);
    let before = handled(&shop);
    for to in [shop.far.at(8080), shop.far.at6(8080)] {
        for _ in 0..20 {
            kubelet.connect(to).unwrap_or_else(|e| panic!("probe of {to}: {e}")).ask(b"are you well");
        }
    }
    let gateways = ["10.244.1.1".parse().unwrap(), "fd00:10:244:1::1".parse::<std::net::IpAddr>().unwrap()];
    assert!(server.seen().iter().all(|seen| gateways.contains(&seen.peer.ip())), "{:?}", server.seen());
    assert_eq!(handled(&shop), before, "no proxy saw them");
    // As without a mesh, a probe of a closed port is refused, not accepted and cut.
    let refused = kubelet.connect(shop.far.at(9999)).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn traffic_that_only_carries_the_nodes_address_is_not_taken_for_a_probe() {
    // A NodePort with masquerade: a machine outside comes to the pod from the node's own address.
    let shop = Shop::in_mesh();
    let outside = shop.tb.outside("laptop");
    let node = shop.tb.node(1);
    let pod = shop.far.ip();
    node.netns().nft(&format!(
        "table ip nodeport {{
            chain pre {{ type nat hook prerouting priority dstnat; tcp dport 30080 dnat to {pod}:8080; }}
            chain post {{ type nat hook postrouting priority srcnat; ip daddr {pod} tcp dport 8080 masquerade; }}
        }}"
    ));
    let server = shop.far.serve(8080, Behaviour::Echo);
    let before = handled(&shop);
    outside.connect((node.ip4(), 30080).into()).expect("through the node port").ask(b"from outside");
    assert_eq!(server.seen()[0].peer.ip().to_string(), "10.244.1.1", "it carries the node's address");
    testbed::wait_for("the proxy to have handled it", || (handled(&shop) > before).then_some(()));
}

#[test]
fn a_host_network_pod_is_no_host_process() {
    // It lies under kubepods: what it sends is a plain client's traffic.
    let shop = Shop::in_mesh();
    let pod = shop.tb.pod("infra/host-pod").host_network().on(shop.tb.node(1)).start();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let before = handled(&shop);
    pod.connect(shop.far.at(8080)).expect("connect").ask(b"plain");
    testbed::wait_for("the proxy to have handled it", || (handled(&shop) > before).then_some(()));
}

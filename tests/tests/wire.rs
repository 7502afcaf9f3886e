//! What passes between the nodes: nothing readable while the mesh is on, everything while it is off.

use testbed::{Behaviour, MeshOptions, Shop, StreamExt, client_hello_key_shares};

const CANARY: &[u8] = b"canary-7c1f0e55-on-the-wire";

/// The canary goes both ways over every kind of path.
fn send_canaries(shop: &Shop, through_services: bool) {
    let _servers = (shop.far.serve(8080, Behaviour::Echo), shop.client.serve(9090, Behaviour::Echo));
    let mut paths = vec![(&shop.client, shop.far.at(8080)), (&shop.client, shop.far.at6(8080))];
    paths.push((&shop.far, shop.client.at(9090)));
    if through_services {
        paths.push((&shop.client, shop.far_service.at(80)));
        paths.push((&shop.client, shop.far_service.at6(80)));
    }
    for (from, to) in paths {
        from.connect(to).unwrap_or_else(|e| panic!("{} → {to}: {e}", from.name())).ask(CANARY);
    }
}

#[test]
fn nothing_readable_leaves_a_node_while_enrolled_and_everything_does_while_not() {
    let shop = Shop::outside_mesh();
    let wire = shop.tb.wire();
    send_canaries(&shop, false);
    assert!(wire.contains(CANARY), "with enrolment off the canary is seen, or the test could not fail");
    drop(wire);

    shop.enrol();
    let wire = shop.tb.wire();
    send_canaries(&shop, true);
    assert!(!wire.contains(CANARY), "an enrolled pod's bytes were seen in the clear");
    assert!(wire.flows_to_port(8080).is_empty(), "{:?}", wire.flows_to_port(8080));
    let tunnels = wire.flows_to_port(15008);
    assert!(!tunnels.is_empty());
    for flow in tunnels.iter().filter(|flow| flow.complete) {
        let records = flow.tls13().unwrap_or_else(|e| panic!("{} → {}: {e}", flow.client, flow.server));
        assert_eq!(records.cipher, 0x1301, "AES-128-GCM is preferred");
        const X25519MLKEM768: u16 = 0x11ec;
        let shares = client_hello_key_shares(&flow.to_server).expect("a client hello");
        assert!(shares.contains(&X25519MLKEM768), "the hybrid key exchange is offered: {shares:x?}");
        assert_eq!(records.group, X25519MLKEM768, "and taken");
    }
    drop(wire);

    shop.unenrol();
    let wire = shop.tb.wire();
    send_canaries(&shop, false);
    assert!(wire.contains(CANARY), "out of the mesh again");
}

#[test]
fn tunnels_go_from_pod_to_pod_not_from_node_to_node() {
    // So that the network policies of a cluster still see who talks to whom.
    let shop = Shop::in_mesh();
    let wire = shop.tb.wire();
    send_canaries(&shop, true);
    for flow in wire.flows_to_port(15008) {
        let ends = [flow.client.ip(), flow.server.ip()];
        for ip in ends {
            let known = shop.pods().iter().any(|pod| pod.ip() == ip || pod.ip6() == ip);
            assert!(known, "{ip} is no pod of the mesh: {} → {}", flow.client, flow.server);
        }
    }
}

#[test]
fn on_demand_discovery_is_as_silent() {
    let shop = Shop::in_mesh_with(MeshOptions { on_demand: true, ..MeshOptions::default() });
    let wire = shop.tb.wire();
    send_canaries(&shop, true);
    assert!(!wire.contains(CANARY));
    assert!(!wire.flows_to_port(15008).is_empty());
}

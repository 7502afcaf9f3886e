//! One pod's trouble, and one connection's, stays its own, and has a reason that can be read.

use std::io::Read;
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, Families, MeshOptions, Shop, StreamExt, wait_for};

const CANARY: &[u8] = b"canary-in-trouble";

/// The rest of the mesh works.
#[track_caller]
fn others_are_well(shop: &Shop) {
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"others are well");
}

#[test]
fn a_pod_without_a_service_account_object_troubles_nobody() {
    let shop = Shop::in_mesh();
    let ghost = shop.tb.pod("shop/ghost").service_account("ghost").start();
    shop.tb.remove_manifest("serviceaccount-shop-ghost.yaml");
    others_are_well(&shop);
    let wire = shop.tb.wire();
    let _server = shop.far.serve(8081, Behaviour::Echo);
    wait_for("the agent to have decided about the pod", || shop.mesh().status(&ghost));
    if let Ok(mut stream) = ghost.connect(shop.far.at(8081)) {
        stream.say(CANARY);
        let _ = stream.read(&mut [0; 64]);
    }
    assert!(!wire.contains(CANARY), "enrolled, so never in the clear");
}

/// B59: the error names the identity, the node and why; nothing loops hotly.
#[test]
fn a_denied_certificate_closes_the_way_and_says_why() {
    let shop = Shop::outside_mesh_with(MeshOptions {
        trusted_node_account: Some("other/account".to_owned()),
        ..MeshOptions::default()
    });
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.enrol();
    let node = shop.mesh().node(0);
    let wire = shop.tb.wire();
    let start = Instant::now();
    let mut stream = shop.client.connect(shop.far.at(8080)).expect("the proxy accepts");
    assert_eq!(stream.say_in_vain(CANARY), (Vec::new(), End::Reset));
    assert!(start.elapsed() < Duration::from_secs(15), "bounded: {:?}", start.elapsed());
    assert!(!wire.contains(CANARY));
    let line = node.wait_access_line("the failed connection", |line| line.get("direction") == "outbound");
    assert_ne!(line.get("error"), "", "{}", line.text);
    let flags = [("response_flags", "IDENTITY_ERROR")];
    node.wait_proxy_count(1.0, "istio_tcp_connections_failed_total", &flags);
    let log = node.proxy.wait_log(&["spiffe://cluster.local/ns/shop/sa/client"]);
    assert!(!log.is_empty());
    let dump = node.config_dump();
    let certificates = dump["certificates"].as_array().expect("certificates");
    let own = certificates.iter().find(|c| c["identity"] == "spiffe://cluster.local/ns/shop/sa/client");
    let state = own.expect("the identity is listed")["state"].as_str().expect("a state").to_owned();
    assert!(state.starts_with("Unavailable"), "{state}");
    let used = node.proxy.cpu();
    std::thread::sleep(Duration::from_secs(2));
    assert!(node.proxy.cpu() - used < Duration::from_millis(400), "it asks again without burning CPU");
}

/// B56, B58: a pod without IPv6 is served over IPv4, and troubles nobody. B94: no family is silently uncaptured.
#[test]
fn a_pod_without_ipv6_is_served_over_ipv4() {
    let shop = Shop::in_mesh();
    let off = shop.tb.pod("shop/off").families(Families::V4Kernel).on(shop.tb.node(1)).start();
    let v4 = shop.tb.pod("shop/v4").families(Families::V4Only).start();
    shop.mesh().wait_in_mesh(&[&off, &v4]);
    let server = off.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    v4.connect(off.at(8080)).expect("connect").ask(CANARY);
    assert_eq!(server.seen()[0].peer.ip(), v4.ip());
    // An IPv6 address that appears later is not known to the mesh: refused, never in the clear.
    v4.netns().ip("addr add fd00:10:244::77/64 dev eth0 nodad\nroute add ::/0 via fd00:10:244::1\n");
    let _far = shop.far.serve(8081, Behaviour::Echo);
    if let Ok(mut stream) = v4.dial(shop.far.at6(8081)).timeout(Duration::from_secs(3)).connect() {
        stream.say(CANARY);
        let _ = stream.read(&mut [0; 64]);
    }
    assert!(!wire.contains(CANARY));
    others_are_well(&shop);
}

#[test]
fn a_netns_that_vanishes_troubles_only_its_own_pod() {
    let shop = Shop::in_mesh();
    let pod = shop.tb.pod("shop/short").start();
    shop.mesh().wait_in_mesh(&[&pod]);
    let _server = pod.serve(8080, Behaviour::Echo);
    shop.client.connect(pod.at(8080)).expect("connect").ask(b"hello");
    // The link and the name are gone; the object, the label and the processes are still there.
    pod.destroy_netns();
    others_are_well(&shop);
    pod.destroy_sandbox();
    others_are_well(&shop);
    // The next pod, made while the dead one is still in the API.
    let next = shop.tb.pod("shop/next").start();
    shop.mesh().wait_in_mesh(&[&next]);
    pod.remove_object();
    let node = shop.mesh().node(0);
    wait_for("the dead pod to be dropped", || node.pod_state(&pod).is_none().then_some(()));
    // One that vanishes before anybody has looked at it.
    let gone = shop.tb.pod("shop/gone").start();
    gone.destroy_sandbox();
    others_are_well(&shop);
    gone.remove_object();
    assert!(node.agent.runs() && node.proxy.runs());
}

#[test]
fn a_service_without_endpoints_refuses_with_a_reason() {
    let shop = Shop::in_mesh();
    let empty = shop.tb.service("shop/empty").port(80, 8080).create();
    shop.mesh().wait_endpoints(&empty, 0);
    let node = shop.mesh().node(0);
    let mut stream = shop.client.connect(empty.at(80)).expect("the proxy accepts");
    let (end, took) = stream.time_to_end();
    assert_eq!(end, End::Reset);
    assert!(took < Duration::from_secs(2), "{took:?}");
    let line = node.wait_access_line("no endpoints", |line| line.get("dst.service") == empty.hostname());
    assert_ne!(line.get("error"), "", "{}", line.text);
    let labels = [("reporter", "source"), ("destination_service_name", "empty")];
    node.wait_proxy_count(1.0, "istio_tcp_connections_failed_total", &labels);
    assert_eq!(node.proxy_metrics().sum("istio_tcp_connections_failed_total", &labels), 1.0, "once");
    others_are_well(&shop);
    // A port that the service does not have.
    let mut stream = shop.client.connect(shop.far_service.at(81)).expect("the proxy accepts");
    assert_eq!(stream.time_to_end().0, End::Reset);
}

#[test]
fn an_endpoint_that_is_gone_fails_its_connections_only() {
    let shop = Shop::in_mesh();
    let gone = shop.tb.pod("shop/gone").on(shop.tb.node(1)).start();
    let service = shop.tb.service("shop/gone").port(80, 8080).create();
    shop.mesh().wait_in_mesh(&[&gone]);
    shop.mesh().wait_endpoints(&service, 1);
    // Power loss: the object still says Running and Ready.
    gone.destroy_sandbox();
    let start = Instant::now();
    let mut stream = shop.client.connect(service.at(80)).expect("the proxy accepts");
    assert_eq!(stream.time_to_end().0, End::Reset);
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
    let node = shop.mesh().node(0);
    let line = node.wait_access_line("the failed dial", |line| line.get("dst.service") == service.hostname());
    assert_ne!(line.get("error"), "", "{}", line.text);
    others_are_well(&shop);
}

/// B01: before any byte has been forwarded, a failed dial goes to another endpoint.
#[test]
fn a_stopped_server_costs_no_connection_while_another_endpoint_is_there() {
    let shop = Shop::in_mesh();
    let pods = ["pair-a", "pair-b"]
        .map(|name| shop.tb.pod(&format!("shop/{name}")).label("app", "pair").on(shop.tb.node(1)).start());
    let service = shop.tb.service("shop/pair").port(80, 8080).create();
    shop.mesh().wait_in_mesh(&[&pods[0], &pods[1]]);
    shop.mesh().wait_endpoints(&service, 2);
    let _alive = pods[0].serve(8080, Behaviour::Echo);
    let stopped = pods[1].serve(8080, Behaviour::Echo);
    for _ in 0..20 {
        shop.client.connect(service.at(80)).expect("connect").ask(b"both");
    }
    assert!(!stopped.seen().is_empty());
    // The process is gone; the API does not know yet.
    drop(stopped);
    for i in 0..60 {
        let mut stream = shop.client.connect(service.at(80)).expect("connect");
        stream.ask(format!("attempt {i}").as_bytes());
    }
}

/// B138: a peer on the tunnel port that does not speak HBONE is named as such.
#[test]
fn a_peer_that_does_not_speak_hbone_is_named_in_plain_words() {
    let shop = Shop::in_mesh();
    // It says that it terminates HBONE itself, but what listens there is something else.
    let liar = shop
        .tb
        .pod("other/liar")
        .label("networking.istio.io/tunnel", "http")
        .label("istio.io/dataplane-mode", "none")
        .on(shop.tb.node(1))
        .start();
    let _http = liar.serve(15008, Behaviour::Banner("HTTP/1.1 400 Bad Request\r\n\r\n"));
    let node = shop.mesh().node(0);
    wait_for("the proxy to take the pod for an HBONE peer", || {
        let dump = node.config_dump();
        (testbed::workload_of(&dump, &liar)?["protocol"] == "HBONE").then_some(())
    });
    let mut stream = shop.client.connect(liar.at(8080)).expect("the proxy accepts");
    assert_eq!(stream.time_to_end().0, End::Reset);
    let line =
        node.wait_access_line("the failed tunnel", |line| line.get("dst.hbone_addr") == liar.at(8080).to_string());
    assert_ne!(line.get("error"), "", "{}", line.text);
    assert!(line.get("dst.addr").ends_with(":15008"), "the line names the peer: {}", line.text);
}

//! What operators see: metrics of both sides, the access log, the configuration dump.

use testbed::{Behaviour, MeshOptions, Shop, StreamExt, wait_for, workload_of};

/// B147: both ends report the service, the workloads and the identities.
#[test]
fn both_sides_count_a_connection_with_all_its_names() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.ask(&[b'x'; 1000]);
    stream.half_close();
    stream.hear_end();
    let (source, destination) = (shop.client.identity(), shop.far.identity());
    let labels = |reporter: &'static str| {
        vec![
            ("reporter", reporter),
            ("source_workload", "client"),
            ("source_workload_namespace", "shop"),
            ("destination_workload", "far"),
            ("destination_service_name", "far"),
            ("destination_service_namespace", "shop"),
            ("destination_service", "far.shop.svc.cluster.local"),
            ("connection_security_policy", "mutual_tls"),
            ("request_protocol", "tcp"),
            ("response_flags", "-"),
        ]
    };
    for (node, reporter) in [(0, "source"), (1, "destination")] {
        let node = shop.mesh().node(node);
        let mut labels = labels(reporter);
        if reporter == "destination" {
            labels.push(("source_principal", &source));
        } else {
            labels.push(("destination_principal", &destination));
        }
        wait_for(&format!("the {reporter}'s metrics"), || {
            let metrics = node.proxy_metrics();
            let one = |name: &str| metrics.sum(name, &labels) == 1.0;
            (one("istio_tcp_connections_opened_total") && one("istio_tcp_connections_closed_total")).then_some(())
        });
        let metrics = node.proxy_metrics();
        // Client to server is received, server to client sent, at both reporters.
        for name in ["istio_tcp_received_bytes_total", "istio_tcp_sent_bytes_total"] {
            assert_eq!(metrics.sum(name, &labels), 1000.0, "{reporter}: {name}");
        }
    }
}

#[test]
fn one_access_line_a_side_tells_who_to_whom_and_how_much() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Sink);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    let client_addr = stream.local_addr().unwrap();
    stream.say(&[1; 500]);
    stream.half_close();
    stream.hear_end();
    drop(stream);
    let out = shop.mesh().node(0).wait_access_line("outbound", |line| line.get("direction") == "outbound");
    let expected = [
        ("src.addr", client_addr.to_string()),
        ("src.workload", "client".to_owned()),
        ("src.namespace", "shop".to_owned()),
        ("dst.addr", shop.far.at(15008).to_string()),
        ("dst.hbone_addr", shop.far.at(8080).to_string()),
        ("dst.service", shop.far_service.hostname()),
        ("dst.workload", "far".to_owned()),
        ("dst.identity", shop.far.identity()),
        ("bytes_sent", "500".to_owned()),
        ("bytes_recv", "16".to_owned()),
        ("error", String::new()),
    ];
    for (field, value) in &expected {
        assert_eq!(out.get(field), value, "{field} of {}", out.text);
    }
    let inbound = shop.mesh().node(1).wait_access_line("inbound", |line| line.get("direction") == "inbound");
    let expected = [
        ("src.workload", "client".to_owned()),
        ("src.identity", shop.client.identity()),
        ("dst.addr", shop.far.at(8080).to_string()),
        ("dst.service", shop.far_service.hostname()),
        ("dst.workload", "far".to_owned()),
        ("bytes_recv", "500".to_owned()),
        ("bytes_sent", "16".to_owned()),
    ];
    for (field, value) in &expected {
        assert_eq!(inbound.get(field), value, "{field} of {}", inbound.text);
    }
    for node in shop.mesh().nodes() {
        assert_eq!(node.access_log().len(), 1, "one line on {}", node.name());
    }
}

#[test]
fn the_dump_shows_pods_connections_and_certificates() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.ask(b"hello");
    let dump = shop.mesh().node(0).config_dump();
    let far = workload_of(&dump, &shop.far).expect("the workload");
    assert_eq!((far["protocol"].as_str(), far["node"].as_str()), (Some("HBONE"), Some("node1")), "{far}");
    assert_eq!(far["serviceAccount"], "far");
    let state = &dump["workloadState"][shop.client.uid()];
    assert_eq!(state["state"], "Up", "{state}");
    let outbound = &state["connections"]["outbound"][0];
    assert_eq!(outbound["originalDst"], shop.far_service.at(80).to_string(), "{state}");
    assert_eq!(outbound["protocol"], "HBONE", "{state}");
    let certificates = dump["certificates"].as_array().expect("certificates");
    let own = certificates.iter().find(|c| c["identity"] == shop.client.identity().as_str()).expect("the client's");
    assert_eq!(own["state"], "Available");
    assert!(own["certChain"].as_array().is_some_and(|chain| !chain.is_empty()), "{own}");
    let services = dump["services"].as_array().expect("services");
    let service = services.iter().find(|s| s["hostname"] == shop.far_service.hostname()).expect("the service");
    assert_eq!(service["endpoints"].as_object().map(serde_json::Map::len), Some(1), "{service}");
    assert_eq!(service["vips"].as_array().map(Vec::len), Some(2), "both families: {service}");
}

#[test]
fn log_levels_are_changed_while_it_runs() {
    let shop = Shop::in_mesh();
    let node = shop.mesh().node(0);
    let answer = node.admin_post("/logging?level=debug").expect("an answer");
    assert!(answer.status == 200 && answer.body.contains("debug"), "{answer:?}");
    assert_eq!(node.admin_post("/logging?level=nonsense,,=").expect("an answer").status, 400);
    assert_eq!(node.admin("/logging").expect("an answer").status, 405);
    assert_eq!(node.admin("/no-such-page").expect("an answer").status, 404);
}

#[test]
fn the_agent_lists_its_pods_and_their_states() {
    let shop = Shop::in_mesh();
    let text = shop.mesh().node(0).agent_status().to_string();
    for pod in [&shop.client, &shop.near] {
        assert!(text.contains(pod.uid()), "{text}");
    }
    assert!(!text.contains(shop.far.uid()), "only pods of its own node: {text}");
    let metrics = shop.mesh().node(0).agent_metrics();
    assert_eq!(metrics.sum("understory_agent_pods", &[("state", "enrolled")]), 2.0);
    assert_eq!(metrics.sum("ztunnel_connected", &[]), 1.0);
    assert_eq!(metrics.sum("understory_agent_pods_not_captured", &[]), 0.0);
}

/// B33: what a workload has counted is forgotten some time after it has gone, and not before.
#[test]
fn metric_series_of_a_workload_that_is_gone_expire() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("METRIC_SERIES_IDLE", "1s"));
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let guest = shop.tb.pod("shop/guest").start();
    shop.mesh().wait_in_mesh(&[&guest]);
    let mut stays = shop.client.connect(shop.far.at(8080)).expect("connect");
    stays.ask(b"of a workload that stays");
    let mut leaves = guest.connect(shop.far.at(8080)).expect("connect");
    leaves.ask(b"of one that leaves");
    let series = |node: usize, workload: &str| {
        let metrics = shop.mesh().node(node).proxy_metrics();
        let of = |sample: &&testbed::Sample| sample.labels.iter().any(|(k, v)| k == "source_workload" && v == workload);
        metrics.samples().iter().filter(of).count()
    };
    for node in [0, 1] {
        wait_for("the series of the guest", || (series(node, "guest") > 0).then_some(()));
    }
    drop(leaves);
    guest.delete();
    for node in [0, 1] {
        wait_for("the series of the guest to expire", || (series(node, "guest") == 0).then_some(()));
        assert!(series(node, "client") > 0, "an open connection keeps its series");
    }
    stays.ask(b"goes on");
}

#[test]
fn a_log_that_nobody_reads_stops_no_traffic_and_the_lines_that_are_lost_are_counted() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let (mesh, node) = (shop.mesh(), shop.mesh().node(0));
    node.proxy.terminate();
    mesh.start_proxy_unread(node, &[("LOG_QUEUE", "16Ki")]);
    node.wait_proxy_ready();
    mesh.wait_in_mesh(&[&shop.client]);
    // Each has a line of some hundred bytes: more than pipe and queue hold.
    for number in 0..600 {
        shop.client.connect(shop.far.at(8080)).expect("connect").ask(format!("connection {number}").as_bytes());
    }
    node.wait_proxy_count(1.0, "understory_log_lines_lost_total", &[]);
    shop.client.connect(shop.far.at(8080)).expect("connect").ask(b"and it goes on");
}

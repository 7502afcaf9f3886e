//! Policies as they are enforced between pods: what is refused, on which paths, and what both sides are told.

use std::net::SocketAddr;

use testbed::{Behaviour, End, HboneClient, NodeMesh, Place, Shop, StreamExt, wait_for};

/// An AuthorizationPolicy of the namespace `shop` for the pods with a label, or all.
fn put(shop: &Shop, name: &str, rest: &str) {
    let head = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: {name}, namespace: shop}}\n"
    );
    shop.tb.put_manifest(&format!("{name}.yaml"), &(head + rest));
}

fn remove(shop: &Shop, name: &str) {
    shop.tb.remove_manifest(&format!("{name}.yaml"));
}

/// Waits until all proxies hold exactly these policies.
#[track_caller]
fn wait_policies(shop: &Shop, names: &[&str]) {
    for node in shop.mesh().nodes() {
        wait_for(&format!("the proxy on {} to hold the policies {names:?}", node.name()), || {
            let dump = node.config_dump();
            let held = dump["policies"].as_array()?.iter().map(|p| p["name"].as_str().unwrap_or_default());
            let mut held: Vec<_> = held.map(str::to_owned).collect();
            held.sort();
            (held == names).then_some(())
        });
    }
}

/// Whether a connection is answered; a refused one is reset.
#[track_caller]
fn answered(from: &Place, to: SocketAddr) -> bool {
    let Ok(mut stream) = from.connect(to) else { return false };
    use std::io::{Read, Write};
    let sent = stream.write_all(b"hello");
    let mut bytes = [0; 5];
    match sent.and_then(|()| stream.read_exact(&mut bytes)) {
        Ok(()) => true,
        Err(e) => {
            let reset = [std::io::ErrorKind::ConnectionReset, std::io::ErrorKind::BrokenPipe];
            assert!(reset.contains(&e.kind()), "{} → {to}: {e}", from.name());
            false
        }
    }
}

fn verdicts(node: &NodeMesh, labels: &[(&str, &str)]) {
    node.wait_proxy_count(1.0, "understory_policy_verdicts_total", labels);
}

#[test]
fn a_refusal_names_the_rule_that_came_closest_on_both_sides_and_in_the_metric() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let near = shop.near.serve(8080, Behaviour::Echo);
    put(
        &shop,
        "allow-near",
        "spec: {rules: [{from: [{source: {principals: [cluster.local/ns/shop/sa/near]}}], to: [{operation: {ports: ['8080']}}]}]}",
    );
    wait_policies(&shop, &["allow-near"]);

    let reason = "not allowed by 1 policy; closest: shop/allow-near rule 0: principals wanted \
                  cluster.local/ns/shop/sa/near, was cluster.local/ns/shop/sa/client";
    let paths = [shop.far_service.at(80), shop.far_service.at6(80), shop.far.at(8080), shop.far.at6(8080)];
    for to in paths {
        assert!(!answered(&shop.client, to), "{to}");
        assert!(answered(&shop.near, to), "{to}");
    }
    // On one node too.
    assert!(!answered(&shop.client, shop.near_service.at(80)));
    assert!(!answered(&shop.client, shop.near.at(8080)));
    assert_eq!((server.seen().len(), near.seen().len()), (paths.len(), 0), "no refused connection came to an app");

    let (client_side, server_side) = (shop.mesh().node(0), shop.mesh().node(1));
    let inbound = server_side.wait_access_line("the refusal", |line| line.get("error") == reason);
    assert_eq!((inbound.get("direction"), inbound.get("response_flags")), ("inbound", "DENY"), "{}", inbound.text);
    assert_eq!(inbound.get("src.identity"), shop.client.identity());
    let told = format!("status 401: {reason}");
    let outbound = client_side.wait_access_line("the peer's reason", |line| line.get("error").contains(&told));
    assert_eq!(outbound.get("direction"), "outbound", "{}", outbound.text);
    verdicts(
        server_side,
        &[("mode", "enforced"), ("policy", "shop/allow-near"), ("rule", "0"), ("result", "not_allowed")],
    );
    server_side.wait_proxy_count(1.0, "istio_tcp_connections_failed_total", &[("response_flags", "DENY")]);

    let leaf = shop.mesh().authority().issue(&shop.client.identity());
    let mut tunnel = HboneClient::open(&plain, shop.far.at(15008), Some(&leaf)).expect("a tunnel");
    let answer = tunnel.connect(&shop.far.at(8080).to_string(), &[]).expect("an answer");
    assert_eq!((answer.status, answer.headers["x-understory-reason"].to_str().unwrap()), (401, reason));

    remove(&shop, "allow-near");
    wait_policies(&shop, &[]);
    assert!(answered(&shop.client, shop.far_service.at(80)));
    // The tunnel from before is judged stream by stream.
    assert_eq!(tunnel.connect(&shop.far.at(8080).to_string(), &[]).expect("an answer").status, 200);
}

#[test]
fn a_denial_names_its_rule_and_ports_are_those_of_the_app() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    // The service's port is not the app's.
    put(&shop, "deny-80", "spec: {action: DENY, rules: [{to: [{operation: {ports: ['80']}}]}]}");
    wait_policies(&shop, &["deny-80"]);
    assert!(answered(&shop.client, shop.far_service.at(80)));
    put(
        &shop,
        "deny-8080",
        "spec: {action: DENY, rules: [{from: [{source: {namespaces: [other]}}]}, {to: [{operation: {ports: ['8080']}}]}]}",
    );
    wait_policies(&shop, &["deny-80", "deny-8080"]);
    assert!(!answered(&shop.client, shop.far_service.at(80)));
    let reason = "denied by shop/deny-8080 rule 1: destinationPorts 8080 matched 8080";
    let node = shop.mesh().node(1);
    node.wait_access_line("the denial", |line| line.get("error") == reason);
    verdicts(node, &[("mode", "enforced"), ("policy", "shop/deny-8080"), ("rule", "1"), ("result", "denied")]);
    assert_eq!(server.seen().len(), 1);
}

#[test]
fn in_the_clear_a_refused_connection_is_reset_and_nothing_comes_to_the_app() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let server = shop.far.serve(8080, Behaviour::Echo);
    assert!(answered(&plain, shop.far.at(8080)), "it is served, or the rest shows nothing");
    put(&shop, "allow-mesh", "spec: {rules: [{from: [{source: {principals: ['*']}}]}]}");
    wait_policies(&shop, &["allow-mesh"]);
    for to in [shop.far.at(8080), shop.far.at6(8080)] {
        let mut stream = plain.connect(to).expect("connect");
        let (bytes, end) = stream.hear_end();
        assert_eq!((bytes.len(), end), (0, End::Reset), "{to}");
    }
    assert!(answered(&shop.client, shop.far.at(8080)));
    assert_eq!(server.seen().len(), 2);
    let reason = "not allowed by 1 policy; closest: shop/allow-mesh rule 0: principals wanted *, was none (no mTLS)";
    let node = shop.mesh().node(1);
    let line = node.wait_access_line("the refusal", |line| line.get("error") == reason);
    assert_eq!((line.get("direction"), line.get("src.identity")), ("inbound", ""), "{}", line.text);
    let labels = [("reporter", "destination"), ("connection_security_policy", "unknown"), ("response_flags", "DENY")];
    node.wait_proxy_count(2.0, "istio_tcp_connections_failed_total", &labels);
}

#[test]
fn a_dry_run_and_an_audit_are_reported_and_change_nothing() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    put(&shop, "watch", "spec: {action: AUDIT, rules: [{from: [{source: {serviceAccounts: [client]}}]}]}");
    shop.tb.put_manifest(
        "next.yaml",
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\n\
         metadata: {name: next, namespace: shop, annotations: {istio.io/dry-run: 'true'}}\n\
         spec: {action: DENY, rules: [{to: [{operation: {ports: ['8080']}}]}]}\n",
    );
    wait_policies(&shop, &["next", "watch"]);
    let node = shop.mesh().node(1);
    let mark = node.proxy.log_mark();
    assert!(answered(&shop.client, shop.far_service.at(80)));
    assert_eq!(server.seen().len(), 1);
    mark.wait(&[
        "\tpolicy\tconnection judged",
        "verdict=\"allowed: no ALLOW policy applies\"",
        "dry_run=\"denied by shop/next rule 0: destinationPorts 8080 matched 8080\"",
        "audited=\"shop/watch rule 0\"",
    ]);
    verdicts(node, &[("mode", "dry_run"), ("policy", "shop/next"), ("rule", "0"), ("result", "denied")]);
    verdicts(node, &[("mode", "audit"), ("policy", "shop/watch"), ("rule", "0"), ("result", "matched")]);
    let enforced = node.proxy_metrics().sum("understory_policy_verdicts_total", &[("mode", "enforced")]);
    assert_eq!(enforced, 0.0);
}

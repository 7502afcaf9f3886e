//! Connections that are open when policies change, and those that are older than their pod's place in the mesh.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use testbed::{Behaviour, DATAPLANE_MODE, End, NodeMesh, Place, Shop, StreamExt, wait_for};

/// A manifest of `security.istio.io` in the namespace `shop`.
fn put(shop: &Shop, kind: &str, name: &str, spec: &str) {
    shop.tb.put_manifest(&format!("{name}.yaml"), &manifest(kind, name, spec));
}

fn manifest(kind: &str, name: &str, spec: &str) -> String {
    format!(
        "apiVersion: security.istio.io/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: shop}}\nspec: {spec}\n"
    )
}

fn deny(shop: &Shop, name: &str, rule: &str) {
    put(shop, "AuthorizationPolicy", name, &format!("{{action: DENY, rules: [{rule}]}}"));
}

/// A connection that is in use.
#[track_caller]
fn open(from: &Place, to: SocketAddr) -> TcpStream {
    let mut stream = from.connect(to).unwrap_or_else(|e| panic!("{} → {to}: {e}", from.name()));
    stream.ask(b"open");
    stream
}

/// Waits until a proxy's inbound side enforces a policy: then what it forbids is ended within a second.
#[track_caller]
fn wait_policy(node: &NodeMesh, name: &str) -> Instant {
    wait_for(&format!("the proxy on {} to hold {name}", node.name()), || {
        let dump = node.config_dump();
        dump["policies"].as_array()?.iter().any(|policy| policy["name"] == name).then(Instant::now)
    })
}

#[test]
fn a_denial_ends_open_connections_on_every_path_within_a_second_and_touches_no_other() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let _servers = [
        shop.far.serve(8080, Behaviour::Echo),
        shop.near.serve(8080, Behaviour::Echo),
        plain.serve(9000, Behaviour::Echo),
    ];
    let paths =
        [shop.far_service.at(80), shop.far_service.at6(80), shop.far.at(8080), shop.far.at6(8080), shop.near.at(8080)];
    let mut denied: Vec<TcpStream> = paths.iter().map(|to| open(&shop.client, *to)).collect();
    let mut others = vec![
        open(&shop.near, shop.far_service.at(80)),
        open(&shop.far, shop.near.at6(8080)),
        open(&plain, shop.far.at(8080)),
        open(&shop.client, plain.at(9000)),
    ];

    deny(&shop, "no-client", "{from: [{source: {serviceAccounts: [client]}}], to: [{operation: {ports: ['8080']}}]}");
    let known = shop.mesh().nodes().iter().map(|node| wait_policy(node, "no-client")).max().expect("nodes");
    for (stream, to) in denied.iter_mut().zip(paths) {
        assert_eq!(stream.time_to_end().0, End::Reset, "{to}");
    }
    let took = known.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?} from the policy's arrival to the last end");
    for stream in &mut others {
        stream.ask(b"not concerned");
    }

    let reason = "closed due to policy change: denied by shop/no-client rule 0: ";
    let far = shop.mesh().node(1);
    let line = far.wait_access_line("the end", |line| line.get("error").starts_with(reason));
    assert_eq!(
        (line.get("direction"), line.get("response_flags"), line.get("src.identity")),
        ("inbound", "DENY", &*shop.client.identity()),
        "{}",
        line.text
    );
    let ends = |node: &NodeMesh| {
        node.access_log().iter().filter(|line| line.get("error").starts_with("closed due to policy change")).count()
    };
    wait_for("a line for each end", || (ends(far) == 4 && ends(shop.mesh().node(0)) == 1).then_some(()));
    let labels = [("mode", "enforced"), ("policy", "shop/no-client"), ("rule", "0"), ("result", "denied")];
    far.wait_proxy_count(4.0, "understory_policy_verdicts_total", &labels);
    assert!(shop.client.connect(paths[0]).map_or(true, |mut stream| stream.hear_end().1 == End::Reset));
}

#[test]
fn strict_and_an_allow_list_end_what_comes_in_the_clear_and_nothing_else() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mut clear = [open(&plain, shop.far.at(8080)), open(&plain, shop.far.at6(8080))];
    let mut meshed = open(&shop.client, shop.far_service.at(80));
    put(&shop, "PeerAuthentication", "strict", "{mtls: {mode: STRICT}}");
    for stream in &mut clear {
        assert_eq!(stream.time_to_end().0, End::Reset);
    }
    meshed.ask(b"still here");
    // A label of the pod decides which policies are for it.
    let selected = "{selector: {matchLabels: {tier: back}}, rules: [{from: [{source: {serviceAccounts: [near]}}]}]}";
    put(&shop, "AuthorizationPolicy", "back-only", selected);
    let mut near = open(&shop.near, shop.far_service.at(80));
    meshed.ask(b"the policy is not for this pod");
    shop.far.set_label("tier", Some("back"));
    assert_eq!(meshed.time_to_end().0, End::Reset);
    near.ask(b"allowed");
    let error = "closed due to policy change: not allowed by 1 policy; closest: shop/back-only rule 0: ";
    shop.mesh().node(1).wait_access_line("the reason", |line| line.get("error").starts_with(error));
}

/// The proxy never held them: it ends them in the kernel.
#[test]
fn connections_older_than_enrolment_go_on_until_strict_forbids_them() {
    let shop = Shop::outside_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let _elsewhere = plain.serve(9000, Behaviour::Echo);
    let mut older =
        [open(&plain, shop.far.at(8080)), open(&plain, shop.far.at6(8080)), open(&shop.client, shop.far.at(8080))];
    let mut outgoing = open(&shop.far, plain.at(9000));
    shop.enrol();
    for stream in &mut older {
        stream.ask(b"undisturbed");
    }
    let node = shop.mesh().node(1);
    let held = || node.proxy_metrics().sum("understory_older_connections", &[]);
    wait_for("the older connections to be known", || (held() == 3.0).then_some(()));
    let mut meshed = open(&shop.client, shop.far_service.at(80));

    put(&shop, "PeerAuthentication", "strict", "{mtls: {mode: STRICT}}");
    let known = wait_for("the proxy to be told", || {
        let dump = node.config_dump();
        (!dump["policies"].as_array()?.is_empty()).then(Instant::now)
    });
    for stream in &mut older {
        assert_eq!(stream.time_to_end().0, End::Reset);
    }
    let took = known.elapsed();
    assert!(took < Duration::from_secs(1), "{took:?}");
    for stream in [&mut meshed, &mut outgoing] {
        stream.ask(b"not concerned");
    }
    assert_eq!(server.seen().len(), 4);
    node.wait_proxy_count(3.0, "understory_older_connections_ended_total", &[]);
    assert_eq!(held(), 0.0);
    node.proxy.wait_log(&["ended a connection that is older than the pod's place in the mesh", "peer=", "reason="]);
}

/// They are as old as any other for the mesh that the pod comes back to.
#[test]
fn connections_from_a_time_out_of_the_mesh_are_judged_when_the_pod_comes_back() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    put(&shop, "PeerAuthentication", "strict", "{mtls: {mode: STRICT}}");
    wait_policy(shop.mesh().node(1), "istio_converted_static_strict");
    let in_the_clear = || {
        wait_for("connections to pass in the clear", || {
            let mut stream = plain.connect(shop.far.at(8080)).ok()?;
            stream.write_all(b"x").and_then(|()| stream.read_exact(&mut [0])).ok().map(|()| stream)
        })
    };
    let label = |mode| shop.far.set_label(DATAPLANE_MODE, mode);
    // It has left altogether.
    label(Some("none"));
    shop.mesh().wait_out_of_mesh(&[&shop.far]);
    let mut older = [in_the_clear(), open(&plain, shop.far.at6(8080)), open(&shop.client, shop.far_service.at(80))];
    label(None);
    for stream in &mut older {
        assert_eq!(stream.time_to_end().0, End::Reset);
    }
    shop.mesh().wait_in_mesh(&[&shop.far]);
    // It waits for a connection to end when its agent ends; the next one finds it wanted again.
    let beside = shop.tb.pod("shop/beside").on(shop.tb.node(1)).start();
    shop.mesh().wait_in_mesh(&[&beside]);
    let mut meshed = [open(&shop.client, shop.far_service.at(80)), open(&beside, shop.far.at(8080))];
    label(Some("none"));
    let mut older = in_the_clear();
    let node = shop.mesh().node(1);
    node.agent.kill9();
    label(None);
    shop.mesh().start_agent(node);
    assert_eq!(older.time_to_end().0, End::Reset);
    shop.mesh().wait_in_mesh(&[&shop.far]);
    for stream in &mut meshed {
        stream.ask(b"has outlived it, and is not taken for one in the clear");
    }
}

/// Whatever order changes arrive in, there is no moment at which the client may pass: at each, some policy denies it.
#[test]
fn a_thousand_changes_a_second_never_let_pass_what_each_of_them_forbids() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let forms = [
        "{action: DENY, rules: [{from: [{source: {serviceAccounts: [client]}}]}]}",
        "{action: DENY, rules: [{from: [{source: {notPrincipals: [cluster.local/ns/shop/sa/near]}}]}]}",
        "{rules: [{from: [{source: {principals: ['*/sa/near']}}]}]}",
        "{selector: {matchLabels: {app: far}}, rules: [{from: [{source: {serviceAccounts: [near]}}]}]}",
    ];
    let idle = "{action: DENY, rules: [{to: [{operation: {ports: ['9999']}}]}]}";
    let selected = forms[0].replacen('{', "{selector: {matchLabels: {app: far}}, ", 1);
    // In the last form another policy of the same file stands in its place.
    let guard = |round: usize| {
        let forms = forms.iter().map(|form| [form, idle]).chain([[idle, &selected]]);
        let [guard, relief] = forms.cycle().nth(round % 5).expect("endless");
        let texts =
            [("guard", guard), ("relief", relief)].map(|(name, spec)| manifest("AuthorizationPolicy", name, spec));
        shop.tb.put_manifest("guard.yaml", &texts.join("---\n"));
    };
    guard(0);
    wait_policy(shop.mesh().node(1), "guard");
    let (stop, tries, passed) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut changes = 0;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for to in [shop.far_service.at(80), shop.far.at6(8080)] {
            let (stop, tries, passed, client, near) = (&stop, &tries, &passed, &shop.client, &shop.near);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(mut stream) = client.connect(to) {
                        let asked = stream.write_all(b"let me in").and_then(|()| stream.read_exact(&mut [0]));
                        passed.fetch_add(usize::from(asked.is_ok()), Ordering::Relaxed);
                    }
                    tries.fetch_add(1, Ordering::Relaxed);
                }
            });
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    near.connect(to).expect("connect").ask(b"always allowed");
                }
            });
        }
        while changes < 3000 || tries.load(Ordering::Relaxed) < 100 {
            guard(changes);
            match changes % 6 {
                // One that comes and goes under one name, with and without a selector.
                0 => deny(&shop, "other", "{to: [{operation: {ports: ['9999']}}]}"),
                2 => shop.tb.remove_manifest("other.yaml"),
                3 => put(&shop, "AuthorizationPolicy", "other", &forms[3].replace("near]", "near, far]")),
                5 => shop.tb.remove_manifest("other.yaml"),
                _ => {}
            }
            changes += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
    let rate = changes as f64 / begun.elapsed().as_secs_f64();
    println!("{changes} changes, {rate:.0} a second; {} tries", tries.load(Ordering::Relaxed));
    assert_eq!(passed.load(Ordering::Relaxed), 0);
    let of_client = [shop.client.ip(), shop.client.ip6()];
    let come = server.seen().iter().filter(|seen| of_client.contains(&seen.peer.ip())).count();
    assert_eq!(come, 0, "connections of the client that came to the app");
    assert!(!server.seen().is_empty());
}

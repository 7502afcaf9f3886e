//! Connections between two pods of one node: without a tunnel, and with everything else that a tunnel gives.

use std::net::{SocketAddr, TcpListener};
use std::panic::AssertUnwindSafe;
use std::sync::Barrier;
use std::time::Duration;

use rustix::thread::{UnshareFlags, unshare_unsafe};
use testbed::{AccessLine, Behaviour, End, MeshOptions, Shop, StreamExt, wait_for};
use ztunnel::lifecycle::raise_descriptor_limit;

/// Tables of descriptors that share the ports.
const PARTS: usize = 4;
const CANARY: &[u8] = b"canary-between-neighbours";

fn is_attested(line: &AccessLine) -> bool {
    line.get("security") == "attested"
}

fn put_policy(shop: &Shop, spec: &str) {
    let text = format!(
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {{name: p, namespace: shop}}\n\
         spec: {spec}\n"
    );
    shop.tb.put_manifest("p.yaml", &text);
    wait_for("the policy at the proxy", || {
        let dump = shop.mesh().node(0).config_dump();
        dump["policies"].as_array()?.iter().any(|policy| policy["name"] == "p").then_some(())
    });
}

#[test]
fn neighbours_are_reached_without_a_tunnel_and_both_sides_say_who_it_was() {
    let shop = Shop::in_mesh();
    let server = shop.near.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    let paths = [shop.near_service.at(80), shop.near_service.at6(80), shop.near.at(8080), shop.near.at6(8080)];
    for to in paths {
        shop.client.connect(to).expect("connect").ask(b"hello");
        let own = if to.is_ipv4() { shop.client.ip() } else { shop.client.ip6() };
        let seen = server.wait_seen(1);
        assert_eq!(seen.last().map(|seen| seen.peer.ip()), Some(own), "{to}: the server sees the client's address");
    }
    assert_eq!(server.seen().len(), 4);
    let lines = |direction: &str| {
        let of = |line: &AccessLine| is_attested(line) && line.get("direction") == direction;
        node.access_log().into_iter().filter(of).collect::<Vec<_>>()
    };
    wait_for("a line for each side", || (lines("outbound").len() == 4 && lines("inbound").len() == 4).then_some(()));
    for line in lines("outbound").into_iter().chain(lines("inbound")) {
        assert_eq!(line.get("src.identity"), shop.client.identity(), "{}", line.text);
        assert_eq!((line.get("dst.workload"), line.get("dst.hbone_addr")), ("near", ""), "{}", line.text);
        assert_eq!(line.get("closed.how"), "FIN", "{}", line.text);
    }
    assert!(lines("inbound").iter().all(|line| line.get("dst.service") == shop.near_service.hostname()));
    assert!(lines("outbound").iter().all(|line| line.get("dst.identity") == shop.near.identity()));

    let mut stream = shop.client.connect(shop.near_service.at(80)).expect("connect");
    stream.ask(CANARY);
    for reporter in ["source", "destination"] {
        let labels = [("reporter", reporter), ("connection_security_policy", "attested")];
        node.wait_proxy_count((4 * b"hello".len() + CANARY.len()) as f64, "istio_tcp_received_bytes_total", &labels);
    }
    let told = node.ztunnel(&["explain", "--from", "shop/client", "--to", "shop/near:80"]).expect("an answer");
    assert!(told.contains("on this node, without a tunnel") && told.contains("outcome: allowed"), "{told}");
    let dump = node.config_dump();
    let state = dump["workloadState"].as_object().expect("pods").values();
    let protocols: Vec<_> = state
        .flat_map(|pod| ["inbound", "outbound"].map(|way| pod["connections"][way][0]["protocol"].clone()))
        .filter(|protocol| !protocol.is_null())
        .collect();
    assert_eq!(protocols, ["ATTESTED", "ATTESTED"]);
}

#[test]
fn policies_hold_between_neighbours_at_the_first_byte_and_later() {
    let shop = Shop::in_mesh();
    let server = shop.near.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    put_policy(&shop, "{action: DENY, rules: [{from: [{source: {serviceAccounts: [far]}}]}]}");
    let mut open = [shop.near.at(8080), shop.near_service.at6(80)].map(|to| shop.client.connect(to).expect("connect"));
    open.iter_mut().for_each(|stream| stream.ask(b"allowed"));
    put_policy(&shop, "{action: DENY, rules: [{from: [{source: {serviceAccounts: [client]}}]}]}");
    for stream in &mut open {
        assert_eq!(stream.time_to_end().0, End::Reset);
    }
    node.wait_access_line("the end", |line| {
        is_attested(line)
            && line.get("direction") == "inbound"
            && line.get("error").starts_with("closed due to policy change: denied by shop/p rule 0")
    });
    let before = server.seen().len();
    for to in [shop.near.at(8080), shop.near.at6(8080), shop.near_service.at(80)] {
        let mut refused = shop.client.connect(to).expect("the proxy accepts");
        assert_eq!(refused.say_in_vain(CANARY), (Vec::new(), End::Reset), "{to}");
    }
    assert_eq!(server.seen().len(), before, "nothing came to the app");
    for direction in ["inbound", "outbound"] {
        node.wait_access_line("the reason on both sides", |line| {
            line.get("direction") == direction
                && line.get("response_flags") == "DENY"
                && line.get("error").contains("denied by shop/p rule 0")
                && line.text.contains("connection failed")
        });
    }
}

/// Another pod has the neighbour's address: it does not get a byte, whether it is in the mesh or not.
#[test]
fn a_pod_that_takes_a_neighbours_address_gets_nothing() {
    let shop = Shop::in_mesh();
    let thief = shop.tb.pod("other/thief").start();
    let _server = shop.near.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.near.at(8080)).expect("connect").ask(b"the right one");
    let link = thief.netns().ip_output(&["-o", "link", "show", "eth0"]);
    let mac = link.split("link/ether ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a MAC address");
    let theirs = [(shop.near.at(8080), 32), (shop.near.at6(8080), 128)];
    let stolen: Vec<_> = theirs
        .iter()
        .map(|(to, prefix)| {
            let nodad = if to.is_ipv6() { " nodad" } else { "" };
            thief.netns().ip(&format!("addr add {}/{prefix} dev eth0{nodad}\n", to.ip()));
            // As after a poisoned answer to the question who has the address.
            let neighbour = format!("neigh replace {} lladdr {mac} dev eth0 nud permanent\n", to.ip());
            shop.client.netns().ip(&neighbour);
            thief.serve_on(*to, Behaviour::Echo)
        })
        .collect();
    for (to, _) in theirs {
        let mut stream = shop.client.connect(to).expect("the proxy accepts");
        stream.set_read_timeout(Some(Duration::from_secs(15))).expect("set a timeout");
        assert_eq!(stream.say_in_vain(CANARY), (Vec::new(), End::Reset), "{to}");
    }
    assert!(stolen.iter().all(|server| server.seen().iter().all(|seen| seen.received == 0)), "not a byte");
    shop.mesh().node(0).wait_proxy_count(2.0, "understory_unattested_dials_total", &[]);
}

#[test]
fn encryption_can_be_demanded_on_the_node_too() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("SAME_NODE_ENCRYPTION", "true"));
    let _server = shop.near.serve(8080, Behaviour::Echo);
    shop.client.connect(shop.near_service.at(80)).expect("connect").ask(b"hello");
    let line = shop.mesh().node(0).wait_access_line("the line", |line| line.get("direction") == "outbound");
    assert_eq!((line.get("security"), line.get("dst.hbone_addr")), ("", &*shop.near.at(8080).to_string()));
    let told = shop.mesh().node(0).ztunnel(&["explain", "--from", "shop/client", "--to", "shop/near:80"]);
    assert!(told.as_ref().is_ok_and(|told| told.contains("HBONE to")), "{told:?}");
}

/// A rule that lets nothing but the tunnel's port through is a common one: the pods reach each other all the same.
#[test]
fn a_network_policy_that_only_allows_the_tunnels_port_does_not_part_neighbours() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("CONNECT_TIMEOUT", "1s"));
    let _server = shop.near.serve(8080, Behaviour::Echo);
    // As a CNI plugin does it: before the packets come to the pod's sockets.
    shop.near.netns().nft(
        "table inet cni {\nchain in {\ntype filter hook input priority 0;\niifname \"eth0\" tcp dport 15008 accept\n\
         iifname \"eth0\" tcp flags & (syn | ack) == syn drop\n}\n}\n",
    );
    for _ in 0..3 {
        let mut stream = shop.client.connect(shop.near_service.at(80)).expect("connect");
        stream.ask(b"hello");
        drop(stream);
    }
    let node = shop.mesh().node(0);
    wait_for("three lines", || {
        let lines = node.access_log().into_iter().filter(|line| {
            line.get("direction") == "outbound" && line.get("dst.hbone_addr") == shop.near.at(8080).to_string()
        });
        (lines.count() == 3).then_some(())
    });
}

/// What a policy ends is over on the server's side too, whatever becomes of the packets from the client's.
#[test]
fn the_servers_side_ends_although_nothing_from_the_client_reaches_it() {
    let shop = Shop::in_mesh();
    let server = shop.near.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(shop.near.at(8080)).expect("connect");
    stream.ask(b"open");
    shop.near
        .netns()
        .nft("table inet cni {\nchain in {\ntype filter hook input priority 0;\niifname \"eth0\" drop\n}\n}\n");
    put_policy(&shop, "{action: DENY, rules: [{from: [{source: {serviceAccounts: [client]}}]}]}");
    // The app reads ECONNABORTED.
    server.wait_last_end();
}

/// A pod that leaves the mesh, and one that is deleted: what was open ends as over a tunnel, and nothing new is let past.
#[test]
fn a_neighbour_that_leaves_is_reached_in_the_clear_and_one_that_is_gone_ends_its_connections() {
    let shop = Shop::in_mesh();
    let _servers = [shop.near.serve(8080, Behaviour::Echo), shop.client.serve(8080, Behaviour::Echo)];
    let mut to_near = shop.client.connect(shop.near_service.at(80)).expect("connect");
    let mut to_client = shop.near.connect(shop.client.at(8080)).expect("connect");
    to_near.ask(b"both in the mesh");
    to_client.ask(b"both in the mesh");
    shop.near.set_label("istio.io/dataplane-mode", Some("none"));
    to_near.ask(b"while it drains");
    drop((to_near, to_client));
    shop.mesh().wait_out_of_mesh(&[&shop.near]);
    let mut again = shop.client.connect(shop.near_service.at(80)).expect("connect");
    again.ask(b"in the clear");
    let line = {
        drop(again);
        shop.mesh().node(0).wait_access_line("the plain connection", |line| {
            line.get("direction") == "outbound" && line.get("src.identity").is_empty()
        })
    };
    assert_eq!((line.get("security"), line.get("dst.workload")), ("", "near"), "{}", line.text);
    shop.near.set_label("istio.io/dataplane-mode", None);
    shop.mesh().wait_in_mesh(&[&shop.near]);
    let mut last = shop.client.connect(shop.near_service.at(80)).expect("connect");
    last.ask(b"in the mesh again");
    shop.near.delete();
    last.time_to_end();
    let mut late = shop.client.connect(shop.near.at(8080)).expect("the proxy accepts");
    assert_eq!(late.say_in_vain(CANARY), (Vec::new(), End::Reset));
}

/// An app's closed connections keep their ports for a minute, and have soon all that the kernel gives by itself: with the
/// very address that dials to neighbours come from.
#[test]
fn an_app_that_has_used_up_its_ports_still_reaches_its_neighbour_without_a_tunnel() {
    let shop = Shop::in_mesh();
    let _server = shop.near.serve(8080, Behaviour::Echo);
    raise_descriptor_limit();
    let ports: Vec<u16> = (32_768..61_000).collect();
    let (taken, done) = (Barrier::new(PARTS + 1), Barrier::new(PARTS + 1));
    std::thread::scope(|scope| {
        for part in ports.chunks(ports.len().div_ceil(PARTS)) {
            scope.spawn(|| {
                // SAFETY: the thread has a table of descriptors of its own from then on, and ends with it: no process may
                // have so many.
                unsafe { unshare_unsafe(UnshareFlags::FILES) }.expect("a table of descriptors");
                let bind = |port: &u16| TcpListener::bind(SocketAddr::new(shop.client.ip(), *port)).ok();
                let held: Vec<_> = shop.client.netns().run(|| part.iter().filter_map(bind).collect());
                taken.wait();
                done.wait();
                assert!(held.len() > part.len() * 99 / 100, "only {} of {} ports", held.len(), part.len());
            });
        }
        taken.wait();
        let dialled = std::panic::catch_unwind(AssertUnwindSafe(|| reach_near(&shop)));
        done.wait();
        dialled.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

/// Twenty times, from ports that are free.
fn reach_near(shop: &Shop) {
    for port in 20_000..20_020 {
        let from = SocketAddr::new(shop.client.ip(), port);
        shop.client.dial(shop.near_service.at(80)).from(from).connect().expect("connect").ask(b"hello");
    }
    let node = shop.mesh().node(0);
    let attested = || node.access_log().iter().filter(|l| is_attested(l) && l.get("direction") == "outbound").count();
    wait_for("all of them without a tunnel", || (attested() == 20).then_some(()));
}

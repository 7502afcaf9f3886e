//! Traffic between the mesh and what is not in it.

use testbed::{Behaviour, End, Pod, Shop, StreamExt};

#[test]
fn destinations_outside_are_passed_through_with_the_pods_own_address() {
    let shop = Shop::in_mesh();
    let outside = shop.tb.outside("db");
    let plain = shop.tb.pod("legacy/plain").on(shop.tb.node(1)).start();
    let servers = [outside.serve(5432, Behaviour::Banner("ready\n")), plain.serve(5432, Behaviour::Banner("ready\n"))];
    for to in [(outside.ip4(), 5432), (outside.ip6(), 5432), (plain.ip(), 5432), (plain.ip6(), 5432)] {
        let mut stream = shop.client.connect(to.into()).unwrap_or_else(|e| panic!("{to:?}: {e}"));
        assert_eq!(stream.hear(6), b"ready\n");
        stream.ask(b"query");
        assert_eq!(stream.peer_addr().unwrap(), to.into());
    }
    for server in &servers {
        let peers: Vec<_> = server.seen().iter().map(|seen| seen.peer.ip()).collect();
        assert_eq!(peers, [shop.client.ip(), shop.client.ip6()]);
    }
    // A port outside that nobody listens on: the app learns it at once.
    let mut stream = shop.client.connect((outside.ip4(), 9).into()).expect("the proxy accepts");
    assert_eq!(stream.time_to_end().0, End::Reset);
}

#[test]
fn a_plain_client_reaches_an_enrolled_pod() {
    let shop = Shop::in_mesh();
    let outside = shop.tb.outside("laptop");
    let near = shop.tb.pod("legacy/near").start();
    let server = shop.near.serve(8080, Behaviour::Echo);
    testbed::wait_for("the proxy to know the plain pod", || {
        testbed::workload_of(&shop.mesh().node(0).config_dump(), &near).map(|_| ())
    });
    for to in [shop.near.at(8080), shop.near.at6(8080)] {
        outside.connect(to).expect("connect").ask(b"plain");
        near.connect(to).expect("connect").ask(b"plain");
    }
    let peers: Vec<_> = server.seen().iter().map(|seen| seen.peer.ip()).collect();
    assert_eq!(peers, [outside.ip4(), near.ip(), outside.ip6(), near.ip6()], "the app sees the clients' addresses");
    let line = shop.mesh().node(0).wait_access_line("a plain client", |line| {
        line.get("direction") == "inbound"
            && line.get("src.workload") == "near"
            && line.get("src.namespace") == "legacy"
    });
    assert_eq!(line.get("src.identity"), "", "nobody vouches for a plain client: {}", line.text);
    // RST and a closed port.
    outside.connect(shop.near.at(8080)).expect("connect").reset();
    server.wait_seen(5);
    assert_eq!(server.wait_last_end(), End::Reset);
    if let Ok(mut stream) = outside.connect(shop.near.at(9999)) {
        assert_eq!(stream.time_to_end().0, End::Reset);
    }
}

#[test]
fn an_address_that_nobody_has_fails_and_says_why() {
    // Inside the pods' range, but no pod's: nothing may be sent there in the clear and forgotten.
    let shop = Shop::in_mesh();
    let to = "10.244.1.200:80".parse().unwrap();
    let mut stream = shop.client.connect(to).expect("the proxy accepts");
    assert_eq!(stream.time_to_end().0, End::Reset);
    let line =
        shop.mesh().node(0).wait_access_line("the failed dial", |line| line.get("dst.addr") == "10.244.1.200:80");
    assert_ne!(line.get("error"), "", "{}", line.text);
}

#[test]
fn link_local_addresses_work_as_without_a_mesh() {
    let shop = Shop::in_mesh();
    let server = shop.near.serve(8080, Behaviour::Echo);
    let of = |pod: &Pod, args: &[&str]| pod.netns().ip_output(args);
    let addresses = of(&shop.near, &["-6", "-o", "addr", "show", "dev", "eth0", "scope", "link"]);
    let address = addresses.split_whitespace().find_map(|word| word.strip_suffix("/64")).expect("an address");
    let link = of(&shop.client, &["-o", "link", "show", "eth0"]);
    let (index, _) = link.split_once(':').expect("a number");
    let mut stream = shop.client.connect(format!("[{address}%{index}]:8080").parse().unwrap()).expect("connect");
    stream.ask(b"on the same link");
    drop(stream);
    assert_eq!(server.seen().len(), 1);
    shop.mesh().node(0).wait_access_line("from a link-local address", |line| {
        line.get("direction") == "inbound" && line.get("src.addr").contains("fe80")
    });
}

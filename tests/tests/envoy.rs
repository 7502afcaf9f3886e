//! Envoy as the other side of a tunnel, with certificates of the same authority: as client of our server and as
//! server of our client.

use std::io::{Read, Write};
use std::net::TcpStream;

use testbed::{
    Authority, Behaviour, DATAPLANE_MODE, End, Envoy, Pod, Shop, SidecarPorts, StreamExt, Testbed, read_checksum,
    send_pattern, wait_for, workload_of,
};

const ENVOY: &str = "spiffe://cluster.local/ns/peers/sa/envoy";
const BULK: u64 = 256 << 20;

/// Requests, bulk both ways, the client's half-close and resets of both sides, from a client to a server pod.
///
/// What Envoy itself does not do is not asked for: it resets the whole stream when the server ends its direction
/// before the client, and it passes no RST on, so an abort of either side must only end the other.
fn exercise(connect: &dyn Fn() -> TcpStream, server: &Pod, through: &str) {
    {
        let _requests = server.serve(8080, Behaviour::Requests);
        let mut stream = connect();
        for _ in 0..500 {
            stream.say(&[b'q'; 128]);
            assert_eq!(stream.hear(1024), [b'a'; 1024], "{through}");
        }
    }
    let sum = {
        let _sink = server.serve(8080, Behaviour::Sink);
        let mut stream = connect();
        let sum = send_pattern(&mut stream, BULK).expect("send");
        stream.half_close();
        let (answer, end) = stream.hear_end();
        assert_eq!(answer, [BULK.to_be_bytes(), sum.to_be_bytes()].concat(), "{through}: upload");
        assert_eq!(end, End::Fin);
        sum
    };
    {
        let _source = server.serve(8080, Behaviour::Source(BULK));
        let mut stream = connect();
        stream.half_close();
        assert_eq!(read_checksum(&mut stream).expect("receive"), (BULK, sum), "{through}: download");
    }
    {
        let server = server.serve(8080, Behaviour::Echo);
        let mut stream = connect();
        stream.ask(b"hello");
        stream.reset();
        // As RST or as FIN: it must end.
        server.wait_last_end();
    }
    {
        let behaviour = Behaviour::custom(|mut stream| {
            stream.read_exact(&mut [0; 5]).expect("the client speaks");
            stream.reset();
        });
        let _server = server.serve(8080, behaviour);
        let mut stream = connect();
        stream.write_all(b"hello").expect("send");
        stream.hear_end();
    }
}

#[test]
fn envoy_to_envoy_works_in_the_testbed_itself() {
    // So that a failure of the two tests below is the mesh's.
    let tb = Testbed::new();
    let client = tb.pod("peers/client").start();
    let server = tb.pod("peers/server").on(tb.node(1)).start();
    let authority = Authority::foreign();
    let leaf = authority.issue(ENVOY);
    let material = (&leaf, authority.root_pem.as_str(), ENVOY);
    let _server = Envoy::hbone_server(&server, &tb.path(""), server.at(8080), material);
    let _client = Envoy::hbone_client(&client, &tb.path(""), 7000, (server.at(15008), server.at(8080)), material);
    exercise(&|| client.connect(client.at(7000)).expect("connect"), &server, "Envoy to Envoy");
}

#[test]
fn envoy_is_a_good_client_of_our_server() {
    let shop = Shop::in_mesh();
    let peer = shop.tb.pod("peers/envoy").service_account("envoy").start();
    let authority = shop.mesh().authority();
    let leaf = authority.issue(ENVOY);
    let far = shop.far.identity();
    let to = (shop.far.at(15008), shop.far.at(8080));
    let material = (&leaf, authority.root_pem.as_str(), far.as_str());
    let _client = Envoy::hbone_client(&peer, &shop.tb.path(""), 7000, to, material);
    exercise(&|| peer.connect(peer.at(7000)).expect("connect"), &shop.far, "Envoy to our server");
    let line = shop.mesh().node(1).wait_access_line("from Envoy", |line| line.get("src.identity") == ENVOY);
    assert_eq!(line.get("direction"), "inbound", "{}", line.text);
}

#[test]
fn envoy_is_a_good_server_of_our_client() {
    let shop = Shop::in_mesh();
    // A pod that terminates HBONE itself: known by its label, and not captured.
    let peer = shop
        .tb
        .pod("peers/envoy")
        .service_account("envoy")
        .label("networking.istio.io/tunnel", "http")
        .label(DATAPLANE_MODE, "none")
        .on(shop.tb.node(1))
        .start();
    let authority = shop.mesh().authority();
    let leaf = authority.issue(ENVOY);
    let client = shop.client.identity();
    let material = (&leaf, authority.root_pem.as_str(), client.as_str());
    let _server = Envoy::hbone_server(&peer, &shop.tb.path(""), peer.at(8080), material);
    wait_for("the proxy to know that the pod speaks HBONE", || {
        (workload_of(&shop.mesh().node(0).config_dump(), &peer)?["protocol"] == "HBONE").then_some(())
    });
    let wire = shop.tb.wire();
    shop.client.connect(peer.at(8080)).expect("connect").half_close();
    assert!(!wire.flows_to_port(15008).is_empty(), "it goes through the tunnel");
    drop(wire);
    exercise(&|| shop.client.connect(peer.at(8080)).expect("connect"), &peer, "our client to Envoy");
}

#[test]
fn sidecars_carry_bytes_and_http_over_mutual_tls() {
    let tb = Testbed::new();
    let client = tb.pod("sidecars/client").start();
    let server = tb.pod("sidecars/server").on(tb.node(1)).start();
    let outside = tb.outside("outside");
    let authority = Authority::foreign();
    let leaf = authority.issue(ENVOY);
    let sidecar = |name: &str, pod: &Pod| {
        let material = (&leaf, authority.root_pem.as_str(), ENVOY);
        let ways = (("10.244.0.0", 16), SidecarPorts { http: &[8083] });
        Envoy::sidecar(&pod.beside("sidecar"), &tb.path(""), name, material, ways, (3, 2), 2)
    };
    let (near, far) = (sidecar("sidecar-client", &client), sidecar("sidecar-server", &server));
    let wire = tb.wire();
    {
        let _echo = server.serve(8080, Behaviour::Echo);
        client.connect(server.at(8080)).expect("connect").ask(b"canary");
    }
    {
        let behaviour = Behaviour::custom(|mut stream| {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).expect("a request");
                head.push(byte[0]);
            }
            assert!(head.starts_with(b"GET /canary HTTP/1.1"), "{}", String::from_utf8_lossy(&head));
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\ncanary").expect("answer");
        });
        let _http = server.serve(8083, behaviour);
        let mut stream = client.connect(server.at(8083)).expect("connect");
        stream.write_all(b"GET /canary HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").expect("send");
        let (answer, _) = stream.hear_end();
        assert!(answer.ends_with(b"canary"), "{}", String::from_utf8_lossy(&answer));
    }
    assert!(!wire.contains(b"canary"), "in the clear between the nodes");
    let handshakes = |envoy: &Envoy| envoy.stats("ssl.handshake").iter().map(|(_, count)| count).sum::<u64>();
    assert_eq!((handshakes(&near), handshakes(&far)), (2, 2), "both went through both sidecars");
    let _echo = outside.serve(8080, Behaviour::Echo);
    client.connect((outside.ip4(), 8080).into()).expect("connect").ask(b"hello");
}

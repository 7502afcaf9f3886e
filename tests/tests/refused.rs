//! What a peer must not get: the capture ports, tunnels without the right certificate, destinations that are not
//! this pod's.

use std::io::{Read, Write};
use std::time::Duration;

use rustls::AlertDescription;
use testbed::{
    Authority, Behaviour, End, HboneClient, Leaf, MeshOptions, Pod, Shop, StreamExt, TunnelError, holds_for, wait_for,
};

const PEER: &str = "spiffe://cluster.local/ns/legacy/sa/default";

/// The shop, a plain pod to dial from, and a good certificate for it.
fn set_up() -> (Shop, Pod, Leaf) {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue(PEER);
    (shop, plain, leaf)
}

#[test]
fn direct_dials_to_the_capture_ports_are_refused_from_everywhere_and_do_not_loop() {
    let (shop, plain, _) = set_up();
    let outside = shop.tb.outside("laptop");
    let from: [(&str, &testbed::Place); 5] = [
        ("a pod outside the mesh", &plain),
        ("a machine outside", &outside),
        ("a host process of the node", shop.tb.node(1)),
        ("another pod in the mesh", &shop.client),
        ("the pod itself", &shop.far),
    ];
    let fds_before = shop.mesh().node(1).proxy.open_fds();
    for port in [15001, 15006] {
        for (who, place) in &from {
            for to in [shop.far.at(port), shop.far.at6(port)] {
                let Ok(mut stream) = place.dial(to).timeout(Duration::from_secs(3)).connect() else { continue };
                // A connect may succeed where the pod's own proxy accepts it; then it must end without an answer.
                let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n");
                let _ = stream.set_read_timeout(Some(Duration::from_secs(5)));
                let mut answer = [0; 64];
                match stream.read(&mut answer) {
                    Ok(0) => {}
                    Ok(n) => panic!("{who} → {to} got {:?}", String::from_utf8_lossy(&answer[..n])),
                    Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{who} → {to}: {e}"),
                }
            }
        }
    }
    holds_for(Duration::from_millis(500), "the proxy does not talk to itself", || {
        shop.mesh().node(1).proxy.open_fds() < fds_before + 20
    });
}

#[test]
fn a_tunnel_needs_a_certificate_of_the_mesh_that_is_valid_now() {
    let (shop, plain, good) = set_up();
    let authority = shop.mesh().authority();
    let to = shop.far.at(15008);
    HboneClient::open(&plain, to, Some(&good)).expect("a good certificate is taken, or the rest shows nothing");
    let log = &shop.mesh().node(1).proxy;
    let cases = [
        ("none", None, vec![AlertDescription::CertificateRequired]),
        ("foreign", Some(Authority::foreign().issue(PEER)), vec![AlertDescription::UnknownCA]),
        ("expired", Some(authority.issue_expired(PEER)), vec![AlertDescription::CertificateExpired]),
        (
            "another trust domain",
            Some(authority.issue("spiffe://other.example/ns/legacy/sa/default")),
            vec![
                AlertDescription::BadCertificate,
                AlertDescription::CertificateUnknown,
                AlertDescription::AccessDenied,
            ],
        ),
        (
            "no SPIFFE identity",
            Some(authority.issue("https://example.com/not-spiffe")),
            vec![
                AlertDescription::BadCertificate,
                AlertDescription::CertificateUnknown,
                AlertDescription::AccessDenied,
            ],
        ),
        (
            "a server's only",
            Some(authority.issue_with(PEER, |params| {
                params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
            })),
            vec![
                AlertDescription::BadCertificate,
                AlertDescription::CertificateUnknown,
                AlertDescription::UnsupportedCertificate,
            ],
        ),
    ];
    for (what, leaf, alerts) in cases {
        let mark = log.log_mark();
        match HboneClient::open(&plain, to, leaf.as_ref()) {
            Err(TunnelError::Alert(alert)) => assert!(alerts.contains(&alert), "{what}: alert {alert:?}"),
            Err(other) => panic!("{what}: no alert, but {other}"),
            Ok(_) => panic!("a certificate that is {what} opened a tunnel"),
        }
        // The line names the peer.
        mark.wait(&[&plain.ip().to_string()]);
    }
}

#[test]
fn connect_reaches_only_this_pod_and_only_well_formed_authorities() {
    let (shop, plain, leaf) = set_up();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let mut tunnel = HboneClient::open(&plain, shop.far.at(15008), Some(&leaf)).expect("a tunnel");
    let good = shop.far.at(8080).to_string();
    let mut stream = tunnel.connect(&good, &[]).expect("an answer");
    assert_eq!(stream.status, 200, "or the rest shows nothing");
    tunnel.say(&mut stream, b"hello", false).expect("send");
    assert_eq!(tunnel.hear(&mut stream, 5).expect("receive"), b"hello");

    let mark = shop.mesh().node(1).proxy.log_mark();
    let near = shop.near.at(8080).to_string();
    let capture = [shop.far.at(15001), shop.far.at(15006), shop.far.at(15008)].map(|a| a.to_string());
    let cases = [
        (near.as_str(), 400, "another pod"),
        ("127.0.0.1:8080", 400, "loopback"),
        ("[::1]:8080", 400, "loopback"),
        ("8.8.8.8:53", 400, "outside"),
        ("no-port", 400, "no port"),
        ("10.244.1.10", 400, "no port"),
        (&capture[0], 503, "a capture port"),
        (&capture[1], 503, "a capture port"),
        (&capture[2], 503, "the tunnel's own port"),
        ("unknown.shop.svc.cluster.local:80", 503, "an unknown host name"),
    ];
    for (authority, status, what) in cases {
        let answer = tunnel.connect(authority, &[]).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(answer.status, status, "CONNECT {authority}: {what}");
    }
    mark.wait(&[near.as_str()]);
    // Other methods.
    let get = http::Request::get(format!("http://{good}/")).body(()).expect("a request");
    assert_eq!(tunnel.request(get).expect("an answer").status, 400);
    // A port that nobody listens on: 503, and the tunnel goes on.
    let closed = shop.far.at(9999).to_string();
    assert_eq!(tunnel.connect(&closed, &[]).expect("an answer").status, 503);
    let mut again = tunnel.connect(&good, &[]).expect("the tunnel has not suffered");
    assert_eq!(again.status, 200);
    tunnel.say(&mut again, b"hello", true).expect("send");
    assert_eq!(tunnel.hear(&mut again, 5).expect("receive"), b"hello");
    assert_eq!(server.seen().len(), 2, "nothing else came to the app");
}

#[test]
fn an_abandoned_stream_is_a_reset_for_the_app_and_only_end_stream_is_an_end() {
    let (shop, plain, leaf) = set_up();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let mut tunnel = HboneClient::open(&plain, shop.far.at(15008), Some(&leaf)).expect("a tunnel");
    let authority = shop.far.at(8080).to_string();
    for (reason, end) in [
        (Some(h2::Reason::CANCEL), End::Reset),
        (Some(h2::Reason::NO_ERROR), End::Reset),
        (Some(h2::Reason::INTERNAL_ERROR), End::Reset),
        (None, End::Fin),
    ] {
        let count = server.seen().len();
        let mut stream = tunnel.connect(&authority, &[]).expect("an answer");
        tunnel.say(&mut stream, b"hello", reason.is_none()).expect("send");
        assert_eq!(tunnel.hear(&mut stream, 5).expect("receive"), b"hello");
        if let Some(reason) = reason {
            stream.send.send_reset(reason);
        }
        server.wait_seen(count + 1);
        assert_eq!(server.wait_last_end(), end, "{reason:?}");
    }
    // The whole tunnel torn down in mid-stream.
    let mut stream = tunnel.connect(&authority, &[]).expect("an answer");
    tunnel.say(&mut stream, b"hello", false).expect("send");
    assert_eq!(tunnel.hear(&mut stream, 5).expect("receive"), b"hello");
    drop((stream, tunnel));
    server.wait_seen(5);
    assert_eq!(server.wait_last_end(), End::Reset);
}

/// Else a peer that opens and resets streams in a row would use up the node's descriptors.
#[test]
fn the_dial_for_a_stream_that_its_peer_gives_up_is_given_up_too() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("CONNECT_TIMEOUT", "29s"));
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue(PEER);
    // An app whose port answers nothing.
    shop.far.netns().nft(
        "table inet mute {
            chain i { type filter hook input priority 0; tcp dport 9998 drop
            }
        }",
    );
    let dials = || {
        let table = shop.far.netns().run(|| std::fs::read_to_string("/proc/thread-self/net/tcp")).expect("the sockets");
        table.lines().filter(|line| line.split_whitespace().nth(3) == Some("02")).count()
    };
    let mut tunnel = HboneClient::open(&plain, shop.far.at(15008), Some(&leaf)).expect("a tunnel");
    let authority = shop.far.at(9998).to_string();
    let begun: Vec<_> = (0..20).map(|_| tunnel.begin(&authority).expect("send")).collect();
    wait_for("the proxy to dial for all streams", || (dials() == 20).then_some(()));
    drop(begun);
    wait_for("the dials to be given up", || (dials() == 0).then_some(()));
    let line = shop.mesh().node(1).wait_access_line("a stream given up", |line| line.get("dst.addr") == authority);
    assert!(line.get("error").contains("gave up"), "{}", line.text);
    // The tunnel goes on, and the whole of it is given up as well.
    let begun: Vec<_> = (0..20).map(|_| tunnel.begin(&authority).expect("send")).collect();
    wait_for("the proxy to dial for all streams", || (dials() == 20).then_some(()));
    drop((begun, tunnel));
    wait_for("the dials to be given up", || (dials() == 0).then_some(()));
}

#[test]
fn plaintext_on_the_tunnel_port_is_refused_with_a_log_line() {
    let (shop, plain, _) = set_up();
    let mark = shop.mesh().node(1).proxy.log_mark();
    let mut stream = plain.connect(shop.far.at(15008)).expect("connect");
    let (bytes, _) = stream.say_in_vain(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(bytes.is_empty() || bytes[0] == 21, "nothing but a TLS alert: {bytes:?}");
    mark.wait(&[&plain.ip().to_string()]);
}

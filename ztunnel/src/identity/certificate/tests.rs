use std::io::{Read, Write};

use rustls::pki_types::ServerName;
use rustls::{AlertDescription, ClientConnection, Connection, ServerConnection};

use super::*;
use crate::identity::testing::{Leaf, TestCa};
use crate::identity::{PrivateKey, TrustDomain, TrustSettings, check_handshake, peer_identity, take_refusal};

fn identity(name: &str) -> Identity {
    format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
}

fn carry(from: &mut Connection, to: &mut Connection, end: &mut Result<(), rustls::Error>) {
    let mut wire = Vec::new();
    while from.wants_write() {
        from.write_tls(&mut wire).unwrap();
    }
    let mut rest = &wire[..];
    while !rest.is_empty() && end.is_ok() {
        to.read_tls(&mut rest).unwrap();
        *end = to.process_new_packets().map(|_| ());
    }
}

/// Runs a handshake in memory; what each side says in the end.
fn handshake(
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
) -> (Result<Identity, rustls::Error>, Result<Identity, rustls::Error>) {
    let name = ServerName::try_from("0.0.0.0").unwrap();
    let mut client = Connection::from(ClientConnection::new(client, name).unwrap());
    let mut server = Connection::from(ServerConnection::new(server).unwrap());
    let (mut client_end, mut server_end) = (Ok(()), Ok(()));
    for _ in 0..10 {
        carry(&mut client, &mut server, &mut server_end);
        carry(&mut server, &mut client, &mut client_end);
    }
    let finish = |end: Result<(), rustls::Error>, connection: &Connection| {
        end.map(|()| {
            assert!(!connection.is_handshaking());
            check_handshake(connection).unwrap()
        })
    };
    (finish(client_end, &client), finish(server_end, &server))
}

#[test]
fn both_sides_learn_the_other_identity_over_tls13_with_aes128_and_the_hybrid_exchange() {
    let ca = TestCa::new("root");
    let (cart, web) = (ca.certificate(&identity("cart")), ca.certificate(&identity("web")));
    let name = ServerName::try_from("0.0.0.0").unwrap();
    let mut client = ClientConnection::new(web.client_config(&[identity("cart")]), name).unwrap();
    let mut server = ServerConnection::new(cart.server_config()).unwrap();
    for _ in 0..3 {
        let mut wire = Vec::new();
        while client.wants_write() {
            client.write_tls(&mut wire).unwrap();
        }
        server.read_tls(&mut &wire[..]).unwrap();
        server.process_new_packets().unwrap();
        wire.clear();
        while server.wants_write() {
            server.write_tls(&mut wire).unwrap();
        }
        client.read_tls(&mut &wire[..]).unwrap();
        client.process_new_packets().unwrap();
    }
    assert_eq!(check_handshake(&client).unwrap(), identity("cart"));
    assert_eq!(check_handshake(&server).unwrap(), identity("web"));
    assert_eq!(server.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
    assert_eq!(
        server.negotiated_cipher_suite().map(|s| s.suite()),
        Some(rustls::CipherSuite::TLS13_AES_128_GCM_SHA256)
    );
    assert_eq!(server.negotiated_key_exchange_group().map(|g| g.name()), Some(rustls::NamedGroup::X25519MLKEM768));
    assert_eq!(server.server_name(), None, "no SNI is sent");
    client.writer().write_all(b"hello").unwrap();
    let mut wire = Vec::new();
    client.write_tls(&mut wire).unwrap();
    server.read_tls(&mut &wire[..]).unwrap();
    server.process_new_packets().unwrap();
    let mut got = [0; 5];
    server.reader().read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}

#[test]
fn a_server_with_another_identity_is_refused_and_named() {
    let ca = TestCa::new("root");
    let (cart, web) = (ca.certificate(&identity("cart")), ca.certificate(&identity("web")));
    let (client, _) = handshake(web.client_config(&[identity("bank"), identity("shop")]), cart.server_config());
    let error = client.unwrap_err().to_string();
    assert!(error.contains("sa/cart") && error.contains("sa/bank"), "{error}");
    let (client, _) = handshake(web.client_config(&[]), cart.server_config());
    assert!(client.is_err(), "nothing is expected, so nobody is right");
    let (client, server) = handshake(web.client_config(&[identity("bank"), identity("cart")]), cart.server_config());
    assert_eq!((client.unwrap(), server.unwrap()), (identity("cart"), identity("web")));
}

/// Whether a text has a time, give or take what passes between two looks at the clock.
fn tells(text: &str, time: SystemTime) -> bool {
    (0..20).any(|second| text.contains(&rfc3339(time + Duration::from_secs(2) - Duration::from_secs(second))))
}

#[test]
fn each_bad_client_gets_the_alert_that_says_why() {
    let ca = TestCa::new("root");
    let cart = ca.certificate(&identity("cart"));
    let expected = [identity("cart")];

    let alert = |client: Arc<ClientConfig>| {
        take_refusal();
        let (client, server) = handshake(client, cart.server_config());
        let server = server.unwrap_err();
        let reason = take_refusal().map_or_else(|| server.to_string(), |reason| reason.to_string());
        match client {
            Err(rustls::Error::AlertReceived(alert)) => (alert, reason),
            other => panic!("no alert but {other:?}"),
        }
    };

    // No certificate at all.
    let mut nobody = ca.certificate(&identity("web")).build_client_config(&expected);
    nobody.client_auth_cert_resolver = Arc::new(NoCertificate);
    assert_eq!(alert(Arc::new(nobody)).0, AlertDescription::CertificateRequired);

    // A foreign authority; the client itself trusts the server.
    let foreign = TestCa::new("foreign");
    let key = PrivateKey::generate().unwrap();
    let leaf = foreign.sign(&Leaf::of(&identity("web")), &key);
    let (description, text) = alert(client_with(&ca, vec![leaf], key));
    assert_eq!(description, AlertDescription::UnknownCA);
    assert!(text.contains("CN=foreign") && text.contains("sa/web"), "{text}");

    // Expired.
    let key = PrivateKey::generate().unwrap();
    let mut old = Leaf::of(&identity("web"));
    old.not_after = SystemTime::now() - Duration::from_secs(60);
    let leaf = ca.sign(&old, &key);
    let (description, text) = alert(client_with(&ca, vec![leaf], key));
    assert_eq!(description, AlertDescription::CertificateExpired);
    assert!(tells(&text, old.not_after) && tells(&text, SystemTime::now()) && text.contains("sa/web"), "{text}");

    // Not valid yet, as with a clock that is behind.
    let key = PrivateKey::generate().unwrap();
    let early = Leaf { not_before: SystemTime::now() + Duration::from_secs(600), ..Leaf::of(&identity("web")) };
    let leaf = ca.sign(&early, &key);
    let (description, text) = alert(client_with(&ca, vec![leaf], key));
    assert_eq!(description, AlertDescription::CertificateExpired);
    assert!(tells(&text, early.not_before) && tells(&text, SystemTime::now()) && text.contains("clock"), "{text}");

    // Another trust domain, no identity.
    for name in ["spiffe://elsewhere/ns/shop/sa/web", "https://example.org"] {
        let key = PrivateKey::generate().unwrap();
        let leaf = ca.sign(&Leaf { names: vec![name.into()], ..Leaf::of(&identity("web")) }, &key);
        let (description, text) = alert(client_with(&ca, vec![leaf], key));
        assert_eq!(description, AlertDescription::CertificateUnknown, "{text}");
        assert!(text.contains("trusted domains") || text.contains("no SPIFFE identity"), "{text}");
    }
}

#[test]
fn an_alias_of_the_trust_domain_is_accepted() {
    let ca = TestCa::new("root");
    let settings = TrustSettings { aliases: vec![TrustDomain::new("old.example")], ..TrustSettings::default() };
    let cart = ca.certificate_with(&identity("cart"), ca.trust(&identity("cart"), settings.clone()));
    let web: Identity = "spiffe://old.example/ns/shop/sa/web".parse().unwrap();
    let (_, server) = handshake(ca.certificate(&web).client_config(&[identity("cart")]), cart.server_config());
    assert_eq!(server.unwrap(), web);
    assert_eq!(cart.trust().canonical(&web), identity("web"), "policies see the mesh's own trust domain");
    assert_eq!(cart.trust().canonical(&identity("web")), identity("web"));

    // A server that has moved already, or not yet, is the one that was expected.
    let moved = ca.certificate_with(&web, ca.trust(&web, settings));
    let (client, _) = handshake(cart.client_config(&[identity("web")]), moved.server_config());
    assert_eq!(client.unwrap(), web);
    let (client, _) = handshake(cart.client_config(&[identity("bank")]), moved.server_config());
    assert!(client.is_err(), "an alias stands for a trust domain, not for a name in it");
    let stranger: Identity = "spiffe://elsewhere/ns/shop/sa/web".parse().unwrap();
    assert_eq!(cart.trust().canonical(&stranger), stranger);
}

#[test]
fn what_is_not_what_was_asked_for_never_becomes_a_certificate() {
    let (ca, other) = (TestCa::new("root"), TestCa::new("other"));
    let cart = identity("cart");
    let key = Arc::new(PrivateKey::generate().unwrap());
    let good = ca.sign(&Leaf::of(&cart), &*key);
    let make = |chain: Vec<CertificateDer<'static>>, roots: Vec<CertificateDer<'static>>| {
        Certificate::new(&cart, key.clone(), chain, roots, Trust::new(TrustSettings::default())).map(|_| ())
    };
    make(vec![good.clone()], vec![ca.root_der()]).unwrap();
    make(vec![good.clone()], vec![other.root_der(), ca.root_der()]).unwrap();

    let wrong = ca.sign(&Leaf::of(&identity("web")), &*key);
    assert!(matches!(make(vec![wrong], vec![ca.root_der()]), Err(CertificateError::WrongIdentity { .. })));
    let stranger = ca.sign(&Leaf::of(&cart), &PrivateKey::generate().unwrap());
    assert!(matches!(make(vec![stranger], vec![ca.root_der()]), Err(CertificateError::WrongKey)));
    assert!(matches!(make(vec![good.clone()], vec![other.root_der()]), Err(CertificateError::Chain(_))));
    assert!(matches!(make(vec![good], vec![]), Err(CertificateError::Chain(_))));

    let now = SystemTime::now();
    let hour = Duration::from_secs(3600);
    for (not_before, not_after) in [(now + hour, now + 2 * hour), (now - 2 * hour, now - hour)] {
        let leaf = ca.sign(&Leaf { not_before, not_after, ..Leaf::of(&cart) }, &*key);
        let error = make(vec![leaf], vec![ca.root_der()]).unwrap_err();
        assert!(matches!(error, CertificateError::NotValidNow { .. }));
        assert!(tells(&error.to_string(), SystemTime::now()), "{error}");
    }

    let only_leaf = Certificate::from_pem_chain(&cart, key, &[b"x"], Trust::new(TrustSettings::default()));
    assert!(matches!(only_leaf, Err(CertificateError::Incomplete(1))));
}

#[test]
fn intermediates_are_presented_and_shown() {
    let root = TestCa::new("root");
    let intermediate = root.intermediate("below");
    let key = PrivateKey::generate().unwrap();
    let chain = vec![intermediate.sign(&Leaf::of(&identity("web")), &key), intermediate.root_der()];
    let roots = vec![root.root_der()];
    let trust = root.trust(&identity("web"), TrustSettings::default());
    let web = Certificate::new(&identity("web"), Arc::new(key), chain, roots, trust).unwrap();
    let cart = root.certificate(&identity("cart"));
    let (client, server) = handshake(web.client_config(&[identity("cart")]), cart.server_config());
    assert_eq!((client.unwrap(), server.unwrap()), (identity("cart"), identity("web")));
    assert_eq!(web.chain_info().len(), 2);
    let info = &web.roots_info()[0];
    assert_eq!(info.pem, root.root_pem().replace("\r\n", "\n"));
    assert_eq!(peer_identity(web.chain()).unwrap(), identity("web"));
}

#[test]
fn tls_configurations_are_made_once_and_their_number_is_bounded() {
    let web = TestCa::new("root").certificate(&identity("web"));
    assert!(Arc::ptr_eq(&web.server_config(), &web.server_config()));
    let expected = [identity("cart")];
    assert!(Arc::ptr_eq(&web.client_config(&expected), &web.client_config(&expected)));
    for i in 0..2 * MAX_CLIENT_CONFIGS {
        web.client_config(&[identity(&format!("peer-{i}"))]);
    }
    assert!(web.clients.lock().unwrap().len() <= MAX_CLIENT_CONFIGS);
}

#[test]
fn times_are_written_as_rfc_3339() {
    for (seconds, text) in [
        (0, "1970-01-01T00:00:00Z"),
        (951_782_400, "2000-02-29T00:00:00Z"),
        (1_790_000_000, "2026-09-21T14:13:20Z"),
        (4_107_542_399, "2100-02-28T23:59:59Z"),
    ] {
        assert_eq!(rfc3339(at(seconds)), text);
    }
    assert_eq!(rfc3339(at(-1)), "1969-12-31T23:59:59Z");
}

#[derive(Debug)]
struct NoCertificate;

impl rustls::client::ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[rustls::SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// A client that shows `chain`, whatever it is, and trusts `ca`.
fn client_with(ca: &TestCa, chain: Vec<CertificateDer<'static>>, key: PrivateKey) -> Arc<ClientConfig> {
    let mut config = ca.certificate(&identity("any")).build_client_config(&[identity("cart")]);
    let key = CertifiedKey::new(chain, Arc::new(key));
    config.client_auth_cert_resolver = Arc::new(rustls::sign::SingleCertAndKey::from(key));
    Arc::new(config)
}

/// A session that could be resumed would outlive the trust that it began with.
#[test]
fn no_session_is_ever_resumed() {
    let ca = TestCa::new("root");
    let (cart, web) = (ca.certificate(&identity("cart")), ca.certificate(&identity("web")));
    let mut eager = web.build_client_config(&[identity("cart")]);
    eager.resumption = Resumption::in_memory_sessions(16);
    let eager = Arc::new(eager);
    let name = ServerName::try_from("0.0.0.0").unwrap();
    for _ in 0..3 {
        let mut client = Connection::from(ClientConnection::new(eager.clone(), name.clone()).unwrap());
        let mut server = Connection::from(ServerConnection::new(cart.server_config()).unwrap());
        let (mut client_end, mut server_end) = (Ok(()), Ok(()));
        for _ in 0..5 {
            carry(&mut client, &mut server, &mut server_end);
            carry(&mut server, &mut client, &mut client_end);
        }
        client_end.and(server_end).unwrap();
        let Connection::Client(client) = &client else { unreachable!("made as one") };
        assert_eq!(client.tls13_tickets_received(), 0);
        assert_eq!(client.handshake_kind(), Some(rustls::HandshakeKind::Full));
    }
}

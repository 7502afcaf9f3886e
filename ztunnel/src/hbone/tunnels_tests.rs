use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;

use http::HeaderMap;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, spawn_local};
use tokio::time::{Instant, timeout};

use super::*;
use crate::hbone::client::Tunnel;
use crate::hbone::{
    Accepted, Broken, Dialled, Established, OpenError, Opened, Pool, PoolKey, Request, Settings, StreamError,
};
use crate::identity::testing::{Leaf, TestCa};
use crate::identity::{CrlSet, RevocationRules, TrustSettings};

const SOON: Duration = Duration::from_secs(5);

fn identity(name: &str) -> Identity {
    format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
}

/// A client and a server with tunnels between them, each with a trust of its own.
struct Rig {
    ca: TestCa,
    client: Side,
    server: Side,
    pool: Pool<String>,
    address: SocketAddr,
}

struct Side {
    trust: Trust,
    tunnels: Tunnels,
    certificate: Arc<Certificate>,
}

impl Side {
    fn new(ca: &TestCa, name: &str, life: Duration, settings: TrustSettings) -> Self {
        let identity = identity(name);
        let trust = ca.trust(&identity, settings);
        let certificate = ca.try_certificate(&identity, &Leaf::of(&identity).lives(life), trust.clone()).unwrap();
        Self { tunnels: Tunnels::new(trust.clone()), trust, certificate: Arc::new(certificate) }
    }
}

impl Rig {
    /// Certificates that live so long; revocation is looked at by both.
    async fn new(client_life: Duration, server_life: Duration) -> Self {
        Self::with(client_life, server_life, TrustSettings::default()).await
    }

    async fn with(client_life: Duration, server_life: Duration, settings: TrustSettings) -> Self {
        let ca = TestCa::new("root");
        let client = Side::new(&ca, "web", client_life, settings.clone());
        let server = Side::new(&ca, "cart", server_life, settings);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (certificate, tunnels) = (server.certificate.clone(), server.tunnels.clone());
        spawn_local(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let accepted = Accepted::handshake(socket, &certificate, &Settings::default(), &tunnels).await;
                if let Ok(accepted) = accepted {
                    spawn_local(echo(accepted));
                }
            }
        });
        let pool = Pool::new(Settings::default(), client.tunnels.clone());
        Self { ca, client, server, pool, address }
    }

    async fn stream(&self) -> Result<Opened, OpenError<String>> {
        let key = PoolKey {
            pod: "web".into(),
            workload: "cart".into(),
            address: self.address,
            expected: vec![identity("cart")],
        };
        let request = || Request::connect("10.0.0.1:80", HeaderMap::new());
        let dial = || async {
            let socket = TcpStream::connect(self.address).await.map_err(|e| e.to_string())?;
            Ok(Dialled { socket, certificate: self.client.certificate.clone() })
        };
        timeout(SOON, self.pool.stream(&key, request, dial)).await.expect("an end in time")
    }

    async fn asked(&self) -> Opened {
        let mut stream = self.stream().await.unwrap();
        ask(&mut stream).await.unwrap();
        stream
    }
}

/// Answers every stream with what comes in it.
async fn echo(mut accepted: Accepted) {
    while let Some(Ok(incoming)) = poll_fn(|cx| accepted.poll_next(cx)).await {
        let Ok(Established { stream, count }) = incoming.accept(None) else { continue };
        spawn_local(async move {
            while let Some(Ok(bytes)) = stream.hear().await {
                if stream.send(&bytes, false).is_err() {
                    return;
                }
            }
            drop(count);
        });
    }
}

async fn ask(opened: &mut Opened) -> Result<(), Broken> {
    opened.stream.send(b"hello", false)?;
    let answer = timeout(SOON, opened.stream.hear()).await.expect("an answer or an end");
    answer.expect("no end in order").map(|bytes| assert_eq!(bytes, b"hello"))
}

/// The end of a stream, and why its tunnel ended as our own side sees it.
async fn ended(opened: &mut Opened) -> Option<Ended> {
    let end = timeout(SOON, opened.stream.hear()).await.expect("the stream ends");
    assert!(!matches!(end, Some(Ok(_))), "{end:?}");
    opened.count.tunnel_ended()
}

fn never(_: &Identity) -> bool {
    false
}

async fn local<T>(test: impl Future<Output = T>) -> T {
    LocalSet::new().run_until(test).await
}

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn a_tunnel_whose_certificate_has_ended_takes_no_new_streams_and_its_running_ones_go_on() {
    local(async {
        for (client_life, server_life) in [(Duration::from_secs(3), HOUR), (HOUR, Duration::from_secs(3))] {
            let mut rig = Rig::new(client_life, server_life).await;
            let mut old = rig.asked().await;
            rig.asked().await;
            assert_eq!(rig.client.tunnels.len(), 1);
            let end = rig.client.certificate.not_after().min(rig.server.certificate.not_after());
            while SystemTime::now() <= end {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            // A renewal, of which the running stream knows nothing.
            let renewed = Side::new(&rig.ca, "web", HOUR, TrustSettings::default());
            rig.client.certificate = renewed.certificate;
            let (round, next) = rig.client.tunnels.tend(SystemTime::now(), false, never);
            assert_eq!((round, next), (Round::default(), LOOK_AT_ENDED));
            rig.server.tunnels.tend(SystemTime::now(), false, never);
            let new = rig.stream().await;
            if server_life == HOUR {
                new.unwrap();
                assert_eq!(rig.client.tunnels.len(), 2, "a tunnel of its own");
            } else {
                // This server goes on with the certificate that has ended.
                let error = new.err().expect("the server is refused").to_string();
                assert!(error.contains("was valid from") && error.contains("sa/cart"), "{error}");
            }
            ask(&mut old).await.unwrap();
            rig.pool.sweep(|_| true);
            ask(&mut old).await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn tunnels_that_are_retired_keep_their_streams_and_new_ones_go_on_another() {
    local(async {
        let rig = Rig::new(HOUR, HOUR).await;
        let mut old = rig.asked().await;
        rig.asked().await;
        assert_eq!(rig.client.tunnels.len(), 1);
        rig.server.tunnels.retire_ours();
        rig.asked().await;
        assert_eq!(rig.client.tunnels.len(), 1, "the server's end is not the server's to retire");
        rig.client.tunnels.retire_ours();
        let mut new = rig.asked().await;
        assert_eq!(rig.client.tunnels.len(), 2);
        ask(&mut old).await.unwrap();
        ask(&mut new).await.unwrap();
    })
    .await;
}

/// After a burst, what is left of the traffic goes on few tunnels: the others fall idle and end.
#[tokio::test]
async fn streams_after_a_burst_go_on_the_fullest_tunnel_that_has_room() {
    local(async {
        let rig = Rig::new(HOUR, HOUR).await;
        let streams = Settings::default().streams_per_tunnel as usize;
        let mut burst = Vec::new();
        for _ in 0..2 * streams + 1 {
            burst.push(rig.asked().await);
        }
        assert_eq!(rig.client.tunnels.len(), 3);
        // One stream of each tunnel lives on, and two of the last full one.
        let mut kept: Vec<_> = burst
            .into_iter()
            .enumerate()
            .filter(|(at, _)| [0, streams, streams + 1, 2 * streams].contains(at))
            .collect();
        for _ in 0..2 * streams {
            drop(rig.asked().await);
        }
        let mut more = Vec::new();
        for _ in 0..3 {
            more.push(rig.asked().await);
        }
        assert_eq!(rig.client.tunnels.len(), 3, "no new ones");
        let loads: Vec<_> = rig.client.tunnels.all().iter().map(|load| load.streams()).collect();
        assert_eq!(loads, [1, 5, 1]);
        for (_, stream) in &mut kept {
            ask(stream).await.unwrap();
        }
    })
    .await;
}

/// A root that is withdrawn later hurts nobody who began after the renewal.
#[tokio::test]
async fn new_streams_go_on_a_new_tunnel_once_the_certificates_should_have_been_renewed() {
    local(async {
        let rig = Rig::new(2 * HOUR, HOUR).await;
        let socket = TcpStream::connect(rig.address).await.unwrap();
        let dialled = Dialled { socket, certificate: rig.client.certificate.clone() };
        let settings = Settings::default();
        let expected = [identity("cart")];
        let tunnel = Tunnel::open(dialled, &expected, &settings, &rig.client.tunnels).await.unwrap();
        let at = |minutes: u64| SystemTime::now() + Duration::from_secs(60 * minutes);
        for (minutes, fresh) in [(0, true), (37, true), (43, false), (61, false)] {
            assert_eq!(tunnel.room(&settings, at(minutes)) > 0, fresh, "{minutes} minutes");
            assert_eq!(tunnel.is_over(at(minutes)), !fresh, "{minutes} minutes");
        }
        let stream = tunnel.stream(Request::connect("10.0.0.1:80", HeaderMap::new()), &settings).await.unwrap();
        assert!(!tunnel.is_over(at(43)), "it is kept while a stream runs on it");
        drop(stream);
        assert!(tunnel.is_over(at(43)));
    })
    .await;
}

#[test]
fn a_tunnel_between_certificates_that_are_about_to_end_is_used_for_a_second_at_least() {
    let now = SystemTime::now();
    let millis = Duration::from_millis;
    for (left, fresh) in [(60_000, 40_000), (1500, 1000), (1200, 1000), (700, 700), (0, 0)] {
        assert_eq!(fresh_until(now, now + millis(left)), now + millis(fresh));
    }
    assert_eq!(fresh_until(now, now - millis(1)), now - millis(1));
}

/// The peer's clock may run behind, or it may be of another make.
#[tokio::test]
async fn a_server_refuses_new_streams_after_the_end_and_the_client_takes_them_to_another_tunnel() {
    local(async {
        let rig = Rig::new(HOUR, HOUR).await;
        let mut old = rig.asked().await;
        // For the server alone an hour has passed.
        let later = SystemTime::now() + 2 * HOUR;
        rig.server.tunnels.tend(later, false, never);
        rig.asked().await;
        assert_eq!(rig.client.tunnels.len(), 2);
        ask(&mut old).await.unwrap();
    })
    .await;
}

#[tokio::test]
async fn an_idle_tunnel_is_closed_in_order_when_its_certificate_has_ended() {
    local(async {
        let rig = Rig::new(HOUR, HOUR).await;
        drop(rig.asked().await);
        tokio::task::yield_now().await;
        let later = SystemTime::now() + 2 * HOUR;
        let (round, _) = rig.server.tunnels.tend(later, false, never);
        assert_eq!(round, Round::default(), "nobody was hurt");
        timeout(SOON, async {
            while !rig.server.tunnels.is_empty() || !rig.client.tunnels.is_empty() {
                rig.pool.sweep(|_| true);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .expect("both ends are gone");
    })
    .await;
}

#[tokio::test]
async fn at_the_end_streams_are_cut_where_that_is_set_or_the_renewal_was_denied() {
    local(async {
        let later = SystemTime::now() + 2 * HOUR;
        for cut in [true, false] {
            let rig = Rig::new(HOUR, HOUR).await;
            let mut stream = rig.asked().await;
            let (round, _) = rig.client.tunnels.tend(SystemTime::now(), cut, |_| true);
            assert_eq!(round, Round::default(), "nothing before the end");
            let (round, _) = rig.client.tunnels.tend(later, cut, |own| !cut && *own == identity("web"));
            assert_eq!((round.tunnels, round.streams), (1, 1));
            let why = ended(&mut stream).await;
            match cut {
                true => assert!(matches!(&why, Some(Ended::Expired { .. })), "{why:?}"),
                false => assert!(matches!(&why, Some(Ended::RenewalDenied { .. })), "{why:?}"),
            }
            assert_eq!(round.first, why);
        }
    })
    .await;
}

#[tokio::test]
async fn when_a_root_is_withdrawn_tunnels_of_its_peers_end_on_either_side_and_others_stay() {
    local(async {
        for withdrawn_at_client in [true, false] {
            let rig = Rig::new(HOUR, HOUR).await;
            let (at, other) = match withdrawn_at_client {
                true => (&rig.client, &rig.server),
                false => (&rig.server, &rig.client),
            };
            let mut stream = rig.asked().await;
            let domain = at.certificate.identity().trust_domain().clone();
            let new = TestCa::new("new");

            at.trust.learn(&domain, &[rig.ca.root_der(), new.root_der()], Instant::now(), false);
            assert_eq!(at.tunnels.judge().await, Round::default(), "both roots overlap");
            ask(&mut stream).await.unwrap();

            at.trust.learn(&domain, &[new.root_der()], Instant::now(), false);
            let round = at.tunnels.judge().await;
            assert_eq!((round.tunnels, round.streams), (1, 1));
            let why = round.first.unwrap().to_string();
            assert!(why.contains("CN=root") && why.contains("none of the 1 trusted"), "{why}");
            assert_eq!(other.tunnels.judge().await, Round::default());
            let seen = ended(&mut stream).await;
            if withdrawn_at_client {
                assert!(matches!(seen, Some(Ended::Distrusted(_))), "{seen:?}");
            }
            let error = rig.stream().await.err().expect("no tunnel to who is not trusted");
            match (withdrawn_at_client, &error) {
                (true, OpenError::Tunnel(_)) => {}
                (false, OpenError::Stream(StreamError::Alert(rustls::AlertDescription::UnknownCA))) => {}
                other => panic!("{other:?}"),
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_revoked_peer_loses_its_tunnels_and_a_list_of_others_costs_nobody_anything() {
    local(async {
        let settings = TrustSettings { revocation: Some(RevocationRules::default()), ..TrustSettings::default() };
        // Without a list nobody would get in.
        let rig = Rig::with(HOUR, HOUR, TrustSettings::default()).await;
        assert!(Rig::with(HOUR, HOUR, settings.clone()).await.stream().await.is_err());

        let rig = Rig { client: Side::new(&rig.ca, "web", HOUR, settings.clone()), ..rig };
        let rig = Rig { pool: Pool::new(Settings::default(), rig.client.tunnels.clone()), ..rig };
        let now = SystemTime::now();
        let list =
            |revoked: &[&CertificateDer<'_>]| CrlSet::read(&rig.ca.crl(revoked, now - HOUR, now + HOUR)).unwrap();
        rig.client.trust.revoke(list(&[&rig.client.certificate.chain()[0]]));
        let mut stream = rig.asked().await;
        assert_eq!(rig.client.tunnels.judge().await, Round::default());
        rig.client.trust.revoke(list(&[&rig.server.certificate.chain()[0]]));
        let round = rig.client.tunnels.judge().await;
        assert_eq!((round.tunnels, round.revoked_servers, round.revoked_clients), (1, 1, 0));
        let why = ended(&mut stream).await;
        assert!(matches!(&why, Some(Ended::Distrusted(error)) if error.is_revocation()), "{why:?}");
    })
    .await;
}

/// The trust changes between the check in the handshake and the place on the list.
#[tokio::test]
async fn a_tunnel_that_was_being_made_while_trust_changed_is_judged_as_well() {
    local(async {
        let rig = Rig::new(HOUR, HOUR).await;
        let domain = identity("web").trust_domain().clone();
        let generation = rig.client.tunnels.generation();
        let socket = TcpStream::connect(rig.address).await.unwrap();
        let config = rig.client.certificate.client_config(&[identity("cart")]);
        let tls = HeldTls::new(crate::hbone::TlsSocket::connect(socket, config).await.unwrap());
        let load = Load::new(Some(Proof::new(&rig.client.certificate, PeerRole::Server, &tls)));
        rig.client.trust.learn(&domain, &[TestCa::new("new").root_der()], Instant::now(), false);
        assert_eq!(rig.client.tunnels.judge().await, Round::default(), "it is not on the list yet");
        rig.client.tunnels.add(&load, generation);
        assert!(load.is_cut());
        let other = Load::new(Some(Proof::new(&rig.client.certificate, PeerRole::Server, &tls)));
        rig.client.tunnels.add(&other, rig.client.tunnels.generation());
        assert!(!other.is_cut(), "whoever begins now has been judged by what holds now");
    })
    .await;
}

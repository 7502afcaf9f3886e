//! The certificates behind connections without a tunnel: nothing is encrypted with them, but what would refuse a tunnel's
//! handshake, or end its streams, refuses and ends these too.
//!
//! Must never let a connection go on whose ends would no longer take each other.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustls::pki_types::UnixTime;

use super::guard::{TrustCounters, refusal_flag};
use crate::identity::{Certificate, Identity, Names, PeerError, PeerRole, Trust, rfc3339};
use crate::telemetry::LiveConnection;
use crate::telemetry::flow::{CloseReason, Direction, ResponseFlag};

/// The certificates that two ends would show each other.
#[derive(Clone)]
pub struct Pair {
    pub source: Arc<Certificate>,
    pub destination: Arc<Certificate>,
}

/// A connection that is open, and what it rests on.
pub struct Attested {
    pair: Pair,
    since: SystemTime,
    inbound: LiveConnection,
}

/// The connections of a worker to neighbours, by the certificates that they rest on.
#[derive(Default)]
pub struct Attestations {
    list: RefCell<Vec<Weak<Attested>>>,
    /// Pairs that were found good a moment ago, and the generation of the trust by which.
    good: RefCell<(u64, Good)>,
}

type Good = HashMap<[*const Certificate; 2], (Pair, Instant)>;

impl Pair {
    /// Who would not take whom, and why.
    fn verify(
        &self,
        trust: &Trust,
        verify: impl Fn(&Certificate, &Certificate, PeerRole) -> Result<(), PeerError>,
    ) -> Result<(), (PeerRole, PeerError)> {
        let Self { source, destination } = self;
        let (client, server) = (source.identity(), destination.identity());
        if !trust.accepts(server.trust_domain(), client.trust_domain()) {
            let (found, trusted) = (Names(vec![client.clone()]), trust.accepted(server.trust_domain()));
            return Err((PeerRole::Client, PeerError::WrongTrustDomain { found, trusted }));
        }
        verify(destination, source, PeerRole::Client).map_err(|error| (PeerRole::Client, error))?;
        verify(source, destination, PeerRole::Server).map_err(|error| (PeerRole::Server, error))
    }

    fn end(&self) -> SystemTime {
        self.source.not_after().min(self.destination.not_after())
    }
}

impl Attestations {
    /// Whether both ends would take each other now.
    pub fn check(&self, trust: &Trust, pair: &Pair) -> Result<(), (PeerRole, PeerError)> {
        let key = [Arc::as_ptr(&pair.source), Arc::as_ptr(&pair.destination)];
        let generation = trust.generation();
        let mut good = self.good.borrow_mut();
        if good.0 != generation || good.1.len() >= MOST_KNOWN {
            *good = (generation, HashMap::new());
        }
        // Those that are on the list live: another certificate cannot have the same place. A revocation list may end
        // meanwhile, or a root.
        if good.1.get(&key).is_some_and(|(_, at)| at.elapsed() < GOOD_FOR) {
            return Ok(());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        pair.verify(trust, |own, peer, role| {
            let domain = own.identity().trust_domain();
            trust.verify(domain, peer.chain(), role, UnixTime::since_unix_epoch(now))
        })?;
        good.1.insert(key, (pair.clone(), Instant::now()));
        Ok(())
    }

    pub fn add(&self, pair: Pair, inbound: LiveConnection) -> Rc<Attested> {
        let attested = Rc::new(Attested { pair, since: SystemTime::now(), inbound });
        let mut list = self.list.borrow_mut();
        if list.len() == list.capacity() {
            list.retain(|one| one.strong_count() > 0);
        }
        list.push(Rc::downgrade(&attested));
        attested
    }

    /// Ends the connections whose ends would no longer take each other; why.
    pub fn judge(&self, trust: &Trust, counters: &TrustCounters) -> Vec<String> {
        let mut known: HashMap<[*const Certificate; 2], Verdict> = HashMap::new();
        let mut ended = Vec::new();
        for attested in self.all() {
            let pair = &attested.pair;
            let key = [Arc::as_ptr(&pair.source), Arc::as_ptr(&pair.destination)];
            let verdict = known.entry(key).or_insert_with(|| attested.verify(trust, counters));
            ended.extend(attested.end(verdict));
        }
        ended
    }

    /// Sees to connections whose certificates have ended, as over a tunnel: why some were ended, and when to look again.
    pub fn tend(&self, now: SystemTime, cut: bool, denied: impl Fn(&Identity) -> bool) -> (Vec<String>, Duration) {
        let (mut ended, mut next) = (Vec::new(), LOOK_AGAIN);
        for attested in self.all() {
            let pair = &attested.pair;
            if let Ok(left) = pair.end().duration_since(now)
                && !left.is_zero()
            {
                next = next.min(left);
                continue;
            }
            let over = || [&pair.source, &pair.destination].into_iter().filter(|c| c.not_after() <= now);
            let denied = over().find(|certificate| denied(certificate.identity()));
            let (reason, certificate) = match (cut, denied, over().next()) {
                (true, _, Some(certificate)) => (CloseReason::CertificateExpired, certificate),
                (false, Some(certificate), _) => (CloseReason::RenewalDenied, certificate),
                _ => {
                    next = next.min(LOOK_AT_ENDED);
                    continue;
                }
            };
            let text = format!("that of {} ended at {}", certificate.identity(), rfc3339(certificate.not_after()));
            ended.extend(attested.end(&Err((reason, text))));
        }
        (ended, next)
    }

    fn all(&self) -> Vec<Rc<Attested>> {
        self.list.borrow().iter().filter_map(Weak::upgrade).collect()
    }
}

/// Why a connection may not go on.
type Verdict = Result<(), (CloseReason, String)>;

impl Attested {
    fn verify(&self, trust: &Trust, counters: &TrustCounters) -> Verdict {
        let verified = self.pair.verify(trust, |own, peer, role| {
            trust.verify_again(own.identity().trust_domain(), peer.chain(), role, self.since)
        });
        verified.map_err(|(role, error)| {
            let reason = match refusal_flag(counters, direction(role), &error) {
                ResponseFlag::CertRevoked => CloseReason::CertificateRevoked,
                _ => CloseReason::TrustWithdrawn,
            };
            (reason, format!("{}: {error}", whose(role)))
        })
    }

    pub fn judge(&self, trust: &Trust, counters: &TrustCounters) -> Option<String> {
        self.end(&self.verify(trust, counters))
    }

    /// Why it was ended, if it was.
    fn end(&self, verdict: &Verdict) -> Option<String> {
        let Err((reason, text)) = verdict else { return None };
        self.inbound.close_because(*reason, text).then(|| text.clone())
    }
}

/// Who refuses: a client's certificate is the server's matter.
fn direction(role: PeerRole) -> Direction {
    match role {
        PeerRole::Client => Direction::Inbound,
        PeerRole::Server => Direction::Outbound,
    }
}

pub fn whose(role: PeerRole) -> &'static str {
    match role {
        PeerRole::Client => "the client's certificate",
        PeerRole::Server => "the server's certificate",
    }
}

/// How long a pair of certificates that was found good is not looked at again.
const GOOD_FOR: Duration = Duration::from_secs(5);
/// Pairs that are remembered.
const MOST_KNOWN: usize = 1024;
/// The clock may have been changed: look again at least this often.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// While connections go on whose certificates have ended.
const LOOK_AT_ENDED: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;
    use crate::identity::testing::{Leaf, TestCa};
    use crate::identity::{CrlSet, RevocationRules, TrustSettings};
    use crate::telemetry::flow::{Flow, Protocol};
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::{Connection, Telemetry};

    const HOUR: Duration = Duration::from_secs(3600);

    fn identity(name: &str) -> Identity {
        format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
    }

    fn certificate(ca: &TestCa, name: &str, life: Duration, trust: &Trust) -> Arc<Certificate> {
        let identity = identity(name);
        Arc::new(ca.try_certificate(&identity, &Leaf::of(&identity).lives(life), trust.clone()).unwrap())
    }

    fn connection() -> Connection {
        let at = "10.0.0.1:1".parse().unwrap();
        let telemetry = Telemetry::new(&Metrics::new(), 100, HOUR);
        telemetry.open(Flow::new(Direction::Inbound, Protocol::Attested, "pod".into(), at, at))
    }

    async fn ordered(connection: &Connection) -> Option<CloseReason> {
        poll_fn(|cx| match connection.poll_close_ordered(cx) {
            Poll::Ready(closing) => Poll::Ready(Some(closing.reason)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// With two ends whose certificates live so long, and an open connection between them.
    fn rig(
        lives: [Duration; 2],
        settings: TrustSettings,
    ) -> (TestCa, Trust, Attestations, Pair, Connection, Rc<Attested>) {
        let ca = TestCa::new("root");
        let trust = ca.trust(&identity("web"), settings);
        let source = certificate(&ca, "web", lives[0], &trust);
        let destination = certificate(&ca, "cart", lives[1], &trust);
        let (attestations, pair, connection) = (Attestations::default(), Pair { source, destination }, connection());
        let attested = attestations.add(pair.clone(), connection.live());
        (ca, trust, attestations, pair, connection, attested)
    }

    #[tokio::test]
    async fn who_would_not_be_taken_over_a_tunnel_is_not_taken_without_one() {
        let settings = TrustSettings { revocation: Some(RevocationRules::default()), ..TrustSettings::default() };
        let (ca, trust, attestations, pair, connection, _attested) = rig([HOUR, HOUR], settings);
        let counters = TrustCounters::default();
        assert!(attestations.check(&trust, &pair).is_err(), "revocation counts, and there is no list");
        let now = SystemTime::now();
        let list =
            |revoked: &Certificate| CrlSet::read(&ca.crl(&[&revoked.chain()[0]], now - HOUR, now + HOUR)).unwrap();
        let other = certificate(&ca, "other", HOUR, &trust);
        trust.revoke(list(&other));
        for _ in 0..2 {
            assert!(attestations.check(&trust, &pair).is_ok());
        }
        assert!(attestations.judge(&trust, &counters).is_empty());
        assert_eq!(ordered(&connection).await, None);

        let revoked_client = Pair { source: other, ..pair.clone() };
        assert!(matches!(attestations.check(&trust, &revoked_client), Err((PeerRole::Client, e)) if e.is_revocation()));
        trust.revoke(list(&pair.destination));
        assert!(matches!(attestations.check(&trust, &pair), Err((PeerRole::Server, e)) if e.is_revocation()));
        assert_eq!(attestations.judge(&trust, &counters).len(), 1);
        assert_eq!(ordered(&connection).await, Some(CloseReason::CertificateRevoked));
        assert_eq!((counters.revoked(Direction::Inbound), counters.revoked(Direction::Outbound)), (0, 1));
    }

    #[tokio::test]
    async fn a_certificate_of_another_root_is_not_taken() {
        let (_, trust, attestations, pair, ..) = rig([HOUR, HOUR], TrustSettings::default());
        assert!(attestations.check(&trust, &pair).is_ok());
        let foreign = TestCa::new("foreign");
        let own_trust = foreign.trust(&identity("web"), TrustSettings::default());
        let stranger = Pair { source: certificate(&foreign, "web", HOUR, &own_trust), ..pair };
        assert!(matches!(attestations.check(&trust, &stranger), Err((PeerRole::Client, PeerError::Untrusted { .. }))));
    }

    /// Roots may be the same: then only the names tell.
    #[tokio::test]
    async fn a_client_of_a_foreign_trust_domain_is_not_taken_though_its_roots_are_known() {
        let (ca, trust, attestations, pair, ..) = rig([HOUR, HOUR], TrustSettings::default());
        let foreign: Identity = "spiffe://elsewhere/ns/shop/sa/web".parse().unwrap();
        let other = ca.trust(&foreign, TrustSettings::default());
        let source = Arc::new(ca.try_certificate(&foreign, &Leaf::of(&foreign).lives(HOUR), other).unwrap());
        let stranger = Pair { source, ..pair };
        let refused = attestations.check(&trust, &stranger);
        assert!(matches!(refused, Err((PeerRole::Client, PeerError::WrongTrustDomain { .. }))), "{refused:?}");
    }

    #[tokio::test]
    async fn an_ended_certificate_ends_connections_by_setting_or_if_its_renewal_is_denied() {
        let later = SystemTime::now() + 2 * HOUR;
        let denied = |name: &'static str| move |of: &Identity| *of == identity(name);
        let (both, one) = ([HOUR, HOUR], [24 * HOUR, HOUR]);
        for (lives, cut, name, expected) in [
            (one, false, "nobody", None),
            (one, false, "web", None),
            (one, false, "cart", Some(CloseReason::RenewalDenied)),
            (one, true, "nobody", Some(CloseReason::CertificateExpired)),
            (both, false, "nobody", None),
            (both, false, "web", Some(CloseReason::RenewalDenied)),
            (both, false, "cart", Some(CloseReason::RenewalDenied)),
        ] {
            let (_, _, attestations, _, connection, _attested) = rig(lives, TrustSettings::default());
            assert!(attestations.tend(SystemTime::now(), cut, denied(name)).1 <= LOOK_AGAIN);
            assert_eq!(ordered(&connection).await, None);
            attestations.tend(later, cut, denied(name));
            assert_eq!(ordered(&connection).await, expected, "{lives:?} {cut} {name}");
        }
    }
}

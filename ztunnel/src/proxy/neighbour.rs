//! Connections between two pods of this node: no tunnel and no second proxy. One relay dials from the client's network
//! namespace straight to the server's app, past that pod's listeners. Whose namespaces these are says who the ends are:
//! the kernel attests it, where a tunnel would prove it by certificates. Everything else is as over a tunnel: policy,
//! certificates that hold, both sides' metrics and log lines, and what ends a connection that is open.
//!
//! Must never send a byte before the server's policies have been judged, and before it is certain that what has
//! answered is in the server's namespace: other pods can have the same address.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::UnixTime;
use tokio::net::TcpStream;

use super::guard::{TrustCounters, refusal_flag};
use super::inbound::{ILLEGAL_PORTS, service_of};
use super::judge::judge;
use super::rejudge;
use super::route::{Hop, HopKind};
use super::share::OpenConnection;
use super::state::{Phase, Pod, Shared};
use super::worker::Worker;
use crate::identity::{Certificate, Identity, PeerError, PeerRole, Trust, rfc3339};
use crate::mesh::Workload;
use crate::policy;
use crate::telemetry::flow::{CloseReason, Direction, Failure, Flow, Peer, Protocol, ResponseFlag};
use crate::telemetry::{Connection, LiveConnection};

/// A connection to a neighbour, as its server's side sees it.
pub struct Neighbour {
    pub socket: TcpStream,
    pub inbound: Connection,
    pub kept: (OpenConnection, Rc<Attested>),
}

/// The workload that a hop leads to, if no tunnel would be needed on one node.
pub fn may_attest(hop: &Hop, encryption: bool) -> Option<&Workload> {
    let HopKind::Hbone { tunnel, authority, .. } = &hop.kind else { return None };
    // A waypoint is dialled at its own address and asked for another one.
    let is_direct = tunnel.ip() == authority.ip() && tunnel.port() == ebpf::HBONE_PORT;
    let may = is_direct && !encryption && !ILLEGAL_PORTS.contains(&authority.port());
    hop.workload.as_deref().filter(|_| may)
}

/// The pod of this node that a hop leads to, if it can be reached without a tunnel.
pub fn find(shared: &Shared, hop: &Hop) -> Option<Arc<Pod>> {
    let pod = shared.pod_of(may_attest(hop, shared.config.same_node_encryption)?)?;
    let serves = pod.by_ebpf && *pod.phase.borrow() == Phase::Serving;
    serves.then_some(pod)
}

/// Opens a connection of `pod`, whose record is `source`, to a neighbour. Nothing: what answers at this address is not
/// that pod, and only a tunnel can tell who it is.
pub async fn open(
    worker: &Worker,
    pod: &Pod,
    source: &Arc<Workload>,
    neighbour: Arc<Pod>,
    hop: &Hop,
    outbound: &Flow,
) -> Result<Option<Neighbour>, Failure> {
    let shared = &worker.shared;
    let (HopKind::Hbone { authority, .. }, Some(workload)) = (&hop.kind, &hop.workload) else { return Ok(None) };
    let to = *authority;
    let own = shared.own_workload(&neighbour).await?;
    let from = source.addresses.iter().copied().find(|ip| ip.is_ipv4() == to.is_ipv4());
    let maps = shared.maps.load_full();
    let (Some(from), Some(maps), true) = (from, maps, own.uid == workload.uid) else { return Ok(None) };
    let identity = shared.certificates.trust().canonical(&source.identity());
    let mut flow =
        Flow::new(Direction::Inbound, Protocol::Attested, neighbour.uid.clone(), SocketAddr::new(from, 0), to);
    flow.source = Peer::of(Some(source.clone()), Some(identity.clone()));
    flow.destination = Peer::of(Some(own.clone()), Some(own.identity()));
    let host = outbound.service.as_ref().map(|service| service.hostname.clone());
    flow.service = service_of(&shared.mesh.load(), &own, host.as_deref());

    let attested = certificates(worker, source.identity(), own.identity()).await?;
    let told = |failure: Failure| {
        shared.telemetry.failed(&flow, &failure);
        let text = format!("{to} on this node refused the connection: {}", failure.text);
        Failure::new(failure.flag, "connect", text)
    };
    let judged = policy::Connection { identity: Some(identity), source: from, destination: to };
    let judged_by = judge(worker, &neighbour, &judged, &flow).await.map_err(told)?;
    let kept = neighbour.connection(&shared.config.limits).map_err(told)?;
    let dialled = shared
        .tcp
        .dial_neighbour((&pod.netns, from), !pod.by_ebpf, &maps.pass, (neighbour.netns.cookie(), to))
        .await
        .map_err(|e| told(Failure::new(ResponseFlag::Connect, "dial", format!("dialling the app at {to}: {e}"))))?;
    let Some((socket, from)) = dialled else {
        shared.unattested.fetch_add(1, Ordering::Relaxed);
        tracing::debug!(pod = pod.name, %to, neighbour = neighbour.name, "another one has the neighbour's address");
        return Ok(None);
    };
    flow.src = from;
    let inbound = shared.telemetry.open(flow);
    rejudge::established(shared, &neighbour, &inbound, &judged_by);
    if *neighbour.phase.borrow() == Phase::Gone {
        inbound.live().close(CloseReason::PodRemoved);
    }
    let attested = worker.neighbours.add(attested, inbound.live());
    Ok(Some(Neighbour { socket, inbound, kept: (kept, attested) }))
}

/// The certificates of both ends. Nothing is encrypted with them, but who has none that its peer would take is refused,
/// as over a tunnel.
async fn certificates(worker: &Worker, source: Identity, destination: Identity) -> Result<Pair, Failure> {
    let shared = &worker.shared;
    let limit = shared.config.timeouts.certificate;
    let no_certificate = |error: String| Failure::new(ResponseFlag::IdentityError, "identity", error);
    let source = shared.certificates.wait(&source, limit).await.map_err(|e| no_certificate(e.to_string()))?;
    let destination = shared.certificates.wait(&destination, limit).await;
    let destination = destination.map_err(|e| no_certificate(format!("of the server: {e}")))?;
    let pair = Pair { source, destination };
    worker.neighbours.check(shared.certificates.trust(), &pair).map_err(|(role, error)| {
        let flag = refusal_flag(&shared.trust_counters, direction(role), &error);
        Failure::new(flag, "handshake", format!("{}: {error}", end(role)))
    })?;
    Ok(pair)
}

/// The certificates that two ends would show each other.
#[derive(Clone)]
struct Pair {
    source: Arc<Certificate>,
    destination: Arc<Certificate>,
}

/// A connection that is open, and what it rests on.
pub struct Attested {
    pair: Pair,
    since: SystemTime,
    inbound: LiveConnection,
}

/// The connections of a worker to neighbours.
#[derive(Default)]
pub struct Neighbours {
    list: RefCell<Vec<Weak<Attested>>>,
    /// Pairs that were found good, and the generation of the trust by which.
    good: RefCell<(u64, HashMap<[*const Certificate; 2], Pair>)>,
}

impl Pair {
    /// Who would not take whom, and why.
    fn verify(
        &self,
        verify: impl Fn(&Certificate, &Certificate, PeerRole) -> Result<(), PeerError>,
    ) -> Result<(), (PeerRole, PeerError)> {
        let Self { source, destination } = self;
        verify(destination, source, PeerRole::Client).map_err(|error| (PeerRole::Client, error))?;
        verify(source, destination, PeerRole::Server).map_err(|error| (PeerRole::Server, error))
    }

    fn end(&self) -> SystemTime {
        self.source.not_after().min(self.destination.not_after())
    }
}

impl Neighbours {
    /// Whether both ends would take each other now.
    fn check(&self, trust: &Trust, pair: &Pair) -> Result<(), (PeerRole, PeerError)> {
        let key = [Arc::as_ptr(&pair.source), Arc::as_ptr(&pair.destination)];
        let generation = trust.generation();
        let mut good = self.good.borrow_mut();
        if good.0 != generation || good.1.len() >= MOST_KNOWN {
            *good = (generation, HashMap::new());
        }
        // Those that are on the list live: another certificate cannot have the same place.
        if good.1.contains_key(&key) {
            return Ok(());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        pair.verify(|own, peer, role| {
            let domain = own.identity().trust_domain();
            trust.verify(domain, peer.chain(), role, UnixTime::since_unix_epoch(now))
        })?;
        good.1.insert(key, pair.clone());
        Ok(())
    }

    fn add(&self, pair: Pair, inbound: LiveConnection) -> Rc<Attested> {
        let attested = Rc::new(Attested { pair, since: SystemTime::now(), inbound });
        let mut list = self.list.borrow_mut();
        if list.len() == list.capacity() {
            list.retain(|one| one.strong_count() > 0);
        }
        list.push(Rc::downgrade(&attested));
        attested
    }

    /// Ends the connections whose ends would no longer take each other.
    pub fn judge(&self, trust: &Trust, counters: &TrustCounters) {
        let mut known: HashMap<[*const Certificate; 2], Result<(), (PeerRole, PeerError)>> = HashMap::new();
        for attested in self.all() {
            let Attested { pair, since, inbound } = &*attested;
            let key = [Arc::as_ptr(&pair.source), Arc::as_ptr(&pair.destination)];
            let verdict = known.entry(key).or_insert_with(|| {
                pair.verify(|own, peer, role| {
                    trust.verify_again(own.identity().trust_domain(), peer.chain(), role, *since)
                })
            });
            let Err((role, error)) = verdict else { continue };
            let reason = match refusal_flag(counters, direction(*role), error) {
                ResponseFlag::CertRevoked => CloseReason::CertificateRevoked,
                _ => CloseReason::TrustWithdrawn,
            };
            inbound.close_because(reason, &format!("{}: {error}", end(*role)));
        }
    }

    /// Sees to connections whose certificates have ended, as over a tunnel. Also says when to look again.
    pub fn tend(&self, now: SystemTime, cut: bool, denied: impl Fn(&Identity) -> bool) -> Duration {
        let mut next = LOOK_AGAIN;
        for attested in self.all() {
            let pair = &attested.pair;
            if let Ok(left) = pair.end().duration_since(now)
                && !left.is_zero()
            {
                next = next.min(left);
                continue;
            }
            let ended = [&pair.source, &pair.destination].into_iter().find(|c| c.not_after() <= now);
            let Some(ended) = ended else { continue };
            let text = format!("that of {} ended at {}", ended.identity(), rfc3339(ended.not_after()));
            if cut {
                attested.inbound.close_because(CloseReason::CertificateExpired, &text);
            } else if denied(ended.identity()) {
                attested.inbound.close_because(CloseReason::RenewalDenied, &text);
            } else {
                next = next.min(LOOK_AT_ENDED);
            }
        }
        next
    }

    fn all(&self) -> Vec<Rc<Attested>> {
        self.list.borrow().iter().filter_map(Weak::upgrade).collect()
    }
}

/// Who refuses: a client's certificate is the server's matter.
fn direction(role: PeerRole) -> Direction {
    match role {
        PeerRole::Client => Direction::Inbound,
        PeerRole::Server => Direction::Outbound,
    }
}

fn end(role: PeerRole) -> &'static str {
    match role {
        PeerRole::Client => "the client's certificate",
        PeerRole::Server => "the server's certificate",
    }
}

/// Pairs of certificates that are remembered.
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
    use crate::telemetry::Telemetry;
    use crate::telemetry::metrics::Metrics;

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
    ) -> (TestCa, Trust, Neighbours, Pair, Connection, Rc<Attested>) {
        let ca = TestCa::new("root");
        let trust = ca.trust(&identity("web"), settings);
        let source = certificate(&ca, "web", lives[0], &trust);
        let destination = certificate(&ca, "cart", lives[1], &trust);
        let (neighbours, pair, connection) = (Neighbours::default(), Pair { source, destination }, connection());
        let attested = neighbours.add(pair.clone(), connection.live());
        (ca, trust, neighbours, pair, connection, attested)
    }

    #[tokio::test]
    async fn who_would_not_be_taken_over_a_tunnel_is_not_taken_without_one() {
        let settings = TrustSettings { revocation: Some(RevocationRules::default()), ..TrustSettings::default() };
        let (ca, trust, neighbours, pair, connection, _attested) = rig([HOUR, HOUR], settings);
        let counters = TrustCounters::default();
        assert!(neighbours.check(&trust, &pair).is_err(), "revocation counts, and there is no list");
        let now = SystemTime::now();
        let list =
            |revoked: &Certificate| CrlSet::read(&ca.crl(&[&revoked.chain()[0]], now - HOUR, now + HOUR)).unwrap();
        let other = certificate(&ca, "other", HOUR, &trust);
        trust.revoke(list(&other));
        for _ in 0..2 {
            assert!(neighbours.check(&trust, &pair).is_ok());
        }
        neighbours.judge(&trust, &counters);
        assert_eq!(ordered(&connection).await, None);

        let revoked_client = Pair { source: other, ..pair.clone() };
        assert!(matches!(neighbours.check(&trust, &revoked_client), Err((PeerRole::Client, e)) if e.is_revocation()));
        trust.revoke(list(&pair.destination));
        assert!(matches!(neighbours.check(&trust, &pair), Err((PeerRole::Server, e)) if e.is_revocation()));
        neighbours.judge(&trust, &counters);
        assert_eq!(ordered(&connection).await, Some(CloseReason::CertificateRevoked));
        assert_eq!((counters.revoked(Direction::Inbound), counters.revoked(Direction::Outbound)), (0, 1));
    }

    #[tokio::test]
    async fn a_certificate_of_another_root_is_not_taken() {
        let (_, trust, neighbours, pair, ..) = rig([HOUR, HOUR], TrustSettings::default());
        assert!(neighbours.check(&trust, &pair).is_ok());
        let foreign = TestCa::new("foreign");
        let own_trust = foreign.trust(&identity("web"), TrustSettings::default());
        let stranger = Pair { source: certificate(&foreign, "web", HOUR, &own_trust), ..pair };
        assert!(matches!(neighbours.check(&trust, &stranger), Err((PeerRole::Client, PeerError::Untrusted { .. }))));
    }

    #[tokio::test]
    async fn an_ended_certificate_ends_connections_by_setting_or_if_its_renewal_is_denied() {
        let later = SystemTime::now() + 2 * HOUR;
        let denied = |name: &'static str| move |of: &Identity| *of == identity(name);
        for (cut, name, expected) in [
            (false, "nobody", None),
            (false, "web", None),
            (false, "cart", Some(CloseReason::RenewalDenied)),
            (true, "nobody", Some(CloseReason::CertificateExpired)),
        ] {
            let (_, _, neighbours, _, connection, _attested) = rig([24 * HOUR, HOUR], TrustSettings::default());
            assert!(neighbours.tend(SystemTime::now(), cut, denied(name)) <= LOOK_AGAIN);
            assert_eq!(ordered(&connection).await, None);
            neighbours.tend(later, cut, denied(name));
            assert_eq!(ordered(&connection).await, expected, "{cut} {name}");
        }
    }
}

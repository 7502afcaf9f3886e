//! Connections between two pods of this node: no tunnel and no second proxy. One relay dials from the client's network
//! namespace straight to the server's app, past that pod's listeners. Whose namespaces these are says who the ends are:
//! the kernel attests it, where a tunnel would prove it by certificates. Everything else is as over a tunnel: policy,
//! certificates that hold, both sides' metrics and log lines, and what ends a connection that is open.
//!
//! Must never send a byte before the server's policies have been judged, and before the dial has been seen to come to
//! the server's namespace: another pod can have the same address. (Who may forge packets on the node's network can still
//! stand between the two, as he can without a mesh.)

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::io;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

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
use crate::capture::sock_diag::{self, TcpSocket, TcpState};
use crate::capture::sockets::Dialled;
use crate::identity::{Certificate, Identity, PeerError, PeerRole, Trust, rfc3339};
use crate::mesh::Workload;
use crate::policy;
use crate::telemetry::flow::{CloseReason, Direction, Failure, Flow, Peer, Protocol, ResponseFlag};
use crate::telemetry::log::Hush;
use crate::telemetry::{Connection, LiveConnection};

/// A connection to a neighbour, as its server's side sees it.
pub struct Neighbour {
    pub socket: TcpStream,
    pub inbound: Connection,
    pub server: Arc<Pod>,
    pub kept: (OpenConnection, Rc<Attested>),
}

/// Dials to neighbours that are under way: their ends, and those of connections that are open, are no connections in the
/// clear.
#[derive(Default)]
pub struct Dials(Mutex<HashSet<(SocketAddr, SocketAddr)>>);

struct Dial<'a> {
    dials: &'a Dials,
    ends: (SocketAddr, SocketAddr),
}

impl Dials {
    fn begin(&self, from: SocketAddr, to: SocketAddr) -> Dial<'_> {
        self.lock().insert((from, to));
        Dial { dials: self, ends: (from, to) }
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<(SocketAddr, SocketAddr)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Dial<'_> {
    fn drop(&mut self) {
        self.dials.lock().remove(&self.ends);
    }
}

/// Client and server of all connections to neighbours, also of those that are being opened.
pub fn ends(shared: &Shared) -> HashSet<(SocketAddr, SocketAddr)> {
    // In this order: what is being opened is open before it leaves the first list.
    let mut ends = shared.dials.lock().clone();
    let open = shared.telemetry.connections().filter(|c| c.flow().protocol == Protocol::Attested);
    ends.extend(open.map(|connection| (connection.flow().src, connection.flow().dst)));
    ends
}

/// Ends the server's side of a connection in its own namespace: a reset from the client's may be dropped on its way, or
/// that namespace be gone.
pub async fn end_server_side(server: Arc<Pod>, from: SocketAddr, to: SocketAddr) {
    let ended = tokio::task::spawn_blocking(move || {
        let sockets = sock_diag::tcp_sockets(&server.netns)?;
        let is_it = |s: &&TcpSocket| s.state == TcpState::Open && s.local == to && s.peer == from;
        sockets.iter().find(is_it).map_or(Ok(false), |socket| sock_diag::destroy(&server.netns, socket))
    });
    if let Err(error) = ended.await.unwrap_or_else(|e| Err(io::Error::other(e))) {
        tracing::warn!(%from, %to, %error, "cannot make sure that the server's side of a connection has ended");
    }
}

/// The workload that a hop of `source` leads to, if no tunnel would be needed on one node.
pub fn may_attest<'a>(source: &Workload, hop: &'a Hop, encryption: bool) -> Option<&'a Workload> {
    let HopKind::Hbone { tunnel, authority, .. } = &hop.kind else { return None };
    // A waypoint is dialled at its own address and asked for another one.
    let is_direct = tunnel.ip() == authority.ip() && tunnel.port() == ebpf::HBONE_PORT;
    let may = is_direct && !encryption && !ILLEGAL_PORTS.contains(&authority.port());
    // What a pod sends to itself does not come to its listeners.
    hop.workload.as_deref().filter(|workload| may && workload.uid != source.uid)
}

/// The pod of this node that a hop leads to, if it can be reached without a tunnel.
pub fn find(shared: &Shared, source: &Workload, hop: &Hop) -> Option<Arc<Pod>> {
    let pod = shared.pod_of(may_attest(source, hop, shared.config.same_node_encryption)?)?;
    let serves = pod.by_ebpf && *pod.phase.borrow() == Phase::Serving;
    serves.then_some(pod)
}

/// Opens a connection of `pod`, whose record is `source`, to a neighbour. Nothing: a tunnel has to be used, because another
/// one answers at this address, or nobody.
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
    if worker.neighbours.is_avoided(&pod.uid, to) {
        return Ok(None);
    }
    let identity = shared.certificates.trust().canonical(&source.identity());
    let mut flow =
        Flow::new(Direction::Inbound, Protocol::Attested, neighbour.uid.clone(), SocketAddr::new(from, 0), to);
    flow.source = Peer::of(Some(source.clone()), Some(identity.clone()));
    flow.destination = Peer::of(Some(own.clone()), Some(own.identity()));
    let host = outbound.service.as_ref().map(|service| service.hostname.clone());
    flow.service = service_of(&shared.mesh.load(), &own, host.as_deref());

    let told = |failure: Failure| {
        shared.telemetry.failed(&flow, &failure);
        let text = format!("{to} on this node refused the connection: {}", failure.text);
        Failure::new(failure.flag, "connect", text)
    };
    let trust = shared.certificates.trust();
    let generation = trust.generation();
    let Some(pair) = certificates(worker, source.identity(), own.identity(), told).await? else { return Ok(None) };
    let judged = policy::Connection { identity: Some(identity), source: from, destination: to };
    let judged_by = judge(worker, &neighbour, &judged, &flow).await.map_err(told)?;
    let kept = neighbour.connection(&shared.config.limits).map_err(told)?;
    let begin = |from| shared.dials.begin(from, to);
    let server = (neighbour.netns.cookie(), to);
    let dialled = shared.tcp.dial_neighbour((&pod.netns, from), !pod.by_ebpf, &maps.pass, server, begin).await;
    let (socket, from, _under_way) = match dialled {
        Ok(Dialled::Connected(socket, from, under_way)) => (socket, from, under_way),
        Ok(Dialled::NotOurAddress) => {
            tracing::debug!(pod = pod.name, %from, "the pod has not the address of its record: a tunnel is used");
            return Ok(None);
        }
        Ok(Dialled::Stranger) => {
            shared.unattested.fetch_add(1, Ordering::Relaxed);
            if let Some(untold) = STRANGERS.speak() {
                let (pod, neighbour) = (&pod.name, &neighbour.name);
                tracing::warn!(pod, neighbour, %to, untold, "not the neighbour has answered at its address");
            }
            return Ok(None);
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            worker.neighbours.avoid(&pod.uid, to);
            if let Some(untold) = SILENCE.speak() {
                tracing::warn!(
                    pod = pod.name, neighbour = neighbour.name, %to, %error, untold,
                    "a pod of this node does not answer on the app's port, a tunnel is tried: does a NetworkPolicy only \
                     allow port {}?", ebpf::HBONE_PORT
                );
            }
            return Ok(None);
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable) => {
            tracing::debug!(pod = pod.name, %to, %error, "no port is free towards a pod of this node: a tunnel is used");
            return Ok(None);
        }
        Err(error) => {
            return Err(told(Failure::new(
                ResponseFlag::Connect,
                "dial",
                format!("dialling the app at {to}: {error}"),
            )));
        }
    };
    flow.src = from;
    let inbound = shared.telemetry.open(flow);
    rejudge::established(shared, &neighbour, &inbound, &judged_by);
    if *neighbour.phase.borrow() == Phase::Gone {
        inbound.live().close(CloseReason::PodRemoved);
    }
    let attested = worker.neighbours.add(pair, inbound.live());
    if trust.generation() != generation {
        // [`Neighbours::judge`] may not have seen it.
        note(worker, attested.judge(trust, &shared.trust_counters).into_iter().collect());
    }
    Ok(Some(Neighbour { socket, inbound, server: neighbour, kept: (kept, attested) }))
}

/// Says and counts what trust has ended.
pub fn note(worker: &Worker, ended: Vec<String>) {
    let Some(first_reason) = ended.first() else { return };
    worker.shared.trust_counters.ended_connections(ended.len() as u64);
    tracing::warn!(connections = ended.len(), first_reason, "connections between pods of this node were ended");
}

/// The certificates of both ends. Nothing is encrypted with them, but who has none is refused, as over a tunnel. Nothing:
/// one of them would not be taken, which the handshake of a tunnel decides.
async fn certificates(
    worker: &Worker,
    source: Identity,
    destination: Identity,
    told: impl Fn(Failure) -> Failure,
) -> Result<Option<Pair>, Failure> {
    let shared = &worker.shared;
    let limit = shared.config.timeouts.certificate;
    let no_certificate = |error: String| Failure::new(ResponseFlag::IdentityError, "identity", error);
    let source = shared.certificates.wait(&source, limit).await.map_err(|e| no_certificate(e.to_string()))?;
    let destination = shared.certificates.wait(&destination, limit).await;
    let destination = destination.map_err(|e| told(no_certificate(format!("of the server: {e}"))))?;
    let pair = Pair { source, destination };
    let checked = worker.neighbours.check(shared.certificates.trust(), &pair);
    if let Err((role, error)) = &checked {
        tracing::debug!(%error, "{} would not be taken on this node: a tunnel is tried", end(*role));
    }
    Ok(checked.is_ok().then_some(pair))
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
    /// Pairs that were found good a moment ago, and the generation of the trust by which.
    good: RefCell<(u64, Good)>,
    /// Where a dial had no answer: by the client's pod and what it dialled, until then.
    avoided: RefCell<HashMap<(Arc<str>, SocketAddr), Instant>>,
}

type Good = HashMap<[*const Certificate; 2], (Pair, Instant)>;

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
        // Those that are on the list live: another certificate cannot have the same place. A revocation list may end
        // meanwhile, or a root.
        if good.1.get(&key).is_some_and(|(_, at)| at.elapsed() < GOOD_FOR) {
            return Ok(());
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        pair.verify(|own, peer, role| {
            let domain = own.identity().trust_domain();
            trust.verify(domain, peer.chain(), role, UnixTime::since_unix_epoch(now))
        })?;
        good.1.insert(key, (pair.clone(), Instant::now()));
        Ok(())
    }

    fn is_avoided(&self, client: &Arc<str>, to: SocketAddr) -> bool {
        let avoided = self.avoided.borrow();
        !avoided.is_empty() && avoided.get(&(client.clone(), to)).is_some_and(|until| Instant::now() < *until)
    }

    fn avoid(&self, client: &Arc<str>, to: SocketAddr) {
        let (mut avoided, now) = (self.avoided.borrow_mut(), Instant::now());
        if avoided.len() >= MOST_KNOWN {
            avoided.retain(|_, until| now < *until);
        }
        if avoided.len() < MOST_KNOWN {
            avoided.insert((client.clone(), to), now + AVOIDED_FOR);
        }
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
        let verified = self.pair.verify(|own, peer, role| {
            trust.verify_again(own.identity().trust_domain(), peer.chain(), role, self.since)
        });
        verified.map_err(|(role, error)| {
            let reason = match refusal_flag(counters, direction(role), &error) {
                ResponseFlag::CertRevoked => CloseReason::CertificateRevoked,
                _ => CloseReason::TrustWithdrawn,
            };
            (reason, format!("{}: {error}", end(role)))
        })
    }

    fn judge(&self, trust: &Trust, counters: &TrustCounters) -> Option<String> {
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

fn end(role: PeerRole) -> &'static str {
    match role {
        PeerRole::Client => "the client's certificate",
        PeerRole::Server => "the server's certificate",
    }
}

/// Lines a second about what others on the node do.
static STRANGERS: Hush = Hush::new(1);
static SILENCE: Hush = Hush::new(1);
/// How long a pair of certificates that was found good is not looked at again.
const GOOD_FOR: Duration = Duration::from_secs(5);
/// How long tunnels are used where a neighbour did not answer.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
/// Pairs of certificates, and destinations, that are remembered.
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
        assert!(neighbours.judge(&trust, &counters).is_empty());
        assert_eq!(ordered(&connection).await, None);

        let revoked_client = Pair { source: other, ..pair.clone() };
        assert!(matches!(neighbours.check(&trust, &revoked_client), Err((PeerRole::Client, e)) if e.is_revocation()));
        trust.revoke(list(&pair.destination));
        assert!(matches!(neighbours.check(&trust, &pair), Err((PeerRole::Server, e)) if e.is_revocation()));
        assert_eq!(neighbours.judge(&trust, &counters).len(), 1);
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
            let (_, _, neighbours, _, connection, _attested) = rig(lives, TrustSettings::default());
            assert!(neighbours.tend(SystemTime::now(), cut, denied(name)).1 <= LOOK_AGAIN);
            assert_eq!(ordered(&connection).await, None);
            neighbours.tend(later, cut, denied(name));
            assert_eq!(ordered(&connection).await, expected, "{lives:?} {cut} {name}");
        }
    }
}

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
use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::TcpStream;

use super::attested::{Attested, Pair, whose};
use super::inbound::{ILLEGAL_PORTS, service_of};
use super::judge::judge;
use super::rejudge;
use super::route::{Hop, HopKind};
use super::share::OpenConnection;
use super::state::{Phase, Pod, Shared};
use super::worker::Worker;
use crate::capture::sock_diag;
use crate::capture::sockets::Dialled;
use crate::identity::Identity;
use crate::mesh::Workload;
use crate::policy;
use crate::telemetry::Connection;
use crate::telemetry::flow::{Direction, Failure, Flow, Peer, Protocol, ResponseFlag};
use crate::telemetry::log::Hush;

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
pub fn end_server_side(server: &Pod, from: SocketAddr, to: SocketAddr) {
    let found = sock_diag::connection(&server.netns, to, from);
    let ended = found.and_then(|s| s.map_or(Ok(false), |socket| sock_diag::destroy(&server.netns, &socket)));
    if let Err(error) = ended {
        tracing::warn!(
            pod = server.name, namespace = server.namespace, %from, %to, %error,
            "cannot make sure that the server's side of a connection has ended"
        );
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
    to: SocketAddr,
    outbound: &Flow,
) -> Result<Option<Neighbour>, Failure> {
    let shared = &worker.shared;
    let own = shared.own_workload(&neighbour).await?;
    let from = source.addresses.iter().copied().find(|ip| ip.is_ipv4() == to.is_ipv4());
    let maps = shared.maps.load_full();
    // The record may be another one by now.
    let is_it = outbound.destination.workload.as_ref().is_some_and(|workload| workload.uid == own.uid);
    let (Some(from), Some(maps), true) = (from, maps, is_it) else { return Ok(None) };
    if worker.avoided.has(&pod.uid, to) {
        return Ok(None);
    }
    let identity = shared.certificates.trust().canonical(&source.identity());
    // Until there is a dial, the app's port tells which connection it is.
    let client = SocketAddr::new(from, outbound.src.port());
    let mut flow = Flow::new(Direction::Inbound, Protocol::Attested, neighbour.uid.clone(), client, to);
    flow.source = Peer::of(Some(source.clone()), Some(identity.clone()));
    flow.destination = Peer::of(Some(own.clone()), Some(own.identity()));
    let host = outbound.service.as_ref().map(|service| &*service.hostname);
    flow.service = service_of(&shared.mesh.load(), &own, host);

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
    let kept = neighbour.connection(shared).map_err(told)?;
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
            worker.avoided.add(&pod.uid, to);
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
            return Err(told(shared.overload.dial_failure(&error, &format!("dialling the app at {to}"))));
        }
    };
    flow.src = from;
    let inbound = shared.open(&neighbour, flow);
    rejudge::established(shared, &neighbour, &inbound, &judged_by);
    let attested = worker.attested.add(pair, inbound.live());
    if trust.generation() != generation {
        // [`Attestations::judge`](super::attested::Attestations::judge) may not have seen it.
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
    let checked = worker.attested.check(shared.certificates.trust(), &pair);
    if let Err((role, error)) = &checked {
        tracing::debug!(%error, "{} would not be taken on this node: a tunnel is tried", whose(*role));
    }
    Ok(checked.is_ok().then_some(pair))
}

/// Where a dial had no answer: by the client's pod and what it dialled, until then.
#[derive(Default)]
pub struct Avoided(RefCell<HashMap<(Arc<str>, SocketAddr), Instant>>);

impl Avoided {
    fn has(&self, client: &Arc<str>, to: SocketAddr) -> bool {
        let avoided = self.0.borrow();
        !avoided.is_empty() && avoided.get(&(client.clone(), to)).is_some_and(|until| Instant::now() < *until)
    }

    fn add(&self, client: &Arc<str>, to: SocketAddr) {
        let (mut avoided, now) = (self.0.borrow_mut(), Instant::now());
        if avoided.len() >= MOST_AVOIDED {
            avoided.retain(|_, until| now < *until);
        }
        if avoided.len() < MOST_AVOIDED {
            avoided.insert((client.clone(), to), now + AVOIDED_FOR);
        }
    }
}

/// Lines a second about what others on the node do.
static STRANGERS: Hush = Hush::new(1);
static SILENCE: Hush = Hush::new(1);
/// How long tunnels are used where a neighbour did not answer.
const AVOIDED_FOR: Duration = Duration::from_secs(60);
/// Destinations that are remembered; beyond these each dial waits for its own time-out.
const MOST_AVOIDED: usize = 1024;

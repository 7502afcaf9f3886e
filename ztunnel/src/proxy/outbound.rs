//! A connection that an app of a pod has opened.
//!
//! Must never send anything in the clear to a peer that speaks HBONE: without an identity, a record or a waypoint the
//! app gets a reset and the log the reason.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use http::HeaderMap;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::finish::{Both, carry, carry_both};
use super::guard::{alert_failure, handshake_failure};
use super::neighbour::{self, Neighbour};
use super::relay::{PlainRelay, Resetting, Side, TunnelRelay};
use super::route::{Hop, HopKind, route};
use super::state::{Phase, Pod, Shared};
use super::worker::{Counted, Worker};
use crate::capture::sockets::redirected_from;
use crate::discovery::Need;
use crate::hbone::{self, Dialled, OpenError, Opened, PoolKey, Request, StreamError, TunnelError};
use crate::identity::Identity;
use crate::mesh::{NetworkAddress, Workload};
use crate::random;
use crate::telemetry::flow::{Authority, Direction, Failure, Flow, Peer, Protocol, ResponseFlag};

/// Serves a connection to its end.
pub async fn serve(worker: Rc<Worker>, pod: Arc<Pod>, app: TcpStream, client: SocketAddr, counted: Counted) {
    let work = worker.shared.shutdown.work();
    let app = Resetting::new(app);
    let dialled = match dialled(&worker, &pod, &app, client) {
        Ok(dialled) => dialled,
        Err(failure) => {
            let flow = Flow::new(Direction::Outbound, Protocol::Tcp, pod.uid.clone(), client, client);
            worker.shared.telemetry.failed(&flow, &failure);
            return;
        }
    };
    let mut flow = Flow::new(Direction::Outbound, Protocol::Tcp, pod.uid.clone(), client, dialled);
    flow.original_dst = Some(dialled);
    let open = match pod.connection(&worker.shared) {
        Ok(open) => open,
        Err(failure) => {
            worker.shared.telemetry.failed(&flow, &failure);
            return;
        }
    };
    // Large futures stand on the heap while they are needed: a relay that idles is small.
    let established = Box::pin(async {
        tokio::select! {
            biased;
            () = pod.reached(Phase::Gone) => {
                Err(Failure::new(ResponseFlag::Connect, "source", super::finish::gone().to_string()))
            }
            result = establish(&worker, &pod, dialled, &mut flow) => result,
        }
    });
    let upstream = match established.await {
        Ok(upstream) => upstream,
        Err(failure) => {
            worker.shared.telemetry.failed(&flow, &failure);
            return;
        }
    };
    let half_close = worker.shared.config.timeouts.half_close;
    let connection = worker.shared.open(&pod, flow);
    let buffered = open.buffered();
    let kept = (upstream.busy, pod, counted, open, work);
    match upstream.link {
        Link::Plain(server) => {
            let relay = PlainRelay::new(app, server, connection.live(), half_close);
            tokio::task::spawn_local(carry(relay, connection, None, kept));
        }
        Link::Neighbour(neighbour) => {
            let Neighbour { socket, inbound, server, kept: of_server } = *neighbour;
            let relay = PlainRelay::new(app, socket, Both(connection.live(), inbound.live()), half_close);
            let (from, to) = (inbound.flow().src, inbound.flow().dst);
            let at_order = move || neighbour::end_server_side(&server, from, to);
            tokio::task::spawn_local(carry_both(relay, connection, inbound, at_order, (kept, of_server)));
        }
        Link::Tunnel(opened) => {
            let Opened { stream, headers: _, count } = *opened;
            let relay = TunnelRelay::new(app, Side::Client, stream, connection.live(), buffered, half_close);
            tokio::task::spawn_local(carry(relay, connection, Some(count), kept));
        }
    }
}

/// A way to the server.
struct Upstream {
    link: Link,
    busy: Option<Busy>,
}

enum Link {
    Plain(TcpStream),
    Neighbour(Box<Neighbour>),
    Tunnel(Box<Opened>),
}

/// What the app dialled: from the agent's map, or as iptables know it.
fn dialled(worker: &Worker, pod: &Pod, app: &Resetting, client: SocketAddr) -> Result<SocketAddr, Failure> {
    let fail = |text: String| Failure::new(ResponseFlag::Connect, "source", text);
    let direct = || fail(format!("{client} dialled the capture port itself, or its destination was not kept"));
    if !pod.by_ebpf {
        let own = app.socket().local_addr().map_err(|e| fail(format!("the connection's own address: {e}")))?;
        let to = redirected_from(SockRef::from(app.socket())).ok_or_else(direct)?;
        if to.port() == own.port() && to.ip() == own.ip().to_canonical() {
            return Err(direct());
        }
        return Ok(to);
    }
    let maps = worker.shared.maps.load();
    let maps = maps.as_ref().ok_or_else(|| fail("the agent has not handed over its maps".into()))?;
    let found = maps.orig_dst.take(pod.netns.cookie(), client);
    found.map_err(|e| fail(format!("reading the original destination of {client}: {e}")))?.ok_or_else(direct)
}

async fn establish(
    worker: &Rc<Worker>,
    pod: &Arc<Pod>,
    dialled: SocketAddr,
    flow: &mut Flow,
) -> Result<Upstream, Failure> {
    let shared = &worker.shared;
    let source = shared.own_workload(pod).await?;
    flow.source = Peer::of(Some(source.clone()), None);
    let address = NetworkAddress { network: source.place.network.clone(), address: dialled.ip() };
    match shared.discovery.need(&address).await {
        Need::Known | Need::Unknown | Need::Outside => {}
        Need::Unreachable(reason) => return Err(Failure::new(ResponseFlag::Connect, "destination", reason)),
    }
    // Named in the log also where no way is found.
    flow.service = shared.mesh.load().service_at(&source.common.namespace, &address).cloned();
    let mut tried: Vec<Arc<str>> = Vec::new();
    loop {
        let load = |w: &Workload| worker.busy.borrow().get(&w.uid).copied().unwrap_or(0);
        let hop = route(&shared.mesh.load(), &source, dialled, &tried, load)?;
        let identity = source.identity();
        describe(flow, &hop, &identity);
        let workload = hop.workload.clone();
        let is_service = hop.service.is_some();
        let busy = workload.as_ref().map(|w| Busy::new(worker, w.uid.clone()));
        let failure = match connect(worker, pod, &source, hop, flow).await {
            Ok(link) => return Ok(Upstream { link, busy }),
            Err(failure) => failure,
        };
        // Nothing of the app's has been sent: another endpoint may do better. What a policy denied stays denied, and a
        // limit is ours.
        let is_final = failure.flag == ResponseFlag::Deny || failure.step == "limit";
        let Some(workload) = workload.filter(|_| is_service && !is_final) else {
            return Err(failure);
        };
        tried.push(workload.uid.clone());
        let more = tried.len() < ENDPOINT_TRIES && route(&shared.mesh.load(), &source, dialled, &tried, |_| 0).is_ok();
        if !more {
            return Err(failure);
        }
        tracing::debug!(pod = pod.name, endpoint = &*workload.uid, reason = %failure, "trying another endpoint");
    }
}

/// Puts into the flow what is known of a hop before it is tried.
fn describe(flow: &mut Flow, hop: &Hop, identity: &Identity) {
    flow.service.clone_from(&hop.service);
    flow.destination = Peer::of(hop.workload.clone(), None);
    match &hop.kind {
        HopKind::Tcp(to) => {
            flow.protocol = Protocol::Tcp;
            flow.dst = *to;
            flow.authority = None;
            flow.source.identity = None;
        }
        HopKind::Hbone { tunnel, authority, .. } => {
            flow.protocol = Protocol::Hbone;
            flow.dst = *tunnel;
            flow.authority = Some(Authority::Address(*authority));
            flow.source.identity = Some(identity.clone());
            flow.destination.identity = hop.workload.as_ref().map(|w| w.identity());
        }
    }
}

async fn connect(
    worker: &Rc<Worker>,
    pod: &Arc<Pod>,
    source: &Arc<Workload>,
    hop: Hop,
    flow: &mut Flow,
) -> Result<Link, Failure> {
    let shared = &worker.shared;
    if let (Some(near), HopKind::Hbone { authority, .. }) = (neighbour::find(shared, source, &hop), &hop.kind) {
        let opened = Box::pin(neighbour::open(worker, pod, source, near, *authority, flow)).await;
        if !matches!(opened, Ok(None)) {
            // No tunnel was tried, also where it was refused.
            (flow.protocol, flow.dst, flow.authority) = (Protocol::Attested, *authority, None);
        }
        if let Some(near) = opened? {
            return Ok(Link::Neighbour(Box::new(near)));
        }
    }
    let flow = &*flow;
    let (tunnel, authority, expected) = match hop.kind {
        HopKind::Tcp(to) => {
            let dial = shared.tcp.dial(&pod.netns, !pod.by_ebpf, to).await;
            let socket = dial.map_err(|e| shared.overload.dial_failure(&e, &format!("dialling {to}")))?;
            return Ok(Link::Plain(socket));
        }
        HopKind::Hbone { tunnel, authority, expected } => (tunnel, authority, expected),
    };
    let workload = hop.workload.as_ref().map(|w| w.uid.clone()).unwrap_or_else(|| "".into());
    let key = PoolKey { pod: pod.uid.clone(), workload, address: tunnel, expected };
    let identity = source.identity();
    let request = || request(authority, source, flow);
    let dial = || async {
        let certificate = shared
            .certificates
            .wait(&identity, shared.config.timeouts.certificate)
            .await
            .map_err(|e| Failure::new(ResponseFlag::IdentityError, "identity", e.to_string()))?;
        let dialled = shared.tcp.dial_tunnel(&pod.netns, !pod.by_ebpf, tunnel).await;
        let socket = dialled.map_err(|e| no_tunnel(shared, tunnel, &e))?;
        Ok(Dialled { socket, certificate })
    };
    match worker.pool.stream(&key, request, dial).await {
        Ok(opened) => Ok(Link::Tunnel(Box::new(opened))),
        Err(error) => Err(not_opened(worker, error, &identity, tunnel, authority)),
    }
}

fn request(authority: SocketAddr, source: &Workload, flow: &Flow) -> Request {
    let mut headers = HeaderMap::new();
    if let Some(baggage) = hbone::baggage_of(source) {
        headers.insert(hbone::BAGGAGE, baggage);
    }
    if let Some(forwarded) = hbone::forwarded(flow.src, flow.service.as_ref().map(|s| &*s.hostname)) {
        headers.insert(hbone::FORWARDED, forwarded);
    }
    let (a, b, c) = (random::next_u64(), random::next_u64(), random::next_u64());
    if let Ok(trace) = format!("00-{a:016x}{b:016x}-{c:016x}-00").parse() {
        headers.insert(hbone::TRACEPARENT, trace);
    }
    Request::connect(&authority.to_string(), headers)
}

fn no_tunnel(shared: &Shared, to: SocketAddr, error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::TimedOut {
        let text = format!("dialling HBONE at {to}: {error}; does a NetworkPolicy forbid port {}?", to.port());
        return Failure::new(ResponseFlag::NetworkPolicy, "dial", text);
    }
    shared.overload.dial_failure(error, &format!("dialling HBONE at {to}"))
}

fn not_opened(
    worker: &Worker,
    error: OpenError<Failure>,
    own: &Identity,
    tunnel: SocketAddr,
    authority: SocketAddr,
) -> Failure {
    let own = || worker.shared.certificates.get(own);
    match error {
        OpenError::Dial(failure) => failure,
        OpenError::Tunnel(error) => match &*error {
            TunnelError::Tls(error) => {
                let (flag, reason) = handshake_failure(worker, Direction::Outbound, error, own().as_deref());
                Failure::new(flag, "handshake", format!("TLS with {tunnel}: {reason}"))
            }
            error => {
                let text = format!("{tunnel} did not take HBONE: {error}");
                Failure::new(ResponseFlag::H2HandshakeFailure, "handshake", text)
            }
        },
        OpenError::Stream(StreamError::Alert(alert)) => {
            let (flag, reason) = alert_failure(worker, alert, own().as_deref());
            Failure::new(flag, "handshake", format!("TLS with {tunnel}: {reason}"))
        }
        OpenError::Stream(StreamError::Refused { status, reason }) => {
            let flag =
                if status == http::StatusCode::UNAUTHORIZED { ResponseFlag::Deny } else { ResponseFlag::Connect };
            let reason = reason.map(|r| format!(": {r}")).unwrap_or_default();
            let text = format!("{tunnel} refused CONNECT {authority} with status {}{reason}", status.as_u16());
            Failure::new(flag, "connect", text)
        }
        OpenError::Stream(error) => {
            Failure::new(ResponseFlag::Connect, "connect", format!("CONNECT {authority} at {tunnel}: {error}"))
        }
    }
}

/// Counts a connection of this worker to a workload, for the choice of endpoints.
struct Busy {
    worker: Rc<Worker>,
    uid: Arc<str>,
}

impl Busy {
    fn new(worker: &Rc<Worker>, uid: Arc<str>) -> Self {
        *worker.busy.borrow_mut().entry(uid.clone()).or_default() += 1;
        Self { worker: worker.clone(), uid }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut busy = self.worker.busy.borrow_mut();
        if let Some(count) = busy.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                busy.remove(&self.uid);
            }
        }
    }
}

/// Endpoints that are tried for one connection.
const ENDPOINT_TRIES: usize = 3;

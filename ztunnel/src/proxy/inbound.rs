//! Tunnels that peers open to a pod, and the connections in them.
//!
//! Must never let a byte reach an app before the peer's identity, the authority and the policies have been judged.

use std::borrow::Cow;
use std::future::poll_fn;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;

use http::{Method, StatusCode};
use tokio::net::TcpStream;

use super::finish::carry;
use super::guard::handshake_failure;
use super::judge::judge;
use super::rejudge;
use super::relay::{Resetting, Side, TunnelRelay};
use super::state::{Phase, Pod};
use super::worker::{Counted, Worker};
use crate::hbone::{self, Accepted, Baggage, Established, Incoming, Request, TunnelError};
use crate::identity::Identity;
use crate::mesh::{NetworkAddress, Service, Snapshot, Workload};
use crate::policy::{self, PolicySet};
use crate::telemetry::flow::{Authority, Direction, Failure, Flow, Peer, PeerClaims, Protocol, ResponseFlag};

/// What all streams of a tunnel have in common.
struct Tunnel {
    worker: Rc<Worker>,
    pod: Arc<Pod>,
    own: Arc<Workload>,
    /// The peer's address.
    client: SocketAddr,
    /// The pod's address that the peer dialled.
    local: IpAddr,
    identity: Identity,
}

/// Serves a tunnel to its end.
pub async fn serve(worker: Rc<Worker>, pod: Arc<Pod>, socket: TcpStream, client: SocketAddr, _counted: Counted) {
    let Ok(local) = socket.local_addr() else { return };
    let local = SocketAddr::new(local.ip().to_canonical(), local.port());
    let flow = || Flow::new(Direction::Inbound, Protocol::Hbone, pod.uid.clone(), client, local);
    let shared = &worker.shared;
    let taken = pod.tunnel(shared).and_then(|open| Ok((open, pod.handshake(client.ip(), shared)?)));
    let (_open, handshake) = match taken {
        Ok(taken) => taken,
        Err(failure) => {
            drop(Resetting::new(socket));
            worker.shared.telemetry.failed(&flow(), &failure);
            return;
        }
    };
    let accepted = Box::pin(async {
        tokio::select! {
            biased;
            () = pod.reached(Phase::Gone) => {
                Err(Failure::new(ResponseFlag::Connect, "source", super::finish::gone().to_string()))
            }
            result = accept(&worker, &pod, socket) => result,
        }
    });
    let (mut accepted, own, identity) = match accepted.await {
        Ok(accepted) => accepted,
        Err(failure) => {
            worker.shared.telemetry.failed(&flow(), &failure);
            return;
        }
    };
    drop(handshake);
    let tunnel = Rc::new(Tunnel { worker, pod: pod.clone(), own, client, local: local.ip(), identity });
    let (draining, gone) = (pod.reached(Phase::Draining), pod.reached(Phase::Gone));
    let stopping = tunnel.worker.shared.shutdown.clone();
    let stopping = stopping.ordered();
    tokio::pin!(draining, gone, stopping);
    let mut drained = false;
    loop {
        let next = tokio::select! {
            biased;
            () = &mut gone => return,
            () = &mut draining, if !drained => {
                drained = true;
                accepted.drain();
                continue;
            }
            _ = &mut stopping, if !drained => {
                drained = true;
                accepted.drain();
                continue;
            }
            next = poll_fn(|cx| accepted.poll_next(cx)) => next,
        };
        match next {
            Some(Ok(incoming)) => {
                tokio::task::spawn_local(connection(tunnel.clone(), incoming));
            }
            Some(Err(ended)) => {
                // Streams that were hurt have a line of their own.
                tracing::debug!(peer = %client, identity = %tunnel.identity, reason = %ended, "a tunnel ended");
                return;
            }
            None => return,
        }
    }
}

async fn accept(worker: &Worker, pod: &Pod, socket: TcpStream) -> Result<(Accepted, Arc<Workload>, Identity), Failure> {
    let shared = &worker.shared;
    // A handshake that fails closes with a reset only if the alert could not be sent.
    let own = shared.own_workload(pod).await?;
    let limit = shared.config.timeouts.certificate;
    let certificate = shared.certificates.wait(&own.identity(), limit).await;
    let certificate = certificate.map_err(|e| Failure::new(ResponseFlag::IdentityError, "identity", e.to_string()))?;
    let accepted = Accepted::handshake(socket, &certificate, &shared.hbone, &worker.tunnels).await;
    let accepted = accepted.map_err(|error| match error {
        TunnelError::Tls(error) => {
            let (flag, text) = handshake_failure(worker, Direction::Inbound, &error, Some(&certificate));
            Failure::new(flag, "handshake", text)
        }
        error => Failure::new(ResponseFlag::H2HandshakeFailure, "handshake", error.to_string()),
    })?;
    let identity = accepted.peer().clone();
    Ok((accepted, own, identity))
}

async fn connection(tunnel: Rc<Tunnel>, incoming: Incoming) {
    let work = tunnel.worker.shared.shutdown.work();
    let mut flow = Flow::new(
        Direction::Inbound,
        Protocol::Hbone,
        tunnel.pod.uid.clone(),
        tunnel.client,
        SocketAddr::new(tunnel.local, 0),
    );
    let telemetry = &tunnel.worker.shared.telemetry;
    let open = match tunnel.pod.connection(&tunnel.worker.shared) {
        Ok(open) => open,
        Err(failure) => {
            incoming.refuse(StatusCode::SERVICE_UNAVAILABLE, &failure.text);
            telemetry.failed(&flow, &failure);
            return;
        }
    };
    let opened = Box::pin(establish(&tunnel, incoming, &mut flow));
    match opened.await {
        Ok((app, established)) => {
            let connection = tunnel.worker.shared.open(&tunnel.pod, flow);
            rejudge::established(&tunnel.worker.shared, &tunnel.pod, &connection, &app.judged_by);
            let Established { stream, count } = established;
            let half_close = tunnel.worker.shared.config.timeouts.half_close;
            let socket = Resetting::new(app.socket);
            let relay = TunnelRelay::new(socket, Side::Server, stream, connection.live(), open.buffered(), half_close);
            tokio::task::spawn_local(carry(relay, connection, Some(count), (open, work)));
        }
        Err(failure) => telemetry.failed(&flow, &failure),
    }
}

/// The app, reached, and what allowed that.
pub struct App {
    pub socket: TcpStream,
    pub judged_by: Arc<PolicySet>,
}

/// A refusal: what the peer is answered, and what the log says.
struct Refusal {
    status: StatusCode,
    failure: Failure,
    /// The reason that the peer is told.
    told: Cow<'static, str>,
}

impl Refusal {
    fn new(status: StatusCode, flag: ResponseFlag, step: &'static str, text: impl Into<String>) -> Self {
        Self::of(status, Failure::new(flag, step, text.into()))
    }

    fn of(status: StatusCode, failure: Failure) -> Self {
        Self { status, told: failure.text.clone(), failure }
    }
}

async fn establish(tunnel: &Rc<Tunnel>, incoming: Incoming, flow: &mut Flow) -> Result<(App, Established), Failure> {
    describe(tunnel, incoming.request(), flow);
    let (request, abandoned) = incoming.watched();
    let reached = tokio::select! {
        biased;
        // A peer could fill the node with dials that it does not wait for.
        () = abandoned => {
            return Err(Failure::new(ResponseFlag::Connect, "connect", "the peer gave up before the app was reached"));
        }
        reached = reach(tunnel, request, flow) => reached,
    };
    match reached {
        Ok(app) => {
            let baggage = hbone::baggage_of(&tunnel.own);
            let answered = incoming
                .accept(baggage)
                .map_err(|e| Failure::new(ResponseFlag::Connect, "connect", format!("before the answer: {e}")))?;
            Ok((app, answered))
        }
        Err(Refusal { status, failure, told }) => {
            incoming.refuse(status, &told);
            Err(failure)
        }
    }
}

/// Judges a CONNECT and dials the app.
async fn reach(tunnel: &Tunnel, request: &Request, flow: &mut Flow) -> Result<App, Refusal> {
    if request.method != Method::CONNECT {
        let text = format!("method {} instead of CONNECT", request.method);
        return Err(Refusal::new(StatusCode::BAD_REQUEST, ResponseFlag::Connect, "connect", text));
    }
    let authority = request.authority.as_str();
    let address = match hbone::Authority::parse(authority) {
        Some(hbone::Authority::Address(address)) => address,
        Some(hbone::Authority::Host(host, port)) => {
            flow.authority = Some(Authority::Name(host.as_str().into(), port));
            own_port_of(tunnel, &host, port).map(|port| SocketAddr::new(tunnel.local, port))?
        }
        None => {
            let shown: String = authority.chars().take(128).collect();
            let text = format!("authority {shown:?} is not address:port");
            return Err(Refusal::new(StatusCode::BAD_REQUEST, ResponseFlag::Connect, "connect", text));
        }
    };
    if flow.authority.is_none() {
        flow.authority = Some(Authority::Address(address));
    }
    if address.ip() != tunnel.local {
        let text = format!("authority {address} is not this pod, which is {}", tunnel.local);
        return Err(Refusal::new(StatusCode::BAD_REQUEST, ResponseFlag::Connect, "connect", text));
    }
    flow.dst = address;
    if ILLEGAL_PORTS.contains(&address.port()) {
        let text = format!("port {} is the proxy's own", address.port());
        return Err(Refusal::new(StatusCode::SERVICE_UNAVAILABLE, ResponseFlag::Connect, "connect", text));
    }
    let judged = policy::Connection {
        identity: Some(tunnel.identity.clone()),
        source: tunnel.client.ip(),
        destination: address,
    };
    let judged_by = judge(&tunnel.worker, &tunnel.pod, &judged, flow).await.map_err(|failure| {
        // Which rule it was says who is allowed: that is for the own mesh only.
        let is_own = tunnel.identity.trust_domain() == &tunnel.own.common.trust_domain;
        let told = if is_own { failure.text.clone() } else { "denied by policy".into() };
        Refusal { status: StatusCode::UNAUTHORIZED, failure, told }
    })?;
    // The client's own port is a hint for ours; nothing depends on it.
    let port = hbone::read_forwarded(&request.headers).0.map_or(0, |from| from.port());
    let client = SocketAddr::new(tunnel.client.ip(), port);
    let socket = dial(&tunnel.worker, &tunnel.pod, client, address).await;
    let socket = socket.map_err(|failure| Refusal::of(StatusCode::SERVICE_UNAVAILABLE, failure))?;
    Ok(App { socket, judged_by })
}

/// The pod's own port behind a service's host name and port.
fn own_port_of(tunnel: &Tunnel, host: &str, port: u16) -> Result<u16, Refusal> {
    let refuse = |text: String| Refusal::new(StatusCode::SERVICE_UNAVAILABLE, ResponseFlag::Connect, "connect", text);
    let mesh = tunnel.worker.shared.mesh.load();
    let service = mesh.service_by_host(&tunnel.own.common.namespace, host);
    let service = service.ok_or_else(|| refuse(format!("host {host} is not known")))?;
    let share = tunnel.own.services.iter().find(|s| s.service == service.key);
    let share = share.ok_or_else(|| refuse(format!("this pod is not behind {host}")))?;
    let own = share.ports.iter().find(|(p, _)| *p == port).map(|(_, target)| *target);
    let general = service.ports.iter().find(|p| p.service_port == port).map(|p| p.target_port);
    let target = own.filter(|p| *p != 0).or(general).filter(|p| *p != 0);
    target.ok_or_else(|| refuse(format!("{host} has no port {port} here")))
}

/// Reaches the app with the client's address, where a connection may have it; else with the pod's own.
pub async fn dial(worker: &Worker, pod: &Pod, client: SocketAddr, app: SocketAddr) -> Result<TcpStream, Failure> {
    let tcp = &worker.shared.tcp;
    let dialled = if !replies_come_back(client.ip(), app.ip()) {
        tcp.dial(&pod.netns, !pod.by_ebpf, app).await
    } else {
        let maps = worker.shared.maps.load();
        let pass = maps.as_ref().filter(|_| pod.by_ebpf).map(|m| m.pass.clone());
        tcp.dial_app(&pod.netns, pass.as_ref(), client, app).await
    };
    dialled.map_err(|e| worker.shared.overload.dial_failure(&e, &format!("dialling the app at {app}")))
}

/// Whether the app's replies to this client can be led to us: not if it is the pod itself, nobody in particular, of
/// the other family, or on a link, to which the kernel sends replies whatever its routes say.
fn replies_come_back(client: IpAddr, app: IpAddr) -> bool {
    let is_on_link = matches!(client, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let is_somebody = !client.is_unspecified() && !client.is_multicast();
    client != app && is_somebody && client.is_ipv4() == app.is_ipv4() && !is_on_link
}

fn describe(tunnel: &Tunnel, request: &Request, flow: &mut Flow) {
    let mesh = tunnel.worker.shared.mesh.load();
    let address = NetworkAddress { network: tunnel.own.place.network.clone(), address: tunnel.client.ip() };
    // A record counts only if it fits the identity that was proved.
    let workload = mesh.workload_at(&address).filter(|w| w.identity() == tunnel.identity).cloned();
    let claims = workload.is_none().then(|| Box::new(claims(&Baggage::read(&request.headers))));
    flow.source = Peer { workload, claims, identity: Some(tunnel.identity.clone()) };
    flow.destination = Peer::of(Some(tunnel.own.clone()), Some(tunnel.own.identity()));
    let (_, host) = hbone::read_forwarded(&request.headers);
    flow.service = service_of(&mesh, &tunnel.own, host);
}

/// The service behind which a pod was addressed: the named one if the pod backs it, else one that it backs.
pub fn service_of(mesh: &Snapshot, own: &Workload, host: Option<&str>) -> Option<Arc<Service>> {
    let backed = own.services.iter().filter_map(|s| mesh.service(&s.service));
    let named = host.and_then(|host| backed.clone().find(|s| *s.hostname == *host));
    named.or_else(|| backed.clone().next()).cloned()
}

fn claims(baggage: &Baggage) -> PeerClaims {
    let text = |value: &Option<String>| PeerClaims::value(value.as_deref().unwrap_or_default());
    PeerClaims {
        cluster: text(&baggage.cluster),
        namespace: text(&baggage.namespace),
        workload: text(&baggage.workload),
        canonical_service: text(&baggage.service),
        canonical_revision: text(&baggage.revision),
        region: text(&baggage.region),
        zone: text(&baggage.zone),
    }
}

/// Ports that lead to the proxy itself.
pub const ILLEGAL_PORTS: [u16; 3] = [ebpf::OUTBOUND_PORT, ebpf::PLAINTEXT_PORT, ebpf::HBONE_PORT];

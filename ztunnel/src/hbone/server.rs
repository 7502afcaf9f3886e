//! The receiving end of tunnels: TLS as the pod whose listener accepted, HTTP/2, and the CONNECT requests that come.

use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::SystemTime;

use h2::Reason;
use http::{HeaderMap, HeaderValue, StatusCode};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client::TunnelError;
use super::connection::Role;
use super::driver::{Ended, Load, StreamCount, Watch, Wire};
use super::fields::{Request, Response};
use super::headers::REASON;
use super::held::HeldTls;
use super::settings::Settings;
use super::state::Broken;
use super::stream::Stream;
use super::tls::{TlsError, TlsSocket};
use super::tunnels::{Proof, Tunnels};
use crate::identity::{Certificate, Identity, PeerRole, peer_identity};

/// A tunnel that a peer opened to one of our pods.
pub struct Accepted {
    wire: Rc<Wire>,
    watch: Watch,
    peer: Identity,
}

/// A CONNECT that waits for its answer.
pub struct Incoming {
    request: Request,
    stream: Stream,
    count: StreamCount,
}

/// Ready when the peer no longer wants an answer: it has reset the stream, or the tunnel has ended.
pub struct Abandoned<'a>(&'a Stream);

/// Why a CONNECT could not be answered any more.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    #[error("the tunnel ended: {0}")]
    Tunnel(Ended),
    #[error("the peer left: {0}")]
    Stream(#[from] Broken),
}

/// A CONNECT that was answered with 200.
pub struct Established {
    pub stream: Stream,
    pub count: StreamCount,
}

impl Accepted {
    pub async fn handshake(
        socket: TcpStream,
        certificate: &Certificate,
        settings: &Settings,
        tunnels: &Tunnels,
    ) -> Result<Self, TunnelError> {
        let limit = settings.handshake_timeout;
        let generation = tunnels.generation();
        let both = async {
            let socket = TlsSocket::accept(socket, certificate.server_config()).await?;
            let peer = peer_identity(socket.peer_certificates()).map_err(TlsError::Peer)?;
            let peer = certificate.trust().canonical(&peer);
            let tls = HeldTls::new(socket);
            let load = Load::new(Some(Proof::new(certificate, PeerRole::Client, &tls)));
            tunnels.add(&load, generation);
            let wire = Wire::new(tls, Role::Server, load, settings);
            let mut watch = Watch::new(settings);
            // Whoever speaks TLS and says nothing more has no tunnel.
            poll_fn(|cx| match wire.poll_turn(cx, &mut watch) {
                Poll::Ready(ended) => Poll::Ready(Err(TunnelError::H2(ended.to_string()))),
                Poll::Pending if wire.connection.borrow().is_greeted() => Poll::Ready(Ok(())),
                Poll::Pending => Poll::Pending,
            })
            .await?;
            Ok(Self { wire, watch, peer })
        };
        timeout(limit, both).await.map_err(|_| TunnelError::Timeout(limit))?
    }

    /// Who the peer is, as policies see it. Its chain was verified.
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// The next CONNECT; nothing once the tunnel has ended in order. Must be polled all the time: it drives the
    /// tunnel.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Incoming, Ended>>> {
        let Self { wire, watch, .. } = self;
        if wire.load.take_draining() {
            wire.connection.borrow_mut().leave();
        }
        if let Some(incoming) = next(wire) {
            return Poll::Ready(Some(Ok(incoming)));
        }
        let turn = wire.poll_turn(cx, watch);
        if let Poll::Pending = turn
            && let Some(incoming) = next(wire)
        {
            return Poll::Ready(Some(Ok(incoming)));
        }
        // Requests that came with the end have nobody to answer them.
        let ended = ready!(turn);
        wire.connection.borrow_mut().end(&ended.to_string());
        wire.load.end(ended.clone());
        Poll::Ready((ended != Ended::Closed).then_some(Err(ended)))
    }

    /// Tells the peer to open no more streams here (GOAWAY); those that run finish.
    pub fn drain(&mut self) {
        self.wire.connection.borrow_mut().leave();
        self.wire.load.wake();
    }
}

impl Drop for Accepted {
    fn drop(&mut self) {
        self.wire.connection.borrow_mut().end("the tunnel was closed");
    }
}

/// The next request on a tunnel that takes requests.
fn next(wire: &Rc<Wire>) -> Option<Incoming> {
    loop {
        let mut connection = wire.connection.borrow_mut();
        let (id, request, state) = connection.next_request()?;
        if wire.load.is_open(SystemTime::now()) {
            return Some(Incoming { request, stream: Stream::new(wire, id, state), count: wire.load.count() });
        }
        // The peer may try it on another tunnel: nothing of it has been taken.
        connection.reset(id, Reason::REFUSED_STREAM);
        wire.load.wake();
    }
}

impl Incoming {
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The request, and what tells that its answer has become pointless.
    pub fn watched(&self) -> (&Request, Abandoned<'_>) {
        (&self.request, Abandoned(&self.stream))
    }

    /// The app is reached: from now on bytes flow.
    pub fn accept(self, baggage: Option<HeaderValue>) -> Result<Established, AcceptError> {
        let Self { stream, count, .. } = self;
        if let Some(ended) = count.tunnel_ended() {
            return Err(AcceptError::Tunnel(ended));
        }
        let mut headers = HeaderMap::new();
        if let Some(baggage) = baggage {
            headers.insert(super::headers::BAGGAGE, baggage);
        }
        stream.answer(&Response { status: StatusCode::OK, headers }, false)?;
        Ok(Established { stream, count })
    }

    /// Says no, with the reason in a header of ours that other peers ignore.
    pub fn refuse(self, status: StatusCode, reason: &str) {
        let mut headers = HeaderMap::new();
        headers.insert(REASON, super::headers::reason(reason));
        // A peer that has gone needs no answer.
        let _ = self.stream.answer(&Response { status, headers }, true);
    }
}

impl Future for Abandoned<'_> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll_broken(cx).map(|_| ())
    }
}

//! The receiving end of tunnels: TLS as the pod whose listener accepted, HTTP/2, and the CONNECT requests that come.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::SystemTime;

use bytes::Bytes;
use h2::server::{Connection, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::{HeaderValue, Request, Response, StatusCode};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client::TunnelError;
use super::driver::{Ended, Load, StreamCount, Watch, poll_turn};
use super::headers::REASON;
use super::held::HeldTls;
use super::settings::Settings;
use super::tls::{TlsError, TlsSocket};
use super::tunnels::{Proof, Tunnels};
use crate::identity::{Certificate, Identity, PeerRole, peer_identity};

/// A tunnel that a peer opened to one of our pods.
pub struct Accepted {
    connection: Connection<HeldTls, Bytes>,
    tls: HeldTls,
    load: Rc<Load>,
    watch: Watch,
    peer: Identity,
}

/// A CONNECT that waits for its answer.
pub struct Incoming {
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    count: StreamCount,
}

/// Ready when the peer no longer wants an answer: it has reset the stream, or the tunnel has ended.
pub struct Abandoned<'a>(&'a mut SendResponse<Bytes>);

/// Why a CONNECT could not be answered any more.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    #[error("the tunnel ended: {0}")]
    Tunnel(Ended),
    #[error("the peer left: {0}")]
    Stream(#[from] h2::Error),
}

/// A CONNECT that was answered with 200.
pub struct Established {
    pub send: SendStream<Bytes>,
    pub recv: RecvStream,
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
            let mut connection =
                settings.server().handshake(tls.clone()).await.map_err(|e| TunnelError::H2(e.to_string()))?;
            let watch = Watch::new(connection.ping_pong(), settings);
            let load = Load::new(Some(Proof::new(certificate, PeerRole::Client, &tls)));
            tunnels.add(&load, generation);
            Ok(Self { connection, tls, load, watch, peer })
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
        let Self { connection, tls, load, watch, .. } = self;
        loop {
            if load.take_draining() {
                connection.graceful_shutdown();
            }
            let ended = match std::task::ready!(poll_turn(cx, tls, watch, load, |cx| connection.poll_accept(cx))) {
                Ok(Some(Ok((request, mut respond)))) => {
                    if load.is_open(SystemTime::now()) {
                        return Poll::Ready(Some(Ok(Incoming { request, respond, count: load.count() })));
                    }
                    // The peer may try it on another tunnel: nothing of it has been taken.
                    respond.send_reset(Reason::REFUSED_STREAM);
                    continue;
                }
                Ok(Some(Err(error))) => match tls.get().alert() {
                    Some(alert) => Ended::Alert(alert),
                    None => Ended::Failed(error.to_string()),
                },
                Ok(None) => return Poll::Ready(None),
                Err(ended) => ended,
            };
            load.end(ended.clone());
            return Poll::Ready(Some(Err(ended)));
        }
    }

    /// Tells the peer to open no more streams here (GOAWAY); those that run finish.
    pub fn drain(&mut self) {
        self.connection.graceful_shutdown();
    }
}

impl Incoming {
    pub fn request(&self) -> &Request<RecvStream> {
        &self.request
    }

    /// The request, and what tells that its answer has become pointless.
    pub fn watched(&mut self) -> (&Request<RecvStream>, Abandoned<'_>) {
        (&self.request, Abandoned(&mut self.respond))
    }

    /// The app is reached: from now on bytes flow.
    pub fn accept(self, baggage: Option<HeaderValue>) -> Result<Established, AcceptError> {
        let Self { request, mut respond, count } = self;
        if let Some(ended) = count.tunnel_ended() {
            return Err(AcceptError::Tunnel(ended));
        }
        let mut response = Response::new(());
        if let Some(baggage) = baggage {
            response.headers_mut().insert(super::headers::BAGGAGE, baggage);
        }
        let send = respond.send_response(response, false)?;
        Ok(Established { send, recv: request.into_body(), count })
    }

    /// Says no, with the reason in a header of ours that other peers ignore.
    pub fn refuse(mut self, status: StatusCode, reason: &str) {
        let mut response = Response::new(());
        *response.status_mut() = status;
        response.headers_mut().insert(REASON, super::headers::reason(reason));
        // A peer that has gone needs no answer.
        let _ = self.respond.send_response(response, true);
    }
}

impl Future for Abandoned<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.0.poll_reset(cx).map(|_| ())
    }
}

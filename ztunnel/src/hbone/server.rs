//! The receiving end of tunnels: TLS as the pod whose listener accepted, HTTP/2, and the CONNECT requests that come.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::server::{Connection, SendResponse};
use h2::{RecvStream, SendStream};
use http::{HeaderValue, Request, Response, StatusCode};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client::TunnelError;
use super::driver::{Ended, Load, StreamCount, Watch, poll_turn};
use super::headers::REASON;
use super::held::HeldTls;
use super::settings::Settings;
use super::tls::TlsSocket;

/// A tunnel that a peer opened to one of our pods.
pub struct Accepted {
    connection: Connection<HeldTls, Bytes>,
    tls: HeldTls,
    load: Rc<Load>,
    watch: Watch,
    peer: Vec<CertificateDer<'static>>,
}

/// A CONNECT that waits for its answer.
pub struct Incoming {
    request: Request<RecvStream>,
    respond: SendResponse<Bytes>,
    count: StreamCount,
}

/// Ready when the peer no longer wants an answer: it has reset the stream, or the tunnel has ended.
pub struct Abandoned<'a>(&'a mut SendResponse<Bytes>);

/// A CONNECT that was answered with 200.
pub struct Established {
    pub send: SendStream<Bytes>,
    pub recv: RecvStream,
    pub count: StreamCount,
}

impl Accepted {
    pub async fn handshake(
        socket: TcpStream,
        config: Arc<ServerConfig>,
        settings: &Settings,
    ) -> Result<Self, TunnelError> {
        let limit = settings.handshake_timeout;
        let both = async {
            let socket = TlsSocket::accept(socket, config).await?;
            let peer = socket.peer_certificates().to_vec();
            let tls = HeldTls::new(socket);
            let mut connection =
                settings.server().handshake(tls.clone()).await.map_err(|e| TunnelError::H2(e.to_string()))?;
            let watch = Watch::new(connection.ping_pong(), settings);
            Ok(Self { connection, tls, load: Load::new(), watch, peer })
        };
        timeout(limit, both).await.map_err(|_| TunnelError::Timeout(limit))?
    }

    /// The peer's certificate chain, leaf first; verified by the configuration's verifier.
    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        &self.peer
    }

    /// The next CONNECT; nothing once the tunnel has ended in order. Must be polled all the time: it drives the
    /// tunnel.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Incoming, Ended>>> {
        let Self { connection, tls, load, watch, .. } = self;
        let next = match poll_turn(cx, tls, watch, load, |cx| connection.poll_accept(cx)) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(next) => next,
        };
        Poll::Ready(match next {
            Ok(Some(Ok((request, respond)))) => Some(Ok(Incoming { request, respond, count: load.count() })),
            Ok(Some(Err(error))) => Some(Err(Ended::Failed(error.to_string()))),
            Ok(None) => None,
            Err(ended) => Some(Err(ended)),
        })
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
    pub fn accept(self, baggage: Option<HeaderValue>) -> Result<Established, h2::Error> {
        let Self { request, mut respond, count } = self;
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

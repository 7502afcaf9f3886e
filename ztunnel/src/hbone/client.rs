//! A tunnel to a peer, and streams on it.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::{Instant, SystemTime};

use bytes::Bytes;
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use http::{HeaderMap, Request, StatusCode};
use rustls::AlertDescription;
use tokio::time::timeout;

use super::driver::{Ended, Load, StreamCount, Watch, poll_turn};
use super::headers::read_reason;
use super::held::HeldTls;
use super::pool::Dialled;
use super::settings::Settings;
use super::tls::{TlsError, TlsSocket};
use super::tunnels::{Proof, Tunnels};
use crate::identity::{Identity, PeerRole};

/// Why a tunnel could not be made.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    #[error("TLS handshake: {0}")]
    Tls(#[from] TlsError),
    #[error("HTTP/2 handshake: {0}")]
    H2(String),
    #[error("TLS and HTTP/2 handshake: no answer in {0:?}")]
    Timeout(std::time::Duration),
}

/// Why a stream could not be opened on a tunnel.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StreamError {
    /// The peer did not begin with it: another tunnel may be tried.
    #[error("the tunnel ended before the stream was taken: {0}")]
    NotStarted(String),
    #[error("the peer refused with status {status}{}", .reason.as_deref().map(|r| format!(": {r}")).unwrap_or_default())]
    Refused { status: StatusCode, reason: Option<String> },
    #[error("the peer reset the stream: {0}")]
    Reset(String),
    /// The peer did not take our certificate: another tunnel would not do better.
    #[error("the peer ended TLS with alert {0:?}")]
    Alert(AlertDescription),
    #[error("no answer to CONNECT in {0:?}")]
    Timeout(std::time::Duration),
}

/// A tunnel: one HTTP/2 connection over mutual TLS.
pub(super) struct Tunnel {
    requests: SendRequest<Bytes>,
    load: Rc<Load>,
}

/// An accepted CONNECT of ours: the app's bytes go through it.
pub struct Stream {
    pub send: SendStream<Bytes>,
    pub recv: RecvStream,
    /// Of the answer.
    pub headers: HeaderMap,
    pub count: StreamCount,
}

impl Tunnel {
    /// Speaks TLS and HTTP/2 on a connected socket. The tunnel's driver runs on this thread until the tunnel ends.
    pub async fn open(
        dialled: Dialled,
        expected: &[Identity],
        settings: &Settings,
        tunnels: &Tunnels,
    ) -> Result<Self, TunnelError> {
        let limit = settings.handshake_timeout;
        let opened = timeout(limit, Self::handshake(dialled, expected, settings, tunnels));
        opened.await.map_err(|_| TunnelError::Timeout(limit))?
    }

    async fn handshake(
        dialled: Dialled,
        expected: &[Identity],
        settings: &Settings,
        tunnels: &Tunnels,
    ) -> Result<Self, TunnelError> {
        let Dialled { socket, certificate } = dialled;
        let generation = tunnels.generation();
        let tls = HeldTls::new(TlsSocket::connect(socket, certificate.client_config(expected)).await?);
        let load = Load::new(Some(Proof::new(&certificate, PeerRole::Server, &tls)));
        tunnels.add(&load, generation);
        let (requests, mut connection) =
            settings.client().handshake::<_, Bytes>(tls.clone()).await.map_err(|e| TunnelError::H2(e.to_string()))?;
        let mut watch = Watch::new(connection.ping_pong(), settings);
        let driven = load.clone();
        tokio::task::spawn_local(async move {
            let end = std::future::poll_fn(|cx| {
                poll_turn(cx, &tls, &mut watch, &driven, |cx| Pin::new(&mut connection).poll(cx))
            })
            .await;
            let alert = tls.get().alert();
            driven.end(match (end, alert) {
                (Ok(Ok(())), _) => Ended::Closed,
                (Ok(Err(_)) | Err(Ended::Failed(_)), Some(alert)) => Ended::Alert(alert),
                (Ok(Err(error)), None) => Ended::Failed(error.to_string()),
                (Err(ended), _) => ended,
            });
        });
        Ok(Self { requests, load })
    }

    /// Streams that can be opened before another tunnel is due: none if this one rests on certificates that have been
    /// renewed by now.
    pub fn room(&self, settings: &Settings, now: SystemTime) -> u32 {
        let limit = self.requests.current_max_send_streams().min(settings.streams_per_tunnel as usize) as u32;
        if self.load.is_fresh(now) { limit.saturating_sub(self.load.streams()) } else { 0 }
    }

    /// Whether it is of no more use.
    pub fn is_over(&self, now: SystemTime) -> bool {
        self.load.is_ended() || (self.load.streams() == 0 && !self.load.is_fresh(now))
    }

    /// Since when it has had no stream; nothing while it has one.
    pub fn idle_since(&self) -> Option<Instant> {
        (self.load.streams() == 0).then(|| self.load.idle_since())
    }

    /// Takes a place on the tunnel; the future opens the stream.
    pub fn stream(
        &self,
        request: Request<()>,
        settings: &Settings,
    ) -> impl Future<Output = Result<Stream, StreamError>> + use<> {
        let requests = self.requests.clone();
        let count = self.load.count();
        let load = self.load.clone();
        let limit = settings.response_timeout;
        async move {
            match timeout(limit, connect(requests, request, count)).await {
                Ok(Err(error @ StreamError::NotStarted(_))) => {
                    // The peer takes no more on it, as after a GOAWAY; what runs may finish.
                    load.retire();
                    Err(error)
                }
                Ok(result) => result,
                Err(_) => Err(StreamError::Timeout(limit)),
            }
        }
    }
}

async fn connect(
    requests: SendRequest<Bytes>,
    request: Request<()>,
    count: StreamCount,
) -> Result<Stream, StreamError> {
    let not_started = |e: h2::Error| match count.tunnel_ended() {
        Some(Ended::Alert(alert)) => StreamError::Alert(alert),
        Some(ended) => StreamError::NotStarted(ended.to_string()),
        None => StreamError::NotStarted(e.to_string()),
    };
    let mut requests = requests.ready().await.map_err(not_started)?;
    let (response, send) = requests.send_request(request, false).map_err(not_started)?;
    drop(requests);
    let response = response.await.map_err(|e| unanswered(e, &count))?;
    let (head, recv) = response.into_parts();
    if head.status != StatusCode::OK {
        return Err(StreamError::Refused { status: head.status, reason: read_reason(&head.headers) });
    }
    Ok(Stream { send, recv, headers: head.headers, count })
}

/// A peer that says REFUSED_STREAM, or GOAWAY with an earlier last stream, has not begun (RFC 9113 §8.7). Nor has
/// anything of the app's been sent before the answer, so a tunnel that broke is no reason either to give up.
fn unanswered(error: h2::Error, count: &StreamCount) -> StreamError {
    if let Some(Ended::Alert(alert)) = count.tunnel_ended() {
        return StreamError::Alert(alert);
    }
    let not_started = error.reason() == Some(h2::Reason::REFUSED_STREAM)
        || error.is_go_away()
        || error.is_io()
        || count.tunnel_ended().is_some();
    if not_started { StreamError::NotStarted(error.to_string()) } else { StreamError::Reset(error.to_string()) }
}

//! A tunnel to a peer, and streams on it.

use std::future::{Future, poll_fn};
use std::rc::{Rc, Weak};
use std::time::{Instant, SystemTime};

use h2::Reason;
use http::{HeaderMap, StatusCode};
use rustls::AlertDescription;
use tokio::time::timeout;

use super::connection::Role;
use super::driver::{Ended, Load, StreamCount, Watch, Wire};
use super::fields::Request;
use super::headers::read_reason;
use super::held::HeldTls;
use super::pool::Dialled;
use super::settings::Settings;
use super::state::Broken;
use super::stream::Stream;
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
    wire: Weak<Wire>,
    load: Rc<Load>,
}

/// A CONNECT of ours that was taken: the app's bytes go through its stream.
pub struct Opened {
    pub stream: Stream,
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
        let wire = Wire::new(tls, Role::Client, load.clone(), settings);
        let tunnel = Self { wire: Rc::downgrade(&wire), load };
        let mut watch = Watch::new(settings);
        tokio::task::spawn_local(async move {
            let ended = poll_fn(|cx| wire.poll_turn(cx, &mut watch)).await;
            wire.connection.borrow_mut().end(&ended.to_string());
            wire.load.end(ended);
        });
        Ok(tunnel)
    }

    /// Streams that can be opened before another tunnel is due: none if this one rests on certificates that have been
    /// renewed by now.
    pub fn room(&self, settings: &Settings, now: SystemTime) -> u32 {
        let Some(wire) = self.wire.upgrade() else { return 0 };
        let connection = wire.connection.borrow();
        let limit = connection.peer_streams().unwrap_or(u32::MAX).min(settings.streams_per_tunnel);
        if self.load.is_fresh(now) && !connection.peer_left() { limit.saturating_sub(self.load.streams()) } else { 0 }
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
        request: Request,
        settings: &Settings,
    ) -> impl Future<Output = Result<Opened, StreamError>> + use<> {
        let count = self.load.count();
        let load = self.load.clone();
        let wire = self.wire.clone();
        let limit = settings.response_timeout;
        async move {
            match timeout(limit, connect(wire, &request, count)).await {
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

impl Drop for Tunnel {
    fn drop(&mut self) {
        // Nobody opens any more streams: it ends with those that run.
        if let Some(wire) = self.wire.upgrade() {
            wire.connection.borrow_mut().leave();
            self.load.wake();
        }
    }
}

async fn connect(wire: Weak<Wire>, request: &Request, count: StreamCount) -> Result<Opened, StreamError> {
    let stream = open(wire, request).ok_or_else(|| match count.tunnel_ended() {
        Some(Ended::Alert(alert)) => StreamError::Alert(alert),
        Some(ended) => StreamError::NotStarted(ended.to_string()),
        None => StreamError::NotStarted("the peer takes no more streams on it".into()),
    })?;
    let answer = poll_fn(|cx| stream.poll_answer(cx)).await.map_err(|broken| unanswered(&broken, &count))?;
    if answer.status != StatusCode::OK {
        return Err(StreamError::Refused { status: answer.status, reason: read_reason(&answer.headers) });
    }
    Ok(Opened { stream, headers: answer.headers, count })
}

fn open(wire: Weak<Wire>, request: &Request) -> Option<Stream> {
    let wire = wire.upgrade()?;
    let (id, state) = wire.connection.borrow_mut().open(request)?;
    wire.said();
    Some(Stream::new(&wire, id, state))
}

/// A peer that says REFUSED_STREAM, or GOAWAY with an earlier last stream, has not begun (RFC 9113 §8.7). Nor has
/// anything of the app's been sent before the answer, so a tunnel that broke is no reason either to give up.
fn unanswered(broken: &Broken, count: &StreamCount) -> StreamError {
    match (count.tunnel_ended(), broken) {
        (Some(Ended::Alert(alert)), _) => StreamError::Alert(alert),
        (Some(_), _) | (None, Broken::NotTaken | Broken::Tunnel(_) | Broken::Reset(Reason::REFUSED_STREAM)) => {
            StreamError::NotStarted(broken.to_string())
        }
        (None, Broken::Reset(reason) | Broken::Fault(reason)) => StreamError::Reset(format!("{reason:?}")),
    }
}

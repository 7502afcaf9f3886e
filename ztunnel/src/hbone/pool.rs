//! The tunnels of one worker thread, by source pod and destination workload.
//!
//! A tunnel is never used for another identity or another workload than it was made for, also when an address has
//! changed hands: both stand in the key.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use http::Request;
use tokio::sync::Notify;

use super::client::{Stream, StreamError, Tunnel, TunnelError};
use super::settings::Settings;
use crate::identity::Identity;

/// What a tunnel was made for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PoolKey {
    /// UID of the pod whose traffic it carries, and whose identity it shows.
    pub pod: Arc<str>,
    /// UID of the workload at the other end.
    pub workload: Arc<str>,
    pub address: SocketAddr,
    /// Who the other end must be.
    pub expected: Vec<Identity>,
}

/// A thread's tunnels.
pub struct Pool {
    settings: Settings,
    peers: RefCell<HashMap<PoolKey, Rc<Peer>>>,
}

#[derive(Default)]
struct Peer {
    tunnels: RefCell<Vec<Tunnel>>,
    /// Only one tunnel to a peer is being made at a time; the others wait for it.
    connecting: std::cell::Cell<bool>,
    connected: Notify,
}

/// Why no stream was opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError<E> {
    /// The socket could not be connected, or there is no certificate.
    #[error(transparent)]
    Dial(E),
    #[error(transparent)]
    Tunnel(TunnelError),
    #[error(transparent)]
    Stream(StreamError),
}

/// What is needed to make a tunnel.
pub struct Dialled {
    pub socket: tokio::net::TcpStream,
    pub config: Arc<rustls::ClientConfig>,
}

impl Pool {
    pub fn new(settings: Settings) -> Self {
        Self { settings, peers: RefCell::default() }
    }

    /// Opens a stream, on a tunnel that is there or on a new one for which `dial` gives the socket. A stream that the
    /// peer did not begin with is tried again on another tunnel.
    pub async fn stream<E, F>(
        &self,
        key: &PoolKey,
        request: impl Fn() -> Request<()>,
        dial: impl Fn() -> F,
    ) -> Result<Stream, OpenError<E>>
    where
        F: Future<Output = Result<Dialled, E>>,
    {
        let peer = self.peers.borrow_mut().entry(key.clone()).or_default().clone();
        let mut tries = 0;
        loop {
            let stream = peer.place(request(), &self.settings);
            let Some(stream) = stream else {
                if peer.connecting.replace(true) {
                    peer.connected.notified().await;
                    continue;
                }
                let connecting = Connecting(&peer);
                let Dialled { socket, config } = dial().await.map_err(OpenError::Dial)?;
                let tunnel = Tunnel::open(socket, config, &self.settings).await.map_err(OpenError::Tunnel)?;
                peer.tunnels.borrow_mut().push(tunnel);
                drop(connecting);
                continue;
            };
            tries += 1;
            match stream.await {
                Ok(stream) => return Ok(stream),
                Err(StreamError::NotStarted(_)) if tries < TRIES => continue,
                Err(error) => return Err(OpenError::Stream(error)),
            }
        }
    }

    /// Closes tunnels that have had no stream for long. Running streams of a peer that `keep` denies finish, but it gets no new ones.
    pub fn sweep(&self, keep: impl Fn(&PoolKey) -> bool) {
        let now = Instant::now();
        self.peers.borrow_mut().retain(|key, peer| {
            let mut tunnels = peer.tunnels.borrow_mut();
            if !keep(key) {
                tunnels.clear();
            }
            tunnels.retain(|t| {
                let idle = t.idle_since().map(|since| now.saturating_duration_since(since)).unwrap_or_default();
                !t.is_ended() && idle < self.settings.idle_timeout
            });
            !tunnels.is_empty() || peer.connecting.get() || Rc::strong_count(peer) > 1
        });
    }

    /// Closes the tunnels of a pod: running streams finish.
    pub fn forget_pod(&self, pod: &str) {
        self.peers.borrow_mut().retain(|key, _| &*key.pod != pod);
    }

    /// Tunnels that are open.
    pub fn len(&self) -> usize {
        self.peers.borrow().values().map(|p| p.tunnels.borrow().len()).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Peer {
    /// A place on the tunnel with the most room.
    fn place(
        &self,
        request: Request<()>,
        settings: &Settings,
    ) -> Option<impl Future<Output = Result<Stream, StreamError>> + use<>> {
        let mut tunnels = self.tunnels.borrow_mut();
        tunnels.retain(|t| !t.is_ended());
        tunnels
            .iter()
            .map(|t| (t.room(settings), t))
            .filter(|(room, _)| *room > 0)
            .max_by_key(|(room, _)| *room)
            .map(|(_, t)| t.stream(request, settings))
    }
}

/// While it lives, others wait; at its end, also by cancellation or failure, one or all of them go on.
struct Connecting<'a>(&'a Peer);

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        self.0.connecting.set(false);
        self.0.connected.notify_waiters();
    }
}

/// Tunnels that are tried for one stream.
const TRIES: u32 = 3;

//! The port that nodes connect to: TLS with a certificate of our own authority, renewed by itself.
//!
//! Must never let strangers pile up, in a handshake or behind it: until a valid token has come on a connection, it is
//! bounded in time, and one address has few of them.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::Connected;
use ztunnel::identity::ALPN_H2;
use ztunnel::telemetry::log::Hush;

use crate::ca::{Ca, CaError};
use crate::metrics::{Metrics, Open};

/// The certificate that is shown to nodes.
#[derive(Debug)]
pub struct Serving {
    ca: Arc<Ca>,
    names: Vec<String>,
    current: ArcSwap<CertifiedKey>,
    /// When it is half over.
    renew_at: Mutex<Instant>,
}

/// A TLS connection as tonic wants it.
pub struct Secured {
    stream: TlsStream<TcpStream>,
    peer: Peer,
    /// Until its peer is known as a node's proxy.
    stranger: Option<(Stranger, Pin<Box<Sleep>>)>,
    _slot: OwnedSemaphorePermit,
    _open: Open,
}

/// Where a request comes from.
#[derive(Debug, Clone)]
pub struct Peer {
    address: SocketAddr,
    rank: Arc<AtomicU8>,
}

/// What the peer of a connection has shown, each above the one before; 0 is nothing yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
enum Rank {
    /// A token of somebody of the cluster: the connection may stay, and counts for its address.
    Caller = 1,
    /// A token of a node's proxy.
    Proxy = 2,
}

/// Connections by address that are not of node proxies.
#[derive(Debug, Default)]
struct Strangers(Mutex<HashMap<IpAddr, usize>>);

/// One of them.
struct Stranger {
    all: Arc<Strangers>,
    address: IpAddr,
}

impl Peer {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, rank: Arc::default() }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// It has shown a valid token, of a node's proxy or of somebody else.
    pub fn is_known(&self, is_proxy: bool) {
        let rank = if is_proxy { Rank::Proxy } else { Rank::Caller };
        self.rank.fetch_max(rank as u8, Ordering::Relaxed);
    }

    fn has(&self, rank: Rank) -> bool {
        self.rank.load(Ordering::Relaxed) >= rank as u8
    }
}

impl Strangers {
    fn add(self: &Arc<Self>, address: IpAddr) -> Option<Stranger> {
        let mut by_address = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = by_address.entry(address).or_default();
        if *count >= STRANGERS_OF_ADDRESS {
            return None;
        }
        *count += 1;
        Some(Stranger { all: self.clone(), address })
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let mut by_address = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = by_address.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                by_address.remove(&self.address);
            }
        }
    }
}

impl Serving {
    pub fn new(ca: Arc<Ca>, names: Vec<String>) -> Result<Arc<Self>, CaError> {
        let (first, renew_at) = certified(&ca, &names)?;
        Ok(Arc::new(Self { ca, names, current: ArcSwap::new(first), renew_at: Mutex::new(renew_at) }))
    }

    /// Puts a fresh certificate in place; connections keep what they have. Reads and writes files.
    pub fn renew(&self) -> Result<(), CaError> {
        let (fresh, renew_at) = certified(&self.ca, &self.names)?;
        self.current.store(fresh);
        *self.renew_at.lock().unwrap_or_else(PoisonError::into_inner) = renew_at;
        Ok(())
    }

    pub fn is_due(&self) -> bool {
        Instant::now() >= *self.renew_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// TLS 1.2 and 1.3, HTTP/2, no client certificate.
    pub fn config(self: &Arc<Self>) -> Result<Arc<ServerConfig>, rustls::Error> {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Serving {
    /// One certificate, whatever name is asked for: it holds all of ours.
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.load_full())
    }
}

/// A fresh certificate, and when it is half over.
fn certified(ca: &Ca, names: &[String]) -> Result<(Arc<CertifiedKey>, Instant), CaError> {
    let (chain, key, end) = ca.serving(names, SERVING_LIFETIME)?;
    let left = end.duration_since(SystemTime::now()).unwrap_or_default();
    Ok((Arc::new(CertifiedKey::new(chain, Arc::new(key))), Instant::now() + left / 2))
}

/// Listens. `[::]` means IPv4 too, and falls back to `0.0.0.0` where there is no IPv6.
pub fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let bind = |address: SocketAddr| {
        let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    match bind(address) {
        Err(e) if address.ip().is_unspecified() && address.is_ipv6() && is_without_ipv6(&e) => {
            bind((Ipv4Addr::UNSPECIFIED, address.port()).into())
        }
        other => other,
    }
}

/// Accepts for as long as somebody takes what is accepted.
pub async fn accept(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    metrics: Arc<Metrics>,
    ready: mpsc::Sender<io::Result<Secured>>,
) {
    let acceptor = TlsAcceptor::from(config);
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let strangers = Arc::new(Strangers::default());
    loop {
        // Neither semaphore is ever closed. Who finds them empty waits in the listen queue.
        let Ok(slot) = connections.clone().acquire_owned().await else { return };
        let Ok(handshake) = handshakes.clone().acquire_owned().await else { return };
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = ready.closed() => return,
        };
        let (socket, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Mostly: no descriptors left.
                if let Some(untold) = ACCEPT_HUSH.speak() {
                    tracing::warn!(%error, untold, "cannot accept a connection");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let peer = SocketAddr::new(peer.ip().to_canonical(), peer.port());
        let Some(stranger) = strangers.add(peer.ip()) else {
            metrics.handshake_failed("too_many");
            tracing::debug!(%peer, most = STRANGERS_OF_ADDRESS, "too many connections of one address without a token");
            continue;
        };
        let (acceptor, metrics, ready) = (acceptor.clone(), metrics.clone(), ready.clone());
        tokio::spawn(async move {
            // Without the delay of small packets: a push is small and awaited.
            let _ = socket.set_nodelay(true);
            let done = tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(socket)).await;
            drop(handshake);
            match done {
                Ok(Ok(stream)) => {
                    let _open = metrics.connection();
                    let stranger = Some((stranger, Box::pin(sleep(TOKEN_LIMIT))));
                    let peer = Peer::new(peer);
                    let _ = ready.send(Ok(Secured { stream, peer, stranger, _slot: slot, _open })).await;
                }
                Ok(Err(error)) => {
                    metrics.handshake_failed("tls");
                    tracing::debug!(%peer, %error, "a TLS handshake failed");
                }
                Err(_) => {
                    metrics.handshake_failed("timeout");
                    tracing::debug!(%peer, limit = ?HANDSHAKE_LIMIT, "a TLS handshake took too long");
                }
            }
        });
    }
}

impl Connected for Secured {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Secured {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.peer.has(Rank::Proxy) {
            self.stranger = None;
        } else if !self.peer.has(Rank::Caller)
            && let Some((_, limit)) = &mut self.stranger
            && limit.as_mut().poll(cx).is_ready()
        {
            tracing::debug!(peer = %self.peer.address, limit = ?TOKEN_LIMIT, "no valid token came: disconnected");
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

fn is_without_ipv6(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL].iter().any(|e| error.raw_os_error() == Some(e.raw_os_error()))
}

/// Of the serving certificate, at most; renewed at half of it.
const SERVING_LIFETIME: Duration = Duration::from_secs(24 * 3600);
const BACKLOG: u32 = 1024;
const MAX_HANDSHAKES: usize = 1024;
/// A cluster's nodes and waypoints, some times over.
const MAX_CONNECTIONS: usize = 20_000;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// From the end of the handshake to a valid token.
const TOKEN_LIMIT: Duration = Duration::from_secs(15);
/// A node's proxy has two connections, which do not count once it is known. Many nodes may come from one address, but not
/// all in one moment.
const STRANGERS_OF_ADDRESS: usize = 64;
static ACCEPT_HUSH: Hush = Hush::new(1);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_few_connections_that_are_not_of_node_proxies() {
        let (strangers, address) = (Arc::new(Strangers::default()), IpAddr::from([10, 0, 0, 1]));
        let mut held: Vec<Stranger> = (0..STRANGERS_OF_ADDRESS).map(|_| strangers.add(address).unwrap()).collect();
        assert!(strangers.add(address).is_none() && strangers.add([10, 0, 0, 2].into()).is_some());
        held.pop();
        assert!(strangers.add(address).is_some());
        drop(held);
        assert!(strangers.0.lock().unwrap().is_empty(), "who has left is forgotten");
    }

    #[test]
    fn only_a_node_proxy_counts_no_longer_for_its_address() {
        let peer = Peer::new("10.0.0.1:1".parse().unwrap());
        assert!(!peer.has(Rank::Caller));
        peer.is_known(false);
        assert!(peer.has(Rank::Caller) && !peer.has(Rank::Proxy));
        peer.is_known(true);
        peer.is_known(false);
        assert!(peer.has(Rank::Proxy), "another request of the connection takes nothing back");
    }
}

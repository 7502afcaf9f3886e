//! The agent's side: accepts proxies and carries requests to each of them, one at a time.
//!
//! Must never match an answer with another request than its own, nor let a stopped proxy stop the agent.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::message::{ProtocolError, Request, Response, decode_hello};
use super::transport::{Peer, Seqpacket, SeqpacketListener, TransportError};

/// Settings of the server; the defaults are those of the field.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    pub sockets: Vec<PathBuf>,
    /// How long a new connection may take to say hello.
    pub hello_timeout: Duration,
    /// How long sending a request, and waiting for its answer, may take.
    pub request_timeout: Duration,
    /// Shortest time between two connections that are accepted.
    pub accept_interval: Duration,
}

/// The listening end.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    listeners: Vec<SeqpacketListener>,
    next_id: AtomicU64,
}

/// A connection that has not said hello yet.
#[derive(Debug)]
pub struct Arrival {
    id: SessionId,
    socket: Seqpacket,
    config: ServerConfig,
}

/// Which connection; a later one has a greater number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(u64);

/// A connected proxy. Clones are the same connection; it closes with the last one.
#[derive(Clone, Debug)]
pub struct Session {
    id: SessionId,
    peer: Peer,
    extension: u32,
    requests: mpsc::Sender<Job>,
    closed: watch::Receiver<Option<String>>,
    process: Option<Arc<OwnedFd>>,
}

/// Why a connection did not become a session.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    #[error("the peer's process cannot be told: {0}")]
    Peer(#[source] std::io::Error),
    #[error("process {pid} of user {uid} is not root's", pid = .0.pid, uid = .0.uid)]
    NotRoot(Peer),
    #[error("no hello from the proxy within {0:?}")]
    Timeout(Duration),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
}

/// Why a request has no answer, or a bad one.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum RequestError {
    #[error("the proxy refused: {0}")]
    Refused(String),
    #[error("the proxy did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the connection to the proxy is closed: {0}")]
    Closed(String),
    #[error("the proxy does not speak the extension")]
    NoExtension,
    #[error("the request does not fit into a packet: {0}")]
    TooLong(String),
}

struct Job {
    request: Request,
    answer: oneshot::Sender<Result<Response, RequestError>>,
}

impl ServerConfig {
    pub fn new(sockets: impl IntoIterator<Item = PathBuf>) -> ServerConfig {
        ServerConfig {
            sockets: sockets.into_iter().collect(),
            hello_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(5),
            accept_interval: Duration::from_millis(200),
        }
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Server {
    pub fn bind(config: ServerConfig) -> Result<Server, TransportError> {
        let listeners = config.sockets.iter().map(|path| SeqpacketListener::bind(path)).collect::<Result<_, _>>()?;
        Ok(Server { config, listeners, next_id: AtomicU64::new(1) })
    }

    /// The next connection. Cancel-safe.
    pub async fn accept(&self) -> std::io::Result<Arrival> {
        let accepts = self.listeners.iter().map(|listener| Box::pin(listener.accept()));
        let (socket, _, _) = futures_util::future::select_all(accepts).await;
        let id = SessionId(self.next_id.fetch_add(1, Ordering::Relaxed));
        Ok(Arrival { id, socket: socket?, config: self.config.clone() })
    }

    /// How long to wait before the next [`Server::accept`].
    pub fn accept_interval(&self) -> Duration {
        self.config.accept_interval
    }
}

impl Arrival {
    /// Waits for the proxy's hello.
    pub async fn hello(self) -> Result<Session, HelloError> {
        let peer = self.socket.peer().map_err(HelloError::Peer)?;
        if peer.uid != 0 {
            return Err(HelloError::NotRoot(peer));
        }
        let packet = timeout(self.config.hello_timeout, self.socket.receive())
            .await
            .map_err(|_| HelloError::Timeout(self.config.hello_timeout))??;
        let extension = decode_hello(packet)?;
        let process = self.socket.peer_process().ok().map(Arc::new);
        let (requests, jobs) = mpsc::channel(QUEUE);
        let (closed_tx, closed) = watch::channel(None);
        let connection = Connection { socket: self.socket, wait: self.config.request_timeout, owed: 0 };
        // Ends when the last session handle is gone (the queue closes) or the socket fails.
        tokio::spawn(async move {
            let reason = connection.serve(jobs).await;
            closed_tx.send_replace(Some(reason));
        });
        Ok(Session { id: self.id, peer, extension, requests, closed, process })
    }
}

impl Session {
    pub fn id(&self) -> SessionId {
        self.id
    }

    pub fn peer(&self) -> Peer {
        self.peer
    }

    /// Whether the proxy takes sockets and maps, and gives sockets back.
    pub fn is_extended(&self) -> bool {
        self.extension > 0
    }

    /// A descriptor that is readable once the proxy's process has ended; `None` where the kernel gives none.
    pub fn process(&self) -> Option<&OwnedFd> {
        self.process.as_deref()
    }

    /// Sends a request and waits for its answer, each bounded. The answer to a request that timed out is thrown
    /// away when it comes.
    pub async fn request(&self, request: Request) -> Result<Response, RequestError> {
        if request.is_extension() && !self.is_extended() {
            return Err(RequestError::NoExtension);
        }
        let (answer, answered) = oneshot::channel();
        if self.requests.send(Job { request, answer }).await.is_err() {
            return Err(self.why_closed());
        }
        let response = answered.await.unwrap_or_else(|_| Err(self.why_closed()))?;
        match response.error {
            Some(error) => Err(RequestError::Refused(error)),
            None => Ok(response),
        }
    }

    pub fn is_closed(&self) -> bool {
        self.requests.is_closed()
    }

    /// Ends when the connection has; gives the reason.
    pub async fn closed(&self) -> String {
        let mut closed = self.closed.clone();
        match closed.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or_default(),
            Err(_) => "its task ended".into(),
        }
    }

    fn why_closed(&self) -> RequestError {
        RequestError::Closed(self.closed.borrow().clone().unwrap_or_else(|| "it is closing".into()))
    }
}

/// The task that owns the socket.
struct Connection {
    socket: Seqpacket,
    wait: Duration,
    /// Requests that timed out and whose answers are still to come, before any other.
    owed: u32,
}

impl Connection {
    /// Serves until the connection ends; gives the reason.
    async fn serve(mut self, mut jobs: mpsc::Receiver<Job>) -> String {
        loop {
            let job = tokio::select! {
                job = jobs.recv() => match job {
                    Some(job) => job,
                    None => return "the agent closed it".into(),
                },
                ready = self.socket.readable() => {
                    if let Err(error) = ready {
                        return error.to_string();
                    }
                    // When nothing is asked there is nothing to be heard, but for late answers and the end.
                    match self.late_answer().await {
                        Ok(()) => continue,
                        Err(reason) => return reason,
                    }
                }
            };
            if job.answer.is_closed() {
                continue;
            }
            match self.ask(&job.request).await {
                Ok(result) => {
                    // The caller may have given up meanwhile.
                    let _ = job.answer.send(result);
                }
                Err(reason) => {
                    let _ = job.answer.send(Err(RequestError::Closed(reason.clone())));
                    return reason;
                }
            }
        }
    }

    /// The inner result is the request's, the outer error ends the connection.
    async fn ask(&mut self, request: &Request) -> Result<Result<Response, RequestError>, String> {
        let late = RequestError::Timeout(self.wait);
        let deadline = Instant::now() + self.wait;
        while self.owed > 0 {
            match tokio::time::timeout_at(deadline, self.late_answer()).await {
                Ok(result) => result?,
                Err(_) => return Ok(Err(late)),
            }
        }
        let (bytes, descriptors) = request.encode();
        match timeout(self.wait, self.socket.send(&bytes, &descriptors)).await {
            Ok(Ok(())) => {}
            Ok(Err(error @ TransportError::TooLong(_))) => {
                return Ok(Err(RequestError::TooLong(error.to_string())));
            }
            Ok(Err(error)) => return Err(error.to_string()),
            Err(_) => return Ok(Err(late)),
        }
        match timeout(self.wait, self.socket.receive()).await {
            Ok(Ok(packet)) => Response::decode(packet).map(Ok).map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => {
                self.owed += 1;
                warn!(wait = ?self.wait, "the proxy has not answered a request");
                Ok(Err(late))
            }
        }
    }

    async fn late_answer(&mut self) -> Result<(), String> {
        let packet = self.socket.receive().await.map_err(|error| error.to_string())?;
        if self.owed == 0 {
            return Err("the proxy sent a message that nobody asked for".into());
        }
        Response::decode(packet).map_err(|error| error.to_string())?;
        self.owed -= 1;
        Ok(())
    }
}

/// Requests of different pods that may wait for the connection.
const QUEUE: usize = 64;

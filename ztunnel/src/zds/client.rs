//! The proxy's side: keeps a connection to the agent, and turns its requests into pods that the proxy serves.
//!
//! A lost connection or a broken message never touches running pods: they go on, and the next connection's snapshot
//! says which of them are still wanted.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{debug, info, warn};

use super::message::{CaptureMapFds, EXTENSION, PodInfo, ProtocolError, Request, Response, encode_hello};
use super::transport::{Seqpacket, TransportError};
use crate::capture::listeners::PodListeners;

/// A pod that the proxy is to serve.
#[derive(Debug)]
pub struct AddedPod {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    pub netns: OwnedFd,
    /// The pod's listening sockets; `None` from a plain ZDS agent: the proxy makes its own.
    pub listeners: Option<PodListeners>,
}

/// How a pod leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Removal {
    /// It is gone, or was drained before: its connections are cut.
    Gone,
    /// Its connections may end by themselves, within the proxy's own bound.
    Drain,
}

/// How far a pod's drain is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    /// Connections of the pod that are still open.
    pub open: u32,
    /// The proxy's own model says that peers no longer use HBONE to the pod.
    pub followed: bool,
}

/// What the proxy does with the agent's requests. Every method returns quickly: the agent waits for the answer.
pub trait PodManager: Send + Sync + 'static {
    /// The maps of the agent that loaded the programs. Comes again after each reconnect.
    fn capture_maps(&self, maps: CaptureMapFds) -> Result<(), String>;
    /// Serves a pod. Same uid and same namespace: nothing to do; other namespace: the old one is dropped.
    fn add(&self, pod: AddedPod) -> Result<(), String>;
    fn remove(&self, uid: &str, how: Removal);
    /// Duplicates of a pod's listening sockets, for a restarted agent.
    fn listeners(&self, uid: &str) -> Option<PodListeners>;
    /// The first call starts the drain.
    fn drain(&self, uid: &str) -> DrainState;
    /// The uids of all pods that are served.
    fn pods(&self) -> Vec<String>;
}

/// Settings of the client; the defaults are those of the field.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    pub socket: PathBuf,
    /// First and longest wait before connecting again; it doubles in between.
    pub reconnect: (Duration, Duration),
    /// How often a pod whose start failed is tried again.
    pub retry_pending: Duration,
    /// With no message for this long before the end of the snapshot, the connection is given up.
    pub snapshot_silence: Duration,
}

/// Where the client stands, for readiness.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Status {
    pub connected: bool,
    /// The whole snapshot of the present connection has arrived.
    pub snapshot: bool,
    /// Pods whose start failed and is tried again.
    pub pending: usize,
}

/// The proxy's end of ZDS.
#[derive(Debug)]
pub struct Client {
    config: ClientConfig,
    status: watch::Sender<Status>,
}

impl ClientConfig {
    pub fn new(socket: impl Into<PathBuf>) -> ClientConfig {
        ClientConfig {
            socket: socket.into(),
            reconnect: (Duration::from_millis(10), Duration::from_secs(15)),
            retry_pending: Duration::from_secs(5),
            snapshot_silence: Duration::from_secs(30),
        }
    }
}

impl AddedPod {
    fn try_clone(&self) -> Result<AddedPod, String> {
        let netns = self.netns.try_clone().map_err(|error| format!("cannot keep the pod's namespace: {error}"))?;
        let listeners = match &self.listeners {
            Some(listeners) => Some(listeners.try_clone().map_err(|error| error.to_string())?),
            None => None,
        };
        Ok(AddedPod {
            uid: self.uid.clone(),
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            service_account: self.service_account.clone(),
            netns,
            listeners,
        })
    }
}

impl Client {
    pub fn new(config: ClientConfig) -> Client {
        Client { config, status: watch::Sender::default() }
    }

    /// Where the client stands, now and from now on.
    pub fn status(&self) -> watch::Receiver<Status> {
        self.status.subscribe()
    }

    /// Serves the agent's requests for ever. Dropping the future closes the connection and leaves the pods alone.
    pub async fn run(&self, manager: Arc<impl PodManager>) {
        let mut pods = Pods::new(manager);
        let mut retry = tokio::time::interval(self.config.retry_pending);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut wait = self.config.reconnect.0;
        let mut last_failure = String::new();
        loop {
            let failure = self.session(&mut pods, &mut retry).await;
            let status = self.status.send_replace(Status { pending: pods.pending.len(), ..Status::default() });
            if status.snapshot {
                wait = self.config.reconnect.0;
            }
            // The same failure again and again is one event for the operator.
            let failure = failure.to_string();
            if failure != last_failure || status.connected {
                warn!(socket = %self.config.socket.display(), reason = failure, "no connection to the agent");
            } else {
                debug!(socket = %self.config.socket.display(), reason = failure, "still no connection to the agent");
            }
            last_failure = failure;
            let next = Instant::now() + jittered(wait);
            loop {
                tokio::select! {
                    () = tokio::time::sleep_until(next) => break,
                    _ = retry.tick() => self.retry(&mut pods),
                }
            }
            wait = (wait * 2).min(self.config.reconnect.1);
        }
    }

    /// One connection, to its end.
    async fn session(&self, pods: &mut Pods<impl PodManager>, retry: &mut tokio::time::Interval) -> SessionError {
        let socket = match Seqpacket::connect(&self.config.socket).await {
            Ok(socket) => socket,
            Err(error) => return error.into(),
        };
        if let Err(error) = socket.send(&encode_hello(EXTENSION), &[]).await {
            return error.into();
        }
        pods.begin();
        self.publish(pods, true);
        info!(socket = %self.config.socket.display(), "connected to the agent");
        let mut last_message = Instant::now();
        loop {
            let silence = last_message + self.config.snapshot_silence;
            let packet = tokio::select! {
                packet = socket.receive() => packet,
                _ = retry.tick() => {
                    self.retry(pods);
                    continue;
                }
                () = tokio::time::sleep_until(silence), if !pods.snapshot_done => {
                    return SessionError::SnapshotSilence(self.config.snapshot_silence);
                }
            };
            last_message = Instant::now();
            let request = match packet {
                Ok(packet) => Request::decode(packet),
                Err(error) => return error.into(),
            };
            let outcome = request.and_then(|request| pods.handle(request));
            let (response, broken) = match outcome {
                Ok(response) => (response, None),
                // A request that we do not know, of a newer agent: it learns so, and goes on.
                Err(ProtocolError::Empty) => (Response::failed("unknown request"), None),
                Err(error) => (Response::failed(error.to_string()), Some(error)),
            };
            self.publish(pods, true);
            let (bytes, descriptors) = response.encode();
            let sent = socket.send(&bytes, &descriptors).await;
            if let Some(error) = broken {
                return error.into();
            }
            if let Err(error) = sent {
                return error.into();
            }
        }
    }

    fn retry(&self, pods: &mut Pods<impl PodManager>) {
        if !pods.pending.is_empty() {
            pods.retry_pending();
            let connected = self.status.borrow().connected;
            self.publish(pods, connected);
        }
    }

    fn publish(&self, pods: &Pods<impl PodManager>, connected: bool) {
        let status = Status { connected, snapshot: connected && pods.snapshot_done, pending: pods.pending.len() };
        self.status.send_if_modified(|old| std::mem::replace(old, status) != status);
    }
}

#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the agent broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    #[error("the agent sent nothing for {0:?} before the end of its snapshot")]
    SnapshotSilence(Duration),
}

/// What the requests of a connection mean, apart from the socket.
struct Pods<M> {
    manager: Arc<M>,
    /// Named so far in this connection's snapshot.
    named: HashSet<String>,
    snapshot_done: bool,
    /// The agent has shown that it speaks our extension.
    extended: bool,
    /// Pods whose start failed.
    pending: HashMap<String, AddedPod>,
}

impl<M: PodManager> Pods<M> {
    fn new(manager: Arc<M>) -> Pods<M> {
        let (named, pending) = (HashSet::new(), HashMap::new());
        Pods { manager, named, snapshot_done: false, extended: false, pending }
    }

    /// A new connection starts with nothing named.
    fn begin(&mut self) {
        self.named.clear();
        self.snapshot_done = false;
        self.extended = false;
    }

    fn handle(&mut self, request: Request) -> Result<Response, ProtocolError> {
        self.extended |= request.is_extension();
        match request {
            Request::Add { pod, netns, listeners } => Ok(self.add(pod, netns, listeners)),
            Request::Keep { .. } if self.snapshot_done => Err(ProtocolError::AfterSnapshot { message: "KeepWorkload" }),
            Request::Keep { uid } => {
                self.named.insert(uid);
                Ok(Response::default())
            }
            Request::Delete { uid } => {
                self.named.remove(&uid);
                // Our agent drains a pod before; a plain one leaves that to us.
                self.remove(&uid, if self.extended { Removal::Gone } else { Removal::Drain });
                Ok(Response::default())
            }
            Request::SnapshotSent if self.snapshot_done => {
                Err(ProtocolError::AfterSnapshot { message: "SnapshotSent" })
            }
            Request::SnapshotSent => {
                self.end_snapshot();
                Ok(Response::default())
            }
            Request::CaptureMaps(maps) => {
                Ok(Response { error: self.manager.capture_maps(maps).err(), ..Response::default() })
            }
            Request::ReturnListeners { uid } => {
                Ok(Response { listeners: self.manager.listeners(&uid), ..Response::default() })
            }
            Request::Drain { uid } => {
                let DrainState { open, followed } = self.manager.drain(&uid);
                Ok(Response { open, followed, ..Response::default() })
            }
        }
    }

    fn add(&mut self, pod: PodInfo, netns: OwnedFd, listeners: Option<PodListeners>) -> Response {
        let PodInfo { uid, name, namespace, service_account } = pod;
        if !self.snapshot_done {
            self.named.insert(uid.clone());
        }
        let added = AddedPod { uid, name, namespace, service_account, netns, listeners };
        // An older attempt holds descriptors of what may be another namespace.
        self.pending.remove(&added.uid);
        match self.start(added) {
            Ok(()) => Response::default(),
            Err(error) => Response::failed(error),
        }
    }

    fn start(&mut self, pod: AddedPod) -> Result<(), String> {
        let kept = pod.try_clone()?;
        let (name, namespace) = (kept.name.clone(), kept.namespace.clone());
        let result = self.manager.add(pod);
        if let Err(error) = &result {
            warn!(pod = name, namespace, error, "the pod cannot be served yet, trying again");
            self.pending.insert(kept.uid.clone(), kept);
        }
        result
    }

    fn retry_pending(&mut self) {
        for (_, pod) in std::mem::take(&mut self.pending) {
            // A failure puts it back.
            let _ = self.start(pod);
        }
    }

    fn remove(&mut self, uid: &str, how: Removal) {
        self.pending.remove(uid);
        self.manager.remove(uid, how);
    }

    fn end_snapshot(&mut self) {
        let mut known = self.manager.pods();
        known.extend(self.pending.keys().cloned());
        known.retain(|uid| !self.named.contains(uid));
        for uid in known {
            info!(uid, "the agent no longer knows the pod, dropping it");
            self.remove(&uid, Removal::Gone);
        }
        self.named.clear();
        self.snapshot_done = true;
    }
}

/// `wait` ± 20 %.
fn jittered(wait: Duration) -> Duration {
    let random = RandomState::new().hash_one(0u8) as f64 / u64::MAX as f64;
    wait.mul_f64(0.8 + 0.4 * random)
}

#[cfg(test)]
#[path = "client_tests.rs"]
mod tests;

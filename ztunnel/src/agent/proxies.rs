//! The proxies that are connected, what each of them has been told, and what a new one is told.
//!
//! Must never let a proxy serve pods before its cgroup is exempt from capture (its own dials would come back to it),
//! nor let a proxy that is stopped hold up another one or a pod's task for longer than a request's bound.

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, error, info, warn};

use super::exempt::Exemptions;
use super::kernel::Kernel;
use crate::capture::listeners::PodListeners;
use crate::capture::netns::Netns;
use crate::zds::{Arrival, DrainState, PodInfo, Request, RequestError, Response, Server, Session};

/// All connected proxies.
#[derive(Debug)]
pub struct Proxies {
    kernel: Arc<Kernel>,
    exemptions: Exemptions,
    inner: Mutex<Inner>,
    changed: watch::Sender<u64>,
    /// Set once all pods of the node are known: a snapshot before would make a proxy drop some.
    complete: watch::Sender<bool>,
    /// Changes when all connections must begin anew.
    renewed: watch::Sender<u64>,
}

/// A pod as a proxy gets it.
#[derive(Debug)]
pub struct Offer {
    pub info: PodInfo,
    pub netns: Arc<Netns>,
    pub listeners: Arc<PodListeners>,
}

/// Why a pod has not been taken over by a proxy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    #[error("no proxy is connected")]
    NoProxy,
    #[error("the pod is not on offer")]
    NotOffered,
    #[error("cannot duplicate the pod's descriptors: {0}")]
    Descriptors(String),
    #[error(transparent)]
    Request(#[from] RequestError),
}

#[derive(Debug, Default)]
struct Inner {
    offers: HashMap<String, Offered>,
    /// Oldest first.
    proxies: Vec<Arc<Proxy>>,
    /// Processes of proxies whose connection is lost, and since when.
    lost: Vec<(Arc<OwnedFd>, Instant)>,
}

#[derive(Clone, Debug)]
enum Offered {
    /// It is wanted, but there is nothing to hand over yet.
    Keep,
    Pod(Arc<Offer>),
}

#[derive(Debug)]
struct Proxy {
    session: Session,
    /// Pods that it has taken.
    taken: Mutex<HashSet<String>>,
    /// Those of them that it took from an earlier agent, and gave the sockets of back. That one may have begun to drain
    /// them.
    returned: Mutex<HashSet<String>>,
    /// Held while a pod is given to it: the snapshot and the pod's own task may want to at one time.
    giving: tokio::sync::Mutex<()>,
    /// Deletes that it did not answer.
    owed: Mutex<HashSet<String>>,
    /// It has the maps, without which it could not serve a pod.
    usable: AtomicBool,
    /// It left its last request without an answer: stopped, or stuck.
    silent: AtomicBool,
}

impl Proxies {
    pub fn new(kernel: Arc<Kernel>, exemptions: Exemptions) -> Arc<Proxies> {
        Arc::new(Proxies {
            kernel,
            exemptions,
            inner: Mutex::default(),
            changed: watch::Sender::default(),
            complete: watch::Sender::default(),
            renewed: watch::Sender::default(),
        })
    }

    /// From now on all pods of the node are on offer or kept.
    pub fn set_complete(&self) {
        self.complete.send_replace(true);
    }

    /// Tells when a proxy came, finished its snapshot, or left.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub fn connected(&self) -> usize {
        self.lock().proxies.len()
    }

    /// Whether there is a proxy that will take waiting connections, if only later: a connected one, or one whose
    /// connection to us was lost a moment ago and that still runs.
    pub fn any_alive(&self) -> bool {
        let mut inner = self.lock();
        inner.lost.retain(|(process, since)| since.elapsed() < RECONNECT && is_running(process));
        !inner.proxies.is_empty() || !inner.lost.is_empty()
    }

    /// The pod must not be dropped by a proxy, but there is nothing to hand over yet.
    pub fn keep(&self, uid: &str) {
        self.lock().offers.insert(uid.to_owned(), Offered::Keep);
    }

    /// What the pod's proxy gets. [`Proxies::add`] tells the present one.
    pub fn offer(&self, offer: Offer) {
        self.lock().offers.insert(offer.info.uid.clone(), Offered::Pod(Arc::new(offer)));
    }

    /// The pod is no longer for any proxy. [`Proxies::delete`] tells the present ones.
    pub fn withdraw(&self, uid: &str) {
        self.lock().offers.remove(uid);
    }

    /// The listening sockets of all pods on offer.
    pub fn listeners(&self) -> Vec<(String, Arc<PodListeners>)> {
        let inner = self.lock();
        let pods = inner.offers.iter().filter_map(|(uid, offered)| match offered {
            Offered::Keep => None,
            Offered::Pod(offer) => Some((uid.clone(), offer.listeners.clone())),
        });
        pods.collect()
    }

    /// Whether the newest proxy has taken the pod.
    pub fn has_taken(&self, uid: &str) -> bool {
        self.newest().is_some_and(|proxy| lock(&proxy.taken).contains(uid))
    }

    /// Whether there is a proxy that should have taken the pod and has not.
    pub fn wants(&self, uid: &str) -> bool {
        self.newest().is_some_and(|proxy| !lock(&proxy.taken).contains(uid))
    }

    /// Gives the pod to the newest proxy.
    pub async fn add(&self, uid: &str) -> Result<(), OfferError> {
        let proxy = self.newest().ok_or(OfferError::NoProxy)?;
        let _giving = proxy.giving.lock().await;
        if proxy.has(uid) {
            return Ok(());
        }
        let offer = match self.lock().offers.get(uid) {
            Some(Offered::Pod(offer)) => offer.clone(),
            _ => return Err(OfferError::NotOffered),
        };
        // A delete that it still owes us must not come after this.
        if lock(&proxy.owed).contains(uid) {
            proxy.request(Request::Delete { uid: uid.to_owned() }).await?;
            lock(&proxy.owed).remove(uid);
        }
        proxy.add(&offer).await
    }

    /// Takes the pod from all proxies. A proxy that does not answer is told again later.
    pub async fn delete(&self, uid: &str) {
        for proxy in self.all() {
            lock(&proxy.taken).remove(uid);
            lock(&proxy.returned).remove(uid);
            if let Err(error) = proxy.request(Request::Delete { uid: uid.to_owned() }).await {
                debug!(uid, %error, session = %proxy.session.id(), "the proxy has not confirmed the pod's removal");
                lock(&proxy.owed).insert(uid.to_owned());
            }
        }
    }

    /// How far all proxies together are with the pod's drain; the first call starts it. `None` if no proxy can say.
    pub async fn drain(&self, uid: &str) -> Option<DrainState> {
        let mut all: Option<DrainState> = None;
        for proxy in self.all() {
            let state = match proxy.request(Request::Drain { uid: uid.to_owned() }).await {
                Ok(response) => DrainState { open: response.open, followed: response.followed },
                Err(RequestError::NoExtension | RequestError::Closed(_)) => continue,
                Err(error) => {
                    debug!(uid, %error, "the proxy does not say how far the pod's drain is");
                    DrainState { open: 1, followed: false }
                }
            };
            let before = all.unwrap_or(DrainState { open: 0, followed: true });
            all = Some(DrainState {
                open: before.open.saturating_add(state.open),
                followed: before.followed && state.followed,
            });
        }
        all
    }

    /// The pod's listening sockets out of the hands of a proxy, after a restart of the agent.
    pub async fn return_listeners(&self, uid: &str) -> Option<PodListeners> {
        for proxy in self.all().into_iter().rev() {
            match proxy.request(Request::ReturnListeners { uid: uid.to_owned() }).await {
                Ok(response) if response.listeners.is_some() => {
                    // It serves the pod: only who wants the pod in the mesh gives it again, for that undoes a drain.
                    lock(&proxy.taken).insert(uid.to_owned());
                    lock(&proxy.returned).insert(uid.to_owned());
                    return response.listeners;
                }
                Ok(_) | Err(RequestError::NoExtension) => {}
                Err(error) => debug!(uid, %error, "the proxy has not given the pod's sockets back"),
            }
        }
        None
    }

    /// Accepts proxies for ever. Dropping the future closes all connections and leaves the pods alone.
    pub async fn serve(self: Arc<Proxies>, server: Server) {
        let mut sessions = JoinSet::new();
        let mut retries = tokio::time::interval(RETRY_DELETES);
        loop {
            tokio::select! {
                arrival = server.accept() => {
                    match arrival {
                        Ok(arrival) => {
                            sessions.spawn(self.clone().session(arrival));
                        }
                        Err(error) => warn!(%error, "a proxy could not be accepted"),
                    }
                    tokio::time::sleep(server.accept_interval()).await;
                }
                Some(_) = sessions.join_next() => {}
                _ = retries.tick() => {
                    for proxy in self.all() {
                        if !lock(&proxy.owed).is_empty() {
                            sessions.spawn(async move { proxy.pay_deletes().await });
                        }
                    }
                }
            }
        }
    }

    /// One proxy, from its hello to its end.
    async fn session(self: Arc<Proxies>, arrival: Arrival) {
        let session = match arrival.hello().await {
            Ok(session) => session,
            Err(error) => return warn!(%error, "a connection to the agent's socket was not a proxy's"),
        };
        let (id, pid) = (session.id(), session.peer().pid);
        if let Err(reason) = self.exemptions.exempt(session.peer()) {
            return error!(session = %id, pid, reason, "the proxy cannot be exempt from capture, so it gets no pods");
        }
        info!(session = %id, pid, extended = session.is_extended(), "a proxy has connected");
        let proxy = Arc::new(Proxy {
            session: session.clone(),
            taken: Mutex::default(),
            returned: Mutex::default(),
            giving: tokio::sync::Mutex::default(),
            owed: Mutex::default(),
            usable: AtomicBool::new(false),
            silent: AtomicBool::new(false),
        });
        self.lock().proxies.push(proxy.clone());
        self.notify();
        let mut renewed = self.renewed.subscribe();
        let serving = async {
            match self.snapshot(&proxy).await {
                Ok(()) => {
                    info!(session = %id, "the proxy has the whole snapshot");
                    self.notify();
                    session.closed().await
                }
                Err(error) => {
                    error!(session = %id, %error, "the proxy cannot be used");
                    error.to_string()
                }
            }
        };
        let ended = tokio::select! {
            reason = serving => reason,
            reason = session.closed() => reason,
            Ok(()) = renewed.changed() => "it is to begin anew".to_owned(),
        };
        {
            let mut inner = self.lock();
            inner.proxies.retain(|other| other.session.id() != id);
            let process = session.process().and_then(|process| process.try_clone().ok());
            inner.lost.extend(process.map(|process| (Arc::new(process), Instant::now())));
        }
        warn!(session = %id, pid, reason = ended, "the connection to the proxy has ended");
        self.notify();
    }

    async fn snapshot(&self, proxy: &Proxy) -> Result<(), OfferError> {
        // The sender lives as long as we do.
        let _ = self.complete.subscribe().wait_for(|complete| *complete).await;
        while proxy.session.is_extended() {
            let maps = self.kernel.map_fds().map_err(|error| OfferError::Descriptors(error.to_string()))?;
            match proxy.request(Request::CaptureMaps(maps)).await {
                // It may be stopped.
                Err(RequestError::Timeout(_)) => {}
                other => {
                    other?;
                    break;
                }
            }
        }
        proxy.usable.store(true, Ordering::Release);
        self.notify();
        let uids: Vec<String> = self.lock().offers.keys().cloned().collect();
        for uid in uids {
            self.tell(proxy, &uid).await?;
        }
        proxy.insist(|| Request::SnapshotSent).await?;
        Ok(())
    }

    /// Tells of one pod in the snapshot.
    async fn tell(&self, proxy: &Proxy, uid: &str) -> Result<(), OfferError> {
        let offered = self.lock().offers.get(uid).cloned();
        match offered {
            None => return Ok(()),
            Some(Offered::Keep) => {
                proxy.insist(|| Request::Keep { uid: uid.to_owned() }).await?;
            }
            Some(Offered::Pod(offer)) => loop {
                let _giving = proxy.giving.lock().await;
                if proxy.has(uid) {
                    break;
                }
                match proxy.add(&offer).await {
                    Ok(()) => break,
                    Err(OfferError::Request(RequestError::Timeout(_))) => {}
                    Err(OfferError::Request(RequestError::Refused(error))) => {
                        warn!(uid, error, session = %proxy.session.id(), "the proxy has not taken the pod");
                        break;
                    }
                    Err(error) => return Err(error),
                }
            },
        }
        // Withdrawn meanwhile: the delete may have come before our message.
        if !self.lock().offers.contains_key(uid) {
            lock(&proxy.taken).remove(uid);
            proxy.insist(|| Request::Delete { uid: uid.to_owned() }).await?;
        }
        Ok(())
    }

    /// Ends all connections: the proxies come back and get everything anew.
    pub fn reconnect_all(&self) {
        warn!("the capture maps are new, all proxies are told to fetch them");
        self.renewed.send_modify(|count| *count += 1);
    }

    /// Forgets exemptions of proxies that are gone.
    pub fn sweep_exemptions(&self) {
        self.exemptions.sweep();
    }

    /// The proxy that new pods go to: the newest, but one that answers before one that does not.
    fn newest(&self) -> Option<Arc<Proxy>> {
        let inner = self.lock();
        let mut usable = inner.proxies.iter().rev().filter(|proxy| proxy.usable.load(Ordering::Acquire));
        let newest = usable.clone().next();
        usable.find(|proxy| !proxy.silent.load(Ordering::Relaxed)).or(newest).cloned()
    }

    fn all(&self) -> Vec<Arc<Proxy>> {
        self.lock().proxies.clone()
    }

    fn notify(&self) {
        self.changed.send_modify(|count| *count += 1);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        lock(&self.inner)
    }
}

impl Proxy {
    async fn request(&self, request: Request) -> Result<Response, RequestError> {
        let result = self.session.request(request).await;
        match &result {
            Ok(_) | Err(RequestError::Refused(_)) => self.silent.store(false, Ordering::Relaxed),
            Err(RequestError::Timeout(_)) => self.silent.store(true, Ordering::Relaxed),
            Err(RequestError::Closed(_) | RequestError::NoExtension | RequestError::TooLong(_)) => {}
        }
        result
    }

    /// Whether it has taken the pod, and knows that it is wanted in the mesh.
    fn has(&self, uid: &str) -> bool {
        lock(&self.taken).contains(uid) && !lock(&self.returned).contains(uid)
    }

    async fn add(&self, offer: &Offer) -> Result<(), OfferError> {
        let netns = offer.netns.as_fd().try_clone_to_owned();
        let netns = netns.map_err(|error| OfferError::Descriptors(error.to_string()))?;
        let listeners = if self.session.is_extended() {
            Some(offer.listeners.try_clone().map_err(|error| OfferError::Descriptors(error.to_string()))?)
        } else {
            None
        };
        self.request(Request::Add { pod: offer.info.clone(), netns, listeners }).await?;
        lock(&self.taken).insert(offer.info.uid.clone());
        lock(&self.returned).remove(&offer.info.uid);
        Ok(())
    }

    /// Asks until the proxy answers; a stopped one is waited for. Its refusal is its own affair.
    async fn insist(&self, request: impl Fn() -> Request) -> Result<(), OfferError> {
        loop {
            match self.request(request()).await {
                Err(RequestError::Timeout(_)) => {}
                Ok(_) | Err(RequestError::Refused(_)) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn pay_deletes(&self) {
        let owed: Vec<String> = lock(&self.owed).iter().cloned().collect();
        for uid in owed {
            // Given again meanwhile: that paid it.
            if lock(&self.taken).contains(&uid) {
                lock(&self.owed).remove(&uid);
                continue;
            }
            match self.request(Request::Delete { uid: uid.clone() }).await {
                Ok(_) => {
                    lock(&self.owed).remove(&uid);
                }
                Err(_) => return,
            }
        }
    }
}

/// A pidfd is readable once its process has ended.
fn is_running(process: &OwnedFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(0)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic left behind is still a whole value: every change is one step.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A proxy that lost its connection and runs is expected back within this time.
const RECONNECT: Duration = Duration::from_secs(60);
const RETRY_DELETES: Duration = Duration::from_secs(1);

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
use std::time::{Instant, SystemTime};

use tokio::sync::Notify;

use super::client::{Opened, StreamError, Tunnel, TunnelError};
use super::fields::Request;
use super::settings::Settings;
use super::tunnels::Tunnels;
use crate::identity::{Certificate, Identity};

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

/// A thread's tunnels. `E`: why a socket could not be had.
pub struct Pool<E> {
    settings: Settings,
    tunnels: Tunnels,
    peers: RefCell<HashMap<PoolKey, Rc<Peer<E>>>>,
}

struct Peer<E> {
    tunnels: RefCell<Vec<Tunnel>>,
    /// Only one tunnel to a peer is being made at a time; the others wait for it.
    attempt: RefCell<Option<Rc<Attempt<E>>>>,
}

/// A tunnel that is being made.
struct Attempt<E> {
    failure: RefCell<Option<OpenError<E>>>,
    over: Notify,
}

/// Why no stream was opened.
#[derive(Debug, Clone, thiserror::Error)]
pub enum OpenError<E> {
    /// The socket could not be connected, or there is no certificate.
    #[error(transparent)]
    Dial(E),
    #[error(transparent)]
    Tunnel(Rc<TunnelError>),
    #[error(transparent)]
    Stream(StreamError),
}

/// What is needed to make a tunnel.
pub struct Dialled {
    pub socket: tokio::net::TcpStream,
    /// That we show.
    pub certificate: Arc<Certificate>,
}

impl<E: Clone> Pool<E> {
    pub fn new(settings: Settings, tunnels: Tunnels) -> Self {
        Self { settings, tunnels, peers: RefCell::default() }
    }

    /// Opens a stream, on a tunnel that is there or on a new one for which `dial` gives the socket. A stream that the
    /// peer did not begin with is tried again on another tunnel.
    ///
    /// Waits for one attempt to make a tunnel at most: all who wait for one that fails are told the same.
    pub async fn stream<F>(
        &self,
        key: &PoolKey,
        request: impl Fn() -> Request,
        dial: impl Fn() -> F,
    ) -> Result<Opened, OpenError<E>>
    where
        F: Future<Output = Result<Dialled, E>>,
    {
        let peer = self.peers.borrow_mut().entry(key.clone()).or_default().clone();
        let (mut tries, mut dials) = (0, 0);
        loop {
            let Some(stream) = peer.place(request(), &self.settings) else {
                let under_way = peer.attempt.borrow().clone();
                match under_way {
                    Some(attempt) => attempt.end().await?,
                    None if dials == TRIES => {
                        // Each ended before a stream was on it.
                        let reason = format!("{TRIES} new tunnels could not be used");
                        return Err(OpenError::Stream(StreamError::NotStarted(reason)));
                    }
                    None => {
                        dials += 1;
                        // Apart: most streams find a tunnel, and need not carry the room for making one.
                        Box::pin(peer.connect(dial(), key, self)).await?;
                    }
                }
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

    /// Closes tunnels that have had no stream for long. Running streams of a peer that `keep` denies finish, but it gets
    /// no new ones.
    pub fn sweep(&self, keep: impl Fn(&PoolKey) -> bool) {
        let (now, time) = (Instant::now(), SystemTime::now());
        self.peers.borrow_mut().retain(|key, peer| {
            let mut tunnels = peer.tunnels.borrow_mut();
            if !keep(key) {
                tunnels.clear();
            }
            tunnels.retain(|t| {
                let idle = t.idle_since().map(|since| now.saturating_duration_since(since)).unwrap_or_default();
                !t.is_over(time) && idle < self.settings.idle_timeout
            });
            !tunnels.is_empty() || Rc::strong_count(peer) > 1
        });
    }
}

impl<E: Clone> Peer<E> {
    /// Makes a tunnel. Others wait for its end.
    async fn connect(
        &self,
        dial: impl Future<Output = Result<Dialled, E>>,
        key: &PoolKey,
        pool: &Pool<E>,
    ) -> Result<(), OpenError<E>> {
        let attempt = Rc::new(Attempt { failure: RefCell::default(), over: Notify::new() });
        self.attempt.replace(Some(attempt.clone()));
        let _connecting = Connecting { peer: self, attempt: &attempt };
        let made = async {
            let dialled = dial.await.map_err(OpenError::Dial)?;
            let tunnel = Tunnel::open(dialled, &key.expected, &pool.settings, &pool.tunnels);
            tunnel.await.map_err(|error| OpenError::Tunnel(error.into()))
        };
        match made.await {
            Ok(tunnel) => self.tunnels.borrow_mut().push(tunnel),
            Err(failure) => {
                attempt.failure.replace(Some(failure.clone()));
                return Err(failure);
            }
        }
        Ok(())
    }

    /// A place on the fullest tunnel that has room: what leaves together costs less, and tunnels of a burst fall idle
    /// after it, and end.
    fn place(
        &self,
        request: Request,
        settings: &Settings,
    ) -> Option<impl Future<Output = Result<Opened, StreamError>> + use<E>> {
        let now = SystemTime::now();
        let mut tunnels = self.tunnels.borrow_mut();
        tunnels.retain(|t| !t.is_over(now));
        tunnels
            .iter()
            .map(|t| (t.room(settings, now), t))
            .filter(|(room, _)| *room > 0)
            .min_by_key(|(room, _)| *room)
            .map(|(_, t)| t.stream(request, settings))
    }
}

impl<E: Clone> Attempt<E> {
    /// Waits until it is over; its failure, if it failed.
    async fn end(&self) -> Result<(), OpenError<E>> {
        self.over.notified().await;
        self.failure.borrow().clone().map_or(Ok(()), Err)
    }
}

impl<E> Default for Peer<E> {
    fn default() -> Self {
        Self { tunnels: RefCell::default(), attempt: RefCell::default() }
    }
}

/// While it lives, others wait; at its end, also by cancellation, they go on.
struct Connecting<'a, E> {
    peer: &'a Peer<E>,
    attempt: &'a Attempt<E>,
}

impl<E> Drop for Connecting<'_, E> {
    fn drop(&mut self) {
        self.peer.attempt.replace(None);
        self.attempt.over.notify_waiters();
    }
}

/// Tunnels that are tried for one stream.
const TRIES: u32 = 3;

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::task::{LocalSet, spawn_local};

    use super::*;
    use http::HeaderMap;

    use crate::identity::{Trust, TrustSettings};

    fn key() -> PoolKey {
        let address = "192.0.2.1:15008".parse().unwrap();
        PoolKey { pod: "pod".into(), workload: "workload".into(), address, expected: Vec::new() }
    }

    fn tunnels() -> Tunnels {
        Tunnels::new(Trust::new(TrustSettings::default()))
    }

    /// Dials that fail once they are told to, counted.
    #[derive(Default)]
    struct Dials {
        begun: Cell<u32>,
        fail: Notify,
    }

    type Opening = tokio::task::JoinHandle<Result<Opened, OpenError<&'static str>>>;

    fn open(pool: &Rc<Pool<&'static str>>, dials: &Rc<Dials>) -> Opening {
        let (pool, dials) = (pool.clone(), dials.clone());
        spawn_local(async move {
            let dial = || async {
                dials.begun.set(dials.begun.get() + 1);
                dials.fail.notified().await;
                Err("no answer")
            };
            pool.stream(&key(), || Request::connect("192.0.2.1:80", HeaderMap::new()), dial).await
        })
    }

    /// A black hole must not make each connection wait for the failures of all before it.
    #[tokio::test]
    async fn all_who_wait_for_an_attempt_that_fails_are_told_at_once() {
        let all = async {
            let (pool, dials) = (Rc::new(Pool::new(Settings::default(), tunnels())), Rc::new(Dials::default()));
            let waiting: Vec<_> = (0..10).map(|_| open(&pool, &dials)).collect();
            tokio::task::yield_now().await;
            dials.fail.notify_one();
            for one in waiting {
                let failure = one.await.unwrap().err().expect("the dial failed");
                assert!(matches!(failure, OpenError::Dial("no answer")));
            }
            assert_eq!(dials.begun.get(), 1);
            // Who comes later tries anew.
            let later = open(&pool, &dials);
            dials.fail.notify_one();
            assert!(later.await.unwrap().is_err());
            assert_eq!(dials.begun.get(), 2);
        };
        LocalSet::new().run_until(all).await;
    }

    #[tokio::test]
    async fn who_waits_for_an_attempt_that_is_given_up_makes_one() {
        let all = async {
            let (pool, dials) = (Rc::new(Pool::new(Settings::default(), tunnels())), Rc::new(Dials::default()));
            let first = open(&pool, &dials);
            let second = open(&pool, &dials);
            tokio::task::yield_now().await;
            assert_eq!(dials.begun.get(), 1);
            first.abort();
            assert!(first.await.err().is_some_and(|error| error.is_cancelled()));
            tokio::task::yield_now().await;
            assert_eq!(dials.begun.get(), 2);
            dials.fail.notify_one();
            assert!(second.await.unwrap().is_err());
        };
        LocalSet::new().run_until(all).await;
    }
}

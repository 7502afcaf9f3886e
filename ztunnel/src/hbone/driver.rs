//! Drives one HTTP/2 connection: lets h2 do its turn, sends what came of it at once, and watches that the peer lives.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use h2::{Ping, PingPong};
use tokio::time::{Sleep, sleep};

use super::held::HeldTls;
use super::settings::Settings;

/// Why a tunnel ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    #[error("closed")]
    Closed,
    #[error("no frame for {0:?}, not even to a ping")]
    Dead(Duration),
    #[error("{0}")]
    Failed(String),
}

/// What streams and the pool know of a tunnel.
pub(super) struct Load {
    streams: Cell<u32>,
    /// When the last stream ended.
    idle_since: Cell<Instant>,
    ended: RefCell<Option<Ended>>,
}

/// Counts one stream of a tunnel for as long as it lives.
pub struct StreamCount(Rc<Load>);

impl Load {
    pub fn new() -> Rc<Self> {
        Rc::new(Self { streams: Cell::new(0), idle_since: Cell::new(Instant::now()), ended: RefCell::new(None) })
    }

    pub fn streams(&self) -> u32 {
        self.streams.get()
    }

    pub fn idle_since(&self) -> Instant {
        self.idle_since.get()
    }

    pub fn ended(&self) -> Option<Ended> {
        self.ended.borrow().clone()
    }

    pub fn is_ended(&self) -> bool {
        self.ended.borrow().is_some()
    }

    pub fn end(&self, why: Ended) {
        self.ended.borrow_mut().get_or_insert(why);
    }

    pub fn count(self: &Rc<Self>) -> StreamCount {
        self.streams.set(self.streams.get() + 1);
        StreamCount(self.clone())
    }
}

impl StreamCount {
    /// Why the tunnel ended, if it has.
    pub fn tunnel_ended(&self) -> Option<Ended> {
        self.0.ended()
    }
}

impl Drop for StreamCount {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
        self.0.idle_since.set(Instant::now());
    }
}

/// Notices a peer that has gone silent while streams are open. Any byte is a sign of life.
pub(super) struct Watch {
    timer: Pin<Box<Sleep>>,
    pings: Option<PingPong>,
    pinged: bool,
    ping_after: Duration,
    dead_after: Duration,
}

impl Watch {
    pub fn new(pings: Option<PingPong>, settings: &Settings) -> Self {
        Self {
            timer: Box::pin(sleep(settings.ping_after)),
            pings,
            pinged: false,
            ping_after: settings.ping_after,
            dead_after: settings.dead_after,
        }
    }

    /// Ready once the peer is dead. `quiet` is the time since its last byte.
    fn poll(&mut self, cx: &mut Context<'_>, load: &Load, tls: &HeldTls) -> Poll<Ended> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let quiet = tls.get().last_heard().elapsed();
            let next = if load.streams() == 0 || quiet < self.ping_after {
                self.pinged = false;
                self.ping_after.saturating_sub(quiet).max(Duration::from_millis(100))
            } else if self.pinged && quiet >= self.dead_after {
                return Poll::Ready(Ended::Dead(quiet));
            } else {
                if let Some(pings) = &mut self.pings
                    && !self.pinged
                {
                    // An earlier ping may be under way still: then its answer serves as well.
                    let _ = pings.send_ping(Ping::opaque());
                }
                self.pinged = true;
                self.dead_after.saturating_sub(quiet).max(Duration::from_millis(100))
            };
            self.timer.set(sleep(if load.streams() == 0 { self.ping_after } else { next }));
        }
        if let Some(pings) = &mut self.pings {
            // Takes the answer, so that the next ping can be sent.
            let _ = pings.poll_pong(cx);
        }
        Poll::Pending
    }
}

/// One turn: `h2` does what it can, then all that it wrote is sent.
pub(super) fn poll_turn<T>(
    cx: &mut Context<'_>,
    tls: &HeldTls,
    watch: &mut Watch,
    load: &Load,
    mut h2: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Poll<Result<T, Ended>> {
    loop {
        let turn = h2(cx);
        let mut socket = tls.get();
        match socket.poll_send(cx) {
            Poll::Ready(Err(error)) => {
                return Poll::Ready(Err(Ended::Failed(format!("writing to the tunnel: {error}"))));
            }
            Poll::Ready(Ok(())) if turn.is_pending() && socket.take_turned_away() => continue,
            _ => {}
        }
        drop(socket);
        if let Poll::Ready(value) = turn {
            return Poll::Ready(Ok(value));
        }
        return watch.poll(cx, load, tls).map(Err);
    }
}

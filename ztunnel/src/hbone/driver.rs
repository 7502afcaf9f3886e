//! Drives one tunnel: in a turn it reads all that has come, hands it on, and sends all that the streams wrote meanwhile
//! in few records and one system call. Watches that the peer lives.

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime};

use h2::Reason;
use rustls::AlertDescription;
use tokio::time::{Sleep, sleep, timeout};

use super::connection::{Connection, Role};
use super::held::HeldTls;
use super::settings::Settings;
use super::tls::{LINGER, TlsSocket};
use super::tunnels::Proof;
use crate::identity::{Identity, PeerError};

/// Why a tunnel ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Ended {
    #[error("closed")]
    Closed,
    #[error("no frame for {0:?}, not even to a ping")]
    Dead(Duration),
    #[error("{0}")]
    Failed(String),
    /// The peer did not take our certificate, or gave up TLS for another reason.
    #[error("the peer ended TLS with alert {0:?}")]
    Alert(AlertDescription),
    #[error("{0}")]
    Distrusted(Box<PeerError>),
    #[error("{} certificate ended at {at}", if *own { "our" } else { "the peer's" })]
    Expired { own: bool, at: String },
    #[error("our certificate for {own} ended at {at}, and its renewal is denied")]
    RenewalDenied { own: Identity, at: String },
}

/// What streams and the pool know of a tunnel.
pub(super) struct Load {
    streams: Cell<u32>,
    /// When the last stream ended.
    idle_since: Cell<Instant>,
    ended: RefCell<Option<Ended>>,
    /// Takes no new streams.
    retired: Cell<bool>,
    /// The peer must be told so.
    draining: Cell<bool>,
    /// The driver is to end the tunnel for this reason.
    cut: RefCell<Option<Ended>>,
    driver: RefCell<Option<Waker>>,
    /// What it rests on; missing in tests of what has nothing to do with it.
    pub proof: Option<Proof>,
}

/// Counts one stream of a tunnel for as long as it lives.
pub struct StreamCount(Rc<Load>);

impl Load {
    pub fn new(proof: Option<Proof>) -> Rc<Self> {
        Rc::new(Self {
            streams: Cell::new(0),
            idle_since: Cell::new(Instant::now()),
            ended: RefCell::new(None),
            retired: Cell::new(false),
            draining: Cell::new(false),
            cut: RefCell::new(None),
            driver: RefCell::new(None),
            proof,
        })
    }

    /// Takes no new streams from now on.
    pub fn retire(&self) {
        self.retired.set(true);
    }

    /// Whether it takes new streams at that time.
    pub fn is_open(&self, now: SystemTime) -> bool {
        !self.is_ended() && !self.retired.get() && self.proof.as_ref().is_none_or(|proof| now < proof.end())
    }

    /// Whether new streams should be put on it at that time.
    pub fn is_fresh(&self, now: SystemTime) -> bool {
        self.is_open(now) && self.proof.as_ref().is_none_or(|proof| now < proof.fresh_until())
    }

    /// Takes no new streams, and tells the peer where that is the peer's to know.
    pub fn drain(&self) {
        if !self.retired.replace(true) {
            self.draining.set(true);
            self.wake();
        }
    }

    pub fn take_draining(&self) -> bool {
        self.draining.take()
    }

    /// Ends the tunnel with its streams.
    pub fn cut(&self, why: Ended) {
        self.retired.set(true);
        self.cut.borrow_mut().get_or_insert(why);
        self.wake();
    }

    pub fn is_cut(&self) -> bool {
        self.cut.borrow().is_some()
    }

    /// Lets the driver have a turn.
    pub fn wake(&self) {
        let driver = self.driver.borrow_mut().take();
        if let Some(driver) = driver {
            driver.wake();
        }
    }

    /// Whether the driver is to end; else it will be woken when it is.
    fn poll_cut(&self, cx: &mut Context<'_>) -> Poll<Ended> {
        if let Some(why) = &*self.cut.borrow() {
            return Poll::Ready(why.clone());
        }
        let mut driver = self.driver.borrow_mut();
        if driver.as_ref().is_none_or(|known| !known.will_wake(cx.waker())) {
            *driver = Some(cx.waker().clone());
        }
        Poll::Pending
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
    silence: Silence,
}

/// When a silent tunnel is pinged, and when it is dead.
struct Silence {
    ping_after: Duration,
    /// How long a sign of life may take after a ping.
    patience: Duration,
    /// When the ping was sent that has had no sign of life yet.
    pinged: Option<Instant>,
}

#[derive(Debug, PartialEq, Eq)]
enum Look {
    Again(Duration),
    Ping(Duration),
    Dead,
}

impl Watch {
    pub fn new(settings: &Settings) -> Self {
        Self { timer: Box::pin(sleep(settings.ping_after)), silence: Silence::new(settings) }
    }

    /// Ready once the peer is dead.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        load: &Load,
        last_heard: Instant,
        connection: &mut Connection,
    ) -> Poll<()> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let next = match self.silence.look(load.streams() > 0, last_heard, Instant::now()) {
                Look::Dead => return Poll::Ready(()),
                Look::Again(next) => next,
                Look::Ping(next) => {
                    connection.ping();
                    next
                }
            };
            self.timer.set(sleep(next.max(SHORTEST)));
        }
        Poll::Pending
    }
}

impl Silence {
    fn new(settings: &Settings) -> Self {
        let patience = settings.dead_after.saturating_sub(settings.ping_after);
        Self { ping_after: settings.ping_after, patience, pinged: None }
    }

    /// What to do now, and when to look again.
    fn look(&mut self, in_use: bool, last_heard: Instant, now: Instant) -> Look {
        let quiet = now.saturating_duration_since(last_heard);
        let answered = self.pinged.is_some_and(|pinged| last_heard >= pinged);
        if !in_use || quiet < self.ping_after || answered {
            self.pinged = None;
        }
        if !in_use {
            return Look::Again(self.ping_after);
        }
        if quiet < self.ping_after {
            return Look::Again(self.ping_after - quiet);
        }
        let Some(pinged) = self.pinged else {
            self.pinged = Some(now);
            return Look::Ping(self.patience.min(self.ping_after));
        };
        // Counted from the ping: before it the tunnel may have been silent because it had no stream.
        let waited = now.saturating_duration_since(pinged);
        if waited >= self.patience { Look::Dead } else { Look::Again((self.patience - waited).min(self.ping_after)) }
    }
}

/// A tunnel: what its driver owns, and its streams find as long as it runs.
pub(super) struct Wire {
    pub tls: HeldTls,
    pub connection: RefCell<Connection>,
    pub load: Rc<Load>,
    closing: Cell<Option<Instant>>,
    gathering: Cell<Gathering>,
}

/// Whether to wait a little before sending, because more is about to be said.
///
/// Where several streams speak in one turn, their apps and peers are at work on this machine's cores: giving those way
/// and looking at the sockets once more costs less than another record, system call and wake-up of the peer. A stream
/// that speaks alone never waits, and there is no timer.
#[derive(Debug, Clone, Copy, Default)]
struct Gathering {
    /// What streams have written since the last time that all was sent.
    said: u32,
    /// Of that, what was there when it was last waited for more.
    known: u32,
    waits: u32,
}

impl Gathering {
    /// Whether to wait once more.
    fn wait(&mut self) -> bool {
        let waits = self.said >= self.known + SEVERAL && self.waits < MOST_WAITS;
        if waits {
            self.known = self.said;
            self.waits += 1;
        } else {
            *self = Self::default();
        }
        waits
    }
}

impl Wire {
    pub fn new(tls: HeldTls, role: Role, load: Rc<Load>, settings: &Settings) -> Rc<Self> {
        let connection = RefCell::new(Connection::new(role, settings));
        Rc::new(Self { tls, connection, load, closing: Cell::new(None), gathering: Cell::default() })
    }

    /// A stream has written something.
    pub fn said(&self) {
        let gathering = self.gathering.get();
        self.gathering.set(Gathering { said: gathering.said + 1, ..gathering });
        self.load.wake();
    }

    /// Gives way once to who may have more to say, if that is worth it; the turn goes on after the next look at the
    /// sockets.
    fn gathers(&self, cx: &mut Context<'_>, tls: &TlsSocket) -> bool {
        let mut gathering = self.gathering.get();
        let waits = tls.waiting() < LITTLE && gathering.wait();
        self.gathering.set(gathering);
        if waits {
            std::thread::yield_now();
            let _ = pin!(tokio::task::yield_now()).poll(cx);
        }
        waits
    }

    /// One turn; ready when the tunnel is over.
    pub fn poll_turn(&self, cx: &mut Context<'_>, watch: &mut Watch) -> Poll<Ended> {
        if let Poll::Ready(why) = self.load.poll_cut(cx) {
            return Poll::Ready(why);
        }
        let (tls, connection) = (&mut *self.tls.get(), &mut *self.connection.borrow_mut());
        let ended = self.read(cx, tls, connection);
        if watch.poll(cx, &self.load, tls.last_heard(), connection).is_ready() {
            return Poll::Ready(Ended::Dead(tls.last_heard().elapsed()));
        }
        if ended.is_none() && self.gathers(cx, tls) {
            return Poll::Pending;
        }
        if let Err(error) = send(cx, tls, connection) {
            // What the peer said before is the better reason.
            let failed = || Ended::Failed(format!("writing to the tunnel: {error}"));
            return Poll::Ready(ended.or_else(|| tls.alert().map(Ended::Alert)).unwrap_or_else(failed));
        }
        connection.check_unsent();
        if let Some((reason, what)) = connection.failed() {
            let _ = write_out(tls, connection);
            let tls = self.tls.clone();
            // Streams need not wait until the peer has heard of it.
            tokio::task::spawn_local(timeout(LINGER, poll_fn(move |cx| tls.get().poll_linger(cx))));
            return Poll::Ready(Ended::Failed(format!("the peer broke HTTP/2: {what} ({reason:?})")));
        }
        if connection.grant(tls.room()) {
            cx.waker().wake_by_ref();
        }
        if let Some(ended) = ended {
            let fault = connection.peer_fault().filter(|_| !matches!(ended, Ended::Alert(_)));
            let named = |reason: Reason| Ended::Failed(format!("the peer ended it: {reason:?}"));
            return Poll::Ready(fault.map_or(ended, named));
        }
        if !connection.is_done() || !connection.out().is_empty() {
            return Poll::Pending;
        }
        let since = self.closing.get().unwrap_or_else(Instant::now);
        self.closing.set(Some(since));
        match tls.poll_close(cx) {
            Poll::Pending if since.elapsed() < CLOSE => Poll::Pending,
            _ => Poll::Ready(Ended::Closed),
        }
    }

    /// Reads what there is, within what is fair to others of this thread. How the tunnel ended, if it did.
    fn read(&self, cx: &mut Context<'_>, tls: &mut TlsSocket, connection: &mut Connection) -> Option<Ended> {
        for _ in 0..READS {
            let read = tls.poll_read(cx, |bytes| connection.read(bytes));
            connection.deliver();
            match read {
                Poll::Pending => return None,
                Poll::Ready(Ok(true)) => {}
                Poll::Ready(Ok(false)) => return Some(Ended::Closed),
                Poll::Ready(Err(error)) => {
                    return Some(match tls.alert() {
                        Some(alert) => Ended::Alert(alert),
                        None => Ended::Failed(error.to_string()),
                    });
                }
            }
        }
        cx.waker().wake_by_ref();
        None
    }
}

/// Puts what is to be said before the streams' bytes.
pub(super) fn write_out(tls: &mut TlsSocket, connection: &mut Connection) -> io::Result<()> {
    let out = connection.out();
    if !out.is_empty() {
        let n = tls.write(out)?;
        out.drain(..n);
        if out.is_empty() && out.capacity() > KEPT_OUT {
            *out = Vec::new();
        }
    }
    Ok(())
}

/// Sends all that was written, or what the socket takes.
fn send(cx: &mut Context<'_>, tls: &mut TlsSocket, connection: &mut Connection) -> io::Result<()> {
    loop {
        write_out(tls, connection)?;
        match tls.poll_send(cx) {
            Poll::Ready(sent) => sent?,
            Poll::Pending => return Ok(()),
        }
        if connection.out().is_empty() {
            return Ok(());
        }
    }
}

/// Messages in a turn that show that streams are busy.
const SEVERAL: u32 = 2;
/// Bytes up to which a turn's messages are worth waiting with.
const LITTLE: usize = 64 * 1024;
/// Times that a turn waits for more.
const MOST_WAITS: u32 = 4;
/// Reads of one turn, each of up to a buffer.
const READS: usize = 4;
/// What a peer may take to read our last words.
const CLOSE: Duration = Duration::from_secs(10);
/// Of the space for frames that are not of streams, bytes that are kept.
const KEPT_OUT: usize = 512;
/// Between two looks at a tunnel.
const SHORTEST: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn silence() -> Silence {
        Silence::new(&Settings { ping_after: 5 * SECOND, dead_after: 15 * SECOND, ..Settings::default() })
    }

    /// Looks for so long as often as it is told to; `heard` says when the last byte came, given when the last ping
    /// was sent. When the tunnel was found dead, and when pings were sent.
    fn watch(
        seconds: u32,
        in_use: bool,
        heard: impl Fn(Instant, Option<Instant>) -> Instant,
    ) -> (Option<Duration>, Vec<Duration>) {
        let (mut silence, begun) = (silence(), Instant::now() + 600 * SECOND);
        let (mut now, mut pings, mut pinged) = (begun, Vec::new(), None);
        while now < begun + seconds * SECOND {
            now += match silence.look(in_use, heard(begun, pinged), now) {
                Look::Dead => return (Some(now - begun), pings),
                Look::Again(next) => next.max(SHORTEST),
                Look::Ping(next) => {
                    pings.push(now - begun);
                    pinged = Some(now);
                    next.max(SHORTEST)
                }
            };
        }
        (None, pings)
    }

    #[test]
    fn a_quiet_tunnel_lives_for_as_long_as_each_ping_is_answered() {
        let (dead, pings) = watch(600, true, |begun, pinged| pinged.map_or(begun, |at| at + SECOND / 10));
        assert_eq!(dead, None);
        assert!(pings.len() > 50, "{pings:?}");
    }

    #[test]
    fn a_peer_that_falls_silent_is_pinged_and_dead_in_bounded_time() {
        let (dead, pings) = watch(600, true, |begun, _| begun);
        assert_eq!((dead, pings), (Some(15 * SECOND), vec![5 * SECOND]));
        // It answered twice before.
        let (dead, pings) = watch(600, true, |begun, pinged| match pinged {
            Some(at) if at < begun + 11 * SECOND => at + SECOND / 10,
            Some(_) => begun + 10 * SECOND + SECOND / 5,
            None => begun,
        });
        assert_eq!(pings.len(), 3);
        assert!(dead.is_some_and(|dead| dead < 26 * SECOND), "{dead:?}");
    }

    #[test]
    fn a_tunnel_that_was_idle_for_long_has_its_whole_time_to_answer() {
        let (dead, pings) = watch(600, true, |begun, _| begun - 60 * SECOND);
        assert_eq!((dead, pings), (Some(10 * SECOND), vec![Duration::ZERO]));
    }

    #[test]
    fn a_tunnel_without_streams_is_not_pinged() {
        assert_eq!(watch(600, false, |begun, _| begun), (None, vec![]));
    }

    #[test]
    fn several_who_speak_are_waited_for_while_more_comes_and_not_for_ever() {
        let mut gathering = Gathering::default();
        let mut turn = |said| {
            gathering.said += said;
            gathering.wait()
        };
        assert!(!turn(1), "who speaks alone does not wait");
        assert!(turn(2));
        assert!(!turn(1), "nobody else came");
        assert_eq!([5; 6].map(&mut turn), [true, true, true, true, false, true]);
    }
}

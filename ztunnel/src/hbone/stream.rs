//! One end of a CONNECT that was taken: bytes of an app go in, and come out into its [`Sink`].

use std::cell::RefCell;
use std::io;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

use h2::Reason;

use super::connection::TURN;
use super::driver::{Wire, write_out};
use super::fields::Response;
use super::frame::{Head, flag, kind};
use super::state::{Broken, Sink, State};
use super::tls::TlsSocket;

/// A stream of a tunnel. Dropped before both directions have ended it is reset.
pub struct Stream {
    wire: Weak<Wire>,
    id: u32,
    state: Rc<RefCell<State>>,
}

impl Stream {
    pub(super) fn new(wire: &Rc<Wire>, id: u32, state: Rc<RefCell<State>>) -> Self {
        Self { wire: Rc::downgrade(wire), id, state }
    }

    /// What comes goes there at once from now on. What has come before is to be taken with [`Self::take_waiting`].
    pub fn set_sink(&self, sink: Rc<dyn Sink>) {
        let mut state = self.state.borrow_mut();
        sink.waits(state.waiting.len());
        state.sink = Some(sink);
    }

    /// How the stream was broken off, if it was. Its user is woken when that changes.
    pub fn poll_broken(&self, cx: &mut Context<'_>) -> Poll<Broken> {
        let mut state = self.state.borrow_mut();
        if let Some(broken) = &state.broken {
            return Poll::Ready(broken.clone());
        }
        state.set_user(cx.waker());
        Poll::Pending
    }

    /// The answer to our request.
    pub(super) fn poll_answer(&self, cx: &mut Context<'_>) -> Poll<Result<Response, Broken>> {
        if let Some(answer) = self.state.borrow_mut().answer.take() {
            return Poll::Ready(Ok(answer));
        }
        self.poll_broken(cx).map(Err)
    }

    /// Hands what waits to `put`, which takes a prefix. Whether nothing is left.
    pub fn take_waiting(&self, mut put: impl FnMut(&[u8]) -> io::Result<usize>) -> io::Result<bool> {
        let wire = self.wire.upgrade();
        let mut state = self.state.borrow_mut();
        while !state.waiting.is_empty() {
            let n = put(state.waiting.as_slices().0)?;
            if n == 0 {
                return Ok(false);
            }
            state.waiting.drain(..n);
            if let Some(wire) = &wire {
                wire.connection.borrow_mut().taken(self.id, &mut state, n);
                wire.load.wake();
            }
        }
        if state.waiting.capacity() > 0 {
            state.waiting = Default::default();
        }
        Ok(true)
    }

    /// Whether the peer has ended its direction, and all of it has been taken.
    pub fn is_at_end(&self) -> bool {
        let state = self.state.borrow();
        state.peer_ended && state.waiting.is_empty()
    }

    /// How many bytes can be sent at once: ready when there is room for at least one.
    pub fn poll_room(&self, cx: &mut Context<'_>) -> Poll<Result<usize, Broken>> {
        let mut state = self.state.borrow_mut();
        if let Some(broken) = &state.broken {
            return Poll::Ready(Err(broken.clone()));
        }
        let Some(wire) = self.wire.upgrade() else { return Poll::Ready(Err(gone())) };
        state.set_user(cx.waker());
        let (tls, connection) = (&mut *wire.tls.get(), &mut *wire.connection.borrow_mut());
        let is_clear = write_out(tls, connection).is_ok() && connection.out().is_empty();
        let room = connection.room(self.id, &mut state, if is_clear { tls.room() } else { 0 });
        if room > 0 { Poll::Ready(Ok(room.min(TURN))) } else { Poll::Pending }
    }

    /// Sends bytes that there is room for; `end`: none will follow. They leave at the end of the tunnel's turn.
    pub fn send(&self, mut bytes: &[u8], end: bool) -> Result<(), Broken> {
        let mut state = self.state.borrow_mut();
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        let wire = self.wire.upgrade().ok_or_else(gone)?;
        let (tls, connection) = (&mut *wire.tls.get(), &mut *wire.connection.borrow_mut());
        let failed = |e: io::Error| Broken::Tunnel(e.to_string().into());
        write_out(tls, connection).map_err(failed)?;
        while !bytes.is_empty() {
            let (part, rest) = bytes.split_at(bytes.len().min(connection.frame_size()));
            bytes = rest;
            let last = end && bytes.is_empty();
            let head = Head::new(kind::DATA, if last { flag::END_STREAM } else { 0 }, self.id, part.len());
            write(tls, &head.bytes()).and_then(|()| write(tls, part)).map_err(failed)?;
            connection.sent(&mut state, part.len());
            if last {
                connection.end_sent(self.id, &mut state);
            }
        }
        if end && !state.we_ended {
            let head = Head::new(kind::DATA, flag::END_STREAM, self.id, 0);
            connection.out().extend_from_slice(&head.bytes());
            connection.end_sent(self.id, &mut state);
        }
        wire.said();
        Ok(())
    }

    /// Breaks it off, if there is something to break off.
    pub fn reset(&self, reason: Reason) {
        if let Some(wire) = self.wire.upgrade() {
            wire.connection.borrow_mut().reset(self.id, reason);
            wire.load.wake();
        }
    }

    /// Answers the peer's request.
    pub(super) fn answer(&self, response: &Response, end: bool) -> Result<(), Broken> {
        if let Some(broken) = &self.state.borrow().broken {
            return Err(broken.clone());
        }
        let wire = self.wire.upgrade().ok_or_else(gone)?;
        wire.connection.borrow_mut().answer(self.id, response, end);
        wire.said();
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let is_over = {
            let mut state = self.state.borrow_mut();
            state.sink = None;
            state.is_over()
        };
        if !is_over {
            self.reset(Reason::CANCEL);
        }
    }
}

/// Writes what there must be room for.
fn write(tls: &mut TlsSocket, bytes: &[u8]) -> io::Result<()> {
    if tls.write(bytes)? < bytes.len() {
        Err(io::Error::other("more was sent than there was room for"))
    } else {
        Ok(())
    }
}

fn gone() -> Broken {
    Broken::Tunnel("the tunnel has ended".into())
}

#[cfg(test)]
impl Stream {
    /// The next bytes, for a test without a sink; nothing at the end.
    pub async fn hear(&self) -> Option<Result<Vec<u8>, Broken>> {
        std::future::poll_fn(|cx| {
            let mut heard = Vec::new();
            let all = self.take_waiting(|bytes| {
                heard.extend_from_slice(bytes);
                Ok(bytes.len())
            });
            assert!(all.expect("the sink does not fail"));
            if !heard.is_empty() {
                return Poll::Ready(Some(Ok(heard)));
            }
            if self.is_at_end() {
                return Poll::Ready(None);
            }
            self.poll_broken(cx).map(|broken| Some(Err(broken)))
        })
        .await
    }
}

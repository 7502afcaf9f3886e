//! Moves bytes between an app and a tunnel, or between two TCP connections, until both directions have ended.
//!
//! An end is never dressed up: only END_STREAM and FIN are orderly, and anything else reaches the other side as a
//! reset. A relay owns no buffer while nothing moves, and holds no more than one read on its way to a slow reader:
//! what the reader does not take stays in the stream's window and in socket buffers.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use h2::{Reason, RecvStream, SendStream};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::hbone::Buffer;

/// Which end of a relay: the side that connected to us, or the side that we connected to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Client,
    Server,
}

/// How a relay ended that did not end with an orderly close of both directions.
#[derive(Debug, thiserror::Error)]
pub enum Cut {
    #[error("the {0} reset the connection")]
    Reset(Side),
    #[error("the tunnel to the {0} broke: {1}")]
    Tunnel(Side, String),
    #[error("the {0}'s connection failed: {1}")]
    Io(Side, io::Error),
    #[error("half closed by the {0} and silent for {1:?}")]
    HalfClosed(Side, Duration),
}

/// What a relay has moved and how it ended. The last to be closed says who closed the connection first.
#[derive(Debug, Clone, Copy, Default)]
pub struct Moved {
    /// Client to server, bytes.
    pub up: u64,
    /// Server to client, bytes.
    pub down: u64,
    /// The side whose FIN came first.
    pub first_fin: Option<Side>,
}

/// Where a relay reports what it moves while it runs.
pub trait Meter {
    fn up(&self, bytes: u64);
    fn down(&self, bytes: u64);
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "client",
            Self::Server => "server",
        })
    }
}

impl Side {
    fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// Two sides between which bytes are moved. Dropped before its end, both sides see a reset.
pub trait Relay {
    /// Moves what can be moved; ready when both directions have ended. Not polled again after that.
    fn poll(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<Moved, Cut>>;
}

/// Between an app's TCP connection and a stream.
pub struct TunnelRelay {
    app: Resetting,
    app_side: Side,
    send: SendStream<Bytes>,
    recv: RecvStream,
    read_size: usize,
    pending: VecDeque<Bytes>,
    pending_bytes: usize,
    recv_ended: bool,
    from_app_done: bool,
    to_app_done: bool,
    progress: bool,
    moved: Moved,
    silence: Silence,
}

impl TunnelRelay {
    /// `app_side` says which side the app is; `half_close` is the silence after which a half-closed connection is ended.
    pub fn new(
        app: Resetting,
        app_side: Side,
        send: SendStream<Bytes>,
        recv: RecvStream,
        half_close: Duration,
    ) -> Self {
        Self {
            app,
            app_side,
            send,
            recv,
            read_size: FIRST_READ,
            pending: VecDeque::new(),
            pending_bytes: 0,
            recv_ended: false,
            from_app_done: false,
            to_app_done: false,
            progress: false,
            moved: Moved::default(),
            silence: Silence::new(half_close),
        }
    }
}

impl Relay for TunnelRelay {
    fn poll(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<Moved, Cut>> {
        self.progress = false;
        match self.poll_both(cx, meter) {
            Poll::Ready(Ok(())) => {
                // Orderly: the close of the socket is a FIN that has been sent already.
                self.app.keep();
                return Poll::Ready(Ok(self.moved));
            }
            Poll::Ready(Err(cut)) => {
                self.send.send_reset(Reason::CANCEL);
                return Poll::Ready(Err(cut));
            }
            Poll::Pending => {}
        }
        if self.from_app_done != self.to_app_done {
            let first = if self.from_app_done { self.app_side } else { self.app_side.other() };
            if self.silence.poll(cx, self.progress).is_ready() {
                self.send.send_reset(Reason::CANCEL);
                return Poll::Ready(Err(Cut::HalfClosed(first, self.silence.limit)));
            }
        }
        Poll::Pending
    }
}

impl TunnelRelay {
    fn poll_both(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<(), Cut>> {
        let mut pending = false;
        if !self.to_app_done {
            match self.poll_to_app(cx, meter) {
                Poll::Ready(Ok(())) => {
                    self.to_app_done = true;
                    self.progress = true;
                    self.moved.first_fin.get_or_insert(self.app_side.other());
                }
                Poll::Ready(Err(cut)) => return Poll::Ready(Err(cut)),
                Poll::Pending => pending = true,
            }
        }
        if !self.from_app_done {
            match self.poll_from_app(cx, meter) {
                Poll::Ready(Ok(())) => {
                    self.from_app_done = true;
                    self.progress = true;
                    self.moved.first_fin.get_or_insert(self.app_side);
                }
                Poll::Ready(Err(cut)) => return Poll::Ready(Err(cut)),
                Poll::Pending => pending = true,
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn poll_from_app(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<(), Cut>> {
        loop {
            // Window is asked for only when there is something to send: an idle stream holds none of the tunnel's.
            if self.app.socket.poll_read_ready(cx).map_err(|e| Cut::Io(self.app_side, e))?.is_pending() {
                self.send.reserve_capacity(0);
                if self.to_app_done {
                    // Nobody else would notice a reset then.
                    if let Poll::Ready(reason) = self.send.poll_reset(cx) {
                        return Poll::Ready(Err(self.broken(reason.map_or_else(|e| e, h2::Error::from))));
                    }
                }
                return Poll::Pending;
            }
            self.send.reserve_capacity(self.read_size);
            if self.send.capacity() == 0 {
                match ready!(self.send.poll_capacity(cx)) {
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Poll::Ready(Err(self.broken(error))),
                    None => return Poll::Ready(Err(Cut::Reset(self.app_side.other()))),
                }
            }
            let size = self.read_size.min(self.send.capacity());
            if size == 0 {
                continue;
            }
            let mut buffer = BytesMut::with_capacity(size);
            let mut room = ReadBuf::uninit(&mut buffer.spare_capacity_mut()[..size]);
            match Pin::new(&mut self.app.socket).poll_read(cx, &mut room) {
                Poll::Pending => continue,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(self.app_failed(error))),
            }
            let n = room.filled().len();
            // SAFETY: `poll_read` has initialised the first `n` bytes of the spare capacity.
            unsafe { buffer.set_len(n) };
            self.send.send_data(buffer.freeze(), n == 0).map_err(|e| self.broken(e))?;
            if n == 0 {
                return Poll::Ready(Ok(()));
            }
            self.read_size = next_read(self.read_size, n);
            self.progress = true;
            count(self.app_side, n as u64, meter, &mut self.moved);
        }
    }

    fn poll_to_app(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<(), Cut>> {
        loop {
            while !self.recv_ended && self.pending.len() < GATHER && self.pending_bytes < MAX_READ {
                match self.recv.poll_data(cx) {
                    Poll::Ready(Some(Ok(bytes))) => {
                        self.pending_bytes += bytes.len();
                        if !bytes.is_empty() {
                            self.pending.push_back(bytes);
                        }
                    }
                    Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(self.broken(error))),
                    Poll::Ready(None) => self.recv_ended = true,
                    Poll::Pending => break,
                }
            }
            if self.pending.is_empty() {
                self.pending = VecDeque::new();
                if !self.recv_ended {
                    return Poll::Pending;
                }
                if self.from_app_done {
                    // The close that follows says it too.
                    return Poll::Ready(Ok(()));
                }
                return Pin::new(&mut self.app.socket).poll_shutdown(cx).map_err(|e| self.app_failed(e));
            }
            let mut slices = [IoSlice::new(&[]); GATHER];
            for (slice, bytes) in slices.iter_mut().zip(&self.pending) {
                *slice = IoSlice::new(bytes);
            }
            let slices = &slices[..self.pending.len()];
            let n = match ready!(Pin::new(&mut self.app.socket).poll_write_vectored(cx, slices)) {
                Ok(n) => n,
                Err(error) => return Poll::Ready(Err(self.app_failed(error))),
            };
            self.written(n).map_err(|e| self.broken(e))?;
            count(self.app_side.other(), n as u64, meter, &mut self.moved);
        }
    }

    /// Bytes that the app's socket took: the peer may send as many more.
    fn written(&mut self, n: usize) -> Result<(), h2::Error> {
        self.progress = true;
        self.pending_bytes -= n;
        let mut left = n;
        while left > 0 {
            let Some(front) = self.pending.front_mut() else { break };
            let part = left.min(front.len());
            front.advance(part);
            left -= part;
            if front.is_empty() {
                self.pending.pop_front();
            }
        }
        if self.recv_ended { Ok(()) } else { self.recv.flow_control().release_capacity(n) }
    }

    fn app_failed(&self, error: io::Error) -> Cut {
        failed(self.app_side, error)
    }

    fn broken(&self, error: h2::Error) -> Cut {
        let side = self.app_side.other();
        match error.reason() {
            Some(Reason::CANCEL | Reason::NO_ERROR) if error.is_reset() => Cut::Reset(side),
            _ => Cut::Tunnel(side, error.to_string()),
        }
    }
}

/// Between two TCP connections.
pub struct PlainRelay {
    client: Resetting,
    server: Resetting,
    up: Pipe,
    down: Pipe,
    moved: Moved,
    silence: Silence,
}

impl PlainRelay {
    /// `half_close` is the silence after which a half-closed connection is ended.
    pub fn new(client: Resetting, server: TcpStream, half_close: Duration) -> Self {
        Self {
            client,
            server: Resetting::new(server),
            up: Pipe::default(),
            down: Pipe::default(),
            moved: Moved::default(),
            silence: Silence::new(half_close),
        }
    }
}

impl Relay for PlainRelay {
    fn poll(&mut self, cx: &mut Context<'_>, meter: &impl Meter) -> Poll<Result<Moved, Cut>> {
        let Self { client, server, up, down, moved, silence } = self;
        let before = (moved.up, moved.down, up.done, down.done);
        let up_turn = up.poll(cx, &mut client.socket, &mut server.socket, Side::Client, |n| {
            moved.up += n;
            meter.up(n);
        });
        if up.done {
            moved.first_fin.get_or_insert(Side::Client);
        }
        let down_turn = down.poll(cx, &mut server.socket, &mut client.socket, Side::Server, |n| {
            moved.down += n;
            meter.down(n);
        });
        if down.done {
            moved.first_fin.get_or_insert(Side::Server);
        }
        match (up_turn, down_turn) {
            (Poll::Ready(Err(cut)), _) | (_, Poll::Ready(Err(cut))) => return Poll::Ready(Err(cut)),
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => {
                client.keep();
                server.keep();
                return Poll::Ready(Ok(*moved));
            }
            _ => {}
        }
        if let Some(first) = moved.first_fin {
            let progress = before != (moved.up, moved.down, up.done, down.done);
            if silence.poll(cx, progress).is_ready() {
                return Poll::Ready(Err(Cut::HalfClosed(first, silence.limit)));
            }
        }
        Poll::Pending
    }
}

/// One direction between two TCP connections.
#[derive(Default)]
struct Pipe {
    /// Lent only while it holds bytes.
    buffer: Option<Buffer>,
    ended: bool,
    done: bool,
}

impl Pipe {
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        from: &mut TcpStream,
        to: &mut TcpStream,
        from_side: Side,
        mut count: impl FnMut(u64),
    ) -> Poll<Result<(), Cut>> {
        while !self.done {
            if let Some(buffer) = &mut self.buffer {
                while !buffer.is_empty() {
                    let n = ready!(Pin::new(&mut *to).poll_write(cx, buffer.filled()))
                        .map_err(|e| failed(from_side.other(), e))?;
                    buffer.take(n);
                    count(n as u64);
                }
            }
            if self.ended {
                ready!(Pin::new(&mut *to).poll_shutdown(cx)).map_err(|e| failed(from_side.other(), e))?;
                self.done = true;
                break;
            }
            if self.buffer.is_none() {
                ready!(from.poll_read_ready(cx)).map_err(|e| failed(from_side, e))?;
            }
            let buffer = self.buffer.get_or_insert_with(Buffer::lend);
            let mut room = ReadBuf::new(buffer.room(1));
            let read = Pin::new(&mut *from).poll_read(cx, &mut room);
            let n = room.filled().len();
            if read.is_pending() {
                self.buffer = None;
            }
            ready!(read).map_err(|e| failed(from_side, e))?;
            buffer_add(&mut self.buffer, n);
            if n == 0 {
                self.buffer = None;
                self.ended = true;
            }
        }
        Poll::Ready(Ok(()))
    }
}

fn buffer_add(buffer: &mut Option<Buffer>, n: usize) {
    if let Some(buffer) = buffer {
        buffer.add(n);
    }
}

fn failed(side: Side, error: io::Error) -> Cut {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => Cut::Reset(side),
        _ => Cut::Io(side, error),
    }
}

fn count(from: Side, n: u64, meter: &impl Meter, moved: &mut Moved) {
    match from {
        Side::Client => {
            moved.up += n;
            meter.up(n);
        }
        Side::Server => {
            moved.down += n;
            meter.down(n);
        }
    }
}

/// Reads grow while they are filled and shrink when they are not.
fn next_read(size: usize, read: usize) -> usize {
    if read == size {
        (size * 4).min(MAX_READ)
    } else if read < size / 4 {
        (size / 2).max(FIRST_READ)
    } else {
        size
    }
}

/// A socket whose close is a RST, unless the relay ended in order.
pub struct Resetting {
    socket: TcpStream,
    orderly: bool,
}

impl Resetting {
    pub fn new(socket: TcpStream) -> Self {
        Self { socket, orderly: false }
    }

    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    fn keep(&mut self) {
        self.orderly = true;
    }
}

impl Drop for Resetting {
    fn drop(&mut self) {
        if !self.orderly {
            // Nothing to do if the socket is gone.
            let _ = SockRef::from(&self.socket).set_linger(Some(Duration::ZERO));
        }
    }
}

/// The deadline of a half-closed connection.
struct Silence {
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    last: Option<Instant>,
}

impl Silence {
    fn new(limit: Duration) -> Self {
        Self { limit, timer: None, last: None }
    }

    /// Ready when nothing has moved for the limit. Called at each turn of a half-closed connection.
    fn poll(&mut self, cx: &mut Context<'_>, progress: bool) -> Poll<()> {
        let now = Instant::now();
        if progress || self.last.is_none() {
            self.last = Some(now);
        }
        let due = self.last.unwrap_or(now) + self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(due)));
        loop {
            ready!(timer.as_mut().poll(cx));
            if due <= Instant::now() {
                return Poll::Ready(());
            }
            timer.as_mut().reset(due);
        }
    }
}

/// First and smallest read from an app, bytes.
const FIRST_READ: usize = 4 * 1024;
/// Largest read from an app, and most that is taken out of a stream before the app's socket took it, bytes.
const MAX_READ: usize = 256 * 1024;
/// Pieces that go to the app in one call.
const GATHER: usize = 16;

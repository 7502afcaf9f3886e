//! Moves bytes between an app and a tunnel, or between two TCP connections, until both directions have ended.
//!
//! An end is never dressed up: only END_STREAM and FIN are orderly, and anything else reaches the other side as a
//! reset. A relay owns no buffer while nothing moves, and holds no more than one read on its way to a slow reader:
//! what the reader does not take stays in the stream's window and in socket buffers.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use h2::Reason;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

use super::share::Buffered;
use crate::hbone::{Broken, Buffer, Sink, Stream};

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
pub trait Meter: 'static {
    fn up(&self, bytes: u64);
    fn down(&self, bytes: u64);
    /// Whether the connection has been ordered to end: nothing more may reach either side.
    fn is_over(&self) -> bool;
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
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Moved, Cut>>;
}

/// Between an app's TCP connection and a stream. Bytes from the tunnel are written to the app by the tunnel's driver as
/// they come, and only what the app does not take at once by the relay.
pub struct TunnelRelay<M> {
    app: Rc<App<M>>,
    stream: Stream,
    attached: bool,
    from_app_done: bool,
    to_app_done: bool,
    seen: (u64, u64),
    first_fin: Option<Side>,
    silence: Silence,
    /// While the app has more to say than the stream takes.
    stall: Stall,
}

/// The app's connection, for the relay to read from, and for whoever has bytes to write to.
struct App<M> {
    socket: RefCell<Resetting>,
    side: Side,
    meter: M,
    from: Cell<u64>,
    to: Cell<u64>,
    /// Of a write that nobody has asked about yet.
    error: Cell<Option<io::Error>>,
    /// Bytes that the app has not taken yet.
    buffered: Buffered,
}

impl<M: Meter> App<M> {
    fn count(&self, from: Side, bytes: u64) {
        let moved = if from == self.side { &self.from } else { &self.to };
        moved.set(moved.get() + bytes);
        match from {
            Side::Client => self.meter.up(bytes),
            Side::Server => self.meter.down(bytes),
        }
    }
}

impl<M: Meter> Sink for App<M> {
    fn put(&self, bytes: &[u8]) -> io::Result<usize> {
        if self.meter.is_over() {
            return Ok(0);
        }
        match self.socket.borrow().socket.try_write(bytes) {
            Ok(n) => {
                self.count(self.side.other(), n as u64);
                Ok(n)
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            Err(error) => {
                let kind = error.kind();
                self.error.set(Some(error));
                Err(kind.into())
            }
        }
    }

    fn waits(&self, bytes: usize) {
        self.buffered.waits(bytes);
    }
}

impl<M: Meter> TunnelRelay<M> {
    /// `app_side` says which side the app is; `half_close` is the silence after which a half-closed connection is ended.
    pub fn new(
        app: Resetting,
        app_side: Side,
        stream: Stream,
        meter: M,
        buffered: Buffered,
        half_close: Duration,
    ) -> Self {
        let app = App {
            socket: app.into(),
            side: app_side,
            meter,
            from: Cell::new(0),
            to: Cell::new(0),
            error: Cell::new(None),
            buffered,
        };
        Self {
            app: Rc::new(app),
            stream,
            attached: false,
            from_app_done: false,
            to_app_done: false,
            seen: (0, 0),
            first_fin: None,
            silence: Silence::new(half_close),
            stall: Stall::default(),
        }
    }

    fn moved(&self) -> Moved {
        let (from, to) = (self.app.from.get(), self.app.to.get());
        let (up, down) = if self.app.side == Side::Client { (from, to) } else { (to, from) };
        Moved { up, down, first_fin: self.first_fin }
    }
}

impl<M: Meter> Relay for TunnelRelay<M> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Moved, Cut>> {
        // Not before whoever polls has seen that the connection may begin.
        if !std::mem::replace(&mut self.attached, true) {
            self.stream.set_sink(self.app.clone());
        }
        match self.poll_both(cx) {
            Poll::Ready(Ok(())) => {
                // Orderly: the close of the socket is a FIN that has been sent already.
                self.app.socket.borrow_mut().keep();
                return Poll::Ready(Ok(self.moved()));
            }
            Poll::Ready(Err(cut)) => {
                self.stream.reset(Reason::CANCEL);
                return Poll::Ready(Err(cut));
            }
            Poll::Pending => {}
        }
        if self.from_app_done != self.to_app_done {
            let first = if self.from_app_done { self.app.side } else { self.app.side.other() };
            let now = (self.app.from.get(), self.app.to.get());
            let progress = std::mem::replace(&mut self.seen, now) != now;
            if self.silence.poll(cx, progress).is_ready() {
                // What the driver moved is seen only now.
                self.stream.reset(Reason::CANCEL);
                return Poll::Ready(Err(Cut::HalfClosed(first, self.silence.limit)));
            }
        }
        Poll::Pending
    }
}

impl<M: Meter> TunnelRelay<M> {
    fn poll_both(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Cut>> {
        if !self.to_app_done && self.poll_to_app(cx)?.is_ready() {
            self.to_app_done = true;
            self.first_fin.get_or_insert(self.app.side.other());
        }
        if !self.from_app_done && self.poll_from_app(cx)?.is_ready() {
            self.from_app_done = true;
            self.first_fin.get_or_insert(self.app.side);
        }
        if self.to_app_done && self.from_app_done {
            return Poll::Ready(Ok(()));
        }
        // Also where nothing is to be sent or received a reset must be noticed.
        match self.stream.poll_broken(cx) {
            Poll::Ready(broken) => Poll::Ready(Err(self.broken(broken))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn poll_from_app(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Cut>> {
        let side = self.app.side;
        loop {
            // Room is asked for only when there is something to send.
            let app = &mut self.app.socket.borrow_mut().socket;
            ready!(app.poll_read_ready(cx)).map_err(|e| failed(side, e))?;
            let Poll::Ready(room) = self.stream.poll_room(cx) else {
                let reset = ready!(self.stall.poll(cx, app));
                return Poll::Ready(Err(failed(side, reset)));
            };
            let room = room.map_err(|broken| self.broken(broken))?;
            let mut buffer = Buffer::lend();
            let mut into = ReadBuf::new(&mut buffer.room(0)[..room]);
            ready!(Pin::new(&mut *app).poll_read(cx, &mut into)).map_err(|e| failed(side, e))?;
            let bytes = into.filled();
            self.app.count(side, bytes.len() as u64);
            self.stream.send(bytes, bytes.is_empty()).map_err(|broken| self.broken(broken))?;
            if bytes.is_empty() {
                return Poll::Ready(Ok(()));
            }
        }
    }

    fn poll_to_app(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Cut>> {
        let side = self.app.side;
        loop {
            let all = self.stream.take_waiting(|bytes| {
                let put = self.app.put(bytes)?;
                self.app.buffered.taken(put);
                Ok(put)
            });
            // The first error says why; later ones only that it is so.
            if let Some(error) = self.app.error.take() {
                return Poll::Ready(Err(failed(side, error)));
            }
            if all.map_err(|e| failed(side, e))? {
                break;
            }
            ready!(self.app.socket.borrow().socket.poll_write_ready(cx)).map_err(|e| failed(side, e))?;
        }
        if !self.stream.is_at_end() {
            return Poll::Pending;
        }
        if self.from_app_done {
            // The close that follows says it too.
            return Poll::Ready(Ok(()));
        }
        let socket = &mut self.app.socket.borrow_mut().socket;
        Pin::new(socket).poll_shutdown(cx).map_err(|e| failed(side, e))
    }

    fn broken(&self, broken: Broken) -> Cut {
        let side = self.app.side.other();
        match broken {
            Broken::Reset(Reason::CANCEL | Reason::NO_ERROR) => Cut::Reset(side),
            broken => Cut::Tunnel(side, broken.to_string()),
        }
    }
}

/// Between two TCP connections.
pub struct PlainRelay<M> {
    meter: M,
    client: Resetting,
    server: Resetting,
    up: Pipe,
    down: Pipe,
    moved: Moved,
    silence: Silence,
}

impl<M: Meter> PlainRelay<M> {
    /// `half_close` is the silence after which a half-closed connection is ended.
    pub fn new(client: Resetting, server: TcpStream, meter: M, half_close: Duration) -> Self {
        Self {
            meter,
            client,
            server: Resetting::new(server),
            up: Pipe::default(),
            down: Pipe::default(),
            moved: Moved::default(),
            silence: Silence::new(half_close),
        }
    }
}

impl<M: Meter> Relay for PlainRelay<M> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Moved, Cut>> {
        let Self { meter, client, server, up, down, moved, silence } = self;
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
    /// While the reader takes nothing.
    stall: Stall,
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
        let mut reads = 0;
        while !self.done {
            if let Some(buffer) = &mut self.buffer {
                while !buffer.is_empty() {
                    let Poll::Ready(written) = Pin::new(&mut *to).poll_write(cx, buffer.filled()) else {
                        let reset = ready!(self.stall.poll(cx, from));
                        return Poll::Ready(Err(failed(from_side, reset)));
                    };
                    let n = written.map_err(|e| failed(from_side.other(), e))?;
                    buffer.take(n);
                    count(n as u64);
                }
            }
            if self.ended {
                ready!(Pin::new(&mut *to).poll_shutdown(cx)).map_err(|e| failed(from_side.other(), e))?;
                self.done = true;
                break;
            }
            if reads == READS {
                // The others of this thread have their turn first.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            reads += 1;
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

/// Reads of one turn in each direction, each of up to a buffer.
const READS: u32 = 4;

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

/// A side that has more to say than the other takes is not read from, and its bytes stand before its reset: it is looked
/// for now and then. The clock is left running when the other side takes something: that comes often, and a look too many
/// costs less than a new clock each time.
#[derive(Default)]
struct Stall(Option<Pin<Box<Sleep>>>);

impl Stall {
    /// Ready when the connection has failed, with the reason. Only to be called while the other side takes nothing.
    fn poll(&mut self, cx: &mut Context<'_>, from: &TcpStream) -> Poll<io::Error> {
        loop {
            let clock = self.0.get_or_insert_with(|| Box::pin(sleep(LOOK)));
            ready!(clock.as_mut().poll(cx));
            clock.as_mut().reset(Instant::now() + LOOK);
            // Asked first: the question for an error takes what the next read is to be told.
            if pin!(from.ready(Interest::ERROR)).poll(cx).is_ready()
                && let Some(error) = from.take_error().unwrap_or_else(Some)
            {
                return Poll::Ready(error);
            }
        }
    }
}

/// Between two looks at a side that is not read from.
const LOOK: Duration = Duration::from_secs(1);

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

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    impl Meter for Rc<Cell<u64>> {
        fn up(&self, bytes: u64) {
            self.set(self.get() + bytes);
        }

        fn down(&self, _: u64) {}

        fn is_over(&self) -> bool {
            false
        }
    }

    /// Both ends of a connection.
    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (near, far) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (near.unwrap(), far.unwrap().0)
    }

    #[tokio::test]
    async fn a_turn_moves_a_bounded_number_of_bytes_and_asks_for_the_next_one() {
        let buffer = Buffer::lend().room(0).len();
        // With what was left from the turn before.
        let most = u64::from(READS + 1) * buffer as u64;
        let ((mut client, from), (to, mut server)) = (pair().await, pair().await);
        let moved = Rc::new(Cell::new(0));
        let mut relay = PlainRelay::new(Resetting::new(from), to, moved.clone(), Duration::from_secs(60));
        let total = 16 * most;
        let say = async {
            let block = vec![b'f'; buffer];
            for _ in 0..total / buffer as u64 {
                client.write_all(&block).await.unwrap();
            }
            client.shutdown().await.unwrap();
        };
        let hear = async {
            let mut heard = vec![0; 4 * buffer];
            let mut count = 0;
            loop {
                match server.read(&mut heard).await.unwrap() {
                    0 => break,
                    n => count += n as u64,
                }
            }
            server.shutdown().await.unwrap();
            count
        };
        let carry = std::future::poll_fn(|cx| {
            let before = moved.get();
            let turn = relay.poll(cx);
            assert!(moved.get() - before <= most, "{} bytes in a turn", moved.get() - before);
            turn
        });
        let ((), heard, end) = tokio::join!(say, hear, carry);
        assert_eq!((heard, end.unwrap().up), (total, total));
    }
}

//! Servers with the behaviours that tests need. They run on threads of the test; their sockets are a pod's.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use crate::place::SOCKET_TIMEOUT;
use crate::stream::{End, StreamExt};
use crate::wait::wait_for;

/// What a server does with each connection.
#[derive(Clone)]
pub enum Behaviour {
    /// Sends back what comes, and ends its direction when the client has ended its own.
    Echo,
    /// Speaks first, then echoes.
    Banner(&'static str),
    /// Answers each 128-byte request with 1,024 bytes.
    Requests,
    /// Reads to the end, then sends the number of bytes and their checksum (two times 8 bytes, big endian) and ends.
    Sink,
    /// Sends so many bytes of the [`Pattern`], then ends.
    Source(u64),
    /// Accepts and neither reads nor writes, until the server is dropped.
    Stall,
    /// Ends each connection at once, in order.
    Close,
    /// Resets each connection at once.
    Reset,
    /// Whatever the test likes.
    Custom(Arc<dyn Fn(TcpStream) + Send + Sync>),
}

impl Behaviour {
    pub fn custom(handle: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::Custom(Arc::new(handle))
    }
}

impl fmt::Debug for Behaviour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Echo => "Echo",
            Self::Banner(_) => "Banner",
            Self::Requests => "Requests",
            Self::Sink => "Sink",
            Self::Source(_) => "Source",
            Self::Stall => "Stall",
            Self::Close => "Close",
            Self::Reset => "Reset",
            Self::Custom(_) => "Custom",
        };
        f.write_str(name)
    }
}

/// A connection as the server saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Who the server thinks it talks to (IPv4-mapped addresses are shown as IPv4).
    pub peer: SocketAddr,
    /// Its own address on this connection.
    pub local: SocketAddr,
    /// Bytes received, by the behaviours that read.
    pub received: u64,
    /// How the client ended it; `None` while it is open, or where the behaviour does not wait for the end.
    pub end: Option<End>,
}

/// A running server; dropped, it stops listening and forgets its connections.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    stop: AtomicBool,
    behaviour: Behaviour,
    seen: Mutex<Vec<Seen>>,
    /// Connections that are kept open without reading.
    held: Mutex<Vec<TcpStream>>,
    listener: TcpListener,
}

impl Server {
    pub(crate) fn start(listener: TcpListener, behaviour: Behaviour) -> Self {
        let address = listener.local_addr().expect("a listener has an address");
        let shared = Arc::new(Shared {
            stop: AtomicBool::new(false),
            behaviour,
            seen: Mutex::default(),
            held: Mutex::default(),
            listener,
        });
        let thread = {
            let shared = shared.clone();
            spawn("testbed server", move || accept_all(&shared))
        };
        Self { address, shared, thread: Some(thread) }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// All connections so far, in the order of their coming.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.seen.lock().unwrap().clone()
    }

    /// Waits until at least so many connections have come.
    #[track_caller]
    pub fn wait_seen(&self, count: usize) -> Vec<Seen> {
        wait_for(&format!("{count} connections at the server on {}", self.address), || {
            let seen = self.seen();
            (seen.len() >= count).then_some(seen)
        })
    }

    /// Waits until the latest connection has been ended by its client.
    #[track_caller]
    pub fn wait_last_end(&self) -> End {
        wait_for(&format!("an end of the last connection at {}", self.address), || self.seen().last()?.end)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        // Wakes the accept; a dual-stack listener may refuse it, then the listener is gone already.
        let socket = socket2::SockRef::from(&self.shared.listener);
        let _ = socket.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn spawn<T: Send + 'static>(name: &str, body: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let builder = std::thread::Builder::new().name(name.to_owned()).stack_size(512 * 1024);
    builder.spawn(body).expect("start a thread")
}

fn accept_all(shared: &Arc<Shared>) {
    loop {
        let accepted = shared.listener.accept();
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        match accepted {
            Ok((stream, peer)) => serve_one(shared, stream, peer),
            Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
            Err(e) => panic!("accept on {:?}: {e}", shared.listener.local_addr()),
        }
    }
}

fn serve_one(shared: &Arc<Shared>, stream: TcpStream, peer: SocketAddr) {
    let local = stream.local_addr().map_or(peer, canonical);
    let number = {
        let mut seen = shared.seen.lock().unwrap();
        seen.push(Seen { peer: canonical(peer), local, received: 0, end: None });
        seen.len() - 1
    };
    match shared.behaviour {
        Behaviour::Stall => shared.held.lock().unwrap().push(stream),
        Behaviour::Close => drop(stream),
        Behaviour::Reset => stream.reset(),
        _ => {
            let shared = shared.clone();
            spawn("testbed connection", move || converse(&shared, number, stream));
        }
    }
}

fn converse(shared: &Shared, number: usize, mut stream: TcpStream) {
    // Long: some tests keep a connection idle on purpose.
    let _ = stream.set_read_timeout(Some(SOCKET_TIMEOUT * 30));
    let _ = stream.set_write_timeout(Some(SOCKET_TIMEOUT * 30));
    let mut count = |received| shared.seen.lock().unwrap()[number].received += received;
    let end = match &shared.behaviour {
        Behaviour::Echo => echo(&mut stream, &mut count),
        Behaviour::Banner(text) => stream.write_all(text.as_bytes()).and_then(|()| echo(&mut stream, &mut count)),
        Behaviour::Requests => requests(&mut stream),
        Behaviour::Sink => sink(&mut stream, &mut count),
        Behaviour::Source(total) => source(&mut stream, *total),
        Behaviour::Custom(handle) => {
            let handle = handle.clone();
            handle(stream);
            return;
        }
        Behaviour::Stall | Behaviour::Close | Behaviour::Reset => unreachable!("handled where it was accepted"),
    };
    let end = match end {
        Ok(end) => Some(end),
        // Aborted: the kernel was told to end it.
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionAborted
            ) =>
        {
            Some(End::Reset)
        }
        Err(_) => None,
    };
    shared.seen.lock().unwrap()[number].end = end;
}

fn echo(stream: &mut TcpStream, count: &mut impl FnMut(u64)) -> io::Result<End> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            stream.shutdown(std::net::Shutdown::Write)?;
            return Ok(End::Fin);
        }
        count(n as u64);
        stream.write_all(&buffer[..n])?;
    }
}

fn requests(stream: &mut TcpStream) -> io::Result<End> {
    stream.set_nodelay(true)?;
    let mut request = [0; 128];
    let answer = [b'a'; 1024];
    loop {
        match stream.read_exact(&mut request) {
            Ok(()) => stream.write_all(&answer)?,
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(End::Fin),
            Err(e) => return Err(e),
        }
    }
}

fn sink(stream: &mut TcpStream, count: &mut impl FnMut(u64)) -> io::Result<End> {
    let mut buffer = vec![0; 256 * 1024];
    let mut sum = Checksum::default();
    let mut total = 0u64;
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            break;
        }
        count(n as u64);
        total += n as u64;
        sum.add(&buffer[..n]);
    }
    stream.write_all(&total.to_be_bytes())?;
    stream.write_all(&sum.value().to_be_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)?;
    Ok(End::Fin)
}

fn source(stream: &mut TcpStream, total: u64) -> io::Result<End> {
    send_pattern(stream, total)?;
    stream.shutdown(std::net::Shutdown::Write)?;
    let mut rest = Vec::new();
    crate::stream::read_to_end(stream, &mut rest)
}

/// Sends bytes of the pattern and returns their checksum.
pub fn send_pattern(stream: &mut TcpStream, total: u64) -> io::Result<u64> {
    let mut pattern = Pattern::default();
    let mut sum = Checksum::default();
    let mut buffer = vec![0; 256 * 1024];
    let mut left = total;
    while left > 0 {
        let n = left.min(buffer.len() as u64) as usize;
        pattern.fill(&mut buffer[..n]);
        sum.add(&buffer[..n]);
        stream.write_all(&buffer[..n])?;
        left -= n as u64;
    }
    Ok(sum.value())
}

/// Reads to the end: number of bytes and checksum.
pub fn read_checksum(stream: &mut TcpStream) -> io::Result<(u64, u64)> {
    let mut buffer = vec![0; 256 * 1024];
    let mut sum = Checksum::default();
    let mut total = 0;
    loop {
        let n = stream.read(&mut buffer)?;
        if n == 0 {
            return Ok((total, sum.value()));
        }
        total += n as u64;
        sum.add(&buffer[..n]);
    }
}

/// An endless run of bytes in which no part is like another (a 64-bit generator): lost, doubled or swapped parts
/// change the checksum.
#[derive(Debug)]
pub struct Pattern(u64);

impl Default for Pattern {
    fn default() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }
}

impl Pattern {
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            chunk.copy_from_slice(&self.0.to_le_bytes()[..chunk.len()]);
        }
    }
}

/// Checksum of a stream of bytes that depends on their order, not on how they were cut into pieces.
#[derive(Debug, Default)]
pub struct Checksum {
    sum: u64,
    partial: [u8; 8],
    have: usize,
}

impl Checksum {
    pub fn add(&mut self, mut bytes: &[u8]) {
        if self.have > 0 {
            let take = bytes.len().min(8 - self.have);
            self.partial[self.have..self.have + take].copy_from_slice(&bytes[..take]);
            self.have += take;
            bytes = &bytes[take..];
            if self.have < 8 {
                return;
            }
            self.mix(u64::from_le_bytes(self.partial));
        }
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        self.partial[..rest.len()].copy_from_slice(rest);
        self.have = rest.len();
    }

    pub fn value(&self) -> u64 {
        let mut last = Self { sum: self.sum, partial: [0; 8], have: 0 };
        let mut word = [0; 8];
        word[..self.have].copy_from_slice(&self.partial[..self.have]);
        last.mix(u64::from_le_bytes(word) ^ self.have as u64);
        last.sum
    }

    fn mix(&mut self, word: u64) {
        self.sum = (self.sum.rotate_left(5) ^ word).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.have = 0;
    }
}

/// IPv4-mapped addresses as IPv4, so that tests compare one form.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    (address.ip().to_canonical(), address.port()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_sees_order_and_loss_but_not_the_cuts() {
        let mut bytes = vec![0; 100_003];
        Pattern::default().fill(&mut bytes);
        let whole = |bytes: &[u8]| {
            let mut sum = Checksum::default();
            sum.add(bytes);
            sum.value()
        };
        let mut cut = Checksum::default();
        for (i, piece) in bytes.chunks(37).enumerate() {
            let (a, b) = piece.split_at(i % piece.len());
            cut.add(a);
            cut.add(b);
        }
        assert_eq!(cut.value(), whole(&bytes));
        assert_ne!(whole(&bytes[1..]), whole(&bytes));
        assert_ne!(whole(&bytes[..bytes.len() - 1]), whole(&bytes));
        let mut swapped = bytes.clone();
        swapped.swap(8, 16);
        assert_ne!(whole(&swapped), whole(&bytes));
    }
}

//! The app's own side: runs inside the pod, makes sockets, connects and listens, and hands descriptors out.
//!
//! Must never read or write the sockets that it hands out: what goes through them is the test's business.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Socket, Type};

use super::{Answer, Churn, ChurnReport, Connect, Order, receive, send};

/// Serves orders from standard input until the test is gone.
pub fn run() -> io::Result<()> {
    let control = io::stdin().as_fd().try_clone_to_owned()?;
    while let Some((text, mut fds)) = receive(control.as_fd())? {
        let order: Order = serde_json::from_slice(&text).map_err(io::Error::other)?;
        let Some(reply) = fds.pop() else { continue };
        // An order may block (a connect without an answer); the others go on.
        std::thread::Builder::new().stack_size(256 * 1024).spawn(move || answer(order, reply))?;
    }
    Ok(())
}

fn answer(order: Order, reply: OwnedFd) {
    let mut answer = Answer { error: None, churn: None };
    let done = match order {
        Order::Connect(order) => connect(&order).map(|socket| Some(socket.into())),
        Order::Listen { address, mptcp } => listen(address, mptcp).map(|socket| Some(socket.into())),
        Order::Udp { address } => udp(address).map(|socket| Some(socket.into())),
        Order::Churn(order) => {
            answer.churn = Some(churn(&order));
            Ok(None)
        }
    };
    let fd: Option<OwnedFd> = done.unwrap_or_else(|e| {
        answer.error = Some((e.raw_os_error().unwrap_or(0), e.to_string()));
        None
    });
    let text = serde_json::to_vec(&answer).expect("answers are plain data");
    let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
    // The test may have stopped waiting; then nobody wants the answer.
    let _ = send(reply.as_fd(), &text, &fds);
}

fn stream_protocol(mptcp: bool) -> Protocol {
    if mptcp { Protocol::MPTCP } else { Protocol::TCP }
}

fn connect(order: &Connect) -> io::Result<Socket> {
    let to = if order.mapped { mapped(order.to) } else { order.to };
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(stream_protocol(order.mptcp)))?;
    if let Some(mark) = order.mark {
        socket.set_mark(mark)?;
    }
    if let Some(from) = order.from {
        socket.bind(&(if order.mapped { mapped(from) } else { from }).into())?;
    }
    if let Some(first) = &order.fast_open {
        fast_open(&socket, to, first)?;
        return Ok(socket);
    }
    if order.nonblocking {
        socket.connect_timeout(&to.into(), order.timeout)?;
    } else {
        // A blocking connect as most apps make it; SO_SNDTIMEO bounds it.
        socket.set_write_timeout(Some(order.timeout))?;
        socket.connect(&to.into())?;
        socket.set_write_timeout(None)?;
    }
    Ok(socket)
}

fn mapped(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(v4) => SocketAddrV6::new(v4.ip().to_ipv6_mapped(), v4.port(), 0, 0).into(),
        v6 => v6,
    }
}

fn fast_open(socket: &Socket, to: SocketAddr, first: &[u8]) -> io::Result<()> {
    let sent = socket.send_to_with_flags(first, &to.into(), libc::MSG_FASTOPEN)?;
    let mut rest = &first[sent..];
    while !rest.is_empty() {
        rest = &rest[socket.send(rest)?..];
    }
    Ok(())
}

fn listen(address: SocketAddr, mptcp: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(stream_protocol(mptcp)))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    Ok(socket)
}

fn udp(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    Ok(socket)
}

fn churn(order: &Churn) -> ChurnReport {
    let next = AtomicU32::new(0);
    let errors = Mutex::new(BTreeMap::<String, u32>::new());
    let tenth = (order.connections / 10).max(1);
    let start = Instant::now();
    let marks: Mutex<Vec<(u32, Duration)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..order.threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= order.connections {
                        break;
                    }
                    if number.is_multiple_of(tenth) {
                        marks.lock().unwrap().push((number, start.elapsed()));
                    }
                    let to = order.to[number as usize % order.to.len()];
                    if let Err(e) = one_short(to, number) {
                        *errors.lock().unwrap().entry(e.to_string()).or_default() += 1;
                    }
                }
            });
        }
    });
    let mut marks = marks.into_inner().unwrap();
    marks.push((order.connections, start.elapsed()));
    marks.sort_unstable();
    let rate = |pair: &[(u32, Duration)]| f64::from(pair[1].0 - pair[0].0) / (pair[1].1 - pair[0].1).as_secs_f64();
    let errors = errors.into_inner().unwrap();
    let failed: u32 = errors.values().sum();
    ChurnReport { done: order.connections - failed, errors, rates: marks.windows(2).map(rate).collect() }
}

/// Connects, sends a line, expects it back, and closes first.
fn one_short(to: SocketAddr, number: u32) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_write_timeout(Some(Duration::from_secs(10)))?;
    socket.set_read_timeout(Some(Duration::from_secs(10)))?;
    socket.connect(&to.into()).map_err(|e| step("connect", &e))?;
    let mut stream = std::net::TcpStream::from(socket);
    let line = format!("connection {number:>12}\n");
    stream.write_all(line.as_bytes()).map_err(|e| step("send", &e))?;
    let mut back = vec![0; line.len()];
    stream.read_exact(&mut back).map_err(|e| step("receive", &e))?;
    if back == line.as_bytes() { Ok(()) } else { Err(io::Error::other("another connection's bytes came back")) }
}

fn step(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Waits for the end of standard input: the sandbox process of a pod, which only keeps its namespaces.
pub fn pause() -> io::Result<()> {
    // It must go away with the test, or it would keep a pod alive that nobody owns.
    io::copy(&mut io::stdin().lock(), &mut io::sink()).map(|_| ())
}

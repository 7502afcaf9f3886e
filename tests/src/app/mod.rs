//! The app of a place: a process in its netns and cgroup that makes sockets on demand and hands the descriptors to
//! the test. So the mesh's hooks see a pod's own process make and connect the socket, while the test reads and
//! writes it as if it were its own.
//!
//! Orders are JSON, one packet each, on a Unix socket; each order brings a socket of its own for the answer.

mod executor;

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command};
use std::sync::Mutex;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

pub use executor::{pause, run as run_executor};

/// Longest order or answer.
const PACKET: usize = 64 * 1024;

/// What an app can be asked to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Order {
    Connect(Connect),
    /// Listen for TCP. An IPv6 wildcard address takes IPv4 too.
    Listen {
        address: SocketAddr,
        mptcp: bool,
    },
    Udp {
        address: SocketAddr,
    },
    Churn(Churn),
}

/// A connection to make.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Connect {
    pub to: SocketAddr,
    pub from: Option<SocketAddr>,
    /// Dial an IPv4 address through an IPv6 socket.
    pub mapped: bool,
    pub mptcp: bool,
    /// First bytes, sent with `MSG_FASTOPEN` in the place of `connect`.
    pub fast_open: Option<Vec<u8>>,
    /// `connect` without blocking, then wait for the socket to become writable.
    pub nonblocking: bool,
    pub mark: Option<u32>,
    pub timeout: Duration,
}

/// Many short connections: connect, send a line, read it back, close first.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Churn {
    pub to: Vec<SocketAddr>,
    pub connections: u32,
    pub threads: u32,
}

/// How many short connections went well, and how fast.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ChurnReport {
    pub done: u32,
    /// Error text → how often.
    pub errors: std::collections::BTreeMap<String, u32>,
    /// Connections per second in each tenth of the connections, in order.
    pub rates: Vec<f64>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// Error number and text of the failed step.
    pub error: Option<(i32, String)>,
    pub churn: Option<ChurnReport>,
}

/// The test's end of an app.
#[derive(Debug)]
pub(crate) struct App {
    control: OwnedFd,
    child: Mutex<Child>,
}

impl App {
    /// Starts the app with a command that already leads into its place.
    pub(crate) fn start(mut command: Command) -> io::Result<Self> {
        let (ours, theirs) = pair()?;
        let child = command.arg("app").stdin(theirs).spawn()?;
        Ok(Self { control: ours, child: Mutex::new(child) })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.lock().unwrap().id()
    }

    /// Gives an order and waits for the answer and its descriptor, if it has one.
    pub(crate) fn order(&self, order: &Order, timeout: Duration) -> io::Result<(Answer, Option<OwnedFd>)> {
        let (ours, theirs) = pair()?;
        rustix::net::sockopt::set_socket_timeout(&ours, rustix::net::sockopt::Timeout::Recv, Some(timeout))?;
        let text = serde_json::to_vec(order).expect("orders are plain data");
        send(self.control.as_fd(), &text, &[theirs.as_fd()])?;
        drop(theirs);
        let Some((text, mut fds)) = receive(ours.as_fd())? else {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the app ended before it answered"));
        };
        let answer: Answer = serde_json::from_slice(&text).map_err(io::Error::other)?;
        match answer.error {
            Some((number, _)) if number != 0 => Err(io::Error::from_raw_os_error(number)),
            Some((_, text)) => Err(io::Error::other(text)),
            None => Ok((answer, fds.pop())),
        }
    }

    /// As [`App::order`], where the answer is a descriptor.
    pub(crate) fn order_fd(&self, order: &Order, timeout: Duration) -> io::Result<OwnedFd> {
        self.order(order, timeout)?.1.ok_or_else(|| io::Error::other("the app answered without a descriptor"))
    }
}

impl Drop for App {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn send(socket: BorrowedFd<'_>, text: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)), "there is room for one descriptor");
    }
    sendmsg(socket, &[io::IoSlice::new(text)], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// One packet with its descriptors; `None` at the end.
fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut text = vec![0; PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(socket, &mut [io::IoSliceMut::new(&mut text)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            other => break other?,
        }
    };
    if received.bytes == 0 {
        return Ok(None);
    }
    text.truncate(received.bytes);
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(Some((text, fds)))
}

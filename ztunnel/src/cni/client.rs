//! The plugin's end of the agent's socket: blocking, without a runtime, every wait bounded.

use std::fmt;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

use super::protocol::{Answer, HEADER, Request, encode, length};

/// Why there is no answer.
#[derive(Debug)]
pub struct AskError {
    /// What was being done.
    pub step: &'static str,
    pub source: io::Error,
}

/// How long to wait for what.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until the agent is there.
    pub connect: Duration,
    /// From then on until its answer is there.
    pub answer: Duration,
}

/// Asks the agent. `netns` goes along as a descriptor.
pub fn ask(
    socket: &Path,
    request: &Request,
    netns: Option<BorrowedFd<'_>>,
    patience: Patience,
) -> Result<Answer, AskError> {
    let failed = |step| move |source| AskError { step, source };
    let agent = connect(socket, Deadline::after(patience.connect)).map_err(failed("connect to the agent"))?;
    let deadline = Deadline::after(patience.answer);
    send(agent.as_fd(), &encode(request), netns, deadline).map_err(failed("send the request to the agent"))?;
    receive(agent.as_fd(), deadline).map_err(failed("wait for the agent's answer"))
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot {}: {}", self.step, self.source)
    }
}

/// A moment by which something must be done.
#[derive(Clone, Copy, Debug)]
pub struct Deadline {
    at: Instant,
    allowed: Duration,
}

impl Deadline {
    pub fn after(allowed: Duration) -> Deadline {
        Deadline { at: Instant::now() + allowed, allowed }
    }

    /// Waits until a descriptor is ready, or the time has come, which is an error.
    pub fn wait(self, fd: BorrowedFd<'_>, flags: PollFlags) -> io::Result<()> {
        loop {
            let left = self.at.saturating_duration_since(Instant::now());
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::from_borrowed_fd(fd, flags)], Some(&left)) {
                Ok(0) => {
                    let text = format!("nothing came within {:?}", self.allowed);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, text));
                }
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn is_over(self) -> bool {
        Instant::now() >= self.at
    }
}

/// An agent that is just being started again is waited for.
fn connect(path: &Path, deadline: Deadline) -> io::Result<OwnedFd> {
    let address = SocketAddrUnix::new(path)?;
    loop {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // A Unix socket connects at once, or says EAGAIN when the listener's queue is full.
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::NOENT | Errno::CONNREFUSED | Errno::AGAIN) if !deadline.is_over() => {
                std::thread::sleep(CONNECT_AGAIN);
            }
            Err(Errno::AGAIN) => return Err(io::Error::new(io::ErrorKind::TimedOut, "it takes no more calls")),
            Err(error) => return Err(error.into()),
        }
    }
}

fn send(agent: BorrowedFd<'_>, mut bytes: &[u8], netns: Option<BorrowedFd<'_>>, deadline: Deadline) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = netns.into_iter().collect();
    let mut first = true;
    while !bytes.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if first && !descriptors.is_empty() {
            // The space is made for one.
            control.push(SendAncillaryMessage::ScmRights(&descriptors));
        }
        match rustix::net::sendmsg(agent, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => {
                bytes = &bytes[sent..];
                first = false;
            }
            Err(Errno::AGAIN) => deadline.wait(agent, PollFlags::OUT)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive(agent: BorrowedFd<'_>, deadline: Deadline) -> io::Result<Answer> {
    let mut header = [0; HEADER];
    fill(agent, &mut header, deadline)?;
    let mut body = vec![0; length(header).map_err(io::Error::other)?];
    fill(agent, &mut body, deadline)?;
    serde_json::from_slice(&body).map_err(|error| io::Error::other(format!("the answer is not understood: {error}")))
}

fn fill(agent: BorrowedFd<'_>, mut space: &mut [u8], deadline: Deadline) -> io::Result<()> {
    while !space.is_empty() {
        match rustix::net::recv(agent, &mut *space, RecvFlags::empty()).map(|(taken, _)| taken) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the agent closed the connection")),
            Ok(taken) => space = &mut space[taken..],
            Err(Errno::AGAIN) => deadline.wait(agent, PollFlags::IN)?,
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

const CONNECT_AGAIN: Duration = Duration::from_millis(20);

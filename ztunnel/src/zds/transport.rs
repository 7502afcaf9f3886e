//! Packets with descriptors over a Unix SEQPACKET socket.
//!
//! Must never hand up a cut packet, nor leak a descriptor that came with one.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use tokio::io::unix::AsyncFd;
use tokio::io::{Interest, Ready};

/// Both sides read into a buffer of this many bytes (ZDS, transport).
pub const MAX_PACKET: usize = 1024;

/// One packet as received, with the descriptors that came with it.
#[derive(Debug)]
pub struct Packet {
    pub bytes: Vec<u8>,
    pub descriptors: Vec<OwnedFd>,
}

/// The process at the other side. The number is 0 if that process is not visible from our pid namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub pid: i32,
    pub uid: u32,
}

/// What went wrong on the socket. After each of these but `TooLong` the connection is of no more use.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("cannot connect to {path}: {source}")]
    Connect { path: PathBuf, source: io::Error },
    #[error("cannot listen on {path}: {source}")]
    Listen { path: PathBuf, source: io::Error },
    #[error("the peer closed the connection")]
    Closed,
    #[error("a packet was longer than {MAX_PACKET} bytes")]
    Truncated,
    #[error("a packet carried more descriptors than {MAX_DESCRIPTORS}, or control data that does not belong to ZDS")]
    ControlTruncated,
    #[error("a message of {0} bytes does not fit into a packet of {MAX_PACKET}")]
    TooLong(usize),
    #[error("the socket failed: {0}")]
    Io(#[from] io::Error),
}

/// One connection.
#[derive(Debug)]
pub struct Seqpacket {
    fd: AsyncFd<OwnedFd>,
}

/// A listening socket at a path, which is removed when this is dropped (unless another has taken its place).
#[derive(Debug)]
pub struct SeqpacketListener {
    fd: AsyncFd<OwnedFd>,
    path: PathBuf,
    inode: u64,
}

impl Seqpacket {
    pub async fn connect(path: &Path) -> Result<Seqpacket, TransportError> {
        let failed = |source: io::Error| TransportError::Connect { path: path.to_owned(), source };
        let socket = socket().map_err(|errno| failed(errno.into()))?;
        let address = SocketAddrUnix::new(path).map_err(|errno| failed(errno.into()))?;
        // A Unix socket connects at once, or says EAGAIN when the listener's queue is full.
        rustix::net::connect(&socket, &address).map_err(|errno| failed(errno.into()))?;
        Seqpacket::from_fd(socket).map_err(failed)
    }

    /// Takes over a connected, non-blocking SEQPACKET socket.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Seqpacket> {
        Ok(Seqpacket { fd: watched(fd, Interest::READABLE | Interest::WRITABLE)? })
    }

    /// Two ends of a connection without a path.
    pub fn pair() -> io::Result<(Seqpacket, Seqpacket)> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok((Seqpacket::from_fd(a)?, Seqpacket::from_fd(b)?))
    }

    /// The process at the other side, as it was when it connected.
    pub fn peer(&self) -> io::Result<Peer> {
        let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // SAFETY: `cred` and `len` outlive the call, and `len` is the size of `cred`.
        let result = unsafe {
            libc::getsockopt(
                self.fd.get_ref().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut cred).cast(),
                &raw mut len,
            )
        };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { pid: cred.pid, uid: cred.uid })
    }

    /// A descriptor of the other side's process: readable once it has ended.
    pub fn peer_process(&self) -> io::Result<OwnedFd> {
        let mut pidfd: libc::c_int = -1;
        let mut len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: `pidfd` and `len` outlive the call, and `len` is the size of `pidfd`.
        let result = unsafe {
            libc::getsockopt(
                self.fd.get_ref().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERPIDFD,
                (&raw mut pidfd).cast(),
                &raw mut len,
            )
        };
        if result == 0 && pidfd >= 0 {
            // SAFETY: the kernel has just made this descriptor for us alone.
            return Ok(unsafe { OwnedFd::from_raw_fd(pidfd) });
        }
        // Before Linux 6.5. The peer is connected, so its number is not yet anyone else's.
        let pid = rustix::process::Pid::from_raw(self.peer()?.pid)
            .ok_or_else(|| io::Error::other("the peer's process is not visible from here"))?;
        Ok(rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty())?)
    }

    pub async fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<(), TransportError> {
        if bytes.len() > MAX_PACKET {
            return Err(TransportError::TooLong(bytes.len()));
        }
        if descriptors.len() > MAX_DESCRIPTORS {
            return Err(TransportError::ControlTruncated);
        }
        self.fd.async_io(Interest::WRITABLE, |fd| send(fd.as_fd(), bytes, descriptors)).await.map_err(|error| {
            match error.kind() {
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => TransportError::Closed,
                _ => TransportError::Io(error),
            }
        })
    }

    /// The next packet. Cancel-safe.
    pub async fn receive(&self) -> Result<Packet, TransportError> {
        match self.fd.async_io(Interest::READABLE, |fd| receive(fd.as_fd())).await {
            Ok(result) => result,
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Err(TransportError::Closed),
            Err(error) => Err(TransportError::Io(error)),
        }
    }

    /// Ends when there is something to receive, or the peer is gone; takes nothing. Cancel-safe.
    pub async fn readable(&self) -> io::Result<()> {
        loop {
            let mut guard = self.fd.ready(Interest::READABLE).await?;
            let mut byte = [0u8; 1];
            match rustix::net::recv(self.fd.get_ref(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
                Err(rustix::io::Errno::AGAIN) => guard.clear_ready_matching(Ready::READABLE),
                _ => return Ok(()),
            }
        }
    }
}

impl SeqpacketListener {
    /// Listens at `path`, for root only; removes a socket that is there already and makes missing folders.
    pub fn bind(path: &Path) -> Result<SeqpacketListener, TransportError> {
        bind(path).map_err(|source| TransportError::Listen { path: path.to_owned(), source })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The next connection. Cancel-safe.
    pub async fn accept(&self) -> io::Result<Seqpacket> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let fd = self.fd.async_io(Interest::READABLE, |fd| Ok(rustix::net::accept_with(fd.as_fd(), flags)?)).await?;
        Seqpacket::from_fd(fd)
    }
}

impl Drop for SeqpacketListener {
    fn drop(&mut self) {
        if inode_of(&self.path).is_ok_and(|inode| inode == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn bind(path: &Path) -> io::Result<SeqpacketListener> {
    let socket = listen_for_root(path, SocketType::SEQPACKET, ACCEPT_BACKLOG)?;
    let inode = inode_of(path)?;
    Ok(SeqpacketListener { fd: watched(socket, Interest::READABLE)?, path: path.to_owned(), inode })
}

/// A non-blocking Unix socket that listens at `path`, for root only; takes the place of one that is there already, and
/// makes missing folders.
pub fn listen_for_root(path: &Path, kind: SocketType, backlog: i32) -> io::Result<OwnedFd> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    // Made under another name and moved, so that nobody can connect before the mode is set, and a client never
    // finds the path missing.
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{}", std::process::id()));
    let hidden = PathBuf::from(hidden);
    match std::fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let socket = socket_of(kind)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(&hidden)?)?;
    std::fs::set_permissions(&hidden, std::fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, backlog)?;
    std::fs::rename(&hidden, path)?;
    Ok(socket)
}

fn inode_of(path: &Path) -> io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::symlink_metadata(path)?.ino())
}

fn watched(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor stays the same open file until the AsyncFd, which owns it, is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}

fn socket() -> rustix::io::Result<OwnedFd> {
    socket_of(SocketType::SEQPACKET)
}

fn socket_of(kind: SocketType) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)
}

fn send(fd: BorrowedFd<'_>, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
        debug_assert!(fits, "the space is made for the largest number");
    }
    // The kernel takes a SEQPACKET message whole or not at all.
    rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?;
    Ok(())
}

/// The outer error is the socket's (also "would block"), the inner one is about what arrived.
fn receive(fd: BorrowedFd<'_>) -> io::Result<Result<Packet, TransportError>> {
    let mut bytes = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(fd, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    let mut stray = false;
    for message in control.drain() {
        match message {
            RecvAncillaryMessage::ScmRights(fds) => descriptors.extend(fds),
            _ => stray = true,
        }
    }
    // From here on every early return drops, and so closes, what came along.
    if stray || received.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(Err(TransportError::ControlTruncated));
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Ok(Err(TransportError::Truncated));
    }
    // An empty packet cannot be told from the end of the connection, and no ZDS message is empty.
    if received.bytes == 0 {
        return Ok(Err(TransportError::Closed));
    }
    bytes.truncate(received.bytes);
    Ok(Ok(Packet { bytes, descriptors }))
}

/// A netns and three listeners are the most that a packet carries.
const MAX_DESCRIPTORS: usize = 4;
const SO_PEERPIDFD: libc::c_int = 77;
/// Proxies that wait to be accepted.
const ACCEPT_BACKLOG: i32 = 16;

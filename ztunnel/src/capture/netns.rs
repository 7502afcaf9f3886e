//! A pod's network namespace as a descriptor, and work done inside it.
//!
//! Must never leave a thread in a foreign namespace: what ran there would carry another pod's traffic.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

/// What tells two namespaces apart while at least one descriptor of each is open: device and inode of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NetnsId {
    pub dev: u64,
    pub ino: u64,
}

/// An open network namespace. It lives at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    fd: OwnedFd,
    id: NetnsId,
    cookie: u64,
}

impl Netns {
    /// Takes a descriptor, which must be one of a network namespace: anything else is an `InvalidInput` error.
    pub fn from_fd(fd: OwnedFd) -> io::Result<Netns> {
        require_netns(fd.as_fd())?;
        let meta = File::from(fd.try_clone()?).metadata()?;
        let mut netns = Netns { fd, id: NetnsId { dev: meta.dev(), ino: meta.ino() }, cookie: 0 };
        netns.cookie = netns.run(own_cookie)??;
        Ok(netns)
    }

    /// Opens `/proc/<pid>/ns/net`, or a bind mount of one.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Netns> {
        Netns::from_fd(File::open(path)?.into())
    }

    /// A new namespace without a name; it ends with its last descriptor. Made by a thread of its own, which ends.
    pub fn make() -> io::Result<Netns> {
        let maker = std::thread::spawn(|| {
            // SAFETY: only the network namespace of this short-lived thread changes; no descriptors are unshared.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
            Netns::current()
        });
        maker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// The namespace of the calling thread.
    pub fn current() -> io::Result<Netns> {
        Netns::open("/proc/thread-self/ns/net")
    }

    /// The kernel's number of this namespace (`SO_NETNS_COOKIE`), unique until reboot; the eBPF maps' key.
    pub fn cookie(&self) -> u64 {
        self.cookie
    }

    pub fn id(&self) -> NetnsId {
        self.id
    }

    /// Another descriptor of the same namespace.
    pub fn try_clone(&self) -> io::Result<Netns> {
        Ok(Netns { fd: self.fd.try_clone()?, id: self.id, cookie: self.cookie })
    }

    /// Runs `work` with the calling thread inside the namespace, and brings the thread back, also after a panic.
    /// Sockets made there stay in the namespace and work from any thread. `work` must not wait for other tasks.
    ///
    /// Ends the process if the thread cannot return.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> io::Result<T> {
        HOME.with(|home| {
            let home = match home.get() {
                Some(home) => home,
                None => {
                    let opened = File::open("/proc/thread-self/ns/net")?.into();
                    home.get_or_init(|| opened)
                }
            };
            let back_to = INSIDE.get().unwrap_or(home.as_raw_fd());
            enter(self.fd.as_fd())?;
            INSIDE.set(Some(self.fd.as_raw_fd()));
            let _return = Return { back_to, home: home.as_raw_fd() };
            Ok(work())
        })
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl From<Netns> for OwnedFd {
    fn from(netns: Netns) -> OwnedFd {
        netns.fd
    }
}

impl PartialEq for Netns {
    fn eq(&self, other: &Netns) -> bool {
        self.id == other.id
    }
}

impl Eq for Netns {}

/// The namespace that a socket lives in, as [`Netns::cookie`] gives it.
pub fn socket_netns_cookie(socket: BorrowedFd<'_>) -> io::Result<u64> {
    let mut cookie = 0u64;
    let mut len = size_of::<u64>() as libc::socklen_t;
    // SAFETY: `cookie` and `len` outlive the call, and `len` is the size of `cookie`.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, (&raw mut cookie).cast(), &raw mut len)
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(cookie) }
}

thread_local! {
    /// The namespace that the thread belongs to, kept open so that a visit costs two system calls.
    static HOME: std::cell::OnceCell<OwnedFd> = const { std::cell::OnceCell::new() };
    /// The foreign namespace that the thread is in now.
    static INSIDE: Cell<Option<i32>> = const { Cell::new(None) };
}

struct Return {
    back_to: i32,
    home: i32,
}

impl Drop for Return {
    fn drop(&mut self) {
        // SAFETY: `back_to` is the thread's own HOME, or the namespace of an outer `run`, which is borrowed
        // until that call ends; both outlive this guard.
        let back_to = unsafe { BorrowedFd::borrow_raw(self.back_to) };
        if let Err(error) = enter(back_to) {
            // Going on would open this thread's next sockets inside a pod.
            eprintln!("cannot return from a pod's network namespace: {error}");
            std::process::abort();
        }
        INSIDE.set((self.back_to != self.home).then_some(self.back_to));
    }
}

fn enter(netns: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(netns, Some(LinkNameSpaceType::Network))?)
}

fn own_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::DGRAM, None)?;
    socket_netns_cookie(socket.as_fd())
}

fn require_netns(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: NS_GET_NSTYPE takes no argument; on a descriptor of another kind it fails.
    let kind = unsafe { libc::ioctl(fd.as_raw_fd(), NS_GET_NSTYPE) };
    if kind == libc::CLONE_NEWNET {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "the descriptor is not a network namespace"))
}

const SO_NETNS_COOKIE: libc::c_int = 71;
const NS_GET_NSTYPE: libc::Ioctl = 0xb703;

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn fresh() -> Netns {
        Netns::make().expect("tests need root")
    }

    #[test]
    fn work_runs_inside_and_the_thread_comes_back() {
        let outside = Netns::current().unwrap();
        let pod = fresh();
        assert_ne!(pod, outside);
        assert_ne!(pod.cookie(), outside.cookie());
        assert_eq!(pod.run(|| Netns::current().unwrap().id()).unwrap(), pod.id());
        assert_eq!(Netns::current().unwrap(), outside);
    }

    #[test]
    fn a_visit_from_within_a_visit_returns_to_the_first() {
        let outside = Netns::current().unwrap();
        let (first, second) = (fresh(), fresh());
        let seen = first
            .run(|| {
                let inner = second.run(|| Netns::current().unwrap().id()).unwrap();
                (inner, Netns::current().unwrap().id())
            })
            .unwrap();
        assert_eq!(seen, (second.id(), first.id()));
        assert_eq!(Netns::current().unwrap(), outside);
    }

    #[test]
    fn a_panic_inside_does_not_keep_the_thread_there() {
        let outside = Netns::current().unwrap();
        let pod = fresh();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| pod.run(|| panic!("on purpose"))));
        assert!(caught.is_err());
        assert_eq!(Netns::current().unwrap(), outside);
    }

    #[test]
    fn a_socket_made_inside_shows_the_cookie_of_its_namespace() {
        let pod = fresh();
        let socket = pod.run(|| std::net::UdpSocket::bind("0.0.0.0:0").unwrap()).unwrap();
        assert_eq!(socket_netns_cookie(socket.as_fd()).unwrap(), pod.cookie());
    }

    #[test]
    fn descriptors_of_other_kinds_are_refused() {
        let file = File::open("/proc/self/ns/mnt").unwrap();
        assert_eq!(Netns::from_fd(file.into()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(Netns::open("/dev/null").unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}

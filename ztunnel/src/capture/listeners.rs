//! The listening sockets of a pod, made inside its network namespace.
//!
//! They belong to the agent and the proxy together, so that neither's end closes them. Must never be bound outside
//! the pod's own namespace.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketFlags, SocketType, ipproto, sockopt};

use super::netns::{Netns, socket_netns_cookie};

/// The ports that the listeners are bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerPorts {
    pub outbound: u16,
    pub plaintext: u16,
    pub hbone: u16,
}

/// A pod's listening sockets: non-blocking, dual-stack where the pod has IPv6, `SO_REUSEADDR`.
#[derive(Debug)]
pub struct PodListeners {
    /// Takes what the pod's applications open.
    pub outbound: OwnedFd,
    /// Takes plaintext connections to any port of the pod.
    pub plaintext: OwnedFd,
    /// Takes HBONE connections.
    pub hbone: OwnedFd,
}

/// Why a pod's listeners could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenerError {
    #[error("cannot enter the pod's network namespace: {0}")]
    Enter(#[source] io::Error),
    #[error("port {port} of the pod is taken by another socket")]
    PortTaken { port: u16 },
    #[error("cannot listen on port {port} in the pod: {source}")]
    Listen { port: u16, source: io::Error },
    #[error("the socket handed over for {name} is not a listening TCP socket of this pod: {reason}")]
    Foreign { name: &'static str, reason: String },
    #[error("cannot duplicate a listening socket: {0}")]
    Duplicate(#[source] io::Error),
}

impl Default for ListenerPorts {
    fn default() -> Self {
        ListenerPorts { outbound: ebpf::OUTBOUND_PORT, plaintext: ebpf::PLAINTEXT_PORT, hbone: ebpf::HBONE_PORT }
    }
}

impl PodListeners {
    /// Makes the sockets in `netns`.
    pub fn open(netns: &Netns, ports: &ListenerPorts) -> Result<PodListeners, ListenerError> {
        netns
            .run(|| {
                Ok(PodListeners {
                    outbound: listen(ports.outbound)?,
                    plaintext: listen(ports.plaintext)?,
                    hbone: listen(ports.hbone)?,
                })
            })
            .map_err(ListenerError::Enter)?
    }

    /// Other descriptors of the same sockets.
    pub fn try_clone(&self) -> Result<PodListeners, ListenerError> {
        let dup = |fd: &OwnedFd| fd.try_clone().map_err(ListenerError::Duplicate);
        Ok(PodListeners { outbound: dup(&self.outbound)?, plaintext: dup(&self.plaintext)?, hbone: dup(&self.hbone)? })
    }

    /// Each socket with its name.
    pub fn named(&self) -> [(&'static str, BorrowedFd<'_>); 3] {
        [("outbound", self.outbound.as_fd()), ("plaintext", self.plaintext.as_fd()), ("hbone", self.hbone.as_fd())]
    }

    /// That sockets which came from another process are what they are said to be: listening TCP sockets in the
    /// namespace with this cookie, bound to these ports.
    pub fn check(&self, netns_cookie: u64, ports: &ListenerPorts) -> Result<(), ListenerError> {
        let ports = [ports.outbound, ports.plaintext, ports.hbone];
        for ((name, fd), port) in self.named().into_iter().zip(ports) {
            check(fd, netns_cookie, port).map_err(|reason| ListenerError::Foreign { name, reason })?;
        }
        Ok(())
    }
}

/// How many connections wait to be accepted.
pub fn waiting(listener: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: tcp_info is plain numbers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `len` outlive the call, and `len` is the size of `info`.
    let result = unsafe {
        libc::getsockopt(listener.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len)
    };
    // On a listening socket the kernel puts the length of the accept queue here.
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(info.tcpi_unacked) }
}

/// Takes up to `most` connections, those that have waited longest, and resets them; how many there were.
pub fn reset_oldest(listener: BorrowedFd<'_>, most: u32) -> io::Result<u32> {
    for done in 0..most {
        match net::accept_with(listener, SocketFlags::CLOEXEC) {
            // Closing with a linger time of zero sends RST.
            Ok(connection) => sockopt::set_socket_linger(&connection, Some(Duration::ZERO))?,
            Err(Errno::AGAIN) => return Ok(done),
            Err(Errno::CONNABORTED | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(most)
}

fn listen(port: u16) -> Result<OwnedFd, ListenerError> {
    let wrap = |errno: Errno| match errno {
        Errno::ADDRINUSE => ListenerError::PortTaken { port },
        errno => ListenerError::Listen { port, source: errno.into() },
    };
    match listen_on((Ipv6Addr::UNSPECIFIED, port).into()) {
        // The namespace, or the whole kernel, is without IPv6.
        Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => listen_on((Ipv4Addr::UNSPECIFIED, port).into()).map_err(wrap),
        other => other.map_err(wrap),
    }
}

fn listen_on(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, false)?;
    }
    sockopt::set_socket_reuseaddr(&socket, true)?;
    // Also for what waits here before a proxy sets up the rest.
    sockopt::set_tcp_nodelay(&socket, true)?;
    net::bind(&socket, &address)?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn check(fd: BorrowedFd<'_>, netns_cookie: u64, port: u16) -> Result<(), String> {
    let listening = sockopt::socket_acceptconn(fd).map_err(|error| format!("not a socket: {error}"))?;
    if !listening || sockopt::socket_protocol(fd) != Ok(Some(ipproto::TCP)) {
        return Err("it does not listen for TCP connections".into());
    }
    let cookie = socket_netns_cookie(fd).map_err(|error| format!("its namespace is unknown: {error}"))?;
    if cookie != netns_cookie {
        return Err("it belongs to another network namespace".into());
    }
    let name = net::getsockname(fd).map_err(|error| format!("its address is unknown: {error}"))?;
    let bound = SocketAddr::try_from(name).map_err(|_| "it has no IP address".to_string())?;
    if bound.port() != port || !bound.ip().is_unspecified() {
        return Err(format!("it is bound to {bound}, not to port {port} of all addresses"));
    }
    Ok(())
}

/// Connections that wait while the proxy is away or busy; the kernel bounds it by `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

#[cfg(test)]
mod tests {
    use super::super::netns::tests::fresh;
    use super::*;
    use std::net::TcpStream;

    fn bring_up_loopback() {
        let status = std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap();
        assert!(status.success());
    }

    #[test]
    fn listeners_take_both_families_inside_the_pod_only() {
        let pod = fresh();
        let listeners = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
        listeners.check(pod.cookie(), &ListenerPorts::default()).unwrap();
        pod.run(|| {
            bring_up_loopback();
            for host in ["127.0.0.1", "[::1]"] {
                for port in [15001, 15006, 15008] {
                    TcpStream::connect(format!("{host}:{port}")).unwrap();
                }
            }
        })
        .unwrap();
    }

    /// Field cases B56 and B58: a pod without IPv6.
    #[test]
    fn a_pod_whose_ipv6_is_off_still_gets_its_listeners() {
        let pod = fresh();
        pod.run(|| std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap()).unwrap();
        let _listeners = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
        pod.run(|| {
            bring_up_loopback();
            TcpStream::connect("127.0.0.1:15008").unwrap();
        })
        .unwrap();
    }

    #[test]
    fn a_taken_port_is_named() {
        let pod = fresh();
        let _first = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
        let error = PodListeners::open(&pod, &ListenerPorts::default()).unwrap_err();
        assert!(matches!(error, ListenerError::PortTaken { port: 15001 }), "{error}");
    }

    #[test]
    fn sockets_of_another_pod_or_kind_are_refused() {
        let (pod, other) = (fresh(), fresh());
        let ports = ListenerPorts::default();
        let listeners = PodListeners::open(&pod, &ports).unwrap();
        assert!(listeners.check(other.cookie(), &ports).unwrap_err().to_string().contains("another network namespace"));

        let swapped = PodListeners {
            outbound: listeners.hbone.try_clone().unwrap(),
            plaintext: listeners.plaintext.try_clone().unwrap(),
            hbone: listeners.outbound.try_clone().unwrap(),
        };
        assert!(swapped.check(pod.cookie(), &ports).is_err());

        let file = PodListeners { outbound: std::fs::File::open("/dev/null").unwrap().into(), ..listeners };
        assert!(file.check(pod.cookie(), &ports).unwrap_err().to_string().contains("not a socket"));
    }

    #[test]
    fn waiting_connections_are_counted_and_the_oldest_reset() {
        use std::io::Read;
        let pod = fresh();
        let listeners = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
        let listener = listeners.outbound.as_fd();
        assert_eq!(waiting(listener).unwrap(), 0);
        let mut clients = pod
            .run(|| {
                bring_up_loopback();
                std::array::from_fn::<_, 3, _>(|_| TcpStream::connect("127.0.0.1:15001").unwrap())
            })
            .unwrap();
        assert_eq!(waiting(listener).unwrap(), 3);
        assert_eq!(reset_oldest(listener, 2).unwrap(), 2);
        assert_eq!(waiting(listener).unwrap(), 1);
        for client in &mut clients[..2] {
            assert_eq!(client.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
        }
        clients[2].set_nonblocking(true).unwrap();
        assert_eq!(clients[2].read(&mut [0]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(reset_oldest(listener, 9).unwrap(), 1);
    }
}

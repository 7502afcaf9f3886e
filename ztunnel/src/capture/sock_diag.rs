//! The TCP sockets of a namespace, as the kernel lists them (`sock_diag`), and the end of one from outside
//! (`SOCK_DESTROY`): the app reads `ECONNABORTED`, the peer gets a RST.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::netns::Netns;

/// A TCP socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TcpSocket {
    /// IPv4-mapped addresses are shown as IPv4.
    pub local: SocketAddr,
    /// Of a listening socket: unspecified.
    pub peer: SocketAddr,
    pub state: TcpState,
    /// Of the socket's file; 0 if no process has it any more, or not yet.
    pub inode: u32,
    /// The kernel's number of this socket, unique until reboot.
    pub cookie: u64,
    /// The kernel's own name for it.
    id: SocketId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TcpState {
    Listening,
    /// Established, or half closed.
    Open,
}

/// Family and `inet_diag_sockid`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SocketId {
    family: u8,
    bytes: [u8; SOCKET_ID],
}

impl SocketId {
    /// Of the connection with these ends, whatever its cookie.
    fn of(local: SocketAddr, peer: SocketAddr) -> Self {
        let mut bytes = [0; SOCKET_ID];
        bytes[0..2].copy_from_slice(&local.port().to_be_bytes());
        bytes[2..4].copy_from_slice(&peer.port().to_be_bytes());
        for (at, ip) in [(4, local.ip()), (20, peer.ip())] {
            match ip {
                IpAddr::V4(ip) => bytes[at..at + 4].copy_from_slice(&ip.octets()),
                IpAddr::V6(ip) => bytes[at..at + 16].copy_from_slice(&ip.octets()),
            }
        }
        bytes[40..].fill(0xff);
        let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        Self { family: family as u8, bytes }
    }
}

/// All listening and open sockets of both families.
pub fn tcp_sockets(netns: &Netns) -> io::Result<Vec<TcpSocket>> {
    let socket = open(netns)?;
    let mut sockets = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let id = SocketId { family: family as u8, bytes: [0; SOCKET_ID] };
        send(&socket, &request(SOCK_DIAG_BY_FAMILY, libc::NLM_F_DUMP, &id, STATES))?;
        receive(&socket, |message| sockets.extend(parse(message)))?;
    }
    Ok(sockets)
}

/// The open connection with these ends, if there is one.
pub fn connection(netns: &Netns, local: SocketAddr, peer: SocketAddr) -> io::Result<Option<TcpSocket>> {
    let socket = open(netns)?;
    let mut found = None;
    send(&socket, &request(SOCK_DIAG_BY_FAMILY, libc::NLM_F_ACK, &SocketId::of(local, peer), STATES))?;
    match receive(&socket, |message| found = parse(message)) {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return Err(error),
        _ => {}
    }
    // Where there is no connection, the kernel gives who listens.
    Ok(found.filter(|s: &TcpSocket| s.state == TcpState::Open && s.local == local && s.peer == peer))
}

/// Ends a connection. `false` if it had ended by itself.
pub fn destroy(netns: &Netns, socket: &TcpSocket) -> io::Result<bool> {
    let netlink = open(netns)?;
    send(&netlink, &request(SOCK_DESTROY, libc::NLM_F_ACK, &socket.id, STATES))?;
    match receive(&netlink, |_| {}) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}

fn open(netns: &Netns) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let kind = Some(netlink::SOCK_DIAG);
    let socket = netns.run(|| rustix::net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, kind))??;
    rustix::net::sockopt::set_socket_timeout(&socket, rustix::net::sockopt::Timeout::Recv, Some(ANSWER))?;
    Ok(socket)
}

fn send(socket: &OwnedFd, message: &[u8]) -> io::Result<()> {
    rustix::net::sendto(socket, message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    Ok(())
}

/// A request with its header (`nlmsghdr`, `inet_diag_req_v2`).
fn request(kind: u16, flags: libc::c_int, id: &SocketId, states: u32) -> [u8; REQUEST] {
    let mut message = [0; REQUEST];
    message[0..4].copy_from_slice(&(REQUEST as u32).to_ne_bytes());
    message[4..6].copy_from_slice(&kind.to_ne_bytes());
    message[6..8].copy_from_slice(&((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    message[HEADER] = id.family;
    message[HEADER + 1] = libc::IPPROTO_TCP as u8;
    message[HEADER + 4..HEADER + 8].copy_from_slice(&states.to_ne_bytes());
    message[HEADER + 8..].copy_from_slice(&id.bytes);
    message
}

/// Reads answers to their end: the end of a list, or an acknowledgement.
fn receive(socket: &OwnedFd, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let (n, _) = rustix::net::recv(socket, &mut *buffer, RecvFlags::empty())?;
        let mut rest = &buffer[..n];
        while rest.len() >= HEADER {
            let length = u32::from_ne_bytes(four(rest)) as usize;
            let kind = u16::from_ne_bytes([rest[4], rest[5]]);
            let Some(body) = rest.get(HEADER..length) else {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel's answer is cut off"));
            };
            match libc::c_int::from(kind) {
                libc::NLMSG_DONE => return Ok(()),
                libc::NLMSG_ERROR if body.len() >= 4 => {
                    return match i32::from_ne_bytes(four(body)) {
                        0 => Ok(()),
                        code => Err(io::Error::from_raw_os_error(-code)),
                    };
                }
                _ => each(body),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

/// `inet_diag_msg`.
fn parse(message: &[u8]) -> Option<TcpSocket> {
    let bytes: [u8; SOCKET_ID] = message.get(4..4 + SOCKET_ID)?.try_into().ok()?;
    let inode = u32::from_ne_bytes(message.get(68..72)?.try_into().ok()?);
    let family = message[0];
    let address = |at: usize, port: usize| {
        let port = u16::from_be_bytes([bytes[port], bytes[port + 1]]);
        if libc::c_int::from(family) == libc::AF_INET {
            return SocketAddr::from((four(&bytes[at..]), port));
        }
        let mut ip = [0; 16];
        ip.copy_from_slice(&bytes[at..at + 16]);
        SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), port)
    };
    let low = u64::from(u32::from_ne_bytes(four(&bytes[40..])));
    let high = u64::from(u32::from_ne_bytes(four(&bytes[44..])));
    Some(TcpSocket {
        local: address(4, 0),
        peer: address(20, 2),
        state: if message[1] == LISTEN { TcpState::Listening } else { TcpState::Open },
        inode,
        cookie: high << 32 | low,
        id: SocketId { family, bytes },
    })
}

fn four(bytes: &[u8]) -> [u8; 4] {
    [bytes[0], bytes[1], bytes[2], bytes[3]]
}

/// The kernel answers at once; a lost answer must not hold the caller.
const ANSWER: std::time::Duration = std::time::Duration::from_secs(5);
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const HEADER: usize = 16;
const SOCKET_ID: usize = 48;
const REQUEST: usize = HEADER + 8 + SOCKET_ID;
const LISTEN: u8 = 10;
/// ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LISTEN.
const STATES: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << LISTEN;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::capture::netns::tests::fresh;

    fn loopback_up(netns: &Netns) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (connection, handle, _) =
            runtime.block_on(async { netns.run(rtnetlink::new_connection).unwrap().unwrap() });
        runtime.block_on(async {
            tokio::spawn(connection);
            handle.link().set(rtnetlink::LinkUnspec::new_with_index(1).up().build()).execute().await.unwrap();
        });
    }

    #[test]
    fn sockets_of_both_families_are_listed_and_one_is_ended() {
        let netns = fresh();
        loopback_up(&netns);
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let listener = netns.run(|| TcpListener::bind(address).unwrap()).unwrap();
            let server_at = listener.local_addr().unwrap();
            let mut client = netns.run(|| TcpStream::connect(server_at).unwrap()).unwrap();
            let (mut server, client_at) = listener.accept().unwrap();
            let listed = tcp_sockets(&netns).unwrap();
            let find = |local, peer| listed.iter().find(|s| s.local == local && s.peer == peer).cloned();
            assert!(listed.iter().any(|s| s.local == server_at && s.state == TcpState::Listening), "{listed:?}");
            let served = find(server_at, client_at).expect("the server's socket");
            assert_eq!(served.state, TcpState::Open);
            assert_ne!(served.inode, 0);
            let dialled = find(client_at, server_at).expect("the client's socket");
            assert_ne!(served.cookie, dialled.cookie);

            assert_eq!(connection(&netns, server_at, client_at).unwrap(), Some(served.clone()));
            assert!(destroy(&netns, &served).unwrap());
            assert_eq!(connection(&netns, server_at, client_at).unwrap(), None, "not the one that listens");
            assert_eq!(server.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionAborted);
            assert_eq!(client.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            assert!(!destroy(&netns, &served).unwrap(), "it is gone");
        }
    }

    #[test]
    fn an_ipv4_connection_of_an_ipv6_socket_is_shown_as_ipv4_and_can_be_ended() {
        let netns = fresh();
        loopback_up(&netns);
        let listener = netns.run(|| TcpListener::bind("[::]:0").unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut client = netns.run(|| TcpStream::connect(("127.0.0.1", port)).unwrap()).unwrap();
        let (_server, _) = listener.accept().unwrap();
        let listed = tcp_sockets(&netns).unwrap();
        let local = SocketAddr::from(([127, 0, 0, 1], port));
        let served = listed.iter().find(|s| s.local == local && s.state == TcpState::Open);
        let served = served.expect("the server's socket");
        assert_eq!(connection(&netns, local, served.peer).unwrap().as_ref(), Some(served));
        assert!(destroy(&netns, served).unwrap());
        assert_eq!(client.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }

    #[test]
    fn only_the_namespaces_own_sockets_are_listed() {
        let (first, second) = (fresh(), fresh());
        loopback_up(&first);
        let _listener = first.run(|| TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        assert_eq!(tcp_sockets(&first).unwrap().len(), 1);
        assert_eq!(tcp_sockets(&second).unwrap(), Vec::new());
    }
}

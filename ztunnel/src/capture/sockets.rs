//! The sockets that the proxy dials with from inside a pod's namespace: with the pod's own address, or with a client's
//! address towards the pod's app.
//!
//! Must never leave a pass entry behind: it would let a stranger with the same address and port past the proxy.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

use super::maps::PassMap;
use super::netns::Netns;
use super::pod_network::MARK;
use crate::random;

/// How the proxy's TCP sockets are set up.
#[derive(Debug, Clone, Copy)]
pub struct TcpSettings {
    pub connect_timeout: Duration,
    pub keepalive_time: Duration,
    pub keepalive_interval: Duration,
    /// How long a peer's proxy may leave sent bytes without acknowledgement, or take none, before it counts as dead.
    pub user_timeout: Duration,
    /// Dials whose descriptor would have this number or a higher one fail: those are kept for what must go on.
    pub descriptors: u32,
}

impl TcpSettings {
    /// For a listening socket: what is accepted from then on has these settings from it. `by_others`: not by the pod's
    /// own apps, which share our kernel and cannot be gone without its knowledge.
    pub fn listen(&self, socket: SockRef<'_>, by_others: bool) -> io::Result<()> {
        socket.set_tcp_nodelay(true)?;
        if by_others { self.keep_alive(socket) } else { Ok(()) }
    }

    /// For a socket that was accepted before its listener was set up.
    pub fn keep_alive(&self, socket: SockRef<'_>) -> io::Result<()> {
        let keepalive = TcpKeepalive::new()
            .with_time(self.keepalive_time)
            .with_interval(self.keepalive_interval)
            .with_retries(KEEPALIVE_RETRIES);
        socket.set_tcp_keepalive(&keepalive)
    }

    /// Connects from inside the pod with the pod's own address. `marked`: iptables of another agent need our mark.
    pub async fn dial(&self, pod: &Netns, marked: bool, to: SocketAddr) -> io::Result<TcpStream> {
        let to = with_link(pod, to)?;
        let socket = self.own_socket(pod, marked, to)?;
        self.keep_alive(SockRef::from(&socket))?;
        self.connect(socket, to).await
    }

    /// The same to a peer's HBONE port. The other end always reads, so one that does not is dead; an app may pause for
    /// as long as it likes.
    pub async fn dial_tunnel(&self, pod: &Netns, marked: bool, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = self.own_socket(pod, marked, to)?;
        self.keep_alive(SockRef::from(&socket))?;
        socket.set_tcp_user_timeout(Some(self.user_timeout))?;
        self.connect(socket, to).await
    }

    fn own_socket(&self, pod: &Netns, marked: bool, to: SocketAddr) -> io::Result<Socket> {
        let socket = pod.run(|| stream_socket(to))??;
        socket.set_tcp_nodelay(true)?;
        if marked {
            socket.set_mark(MARK)?;
        }
        Ok(socket)
    }

    /// Connects to an app of the pod with the address of its client; the client's own port where it is free, so that
    /// no search through the port range is needed.
    pub async fn dial_app(
        &self,
        pod: &Netns,
        pass: Option<&Arc<PassMap>>,
        client: SocketAddr,
        app: SocketAddr,
    ) -> io::Result<TcpStream> {
        let mut refused = None;
        for attempt in 0..BIND_TRIES {
            let port = if attempt == 0 && client.port() != 0 { client.port() } else { random_port(PORTS) };
            match self.dial_app_from(pod, pass, SocketAddr::new(client.ip(), port), app).await {
                Err(error) if matches!(error.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable) => {
                    refused = Some(error);
                }
                result => return result,
            }
        }
        Err(refused.unwrap_or_else(|| io::ErrorKind::AddrInUse.into()))
    }

    async fn dial_app_from(
        &self,
        pod: &Netns,
        pass: Option<&Arc<PassMap>>,
        client: SocketAddr,
        app: SocketAddr,
    ) -> io::Result<TcpStream> {
        let socket = pod.run(|| stream_socket(app))??;
        socket.set_tcp_nodelay(true)?;
        socket.set_mark(MARK)?;
        socket.set_reuse_address(true)?;
        match client.ip() {
            IpAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
            IpAddr::V6(_) => set_transparent_v6(&socket)?,
        }
        socket.bind(&client.into())?;
        let _entry = match pass {
            Some(map) => Some(PassEntry::new(map.clone(), pod.cookie(), client, app)?),
            None => None,
        };
        self.connect(socket, app).await
    }

    /// Connects from inside a pod, with its address `from`, to an app of another pod of this node, past that one's
    /// listeners. `begin` hears of each address that it is tried from; what it gives comes back with the connection.
    pub async fn dial_neighbour<G>(
        &self,
        (pod, from): (&Netns, IpAddr),
        marked: bool,
        pass: &Arc<PassMap>,
        (netns, app): (u64, SocketAddr),
        begin: impl Fn(SocketAddr) -> G,
    ) -> io::Result<Dialled<G>> {
        let mut refused = io::Error::from(io::ErrorKind::AddrInUse);
        for attempt in 0..BIND_TRIES {
            // Connections that the pod's apps have closed keep ports of the usual range for a minute, with this very
            // address: under traffic there may soon be none left.
            let ports = if attempt % 2 == 0 { HIGH_PORTS } else { PORTS };
            let from = SocketAddr::new(from, random_port(ports));
            let socket = self.own_socket(pod, marked, app)?;
            // What goes from pod to pod crosses the node's network, which may come to drop it.
            self.keep_alive(SockRef::from(&socket))?;
            socket.set_reuse_address(true)?;
            match socket.bind(&from.into()) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => return Ok(Dialled::NotOurAddress),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    refused = error;
                    continue;
                }
                Err(error) => return Err(error),
            }
            let mut entry = match PassEntry::new(pass.clone(), netns, from, app) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    refused = error;
                    continue;
                }
                entry => entry?,
            };
            let begun = begin(from);
            match self.connect(socket, app).await {
                Ok(connected) if entry.end()? => return Ok(Dialled::Connected(connected, from, begun)),
                Ok(stranger) => {
                    SockRef::from(&stranger).set_linger(Some(Duration::ZERO))?;
                    return Ok(Dialled::Stranger);
                }
                // The same pair of ports is in use.
                Err(error) if error.kind() == io::ErrorKind::AddrNotAvailable => refused = error,
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    async fn connect(&self, socket: Socket, to: SocketAddr) -> io::Result<TcpStream> {
        if socket.as_raw_fd().unsigned_abs() >= self.descriptors {
            return Err(rustix::io::Errno::MFILE.into());
        }
        let socket = tokio::net::TcpSocket::from_std_stream(socket.into());
        match tokio::time::timeout(self.connect_timeout, socket.connect(to)).await {
            Ok(connected) => connected,
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer in {:?}", self.connect_timeout))),
        }
    }
}

/// What became of a dial to a neighbour.
#[derive(Debug)]
pub enum Dialled<G> {
    /// It has come to the neighbour's namespace: the connection and its own address.
    Connected(TcpStream, SocketAddr, G),
    /// Somebody else has answered at the neighbour's address.
    Stranger,
    /// The address to dial from is not that pod's.
    NotOurAddress,
}

/// An entry of the pass map for as long as a dial takes.
struct PassEntry {
    map: Arc<PassMap>,
    netns: u64,
    client: SocketAddr,
    app: SocketAddr,
    is_there: bool,
}

impl PassEntry {
    fn new(map: Arc<PassMap>, netns: u64, client: SocketAddr, app: SocketAddr) -> io::Result<Self> {
        map.insert(netns, client, app)?;
        Ok(Self { map, netns, client, app, is_there: true })
    }

    /// Removes it; whether the connection has come to the namespace.
    fn end(&mut self) -> io::Result<bool> {
        let passed = self.map.remove(self.netns, self.client, self.app)?;
        self.is_there = false;
        Ok(passed)
    }
}

impl Drop for PassEntry {
    fn drop(&mut self) {
        if self.is_there
            && let Err(error) = self.end()
        {
            tracing::error!(%error, client = %self.client, app = %self.app, "cannot remove a pass entry");
        }
    }
}

/// Where a connection that iptables redirected wanted to go; nothing if it was not redirected.
pub fn redirected_from(socket: SockRef<'_>) -> Option<SocketAddr> {
    let v4 = socket.original_dst_v4().ok().and_then(|a| a.as_socket());
    v4.or_else(|| socket.original_dst_v6().ok().and_then(|a| a.as_socket()))
        .map(|a| SocketAddr::new(a.ip().to_canonical(), a.port()))
}

/// A link-local address with its link. Capture does not keep the one that the app named, so it must be the pod's only
/// one.
fn with_link(pod: &Netns, to: SocketAddr) -> io::Result<SocketAddr> {
    let SocketAddr::V6(mut to) = to else { return Ok(to) };
    if !to.ip().is_unicast_link_local() || to.scope_id() != 0 {
        return Ok(to.into());
    }
    let table = pod.run(|| std::fs::read_to_string("/proc/thread-self/net/if_inet6"))??;
    match links(&table)[..] {
        [link] => to.set_scope_id(link),
        [] => return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, "the pod has no link-local address")),
        [..] => {
            let text = "the pod has several links, and which one is meant is not known";
            return Err(io::Error::new(io::ErrorKind::AddrNotAvailable, text));
        }
    }
    Ok(to.into())
}

/// Numbers of the interfaces that have a link-local address, of a table with address, interface, prefix length, scope,
/// flags and name in each line.
fn links(table: &str) -> Vec<u32> {
    const LINK_LOCAL: &str = "20";
    let link = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (link, scope) = (fields.next()?, fields.nth(1)?);
        (scope == LINK_LOCAL).then(|| u32::from_str_radix(link, 16).ok())?
    };
    let mut links: Vec<u32> = table.lines().filter_map(link).collect();
    links.sort_unstable();
    links.dedup();
    links
}

fn stream_socket(to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    Ok(socket)
}

fn set_transparent_v6(socket: &Socket) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let on: libc::c_int = 1;
    // SAFETY: `on` outlives the call and its size is passed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_TRANSPARENT,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn random_port((first, end): (u32, u32)) -> u16 {
    (first + random::below(u64::from(end - first)) as u32) as u16
}

const KEEPALIVE_RETRIES: u32 = 9;
/// Ports that are tried where the client's own one is taken.
const BIND_TRIES: u32 = 12;
const PORTS: (u32, u32) = (32768, 61000);
/// Above those that the kernel gives by itself.
const HIGH_PORTS: (u32, u32) = (61000, 65536);

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::super::netns::tests::fresh;
    use super::*;

    const SETTINGS: TcpSettings = TcpSettings {
        connect_timeout: Duration::from_secs(5),
        keepalive_time: Duration::from_secs(180),
        keepalive_interval: Duration::from_secs(20),
        user_timeout: Duration::from_secs(20),
        descriptors: u32::MAX,
    };

    fn ip(pod: &Netns, commands: &[&str]) {
        for command in commands {
            let run = || std::process::Command::new("ip").args(command.split(' ')).status().unwrap();
            assert!(pod.run(run).unwrap().success(), "ip {command}");
        }
    }

    #[tokio::test]
    async fn what_is_accepted_has_its_settings_from_the_listener() {
        let pod = fresh();
        ip(&pod, &["link set lo up"]);
        for by_others in [false, true] {
            let listener = pod.run(|| TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
            SETTINGS.listen(SockRef::from(&listener), by_others).unwrap();
            let _client = SETTINGS.dial(&pod, false, listener.local_addr().unwrap()).await.unwrap();
            let accepted = listener.accept().unwrap().0;
            let accepted = SockRef::from(&accepted);
            assert!(accepted.tcp_nodelay().unwrap());
            assert_eq!(accepted.keepalive().unwrap(), by_others);
            if by_others {
                assert_eq!(accepted.tcp_keepalive_time().unwrap(), SETTINGS.keepalive_time);
            }
        }
    }

    /// The kernel counts a window that stays closed as no acknowledgement.
    #[tokio::test]
    async fn an_app_that_does_not_read_has_all_the_time_and_a_proxy_has_not() {
        let pod = fresh();
        ip(&pod, &["link set lo up"]);
        let listener = pod.run(|| TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        let to = listener.local_addr().unwrap();
        let app = SETTINGS.dial(&pod, false, to).await.unwrap();
        assert_eq!(SockRef::from(&app).tcp_user_timeout().unwrap(), None);
        let tunnel = SETTINGS.dial_tunnel(&pod, false, to).await.unwrap();
        assert_eq!(SockRef::from(&tunnel).tcp_user_timeout().unwrap(), Some(SETTINGS.user_timeout));
    }

    #[tokio::test]
    async fn a_link_local_address_is_dialled_on_the_pods_only_link() {
        let pod = fresh();
        let dialled = || SETTINGS.dial(&pod, false, "[fe80::1]:80".parse().unwrap());
        assert!(dialled().await.unwrap_err().to_string().contains("no link-local address"));
        ip(
            &pod,
            &["link set lo up", "link add one type bridge", "link set one up", "addr add fe80::1/64 dev one nodad"],
        );
        let index = pod.run(|| std::fs::read_to_string("/proc/thread-self/net/if_inet6").unwrap()).unwrap();
        let link = links(&index)[0];
        let listener = pod.run(|| TcpListener::bind(format!("[fe80::1%{link}]:80")).unwrap()).unwrap();
        let stream = dialled().await.unwrap();
        assert_eq!(listener.accept().unwrap().1, stream.local_addr().unwrap());
        ip(&pod, &["link add two type bridge", "link set two up", "addr add fe80::2/64 dev two nodad"]);
        assert!(dialled().await.unwrap_err().to_string().contains("several links"));
    }
}

//! What is on the wire: frames read from packet sockets in the testbed's namespaces, put together to TCP flows.
//!
//! Must never claim that something was not seen when frames were lost: a capture that dropped frames panics.

mod packet;
mod tls;

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::Socket;

pub use packet::{Flags, Packet};
pub use tls::{Records, TlsError, client_hello_key_shares};

use crate::netns::Netns;

/// Payload bytes that a capture keeps; more is a mistake in the test.
const KEEP: usize = 512 * 1024 * 1024;
/// Receive buffer of the packet socket.
const SOCKET_BUFFER: usize = 64 * 1024 * 1024;

/// A running record of TCP (and UDP) packets.
#[derive(Debug)]
pub struct Capture {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    packets: Mutex<Vec<Packet>>,
    lost: Mutex<Option<String>>,
}

/// Which frames of an interface are recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    /// Only those that the interface receives: on all ports of a bridge that is each frame once.
    Received,
    Both,
}

impl Capture {
    /// All frames between nodes, each once.
    pub(crate) fn between_nodes(lan: &Netns) -> Self {
        Self::start(lan, None, Direction::Received)
    }

    /// All frames of one interface, e.g. a pod's veth in its node's netns.
    pub fn interface(netns: &Netns, name: &str) -> Self {
        Self::start(netns, Some(name), Direction::Both)
    }

    fn start(netns: &Netns, interface: Option<&str>, direction: Direction) -> Self {
        let socket = netns.run(|| open(interface, direction));
        let socket = socket.unwrap_or_else(|e| panic!("packet socket in {}: {e}", netns.name()));
        let shared = Arc::<Shared>::default();
        let thread = {
            let shared = shared.clone();
            std::thread::Builder::new().name("testbed capture".to_owned()).spawn(move || read_all(socket, &shared))
        };
        Self { shared, thread: Some(thread.expect("start a thread")) }
    }

    /// Packets so far. Those that were sent before the call are in it.
    #[track_caller]
    pub fn packets(&self) -> Vec<Packet> {
        // The reader polls every few milliseconds; what has been queued is read when the queue was once empty.
        std::thread::sleep(POLL * 3);
        if let Some(lost) = self.shared.lost.lock().unwrap().as_ref() {
            panic!("the capture is not complete: {lost}");
        }
        self.shared.packets.lock().unwrap().clone()
    }

    /// TCP connections so far, in the order of their first packets.
    #[track_caller]
    pub fn flows(&self) -> Vec<Flow> {
        assemble(&self.packets())
    }

    /// Was this byte string sent in any packet or across packets of one connection?
    #[track_caller]
    pub fn contains(&self, needle: &[u8]) -> bool {
        let packets = self.packets();
        let udp = packets.iter().filter(|packet| packet.flags.is_none());
        let in_packet = udp.into_iter().any(|packet| find(&packet.payload, needle));
        in_packet
            || assemble(&packets).iter().any(|flow| find(&flow.to_server, needle) || find(&flow.to_client, needle))
    }

    /// Connections to a port, of any address.
    #[track_caller]
    pub fn flows_to_port(&self, port: u16) -> Vec<Flow> {
        self.flows().into_iter().filter(|flow| flow.server.port() == port).collect()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A TCP connection, put together from its packets.
#[derive(Debug, Clone)]
pub struct Flow {
    /// Who sent the first packet seen: the client, if the capture was there in time.
    pub client: SocketAddr,
    pub server: SocketAddr,
    /// Bytes in their order; they end before the first gap.
    pub to_server: Vec<u8>,
    pub to_client: Vec<u8>,
    /// The handshake was seen.
    pub complete: bool,
    /// Who ended it with RST, if anybody.
    pub reset_by: Option<SocketAddr>,
}

impl Flow {
    /// Checks that both directions are nothing but TLS 1.3 records, and says which.
    pub fn tls13(&self) -> Result<Records, TlsError> {
        tls::check(&self.to_server, &self.to_client)
    }
}

#[derive(Default)]
struct Half {
    /// Initial sequence number, from the SYN or, without one, from the first packet.
    start: Option<u32>,
    segments: BTreeMap<u32, Vec<u8>>,
}

impl Half {
    fn add(&mut self, packet: &Packet, flags: Flags) {
        let first = if flags.syn { packet.seq.wrapping_add(1) } else { packet.seq };
        let start = *self.start.get_or_insert(first);
        if packet.payload.is_empty() {
            return;
        }
        // Offset in the stream; a retransmission may be longer than what was sent first.
        let segment = self.segments.entry(first.wrapping_sub(start)).or_default();
        if segment.len() < packet.payload.len() {
            segment.clone_from(&packet.payload);
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (offset, segment) in &self.segments {
            let have = bytes.len();
            let Some(skip) = have.checked_sub(*offset as usize) else { break };
            bytes.extend_from_slice(segment.get(skip..).unwrap_or_default());
        }
        bytes
    }
}

fn assemble(packets: &[Packet]) -> Vec<Flow> {
    struct Building {
        client: SocketAddr,
        server: SocketAddr,
        complete: bool,
        reset_by: Option<SocketAddr>,
        to_server: Half,
        to_client: Half,
    }
    let mut flows: Vec<Building> = Vec::new();
    let mut current: BTreeMap<(SocketAddr, SocketAddr), usize> = BTreeMap::new();
    for packet in packets {
        let Some(flags) = packet.flags else { continue };
        let forward = (packet.from, packet.to);
        let known = current.get(&forward).or_else(|| current.get(&(packet.to, packet.from))).copied();
        let opens = flags.syn && !flags.ack;
        // A port used again is a new connection; a repeated SYN is not.
        let again = |i: &usize| !opens || flows[*i].to_server.start == Some(packet.seq.wrapping_add(1));
        let index = known.filter(again).unwrap_or_else(|| {
            let (client, server) = if flags.syn && flags.ack { (packet.to, packet.from) } else { forward };
            current.remove(&(server, client));
            current.insert((client, server), flows.len());
            flows.push(Building {
                client,
                server,
                complete: opens,
                reset_by: None,
                to_server: Half::default(),
                to_client: Half::default(),
            });
            flows.len() - 1
        });
        let flow = &mut flows[index];
        if flags.rst {
            flow.reset_by.get_or_insert(packet.from);
            continue;
        }
        let half = if packet.from == flow.client { &mut flow.to_server } else { &mut flow.to_client };
        half.add(packet, flags);
    }
    let done = |b: Building| Flow {
        client: b.client,
        server: b.server,
        to_server: b.to_server.bytes(),
        to_client: b.to_client.bytes(),
        complete: b.complete,
        reset_by: b.reset_by,
    };
    flows.into_iter().map(done).collect()
}

fn find(bytes: &[u8], needle: &[u8]) -> bool {
    bytes.windows(needle.len()).any(|window| window == needle)
}

const POLL: Duration = Duration::from_millis(5);

fn read_all(mut socket: Socket, shared: &Shared) {
    let mut buffer = vec![0; 128 * 1024];
    let mut kept = 0;
    loop {
        match socket.read(&mut buffer) {
            Ok(n) => {
                let Some(packet) = packet::parse(&buffer[..n]) else { continue };
                kept += packet.payload.len();
                if kept > KEEP {
                    *shared.lost.lock().unwrap() = Some(format!("more than {KEEP} bytes of payload"));
                    return;
                }
                shared.packets.lock().unwrap().push(packet);
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let dropped = dropped_frames(&socket);
                if dropped > 0 {
                    *shared.lost.lock().unwrap() = Some(format!("the kernel dropped {dropped} frames"));
                }
                if shared.stop.load(Ordering::Acquire) {
                    return;
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // The interface went away with its pod: nothing more can come.
            Err(e) if e.raw_os_error() == Some(libc::ENETDOWN) => {}
            Err(e) => {
                *shared.lost.lock().unwrap() = Some(format!("reading failed: {e}"));
                return;
            }
        }
    }
}

fn open(interface: Option<&str>, direction: Direction) -> io::Result<Socket> {
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    // Protocol 0: nothing arrives before it is bound to the interface.
    // SAFETY: plain socket(2); the descriptor is owned from here on.
    let fd = unsafe {
        let fd = libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let socket = Socket::from(fd);
    set_packet_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, SOCKET_BUFFER as libc::c_int)?;
    if direction == Direction::Received {
        const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
        set_packet_option(&socket, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
    }
    let index = match interface {
        None => 0,
        Some(name) => {
            let name = std::ffi::CString::new(name).map_err(io::Error::other)?;
            // SAFETY: the string is terminated and lives through the call.
            match unsafe { libc::if_nametoindex(name.as_ptr()) } {
                0 => return Err(io::Error::last_os_error()),
                index => index,
            }
        }
    };
    // SAFETY: all zero is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol;
    address.sll_ifindex = index as i32;
    // SAFETY: the address is a sockaddr_ll and its size is given.
    let bound = unsafe {
        libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size_of::<libc::sockaddr_ll>() as libc::socklen_t)
    };
    if bound != 0 {
        return Err(io::Error::last_os_error());
    }
    socket.set_read_timeout(Some(POLL))?;
    Ok(socket)
}

fn set_packet_option(socket: &Socket, level: i32, option: i32, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is an int and its size is given.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Frames lost since the last call.
fn dropped_frames(socket: &Socket) -> u32 {
    // struct tpacket_stats: packets, drops.
    let mut stats = [0u32; 2];
    let mut length = size_of_val(&stats) as libc::socklen_t;
    // SAFETY: the buffer has the size that is given.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_STATISTICS,
            stats.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    if got == 0 { stats[1] } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(from: &str, to: &str, seq: u32, flags: &str, payload: &[u8]) -> Packet {
        let flags = Flags {
            syn: flags.contains('S'),
            ack: flags.contains('A'),
            fin: flags.contains('F'),
            rst: flags.contains('R'),
        };
        let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
        Packet { from, to, flags: Some(flags), seq, payload: payload.to_vec() }
    }

    #[test]
    fn a_string_is_found_across_packets_out_of_order_and_sent_twice() {
        let (c, s) = ("10.0.0.1:1000", "10.0.0.2:80");
        let near_wrap = u32::MAX - 2;
        let packets = [
            packet(c, s, near_wrap, "S", b""),
            packet(s, c, 7, "SA", b""),
            packet(c, s, 3, "A", b"nary"),
            packet(c, s, near_wrap.wrapping_add(1), "A", b"cxxca"),
            packet(c, s, near_wrap.wrapping_add(1), "A", b"cx"),
            packet(s, c, 8, "A", b"answer"),
            packet(c, s, 7, "R", b""),
            packet(c, s, 500, "S", b""),
            packet(c, s, 501, "A", b"another connection"),
        ];
        let flows = assemble(&packets);
        assert_eq!(flows.len(), 2);
        assert_eq!(flows[0].to_server, b"cxxcanary");
        assert_eq!(flows[0].to_client, b"answer");
        assert_eq!(flows[0].reset_by, Some(c.parse().unwrap()));
        assert!(flows[0].complete);
        assert_eq!(flows[1].to_server, b"another connection");
    }

    #[test]
    fn bytes_after_a_gap_are_left_out() {
        let (c, s) = ("10.0.0.1:1000", "10.0.0.2:80");
        let packets = [packet(c, s, 0, "S", b""), packet(c, s, 1, "A", b"ab"), packet(c, s, 9, "A", b"zz")];
        assert_eq!(assemble(&packets)[0].to_server, b"ab");
    }
}

//! Connections to a pod that are older than its place in the mesh: the app holds them itself, in the clear, and they
//! are ended where the policies allow no such connection.
//!
//! Must never end a connection that was opened after the pod had come into the mesh: those were judged when they were
//! opened, or belong to probes.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;

use super::inbound::ILLEGAL_PORTS;
use crate::capture::netns::Netns;
use crate::capture::sock_diag::{self, TcpSocket, TcpState};
use crate::policy::{Connection, Decision, PolicySet, evaluate};

/// The older connections of a pod that are still open. Made once for each pod, when peers have been told that it is in
/// the mesh.
#[derive(Debug, Default)]
pub struct Older {
    /// The app's.
    cookies: HashSet<u64>,
    /// They wait for an accept, by the app or by this proxy: whose they are shows then.
    unaccepted: HashSet<u64>,
}

/// What a look at them did.
#[derive(Debug, Default)]
pub struct Looked {
    /// Those that were ended, and why.
    pub ended: Vec<(SocketAddr, SocketAddr, Decision)>,
    /// A decision waits for something.
    pub undecided: bool,
    /// The app has not accepted a connection yet, or has left it to the kernel.
    pub unaccepted: bool,
}

impl Older {
    /// Finds them. `ours` gives client and server of the connections that this process has dialled from other pods'
    /// namespaces: those were judged with their identities. It is asked after the sockets have been looked at, so that
    /// none of them can be missing.
    pub fn find(netns: &Netns, ours: impl FnOnce() -> HashSet<(SocketAddr, SocketAddr)>) -> io::Result<Self> {
        let sockets = sock_diag::tcp_sockets(netns)?;
        let own = own_inodes()?;
        let ours = ours();
        let is_foreign = |s: &&TcpSocket| !own.contains(&s.inode) && !ours.contains(&(s.peer, s.local));
        let served: Vec<_> = sockets.iter().filter(|s| is_served(s, &sockets)).filter(is_foreign).collect();
        let (unaccepted, cookies): (Vec<_>, Vec<_>) = served.into_iter().partition(|s| s.inode == 0);
        let of = |sockets: Vec<&TcpSocket>| sockets.into_iter().map(|s| s.cookie).collect();
        Ok(Self { cookies: of(cookies), unaccepted: of(unaccepted) })
    }

    pub fn count(&self) -> usize {
        self.cookies.len() + self.unaccepted.len()
    }

    /// Judges those that are still open, and ends what the policies do not allow. What is undecided stays, unless
    /// `is_last_call`.
    pub fn judge(&mut self, netns: &Netns, policies: &PolicySet, is_last_call: bool) -> io::Result<Looked> {
        let mut looked = Looked::default();
        if self.count() == 0 {
            return Ok(looked);
        }
        let sockets = sock_diag::tcp_sockets(netns)?;
        let is_ours = |s: &&TcpSocket| self.cookies.contains(&s.cookie) || self.unaccepted.contains(&s.cookie);
        let mut here: Vec<_> = sockets.iter().filter(|s| s.state == TcpState::Open).filter(is_ours).collect();
        // Only for those that have been accepted by now, since a look at all that this process has open costs something.
        if here.iter().any(|s| s.inode != 0 && self.unaccepted.contains(&s.cookie)) {
            let own = own_inodes()?;
            here.retain(|s| !own.contains(&s.inode));
        }
        let (unaccepted, here): (Vec<_>, Vec<_>) = here.into_iter().partition(|s| s.inode == 0);
        self.unaccepted = unaccepted.iter().map(|s| s.cookie).collect();
        self.cookies = here.iter().map(|s| s.cookie).collect();
        looked.unaccepted = !self.unaccepted.is_empty();
        for socket in here {
            let connection = Connection { identity: None, source: socket.peer.ip(), destination: socket.local };
            let decision = evaluate(policies, &connection);
            if decision.is_allowed() {
                continue;
            }
            if decision.verdict.is_undecided() && !is_last_call {
                looked.undecided = true;
                continue;
            }
            if sock_diag::destroy(netns, socket)? {
                looked.ended.push((socket.peer, socket.local, decision));
            }
            self.cookies.remove(&socket.cookie);
        }
        Ok(looked)
    }
}

/// Whether a socket is an app's end of a connection that came from outside of the pod, other than through a relay of
/// ours: such a relay has the other end in the same namespace.
fn is_served(socket: &TcpSocket, all: &[TcpSocket]) -> bool {
    let is_listened = |s: &TcpSocket| {
        s.state == TcpState::Listening
            && s.local.port() == socket.local.port()
            && (s.local.ip().is_unspecified() || s.local.ip() == socket.local.ip())
    };
    socket.state == TcpState::Open
        && !socket.local.ip().is_loopback()
        && socket.local.ip() != socket.peer.ip()
        && !ILLEGAL_PORTS.contains(&socket.local.port())
        && all.iter().any(is_listened)
        && !all.iter().any(|s| s.local == socket.peer && s.peer == socket.local)
}

/// The sockets that this process has open.
fn own_inodes() -> io::Result<HashSet<u32>> {
    let mut inodes = HashSet::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        // A descriptor may be closed meanwhile.
        let Ok(target) = entry.and_then(|entry| std::fs::read_link(entry.path())) else { continue };
        let target = target.to_string_lossy();
        let inode = target.strip_prefix("socket:[").and_then(|t| t.strip_suffix(']'));
        let inode = inode.and_then(|inode| inode.parse::<u32>().ok());
        inodes.extend(inode);
    }
    Ok(inodes)
}

//! An app connects: the destination becomes the pod's outbound listener, the original is kept for the proxy and for
//! the app's own `getpeername`.
//!
//! Must never let a pod's stream socket out uncaptured, unless that pod is to fail open.

use core::ffi::c_void;
use core::ptr;

use aya_ebpf::EbpfContext;
use aya_ebpf::Global;
use aya_ebpf::bindings::{bpf_sock_addr, bpf_sock_tuple};
use aya_ebpf::helpers::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_netns_cookie, bpf_sk_lookup_tcp,
    bpf_sk_release, bpf_skc_to_mptcp_sock,
};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use ebpf::{Counter, Dial, OUTBOUND_PORT, Pod};

use crate::address::{self, Words};
use crate::context::{read, read_pointer, read_words, write, write_words};
use crate::maps::{EXEMPT_CGROUPS, NODE, POD_IPS, PODS, PROBED, SK_DIAL, count};

/// Set by the loader where the kernel has the helper that finds the MPTCP socket of a subflow (Linux 5.19). Without it
/// `getpeername` of a captured MPTCP socket names the listener.
#[unsafe(no_mangle)]
static HAS_MPTCP_SOCK: Global<u32> = Global::new(0);

#[cgroup_sock_addr(connect4)]
pub fn us_connect4(ctx: SockAddrContext) -> i32 {
    let addr = ctx.sock_addr;
    let to = address::mapped(read!(addr, bpf_sock_addr, user_ip4));
    let instead = match decide(&ctx, &to) {
        Decision::Allow => return ALLOW,
        Decision::Refuse => return REFUSE,
        Decision::Capture(listener) => listener[3],
        Decision::Unreachable => ALL_NODES_V4,
    };
    write!(addr, bpf_sock_addr, user_ip4, instead);
    write!(addr, bpf_sock_addr, user_port, OUTBOUND_PORT.to_be());
    ALLOW
}

/// Also for an IPv6 socket that connects to an IPv4-mapped address.
#[cgroup_sock_addr(connect6)]
pub fn us_connect6(ctx: SockAddrContext) -> i32 {
    let addr = ctx.sock_addr;
    let to = read_words!(addr, bpf_sock_addr, user_ip6);
    let instead = match decide(&ctx, &to) {
        Decision::Allow => return ALLOW,
        Decision::Refuse => return REFUSE,
        Decision::Capture(listener) => listener,
        Decision::Unreachable if address::is_v4(&to) => address::mapped(ALL_NODES_V4),
        Decision::Unreachable => ALL_NODES_V6,
    };
    write_words!(addr, bpf_sock_addr, user_ip6, instead);
    write!(addr, bpf_sock_addr, user_port, OUTBOUND_PORT.to_be());
    ALLOW
}

enum Decision {
    Allow,
    /// The app sees EPERM.
    Refuse,
    /// To the outbound listener at this address of the pod.
    Capture(Words),
    /// The app sees ENETUNREACH. A hook can choose its error only since Linux 5.18, so the connection is sent where
    /// the kernel lets no stream go.
    Unreachable,
}

#[inline(always)]
fn decide(ctx: &SockAddrContext, to: &Words) -> Decision {
    if read!(ctx.sock_addr, bpf_sock_addr, type_) != SOCK_STREAM {
        return Decision::Allow;
    }
    let port = u16::from_be(read!(ctx.sock_addr, bpf_sock_addr, user_port) as u16);
    // SAFETY: the context is the one that the kernel gave.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // SAFETY: entries are replaced whole, and one that is removed keeps its memory until the program ends.
    match unsafe { PODS.get(netns) } {
        Some(pod) => of_pod(ctx, netns, pod, to, port),
        None => {
            of_host(ctx, netns, to, port);
            Decision::Allow
        }
    }
}

#[inline(always)]
fn of_pod(ctx: &SockAddrContext, netns: u64, pod: &Pod, to: &Words, port: u16) -> Decision {
    let socket = socket(ctx);
    // What an earlier connect of the same socket has left must mislead nobody.
    SK_DIAL.forget(socket);
    // SAFETY: takes nothing.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    // SAFETY: the value is not read.
    if unsafe { EXEMPT_CGROUPS.get(cgroup) }.is_some() {
        return Decision::Allow;
    }
    if address::is_loopback(to) || address::is_unspecified(to) || address::is_own(pod, to) {
        return Decision::Allow;
    }
    if address::is_probe(to) {
        match PROBED.get_ptr_mut(netns) {
            // SAFETY: the entry's memory outlives the program; the one who probes does it one by one.
            Some(seen) => unsafe { *seen += 1 },
            None => _ = PROBED.insert(netns, 1, 0),
        }
        return Decision::Refuse;
    }
    let protocol = read!(ctx.sock_addr, bpf_sock_addr, protocol);
    if protocol != IPPROTO_TCP && protocol != IPPROTO_MPTCP {
        count(Counter::Refused);
        return Decision::Refuse;
    }

    let fail_open = pod.flags & Pod::FAIL_OPEN != 0;
    let is_v4 = address::is_v4(to);
    if pod.flags & if is_v4 { Pod::HAS_V4 } else { Pod::HAS_V6 } == 0 {
        if fail_open {
            count(Counter::FailedOpen);
            return Decision::Allow;
        }
        count(Counter::NoFamily);
        return Decision::Unreachable;
    }
    let listener = if is_v4 { address::mapped(u32::from_ne_bytes(pod.v4)) } else { address::words_of(&pod.v6) };
    if fail_open && !is_listening(ctx, &listener, is_v4) {
        count(Counter::FailedOpen);
        return Decision::Allow;
    }

    let mut dial = Dial { to: address::endpoint(to, port), pod: 0, kind: Dial::CAPTURED, _pad: 0 };
    if !SK_DIAL.set(socket, &mut dial) {
        count(Counter::OrigDstFull);
        return Decision::Refuse;
    }
    if HAS_MPTCP_SOCK.load() != 0 {
        // MPTCP connects a subflow, which is a TCP socket; the app holds the MPTCP socket above it.
        // SAFETY: the socket is the context's.
        let whole = unsafe { bpf_skc_to_mptcp_sock(socket) };
        if !whole.is_null() {
            SK_DIAL.set(whole.cast(), &mut dial);
        }
    }
    count(Counter::Captured);
    Decision::Capture(listener)
}

/// Marks the socket of a host process that connects to an enrolled pod: its tuple is noted when the source port is
/// known. Processes below `kubepods` are pods, even where they share the node's netns.
#[inline(always)]
fn of_host(ctx: &SockAddrContext, netns: u64, to: &Words, port: u16) {
    let Some(node) = NODE.get(0) else { return };
    if node.netns == 0 || netns != node.netns {
        return;
    }
    let socket = socket(ctx);
    SK_DIAL.forget(socket);
    let addr = address::addr_of(to);
    // SAFETY: the value is copied at once.
    let Some(pod) = unsafe { POD_IPS.get(addr) }.copied() else { return };
    if node.kubepods != 0 {
        // SAFETY: takes a number.
        let above = unsafe { bpf_get_current_ancestor_cgroup_id(node.kubepods_level as i32) };
        if above == node.kubepods {
            return;
        }
    }
    // Without the mark the connection is treated as any other from outside.
    SK_DIAL.set(socket, &mut Dial { to: address::endpoint(to, port), pod, kind: Dial::HOST, _pad: 0 });
}

/// Whether the pod's outbound listener exists. Asked as from the pod's own address and port 0, which the pod's
/// inbound program lets through.
#[inline(always)]
fn is_listening(ctx: &SockAddrContext, at: &Words, is_v4: bool) -> bool {
    let dport = OUTBOUND_PORT.to_be();
    // SAFETY: -1 means the socket's own netns; each tuple is told by its size.
    let found = unsafe {
        if is_v4 {
            let mut tuple = Tuple4 { saddr: at[3], daddr: at[3], sport: 0, dport };
            let tuple: *mut bpf_sock_tuple = ptr::from_mut(&mut tuple).cast();
            bpf_sk_lookup_tcp(ctx.as_ptr(), tuple, size_of::<Tuple4>() as u32, u64::MAX, 0)
        } else {
            let mut tuple = Tuple6 { saddr: *at, daddr: *at, sport: 0, dport };
            let tuple: *mut bpf_sock_tuple = ptr::from_mut(&mut tuple).cast();
            bpf_sk_lookup_tcp(ctx.as_ptr(), tuple, size_of::<Tuple6>() as u32, u64::MAX, 0)
        }
    };
    if found.is_null() {
        return false;
    }
    // SAFETY: the reference came from the look-up above.
    unsafe { bpf_sk_release(found.cast()) };
    true
}

#[inline(always)]
fn socket(ctx: &SockAddrContext) -> *mut c_void {
    read_pointer!(ctx.sock_addr, bpf_sock_addr, __bindgen_anon_1)
}

#[repr(C)]
struct Tuple4 {
    saddr: u32,
    daddr: u32,
    sport: u16,
    dport: u16,
}

#[repr(C)]
struct Tuple6 {
    saddr: Words,
    daddr: Words,
    sport: u16,
    dport: u16,
}

const ALLOW: i32 = 1;
const REFUSE: i32 = 0;
/// Multicast to all nodes of a link.
const ALL_NODES_V4: u32 = u32::from_ne_bytes([224, 0, 0, 1]);
const ALL_NODES_V6: Words = [0xff02_0000_u32.to_be(), 0, 0, 1_u32.to_be()];
const SOCK_STREAM: u32 = 1;
const IPPROTO_TCP: u32 = 6;
/// Linux shows the hook the first subflow, a TCP socket; should it ever show the socket itself, it is known as well.
const IPPROTO_MPTCP: u32 = 262;

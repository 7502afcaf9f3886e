//! An app connects: the destination becomes the pod's outbound listener, the original is kept for the proxy and for
//! the app's own `getpeername`.

use core::ptr::{addr_of, addr_of_mut, read_volatile, write_volatile};

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{bpf_sock_addr, bpf_sock_tuple};
use aya_ebpf::helpers::{
    bpf_get_current_ancestor_cgroup_id, bpf_get_current_cgroup_id, bpf_get_netns_cookie,
    bpf_get_socket_cookie, bpf_sk_lookup_tcp, bpf_sk_release,
};
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use ebpf::{Addr, Counter, Endpoint, OUTBOUND_PORT, PROBE_V4, PROBE_V6, Pod};

use crate::maps::{
    EXEMPT_CGROUPS, PEERS, POD_IPS, PROBED, count, is_mapped, mapped, node, pod, words,
};

const ALLOW: i32 = 1;
/// The app sees EPERM.
const REFUSE: i32 = 0;

#[cgroup_sock_addr(connect4)]
pub fn us_connect4(ctx: SockAddrContext) -> i32 {
    let to = read4(ctx.sock_addr).to_ne_bytes();
    match decide(&ctx, mapped(to)) {
        Decision::Capture(pod) if pod.flags & Pod::HAS_V4 != 0 => {
            if fails_open(&ctx, &pod, true) {
                return ALLOW;
            }
            if !remember(&ctx, mapped(to)) {
                return REFUSE;
            }
            write4(ctx.sock_addr, u32::from_ne_bytes(pod.v4));
            write_port(ctx.sock_addr);
            count(Counter::Captured);
            ALLOW
        }
        Decision::Capture(pod) => no_family(&pod),
        Decision::Host => host(&ctx, mapped(to)),
        Decision::Allow => ALLOW,
        Decision::Refuse => REFUSE,
    }
}

#[cgroup_sock_addr(connect6)]
pub fn us_connect6(ctx: SockAddrContext) -> i32 {
    let to_words = read6(ctx.sock_addr);
    let to = crate::maps::addr_of(to_words);
    let v4 = is_mapped(to_words);
    match decide(&ctx, to) {
        Decision::Capture(pod) => {
            let own = if v4 && pod.flags & Pod::HAS_V4 != 0 {
                words(mapped(pod.v4))
            } else if !v4 && pod.flags & Pod::HAS_V6 != 0 {
                words(pod.v6)
            } else {
                return no_family(&pod);
            };
            if fails_open(&ctx, &pod, v4) {
                return ALLOW;
            }
            if !remember(&ctx, to) {
                return REFUSE;
            }
            write6(ctx.sock_addr, own);
            write_port(ctx.sock_addr);
            count(Counter::Captured);
            ALLOW
        }
        Decision::Host => host(&ctx, to),
        Decision::Allow => ALLOW,
        Decision::Refuse => REFUSE,
    }
}

enum Decision {
    Allow,
    Refuse,
    Capture(Pod),
    /// A process of the node outside all pods connects to an enrolled pod.
    Host,
}

#[inline(always)]
fn decide(ctx: &SockAddrContext, to: Addr) -> Decision {
    if kind(ctx.sock_addr) != SOCK_STREAM {
        return Decision::Allow;
    }
    // SAFETY: the context is the one that the kernel gave.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    let Some(pod) = pod(netns) else { return host_process(netns, to) };
    // SAFETY: takes nothing.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    // SAFETY: the value is not read.
    if unsafe { EXEMPT_CGROUPS.get(cgroup) }.is_some() {
        return Decision::Allow;
    }
    if to == mapped(PROBE_V4) || to == PROBE_V6 {
        // SAFETY: the value is copied at once.
        let seen = unsafe { PROBED.get(netns) }.copied().unwrap_or(0) + 1;
        let _ = PROBED.insert(netns, seen, 0);
        return Decision::Refuse;
    }
    if is_local(&pod, to) { Decision::Allow } else { Decision::Capture(pod) }
}

/// Loopback, the pod itself, and addresses that mean either; link-local IPv6 needs a scope that a program cannot see,
/// and multicast is not TCP's.
#[inline(always)]
fn is_local(pod: &Pod, to: Addr) -> bool {
    let w = words(to);
    if is_mapped(w) {
        let v4 = [to[12], to[13], to[14], to[15]];
        return v4[0] == 127
            || v4 == [0, 0, 0, 0]
            || (pod.flags & Pod::HAS_V4 != 0 && v4 == pod.v4);
    }
    let low_one = w[0] == 0 && w[1] == 0 && w[2] == 0 && (w[3] == 0 || w[3] == u32::from_be(1));
    low_one
        || (to[0] == 0xfe && to[1] & 0xc0 == 0x80)
        || to[0] == 0xff
        || (pod.flags & Pod::HAS_V6 != 0 && to == pod.v6)
}

#[inline(always)]
fn host_process(netns: u64, to: Addr) -> Decision {
    let Some(node) = node() else { return Decision::Allow };
    if node.netns == 0 || netns != node.netns {
        return Decision::Allow;
    }
    // SAFETY: the value is not read.
    if unsafe { POD_IPS.get(to) }.is_none() {
        return Decision::Allow;
    }
    if node.kubepods != 0 {
        // SAFETY: takes a number.
        let above = unsafe { bpf_get_current_ancestor_cgroup_id(node.kubepods_level as i32) };
        if above == node.kubepods {
            return Decision::Allow;
        }
    }
    Decision::Host
}

#[inline(always)]
fn host(ctx: &SockAddrContext, to: Addr) -> i32 {
    let port = read_port(ctx.sock_addr);
    let mut peer = Endpoint { addr: to, port, _pad: [0; 6] };
    peer._pad[0] = Endpoint::HOST;
    // SAFETY: the context is the one that the kernel gave.
    let socket = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // Without the entry the connection is treated as any other from outside.
    let _ = PEERS.insert(socket, peer, 0);
    ALLOW
}

#[inline(always)]
fn remember(ctx: &SockAddrContext, to: Addr) -> bool {
    let original = Endpoint { addr: to, port: read_port(ctx.sock_addr), _pad: [0; 6] };
    // SAFETY: the context is the one that the kernel gave.
    let socket = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    let kept = PEERS.insert(socket, original, 0).is_ok();
    if !kept {
        count(Counter::OrigDstFull);
    }
    kept
}

#[inline(always)]
fn no_family(pod: &Pod) -> i32 {
    if pod.flags & Pod::FAIL_OPEN != 0 {
        return ALLOW;
    }
    count(Counter::NoFamily);
    REFUSE
}

/// For a pod that fails open: whether nobody listens for its connections.
#[inline(always)]
fn fails_open(ctx: &SockAddrContext, pod: &Pod, v4: bool) -> bool {
    if pod.flags & Pod::FAIL_OPEN == 0 {
        return false;
    }
    // SAFETY: all-zero is a valid tuple.
    let mut tuple: bpf_sock_tuple = unsafe { core::mem::zeroed() };
    let size = if v4 {
        // SAFETY: the IPv4 variant is the one that is filled and whose size is passed.
        unsafe {
            tuple.__bindgen_anon_1.ipv4.daddr = u32::from_ne_bytes(pod.v4);
            tuple.__bindgen_anon_1.ipv4.saddr = u32::from_ne_bytes(pod.v4);
            tuple.__bindgen_anon_1.ipv4.dport = OUTBOUND_PORT.to_be();
            size_of_val(&tuple.__bindgen_anon_1.ipv4)
        }
    } else {
        // SAFETY: the IPv6 variant is the one that is filled and whose size is passed.
        unsafe {
            tuple.__bindgen_anon_1.ipv6.daddr = words(pod.v6);
            tuple.__bindgen_anon_1.ipv6.saddr = words(pod.v6);
            tuple.__bindgen_anon_1.ipv6.dport = OUTBOUND_PORT.to_be();
            size_of_val(&tuple.__bindgen_anon_1.ipv6)
        }
    };
    // SAFETY: the tuple is `size` bytes long; -1 means the socket's own netns.
    let found = unsafe { bpf_sk_lookup_tcp(ctx.as_ptr(), addr_of_mut!(tuple), size as u32, u64::MAX, 0) };
    if found.is_null() {
        count(Counter::FailedOpen);
        return true;
    }
    // SAFETY: the reference came from the look-up above.
    unsafe { bpf_sk_release(found.cast()) };
    false
}

#[inline(always)]
fn kind(addr: *mut bpf_sock_addr) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read_volatile(addr_of!((*addr).type_)) }
}

#[inline(always)]
pub fn read4(addr: *mut bpf_sock_addr) -> u32 {
    // SAFETY: a field of the context.
    unsafe { read_volatile(addr_of!((*addr).user_ip4)) }
}

#[inline(always)]
pub fn write4(addr: *mut bpf_sock_addr, ip: u32) {
    // SAFETY: a field of the context.
    unsafe { write_volatile(addr_of_mut!((*addr).user_ip4), ip) };
}

#[inline(always)]
pub fn read6(addr: *mut bpf_sock_addr) -> [u32; 4] {
    // SAFETY: fields of the context.
    unsafe {
        [
            read_volatile(addr_of!((*addr).user_ip6[0])),
            read_volatile(addr_of!((*addr).user_ip6[1])),
            read_volatile(addr_of!((*addr).user_ip6[2])),
            read_volatile(addr_of!((*addr).user_ip6[3])),
        ]
    }
}

#[inline(always)]
pub fn write6(addr: *mut bpf_sock_addr, ip: [u32; 4]) {
    // SAFETY: fields of the context.
    unsafe {
        write_volatile(addr_of_mut!((*addr).user_ip6[0]), ip[0]);
        write_volatile(addr_of_mut!((*addr).user_ip6[1]), ip[1]);
        write_volatile(addr_of_mut!((*addr).user_ip6[2]), ip[2]);
        write_volatile(addr_of_mut!((*addr).user_ip6[3]), ip[3]);
    }
}

#[inline(always)]
fn read_port(addr: *mut bpf_sock_addr) -> u16 {
    // SAFETY: a field of the context; the port stands in network order in its low half.
    u16::from_be(unsafe { read_volatile(addr_of!((*addr).user_port)) } as u16)
}

#[inline(always)]
fn write_port(addr: *mut bpf_sock_addr) {
    set_port(addr, OUTBOUND_PORT);
}

#[inline(always)]
pub fn set_port(addr: *mut bpf_sock_addr, port: u16) {
    // SAFETY: a field of the context.
    unsafe { write_volatile(addr_of_mut!((*addr).user_port), u32::from(port.to_be())) };
}

const SOCK_STREAM: u32 = 1;

//! A connection gets its source port: now the proxy's key for the original destination is known, before the SYN leaves.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{
    BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE,
};
use aya_ebpf::helpers::{bpf_get_netns_cookie, bpf_get_socket_cookie, bpf_ktime_get_ns};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use ebpf::{ConnKey, Counter, Endpoint, Tuple};

use crate::maps::{HOST_CONNS, ORIG_DST, PEERS, count, either, is_mapped, words};

#[sock_ops]
pub fn us_sock_ops(ctx: SockOpsContext) -> u32 {
    let op = ctx.op();
    if op != BPF_SOCK_OPS_TCP_CONNECT_CB && op != BPF_SOCK_OPS_STATE_CB {
        return 1;
    }
    // SAFETY: the context is the one that the kernel gave.
    let socket = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // SAFETY: the value is copied at once.
    let Some(peer) = unsafe { PEERS.get(socket) }.copied() else { return 1 };
    if op == BPF_SOCK_OPS_STATE_CB {
        if ctx.arg(1) == BPF_TCP_CLOSE {
            if peer._pad[0] == Endpoint::HOST {
                let _ = HOST_CONNS.remove(tuple(&ctx, &peer));
            }
            let _ = PEERS.remove(socket);
        }
        return 1;
    }
    let _ = ctx.set_cb_flags((ctx.cb_flags() | BPF_SOCK_OPS_STATE_CB_FLAG) as i32);
    if peer._pad[0] == Endpoint::HOST {
        // SAFETY: takes nothing.
        let now = unsafe { bpf_ktime_get_ns() };
        let _ = HOST_CONNS.insert(tuple(&ctx, &peer), now, 0);
        return 1;
    }
    // SAFETY: the context is the one that the kernel gave.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    let key = ConnKey { netns, source: local(&ctx, &peer) };
    if ORIG_DST.insert(key, peer, 0).is_err() {
        count(Counter::OrigDstFull);
    }
    1
}

/// The connection as the pod at its other end sees it.
#[inline(always)]
fn tuple(ctx: &SockOpsContext, peer: &Endpoint) -> Tuple {
    let mut remote_end = *peer;
    remote_end._pad = [0; 6];
    Tuple { remote: local(ctx, peer), local: remote_end, netns: 0 }
}

/// The socket's own address and port, in the family that it really uses: that of an IPv6 socket with a mapped peer is
/// IPv4.
#[inline(always)]
fn local(ctx: &SockOpsContext, peer: &Endpoint) -> Endpoint {
    let ops = ctx.ops;
    // SAFETY: fields of the context.
    let (port, v4, v6) = unsafe {
        (
            read_volatile(addr_of!((*ops).local_port)) as u16,
            read_volatile(addr_of!((*ops).local_ip4)),
            [
                read_volatile(addr_of!((*ops).local_ip6[0])),
                read_volatile(addr_of!((*ops).local_ip6[1])),
                read_volatile(addr_of!((*ops).local_ip6[2])),
                read_volatile(addr_of!((*ops).local_ip6[3])),
            ],
        )
    };
    let addr = either(is_mapped(words(peer.addr)), v4, v6);
    Endpoint { addr, port, _pad: [0; 6] }
}

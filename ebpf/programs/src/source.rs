//! A connection gets its source port: now the proxy's key for the original destination is known, before the SYN leaves.
//!
//! Must never set the reply of an event: it may be another program's.

use aya_ebpf::EbpfContext;
use aya_ebpf::bindings::{
    BPF_SOCK_OPS_STATE_CB, BPF_SOCK_OPS_STATE_CB_FLAG, BPF_SOCK_OPS_TCP_CONNECT_CB, BPF_TCP_CLOSE, bpf_sock_ops,
};
use aya_ebpf::helpers::{bpf_get_netns_cookie, bpf_ktime_get_ns};
use aya_ebpf::macros::sock_ops;
use aya_ebpf::programs::SockOpsContext;
use ebpf::{ConnKey, Counter, Dial, Endpoint, Tuple};

use crate::address;
use crate::context::{read, read_pointer, read_words};
use crate::maps::{HOST_CONNS, ORIG_DST, SK_DIAL, count};

#[sock_ops]
pub fn us_sock_ops(ctx: SockOpsContext) -> u32 {
    match read!(ctx.ops, bpf_sock_ops, op) {
        BPF_SOCK_OPS_TCP_CONNECT_CB => connecting(&ctx),
        // The event's second argument is the new state.
        BPF_SOCK_OPS_STATE_CB if read!(ctx.ops, bpf_sock_ops, __bindgen_anon_1, 1) == BPF_TCP_CLOSE => closed(&ctx),
        _ => {}
    }
    1
}

#[inline(always)]
fn connecting(ctx: &SockOpsContext) {
    let Some(dial) = dial(ctx) else { return };
    let source = local(ctx.ops, &dial);
    if dial.kind == Dial::HOST {
        // SAFETY: takes nothing.
        let now = unsafe { bpf_ktime_get_ns() };
        // Without the entry the connection is treated as any other from outside.
        let _ = HOST_CONNS.insert(Tuple { remote: source, local: dial.to, netns: dial.pod }, now, 0);
        // What others want to be told of this socket is kept.
        let flags = read!(ctx.ops, bpf_sock_ops, bpf_sock_ops_cb_flags) | BPF_SOCK_OPS_STATE_CB_FLAG;
        let _ = ctx.set_cb_flags(flags as i32);
        return;
    }
    // SAFETY: the context is the one that the kernel gave.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    // Without the entry the pod's inbound program refuses the connection.
    if ORIG_DST.insert(ConnKey { netns, source }, dial.to, 0).is_err() {
        count(Counter::OrigDstFull);
    }
}

/// The port is free again, and the same tuple may be anybody's.
#[inline(always)]
fn closed(ctx: &SockOpsContext) {
    let Some(dial) = dial(ctx) else { return };
    if dial.kind == Dial::HOST {
        let _ = HOST_CONNS.remove(Tuple { remote: local(ctx.ops, &dial), local: dial.to, netns: dial.pod });
    }
}

#[inline(always)]
fn dial(ctx: &SockOpsContext) -> Option<Dial> {
    let socket = read_pointer!(ctx.ops, bpf_sock_ops, __bindgen_anon_2);
    // A socket that is not a full one never connects.
    if socket.is_null() { None } else { SK_DIAL.get(socket) }
}

/// The socket's own address and port, in the family that it really uses: that of an IPv6 socket with a mapped peer is
/// IPv4.
#[inline(always)]
fn local(ops: *mut bpf_sock_ops, dial: &Dial) -> Endpoint {
    let port = read!(ops, bpf_sock_ops, local_port) as u16;
    let words = if address::is_v4(&address::words_of(&dial.to.addr)) {
        address::mapped(read!(ops, bpf_sock_ops, local_ip4))
    } else {
        read_words!(ops, bpf_sock_ops, local_ip6)
    };
    address::endpoint(&words, port)
}

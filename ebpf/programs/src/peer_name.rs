//! `getpeername` of a captured socket: what the app dialled, not the proxy's listener.

use aya_ebpf::bindings::bpf_sock_addr;
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use ebpf::{Dial, Endpoint};

use crate::address;
use crate::context::{read_pointer, write, write_words};
use crate::maps::SK_DIAL;

#[cgroup_sock_addr(getpeername4)]
pub fn us_getpeername4(ctx: SockAddrContext) -> i32 {
    if let Some(dialled) = dialled(&ctx) {
        write!(ctx.sock_addr, bpf_sock_addr, user_ip4, address::words_of(&dialled.addr)[3]);
        write!(ctx.sock_addr, bpf_sock_addr, user_port, dialled.port.to_be());
    }
    1
}

/// Also for an IPv6 socket with an IPv4-mapped peer.
#[cgroup_sock_addr(getpeername6)]
pub fn us_getpeername6(ctx: SockAddrContext) -> i32 {
    if let Some(dialled) = dialled(&ctx) {
        write_words!(ctx.sock_addr, bpf_sock_addr, user_ip6, address::words_of(&dialled.addr));
        write!(ctx.sock_addr, bpf_sock_addr, user_port, dialled.port.to_be());
    }
    1
}

#[inline(always)]
fn dialled(ctx: &SockAddrContext) -> Option<Endpoint> {
    let dial = SK_DIAL.get(read_pointer!(ctx.sock_addr, bpf_sock_addr, __bindgen_anon_1))?;
    (dial.kind == Dial::CAPTURED).then_some(dial.to)
}

//! `getpeername` of a captured socket: what the app dialled, not the proxy's listener.

use aya_ebpf::EbpfContext;
use aya_ebpf::helpers::bpf_get_socket_cookie;
use aya_ebpf::macros::cgroup_sock_addr;
use aya_ebpf::programs::SockAddrContext;
use ebpf::Endpoint;

use crate::connect::{set_port, write4, write6};
use crate::maps::{PEERS, words};

#[cgroup_sock_addr(getpeername4)]
pub fn us_getpeername4(ctx: SockAddrContext) -> i32 {
    if let Some(original) = original(&ctx) {
        write4(ctx.sock_addr, words(original.addr)[3]);
        set_port(ctx.sock_addr, original.port);
    }
    1
}

#[cgroup_sock_addr(getpeername6)]
pub fn us_getpeername6(ctx: SockAddrContext) -> i32 {
    if let Some(original) = original(&ctx) {
        write6(ctx.sock_addr, words(original.addr));
        set_port(ctx.sock_addr, original.port);
    }
    1
}

#[inline(always)]
fn original(ctx: &SockAddrContext) -> Option<Endpoint> {
    // SAFETY: the context is the one that the kernel gave.
    let socket = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    // SAFETY: the value is copied at once.
    let peer = unsafe { PEERS.get(socket) }.copied()?;
    (peer._pad[0] != Endpoint::HOST).then_some(peer)
}

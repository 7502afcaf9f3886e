//! Sockets that no later hook sees are refused when they are made: MPTCP connects its subflows inside the kernel, past
//! the connect hooks. Apps fall back to TCP.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::EbpfContext;
use aya_ebpf::helpers::{bpf_get_current_cgroup_id, bpf_get_netns_cookie};
use aya_ebpf::macros::cgroup_sock;
use aya_ebpf::programs::SockContext;
use ebpf::Counter;

use crate::maps::{EXEMPT_CGROUPS, count, pod};

#[cgroup_sock(sock_create)]
pub fn us_sock_create(ctx: SockContext) -> i32 {
    // SAFETY: a field of the context.
    let protocol = unsafe { read_volatile(addr_of!((*ctx.sock).protocol)) };
    if protocol != IPPROTO_MPTCP {
        return 1;
    }
    // SAFETY: the context is the one that the kernel gave.
    let netns = unsafe { bpf_get_netns_cookie(ctx.as_ptr()) };
    if pod(netns).is_none() {
        return 1;
    }
    // SAFETY: takes nothing.
    let cgroup = unsafe { bpf_get_current_cgroup_id() };
    // SAFETY: the value is not read.
    if unsafe { EXEMPT_CGROUPS.get(cgroup) }.is_some() {
        return 1;
    }
    count(Counter::Refused);
    0
}

const IPPROTO_MPTCP: u32 = 262;

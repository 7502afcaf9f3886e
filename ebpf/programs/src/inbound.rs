//! A connection comes to a pod: it goes to the pod's listener, unless it is the proxy's own or a host process's.
//!
//! One instance is attached to each pod's netns. `POD_NETNS` is set when it is loaded, because a program of this type
//! cannot ask for the cookie.

use core::ptr::{addr_of, read_volatile};

use aya_ebpf::bindings::bpf_sk_lookup;
use aya_ebpf::macros::sk_lookup;
use aya_ebpf::programs::SkLookupContext;
use ebpf::{Addr, Counter, Endpoint, HBONE_PORT, ListenerKey, OUTBOUND_PORT, PLAINTEXT_PORT, Pod, Tuple};

use crate::maps::{HOST_CONNS, LISTENERS, PASS, count, either, is_mapped, pod, words};

#[unsafe(no_mangle)]
static POD_NETNS: u64 = 0;

const DROP: u32 = 0;
const PASSED: u32 = 1;

#[sk_lookup]
pub fn us_inbound(ctx: SkLookupContext) -> u32 {
    let lookup = ctx.lookup;
    // SAFETY: a field of the context.
    if unsafe { read_volatile(addr_of!((*lookup).protocol)) } != IPPROTO_TCP {
        return PASSED;
    }
    // SAFETY: a constant that is set at load.
    let netns = unsafe { read_volatile(&raw const POD_NETNS) };
    let Some(pod) = pod(netns) else { return PASSED };
    // SAFETY: fields of the context.
    let (port, ifindex) = unsafe {
        (read_volatile(addr_of!((*lookup).local_port)) as u16, read_volatile(addr_of!((*lookup).ingress_ifindex)))
    };
    let remote = remote(lookup);
    if ifindex == LOOPBACK || is_own(&pod, remote.addr) {
        return PASSED;
    }
    if port == OUTBOUND_PORT || port == PLAINTEXT_PORT {
        count(Counter::CapturePort);
        return DROP;
    }
    let mut tuple = Tuple { remote, local: local(lookup, port), netns };
    // SAFETY: the value is not read.
    if unsafe { PASS.get(tuple) }.is_some() {
        count(Counter::ProxyDial);
        return PASSED;
    }
    tuple.netns = 0;
    // SAFETY: the value is not read.
    if unsafe { HOST_CONNS.get(tuple) }.is_some() {
        count(Counter::HostConn);
        return PASSED;
    }
    let listener = if port == HBONE_PORT { HBONE_PORT } else { PLAINTEXT_PORT };
    let key = ListenerKey { netns, port: u32::from(listener), _pad: 0 };
    if LISTENERS.redirect_sk_lookup(&ctx, key, 0).is_ok() {
        count(Counter::Steered);
        return PASSED;
    }
    if pod.flags & Pod::FAIL_OPEN != 0 {
        count(Counter::FailedOpen);
        return PASSED;
    }
    count(Counter::NoListener);
    DROP
}

#[inline(always)]
fn is_own(pod: &Pod, remote: Addr) -> bool {
    if is_mapped(words(remote)) {
        let v4 = [remote[12], remote[13], remote[14], remote[15]];
        return v4[0] == 127 || (pod.flags & Pod::HAS_V4 != 0 && v4 == pod.v4);
    }
    pod.flags & Pod::HAS_V6 != 0 && remote == pod.v6
}

#[inline(always)]
fn remote(lookup: *mut bpf_sk_lookup) -> Endpoint {
    // SAFETY: fields of the context; the port stands in network order in the first two bytes of its word.
    let (port, is_v4, v4, v6) = unsafe {
        (
            u16::from_be(read_volatile(addr_of!((*lookup).remote_port).cast::<u16>())),
            read_volatile(addr_of!((*lookup).family)) == AF_INET,
            read_volatile(addr_of!((*lookup).remote_ip4)),
            [
                read_volatile(addr_of!((*lookup).remote_ip6[0])),
                read_volatile(addr_of!((*lookup).remote_ip6[1])),
                read_volatile(addr_of!((*lookup).remote_ip6[2])),
                read_volatile(addr_of!((*lookup).remote_ip6[3])),
            ],
        )
    };
    Endpoint { addr: either(is_v4, v4, v6), port, _pad: [0; 6] }
}

#[inline(always)]
fn local(lookup: *mut bpf_sk_lookup, port: u16) -> Endpoint {
    // SAFETY: fields of the context.
    let (is_v4, v4, v6) = unsafe {
        (
            read_volatile(addr_of!((*lookup).family)) == AF_INET,
            read_volatile(addr_of!((*lookup).local_ip4)),
            [
                read_volatile(addr_of!((*lookup).local_ip6[0])),
                read_volatile(addr_of!((*lookup).local_ip6[1])),
                read_volatile(addr_of!((*lookup).local_ip6[2])),
                read_volatile(addr_of!((*lookup).local_ip6[3])),
            ],
        )
    };
    Endpoint { addr: either(is_v4, v4, v6), port, _pad: [0; 6] }
}

const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;
/// A netns' loopback always has this index.
const LOOPBACK: u32 = 1;

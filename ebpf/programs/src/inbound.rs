//! A connection comes to a pod: it goes to the pod's listener, unless it is the proxy's own or a host process's.
//!
//! One instance is attached to each pod's netns and knows nothing but that netns' cookie, so that a pod gains nothing
//! from an address that it takes from another. UDP and established connections are untouched.

use core::arch::asm;

use aya_ebpf::bindings::bpf_sk_lookup;
use aya_ebpf::helpers::bpf_ktime_get_ns;
use aya_ebpf::macros::sk_lookup;
use aya_ebpf::programs::SkLookupContext;
use ebpf::{
    ConnKey, Counter, HBONE_PORT, ListenerKey, OUTBOUND_PORT, PASS_TTL_NS, PLAINTEXT_PORT, POD_NETNS_PLACEHOLDER, Pod,
    Tuple,
};

use crate::address::{self, Words};
use crate::context::{read, read_half, read_words};
use crate::maps::{HOST_CONNS, LISTENERS, ORIG_DST, PASS, PODS, count};

#[sk_lookup]
pub fn us_inbound(ctx: SkLookupContext) -> u32 {
    let lookup = ctx.lookup;
    if read!(lookup, bpf_sk_lookup, protocol) != IPPROTO_TCP {
        return PASSED;
    }
    let netns = pod_netns();
    // SAFETY: entries are replaced whole, and one that is removed keeps its memory until the program ends.
    let Some(pod) = (unsafe { PODS.get(netns) }) else { return PASSED };
    let (remote_ip, local_ip) = ends(lookup);
    let remote = address::endpoint(&remote_ip, u16::from_be(read_half!(lookup, bpf_sk_lookup, remote_port)));
    let port = read!(lookup, bpf_sk_lookup, local_port) as u16;
    let inside = is_inside(pod, &remote_ip, &local_ip);

    if port == OUTBOUND_PORT {
        // Only what the connect hook has sent here, and that hook's question whether anybody listens.
        // SAFETY: the value is not read.
        let sent = unsafe { ORIG_DST.get(ConnKey { netns, source: remote }) }.is_some();
        if sent || (inside && remote.port == 0) {
            return PASSED;
        }
    }
    if port == OUTBOUND_PORT || port == PLAINTEXT_PORT {
        count(Counter::CapturePort);
        return REFUSED;
    }
    if inside {
        return PASSED;
    }

    let tuple = Tuple { remote, local: address::endpoint(&local_ip, port), netns };
    if let Some(value) = PASS.get_ptr_mut(tuple) {
        // SAFETY: one that is removed meanwhile keeps its memory until the program ends. Writers agree: all set one bit.
        let since = unsafe { *value };
        if is_fresh(Some(since & !ebpf::PASSED)) {
            // SAFETY: as above.
            unsafe { *value = since | ebpf::PASSED };
            count(Counter::ProxyDial);
            return PASSED;
        }
    }
    // SAFETY: the value is copied at once.
    if is_fresh(unsafe { HOST_CONNS.get(tuple) }.copied()) {
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
    REFUSED
}

/// A connection of the pod to itself. Which interface it came by would not tell: for the pod's own address it is eth0.
#[inline(always)]
fn is_inside(pod: &Pod, remote: &Words, local: &Words) -> bool {
    address::is_loopback(remote)
        || address::is_loopback(local)
        || address::equal(remote, local)
        || address::is_own(pod, remote)
}

#[inline(always)]
fn is_fresh(since: Option<u64>) -> bool {
    let Some(since) = since else { return false };
    // SAFETY: takes nothing.
    let now = unsafe { bpf_ktime_get_ns() };
    now.saturating_sub(since) < PASS_TTL_NS
}

#[inline(always)]
fn ends(lookup: *mut bpf_sk_lookup) -> (Words, Words) {
    if read!(lookup, bpf_sk_lookup, family) == AF_INET {
        let remote = read!(lookup, bpf_sk_lookup, remote_ip4);
        let local = read!(lookup, bpf_sk_lookup, local_ip4);
        (address::mapped(remote), address::mapped(local))
    } else {
        (read_words!(lookup, bpf_sk_lookup, remote_ip6), read_words!(lookup, bpf_sk_lookup, local_ip6))
    }
}

/// The cookie of the netns that this instance serves: one instruction that the loader finds and fills in.
#[inline(always)]
fn pod_netns() -> u64 {
    let cookie: u64;
    // SAFETY: loads a constant.
    unsafe {
        asm!("{cookie} = {placeholder} ll", cookie = out(reg) cookie, placeholder = const POD_NETNS_PLACEHOLDER,
            options(pure, nomem, nostack));
    }
    cookie
}

/// A connection that finds no socket is answered with RST.
const REFUSED: u32 = 0;
const PASSED: u32 = 1;
const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;

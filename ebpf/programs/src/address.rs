//! Addresses as the hooks handle them: four words in network byte order, IPv4 in its IPv4-mapped form.

use core::{mem, ptr};
use ebpf::{Addr, Endpoint, PROBE_V4, PROBE_V6, Pod};

/// An address in network byte order. Words, because byte-wise code costs instructions and verifier time.
pub type Words = [u32; 4];

/// Third word of an IPv4-mapped address.
const MAPPED: u32 = 0xffff_u32.to_be();

#[inline(always)]
pub fn mapped(v4: u32) -> Words {
    [0, 0, MAPPED, v4]
}

#[inline(always)]
pub fn is_v4(words: &Words) -> bool {
    words[0] == 0 && words[1] == 0 && words[2] == MAPPED
}

#[inline(always)]
pub fn equal(a: &Words, b: &Words) -> bool {
    ((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3])) == 0
}

/// 127.0.0.0/8 or ::1.
#[inline(always)]
pub fn is_loopback(words: &Words) -> bool {
    if is_v4(words) { words[3].to_ne_bytes()[0] == 127 } else { equal(words, &[0, 0, 0, 1_u32.to_be()]) }
}

/// 0.0.0.0 or ::, which a connect takes for loopback.
#[inline(always)]
pub fn is_unspecified(words: &Words) -> bool {
    words[0] == 0 && words[1] == 0 && (words[2] == 0 || words[2] == MAPPED) && words[3] == 0
}

/// One of the two addresses that the agent dials to see the hook at work.
#[inline(always)]
pub fn is_probe(words: &Words) -> bool {
    equal(words, &mapped(u32::from_ne_bytes(PROBE_V4))) || equal(words, &words_of(&PROBE_V6))
}

/// One of the pod's own addresses.
#[inline(always)]
pub fn is_own(pod: &Pod, words: &Words) -> bool {
    (pod.flags & Pod::HAS_V4 != 0 && equal(words, &mapped(u32::from_ne_bytes(pod.v4))))
        || (pod.flags & Pod::HAS_V6 != 0 && equal(words, &words_of(&pod.v6)))
}

#[inline(always)]
pub fn words_of(addr: &Addr) -> Words {
    // SAFETY: 16 plain bytes; all addresses of the shared types lie at multiples of four.
    unsafe { ptr::from_ref(addr).cast::<Words>().read() }
}

#[inline(always)]
pub fn addr_of(words: &Words) -> Addr {
    // SAFETY: both are 16 plain bytes.
    unsafe { mem::transmute(*words) }
}

#[inline(always)]
pub fn endpoint(words: &Words, port: u16) -> Endpoint {
    Endpoint::new(addr_of(words), port)
}

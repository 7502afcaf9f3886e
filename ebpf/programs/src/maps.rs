//! The maps, and the few ways in which programs use them.

use aya_ebpf::macros::map;
use aya_ebpf::maps::{Array, HashMap, LruHashMap, PerCpuArray, SockHash};
use ebpf::{Addr, COUNTERS as COUNT, ConnKey, Counter, Endpoint, ListenerKey, Node, Pod, Tuple};

#[map]
pub static PODS: HashMap<u64, Pod> = HashMap::with_max_entries(4096, 0);
#[map]
pub static POD_IPS: HashMap<Addr, u64> = HashMap::with_max_entries(8192, 0);
#[map]
pub static EXEMPT_CGROUPS: HashMap<u64, u8> = HashMap::with_max_entries(64, 0);
#[map]
pub static NODE: Array<Node> = Array::with_max_entries(1, 0);
#[map]
pub static ORIG_DST: LruHashMap<ConnKey, Endpoint> = LruHashMap::with_max_entries(65536, 0);
/// Key: the socket's cookie. What a captured socket wanted to reach, or that it is a host process's.
#[map]
pub static PEERS: LruHashMap<u64, Endpoint> = LruHashMap::with_max_entries(262_144, 0);
#[map]
pub static PASS: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(65536, 0);
#[map]
pub static HOST_CONNS: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(65536, 0);
#[map]
pub static LISTENERS: SockHash<ListenerKey> = SockHash::with_max_entries(8192, 0);
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNT, 0);
#[map]
pub static PROBED: LruHashMap<u64, u64> = LruHashMap::with_max_entries(4096, 0);

#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the entry is this CPU's own and lives as long as the map.
        unsafe { *value += 1 };
    }
}

/// The record of the pod whose netns has this cookie, copied out.
#[inline(always)]
pub fn pod(netns: u64) -> Option<Pod> {
    // SAFETY: entries are replaced whole; the copy is taken at once.
    unsafe { PODS.get(netns) }.copied()
}

#[inline(always)]
pub fn node() -> Option<Node> {
    NODE.get(0).copied()
}

/// The IPv4-mapped form of an address in network byte order.
#[inline(always)]
pub fn mapped(v4: [u8; 4]) -> Addr {
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, v4[0], v4[1], v4[2], v4[3]]
}

#[inline(always)]
pub fn words(addr: Addr) -> [u32; 4] {
    // SAFETY: both are 16 plain bytes.
    unsafe { core::mem::transmute::<Addr, [u32; 4]>(addr) }
}

#[inline(always)]
pub fn addr_of(words: [u32; 4]) -> Addr {
    // SAFETY: both are 16 plain bytes.
    unsafe { core::mem::transmute::<[u32; 4], Addr>(words) }
}

/// The address of a socket: `v4` in its mapped form, or `v6`. Both are read before the choice, so that the compiler
/// cannot choose between pointers into the context, which the verifier refuses.
#[inline(always)]
pub fn either(is_v4: bool, v4: u32, v6: [u32; 4]) -> Addr {
    if is_v4 { mapped(v4.to_ne_bytes()) } else { addr_of(v6) }
}

/// Whether the words are those of an IPv4-mapped address.
#[inline(always)]
pub fn is_mapped(words: [u32; 4]) -> bool {
    words[0] == 0 && words[1] == 0 && words[2] == u32::from_be(0xffff)
}

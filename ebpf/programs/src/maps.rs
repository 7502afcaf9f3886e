//! The maps, and the few ways in which programs use them. The loader sets the sizes of those that grow with the node.

use core::ffi::c_void;
use core::ptr::{self, NonNull};

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::helpers::{bpf_sk_storage_delete, bpf_sk_storage_get};
use aya_ebpf::macros::{btf_map, map};
use aya_ebpf::maps::{Array, HashMap, LruHashMap, PerCpuArray, SockHash};
use ebpf::{Addr, COUNTERS as COUNT, ConnKey, Counter, Dial, Endpoint, ListenerKey, Node, Pod, Tuple};

#[map]
pub static PODS: HashMap<u64, Pod> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);
#[map]
pub static POD_IPS: HashMap<Addr, u64> = HashMap::with_max_entries(8192, BPF_F_NO_PREALLOC);
#[map]
pub static EXEMPT_CGROUPS: HashMap<u64, u8> = HashMap::with_max_entries(64, BPF_F_NO_PREALLOC);
#[map]
pub static PROBED: HashMap<u64, u64> = HashMap::with_max_entries(4096, BPF_F_NO_PREALLOC);
#[map]
pub static NODE: Array<Node> = Array::with_max_entries(1, 0);
#[map]
pub static ORIG_DST: LruHashMap<ConnKey, Endpoint> = LruHashMap::with_max_entries(65536, 0);
#[map]
pub static PASS: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(16384, 0);
#[map]
pub static HOST_CONNS: LruHashMap<Tuple, u64> = LruHashMap::with_max_entries(8192, 0);
#[map]
pub static LISTENERS: SockHash<ListenerKey> = SockHash::with_max_entries(8192, 0);
#[map]
pub static COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(COUNT, 0);
#[btf_map]
pub static SK_DIAL: SkStorage<Dial> = SkStorage::new();

#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: the entry is this CPU's own and lives as long as the map.
        unsafe { *value += 1 };
    }
}

/// Values kept on sockets, which end with their socket. The kernel wants this kind of map described by BTF. Written
/// here because the library's own type can only be used in hooks of one type.
#[repr(C)]
pub struct SkStorage<T> {
    r#type: *const [i32; 24],
    key: *const i32,
    value: *const T,
    max_entries: *const [i32; 0],
    map_flags: *const [i32; BPF_F_NO_PREALLOC as usize],
}

// SAFETY: the fields only describe the map to the loader.
unsafe impl<T> Sync for SkStorage<T> {}

impl<T: Copy> SkStorage<T> {
    const fn new() -> Self {
        Self {
            r#type: ptr::null(),
            key: ptr::null(),
            value: ptr::null(),
            max_entries: ptr::null(),
            map_flags: ptr::null(),
        }
    }

    #[inline(always)]
    fn map(&self) -> *mut c_void {
        ptr::from_ref(self).cast_mut().cast()
    }

    /// `sk`: a socket that came from a context.
    #[inline(always)]
    pub fn get(&self, sk: *mut c_void) -> Option<T> {
        // SAFETY: the kernel answers null or the value, which lives as long as the socket.
        NonNull::new(unsafe { bpf_sk_storage_get(self.map(), sk, ptr::null_mut(), 0) }.cast::<T>())
            .map(|value| unsafe { *value.as_ptr() })
    }

    /// False if the kernel has no memory for it.
    #[inline(always)]
    pub fn set(&self, sk: *mut c_void, value: &mut T) -> bool {
        const CREATE: u64 = 1;
        // SAFETY: the kernel copies the value when it makes the storage.
        let slot = unsafe { bpf_sk_storage_get(self.map(), sk, ptr::from_mut(value).cast(), CREATE) }.cast::<T>();
        if slot.is_null() {
            return false;
        }
        // Storage that was there already is handed out as it is.
        // SAFETY: not null; the socket is locked by the process that connects it.
        unsafe { *slot = *value };
        true
    }

    #[inline(always)]
    pub fn forget(&self, sk: *mut c_void) {
        // SAFETY: that there is nothing to delete is no error.
        unsafe { bpf_sk_storage_delete(self.map(), sk) };
    }
}

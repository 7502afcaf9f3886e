//! Maps by bpf(2): what the proxy and the agent do with them, on descriptors; single entries without allocation.

use std::ffi::CString;
use std::io;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Types that may cross into a map: plain bytes, every bit pattern valid, no implicit padding.
///
/// # Safety
/// Only for `repr(C)` types and integers of which that holds.
pub unsafe trait Plain: Copy {}

// SAFETY: integers and types of the `ebpf` crate, which are laid out without implicit padding.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for ebpf::Addr {}
// SAFETY: as above.
unsafe impl Plain for ebpf::Pod {}
// SAFETY: as above.
unsafe impl Plain for ebpf::Node {}
// SAFETY: as above.
unsafe impl Plain for ebpf::Endpoint {}
// SAFETY: as above.
unsafe impl Plain for ebpf::ConnKey {}
// SAFETY: as above.
unsafe impl Plain for ebpf::Tuple {}
// SAFETY: as above.
unsafe impl Plain for ebpf::ListenerKey {}

/// Now, as the programs see it (`CLOCK_MONOTONIC`, nanoseconds).
pub fn monotonic_ns() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` outlives the call, and this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// A map with keys `K` and values `V`.
#[derive(Debug)]
pub struct BpfMap<K, V> {
    fd: OwnedFd,
    types: PhantomData<fn(K) -> V>,
}

impl<K: Plain, V: Plain> BpfMap<K, V> {
    /// Takes a map's descriptor, if its keys and values have the sizes of `K` and `V`.
    pub fn new(fd: OwnedFd) -> io::Result<Self> {
        let info = info(fd.as_fd())?;
        if info.key_size as usize != size_of::<K>() || info.value_size as usize != size_of::<V>() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "the map has keys of {} and values of {} bytes, expected {} and {}",
                    info.key_size,
                    info.value_size,
                    size_of::<K>(),
                    size_of::<V>()
                ),
            ));
        }
        Ok(Self { fd, types: PhantomData })
    }

    pub fn open(pin: &Path) -> io::Result<Self> {
        Self::new(open_pin(pin)?)
    }

    pub fn get(&self, key: &K) -> io::Result<Option<V>> {
        self.fetch(BPF_MAP_LOOKUP_ELEM, key)
    }

    /// The value, which is no longer in the map afterwards (hash maps; Linux 5.14).
    pub fn take(&self, key: &K) -> io::Result<Option<V>> {
        self.fetch(BPF_MAP_LOOKUP_AND_DELETE_ELEM, key)
    }

    pub fn set(&self, key: &K, value: &V) -> io::Result<()> {
        let attr =
            Element { map_fd: self.fd.as_raw_fd() as u32, _pad: 0, key: address(key), value: address(value), flags: 0 };
        bpf(BPF_MAP_UPDATE_ELEM, &attr).map(|_| ())
    }

    /// Adds an entry where there is none; whether there was none.
    pub fn add(&self, key: &K, value: &V) -> io::Result<bool> {
        let fd = self.fd.as_raw_fd() as u32;
        let attr = Element { map_fd: fd, _pad: 0, key: address(key), value: address(value), flags: BPF_NOEXIST };
        match bpf(BPF_MAP_UPDATE_ELEM, &attr) {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Whether there was an entry.
    pub fn remove(&self, key: &K) -> io::Result<bool> {
        let attr = Element { map_fd: self.fd.as_raw_fd() as u32, _pad: 0, key: address(key), value: 0, flags: 0 };
        found(bpf(BPF_MAP_DELETE_ELEM, &attr).map(|_| ())).map(|done| done.is_some())
    }

    /// All keys. Entries that come and go meanwhile may be missed or seen.
    pub fn keys(&self) -> io::Result<Vec<K>> {
        let mut keys = Vec::new();
        let mut last: Option<K> = None;
        let limit = info(self.fd.as_fd())?.max_entries as usize * 2;
        while keys.len() <= limit {
            let mut next = MaybeUninit::<K>::uninit();
            let attr = Element {
                map_fd: self.fd.as_raw_fd() as u32,
                _pad: 0,
                key: last.as_ref().map_or(0, address),
                value: next.as_mut_ptr() as u64,
                flags: 0,
            };
            if found(bpf(BPF_MAP_GET_NEXT_KEY, &attr))?.is_none() {
                break;
            }
            // SAFETY: the call has succeeded, so the kernel has written a whole key.
            let key = unsafe { next.assume_init() };
            keys.push(key);
            last = Some(key);
        }
        Ok(keys)
    }

    /// Number of entries, counted in batches (hash maps). Entries that come and go meanwhile may be missed or seen.
    pub fn entries(&self) -> io::Result<usize> {
        let mut keys: Vec<MaybeUninit<K>> = vec![MaybeUninit::uninit(); BATCH as usize];
        let mut values: Vec<MaybeUninit<V>> = vec![MaybeUninit::uninit(); BATCH as usize];
        let mut position = 0u64;
        let mut total = 0;
        let mut first = true;
        loop {
            let mut attr = Batch {
                in_batch: if first { 0 } else { address(&position) },
                out_batch: (&raw mut position) as u64,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: BATCH,
                map_fd: self.fd.as_raw_fd() as u32,
                elem_flags: 0,
                flags: 0,
            };
            let more = found(bpf_mut(BPF_MAP_LOOKUP_BATCH, &mut attr))?.is_some();
            total += attr.count as usize;
            first = false;
            if !more {
                return Ok(total);
            }
        }
    }

    pub fn max_entries(&self) -> io::Result<u32> {
        Ok(info(self.fd.as_fd())?.max_entries)
    }

    pub fn try_clone_fd(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    fn fetch(&self, command: u32, key: &K) -> io::Result<Option<V>> {
        let mut value = MaybeUninit::<V>::uninit();
        let attr = Element {
            map_fd: self.fd.as_raw_fd() as u32,
            _pad: 0,
            key: address(key),
            value: value.as_mut_ptr() as u64,
            flags: 0,
        };
        // SAFETY: where the call succeeds the kernel has written a whole value.
        Ok(found(bpf(command, &attr))?.map(|_| unsafe { value.assume_init() }))
    }
}

impl<K> BpfMap<K, u64>
where
    K: Plain + From<u32>,
{
    /// The values of a per-CPU array entry, added up.
    pub fn sum_per_cpu(&self, key: u32) -> io::Result<u64> {
        let cpus = possible_cpus()?;
        let mut values = vec![0u64; cpus];
        let key = K::from(key);
        let attr = Element {
            map_fd: self.fd.as_raw_fd() as u32,
            _pad: 0,
            key: address(&key),
            value: values.as_mut_ptr() as u64,
            flags: 0,
        };
        bpf(BPF_MAP_LOOKUP_ELEM, &attr)?;
        Ok(values.iter().sum())
    }
}

impl<K> AsFd for BpfMap<K, u32> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Opens what is pinned at a path of a bpffs.
pub fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attr = Object { pathname: path.as_ptr() as u64, bpf_fd: 0, file_flags: 0 };
    let fd = bpf(BPF_OBJ_GET, &attr)?;
    // SAFETY: the call has made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Pins what a descriptor refers to.
pub fn pin(object: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let attr = Object { pathname: path.as_ptr() as u64, bpf_fd: object.as_raw_fd() as u32, file_flags: 0 };
    bpf(BPF_OBJ_PIN, &attr).map(|_| ())
}

/// The kernel's number of a map.
pub fn map_id(map: BorrowedFd<'_>) -> io::Result<u32> {
    Ok(info(map)?.id)
}

fn info(fd: BorrowedFd<'_>) -> io::Result<MapInfo> {
    let mut info = MapInfo::default();
    object_info(fd, &mut info)?;
    Ok(info)
}

/// Fills `info` with what the kernel tells of a map, program or link. Zeroes and what pointers in it refer to are the
/// caller's part.
pub(super) fn object_info<T>(fd: BorrowedFd<'_>, info: &mut T) -> io::Result<()> {
    let attr = InfoRequest {
        bpf_fd: fd.as_raw_fd() as u32,
        info_len: size_of::<T>() as u32,
        info: std::ptr::from_mut(info) as u64,
    };
    bpf(BPF_OBJ_GET_INFO_BY_FD, &attr).map(|_| ())
}

fn possible_cpus() -> io::Result<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    let last = text.trim().rsplit(['-', ',']).next().and_then(|n| n.parse::<usize>().ok());
    last.map(|n| n + 1).ok_or_else(|| io::Error::other(format!("cannot read the list of CPUs {text:?}")))
}

fn found<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

fn address<T>(value: &T) -> u64 {
    std::ptr::from_ref(value) as u64
}

/// As [`bpf`], for commands that answer in `attr`.
fn bpf_mut<T>(command: u32, attr: &mut T) -> io::Result<i32> {
    // SAFETY: as in `bpf`; nothing else refers to `attr` meanwhile.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

pub(super) fn bpf<T>(command: u32, attr: &T) -> io::Result<i32> {
    // SAFETY: `attr` is the prefix of bpf_attr that `command` reads, its size is passed, and the pointers in it are
    // alive until the call ends.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size_of::<T>()) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

#[repr(C)]
struct Element {
    map_fd: u32,
    _pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct Batch {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

#[repr(C)]
struct Object {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
struct InfoRequest {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

/// The first fields of bpf_map_info.
#[repr(C)]
#[derive(Default)]
struct MapInfo {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

const BPF_MAP_LOOKUP_ELEM: u32 = 1;
const BPF_MAP_UPDATE_ELEM: u32 = 2;
const BPF_NOEXIST: u64 = 1;
const BPF_MAP_DELETE_ELEM: u32 = 3;
const BPF_MAP_GET_NEXT_KEY: u32 = 4;
const BPF_OBJ_PIN: u32 = 6;
const BPF_OBJ_GET: u32 = 7;
const BPF_MAP_LOOKUP_AND_DELETE_ELEM: u32 = 21;
const BPF_OBJ_GET_INFO_BY_FD: u32 = 15;
const BPF_MAP_LOOKUP_BATCH: u32 = 24;

/// Entries counted by one call.
const BATCH: u32 = 4096;

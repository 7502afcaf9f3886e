//! The types that the eBPF programs and user space share, and the committed object.
//!
//! Every type is plain: fixed layout, no padding left implicit, addresses in network byte order and at multiples of four.
//! A change of any layout here means a new [`LAYOUT_VERSION`], because pinned maps outlive processes.
#![no_std]

/// Version of the map layouts; part of the pin path, so that no process adopts maps of another layout.
pub const LAYOUT_VERSION: u32 = 1;

/// Ports that every enrolled pod's listeners use (HBONE, §1 of the protocol).
pub const OUTBOUND_PORT: u16 = 15001;
/// Port of the listener that takes captured plaintext inbound connections.
pub const PLAINTEXT_PORT: u16 = 15006;
/// Port on which a pod is reached over HBONE.
pub const HBONE_PORT: u16 = 15008;

/// How long an entry of `PASS` or `HOST_CONNS` lets a new connection through, in nanoseconds: one that its owner failed
/// to remove opens nothing after this. Whoever dials through an entry must give up earlier.
pub const PASS_TTL_NS: u64 = 30_000_000_000;

/// Bit of a value in `PASS`, set by `sk_lookup` when the connection has come: it has reached the netns of the entry, and
/// not another one that has the same address.
pub const PASSED: u64 = 1 << 63;

/// Stands in the `sk_lookup` program where the loader writes the cookie of the netns that an instance serves: programs
/// of that type have no helper that tells it.
pub const POD_NETNS_PLACEHOLDER: u64 = 0x5eed_c00c_1e0f_a90d;

/// The programs, as `cargo xtask ebpf` has built them from `programs/`.
#[cfg(not(target_arch = "bpf"))]
pub static OBJECT: &[u8] = {
    /// Puts the bytes where an ELF file's structures may be read in place.
    #[repr(C, align(32))]
    struct Aligned<T: ?Sized>(T);
    static ALIGNED: &Aligned<[u8]> = &Aligned(*include_bytes!("../understory.bpf.o"));
    &ALIGNED.0
};

/// An IPv6 address, or an IPv4 address in its IPv4-mapped form, in network byte order.
pub type Addr = [u8; 16];

/// Address and port of one end of a connection. The port is in host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Endpoint {
    pub addr: Addr,
    pub port: u16,
    pub _pad: u16,
    pub _pad2: u32,
}

impl Endpoint {
    #[inline(always)]
    pub const fn new(addr: Addr, port: u16) -> Self {
        Self { addr, port, _pad: 0, _pad2: 0 }
    }
}

/// Value of map `PODS` (key: the pod's netns cookie): a pod whose connections are captured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, align(8))]
pub struct Pod {
    /// IPv4 address in network byte order; valid with [`Pod::HAS_V4`].
    pub v4: [u8; 4],
    /// IPv6 address; valid with [`Pod::HAS_V6`].
    pub v6: Addr,
    pub flags: u32,
}

impl Pod {
    pub const HAS_V4: u32 = 1;
    pub const HAS_V6: u32 = 2;
    /// Without a proxy's listener, connections pass uncaptured instead of being refused.
    pub const FAIL_OPEN: u32 = 4;
}

/// Key of map `ORIG_DST`: the client's end of a captured connection. Value: [`Endpoint`], where it wanted to go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ConnKey {
    /// Cookie of the netns that the client's socket lives in.
    pub netns: u64,
    /// The client's own address and port.
    pub source: Endpoint,
}

/// Key of maps `PASS` (the proxy's own dials to an app) and `HOST_CONNS` (connections that host processes
/// of the node opened to a pod): `sk_lookup` lets exactly this connection reach the app.
/// Value: `u64`, time of insertion in nanoseconds of `CLOCK_MONOTONIC`; void [`PASS_TTL_NS`] later. In `PASS` also
/// [`PASSED`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Tuple {
    /// Where the connection comes from, as the pod sees it.
    pub remote: Endpoint,
    /// The pod's address and the app's port.
    pub local: Endpoint,
    /// Cookie of the dialled pod's netns: an entry opens nothing in another, whatever addresses that has.
    pub netns: u64,
}

/// Key of map `LISTENERS` (a sockhash): which of a pod's listeners.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ListenerKey {
    pub netns: u64,
    /// [`PLAINTEXT_PORT`] or [`HBONE_PORT`].
    pub port: u32,
    pub _pad: u32,
}

/// The only value of map `NODE`: what the programs know of the node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Node {
    /// Cookie of the node's own netns, in which kubelet and other host processes run.
    pub netns: u64,
    /// cgroup id of the node's `kubepods`; processes below it are pods, also hostNetwork ones. 0: none.
    pub kubepods: u64,
    /// Depth of `kubepods` below the root of the hierarchy (root = 0).
    pub kubepods_level: u32,
    pub _pad: u32,
}

/// Value of the socket storage `SK_DIAL`: what the connect hook keeps for the later hooks of the same socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Dial {
    /// What the app dialled.
    pub to: Endpoint,
    /// [`Dial::HOST`]: cookie of the dialled pod's netns. Else zero.
    pub pod: u64,
    /// [`Dial::CAPTURED`] or [`Dial::HOST`].
    pub kind: u32,
    pub _pad: u32,
}

impl Dial {
    /// A pod's connection, on its way to the outbound listener.
    pub const CAPTURED: u32 = 1;
    /// A host process's connection to an enrolled pod, left alone.
    pub const HOST: u32 = 2;
}

/// Index into the per-CPU array `COUNTERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Counter {
    /// Connections sent to the outbound listener.
    Captured = 0,
    /// Original destinations for which the kernel had no room; the connection is refused.
    OrigDstFull = 1,
    /// Connections refused because the pod has no address of that family.
    NoFamily = 2,
    /// Stream sockets of a protocol that cannot be captured (neither TCP nor MPTCP), refused.
    Refused = 3,
    /// Inbound connections steered to a listener.
    Steered = 4,
    /// Inbound connections dropped because the pod has no listener.
    NoListener = 5,
    /// Direct dials to the capture ports, dropped.
    CapturePort = 6,
    /// The proxy's own dials passed to the app.
    ProxyDial = 7,
    /// Connections of the node's host processes passed to the app.
    HostConn = 8,
    /// Connections of pods that fail open, passed without a listener.
    FailedOpen = 9,
}

/// Number of counters.
pub const COUNTERS: u32 = 10;

/// Destination that a probe of the agent dials from inside a pod: the connect hook refuses it and records the
/// netns in map `PROBED` (key: netns cookie, value: `u64` number of probes seen), so capture is shown without a packet.
/// Class E space: never routed, never a workload's.
pub const PROBE_V4: [u8; 4] = [240, 0, 0, 1];
/// The same for IPv6: discard-only space (RFC 6666).
pub const PROBE_V6: Addr = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

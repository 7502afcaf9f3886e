//! The eBPF programs in the kernel, shown by real sockets: this process joins a cgroup of its own, makes network
//! namespaces of its own, and leaves nothing behind. Needs root.

mod ground;
mod inbound;
mod lifetime;
mod outbound;

//! The programs that capture a node's traffic. One file a hook; what they share with user space is the `ebpf` crate.
//!
//! A pod is known by the cookie of its netns, a proxy by its cgroup; nothing that a pod can set itself (a mark, an
//! address) exempts from anything. Only helpers and context fields that Linux 5.15 has are used, but for one that is
//! behind a switch of the loader.
#![no_std]
#![no_main]
#![feature(asm_experimental_arch)]

mod address;
mod connect;
mod context;
mod inbound;
mod maps;
mod peer_name;
mod source;

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

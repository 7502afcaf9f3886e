//! The programs that capture a node's traffic. One file a hook; what they share with user space is the `ebpf` crate.
//!
//! Context fields are read and written with volatile accesses of their own width: the verifier accepts no other.
#![no_std]
#![no_main]

mod connect;
mod create;
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

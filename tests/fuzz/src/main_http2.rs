//! Feeds a tunnel's HTTP/2 with what libFuzzer makes up.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| ztunnel::hbone::check::check(data));

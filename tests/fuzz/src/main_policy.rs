//! Feeds `policy.rs` with what libFuzzer makes up.
#![no_main]

mod policy;

libfuzzer_sys::fuzz_target!(|data: &[u8]| policy::check(data));

//! An allocator that counts what the present thread allocates.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
    static FREED: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is passed to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        ALLOCATED.set(ALLOCATED.get() + size_class(layout.size()));
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        FREED.set(FREED.get() + size_class(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What jemalloc takes for so many bytes: multiples of 16 up to 128, then four sizes up to each doubling.
fn size_class(bytes: usize) -> u64 {
    let step = match bytes {
        0..=8 => 8,
        9..=128 => 16,
        _ => bytes.next_power_of_two() / 8,
    };
    bytes.next_multiple_of(step) as u64
}

/// Bytes that are held now.
pub fn held() -> i64 {
    ALLOCATED.get() as i64 - FREED.get() as i64
}

/// Bytes, and how often, so far.
pub fn allocated() -> (u64, u64) {
    (ALLOCATED.get(), ALLOCATIONS.get())
}

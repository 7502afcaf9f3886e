//! The list of established connections: each worker's thread has a part of its own, so that workers do not meet.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::Live;

pub(super) struct LiveTable {
    parts: [Mutex<Part>; PARTS],
}

/// Where a connection is in the list.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    part: u32,
    slot: u32,
}

#[derive(Default)]
struct Part {
    slots: Vec<Option<Arc<Live>>>,
    free: Vec<u32>,
}

impl LiveTable {
    pub(super) fn insert(&self, live: Arc<Live>) -> Place {
        let part = part_of_this_thread();
        let mut list = self.lock(part);
        let slot = list.free.pop().unwrap_or_else(|| {
            list.slots.push(None);
            (list.slots.len() - 1) as u32
        });
        list.slots[slot as usize] = Some(live);
        Place { part: part as u32, slot }
    }

    pub(super) fn remove(&self, place: Place) {
        let mut list = self.lock(place.part as usize);
        let gone = list.slots[place.slot as usize].take();
        list.free.push(place.slot);
        if list.free.len() == list.slots.len() {
            // Empty: give back what a burst needed.
            *list = Part::default();
        }
        drop(list);
        drop(gone);
    }

    /// Goes through all, part by part; no lock is held while the caller looks at one.
    pub(super) fn all(&self) -> impl Iterator<Item = Arc<Live>> + '_ {
        (0..PARTS).flat_map(|part| {
            let copies: Vec<_> = self.lock(part).slots.iter().flatten().cloned().collect();
            copies
        })
    }

    fn lock(&self, part: usize) -> MutexGuard<'_, Part> {
        self.parts[part].lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Default for LiveTable {
    fn default() -> Self {
        Self { parts: std::array::from_fn(|_| Mutex::default()) }
    }
}

fn part_of_this_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static PART: Cell<Option<usize>> = const { Cell::new(None) });
    PART.with(|part| {
        part.get().unwrap_or_else(|| {
            let new = NEXT.fetch_add(1, Ordering::Relaxed) % PARTS;
            part.set(Some(new));
            new
        })
    })
}

const PARTS: usize = 64;

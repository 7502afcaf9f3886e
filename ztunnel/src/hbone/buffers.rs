//! Large buffers that are lent while bytes are on their way and given back when a connection falls idle, so that an
//! idle connection owns none. One stock per thread: no locks.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

/// Size of a buffer, bytes. Reads of 64–256 KiB are the optimum on bulk; TLS records are at most 16 KiB + 256 + 5.
pub const BUFFER_SIZE: usize = 256 * 1024;

/// Buffers that a thread keeps for the next use; what is given back beyond that is freed.
const KEPT: usize = 4;

thread_local! {
    static STOCK: RefCell<Vec<Box<[u8]>>> = const { RefCell::new(Vec::new()) };
}

/// A lent buffer: bytes `start..end` are in use.
pub struct Buffer {
    bytes: Option<Box<[u8]>>,
    start: usize,
    end: usize,
}

impl Buffer {
    pub fn lend() -> Self {
        let bytes = STOCK.with_borrow_mut(Vec::pop).unwrap_or_else(|| vec![0; BUFFER_SIZE].into_boxed_slice());
        Self { bytes: Some(bytes), start: 0, end: 0 }
    }

    /// The bytes in use.
    pub fn filled(&self) -> &[u8] {
        &self[self.start..self.end]
    }

    pub fn filled_mut(&mut self) -> &mut [u8] {
        let (start, end) = (self.start, self.end);
        &mut self.deref_mut()[start..end]
    }

    /// The room behind the bytes in use. Moves them to the front first where less than `wanted` is left.
    pub fn room(&mut self, wanted: usize) -> &mut [u8] {
        if BUFFER_SIZE - self.end < wanted && self.start > 0 {
            let (start, end) = (self.start, self.end);
            self.deref_mut().copy_within(start..end, 0);
            self.end -= start;
            self.start = 0;
        }
        let end = self.end;
        &mut self.deref_mut()[end..]
    }

    /// Bytes written into [`Buffer::room`].
    pub fn add(&mut self, n: usize) {
        self.end += n;
        debug_assert!(self.end <= BUFFER_SIZE);
    }

    /// Bytes taken from the front.
    pub fn take(&mut self, n: usize) {
        self.start += n;
        debug_assert!(self.start <= self.end);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    pub fn len(&self) -> usize {
        self.end - self.start
    }
}

/// Bytes that were read and not used yet: in a lent buffer, or, where they are few and more may be long in coming, in
/// one of their own size.
#[derive(Default)]
pub struct Inbox {
    lent: Option<Buffer>,
    small: Vec<u8>,
}

impl Inbox {
    pub fn filled_mut(&mut self) -> &mut [u8] {
        match &mut self.lent {
            Some(buffer) => buffer.filled_mut(),
            None => &mut self.small,
        }
    }

    /// Whether there is a large buffer, so that room costs nothing.
    pub fn is_lent(&self) -> bool {
        self.lent.is_some()
    }

    /// The room behind the bytes, in a large buffer.
    pub fn room(&mut self, wanted: usize) -> &mut [u8] {
        let small = std::mem::take(&mut self.small);
        let buffer = self.lent.get_or_insert_with(Buffer::lend);
        buffer.room(small.len())[..small.len()].copy_from_slice(&small);
        buffer.add(small.len());
        buffer.room(wanted)
    }

    /// Bytes written into [`Inbox::room`].
    pub fn add(&mut self, n: usize) {
        if let Some(buffer) = &mut self.lent {
            buffer.add(n);
        }
        self.give_back_if_empty();
    }

    /// Bytes taken from the front.
    pub fn take(&mut self, n: usize) {
        match &mut self.lent {
            Some(buffer) => buffer.take(n),
            None => drop(self.small.drain(..n)),
        }
        self.give_back_if_empty();
    }

    /// Gives the large buffer back; what is in it moves.
    pub fn shrink(&mut self) {
        if let Some(buffer) = self.lent.take() {
            self.small = buffer.filled().to_vec();
        }
    }

    fn give_back_if_empty(&mut self) {
        if self.lent.as_ref().is_some_and(Buffer::is_empty) {
            self.lent = None;
        }
        if self.small.is_empty() {
            self.small = Vec::new();
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // Always there: only `drop` takes it.
        self.bytes.as_deref().unwrap_or_default()
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.bytes.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(bytes) = self.bytes.take() else { return };
        // A thread that is ending has no stock any more: the buffer is freed.
        let _ = STOCK.try_with(|stock| {
            let mut stock = stock.borrow_mut();
            if stock.len() < KEPT {
                stock.push(bytes);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inbox_keeps_its_bytes_through_every_size() {
        let mut inbox = Inbox::default();
        inbox.room(8)[..6].copy_from_slice(b"abcdef");
        inbox.add(6);
        inbox.take(1);
        inbox.shrink();
        assert!(!inbox.is_lent());
        assert_eq!(inbox.filled_mut(), b"bcdef");
        inbox.take(1);
        inbox.room(2)[..2].copy_from_slice(b"gh");
        inbox.add(2);
        assert_eq!(inbox.filled_mut(), b"cdefgh");
        inbox.take(6);
        assert!(!inbox.is_lent() && inbox.filled_mut().is_empty());
        inbox.room(1);
        inbox.add(0);
        assert!(!inbox.is_lent(), "nothing came");
    }

    #[test]
    fn room_moves_bytes_to_the_front_when_it_runs_short() {
        let mut buffer = Buffer::lend();
        buffer.room(1)[..4].copy_from_slice(b"abcd");
        buffer.add(4);
        buffer.take(2);
        assert_eq!(buffer.filled(), b"cd");
        assert_eq!(buffer.room(BUFFER_SIZE - 2).len(), BUFFER_SIZE - 2);
        assert_eq!(buffer.filled(), b"cd");
        buffer.take(2);
        assert!(buffer.is_empty());
        assert_eq!(buffer.room(1).len(), BUFFER_SIZE);
    }
}

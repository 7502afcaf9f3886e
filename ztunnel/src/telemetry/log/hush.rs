//! A bound to lines that somebody else can cause as often as he likes.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Lets so many lines through a second, and counts the others.
#[derive(Debug)]
pub struct Hush {
    per_second: u32,
    second: Mutex<Option<Second>>,
}

#[derive(Debug)]
struct Second {
    since: Instant,
    spoken: u32,
    unsaid: u64,
}

impl Hush {
    pub const fn new(per_second: u32) -> Self {
        Self { per_second, second: Mutex::new(None) }
    }

    /// Whether to write a line; if so, how many were not written since the last one.
    pub fn speak(&self) -> Option<u64> {
        let now = Instant::now();
        let mut second = self.second.lock().unwrap_or_else(PoisonError::into_inner);
        let second = second.get_or_insert(Second { since: now, spoken: 0, unsaid: 0 });
        if now.duration_since(second.since).as_secs() > 0 {
            (second.since, second.spoken) = (now, 0);
        }
        if second.spoken >= self.per_second {
            second.unsaid += 1;
            return None;
        }
        second.spoken += 1;
        Some(std::mem::take(&mut second.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_lines_pass_and_the_others_are_counted() {
        let hush = Hush::new(3);
        let said: Vec<u64> = (0..1000).filter_map(|_| hush.speak()).collect();
        // More only if a second has passed meanwhile.
        assert!((3..=6).contains(&said.len()), "{said:?}");
        assert_eq!(said[..3], [0, 0, 0]);
        let next = loop {
            if let Some(unsaid) = hush.speak() {
                break unsaid;
            }
        };
        assert!(next >= 990 - said.iter().sum::<u64>(), "{next}");
    }
}

//! Cheap randomness for spreading load and jitter. Must never be used for anything secret.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

/// A random number (wyrand, seeded per thread by the system).
pub fn next_u64() -> u64 {
    thread_local!(static STATE: Cell<u64> = Cell::new(RandomState::new().build_hasher().finish()));
    STATE.with(|state| {
        let seed = state.get().wrapping_add(0xa076_1d64_78bd_642f);
        state.set(seed);
        let wide = u128::from(seed) * u128::from(seed ^ 0xe703_7ed1_a0b4_28db);
        (wide as u64) ^ (wide >> 64) as u64
    })
}

/// A random number below `bound`; 0 if that is 0.
pub fn below(bound: u64) -> u64 {
    ((u128::from(next_u64()) * u128::from(bound)) >> 64) as u64
}

/// A random factor within `1 - spread .. 1 + spread`.
pub fn factor(spread: f64) -> f64 {
    1.0 + spread * (2.0 * (next_u64() >> 11) as f64 / (1u64 << 53) as f64 - 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_spread_over_the_whole_range() {
        let mut counts = [0; 10];
        for _ in 0..10_000 {
            counts[below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|&n| (800..1200).contains(&n)), "{counts:?}");
        assert_eq!(below(0), 0);
        assert!((0..1000).all(|_| (0.8..=1.2).contains(&factor(0.2))));
    }
}

//! Limits on what callers may cost: requests by caller, log lines by the second.
//!
//! Must never grow with the number of callers that ever came.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often each caller may ask: so many at once, then so many a second.
#[derive(Debug)]
pub struct Rates {
    burst: f64,
    per_second: f64,
    buckets: Mutex<HashMap<String, Bucket>>,
}

/// Lets so many lines through a second; the others count.
#[derive(Debug, Default)]
pub struct Hush(Mutex<Option<Bucket>>);

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    pub fn new(burst: u32, per_second: u32) -> Self {
        Self { burst: burst.into(), per_second: per_second.into(), buckets: Mutex::default() }
    }

    pub fn allow(&self, caller: &str) -> bool {
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if buckets.len() >= MAX_CALLERS && !buckets.contains_key(caller) {
            // A full bucket says nothing.
            buckets.retain(|_, bucket| bucket.filled(now, self.burst, self.per_second) < self.burst);
            if buckets.len() >= MAX_CALLERS {
                return false;
            }
        }
        let fresh = Bucket { left: self.burst, at: now };
        buckets.entry(caller.to_owned()).or_insert(fresh).take(now, self.burst, self.per_second)
    }
}

impl Hush {
    pub fn speak(&self) -> bool {
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        bucket.get_or_insert(Bucket { left: LINES, at: now }).take(now, LINES, LINES)
    }
}

impl Bucket {
    fn filled(&self, now: Instant, burst: f64, per_second: f64) -> f64 {
        let since: Duration = now.saturating_duration_since(self.at);
        (self.left + since.as_secs_f64() * per_second).min(burst)
    }

    fn take(&mut self, now: Instant, burst: f64, per_second: f64) -> bool {
        self.left = self.filled(now, burst, per_second);
        self.at = now;
        let allowed = self.left >= 1.0;
        if allowed {
            self.left -= 1.0;
        }
        allowed
    }
}

/// Callers are remembered only while they have asked lately; a cluster has fewer nodes.
const MAX_CALLERS: usize = 20_000;
/// Lines a second.
const LINES: f64 = 10.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_that_asks_too_often_is_refused_and_others_are_not() {
        let rates = Rates::new(3, 1);
        let answers: Vec<bool> = (0..5).map(|_| rates.allow("a")).collect();
        assert_eq!(answers, [true, true, true, false, false]);
        assert!(rates.allow("b"));
        if let Some(bucket) = rates.buckets.lock().unwrap().get_mut("a") {
            bucket.at -= Duration::from_secs(1);
        }
        assert!(rates.allow("a") && !rates.allow("a"));
    }

    #[test]
    fn callers_of_long_ago_are_forgotten() {
        let rates = Rates::new(1, 1000);
        for n in 0..MAX_CALLERS * 2 {
            rates.allow(&n.to_string());
        }
        assert!(rates.buckets.lock().unwrap().len() <= MAX_CALLERS);
    }
}

//! Limits on what callers may cost: requests by caller.
//!
//! Must never grow with the number of callers that ever came.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often each caller may ask: so many at once, then so many a second.
#[derive(Debug)]
pub struct Rates {
    pub rate: Rate,
    /// Callers that are remembered at a time.
    most: usize,
    table: Mutex<Table>,
}

/// So many at once, then so many a second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    pub burst: u32,
    pub per_second: u32,
}

/// The caller must wait for so long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait(pub Duration);

#[derive(Debug, Default)]
struct Table {
    buckets: HashMap<String, Bucket>,
    swept: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    left: f64,
    at: Instant,
}

impl Rates {
    /// `most`: callers that are remembered at a time; a further one is refused until one of them has been quiet.
    pub fn new(rate: Rate, most: usize) -> Self {
        Self { rate, most, table: Mutex::default() }
    }

    pub fn allow(&self, caller: &str) -> Result<(), Wait> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, rate) = (Instant::now(), self.rate);
        if table.buckets.len() >= self.most && !table.buckets.contains_key(caller) {
            // A look at all of them costs something: not for each who comes in vain.
            if table.swept.is_none_or(|swept| now.saturating_duration_since(swept) >= SWEEP) {
                table.swept = Some(now);
                // A full bucket says nothing.
                table.buckets.retain(|_, bucket| bucket.filled(now, rate) < f64::from(rate.burst));
            }
            if table.buckets.len() >= self.most {
                return Err(Wait(SWEEP));
            }
        }
        let fresh = Bucket { left: rate.burst.into(), at: now };
        table.buckets.entry(caller.to_owned()).or_insert(fresh).take(now, rate)
    }
}

impl Bucket {
    fn filled(&self, now: Instant, rate: Rate) -> f64 {
        let since: Duration = now.saturating_duration_since(self.at);
        (self.left + since.as_secs_f64() * f64::from(rate.per_second)).min(rate.burst.into())
    }

    fn take(&mut self, now: Instant, rate: Rate) -> Result<(), Wait> {
        self.left = self.filled(now, rate);
        self.at = now;
        if self.left < 1.0 {
            return Err(Wait(Duration::from_secs_f64((1.0 - self.left) / f64::from(rate.per_second.max(1)))));
        }
        self.left -= 1.0;
        Ok(())
    }
}

/// How often, at most, all callers are looked at.
const SWEEP: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn ago(rates: &Rates, caller: &str, time: Duration) {
        if let Some(bucket) = rates.table.lock().unwrap().buckets.get_mut(caller) {
            bucket.at -= time;
        }
    }

    #[test]
    fn a_caller_that_asks_too_often_is_told_to_wait_and_others_are_not() {
        let rates = Rates::new(Rate { burst: 3, per_second: 1 }, 10);
        let answers: Vec<bool> = (0..5).map(|_| rates.allow("a").is_ok()).collect();
        assert_eq!(answers, [true, true, true, false, false]);
        let Wait(wait) = rates.allow("a").unwrap_err();
        assert!(wait > Duration::from_millis(500) && wait <= Duration::from_secs(1), "{wait:?}");
        assert!(rates.allow("b").is_ok());
        ago(&rates, "a", Duration::from_secs(1));
        assert!(rates.allow("a").is_ok() && rates.allow("a").is_err());
    }

    #[test]
    fn callers_of_long_ago_make_room_and_those_of_now_do_not() {
        let rates = Rates::new(Rate { burst: 1, per_second: 1 }, 100);
        for n in 0..100 {
            rates.allow(&n.to_string()).unwrap();
        }
        assert_eq!(rates.allow("one more"), Err(Wait(SWEEP)));
        assert!(
            matches!(rates.allow("1"), Err(Wait(wait)) if wait <= Duration::from_secs(1)),
            "who is known is judged"
        );
        for n in 0..100 {
            ago(&rates, &n.to_string(), Duration::from_secs(2));
        }
        assert!(rates.allow("one more").is_err(), "looked at a moment ago");
        rates.table.lock().unwrap().swept = None;
        assert!(rates.allow("one more").is_ok());
        assert_eq!(rates.table.lock().unwrap().buckets.len(), 1);
    }
}

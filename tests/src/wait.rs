//! Waiting for conditions. Tests never sleep for a fixed time where something can be looked at.

use std::time::{Duration, Instant};

/// How long tests wait for something that should come soon. Generous: a busy machine must not fail a test.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Asks again and again until there is an answer. `None` when the deadline has passed without one.
pub fn wait_until<T>(deadline: Duration, mut condition: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + deadline;
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(answer) = condition() {
            return Some(answer);
        }
        let now = Instant::now();
        if now >= end {
            return None;
        }
        std::thread::sleep(pause.min(end - now));
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

/// Waits up to [`DEADLINE`] and panics with what was waited for.
#[track_caller]
pub fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    wait_for_within(DEADLINE, what, condition)
}

/// Waits up to a deadline and panics with what was waited for.
#[track_caller]
pub fn wait_for_within<T>(deadline: Duration, what: &str, condition: impl FnMut() -> Option<T>) -> T {
    match wait_until(deadline, condition) {
        Some(answer) => answer,
        None => panic!("waited {deadline:?} in vain for: {what}"),
    }
}

/// Asserts that a condition holds all through a span of time.
#[track_caller]
pub fn holds_for(span: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let broken = wait_until(span, || (!condition()).then_some(()));
    assert!(broken.is_none(), "did not hold for {span:?}: {what}");
}

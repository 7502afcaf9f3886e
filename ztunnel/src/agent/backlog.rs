//! While no proxy is there, connections wait in the pods' listeners; the agent, which holds them too, resets those
//! that have waited too long. A proxy that is there but stopped keeps them waiting.
//!
//! Must never take a connection that a living proxy could still accept.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{debug, warn};

use super::metrics::AgentMetrics;
use super::proxies::Proxies;
use crate::capture::listeners;

/// Watches the backlogs until it is dropped.
pub async fn guard(proxies: Arc<Proxies>, patience: Duration, metrics: Arc<AgentMetrics>) {
    let mut pods: HashMap<String, [Queue; 3]> = HashMap::new();
    let mut tick = tokio::time::interval((patience / 10).clamp(SHORTEST_TICK, LONGEST_TICK));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        if proxies.any_alive() {
            pods.clear();
            continue;
        }
        let offered = proxies.listeners();
        pods.retain(|uid, _| offered.iter().any(|(other, _)| other == uid));
        let now = Instant::now();
        for (uid, listeners) in offered {
            let queues = pods.entry(uid.clone()).or_default();
            for (queue, (name, fd)) in queues.iter_mut().zip(listeners.named()) {
                match queue.shorten(fd, now, patience) {
                    Ok(0) => {}
                    Ok(count) => {
                        metrics.backlog_resets.add(u64::from(count));
                        warn!(pod = uid, listener = name, count, "no proxy took these connections in time: reset");
                    }
                    Err(error) => debug!(pod = uid, listener = name, %error, "cannot look at the backlog"),
                }
            }
        }
    }
}

/// What is known of a queue that nobody but us takes from: how many had come by when.
#[derive(Debug, Default)]
struct Queue {
    taken: u64,
    seen: VecDeque<(Instant, u64)>,
}

impl Queue {
    fn shorten(&mut self, listener: BorrowedFd<'_>, now: Instant, patience: Duration) -> std::io::Result<u32> {
        let due = self.due(listeners::waiting(listener)?, now, patience);
        // Bounded, so that one pod's flood does not hold up the others; the rest is due at the next tick.
        let done = listeners::reset_oldest(listener, due.min(MOST_PER_TICK))?;
        self.taken += u64::from(done);
        Ok(done)
    }

    /// How many of the connections that wait now have waited for `patience`. The queue is first in, first out.
    fn due(&mut self, waiting: u32, now: Instant, patience: Duration) -> u32 {
        let come = self.taken + u64::from(waiting);
        if self.seen.back().is_some_and(|(_, before)| come < *before) {
            // Somebody else took some after all: what we knew of the others is void.
            self.seen.clear();
        }
        self.seen.push_back((now, come));
        // Keep only the latest look that is old enough.
        while self.seen.get(1).is_some_and(|(then, _)| now.duration_since(*then) >= patience) {
            self.seen.pop_front();
        }
        match self.seen.front() {
            Some((then, come)) if now.duration_since(*then) >= patience => {
                come.saturating_sub(self.taken).min(u64::from(waiting)) as u32
            }
            _ => 0,
        }
    }
}

const SHORTEST_TICK: Duration = Duration::from_millis(20);
/// A connection waits for so much longer than it should at the most.
const LONGEST_TICK: Duration = Duration::from_millis(250);
const MOST_PER_TICK: u32 = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    #[test]
    fn only_those_that_have_waited_long_enough_are_due() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut queue = Queue::default();
        assert_eq!(queue.due(2, at(0), PATIENCE), 0);
        assert_eq!(queue.due(5, at(4), PATIENCE), 0);
        assert_eq!(queue.due(7, at(9), PATIENCE), 0);
        // Two came before second 0.
        assert_eq!(queue.due(7, at(10), PATIENCE), 2);
        queue.taken += 2;
        assert_eq!(queue.due(5, at(11), PATIENCE), 0);
        // Three more before second 4.
        assert_eq!(queue.due(5, at(14), PATIENCE), 3);
        queue.taken += 3;
        assert_eq!(queue.due(2, at(19), PATIENCE), 2);
    }

    #[test]
    fn what_was_due_and_not_done_stays_due() {
        let start = Instant::now();
        let mut queue = Queue::default();
        queue.due(3000, start, PATIENCE);
        assert_eq!(queue.due(3000, start + PATIENCE, PATIENCE), 3000);
        queue.taken += 1024;
        assert_eq!(queue.due(1976, start + PATIENCE * 2, PATIENCE), 1976);
    }

    #[test]
    fn a_queue_that_somebody_else_empties_starts_anew() {
        let start = Instant::now();
        let mut queue = Queue::default();
        queue.due(5, start, PATIENCE);
        assert_eq!(queue.due(1, start + Duration::from_secs(5), PATIENCE), 0);
        assert_eq!(queue.due(1, start + PATIENCE, PATIENCE), 0);
        assert_eq!(queue.due(1, start + Duration::from_secs(15), PATIENCE), 1);
    }
}

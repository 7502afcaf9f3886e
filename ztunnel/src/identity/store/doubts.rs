//! How often the authority is asked whether its roots have changed because peers were met that do not fit ours.
//!
//! Strangers can make such peers at will: must never let them decide how often the authority is asked.

use std::time::Duration;

use tokio::time::Instant;

/// Pauses between questions: longer after each that changed nothing.
pub(super) struct Doubts {
    /// Before it nothing is asked.
    next: Option<Instant>,
    pause: Duration,
}

impl Default for Doubts {
    fn default() -> Self {
        Self { next: None, pause: FIRST_PAUSE }
    }
}

impl Doubts {
    /// Whether to ask now; if so, it has been asked.
    pub fn ask(&mut self, now: Instant) -> bool {
        if self.next.is_some_and(|next| now < next) {
            return false;
        }
        self.next = Some(now + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        true
    }

    /// The roots have changed.
    pub fn confirmed(&mut self) {
        self.pause = FIRST_PAUSE;
    }
}

const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_become_rare_unless_the_roots_have_changed() {
        let (mut doubts, start) = (Doubts::default(), Instant::now());
        let asked = |doubts: &mut Doubts, from: u64, to: u64| {
            (from..to).filter(|second| doubts.ask(start + Duration::from_secs(*second))).collect::<Vec<_>>()
        };
        assert_eq!(asked(&mut doubts, 0, 100), [0, 5, 15, 35, 75]);
        assert_eq!(asked(&mut doubts, 100, 24 * 3600).len(), 3 + (24 * 3600 - 1200) / 600);
        doubts.confirmed();
        let later = 25 * 3600;
        assert_eq!(asked(&mut doubts, later, later + 20), [later, later + 5, later + 15]);
    }
}

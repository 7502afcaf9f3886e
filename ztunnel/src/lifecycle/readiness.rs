//! Readiness: named tasks that the process waits for.

use std::sync::{Arc, Mutex, MutexGuard};

/// What the process still waits for. Clones are handles of the same list.
#[derive(Clone, Default)]
pub struct Readiness(Arc<Mutex<Vec<Item>>>);

/// A task that starts as pending. Dropped while it is pending it stays so: its owner is gone without being done.
pub struct Pending {
    readiness: Readiness,
    name: &'static str,
}

struct Item {
    name: &'static str,
    state: State,
}

enum State {
    Pending,
    Done,
    /// Asked each time.
    Asked(Box<dyn Fn() -> bool + Send>),
}

impl Readiness {
    pub fn new() -> Self {
        Self::default()
    }

    /// A task that has to be done before the process is ready. It may become pending again.
    pub fn pending(&self, name: &'static str) -> Pending {
        self.set(name, State::Pending);
        Pending { readiness: self.clone(), name }
    }

    /// A task that is done whenever `done` says so. It is called with the list locked: it must be quick.
    pub fn asked(&self, name: &'static str, done: impl Fn() -> bool + Send + 'static) {
        self.set(name, State::Asked(Box::new(done)));
    }

    /// The tasks that are pending now; none: ready.
    pub fn pending_tasks(&self) -> Vec<&'static str> {
        let pending = |item: &&Item| match &item.state {
            State::Pending => true,
            State::Done => false,
            State::Asked(done) => !done(),
        };
        self.lock().iter().filter(pending).map(|item| item.name).collect()
    }

    pub fn is_ready(&self) -> bool {
        self.pending_tasks().is_empty()
    }

    fn set(&self, name: &'static str, state: State) {
        let mut items = self.lock();
        match items.iter_mut().find(|item| item.name == name) {
            Some(item) => item.state = state,
            None => items.push(Item { name, state }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Item>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Pending {
    pub fn done(&self) {
        self.change(State::Done, "a task of the start is done");
    }

    /// What was done is so no longer, for example a connection that is lost.
    pub fn again(&self) {
        self.change(State::Pending, "a task is pending again");
    }

    fn change(&self, state: State, text: &'static str) {
        let was_ready = self.readiness.is_ready();
        self.readiness.set(self.name, state);
        let pending = self.readiness.pending_tasks();
        tracing::debug!(target: "readiness", task = self.name, ?pending, "{text}");
        match (was_ready, pending.is_empty()) {
            (false, true) => tracing::info!(target: "readiness", "ready"),
            (true, false) => tracing::warn!(target: "readiness", ?pending, "not ready any more"),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn ready_means_that_every_task_is_done() {
        let readiness = Readiness::new();
        assert!(readiness.is_ready());
        let state = readiness.pending("state manager");
        let pods = readiness.pending("proxy workload manager");
        assert_eq!(readiness.pending_tasks(), ["state manager", "proxy workload manager"]);
        state.done();
        assert_eq!(readiness.pending_tasks(), ["proxy workload manager"]);
        pods.done();
        assert!(readiness.is_ready());
        state.again();
        assert_eq!(readiness.pending_tasks(), ["state manager"]);
    }

    #[test]
    fn an_owner_that_vanishes_leaves_its_task_pending() {
        let readiness = Readiness::new();
        drop(readiness.pending("state manager"));
        assert!(!readiness.is_ready());
    }

    #[test]
    fn a_task_can_be_asked_each_time() {
        let (readiness, well) = (Readiness::new(), Arc::new(AtomicBool::new(false)));
        let asked = well.clone();
        readiness.asked("workers", move || asked.load(Ordering::Relaxed));
        assert_eq!(readiness.pending_tasks(), ["workers"]);
        well.store(true, Ordering::Relaxed);
        assert!(readiness.is_ready());
    }
}

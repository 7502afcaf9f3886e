//! On demand: which requests bring about the wanted subscriptions, given how servers answer (istiod, observed):
//! a name that is subscribed already gets no answer, and a request that only unsubscribes, or names the same thing
//! twice, is answered as if everything were gone.
//!
//! Must never make such a request.

use std::collections::HashSet;
use std::sync::Arc;

/// What the server takes us to be subscribed to on this stream, and what is to be given up.
#[derive(Debug, Default)]
pub struct Subscriptions {
    subscribed: HashSet<Arc<str>>,
    to_drop: HashSet<Arc<str>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    pub subscribe: Vec<Arc<str>>,
    pub unsubscribe: Vec<Arc<str>>,
}

impl Subscriptions {
    /// A new stream that starts with these names.
    pub fn restart(&mut self, names: &[Arc<str>]) {
        self.subscribed = names.iter().cloned().collect();
        self.to_drop.clear();
    }

    /// A resource came: the server subscribes us to its name.
    pub fn received(&mut self, name: &Arc<str>) {
        if !self.subscribed.contains(name) {
            self.subscribed.insert(name.clone());
        }
    }

    /// No longer needed: given up with the next request that asks for something.
    pub fn drop_later(&mut self, name: Arc<str>) {
        if self.subscribed.contains(&name) {
            self.to_drop.insert(name);
        }
    }

    /// The requests, in order, by which the server answers each of `ask`.
    pub fn ask(&mut self, ask: &[Arc<str>]) -> Vec<Change> {
        let mut fresh: Vec<Arc<str>> = Vec::new();
        let mut again: Vec<Arc<str>> = Vec::new();
        for name in ask.iter().collect::<HashSet<_>>() {
            self.to_drop.remove(name);
            if self.subscribed.contains(name) { again.push(name.clone()) } else { fresh.push(name.clone()) }
        }
        if fresh.is_empty() && again.is_empty() {
            return Vec::new();
        }
        let mut filler = Vec::new();
        if fresh.is_empty() {
            filler.push(Arc::from(FILLER));
        }
        let dropped = self.to_drop.drain().inspect(|name| {
            self.subscribed.remove(name);
        });
        let unsubscribe = dropped.chain(again.iter().cloned()).collect();
        self.subscribed.extend(fresh.iter().cloned());
        let first = Change { subscribe: if fresh.is_empty() { filler.clone() } else { fresh }, unsubscribe };
        if again.is_empty() {
            return vec![first];
        }
        vec![first, Change { subscribe: again, unsubscribe: filler }]
    }
}

/// A name that stands for nothing, so that a request can subscribe something else.
const FILLER: &str = "understory/nothing";

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn names(list: &[&str]) -> Vec<Arc<str>> {
        list.iter().map(|n| Arc::from(*n)).collect()
    }

    #[test]
    fn a_new_name_takes_along_what_is_given_up() {
        let mut subscriptions = Subscriptions::default();
        assert_eq!(subscriptions.ask(&names(&["a"])), [Change { subscribe: names(&["a"]), unsubscribe: vec![] }]);
        subscriptions.drop_later("a".into());
        subscriptions.drop_later("never subscribed".into());
        let changes = subscriptions.ask(&names(&["b"]));
        assert_eq!(changes, [Change { subscribe: names(&["b"]), unsubscribe: names(&["a"]) }]);
    }

    #[test]
    fn a_subscribed_name_is_given_up_and_taken_again() {
        let mut subscriptions = Subscriptions::default();
        subscriptions.ask(&names(&["a"]));
        let changes = subscriptions.ask(&names(&["a"]));
        assert_eq!(
            changes,
            [
                Change { subscribe: names(&[FILLER]), unsubscribe: names(&["a"]) },
                Change { subscribe: names(&["a"]), unsubscribe: names(&[FILLER]) }
            ]
        );
        assert!(subscriptions.ask(&[]).is_empty());
    }

    proptest! {
        #[test]
        fn every_request_is_answered_and_none_is_a_trap(
            steps in proptest::collection::vec((proptest::collection::vec(0u8..5, 0..4), 0u8..5), 0..30)
        ) {
            let name = |n: &u8| -> Arc<str> { format!("n{n}").into() };
            let mut subscriptions = Subscriptions::default();
            let mut server: HashSet<Arc<str>> = HashSet::new();
            for (ask, drop) in steps {
                let ask: Vec<_> = ask.iter().map(name).collect();
                subscriptions.drop_later(name(&drop));
                let mut answered = HashSet::new();
                for change in subscriptions.ask(&ask) {
                    prop_assert!(!change.subscribe.is_empty());
                    prop_assert!(change.subscribe.iter().all(|n| !change.unsubscribe.contains(n)));
                    for name in change.unsubscribe {
                        server.remove(&name);
                    }
                    for name in change.subscribe {
                        if server.insert(name.clone()) {
                            answered.insert(name);
                        }
                    }
                }
                prop_assert!(ask.iter().all(|n| answered.contains(n)));
                prop_assert!(!server.contains(FILLER));
                let believed: HashSet<_> = subscriptions.subscribed.iter().cloned().collect();
                let real = server.clone();
                prop_assert_eq!(believed, real);
            }
        }
    }
}

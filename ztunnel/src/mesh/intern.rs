//! Equal values, which a mesh is full of, are kept once.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::Hash;
use std::sync::Arc;

use super::workload::{Common, GatewayAddress, Place, WorkloadService};

/// Shares what the records of a mesh have in common.
#[derive(Debug, Default)]
pub struct Interner {
    strings: Pool<str>,
    gateways: Pool<GatewayAddress>,
    common: Pool<Common>,
    places: Pool<Place>,
    services: Pool<[WorkloadService]>,
}

impl Interner {
    pub fn get(&mut self, text: &str) -> Arc<str> {
        self.strings.get(text)
    }

    pub(super) fn gateway(&mut self, gateway: GatewayAddress) -> Arc<GatewayAddress> {
        self.gateways.get(gateway)
    }

    pub(super) fn common(&mut self, common: Common) -> Arc<Common> {
        self.common.get(common)
    }

    pub(super) fn place(&mut self, place: Place) -> Arc<Place> {
        self.places.get(place)
    }

    pub(super) fn services(&mut self, services: Vec<WorkloadService>) -> Arc<[WorkloadService]> {
        self.services.get(services)
    }

    /// Forgets what nobody else holds: a node lives through many more pods than it has.
    pub(super) fn shrink_if_grown(&mut self) {
        self.common.shrink_if_grown();
        self.places.shrink_if_grown();
        self.services.shrink_if_grown();
        // They are held by those above, and hold strings themselves.
        self.gateways.shrink_if_grown();
        self.strings.shrink_if_grown();
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.strings.values.len() + self.common.values.len() + self.places.values.len() + self.services.values.len()
    }
}

#[derive(Debug)]
struct Pool<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// How many were in use when unused ones were last looked for.
    kept: usize,
}

impl<T: ?Sized + Eq + Hash> Pool<T> {
    fn get<V: Borrow<T> + Into<Arc<T>>>(&mut self, value: V) -> Arc<T> {
        if let Some(shared) = self.values.get(value.borrow()) {
            return shared.clone();
        }
        let shared: Arc<T> = value.into();
        self.values.insert(shared.clone());
        shared
    }

    /// Looks each time when the number has doubled.
    fn shrink_if_grown(&mut self) {
        if self.values.len() >= SHRINK_FROM.max(2 * self.kept) {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            self.values.shrink_to(2 * self.values.len());
            self.kept = self.values.len();
        }
    }
}

impl<T: ?Sized> Default for Pool<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), kept: 0 }
    }
}

/// Fewer values are not worth a look.
const SHRINK_FROM: usize = 1000;

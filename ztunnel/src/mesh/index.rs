//! Indexes of records: they share what has not changed with their copies, and take few bytes for each record.
//!
//! Trees in order and not hash tables: those of `imbl` keep three records in nodes with room for sixteen.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use imbl::{OrdMap, OrdSet};

use super::few::Few;
use super::service::Service;
use super::workload::Workload;

/// What has a name of its own.
pub trait Record {
    fn key(&self) -> &str;
}

/// Records by their own key, of which no copy is kept.
#[derive(Debug)]
pub struct ByKey<T: Record>(OrdSet<Entry<T>>);

#[derive(Debug)]
struct Entry<T>(Arc<T>);

/// Records by something that several may have.
#[derive(Debug)]
pub struct By<K: Ord, T: Record>(OrdMap<K, Few<Arc<T>>>);

/// Records by their addresses. IPv4 has a tree of its own: in one for both it would take as much room as IPv6.
#[derive(Debug)]
pub struct ByAddress<T: Record> {
    v4: By<Ipv4Addr, T>,
    v6: By<Ipv6Addr, T>,
}

impl Record for Workload {
    fn key(&self) -> &str {
        &self.uid
    }
}

impl Record for Service {
    fn key(&self) -> &str {
        &self.key
    }
}

impl<T: Record> ByKey<T> {
    pub fn get(&self, key: &str) -> Option<&Arc<T>> {
        self.0.get(key).map(|entry| &entry.0)
    }

    pub fn contains(&self, key: &str) -> bool {
        self.0.contains(key)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<T>> {
        self.0.iter().map(|entry| &entry.0)
    }

    pub fn insert(&mut self, record: Arc<T>) {
        self.0.insert(Entry(record));
    }

    pub fn remove(&mut self, key: &str) -> Option<Arc<T>> {
        self.0.remove(key).map(|entry| entry.0)
    }
}

impl<K: Ord + Clone, T: Record> By<K, T> {
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> &[Arc<T>]
    where
        K: Borrow<Q>,
    {
        self.0.get(key).map_or(&[], |list| list)
    }

    /// In the order of `rank`; takes the place of one with the same key.
    pub fn insert<R: Ord>(&mut self, key: K, record: Arc<T>, rank: impl Fn(&T) -> R) {
        match self.0.get_mut(&key) {
            None => {
                self.0.insert(key, record.into());
            }
            Some(list) => list.change(|list| {
                list.retain(|held| held.key() != record.key());
                list.push(record);
                list.sort_by_key(|record| rank(record));
            }),
        }
    }

    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q, gone: &str)
    where
        K: Borrow<Q>,
    {
        let Some(list) = self.0.get_mut(key) else { return };
        list.change(|list| list.retain(|record| record.key() != gone));
        if list.is_empty() {
            self.0.remove(key);
        }
    }
}

impl<T: Record> ByAddress<T> {
    pub fn get(&self, address: IpAddr) -> &[Arc<T>] {
        match address {
            IpAddr::V4(v4) => self.v4.get(&v4),
            IpAddr::V6(v6) => self.v6.get(&v6),
        }
    }

    /// As [`By::insert`].
    pub fn insert<R: Ord>(&mut self, address: IpAddr, record: Arc<T>, rank: impl Fn(&T) -> R) {
        match address {
            IpAddr::V4(v4) => self.v4.insert(v4, record, rank),
            IpAddr::V6(v6) => self.v6.insert(v6, record, rank),
        }
    }

    pub fn remove(&mut self, address: IpAddr, gone: &str) {
        match address {
            IpAddr::V4(v4) => self.v4.remove(&v4, gone),
            IpAddr::V6(v6) => self.v6.remove(&v6, gone),
        }
    }
}

impl<T: Record> Borrow<str> for Entry<T> {
    fn borrow(&self) -> &str {
        self.0.key()
    }
}

impl<T: Record> Ord for Entry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.key().cmp(other.0.key())
    }
}

impl<T: Record> PartialOrd for Entry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T: Record> Eq for Entry<T> {}

impl<T: Record> PartialEq for Entry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.0.key() == other.0.key()
    }
}

// Derived, these would ask that the records can be cloned.
impl<T> Clone for Entry<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Record> Clone for ByKey<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K: Ord + Clone, T: Record> Clone for By<K, T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: Record> Clone for ByAddress<T> {
    fn clone(&self) -> Self {
        Self { v4: self.v4.clone(), v6: self.v6.clone() }
    }
}

impl<T: Record> Default for ByKey<T> {
    fn default() -> Self {
        Self(OrdSet::default())
    }
}

impl<K: Ord, T: Record> Default for By<K, T> {
    fn default() -> Self {
        Self(OrdMap::default())
    }
}

impl<T: Record> Default for ByAddress<T> {
    fn default() -> Self {
        Self { v4: By::default(), v6: By::default() }
    }
}

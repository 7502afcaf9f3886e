//! The TCP metrics' series: one for each label set in use, bounded in number, dropped after a time without traffic.
//!
//! Must never drop a series that a connection still holds: its counts would be lost.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, Hasher, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

use super::labels::{TcpLabels, View};

/// The counters of one label set.
pub struct Series {
    labels: TcpLabels,
    pub opened: AtomicU64,
    pub closed: AtomicU64,
    pub failed: AtomicU64,
    /// Bytes from client to server.
    pub received: AtomicU64,
    /// Bytes from server to client.
    pub sent: AtomicU64,
    /// Seconds since the table's start.
    used: AtomicU32,
}

/// All series.
pub struct SeriesTable {
    table: Mutex<Table>,
    hash_keys: RandomState,
    limit: usize,
    idle: Duration,
    start: Instant,
    overflowed: AtomicU64,
}

#[derive(Default)]
struct Table {
    /// By hash of the labels; nearly always one.
    series: HashMap<u64, Vec<Arc<Series>>, BuildHasherDefault<Ready>>,
    /// Without those of the overflow.
    len: usize,
    /// Seconds since the start.
    swept: u32,
}

impl SeriesTable {
    /// At most `limit` label sets (more are counted as `overflow`), each kept for `idle` without traffic.
    pub fn new(limit: usize, idle: Duration) -> Self {
        Self {
            table: Mutex::default(),
            hash_keys: RandomState::new(),
            limit,
            idle,
            start: Instant::now(),
            overflowed: AtomicU64::new(0),
        }
    }

    /// The series of these labels. Hold it as long as counts may come.
    pub fn get(&self, view: View<'_>) -> Arc<Series> {
        self.get_at(view, self.now())
    }

    /// Notes that the series has counted something.
    pub fn touch(&self, series: &Series) {
        series.touch_at(self.now());
    }

    /// Label sets in use, without those of the overflow.
    pub fn len(&self) -> usize {
        self.lock().len
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Connections that were counted as `overflow`.
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Drops what has been idle for long.
    pub fn sweep(&self) {
        self.sweep_at(self.now());
    }

    pub(super) fn get_at(&self, view: View<'_>, now: u32) -> Arc<Series> {
        let mut table = self.lock();
        if let Some(series) = self.find(&table, &view) {
            series.touch_at(now);
            return series;
        }
        if now.saturating_sub(table.swept) >= SWEEP_EVERY {
            self.sweep_table(&mut table, now);
        }
        if table.len < self.limit {
            table.len += 1;
            return self.insert(&mut table, &view, now);
        }
        self.overflowed.fetch_add(1, Ordering::Relaxed);
        let view = view.without_names();
        let series = self.find(&table, &view).unwrap_or_else(|| self.insert(&mut table, &view, now));
        series.touch_at(now);
        series
    }

    pub(super) fn sweep_at(&self, now: u32) {
        self.sweep_table(&mut self.lock(), now);
    }

    pub(super) fn all(&self) -> Vec<Arc<Series>> {
        self.lock().series.values().flatten().cloned().collect()
    }

    fn find(&self, table: &Table, view: &View<'_>) -> Option<Arc<Series>> {
        table.series.get(&self.hash(view))?.iter().find(|series| series.labels.matches(view)).cloned()
    }

    fn insert(&self, table: &mut Table, view: &View<'_>, now: u32) -> Arc<Series> {
        let series = Arc::new(Series {
            labels: view.into(),
            opened: AtomicU64::new(0),
            closed: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            received: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            used: AtomicU32::new(now),
        });
        table.series.entry(self.hash(view)).or_default().push(series.clone());
        series
    }

    fn sweep_table(&self, table: &mut Table, now: u32) {
        table.swept = now;
        let idle = u32::try_from(self.idle.as_secs()).unwrap_or(u32::MAX);
        let mut dropped = 0;
        table.series.retain(|_, same_hash| {
            same_hash.retain_mut(|series| {
                // Handles are only made under the lock that we hold: nobody else has one, nobody can get one.
                let Some(series) = Arc::get_mut(series) else { return true };
                let keep = now.saturating_sub(*series.used.get_mut()) < idle;
                if !keep && !series.labels.is_overflow() {
                    dropped += 1;
                }
                keep
            });
            !same_hash.is_empty()
        });
        table.len -= dropped;
        table.series.shrink_to(table.series.len() * 2);
    }

    fn hash(&self, view: &View<'_>) -> u64 {
        let mut hasher = self.hash_keys.build_hasher();
        view.hash_into(&mut hasher);
        hasher.finish()
    }

    fn now(&self) -> u32 {
        u32::try_from(self.start.elapsed().as_secs()).unwrap_or(u32::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Writes the five families.
    pub fn encode(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let all = self.all();
        type Read = fn(&Series) -> &AtomicU64;
        let families: [(&str, &str, Read); 5] = [
            ("istio_tcp_connections_opened", "Connections established and authorised", |s| &s.opened),
            ("istio_tcp_connections_closed", "Connections closed after they were established", |s| &s.closed),
            ("istio_tcp_connections_failed", "Connections never established (unstable)", |s| &s.failed),
            ("istio_tcp_received_bytes", "Bytes from client to server", |s| &s.received),
            ("istio_tcp_sent_bytes", "Bytes from server to client", |s| &s.sent),
        ];
        for (name, help, read) in families {
            let of_failures = name.ends_with("_failed");
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for series in &all {
                let shown = if of_failures { &series.failed } else { &series.opened };
                if shown.load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let value = read(series).load(Ordering::Relaxed);
                family.encode_family(&series.labels)?.encode_counter::<NoLabelSet, u64, f64>(&value, None)?;
            }
        }
        Ok(())
    }
}

impl Series {
    pub(super) fn touch_at(&self, now: u32) {
        self.used.store(now, Ordering::Relaxed);
    }
}

/// A hasher for keys that are hashes already.
#[derive(Default)]
pub(super) struct Ready(u64);

impl Hasher for Ready {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are u64")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

/// New label sets trigger a sweep if the last one is so many seconds ago.
const SWEEP_EVERY: u32 = 60;

//! The task that asks the authority, a few requests at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::Shared;
use crate::identity::{CertificateAuthority, IssueError};

/// Ends with the store.
pub(super) async fn work(shared: Weak<Shared>, wake: Arc<Notify>, authority: Arc<dyn CertificateAuthority>) {
    let mut running = FuturesUnordered::new();
    let slow = Arc::new(AtomicUsize::new(0));
    let Some(mut trust) = shared.upgrade().map(|store| store.trust.changes()) else { return };
    loop {
        // Never held over an await, so that dropping the store ends the task.
        let Some(store) = shared.upgrade() else { return };
        let limit = store.settings.in_flight;
        let is_full = |running: usize| {
            running.saturating_sub(slow.load(Ordering::Relaxed)) >= limit || running >= limit * MOST_SLOW
        };
        while !is_full(running.len()) {
            let Some((identity, generation)) = store.next_due() else { break };
            let (authority, limit) = (authority.clone(), store.settings.request_timeout);
            let (slow, wake, address) = (slow.clone(), wake.clone(), store.authority.clone());
            running.push(async move {
                let asked = Instant::now();
                let issue = tokio::time::timeout(limit, authority.issue(identity.clone()));
                let result = match noting_slowness(issue, &slow, &wake).await {
                    Ok(result) => result,
                    Err(_) => Err(IssueError::Timeout { identity: identity.clone(), authority: address, limit }),
                };
                (identity, generation, result, asked)
            });
        }
        store.counters.in_flight.store(running.len() as u64, Ordering::Relaxed);
        let next = store.sweep();
        let full = is_full(running.len());
        drop(store);

        let done = tokio::select! {
            Some(done) = running.next() => Some(done),
            () = wake.notified() => None,
            Ok(()) = trust.changed() => None,
            () = tokio::time::sleep_until(next), if !full => None,
        };
        let Some(store) = shared.upgrade() else { return };
        if let Some((identity, generation, result, asked)) = done {
            let counter = if result.is_ok() { &store.counters.issued } else { &store.counters.failed };
            counter.fetch_add(1, Ordering::Relaxed);
            store.counters.request_micros.fetch_add(asked.elapsed().as_micros() as u64, Ordering::Relaxed);
            store.finish(&identity, generation, asked, result);
        }
    }
}

/// Counts a request as slow from when it has taken [`SLOW`] to its end.
async fn noting_slowness<T>(request: impl Future<Output = T>, slow: &AtomicUsize, wake: &Notify) -> T {
    tokio::pin!(request);
    if let Ok(done) = tokio::time::timeout(SLOW, &mut request).await {
        return done;
    }
    slow.fetch_add(1, Ordering::Relaxed);
    wake.notify_one();
    let done = request.await;
    slow.fetch_sub(1, Ordering::Relaxed);
    done
}

/// From here on a request no longer counts against the limit of requests at a time.
const SLOW: Duration = Duration::from_secs(1);
/// Bound of requests at a time, slow ones included, in units of the limit.
const MOST_SLOW: usize = 8;

//! The proxy's interface to telemetry: a connection is opened once, counts bytes, and is finished once.
//!
//! Must never take a lock that another worker holds for long, nor let a connection end without a line and a count.

use std::future::poll_fn;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use super::access_log;
use super::flow::{CloseReason, Direction, Failure, Flow, Outcome, ResponseFlag};
use super::metrics::{Metrics, Series, SeriesTable, View};
use super::policies::PolicyCounts;
use crate::policy::Decision;
use live::{LiveTable, Place};

mod live;

/// Counts and logs the connections of a process.
pub struct Telemetry {
    series: SeriesTable,
    live: LiveTable,
    policies: Arc<PolicyCounts>,
    failed: Family<[(&'static str, &'static str); 3], Counter>,
    ended: Family<[(&'static str, &'static str); 3], Counter>,
    inbound_setup: Histogram,
    outbound_setup: Histogram,
}

/// An established connection. Dropped without [`Connection::finish`] it is logged as abandoned.
pub struct Connection {
    live: Arc<Live>,
    place: Place,
    telemetry: Arc<Telemetry>,
    finished: bool,
}

/// A look at an established connection from outside of its task; it may be over by now.
#[derive(Clone)]
pub struct LiveConnection(Arc<Live>);

/// The state of a connection that others can see.
struct Live {
    flow: Flow,
    series: Arc<Series>,
    sent: AtomicU64,
    received: AtomicU64,
    /// How much of them is in the series.
    sent_counted: AtomicU64,
    received_counted: AtomicU64,
    /// A [`CloseReason`], or 0.
    close: OnceLock<Closing>,
    closing: AtomicWaker,
}

/// Why a connection is ordered to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Closing {
    pub reason: CloseReason,
    /// What led to it, if the reason alone does not say.
    pub detail: Option<Box<str>>,
}

impl Telemetry {
    /// `series_max` label sets, each dropped after `series_idle` without traffic.
    pub fn new(metrics: &Metrics, series_max: usize, series_idle: Duration) -> Arc<Self> {
        let telemetry = Arc::new(Self {
            series: SeriesTable::new(series_max, series_idle),
            live: LiveTable::default(),
            policies: Arc::new(PolicyCounts::new(series_max, series_idle)),
            failed: Family::default(),
            ended: Family::default(),
            inbound_setup: Histogram::new(SETUP_BUCKETS),
            outbound_setup: Histogram::new(SETUP_BUCKETS),
        });
        telemetry.register(metrics);
        telemetry
    }

    /// A connection is established and authorised.
    pub fn open(self: &Arc<Self>, flow: Flow) -> Connection {
        let setup = flow.started.elapsed().as_secs_f64();
        match flow.direction {
            Direction::Inbound => self.inbound_setup.observe(setup),
            Direction::Outbound => self.outbound_setup.observe(setup),
        }
        access_log::opened(&flow);
        let series = self.series.get(View::of(&flow, ResponseFlag::None));
        series.opened.fetch_add(1, Ordering::Relaxed);
        let live = Arc::new(Live {
            flow,
            series,
            sent: AtomicU64::new(0),
            received: AtomicU64::new(0),
            sent_counted: AtomicU64::new(0),
            received_counted: AtomicU64::new(0),
            close: OnceLock::new(),
            closing: AtomicWaker::new(),
        });
        let place = self.live.insert(live.clone());
        Connection { live, place, telemetry: self.clone(), finished: false }
    }

    /// The policies have been asked about a connection, before it is [opened](Self::open) or [failed](Self::failed).
    pub fn judged(&self, flow: &Flow, decision: &Decision) {
        if decision.is_allowed() && decision.dry_run.is_none() && decision.audited.is_empty() {
            return;
        }
        self.policies.count(decision);
        access_log::judged(flow, decision);
    }

    /// A connection was never established.
    pub fn failed(&self, flow: &Flow, failure: &Failure) {
        let flag = match failure.flag {
            ResponseFlag::None => ResponseFlag::Connect,
            flag => flag,
        };
        self.series.get(View::of(flow, flag)).failed.fetch_add(1, Ordering::Relaxed);
        let labels =
            [("reporter", flow.direction.reporter()), ("response_flags", flag.as_str()), ("step", failure.step)];
        self.failed.get_or_create(&labels).inc();
        access_log::failed(flow, failure);
    }

    /// The connections that are established now.
    pub fn connections(&self) -> impl Iterator<Item = LiveConnection> + '_ {
        self.live.all().map(LiveConnection)
    }

    /// Those of one pod, which is known by the very uid that stands in their flows: one that left and came back has
    /// another of the same text.
    pub fn connections_of(&self, pod: &Arc<str>) -> impl Iterator<Item = LiveConnection> + '_ {
        let pod = pod.clone();
        self.connections().filter(move |connection| Arc::ptr_eq(&connection.flow().pod, &pod))
    }

    fn register(self: &Arc<Self>, metrics: &Metrics) {
        metrics.collect("istio_tcp", TcpCollector(self.clone()));
        self.policies.register(metrics);
        metrics.register(
            "understory_connections_failed",
            "Connections never established, by the step that failed",
            self.failed.clone(),
        );
        metrics.register(
            "understory_connections_ended",
            "Established connections that are over, by who ended them (client, server, proxy) and how",
            self.ended.clone(),
        );
        metrics.register(
            "understory_inbound_setup_seconds",
            "From accept to established, inbound",
            self.inbound_setup.clone(),
        );
        metrics.register(
            "understory_outbound_setup_seconds",
            "From accept to established, outbound",
            self.outbound_setup.clone(),
        );
        let telemetry = self.clone();
        metrics.gauges(
            "istio_tcp_sockets_open",
            "Sockets of local applications on established connections",
            move |s| {
                let (mut inbound, mut outbound) = (0u32, 0u32);
                for connection in telemetry.live.all() {
                    match connection.flow.direction {
                        Direction::Inbound => inbound += 1,
                        Direction::Outbound => outbound += 1,
                    }
                }
                s.add(&[("reporter", Direction::Inbound.reporter())], inbound.into());
                s.add(&[("reporter", Direction::Outbound.reporter())], outbound.into());
            },
        );
        let telemetry = self.clone();
        metrics.gauge("understory_metric_series", "Label sets of the TCP metrics in use", move || {
            telemetry.series.len() as f64
        });
        let telemetry = self.clone();
        metrics.counter(
            "understory_metric_series_overflow",
            "Connections counted under the label overflow because there are too many label sets",
            move || telemetry.series.overflowed(),
        );
    }
}

impl Connection {
    pub fn flow(&self) -> &Flow {
        &self.live.flow
    }

    /// Waits until somebody orders the connection to end. Only one task may wait.
    pub async fn close_ordered(&self) -> CloseReason {
        poll_fn(|cx| self.poll_close_ordered(cx).map(|closing| closing.reason)).await
    }

    /// The same for a loop of its own.
    pub fn poll_close_ordered(&self, cx: &mut Context<'_>) -> Poll<&Closing> {
        self.live.closing.register(cx.waker());
        match self.live.close.get() {
            Some(closing) => Poll::Ready(closing),
            None => Poll::Pending,
        }
    }

    /// A handle for others.
    pub fn live(&self) -> LiveConnection {
        LiveConnection(self.live.clone())
    }

    /// The connection is over: writes its line and its counts.
    pub fn finish(mut self, outcome: &Outcome) {
        self.end(outcome);
    }

    fn end(&mut self, outcome: &Outcome) {
        self.finished = true;
        let (live, telemetry) = (&self.live, &self.telemetry);
        telemetry.live.remove(self.place);
        live.count();
        live.series.closed.fetch_add(1, Ordering::Relaxed);
        telemetry.series.touch(&live.series);
        let labels = [
            ("reporter", live.flow.direction.reporter()),
            ("by", outcome.side.as_str()),
            ("how", outcome.how.as_str()),
        ];
        telemetry.ended.get_or_create(&labels).inc();
        let (sent, received) = (live.sent.load(Ordering::Relaxed), live.received.load(Ordering::Relaxed));
        access_log::complete(&live.flow, sent, received, outcome);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if !self.finished {
            self.end(&Outcome::abandoned());
        }
    }
}

impl LiveConnection {
    pub fn flow(&self) -> &Flow {
        &self.0.flow
    }

    /// Bytes went from the local application to its peer. (Istio's metrics look from the client instead: they count
    /// these as `received` outbound and as `sent` inbound.)
    pub fn add_sent(&self, bytes: u64) {
        self.0.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes went from the peer to the local application.
    pub fn add_received(&self, bytes: u64) {
        self.0.received.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Bytes so far from the local application to its peer.
    pub fn sent(&self) -> u64 {
        self.0.sent.load(Ordering::Relaxed)
    }

    /// Bytes so far from the peer to the local application.
    pub fn received(&self) -> u64 {
        self.0.received.load(Ordering::Relaxed)
    }

    pub fn is_ordered_to_end(&self) -> bool {
        self.0.close.get().is_some()
    }

    /// Orders the connection to end; its task does it. The first order stays.
    pub fn close(&self, reason: CloseReason) {
        self.close_as(Closing { reason, detail: None });
    }

    /// The same, with what led to it. Whether this order stays.
    pub fn close_because(&self, reason: CloseReason, detail: &str) -> bool {
        self.close_as(Closing { reason, detail: Some(detail.into()) })
    }

    fn close_as(&self, closing: Closing) -> bool {
        let is_first = self.0.close.set(closing).is_ok();
        if is_first {
            self.0.closing.wake();
        }
        is_first
    }
}

impl Live {
    /// Moves what is not counted yet into the series. Any thread may, at any time: each byte is counted once.
    fn count(&self) -> bool {
        let move_on = |bytes: &AtomicU64, counted: &AtomicU64, to: &AtomicU64| {
            let now = bytes.load(Ordering::Relaxed);
            // Only whoever raises the mark adds the difference.
            let before = counted.fetch_max(now, Ordering::Relaxed);
            let new = now.saturating_sub(before);
            to.fetch_add(new, Ordering::Relaxed);
            new != 0
        };
        let (client_to_server, server_to_client) = (&self.series.received, &self.series.sent);
        let (of_sent, of_received) = match self.flow.direction {
            Direction::Outbound => (client_to_server, server_to_client),
            Direction::Inbound => (server_to_client, client_to_server),
        };
        let sent = move_on(&self.sent, &self.sent_counted, of_sent);
        let received = move_on(&self.received, &self.received_counted, of_received);
        sent || received
    }
}

/// Writes the TCP families; before, all live connections' bytes go into their series.
struct TcpCollector(Arc<Telemetry>);

impl Collector for TcpCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> std::fmt::Result {
        for live in self.0.live.all() {
            if live.count() {
                self.0.series.touch(&live.series);
            }
        }
        self.0.series.encode(&mut encoder)?;
        self.0.series.sweep();
        Ok(())
    }
}

impl std::fmt::Debug for TcpCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TcpCollector")
    }
}

/// Seconds.
const SETUP_BUCKETS: [f64; 10] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0];

#[cfg(test)]
pub(crate) mod tests;

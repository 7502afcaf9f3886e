use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::telemetry::flow::{Direction, Flow, Peer, PeerClaims, Protocol, ResponseFlag};

/// A flow whose label set is told by a number.
fn flow(number: u8) -> Flow {
    let direction = if number.is_multiple_of(2) { Direction::Inbound } else { Direction::Outbound };
    let any = "10.0.0.1:1".parse().unwrap();
    let claims = PeerClaims { workload: PeerClaims::value(&format!("w{number}")), ..Default::default() };
    let mut flow = Flow::new(direction, Protocol::Hbone, "pod".into(), any, any);
    flow.source = Peer { claims: Some(Box::new(claims)), ..Peer::default() };
    flow
}

fn view(flow: &Flow) -> View<'_> {
    View::of(flow, ResponseFlag::None)
}

#[test]
fn idle_series_leave_and_held_ones_stay() {
    let table = SeriesTable::new(10, Duration::from_secs(600));
    let (held, idle) = (flow(0), flow(1));
    let series = table.get_at(view(&held), 0);
    table.get_at(view(&idle), 0);
    assert_eq!(table.len(), 2);
    table.sweep_at(599);
    assert_eq!(table.len(), 2);
    table.sweep_at(600);
    assert_eq!(table.len(), 1);
    drop(series);
    table.sweep_at(600);
    assert_eq!(table.len(), 0);
    assert!(table.all().is_empty());
}

/// B33: memory grew with the series of pods long gone.
#[test]
fn five_thousand_short_lived_peers_end_in_the_overflow_bucket_and_then_leave() {
    let table = SeriesTable::new(100, Duration::from_secs(600));
    for number in 0..5000u32 {
        let mut flow = flow(0);
        let claims = PeerClaims { workload: PeerClaims::value(&format!("peer-{number}")), ..Default::default() };
        flow.source.claims = Some(Box::new(claims));
        table.get_at(view(&flow), 1).opened.fetch_add(1, Relaxed);
    }
    assert_eq!((table.len(), table.all().len(), table.overflowed()), (100, 101, 4900));
    let opened: u64 = table.all().iter().map(|series| series.opened.load(Relaxed)).sum();
    assert_eq!(opened, 5000);
    table.sweep_at(601);
    assert_eq!(table.all().len(), 0);
    // Room again.
    table.get_at(view(&flow(7)), 602);
    assert_eq!(table.overflowed(), 4900);
}

#[test]
fn the_overflow_keeps_reporter_and_flag() {
    let table = SeriesTable::new(1, Duration::from_secs(600));
    table.get(view(&flow(0)));
    for (number, flag) in [(1, ResponseFlag::None), (2, ResponseFlag::None), (3, ResponseFlag::Deny)] {
        table.get(View::of(&flow(number), flag)).opened.fetch_add(1, Relaxed);
    }
    struct Tcp(SeriesTable);
    impl Collector for Tcp {
        fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
            self.0.encode(&mut encoder)
        }
    }
    impl Debug for Tcp {
        fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
            Ok(())
        }
    }
    let metrics = Metrics::new();
    metrics.collect("tcp", Tcp(table));
    let text = write(&metrics);
    let opened = text.lines().filter(|l| l.starts_with("istio_tcp_connections_opened_total{"));
    let of_overflow: Vec<&str> = opened.filter(|l| l.contains("source_workload=\"overflow\"")).collect();
    assert_eq!(of_overflow.len(), 3, "{text}");
    assert!(of_overflow.iter().any(|l| l.contains("response_flags=\"DENY\"")), "{text}");
}

fn write(metrics: &Metrics) -> String {
    let mut text = String::new();
    metrics.write(&mut text).unwrap();
    text
}

#[test]
fn closures_are_read_at_each_scrape() {
    let metrics = Metrics::new();
    let value = Arc::new(std::sync::atomic::AtomicU64::new(1));
    let read = value.clone();
    metrics.counter("understory_things", "Things", move || read.load(Relaxed));
    metrics.gauges("understory_pods", "Pods by state", |samples| {
        samples.add(&[("state", "up \"x\"\n")], 2.0);
        samples.add(&[("state", "pending")], 0.5);
    });
    assert!(write(&metrics).contains("# TYPE understory_things counter\nunderstory_things_total 1\n"));
    value.store(9_007, Relaxed);
    let text = write(&metrics);
    assert!(text.contains("understory_things_total 9007\n"), "{text}");
    assert!(text.contains("understory_pods{state=\"up \\\"x\\\"\\n\"} 2\n"), "{text}");
    assert!(text.contains("understory_pods{state=\"pending\"} 0.5\n"), "{text}");
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn process_metrics_have_their_names() {
    let metrics = Metrics::new();
    metrics.process("ztunnel", None);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    metrics.runtimes(vec![runtime.handle().clone()]);
    let text = write(&metrics);
    for line in [
        "istio_build{component=\"ztunnel\",tag=\"",
        "\nprocess_open_fds ",
        "\nprocess_max_fds ",
        "\ntokio_num_workers 1\n",
        "\ntokio_num_alive_tasks 0\n",
        "\ntokio_global_queue_depth 0\n",
        "\ntokio_worker_total_busy_duration_seconds_total{worker=\"0\"} ",
        "\ntokio_worker_park_count_total{worker=\"0\"} ",
        "\ntokio_worker_park_unpark_count_total{worker=\"0\"} ",
    ] {
        assert!(text.contains(line), "{line:?} is missing in {text}");
    }
}

#[test]
fn a_name_is_registered_once() {
    let metrics = Metrics::new();
    metrics.gauge("understory_x", "First", || 1.0);
    metrics.gauge("understory_x", "Second", || 2.0);
    assert_eq!(write(&metrics).matches("# TYPE understory_x ").count(), 1);
}

#[derive(Debug, Clone)]
enum Step {
    Open(u8),
    Count(usize, u64),
    Finish(usize),
    Wait(u32),
    Sweep,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0u8..12).prop_map(Step::Open),
        4 => (any::<usize>(), 0u64..1000).prop_map(|(which, bytes)| Step::Count(which, bytes)),
        2 => any::<usize>().prop_map(Step::Finish),
        2 => (0u32..400).prop_map(Step::Wait),
        2 => Just(Step::Sweep),
    ]
}

proptest! {
    /// Whatever happens, each count is either in the table or was in it, unchanged, for the whole idle time before
    /// its series left; and the series of a live connection never leaves.
    #[test]
    fn expiry_never_loses_a_count(steps in proptest::collection::vec(step(), 1..200)) {
        const IDLE: u32 = 600;
        let table = SeriesTable::new(5, Duration::from_secs(IDLE.into()));
        let address = |series: &Arc<Series>| Arc::as_ptr(series) as usize;
        let (mut now, mut live) = (0u32, Vec::<Arc<Series>>::new());
        let (mut counted, mut left) = (0u64, 0u64);
        let mut last_change = BTreeMap::<usize, u32>::new();
        for step in steps {
            match step {
                Step::Count(which, bytes) if !live.is_empty() => {
                    let which = which % live.len();
                    live[which].received.fetch_add(bytes, Relaxed);
                    counted += bytes;
                }
                Step::Finish(which) if !live.is_empty() => {
                    let series = live.swap_remove(which % live.len());
                    series.touch_at(now);
                    last_change.insert(address(&series), now);
                }
                Step::Count(..) | Step::Finish(_) => {}
                Step::Wait(seconds) => now += seconds,
                Step::Sweep | Step::Open(_) => {
                    let value = |series: &Arc<Series>| (address(series), series.received.load(Relaxed));
                    let before: BTreeMap<usize, u64> = table.all().iter().map(value).collect();
                    table.sweep_at(now);
                    let after: BTreeMap<usize, u64> = table.all().iter().map(value).collect();
                    for (series, value) in before.iter().filter(|(series, _)| !after.contains_key(series)) {
                        prop_assert!(now - last_change[series] >= IDLE, "left too early");
                        prop_assert!(live.iter().all(|held| address(held) != *series), "left while it was held");
                        left += value;
                    }
                }
            }
            if let Step::Open(number) = step {
                let series = table.get_at(view(&flow(number)), now);
                last_change.insert(address(&series), now);
                live.push(series);
            }
            let shown: u64 = table.all().iter().map(|series| series.received.load(Relaxed)).sum();
            prop_assert_eq!(shown + left, counted);
            prop_assert!(table.len() <= 5);
        }
    }
}

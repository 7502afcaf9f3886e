use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Once;

use super::super::flow::{Authority, How, Peer, PeerClaims, Protocol, Side};
use super::super::log::Format;
use super::super::log::tests::lines_of;
use super::*;
use crate::identity::{Identity, TrustDomain};
use crate::mesh::{Common, Few, Locality, Place, Service, Workload};
use crate::policy::{RuleRef, Verdict};

fn identity(namespace: &str, account: &str) -> Identity {
    Identity::new(&TrustDomain::default(), namespace, account)
}

pub(crate) fn workload(name: &str) -> Arc<Workload> {
    Arc::new(Workload {
        uid: format!("Kubernetes//Pod/shop/{name}-0").into(),
        own_name: None,
        addresses: Few::default(),
        common: Arc::new(Common {
            namespace: "shop".into(),
            service_account: "default".into(),
            trust_domain: TrustDomain::default(),
            protocol: Default::default(),
            hostname: "".into(),
            workload_name: name.into(),
            workload_type: "pod",
            canonical_name: name.into(),
            canonical_revision: "v1".into(),
            waypoint: None,
            native_tunnel: false,
            host_network: false,
            application_tunnel: None,
            policies: [].into(),
            identity: Default::default(),
        }),
        place: Arc::new(Place {
            node: "".into(),
            cluster: "Kubernetes".into(),
            network: "".into(),
            network_gateway: None,
            locality: Locality { region: "r1".into(), zone: "z1".into(), subzone: "".into() },
        }),
        services: [].into(),
        capacity: 1,
        healthy: true,
    })
}

pub(crate) fn service() -> Arc<Service> {
    Arc::new(Service {
        key: "shop/cart.shop.svc.cluster.local".into(),
        name: "cart".into(),
        namespace: "shop".into(),
        hostname: "cart.shop.svc.cluster.local".into(),
        vips: Few::default(),
        cidr_vips: [].into(),
        ports: Few::default(),
        subject_alt_names: [].into(),
        waypoint: None,
        weighted_waypoints: [].into(),
        load_balancing: Default::default(),
        ip_families: Default::default(),
        canonical: true,
        visibility: Default::default(),
    })
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// A connection from `web` to the service `cart`, seen from one of the two proxies.
pub(crate) fn hbone(direction: Direction) -> Flow {
    let dst = if direction == Direction::Outbound { "10.0.1.2:15008" } else { "10.0.1.2:8080" };
    Flow {
        source: Peer::of(Some(workload("web")), Some(identity("shop", "web"))),
        destination: Peer::of(Some(workload("cart")), Some(identity("shop", "cart"))),
        service: Some(service()),
        authority: Some(Authority::Address(address("10.0.1.2:8080"))),
        ..Flow::new(direction, Protocol::Hbone, "uid-1".into(), address("10.0.0.1:4000"), address(dst))
    }
}

pub(crate) fn new() -> (Arc<Metrics>, Arc<Telemetry>) {
    // A place in the code that logs for the first time while another test makes its subscriber may miss it.
    static ALL_PLACES_KNOWN: Once = Once::new();
    ALL_PLACES_KNOWN.call_once(|| {
        lines_of(Format::Plain, "trace", |_| {
            let (flow, failure) = (hbone(Direction::Inbound), |step| Failure::new(ResponseFlag::Deny, step, ""));
            access_log::opened(&flow);
            access_log::complete(&flow, 0, 0, &Outcome::reset(Side::Client));
            access_log::complete(&flow, 0, 0, &Outcome::abandoned());
            access_log::failed(&flow, &failure("policy"));
            access_log::failed(&flow, &failure("dial"));
            let allowed = || Verdict::Allowed { by: None };
            let mut decision = Decision { verdict: allowed(), dry_run: Some(allowed()), audited: vec![] };
            access_log::judged(&flow, &decision);
            decision.audited.push(RuleRef { policy: "n/p".into(), rule: 0 });
            access_log::judged(&flow, &decision);
        });
    });
    let metrics = Metrics::new();
    let telemetry = Telemetry::new(&metrics, 100, Duration::from_secs(600));
    (metrics, telemetry)
}

/// The samples of one metric: labels → value.
fn samples(metrics: &Metrics, name: &str) -> Vec<(BTreeMap<String, String>, f64)> {
    let mut text = String::new();
    metrics.write(&mut text).unwrap();
    assert!(text.ends_with("# EOF\n"));
    let lines = text.lines().filter_map(|line| line.strip_prefix(name)).filter(|rest| rest.starts_with(['{', ' ']));
    lines
        .map(|rest| {
            let (labels, value) = rest.rsplit_once(' ').unwrap();
            let pairs = labels.trim_matches(['{', '}']).split("\",").filter(|pair| !pair.is_empty());
            let pair = |pair: &str| {
                let (key, value) = pair.split_once("=\"").unwrap();
                (key.to_owned(), value.trim_end_matches('"').to_owned())
            };
            (pairs.map(pair).collect(), value.parse().unwrap())
        })
        .collect()
}

#[test]
fn labels_have_the_order_and_the_values_of_the_field() {
    let (metrics, telemetry) = new();
    telemetry.open(hbone(Direction::Outbound)).finish(&Outcome::orderly(Side::Client));
    let mut text = String::new();
    metrics.write(&mut text).unwrap();
    let expected = concat!(
        "istio_tcp_connections_opened_total{reporter=\"source\",source_workload=\"web\",",
        "source_canonical_service=\"web\",source_canonical_revision=\"v1\",source_workload_namespace=\"shop\",",
        "source_principal=\"spiffe://cluster.local/ns/shop/sa/web\",source_app=\"web\",source_version=\"v1\",",
        "source_cluster=\"Kubernetes\",destination_service=\"cart.shop.svc.cluster.local\",",
        "destination_service_namespace=\"shop\",destination_service_name=\"cart\",destination_workload=\"cart\",",
        "destination_canonical_service=\"cart\",destination_canonical_revision=\"v1\",",
        "destination_workload_namespace=\"shop\",",
        "destination_principal=\"spiffe://cluster.local/ns/shop/sa/cart\",destination_app=\"cart\",",
        "destination_version=\"v1\",destination_cluster=\"Kubernetes\",request_protocol=\"tcp\",",
        "response_flags=\"-\",connection_security_policy=\"mutual_tls\",source_region=\"r1\",source_zone=\"z1\",",
        "destination_region=\"r1\",destination_zone=\"z1\"} 1\n",
    );
    assert!(text.contains(expected), "{text}");
}

#[test]
fn what_is_not_known_is_unknown_and_claims_fill_in_for_a_missing_record() {
    let (metrics, telemetry) = new();
    let flow = Flow::new(Direction::Inbound, Protocol::Tcp, "u".into(), address("10.9.9.9:1"), address("10.0.1.2:80"));
    let claims = PeerClaims { namespace: "far".into(), workload: PeerClaims::value("gate"), ..Default::default() };
    let claimed = Flow { source: Peer { claims: Some(Box::new(claims)), ..Peer::default() }, ..flow.clone() };
    telemetry.open(flow).finish(&Outcome::orderly(Side::Server));
    telemetry.open(claimed).finish(&Outcome::orderly(Side::Server));
    let opened = samples(&metrics, "istio_tcp_connections_opened_total");
    for (labels, _) in &opened {
        assert_eq!(labels["connection_security_policy"], "unknown");
        assert_eq!(labels["source_principal"], "unknown");
        assert_eq!(labels["destination_service"], "unknown");
    }
    let by_source: BTreeMap<_, _> =
        opened.iter().map(|(l, _)| (&*l["source_workload"], &*l["source_workload_namespace"])).collect();
    assert_eq!(by_source, BTreeMap::from([("unknown", "unknown"), ("gate", "far")]));
}

#[test]
fn received_counts_client_to_server_at_both_reporters() {
    for (direction, reporter) in [(Direction::Outbound, "source"), (Direction::Inbound, "destination")] {
        let (metrics, telemetry) = new();
        let connection = telemetry.open(hbone(direction));
        // The client sends 70 bytes, the server 500.
        let (of_local_app, of_peer) = if direction == Direction::Outbound { (70, 500) } else { (500, 70) };
        connection.live().add_sent(of_local_app);
        connection.live().add_received(of_peer);
        // Counts are seen while the connection lives, and not twice when it ends.
        for _ in 0..2 {
            let received = samples(&metrics, "istio_tcp_received_bytes_total");
            assert_eq!((&*received[0].0["reporter"], received[0].1), (reporter, 70.0));
            assert_eq!(samples(&metrics, "istio_tcp_sent_bytes_total")[0].1, 500.0);
        }
        assert_eq!(samples(&metrics, "istio_tcp_sockets_open").iter().map(|s| s.1).sum::<f64>(), 1.0);
        connection.finish(&Outcome::orderly(Side::Client));
        assert_eq!(samples(&metrics, "istio_tcp_received_bytes_total")[0].1, 70.0);
        assert_eq!(samples(&metrics, "istio_tcp_connections_closed_total")[0].1, 1.0);
        assert_eq!(samples(&metrics, "istio_tcp_sockets_open").iter().map(|s| s.1).sum::<f64>(), 0.0);
    }
}

#[test]
fn a_failure_counts_as_failed_with_its_flag_and_not_as_opened() {
    let (metrics, telemetry) = new();
    let failure = Failure::new(ResponseFlag::Deny, "policy", "denied by shop/only-web");
    telemetry.failed(&hbone(Direction::Inbound), &failure);
    let failed = samples(&metrics, "istio_tcp_connections_failed_total");
    assert_eq!((failed.len(), &*failed[0].0["response_flags"], failed[0].1), (1, "DENY", 1.0));
    assert!(samples(&metrics, "istio_tcp_connections_opened_total").is_empty());
    let steps = samples(&metrics, "understory_connections_failed_total");
    assert_eq!((&*steps[0].0["step"], steps[0].1), ("policy", 1.0));
}

#[test]
fn a_dropped_connection_is_counted_as_abandoned() {
    let (metrics, telemetry) = new();
    drop(telemetry.open(hbone(Direction::Outbound)));
    let ended = samples(&metrics, "understory_connections_ended_total");
    assert_eq!((&*ended[0].0["by"], &*ended[0].0["how"]), ("proxy", "abandoned"));
    assert_eq!(telemetry.connections().count(), 0);
}

#[tokio::test]
async fn a_live_connection_can_be_ordered_to_end_with_a_reason() {
    let (_metrics, telemetry) = new();
    let connection = telemetry.open(hbone(Direction::Inbound));
    let pod = connection.flow().pod.clone();
    let other = telemetry.open(Flow { pod: (&*pod).into(), ..hbone(Direction::Inbound) });
    let waiting = tokio::spawn(async move {
        let reason = connection.close_ordered().await;
        connection.finish(&Outcome::closed(reason));
        reason
    });
    tokio::task::yield_now().await;
    for live in telemetry.connections_of(&pod) {
        live.close(CloseReason::PolicyChange);
        live.close(CloseReason::PodRemoved);
    }
    assert_eq!(waiting.await.unwrap(), CloseReason::PolicyChange);
    assert_eq!(telemetry.connections_of(&pod).count(), 0);
    assert_eq!(telemetry.connections().count(), 1);
    drop(other);
}

#[test]
fn the_state_of_a_connection_stays_small() {
    let size = std::mem::size_of::<Live>() + std::mem::size_of::<Connection>() + 16;
    assert!(size <= 400, "{size}");
}

#[test]
fn connections_of_many_threads_are_all_counted() {
    let (metrics, telemetry) = new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for i in 0..500u64 {
                    let connection = telemetry.open(hbone(Direction::Outbound));
                    connection.live().add_sent(i);
                    connection.finish(&Outcome::reset(Side::Server));
                }
            });
        }
        for _ in 0..20 {
            samples(&metrics, "istio_tcp_received_bytes_total");
        }
    });
    assert_eq!(samples(&metrics, "istio_tcp_connections_closed_total")[0].1, 2000.0);
    assert_eq!(samples(&metrics, "istio_tcp_received_bytes_total")[0].1, (4 * 499 * 500 / 2) as f64);
}

/// The access-log lines of what `run` does, without their time.
fn access_lines(levels: &str, run: impl FnOnce(&Arc<Telemetry>)) -> Vec<String> {
    let (_metrics, telemetry) = new();
    let lines = lines_of(Format::Plain, levels, |_| run(&telemetry));
    let without_time = |line: &String| line.split_once('\t').unwrap().1.to_owned();
    lines.iter().map(without_time).collect()
}

fn without_duration(line: &str) -> String {
    let (before, rest) = line.split_once("duration=\"").unwrap();
    let (milliseconds, after) = rest.split_once("ms\"").unwrap();
    milliseconds.parse::<u64>().unwrap();
    format!("{before}duration{after}")
}

#[test]
fn a_completed_connection_has_one_line_with_all_that_matters() {
    let lines = access_lines("info", |telemetry| {
        let connection = telemetry.open(hbone(Direction::Outbound));
        connection.live().add_sent(70);
        connection.live().add_received(500);
        connection.finish(&Outcome::orderly(Side::Server));
    });
    assert_eq!(lines.len(), 1);
    assert_eq!(
        without_duration(&lines[0]),
        concat!(
            "info\taccess\tconnection complete\tsrc.addr=10.0.0.1:4000 src.workload=\"web-0\" src.namespace=\"shop\" ",
            "src.identity=\"spiffe://cluster.local/ns/shop/sa/web\" src.cluster=\"Kubernetes\" ",
            "dst.addr=10.0.1.2:15008 dst.hbone_addr=10.0.1.2:8080 dst.service=\"cart.shop.svc.cluster.local\" ",
            "dst.workload=\"cart-0\" dst.namespace=\"shop\" dst.identity=\"spiffe://cluster.local/ns/shop/sa/cart\" ",
            "dst.cluster=\"Kubernetes\" direction=\"outbound\" bytes_sent=70 bytes_recv=500 duration ",
            "closed.by=\"server\" closed.hop=\"peer\" closed.how=\"FIN\"",
        )
    );
}

/// B149: it could not be told who closed a TCP connection, and how.
#[test]
fn the_line_says_who_closed_and_how_at_which_hop() {
    let cases = [
        (Direction::Outbound, Outcome::orderly(Side::Client), ["client", "app", "FIN"]),
        (Direction::Outbound, Outcome::reset(Side::Server), ["server", "peer", "RST"]),
        (Direction::Inbound, Outcome::orderly(Side::Server), ["server", "app", "FIN"]),
        (Direction::Inbound, Outcome::reset(Side::Client), ["client", "peer", "RST"]),
    ];
    for (direction, outcome, [by, hop, how]) in cases {
        let lines = access_lines("info", |telemetry| telemetry.open(hbone(direction)).finish(&outcome));
        let end = format!("closed.by=\"{by}\" closed.hop=\"{hop}\" closed.how=\"{how}\"");
        assert!(lines[0].starts_with("info\t") && lines[0].ends_with(&end), "{lines:?}");
    }
}

#[test]
fn failures_are_errors_and_early_denials_warnings() {
    let lines = access_lines("info", |telemetry| {
        let dial = Failure::new(ResponseFlag::Connect, "dial", "10.0.1.2:8080 refused the connection");
        let connection = telemetry.open(hbone(Direction::Inbound));
        connection.finish(&Outcome::broken(Side::Server, How::Timeout, dial.clone()));
        telemetry.open(hbone(Direction::Inbound)).finish(&Outcome::closed(CloseReason::PolicyChange));
        telemetry.failed(&hbone(Direction::Outbound), &dial);
        let denied = Failure::new(ResponseFlag::Deny, "policy", "denied by shop/only-web");
        telemetry.failed(&hbone(Direction::Inbound), &denied);
        drop(telemetry.open(hbone(Direction::Inbound)));
    });
    let expected = [
        (
            "error\taccess\tconnection complete",
            "error=\"10.0.1.2:8080 refused the connection\" response_flags=\"CONNECT\"",
        ),
        ("error\taccess\tconnection complete", "error=\"closed due to policy change\" response_flags=\"DENY\""),
        (
            "error\taccess\tconnection failed",
            "error=\"10.0.1.2:8080 refused the connection\" response_flags=\"CONNECT\"",
        ),
        ("warn\taccess\tconnection failed", "error=\"denied by shop/only-web\" response_flags=\"DENY\""),
        ("error\taccess\tconnection complete", "closed.how=\"abandoned\""),
    ];
    assert_eq!(lines.len(), expected.len());
    for (line, (start, part)) in lines.iter().zip(expected) {
        assert!(line.starts_with(start) && line.contains(part), "{line}");
    }
    // An inbound line does not repeat the pod's own identity as the destination's.
    assert!(!lines[0].contains("dst.identity"), "{}", lines[0]);
}

#[test]
fn a_flood_that_a_limit_refuses_has_few_lines_and_they_say_how_many_are_missing() {
    let lines = access_lines("info", |telemetry| {
        let full = Failure::new(ResponseFlag::Connect, "limit", "the pod has 20 connections already");
        (0..5000).for_each(|_| telemetry.failed(&hbone(Direction::Outbound), &full));
    });
    assert!((10..1000).contains(&lines.len()), "{} lines", lines.len());
    assert!(lines.iter().all(|line| line.contains("the pod has 20 connections already")), "{lines:?}");
    assert!(!lines[0].contains("untold"), "{}", lines[0]);
}

#[test]
fn opening_is_logged_at_debug_and_the_log_can_be_errors_only() {
    let one =
        |telemetry: &Arc<Telemetry>| telemetry.open(hbone(Direction::Inbound)).finish(&Outcome::orderly(Side::Client));
    let lines = access_lines("info,access=debug", one);
    assert!(lines[0].starts_with("debug\taccess\tconnection opened\tsrc.addr="), "{lines:?}");
    assert_eq!(lines.len(), 2);
    assert!(access_lines("info,access=error", one).is_empty());
}

#[test]
fn audits_and_dry_runs_that_would_change_something_have_a_line_at_once() {
    let (metrics, telemetry) = new();
    let allowed = || Verdict::Allowed { by: None };
    let by = |policy: &str| RuleRef { policy: policy.into(), rule: 1 };
    let denied = || Verdict::Denied { by: by("shop/next"), matched: "it matches everything".into() };
    let lines = |decision: Decision| {
        lines_of(Format::Plain, "info", |_| telemetry.judged(&hbone(Direction::Inbound), &decision))
    };
    assert!(lines(Decision { verdict: allowed(), dry_run: None, audited: vec![] }).is_empty());
    assert!(lines(Decision { verdict: denied(), dry_run: None, audited: vec![] }).is_empty(), "it has its access line");
    assert!(lines(Decision { verdict: allowed(), dry_run: Some(allowed()), audited: vec![] }).is_empty());
    let audited = vec![by("shop/watch")];
    let text = lines(Decision { verdict: allowed(), dry_run: Some(denied()), audited }).join("\n");
    for part in [
        "\tinfo\tpolicy\tconnection judged\tsrc.addr=10.0.0.1:4000 src.workload=\"web-0\"",
        "src.identity=\"spiffe://cluster.local/ns/shop/sa/web\"",
        "verdict=\"allowed: no ALLOW policy applies\"",
        "dry_run=\"denied by shop/next rule 1: it matches everything\"",
        "audited=\"shop/watch rule 1\"",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let counted: f64 = samples(&metrics, "understory_policy_verdicts_total").iter().map(|sample| sample.1).sum();
    assert_eq!(counted, 4.0, "one refusal, two dry runs, one audit");
}

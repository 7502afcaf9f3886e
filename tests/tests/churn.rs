//! Very many short connections from one client, which ends them first.

use std::net::SocketAddr;

use testbed::{Behaviour, ChurnReport, Shop};

/// All well, and no slower at the end than at the start. Source ports that rest in TIME_WAIT would show as errors
/// after some 28,000 connections, or as a rate that falls (B30).
#[track_caller]
fn assert_steady(report: &ChurnReport, connections: u32) {
    assert_eq!((report.done, &report.errors), (connections, &Default::default()), "{report:?}");
    let first = report.rates[1..4].iter().sum::<f64>() / 3.0;
    let last = report.rates[7..].iter().sum::<f64>() / 3.0;
    assert!(last > first * 0.6, "the rate fell from {first:.0} to {last:.0} per second: {report:?}");
}

#[test]
fn a_hundred_thousand_short_connections_to_one_service_and_to_eight() {
    let shop = Shop::in_mesh();
    let ports: Vec<u16> = (9000..9008).collect();
    let _servers: Vec<_> = ports.iter().map(|port| shop.far.serve(*port, Behaviour::Echo)).collect();
    let services: Vec<SocketAddr> = ports
        .iter()
        .map(|port| shop.tb.service(&format!("shop/s{port}")).select("app", "far").port(80, *port).create())
        .map(|service| {
            shop.mesh().wait_endpoints(&service, 1);
            service.at(80)
        })
        .collect();
    assert_steady(&shop.client.churn(&services[..1], 60_000, 8), 60_000);
    assert_steady(&shop.client.churn(&services, 40_000, 8), 40_000);
}

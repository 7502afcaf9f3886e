//! What the model of a large mesh costs, counted: memory for each workload and service, and a change that costs the
//! change. (Of a whole proxy, and times, in the bench.)

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;

use counting::{allocated, held};
use ztunnel::mesh::{Mesh, convert_service, convert_workload};
use ztunnel::proto::workload::{self as wire, Port, PortList};

mod counting;

/// Workloads with one service account, services for so many workloads, workloads on a node.
const ALIKE: usize = 10;
const BEHIND: usize = 10;
const ON_NODE: usize = 50;

fn service(number: usize) -> wire::Service {
    let namespace = format!("team-{}", number / 50);
    wire::Service {
        name: format!("app-{number}"),
        hostname: format!("app-{number}.{namespace}.svc.cluster.local"),
        namespace,
        addresses: vec![wire::NetworkAddress {
            address: address(Ipv4Addr::new(10, 96, 0, 0), number),
            ..Default::default()
        }],
        ports: vec![Port { service_port: 80, target_port: 8080, ..Default::default() }],
        ..Default::default()
    }
}

fn workload(number: usize, services: usize) -> wire::Workload {
    let of = service(number % services);
    let (namespace, app) = (format!("team-{}", number / 500), format!("app-{}", number / ALIKE));
    let name = format!("{app}-7c9d8f6b5-{number:05x}");
    let ports = vec![Port { service_port: 80, target_port: 8080, ..Default::default() }];
    wire::Workload {
        uid: format!("Kubernetes//Pod/{namespace}/{name}"),
        name,
        namespace,
        addresses: vec![address(Ipv4Addr::new(10, 0, 0, 0), number)],
        tunnel_protocol: wire::TunnelProtocol::Hbone.into(),
        trust_domain: "cluster.local".into(),
        service_account: app.clone(),
        node: format!("worker-{}", number / ON_NODE),
        canonical_name: app.clone(),
        canonical_revision: "latest".into(),
        workload_name: app,
        cluster_id: "Kubernetes".into(),
        locality: Some(wire::Locality {
            region: "r1".into(),
            zone: format!("zone{}", number / ON_NODE % 3),
            ..Default::default()
        }),
        services: BTreeMap::from([(format!("{}/{}", of.namespace, of.hostname), PortList { ports })]),
        ..Default::default()
    }
}

fn address(base: Ipv4Addr, number: usize) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(&(u32::from(base) + number as u32).to_be_bytes())
}

/// Told in parts, as by a control plane, in an order that is not that of the names.
fn mesh(workloads: usize) -> Arc<Mesh> {
    let mesh = Mesh::new("worker-0", "Kubernetes");
    let services = workloads / BEHIND;
    let shuffled = |count: usize| (0..count).map(move |number| number * 7919 % count);
    for part in shuffled(services).collect::<Vec<_>>().chunks(5000) {
        mesh.update(|update| {
            for number in part {
                let service = convert_service(&service(*number), update.strings()).expect("a good service");
                update.service(service);
            }
        });
    }
    for part in shuffled(workloads).collect::<Vec<_>>().chunks(5000) {
        mesh.update(|update| part.iter().for_each(|number| tell(update, workload(*number, services))));
    }
    assert_eq!((mesh.load().workloads().count(), mesh.load().services().count()), (workloads, services));
    mesh
}

fn tell(update: &mut ztunnel::mesh::Update<'_>, record: wire::Workload) {
    let record = convert_workload(&record, update.strings()).expect("a good workload");
    update.workload(record);
}

#[test]
fn a_workload_with_its_part_of_all_else_needs_at_most_370_bytes() {
    let before = held();
    let mesh = mesh(50_000);
    let each = (held() - before) / 50_000;
    assert!(each <= 370, "{each} bytes");
    drop(mesh);
    assert!((held() - before).abs() < 100_000, "{} bytes are left", held() - before);
}

#[test]
fn records_that_are_told_again_and_again_need_no_more() {
    let mesh = mesh(5000);
    let tell_all = |zone: &str| {
        for number in 0..5000 {
            let locality = Some(wire::Locality { zone: zone.into(), ..Default::default() });
            mesh.update(|update| tell(update, wire::Workload { locality, ..workload(number, 500) }));
        }
        held()
    };
    let once = tell_all("a");
    for zone in ["b", "c", "d"] {
        let again = tell_all(zone);
        assert!((again - once).abs() < 5000 * 40, "{once} bytes, and then {again}");
    }
}

#[test]
fn a_change_of_one_costs_the_change() {
    let mesh = mesh(50_000);
    for number in [7, 20_000, 49_999] {
        let mut record = workload(number, 5000);
        record.status = wire::WorkloadStatus::Unhealthy.into();
        let (bytes, count) = allocated();
        mesh.update(|update| tell(update, record));
        let (bytes, count) = (allocated().0 - bytes, allocated().1 - count);
        assert!(bytes < 32_000 && count < 100, "{bytes} bytes in {count} allocations");
    }
}

//! Where an outbound connection goes: a pure function of the mesh and what the app dialled.
//!
//! Must never choose plaintext for a peer that speaks HBONE, nor go round a waypoint that is named.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::identity::Identity;
use crate::mesh::{
    Chosen, Destination, Gateway, GatewayAddress, LoadBalancingMode, NetworkAddress, NoEndpoint, Request, Service,
    Snapshot, TunnelProtocol, Workload,
};
use crate::random;
use crate::telemetry::flow::{Failure, ResponseFlag};

/// The next hop of a connection.
#[derive(Debug, Clone)]
pub struct Hop {
    pub kind: HopKind,
    /// What is known of the other end.
    pub workload: Option<Arc<Workload>>,
    /// The service that the app addressed.
    pub service: Option<Arc<Service>>,
}

#[derive(Debug, Clone)]
pub enum HopKind {
    /// Plain TCP to this address.
    Tcp(SocketAddr),
    /// A stream to `authority` on a tunnel to `tunnel`.
    Hbone { tunnel: SocketAddr, authority: SocketAddr, expected: Vec<Identity> },
}

/// The hop for a connection of `source` to `dialled`. `tried` are workloads that could not be reached; `load` says how
/// busy a workload is.
pub fn route(
    mesh: &Snapshot,
    source: &Workload,
    dialled: SocketAddr,
    tried: &[Arc<str>],
    load: impl Fn(&Workload) -> u64,
) -> Result<Hop, Failure> {
    let address = NetworkAddress { network: source.place.network.clone(), address: dialled.ip() };
    let mut of = None;
    if let Some(service) = mesh.service_at(&source.common.namespace, &address) {
        let service = service.clone();
        if let Some(waypoint) = waypoint_of(&service) {
            return through_waypoint(mesh, source, waypoint, dialled, Some(service.clone()), tried, load);
        }
        if service.load_balancing.mode != LoadBalancingMode::Passthrough {
            let request = Request { service: &service, port: dialled.port(), source, dialled: dialled.ip(), tried };
            let Chosen { workload, address } = mesh.choose(&request, load).map_err(no_endpoint)?;
            return Ok(to_workload(workload, address, Some(service)));
        }
        // Whoever is at the address is reached as without the service.
        of = Some(service);
    }
    let Some(workload) = mesh.workload_at(&address) else {
        if let Some(unusable) = mesh.unusable_at(&address) {
            let text = format!("{} has this address and cannot be used: {}", unusable.name, unusable.reason);
            return Err(Failure::new(ResponseFlag::Connect, "destination", text));
        }
        return Ok(Hop { kind: HopKind::Tcp(dialled), workload: None, service: of });
    };
    if let Some(waypoint) = &workload.common.waypoint
        && !is_waypoint(mesh, waypoint, source)
    {
        return through_waypoint(mesh, source, waypoint, dialled, of, tried, load);
    }
    // Who may answer is the workload's to say alone.
    Ok(Hop { service: of, ..to_workload(workload.clone(), dialled, None) })
}

fn to_workload(workload: Arc<Workload>, address: SocketAddr, service: Option<Arc<Service>>) -> Hop {
    let kind = match workload.common.protocol {
        TunnelProtocol::None => HopKind::Tcp(address),
        TunnelProtocol::Hbone => HopKind::Hbone {
            tunnel: SocketAddr::new(address.ip(), ebpf::HBONE_PORT),
            authority: address,
            expected: expected(&workload, service.as_deref()),
        },
    };
    Hop { kind, workload: Some(workload), service }
}

/// Who may answer: the workload itself, or a name that the service allows beside it.
fn expected(workload: &Workload, service: Option<&Service>) -> Vec<Identity> {
    let mut expected = vec![workload.identity()];
    expected.extend(service.into_iter().flat_map(|s| s.subject_alt_names.iter().cloned()));
    expected
}

fn waypoint_of(service: &Service) -> Option<&GatewayAddress> {
    let total: u64 = service.weighted_waypoints.iter().map(|w| u64::from(w.weight)).sum();
    if total == 0 {
        return service.waypoint.as_deref();
    }
    let mut at = random::below(total);
    let drawn = service.weighted_waypoints.iter().find(|w| {
        let weight = u64::from(w.weight);
        let here = at < weight;
        at = at.saturating_sub(weight);
        here
    });
    drawn.map(|w| &w.destination).or(service.waypoint.as_deref())
}

/// A waypoint is named: the connection goes there or nowhere.
fn through_waypoint(
    mesh: &Snapshot,
    source: &Workload,
    waypoint: &GatewayAddress,
    dialled: SocketAddr,
    service: Option<Arc<Service>>,
    tried: &[Arc<str>],
    load: impl Fn(&Workload) -> u64,
) -> Result<Hop, Failure> {
    let (workload, ip, expected) = match mesh.gateway(waypoint) {
        Some(Gateway::Workload(workload)) if workload.place.network != source.place.network => {
            return Err(no_waypoint(waypoint, "it is in another network"));
        }
        Some(Gateway::Workload(workload)) => {
            let ip = address_for(&workload, dialled.ip()).ok_or_else(|| no_waypoint(waypoint, "it has no address"))?;
            let expected = expected(&workload, None);
            (workload, ip, expected)
        }
        Some(Gateway::Service(gateway)) => {
            let request =
                Request { service: &gateway, port: waypoint.hbone_port, source, dialled: dialled.ip(), tried };
            let chosen = mesh.choose(&request, load).map_err(|e| no_waypoint(waypoint, &e.to_string()))?;
            let expected = expected(&chosen.workload, Some(&gateway));
            (chosen.workload, chosen.address.ip(), expected)
        }
        None => return Err(no_waypoint(waypoint, "it is not known")),
    };
    let tunnel = SocketAddr::new(ip, waypoint.hbone_port);
    Ok(Hop { kind: HopKind::Hbone { tunnel, authority: dialled, expected }, workload: Some(workload), service })
}

/// Whether the client is an instance of that waypoint itself.
fn is_waypoint(mesh: &Snapshot, waypoint: &GatewayAddress, source: &Workload) -> bool {
    match mesh.gateway(waypoint) {
        Some(Gateway::Workload(workload)) => workload.uid == source.uid,
        Some(Gateway::Service(service)) => {
            mesh.members(&service).iter().any(|w| w.uid == source.uid && w.identity() == source.identity())
        }
        None => false,
    }
}

fn address_for(workload: &Workload, dialled: IpAddr) -> Option<IpAddr> {
    let same = workload.addresses.iter().find(|ip| ip.is_ipv4() == dialled.is_ipv4());
    same.or(workload.addresses.first()).copied()
}

fn no_endpoint(error: NoEndpoint) -> Failure {
    Failure::new(ResponseFlag::Connect, "destination", error.to_string())
}

fn no_waypoint(waypoint: &GatewayAddress, reason: &str) -> Failure {
    let name = match &waypoint.destination {
        Destination::Hostname(name) => format!("{}/{}", name.namespace, name.hostname),
        Destination::Address(address) => format!("{}/{}", address.network, address.address),
    };
    Failure::new(ResponseFlag::Connect, "destination", format!("waypoint {name} cannot be used: {reason}"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::mesh::{Mesh, Unusable, convert_service, convert_workload};
    use crate::proto::workload as wire;

    fn mesh() -> Arc<Mesh> {
        let mesh = Mesh::new("n1", "Kubernetes");
        let pods = [
            ("client", [10, 0, 0, 1], wire::TunnelProtocol::Hbone),
            ("server", [10, 0, 0, 2], wire::TunnelProtocol::Hbone),
            ("plain", [10, 0, 0, 3], wire::TunnelProtocol::None),
        ];
        mesh.update(|update| {
            for (name, address, protocol) in pods {
                let pod = wire::Workload {
                    uid: name.into(),
                    name: name.into(),
                    namespace: "shop".into(),
                    addresses: vec![address.to_vec().into()],
                    tunnel_protocol: protocol as i32,
                    ..Default::default()
                };
                let pod = convert_workload(&pod, update.strings()).unwrap();
                update.workload(pod);
            }
        });
        mesh
    }

    fn to(mesh: &Mesh, dialled: &str) -> Result<HopKind, Failure> {
        let mesh = mesh.load();
        let client = mesh.workload("client").unwrap();
        route(&mesh, client, dialled.parse().unwrap(), &[], |_| 0).map(|hop| hop.kind)
    }

    #[test]
    fn a_peer_that_speaks_hbone_is_reached_by_it_and_others_in_the_clear() {
        let mesh = mesh();
        assert!(matches!(to(&mesh, "10.0.0.2:80"), Ok(HopKind::Hbone { tunnel, .. }) if tunnel.port() == 15008));
        assert!(matches!(to(&mesh, "10.0.0.3:80"), Ok(HopKind::Tcp(_))));
        assert!(matches!(to(&mesh, "192.0.2.1:80"), Ok(HopKind::Tcp(_))));
    }

    #[test]
    fn a_range_that_passes_through_does_not_take_its_pods_out_of_the_mesh() {
        let mesh = mesh();
        let range = wire::NetworkAddress { address: vec![10, 0, 0, 0].into(), length: Some(8), ..Default::default() };
        let everything = wire::Service {
            name: "all".into(),
            namespace: "shop".into(),
            hostname: "all.example".into(),
            addresses: vec![range],
            subject_alt_names: vec!["spiffe://cluster.local/ns/other/sa/other".into()],
            load_balancing: Some(wire::LoadBalancing {
                mode: wire::load_balancing::Mode::Passthrough.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        mesh.update(|update| {
            let service = convert_service(&everything, update.strings()).unwrap();
            update.service(service);
        });
        let Ok(HopKind::Hbone { authority, expected, .. }) = to(&mesh, "10.0.0.2:80") else { panic!() };
        assert_eq!((authority, expected.len()), ("10.0.0.2:80".parse().unwrap(), 1));
        assert!(matches!(to(&mesh, "10.0.0.3:80"), Ok(HopKind::Tcp(at)) if at.port() == 80));
        assert!(matches!(to(&mesh, "10.9.9.9:81"), Ok(HopKind::Tcp(at)) if at.port() == 81));
    }

    /// Whoever writes a range gets what nobody has, and not the connections to others' pods.
    #[test]
    fn a_range_with_endpoints_does_not_take_the_pods_in_it() {
        let mesh = mesh();
        let range = wire::NetworkAddress { address: vec![10, 0, 0, 0].into(), length: Some(8), ..Default::default() };
        let greedy = wire::Service {
            name: "greedy".into(),
            namespace: "other".into(),
            hostname: "greedy.example".into(),
            addresses: vec![range],
            canonical: true,
            ..Default::default()
        };
        mesh.update(|update| {
            let service = convert_service(&greedy, update.strings()).unwrap();
            update.service(service);
        });
        let Ok(HopKind::Hbone { authority, .. }) = to(&mesh, "10.0.0.2:80") else { panic!() };
        assert_eq!(authority, "10.0.0.2:80".parse().unwrap());
        assert!(to(&mesh, "10.9.9.9:81").is_err(), "it has no endpoint");
        // So that on demand a pod in it is asked for.
        let at = NetworkAddress { network: "".into(), address: [10, 9, 9, 9].into() };
        assert!(!mesh.load().has_service_at(&at) && mesh.load().service_at("shop", &at).is_some());
    }

    #[test]
    fn an_address_whose_record_cannot_be_used_is_refused_and_not_passed() {
        let mesh = mesh();
        let at = |address: &str| NetworkAddress { network: "".into(), address: address.parse().unwrap() };
        let unusable = Unusable { name: "odd".into(), addresses: vec![at("10.0.0.9")], reason: "status".into() };
        mesh.update(|update| update.unusable(unusable));
        let failure = to(&mesh, "10.0.0.9:80").unwrap_err();
        assert!(failure.text.contains("odd") && failure.text.contains("status"), "{}", failure.text);
        // A record that is held goes on, whatever else claims its address.
        let other = Unusable { name: "other".into(), addresses: vec![at("10.0.0.2")], reason: "status".into() };
        mesh.update(|update| update.unusable(other));
        assert!(matches!(to(&mesh, "10.0.0.2:80"), Ok(HopKind::Hbone { .. })));
    }
}

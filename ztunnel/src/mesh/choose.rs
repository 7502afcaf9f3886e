//! Which endpoint of a service a connection goes to: weighted, by locality, the less loaded of two.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::service::{HealthPolicy, IpFamilies, LoadBalancingMode, Scope, Service};
use super::snapshot::Snapshot;
use super::workload::Workload;
use crate::random;

/// An endpoint that was chosen.
#[derive(Debug, Clone)]
pub struct Chosen {
    pub workload: Arc<Workload>,
    /// Its address and target port.
    pub address: SocketAddr,
}

/// Why no endpoint can be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoEndpoint {
    #[error("service {service} has no port {port}")]
    NoPort { service: Arc<str>, port: u16 },
    #[error(
        "service {service} has no usable endpoint for port {port} ({members} known, {unhealthy} unhealthy, \
         {elsewhere} in other networks, {tried} already tried)"
    )]
    None { service: Arc<str>, port: u16, members: usize, unhealthy: usize, elsewhere: usize, tried: usize },
}

/// Why a member of a service is not chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LeftOut {
    #[error("it is not healthy")]
    Unhealthy,
    #[error("its weight is 0")]
    NoCapacity,
    #[error("it has been tried in vain")]
    Tried,
    #[error("it is in another network")]
    OtherNetwork,
    #[error("it does not serve this port")]
    NoPort,
    #[error("it has no address of the service's families")]
    NoAddress,
    #[error("the service's traffic stays within the client's {0}")]
    OutOfScope(Scope),
    #[error("a nearer one is there")]
    Farther,
}

/// A member of a service, and where it would be reached.
pub type Candidate = (Arc<Workload>, Result<SocketAddr, LeftOut>);

/// What a choice is made for.
pub struct Request<'a> {
    pub service: &'a Service,
    pub port: u16,
    /// The client.
    pub source: &'a Workload,
    /// What the client dialled: an endpoint of its family is preferred.
    pub dialled: IpAddr,
    /// UIDs that have been tried in vain.
    pub tried: &'a [Arc<str>],
}

impl Snapshot {
    /// Chooses an endpoint. `load` tells how busy a workload is, seen from here; of two candidates the less busy wins.
    pub fn choose(&self, request: &Request<'_>, load: impl Fn(&Workload) -> u64) -> Result<Chosen, NoEndpoint> {
        let Request { service, port, tried, .. } = *request;
        let target = target_port(request)?;
        let members = self.members(service);
        if service.load_balancing.mode == LoadBalancingMode::Standard
            && let Some(chosen) = sample(request, members, target, &load)
        {
            return Ok(chosen);
        }
        let mut best_rank = 0;
        let mut candidates: Vec<(&Arc<Workload>, SocketAddr)> = Vec::new();
        for workload in members {
            let Ok((rank, address)) = fit(request, workload, target) else { continue };
            if rank > best_rank {
                best_rank = rank;
                candidates.clear();
            }
            if rank == best_rank {
                candidates.push((workload, address));
            }
        }
        let Some((workload, address)) = two_choices(&candidates, &load) else {
            return Err(NoEndpoint::None {
                service: service.key.clone(),
                port,
                members: members.len(),
                unhealthy: members.iter().filter(|w| !w.healthy).count(),
                elsewhere: members.iter().filter(|w| w.place.network != request.source.place.network).count(),
                tried: tried.len(),
            });
        };
        Ok(Chosen { workload: workload.clone(), address })
    }

    /// All members of the service: the address of each that may be chosen, or why it is left out.
    pub fn candidates(&self, request: &Request<'_>) -> Result<Vec<Candidate>, NoEndpoint> {
        let target = target_port(request)?;
        let fits: Vec<_> = self.members(request.service).iter().map(|w| (w, fit(request, w, target))).collect();
        let best_rank = fits.iter().filter_map(|(_, fit)| Some(fit.as_ref().ok()?.0)).max();
        let judged = fits.into_iter().map(|(workload, fit)| {
            let address = fit.and_then(|(rank, address)| match Some(rank) == best_rank {
                true => Ok(address),
                false => Err(LeftOut::Farther),
            });
            (workload.clone(), address)
        });
        Ok(judged.collect())
    }
}

/// The service's own target port for the port that was dialled; an endpoint may have another.
fn target_port(request: &Request<'_>) -> Result<u16, NoEndpoint> {
    let Request { service, port, .. } = *request;
    let found = service.ports.iter().find(|p| p.service_port == port).map(|p| p.target_port);
    found.ok_or_else(|| NoEndpoint::NoPort { service: service.key.clone(), port })
}

/// A few draws from all members: finds an endpoint at once where most are usable and weigh the same.
fn sample(
    request: &Request<'_>,
    members: &[Arc<Workload>],
    target: u16,
    load: &impl Fn(&Workload) -> u64,
) -> Option<Chosen> {
    if members.len() < SAMPLE_FROM || !request.tried.is_empty() {
        return None;
    }
    let draw = || {
        let workload = &members[random::below(members.len() as u64) as usize];
        // Weights need the whole list.
        (workload.capacity == 1).then(|| usable(request, workload, target).ok().map(|a| (workload, a)))?
    };
    let (first, second) = (draw()?, draw()?);
    let (workload, address) = if load(second.0) < load(first.0) { second } else { first };
    Some(Chosen { workload: workload.clone(), address })
}

fn two_choices<'a>(
    candidates: &[(&'a Arc<Workload>, SocketAddr)],
    load: &impl Fn(&Workload) -> u64,
) -> Option<(&'a Arc<Workload>, SocketAddr)> {
    let total: u64 = candidates.iter().map(|(w, _)| u64::from(w.capacity)).sum();
    if total == 0 {
        return None;
    }
    let draw = || {
        let mut at = random::below(total);
        candidates.iter().find(|(w, _)| {
            let capacity = u64::from(w.capacity);
            let here = at < capacity;
            at = at.saturating_sub(capacity);
            here
        })
    };
    let (first, second) = (draw()?, draw()?);
    Some(if load(second.0) < load(first.0) { *second } else { *first })
}

/// The address of a workload as an endpoint, and how near it is, if it may be chosen by the service's rules.
fn fit(request: &Request<'_>, workload: &Workload, service_target: u16) -> Result<(usize, SocketAddr), LeftOut> {
    let address = usable(request, workload, service_target)?;
    let balancing = &request.service.load_balancing;
    match balancing.mode {
        LoadBalancingMode::Standard | LoadBalancingMode::Passthrough => Ok((0, address)),
        LoadBalancingMode::Strict => {
            match balancing.preference.iter().find(|s| !matches(**s, request.source, workload)) {
                Some(scope) => Err(LeftOut::OutOfScope(*scope)),
                None => Ok((0, address)),
            }
        }
        LoadBalancingMode::Failover => Ok((rank(&balancing.preference, request.source, workload), address)),
    }
}

/// The address of a workload as an endpoint, if it may be one now.
fn usable(request: &Request<'_>, workload: &Workload, service_target: u16) -> Result<SocketAddr, LeftOut> {
    let service = request.service;
    if !workload.healthy && service.load_balancing.health != HealthPolicy::AllowAll {
        return Err(LeftOut::Unhealthy);
    }
    if workload.capacity == 0 {
        return Err(LeftOut::NoCapacity);
    }
    if request.tried.contains(&workload.uid) {
        return Err(LeftOut::Tried);
    }
    // Its address may be somebody else's here.
    if workload.place.network != request.source.place.network {
        return Err(LeftOut::OtherNetwork);
    }
    let share = workload.services.iter().find(|s| s.service == service.key).ok_or(LeftOut::NoPort)?;
    let own_target = share.ports.iter().find(|(port, _)| *port == request.port).map_or(0, |(_, target)| *target);
    let target = if own_target != 0 { own_target } else { service_target };
    if target == 0 {
        return Err(LeftOut::NoPort);
    }
    let allowed = |ip: &IpAddr| match service.ip_families {
        IpFamilies::Automatic | IpFamilies::Dual => true,
        IpFamilies::V4Only => ip.is_ipv4(),
        IpFamilies::V6Only => ip.is_ipv6(),
    };
    let mut addresses = workload.addresses.iter().filter(|ip| allowed(ip));
    let ip = if workload.addresses.contains(&request.dialled) {
        request.dialled
    } else {
        let same_family = addresses.clone().find(|ip| ip.is_ipv4() == request.dialled.is_ipv4());
        *same_family.or_else(|| addresses.next()).ok_or(LeftOut::NoAddress)?
    };
    Ok(SocketAddr::new(ip, target))
}

/// Leading scopes that match. A network that is first counts more than all others together (xDS §3).
fn rank(preference: &[Scope], source: &Workload, endpoint: &Workload) -> usize {
    let network_first = preference.first() == Some(&Scope::Network);
    let mut rank = 0;
    for (index, scope) in preference.iter().enumerate() {
        let same = matches(*scope, source, endpoint);
        match (network_first && index == 0, same) {
            (true, true) => rank += preference.len(),
            (true, false) => {}
            (false, true) => rank += 1,
            (false, false) => break,
        }
    }
    rank
}

fn matches(scope: Scope, source: &Workload, endpoint: &Workload) -> bool {
    let (source, endpoint) = (&source.place, &endpoint.place);
    match scope {
        Scope::Region => source.locality.region == endpoint.locality.region,
        Scope::Zone => source.locality.zone == endpoint.locality.zone,
        Scope::Subzone => source.locality.subzone == endpoint.locality.subzone,
        Scope::Node => source.node == endpoint.node,
        Scope::Cluster => source.cluster == endpoint.cluster,
        Scope::Network => source.network == endpoint.network,
    }
}

/// Members from which on a draw is tried before the list is walked.
const SAMPLE_FROM: usize = 16;

//! What would happen to a connection, and why: answered by the functions that decide real ones, on one state of the
//! mesh. Asked by `ztunnel explain` through the admin server.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use serde::Serialize;

use super::inbound::ILLEGAL_PORTS;
use super::route::{Hop, HopKind, route};
use super::state::Phase;
use crate::identity::{Identity, TrustDomain};
use crate::mesh::{NetworkAddress, Request, Service, Snapshot, TunnelProtocol, Workload};
use crate::policy::{Connection, Decision, PolicySet, evaluate};

/// What is asked.
#[derive(Debug, Clone)]
pub struct Question {
    /// `namespace/pod`, a SPIFFE ID, or an IP address.
    pub from: String,
    /// `namespace/service`, `namespace/pod`, a host name or an IP address, each with `:port`.
    pub to: String,
}

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadQuestion {
    #[error("from {0:?}: expected namespace/pod, a SPIFFE ID or an IP address")]
    From(String),
    #[error("from {0}: no workload with this name is known here")]
    UnknownSource(String),
    #[error("to {0:?}: expected namespace/service, namespace/pod, a host name or an IP address, with :port")]
    To(String),
    #[error("to {0}: neither a service nor a pod with this name is known here")]
    UnknownDestination(String),
    #[error("to {0}: the service has no address of its own; ask for one of its pods: {1}")]
    Headless(String, String),
}

/// What this node knows beside the mesh.
pub trait NodeFacts {
    /// How far the node's proxy serves the pod; nothing if it does not.
    fn phase(&self, workload: &Workload) -> Option<Phase>;
    /// Whether the proxy reaches the hop's pod without a tunnel, because it serves that one too.
    fn attests(&self, source: &Workload, hop: &Hop) -> bool;
    /// Whether a workload of trust domain `own` takes peers of `theirs`.
    fn takes(&self, own: &TrustDomain, theirs: &TrustDomain) -> bool;
    /// The state of an identity's certificate; nothing if this proxy does not hold it.
    fn certificate(&self, identity: &Identity) -> Option<CertificateState>;
}

/// A certificate's state in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateState {
    pub is_usable: bool,
    pub text: String,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Explanation {
    pub from: String,
    pub to: String,
    pub outcome: Outcome,
    /// In the order in which a connection meets them.
    pub steps: Vec<Step>,
    /// Where it can end, and where not.
    pub endpoints: Vec<Endpoint>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    Allowed,
    Refused,
    /// Some endpoints would take the connection, others not.
    DependsOnTheEndpoint,
}

#[derive(Debug, Clone, Serialize)]
pub struct Step {
    pub step: &'static str,
    /// Whether a connection gets past it.
    pub passes: bool,
    pub text: String,
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Endpoint {
    pub workload: String,
    /// Where the app listens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<SocketAddr>,
    /// Why it is not a candidate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub left_out: Option<String>,
    /// What is known of its own certificate here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<String>,
    /// Nothing where no proxy judges: the endpoint is not in the mesh.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Decision>,
}

/// Answers a question.
pub fn explain(mesh: &Snapshot, facts: &impl NodeFacts, question: &Question) -> Result<Explanation, BadQuestion> {
    let source = Source::find(mesh, &question.from)?;
    let target = Target::find(mesh, &source, &question.to)?;
    let mut explanation = Explanation {
        from: source.to_string(),
        to: target.to_string(),
        outcome: Outcome::Refused,
        steps: Vec::new(),
        endpoints: Vec::new(),
    };
    let in_mesh = source.workload.as_ref().filter(|w| w.common.protocol == TunnelProtocol::Hbone);
    match in_mesh {
        Some(workload) => from_mesh(mesh, facts, workload, &source, &target, &mut explanation),
        None => from_outside(mesh, facts, &source, &target, &mut explanation),
    }
    let passes = explanation.steps.iter().all(|step| step.passes)
        && (explanation.endpoints.is_empty() || explanation.endpoints.iter().any(|e| e.left_out.is_none()));
    let candidates = || explanation.endpoints.iter().filter(|e| e.left_out.is_none());
    let allowed = |e: &Endpoint| e.policy.as_ref().is_none_or(|decision| decision.is_allowed());
    explanation.outcome = match () {
        () if !passes => Outcome::Refused,
        () if candidates().all(allowed) => Outcome::Allowed,
        () if candidates().any(allowed) => Outcome::DependsOnTheEndpoint,
        () => Outcome::Refused,
    };
    Ok(explanation)
}

fn from_mesh(
    mesh: &Snapshot,
    facts: &impl NodeFacts,
    workload: &Arc<Workload>,
    source: &Source,
    target: &Target,
    to: &mut Explanation,
) {
    let (passes, text) = match facts.phase(workload) {
        Some(Phase::Serving) => (true, "captured here; the proxy serves the pod".to_owned()),
        Some(phase) => (phase < Phase::Leaving, format!("the pod is leaving the mesh ({phase:?})")),
        None => (
            true,
            format!("the proxy of node {} captures it; what that one holds is not known here", workload.place.node),
        ),
    };
    to.step("capture", passes, text);
    let to_itself = target.dialled.ip();
    if to_itself.is_loopback() || to_itself.is_unspecified() || workload.addresses.contains(&to_itself) {
        to.step("route", true, "the pod's own address: not captured, it stays in the pod".to_owned());
        return;
    }
    let hop = match route(mesh, workload, target.dialled, &[], |_| 0) {
        Ok(hop) => hop,
        Err(failure) => {
            to.step("route", false, failure.text.into_owned());
            to.candidates(mesh, facts, workload, target, None, source);
            return;
        }
    };
    let (is_hbone, text) = match &hop.kind {
        HopKind::Tcp(address) => (false, format!("{address} in the clear: {}", why_clear(&hop))),
        HopKind::Hbone { tunnel, authority, expected } => {
            let names: Vec<_> = expected.iter().map(ToString::to_string).collect();
            let names = names.join(" or ");
            let text = match facts.attests(workload, &hop) {
                true => format!("{authority} on this node, without a tunnel; the kernel attests that it is {names}"),
                false => format!("HBONE to {tunnel}, CONNECT {authority}; the peer must be {names}"),
            };
            (true, text)
        }
    };
    to.step("route", true, text);
    if !is_hbone {
        to.endpoint_of(mesh, facts, &hop, None, source);
        return;
    }
    let identity = workload.identity();
    match facts.certificate(&identity) {
        Some(state) => to.step("identity", state.is_usable, format!("{identity}: {}", state.text)),
        None => to.step("identity", true, format!("{identity}: its certificate is not held here")),
    }
    let authority = match &hop.kind {
        HopKind::Hbone { authority, .. } => *authority,
        HopKind::Tcp(address) => *address,
    };
    if authority == target.dialled && hop.service.is_some() {
        let name = hop.workload.as_ref().map_or("", |w| w.name());
        to.step("waypoint", true, format!("{name} stands before the service and decides what follows"));
        to.endpoint_of(mesh, facts, &hop, Some(&identity), source);
    } else if hop.service.is_some() {
        to.candidates(mesh, facts, workload, target, Some(&identity), source);
    } else {
        to.endpoint_of(mesh, facts, &hop, Some(&identity), source);
    }
}

/// The client is not in the mesh: nothing of ours is on its side.
fn from_outside(mesh: &Snapshot, facts: &impl NodeFacts, source: &Source, target: &Target, to: &mut Explanation) {
    let identity = match &source.workload {
        None if source.identity.is_some() => source.identity.as_ref(),
        _ => None,
    };
    let text = match (&source.workload, identity) {
        (_, Some(identity)) => {
            format!("no workload with this identity is known; somebody shows {identity}")
        }
        (Some(workload), None) => format!("{} is not in the mesh: its connections come in the clear", workload.name()),
        (None, None) => "no workload has this address: its connections come in the clear".to_owned(),
    };
    to.step("source", true, text);
    match (&target.service, &target.workload) {
        (Some(service), _) => {
            let members = mesh.members(service);
            to.step("route", true, format!("the cluster chooses one of {} endpoints", members.len()));
            for member in members {
                let port = target_port(service, member, target.dialled.port());
                let address = member.addresses.first().zip(port).map(|(ip, port)| SocketAddr::new(*ip, port));
                to.endpoints.push(endpoint(mesh, facts, member, address, identity, source));
            }
        }
        (None, Some(workload)) => {
            to.endpoints.push(endpoint(mesh, facts, workload, Some(target.dialled), identity, source));
        }
        (None, None) => {
            to.step("route", true, "the destination is not known here: not a connection of the mesh".into())
        }
    }
}

fn target_port(service: &Service, member: &Workload, port: u16) -> Option<u16> {
    let share = member.services.iter().find(|s| s.service == service.key)?;
    let own = share.ports.iter().find(|(p, _)| *p == port).map(|(_, target)| *target);
    let general = service.ports.iter().find(|p| p.service_port == port).map(|p| p.target_port);
    own.filter(|p| *p != 0).or(general).filter(|p| *p != 0)
}

fn why_clear(hop: &Hop) -> &'static str {
    match &hop.workload {
        Some(_) => "the destination is not in the mesh",
        None => "nothing is known at this address, so it lies outside of the mesh",
    }
}

/// What the proxy of an endpoint would say.
fn endpoint(
    mesh: &Snapshot,
    facts: &impl NodeFacts,
    workload: &Workload,
    address: Option<SocketAddr>,
    identity: Option<&Identity>,
    source: &Source,
) -> Endpoint {
    let in_mesh = address.filter(|_| workload.common.protocol == TunnelProtocol::Hbone);
    let taken = in_mesh.map(|address| address.port()).filter(|port| ILLEGAL_PORTS.contains(port));
    let judged = in_mesh.map(|destination| {
        let source = source.address_for(destination.ip());
        let connection = Connection { identity: identity.cloned(), source, destination };
        evaluate(&policies_of(mesh, workload), &connection)
    });
    let certificate = facts.certificate(&workload.identity());
    // Only a connection with an identity meets trust.
    let stranger =
        identity.filter(|i| in_mesh.is_some() && !facts.takes(&workload.common.trust_domain, i.trust_domain()));
    let without = certificate.as_ref().filter(|state| in_mesh.is_some() && identity.is_some() && !state.is_usable);
    let left_out = taken
        .map(|port| format!("port {port} is the proxy's own"))
        .or_else(|| stranger.map(|i| format!("it takes no peers of trust domain {}", i.trust_domain())))
        .or_else(|| without.map(|_| "its certificate cannot be used".to_owned()));
    Endpoint {
        workload: format!("{}/{}", workload.common.namespace, workload.name()),
        address,
        left_out,
        certificate: certificate.map(|state| state.text),
        policy: judged,
    }
}

fn policies_of(mesh: &Snapshot, workload: &Workload) -> Arc<PolicySet> {
    match mesh.local(&workload.common.namespace, workload.name(), &workload.common.service_account) {
        Some(local) => local.policies.clone(),
        None => Arc::new(mesh.policies().applying(&workload.common.namespace, &workload.common.policies)),
    }
}

impl Explanation {
    fn step(&mut self, step: &'static str, passes: bool, text: String) {
        self.steps.push(Step { step, passes, text });
    }

    /// All members of the service that was addressed.
    fn candidates(
        &mut self,
        mesh: &Snapshot,
        facts: &impl NodeFacts,
        client: &Workload,
        target: &Target,
        identity: Option<&Identity>,
        source: &Source,
    ) {
        let Some(service) = &target.service else { return };
        let (port, dialled) = (target.dialled.port(), target.dialled.ip());
        let request = Request { service, port, source: client, dialled, tried: &[] };
        // What hinders all of them, such as an unknown port, is the route's failure.
        for (workload, fit) in mesh.candidates(&request).unwrap_or_default() {
            let is_in_mesh = workload.common.protocol == TunnelProtocol::Hbone;
            let identity = identity.filter(|_| is_in_mesh);
            let mut endpoint = endpoint(mesh, facts, &workload, fit.as_ref().ok().copied(), identity, source);
            endpoint.left_out = fit.err().map(|reason| reason.to_string()).or(endpoint.left_out);
            self.endpoints.push(endpoint);
        }
    }

    /// The one workload that a hop leads to.
    fn endpoint_of(
        &mut self,
        mesh: &Snapshot,
        facts: &impl NodeFacts,
        hop: &Hop,
        identity: Option<&Identity>,
        source: &Source,
    ) {
        let Some(workload) = &hop.workload else { return };
        let address = match &hop.kind {
            HopKind::Tcp(address) | HopKind::Hbone { authority: address, .. } => *address,
        };
        self.endpoints.push(endpoint(mesh, facts, workload, Some(address), identity, source));
    }
}

/// The client.
struct Source {
    workload: Option<Arc<Workload>>,
    identity: Option<Identity>,
    address: Option<IpAddr>,
}

impl Source {
    fn find(mesh: &Snapshot, text: &str) -> Result<Self, BadQuestion> {
        if text.starts_with("spiffe://") {
            let identity: Identity = text.parse().map_err(|_| BadQuestion::From(text.to_owned()))?;
            let workload = mesh.workloads().filter(|w| w.identity() == identity).min_by_key(|w| &w.uid).cloned();
            return Ok(Self { workload, identity: Some(identity), address: None });
        }
        if let Ok(address) = text.parse::<IpAddr>() {
            return Ok(Self { workload: at(mesh, address), identity: None, address: Some(address) });
        }
        let (namespace, name) = text.split_once('/').ok_or_else(|| BadQuestion::From(text.to_owned()))?;
        let workload = named(mesh, namespace, name).ok_or_else(|| BadQuestion::UnknownSource(text.to_owned()))?;
        Ok(Self { workload: Some(workload), identity: None, address: None })
    }

    fn namespace(&self) -> &str {
        self.workload.as_ref().map_or("", |w| &w.common.namespace)
    }

    /// The client's address towards a destination.
    fn address_for(&self, destination: IpAddr) -> IpAddr {
        let own = self.workload.iter().flat_map(|w| &w.addresses);
        let same_family = own.copied().find(|ip| ip.is_ipv4() == destination.is_ipv4());
        self.address.or(same_family).unwrap_or(Ipv4Addr::UNSPECIFIED.into())
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.workload, &self.identity, self.address) {
            (Some(workload), _, _) => {
                write!(
                    f,
                    "{}/{} on node {}, {}",
                    workload.common.namespace,
                    workload.name(),
                    workload.place.node,
                    workload.identity()
                )
            }
            (None, Some(identity), _) => write!(f, "{identity}"),
            (None, None, Some(address)) => write!(f, "{address}"),
            (None, None, None) => Ok(()),
        }
    }
}

/// What is dialled.
struct Target {
    dialled: SocketAddr,
    service: Option<Arc<Service>>,
    workload: Option<Arc<Workload>>,
}

impl Target {
    fn find(mesh: &Snapshot, source: &Source, text: &str) -> Result<Self, BadQuestion> {
        let bad = || BadQuestion::To(text.to_owned());
        if let Ok(dialled) = text.parse::<SocketAddr>() {
            return Ok(Self::at(mesh, source, dialled));
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(bad)?;
        let port: u16 = port.parse().ok().filter(|port| *port != 0).ok_or_else(bad)?;
        let unknown = || BadQuestion::UnknownDestination(host.to_owned());
        let service = match host.split_once('/') {
            Some((namespace, name)) => mesh.services().find(|s| {
                *s.namespace == *namespace && (*s.hostname == *name || s.hostname.split('.').next() == Some(name))
            }),
            None => mesh.service_by_host(source.namespace(), host),
        };
        if let Some(service) = service {
            let vip = service.vips.iter().min_by_key(|vip| !vip.address.is_ipv4());
            let Some(vip) = vip else {
                let members = mesh.members(service).iter().take(SHOWN);
                let members: Vec<_> = members.map(|w| format!("{}/{}", w.common.namespace, w.name())).collect();
                return Err(BadQuestion::Headless(host.to_owned(), members.join(", ")));
            };
            let dialled = SocketAddr::new(vip.address, port);
            return Ok(Self { dialled, service: Some(service.clone()), workload: None });
        }
        let (namespace, name) = host.split_once('/').ok_or_else(unknown)?;
        let workload = named(mesh, namespace, name).ok_or_else(unknown)?;
        let ip = workload.addresses.first().copied().ok_or_else(unknown)?;
        Ok(Self { dialled: SocketAddr::new(ip, port), service: None, workload: Some(workload) })
    }

    fn at(mesh: &Snapshot, source: &Source, dialled: SocketAddr) -> Self {
        let dialled = SocketAddr::new(dialled.ip().to_canonical(), dialled.port());
        let network = source.workload.as_ref().map(|w| w.place.network.clone()).unwrap_or_default();
        let address = NetworkAddress { network, address: dialled.ip() };
        let service = mesh.service_at(source.namespace(), &address).cloned();
        let workload = if service.is_none() { mesh.workload_at(&address).cloned() } else { None };
        Self { dialled, service, workload }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.service, &self.workload) {
            (Some(service), _) => write!(f, "service {} at {}", service.key, self.dialled),
            (None, Some(workload)) => {
                write!(f, "pod {}/{} at {}", workload.common.namespace, workload.name(), self.dialled)
            }
            (None, None) => write!(f, "{}", self.dialled),
        }
    }
}

fn named(mesh: &Snapshot, namespace: &str, name: &str) -> Option<Arc<Workload>> {
    mesh.workloads().find(|w| *w.common.namespace == *namespace && *w.name() == *name).cloned()
}

fn at(mesh: &Snapshot, address: IpAddr) -> Option<Arc<Workload>> {
    let address = address.to_canonical();
    mesh.workloads().find(|w| !w.common.host_network && w.addresses.contains(&address)).cloned()
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = match self.outcome {
            Outcome::Allowed => "allowed",
            Outcome::Refused => "refused",
            Outcome::DependsOnTheEndpoint => "depends on the endpoint",
        };
        writeln!(f, "from:    {}\nto:      {}\noutcome: {outcome}\n", self.from, self.to)?;
        for Step { step, passes, text } in &self.steps {
            writeln!(f, "{} {step:<10} {text}", if *passes { "ok    " } else { "FAILS " })?;
        }
        for endpoint in &self.endpoints {
            let mut line = format!("       endpoint   {}", endpoint.workload);
            if let Some(address) = endpoint.address {
                let _ = write!(line, " at {address}");
            }
            if let Some(reason) = &endpoint.left_out {
                let _ = write!(line, ": left out, {reason}");
            }
            if let Some(certificate) = &endpoint.certificate {
                let _ = write!(line, " ({certificate})");
            }
            writeln!(f, "{line}")?;
            let Some(decision) = endpoint.policy.as_ref().filter(|_| endpoint.left_out.is_none()) else { continue };
            writeln!(f, "{} policy     {}", if decision.is_allowed() { "ok    " } else { "FAILS " }, decision.verdict)?;
            if let Some(dry_run) = &decision.dry_run {
                writeln!(f, "       dry run    {dry_run}")?;
            }
            for rule in &decision.audited {
                writeln!(f, "       audit      {rule}")?;
            }
        }
        Ok(())
    }
}

/// Names that an error lists.
const SHOWN: usize = 5;

pub mod running;
#[cfg(test)]
mod tests;

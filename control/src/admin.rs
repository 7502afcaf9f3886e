//! The pages for operators: metrics, health, what is served, what is wrong.
//!
//! Must never show a key, nor tell the layout of the mesh to another machine: what is served is shown to this one alone.

use std::io::{self, Write};
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::watch;
use tonic::codegen::http::StatusCode;
use ztunnel::kubernetes::Health;
use ztunnel::lifecycle::Shutdown;
use ztunnel::manifests::{Objects, SecurityKind};
use ztunnel::proto::workload as wire;
use ztunnel::telemetry::http::{Chunks, Request, Response, Router};
use ztunnel::telemetry::metrics::Metrics;

use crate::ca::Ca;
use crate::model::{Decoded, Resource, Set, Snapshot};
use crate::policy;

/// What says whether nodes can be answered.
pub struct Readiness {
    pub shutdown: Shutdown,
    /// The first objects are known, and what is served of them.
    pub known: watch::Receiver<bool>,
    /// Of the API server, where it is the source.
    pub health: Option<Arc<Health>>,
}

impl Readiness {
    /// With what is not as it should be, which need not be in the way.
    fn page(&self) -> Response {
        let detail = self.health.as_ref().map(|health| health.detail()).unwrap_or_default();
        match self.shutdown.is_ordered() {
            Some(why) => Response::text(StatusCode::SERVICE_UNAVAILABLE, format!("stopping: {why}\n")),
            None if *self.known.borrow() => Response::text(StatusCode::OK, format!("ready\n{detail}")),
            None => Response::text(StatusCode::SERVICE_UNAVAILABLE, format!("the cluster is not known yet\n{detail}")),
        }
    }
}

/// All pages.
pub fn pages(
    metrics: &Arc<Metrics>,
    ca: Arc<Ca>,
    snapshots: watch::Receiver<Snapshot>,
    objects: watch::Receiver<Arc<Objects>>,
    readiness: Readiness,
) -> Router {
    let ready = move |_: &Request| readiness.page();
    let of = snapshots.clone();
    let problems = move |_: &Request| Response::json(&problems(&objects.borrow(), &of.borrow()));
    let of = snapshots.clone();
    let policies = move |request: &Request| {
        let snapshot = of.borrow().clone();
        to_this_machine(request, move |out| write_policies(&snapshot, out))
    };
    let served = move |request: &Request| {
        let snapshot = snapshots.borrow().clone();
        to_this_machine(request, move |out| write_served(&snapshot, out))
    };
    // Certificates are public.
    let authority = move |_: &Request| Response::json(&ca.report());
    metrics
        .pages(Router::new())
        .get("/healthz", |_| Response::text(StatusCode::OK, "ok\n"))
        .get("/readyz", ready)
        .get("/debug/ca", authority)
        .get("/debug/problems", problems)
        .get("/debug/policies", policies)
        .get("/debug/resources", served)
}

fn to_this_machine(request: &Request, write: impl FnOnce(&mut Chunks) -> io::Result<()> + Send + 'static) -> Response {
    if !request.peer().ip().to_canonical().is_loopback() {
        let text = "only shown to this machine: ask 127.0.0.1 or [::1], for example through a port forward\n";
        return Response::text(StatusCode::FORBIDDEN, text);
    }
    Response::stream("application/json", write)
}

fn problems(objects: &Objects, snapshot: &Snapshot) -> Value {
    let files = objects.problems().iter().map(|p| {
        json!({
            "file": p.file.display().to_string(), "line": p.line,
            "object": p.object.as_ref().map(ToString::to_string), "reason": p.reason,
        })
    });
    let of_objects =
        snapshot.problems.iter().map(|(object, reason)| json!({"object": object.to_string(), "reason": &**reason}));
    Value::Array(files.chain(of_objects).collect())
}

/// One resource at a time, so that a large mesh costs no memory.
fn write_served(snapshot: &Snapshot, out: &mut Chunks) -> io::Result<()> {
    write!(out, "{{\n\"generation\": {},\n\"resources\": [", snapshot.generation)?;
    let all = [Set::Addresses, Set::Authorizations].into_iter().flat_map(|set| snapshot.all(set));
    for (index, resource) in all.enumerate() {
        write!(out, "{}\n{}", if index == 0 { "" } else { "," }, describe(resource))?;
    }
    writeln!(out, "\n]\n}}")
}

/// What became of each policy, one at a time.
fn write_policies(snapshot: &Snapshot, out: &mut Chunks) -> io::Result<()> {
    write!(out, "[")?;
    for (index, (key, status)) in snapshot.policies.iter().enumerate() {
        let Some((kind, name)) = SecurityKind::of(key) else { continue };
        let value = json!({
            "kind": kind.name(), "namespace": *name.namespace, "name": *name.name, "state": status.state.label(),
            "status": **status,
        });
        write!(out, "{}\n{value}", if index == 0 { "" } else { "," })?;
    }
    writeln!(out, "\n]")
}

fn describe(resource: &Resource) -> Value {
    let mut value = match resource.decode() {
        Some(Decoded::Workload(w)) => json!({"workload": workload(&w)}),
        Some(Decoded::Service(s)) => json!({"service": service(&s)}),
        Some(Decoded::Authorization(a)) => json!({"authorization": policy::json(&a)}),
        None => json!({"broken": true}),
    };
    value["name"] = json!(*resource.name);
    value["version"] = json!(resource.version_text());
    value["aliases"] = resource.aliases.iter().map(|a| json!(**a)).collect();
    value
}

fn workload(w: &wire::Workload) -> Value {
    let services = w.services.iter().map(|(key, list)| (key.clone(), ports(&list.ports)));
    json!({
        "uid": w.uid, "name": w.name, "namespace": w.namespace, "network": w.network, "node": w.node,
        "addresses": w.addresses.iter().map(|a| address(a)).collect::<Vec<_>>(), "hostname": w.hostname,
        "capacity": w.capacity,
        "protocol": w.tunnel_protocol().as_str_name(), "nativeTunnel": w.native_tunnel,
        "status": w.status().as_str_name(), "networkMode": w.network_mode().as_str_name(),
        "trustDomain": w.trust_domain, "serviceAccount": w.service_account, "clusterId": w.cluster_id,
        "canonicalName": w.canonical_name, "canonicalRevision": w.canonical_revision, "workloadName": w.workload_name,
        "locality": w.locality.as_ref().map(|l| [&l.region, &l.zone, &l.subzone]),
        "services": services.collect::<serde_json::Map<_, _>>(), "authorizationPolicies": w.authorization_policies,
    })
}

fn service(s: &wire::Service) -> Value {
    let balancing = s.load_balancing.as_ref().map(|l| {
        json!({
            "mode": l.mode().as_str_name(), "healthPolicy": l.health_policy().as_str_name(),
            "routingPreference": l.routing_preference().map(|s| s.as_str_name()).collect::<Vec<_>>(),
        })
    });
    json!({
        "name": s.name, "namespace": s.namespace, "hostname": s.hostname,
        "addresses": s.addresses.iter().map(network_address).collect::<Vec<_>>(),
        "ports": ports(&s.ports), "ipFamilies": s.ip_families().as_str_name(), "canonical": s.canonical,
        "visibility": s.visibility().as_str_name(), "subjectAltNames": s.subject_alt_names, "loadBalancing": balancing,
    })
}

/// Service port → target port; 0 is as each workload says.
fn ports(ports: &[wire::Port]) -> Value {
    ports.iter().map(|p| (p.service_port.to_string(), json!(p.target_port))).collect::<serde_json::Map<_, _>>().into()
}

/// `network/ip`, and the length of a range.
fn network_address(a: &wire::NetworkAddress) -> String {
    let length = a.length.map_or_else(String::new, |length| format!("/{length}"));
    format!("{}/{}{length}", a.network, address(&a.address))
}

fn address(bytes: &[u8]) -> String {
    match *bytes {
        [a, b, c, d] => std::net::Ipv4Addr::new(a, b, c, d).to_string(),
        _ => <[u8; 16]>::try_from(bytes).map_or_else(|_| "?".into(), |b| std::net::Ipv6Addr::from(b).to_string()),
    }
}

//! `/config_dump`: what the proxy knows and holds, in the form that istioctl reads.
//!
//! Must never build the whole dump in memory (a mesh has 100,000 workloads), nor show a private key.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::json;

use super::connections::{LiveConnection, Telemetry};
use super::flow::Direction;
use super::http::{Response, Router};
use crate::mesh::{Service, Workload};

mod certificates;
mod model;
mod policies;

pub use certificates::{CertificateDump, CertificatesDump};
pub use model::{Endpoint, Node, Unusable};
pub use policies::{Match, Policy, ServiceAccount, TextMatch};

/// The model of the mesh as the dump goes through it; one consistent state.
pub trait Model: Send {
    /// Whose it is, and what of it has not come or cannot be used.
    fn node(&self) -> Node;
    fn workloads(&self) -> Box<dyn Iterator<Item = &Workload> + '_>;
    fn services(&self) -> Box<dyn Iterator<Item = &Service> + '_>;
    fn endpoints(&self, service: &Service) -> Vec<Endpoint>;
    fn policies(&self) -> Box<dyn Iterator<Item = Policy> + '_>;
    /// Endpoints of services that are not known (yet), by the service's key.
    fn staged(&self) -> BTreeMap<String, Vec<Endpoint>>;
}

/// A pod of the node.
#[derive(Debug, Clone)]
pub struct Pod {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    /// The agent captures it with eBPF, and not somebody else with iptables.
    pub by_ebpf: bool,
    /// Its listeners run.
    pub up: bool,
}

/// Where the parts of the dump come from; each is asked when a dump is made.
pub struct Sources {
    pub model: Box<dyn Fn() -> Box<dyn Model> + Send + Sync>,
    pub certificates: Box<dyn Fn() -> Vec<CertificatesDump> + Send + Sync>,
    pub pods: Box<dyn Fn() -> Vec<Pod> + Send + Sync>,
    pub telemetry: Arc<Telemetry>,
    /// The effective configuration.
    pub config: serde_json::Value,
}

impl Sources {
    /// The page `/config_dump`.
    pub fn page(self, router: Router) -> Router {
        let sources = Arc::new(self);
        router.get("/config_dump", move |_| {
            let sources = sources.clone();
            Response::stream("application/json", move |out| sources.write(out))
        })
    }

    /// Writes the dump piece by piece.
    pub fn write(&self, out: &mut impl io::Write) -> io::Result<()> {
        let model = (self.model)();
        serde_json::to_writer_pretty(&mut *out, &Dump { sources: self, model: &*model })?;
        out.write_all(b"\n")
    }
}

struct Dump<'a> {
    sources: &'a Sources,
    model: &'a dyn Model,
}

impl Serialize for Dump<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let model = self.model;
        let mut top = serializer.serialize_map(None)?;
        top.serialize_entry("node", &model.node())?;
        top.serialize_entry("workloads", &Seq(|| model.workloads().map(model::WorkloadDump::from)))?;
        top.serialize_entry(
            "services",
            &Seq(|| model.services().map(|service| model::ServiceDump::new(service, model.endpoints(service)))),
        )?;
        top.serialize_entry("policies", &Seq(|| model.policies()))?;
        top.serialize_entry("stagedServices", &model.staged())?;
        top.serialize_entry("staticConfig", &json!({}))?;
        top.serialize_entry("version", &version(&self.sources.config))?;
        top.serialize_entry("config", &self.sources.config)?;
        top.serialize_entry("certificates", &Seq(|| (self.sources.certificates)()))?;
        top.serialize_entry("workloadState", &self.workload_state())?;
        top.end()
    }
}

impl Dump<'_> {
    fn workload_state(&self) -> BTreeMap<String, PodDump> {
        let mut pods: BTreeMap<String, PodDump> = (self.sources.pods)()
            .into_iter()
            .map(|pod| (pod.uid.clone(), PodDump { pod, connections: vec![] }))
            .collect();
        for connection in self.sources.telemetry.connections() {
            if let Some(pod) = pods.get_mut(&*connection.flow().pod) {
                pod.connections.push(connection);
            }
        }
        pods
    }
}

/// A sequence that is made while it is written.
struct Seq<F>(F);

impl<F, I> Serialize for Seq<F>
where
    F: Fn() -> I,
    I: IntoIterator<Item: Serialize>,
{
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq((self.0)())
    }
}

struct PodDump {
    pod: Pod,
    connections: Vec<LiveConnection>,
}

impl Serialize for PodDump {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let of = |direction| self.connections.iter().filter(move |c| c.flow().direction == direction);
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("state", if self.pod.up { "Up" } else { "Pending" })?;
        map.serialize_entry(
            "info",
            &json!({
                "name": self.pod.name,
                "namespace": self.pod.namespace,
                "serviceAccount": self.pod.service_account,
                "byEbpf": self.pod.by_ebpf,
            }),
        )?;
        map.serialize_entry(
            "connections",
            &json!({
                "inbound": of(Direction::Inbound).map(inbound).collect::<Vec<_>>(),
                "outbound": of(Direction::Outbound).map(outbound).collect::<Vec<_>>(),
            }),
        )?;
        map.end()
    }
}

fn inbound(connection: &LiveConnection) -> serde_json::Value {
    let flow = connection.flow();
    json!({
        "src": flow.src,
        "originalDst": flow.service.as_ref().map(|service| &*service.hostname),
        "actualDst": flow.dst,
        "protocol": flow.protocol.as_str(),
    })
}

fn outbound(connection: &LiveConnection) -> serde_json::Value {
    let flow = connection.flow();
    json!({
        "src": flow.src,
        "originalDst": flow.original_dst.unwrap_or(flow.dst),
        "actualDst": flow.dst,
        "protocol": flow.protocol.as_str(),
    })
}

fn version(config: &serde_json::Value) -> serde_json::Value {
    let istio = config.pointer("/control/metadata/ISTIO_VERSION").and_then(|version| version.as_str());
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "gitRevision": option_env!("GIT_REVISION").unwrap_or("unknown"),
        "rustVersion": env!("RUSTC_VERSION"),
        "buildProfile": if cfg!(debug_assertions) { "debug" } else { "release" },
        "buildStatus": option_env!("BUILD_STATUS").unwrap_or("unknown"),
        "istioVersion": istio.unwrap_or("unknown"),
        "cryptoProvider": "aws-lc-rs",
    })
}

#[cfg(test)]
mod tests;

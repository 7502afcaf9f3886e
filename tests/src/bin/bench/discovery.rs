//! A discovery service of a cluster that does not exist: so many workloads behind so many services, beside the pods of
//! the testbed. It tells as `control` does, in messages of the same size, and knows when a proxy has taken what it was
//! told.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use prost::Message;
use testbed::{Outside, Pod, serve_grpc, wait_for};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use ztunnel::discovery::MORE;
use ztunnel::proto::discovery::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use ztunnel::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse, Resource};
use ztunnel::proto::workload::{self, Address, address};

const PORT: u16 = 15012;
const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
/// As `control`'s.
const MAX_MESSAGE: usize = 1_000_000;
/// Workloads with one service account, and in one namespace.
const ALIKE: usize = 10;
const NAMESPACE: usize = 500;

/// The service, on a machine of the testbed. It ends with this value.
pub struct Source {
    shared: Arc<Shared>,
    pub address: String,
    // Ends the service.
    _runtime: Runtime,
}

/// How large the cluster is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub workloads: usize,
    pub services: usize,
}

struct Shared {
    size: Mutex<Size>,
    /// The testbed's pods: their node and their records.
    own: Vec<(String, Resource)>,
    /// The latest stream of each node.
    streams: Mutex<HashMap<String, Stream>>,
}

#[derive(Clone)]
struct Stream {
    send: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    /// Messages on addresses that were sent and that were acknowledged.
    told: Arc<AtomicU64>,
    taken: Arc<AtomicU64>,
}

impl Source {
    pub fn start(place: &Outside, pods: &[&Pod], size: Size) -> Self {
        let own = pods.iter().map(|pod| (pod.node().to_owned(), resource(record_of(pod)))).collect();
        let shared = Arc::new(Shared { size: Mutex::new(size), own, streams: Mutex::default() });
        let service = AggregatedDiscoveryServiceServer::new(Service(shared.clone()));
        let runtime = serve_grpc(place, PORT, tonic::transport::Server::builder().add_service(service));
        Self { shared, address: format!("http://{}:{PORT}", place.ip4()), _runtime: runtime }
    }

    /// For streams that are opened from now on. What is known of the streams until now is forgotten.
    pub fn set_size(&self, size: Size) {
        *self.shared.size.lock().unwrap() = size;
        self.shared.streams.lock().unwrap().clear();
    }

    /// Waits until the node's proxy has taken all that it was told on its stream.
    #[track_caller]
    pub fn wait_taken(&self, node: &str) {
        wait_for(&format!("the proxy on {node} to take what it is told"), || {
            let stream = self.shared.streams.lock().unwrap().get(node)?.clone();
            let told = stream.told.load(Ordering::Acquire);
            (told > 0 && stream.taken.load(Ordering::Acquire) == told).then_some(())
        });
    }

    /// Tells a node's proxy about so many changed workloads, each in a message of its own that waits until the one
    /// before was taken.
    pub fn change(&self, node: &str, count: usize) {
        let stream = self.shared.streams.lock().unwrap().get(node).expect("the proxy has a stream").clone();
        let size = *self.shared.size.lock().unwrap();
        for change in 0..count {
            // Far apart from each other, and every one another.
            let number = change * (size.workloads / count.max(1)).max(1) % size.workloads;
            let mut record = generated_workload(number, size);
            record.status = workload::WorkloadStatus::Unhealthy.into();
            let answer = response(vec![resource(address::Type::Workload(record))], false, u64::MAX);
            let told = stream.told.fetch_add(1, Ordering::AcqRel) + 1;
            stream.send.blocking_send(Ok(answer)).expect("the stream is open");
            while stream.taken.load(Ordering::Acquire) < told {
                std::thread::yield_now();
            }
        }
    }
}

struct Service(Arc<Shared>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        // A message is made only when there is room for it: what waits here would be this process' memory.
        let (send, receive) = mpsc::channel(1);
        let stream = Stream { send, told: Arc::default(), taken: Arc::default() };
        tokio::spawn(serve(self.0.clone(), request.into_inner(), stream));
        Ok(Response::new(ReceiverStream::new(receive)))
    }
}

async fn serve(shared: Arc<Shared>, mut requests: Streaming<DeltaDiscoveryRequest>, stream: Stream) {
    let mut node = String::new();
    let mut opened: Vec<String> = Vec::new();
    while let Ok(Some(request)) = requests.message().await {
        if let Some(id) = &request.node {
            // ztunnel~<address>~<pod>.<namespace>~…, where the pod is named for its node.
            let pod = id.id.split('~').nth(2).unwrap_or_default().split('.').next().unwrap_or_default();
            node = pod.trim_start_matches("ztunnel-").to_owned();
        }
        let is_first = !opened.contains(&request.type_url);
        let is_of_addresses = request.type_url == ADDRESS;
        if is_first {
            opened.push(request.type_url.clone());
        }
        if is_first && is_of_addresses {
            shared.streams.lock().unwrap().insert(node.clone(), stream.clone());
        }
        let is_whole = request.resource_names_unsubscribe.is_empty() && request.resource_names_subscribe.is_empty();
        let done = match (is_first, is_of_addresses) {
            (true, true) if is_whole => tell_all(&shared, &stream).await,
            (true, true) => tell_names(&shared, &stream, &request, Some(&node)).await,
            (true, false) => {
                let empty =
                    DeltaDiscoveryResponse { type_url: request.type_url, nonce: "0".into(), ..Default::default() };
                stream.send.send(Ok(empty)).await.is_ok()
            }
            (false, true) if !request.response_nonce.is_empty() => {
                assert!(request.error_detail.is_none(), "the proxy refused a record: {:?}", request.error_detail);
                stream.taken.fetch_add(1, Ordering::AcqRel);
                true
            }
            (false, true) if !request.resource_names_subscribe.is_empty() => {
                tell_names(&shared, &stream, &request, None).await
            }
            (false, _) => true,
        };
        if !done {
            return;
        }
    }
}

impl Stream {
    /// Is the stream still open?
    async fn tell(&self, answer: DeltaDiscoveryResponse) -> bool {
        self.told.fetch_add(1, Ordering::AcqRel);
        self.send.send(Ok(answer)).await.is_ok()
    }
}

/// Everything, as to a proxy that wants the whole mesh.
async fn tell_all(shared: &Shared, stream: &Stream) -> bool {
    let size = *shared.size.lock().unwrap();
    let services = (0..size.services).map(|number| address::Type::Service(generated_service(number)));
    let workloads = (0..size.workloads).map(|number| address::Type::Workload(generated_workload(number, size)));
    let generated = services.chain(workloads).map(resource);
    let all = shared.own.iter().map(|(_, own)| own.clone()).chain(generated);
    let (mut part, mut bytes, mut nonce) = (Vec::new(), 0, 0);
    // The last message, counted beforehand, so that nobody thinks that an earlier one was the last.
    stream.told.fetch_add(1, Ordering::AcqRel);
    for resource in all {
        bytes += resource.encoded_len();
        part.push(resource);
        if bytes > MAX_MESSAGE {
            nonce += 1;
            if !stream.tell(response(std::mem::take(&mut part), true, nonce)).await {
                return false;
            }
            bytes = 0;
        }
    }
    stream.send.send(Ok(response(part, false, nonce + 1))).await.is_ok()
}

/// What the names stand for, and the pods of the node if it has just come.
async fn tell_names(shared: &Shared, stream: &Stream, request: &DeltaDiscoveryRequest, node: Option<&str>) -> bool {
    let names = || request.resource_names_subscribe.iter().filter(|name| *name != "*");
    let is_named = |own: &Resource| names().any(|name| *name == own.name || own.aliases.contains(name));
    let wanted: Vec<Resource> =
        shared.own.iter().filter(|(at, own)| node == Some(at) || is_named(own)).map(|(_, own)| own.clone()).collect();
    let found = |name: &&String| wanted.iter().any(|own| own.name == **name || own.aliases.contains(name));
    let removed_resources = names().filter(|name| !found(name)).cloned().collect();
    let answer = DeltaDiscoveryResponse { removed_resources, ..response(wanted, false, 1) };
    stream.tell(answer).await
}

/// A hash of the content, as long as `control`'s.
fn version(content: &[u8]) -> String {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

fn response(resources: Vec<Resource>, goes_on: bool, nonce: u64) -> DeltaDiscoveryResponse {
    DeltaDiscoveryResponse {
        system_version_info: if goes_on { MORE.to_owned() } else { String::new() },
        resources,
        type_url: ADDRESS.to_owned(),
        nonce: nonce.to_string(),
        ..Default::default()
    }
}

fn resource(of: address::Type) -> Resource {
    let (name, addresses) = match &of {
        address::Type::Workload(workload) => (workload.uid.clone(), workload.addresses.clone()),
        address::Type::Service(service) => {
            let addresses = service.addresses.iter().map(|at| at.address.clone()).collect();
            (format!("{}/{}", service.namespace, service.hostname), addresses)
        }
    };
    let alias = |bytes: &bytes::Bytes| match bytes.len() {
        4 => Some(format!("/{}", Ipv4Addr::from(<[u8; 4]>::try_from(bytes.as_ref()).ok()?))),
        _ => Some(format!("/{}", IpAddr::from(<[u8; 16]>::try_from(bytes.as_ref()).ok()?))),
    };
    let value = Address { r#type: Some(of) }.encode_to_vec();
    Resource {
        version: version(&value),
        resource: Some(prost_types::Any { type_url: ADDRESS.to_owned(), value }),
        name,
        aliases: addresses.iter().filter_map(alias).collect(),
        ttl: None,
    }
}

/// As `control` tells of a pod of the mesh.
fn record_of(pod: &Pod) -> address::Type {
    let account = pod.identity().rsplit('/').next().unwrap_or_default().to_owned();
    let octets = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => bytes::Bytes::copy_from_slice(&ip.octets()),
        IpAddr::V6(ip) => bytes::Bytes::copy_from_slice(&ip.octets()),
    };
    address::Type::Workload(workload::Workload {
        uid: format!("Kubernetes//Pod/{}/{}", pod.namespace(), pod.pod_name()),
        name: pod.pod_name().to_owned(),
        namespace: pod.namespace().to_owned(),
        addresses: vec![octets(pod.ip()), octets(pod.ip6())],
        service_account: account,
        node: pod.node().to_owned(),
        ..common()
    })
}

/// One of a Deployment's pods, behind one service.
fn generated_workload(number: usize, size: Size) -> workload::Workload {
    let deployment = number / ALIKE;
    let name = format!("app-{deployment}");
    let port = workload::Port { service_port: 80, target_port: 8080, ..Default::default() };
    let services = if size.services == 0 {
        BTreeMap::new()
    } else {
        let service = generated_service(number % size.services);
        let key = format!("{}/{}", service.namespace, service.hostname);
        BTreeMap::from([(key, workload::PortList { ports: vec![port] })])
    };
    let pod = format!("{name}-{:08x}-{:05x}", deployment.wrapping_mul(2_654_435_761) as u32, number);
    let namespace = format!("team-{}", number / NAMESPACE);
    workload::Workload {
        uid: format!("Kubernetes//Pod/{namespace}/{pod}"),
        name: pod,
        namespace,
        addresses: vec![generated_address(Ipv4Addr::new(100, 64, 0, 0), number)],
        service_account: name.clone(),
        node: format!("worker-{}", number / 50),
        canonical_name: name.clone(),
        workload_name: name,
        services,
        locality: Some(workload::Locality {
            region: "region1".into(),
            zone: format!("zone{}", number % 3),
            ..Default::default()
        }),
        ..common()
    }
}

fn common() -> workload::Workload {
    workload::Workload {
        tunnel_protocol: workload::TunnelProtocol::Hbone.into(),
        trust_domain: "cluster.local".into(),
        canonical_revision: "latest".into(),
        workload_type: workload::WorkloadType::Pod.into(),
        cluster_id: "Kubernetes".into(),
        ..Default::default()
    }
}

fn generated_service(number: usize) -> workload::Service {
    let (name, namespace) = (format!("app-{number}"), format!("team-{}", number * ALIKE / NAMESPACE));
    let hostname = format!("{name}.{namespace}.svc.cluster.local");
    workload::Service {
        name,
        namespace,
        hostname,
        addresses: vec![workload::NetworkAddress {
            address: generated_address(Ipv4Addr::new(100, 96, 0, 0), number),
            ..Default::default()
        }],
        ports: vec![workload::Port { service_port: 80, target_port: 8080, ..Default::default() }],
        ..Default::default()
    }
}

fn generated_address(base: Ipv4Addr, number: usize) -> bytes::Bytes {
    bytes::Bytes::copy_from_slice(&(u32::from(base) + number as u32).to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_workload_is_another_and_stands_behind_a_service_that_exists() {
        let size = Size { workloads: 2000, services: 200 };
        let workloads: BTreeMap<String, workload::Workload> =
            (0..size.workloads).map(|n| generated_workload(n, size)).map(|w| (w.uid.clone(), w)).collect();
        assert_eq!(workloads.len(), size.workloads);
        let services: Vec<String> =
            (0..size.services).map(generated_service).map(|s| format!("{}/{}", s.namespace, s.hostname)).collect();
        assert!(workloads.values().flat_map(|w| w.services.keys()).all(|service| services.contains(service)));
        let named = resource(address::Type::Workload(generated_workload(7, size)));
        assert_eq!(named.aliases, ["/100.64.0.7"]);
    }
}

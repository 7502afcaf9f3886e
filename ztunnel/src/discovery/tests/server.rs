//! A discovery server whose every word the test puts into its mouth.

use std::sync::atomic::{AtomicBool, Ordering};

use prost::Message;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Streaming};

use super::*;
use crate::identity::testing::{TestCa, serve_tls};
use crate::proto::discovery::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use crate::proto::discovery::{DeltaDiscoveryResponse, Resource as WireResource};
use crate::proto::trust::Bundle;
use crate::proto::{security, workload};

pub struct Server {
    address: SocketAddr,
    streams: mpsc::Receiver<Stream>,
    ca: Option<TestCa>,
}

/// One stream that the proxy has opened.
pub struct Stream {
    requests: mpsc::Receiver<DeltaDiscoveryRequest>,
    responses: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    pub token: Option<String>,
    /// The requests that opened it.
    pub first: Vec<DeltaDiscoveryRequest>,
    nonce: u64,
}

#[derive(Clone)]
pub struct Resource {
    pub name: String,
    pub version: String,
    pub aliases: Vec<String>,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Workload(Box<workload::Workload>),
    Service(Box<workload::Service>),
    Policy(security::Authorization),
    Garbage,
}

struct Service(mpsc::Sender<Stream>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type DeltaAggregatedResourcesStream = ReceiverStream<Result<DeltaDiscoveryResponse, Status>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let token = request.metadata().get("authorization").map(|v| v.to_str().unwrap().to_owned());
        let mut incoming = request.into_inner();
        let (send_request, requests) = mpsc::channel(64);
        let (responses, outgoing) = mpsc::channel(64);
        let _ = self.0.send(Stream { requests, responses, token, first: Vec::new(), nonce: 0 }).await;
        tokio::spawn(async move {
            while let Ok(Some(request)) = incoming.message().await {
                if send_request.send(request).await.is_err() {
                    return;
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

impl Server {
    pub async fn start() -> Self {
        Self::start_with(tonic::transport::Server::builder()).await
    }

    pub async fn start_with(mut builder: tonic::transport::Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (send, streams) = mpsc::channel(64);
        let server = builder
            .add_service(AggregatedDiscoveryServiceServer::new(Service(send)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(server);
        Self { address, streams, ca: None }
    }

    pub async fn start_tls() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let ca = TestCa::new("control plane");
        let (send, streams) = mpsc::channel(64);
        let server = tonic::transport::Server::builder()
            .add_service(AggregatedDiscoveryServiceServer::new(Service(send)))
            .serve_with_incoming(serve_tls(listener, &ca, "127.0.0.1"));
        tokio::spawn(server);
        Self { address, streams, ca: Some(ca) }
    }

    pub fn root_pem(&self) -> String {
        self.ca.as_ref().unwrap().root_pem()
    }

    pub fn control_plane(&self) -> ControlPlane {
        let scheme = if self.ca.is_some() { "https" } else { "http" };
        control_plane(scheme, self.address)
    }

    /// The next stream that the proxy opens.
    pub async fn stream(&mut self) -> Stream {
        timeout(SOON, self.streams.recv()).await.expect("a stream").unwrap()
    }

    /// A link to this server that can be made to drop everything.
    pub async fn through_link(&self) -> Link {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let link = Link { address: listener.local_addr().unwrap(), frozen: Arc::default() };
        let (server, frozen) = (self.address, link.frozen.clone());
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let far = TcpStream::connect(server).await.unwrap();
                let (near_read, near_write) = near.into_split();
                let (far_read, far_write) = far.into_split();
                // A frozen connection stays so, whatever comes after.
                let dead = Arc::new(AtomicBool::new(false));
                tokio::spawn(carry(near_read, far_write, frozen.clone(), dead.clone()));
                tokio::spawn(carry(far_read, near_write, frozen.clone(), dead));
            }
        });
        link
    }
}

pub struct Link {
    address: SocketAddr,
    frozen: Arc<AtomicBool>,
}

impl Link {
    pub fn control_plane(&self) -> ControlPlane {
        control_plane("http", self.address)
    }

    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::SeqCst);
    }

    pub fn mend(&self) {
        self.frozen.store(false, Ordering::SeqCst);
    }
}

async fn carry(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    frozen: Arc<AtomicBool>,
    dead: Arc<AtomicBool>,
) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        if frozen.load(Ordering::SeqCst) {
            dead.store(true, Ordering::SeqCst);
        }
        if !dead.load(Ordering::SeqCst) && to.write_all(&buffer[..n]).await.is_err() {
            return;
        }
    }
}

fn control_plane(scheme: &str, address: SocketAddr) -> ControlPlane {
    ControlPlane {
        setting: "XDS_ADDRESS",
        roots_setting: "XDS_ROOT_CA",
        address: format!("{scheme}://{address}").parse().unwrap(),
        roots: RootSource::System,
        alternate_name: None,
        token: Some(TokenSource::Literal("token".into())),
        cluster_id: "Kubernetes".into(),
        headers: Vec::new(),
    }
}

impl Stream {
    pub async fn request(&mut self) -> DeltaDiscoveryRequest {
        timeout(SOON, self.requests.recv()).await.expect("a request").expect("an open stream")
    }

    /// The next request is an acknowledgement.
    pub async fn acked(&mut self) {
        let request = self.request().await;
        assert_eq!((request.response_nonce, request.error_detail), (self.nonce.to_string(), None));
    }

    /// Answers both types, together, for a proxy that holds something changes it in one step: the next requests are
    /// their acknowledgements.
    pub async fn answer(&mut self, addresses: Vec<Resource>, policies: Vec<Resource>) {
        let nonces =
            [self.send(Kind::Address, addresses, &[]).await, self.send(Kind::Authorization, policies, &[]).await];
        for nonce in nonces {
            let request = self.request().await;
            assert_eq!((request.response_nonce, request.error_detail), (nonce, None));
        }
    }

    pub async fn is_silent(&mut self) -> bool {
        timeout(WHILE, self.requests.recv()).await.is_err()
    }

    /// Sends a response; its nonce.
    pub async fn send(&mut self, kind: Kind, resources: Vec<Resource>, removed: &[&str]) -> String {
        self.send_part(kind, resources, removed, false).await
    }

    /// The same of an answer that may go on in the next one.
    pub async fn send_part(&mut self, kind: Kind, resources: Vec<Resource>, removed: &[&str], more: bool) -> String {
        self.nonce += 1;
        let mut response = response(kind, resources, removed, self.nonce);
        if more {
            response.system_version_info = MORE.into();
        }
        self.responses.send(Ok(response)).await.unwrap();
        self.nonce.to_string()
    }

    /// Announces roots, and which one signs.
    pub async fn announce(&mut self, roots: &[&[u8]], signs: &[u8], renew_within_ms: u64) -> String {
        self.nonce += 1;
        let bundle =
            Bundle { roots: roots.iter().map(|r| r.to_vec()).collect(), renew_within_ms, signs: signs.to_vec() };
        let content = prost_types::Any { type_url: BUNDLE.into(), value: bundle.encode_to_vec() };
        let resource =
            WireResource { name: "cluster.local".into(), resource: Some(content), ..WireResource::default() };
        let response = DeltaDiscoveryResponse {
            resources: vec![resource],
            type_url: BUNDLE.into(),
            nonce: self.nonce.to_string(),
            ..DeltaDiscoveryResponse::default()
        };
        self.responses.send(Ok(response)).await.unwrap();
        self.nonce.to_string()
    }

    pub async fn end(self, how: Result<(), Status>) {
        if let Err(status) = how {
            let _ = self.responses.send(Err(status)).await;
        }
    }
}

impl Resource {
    pub fn garbage(name: &str) -> Self {
        Self { name: name.into(), version: "1".into(), aliases: Vec::new(), content: Content::Garbage }
    }

    pub fn workload_mut(&mut self) -> &mut workload::Workload {
        match &mut self.content {
            Content::Workload(workload) => workload,
            _ => panic!("not a workload"),
        }
    }

    fn policy_mut(&mut self) -> &mut security::Authorization {
        match &mut self.content {
            Content::Policy(policy) => policy,
            _ => panic!("not a policy"),
        }
    }

    /// A policy of the workloads that name it.
    pub fn selected(mut self) -> Self {
        self.policy_mut().scope = security::Scope::WorkloadSelector as i32;
        self
    }

    /// A policy of its namespace.
    pub fn of_namespace(mut self) -> Self {
        self.policy_mut().scope = security::Scope::Namespace as i32;
        self
    }

    /// A policy with a rule on a port.
    pub fn with_port(mut self, port: u32) -> Self {
        let one = security::Match { destination_ports: vec![port], ..Default::default() };
        let clauses = vec![security::Clause { matches: vec![one] }];
        self.policy_mut().rules.push(security::Rule { clauses });
        self
    }

    pub fn alias(mut self, alias: &str) -> Self {
        self.aliases.push(alias.into());
        self
    }

    fn encode(&self) -> Vec<u8> {
        use workload::address::Type;
        let address = |r#type| workload::Address { r#type: Some(r#type) }.encode_to_vec();
        match &self.content {
            Content::Workload(workload) => address(Type::Workload((**workload).clone())),
            Content::Service(service) => address(Type::Service((**service).clone())),
            Content::Policy(policy) => policy.encode_to_vec(),
            Content::Garbage => vec![0xff; 7],
        }
    }
}

fn response(kind: Kind, resources: Vec<Resource>, removed: &[&str], nonce: u64) -> DeltaDiscoveryResponse {
    let wire = |r: Resource| WireResource {
        version: r.version.clone(),
        resource: Some(prost_types::Any { type_url: kind.url().into(), value: r.encode() }),
        name: r.name,
        aliases: r.aliases,
        ttl: None,
    };
    DeltaDiscoveryResponse {
        system_version_info: String::new(),
        resources: resources.into_iter().map(wire).collect(),
        type_url: kind.url().into(),
        nonce: nonce.to_string(),
        removed_resources: removed.iter().map(|r| (*r).to_owned()).collect(),
    }
}

fn bytes(ip: &str) -> prost::bytes::Bytes {
    match ip.parse().unwrap() {
        IpAddr::V4(v4) => v4.octets().to_vec().into(),
        IpAddr::V6(v6) => v6.octets().to_vec().into(),
    }
}

/// A pod of the namespace `shop` with HBONE, on another node.
pub fn pod(name: &str, ip: &str) -> Resource {
    pod_of(name, ip, &[])
}

/// The same, an endpoint of services in `shop` (port 80 → 8080).
pub fn pod_of(name: &str, ip: &str, services: &[&str]) -> Resource {
    let uid = format!("Kubernetes//Pod/shop/{name}");
    let port = workload::Port { service_port: 80, target_port: 8080, app_protocol: 0 };
    let ports = workload::PortList { ports: vec![port] };
    let workload = workload::Workload {
        uid: uid.clone(),
        name: name.into(),
        namespace: "shop".into(),
        addresses: vec![bytes(ip)],
        node: "node-b".into(),
        tunnel_protocol: workload::TunnelProtocol::Hbone as i32,
        services: services.iter().map(|s| (service_key(s), ports.clone())).collect(),
        ..Default::default()
    };
    let content = Content::Workload(Box::new(workload));
    Resource { name: uid, version: "1".into(), aliases: Vec::new(), content }
}

pub fn service(name: &str, vip: &str) -> Resource {
    service_of(name, vip, None)
}

/// A service with all addresses that begin as this one does for so many bits.
pub fn service_of_range(name: &str, first: &str, length: u32) -> Resource {
    service_of(name, first, Some(length))
}

fn service_of(name: &str, vip: &str, length: Option<u32>) -> Resource {
    let address = workload::NetworkAddress { network: String::new(), address: bytes(vip), length };
    let service = workload::Service {
        name: name.into(),
        namespace: "shop".into(),
        hostname: format!("{name}.shop.svc.cluster.local"),
        addresses: vec![address],
        ports: vec![workload::Port { service_port: 80, target_port: 8080, app_protocol: 0 }],
        ..Default::default()
    };
    let content = Content::Service(Box::new(service));
    Resource { name: service_key(name), version: "1".into(), aliases: Vec::new(), content }
}

pub fn service_key(name: &str) -> String {
    format!("shop/{name}.shop.svc.cluster.local")
}

pub fn authorization(name: &str) -> Resource {
    let policy = security::Authorization { name: name.into(), namespace: "shop".into(), ..Default::default() };
    let content = Content::Policy(policy);
    Resource { name: format!("shop/{name}"), version: String::new(), aliases: Vec::new(), content }
}

//! Delta discovery: each stream is told what it asked for, and then what changes of it.
//!
//! Must never let a slow node slow another: a stream looks at the newest snapshot when it can send again, and what it
//! missed in between costs nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use ztunnel::proto::Node;
use ztunnel::proto::discovery::aggregated_discovery_service_server::AggregatedDiscoveryService;
use ztunnel::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};

use crate::model::{Resource, Set, Snapshot};
use crate::tokens::{Caller, Tokens};

/// The discovery service.
pub struct Ads {
    pub snapshots: watch::Receiver<Snapshot>,
    pub tokens: Arc<Tokens>,
    pub counters: Arc<AdsCounters>,
}

#[derive(Debug, Default)]
pub struct AdsCounters {
    pub streams: AtomicI64,
    pub responses: AtomicU64,
    pub nacks: AtomicU64,
}

type Outgoing = Pin<Box<dyn Stream<Item = Result<DeltaDiscoveryResponse, Status>> + Send>>;

#[tonic::async_trait]
impl AggregatedDiscoveryService for Ads {
    type DeltaAggregatedResourcesStream = Outgoing;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Outgoing>, Status> {
        let caller = self.tokens.caller(request.metadata()).map_err(|error| {
            tracing::warn!(reason = %error, "refused a discovery stream");
            Status::from(error)
        })?;
        let (send, queue) = mpsc::channel(QUEUE);
        let session = Session {
            caller,
            snapshots: self.snapshots.clone(),
            send,
            counters: self.counters.clone(),
            node: String::new(),
            subscriptions: BTreeMap::new(),
            nonce: 0,
        };
        tokio::spawn(session.run(request.into_inner()));
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }
}

/// One stream.
struct Session {
    caller: Caller,
    snapshots: watch::Receiver<Snapshot>,
    send: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    counters: Arc<AdsCounters>,
    /// Kubernetes name of the proxy's node; empty until the first request.
    node: String,
    subscriptions: BTreeMap<Set, Subscription>,
    nonce: u64,
}

/// What a stream wants of one type, and what it has been told.
#[derive(Default)]
struct Subscription {
    wildcard: bool,
    /// On demand: names that were asked for.
    names: BTreeSet<String>,
    /// Name → version of what the peer holds.
    sent: HashMap<Arc<str>, u64>,
    /// Asked-for names that were answered with nothing.
    absent: BTreeSet<String>,
    /// The snapshot that was sent last.
    seen: Snapshot,
}

impl Session {
    async fn run(mut self, mut requests: Streaming<DeltaDiscoveryRequest>) {
        let _open = Open::new(&self.counters);
        let mut snapshots = self.snapshots.clone();
        let mut first = true;
        loop {
            tokio::select! {
                biased;
                request = requests.message() => {
                    let request = match request {
                        Ok(Some(request)) => request,
                        Ok(None) => return,
                        Err(status) => {
                            tracing::debug!(node = self.node, reason = %status, "a discovery stream broke");
                            return;
                        }
                    };
                    if std::mem::take(&mut first)
                        && let Err(status) = self.greet(request.node.as_ref())
                    {
                        tracing::warn!(reason = %status, "refused a discovery stream");
                        let _ = self.send.send(Err(status)).await;
                        return;
                    }
                    if self.take(request).await.is_err() {
                        return;
                    }
                }
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    // A burst of changes is one.
                    tokio::time::sleep(COALESCE).await;
                    snapshots.mark_unchanged();
                    if self.push().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Checks who says to be calling against the token.
    fn greet(&mut self, node: Option<&Node>) -> Result<(), Status> {
        let node = node.ok_or_else(|| Status::invalid_argument("the first request must name the node"))?;
        let parts: Vec<&str> = node.id.split('~').collect();
        let [kind, ip, pod, domain] = parts[..] else {
            return Err(Status::invalid_argument(format!("node id {:?} does not have four parts", short(&node.id))));
        };
        if !["ztunnel", "waypoint", "agentgateway"].contains(&kind) {
            return Err(Status::invalid_argument(format!("unknown type of proxy {:?}", short(kind))));
        }
        if ip.parse::<std::net::IpAddr>().is_err() {
            return Err(Status::invalid_argument(format!("{:?} is not an address", short(ip))));
        }
        let field = |name: &str| match node.metadata.as_ref()?.fields.get(name)?.kind.as_ref()? {
            prost_types::value::Kind::StringValue(text) => Some(text.as_str()),
            _ => None,
        };
        let by_id = domain.split('.').next().unwrap_or_default();
        let namespace = field("NAMESPACE").unwrap_or(by_id);
        if namespace != self.caller.namespace {
            return Err(Status::permission_denied(format!(
                "the token is of namespace {}, the node of {:?}",
                self.caller.namespace,
                short(namespace)
            )));
        }
        self.node = field("NODE_NAME").unwrap_or_default().to_owned();
        tracing::info!(node = self.node, pod = short(pod), kind, "discovery stream is open");
        Ok(())
    }

    async fn take(&mut self, request: DeltaDiscoveryRequest) -> Result<(), ()> {
        if let Some(error) = &request.error_detail {
            self.counters.nacks.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                node = self.node,
                kind = short(&request.type_url),
                reason = error.message.chars().take(1000).collect::<String>(),
                "a proxy cannot use resources"
            );
        }
        let Some(set) = Set::from_type_url(&request.type_url) else {
            if request.response_nonce.is_empty() {
                return self.respond(request.type_url, Vec::new(), Vec::new()).await;
            }
            return Ok(());
        };
        let opens = !self.subscriptions.contains_key(&set);
        if !opens && request.resource_names_subscribe.is_empty() && request.resource_names_unsubscribe.is_empty() {
            // An acknowledgement.
            return Ok(());
        }
        let subscription = self.subscriptions.entry(set).or_default();
        let mut asked = Vec::new();
        if opens {
            for (name, version) in &request.initial_resource_versions {
                let version = u64::from_str_radix(version, 16).unwrap_or(0);
                subscription.sent.insert(name.as_str().into(), version);
            }
            subscription.wildcard = request.resource_names_subscribe.is_empty();
        }
        for name in request.resource_names_subscribe {
            if name == "*" {
                subscription.wildcard = true;
            } else if subscription.names.len() < MAX_NAMES {
                subscription.names.insert(name.clone());
                asked.push(name);
            }
        }
        for name in request.resource_names_unsubscribe {
            if name == "*" {
                subscription.wildcard = false;
            } else {
                subscription.names.remove(&name);
                subscription.absent.remove(&name);
            }
        }
        let current = self.snapshots.borrow().clone();
        if opens || subscription.wildcard {
            return self.sync(set, current, &asked, opens).await;
        }
        self.answer(set, current, &asked).await
    }

    /// Tells a stream everything of a type that it wants and does not have.
    async fn sync(&mut self, set: Set, current: Snapshot, asked: &[String], opens: bool) -> Result<(), ()> {
        let Some(subscription) = self.subscriptions.get_mut(&set) else { return Ok(()) };
        let aliases = !subscription.wildcard;
        let wanted = subscription.wanted(set, &current, &self.node);
        let mut resources = Vec::new();
        for (name, resource) in &wanted {
            if subscription.sent.get(name) != Some(&resource.version) {
                resources.push(resource.clone());
            }
        }
        let mut removed: Vec<String> =
            subscription.sent.keys().filter(|name| !wanted.contains_key(*name)).map(ToString::to_string).collect();
        removed.extend(subscription.newly_absent(set, &current, asked));
        subscription.sent = wanted.iter().map(|(name, r)| (name.clone(), r.version)).collect();
        subscription.seen = current;
        // The first answer comes also when there is nothing to tell: the proxy waits for it.
        if resources.is_empty() && removed.is_empty() && !opens {
            return Ok(());
        }
        self.send_all(set, resources, removed, aliases).await
    }

    /// On demand: answers names that were just asked for.
    async fn answer(&mut self, set: Set, current: Snapshot, asked: &[String]) -> Result<(), ()> {
        let Some(subscription) = self.subscriptions.get_mut(&set) else { return Ok(()) };
        let mut resources = Vec::new();
        for name in asked {
            for resource in related(set, &current, name) {
                subscription.sent.insert(resource.name.clone(), resource.version);
                resources.push(resource);
            }
        }
        let removed = subscription.newly_absent(set, &current, asked);
        self.send_all(set, resources, removed, true).await
    }

    /// Tells the stream what has changed of what it wants.
    async fn push(&mut self) -> Result<(), ()> {
        let current = self.snapshots.borrow().clone();
        for set in Set::ALL {
            let Some(subscription) = self.subscriptions.get_mut(&set) else { continue };
            if !subscription.wildcard {
                self.sync(set, current.clone(), &[], false).await?;
                continue;
            }
            let mut resources = Vec::new();
            let mut removed = Vec::new();
            for change in current.changes_since(&subscription.seen, set) {
                match change {
                    crate::model::Change::Put { new, .. } => {
                        subscription.sent.insert(new.name.clone(), new.version);
                        resources.push(new.clone());
                    }
                    crate::model::Change::Gone(old) => {
                        subscription.sent.remove(&old.name);
                        removed.push(old.name.to_string());
                    }
                }
            }
            subscription.seen = current.clone();
            if !resources.is_empty() || !removed.is_empty() {
                self.send_all(set, resources, removed, false).await?;
            }
        }
        Ok(())
    }

    /// Sends resources in messages of bounded size; removals go with the last.
    async fn send_all(
        &mut self,
        set: Set,
        resources: Vec<Arc<Resource>>,
        removed: Vec<String>,
        aliases: bool,
    ) -> Result<(), ()> {
        let mut part = Vec::new();
        let mut size = 0;
        for resource in resources {
            size += resource.wire_len();
            part.push(resource.to_wire(set, aliases));
            if size >= MAX_MESSAGE {
                let full = std::mem::take(&mut part);
                size = 0;
                self.respond(set.type_url().to_owned(), full, Vec::new()).await?;
            }
        }
        self.respond(set.type_url().to_owned(), part, removed).await
    }

    async fn respond(
        &mut self,
        type_url: String,
        resources: Vec<ztunnel::proto::discovery::Resource>,
        removed_resources: Vec<String>,
    ) -> Result<(), ()> {
        self.nonce += 1;
        self.counters.responses.fetch_add(1, Ordering::Relaxed);
        let response = DeltaDiscoveryResponse {
            system_version_info: String::new(),
            resources,
            type_url,
            nonce: self.nonce.to_string(),
            removed_resources,
        };
        match tokio::time::timeout(SEND_LIMIT, self.send.send(Ok(response))).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(()),
            Err(_) => {
                tracing::warn!(node = self.node, "a proxy has not read for {SEND_LIMIT:?}: its stream is ended");
                Err(())
            }
        }
    }
}

impl Subscription {
    /// What the stream should hold now.
    fn wanted(&self, set: Set, current: &Snapshot, node: &str) -> BTreeMap<Arc<str>, Arc<Resource>> {
        let named = |r: &Arc<Resource>| (r.name.clone(), r.clone());
        if self.wildcard || set == Set::Authorizations {
            return current.all(set).map(named).collect();
        }
        let mut wanted: BTreeMap<_, _> = current.on_node(node).map(named).collect();
        for name in &self.names {
            wanted.extend(related(set, current, name).iter().map(named));
        }
        wanted
    }

    /// Of the asked-for names, those that stand for nothing; and those that were told and are gone.
    fn newly_absent(&mut self, set: Set, current: &Snapshot, asked: &[String]) -> Vec<String> {
        let mut removed = Vec::new();
        for name in &self.names {
            let exists = !current.resolve(set, name).resources.is_empty();
            if exists {
                self.absent.remove(name);
            } else if self.absent.insert(name.clone()) || asked.contains(name) {
                removed.push(name.clone());
            }
        }
        removed
    }
}

/// What a name brings: what it stands for, and all workloads of a service.
fn related(set: Set, current: &Snapshot, name: &str) -> Vec<Arc<Resource>> {
    let resolved = current.resolve(set, name);
    let mut all = resolved.resources;
    for service in &resolved.services {
        all.extend(current.endpoints(service).cloned());
    }
    all
}

fn short(text: &str) -> String {
    text.chars().take(128).collect()
}

/// Counts an open stream.
struct Open(Arc<AdsCounters>);

impl Open {
    fn new(counters: &Arc<AdsCounters>) -> Self {
        counters.streams.fetch_add(1, Ordering::Relaxed);
        Self(counters.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Responses that may wait for a slow node.
const QUEUE: usize = 2;
/// Bytes of resources in one response: under gRPC's usual 4 MB.
const MAX_MESSAGE: usize = 3 << 20;
/// Names that a stream may ask for.
const MAX_NAMES: usize = 200_000;
/// Changes within this time are told together.
const COALESCE: Duration = Duration::from_millis(20);
/// A node that does not read for so long is disconnected.
const SEND_LIMIT: Duration = Duration::from_secs(60);

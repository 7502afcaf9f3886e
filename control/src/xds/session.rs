//! One stream: its requests, the changes it must hear of, and responses of bounded size.
//!
//! Must never queue for a node that does not read: while it waits, nothing is prepared for it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tonic::{Status, Streaming};
use ztunnel::discovery::MORE;
use ztunnel::lifecycle::Shutdown;
use ztunnel::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use ztunnel::telemetry::log::Hush;

use super::node::Proxy;
use super::subscription::{Answer, Subscription};
use super::trust::{BUNDLE, Trust};
use crate::metrics::{Metrics, Open};
use crate::model::{Set, Snapshot};
use crate::tokens::Caller;

pub(super) struct Session {
    caller: Caller,
    peer: Option<SocketAddr>,
    snapshots: watch::Receiver<Snapshot>,
    trust: Trust,
    /// Whether the stream wants to hear of the roots.
    hears_roots: bool,
    send: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
    metrics: Arc<Metrics>,
    nonce: u64,
    _open: Open,
}

/// Why a stream ends.
enum End {
    /// The peer closed it, or the connection is gone.
    Peer,
    /// By us, for this reason.
    Told(&'static str, Status),
    /// By us, in good order: the peer finds another replica.
    Stopping,
}

impl Session {
    pub fn new(
        caller: Caller,
        peer: Option<SocketAddr>,
        snapshots: watch::Receiver<Snapshot>,
        trust: Trust,
        send: mpsc::Sender<Result<DeltaDiscoveryResponse, Status>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let _open = metrics.stream();
        Self { caller, peer, snapshots, trust, hears_roots: false, send, metrics, nonce: 0, _open }
    }

    pub async fn run(mut self, mut requests: Streaming<DeltaDiscoveryRequest>, shutdown: Shutdown) {
        let end = tokio::select! {
            end = self.serve(&mut requests) => end,
            _ = shutdown.ordered() => End::Stopping,
        };
        let account = self.caller.account();
        let peer = self.peer.map(tracing::field::display);
        match end {
            End::Peer => tracing::debug!(account, peer, "discovery stream ended by its peer"),
            End::Stopping => tracing::debug!(account, peer, "discovery stream ended, its peer may come again"),
            End::Told(label, status) => {
                self.metrics.stream_ended(label);
                if let Some(untold) = ENDED.speak() {
                    tracing::warn!(account, peer, reason = status.message(), untold, "discovery stream ended by us");
                }
                // Who does not read does not hear this either.
                let _ = self.send.try_send(Err(status));
            }
        }
    }

    async fn serve(&mut self, requests: &mut Streaming<DeltaDiscoveryRequest>) -> End {
        let first = match tokio::time::timeout(FIRST_REQUEST, requests.message()).await {
            Ok(Ok(Some(first))) => first,
            Ok(_) => return End::Peer,
            Err(_) => {
                let text = format!("no request came within {FIRST_REQUEST:?}");
                return End::Told("silent", Status::deadline_exceeded(text));
            }
        };
        let proxy = match Proxy::check(first.node.as_ref(), &self.caller) {
            Ok(proxy) => proxy,
            Err(error) => {
                self.metrics.stream_refused(error.label());
                return End::Told(error.label(), error.into());
            }
        };
        let peer = self.peer.map(tracing::field::display);
        tracing::info!(node = proxy.node, pod = proxy.pod, kind = proxy.kind, peer, "discovery stream is open");
        let mut subscriptions = BTreeMap::new();
        let mut snapshots = self.snapshots.clone();
        let mut request = Some(first);
        loop {
            if let Some(request) = request.take()
                && let Err(end) = self.take(&proxy, &mut subscriptions, request).await
            {
                return end;
            }
            tokio::select! {
                // Changes first: a request is answered from what the stream was told last.
                biased;
                changed = snapshots.changed() => {
                    if changed.is_err() {
                        return End::Stopping;
                    }
                    let newer = snapshots.borrow_and_update().clone();
                    if let Err(end) = self.push(&proxy, &mut subscriptions, &newer).await {
                        return end;
                    }
                }
                changed = self.trust.bundles.changed(), if self.hears_roots => {
                    if changed.is_err() {
                        return End::Stopping;
                    }
                    if let Err(end) = self.announce_roots(&proxy).await {
                        return end;
                    }
                }
                next = requests.message() => match next {
                    Ok(Some(next)) => request = Some(next),
                    Ok(None) => return End::Peer,
                    Err(status) => {
                        tracing::debug!(node = proxy.node, reason = status.message(), "a discovery stream broke");
                        return End::Peer;
                    }
                },
            }
        }
    }

    async fn take(
        &mut self,
        proxy: &Proxy,
        subscriptions: &mut BTreeMap<Set, Subscription>,
        request: DeltaDiscoveryRequest,
    ) -> Result<(), End> {
        let set = Set::from_type_url(&request.type_url);
        if let Some(error) = &request.error_detail {
            let is_roots = request.type_url == BUNDLE;
            let kind = set.map_or(if is_roots { ROOTS } else { "unknown" }, Set::label);
            self.metrics.nack(kind);
            let reason: String = error.message.chars().take(MAX_REASON).collect();
            if let Some(untold) = NACKS.speak() {
                let (node, pod) = (&proxy.node, &proxy.pod);
                tracing::warn!(node, pod, kind, reason, untold, "a proxy cannot use what it was sent");
            }
        }
        if request.type_url == BUNDLE {
            return match std::mem::replace(&mut self.hears_roots, true) {
                false => self.announce_roots(proxy).await,
                true => Ok(()),
            };
        }
        let Some(set) = set else {
            // Nothing of that type is ours to give; who waits for an answer gets one.
            if request.response_nonce.is_empty() {
                let type_url = request.type_url.chars().take(MAX_REASON).collect();
                return self.respond(proxy, "unknown", type_url, Vec::new(), Vec::new(), false).await;
            }
            return Ok(());
        };
        let too_much =
            |e: super::subscription::TooMuch| End::Told("too_much", Status::resource_exhausted(e.to_string()));
        let answer = match subscriptions.get_mut(&set) {
            Some(subscription) => subscription.take(&request).map_err(too_much)?,
            None => {
                let current = self.snapshots.borrow().clone();
                let (opened, answer) = Subscription::open(set, request, &current, &proxy.node).map_err(too_much)?;
                subscriptions.insert(set, opened);
                Some(answer)
            }
        };
        match answer {
            Some(answer) => self.send_all(proxy, set, answer, false).await,
            None => Ok(()),
        }
    }

    async fn push(
        &mut self,
        proxy: &Proxy,
        subscriptions: &mut BTreeMap<Set, Subscription>,
        newer: &Snapshot,
    ) -> Result<(), End> {
        let answers = subscriptions.iter_mut().filter_map(|(set, s)| Some((*set, s.push(newer)?))).collect();
        let mut rest = in_order(answers).into_iter().peekable();
        let told = rest.peek().is_some();
        while let Some((set, answer)) = rest.next() {
            // What belongs together takes effect together: only the last message ends it.
            self.send_all(proxy, set, answer, rest.peek().is_some()).await?;
        }
        if let (true, Some(published)) = (told, newer.published) {
            self.metrics.pushed(published.elapsed());
        }
        Ok(())
    }

    async fn announce_roots(&mut self, proxy: &Proxy) -> Result<(), End> {
        let resource = self.trust.resource();
        self.respond(proxy, ROOTS, BUNDLE.to_owned(), vec![resource], Vec::new(), false).await
    }

    /// Sends an answer in messages of bounded size, each made only when there is room for it; removals go last. `more`:
    /// what follows belongs to it.
    async fn send_all(&mut self, proxy: &Proxy, set: Set, answer: Answer, more: bool) -> Result<(), End> {
        let url = || set.type_url().to_owned();
        let Answer { resources, narrowed, removed, aliases } = answer;
        let (mut part, mut size) = (Vec::new(), 0);
        for resource in resources.into_iter().chain(narrowed) {
            let len = resource.wire_len();
            if size + len > MAX_MESSAGE && !part.is_empty() {
                self.respond(proxy, set.label(), url(), std::mem::take(&mut part), Vec::new(), true).await?;
                size = 0;
            }
            size += len;
            part.push(resource.to_wire(set, aliases, |feature| proxy.features.contains(&feature)));
        }
        let mut removed = removed;
        while removed.len() > MAX_REMOVED {
            let some = removed.split_off(removed.len() - MAX_REMOVED);
            self.respond(proxy, set.label(), url(), std::mem::take(&mut part), some, true).await?;
        }
        self.respond(proxy, set.label(), url(), part, removed, more).await
    }

    async fn respond(
        &mut self,
        proxy: &Proxy,
        kind: &'static str,
        type_url: String,
        resources: Vec<ztunnel::proto::discovery::Resource>,
        removed_resources: Vec<String>,
        more: bool,
    ) -> Result<(), End> {
        self.nonce += 1;
        let started = Instant::now();
        let sent = tokio::time::timeout(SEND_LIMIT, self.send.reserve()).await;
        let permit = match sent {
            Ok(Ok(permit)) => permit,
            Ok(Err(_)) => return Err(End::Peer),
            Err(_) => {
                let text = format!("{} has not read for {:?}", proxy.pod, started.elapsed());
                return Err(End::Told("slow", Status::deadline_exceeded(text)));
            }
        };
        self.metrics.response(kind, resources.len());
        permit.send(Ok(DeltaDiscoveryResponse {
            // Free text on the wire; ours tells whether the next message belongs to this one.
            system_version_info: if more { MORE.to_owned() } else { String::new() },
            resources,
            type_url,
            nonce: self.nonce.to_string(),
            removed_resources,
        }));
        Ok(())
    }
}

/// Policies come before the records that name them, and go after: a named policy that a proxy does not know denies. One
/// that has to be named from now on changes after the records that do: in between it would apply to nobody.
pub(super) fn in_order(answers: Vec<(Set, Answer)>) -> Vec<(Set, Answer)> {
    let (mut first, mut then, mut last) = (Vec::new(), Vec::new(), Vec::new());
    for (set, answer) in answers {
        match set {
            Set::Addresses | Set::Workloads => then.push((set, answer)),
            Set::Authorizations => {
                let Answer { resources, narrowed, removed, aliases } = answer;
                if !resources.is_empty() {
                    first.push((set, Answer { resources, aliases, ..Answer::default() }));
                }
                if !narrowed.is_empty() || !removed.is_empty() {
                    last.push((set, Answer { narrowed, removed, aliases, ..Answer::default() }));
                }
            }
        }
    }
    first.into_iter().chain(then).chain(last).collect()
}

/// Lines a second about what callers do wrong.
static ENDED: Hush = Hush::new(10);
static NACKS: Hush = Hush::new(10);
/// Bytes of resources in one response: well under gRPC's usual limit of 4 MB, and as much as each proxy keeps room for
/// while it is connected.
pub(super) const MAX_MESSAGE: usize = 1_000_000;
/// Names of removed resources in one response.
const MAX_REMOVED: usize = 20_000;
/// A stream on which nothing is asked for so long is ended.
const FIRST_REQUEST: Duration = Duration::from_secs(30);
/// A node that does not read for so long is disconnected: it comes again and compares.
const SEND_LIMIT: Duration = Duration::from_secs(60);
/// The announcement of roots, for metrics.
const ROOTS: &str = "roots";
/// Characters of a peer's text in a log line.
const MAX_REASON: usize = 1000;

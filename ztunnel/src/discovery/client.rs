//! The delta stream: opened, kept, and opened again for as long as the process lives.
//!
//! Must never block reading on writing, nor wait for ever on a server that says nothing.

use std::time::{Duration, Instant};

use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Status, Streaming};

use super::apply::{Applied, Held, Kind, settle};
use super::status::Termination;
use super::subscriptions::Subscriptions;
use super::{Discovery, messages, trust};
use crate::identity::{ControlPlane, Roots, describe_status};
use crate::proto::discovery::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use crate::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::random;

/// How a stream ended.
struct End {
    why: Termination,
    /// For the log; nothing where the end was planned.
    error: Option<String>,
    /// The server could not take what we told it that we hold.
    too_large: bool,
}

/// One stream while it is open.
struct Session<'a> {
    control_plane: &'a ControlPlane,
    roots: &'a Roots,
    discovery: &'a Discovery,
    held: &'a mut Held,
    /// On demand only.
    subscriptions: Option<Subscriptions>,
    requests: mpsc::Sender<DeltaDiscoveryRequest>,
    opened: Instant,
    /// The types that have had their first answer.
    answered: Vec<Kind>,
    /// Responses that wait for what belongs to them, and how many bytes they are.
    early: Vec<(Kind, DeltaDiscoveryResponse)>,
    early_bytes: u64,
    early_since: Option<Instant>,
    /// A stream older than this is opened anew, so that nothing can stay wrong for ever.
    max_age: Duration,
}

/// Keeps the stream open.
pub async fn run(control_plane: ControlPlane, discovery: Discovery) {
    let (shortest, longest) = discovery.settings.backoff;
    let mut pause = shortest;
    let mut held = Held::default();
    let mut versions_limit = discovery.settings.versions_limit;
    let mut last_warning: Option<Instant> = None;
    loop {
        let (started, responses) = (Instant::now(), discovery.shared.responses());
        let end = session(&control_plane, &discovery, &mut held, versions_limit).await;
        versions_limit = if end.too_large { 0 } else { discovery.settings.versions_limit };
        // A server that answers and then cuts us off, again and again, is not hurried.
        let served = discovery.shared.responses() > responses && started.elapsed() > SERVED;
        if served {
            pause = shortest;
        }
        let (setting, address, why) = (control_plane.setting, &control_plane.address, end.why.as_str());
        let error = end.error.map(|error| match end.why {
            // It names what was dialled.
            Termination::ConnectionError => error,
            _ => format!("discovery at {address}: {error}"),
        });
        let is_new = discovery.shared.ended(end.why, error.clone());
        match &error {
            None => tracing::info!(%address, why, "the discovery stream ends as planned"),
            // Streams end now and then; what matters is whether the next one can be opened.
            Some(reason) if served => tracing::info!(%address, why, reason, "the discovery stream has ended"),
            // Once for each reason, and now and then while it stays so.
            Some(reason) if is_new || last_warning.is_none_or(|at| at.elapsed() > REMIND) => {
                last_warning = Some(Instant::now());
                tracing::warn!(setting, %address, why, reason, "no discovery stream, trying again");
            }
            Some(reason) => tracing::debug!(setting, %address, why, reason, "no discovery stream"),
        }
        tokio::time::sleep(pause.mul_f64(random::factor(0.2))).await;
        pause = (pause * 2).min(longest);
    }
}

async fn session(control_plane: &ControlPlane, discovery: &Discovery, held: &mut Held, versions_limit: usize) -> End {
    let settings = &discovery.settings;
    let roots = match control_plane.load_roots() {
        Ok(roots) => roots,
        Err(error) => return End::not_connected(error.to_string()),
    };
    let channel = match control_plane.connect(&roots, settings.timings).await {
        Ok(channel) => channel,
        Err(error) => return End::not_connected(error.to_string()),
    };
    let (requests, queue) = mpsc::channel(REQUESTS);
    let mut subscriptions = settings.on_demand.then(Subscriptions::default);
    for kind in Kind::ALL {
        let names = match &mut subscriptions {
            Some(subscriptions) if kind == Kind::Address => {
                let names = discovery.demand.restart();
                subscriptions.restart(&names);
                Some(names)
            }
            _ => None,
        };
        let first = messages::first(kind, settings, held.versions(kind, versions_limit), names);
        // The queue is empty and larger than this.
        let _ = requests.try_send(first);
    }
    if settings.hear_roots {
        let _ = requests.try_send(trust::first(settings));
    }
    let mut call = Request::new(ReceiverStream::new(queue));
    if let Err(error) = control_plane.authorize(call.metadata_mut()) {
        return End::not_connected(error.to_string());
    }
    let mut client = AggregatedDiscoveryServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let limit = settings.answer_limit;
    let stream = match tokio::time::timeout(limit, client.delta_aggregated_resources(call)).await {
        Ok(Ok(stream)) => stream.into_inner(),
        Ok(Err(status)) => return ended(&status, false),
        Err(_) => return End::error(format!("the server did not open the stream within {limit:?}")),
    };
    discovery.shared.connected();
    tracing::info!(address = %control_plane.address, on_demand = settings.on_demand, "discovery stream is open");
    let session = Session {
        control_plane,
        roots: &roots,
        discovery,
        held,
        subscriptions,
        requests,
        opened: Instant::now(),
        answered: Vec::new(),
        early: Vec::new(),
        early_bytes: 0,
        early_since: None,
        max_age: settings.max_stream_age.mul_f64(random::factor(0.1)),
    };
    session.serve(stream).await
}

impl Session<'_> {
    async fn serve(mut self, mut stream: Streaming<DeltaDiscoveryResponse>) -> End {
        let mut tick = tokio::time::interval(TICK.min(self.discovery.settings.answer_limit / 2));
        let mut swept = Instant::now();
        loop {
            let end = tokio::select! {
                message = stream.message() => match message {
                    Ok(Some(response)) => self.take(response),
                    Ok(None) => Err(End::planned(Termination::Complete)),
                    Err(status) => Err(ended(&status, !self.answered.is_empty())),
                },
                () = self.discovery.demand.news.notified() => self.ask(&mut swept),
                _ = tick.tick() => self.look_around(),
            };
            if let Err(end) = end {
                return end;
            }
        }
    }

    /// Applies a response and says so to the server.
    fn take(&mut self, response: DeltaDiscoveryResponse) -> Result<(), End> {
        let bytes = response.encoded_len() as u64;
        self.discovery.shared.message(&response.type_url, bytes);
        if response.type_url == trust::BUNDLE {
            return self.hear_roots(&response);
        }
        let Some(kind) = Kind::of(&response.type_url) else {
            tracing::debug!(type_url = response.type_url, "a type that is not used here");
            return self.send(messages::answer(&response, &[]));
        };
        let is_first = !self.answered.contains(&kind);
        let on_demand = self.discovery.settings.on_demand;
        if kind == Kind::Address && on_demand && !is_first && self.held.says_all_is_gone(&response) {
            // The first answer of a new stream compares what we hold and settles it.
            tracing::info!("the control plane says that every address is gone: asking again on a new stream");
            return Err(End::planned(Termination::Reconnect));
        }
        let goes_on = messages::goes_on(&response);
        self.early.push((kind, response));
        self.early_bytes += bytes;
        self.early_since.get_or_insert_with(Instant::now);
        // What is held from before is changed by the first answers on records and policies at once, and by all parts of a
        // later change: between them a policy could apply to nobody, or neither of two that take each other's place.
        let is_again = self.discovery.mesh.load().policies().is_complete();
        let is_little = self.early_bytes <= MAX_EARLY && self.early.len() < MAX_EARLY_MESSAGES;
        if is_again && (goes_on || !self.missing().is_empty()) && is_little {
            return Ok(());
        }
        self.early_bytes = 0;
        self.early_since = None;
        let early = std::mem::take(&mut self.early);
        let responses: Vec<_> = early.iter().map(|(kind, response)| (*kind, response)).collect();
        let applied = self.held.apply(&responses, &self.discovery.mesh, self.subscriptions.as_mut());
        responses
            .iter()
            .zip(applied)
            .try_for_each(|((kind, response), applied)| self.settled(*kind, response, &applied))
    }

    /// The types of which the first answer has not come, or not whole.
    fn missing(&self) -> Vec<&'static str> {
        let is_early = |kind| self.early.iter().any(|(of, response)| *of == kind && !messages::goes_on(response));
        let missing = Kind::ALL.into_iter().filter(|kind| !self.answered.contains(kind) && !is_early(*kind));
        missing.map(Kind::url).collect()
    }

    /// A response has been applied: says so to whoever waits for it, and to the server.
    fn settled(&mut self, kind: Kind, response: &DeltaDiscoveryResponse, applied: &Applied) -> Result<(), End> {
        if kind == Kind::Address && self.discovery.settings.on_demand {
            settle(response, applied, &self.discovery.mesh, &self.discovery.demand);
        }
        if !self.answered.contains(&kind) && !messages::goes_on(response) {
            self.answered.push(kind);
            if self.answered.len() == Kind::ALL.len() {
                self.discovery.shared.synced();
            }
        }
        if !applied.refused.is_empty() {
            let refused = applied.refused.len();
            self.discovery.shared.refused(refused as u64);
            let reason = messages::reasons(&applied.refused);
            tracing::warn!(kind = kind.url(), refused, reason, "resources cannot be used");
        }
        self.send(messages::answer(response, &applied.refused))
    }

    /// Passes on which roots are in force.
    fn hear_roots(&mut self, response: &DeltaDiscoveryResponse) -> Result<(), End> {
        let mut refused = Vec::new();
        match trust::read(response) {
            Ok(Some(roots)) => {
                self.discovery.roots.send_if_modified(|held| {
                    let is_new = held.as_ref() != Some(&roots);
                    *held = Some(roots);
                    is_new
                });
            }
            Ok(None) => {}
            Err((name, reason)) => {
                tracing::warn!(name, reason, "the announced roots cannot be used");
                self.discovery.shared.refused(1);
                refused.push((name, reason));
            }
        }
        self.send(messages::answer(response, &refused))
    }

    /// On demand: asks for what connections need, and gives up what has not been used for long.
    fn ask(&mut self, swept: &mut Instant) -> Result<(), End> {
        let Discovery { demand, mesh, settings, .. } = self.discovery;
        let (names, given_up) = demand.take_to_ask();
        let Some(subscriptions) = self.subscriptions.as_mut().filter(|_| !names.is_empty()) else { return Ok(()) };
        given_up.into_iter().for_each(|name| subscriptions.drop_later(name));
        if swept.elapsed() >= SWEEP.min(settings.forget_after) {
            *swept = Instant::now();
            let (mut unused, used) = demand.forget_unused(settings.forget_after);
            unused.extend(self.held.drop_unused(&used, mesh));
            if !unused.is_empty() {
                tracing::debug!(names = unused.len(), "no longer watching what nobody has used for long");
            }
            unused.into_iter().for_each(|name| subscriptions.drop_later(name));
        }
        for change in subscriptions.ask(&names) {
            self.send(messages::change(&change))?;
        }
        Ok(())
    }

    /// What is looked at from time to time.
    fn look_around(&mut self) -> Result<(), End> {
        let Discovery { demand, mesh, settings, .. } = self.discovery;
        let limit = settings.answer_limit;
        if self.answered.len() < Kind::ALL.len() {
            if self.opened.elapsed() > limit {
                let missing = self.missing().join(" and ");
                return Err(End::error(format!("no first answer within {limit:?} for {missing}")));
            }
        } else if let Some(since) = self.held.stale_since(self.opened)
            && since.elapsed() > settings.quiet
        {
            let purged = self.held.purge(mesh);
            tracing::info!(purged, "removed what the control plane no longer mentions");
        }
        // What waits changes nothing, and may be a policy that denies.
        if self.early_since.is_some_and(|since| since.elapsed() > limit) {
            return Err(End::error(format!("the rest of a change has not come within {limit:?}")));
        }
        if settings.on_demand && demand.oldest_pending().is_some_and(|age| age > limit) {
            return Err(End::error(format!("a name that we asked for was not answered within {limit:?}")));
        }
        if self.opened.elapsed() > self.max_age {
            return Err(End::planned(Termination::Reconnect));
        }
        if self.control_plane.load_roots().is_ok_and(|now| now != *self.roots) {
            tracing::info!("the control plane's roots have changed");
            return Err(End::planned(Termination::Reconnect));
        }
        Ok(())
    }

    fn send(&self, request: DeltaDiscoveryRequest) -> Result<(), End> {
        let refused = |_| End::error(format!("the server has not read our last {REQUESTS} requests"));
        self.requests.try_send(request).map_err(refused)
    }
}

impl End {
    fn not_connected(error: String) -> Self {
        Self { why: Termination::ConnectionError, error: Some(error), too_large: false }
    }

    fn error(error: String) -> Self {
        Self { why: Termination::Error, error: Some(error), too_large: false }
    }

    fn planned(why: Termination) -> Self {
        Self { why, error: None, too_large: false }
    }
}

/// A status that ended the stream: what is planned recycling is no error.
fn ended(status: &Status, progressed: bool) -> End {
    let text = describe_status(status);
    let lower = text.to_ascii_lowercase();
    let may_recycle = progressed
        && matches!(status.code(), Code::Unknown | Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable);
    if may_recycle
        && RECYCLING.iter().any(|part| lower.contains(part))
        && !REPROACHES.iter().any(|part| lower.contains(part))
    {
        return End::planned(Termination::Reconnect);
    }
    End { too_large: status.code() == Code::ResourceExhausted, ..End::error(text) }
}

/// How often the operator is told again what is wrong.
const REMIND: Duration = Duration::from_secs(10);
/// What servers say when they merely want us to come again.
const RECYCLING: [&str; 4] = ["goaway", "go away", "transport is closing", "no error"];
/// What they say when we have done something wrong.
const REPROACHES: [&str; 2] = ["too_many_pings", "calm"];
/// Bytes of one message; a mesh of 100,000 workloads is some 20 MB.
const MAX_MESSAGE: usize = 200 << 20;
/// Bytes of responses that wait for what belongs to them; more are applied as they come.
const MAX_EARLY: u64 = 16 << 20;
/// The same in messages: all are acknowledged at once.
const MAX_EARLY_MESSAGES: usize = REQUESTS / 4;
/// Requests that may wait for the server.
const REQUESTS: usize = 1024;
/// How often the state of the stream is looked at.
const TICK: Duration = Duration::from_secs(2);
/// A stream that lived for so long, and told us something, has served.
const SERVED: Duration = Duration::from_secs(1);
/// At most this often is what is no longer used looked for.
const SWEEP: Duration = Duration::from_secs(60);

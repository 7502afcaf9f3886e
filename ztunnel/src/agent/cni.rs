//! The agent's end of the CNI plugin's socket: brings a pod into the mesh before the runtime starts its first process.
//!
//! Must never say yes for a pod that may belong into the mesh and is not captured, nor leave a call without an answer.

mod metrics;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::{debug, info, warn};

pub use metrics::CniMetrics;

use super::decision::{self, Decision, Exclusion, PodFacts, Rules};
use super::enrolment::Context;
use super::metrics::PodState;
use super::sandbox::{Progress, Sandbox};
use crate::capture::netns::Netns;
use crate::capture::pod_network;
use crate::cni::PodName;
use crate::cni::protocol::{Answer, Attach, HEADER, Request, encode, length};
use crate::lifecycle::Readiness;
use crate::manifests::Objects;
use crate::zds::listen_for_root;

/// Serves the plugin.
pub struct CniServer {
    listener: UnixListener,
    calls: Arc<Calls>,
}

/// What all calls share.
struct Calls {
    context: Arc<Context>,
    rules: Rules,
    objects: watch::Receiver<Arc<Objects>>,
    readiness: Readiness,
    metrics: Arc<CniMetrics>,
    /// How long an ADD may take.
    limit: Duration,
    /// ADDs at a time: those that wait must not keep a STATUS or a DEL from its answer.
    adds: Semaphore,
}

/// What cannot be done now.
struct Refusal {
    step: &'static str,
    reason: String,
}

impl CniServer {
    pub fn bind(
        path: &Path,
        context: Arc<Context>,
        rules: Rules,
        objects: watch::Receiver<Arc<Objects>>,
        readiness: Readiness,
        metrics: Arc<CniMetrics>,
        limit: Duration,
    ) -> io::Result<CniServer> {
        let socket = listen_for_root(path, rustix::net::SocketType::STREAM, BACKLOG)?;
        let listener = UnixListener::from_std(socket.into())?;
        let calls =
            Arc::new(Calls { context, rules, objects, readiness, metrics, limit, adds: Semaphore::new(MAX_ADDS) });
        Ok(CniServer { listener, calls })
    }

    /// Runs for ever.
    pub async fn serve(self) {
        let mut running = JoinSet::new();
        loop {
            if running.len() >= MAX_CALLS {
                running.join_next().await;
            }
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let calls = self.calls.clone();
                    running.spawn(async move { calls.serve(stream).await });
                }
                Err(error) => {
                    warn!(%error, "no call of the CNI plugin can be taken");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            }
            while running.try_join_next().is_some() {}
        }
    }
}

impl Calls {
    async fn serve(&self, mut stream: UnixStream) {
        let begun = Instant::now();
        match stream.peer_cred() {
            Ok(peer) if peer.uid() == 0 => {}
            other => {
                self.metrics.count("unknown", "not_root");
                return warn!(peer = ?other, "a call of the CNI plugin does not come from root");
            }
        }
        let read = timeout(REQUEST, read(&stream)).await;
        let (request, netns) = match read.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(request) => request,
            Err(error) => {
                self.metrics.count("unknown", "unreadable");
                return warn!(%error, "a call of the CNI plugin cannot be read");
            }
        };
        let (command, outcome, answer) = match request {
            Request::Add(attach) => {
                let result = self.add(&attach, netns, begun + self.limit).await;
                let (outcome, answer) = tell("ADD", &attach, begun, result);
                self.metrics.time_add(outcome, begun.elapsed());
                ("ADD", outcome, answer)
            }
            Request::Check(attach) => {
                let (outcome, answer) = tell("CHECK", &attach, begun, self.check(&attach, netns));
                ("CHECK", outcome, answer)
            }
            Request::Del { container } => {
                let known = self.context.sandboxes.forget_container(&container);
                debug!(container, known, "a sandbox goes");
                ("DEL", "done", Answer::Done)
            }
            Request::Status => match self.ready(begun + STATUS).await {
                Ok(()) => ("STATUS", "done", Answer::Done),
                Err(Refusal { step, reason }) => ("STATUS", "refused", Answer::Refused { step: step.into(), reason }),
            },
            Request::Gc { attachments } => {
                let valid = |container: &str| attachments.iter().any(|one| one.container == container);
                let forgotten = self.context.sandboxes.keep_containers(valid);
                info!(valid = attachments.len(), forgotten, "the runtime told which sandboxes there are");
                ("GC", "done", Answer::Done)
            }
        };
        self.metrics.count(command, outcome);
        let sent = timeout(ANSWER, stream.write_all(&encode(&answer))).await;
        if !matches!(sent, Ok(Ok(()))) {
            warn!(command, "the CNI plugin did not take its answer");
        }
    }

    /// Comes back once the pod is captured, or does not belong into the mesh.
    async fn add(&self, attach: &Attach, netns: Option<OwnedFd>, until: Instant) -> Result<Answer, Refusal> {
        let netns = self.open(netns)?;
        let turn = timeout_at(until, self.adds.acquire()).await;
        let _turn = turn.map_err(|_| Refusal {
            step: "wait for other pods' turns",
            reason: format!("{MAX_ADDS} of them start at the same time"),
        })?;
        self.ready(until).await?;
        let (facts, decision) = self.wait_for_object(&attach.pod, until).await?;
        let mut addresses = attach.addresses.clone();
        if addresses.is_empty() {
            let step = "look up the pod's addresses";
            let found = pod_network::addresses(&netns).await;
            addresses = found.map_err(|error| Refusal { step, reason: error.to_string() })?;
            addresses.retain(|address| !address.is_loopback() && !is_link_local(*address));
        }
        // Also that of a pod outside the mesh, which may get the label later.
        let sandbox = Sandbox::new(attach.container.clone(), netns, addresses);
        let awaited = (decision == Decision::In).then(|| sandbox.progress());
        let sandbox = self.context.sandboxes.put(&facts.uid, sandbox);
        if awaited.is_none() {
            return Ok(Answer::Outside { reason: why_outside(decision) });
        }
        let mut progress = sandbox.progress();
        let mut reason = format!("it is not captured within {:?}", self.limit);
        loop {
            match &*progress.borrow_and_update() {
                Progress::Captured => return Ok(Answer::Captured),
                Progress::Stuck(trouble) => reason.clone_from(trouble),
                Progress::Begun => {}
            }
            if !matches!(timeout_at(until, progress.changed()).await, Ok(Ok(()))) {
                return Err(Refusal { step: "bring the pod into the mesh", reason });
            }
        }
    }

    fn check(&self, attach: &Attach, netns: Option<OwnedFd>) -> Result<Answer, Refusal> {
        const STEP: &str = "look whether the pod is captured";
        let refused = |reason: String| Refusal { step: STEP, reason };
        let netns = self.open(netns)?;
        let objects = self.objects.borrow().clone();
        let (facts, decision) = self.look_up(&objects, &attach.pod).map_err(refused)?;
        if decision != Decision::In {
            return Ok(Answer::Outside { reason: why_outside(decision) });
        }
        let view = self.context.metrics.view(&facts.uid);
        let captured = self.context.kernel.is_captured(netns.cookie()).map_err(|error| refused(error.to_string()))?;
        match view {
            Some(view) if view.state == PodState::NotCaptured => Err(refused(view.reason)),
            Some(view) if !captured && !view.reason.is_empty() => Err(refused(view.reason)),
            _ if !captured => Err(refused("nothing captures its network namespace".into())),
            _ => Ok(Answer::Captured),
        }
    }

    fn open(&self, netns: Option<OwnedFd>) -> Result<Arc<Netns>, Refusal> {
        let refused = |reason: String| Refusal { step: "open the pod's network namespace", reason };
        let netns = netns.ok_or_else(|| refused("it did not come with the request".into()))?;
        let netns = Netns::from_fd(netns).map_err(|error| refused(error.to_string()))?;
        if self.context.node_netns.contains(&netns.id()) {
            return Err(refused("it is the node's own".into()));
        }
        Ok(Arc::new(netns))
    }

    /// Waits until the agent knows the node's pods, and that it can capture any.
    async fn ready(&self, until: Instant) -> Result<(), Refusal> {
        loop {
            let pending = self.readiness.pending_tasks();
            if pending.is_empty() {
                return Ok(());
            }
            if Instant::now() + POLL > until {
                let reason = format!("the agent is not ready, pending: {}", pending.join(", "));
                return Err(Refusal { step: "wait for the agent to be ready", reason });
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// The pod may be here before its object.
    async fn wait_for_object(&self, pod: &PodName, until: Instant) -> Result<(PodFacts, Decision), Refusal> {
        let mut objects = self.objects.clone();
        loop {
            let now = objects.borrow_and_update().clone();
            let missing = match self.look_up(&now, pod) {
                Ok(found) => return Ok(found),
                Err(missing) => missing,
            };
            if !matches!(timeout_at(until, objects.changed()).await, Ok(Ok(()))) {
                return Err(Refusal { step: "wait for the pod's object", reason: missing });
            }
        }
    }

    /// The pod and what is to become of it, or what is not known of it yet.
    fn look_up(&self, objects: &Objects, name: &PodName) -> Result<(PodFacts, Decision), String> {
        let pod = objects.pod(&name.namespace, &name.name).ok_or("its object is not known yet")?;
        let facts = decision::facts(pod).ok_or("its object has no uid")?;
        if !name.uid.is_empty() && name.uid != facts.uid && name.uid != facts.cgroup_uid {
            return Err(format!("the object that is known by its name is another pod's, {}", facts.uid));
        }
        if facts.leaving {
            return Err("it is being deleted".into());
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref()).unwrap_or_default();
        if node != self.context.node {
            return Err(format!("its object says that it runs on node {node:?}"));
        }
        let namespace = objects.namespace(&name.namespace);
        let decision = decision::decide(pod, namespace.map(Arc::as_ref), &self.rules);
        if namespace.is_none() && decision == Decision::Out(Exclusion::NotSelected) {
            return Err("the labels of its namespace are not known yet".into());
        }
        Ok((facts, decision))
    }
}

/// The file of the socket in the run folder.
pub fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("cni.sock")
}

/// One line for a call, its outcome for the metric, and its answer.
fn tell(
    command: &'static str,
    attach: &Attach,
    begun: Instant,
    result: Result<Answer, Refusal>,
) -> (&'static str, Answer) {
    let (pod, netns, container, took) = (&attach.pod, &attach.netns, &attach.container, begun.elapsed());
    match result {
        Ok(Answer::Outside { reason }) => {
            debug!(%pod, netns, container, ?took, reason, "CNI {command}: the pod stays outside the mesh");
            ("outside", Answer::Outside { reason })
        }
        Ok(answer) => {
            info!(%pod, netns, container, addresses = ?attach.addresses, ?took, "CNI {command}: the pod is captured");
            ("captured", answer)
        }
        Err(Refusal { step, reason }) => {
            warn!(%pod, netns, container, ?took, step, reason, "CNI {command}: refused");
            ("refused", Answer::Refused { step: step.into(), reason })
        }
    }
}

fn why_outside(decision: Decision) -> String {
    match decision {
        Decision::Out(exclusion) => exclusion.to_string(),
        Decision::Ended => "its containers have ended".into(),
        Decision::In => String::new(),
    }
}

fn is_link_local(address: std::net::IpAddr) -> bool {
    match address {
        std::net::IpAddr::V4(v4) => v4.is_link_local(),
        std::net::IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// A request, with the descriptor that came along.
async fn read(stream: &UnixStream) -> io::Result<(Request, Option<OwnedFd>)> {
    let mut descriptors = Vec::new();
    let mut header = [0; HEADER];
    fill(stream, &mut header, &mut descriptors).await?;
    let mut body = vec![0; length(header).map_err(io::Error::other)?];
    fill(stream, &mut body, &mut descriptors).await?;
    Ok((serde_json::from_slice(&body)?, descriptors.pop()))
}

async fn fill(stream: &UnixStream, mut space: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<()> {
    while !space.is_empty() {
        let (taken, came) = stream.async_io(Interest::READABLE, || receive(stream.as_fd(), space)).await?;
        if taken == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        space = &mut space[taken..];
        descriptors.extend(came);
        if descriptors.len() > 1 {
            return Err(io::Error::other("more than one descriptor came along"));
        }
    }
    Ok(())
}

fn receive(stream: BorrowedFd<'_>, space: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = rustix::net::recvmsg(stream, &mut [IoSliceMut::new(space)], &mut control, flags)?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("more came along than a descriptor"));
    }
    Ok((received.bytes, descriptors))
}

/// Calls at a time; more wait in the socket's queue.
const MAX_CALLS: usize = 512;
const MAX_ADDS: usize = 64;
const BACKLOG: i32 = 128;
/// Until a request is there, and until its answer is taken.
const REQUEST: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(5);
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// How long a STATUS waits for an agent that is just starting; the plugin waits a little longer.
const STATUS: Duration = Duration::from_secs(4);
const POLL: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream as Plain;

    use super::*;

    fn pair() -> (Plain, UnixStream) {
        let (ours, theirs) = Plain::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        (ours, UnixStream::from_std(theirs).unwrap())
    }

    fn send(socket: &Plain, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        assert_eq!(sendmsg(socket, &[io::IoSlice::new(bytes)], &mut control, SendFlags::empty()), Ok(bytes.len()));
    }

    #[tokio::test]
    async fn a_request_comes_whole_with_its_namespace_however_it_is_cut() {
        let bytes = encode(&Request::Status);
        let file = std::fs::File::open("/proc/self/ns/net").unwrap();
        for cut in 1..bytes.len() {
            let (ours, theirs) = pair();
            send(&ours, &bytes[..cut], &[file.as_fd()]);
            let reading = tokio::spawn(async move { read(&theirs).await });
            tokio::task::yield_now().await;
            send(&ours, &bytes[cut..], &[]);
            let (request, netns) = reading.await.unwrap().unwrap();
            assert_eq!(request, Request::Status);
            assert!(Netns::from_fd(netns.unwrap()).is_ok());
        }
    }

    #[tokio::test]
    async fn what_is_no_request_is_refused_without_being_waited_for() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = file.as_fd();
        let status = encode(&Request::Status);
        let none: &[BorrowedFd<'_>] = &[];
        let table = [
            ("too long", u32::MAX.to_be_bytes().to_vec(), none),
            ("empty", vec![0; HEADER], none),
            ("no JSON", b"\0\0\0\x02{{".to_vec(), none),
            ("an unknown command", encode(&serde_json::json!({"command": "Restart"})), none),
            ("no command", encode(&serde_json::json!({})), none),
            ("two descriptors", status.clone(), &[fd, fd]),
            ("three descriptors", status, &[fd, fd, fd]),
        ];
        for (what, bytes, descriptors) in table {
            let (ours, theirs) = pair();
            send(&ours, &bytes, descriptors);
            let result = timeout(REQUEST, read(&theirs)).await.expect(what);
            assert!(result.is_err(), "{what}: {result:?}");
        }
        let (ours, theirs) = pair();
        send(&ours, &[0, 0], &[]);
        drop(ours);
        assert_eq!(read(&theirs).await.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[tokio::test]
    async fn the_socket_is_roots_alone_and_takes_the_place_of_an_old_one() {
        let dir = std::env::temp_dir().join(format!("understory-cni-socket-{}", std::process::id()));
        let path = socket(&dir);
        let first = listen_for_root(&path, rustix::net::SocketType::STREAM, BACKLOG).unwrap();
        let _second = listen_for_root(&path, rustix::net::SocketType::STREAM, BACKLOG).unwrap();
        drop(first);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        Plain::connect(&path).unwrap();
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

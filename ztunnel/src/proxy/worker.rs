//! The worker threads: each a single-threaded runtime on which a connection, its tunnel and its place in the pool stay.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime;
use tokio::sync::mpsc;
use tokio::task::LocalSet;

use super::attested::Attestations;
use super::neighbour::Avoided;
use super::relay::Resetting;
use super::state::{Phase, Pod, Shared};
use super::{guard, inbound, outbound, plaintext};
use crate::hbone::{Pool, Tunnels};
use crate::lifecycle::Watchdog;
use crate::telemetry::flow::{Direction, Failure, Flow, Protocol};
use crate::telemetry::log::Hush;

/// A worker as other threads see it.
#[derive(Clone)]
pub struct WorkerHandle {
    jobs: mpsc::Sender<Job>,
    load: Arc<AtomicU32>,
    tunnels: Arc<AtomicU32>,
}

/// A worker as its own tasks see it.
pub struct Worker {
    pub shared: Arc<Shared>,
    pub pool: Pool<Failure>,
    /// To and from peers.
    pub tunnels: Tunnels,
    /// Connections without a tunnel, between pods of this node.
    pub attested: Attestations,
    pub avoided: Avoided,
    /// Connections under way from here, by destination workload.
    pub busy: RefCell<HashMap<Arc<str>, u64>>,
    own: WorkerHandle,
    index: usize,
}

enum Job {
    /// Accept for this pod from now on.
    Serve(Arc<Pod>),
    Connection(Listener, Arc<Pod>, std::net::TcpStream, SocketAddr, Counted),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listener {
    Outbound,
    Plaintext,
    Hbone,
}

/// Starts the threads; gives their runtimes. They end with the process.
pub fn start(shared: &Arc<Shared>, watchdog: &Watchdog) -> io::Result<Vec<runtime::Handle>> {
    let mut runtimes = Vec::new();
    let mut handles = Vec::new();
    let mut queues = Vec::new();
    for _ in 0..shared.config.threads {
        let (jobs, queue) = mpsc::channel(QUEUE);
        handles.push(WorkerHandle { jobs, load: Arc::default(), tunnels: Arc::default() });
        queues.push(queue);
    }
    // Set once, before any thread looks.
    let _ = shared.workers.set(handles.clone());
    for (index, (own, queue)) in handles.into_iter().zip(queues).enumerate() {
        let runtime = runtime::Builder::new_current_thread().enable_all().event_interval(EVENT_INTERVAL).build()?;
        runtimes.push(runtime.handle().clone());
        let shared = shared.clone();
        let beat = watchdog.worker(format!("worker {index}"));
        std::thread::Builder::new().name(format!("worker {index}")).spawn(move || {
            let tunnels = Tunnels::new(shared.certificates.trust().clone());
            let pool = Pool::new(shared.hbone.clone(), tunnels.clone());
            let (attested, avoided) = (Attestations::default(), Avoided::default());
            let worker =
                Rc::new(Worker { shared, pool, tunnels, attested, avoided, busy: RefCell::default(), own, index });
            LocalSet::new().block_on(&runtime, async move {
                tokio::task::spawn_local(beat.run());
                tokio::task::spawn_local(sweep(worker.clone()));
                tokio::task::spawn_local(guard::run(worker.clone()));
                run(worker, queue).await;
            });
        })?;
    }
    Ok(runtimes)
}

/// Gives a pod to a worker, which accepts its connections.
pub fn serve(shared: &Shared, pod: &Arc<Pod>) -> Result<(), String> {
    let workers = shared.workers.get().ok_or("the workers are not started")?;
    let turn = NEXT.fetch_add(1, Ordering::Relaxed) as usize % workers.len();
    workers[turn].jobs.try_send(Job::Serve(pod.clone())).map_err(|_| "the worker's queue is full".to_owned())
}

/// Connections under way, and tunnels from peers, of each worker.
pub fn loads(shared: &Shared) -> Vec<(u32, u32)> {
    let workers = shared.workers.get().map(Vec::as_slice).unwrap_or_default();
    workers.iter().map(|w| (w.load.load(Ordering::Relaxed), w.tunnels.load(Ordering::Relaxed))).collect()
}

async fn run(worker: Rc<Worker>, mut queue: mpsc::Receiver<Job>) {
    while let Some(job) = queue.recv().await {
        match job {
            Job::Serve(pod) => {
                tokio::task::spawn_local(accept(worker.clone(), pod));
            }
            Job::Connection(listener, pod, socket, client, counted) => match TcpStream::from_std(socket) {
                Ok(socket) => worker.begin(listener, pod, socket, client, counted),
                Err(error) => tracing::warn!(%error, %client, "cannot take over a connection"),
            },
        }
    }
}

/// Takes in what comes for a pod, until it leaves: one task for all of its listeners.
async fn accept(worker: Rc<Worker>, pod: Arc<Pod>) {
    let kinds = [Listener::Outbound, Listener::Plaintext, Listener::Hbone];
    let listeners: Vec<_> = kinds.into_iter().filter_map(|kind| Some((kind, listen(&worker, &pod, kind)?))).collect();
    let since = tokio::time::Instant::now();
    let leaving = pod.reached(Phase::Leaving);
    let stopping = worker.shared.shutdown.ordered();
    tokio::pin!(leaving, stopping);
    let (mut turn, mut taken) = (0, 0);
    loop {
        if taken == ACCEPTS {
            // What has been begun, and other pods, come first: a flood takes no more of a turn than this.
            taken = 0;
            tokio::task::yield_now().await;
        }
        taken += 1;
        let (kind, accepted) = tokio::select! {
            biased;
            () = &mut leaving => return,
            _ = &mut stopping => return,
            accepted = poll_fn(|cx| next(&listeners, &mut turn, cx)) => accepted,
        };
        match accepted {
            Ok((socket, client)) => {
                let client = SocketAddr::new(client.ip().to_canonical(), client.port());
                if kind.is_by_others() && since.elapsed() < BACKLOG_LIFE {
                    // It may be gone already, which shows soon.
                    let _ = worker.shared.tcp.keep_alive(SockRef::from(&socket));
                }
                match worker.shared.overload.check_descriptor(&socket, &worker.shared.config.limits) {
                    Ok(()) => worker.place(kind, &pod, socket, client),
                    Err(failure) => worker.refuse(kind, &pod, socket, client, &failure),
                }
            }
            Err(error) if is_peers(&error) => {}
            Err(error) => {
                // Out of descriptors or memory: what is open goes on, and what waits stays in the backlog.
                if let Some(untold) = ACCEPT_HUSH.speak() {
                    tracing::warn!(%error, pod = pod.name, namespace = pod.namespace, ?kind, untold, "cannot accept");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn listen(worker: &Worker, pod: &Pod, kind: Listener) -> Option<TcpListener> {
    let fd: io::Result<OwnedFd> = match kind {
        Listener::Outbound => pod.listeners.outbound.try_clone(),
        Listener::Plaintext => pod.listeners.plaintext.try_clone(),
        Listener::Hbone => pod.listeners.hbone.try_clone(),
    };
    let listener = match fd.and_then(|fd| TcpListener::from_std(fd.into())) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::error!(%error, pod = pod.name, namespace = pod.namespace, ?kind, "cannot listen for a pod");
            return None;
        }
    };
    if let Err(error) = worker.shared.tcp.listen(SockRef::from(&listener), kind.is_by_others()) {
        tracing::warn!(%error, pod = pod.name, namespace = pod.namespace, ?kind, "cannot set a listener up");
    }
    Some(listener)
}

/// The next connection of any listener. Each has its turn, so that a flood at one does not keep the others waiting.
fn next(
    listeners: &[(Listener, TcpListener)],
    turn: &mut usize,
    cx: &mut Context<'_>,
) -> Poll<(Listener, io::Result<(TcpStream, SocketAddr)>)> {
    for _ in listeners {
        let (kind, listener) = &listeners[*turn % listeners.len()];
        *turn = (*turn + 1) % listeners.len();
        if let Poll::Ready(accepted) = listener.poll_accept(cx) {
            return Poll::Ready((*kind, accepted));
        }
    }
    Poll::Pending
}

impl Listener {
    /// Its connections come from others than the pod itself.
    fn is_by_others(self) -> bool {
        self != Self::Outbound
    }
}

impl Worker {
    /// Here, unless another worker has clearly less to do.
    fn place(self: &Rc<Self>, kind: Listener, pod: &Arc<Pod>, socket: TcpStream, client: SocketAddr) {
        let workers = self.shared.workers.get().map(Vec::as_slice).unwrap_or_default();
        let load = |w: &WorkerHandle| match kind {
            // A tunnel carries many connections: they are spread one by one.
            Listener::Hbone => w.tunnels.load(Ordering::Relaxed) * SLACK,
            Listener::Outbound | Listener::Plaintext => w.load.load(Ordering::Relaxed),
        };
        let least = workers.iter().enumerate().min_by_key(|(_, w)| load(w));
        match least {
            Some((index, other)) if index != self.index && load(other) + SLACK <= load(&self.own) => {
                let Ok(socket) = socket.into_std() else { return };
                // Counted from now on, so that a burst does not all go there before the other has looked.
                let job = Job::Connection(kind, pod.clone(), socket, client, other.count(kind));
                if let Err(error) = other.jobs.try_send(job) {
                    let (mpsc::error::TrySendError::Full(job) | mpsc::error::TrySendError::Closed(job)) = error;
                    if let Job::Connection(_, _, socket, ..) = job
                        && let Ok(socket) = TcpStream::from_std(socket)
                    {
                        self.begin(kind, pod.clone(), socket, client, self.own.count(kind));
                    }
                }
            }
            _ => self.begin(kind, pod.clone(), socket, client, self.own.count(kind)),
        }
    }

    fn refuse(&self, kind: Listener, pod: &Pod, socket: TcpStream, client: SocketAddr, failure: &Failure) {
        let (direction, protocol) = match kind {
            Listener::Outbound => (Direction::Outbound, Protocol::Tcp),
            Listener::Plaintext => (Direction::Inbound, Protocol::Tcp),
            Listener::Hbone => (Direction::Inbound, Protocol::Hbone),
        };
        let local = socket.local_addr().unwrap_or(client);
        let local = SocketAddr::new(local.ip().to_canonical(), local.port());
        drop(Resetting::new(socket));
        let flow = Flow::new(direction, protocol, pod.uid.clone(), client, local);
        self.shared.telemetry.failed(&flow, failure);
    }

    fn begin(self: &Rc<Self>, kind: Listener, pod: Arc<Pod>, socket: TcpStream, client: SocketAddr, counted: Counted) {
        let worker = self.clone();
        match kind {
            Listener::Outbound => tokio::task::spawn_local(outbound::serve(worker, pod, socket, client, counted)),
            Listener::Plaintext => tokio::task::spawn_local(plaintext::serve(worker, pod, socket, client, counted)),
            Listener::Hbone => tokio::task::spawn_local(inbound::serve(worker, pod, socket, client, counted)),
        };
    }
}

impl WorkerHandle {
    fn count(&self, kind: Listener) -> Counted {
        Counted::new(match kind {
            Listener::Hbone => self.tunnels.clone(),
            Listener::Outbound | Listener::Plaintext => self.load.clone(),
        })
    }
}

/// One unit of a worker's load.
pub struct Counted(Arc<AtomicU32>);

impl Counted {
    fn new(counter: Arc<AtomicU32>) -> Self {
        counter.fetch_add(1, Ordering::Relaxed);
        Self(counter)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Closes tunnels that are idle, whose pod is gone, or whose workload has left or changed.
async fn sweep(worker: Rc<Worker>) {
    let mut changes = worker.shared.mesh.changes();
    loop {
        tokio::select! {
            _ = changes.changed() => {}
            () = tokio::time::sleep(SWEEP) => {}
        }
        let mesh = worker.shared.mesh.load();
        let pods: Vec<Arc<str>> = worker.shared.pods().values().map(|p| p.uid.clone()).collect();
        worker.pool.sweep(|key| {
            let same = |w: &crate::mesh::Workload| {
                w.addresses.contains(&key.address.ip()) && key.expected.contains(&w.identity())
            };
            pods.contains(&key.pod) && mesh.workload(&key.workload).is_some_and(|w| same(w))
        });
        drop(mesh);
        // Bursts of changes are one.
        tokio::time::sleep(SWEEP_PAUSE).await;
    }
}

/// The connection was the peer's fault and is gone; the next one may be fine.
fn is_peers(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

static NEXT: AtomicU32 = AtomicU32::new(0);
/// Longer than a connection waits to be accepted.
const BACKLOG_LIFE: Duration = Duration::from_secs(15);
/// Connections that may wait for a worker.
const QUEUE: usize = 4096;
/// How much busier a worker must be than another before it gives a connection away: that costs a wake-up.
const SLACK: u32 = 8;
/// Connections that a pod's listeners take in a turn.
const ACCEPTS: u32 = 8;
/// Tasks that run between two looks at the sockets.
const EVENT_INTERVAL: u32 = 61;
/// All pods' listeners fail at a time.
static ACCEPT_HUSH: Hush = Hush::new(1);
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
const SWEEP: Duration = Duration::from_secs(10);
const SWEEP_PAUSE: Duration = Duration::from_millis(200);

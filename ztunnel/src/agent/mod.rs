//! `ztunnel agent`: brings the node's labelled pods into the mesh, keeps watch over their capture, and holds what
//! must outlive a proxy: eBPF programs and maps, and the pods' listening sockets.
//!
//! Must never leave a pod half in the mesh without saying so, and never touch pods when it merely ends.

mod annotations;
mod args;
mod backlog;
mod cgroups;
mod cleanup;
mod cni;
mod decision;
mod enrolment;
mod events;
mod exempt;
mod feed;
mod kernel;
mod lock;
mod metrics;
mod node;
mod pod;
mod probe;
mod procs;
mod proxies;
mod record;
mod report;
mod sandbox;
mod scanner;
mod selector;
mod verify;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tracing::{info, warn};

pub use args::{
    AgentArgs, AgentCommand, AgentConfig, CleanupArgs, PlaceArgs, RunArgs, SettingError, Sizes, SourceConfig,
};
pub use decision::{Decision, Enablement, Exclusion, PodFacts, Rules, decide, facts};
pub use enrolment::Timings;
pub use metrics::{PodState, PodView};
pub use probe::ProbeArgs;

use crate::capture::listeners::ListenerPorts;
use crate::capture::netns::Netns;
use crate::capture::programs::{CaptureConfig, CaptureError};
use crate::cni::install::{self, InstallError, InstallState};
use crate::kubernetes::{Api, ApiError, ConnectError, Health};
use crate::lifecycle::{Readiness, raise_descriptor_limit};
use crate::manifests::{self, Folders, StatusError, WatchError};
use crate::telemetry::http::{self, Response, Router};
use crate::telemetry::log::Logging;
use crate::telemetry::metrics::Metrics;
use crate::zds::{Server, ServerConfig, TransportError};
use annotations::Annotations;
use cgroups::{CgroupError, CgroupRoot};
use cni::{CniMetrics, CniServer};
use enrolment::Context;
use events::Events;
use exempt::Exemptions;
use feed::Feed;
use kernel::Kernel;
use lock::RunLock;
use metrics::AgentMetrics;
use node::NodeTask;
use proxies::Proxies;
use record::{RecordError, Records};
use report::Reports;
use sandbox::Sandboxes;
use scanner::Scanner;
use verify::Verifier;

/// Why the agent does not run.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("another agent runs in {0}")]
    AlreadyRunning(PathBuf),
    #[error("cannot {step}: {source}")]
    Io { step: &'static str, source: io::Error },
    #[error("cannot {step} the run folder {}: {source}", path.display())]
    RunDir { step: &'static str, path: PathBuf, source: io::Error },
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    #[error(transparent)]
    Capture(#[from] CaptureError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error(transparent)]
    Status(#[from] StatusError),
    #[error(transparent)]
    Watch(#[from] WatchError),
    #[error(transparent)]
    Kubernetes(#[from] ConnectError),
    #[error("{0}")]
    Api(#[from] ApiError),
    #[error("the socket for proxies: {0}")]
    Zds(#[from] TransportError),
    #[error(transparent)]
    CniInstall(#[from] InstallError),
    #[error("the CNI plugin's socket {}: cannot listen: {source}", path.display())]
    CniSocket { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Admin(#[from] http::BindError),
}

/// `ztunnel agent` with whatever it was told to do, to its end.
pub fn main(args: AgentArgs) -> Result<(), AgentError> {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(WORKERS).enable_all().build().map_err(failed("start the runtime"))
    };
    match args.command {
        Some(AgentCommand::Probe(args)) => probe::main(&args).map_err(failed("probe")),
        Some(AgentCommand::Cleanup(args)) => runtime()?.block_on(cleanup::run(&args)),
        None => {
            let (format, levels) = (args.run.log_format, args.run.log_levels.clone());
            let config = args.run.check()?;
            let logging = Logging::start(format, levels, LOG_QUEUE).map_err(failed("start the log"))?;
            raise_descriptor_limit();
            let result = runtime()?.block_on(async {
                let stop = stop_signal().map_err(failed("listen for signals"))?;
                run(config, stop).await
            });
            logging.flush(LOG_FLUSH);
            result
        }
    }
}

/// Runs the agent until `stop`, then leaves everything as it is: captured pods stay captured.
pub async fn run(config: AgentConfig, stop: impl Future<Output = ()>) -> Result<(), AgentError> {
    std::fs::create_dir_all(&config.run_dir).map_err(run_dir_failed("make", &config.run_dir))?;
    let _lock = RunLock::take(&config.run_dir)?;
    let root = CgroupRoot::find(config.cgroup_root.as_deref())?;
    let own = Netns::current().map_err(failed("open the node's network namespace"))?;
    let mut node_netns = vec![own.id()];
    node_netns.extend(Netns::open("/proc/1/ns/net").map(|netns| netns.id()).ok());
    let (scanner, scanning) = Scanner::new(PathBuf::from("/proc"));
    let scan = procs::Scan::take(Path::new("/proc")).map_err(failed("read the processes of the node"))?;

    let capture = CaptureConfig {
        max_pods: config.sizes.max_pods,
        max_waiting: config.sizes.max_waiting,
        ..CaptureConfig::new(config.bpf_dir.clone(), root.dir.clone())
    };
    let kernel = Arc::new(Kernel::open(capture, node::describe_node(own.cookie(), &root, &scan))?);
    let proxies = Proxies::new(kernel.clone(), Exemptions::new(kernel.clone(), root.clone()));
    let metrics = Arc::new(AgentMetrics::default());
    let (feed, reports) = feed_and_reports(&config).await?;
    let context = Arc::new(Context {
        node: config.node_name.clone(),
        node_netns,
        node_cookie: own.cookie(),
        kernel: kernel.clone(),
        proxies: proxies.clone(),
        scanner,
        records: Records::open(config.run_dir.join(RECORDS))?,
        sandboxes: Sandboxes::default(),
        reports,
        verifier: Verifier {
            root: root.clone(),
            program: config.program.clone(),
            limit: config.probe_timeout,
            probes: Semaphore::new(PROBES),
        },
        metrics: metrics.clone(),
        ports: ListenerPorts::default(),
        fail_open: config.fail_open,
        timings: config.timings,
        slots: Semaphore::new(PODS_AT_A_TIME),
    });
    let readiness = Readiness::new();
    let first_look = readiness.pending("pods of the node");
    let self_tested = readiness.pending("self-test of capture");
    let registry = Metrics::new();
    metrics.register(&registry, &proxies, &kernel);
    let problems = feed.objects();
    registry.gauge("understory_agent_manifest_problems", "Objects that cannot be used", move || {
        problems.borrow().problems().len() as f64
    });
    if let Some(health) = feed.health() {
        health.register(&registry);
    }
    let admin = http::Server::bind("agent", config.admin_addr)?;
    let admin_addr = admin.local_addr();
    let server = Server::bind(ServerConfig::new(config.zds_sockets.clone()))?;
    let cni_metrics = Arc::new(CniMetrics::default());
    let cni_socket = cni::socket(&config.run_dir);
    let (rules, limit) = (config.rules.clone(), config.cni_timeout);
    let plugin = CniServer::bind(
        &cni_socket,
        context.clone(),
        rules,
        feed.objects(),
        readiness.clone(),
        cni_metrics.clone(),
        limit,
    )
    .map_err(|source| AgentError::CniSocket { path: cni_socket, source })?;
    let node = NodeTask::new(context.clone(), root.clone(), config.rules, feed.objects(), feed.complete())?;

    // Before the pods' tasks, whose sweep would take the stand-in for the rest of a pod.
    let tested = self_test(&context).await;
    // All of them end when this function does.
    let mut tasks = JoinSet::new();
    tasks.spawn(scanning);
    tasks.spawn(proxies.clone().serve(server));
    tasks.spawn(backlog::guard(proxies, config.timings.backlog, metrics.clone()));
    if let Reports::Kubernetes { annotations, events } = &context.reports {
        let unwritten = annotations.clone();
        registry.gauge(
            "understory_agent_annotations_unwritten",
            "Pods whose annotation does not say yet what holds",
            move || unwritten.unwritten() as f64,
        );
        let left_out = events.clone();
        registry.counter(
            "understory_agent_events_left_out",
            "Troubles of pods of which no Event tells: too many",
            move || left_out.left_out(),
        );
        tasks.spawn(annotations.clone().keep());
        tasks.spawn(events.clone().keep());
    }
    tasks.spawn(admin.serve(pages(registry.clone(), metrics, readiness, feed.health()), std::future::pending()));
    tasks.spawn(node.run(first_look));
    tasks.spawn(plugin.serve());
    let installed = config.cni_install.map(|install| {
        let state = Arc::new(InstallState::default());
        tasks.spawn(install::keep(install, state.clone()));
        state
    });
    cni_metrics.register(&registry, installed);
    tasks.spawn(async move {
        let mut tested = tested;
        while !tested {
            tokio::time::sleep(SELF_TEST_RETRY).await;
            tested = self_test(&context).await;
        }
        self_tested.done();
        std::future::pending().await
    });
    info!(node = config.node_name, cgroup = %root.dir.display(), %admin_addr, "the agent runs");
    tokio::select! {
        () = stop => info!("the agent stops; what is captured stays captured"),
        Some(ended) = tasks.join_next() => warn!(?ended, "a part of the agent has ended, so the agent does"),
    }
    Ok(())
}

/// Whether the connect hooks are seen to work.
async fn self_test(context: &Context) -> bool {
    let result = context.verifier.self_test(&context.kernel).await;
    if let Err(reason) = &result {
        tracing::error!(reason, "capture does not work on this node, so the agent is not ready");
    }
    result.is_ok()
}

/// Where objects come from, and where it is told what becomes of pods. Of a folder all is known after it; of the API
/// server nothing yet.
async fn feed_and_reports(config: &AgentConfig) -> Result<(Feed, Reports), AgentError> {
    match &config.source {
        SourceConfig::Manifests { folder, status_dir } => {
            let folders = Folders { manifests: folder.clone(), status: None };
            let watch = tokio::task::spawn_blocking(move || manifests::watch(folders)).await;
            let watch = watch.map_err(|error| failed("read the manifests")(io::Error::other(error)))??;
            let reports = match status_dir {
                Some(dir) => Reports::folder(dir, &config.node_name)?,
                None => Reports::Nowhere,
            };
            Ok((Feed::Folder(watch), reports))
        }
        SourceConfig::Kubernetes { kubeconfig } => {
            let api = Api::connect(kubeconfig.as_deref()).await?;
            let feed = Feed::kubernetes(&api, &config.node_name);
            let annotations = Annotations::new(api.clone(), feed.objects());
            let events = Arc::new(Events::new(api, config.node_name.clone()));
            Ok((feed, Reports::Kubernetes { annotations, events }))
        }
    }
}

fn pages(
    registry: Arc<Metrics>,
    metrics: Arc<AgentMetrics>,
    readiness: Readiness,
    health: Option<Arc<Health>>,
) -> Router {
    registry
        .pages(Router::new())
        .alive()
        .get("/readyz", move |_| {
            // What is not as it should be, which need not be in the way.
            let detail = health.as_ref().map(|health| health.detail()).unwrap_or_default();
            match readiness.pending_tasks().as_slice() {
                [] => Response::text(StatusCode::OK, format!("ready\n{detail}")),
                pending => {
                    let text = format!("not ready, pending: {}\n{detail}", pending.join(", "));
                    Response::text(StatusCode::SERVICE_UNAVAILABLE, text)
                }
            }
        })
        .get("/status", move |_| Response::json(&metrics.views()))
}

/// Ends with the first SIGTERM or SIGINT.
fn stop_signal() -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> AgentError {
    move |source| AgentError::Io { step, source }
}

fn run_dir_failed(step: &'static str, path: &Path) -> impl Fn(io::Error) -> AgentError {
    move |source| AgentError::RunDir { step, path: path.to_owned(), source }
}

/// Folder of the pods' records in the run folder.
const RECORDS: &str = "pods";
/// Threads of the agent: it waits more than it works.
const WORKERS: usize = 2;
const PODS_AT_A_TIME: usize = 16;
const PROBES: usize = 2;
const SELF_TEST_RETRY: Duration = Duration::from_secs(10);
const LOG_QUEUE: usize = 1 << 20;
const LOG_FLUSH: Duration = Duration::from_secs(2);

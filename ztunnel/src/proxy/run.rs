//! The proxy process: puts its parts together, starts them, and ends them in order.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use rustix::thread::CapabilitySet;

use super::config::ProxyConfig;
use super::dump::{MeshDump, certificates};
use super::pods::Pods;
use super::state::{Phase, Shared};
use super::worker;
use crate::discovery::{Discovery, DiscoverySettings};
use crate::identity::{
    CaClient, CaClientSettings, ControlPlane, ControlPlaneAddress, CrlFile, RootSource, Store, StoreSettings,
    TokenSource, Trust,
};
use crate::lifecycle::{Readiness, Shutdown, Watchdog, raise_descriptor_limit};
use crate::mesh::{Mesh, TunnelProtocol};
use crate::telemetry::Telemetry;
use crate::telemetry::admin::{admin_pages, readiness_pages};
use crate::telemetry::config_dump::{Pod as PodDump, Sources};
use crate::telemetry::flow::CloseReason;
use crate::telemetry::http::{BindError, Router, Server};
use crate::telemetry::log::Logging;
use crate::telemetry::metrics::Metrics;
use crate::zds;

/// Why the proxy does not run.
#[derive(Debug, thiserror::Error)]
pub enum ProxyError {
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error("cannot {step}: {source}")]
    Io { step: &'static str, source: io::Error },
    #[error("the proxy lacks {missing}, without which it cannot {what}: run it as root, or give it the capability")]
    Rights { missing: &'static str, what: &'static str },
}

/// Runs the proxy to its end. `logging` has been started.
pub fn run(config: ProxyConfig, logging: Logging) -> Result<(), ProxyError> {
    let failed = |step| move |source| ProxyError::Io { step, source };
    check_rights().map_err(failed("read the process's capabilities"))??;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed("start the runtime"))?;
    raise_descriptor_limit();
    runtime.block_on(async {
        let limits = config.limits;
        let readiness = Readiness::new();
        let watchdog = Watchdog::new(STUCK);
        let shutdown = Shutdown::new();
        let metrics = Metrics::new();
        let telemetry = Telemetry::new(&metrics, config.telemetry.series_max as usize, config.telemetry.series_idle);
        let mesh = Mesh::new(&config.node.node_name, config.mesh.cluster_id());
        let discovery = Discovery::start(xds(&config), discovery_settings(&config), mesh.clone());
        let trust = Trust::new(config.trust.settings(&config.mesh.trust_domain));
        let crl_file = config.trust.crl_path.clone().map(|path| CrlFile::start(path, trust.clone()));
        let authority = CaClient::new(ca(&config), ca_settings(&config), trust.clone());
        let store = Store::start(Arc::new(authority), trust, StoreSettings::default());
        tokio::spawn(follow_roots(discovery.clone(), store.clone()));

        let admin = Server::bind("admin", config.listen.admin_addr)?;
        let metrics_server = Server::bind("metrics", config.listen.metrics_addr)?;
        let readiness_server = Server::bind("readiness", config.listen.readiness_addr)?;
        let drain = config.timeouts.drain;
        let dumped = serde_json::to_value(&config).unwrap_or_default();
        let socket = config.zds_socket.clone();
        let shared =
            Shared::new(config, mesh.clone(), discovery.clone(), store.clone(), telemetry.clone(), shutdown.clone());
        tokio::spawn(prefetch(shared.clone()));
        tokio::spawn(super::rejudge::run(shared.clone()));
        tokio::spawn(super::overload::watch_memory(shared.clone()));
        let runtimes = worker::start(&shared, &watchdog).map_err(failed("start the workers"))?;

        let client = zds::Client::new(zds::ClientConfig::new(socket));
        let agent = client.status();
        let asked = agent.clone();
        readiness.asked("proxy workload manager", move || {
            let status = *asked.borrow();
            status.connected && status.snapshot && status.pending == 0
        });
        let synced = discovery.clone();
        readiness.asked("state manager", move || synced.is_synced());
        let ending = shutdown.clone();
        readiness.asked("shutdown", move || ending.is_ordered().is_none());
        metrics.process("ztunnel", Some(logging.clone()));
        metrics.runtimes(runtimes);
        super::metrics::register(&metrics, &shared, agent, &watchdog, crl_file);

        let pods_of = shared.clone();
        let sources = Sources {
            model: Box::new(move || Box::new(MeshDump(mesh.load_full()))),
            certificates: Box::new(move || certificates(&store)),
            pods: Box::new(move || pods(&pods_of)),
            telemetry: telemetry.clone(),
            config: dumped,
        };
        let never = std::future::pending::<()>;
        let pages = admin_pages(sources, logging.clone(), shutdown.clone());
        let asked = shared.clone();
        let pages = pages.get("/explain", move |request| super::explain::running::page(&asked, request));
        tokio::spawn(admin.serve(pages, never()));
        tokio::spawn(metrics_server.serve(metrics.pages(Router::new()), never()));
        tokio::spawn(readiness_server.serve(readiness_pages(readiness, watchdog), never()));
        let manager = Pods { shared: shared.clone(), runtime: tokio::runtime::Handle::current() };
        tokio::spawn(async move { client.run(Arc::new(manager)).await });
        let signals = shutdown.clone();
        let last_lines = logging.clone();
        tokio::spawn(async move {
            if let Err(error) = signals.on_signals(|| last_lines.flush(LOG_FLUSH)).await {
                tracing::error!(%error, "signals cannot be received: only quitquitquit stops this proxy in order");
            }
        });
        tracing::info!(threads = shared.config.threads, stream_window = limits.stream_window, "the proxy runs");

        let why = shutdown.ordered().await;
        let all: Vec<_> = shared.pods().values().cloned().collect();
        for pod in all {
            pod.advance(Phase::Leaving);
        }
        let drained = shutdown.drained(drain).await;
        for connection in telemetry.connections() {
            connection.close(CloseReason::DrainDeadline);
        }
        shutdown.drained(LAST_LINES).await;
        tracing::info!(why, %drained, "the proxy ends");
        logging.flush(LOG_FLUSH);
        Ok(())
    })
}

/// Said at once, and not for each pod later.
fn check_rights() -> io::Result<Result<(), ProxyError>> {
    let held = rustix::thread::capabilities(None)?.effective;
    let needed = [
        (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN", "enter pods' network namespaces"),
        (CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN", "dial with a client's address"),
    ];
    let missing = needed.into_iter().find(|(capability, ..)| !held.contains(*capability));
    Ok(missing.map_or(Ok(()), |(_, missing, what)| Err(ProxyError::Rights { missing, what })))
}

fn xds(config: &ProxyConfig) -> ControlPlane {
    let control = &config.control;
    ControlPlane {
        setting: "XDS_ADDRESS",
        roots_setting: "XDS_ROOT_CA",
        address: address(&control.xds_address),
        roots: roots(&control.xds_root),
        alternate_name: control.alt_xds_hostname.clone(),
        token: Some(token(&control.auth_token)),
        cluster_id: config.mesh.cluster_id().to_owned(),
        headers: control.xds_headers.clone().into_iter().collect(),
    }
}

fn ca(config: &ProxyConfig) -> ControlPlane {
    let control = &config.control;
    ControlPlane {
        setting: "CA_ADDRESS",
        roots_setting: "CA_ROOT_CA",
        address: address(&control.ca_address),
        roots: roots(&control.ca_root),
        alternate_name: control.alt_ca_hostname.clone(),
        token: Some(token(&control.auth_token)),
        cluster_id: config.mesh.cluster_id().to_owned(),
        headers: control.ca_headers.clone().into_iter().collect(),
    }
}

fn address(from: &super::config::Endpoint) -> ControlPlaneAddress {
    ControlPlaneAddress { tls: from.tls, host: from.host.clone(), port: from.port }
}

fn roots(from: &super::config::RootSource) -> RootSource {
    match from {
        super::config::RootSource::File(path) => RootSource::File(path.clone()),
        super::config::RootSource::System => RootSource::System,
        super::config::RootSource::Inline(text) => RootSource::Pem(text.clone()),
    }
}

fn token(from: &super::config::TokenSource) -> TokenSource {
    match from {
        super::config::TokenSource::File(path) => TokenSource::File(path.clone()),
        super::config::TokenSource::Literal(text) => TokenSource::Literal(text.clone()),
    }
}

fn ca_settings(config: &ProxyConfig) -> CaClientSettings {
    CaClientSettings { lifetime: config.control.secret_ttl, ..CaClientSettings::default() }
}

fn discovery_settings(config: &ProxyConfig) -> DiscoverySettings {
    DiscoverySettings {
        pod_name: config.node.pod_name.clone(),
        pod_namespace: config.node.pod_namespace.clone(),
        instance_ip: config.node.instance_ip,
        node_name: config.node.node_name.clone(),
        cluster_id: config.mesh.cluster_id().to_owned(),
        metadata: config.control.metadata.clone(),
        on_demand: config.control.on_demand,
        cluster_cidrs: config.mesh.cluster_cidrs.clone(),
        wait: config.timeouts.on_demand,
        hear_roots: config.control.ca_address == config.control.xds_address,
        ..DiscoverySettings::default()
    }
}

/// Certificates for the node's pods are fetched before they are needed, and forgotten with the last pod: for each pod
/// that is served, from when its record has come, and for each record of this node that says HBONE.
async fn prefetch(shared: Arc<Shared>) {
    let (mesh, store) = (&shared.mesh, &shared.certificates);
    let (mut records, mut served) = (mesh.changes(), shared.pods_changed.subscribe());
    let mut wanted = std::collections::HashSet::new();
    loop {
        let snapshot = mesh.load_full();
        let local = snapshot.local_workloads();
        let mut now: std::collections::HashSet<_> = local
            .filter(|w| w.common.protocol == TunnelProtocol::Hbone && !w.common.native_tunnel && !w.common.host_network)
            .map(|w| w.identity())
            .collect();
        now.extend(shared.pods().values().filter_map(|pod| {
            Some(snapshot.local_workload(&pod.namespace, &pod.name, &pod.service_account)?.identity())
        }));
        drop(snapshot);
        for identity in now.difference(&wanted) {
            store.want(identity);
        }
        for identity in wanted.difference(&now) {
            store.forget(identity);
        }
        wanted = now;
        // Both live as long as the process.
        tokio::select! {
            _ = records.changed() => {}
            _ = served.changed() => {}
        }
    }
}

/// Certificates that came with other roots than the control plane announces, or lead to another than the one that signs,
/// are renewed before their time.
async fn follow_roots(discovery: Discovery, store: Store) {
    let mut announced = discovery.announced_roots();
    loop {
        let newest = announced.borrow_and_update().clone();
        if let Some(newest) = newest {
            store.expect_roots(newest.roots, newest.signs, newest.renew_within);
        }
        // The sender lives in `discovery`.
        let _ = announced.changed().await;
    }
}

fn pods(shared: &Shared) -> Vec<PodDump> {
    let pods = shared.pods();
    let dump = pods.values().map(|pod| PodDump {
        uid: pod.uid.to_string(),
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        service_account: pod.service_account.clone(),
        by_ebpf: pod.by_ebpf,
        up: *pod.phase.borrow() == Phase::Serving,
    });
    dump.collect()
}

/// A worker that is silent for longer is stuck.
const STUCK: Duration = Duration::from_secs(20);
/// For the lines of connections that were cut at the end.
const LAST_LINES: Duration = Duration::from_millis(500);
const LOG_FLUSH: Duration = Duration::from_secs(1);

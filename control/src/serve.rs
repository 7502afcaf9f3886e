//! `control serve`: puts the parts together, runs them, and ends them in order.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use ztunnel::files::read_small;
use ztunnel::identity::rfc3339;
use ztunnel::kubernetes::{Api, ConnectError, Health, Source};
use ztunnel::lifecycle::Shutdown;
use ztunnel::manifests::{self, Folders, Objects, Watch, WatchError};
use ztunnel::proto::citadel::istio_certificate_service_server::IstioCertificateServiceServer;
use ztunnel::proto::discovery::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;
use ztunnel::telemetry::http::{BindError, Server as AdminServer};
use ztunnel::telemetry::log::Hush;
use ztunnel::telemetry::metrics::Metrics as Registry;

use crate::admin::{self, Readiness};
use crate::ca::{Ca, CaError, CaSettings, FolderWatch, write_whole};
use crate::ca_secret::{CaSecret, CaSecretError};
use crate::certificates::{Certificates, Rules};
use crate::kubernetes::{self, Candidate};
use crate::limits::{Rate, Rates};
use crate::metrics::Metrics;
use crate::model::{Model, ModelSettings, Snapshot};
use crate::policy_status::{self, PolicyConditions, PolicyStatusFolder};
use crate::root_config_maps::RootConfigMaps;
use crate::settings::{ServeArgs, SourceKind};
use crate::tls::{self, Serving};
use crate::tokens::{Check, KeyFile, KeyFileError, Reviews, TokenSettings, Tokens};
use crate::xds::{Discovery, Trust};

/// Why control does not run. Each message names the setting.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("--ca-dir: {0}")]
    Ca(#[from] CaError),
    #[error("--ca-secret: {0}")]
    CaSecret(#[from] CaSecretError),
    #[error("--ca-secret {0}: it is only kept with --source kubernetes")]
    NoSecrets(String),
    #[error("the host's name cannot be had ({0}): expected --pod-name")]
    PodName(io::Error),
    #[error("--leaf-ttl {life:?} is longer than --max-leaf-ttl {longest:?}: expected at most that")]
    LeafTtl { life: Duration, longest: Duration },
    #[error("--root-cert {}: cannot be written: {source}", path.display())]
    RootCert { path: PathBuf, source: io::Error },
    #[error("--service-account-key {0}")]
    Keys(#[from] KeyFileError),
    #[error("--manifests: {0}")]
    Manifests(#[from] WatchError),
    #[error(transparent)]
    Kubernetes(#[from] ConnectError),
    #[error("--status-dir {}: it is not read with --source kubernetes, where annotations of pods say the same", .0.display())]
    StatusDir(PathBuf),
    #[error("--policy-status-dir {}: {reason}", path.display())]
    PolicyStatus { path: PathBuf, reason: String },
    #[error("--admin-addr: {0}")]
    Admin(#[from] BindError),
    #[error("--listen {address}: {source}")]
    Listen { address: SocketAddr, source: io::Error },
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    #[error("stopped before the start was over")]
    Stopped,
    #[error("{what} ended: {reason}")]
    Ended { what: &'static str, reason: String },
}

/// A control plane that listens.
pub struct Control {
    pub address: SocketAddr,
    pub admin_address: SocketAddr,
    parts: Parts,
}

/// What runs.
struct Parts {
    ca: Arc<Ca>,
    root_cert: Option<PathBuf>,
    serving: Arc<Serving>,
    tls: Arc<rustls::ServerConfig>,
    listener: tokio::net::TcpListener,
    admin: (AdminServer, ztunnel::telemetry::http::Router),
    discovery: Discovery,
    certificates: Certificates,
    metrics: Arc<Metrics>,
    snapshots: watch::Receiver<Snapshot>,
    policy_statuses: Option<PolicyStatusFolder>,
    shutdown: Shutdown,
    known: watch::Receiver<bool>,
    feed: Feed,
    /// Of the authority, where it is kept in one.
    secret: Option<CaSecret>,
    /// What several replicas do once.
    once: Option<Candidate>,
    config_maps: Option<RootConfigMaps>,
    conditions: Option<PolicyConditions>,
}

/// Where objects come from. Ends when it is dropped.
enum Feed {
    Folder(Watch),
    Kubernetes(Source),
}

impl Control {
    /// Reads everything once and listens; nodes are answered once it [runs](Self::run). Must be called on a runtime.
    pub async fn start(args: ServeArgs, shutdown: Shutdown) -> Result<Self, ServeError> {
        // Before the root, which may have to be made: a wrong setting leaves no trace.
        let longest_life = args.max_leaf_ttl.unwrap_or(args.leaf_ttl);
        if args.leaf_ttl > longest_life {
            return Err(ServeError::LeafTtl { life: args.leaf_ttl, longest: longest_life });
        }
        let keys = args.service_account_key.as_deref().map(KeyFile::open).transpose()?;
        let policy_statuses = policy_statuses(&args)?;
        let api = match (args.source, &args.status_dir) {
            (SourceKind::Manifests, _) => None,
            (SourceKind::Kubernetes, Some(dir)) => return Err(ServeError::StatusDir(dir.clone())),
            (SourceKind::Kubernetes, None) => Some(Api::connect(args.kubeconfig.as_deref()).await?),
        };
        let ca_settings = CaSettings {
            dir: args.ca_dir.clone(),
            trust_domain: args.trust_domain.clone(),
            longest_life,
            backdate: args.leaf_backdate,
        };
        let secret = match (args.ca_secret, &api) {
            (None, _) => None,
            (Some(name), None) => return Err(ServeError::NoSecrets(name)),
            (Some(name), Some(api)) => {
                Some(CaSecret { api: api.clone(), namespace: args.system_namespace.clone(), name, dir: args.ca_dir })
            }
        };
        let ca = Arc::new(match &secret {
            None => Ca::open(ca_settings)?,
            Some(secret) => tokio::select! {
                ca = secret.open(ca_settings) => ca?,
                _ = shutdown.ordered() => return Err(ServeError::Stopped),
            },
        });
        let report = ca.report();
        tracing::info!(
            dir = report.dir,
            layout = ?report.layout,
            signs = report.signs.name,
            until = rfc3339(ca.not_after()),
            roots = report.roots.len(),
            "the certificate authority is ready"
        );
        if let Some(path) = &args.root_cert {
            publish_roots(&ca, path).map_err(|source| ServeError::RootCert { path: path.clone(), source })?;
        }
        let settings = TokenSettings {
            issuer: args.service_account_issuer,
            audience: args.token_audience,
            cluster_id: args.cluster_id.clone(),
        };
        let check = match (keys, &api) {
            (Some(keys), _) => Check::Keys(keys),
            (None, Some(api)) => Check::Reviews(Reviews::new(api.clone())),
            // The arguments have been checked for it.
            (None, None) => KeyFile::open(Path::new("")).map(Check::Keys)?,
        };
        let tokens = Arc::new(Tokens::new(check, settings));
        let once = match &api {
            Some(api) => {
                let me = args.pod_name.map_or_else(host_name, Ok).map_err(ServeError::PodName)?;
                Some(Candidate::new(api.clone(), args.system_namespace.clone(), LEASE, me))
            }
            None => None,
        };
        let feed = match (&api, args.manifests) {
            (Some(api), _) => Feed::Kubernetes(kubernetes::source(api)),
            (None, folder) => Feed::folder(folder.unwrap_or_default(), args.status_dir).await?,
        };
        let (objects, health) = (feed.objects(), feed.health());
        let whole = health.clone();
        let (snapshots, known) = follow(
            ModelSettings {
                cluster_id: args.cluster_id,
                cluster_domain: args.cluster_domain,
                trust_domain: args.trust_domain.clone(),
                root_namespace: args.root_namespace.unwrap_or_else(|| args.system_namespace.clone()),
                system_namespace: args.system_namespace,
            },
            objects.clone(),
            async move {
                if let Some(health) = whole {
                    health.complete().await;
                }
            },
        );
        let (metrics, registry) = (Metrics::new(), Registry::new());
        metrics.register(&registry, ca.clone(), snapshots.clone(), objects.clone());
        if let Some(health) = &health {
            health.register(&registry);
        }
        let serving = Serving::new(ca.clone(), args.server_name)?;
        let tls = serving.config()?;
        let listen = |source| ServeError::Listen { address: args.listen, source };
        let listener = tls::listen(args.listen).map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let admin = AdminServer::bind("admin", args.admin_addr)?;
        let admin_address = admin.local_addr();
        let readiness = Readiness { shutdown: shutdown.clone(), known: known.clone(), health };
        let pages = admin::pages(&registry, ca.clone(), snapshots.clone(), objects.clone(), readiness);
        let conditions = api.clone().zip(once.as_ref()).map(|(api, once)| PolicyConditions {
            api,
            snapshots: snapshots.clone(),
            leads: once.leads(),
            metrics: metrics.clone(),
        });
        let config_maps = api.zip(once.as_ref()).map(|(api, once)| RootConfigMaps {
            api,
            ca: ca.clone(),
            objects: objects.clone(),
            leads: once.leads(),
            metrics: metrics.clone(),
        });
        let trust =
            Trust { bundles: ca.bundles(), trust_domain: args.trust_domain.clone(), renew_within: args.renewal_window };
        let certificates = Certificates {
            ca: ca.clone(),
            tokens: tokens.clone(),
            objects,
            rules: Rules {
                trust_domain: args.trust_domain,
                trusted: args.trusted_node_account.clone(),
                leaf_ttl: args.leaf_ttl,
                longest_life,
            },
            metrics: metrics.clone(),
            rates: Rates::new(Rate { burst: args.certificate_burst, per_second: args.certificate_rate }, MAX_PROXIES),
            strangers: Rates::new(STRANGERS, MAX_STRANGERS),
            signing: Arc::new(Semaphore::new(SIGNATURES_AT_ONCE)),
            hush: Hush::new(LINES),
        };
        let discovery = Discovery {
            snapshots: snapshots.clone(),
            trust,
            tokens,
            metrics: metrics.clone(),
            shutdown: shutdown.clone(),
            hush: Hush::new(LINES),
            proxies: args.trusted_node_account,
        };
        let parts = Parts {
            ca,
            root_cert: args.root_cert,
            serving,
            tls,
            listener,
            admin: (admin, pages),
            discovery,
            certificates,
            metrics,
            snapshots,
            policy_statuses,
            shutdown,
            known,
            feed,
            secret,
            once,
            config_maps,
            conditions,
        };
        Ok(Self { address, admin_address, parts })
    }

    /// Runs until the stop is ordered: then streams are ended in good order, and requests that are under way answered.
    pub async fn run(self) -> Result<(), ServeError> {
        let Parts {
            ca,
            root_cert,
            serving,
            tls,
            listener,
            admin,
            discovery,
            certificates,
            metrics,
            snapshots,
            policy_statuses,
            shutdown,
            mut known,
            feed: _feed,
            secret,
            once,
            config_maps,
            conditions,
        } = self.parts;
        tracing::info!(address = %self.address, admin = %self.admin_address, "control runs");
        let (ready, incoming) = mpsc::channel(INCOMING);
        let server = Server::builder()
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PONG))
            .max_concurrent_streams(STREAMS_PER_CONNECTION)
            .http2_max_header_list_size(MAX_HEADERS)
            .add_service(AggregatedDiscoveryServiceServer::new(discovery).max_decoding_message_size(MAX_REQUEST))
            .add_service(IstioCertificateServiceServer::new(certificates).max_decoding_message_size(MAX_CSR_REQUEST));
        let ordered = shutdown.clone();
        let serve = server.serve_with_incoming_shutdown(ReceiverStream::new(incoming), async move {
            ordered.ordered().await;
        });
        let stopped = async {
            shutdown.ordered().await;
            tokio::time::sleep(STOP_LIMIT).await;
        };
        let (admin, pages) = admin;
        // Nobody is told less than there is.
        let mut accept_when = known.clone();
        let accepted = async {
            let _ = accept_when.wait_for(|known| *known).await;
            tls::accept(listener, tls, metrics.clone(), ready).await;
        };
        let secret = forever(secret.map(CaSecret::follow));
        let mut all_known = known.clone();
        let written = async {
            let _ = all_known.wait_for(|known| *known).await;
            tokio::join!(
                forever(config_maps.map(RootConfigMaps::keep)),
                forever(conditions.map(PolicyConditions::keep)),
            );
        };
        let (stop, mut candidate) = (shutdown.clone(), JoinSet::new());
        if let Some(once) = once {
            candidate.spawn(async move { once.run(async move { _ = stop.ordered().await }).await });
        }
        let told = async {
            let _ = known.wait_for(|known| *known).await;
            policy_status::tell(snapshots, policy_statuses, metrics.clone()).await;
        };
        // All end with this function.
        let ended = tokio::select! {
            served = serve => match served {
                Ok(()) if shutdown.is_ordered().is_some() => Ok(()),
                Ok(()) => Err("there are no more connections".to_owned()),
                Err(e) => Err(e.to_string()),
            },
            () = stopped => {
                tracing::warn!(limit = ?STOP_LIMIT, "connections were still open, they are cut");
                Ok(())
            }
            () = told => Err("what becomes of policies is no longer told".to_owned()),
            () = accepted => Err("nothing is accepted any more".to_owned()),
            () = secret => Err("the authority's Secret is no longer followed".to_owned()),
            () = written => Err("roots and statuses are no longer written".to_owned()),
            () = admin.serve(pages, std::future::pending()) => Err("the admin server has ended".to_owned()),
            () = tend(&ca, &serving, root_cert.as_deref()) => Err("the authority is no longer looked after".to_owned()),
        };
        // Lets go of the lease, so that another replica need not wait for its end.
        if tokio::time::timeout(LET_GO, async { while candidate.join_next().await.is_some() {} }).await.is_err() {
            tracing::warn!("the lease has not been given back, it ends by itself");
        }
        ended.map_err(|reason| ServeError::Ended { what: "serving", reason })
    }
}

/// What ends only if it is there.
async fn forever(task: Option<impl Future<Output = ()>>) {
    match task {
        Some(task) => task.await,
        None => std::future::pending().await,
    }
}

fn host_name() -> io::Result<String> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if name.is_empty() { Err(io::Error::new(io::ErrorKind::NotFound, "it is empty")) } else { Ok(name) }
}

/// The folder for the status of policies, which must not be one that is read: its files would be taken for others.
fn policy_statuses(args: &ServeArgs) -> Result<Option<PolicyStatusFolder>, ServeError> {
    let Some(path) = &args.policy_status_dir else { return Ok(None) };
    let fail = |reason: String| ServeError::PolicyStatus { path: path.clone(), reason };
    let folder = PolicyStatusFolder::open(path.clone()).map_err(|e| fail(format!("cannot be made: {e}")))?;
    let real = |path: &Path| path.canonicalize().ok();
    for (setting, other) in [("--manifests", args.manifests.as_ref()), ("--status-dir", args.status_dir.as_ref())] {
        if other.is_some_and(|other| real(other) == real(path)) {
            return Err(fail(format!("is that of {setting}, expected a folder of its own")));
        }
    }
    Ok(Some(folder))
}

impl Feed {
    async fn folder(manifests: PathBuf, status: Option<PathBuf>) -> Result<Self, ServeError> {
        let folders = Folders { manifests, status };
        // Reads a lot of files.
        let watch = tokio::task::spawn_blocking(move || manifests::watch(folders)).await;
        let ended =
            |e: tokio::task::JoinError| ServeError::Ended { what: "reading the manifests", reason: e.to_string() };
        Ok(Self::Folder(watch.map_err(ended)??))
    }

    fn objects(&self) -> watch::Receiver<Arc<Objects>> {
        match self {
            Self::Folder(watch) => watch.objects(),
            Self::Kubernetes(source) => source.objects(),
        }
    }

    fn health(&self) -> Option<Arc<Health>> {
        match self {
            Self::Folder(_) => None,
            Self::Kubernetes(source) => Some(source.health()),
        }
    }
}

/// Keeps the model up to date with the objects, from when they are complete: the second value tells when its first
/// snapshot is there. Ends with the objects' source.
fn follow(
    settings: ModelSettings,
    mut objects: watch::Receiver<Arc<Objects>>,
    complete: impl Future<Output = ()> + Send + 'static,
) -> (watch::Receiver<Snapshot>, watch::Receiver<bool>) {
    let mut model = Model::new(settings);
    let (publish, snapshots) = watch::channel(model.snapshot());
    let (tell, known) = watch::channel(false);
    tokio::spawn(async move {
        complete.await;
        let first = objects.borrow_and_update().clone();
        model.update(first);
        publish.send_replace(model.snapshot());
        tell.send_replace(true);
        while objects.changed().await.is_ok() {
            gather(&mut objects).await;
            let newer = objects.borrow_and_update().clone();
            let started = Instant::now();
            if let Some(mut snapshot) = model.update(newer) {
                snapshot.published = Some(Instant::now());
                tracing::debug!(generation = snapshot.generation, took = ?started.elapsed(), "the model has changed");
                publish.send_replace(snapshot);
            }
        }
    });
    (snapshots, known)
}

/// A burst of changes is one: waits until it is quiet, or long enough.
async fn gather(objects: &mut watch::Receiver<Arc<Objects>>) {
    let limit = tokio::time::Instant::now() + BURST;
    loop {
        objects.borrow_and_update();
        let quiet = (tokio::time::Instant::now() + QUIET).min(limit);
        match tokio::time::timeout_at(quiet, objects.changed()).await {
            Ok(Ok(())) if tokio::time::Instant::now() < limit => {}
            _ => return,
        }
    }
}

/// Looks after the authority and what is signed by it for ourselves.
async fn tend(ca: &Arc<Ca>, serving: &Arc<Serving>, root_cert: Option<&Path>) {
    let mut folder = FolderWatch::new(ca.dir());
    let mut look = tokio::time::interval(LOOK);
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut complaint = None;
    let mut warned = None::<Instant>;
    loop {
        tokio::select! {
            _ = look.tick() => folder.listen(),
            // The files of one change follow each other.
            () = folder.changed() => tokio::time::sleep(GATHER).await,
        }
        let (of, ours, path) = (ca.clone(), serving.clone(), root_cert.map(Path::to_owned));
        let looked = tokio::task::spawn_blocking(move || look_after(&of, &ours, path.as_deref())).await;
        let problem = looked.unwrap_or_else(|panic| Some(panic.to_string()));
        match &problem {
            Some(reason) if problem != complaint => {
                tracing::warn!(reason, "the authority's files cannot be used, those before stay in force");
            }
            None if complaint.is_some() => tracing::info!("the authority's files are right again"),
            _ => {}
        }
        complaint = problem;
        let report = ca.report();
        let ends = report.certificates().filter(|(_, cert)| cert.seconds_left < ENDS_SOON.as_secs());
        if warned.is_none_or(|at| at.elapsed() > WARN_AGAIN) {
            for (what, cert) in ends {
                warned = Some(Instant::now());
                tracing::warn!(
                    name = cert.name,
                    until = cert.not_after,
                    "a {what} certificate of the authority ends soon"
                );
            }
        }
    }
}

/// One look; why the files cannot be used, if they cannot.
fn look_after(ca: &Ca, serving: &Serving, root_cert: Option<&Path>) -> Option<String> {
    let changes = ca.refresh();
    if (changes.signer || serving.is_due())
        && let Err(error) = serving.renew()
    {
        tracing::error!(%error, "the serving certificate cannot be renewed");
    }
    if let Some(path) = root_cert
        && let Err(error) = publish_roots(ca, path)
    {
        tracing::warn!(path = %path.display(), %error, "the roots cannot be written for the proxies");
    }
    changes.problem
}

/// Writes the roots for the proxies, if the file does not hold them.
fn publish_roots(ca: &Ca, path: &Path) -> io::Result<()> {
    let roots = ca.roots_pem();
    if read_small(path, roots.len()).is_ok_and(|held| held == roots.as_bytes()) {
        return Ok(());
    }
    write_whole(path, roots.as_bytes(), 0o644)
}

/// Bytes; a proxy that comes again tells all that it holds.
const MAX_REQUEST: usize = 64 << 20;
/// Bytes.
const MAX_CSR_REQUEST: usize = 64 << 10;
/// Bytes of a request's headers, with its token.
const MAX_HEADERS: u32 = 32 << 10;
/// A proxy opens one for discovery and some for certificates.
const STREAMS_PER_CONNECTION: u32 = 64;
/// Connections that are ready and not taken up yet.
const INCOMING: usize = 64;
/// Node proxies whose rate is known at a time; a cluster has fewer nodes.
const MAX_PROXIES: usize = 20_000;
/// Requests for certificates from accounts that get none.
const STRANGERS: Rate = Rate { burst: 20, per_second: 1 };
const MAX_STRANGERS: usize = 10_000;
/// More would only wait for the processor.
const SIGNATURES_AT_ONCE: usize = 4;
/// Log lines a second about callers that are refused.
const LINES: u32 = 10;
/// As istiod does.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(10);
/// Changes that follow each other within this time are one.
const QUIET: Duration = Duration::from_millis(10);
/// No change waits longer for others.
const BURST: Duration = Duration::from_millis(100);
/// From the order to stop to the end of what has not ended.
const STOP_LIMIT: Duration = Duration::from_secs(5);
const LET_GO: Duration = Duration::from_secs(3);
/// Of the replica that does what is done once.
pub(crate) const LEASE: &str = "understory-control";
/// How often the authority's files are looked at without having heard of a change.
const LOOK: Duration = Duration::from_secs(2);
const GATHER: Duration = Duration::from_millis(200);
const ENDS_SOON: Duration = Duration::from_secs(30 * 86400);
const WARN_AGAIN: Duration = Duration::from_secs(86400);

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::settings::{Cli, Command};

    #[test]
    fn the_status_of_policies_is_not_written_among_what_is_read() {
        let dir = std::env::temp_dir().join(format!("understory-serve-{}", std::process::id()));
        let sub = |name: &str| dir.join(name).display().to_string();
        for name in ["manifests", "status"] {
            std::fs::create_dir_all(dir.join(name)).unwrap();
        }
        let with = |policies: &str| {
            let (manifests, status, policies) = (sub("manifests"), sub("status"), sub(policies));
            let args = ["control", "serve", "--manifests", &manifests, "--status-dir", &status, "--policy-status-dir"];
            let args = args.into_iter().chain([policies.as_str(), "--ca-dir", "/x", "--service-account-key", "/x"]);
            match Cli::try_parse_from(args).unwrap().command {
                Command::Serve(args) => policy_statuses(&args).map_err(|e| e.to_string()),
                Command::Check(_) | Command::Ca(_) => unreachable!("serve was asked for"),
            }
        };
        for (folder, setting) in
            [("manifests", "--manifests"), ("status/../manifests", "--manifests"), ("status", "--status-dir")]
        {
            let error = with(folder).unwrap_err();
            assert!(error.contains("--policy-status-dir") && error.contains(setting), "{error}");
        }
        assert!(with("policies").unwrap().is_some());
        assert!(dir.join("policies").is_dir());
        std::fs::remove_dir_all(dir).unwrap();
    }
}

//! `control serve`: puts the parts together, runs them, and ends them in order.

mod feed;
mod tend;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use ztunnel::identity::rfc3339;
use ztunnel::kubernetes::ConnectError;
use ztunnel::lifecycle::Shutdown;
use ztunnel::manifests::WatchError;
use ztunnel::proto::citadel::istio_certificate_service_server::IstioCertificateServiceServer;
use ztunnel::proto::discovery::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;
use ztunnel::telemetry::http::{BindError, Server as AdminServer};
use ztunnel::telemetry::log::Hush;
use ztunnel::telemetry::metrics::Metrics as Registry;

use crate::admin::{self, Readiness};
use crate::ca::{Ca, CaError, CaSettings};
use crate::ca_secret::{CaSecret, CaSecretError};
use crate::certificates::{Certificates, Rules};
use crate::kubernetes::Candidate;
use crate::limits::{Rate, Rates};
use crate::metrics::Metrics;
use crate::model::{ModelSettings, Snapshot};
use crate::policy_status::{self, PolicyConditions, PolicyStatusFolder};
use crate::root_config_maps::RootConfigMaps;
use crate::settings::ServeArgs;
use crate::tls::{self, Serving};
use crate::tokens::{Check, KeyFile, KeyFileError, Reviews, TokenSettings, Tokens};
use crate::xds::{Discovery, Trust};
use feed::{Feed, Origin};

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
    #[error("{0}: it is required with --source manifests")]
    Required(&'static str),
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
        let origin = Origin::of(&args).await?;
        let check = match (keys, &origin) {
            (Some(keys), _) => Check::Keys(keys),
            (None, Origin::Cluster(api)) => Check::Reviews(Reviews::new(api.clone())),
            (None, Origin::Folders(_)) => return Err(ServeError::Required("--service-account-key")),
        };
        let api = origin.api().cloned();
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
            tend::publish_roots(&ca, path).map_err(|source| ServeError::RootCert { path: path.clone(), source })?;
        }
        let settings = TokenSettings {
            issuer: args.service_account_issuer,
            audience: args.token_audience,
            cluster_id: args.cluster_id.clone(),
        };
        let tokens = Arc::new(Tokens::new(check, settings));
        let once = match &api {
            Some(api) => {
                let me = args.pod_name.map_or_else(host_name, Ok).map_err(ServeError::PodName)?;
                Some(Candidate::new(api.clone(), args.system_namespace.clone(), LEASE, me))
            }
            None => None,
        };
        let feed = Feed::start(origin).await?;
        let (objects, health) = (feed.objects(), feed.health());
        let whole = health.clone();
        let (snapshots, known) = feed::follow(
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
            () = tend::tend(&ca, &serving, root_cert.as_deref()) => Err("the authority is no longer looked after".to_owned()),
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
/// From the order to stop to the end of what has not ended.
const STOP_LIMIT: Duration = Duration::from_secs(5);
const LET_GO: Duration = Duration::from_secs(3);
/// Of the replica that does what is done once.
pub(crate) const LEASE: &str = "understory-control";

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
                Command::Check(_) | Command::Ca(_) | Command::Uninstall(_) => unreachable!("serve was asked for"),
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

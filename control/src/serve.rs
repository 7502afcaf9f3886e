//! `control serve`: puts the parts together and runs them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use rustls::pki_types::PrivateKeyDer;
use rustls::sign::CertifiedKey;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;
use ztunnel::identity::TrustDomain;
use ztunnel::lifecycle::Shutdown;
use ztunnel::manifests::{self, Folders, Objects, WatchError};
use ztunnel::proto::citadel::istio_certificate_service_server::IstioCertificateServiceServer;
use ztunnel::proto::discovery::aggregated_discovery_service_server::AggregatedDiscoveryServiceServer;
use ztunnel::telemetry::http::{BindError, Response, Router, Server as AdminServer};
use ztunnel::telemetry::log::Logging;
use ztunnel::telemetry::metrics::Metrics;

use crate::ads::{Ads, AdsCounters};
use crate::ca::{Ca, CaError, write_whole};
use crate::certificates::{Certificates, Counters, Rates};
use crate::model::{Model, ModelSettings, Snapshot};
use crate::settings::{ServeArgs, SettingError};
use crate::tokens::{TokenError, Tokens};

/// Why control does not run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Setting(#[from] SettingError),
    #[error("--ca-dir: {0}")]
    Ca(#[from] CaError),
    #[error("--service-account-key: {0}")]
    Tokens(#[from] TokenError),
    #[error(transparent)]
    Manifests(#[from] WatchError),
    #[error(transparent)]
    Admin(#[from] BindError),
    #[error("--listen {address}: {source}")]
    Listen { address: std::net::SocketAddr, source: io::Error },
    #[error("cannot {step}: {reason}")]
    Step { step: &'static str, reason: String },
}

/// Runs until SIGTERM.
pub async fn run(args: ServeArgs, logging: Logging) -> Result<(), ServeError> {
    args.check()?;
    let ca = Arc::new(Ca::open(&args.ca_dir)?);
    if let Some(path) = &args.root_cert {
        write_whole(path, ca.root_pem().as_bytes(), 0o644)
            .map_err(|e| ServeError::Step { step: "write --root-cert", reason: format!("{}: {e}", path.display()) })?;
    }
    let tokens = Arc::new(Tokens::new(
        args.service_account_key.clone(),
        args.service_account_issuer.clone(),
        args.token_audience.clone(),
        args.cluster_id.clone(),
    ));
    tokens.check()?;
    let folders = Folders { manifests: args.manifests.clone(), status: args.status_dir.clone() };
    let watch = tokio::task::spawn_blocking(move || manifests::watch(folders));
    let watch = watch.await.map_err(|e| ServeError::Step { step: "read the manifests", reason: e.to_string() })??;
    let objects = watch.objects();
    let settings = ModelSettings {
        cluster_id: args.cluster_id.clone(),
        cluster_domain: args.cluster_domain.clone(),
        trust_domain: TrustDomain::new(&args.trust_domain),
        system_namespace: args.system_namespace.clone(),
    };
    let snapshots = follow(settings, objects.clone());

    let shutdown = Shutdown::new();
    let (ads_counters, ca_counters) = (Arc::<AdsCounters>::default(), Arc::<Counters>::default());
    let metrics = metrics(&ca, &ads_counters, &ca_counters, &snapshots, &objects);
    let admin = AdminServer::bind("admin", args.admin_addr)?;
    let pages = pages(metrics, snapshots.clone(), objects.clone());
    tokio::spawn(admin.serve(pages, std::future::pending()));

    let listener = listen(args.listen).map_err(|source| ServeError::Listen { address: args.listen, source })?;
    let incoming = accept(listener, ca.clone(), args.server_name.clone())?;
    let ads = Ads { snapshots, tokens: tokens.clone(), counters: ads_counters };
    let certificates = Certificates {
        ca,
        tokens,
        objects,
        trust_domain: TrustDomain::new(&args.trust_domain),
        trusted: args.trusted_node_account.clone(),
        leaf_ttl: args.leaf_ttl(),
        counters: ca_counters,
        rates: Rates::default(),
    };
    let signals = shutdown.clone();
    let last_lines = logging.clone();
    tokio::spawn(async move { signals.on_signals(|| last_lines.flush(LOG_FLUSH)).await });
    tracing::info!(address = %args.listen, manifests = %args.manifests.display(), "control runs");
    let serving = Server::builder()
        .http2_keepalive_interval(Some(Duration::from_secs(30)))
        .http2_keepalive_timeout(Some(Duration::from_secs(10)))
        .add_service(AggregatedDiscoveryServiceServer::new(ads).max_decoding_message_size(MAX_REQUEST))
        .add_service(IstioCertificateServiceServer::new(certificates).max_decoding_message_size(MAX_CSR_REQUEST))
        .serve_with_incoming(ReceiverStream::new(incoming));
    tokio::select! {
        served = serving => {
            served.map_err(|e| ServeError::Step { step: "serve", reason: e.to_string() })?;
        }
        why = shutdown.ordered() => tracing::info!(why, "control ends"),
    }
    drop(watch);
    logging.flush(LOG_FLUSH);
    Ok(())
}

/// Keeps the model up to date with the objects.
fn follow(settings: ModelSettings, mut objects: watch::Receiver<Arc<Objects>>) -> watch::Receiver<Snapshot> {
    let mut model = Model::new(settings);
    let first = objects.borrow_and_update().clone();
    model.update(first);
    let (publish, snapshots) = watch::channel(model.snapshot());
    tokio::spawn(async move {
        while objects.changed().await.is_ok() {
            let newer = objects.borrow_and_update().clone();
            if let Some(snapshot) = model.update(newer) {
                publish.send_replace(snapshot);
            }
        }
    });
    snapshots
}

fn listen(address: std::net::SocketAddr) -> io::Result<TcpListener> {
    let bind = |address: std::net::SocketAddr| {
        let socket = socket2_like(address)?;
        socket.listen(1024)
    };
    match bind(address) {
        // A machine without IPv6.
        Err(error) if address.ip().is_unspecified() && address.is_ipv6() && is_no_ipv6(&error) => {
            bind(std::net::SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), address.port()))
        }
        result => result,
    }
}

fn socket2_like(address: std::net::SocketAddr) -> io::Result<tokio::net::TcpSocket> {
    let socket = if address.is_ipv6() { tokio::net::TcpSocket::new_v6() } else { tokio::net::TcpSocket::new_v4() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

fn is_no_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(97 | 99))
}

/// Accepts TLS connections; handshakes are bounded in number and time. The serving certificate is renewed by itself.
fn accept(
    listener: TcpListener,
    ca: Arc<Ca>,
    names: Vec<String>,
) -> Result<mpsc::Receiver<io::Result<Secured>>, ServeError> {
    let (ready, incoming) = mpsc::channel(64);
    let mut acceptor = acceptor(&ca, &names)?;
    tokio::spawn(async move {
        let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
        let mut renewal = tokio::time::interval(SERVING_LIFETIME / 2);
        renewal.tick().await;
        loop {
            let accepted = tokio::select! {
                _ = renewal.tick() => {
                    match self::acceptor(&ca, &names) {
                        Ok(fresh) => acceptor = fresh,
                        Err(error) => tracing::error!(%error, "the serving certificate cannot be renewed"),
                    }
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            let (socket, peer) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(permit) = handshakes.clone().acquire_owned().await else { return };
            let (acceptor, ready) = (acceptor.clone(), ready.clone());
            tokio::spawn(async move {
                let _permit = permit;
                let _ = socket.set_nodelay(true);
                match tokio::time::timeout(HANDSHAKE_LIMIT, acceptor.accept(socket)).await {
                    Ok(Ok(stream)) => {
                        let _ = ready.send(Ok(Secured(stream))).await;
                    }
                    Ok(Err(error)) => tracing::debug!(%peer, %error, "TLS handshake failed"),
                    Err(_) => tracing::debug!(%peer, "TLS handshake took too long"),
                }
            });
        }
    });
    Ok(incoming)
}

/// A TLS connection as tonic wants it.
struct Secured(TlsStream<TcpStream>);

impl Connected for Secured {
    type ConnectInfo = ();
    fn connect_info(&self) {}
}

impl AsyncRead for Secured {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl AsyncWrite for Secured {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

fn acceptor(ca: &Ca, names: &[String]) -> Result<TlsAcceptor, ServeError> {
    let step = |e: String| ServeError::Step { step: "make the serving certificate", reason: e };
    let (pem, key) = ca.serving(names, SERVING_LIFETIME)?;
    let chain = ztunnel::identity::certificates_from_pem(pem.as_bytes()).map_err(|e| step(e.to_string()))?;
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let key = PrivateKeyDer::try_from(key.serialize_der()).map_err(|e| step(e.to_owned()))?;
    let key = provider.key_provider.load_private_key(key).map_err(|e| step(e.to_string()))?;
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])
        .map_err(|e| step(e.to_string()))?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(CertifiedKey::new(chain, key))));
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

fn metrics(
    ca: &Arc<Ca>,
    ads: &Arc<AdsCounters>,
    certificates: &Arc<Counters>,
    snapshots: &watch::Receiver<Snapshot>,
    objects: &watch::Receiver<Arc<Objects>>,
) -> Arc<Metrics> {
    let metrics = Metrics::new();
    let end = ca.not_after();
    metrics.gauge("understory_ca_root_days_left", "Days until the root ends", move || {
        end.duration_since(SystemTime::now()).unwrap_or_default().as_secs_f64() / 86400.0
    });
    let of = certificates.clone();
    metrics.counter("understory_ca_signed", "Certificates signed", move || of.signed.load(Ordering::Relaxed));
    let of = certificates.clone();
    metrics.counter("understory_ca_refused", "Requests for certificates refused", move || {
        of.refused.load(Ordering::Relaxed)
    });
    let of = ads.clone();
    metrics
        .gauge("understory_xds_streams", "Open discovery streams", move || of.streams.load(Ordering::Relaxed) as f64);
    let of = ads.clone();
    metrics
        .counter("understory_xds_responses", "Discovery responses sent", move || of.responses.load(Ordering::Relaxed));
    let of = ads.clone();
    metrics.counter("understory_xds_nacks", "Discovery responses that a proxy could not use whole", move || {
        of.nacks.load(Ordering::Relaxed)
    });
    let of = snapshots.clone();
    metrics.gauges("understory_resources", "Resources served", move |samples| {
        for (kind, count) in of.borrow().counts() {
            samples.add(&[("kind", kind)], count as f64);
        }
    });
    let of = objects.clone();
    metrics
        .gauge("understory_manifest_problems", "Problems with manifests", move || of.borrow().problems().len() as f64);
    metrics
}

#[derive(Serialize)]
struct ProblemPage {
    file: String,
    text: String,
}

fn pages(
    metrics: Arc<Metrics>,
    snapshots: watch::Receiver<Snapshot>,
    objects: watch::Receiver<Arc<Objects>>,
) -> Router {
    let problems = move |_: &ztunnel::telemetry::http::Request| {
        let objects = objects.borrow().clone();
        let page = objects
            .problems()
            .iter()
            .map(|p| ProblemPage { file: p.file.display().to_string(), text: p.to_string() })
            .collect::<Vec<_>>();
        Response::json(&page)
    };
    let resources = move |_: &ztunnel::telemetry::http::Request| {
        let snapshot = snapshots.borrow().clone();
        let mut text = String::new();
        for set in [crate::model::Set::Addresses, crate::model::Set::Authorizations] {
            for resource in snapshot.all(set) {
                use std::fmt::Write;
                let _ = writeln!(text, "{} {} {:?}", resource.name, resource.version_text(), resource.decode());
            }
        }
        Response::text(http::StatusCode::OK, text)
    };
    let ok = |_: &ztunnel::telemetry::http::Request| Response::text(http::StatusCode::OK, "ok");
    metrics
        .pages(Router::new())
        .get("/healthz", ok)
        .get("/readyz", ok)
        .get("/debug/problems", problems)
        .get("/debug/resources", resources)
}

/// Bytes; a proxy that reconnects tells what it holds.
const MAX_REQUEST: usize = 64 << 20;
const MAX_CSR_REQUEST: usize = 64 << 10;
const HANDSHAKES: usize = 256;
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
const SERVING_LIFETIME: Duration = Duration::from_secs(24 * 3600);
const LOG_FLUSH: Duration = Duration::from_secs(1);

//! The link to the control plane: a gRPC channel over TLS with the caller's token. Certificates and discovery use it.
//!
//! Must never send a token over a connection whose server was not verified, unless the address says `http://`.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap};
use tonic::transport::{Channel, Endpoint};

use super::pem;
use super::tls::{ALPN_H2, describe_tls_error, provider};
use crate::files::{read_small, read_small_text};

/// Where a service of the control plane is, and how we and it prove who we are.
#[derive(Debug, Clone)]
pub struct ControlPlane {
    /// The setting that the address comes from, for messages.
    pub setting: &'static str,
    pub address: ControlPlaneAddress,
    /// The setting that the roots come from, for messages.
    pub roots_setting: &'static str,
    pub roots: RootSource,
    /// One more name that the server's certificate may carry.
    pub alternate_name: Option<String>,
    pub token: Option<TokenSource>,
    /// Sent as `clusterid`, if not empty.
    pub cluster_id: String,
    /// Further metadata of each call.
    pub headers: Vec<(String, String)>,
}

/// `https://host:port`, or `http://host:port` for a link without any protection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControlPlaneAddress {
    pub tls: bool,
    /// Without brackets.
    pub host: String,
    pub port: u16,
}

/// Where the roots are that the control plane's own certificate must lead to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootSource {
    File(PathBuf),
    /// The machine's bundle.
    System,
    Pem(String),
}

/// Where the token is. A file is read anew for each call.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    File(PathBuf),
    Literal(String),
}

/// Why the link cannot be made. Every message names what was tried and where.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LinkError {
    #[error("cannot read the control plane's roots from {source_name} ({setting}): {reason}")]
    Roots { setting: &'static str, source_name: String, reason: String },
    #[error("cannot read the token from {path}: {reason}")]
    Token { path: PathBuf, reason: String },
    #[error("cannot send the {what}: it holds characters that a gRPC header must not hold")]
    Header { what: String },
    #[error("cannot resolve {host}: {reason}")]
    Resolve { host: String, reason: String },
    #[error("cannot connect to {address}: {reason}")]
    Connect { address: String, reason: String },
    #[error("TLS with {address} failed: {reason}")]
    Tls { address: String, reason: String },
}

/// A wrong value of a setting.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{value:?} is not an address of a control plane: {reason}; https://<host>:<port> is expected")]
pub struct AddressError {
    value: String,
    reason: &'static str,
}

/// How a channel behaves.
#[derive(Debug, Clone, Copy)]
pub struct LinkTimings {
    /// For the name, for TCP and for TLS, each.
    pub connect: Duration,
    /// Between pings. istiod punishes more than one in 15 s.
    pub ping_interval: Duration,
    /// An unanswered ping means that the link is dead.
    pub ping_timeout: Duration,
}

impl Default for LinkTimings {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            ping_interval: Duration::from_secs(20),
            ping_timeout: Duration::from_secs(10),
        }
    }
}

/// The roots as they are now; compared to find out whether they have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots(Arc<Vec<CertificateDer<'static>>>);

impl ControlPlane {
    /// Reads the roots. Cheap enough for each connection and each poll.
    pub fn load_roots(&self) -> Result<Roots, LinkError> {
        if !self.address.tls {
            return Ok(Roots(Arc::default()));
        }
        let fail = |reason: String| LinkError::Roots {
            setting: self.roots_setting,
            source_name: self.roots.to_string(),
            reason,
        };
        let text = match &self.roots {
            RootSource::Pem(text) => text.clone().into_bytes(),
            RootSource::File(path) => read_small(path, MAX_ROOTS).map_err(|e| fail(e.to_string()))?,
            RootSource::System => {
                let path = system_bundle().ok_or_else(|| fail(format!("none of {SYSTEM_BUNDLES:?} exists")))?;
                read_small(&path, MAX_ROOTS).map_err(|e| fail(e.to_string()))?
            }
        };
        Ok(Roots(Arc::new(pem::certificates(&text).map_err(|e| fail(e.to_string()))?)))
    }

    /// Connects at once.
    pub async fn connect(&self, roots: &Roots, timings: LinkTimings) -> Result<Channel, LinkError> {
        let connector = self.connector(roots, timings)?;
        let address = self.address.clone();
        self.endpoint(timings)?
            .connect_with_connector(tower::service_fn(move |_| connector.clone().connect()))
            .await
            .map_err(|e| {
                link_error(&e).unwrap_or(LinkError::Connect { address: address.to_string(), reason: chain(&e) })
            })
    }

    /// Connects at the first call, and again whenever the connection is lost.
    pub fn connect_lazy(&self, roots: &Roots, timings: LinkTimings) -> Result<Channel, LinkError> {
        let connector = self.connector(roots, timings)?;
        Ok(self.endpoint(timings)?.connect_with_connector_lazy(tower::service_fn(move |_| connector.clone().connect())))
    }

    /// Adds token, cluster and further headers to a call.
    pub fn authorize(&self, metadata: &mut MetadataMap) -> Result<(), LinkError> {
        if let Some(token) = &self.token {
            let bearer = format!("Bearer {}", token.read()?);
            metadata.insert("authorization", header("token", &bearer)?);
        }
        if !self.cluster_id.is_empty() {
            metadata.insert("clusterid", header("cluster id", &self.cluster_id)?);
        }
        for (name, value) in &self.headers {
            let key = AsciiMetadataKey::from_bytes(name.to_ascii_lowercase().as_bytes())
                .map_err(|_| LinkError::Header { what: format!("header {name:?}") })?;
            metadata.insert(key, header(name, value)?);
        }
        Ok(())
    }

    fn endpoint(&self, timings: LinkTimings) -> Result<Endpoint, LinkError> {
        let endpoint = Endpoint::from_shared(self.address.to_string())
            .map_err(|e| LinkError::Connect { address: self.address.to_string(), reason: chain(&e) })?;
        Ok(endpoint
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .http2_keep_alive_interval(timings.ping_interval)
            .keep_alive_timeout(timings.ping_timeout)
            // gRPC servers end connections that are pinged without a call on them.
            .keep_alive_while_idle(false))
    }

    fn connector(&self, roots: &Roots, timings: LinkTimings) -> Result<Connector, LinkError> {
        let tls = if self.address.tls { Some(self.tls_config(roots)?) } else { None };
        Ok(Connector { address: self.address.clone(), tls, timeout: timings.connect })
    }

    fn tls_config(&self, roots: &Roots) -> Result<Arc<ClientConfig>, LinkError> {
        let fail = |reason: String| LinkError::Roots {
            setting: self.roots_setting,
            source_name: self.roots.to_string(),
            reason,
        };
        let mut store = RootCertStore::empty();
        let (usable, _) = store.add_parsable_certificates(roots.0.iter().cloned());
        if usable == 0 {
            return Err(fail("none of the certificates can serve as a root".into()));
        }
        let chain = WebPkiServerVerifier::builder_with_provider(Arc::new(store), provider())
            .build()
            .map_err(|e| fail(e.to_string()))?;
        let alternate = match &self.alternate_name {
            Some(name) => Some(ServerName::try_from(name.clone()).map_err(|_| LinkError::Tls {
                address: self.address.to_string(),
                reason: format!("the alternate host name {name:?} is not a host name"),
            })?),
            None => None,
        };
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has suites for TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(EitherName { chain, alternate }))
            .with_no_client_auth();
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        Ok(Arc::new(config))
    }
}

/// What a failed call says, with all its causes; the link's own error if one is among them.
pub fn describe_status(status: &tonic::Status) -> String {
    match link_error(status) {
        Some(error) => error.to_string(),
        None => {
            let mut text = format!("{:?}", status.code());
            if !status.message().is_empty() {
                text = format!("{text}: {}", status.message());
            }
            match std::error::Error::source(status) {
                Some(source) => {
                    let causes = chain(source);
                    if text.contains(&causes) { text } else { format!("{text}: {causes}") }
                }
                None => text,
            }
        }
    }
}

/// The link's own error among the causes of a failed call.
pub(crate) fn link_error(error: &(dyn std::error::Error + 'static)) -> Option<LinkError> {
    causes(error).find_map(|e| e.downcast_ref::<LinkError>().cloned())
}

fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut texts: Vec<String> = causes(error).map(ToString::to_string).collect();
    texts.dedup();
    texts.join(": ")
}

fn causes<'a>(
    error: &'a (dyn std::error::Error + 'static),
) -> impl Iterator<Item = &'a (dyn std::error::Error + 'static)> {
    std::iter::successors(Some(error), |e| e.source())
}

fn header(what: &str, value: &str) -> Result<AsciiMetadataValue, LinkError> {
    value.parse().map_err(|_| LinkError::Header { what: what.to_owned() })
}

#[derive(Clone)]
struct Connector {
    address: ControlPlaneAddress,
    tls: Option<Arc<ClientConfig>>,
    timeout: Duration,
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

impl Connector {
    async fn connect(self) -> Result<TokioIo<Box<dyn Io>>, LinkError> {
        let (address, limit) = (&self.address, self.timeout);
        let resolve = |reason| LinkError::Resolve { host: address.host.clone(), reason };
        let candidates: Vec<SocketAddr> =
            timeout(limit, tokio::net::lookup_host((address.host.as_str(), address.port)))
                .await
                .map_err(|_| resolve(format!("no answer within {limit:?}")))?
                .map_err(|e| resolve(e.to_string()))?
                .collect();
        let mut failures = Vec::new();
        let mut connected = None;
        for candidate in candidates {
            match timeout(limit, TcpStream::connect(candidate)).await {
                Ok(Ok(stream)) => {
                    connected = Some((stream, candidate));
                    break;
                }
                Ok(Err(e)) => failures.push(format!("{candidate}: {e}")),
                Err(_) => failures.push(format!("{candidate}: no answer within {limit:?}")),
            }
        }
        let Some((stream, peer)) = connected else {
            let reason = if failures.is_empty() { "the name has no address".into() } else { failures.join(", ") };
            return Err(LinkError::Connect { address: address.to_string(), reason });
        };
        let fail = |reason: String| LinkError::Tls { address: format!("{address} ({peer})"), reason };
        prepare(&stream).map_err(|e| LinkError::Connect { address: address.to_string(), reason: e.to_string() })?;
        let Some(tls) = self.tls else { return Ok(TokioIo::new(Box::new(stream))) };
        let name = ServerName::try_from(address.host.clone()).map_err(|e| fail(e.to_string()))?;
        let stream = timeout(limit, tokio_rustls::TlsConnector::from(tls).connect(name, stream))
            .await
            .map_err(|_| fail(format!("no end of the handshake within {limit:?}")))?
            .map_err(|e| fail(in_plain_words(&e)))?;
        if stream.get_ref().1.alpn_protocol() != Some(ALPN_H2) {
            return Err(fail("the server does not speak h2".into()));
        }
        Ok(TokioIo::new(Box::new(stream)))
    }
}

/// With both times, where a certificate is not valid at ours.
fn in_plain_words(error: &std::io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(tls) => describe_tls_error(tls),
        None => error.to_string(),
    }
}

fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    socket2::SockRef::from(stream).set_tcp_keepalive(
        &socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(300))
            .with_interval(Duration::from_secs(75))
            .with_retries(9),
    )
}

/// A server may carry the name that was dialled or the alternate one.
#[derive(Debug)]
struct EitherName {
    chain: Arc<WebPkiServerVerifier>,
    alternate: Option<ServerName<'static>>,
}

impl ServerCertVerifier for EitherName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let first = self.chain.verify_server_cert(end_entity, intermediates, server_name, ocsp, now);
        match (&first, &self.alternate) {
            (
                Err(Error::InvalidCertificate(
                    CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
                )),
                Some(alternate),
            ) => self.chain.verify_server_cert(end_entity, intermediates, alternate, ocsp, now),
            _ => first,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.chain.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.chain.supported_verify_schemes()
    }
}

impl TokenSource {
    fn read(&self) -> Result<String, LinkError> {
        match self {
            Self::Literal(token) => Ok(token.clone()),
            Self::File(path) => {
                let fail = |reason: String| LinkError::Token { path: path.clone(), reason };
                let text = read_small_text(path, MAX_TOKEN).map_err(|e| fail(e.to_string()))?;
                let token = text.trim();
                if token.is_empty() { Err(fail("it is empty".into())) } else { Ok(token.to_owned()) }
            }
        }
    }
}

impl FromStr for TokenSource {
    type Err = std::convert::Infallible;

    /// A path if it looks like one (a token never holds a slash), else the token itself.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(if text.contains('/') || Path::new(text).exists() {
            Self::File(text.into())
        } else {
            Self::Literal(text.to_owned())
        })
    }
}

impl fmt::Debug for TokenSource {
    /// Never shows a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "File({})", path.display()),
            Self::Literal(_) => f.write_str("Literal"),
        }
    }
}

impl FromStr for RootSource {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "SYSTEM" => Self::System,
            pem if pem.contains("-----BEGIN") => Self::Pem(pem.to_owned()),
            path => Self::File(path.into()),
        })
    }
}

impl fmt::Display for RootSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::System => f.write_str("the system's bundle"),
            Self::Pem(_) => f.write_str("the PEM text in the setting"),
        }
    }
}

impl FromStr for ControlPlaneAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| AddressError { value: text.to_owned(), reason };
        let uri: http::Uri = text.parse().map_err(|_| fail("it is not a URL"))?;
        let tls = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(fail("the scheme is missing")),
        };
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(fail("it has a path"));
        }
        let host = uri.host().filter(|h| !h.is_empty()).ok_or_else(|| fail("the host is missing"))?;
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let port = uri.port_u16().filter(|&p| p != 0).ok_or_else(|| fail("the port is missing"))?;
        Ok(Self { tls, host, port })
    }
}

impl fmt::Display for ControlPlaneAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        if self.host.contains(':') {
            write!(f, "{scheme}://[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{scheme}://{}:{}", self.host, self.port)
        }
    }
}

fn system_bundle() -> Option<PathBuf> {
    let configured = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    configured.into_iter().chain(SYSTEM_BUNDLES.iter().map(PathBuf::from)).find(|path| path.is_file())
}

/// Debian, Red Hat, SUSE, Alpine.
const SYSTEM_BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];
/// Bytes. A machine's bundle has some 200 KB.
const MAX_ROOTS: usize = 4 << 20;
/// Bytes; more does not go into a header.
const MAX_TOKEN: usize = 64 << 10;
/// The first answer of discovery can be many megabytes.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_wrong_ones_say_what_would_be_right() {
        for text in ["https://control.understory-system.svc:15012", "http://127.0.0.1:15010", "https://[fd00::1]:15012"]
        {
            assert_eq!(text.parse::<ControlPlaneAddress>().unwrap().to_string(), text);
        }
        for (text, reason) in [
            ("control:15012", "the scheme is missing"),
            ("https://control", "the port is missing"),
            ("https://control:15012/path", "it has a path"),
            ("ftp://control:1", "the scheme is missing"),
            ("", "it is not a URL"),
        ] {
            let error = text.parse::<ControlPlaneAddress>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("https://<host>:<port>"), "{error}");
        }
    }

    #[test]
    fn a_path_is_never_taken_for_a_token_and_no_token_is_shown() {
        let path: TokenSource = "./var/run/secrets/tokens/missing".parse().unwrap();
        assert!(matches!(path.read(), Err(LinkError::Token { .. })));
        let literal: TokenSource = "abc.def.ghi".parse().unwrap();
        assert_eq!(literal.read().unwrap(), "abc.def.ghi");
        assert!(!format!("{literal:?}").contains("abc"));
    }
}

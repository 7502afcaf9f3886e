//! An HBONE client that is none of ours (rustls and the h2 crate used plainly): to send what a good client never
//! sends, and to see the exact alert or status that comes back.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{AlertDescription, ClientConfig, DigitallySignedStruct, SignatureScheme};
use thiserror::Error;
use tokio::runtime::Runtime;
use tokio_rustls::TlsConnector;

use crate::certs::Leaf;
use crate::place::Place;

const TIMEOUT: Duration = Duration::from_secs(10);

/// A tunnel to a pod's HBONE port.
#[derive(Debug)]
pub struct HboneClient {
    runtime: Runtime,
    send: SendRequest<Bytes>,
    /// Certificates that the server showed, leaf first, DER.
    pub server_chain: Vec<Vec<u8>>,
}

/// Why there is no tunnel.
#[derive(Debug, Error)]
pub enum TunnelError {
    /// The server refused the handshake with this alert.
    #[error("TLS alert {0:?}")]
    Alert(AlertDescription),
    /// Any other end of the connection.
    #[error("{0}")]
    Ended(String),
}

/// The answer to a CONNECT.
#[derive(Debug)]
pub struct Connected {
    pub status: u16,
    pub headers: http::HeaderMap,
    pub send: h2::SendStream<Bytes>,
    pub receive: h2::RecvStream,
}

/// A CONNECT that was sent.
#[derive(Debug)]
pub struct Begun {
    _answer: h2::client::ResponseFuture,
    _send: h2::SendStream<Bytes>,
}

impl HboneClient {
    /// Opens a tunnel from a place, with the given certificate or none. The server's certificate is not checked.
    pub fn open(from: &Place, to: SocketAddr, leaf: Option<&Leaf>) -> Result<Self, TunnelError> {
        let stream = from.connect(to).map_err(|e| TunnelError::Ended(format!("connect: {e}")))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("start a runtime");
        let opened = runtime.block_on(async {
            tokio::time::timeout(TIMEOUT, open(stream, config(leaf)))
                .await
                .unwrap_or_else(|_| Err(TunnelError::Ended("no end of the handshake".to_owned())))
        });
        let (send, server_chain) = opened?;
        Ok(Self { runtime, send, server_chain })
    }

    /// Sends a CONNECT with this authority and further headers, and waits for the answer.
    pub fn connect(&mut self, authority: &str, headers: &[(&str, &str)]) -> Result<Connected, h2::Error> {
        let mut request = http::Request::builder().method("CONNECT").uri(authority).version(http::Version::HTTP_2);
        for (key, value) in headers {
            request = request.header(*key, *value);
        }
        let request = request.body(()).expect("the test gives a well-formed request");
        self.request(request)
    }

    /// Sends a CONNECT and does not wait. Dropping it gives it up (RST_STREAM).
    pub fn begin(&mut self, authority: &str) -> Result<Begun, h2::Error> {
        let request = http::Request::builder().method("CONNECT").uri(authority).version(http::Version::HTTP_2);
        let request = request.body(()).expect("the test gives a well-formed request");
        self.runtime.block_on(async {
            let mut send = self.send.clone().ready().await?;
            let (answer, stream) = send.send_request(request, false)?;
            Ok(Begun { _answer: answer, _send: stream })
        })
    }

    /// Sends any request and waits for the head of the answer.
    pub fn request(&mut self, request: http::Request<()>) -> Result<Connected, h2::Error> {
        self.runtime.block_on(async {
            let mut send = self.send.clone().ready().await?;
            let (answer, stream) = send.send_request(request, false)?;
            let answer = tokio::time::timeout(TIMEOUT, answer).await.expect("an answer comes within 10 s")?;
            let (head, receive) = answer.into_parts();
            Ok(Connected { status: head.status.as_u16(), headers: head.headers, send: stream, receive })
        })
    }

    /// Sends bytes in a stream.
    pub fn say(&self, stream: &mut Connected, bytes: &[u8], end: bool) -> Result<(), h2::Error> {
        // Small enough for the first window.
        self.runtime.block_on(async { stream.send.send_data(Bytes::copy_from_slice(bytes), end) })
    }

    /// Receives so many bytes, or what comes before the end.
    pub fn hear(&self, stream: &mut Connected, count: usize) -> Result<Vec<u8>, h2::Error> {
        let mut bytes = Vec::new();
        self.runtime.block_on(async {
            while bytes.len() < count {
                let next = tokio::time::timeout(TIMEOUT, stream.receive.data()).await.expect("data within 10 s");
                let Some(chunk) = next else { break };
                let chunk = chunk?;
                let _ = stream.receive.flow_control().release_capacity(chunk.len());
                bytes.extend_from_slice(&chunk);
            }
            Ok(bytes)
        })
    }
}

async fn open(stream: TcpStream, config: Arc<ClientConfig>) -> Result<(SendRequest<Bytes>, Vec<Vec<u8>>), TunnelError> {
    let ended = |e: io::Error| TunnelError::Ended(e.to_string());
    stream.set_nonblocking(true).map_err(ended)?;
    let stream = tokio::net::TcpStream::from_std(stream).map_err(ended)?;
    let name = ServerName::try_from("hbone.test").expect("a name");
    let tls = TlsConnector::from(config).connect(name, stream).await.map_err(of_io)?;
    let chain = tls.get_ref().1.peer_certificates().unwrap_or_default();
    let chain = chain.iter().map(|cert| cert.to_vec()).collect();
    let (send, mut connection) = h2::client::handshake(tls).await.map_err(of_h2)?;
    let mut ping = connection.ping_pong().expect("taken once");
    let driver = tokio::spawn(connection);
    // In TLS 1.3 the server judges the client's certificate after the client is done: a pong says that it was taken.
    if ping.ping(h2::Ping::opaque()).await.is_ok() {
        return Ok((send, chain));
    }
    match driver.await.expect("the driver does not panic") {
        Ok(()) => Err(TunnelError::Ended("the server closed the tunnel".to_owned())),
        Err(e) => Err(of_h2(e)),
    }
}

/// Alerts by which a server may refuse a client's certificate.
const ALERTS: &[AlertDescription] = &[
    AlertDescription::CertificateRequired,
    AlertDescription::CertificateExpired,
    AlertDescription::CertificateUnknown,
    AlertDescription::CertificateRevoked,
    AlertDescription::BadCertificate,
    AlertDescription::UnsupportedCertificate,
    AlertDescription::UnknownCA,
    AlertDescription::AccessDenied,
    AlertDescription::DecryptError,
    AlertDescription::HandshakeFailure,
    AlertDescription::InternalError,
];

fn of_h2(error: h2::Error) -> TunnelError {
    let text = error.to_string();
    // The h2 crate keeps of a TLS error only its text.
    let named = text.split("received fatal alert: ").nth(1);
    let alert = named.and_then(|name| ALERTS.iter().find(|alert| name.starts_with(&format!("{alert:?}"))));
    match (alert, error.into_io()) {
        (Some(alert), _) => TunnelError::Alert(*alert),
        (None, Some(e)) => of_io(e),
        (None, None) => TunnelError::Ended(text),
    }
}

fn of_io(error: io::Error) -> TunnelError {
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::AlertReceived(alert)) => TunnelError::Alert(*alert),
        _ => TunnelError::Ended(error.to_string()),
    }
}

fn config(leaf: Option<&Leaf>) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .expect("TLS 1.3 is there")
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
    let mut config = match leaf {
        None => builder.with_no_client_auth(),
        Some(leaf) => {
            let chain = CertificateDer::pem_slice_iter(leaf.chain_pem.as_bytes()).map(|c| c.expect("PEM")).collect();
            let key = PrivateKeyDer::from_pem_slice(leaf.key_pem.as_bytes()).expect("PEM");
            builder.with_client_auth_cert(chain, key).expect("key and certificate fit")
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.enable_sni = false;
    Arc::new(config)
}

/// Takes any server certificate: the tests look at it themselves.
#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        rustls::crypto::verify_tls13_signature(message, cert, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

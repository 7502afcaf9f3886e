//! An HBONE client that is none of ours (rustls and the h2 crate used plainly): to send what a good client never
//! sends, and to see the exact alert or status that comes back.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
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

    /// The same with a body, which must be small.
    pub fn request_with(&mut self, request: http::Request<()>, body: &[u8]) -> Result<Connected, h2::Error> {
        self.runtime.block_on(async {
            let mut send = self.send.clone().ready().await?;
            let (answer, mut stream) = send.send_request(request, false)?;
            stream.send_data(Bytes::copy_from_slice(body), true)?;
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

/// Lets programs that know nothing of TLS speak to the HTTP/2 of a pod's tunnels: what they say to the port goes through
/// a TLS connection of its own. Ends when dropped.
#[derive(Debug)]
pub struct Plaintext {
    pub port: u16,
    _runtime: Runtime,
}

impl Plaintext {
    pub fn open(from: &Place, to: SocketAddr, leaf: &Leaf) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port of loopback");
        let port = listener.local_addr().expect("its address").port();
        listener.set_nonblocking(true).expect("make a listener non-blocking");
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("start a runtime");
        let (netns, config) = (from.netns().clone(), config(Some(leaf)));
        runtime.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener).expect("take over a listener");
            while let Ok((client, _)) = listener.accept().await {
                let (netns, config) = (netns.clone(), config.clone());
                let dialled = tokio::task::spawn_blocking(move || netns.run(|| TcpStream::connect(to)));
                tokio::spawn(async move {
                    if let Ok(Ok(server)) = dialled.await {
                        // An end of either side is the end.
                        let _ = relay(client, server, config).await;
                    }
                });
            }
        });
        Self { port, _runtime: runtime }
    }
}

async fn relay(mut client: tokio::net::TcpStream, server: TcpStream, config: Arc<ClientConfig>) -> io::Result<()> {
    server.set_nonblocking(true)?;
    let name = ServerName::try_from("hbone.test").expect("a name");
    let server = tokio::net::TcpStream::from_std(server)?;
    let mut server = TlsConnector::from(config).connect(name, server).await?;
    tokio::io::copy_bidirectional(&mut client, &mut server).await?;
    Ok(())
}

/// A tunnel on which a test writes HTTP/2 frames by hand.
#[derive(Debug)]
pub struct RawTunnel {
    tls: rustls::StreamOwned<rustls::ClientConnection, TcpStream>,
}

/// Types of HTTP/2 frames (RFC 9113 §6).
pub mod frame {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

impl RawTunnel {
    /// Opens a tunnel with a good handshake and sends the HTTP/2 preface with these settings (id, value).
    pub fn open(from: &Place, to: SocketAddr, leaf: &Leaf, settings: &[(u16, u32)]) -> io::Result<Self> {
        let stream = from.connect(to)?;
        let name = ServerName::try_from("hbone.test").expect("a name");
        let tls = rustls::ClientConnection::new(config(Some(leaf)), name).map_err(io::Error::other)?;
        let mut this = Self { tls: rustls::StreamOwned::new(tls, stream) };
        this.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")?;
        let mut payload = Vec::new();
        for (id, value) in settings {
            payload.extend_from_slice(&id.to_be_bytes());
            payload.extend_from_slice(&value.to_be_bytes());
        }
        this.frame(frame::SETTINGS, 0, 0, &payload)?;
        Ok(this)
    }

    /// Sends one frame.
    pub fn frame(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) -> io::Result<()> {
        self.write(&frame_bytes(kind, flags, stream, payload))
    }

    /// Sends a CONNECT with this authority, to be ended by the caller.
    pub fn connect(&mut self, stream: u32, authority: &str) -> io::Result<()> {
        self.frame(frame::HEADERS, END_HEADERS, stream, &connect_block(authority))
    }

    /// Sends bytes as they are.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        use std::io::Write;
        self.tls.write_all(bytes)?;
        self.tls.flush()
    }

    /// The next frame: type, flags, stream, payload.
    pub fn read(&mut self) -> io::Result<(u8, u8, u32, Vec<u8>)> {
        use std::io::Read;
        let mut head = [0; 9];
        self.tls.read_exact(&mut head)?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.tls.read_exact(&mut payload)?;
        Ok((head[3], head[4], u32::from_be_bytes([head[5], head[6], head[7], head[8]]), payload))
    }

    /// Reads frames of a type away until one fits.
    pub fn read_until(&mut self, kind: u8) -> io::Result<(u8, u8, u32, Vec<u8>)> {
        loop {
            let frame = self.read()?;
            if frame.0 == kind {
                return Ok(frame);
            }
        }
    }

    pub fn socket(&self) -> &TcpStream {
        self.tls.get_ref()
    }
}

/// An HTTP/2 frame as it goes on the wire.
pub fn frame_bytes(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u32).to_be_bytes();
    let mut bytes = vec![length[1], length[2], length[3], kind, flags];
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A CONNECT's header block: literals without indexing (RFC 7541 §6.2.2), with names of the static table.
pub fn connect_block(authority: &str) -> Vec<u8> {
    let mut block = vec![0x02, 7];
    block.extend_from_slice(b"CONNECT");
    block.push(0x01);
    block.push(u8::try_from(authority.len()).ok().filter(|n| *n < 127).expect("a short authority"));
    block.extend_from_slice(authority.as_bytes());
    block
}

/// Flag of HEADERS and CONTINUATION.
pub const END_HEADERS: u8 = 4;

//! What is said about a connection: between whom it is, and how it ended.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::identity::Identity;
use crate::mesh::{Service, Workload};

/// A connection as one of its two proxies sees it. The addresses, identities and names go into the access log, the
/// metrics' labels and the list of live connections.
#[derive(Debug, Clone)]
pub struct Flow {
    pub direction: Direction,
    /// What is spoken on the hop between the two proxies (or to the endpoint).
    pub protocol: Protocol,
    /// Uid of the local pod.
    pub pod: Arc<str>,
    pub source: Peer,
    pub destination: Peer,
    /// The service that was addressed, or that the destination was found to back.
    pub service: Option<Arc<Service>>,
    pub src: SocketAddr,
    /// The actual hop: outbound the address that was dialled (pod:15008 for HBONE), inbound the application's.
    pub dst: SocketAddr,
    /// Outbound: what the application dialled.
    pub original_dst: Option<SocketAddr>,
    /// HBONE: the authority of the CONNECT.
    pub authority: Option<Authority>,
    /// When the connection was accepted.
    pub started: Instant,
}

/// Which side of the connection the local pod is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The local pod is the server.
    Inbound,
    /// The local pod is the client.
    Outbound,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// Plain TCP, without mTLS.
    Tcp,
    Hbone,
    DoubleHbone,
    /// Plain TCP between two pods of the node, whose identities the kernel attests.
    Attested,
}

/// How the two ends know each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Security {
    /// Not at all.
    None,
    MutualTls,
    /// By their network namespaces, on one node, unencrypted.
    Attested,
}

/// One end of a connection, as far as it is known.
#[derive(Debug, Clone, Default)]
pub struct Peer {
    pub workload: Option<Arc<Workload>>,
    /// What the peer says of itself (baggage); used only where there is no workload record.
    pub claims: Option<Box<PeerClaims>>,
    /// Verified by mTLS, never taken from an address.
    pub identity: Option<Identity>,
}

/// A peer's own description; not to be trusted beyond labels. Empty: not said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PeerClaims {
    pub cluster: Arc<str>,
    pub namespace: Arc<str>,
    pub workload: Arc<str>,
    pub canonical_service: Arc<str>,
    pub canonical_revision: Arc<str>,
    pub region: Arc<str>,
    pub zone: Arc<str>,
}

/// The authority of a CONNECT.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    Address(SocketAddr),
    /// Host name and port.
    Name(Arc<str>, u16),
}

/// Istio's `response_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ResponseFlag {
    None,
    /// Denied by policy.
    Deny,
    /// The dial failed; also any failure without a flag of its own.
    Connect,
    TlsFailure,
    H2HandshakeFailure,
    /// A dial of port 15008 that got no answer.
    NetworkPolicy,
    /// No certificate for the source.
    IdentityError,
    CertRevoked,
}

/// Why a connection was not established, or broke.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub flag: ResponseFlag,
    /// The step that failed, one of few words for a metric's label: `limit`, `source`, `destination`, `policy`,
    /// `identity`, `dial`, `handshake`, `connect`, `relay`.
    pub step: &'static str,
    /// For the log: names the thing, the peer and the reason.
    pub text: Cow<'static, str>,
}

/// Who ended a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The one who opened it; outbound the local application, inbound the peer.
    Client,
    /// The one who accepted it; outbound the peer, inbound the local application.
    Server,
    /// This proxy.
    Proxy,
}

/// How a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum How {
    /// Orderly, by the side whose FIN came first.
    Fin,
    Rst,
    /// A deadline passed, or the peer was found dead.
    Timeout,
    /// By order: see [`CloseReason`].
    Closed,
    /// The task that carried it ended without saying how: a fault of ours.
    Abandoned,
}

/// The end of an established connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub side: Side,
    pub how: How,
    /// Set where bytes may have been lost.
    pub failure: Option<Failure>,
}

/// Why a live connection is ordered to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseReason {
    PolicyChange,
    PodRemoved,
    /// The endpoint left the mesh.
    EndpointRemoved,
    CertificateRevoked,
    /// The proxy's drain deadline.
    DrainDeadline,
    /// The peer's certificate leads to no root that is trusted still.
    TrustWithdrawn,
    /// A certificate of the tunnel has ended, and the settings say that its connections end with it.
    CertificateExpired,
    /// The own certificate has ended, and the authority refuses to renew it.
    RenewalDenied,
}

impl Flow {
    pub fn new(direction: Direction, protocol: Protocol, pod: Arc<str>, src: SocketAddr, dst: SocketAddr) -> Self {
        Self {
            direction,
            protocol,
            pod,
            source: Peer::default(),
            destination: Peer::default(),
            service: None,
            src,
            dst,
            original_dst: None,
            authority: None,
            started: Instant::now(),
        }
    }

    pub fn security(&self) -> Security {
        match self.protocol {
            Protocol::Tcp => Security::None,
            Protocol::Hbone | Protocol::DoubleHbone => Security::MutualTls,
            Protocol::Attested => Security::Attested,
        }
    }
}

impl Peer {
    pub fn of(workload: Option<Arc<Workload>>, identity: Option<Identity>) -> Self {
        Self { workload, claims: None, identity }
    }
}

impl PeerClaims {
    /// The longest value that is kept; a Kubernetes name has at most so many bytes.
    pub const MAX_VALUE: usize = 253;

    /// A claimed value, cut to a length that a label may have.
    pub fn value(text: &str) -> Arc<str> {
        let mut end = text.len().min(Self::MAX_VALUE);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text[..end].into()
    }
}

impl Direction {
    /// Istio's `reporter`.
    pub fn reporter(self) -> &'static str {
        match self {
            Self::Inbound => "destination",
            Self::Outbound => "source",
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Inbound => "inbound",
            Self::Outbound => "outbound",
        }
    }
}

impl Protocol {
    /// As config_dump writes it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Hbone => "HBONE",
            Self::DoubleHbone => "DOUBLEHBONE",
            Self::Attested => "ATTESTED",
        }
    }
}

impl Security {
    /// Istio's `connection_security_policy`, which has no word for attested.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "unknown",
            Self::MutualTls => "mutual_tls",
            Self::Attested => "attested",
        }
    }
}

impl ResponseFlag {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "-",
            Self::Deny => "DENY",
            Self::Connect => "CONNECT",
            Self::TlsFailure => "TLS_FAILURE",
            Self::H2HandshakeFailure => "H2_HANDSHAKE_FAILURE",
            Self::NetworkPolicy => "NETWORK_POLICY",
            Self::IdentityError => "IDENTITY_ERROR",
            Self::CertRevoked => "CERT_REVOKED",
        }
    }
}

impl Failure {
    pub fn new(flag: ResponseFlag, step: &'static str, text: impl Into<Cow<'static, str>>) -> Self {
        Self { flag, step, text: text.into() }
    }
}

impl Side {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Server => "server",
            Self::Proxy => "proxy",
        }
    }

    /// Where that side is, seen from this proxy: the local application, the peer, or the proxy itself.
    pub fn hop(self, direction: Direction) -> &'static str {
        match (self, direction) {
            (Self::Proxy, _) => "proxy",
            (Self::Client, Direction::Outbound) | (Self::Server, Direction::Inbound) => "app",
            (Self::Server, Direction::Outbound) | (Self::Client, Direction::Inbound) => "peer",
        }
    }
}

impl How {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fin => "FIN",
            Self::Rst => "RST",
            Self::Timeout => "timeout",
            Self::Closed => "closed",
            Self::Abandoned => "abandoned",
        }
    }
}

impl Outcome {
    /// Both directions ended with FIN; `first` closed first.
    pub fn orderly(first: Side) -> Self {
        Self { side: first, how: How::Fin, failure: None }
    }

    pub fn reset(by: Side) -> Self {
        Self { side: by, how: How::Rst, failure: None }
    }

    pub fn broken(side: Side, how: How, failure: Failure) -> Self {
        Self { side, how, failure: Some(failure) }
    }

    /// As [`Outcome::closed`], with what led to it.
    pub fn closed_because(reason: CloseReason, detail: &str) -> Self {
        let failure = Failure::new(reason.flag(), "relay", format!("{}: {detail}", reason.as_str()));
        Self { side: Side::Proxy, how: How::Closed, failure: Some(failure) }
    }

    pub fn closed(reason: CloseReason) -> Self {
        let failure = Failure::new(reason.flag(), "relay", reason.as_str());
        Self { side: Side::Proxy, how: How::Closed, failure: Some(failure) }
    }

    pub(super) fn abandoned() -> Self {
        let failure = Failure::new(ResponseFlag::Connect, "relay", "the proxy gave the connection up");
        Self { side: Side::Proxy, how: How::Abandoned, failure: Some(failure) }
    }
}

impl CloseReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PolicyChange => "closed due to policy change",
            Self::PodRemoved => "closed because the pod is gone",
            Self::EndpointRemoved => "closed because the endpoint is gone",
            Self::CertificateRevoked => "closed because a certificate was revoked",
            Self::DrainDeadline => "closed at the proxy's drain deadline",
            Self::TrustWithdrawn => "closed because the peer is no longer trusted",
            Self::CertificateExpired => "closed because a certificate ended",
            Self::RenewalDenied => "closed because the renewal of the own certificate is denied",
        }
    }

    fn flag(self) -> ResponseFlag {
        match self {
            Self::PolicyChange => ResponseFlag::Deny,
            Self::CertificateRevoked => ResponseFlag::CertRevoked,
            Self::TrustWithdrawn | Self::CertificateExpired => ResponseFlag::TlsFailure,
            Self::RenewalDenied => ResponseFlag::IdentityError,
            Self::PodRemoved | Self::EndpointRemoved | Self::DrainDeadline => ResponseFlag::Connect,
        }
    }
}

impl fmt::Display for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Name(host, port) => write!(f, "{host}:{port}"),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

//! TLS as HBONE wants it: TLS 1.3 only, mutual, ALPN `h2`, peers known by their SPIFFE names and not by host names.
//!
//! Must never accept a peer whose chain does not end in the workload's own roots.

use std::fmt;
use std::sync::{Arc, LazyLock};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, kx_group};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::{
    CertificateError, CommonState, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible,
    RootCertStore, SignatureScheme,
};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::{Identity, TrustDomain};

/// The only protocol in the tunnel.
pub const ALPN_H2: &[u8] = b"h2";

/// Why a peer is not who it should be.
#[derive(Clone, thiserror::Error)]
pub enum PeerError {
    #[error("the peer showed no certificate")]
    NoCertificate,
    #[error("the peer's certificate cannot be read: {0}")]
    Unreadable(String),
    #[error("the peer's certificate names no SPIFFE identity")]
    NoIdentity,
    #[error("the peer is {found}, expected {expected}")]
    WrongIdentity { found: Names, expected: Names },
    #[error("the peer is {found}, which is of none of the trusted domains {trusted:?}")]
    WrongTrustDomain { found: Names, trusted: Vec<TrustDomain> },
    #[error("the peer did not agree on the protocol h2")]
    NotH2,
}

/// Identities in an error text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names(pub Vec<Identity>);

/// What all certificates of this proxy have in common when they judge peers.
#[derive(Debug, Clone, Default)]
pub struct TrustSettings {
    /// Trust domains that are accepted beside that of the own certificate.
    pub aliases: Vec<TrustDomain>,
}

/// The identity of a peer by its certificate: the first SPIFFE name in it.
pub fn peer_identity(chain: &[CertificateDer<'_>]) -> Result<Identity, PeerError> {
    spiffe_names(chain.first().ok_or(PeerError::NoCertificate)?)?.into_iter().next().ok_or(PeerError::NoIdentity)
}

/// After the handshake: the peer's identity, provided that `h2` was agreed on.
pub fn check_handshake(state: &CommonState) -> Result<Identity, PeerError> {
    if state.alpn_protocol() != Some(ALPN_H2) {
        return Err(PeerError::NotH2);
    }
    peer_identity(state.peer_certificates().unwrap_or_default())
}

/// All SPIFFE names of a certificate; names of other kinds are skipped.
pub(super) fn spiffe_names(certificate: &CertificateDer<'_>) -> Result<Vec<Identity>, PeerError> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|e| PeerError::Unreadable(e.to_string()))?;
    let names = parsed.subject_alternative_name().map_err(|e| PeerError::Unreadable(e.to_string()))?;
    let Some(names) = names else { return Ok(Vec::new()) };
    Ok(names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => uri.parse().ok(),
            _ => None,
        })
        .collect())
}

/// AES-128-GCM first: the cheapest where the processor has AES instructions. The hybrid key exchange first: it is
/// offered together with its X25519 half, so that a peer without it needs no second round trip.
pub(super) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        Arc::new(CryptoProvider {
            cipher_suites: vec![cipher_suite::TLS13_AES_128_GCM_SHA256, cipher_suite::TLS13_AES_256_GCM_SHA384],
            kx_groups: vec![kx_group::X25519MLKEM768, kx_group::X25519, kx_group::SECP256R1],
            ..default_provider()
        })
    });
    PROVIDER.clone()
}

/// Checks a client: chain to our roots, and a name in our trust domain or an alias of it.
#[derive(Debug)]
pub(super) struct ClientVerifier {
    chain: Arc<dyn ClientCertVerifier>,
    trusted: Vec<TrustDomain>,
}

impl ClientVerifier {
    pub(super) fn new(
        roots: Arc<RootCertStore>,
        own: &TrustDomain,
        settings: &TrustSettings,
    ) -> Result<Self, rustls::server::VerifierBuilderError> {
        let chain = WebPkiClientVerifier::builder_with_provider(roots, provider()).build()?;
        let trusted = std::iter::once(own).chain(&settings.aliases).cloned().collect();
        Ok(Self { chain, trusted })
    }
}

impl ClientCertVerifier for ClientVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        // Peers have one certificate; a list of authorities would only make the handshake longer.
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.chain.verify_client_cert(end_entity, intermediates, now)?;
        let names = spiffe_names(end_entity).map_err(refuse)?;
        if names.is_empty() {
            return Err(refuse(PeerError::NoIdentity));
        }
        if !names.iter().any(|name| self.trusted.contains(name.trust_domain())) {
            return Err(refuse(PeerError::WrongTrustDomain { found: Names(names), trusted: self.trusted.clone() }));
        }
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
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

/// Checks a server: chain to our roots, and one of the expected identities among its names.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    pub(super) roots: Arc<RootCertStore>,
    pub(super) expected: Box<[Identity]>,
}

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        verify_chain(end_entity, intermediates, &self.roots, now)?;
        let names = spiffe_names(end_entity).map_err(refuse)?;
        if !names.iter().any(|name| self.expected.contains(name)) {
            let expected = Names(self.expected.to_vec());
            return Err(refuse(PeerError::WrongIdentity { found: Names(names), expected }));
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOffered.into())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, cert, dss, &provider().signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

/// Whether a chain ends in one of the roots and is valid now. No host name is looked at.
pub(super) fn verify_chain(
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    roots: &RootCertStore,
    now: UnixTime,
) -> Result<(), Error> {
    let parsed = ParsedCertificate::try_from(end_entity)?;
    let algorithms = provider().signature_verification_algorithms.all;
    verify_server_cert_signed_by_trust_anchor(&parsed, roots, intermediates, now, algorithms)
}

fn refuse(reason: PeerError) -> Error {
    Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(reason))))
}

/// What a failed handshake says, in plain words where the reason is ours.
pub fn describe_tls_error(error: &std::io::Error) -> String {
    match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
        Some(Error::InvalidCertificate(CertificateError::Other(OtherError(reason)))) => reason.to_string(),
        Some(tls) => tls.to_string(),
        None => error.to_string(),
    }
}

impl fmt::Debug for PeerError {
    /// The same words: rustls shows reasons of verifiers this way.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [] => f.write_str("without a SPIFFE identity"),
            [one] => fmt::Display::fmt(one, f),
            several => write!(f, "one of {several:?}"),
        }
    }
}

//! TLS as HBONE wants it: TLS 1.3 only, mutual, ALPN `h2`, peers known by their SPIFFE names and not by host names.
//!
//! Must never accept a peer whose chain does not end in a root of the workload's own trust domain.

use std::cell::RefCell;
use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs::{cipher_suite, default_provider, kx_group};
use rustls::crypto::{CryptoProvider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, PeerIncompatible,
    SignatureScheme,
};

use super::peer::{Names, PeerError, spiffe_names};
use super::trust::{PeerRole, Trust};
use super::{Certificate, Identity, TrustDomain, rfc3339};

/// The only protocol in the tunnel.
pub const ALPN_H2: &[u8] = b"h2";

thread_local! {
    /// Why a verifier on this thread said no last: rustls' own errors have no room for it.
    static REFUSAL: RefCell<Option<PeerError>> = const { RefCell::new(None) };
}

/// Why a verifier refused in the call of rustls that has just failed on this thread. Gives it once.
pub fn take_refusal() -> Option<PeerError> {
    REFUSAL.with(|refusal| refusal.borrow_mut().take())
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

/// Checks a client: chain to the roots of our trust domain, and a name in it or in an alias of it.
#[derive(Debug)]
pub(super) struct ClientVerifier(pub(super) Verifier);

/// Checks a server: chain to the roots of our trust domain, and one of the expected identities among its names.
#[derive(Debug)]
pub(super) struct ServerVerifier {
    pub(super) verifier: Verifier,
    pub(super) expected: Box<[Identity]>,
}

/// What both ends check, by the trust of the moment.
pub(super) struct Verifier {
    pub(super) trust: Trust,
    pub(super) own: TrustDomain,
}

impl Verifier {
    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        role: PeerRole,
        now: UnixTime,
        judge: impl FnOnce(Vec<Identity>) -> Result<(), PeerError>,
    ) -> Result<(), Error> {
        let chain: Vec<_> = std::iter::once(leaf).chain(intermediates).cloned().collect();
        let checked = self.trust.verify(&self.own, &chain, role, now).and_then(|()| judge(spiffe_names(leaf)?));
        checked.map_err(|reason| {
            REFUSAL.with(|refusal| refusal.replace(Some(reason.clone())));
            reason.into_tls()
        })
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
        let Verifier { trust, own } = &self.0;
        self.0.verify(end_entity, intermediates, PeerRole::Client, now, |names| {
            if names.is_empty() {
                return Err(PeerError::NoIdentity);
            }
            // The first one is who the peer is taken for.
            if !names.first().is_some_and(|name| trust.accepts(own, name.trust_domain())) {
                return Err(PeerError::WrongTrustDomain { found: Names(names), trusted: trust.accepted(own) });
            }
            Ok(())
        })?;
        Ok(ClientCertVerified::assertion())
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

impl ServerCertVerifier for ServerVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let trust = &self.verifier.trust;
        self.verifier.verify(end_entity, intermediates, PeerRole::Server, now, |names| {
            let expected = |name: &Identity| {
                self.expected.contains(name) || {
                    let name = trust.canonical(name);
                    self.expected.iter().any(|expected| trust.canonical(expected) == name)
                }
            };
            if names.iter().any(expected) {
                return Ok(());
            }
            Err(PeerError::WrongIdentity { found: Names(names), expected: Names(self.expected.to_vec()) })
        })?;
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

/// What a failed handshake says, in plain words where times or reasons of ours are in it.
pub fn describe_tls_error(error: &Error) -> String {
    let at = |time: &UnixTime| rfc3339(UNIX_EPOCH + Duration::from_secs(time.as_secs()));
    match error {
        Error::InvalidCertificate(CertificateError::Other(OtherError(reason))) => reason.to_string(),
        Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after }) => format!(
            "the peer's certificate was valid until {}, but here it is {}: was it not renewed, or is a clock wrong?",
            at(not_after),
            at(time)
        ),
        Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before }) => format!(
            "the peer's certificate is valid from {}, but here it is {}: is a clock wrong?",
            at(not_before),
            at(time)
        ),
        other => other.to_string(),
    }
}

/// What an alert of the peer says about our own certificate, with its times and ours; nothing for alerts that have
/// another reason.
pub fn describe_alert(alert: AlertDescription, own: &Certificate) -> Option<String> {
    let (from, until, now) = (rfc3339(own.not_before()), rfc3339(own.not_after()), rfc3339(SystemTime::now()));
    let ours = format!("ours, {}, is valid from {from} to {until}, and here it is {now}", own.identity());
    let what = match alert {
        AlertDescription::CertificateExpired => "does not take our certificate as valid at its time",
        AlertDescription::CertificateRevoked => "says that our certificate was revoked",
        AlertDescription::UnknownCA => "does not trust the authority that signed our certificate",
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::AccessDenied => "does not accept our certificate",
        _ => return None,
    };
    let hint = if alert == AlertDescription::CertificateExpired { ": is a clock wrong?" } else { "" };
    Some(format!("the peer {what} (alert {alert:?}); {ours}{hint}"))
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("own", &self.own).finish_non_exhaustive()
    }
}

//! A workload's certificate: chain, key, the roots that came with it, and the TLS configurations made from them.
//!
//! Must never exist with a chain for another identity or another key.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::Resumption;
use rustls::pki_types::CertificateDer;
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::{ClientConfig, ServerConfig};

use super::peer::{self, Names, PeerError};
use super::tls::{self, ALPN_H2, ClientVerifier, ServerVerifier, Verifier};
use super::trust::{self, Trust};
use super::{Identity, PemError, pem};

/// A certificate of a workload, checked and ready for use.
pub struct Certificate {
    identity: Identity,
    key: Arc<CertifiedKey>,
    roots: Vec<CertificateDer<'static>>,
    trust: Trust,
    not_before: SystemTime,
    not_after: SystemTime,
    serial: String,
    server: OnceLock<Arc<ServerConfig>>,
    clients: Mutex<HashMap<Box<[Identity]>, Arc<ClientConfig>>>,
}

/// Why what the authority sent is not a certificate that can be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CertificateError {
    #[error("the answer holds {0} part(s); a leaf and the trust roots are needed")]
    Incomplete(usize),
    #[error("{part}: {reason}")]
    Pem { part: &'static str, reason: PemError },
    #[error("the leaf cannot be read: {0}")]
    Unreadable(String),
    #[error("the leaf is for {found}, asked was for {expected}")]
    WrongIdentity { found: String, expected: Identity },
    #[error("the leaf is not for our key")]
    WrongKey,
    #[error(
        "the leaf is valid from {} to {}, but here it is {}: is a clock wrong?",
        rfc3339(*.not_before),
        rfc3339(*.not_after),
        rfc3339(*.now)
    )]
    NotValidNow { not_before: SystemTime, not_after: SystemTime, now: SystemTime },
    #[error("the chain does not lead to the roots that came with it: {0}")]
    Chain(String),
}

/// One certificate of a chain, for the dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateInfo {
    pub pem: String,
    /// Decimal.
    pub serial: String,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

impl Certificate {
    /// From the certificate service's answer: leaf, intermediates, and all roots in the last element (PEM each).
    pub fn from_pem_chain(
        identity: &Identity,
        key: Arc<dyn SigningKey>,
        answer: &[impl AsRef<[u8]>],
        trust: Trust,
    ) -> Result<Self, CertificateError> {
        let [chain @ .., roots] = answer else { return Err(CertificateError::Incomplete(0)) };
        if chain.is_empty() {
            return Err(CertificateError::Incomplete(1));
        }
        let read = |part, text: &[u8]| pem::certificates(text).map_err(|reason| CertificateError::Pem { part, reason });
        let mut certificates = Vec::with_capacity(chain.len());
        for (i, text) in chain.iter().enumerate() {
            certificates.extend(read(if i == 0 { "the leaf" } else { "an intermediate" }, text.as_ref())?);
        }
        Self::new(identity, key, certificates, read("the trust roots", roots.as_ref())?, trust)
    }

    /// `chain` starts with the leaf. `roots` came with it; they must hold for it, but whom the certificate trusts is
    /// for `trust` to say, at each handshake.
    pub fn new(
        identity: &Identity,
        key: Arc<dyn SigningKey>,
        chain: Vec<CertificateDer<'static>>,
        roots: Vec<CertificateDer<'static>>,
        trust: Trust,
    ) -> Result<Self, CertificateError> {
        let leaf = chain.first().ok_or(CertificateError::Incomplete(0))?;
        let names = peer::spiffe_names(leaf).map_err(|e| CertificateError::Unreadable(e.to_string()))?;
        if names != [identity.clone()] {
            let found = Names(names).to_string();
            return Err(CertificateError::WrongIdentity { found, expected: identity.clone() });
        }
        let info = describe(leaf).map_err(|e| CertificateError::Unreadable(e.to_string()))?;
        let now = SystemTime::now();
        let (not_before, not_after) = (info.not_before, info.not_after);
        if now < not_before || now >= not_after {
            return Err(CertificateError::NotValidNow { not_before, not_after, now });
        }
        trust::verify_own(identity.trust_domain(), &roots, &chain)
            .map_err(|e| CertificateError::Chain(e.to_string()))?;
        let key = CertifiedKey::new(chain, key);
        key.keys_match().map_err(|_| CertificateError::WrongKey)?;
        Ok(Self {
            identity: identity.clone(),
            key: Arc::new(key),
            roots,
            trust,
            not_before,
            not_after,
            serial: info.serial,
            server: OnceLock::new(),
            clients: Mutex::default(),
        })
    }

    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    pub fn not_before(&self) -> SystemTime {
        self.not_before
    }

    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Decimal.
    pub fn serial(&self) -> &str {
        &self.serial
    }

    pub fn is_valid(&self) -> bool {
        self.valid_at(SystemTime::now())
    }

    pub(super) fn valid_at(&self, now: SystemTime) -> bool {
        now < self.not_after
    }

    /// Leaf and intermediates.
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.key.cert
    }

    /// Whether its chain leads to this root.
    pub fn leads_to(&self, root: &CertificateDer<'static>) -> bool {
        trust::verify_own(self.identity.trust_domain(), std::slice::from_ref(root), self.chain()).is_ok()
    }

    /// The roots that came with it.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Whom it takes for a peer.
    pub fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Whether its own chain leads to a root that is trusted still.
    pub fn is_trusted(&self) -> bool {
        self.trust.leads_to_root(self.identity.trust_domain(), self.chain(), self.not_before)
    }

    /// Leaf and intermediates, for the dump.
    pub fn chain_info(&self) -> Vec<CertificateInfo> {
        self.chain().iter().filter_map(|c| describe(c).ok()).collect()
    }

    /// The roots that its peers must lead to now, for the dump.
    pub fn roots_info(&self) -> Vec<CertificateInfo> {
        self.trust.roots(self.identity.trust_domain()).iter().filter_map(|c| describe(c).ok()).collect()
    }

    /// For accepting tunnels as this workload. Asks for the peer's certificate and checks chain and trust domain;
    /// whether `h2` was agreed on is checked after the handshake ([`super::check_handshake`]).
    pub fn server_config(&self) -> Arc<ServerConfig> {
        self.server.get_or_init(|| Arc::new(self.build_server_config())).clone()
    }

    /// For opening tunnels as this workload to a peer that is one of `expected`.
    pub fn client_config(&self, expected: &[Identity]) -> Arc<ClientConfig> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(config) = clients.get(expected) {
            return config.clone();
        }
        if clients.len() >= MAX_CLIENT_CONFIGS {
            clients.clear();
        }
        let config = Arc::new(self.build_client_config(expected));
        clients.insert(expected.into(), config.clone());
        config
    }

    fn build_server_config(&self) -> ServerConfig {
        let verifier = ClientVerifier(self.verifier());
        let mut config = ServerConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has suites for TLS 1.3")
            .with_client_cert_verifier(Arc::new(verifier))
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.key.clone())));
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        // A resumed session would outlive the trust in the certificate that it began with.
        config.send_tls13_tickets = 0;
        config
    }

    fn build_client_config(&self, expected: &[Identity]) -> ClientConfig {
        let verifier = ServerVerifier { verifier: self.verifier(), expected: expected.into() };
        let mut config = ClientConfig::builder_with_provider(tls::provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("the provider has suites for TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.key.clone())));
        config.alpn_protocols = vec![ALPN_H2.to_vec()];
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        config
    }

    fn verifier(&self) -> Verifier {
        Verifier { trust: self.trust.clone(), own: self.identity.trust_domain().clone() }
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Certificate")
            .field("identity", &self.identity)
            .field("serial", &self.serial)
            .field("not_before", &rfc3339(self.not_before))
            .field("not_after", &rfc3339(self.not_after))
            .finish_non_exhaustive()
    }
}

/// What the dump shows of one certificate.
pub fn describe(certificate: &CertificateDer<'_>) -> Result<CertificateInfo, PeerError> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(|e| PeerError::Unreadable(e.to_string()))?;
    let validity = parsed.validity();
    Ok(CertificateInfo {
        pem: to_pem(certificate),
        serial: parsed.tbs_certificate.serial.to_string(),
        not_before: at(validity.not_before.timestamp()),
        // The last second still counts.
        not_after: at(validity.not_after.timestamp().saturating_add(1)),
    })
}

fn to_pem(der: &[u8]) -> String {
    let base64 = super::base64(der);
    let mut text = String::with_capacity(base64.len() + base64.len() / 64 + 60);
    text.push_str("-----BEGIN CERTIFICATE-----\n");
    for line in base64.as_bytes().chunks(64) {
        text.extend(line.iter().map(|&b| char::from(b)));
        text.push('\n');
    }
    text.push_str("-----END CERTIFICATE-----\n");
    text
}

pub(super) fn at(seconds: i64) -> SystemTime {
    match u64::try_from(seconds) {
        Ok(after) => UNIX_EPOCH + Duration::from_secs(after),
        Err(_) => UNIX_EPOCH - Duration::from_secs(seconds.unsigned_abs()),
    }
}

/// A time as RFC 3339 in UTC, whole seconds.
pub fn rfc3339(time: SystemTime) -> String {
    let seconds = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_secs()).unwrap_or(i64::MAX),
    };
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days to civil date (H. Hinnant), eras of 400 years that start on 1 March.
    let z = days + 719_468;
    let (era, doe) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + i64::from(month <= 2);
    let (h, m, s) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}Z")
}

/// One source workload rarely talks to more peers at a time; beyond it the cache starts anew.
const MAX_CLIENT_CONFIGS: usize = 1024;

#[cfg(test)]
mod tests;

//! The certificate authority: a root of its own, kept in a folder, that signs for workloads and for the control plane's
//! own port.
//!
//! Must never sign past its own end, nor take anything but the public key from a request, nor let its key out.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rcgen::{
    CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, KeyUsagePurpose, PublicKeyData, SanType,
    SerialNumber, SubjectPublicKeyInfo,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateSigningRequestDer};
use tokio::sync::watch;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::prelude::FromDer;
use ztunnel::identity::{Identity, PrivateKey, rfc3339};

mod files;
mod root;
#[cfg(test)]
mod tests;

pub use files::write_whole;
use root::Root;

/// The authority.
#[derive(Debug)]
pub struct Ca {
    dir: PathBuf,
    root: ArcSwap<Root>,
    bundles: watch::Sender<Arc<Bundle>>,
}

/// The roots in force at one time, the one that signs first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    roots: Vec<CertificateDer<'static>>,
    version: String,
}

impl Bundle {
    fn new(roots: &[CertificateDer<'static>]) -> Self {
        let mut hash = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        roots.iter().for_each(|root| hash.update(root));
        let version = hash.finish().as_ref()[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { roots: roots.to_vec(), version }
    }

    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Another for other roots.
    pub fn version(&self) -> &str {
        &self.version
    }
}

/// Why the authority cannot work or sign.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("{step} {path}: {source}")]
    File { step: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not usable: {reason}")]
    Root { path: PathBuf, reason: String },
    #[error("the request cannot be signed: {0}")]
    Request(String),
    #[error("the root ended at {root}, it is {now} now: it must be replaced before anything can be signed")]
    Expired { root: String, now: String },
    #[error("signing: {0}")]
    Sign(String),
}

/// What a look at the files of the root found.
#[derive(Debug, PartialEq, Eq)]
pub enum Refreshed {
    Same,
    /// Another root signs from now on. The roots before it are still handed out as trusted.
    Changed,
}

impl Ca {
    /// Opens the root in a folder, or makes one there.
    pub fn open(dir: &Path) -> Result<Self, CaError> {
        let root = Root::open(dir)?;
        let bundles = watch::Sender::new(Arc::new(Bundle::new(root.trusted())));
        let this = Self { dir: dir.to_owned(), root: ArcSwap::from_pointee(root), bundles };
        this.root.load().end_of(SystemTime::now(), Duration::ZERO)?;
        Ok(this)
    }

    /// Takes up a root that was put into the folder since. One that cannot be used changes nothing.
    pub fn refresh(&self) -> Result<Refreshed, CaError> {
        let held = self.root.load_full();
        let read = Root::read(&self.dir)?;
        if read.is_same_as(&held) {
            return Ok(Refreshed::Same);
        }
        read.end_of(SystemTime::now(), Duration::ZERO)?;
        let root = read.trusting_also(&held);
        let bundle = Arc::new(Bundle::new(root.trusted()));
        // First what is handed out, then what is announced.
        self.root.store(Arc::new(root));
        self.bundles.send_replace(bundle);
        Ok(Refreshed::Changed)
    }

    /// All trusted roots, the one that signs first.
    pub fn roots_pem(&self) -> String {
        self.root.load().bundle().to_owned()
    }

    /// The roots in force, now and from now on.
    pub fn bundles(&self) -> watch::Receiver<Arc<Bundle>> {
        self.bundles.subscribe()
    }

    /// When the root that signs ends.
    pub fn not_after(&self) -> SystemTime {
        self.root.load().not_after()
    }

    /// Signs the key of a request (PKCS#10 in PEM) for an identity. Gives the leaf in PEM. A lifetime that would end
    /// after the root is cut.
    pub fn sign(&self, identity: &Identity, request: &str, lifetime: Duration) -> Result<String, CaError> {
        let key = public_key(request)?;
        let name = identity.to_string().try_into().map_err(sign_error)?;
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        Ok(self.leaf(vec![SanType::URI(name)], usages, &key, lifetime)?.pem())
    }

    /// A certificate with its key for the control plane's own port. Names are host names or addresses.
    pub fn serving(
        &self,
        names: &[String],
        lifetime: Duration,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKey), CaError> {
        let key = PrivateKey::generate().map_err(|e| CaError::Sign(e.to_string()))?;
        let san = |name: &String| match name.parse::<IpAddr>() {
            Ok(address) => Ok(SanType::IpAddress(address)),
            Err(_) => name.as_str().try_into().map(SanType::DnsName),
        };
        let names = names.iter().map(san).collect::<Result<_, _>>().map_err(sign_error)?;
        let leaf = self.leaf(names, vec![ExtendedKeyUsagePurpose::ServerAuth], &key, lifetime)?;
        Ok((vec![leaf.der().clone()], key))
    }

    fn leaf(
        &self,
        names: Vec<SanType>,
        usages: Vec<ExtendedKeyUsagePurpose>,
        key: &impl PublicKeyData,
        lifetime: Duration,
    ) -> Result<rcgen::Certificate, CaError> {
        let root = self.root.load();
        let now = SystemTime::now();
        let mut params = CertificateParams::default();
        // With an empty subject the names are marked critical.
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = names;
        params.not_before = (now - SKEW).into();
        params.not_after = root.end_of(now, lifetime)?.into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = usages;
        params.serial_number = Some(serial()?);
        params.use_authority_key_identifier_extension = true;
        params.signed_by(key, root.issuer()).map_err(sign_error)
    }
}

/// The public key of a request whose own signature holds: the caller has the private one. Nothing else counts.
fn public_key(request: &str) -> Result<SubjectPublicKeyInfo, CaError> {
    let wrong = |reason: String| CaError::Request(reason);
    if request.len() > MAX_REQUEST {
        return Err(wrong(format!("it has {} bytes, at most {MAX_REQUEST} are read", request.len())));
    }
    let der = CertificateSigningRequestDer::from_pem_slice(request.as_bytes())
        .map_err(|e| wrong(format!("expected a PKCS#10 in PEM: {e}")))?;
    let (rest, parsed) =
        X509CertificationRequest::from_der(&der).map_err(|e| wrong(format!("expected a PKCS#10: {e}")))?;
    if !rest.is_empty() {
        return Err(wrong("something follows the PKCS#10".into()));
    }
    let key = SubjectPublicKeyInfo::from_der(parsed.certification_request_info.subject_pki.raw)
        .map_err(|e| wrong(format!("its public key: {e}")))?;
    if *key.algorithm() != rcgen::PKCS_ECDSA_P256_SHA256 {
        return Err(wrong("expected an ECDSA key on P-256".into()));
    }
    parsed.verify_signature().map_err(|_| wrong("its own signature does not hold".into()))?;
    Ok(key)
}

/// 128 random bits, less what makes it positive and of full length.
fn serial() -> Result<SerialNumber, CaError> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| CaError::Sign("no randomness".into()))?;
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

fn sign_error(error: rcgen::Error) -> CaError {
    CaError::Sign(error.to_string())
}

impl Root {
    /// When a leaf of that lifetime ends: never after the root.
    fn end_of(&self, now: SystemTime, lifetime: Duration) -> Result<SystemTime, CaError> {
        if now >= self.not_after() {
            return Err(CaError::Expired { root: rfc3339(self.not_after()), now: rfc3339(now) });
        }
        Ok((now + lifetime).min(self.not_after()))
    }
}

/// Bytes of a request.
const MAX_REQUEST: usize = 16 * 1024;
/// Clocks of nodes may be behind by this.
const SKEW: Duration = Duration::from_secs(120);

//! The certificate authority: a root of its own, kept in a folder, that signs for workloads and for the control plane's
//! own port.
//!
//! Must never sign past its own end, nor take anything but the public key from a request.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData, SanType, SerialNumber,
};
use ztunnel::identity::Identity;

/// The authority.
pub struct Ca {
    root_pem: String,
    issuer: Issuer<'static, KeyPair>,
    not_after: SystemTime,
}

/// Why the authority cannot work or sign.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("{step} {path}: {source}")]
    File { step: &'static str, path: PathBuf, source: io::Error },
    #[error("{path} is not a usable root: {reason}")]
    Root { path: PathBuf, reason: String },
    #[error("the request is not a PKCS#10 of at most {MAX_CSR} bytes with a P-256 key: {0}")]
    Request(String),
    #[error("the root ends at {root}, it is {now} now: it must be replaced before anything can be signed")]
    Expired { root: String, now: String },
    #[error("signing: {0}")]
    Sign(String),
}

impl Ca {
    /// Opens the root in a folder, or makes one.
    pub fn open(dir: &Path) -> Result<Self, CaError> {
        let file = |step, path: &Path| {
            let path = path.to_owned();
            move |source| CaError::File { step, path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file("making", dir))?;
        let (key_path, cert_path) = (dir.join(KEY), dir.join(CERT));
        if !cert_path.exists() {
            let (key, root) = new_root().map_err(|reason| CaError::Root { path: cert_path.clone(), reason })?;
            // The key first: a certificate without its key would stop every later start.
            write_private(&key_path, key.as_bytes()).map_err(file("writing", &key_path))?;
            write_private(&cert_path, root.as_bytes()).map_err(file("writing", &cert_path))?;
            tracing::info!(path = %cert_path.display(), "made a root");
        }
        let key = fs::read_to_string(&key_path).map_err(file("reading", &key_path))?;
        let root_pem = fs::read_to_string(&cert_path).map_err(file("reading", &cert_path))?;
        let bad = |reason: String| CaError::Root { path: cert_path.clone(), reason };
        let key = KeyPair::from_pem(&key).map_err(|e| bad(format!("{KEY}: {e}")))?;
        let chain = ztunnel::identity::certificates_from_pem(root_pem.as_bytes()).map_err(|e| bad(e.to_string()))?;
        let root = chain.first().ok_or_else(|| bad("it is empty".into()))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(root).map_err(|e| bad(e.to_string()))?;
        if parsed.public_key().raw != key.subject_public_key_info() {
            return Err(bad(format!("{KEY} is not its key")));
        }
        let end = u64::try_from(parsed.validity().not_after.timestamp()).unwrap_or_default();
        let not_after = SystemTime::UNIX_EPOCH + Duration::from_secs(end);
        let issuer = Issuer::from_ca_cert_der(root, key).map_err(|e| bad(e.to_string()))?;
        let this = Self { root_pem, issuer, not_after };
        this.end_of(SystemTime::now(), Duration::ZERO)?;
        Ok(this)
    }

    pub fn root_pem(&self) -> &str {
        &self.root_pem
    }

    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Signs the key of a request for an identity. Gives the leaf in PEM.
    pub fn sign(&self, identity: &Identity, csr: &str, lifetime: Duration) -> Result<String, CaError> {
        if csr.len() > MAX_CSR {
            return Err(CaError::Request(format!("it has {} bytes", csr.len())));
        }
        // Its own signature is checked here: the caller has the key.
        let request = CertificateSigningRequestParams::from_pem(csr).map_err(|e| CaError::Request(e.to_string()))?;
        let mut params = self.leaf(lifetime)?;
        params.subject_alt_names = vec![SanType::URI(
            identity.to_string().try_into().map_err(|e: rcgen::Error| CaError::Sign(e.to_string()))?,
        )];
        let leaf = params.signed_by(&request.public_key, &self.issuer).map_err(|e| CaError::Sign(e.to_string()))?;
        Ok(leaf.pem())
    }

    /// A certificate with its key for the control plane's own port.
    pub fn serving(&self, names: &[String], lifetime: Duration) -> Result<(String, KeyPair), CaError> {
        let sign = |e: rcgen::Error| CaError::Sign(e.to_string());
        let key = KeyPair::generate().map_err(sign)?;
        let mut params = self.leaf(lifetime)?;
        params.subject_alt_names = names
            .iter()
            .map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)))
            .collect::<Result<_, rcgen::Error>>()
            .map_err(sign)?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &self.issuer).map_err(sign)?;
        Ok((leaf.pem(), key))
    }

    fn leaf(&self, lifetime: Duration) -> Result<CertificateParams, CaError> {
        let now = SystemTime::now();
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.not_before = (now - SKEW).into();
        params.not_after = self.end_of(now, lifetime)?.into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.serial_number = Some(serial()?);
        params.use_authority_key_identifier_extension = true;
        Ok(params)
    }

    /// When a leaf of that lifetime ends: never after the root.
    fn end_of(&self, now: SystemTime, lifetime: Duration) -> Result<SystemTime, CaError> {
        if now >= self.not_after {
            let text = ztunnel::identity::rfc3339;
            return Err(CaError::Expired { root: text(self.not_after), now: text(now) });
        }
        Ok((now + lifetime).min(self.not_after))
    }
}

/// Writes a file that only root reads, whole or not at all.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_whole(path, bytes, 0o600)
}

/// Writes a file whole or not at all.
pub fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let _ = fs::remove_file(&fresh);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

fn new_root() -> Result<(String, String), String> {
    let key = KeyPair::generate().map_err(|e| e.to_string())?;
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Understory");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let now = SystemTime::now();
    params.not_before = (now - SKEW).into();
    params.not_after = (now + ROOT_LIFETIME).into();
    params.serial_number = Some(serial().map_err(|e| e.to_string())?);
    let root = params.self_signed(&key).map_err(|e| e.to_string())?;
    Ok((key.serialize_pem(), root.pem()))
}

fn serial() -> Result<SerialNumber, CaError> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| CaError::Sign("no randomness".into()))?;
    // Positive, and not shorter than 16 bytes.
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

const KEY: &str = "root-key.pem";
const CERT: &str = "root-cert.pem";
/// Bytes of a request.
const MAX_CSR: usize = 16 * 1024;
/// Clocks of nodes may be behind by this.
const SKEW: Duration = Duration::from_secs(120);
const ROOT_LIFETIME: Duration = Duration::from_secs(10 * 365 * 86400);

//! The root's key and certificate in their folder: made once, read, told apart from others.
//!
//! Must never replace a key that is there: what it signed would be lost.

use std::fmt;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair as _};
use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyUsagePurpose};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use zeroize::Zeroizing;
use ztunnel::files::read_small;
use ztunnel::identity::{base64, certificates_from_pem};

use super::files::{lock, write_whole};
use super::{CaError, SKEW, serial};

/// A root that can sign, and all that are trusted with it.
pub(super) struct Root {
    issuer: Issuer<'static, RootKey>,
    /// The one that signs first.
    trusted: Vec<CertificateDer<'static>>,
    bundle: String,
    not_after: SystemTime,
}

/// The root's private key. It lives inside the crypto library, which wipes it when it is dropped.
struct RootKey(EcdsaKeyPair);

impl Root {
    /// Reads the root, after making one if there is none.
    pub fn open(dir: &Path) -> Result<Self, CaError> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file_error("making", dir))?;
        let locked = lock(dir).map_err(file_error("locking", dir))?;
        let (key_path, cert_path) = (dir.join(KEY), dir.join(CERT));
        if !cert_path.exists() {
            // A key without its certificate: the process that made it ended in between. Nothing is signed by it yet.
            let key = if key_path.exists() { read_key(&key_path)? } else { make_key(&key_path)? };
            let root = make_certificate(&key)?;
            write_whole(&cert_path, root.as_bytes(), 0o600).map_err(file_error("writing", &cert_path))?;
            tracing::info!(path = %cert_path.display(), "made a root");
        }
        drop(locked);
        let root = Self::read(dir)?;
        let open_to_others = fs::metadata(&key_path).is_ok_and(|m| m.permissions().mode() & 0o077 != 0);
        if open_to_others {
            tracing::warn!(path = %key_path.display(), "the root's key can be read by others: expected mode 0600");
        }
        Ok(root)
    }

    /// Reads the root that is in the folder. The certificate file holds the root that signs, then others that are
    /// trusted as well.
    pub fn read(dir: &Path) -> Result<Self, CaError> {
        let (key_path, cert_path) = (dir.join(KEY), dir.join(CERT));
        let bad = |reason: String| CaError::Root { path: cert_path.clone(), reason };
        let key = read_key(&key_path)?;
        let text = read_small(&cert_path, MAX_FILE).map_err(file_error("reading", &cert_path))?;
        let trusted = certificates_from_pem(&text).map_err(|e| bad(e.to_string()))?;
        let first = trusted.first().ok_or_else(|| bad("it is empty".into()))?;
        let (_, parsed) = x509_parser::parse_x509_certificate(first).map_err(|e| bad(e.to_string()))?;
        if parsed.public_key().subject_public_key.data != key.0.public_key().as_ref() {
            return Err(bad(format!("{KEY} is not the key of its first certificate")));
        }
        if !parsed.is_ca() {
            return Err(bad("its first certificate is not that of an authority".into()));
        }
        let not_after = end_of(&parsed);
        let issuer = Issuer::from_ca_cert_der(first, key).map_err(|e| bad(e.to_string()))?;
        let bundle = to_pem(&trusted);
        Ok(Self { issuer, trusted, bundle, not_after })
    }

    pub fn issuer(&self) -> &Issuer<'static, impl rcgen::SigningKey + use<>> {
        &self.issuer
    }

    pub fn trusted(&self) -> &[CertificateDer<'static>] {
        &self.trusted
    }

    pub fn bundle(&self) -> &str {
        &self.bundle
    }

    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whether the same root signs and nothing is trusted that the other does not trust.
    pub fn is_same_as(&self, held: &Self) -> bool {
        self.trusted.first() == held.trusted.first() && self.trusted.iter().all(|root| held.trusted.contains(root))
    }

    /// Goes on trusting what was trusted before: leaves of those roots are still in use.
    pub fn trusting_also(mut self, before: &Self) -> Self {
        let now = SystemTime::now();
        let lives = |root: &CertificateDer<'_>| {
            x509_parser::parse_x509_certificate(root).is_ok_and(|(_, parsed)| end_of(&parsed) > now)
        };
        let known = self.trusted.clone();
        self.trusted.extend(before.trusted.iter().filter(|root| !known.contains(root) && lives(root)).cloned());
        self.bundle = to_pem(&self.trusted);
        self
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Root").field("not_after", &self.not_after).field("trusted", &self.trusted.len()).finish()
    }
}

impl rcgen::PublicKeyData for RootKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for RootKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature = self.0.sign(&SystemRandom::new(), message).map_err(|_| rcgen::Error::RemoteKeyError)?;
        Ok(signature.as_ref().to_vec())
    }
}

fn make_key(path: &Path) -> Result<RootKey, CaError> {
    let fail = |_| CaError::Sign("the crypto library cannot make a key".into());
    let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).map_err(fail)?;
    let pkcs8 = key.to_pkcs8v1().map_err(fail)?;
    let text = Zeroizing::new(pem("PRIVATE KEY", pkcs8.as_ref()));
    write_whole(path, text.as_bytes(), 0o600).map_err(file_error("writing", path))?;
    Ok(RootKey(key))
}

fn read_key(path: &Path) -> Result<RootKey, CaError> {
    let text = Zeroizing::new(read_small(path, MAX_FILE).map_err(file_error("reading", path))?);
    let bad = |reason: &str| CaError::Root { path: path.to_owned(), reason: reason.to_owned() };
    let der = PrivatePkcs8KeyDer::from_pem_slice(&text).map_err(|_| bad("expected a PKCS#8 private key in PEM"))?;
    let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, der.secret_pkcs8_der())
        .map_err(|_| bad("expected an ECDSA key on P-256"))?;
    Ok(RootKey(key))
}

fn make_certificate(key: &RootKey) -> Result<String, CaError> {
    let now = SystemTime::now();
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Understory");
    // Two roots that overlap must not have one name: verifiers find the issuer by it.
    let made = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    params.distinguished_name.push(DnType::CommonName, format!("root {made}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now - SKEW).into();
    params.not_after = (now + LIFETIME).into();
    params.serial_number = Some(serial()?);
    params.self_signed(key).map(|root| root.pem()).map_err(|e| CaError::Sign(e.to_string()))
}

fn end_of(certificate: &x509_parser::certificate::X509Certificate<'_>) -> SystemTime {
    let end = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or_default();
    SystemTime::UNIX_EPOCH + Duration::from_secs(end)
}

fn to_pem(certificates: &[CertificateDer<'_>]) -> String {
    certificates.iter().map(|der| pem("CERTIFICATE", der)).collect()
}

fn pem(label: &str, der: &[u8]) -> String {
    let mut text = format!("-----BEGIN {label}-----\n");
    let body = Zeroizing::new(base64(der));
    for line in body.as_bytes().chunks(64) {
        // base64 is ASCII.
        text.extend(line.iter().map(|b| char::from(*b)));
        text.push('\n');
    }
    text.push_str(&format!("-----END {label}-----\n"));
    text
}

fn file_error(step: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> CaError + use<> {
    let path = path.to_owned();
    move |source| CaError::File { step, path, source }
}

const KEY: &str = "root-key.pem";
const CERT: &str = "root-cert.pem";
/// Bytes of each.
const MAX_FILE: usize = 1 << 20;
const LIFETIME: Duration = Duration::from_secs(10 * 365 * 86400);

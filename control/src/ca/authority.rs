//! An authority that can sign: a key, its certificate, and the path from there to a trusted root.
//!
//! Must never exist with a path that a peer would refuse: each is tried on a certificate of its own before it signs one
//! for others.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateParams, DistinguishedName, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyUsagePurpose, PublicKeyData,
    SanType, SerialNumber,
};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{CertificateError, RootCertStore};
use x509_parser::certificate::X509Certificate;
use x509_parser::error::X509Error;
use x509_parser::extensions::ParsedExtension;
use ztunnel::identity::{Identity, PrivateKey, rfc3339};

use super::CaError;
use super::cert::Cert;
use super::key::CaKey;

/// A key with a path to a root.
pub(super) struct Authority {
    issuer: Issuer<'static, CaKey>,
    /// From the certificate that signs upwards, without the root. Empty if the root itself signs.
    path: Vec<Cert>,
    root: Cert,
    not_before: SystemTime,
    not_after: SystemTime,
}

/// The files that an authority is made of, for the words of an error.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub key: &'static str,
    pub cert: &'static str,
    pub chain: &'static str,
    pub roots: &'static str,
}

/// What is wrong, and with which file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub file: &'static str,
    pub reason: String,
}

/// What a leaf is like.
pub(super) struct LeafTerms {
    pub names: Vec<SanType>,
    pub usages: Vec<ExtendedKeyUsagePurpose>,
    pub lifetime: Duration,
    /// How much earlier than now it begins, for clocks that are behind.
    pub backdate: Duration,
}

impl Authority {
    /// `signer` is the key's certificate; `chain` and `roots` are where its path is looked for. `probe` is a name of the
    /// kind that will be signed.
    pub fn new(
        key: CaKey,
        signer: Cert,
        chain: &[Cert],
        roots: &[Cert],
        names: Names,
        probe: &Identity,
        now: SystemTime,
    ) -> Result<Self, Fault> {
        let fault = |file| move |reason: String| Fault { file, reason };
        let parsed = signer.parsed().map_err(fault(names.cert))?;
        if !key.belongs_to(&parsed) {
            let reason = format!("it is not the key of the certificate in {} ({})", names.cert, signer.name);
            return Err(fault(names.key)(reason));
        }
        let (path, root) = find_path(&signer, chain, roots, names)?;
        for (below, cert) in path.iter().chain([&root]).enumerate() {
            let file = match below {
                0 => names.cert,
                _ if below == path.len() => names.roots,
                _ => names.chain,
            };
            check_authority(cert, below, below == path.len(), now).map_err(fault(file))?;
        }
        let issuer = Issuer::from_ca_cert_der(&signer.der, key).map_err(|e| fault(names.cert)(e.to_string()))?;
        let all = || path.iter().chain([&root]);
        // Neither is empty: the root is in both.
        let not_before = all().map(|cert| cert.not_before).max().unwrap_or(now);
        let not_after = all().map(|cert| cert.not_after).min().unwrap_or(now);
        let this = Self { issuer, not_before, not_after, path, root };
        this.try_out(probe, now).map_err(fault(names.cert))?;
        Ok(this)
    }

    /// The certificate whose key signs.
    pub fn signer(&self) -> &Cert {
        self.path.first().unwrap_or(&self.root)
    }

    /// The root that all it signs leads to.
    pub fn root(&self) -> &Cert {
        &self.root
    }

    /// Certificates that must be shown with a leaf: the signing one first, without the root.
    pub fn intermediates(&self) -> &[Cert] {
        &self.path
    }

    /// When the first certificate of the path ends.
    pub fn not_after(&self) -> SystemTime {
        self.not_after
    }

    /// Whether the same key signs with the same path.
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.path == other.path && self.root == other.root
    }

    /// Signs a leaf; it never ends after the path does. Gives its end as well.
    pub fn sign(
        &self,
        key: &impl PublicKeyData,
        terms: LeafTerms,
        now: SystemTime,
    ) -> Result<(rcgen::Certificate, SystemTime), CaError> {
        let end = self.end_of(terms.lifetime, now)?;
        let mut params = CertificateParams::default();
        // With an empty subject the names are marked critical.
        params.distinguished_name = DistinguishedName::new();
        params.subject_alt_names = terms.names;
        params.not_before = (now - terms.backdate).max(self.not_before).into();
        params.not_after = end.into();
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = terms.usages;
        params.serial_number = Some(serial()?);
        params.use_authority_key_identifier_extension = true;
        let leaf = params.signed_by(key, &self.issuer).map_err(|e| CaError::Sign(e.to_string()))?;
        Ok((leaf, end))
    }

    /// When a leaf of that lifetime ends.
    pub fn end_of(&self, lifetime: Duration, now: SystemTime) -> Result<SystemTime, CaError> {
        if now < self.not_before || now >= self.not_after {
            let (begin, end, now) = (rfc3339(self.not_before), rfc3339(self.not_after), rfc3339(now));
            return Err(CaError::NotValidNow { name: self.signer().name.clone(), begin, end, now });
        }
        Ok((now + lifetime).min(self.not_after))
    }

    /// Signs a leaf and judges it as a peer would.
    fn try_out(&self, probe: &Identity, now: SystemTime) -> Result<(), String> {
        let key = PrivateKey::generate().map_err(|e| e.to_string())?;
        let name = probe.to_string().try_into().map_err(|e: rcgen::Error| e.to_string())?;
        let terms = LeafTerms {
            names: vec![SanType::URI(name)],
            usages: workload_usages(),
            lifetime: Duration::from_secs(60),
            backdate: Duration::ZERO,
        };
        let (leaf, _) = self.sign(&key, terms, now).map_err(|e| e.to_string())?;
        let leaf = leaf.der();
        let signer = self.signer().parsed()?;
        let (_, parsed) = x509_parser::parse_x509_certificate(leaf).map_err(|e| e.to_string())?;
        if parsed.issuer().as_raw() != signer.subject().as_raw() {
            return Err(format!("its subject ({}) is encoded in a way that cannot be repeated", self.signer().name));
        }
        verify(leaf, self.path.iter().map(|cert| cert.der.clone()).collect(), &self.root, now)
            .map_err(|reason| format!("what it signs would be refused by peers: {reason}"))
    }
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Authority")
            .field("signer", &self.signer().name)
            .field("root", &self.root.name)
            .field("not_after", &rfc3339(self.not_after))
            .finish()
    }
}

/// From the signing certificate to a root: the certificates between, the signing one first, and the root.
fn find_path(signer: &Cert, chain: &[Cert], roots: &[Cert], names: Names) -> Result<(Vec<Cert>, Cert), Fault> {
    let mut path: Vec<Cert> = Vec::new();
    let mut at = signer;
    loop {
        if let Some(root) = roots.iter().find(|root| *root == at) {
            return Ok((path, root.clone()));
        }
        path.push(at.clone());
        let subject = at.parsed().map_err(|reason| Fault { file: names.chain, reason })?;
        let mut namesake = None;
        let mut next = None;
        let above = roots.iter().map(|cert| (cert, true)).chain(chain.iter().map(|cert| (cert, false)));
        for (cert, is_root) in above.filter(|(cert, _)| !path.contains(cert)) {
            let Ok(issuer) = cert.parsed() else { continue };
            match judge_issuer(&issuer, &subject) {
                Issued::Yes if is_root => return Ok((path, cert.clone())),
                Issued::Yes => next = next.or(Some(cert)),
                Issued::OtherKey => namesake = Some(cert),
                Issued::No => {}
            }
        }
        match next {
            Some(cert) if path.len() < MAX_PATH => at = cert,
            Some(_) => {
                let reason = format!("more than {MAX_PATH} certificates lie between {} and a root", signer.name);
                return Err(Fault { file: names.chain, reason });
            }
            None => {
                let (chain, roots) = (names.chain, names.roots);
                let reason = match namesake {
                    Some(cert) => format!(
                        "{} is not signed by the key of {}, which has its issuer's name: the chain leads to no root in {roots}",
                        at.name, cert.name
                    ),
                    None => format!(
                        "the chain leads to no root in {roots}: the issuer of {}, {}, is in neither {chain} nor {roots}",
                        at.name,
                        subject.issuer()
                    ),
                };
                let file = if path.len() == 1 { names.cert } else { chain };
                return Err(Fault { file, reason });
            }
        }
    }
}

enum Issued {
    Yes,
    /// The name fits, the signature does not.
    OtherKey,
    No,
}

fn judge_issuer(issuer: &X509Certificate<'_>, subject: &X509Certificate<'_>) -> Issued {
    if issuer.subject().as_raw() != subject.issuer().as_raw() {
        return Issued::No;
    }
    match subject.verify_signature(Some(issuer.public_key())) {
        // The trial of the whole path will tell.
        Ok(()) | Err(X509Error::SignatureUnsupportedAlgorithm) => Issued::Yes,
        Err(_) => Issued::OtherKey,
    }
}

/// Whether a certificate may stand in a path, with so many other authorities below it.
fn check_authority(cert: &Cert, below: usize, is_root: bool, now: SystemTime) -> Result<(), String> {
    let (name, parsed) = (&cert.name, cert.parsed()?);
    let constraints = parsed.basic_constraints().map_err(|e| format!("{name}: {e}"))?;
    let Some(constraints) = constraints.filter(|c| c.value.ca) else {
        return Err(format!("{name} is not the certificate of an authority (basic constraints without CA)"));
    };
    if let Some(most) = constraints.value.path_len_constraint
        && (most as usize) < below
    {
        let reason = format!("{name} allows {most} authorities below it (path length), and there are {below}");
        return Err(reason);
    }
    let usage = parsed.key_usage().map_err(|e| format!("{name}: {e}"))?;
    if usage.is_some_and(|usage| !usage.value.key_cert_sign()) {
        return Err(format!("{name} may not sign certificates (key usage without keyCertSign)"));
    }
    let purposes = parsed.extensions().iter().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::ExtendedKeyUsage(purposes) => Some(purposes),
        _ => None,
    });
    // Those of a root count for nobody.
    if let Some(purposes) = purposes.filter(|_| !is_root)
        && !(purposes.any || (purposes.server_auth && purposes.client_auth))
    {
        return Err(format!(
            "{name} is only for other purposes (extended key usage without serverAuth and clientAuth)"
        ));
    }
    cert.check_time(now)
}

fn verify(
    leaf: &CertificateDer<'_>,
    intermediates: Vec<CertificateDer<'static>>,
    root: &Cert,
    now: SystemTime,
) -> Result<(), String> {
    let words = |error: rustls::Error| match error {
        rustls::Error::InvalidCertificate(CertificateError::Other(other)) => format!("{:?}", other.0),
        rustls::Error::InvalidCertificate(reason) => format!("{reason:?}"),
        other => other.to_string(),
    };
    let mut roots = RootCertStore::empty();
    roots.add(root.der.clone()).map_err(words)?;
    let algorithms = rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.all;
    let parsed = ParsedCertificate::try_from(leaf).map_err(words)?;
    let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap_or_default());
    verify_server_cert_signed_by_trust_anchor(&parsed, &roots, &intermediates, now, algorithms).map_err(words)
}

/// What workloads' certificates are for.
pub(super) fn workload_usages() -> Vec<ExtendedKeyUsagePurpose> {
    vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth]
}

/// 128 random bits, less what makes it positive and of full length.
pub(super) fn serial() -> Result<SerialNumber, CaError> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| CaError::Sign("no randomness".into()))?;
    bytes[0] = (bytes[0] & 0x7f) | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Certificates between a leaf and its root.
const MAX_PATH: usize = 5;

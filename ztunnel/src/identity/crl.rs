//! Certificate revocation lists (RFC 5280 §5): read, and asked about the certificates of a verified path.
//!
//! Must never answer "not revoked" from a list that the certificate's issuer has not signed, nor from one that covers
//! only a part of what the issuer has signed.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use rustls::pki_types::SubjectPublicKeyInfoDer;
use webpki::RawPublicKeyEntity;
use x509_parser::asn1_rs::{Any, FromDer};
use x509_parser::oid_registry::{
    OID_X509_EXT_AUTHORITY_KEY_IDENTIFIER, OID_X509_EXT_CRL_NUMBER, OID_X509_EXT_DELTA_CRL_INDICATOR,
    OID_X509_EXT_ISSUER_DISTRIBUTION_POINT,
};
use x509_parser::prelude::{CertificateRevocationList, X509Extension};

use super::certificate::at;
use super::{pem, tls};

/// The lists of one file.
#[derive(Debug, Default)]
pub struct CrlSet {
    /// By the issuer's name, newest first.
    by_issuer: HashMap<Box<[u8]>, Vec<Crl>>,
}

/// One list.
struct Crl {
    issuer: String,
    this_update: SystemTime,
    next_update: Option<SystemTime>,
    /// Serial number, without leading zeros, to the time of its revocation.
    revoked: HashMap<Box<[u8]>, SystemTime>,
    signed: Box<[u8]>,
    algorithm: Box<[u8]>,
    signature: Box<[u8]>,
    /// Keys of issuers that it was checked against, and what came of it.
    checked: Mutex<Vec<(SubjectPublicKeyInfoDer<'static>, bool)>>,
}

/// An issuer, if it could be read, and what is wrong with its list.
type Fault = (Option<String>, String);

/// What a set says of one certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Status {
    Good,
    Revoked {
        since: SystemTime,
    },
    /// No list of its issuer is there.
    Unknown,
    /// The issuer's list has ended: what was revoked since is not known.
    Outdated {
        next_update: SystemTime,
    },
}

/// A certificate of a path, and who signed it.
pub(super) struct Link<'a> {
    /// Content of the issuer's name.
    pub issuer: &'a [u8],
    pub issuer_key: SubjectPublicKeyInfoDer<'static>,
    pub serial: &'a [u8],
}

/// Why a file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CrlError {
    #[error("{0}")]
    Pem(String),
    #[error("list number {number}{} cannot be used: {reason}", .issuer.as_deref().map(|i| format!(" (of {i})")).unwrap_or_default())]
    Unusable { number: usize, issuer: Option<String>, reason: String },
}

impl CrlSet {
    /// From PEM with any number of blocks, or one list in DER. Without any list it is an error: that is how a file looks
    /// that is being written.
    pub fn read(text: &[u8]) -> Result<Self, CrlError> {
        let lists = if text.first() == Some(&DER_SEQUENCE) {
            vec![text.to_vec()]
        } else {
            pem::contents(text, "X509 CRL").map_err(CrlError::Pem)?
        };
        if lists.is_empty() {
            let reason = "no revocation list in it (blocks that begin with -----BEGIN X509 CRL----- are expected)";
            return Err(CrlError::Pem(reason.into()));
        }
        let mut set = Self::default();
        for (index, der) in lists.iter().enumerate() {
            let number = index + 1;
            let (name, crl) =
                Crl::read(der).map_err(|(issuer, reason)| CrlError::Unusable { number, issuer, reason })?;
            set.by_issuer.entry(name).or_default().push(crl);
        }
        for lists in set.by_issuer.values_mut() {
            lists.sort_by_key(|crl| std::cmp::Reverse(crl.this_update));
        }
        Ok(set)
    }

    /// What the newest list says that the certificate's issuer has signed.
    pub(super) fn status(&self, link: &Link<'_>, now: SystemTime) -> Status {
        let lists = self.by_issuer.get(link.issuer).map(Vec::as_slice).unwrap_or_default();
        let Some(crl) = lists.iter().find(|crl| crl.is_signed_by(&link.issuer_key)) else { return Status::Unknown };
        match (crl.revoked.get(without_zeros(link.serial)), crl.next_update) {
            (Some(&since), _) => Status::Revoked { since },
            (None, Some(next_update)) if next_update <= now => Status::Outdated { next_update },
            (None, _) => Status::Good,
        }
    }

    /// Number of lists.
    pub fn len(&self) -> usize {
        self.by_issuer.values().map(Vec::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.by_issuer.is_empty()
    }

    /// Number of revoked certificates.
    pub fn revoked(&self) -> usize {
        self.by_issuer.values().flatten().map(|crl| crl.revoked.len()).sum()
    }

    /// When the first of the newest lists ends.
    pub fn next_update(&self) -> Option<SystemTime> {
        self.by_issuer.values().filter_map(|lists| lists.first()?.next_update).min()
    }
}

impl Crl {
    /// The issuer's name (content only) and the list. The error has the issuer, if it could be read.
    fn read(der: &[u8]) -> Result<(Box<[u8]>, Self), Fault> {
        let unreadable = |e: &dyn fmt::Display| (None, format!("it is no revocation list: {e}"));
        let (rest, list) = CertificateRevocationList::from_der(der).map_err(|e| unreadable(&e))?;
        let tbs = &list.tbs_cert_list;
        let issuer = tbs.issuer.to_string();
        let refuse = |reason: String| (Some(issuer.clone()), reason);
        if !rest.is_empty() {
            return Err(refuse(format!("{} bytes follow it", rest.len())));
        }
        if tbs.signature != list.signature_algorithm {
            return Err(refuse("it names two signature algorithms".into()));
        }
        tbs.extensions().iter().try_for_each(check_extension).map_err(refuse)?;
        let mut revoked = HashMap::with_capacity(tbs.revoked_certificates.len());
        for entry in &tbs.revoked_certificates {
            if let Some(extension) = entry.extensions().iter().find(|e| e.critical) {
                return Err(refuse(format!("an entry has the critical extension {}", extension.oid)));
            }
            revoked.insert(without_zeros(entry.raw_serial()).into(), at(entry.revocation_date.timestamp()));
        }
        let parts = parts(der).map_err(|e| unreadable(&e))?;
        let (_, name) = Any::from_der(tbs.issuer.as_raw()).map_err(|e| unreadable(&e))?;
        let crl = Self {
            this_update: at(tbs.this_update.timestamp()),
            next_update: tbs.next_update.map(|t| at(t.timestamp())),
            revoked,
            signed: parts.signed.into(),
            algorithm: parts.algorithm.into(),
            signature: parts.signature.into(),
            checked: Mutex::default(),
            issuer: issuer.clone(),
        };
        Ok((name.data.into(), crl))
    }

    fn is_signed_by(&self, key: &SubjectPublicKeyInfoDer<'static>) -> bool {
        let mut checked = self.checked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, holds)) = checked.iter().find(|(known, _)| known == key) {
            return *holds;
        }
        let holds = self.verify(key);
        if !holds {
            tracing::debug!(issuer = self.issuer, "a revocation list is not signed with this key of its issuer");
        }
        // Only authorities below a trusted root get here, so few that this is only a bound.
        if checked.len() >= MAX_KEYS {
            checked.clear();
        }
        checked.push((key.clone(), holds));
        holds
    }

    fn verify(&self, key: &SubjectPublicKeyInfoDer<'static>) -> bool {
        let Ok(key) = RawPublicKeyEntity::try_from(key) else { return false };
        let algorithms = tls::provider().signature_verification_algorithms.all;
        let mut fitting = algorithms.iter().filter(|a| *a.signature_alg_id() == *self.algorithm);
        fitting.any(|algorithm| key.verify_signature(*algorithm, &self.signed, &self.signature).is_ok())
    }
}

/// Extensions that narrow what a list covers make it unusable here, as does any critical one that is not known.
fn check_extension(extension: &X509Extension<'_>) -> Result<(), String> {
    let oid = &extension.oid;
    if *oid == OID_X509_EXT_DELTA_CRL_INDICATOR {
        return Err("it is a delta: whole lists are expected".into());
    }
    if *oid == OID_X509_EXT_ISSUER_DISTRIBUTION_POINT {
        return Err("it covers only a part of what its issuer has signed: whole lists are expected".into());
    }
    let known = *oid == OID_X509_EXT_CRL_NUMBER || *oid == OID_X509_EXT_AUTHORITY_KEY_IDENTIFIER;
    if extension.critical && !known { Err(format!("it has the critical extension {oid}")) } else { Ok(()) }
}

/// What is needed to check a signature.
struct Parts<'a> {
    signed: &'a [u8],
    /// Content of the AlgorithmIdentifier.
    algorithm: &'a [u8],
    signature: &'a [u8],
}

fn parts(der: &[u8]) -> Result<Parts<'_>, String> {
    let any = |bytes| Any::from_der(bytes).map_err(|e| e.to_string());
    let (_, whole) = any(der)?;
    let content = whole.data;
    let (after_signed, _) = any(content)?;
    let signed = &content[..content.len() - after_signed.len()];
    let (after_algorithm, algorithm) = any(after_signed)?;
    let (_, bits) = any(after_algorithm)?;
    let (0, signature) = bits.data.split_first().map(|(unused, bits)| (*unused, bits)).ok_or("no signature")? else {
        return Err("a signature that is not whole bytes".into());
    };
    Ok(Parts { signed, algorithm: algorithm.data, signature })
}

fn without_zeros(serial: &[u8]) -> &[u8] {
    let zeros = serial.iter().take_while(|&&b| b == 0).count();
    &serial[zeros..]
}

impl fmt::Debug for Crl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crl")
            .field("issuer", &self.issuer)
            .field("revoked", &self.revoked.len())
            .finish_non_exhaustive()
    }
}

/// First byte of a list in DER; no text begins with it that has a PEM block.
const DER_SEQUENCE: u8 = 0x30;
const MAX_KEYS: usize = 64;

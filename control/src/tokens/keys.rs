//! The file with the cluster's public keys for service account tokens: PEM blocks or a JWKS, read again on change.
//!
//! Must never go without keys because a new version of the file is broken: those known before stay.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, JwkSet, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use ztunnel::files::read_small;

/// The keys of one version of the file.
pub(super) type Keys = Vec<(DecodingKey, Algorithm)>;

/// The watched file.
pub struct KeyFile {
    path: PathBuf,
    held: Mutex<Held>,
}

/// Why a key file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct KeyFileError {
    path: String,
    reason: String,
}

struct Held {
    text: Vec<u8>,
    keys: Arc<Keys>,
    looked: Instant,
    /// What was said about the file last.
    complaint: Option<String>,
}

impl KeyFile {
    /// Reads the file for the first time.
    pub fn open(path: &Path) -> Result<Self, KeyFileError> {
        let error = |reason| KeyFileError { path: path.display().to_string(), reason };
        let text = read(path).map_err(error)?;
        let keys = Arc::new(parse(&text).map_err(error)?);
        let held = Held { text, keys, looked: Instant::now(), complaint: None };
        Ok(Self { path: path.to_owned(), held: Mutex::new(held) })
    }

    /// The keys, looked at again now and then.
    pub(super) fn current(&self) -> Arc<Keys> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.looked.elapsed() >= LOOK {
            self.refresh(&mut held);
        }
        held.keys.clone()
    }

    /// The keys if they are others than a moment ago.
    pub(super) fn look_again(&self) -> Option<Arc<Keys>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // Wrong tokens must not keep us reading.
        if held.looked.elapsed() < LOOK_SOON {
            return None;
        }
        self.refresh(&mut held).then(|| held.keys.clone())
    }

    /// Takes up a new version; whether there was one.
    fn refresh(&self, held: &mut Held) -> bool {
        held.looked = Instant::now();
        let fresh = read(&self.path)
            .and_then(|text| if text == held.text { Ok(None) } else { parse(&text).map(|keys| Some((text, keys))) });
        match fresh {
            Ok(None) => {
                held.complaint = None;
                false
            }
            Ok(Some((text, keys))) => {
                tracing::info!(path = %self.path.display(), keys = keys.len(), "the keys for tokens have changed");
                (held.text, held.keys, held.complaint) = (text, Arc::new(keys), None);
                true
            }
            Err(reason) => {
                if held.complaint.as_ref() != Some(&reason) {
                    let path = self.path.display();
                    tracing::warn!(%path, reason, "the keys for tokens cannot be read, those known before stay");
                    held.complaint = Some(reason);
                }
                false
            }
        }
    }
}

impl fmt::Debug for KeyFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyFile({})", self.path.display())
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    read_small(path, MAX_FILE).map_err(|e| e.to_string())
}

fn parse(text: &[u8]) -> Result<Keys, String> {
    let keys = if text.trim_ascii_start().starts_with(b"{") { from_jwks(text)? } else { from_pem(text)? };
    if keys.len() > MAX_KEYS {
        return Err(format!("it has {} keys, at most {MAX_KEYS} are taken", keys.len()));
    }
    Ok(keys)
}

fn from_jwks(text: &[u8]) -> Result<Keys, String> {
    let set: JwkSet = serde_json::from_slice(text).map_err(|e| format!("expected a JWKS: {e}"))?;
    let mut keys = Vec::new();
    for jwk in &set.keys {
        let algorithm = match &jwk.algorithm {
            AlgorithmParameters::RSA(_) => Algorithm::RS256,
            AlgorithmParameters::EllipticCurve(ec) if ec.curve == EllipticCurve::P256 => Algorithm::ES256,
            // Keys of other kinds sign no tokens that we take.
            _ => continue,
        };
        if jwk.common.public_key_use.as_ref().is_some_and(|u| *u != PublicKeyUse::Signature) {
            continue;
        }
        let key = DecodingKey::from_jwk(jwk).map_err(|e| format!("a key of the JWKS is broken: {e}"))?;
        keys.push((key, algorithm));
    }
    if keys.is_empty() { Err("the JWKS has no RSA or P-256 key for signatures".into()) } else { Ok(keys) }
}

fn from_pem(text: &[u8]) -> Result<Keys, String> {
    let text = std::str::from_utf8(text).map_err(|_| EXPECTED.to_owned())?;
    let mut keys = Vec::new();
    let mut rest = text;
    while let Some(begin) = rest.find("-----BEGIN ") {
        let block = &rest[begin..];
        let label = block["-----BEGIN ".len()..].split("-----").next().unwrap_or_default();
        let end_line = format!("-----END {label}-----");
        let end = block.find(&end_line).ok_or_else(|| format!("a PEM block {label:?} does not end"))? + end_line.len();
        keys.push(pem_key(label, &block[..end])?);
        rest = &block[end..];
    }
    if keys.is_empty() { Err(EXPECTED.to_owned()) } else { Ok(keys) }
}

fn pem_key(label: &str, block: &str) -> Result<(DecodingKey, Algorithm), String> {
    if !matches!(label, "PUBLIC KEY" | "RSA PUBLIC KEY") {
        return Err(format!("a PEM block {label:?}: {EXPECTED}"));
    }
    if let Ok(key) = DecodingKey::from_ec_pem(block.as_bytes()) {
        // The one form of a point on P-256 that is in use.
        return match key.try_get_as_bytes() {
            Ok([0x04, rest @ ..]) if rest.len() == 64 => Ok((key, Algorithm::ES256)),
            _ => Err("an EC key is not on P-256".into()),
        };
    }
    let key = DecodingKey::from_rsa_pem(block.as_bytes()).map_err(|_| format!("a PEM block is broken: {EXPECTED}"))?;
    Ok((key, Algorithm::RS256))
}

const EXPECTED: &str = "expected public keys (RSA or P-256) in PEM, or a JWKS";
/// Bytes.
const MAX_FILE: usize = 1 << 20;
const MAX_KEYS: usize = 32;
/// How often the file is looked at.
const LOOK: Duration = Duration::from_secs(10);
/// How soon it is looked at again when no key fits a token.
pub(super) const LOOK_SOON: Duration = Duration::from_secs(1);

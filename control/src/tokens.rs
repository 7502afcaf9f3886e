//! Who is calling: service account tokens, checked by the cluster's own keys.
//!
//! Must never believe a claim before the signature, the issuer, the audience and the times are right.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use jsonwebtoken::jwk::JwkSet;
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode};
use serde::Deserialize;
use tonic::Status;
use tonic::metadata::MetadataMap;

/// A caller whose token was good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub namespace: String,
    pub service_account: String,
    /// The pod that the token is bound to: name and uid.
    pub pod: Option<(String, String)>,
}

/// Checks tokens.
#[derive(Debug)]
pub struct Tokens {
    file: PathBuf,
    issuer: String,
    audience: String,
    cluster_id: String,
    keys: Mutex<Option<Keys>>,
}

/// A public key and the algorithms that it is for.
type VerifyingKey = (DecodingKey, Vec<Algorithm>);
type KeyList = Arc<Vec<VerifyingKey>>;

struct Keys {
    read: Instant,
    text: Vec<u8>,
    keys: KeyList,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} keys", self.keys.len())
    }
}

/// Why a caller is not believed. The caller hears less than the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("no bearer token")]
    Missing,
    #[error("the token is not good: {0}")]
    Bad(String),
    #[error("the token is for cluster {0:?}")]
    Cluster(String),
    #[error("the keys for service account tokens cannot be used: {0}")]
    Keys(String),
}

#[derive(Deserialize)]
struct Claims {
    sub: String,
    #[serde(rename = "kubernetes.io")]
    kubernetes: Kubernetes,
}

#[derive(Deserialize)]
struct Kubernetes {
    namespace: String,
    serviceaccount: Named,
    pod: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    uid: String,
}

impl Tokens {
    pub fn new(file: PathBuf, issuer: String, audience: String, cluster_id: String) -> Self {
        Self { file, issuer, audience, cluster_id, keys: Mutex::default() }
    }

    /// Reads the keys once, so that a wrong file stops the start.
    pub fn check(&self) -> Result<usize, TokenError> {
        self.keys().map(|keys| keys.len())
    }

    /// Who sends these headers.
    pub fn caller(&self, headers: &MetadataMap) -> Result<Caller, TokenError> {
        if let Some(cluster) = headers.get("clusterid").map(|c| c.to_str().unwrap_or("?"))
            && !cluster.is_empty()
            && cluster != self.cluster_id
        {
            return Err(TokenError::Cluster(cluster.chars().take(64).collect()));
        }
        let header = headers.get("authorization").and_then(|h| h.to_str().ok()).ok_or(TokenError::Missing)?;
        let token = header.strip_prefix("Bearer ").ok_or(TokenError::Missing)?;
        self.verify(token.trim())
    }

    pub fn verify(&self, token: &str) -> Result<Caller, TokenError> {
        let mut last = "no key fits".to_owned();
        for (key, algorithms) in self.keys()?.iter() {
            for algorithm in algorithms {
                let mut validation = Validation::new(*algorithm);
                validation.set_issuer(&[&self.issuer]);
                validation.set_audience(&[&self.audience]);
                validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
                validation.validate_nbf = true;
                validation.leeway = LEEWAY;
                match decode::<Claims>(token, key, &validation) {
                    Ok(data) => return caller(data.claims),
                    Err(error) => last = error.to_string(),
                }
            }
        }
        Err(TokenError::Bad(last))
    }

    /// The keys, read anew when the file has changed. Keys that were good stay while the file is not.
    fn keys(&self) -> Result<KeyList, TokenError> {
        let mut held = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(held) = &*held
            && held.read.elapsed() < REREAD
        {
            return Ok(held.keys.clone());
        }
        let fresh = std::fs::read(&self.file).map_err(|e| format!("{}: {e}", self.file.display())).and_then(|text| {
            if let Some(held) = &*held
                && held.text == text
            {
                return Ok((text, held.keys.clone()));
            }
            let keys = parse_keys(&text).map_err(|reason| format!("{}: {reason}", self.file.display()))?;
            Ok((text, Arc::new(keys)))
        });
        match (fresh, &mut *held) {
            (Ok((text, keys)), held) => {
                *held = Some(Keys { read: Instant::now(), text, keys: keys.clone() });
                Ok(keys)
            }
            (Err(reason), Some(held)) => {
                tracing::warn!(reason, "keys for service account tokens: going on with those known before");
                held.read = Instant::now();
                Ok(held.keys.clone())
            }
            (Err(reason), None) => Err(TokenError::Keys(reason)),
        }
    }
}

impl From<TokenError> for Status {
    fn from(error: TokenError) -> Self {
        match error {
            TokenError::Keys(_) => Status::unavailable("the control plane cannot check tokens now"),
            _ => Status::unauthenticated("request authenticate failure"),
        }
    }
}

fn caller(claims: Claims) -> Result<Caller, TokenError> {
    let Kubernetes { namespace, serviceaccount, pod } = claims.kubernetes;
    let expected = format!("system:serviceaccount:{namespace}:{}", serviceaccount.name);
    if claims.sub != expected {
        return Err(TokenError::Bad(format!("its subject {:?} is not {expected:?}", claims.sub)));
    }
    Ok(Caller { namespace, service_account: serviceaccount.name, pod: pod.map(|p| (p.name, p.uid)) })
}

fn parse_keys(text: &[u8]) -> Result<Vec<VerifyingKey>, String> {
    if text.trim_ascii_start().starts_with(b"{") {
        let set: JwkSet = serde_json::from_slice(text).map_err(|e| format!("not a JWKS: {e}"))?;
        let keys = set.keys.iter().filter_map(|jwk| {
            use jsonwebtoken::jwk::AlgorithmParameters as Parameters;
            let algorithms = match &jwk.algorithm {
                Parameters::RSA(_) => vec![Algorithm::RS256],
                Parameters::EllipticCurve(_) => vec![Algorithm::ES256],
                _ => return None,
            };
            Some((DecodingKey::from_jwk(jwk).ok()?, algorithms))
        });
        let keys: Vec<_> = keys.collect();
        return if keys.is_empty() { Err("the JWKS has no RSA or EC key".into()) } else { Ok(keys) };
    }
    let text = std::str::from_utf8(text).map_err(|_| "neither PEM nor JWKS".to_owned())?;
    let mut keys = Vec::new();
    for block in text.split_inclusive(PEM_END).filter(|b| b.contains(PEM_BEGIN)) {
        let block = &block[block.find(PEM_BEGIN).unwrap_or(0)..];
        if let Ok(key) = DecodingKey::from_ec_pem(block.as_bytes()) {
            keys.push((key, vec![Algorithm::ES256]));
        } else if let Ok(key) = DecodingKey::from_rsa_pem(block.as_bytes()) {
            keys.push((key, vec![Algorithm::RS256]));
        } else {
            return Err("a PEM block is not a public RSA or P-256 key".into());
        }
    }
    if keys.is_empty() { Err("expected PEM public keys or a JWKS".into()) } else { Ok(keys) }
}

const PEM_BEGIN: &str = "-----BEGIN PUBLIC KEY-----";
const PEM_END: &str = "-----END PUBLIC KEY-----";
/// Seconds by which clocks may differ.
const LEEWAY: u64 = 10;
/// How often the key file is looked at.
const REREAD: Duration = Duration::from_secs(10);

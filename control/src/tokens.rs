//! Who is calling: service account tokens, checked by the cluster's own keys.
//!
//! Must never believe a claim before the signature, the issuer, the audience and the times are right.

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation, decode};
use serde::Deserialize;
use tonic::Status;
use tonic::metadata::MetadataMap;

mod keys;
#[cfg(test)]
pub(crate) mod tests;

pub use keys::{KeyFile, KeyFileError};

/// A caller whose token was good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    pub namespace: String,
    pub service_account: String,
    /// The pod that the token is bound to.
    pub pod: Option<BoundPod>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundPod {
    pub name: String,
    pub uid: String,
}

/// Checks tokens.
#[derive(Debug)]
pub struct Tokens {
    keys: KeyFile,
    settings: TokenSettings,
}

/// What a token must say.
#[derive(Debug, Clone)]
pub struct TokenSettings {
    pub issuer: String,
    pub audience: String,
    /// Our own; callers may name it in the header `clusterid`.
    pub cluster_id: String,
}

/// Why a caller is not believed. The caller hears less than the log.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("there is no bearer token")]
    Missing,
    #[error("the token is malformed: {0}")]
    Malformed(String),
    #[error("no key of ours fits the token's signature")]
    Signature,
    #[error("the token is past its end")]
    Expired,
    #[error("the token is not valid yet")]
    TooEarly,
    #[error("the token is of another issuer than {0}")]
    Issuer(String),
    #[error("the token is for another audience than {0}")]
    Audience(String),
    #[error("the token contradicts itself: {0}")]
    Contradiction(String),
    #[error("the caller is of cluster {0:?}")]
    Cluster(String),
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
    pub fn new(keys: KeyFile, settings: TokenSettings) -> Self {
        Self { keys, settings }
    }

    /// Who sends these headers.
    pub fn caller(&self, headers: &MetadataMap) -> Result<Caller, TokenError> {
        let cluster = headers.get("clusterid").map(|c| c.to_str().unwrap_or("?")).unwrap_or_default();
        if !cluster.is_empty() && cluster != self.settings.cluster_id {
            return Err(TokenError::Cluster(cluster.chars().take(64).collect()));
        }
        let header = headers.get("authorization").and_then(|h| h.to_str().ok()).ok_or(TokenError::Missing)?;
        let (scheme, token) = header.split_once(' ').ok_or(TokenError::Missing)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(TokenError::Missing);
        }
        self.verify(token.trim())
    }

    /// Who a token is of.
    pub fn verify(&self, token: &str) -> Result<Caller, TokenError> {
        match self.verify_with(&self.keys.current(), token) {
            // The cluster may have changed its keys since we looked.
            Err(TokenError::Signature) => match self.keys.look_again() {
                Some(keys) => self.verify_with(&keys, token),
                None => Err(TokenError::Signature),
            },
            verdict => verdict,
        }
    }

    fn verify_with(&self, keys: &keys::Keys, token: &str) -> Result<Caller, TokenError> {
        let mut verdict = TokenError::Signature;
        for (key, algorithm) in keys.iter() {
            match decode::<Claims>(token, key, &self.validation(*algorithm)) {
                Ok(data) => return caller(data.claims),
                Err(error) => match error.kind() {
                    // Another key may fit.
                    ErrorKind::InvalidSignature | ErrorKind::InvalidAlgorithm => {}
                    // The signature was right, or the token is no token at all.
                    kind => verdict = self.verdict(kind),
                },
            }
        }
        Err(verdict)
    }

    fn validation(&self, algorithm: Algorithm) -> Validation {
        let mut validation = Validation::new(algorithm);
        validation.set_issuer(&[&self.settings.issuer]);
        validation.set_audience(&[&self.settings.audience]);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        validation.validate_nbf = true;
        validation.leeway = LEEWAY;
        validation
    }

    fn verdict(&self, kind: &ErrorKind) -> TokenError {
        match kind {
            ErrorKind::ExpiredSignature => TokenError::Expired,
            ErrorKind::ImmatureSignature => TokenError::TooEarly,
            ErrorKind::InvalidIssuer => TokenError::Issuer(self.settings.issuer.clone()),
            ErrorKind::InvalidAudience => TokenError::Audience(self.settings.audience.clone()),
            // Never the token itself, which other errors' texts might hold parts of.
            ErrorKind::MissingRequiredClaim(claim) => TokenError::Malformed(format!("claim {claim} is missing")),
            ErrorKind::Json(error) => TokenError::Malformed(format!("its claims: {:?} error", error.classify())),
            _ => TokenError::Malformed("it is no JWT".into()),
        }
    }
}

impl TokenError {
    /// For metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Malformed(_) => "malformed",
            Self::Signature => "signature",
            Self::Expired => "expired",
            Self::TooEarly => "too_early",
            Self::Issuer(_) => "issuer",
            Self::Audience(_) => "audience",
            Self::Contradiction(_) => "contradiction",
            Self::Cluster(_) => "cluster",
        }
    }
}

impl From<TokenError> for Status {
    /// As istiod says it: whoever has a wrong token learns nothing from the answer.
    fn from(_: TokenError) -> Self {
        Status::unauthenticated("request authenticate failure")
    }
}

impl Caller {
    /// `namespace/name` of the service account.
    pub fn account(&self) -> String {
        format!("{}/{}", self.namespace, self.service_account)
    }
}

fn caller(claims: Claims) -> Result<Caller, TokenError> {
    let Kubernetes { namespace, serviceaccount, pod } = claims.kubernetes;
    let expected = format!("system:serviceaccount:{namespace}:{}", serviceaccount.name);
    let is_name = |text: &str| !text.is_empty() && !text.contains([':', '/']);
    if !is_name(&namespace) || !is_name(&serviceaccount.name) {
        return Err(TokenError::Contradiction("a name that is none".into()));
    }
    if claims.sub != expected {
        let subject: String = claims.sub.chars().take(128).collect();
        return Err(TokenError::Contradiction(format!("its subject is {subject:?}, its claims say {expected:?}")));
    }
    let pod = pod.map(|pod| BoundPod { name: pod.name, uid: pod.uid });
    Ok(Caller { namespace, service_account: serviceaccount.name, pod })
}

/// Seconds by which clocks may differ.
const LEEWAY: u64 = 10;

//! Who is calling: service account tokens, checked by the cluster's own keys or reviewed by its API server.
//!
//! Must never believe a claim before the signature, the issuer, the audience and the times are right.

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Algorithm, Validation, decode};
use serde::Deserialize;
use tonic::Status;
use tonic::metadata::MetadataMap;

mod keys;
mod reviews;
#[cfg(test)]
pub(crate) mod tests;

pub use keys::{KeyFile, KeyFileError};
pub use reviews::Reviews;

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
    /// Its node, where the token says so.
    pub node: Option<String>,
}

/// Checks tokens.
#[derive(Debug)]
pub struct Tokens {
    check: Check,
    settings: TokenSettings,
}

/// Who says that a token is good.
#[derive(Debug)]
pub enum Check {
    Keys(KeyFile),
    Reviews(Reviews),
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
    #[error("the API server does not take the token: {0}")]
    Reviewed(String),
    #[error("the token cannot be checked: {0}")]
    Unavailable(String),
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
    node: Option<Named>,
}

#[derive(Deserialize)]
struct Named {
    name: String,
    uid: String,
}

impl Tokens {
    pub fn new(check: Check, settings: TokenSettings) -> Self {
        Self { check, settings }
    }

    /// Who sends these headers.
    pub async fn caller(&self, headers: &MetadataMap) -> Result<Caller, TokenError> {
        let cluster = headers.get("clusterid").map(|c| c.to_str().unwrap_or("?")).unwrap_or_default();
        if !cluster.is_empty() && cluster != self.settings.cluster_id {
            return Err(TokenError::Cluster(cluster.chars().take(64).collect()));
        }
        let header = headers.get("authorization").and_then(|h| h.to_str().ok()).ok_or(TokenError::Missing)?;
        let (scheme, token) = header.split_once(' ').ok_or(TokenError::Missing)?;
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(TokenError::Missing);
        }
        self.verify(token.trim()).await
    }

    /// Who a token is of.
    pub async fn verify(&self, token: &str) -> Result<Caller, TokenError> {
        let keys = match &self.check {
            Check::Keys(keys) => keys,
            Check::Reviews(reviews) => return reviews.verify(token, &self.settings.audience).await,
        };
        match self.verify_with(&keys.current(), token) {
            // The cluster may have changed its keys since we looked.
            Err(TokenError::Signature) => match keys.look_again() {
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
            Self::Reviewed(_) => "reviewed",
            Self::Unavailable(_) => "unavailable",
        }
    }
}

impl From<TokenError> for Status {
    /// As istiod says it: whoever has a wrong token learns nothing from the answer.
    fn from(error: TokenError) -> Self {
        match error {
            // It may be good.
            TokenError::Unavailable(_) => Status::unavailable("tokens cannot be checked now"),
            _ => Status::unauthenticated("request authenticate failure"),
        }
    }
}

impl Caller {
    /// `namespace/name` of the service account.
    pub fn account(&self) -> String {
        format!("{}/{}", self.namespace, self.service_account)
    }
}

fn caller(claims: Claims) -> Result<Caller, TokenError> {
    let Kubernetes { namespace, serviceaccount, pod, node } = claims.kubernetes;
    let said = account_of(&claims.sub)?;
    if (said.0.as_str(), said.1.as_str()) != (&namespace, &serviceaccount.name) {
        let subject: String = claims.sub.chars().take(128).collect();
        let of = format!("{namespace}:{}", serviceaccount.name);
        return Err(TokenError::Contradiction(format!("its subject is {subject:?}, its claims say {of:?}")));
    }
    let pod = pod.map(|pod| BoundPod { name: pod.name, uid: pod.uid, node: node.map(|node| node.name) });
    Ok(Caller { namespace, service_account: serviceaccount.name, pod })
}

/// Namespace and name of a service account, from the name that it has as a user.
fn account_of(user: &str) -> Result<(String, String), TokenError> {
    let is_name = |text: &&str| !text.is_empty() && !text.contains([':', '/']);
    let account = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
    match account.filter(|(namespace, name)| is_name(namespace) && is_name(name)) {
        Some((namespace, name)) => Ok((namespace.to_owned(), name.to_owned())),
        None => {
            let shown: String = user.chars().take(128).collect();
            Err(TokenError::Contradiction(format!("{shown:?} is no service account")))
        }
    }
}

/// Seconds by which clocks may differ.
const LEEWAY: u64 = 10;

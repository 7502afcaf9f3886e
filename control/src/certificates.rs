//! The certificate service: who may get which identity.
//!
//! Must never sign an identity that does not run on the caller's own node, whatever the request says.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost_types::value::Kind;
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status};
use ztunnel::identity::{Identity, ParseIdentityError, TrustDomain, rfc3339};
use ztunnel::manifests::Objects;
use ztunnel::proto::citadel::istio_certificate_service_server::IstioCertificateService;
use ztunnel::proto::citadel::{IstioCertificateRequest, IstioCertificateResponse};
use ztunnel::telemetry::log::Hush;

use crate::ca::{Ca, CaError, Issued};
use crate::limits::{Rate, Rates, Wait};
use crate::metrics::Metrics;
use crate::model::{is_terminal, service_account};
use crate::tls::Peer;
use crate::tokens::{Caller, TokenError, Tokens};

#[cfg(test)]
mod tests;

/// Signs for node proxies.
pub struct Certificates {
    pub ca: Arc<Ca>,
    pub tokens: Arc<Tokens>,
    pub objects: watch::Receiver<Arc<Objects>>,
    pub rules: Rules,
    pub metrics: Arc<Metrics>,
    /// Of the node proxies, each by itself.
    pub rates: Rates,
    /// Of all others, who are refused anyway: they never take room from the proxies.
    pub strangers: Rates,
    /// Signatures at a time. Who waits for one is served in turn.
    pub signing: Arc<Semaphore>,
    pub hush: Hush,
}

/// What is allowed at all.
#[derive(Debug, Clone)]
pub struct Rules {
    pub trust_domain: TrustDomain,
    /// `namespace/name` of the node proxies' accounts.
    pub trusted: Vec<String>,
    /// The life of a certificate for which none is asked.
    pub leaf_ttl: Duration,
    /// The longest life; who asks for a longer one gets this.
    pub longest_life: Duration,
}

/// Why a certificate was not signed.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(
        "{caller} asks for more than {} certificates a second ({} at once): try again in {} ms",
        .rate.per_second,
        .rate.burst,
        .wait.as_millis().max(1)
    )]
    TooOften { caller: String, rate: Rate, wait: Duration },
    #[error("{account} is not an account of node proxies (expected one of {trusted})")]
    NotTrusted { account: String, trusted: String },
    #[error("the token is not bound to a pod")]
    NotBound,
    #[error("the caller's pod {0} is not known (yet)")]
    UnknownCaller(String),
    #[error("the caller's pod {pod} is another one: {what} differs")]
    OtherCaller { pod: String, what: &'static str },
    #[error("the caller's pod {0} has ended or is on no node")]
    CallerGone(String),
    #[error(transparent)]
    Identity(#[from] ParseIdentityError),
    #[error("ImpersonatedIdentity is not text")]
    NoText,
    #[error("trust domain {asked} is not ours, {ours}")]
    TrustDomain { asked: TrustDomain, ours: TrustDomain },
    #[error("no pod with identity {identity} runs on the caller's node {node} (yet)")]
    NotHere { identity: Identity, node: String },
    #[error("a life of {asked} s is asked for, at most {MAX_TTL} s can be given")]
    TooLong { asked: u64 },
    #[error(transparent)]
    Signing(#[from] CaError),
}

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let started = Instant::now();
        let from = request.extensions().get::<Peer>().cloned();
        let peer = from.as_ref().map(Peer::address);
        let caller = self.tokens.caller(request.metadata()).await.map_err(|error| {
            // From outside the mesh's own: they must not fill the log.
            self.refused("unknown", peer, "unknown", &error.clone().into(), self.hush.speak());
            Status::from(error)
        })?;
        if let Some(from) = from {
            from.is_known(self.rules.trusted.contains(&caller.account()));
        }
        let request = request.into_inner();
        let wanted = impersonated(&request);
        let shown = match &wanted {
            Ok(Some(identity)) => identity.chars().take(256).collect(),
            Ok(None) => "its own".to_owned(),
            Err(_) => "no text".to_owned(),
        };
        match self.issue(&caller, wanted, request).await {
            Ok((identity, issued)) => {
                self.metrics.signed(started.elapsed());
                tracing::info!(
                    caller = name_of(&caller), peer = peer.map(tracing::field::display), %identity,
                    until = rfc3339(issued.not_after), "signed a certificate"
                );
                let mut cert_chain = issued.chain;
                cert_chain.push(issued.roots.to_string());
                Ok(Response::new(IstioCertificateResponse { cert_chain }))
            }
            Err(refusal) => {
                let is_flood = matches!(refusal, Refusal::TooOften { .. });
                let speak = if is_flood { self.hush.speak() } else { Some(0) };
                self.refused(&name_of(&caller), peer, &shown, &refusal, speak);
                Err(refusal.into())
            }
        }
    }
}

impl Certificates {
    async fn issue(
        &self,
        caller: &Caller,
        wanted: Result<Option<String>, Refusal>,
        request: IstioCertificateRequest,
    ) -> Result<(Identity, Issued), Refusal> {
        self.check_rate(caller)?;
        let identity = self.judge(caller, wanted?.as_deref())?;
        let lifetime = match u64::try_from(request.validity_duration) {
            Ok(asked) if asked > MAX_TTL => return Err(Refusal::TooLong { asked }),
            Ok(asked) if asked > 0 => Duration::from_secs(asked).min(self.rules.longest_life),
            _ => self.rules.leaf_ttl,
        };
        // Never closed.
        let _turn = self.signing.acquire().await;
        let (ca, whose) = (self.ca.clone(), identity.clone());
        let signed = tokio::task::spawn_blocking(move || ca.sign(&whose, &request.csr, lifetime)).await;
        let issued = signed.map_err(|e| CaError::Sign(e.to_string()))??;
        Ok((identity, issued))
    }

    fn check_rate(&self, caller: &Caller) -> Result<(), Refusal> {
        let is_proxy = self.rules.trusted.contains(&caller.account());
        let rates = if is_proxy { &self.rates } else { &self.strangers };
        let caller = name_of(caller);
        rates.allow(&caller).map_err(|Wait(wait)| Refusal::TooOften { caller, rate: rates.rate, wait })
    }

    /// The identity that the caller may have. `wanted`: that of a pod of its node, else its own.
    fn judge(&self, caller: &Caller, wanted: Option<&str>) -> Result<Identity, Refusal> {
        let account = caller.account();
        if !self.rules.trusted.contains(&account) {
            return Err(Refusal::NotTrusted { account, trusted: self.rules.trusted.join(", ") });
        }
        let identity = match wanted {
            Some(wanted) => wanted.parse()?,
            None => Identity::new(&self.rules.trust_domain, &caller.namespace, &caller.service_account),
        };
        if *identity.trust_domain() != self.rules.trust_domain {
            let (asked, ours) = (identity.trust_domain().clone(), self.rules.trust_domain.clone());
            return Err(Refusal::TrustDomain { asked, ours });
        }
        let objects = self.objects.borrow().clone();
        let node = callers_node(&objects, caller)?;
        let runs_here = objects.pods_in(identity.namespace()).any(|(_, pod)| {
            let here = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(&node);
            here && !is_terminal(pod) && service_account(pod) == identity.service_account()
        });
        if runs_here { Ok(identity) } else { Err(Refusal::NotHere { identity, node }) }
    }

    /// Counts a refusal, and tells it: `speak` has how many were not told before it.
    fn refused(&self, caller: &str, peer: Option<SocketAddr>, identity: &str, refusal: &Refusal, speak: Option<u64>) {
        self.metrics.certificate_refused(refusal.label());
        if let Some(untold) = speak {
            let (peer, untold) = (peer.map(tracing::field::display), Some(untold).filter(|n| *n > 0));
            tracing::warn!(caller, peer, identity, reason = %refusal, untold, "refused a certificate");
        }
    }
}

/// The node of the pod that the caller's token is bound to: from the cluster's objects, never from the request.
fn callers_node(objects: &Objects, caller: &Caller) -> Result<String, Refusal> {
    let bound = caller.pod.as_ref().ok_or(Refusal::NotBound)?;
    let name = format!("{}/{}", caller.namespace, bound.name);
    let Some(pod) = objects.pod(&caller.namespace, &bound.name) else { return Err(Refusal::UnknownCaller(name)) };
    if pod.metadata.uid.as_deref() != Some(&bound.uid) {
        return Err(Refusal::OtherCaller { pod: name, what: "its uid" });
    }
    if service_account(pod) != caller.service_account {
        return Err(Refusal::OtherCaller { pod: name, what: "its service account" });
    }
    let node = pod.spec.as_ref().and_then(|s| s.node_name.clone()).filter(|node| !node.is_empty());
    if let (Some(node), Some(said)) = (&node, &bound.node)
        && node != said
    {
        return Err(Refusal::OtherCaller { pod: name, what: "its node" });
    }
    node.filter(|_| !is_terminal(pod)).ok_or(Refusal::CallerGone(name))
}

/// The identity that is asked for by name. What is there and no text is never taken for nothing.
fn impersonated(request: &IstioCertificateRequest) -> Result<Option<String>, Refusal> {
    let Some(value) = request.metadata.as_ref().and_then(|m| m.fields.get("ImpersonatedIdentity")) else {
        return Ok(None);
    };
    match &value.kind {
        Some(Kind::StringValue(text)) => Ok(Some(text.clone())),
        _ => Err(Refusal::NoText),
    }
}

/// Account and pod: each proxy is a caller of its own.
fn name_of(caller: &Caller) -> String {
    match &caller.pod {
        Some(pod) => format!("{} (pod {}, {})", caller.account(), pod.name, pod.uid),
        None => caller.account(),
    }
}

impl Refusal {
    /// For metrics.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Token(error) => error.label(),
            Self::TooOften { .. } => "too_often",
            Self::NotTrusted { .. } => "not_trusted",
            Self::NotBound => "not_bound",
            Self::UnknownCaller(_) => "unknown_caller",
            Self::OtherCaller { .. } => "other_caller",
            Self::CallerGone(_) => "caller_gone",
            Self::Identity(_) | Self::NoText => "bad_identity",
            Self::TrustDomain { .. } => "trust_domain",
            Self::NotHere { .. } => "not_on_node",
            Self::TooLong { .. } => "too_long",
            Self::Signing(CaError::Request(_)) => "bad_request",
            Self::Signing(CaError::NotValidNow { .. }) => "authority_not_valid",
            Self::Signing(_) => "internal",
        }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.to_string();
        match refusal {
            Refusal::Token(error) => error.into(),
            Refusal::TooOften { .. } => Status::resource_exhausted(text),
            Refusal::TooLong { .. } | Refusal::Signing(CaError::Request(_)) => Status::invalid_argument(text),
            Refusal::Signing(CaError::NotValidNow { .. }) => Status::failed_precondition(text),
            // The rest is for the log alone.
            Refusal::Signing(_) => Status::internal("the certificate could not be signed"),
            // As istiod says it, with the reason.
            _ => Status::unauthenticated(format!("request impersonation authentication failure: {text}")),
        }
    }
}

/// Seconds; as at istiod.
const MAX_TTL: u64 = 90 * 86400;

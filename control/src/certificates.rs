//! The certificate service: who may get which identity.
//!
//! Must never sign an identity that does not run on the caller's own node, whatever the request says.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tonic::{Request, Response, Status};
use ztunnel::identity::{Identity, TrustDomain};
use ztunnel::manifests::Objects;
use ztunnel::proto::citadel::istio_certificate_service_server::IstioCertificateService;
use ztunnel::proto::citadel::{IstioCertificateRequest, IstioCertificateResponse};

use crate::ca::Ca;
use crate::model::{is_terminal, service_account};
use crate::tokens::{Caller, Tokens};

/// Signs for node proxies.
pub struct Certificates {
    pub ca: Arc<Ca>,
    pub tokens: Arc<Tokens>,
    pub objects: watch::Receiver<Arc<Objects>>,
    pub trust_domain: TrustDomain,
    /// `namespace/name` of the node proxies' accounts.
    pub trusted: Vec<String>,
    pub leaf_ttl: Duration,
    pub counters: Arc<Counters>,
    pub rates: Rates,
}

#[derive(Debug, Default)]
pub struct Counters {
    pub signed: AtomicU64,
    pub refused: AtomicU64,
}

/// How often each caller may ask.
#[derive(Debug, Default)]
pub struct Rates(Mutex<HashMap<String, (f64, Instant)>>);

#[tonic::async_trait]
impl IstioCertificateService for Certificates {
    async fn create_certificate(
        &self,
        request: Request<IstioCertificateRequest>,
    ) -> Result<Response<IstioCertificateResponse>, Status> {
        let caller = self.tokens.caller(request.metadata()).map_err(|error| {
            self.refused("(unknown)", "(unknown)", &error.to_string());
            Status::from(error)
        })?;
        let request = request.into_inner();
        let wanted = impersonated(&request);
        let name = format!("{}/{}", caller.namespace, caller.service_account);
        let identity = self.judge(&caller, wanted.as_deref()).map_err(|reason| {
            self.refused(&name, wanted.as_deref().unwrap_or("(its own)"), &reason);
            Status::unauthenticated(format!("request impersonation authentication failure: {reason}"))
        })?;
        if !self.rates.allow(&name_of(&caller)) {
            self.refused(&name, &identity.to_string(), "too many requests");
            return Err(Status::resource_exhausted("too many certificate requests, try again later"));
        }
        let lifetime = match u64::try_from(request.validity_duration) {
            Ok(seconds) if seconds > MAX_TTL => {
                return Err(Status::invalid_argument(format!("validity of {seconds} s, at most {MAX_TTL} s")));
            }
            Ok(seconds) if seconds > 0 => Duration::from_secs(seconds).min(self.leaf_ttl),
            _ => self.leaf_ttl,
        };
        let leaf = self.ca.sign(&identity, &request.csr, lifetime).map_err(|error| {
            self.refused(&name, &identity.to_string(), &error.to_string());
            match error {
                crate::ca::CaError::Request(_) => Status::invalid_argument(error.to_string()),
                _ => Status::internal(error.to_string()),
            }
        })?;
        self.counters.signed.fetch_add(1, Ordering::Relaxed);
        tracing::info!(caller = name, %identity, lifetime = lifetime.as_secs(), "signed a certificate");
        Ok(Response::new(IstioCertificateResponse { cert_chain: vec![leaf, self.ca.root_pem().to_owned()] }))
    }
}

impl Certificates {
    /// The identity that the caller may have, or why not.
    fn judge(&self, caller: &Caller, wanted: Option<&str>) -> Result<Identity, String> {
        let Some(wanted) = wanted else {
            return Ok(Identity::new(&self.trust_domain, &caller.namespace, &caller.service_account));
        };
        let wanted: Identity = wanted.parse().map_err(|e: ztunnel::identity::ParseIdentityError| e.to_string())?;
        if *wanted.trust_domain() != self.trust_domain {
            return Err(format!("trust domain {} is not {}", wanted.trust_domain(), self.trust_domain));
        }
        let account = format!("{}/{}", caller.namespace, caller.service_account);
        if !self.trusted.contains(&account) {
            return Err(format!("{account} is not an account of node proxies"));
        }
        let (name, uid) = caller.pod.as_ref().ok_or("the token is not bound to a pod")?;
        let objects = self.objects.borrow().clone();
        let own = objects.pod(&caller.namespace, name).ok_or_else(|| format!("pod {name} is not known"))?;
        if own.metadata.uid.as_deref() != Some(uid) {
            return Err(format!("pod {name} has another uid than {uid}"));
        }
        if service_account(own) != caller.service_account {
            return Err(format!("pod {name} does not run as {}", caller.service_account));
        }
        let node = own.spec.as_ref().and_then(|s| s.node_name.as_deref()).ok_or("the caller's pod is on no node")?;
        let runs_here = objects.pods_in(wanted.namespace()).any(|(_, pod)| {
            let here = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) == Some(node);
            here && !is_terminal(pod) && service_account(pod) == wanted.service_account()
        });
        if runs_here { Ok(wanted) } else { Err(format!("no pod with identity {wanted} is on node {node}")) }
    }

    fn refused(&self, caller: &str, identity: &str, reason: &str) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(caller, identity, reason, "refused a certificate");
    }
}

impl Rates {
    /// A bucket per caller: so many at once, so many a second.
    fn allow(&self, caller: &str) -> bool {
        let mut buckets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if buckets.len() > MAX_BUCKETS {
            buckets.retain(|_, (_, since)| since.elapsed() < Duration::from_secs(60));
        }
        let (left, since) = buckets.entry(caller.to_owned()).or_insert((BURST, now));
        *left = (*left + since.elapsed().as_secs_f64() * PER_SECOND).min(BURST);
        *since = now;
        let allowed = *left >= 1.0;
        if allowed {
            *left -= 1.0;
        }
        allowed
    }
}

fn name_of(caller: &Caller) -> String {
    let pod = caller.pod.as_ref().map(|(_, uid)| uid.as_str()).unwrap_or_default();
    format!("{}/{}/{pod}", caller.namespace, caller.service_account)
}

fn impersonated(request: &IstioCertificateRequest) -> Option<String> {
    let value = request.metadata.as_ref()?.fields.get("ImpersonatedIdentity")?;
    match &value.kind {
        Some(prost_types::value::Kind::StringValue(text)) => Some(text.clone()),
        // Of another kind: never the caller's own by accident.
        _ => Some(String::new()),
    }
}

/// Seconds.
const MAX_TTL: u64 = 90 * 86400;
const BURST: f64 = 500.0;
const PER_SECOND: f64 = 50.0;
const MAX_BUCKETS: usize = 10_000;

//! The certificate service's client (`istio.v1.auth.IstioCertificateService`): one key, one request, one certificate.
//!
//! Must never accept a certificate for another identity or key than asked for.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prost_types::value::Kind;
use tonic::Code;
use tonic::transport::Channel;

use super::control_plane::{ControlPlane, LinkError, LinkTimings, Roots, describe_status, link_error};
use super::{Certificate, CertificateError, Identity, KeyError, PrivateKey, Trust};
use crate::proto::citadel::IstioCertificateRequest;
use crate::proto::citadel::istio_certificate_service_client::IstioCertificateServiceClient;

/// What signs certificates for workloads.
pub trait CertificateAuthority: Send + Sync + 'static {
    /// Where it is, for error texts.
    fn address(&self) -> String;

    /// A fresh certificate with a fresh key.
    fn issue(&self, identity: Identity) -> Pin<Box<dyn Future<Output = Result<Certificate, IssueError>> + Send + '_>>;
}

/// Why there is no certificate.
#[derive(Debug, Clone, thiserror::Error)]
pub enum IssueError {
    #[error("no certificate for {identity} from {authority}: {reason}")]
    Link { identity: Identity, authority: String, reason: LinkError },
    #[error("{authority} refused a certificate for {identity}: {reason}")]
    Refused { identity: Identity, authority: String, reason: String, denied: bool },
    #[error("no certificate for {identity} from {authority}: no answer within {limit:?}")]
    Timeout { identity: Identity, authority: String, limit: Duration },
    #[error("{authority} sent an unusable certificate for {identity}: {reason}")]
    Unusable { identity: Identity, authority: String, reason: CertificateError },
    #[error("no certificate for {identity}: {reason}")]
    Key { identity: Identity, reason: KeyError },
}

/// Speaks to the certificate service of istiod or `control`.
pub struct CaClient {
    control_plane: ControlPlane,
    settings: CaClientSettings,
    trust: Trust,
    /// The channel, and the roots that it was made with.
    channel: Mutex<Option<(Roots, Channel)>>,
}

#[derive(Debug, Clone)]
pub struct CaClientSettings {
    /// Lifetime that is asked for.
    pub lifetime: Duration,
    /// Bound of one call.
    pub call_timeout: Duration,
    pub timings: LinkTimings,
}

impl IssueError {
    /// Whether the authority decided that the identity is not for us; anything else may be trouble of its own.
    pub fn is_denial(&self) -> bool {
        matches!(self, Self::Refused { denied: true, .. })
    }
}

impl Default for CaClientSettings {
    fn default() -> Self {
        Self {
            lifetime: Duration::from_secs(86_400),
            call_timeout: Duration::from_secs(10),
            timings: LinkTimings::default(),
        }
    }
}

impl CaClient {
    pub fn new(control_plane: ControlPlane, settings: CaClientSettings, trust: Trust) -> Self {
        Self { control_plane, settings, trust, channel: Mutex::default() }
    }

    async fn request(&self, identity: Identity) -> Result<Certificate, IssueError> {
        let authority = self.control_plane.address.to_string();
        let link = |reason| IssueError::Link { identity: identity.clone(), authority: authority.clone(), reason };
        let key = PrivateKey::generate().map_err(|reason| IssueError::Key { identity: identity.clone(), reason })?;
        let csr = key
            .certificate_request(&identity)
            .map_err(|reason| IssueError::Key { identity: identity.clone(), reason })?;

        let mut request = tonic::Request::new(IstioCertificateRequest {
            csr,
            validity_duration: i64::try_from(self.settings.lifetime.as_secs()).unwrap_or(i64::MAX),
            metadata: Some(impersonate(&identity)),
        });
        self.control_plane.authorize(request.metadata_mut()).map_err(link)?;
        let mut client = IstioCertificateServiceClient::new(self.channel().map_err(link)?);
        let answer = tokio::time::timeout(self.settings.call_timeout, client.create_certificate(request))
            .await
            .map_err(|_| {
                // The connection may be dead without having noticed: the next call makes a new one.
                self.forget_channel();
                let limit = self.settings.call_timeout;
                IssueError::Timeout { identity: identity.clone(), authority: authority.clone(), limit }
            })?
            .map_err(|status| match link_error(&status) {
                Some(reason) => link(reason),
                None => IssueError::Refused {
                    identity: identity.clone(),
                    authority: authority.clone(),
                    reason: describe_status(&status),
                    denied: decides_against(&status),
                },
            })?
            .into_inner();
        Certificate::from_pem_chain(&identity, Arc::new(key), &answer.cert_chain, self.trust.clone())
            .map_err(|reason| IssueError::Unusable { identity: identity.clone(), authority, reason })
    }

    /// The channel, made anew when the control plane's roots have changed. While the new roots cannot be read, an
    /// existing channel goes on.
    fn channel(&self) -> Result<Channel, LinkError> {
        let mut current = self.channel.lock().unwrap_or_else(PoisonError::into_inner);
        let roots = match (self.control_plane.load_roots(), &*current) {
            (Ok(roots), Some((known, channel))) if roots == *known => return Ok(channel.clone()),
            (Ok(roots), _) => roots,
            (Err(reason), Some((_, channel))) => {
                tracing::warn!(%reason, "the link to the certificate service goes on with the roots known before");
                return Ok(channel.clone());
            }
            (Err(reason), None) => return Err(reason),
        };
        let channel = self.control_plane.connect_lazy(&roots, self.settings.timings)?;
        *current = Some((roots, channel.clone()));
        Ok(channel)
    }

    fn forget_channel(&self) {
        *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl CertificateAuthority for CaClient {
    fn address(&self) -> String {
        self.control_plane.address.to_string()
    }

    fn issue(&self, identity: Identity) -> Pin<Box<dyn Future<Output = Result<Certificate, IssueError>> + Send + '_>> {
        Box::pin(self.request(identity))
    }
}

/// Whether an answer is about the identity. That we could not be made out ourselves is none: istiod and `control` say it
/// with these words, also where the cluster's API, which they would ask about our token, is away.
fn decides_against(status: &tonic::Status) -> bool {
    match status.code() {
        Code::PermissionDenied => true,
        Code::Unauthenticated => !status.message().contains("request authenticate failure"),
        _ => false,
    }
}

/// "I am the node's proxy and ask for this workload": the service decides whether we may.
fn impersonate(identity: &Identity) -> prost_types::Struct {
    let value = prost_types::Value { kind: Some(Kind::StringValue(identity.to_string())) };
    prost_types::Struct { fields: [("ImpersonatedIdentity".to_owned(), value)].into() }
}

#[cfg(test)]
mod tests;

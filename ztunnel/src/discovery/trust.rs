//! The roots in force, as the control plane announces them: certificates that came with others, or lead to
//! another than the one that signs, are to be renewed soon.
//!
//! Must never make anything trusted: roots count only when they come with a certificate.

use std::time::Duration;

use prost::Message;
use rustls::pki_types::CertificateDer;

use super::DiscoverySettings;
use super::messages;
use crate::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use crate::proto::trust::Bundle;

/// The type of the announcement. A server that does not know it answers with nothing.
pub const BUNDLE: &str = "type.googleapis.com/understory.trust.Bundle";

/// An announcement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnnouncedRoots {
    pub roots: Vec<CertificateDer<'static>>,
    /// The one that fresh certificates lead to, if that is told.
    pub signs: Option<CertificateDer<'static>>,
    /// Certificates that came with other roots, or lead to another one, are to be renewed within this time.
    pub renew_within: Duration,
}

pub(super) fn first(settings: &DiscoverySettings) -> DeltaDiscoveryRequest {
    let node = Some(messages::node(settings));
    DeltaDiscoveryRequest { node, type_url: BUNDLE.into(), ..DeltaDiscoveryRequest::default() }
}

/// What a response announces; nothing if it is empty. The error has the resource's name.
pub(super) fn read(response: &DeltaDiscoveryResponse) -> Result<Option<AnnouncedRoots>, (String, String)> {
    let Some(resource) = response.resources.last() else { return Ok(None) };
    let refuse = |reason: String| (resource.name.clone(), reason);
    let content = resource.resource.as_ref().ok_or_else(|| refuse("it has no content".into()))?;
    let bundle = Bundle::decode(&*content.value).map_err(|e| refuse(format!("it is no bundle of roots: {e}")))?;
    if bundle.roots.is_empty() || bundle.roots.len() > MAX_ROOTS {
        return Err(refuse(format!("it has {} roots, expected 1 to {MAX_ROOTS}", bundle.roots.len())));
    }
    if !bundle.signs.is_empty() && !bundle.roots.contains(&bundle.signs) {
        return Err(refuse("what signs is none of its roots".into()));
    }
    let signs = (!bundle.signs.is_empty()).then(|| CertificateDer::from(bundle.signs));
    let roots = bundle.roots.into_iter().map(CertificateDer::from).collect();
    let renew_within = Duration::from_millis(bundle.renew_within_ms).min(LONGEST);
    Ok(Some(AnnouncedRoots { roots, signs, renew_within }))
}

const MAX_ROOTS: usize = 100;
const LONGEST: Duration = Duration::from_secs(90 * 86_400);

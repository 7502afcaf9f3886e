//! Which roots are in force: announced to the streams that ask, so that proxies renew their certificates when it
//! changes, and not when half of their life is over.
//!
//! Must never announce what the certificate service does not hand out.

use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::sync::watch;
use ztunnel::identity::TrustDomain;
use ztunnel::proto::discovery::Resource;
use ztunnel::proto::trust::Bundle as WireBundle;

use crate::ca::Bundle;

/// The type of the announcement.
pub(super) const BUNDLE: &str = "type.googleapis.com/understory.trust.Bundle";

/// What is announced, and how.
#[derive(Debug, Clone)]
pub struct Trust {
    pub bundles: watch::Receiver<Arc<Bundle>>,
    pub trust_domain: TrustDomain,
    /// Time over which proxies spread the renewals that a change brings.
    pub renew_within: Duration,
}

impl Trust {
    /// The present announcement; from now on, what comes after it is a change.
    pub(super) fn resource(&mut self) -> Resource {
        let bundle = self.bundles.borrow_and_update().clone();
        let wire = WireBundle {
            roots: bundle.roots().iter().map(|root| root.to_vec()).collect(),
            renew_within_ms: u64::try_from(self.renew_within.as_millis()).unwrap_or(u64::MAX),
            signs: bundle.signs().to_vec(),
        };
        Resource {
            name: self.trust_domain.to_string(),
            version: bundle.version().to_owned(),
            resource: Some(prost_types::Any { type_url: BUNDLE.to_owned(), value: wire.encode_to_vec() }),
            ..Resource::default()
        }
    }
}

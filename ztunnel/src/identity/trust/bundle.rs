//! The roots of a trust domain.

use std::time::SystemTime;

use rustls::pki_types::{CertificateDer, TrustAnchor};

use crate::identity::TrustDomain;
use crate::identity::peer::{self, shown};

/// The roots of a trust domain.
#[derive(Default)]
pub(super) struct Bundle {
    pub roots: Vec<Root>,
    /// Of the roots, in their order.
    pub anchors: Vec<TrustAnchor<'static>>,
}

#[derive(Clone, PartialEq)]
pub(super) struct Root {
    pub der: CertificateDer<'static>,
    pub anchor: TrustAnchor<'static>,
    pub name: String,
    pub not_after: SystemTime,
}

impl Bundle {
    pub fn read(domain: &TrustDomain, roots: &[CertificateDer<'static>]) -> Self {
        let mut bundle = Self::default();
        for der in roots {
            match Root::read(der) {
                Ok(root) => bundle.add(root),
                Err(reason) => {
                    tracing::warn!(%domain, reason, "a root that the certificate service sent cannot be used")
                }
            }
        }
        bundle
    }

    pub fn has(&self, der: &CertificateDer<'_>) -> bool {
        self.roots.iter().any(|root| root.der == *der)
    }

    fn add(&mut self, root: Root) {
        if !self.has(&root.der) {
            self.anchors.push(root.anchor.clone());
            self.roots.push(root);
        }
    }

    /// Of these roots, each once.
    pub fn of<'a>(roots: impl Iterator<Item = &'a Root>) -> Self {
        let mut bundle = Self::default();
        roots.for_each(|root| bundle.add(root.clone()));
        bundle
    }

    /// What this one lacks of the other.
    pub fn missing_from<'a>(&self, other: &'a Self) -> Vec<&'a Root> {
        other.roots.iter().filter(|root| !self.has(&root.der)).collect()
    }

    pub fn is_same(&self, other: &Self) -> bool {
        self.roots.len() == other.roots.len() && self.missing_from(other).is_empty()
    }

    /// The anchors of roots that have not ended; nothing if that is all of them.
    pub fn live(&self, now: SystemTime) -> Option<Vec<TrustAnchor<'static>>> {
        if self.roots.iter().all(|root| root.not_after > now) {
            return None;
        }
        Some(self.roots.iter().filter(|root| root.not_after > now).map(|root| root.anchor.clone()).collect())
    }
}

impl Root {
    fn read(der: &CertificateDer<'static>) -> Result<Self, String> {
        let anchor = webpki::anchor_from_trusted_cert(der).map_err(|e| e.to_string())?.to_owned();
        let (_, parsed) = x509_parser::parse_x509_certificate(der).map_err(|e| e.to_string())?;
        let (_, not_after) = peer::validity(der).ok_or("its end cannot be read")?;
        Ok(Self { der: der.clone(), anchor, name: shown(&parsed.subject().to_string()), not_after })
    }
}

pub(super) static NO_ROOTS: Bundle = Bundle { roots: Vec::new(), anchors: Vec::new() };

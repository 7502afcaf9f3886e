//! Whether a chain leads to a root, and was not revoked: the question that every handshake asks, and every change of
//! trust asks again.

use std::cell::RefCell;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::{CertificateDer, SubjectPublicKeyInfoDer, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, KeyUsage, VerifiedPath};

use super::bundle::Bundle;
use super::{PeerRole, RevocationRules, Rule};
use crate::identity::crl::{CrlSet, Link, Status};
use crate::identity::peer::{self, PeerError, claimed};
use crate::identity::{TrustDomain, tls};

/// At which time a chain must hold, and for what.
#[derive(Clone, Copy)]
pub(super) struct Question {
    pub role: PeerRole,
    pub time: UnixTime,
    /// Whether roots and revocation lists that have ended by then do not count.
    pub ends_matter: bool,
}

/// Whether a chain of our own, with the roots that came with it, serves both ends of a connection now.
pub(in crate::identity) fn verify_own(
    domain: &TrustDomain,
    roots: &[CertificateDer<'static>],
    chain: &[CertificateDer<'_>],
) -> Result<(), PeerError> {
    let bundle = Bundle::read(domain, roots);
    [PeerRole::Server, PeerRole::Client].into_iter().try_for_each(|role| {
        let question = Question { role, time: UnixTime::now(), ends_matter: true };
        check(domain, &bundle, None, chain, question)
    })
}

/// `crls`: the lists that are asked, and what counts where they do not say that a certificate is good.
pub(super) fn check(
    domain: &TrustDomain,
    bundle: &Bundle,
    crls: Option<(&CrlSet, RevocationRules)>,
    chain: &[CertificateDer<'_>],
    question: Question,
) -> Result<(), PeerError> {
    let (leaf, intermediates) = chain.split_first().ok_or(PeerError::NoCertificate)?;
    let parsed = EndEntityCert::try_from(leaf).map_err(|e| PeerError::Unreadable(e.to_string()))?;
    if bundle.roots.is_empty() {
        return Err(PeerError::NoRoots { who: claimed(leaf), domain: domain.clone() });
    }
    let now = UNIX_EPOCH + Duration::from_secs(question.time.as_secs());
    let refused = RefCell::new(None);
    let judge = |path: &VerifiedPath<'_>| {
        let Some((crls, rules)) = crls else { return Ok(()) };
        revocation(path, crls, rules, question, now).map_err(|why| {
            let error = why.error();
            refused.replace(Some(why.into_peer_error(leaf, now)));
            error
        })
    };
    let verify = |anchors: &[TrustAnchor<'_>]| {
        let usage = match question.role {
            PeerRole::Client => KeyUsage::client_auth(),
            PeerRole::Server => KeyUsage::server_auth(),
        };
        let algorithms = tls::provider().signature_verification_algorithms.all;
        let (time, judge) = (question.time, Some(&judge as _));
        parsed.verify_for_usage(algorithms, anchors, intermediates, time, usage, None, judge).map(|_| ())
    };
    let live = bundle.live(now).filter(|_| question.ends_matter);
    let Err(error) = verify(live.as_deref().unwrap_or(&bundle.anchors)) else { return Ok(()) };
    if let Some(refused) = refused.take() {
        return Err(refused);
    }
    let mut ended = bundle.roots.iter().filter(|root| question.ends_matter && root.not_after <= now);
    if let Some(root) = ended.find(|root| verify(std::slice::from_ref(&root.anchor)).is_ok()) {
        let (root, not_after) = (root.name.clone(), root.not_after);
        return Err(PeerError::RootExpired { who: claimed(leaf), root, not_after, now });
    }
    Err(explain(&error, domain, bundle, chain, now))
}

/// In words what webpki found.
fn explain(
    error: &webpki::Error,
    domain: &TrustDomain,
    bundle: &Bundle,
    chain: &[CertificateDer<'_>],
    now: SystemTime,
) -> PeerError {
    let leaf = &chain[0];
    let who = claimed(leaf);
    let windows = || chain.iter().filter_map(peer::validity);
    match error {
        webpki::Error::CertExpired { .. } => {
            if let Some((not_before, not_after)) = windows().find(|(_, end)| *end <= now) {
                return PeerError::Expired { who, not_before, not_after, now };
            }
        }
        webpki::Error::CertNotValidYet { .. } => {
            if let Some((not_before, not_after)) = windows().find(|(start, _)| *start > now) {
                return PeerError::NotYetValid { who, not_before, not_after, now };
            }
        }
        webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => {
            let (issuer, roots) = (peer::issuer(leaf), bundle.roots.len());
            return PeerError::Untrusted { who, issuer, roots, domain: domain.clone() };
        }
        _ => {}
    }
    PeerError::Chain { who, reason: error.to_string() }
}

/// Why a path is not taken for the lists' sake.
enum RevocationProblem {
    Revoked { serial: Vec<u8>, issuer: String, since: SystemTime },
    Unknown { issuer: String },
    Outdated { issuer: String, next_update: SystemTime },
}

/// Asks about each certificate of the path, the leaf first.
fn revocation(
    path: &VerifiedPath<'_>,
    crls: &CrlSet,
    rules: RevocationRules,
    question: Question,
    now: SystemTime,
) -> Result<(), RevocationProblem> {
    let certificates = || std::iter::once(&**path.end_entity()).chain(path.intermediate_certificates());
    let keys = path.intermediate_certificates().map(|c| c.subject_public_key_info());
    let keys = keys.chain(std::iter::once(webpki::spki_for_anchor(path.anchor())));
    let mut problem = None;
    for (certificate, issuer_key) in certificates().zip(keys) {
        let issuer_key: SubjectPublicKeyInfoDer<'static> = issuer_key;
        let link = Link { issuer: certificate.issuer(), issuer_key, serial: certificate.serial() };
        let issuer = || peer::issuer(&certificate.der());
        let found = match crls.status(&link, now) {
            Status::Good => None,
            // Worse than anything that is not known.
            Status::Revoked { since } => {
                let serial = certificate.serial().to_vec();
                return Err(RevocationProblem::Revoked { serial, issuer: issuer(), since });
            }
            Status::Unknown if rules.unknown_issuer == Rule::Allow => None,
            Status::Unknown => Some(RevocationProblem::Unknown { issuer: issuer() }),
            Status::Outdated { .. } if rules.outdated == Rule::Allow || !question.ends_matter => None,
            Status::Outdated { next_update } => Some(RevocationProblem::Outdated { issuer: issuer(), next_update }),
        };
        problem = problem.or(found);
    }
    problem.map_or(Ok(()), Err)
}

impl RevocationProblem {
    fn error(&self) -> webpki::Error {
        match self {
            Self::Revoked { .. } => webpki::Error::CertRevoked,
            Self::Unknown { .. } | Self::Outdated { .. } => webpki::Error::UnknownRevocationStatus,
        }
    }

    fn into_peer_error(self, leaf: &CertificateDer<'_>, now: SystemTime) -> PeerError {
        let who = claimed(leaf);
        match self {
            Self::Revoked { serial, issuer, since } => {
                let serial = serial.iter().map(|b| format!("{b:02x}")).collect();
                PeerError::Revoked { who, serial, issuer, since }
            }
            Self::Unknown { issuer } => PeerError::RevocationUnknown { who, issuer },
            Self::Outdated { issuer, next_update } => PeerError::RevocationOutdated { who, issuer, next_update, now },
        }
    }
}

//! What a peer's certificate says, and every way in which it can be wrong, in words that name the peer.
//!
//! Must never call a name proved that stands in a certificate whose chain was not verified.

use std::fmt;
use std::time::SystemTime;

use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::{CertificateError, CommonState, Error, OtherError};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use super::certificate::{at, rfc3339};
use super::tls::ALPN_H2;
use super::{Identity, TrustDomain};

/// Why a peer is not who it should be. Names of peers are what the certificate claims.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
pub enum PeerError {
    #[error("the peer showed no certificate")]
    NoCertificate,
    #[error("the peer's certificate cannot be read: {0}")]
    Unreadable(String),
    #[error("the peer's certificate names no SPIFFE identity")]
    NoIdentity,
    #[error("the peer is {found}, expected {expected}")]
    WrongIdentity { found: Names, expected: Names },
    #[error("the peer is {found}, which is of none of the trusted domains {trusted:?}")]
    WrongTrustDomain { found: Names, trusted: Vec<TrustDomain> },
    #[error("the peer did not agree on the protocol h2")]
    NotH2,
    #[error(
        "the certificate of {} is valid from {} to {}, but here it is {}: is a clock wrong?",
        holder(who),
        rfc3339(*.not_before),
        rfc3339(*.not_after),
        rfc3339(*.now)
    )]
    NotYetValid { who: Names, not_before: SystemTime, not_after: SystemTime, now: SystemTime },
    #[error(
        "the certificate of {} was valid from {} to {}, but here it is {}: was it not renewed, or is a \
         clock wrong?",
        holder(who),
        rfc3339(*.not_before),
        rfc3339(*.not_after),
        rfc3339(*.now)
    )]
    Expired { who: Names, not_before: SystemTime, not_after: SystemTime, now: SystemTime },
    #[error(
        "the certificate of {} was signed by {issuer}, which leads to none of the {roots} trusted root(s) of {domain}",
        holder(who)
    )]
    Untrusted { who: Names, issuer: String, roots: usize, domain: TrustDomain },
    #[error("no root of trust domain {domain} is known, so {} cannot be verified", holder(who))]
    NoRoots { who: Names, domain: TrustDomain },
    #[error(
        "the certificate of {} leads to the root {root}, which ended at {}, and here it is {}",
        holder(who),
        rfc3339(*.not_after),
        rfc3339(*.now)
    )]
    RootExpired { who: Names, root: String, not_after: SystemTime, now: SystemTime },
    #[error(
        "the certificate of {} (serial {serial}, issuer {issuer}) was revoked at {}",
        holder(who),
        rfc3339(*.since)
    )]
    Revoked { who: Names, serial: String, issuer: String, since: SystemTime },
    #[error(
        "whether the certificate of {} was revoked is not known: no revocation list of {issuer} is loaded",
        holder(who)
    )]
    RevocationUnknown { who: Names, issuer: String },
    #[error(
        "whether the certificate of {} was revoked is not known: the revocation list of {issuer} ended at \
         {}, and here it is {}",
        holder(who),
        rfc3339(*.next_update),
        rfc3339(*.now)
    )]
    RevocationOutdated { who: Names, issuer: String, next_update: SystemTime, now: SystemTime },
    #[error("the chain of {} cannot be verified: {reason}", holder(who))]
    Chain { who: Names, reason: String },
}

/// Identities in an error text.
#[derive(Clone, PartialEq, Eq)]
pub struct Names(pub Vec<Identity>);

/// The identity of a peer by its certificate: the first SPIFFE name in it.
pub fn peer_identity(chain: &[CertificateDer<'_>]) -> Result<Identity, PeerError> {
    spiffe_names(chain.first().ok_or(PeerError::NoCertificate)?)?.into_iter().next().ok_or(PeerError::NoIdentity)
}

/// After the handshake: the peer's identity, provided that `h2` was agreed on.
pub fn check_handshake(state: &CommonState) -> Result<Identity, PeerError> {
    if state.alpn_protocol() != Some(ALPN_H2) {
        return Err(PeerError::NotH2);
    }
    peer_identity(state.peer_certificates().unwrap_or_default())
}

fn holder(who: &Names) -> String {
    if who.0.is_empty() { "a peer without a SPIFFE identity".to_owned() } else { who.to_string() }
}

/// When the first certificate of a chain ends that has not ended by `now`: what has may stand in a chain without being
/// needed.
pub fn first_end(chain: &[CertificateDer<'_>], now: SystemTime) -> Option<SystemTime> {
    chain.iter().filter_map(|c| Some(validity(c)?.1)).filter(|end| *end > now).min()
}

/// All SPIFFE names of a certificate; names of other kinds are skipped.
pub(super) fn spiffe_names(certificate: &CertificateDer<'_>) -> Result<Vec<Identity>, PeerError> {
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|e| PeerError::Unreadable(e.to_string()))?;
    let names = parsed.subject_alternative_name().map_err(|e| PeerError::Unreadable(e.to_string()))?;
    let Some(names) = names else { return Ok(Vec::new()) };
    Ok(names
        .value
        .general_names
        .iter()
        .filter_map(|name| match name {
            GeneralName::URI(uri) => uri.parse().ok(),
            _ => None,
        })
        .collect())
}

/// What a certificate claims to name; nothing if it cannot be read.
pub(super) fn claimed(certificate: &CertificateDer<'_>) -> Names {
    Names(spiffe_names(certificate).unwrap_or_default())
}

/// From when to when a certificate is valid; the end is the first moment at which it is not.
pub(super) fn validity(certificate: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let validity = parsed.validity();
    // The last second still counts.
    Some((at(validity.not_before.timestamp()), at(validity.not_after.timestamp().saturating_add(1))))
}

/// Who has signed a certificate, as text.
pub(super) fn issuer(certificate: &CertificateDer<'_>) -> String {
    let parsed = X509Certificate::from_der(certificate);
    parsed.map_or_else(|_| "an unreadable issuer".to_owned(), |(_, parsed)| shown(&parsed.issuer().to_string()))
}

/// A distinguished name in an error text.
pub(super) fn shown(name: &str) -> String {
    if name.is_empty() { "an authority without a name".to_owned() } else { name.chars().take(200).collect() }
}

impl PeerError {
    /// As rustls takes it: decides which alert the peer gets.
    pub(super) fn into_tls(self) -> Error {
        let unix = |time: SystemTime| {
            UnixTime::since_unix_epoch(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
        };
        let error = match &self {
            Self::NotYetValid { not_before, now, .. } => {
                CertificateError::NotValidYetContext { time: unix(*now), not_before: unix(*not_before) }
            }
            Self::Expired { not_after, now, .. } => {
                CertificateError::ExpiredContext { time: unix(*now), not_after: unix(*not_after) }
            }
            Self::Untrusted { .. } | Self::NoRoots { .. } | Self::RootExpired { .. } => CertificateError::UnknownIssuer,
            Self::Revoked { .. } => CertificateError::Revoked,
            Self::RevocationUnknown { .. } | Self::RevocationOutdated { .. } => {
                CertificateError::UnknownRevocationStatus
            }
            Self::NoCertificate
            | Self::Unreadable(_)
            | Self::NoIdentity
            | Self::WrongIdentity { .. }
            | Self::WrongTrustDomain { .. }
            | Self::NotH2
            | Self::Chain { .. } => CertificateError::Other(OtherError(std::sync::Arc::new(self))),
        };
        Error::InvalidCertificate(error)
    }

    /// Whether a revocation list is the reason.
    pub fn is_revocation(&self) -> bool {
        matches!(self, Self::Revoked { .. } | Self::RevocationUnknown { .. } | Self::RevocationOutdated { .. })
    }
}

impl fmt::Debug for PeerError {
    /// The same words: rustls shows reasons of verifiers this way.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [] => f.write_str("without a SPIFFE identity"),
            [one] => write!(f, "{one}"),
            several => {
                // What a stranger shows may hold thousands.
                let more = several.len().saturating_sub(MOST_NAMES);
                write!(f, "one of {:?}", &several[..several.len() - more])?;
                if more > 0 { write!(f, " and {more} more") } else { Ok(()) }
            }
        }
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Names of one certificate that are shown.
const MOST_NAMES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_names_a_few_are_shown() {
        let names = |count: usize| {
            let name = |i| format!("spiffe://cluster.local/ns/shop/sa/web-{i}").parse().unwrap();
            Names((0..count).map(name).collect()).to_string()
        };
        assert_eq!(names(1), "spiffe://cluster.local/ns/shop/sa/web-0");
        assert!(names(3).ends_with("sa/web-2]") && names(3).starts_with("one of ["), "{}", names(3));
        assert!(names(1000).ends_with("sa/web-2] and 997 more"), "{}", names(1000));
    }
}

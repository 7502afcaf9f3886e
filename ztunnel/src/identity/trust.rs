//! What this proxy trusts: the roots of each trust domain, one set for all identities, and what was revoked.
//!
//! The roots come with each answer of the certificate service, and those of a later answer count for every identity.
//! Which answer is later is known only of two that did not overlap: of one that was asked for after the other had
//! come. So an answer that was asked for after the last one had come replaces the roots; one that overlaps with
//! another and brings other roots adds to them, and the service is asked again, which settles it. So does one that
//! contradicts what the control plane has announced: it may come from a replica that is behind. Neither brings back a
//! root that was withdrawn.
//!
//! Must never trust a root that no answer has brought, nor keep one that a later answer left out.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::sync::watch;
use tokio::time::Instant;

mod bundle;
#[cfg(test)]
mod tests;
mod verify;

use super::crl::CrlSet;
use super::peer::PeerError;
use super::{Identity, TrustDomain};
use bundle::{Bundle, NO_ROOTS, Root};
pub(super) use verify::verify_own;
use verify::{Question, check};

/// The trust of a proxy. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Trust(Arc<Shared>);

/// How peers are judged.
#[derive(Debug, Clone, Default)]
pub struct TrustSettings {
    /// The mesh's own trust domain.
    pub domain: TrustDomain,
    /// Trust domains that mean the mesh's own: peers with names in them are accepted, and policies see them as of the
    /// mesh's own.
    pub aliases: Vec<TrustDomain>,
    /// Whether revocation lists are asked at all, and how.
    pub revocation: Option<RevocationRules>,
}

/// What counts where the lists do not say that a certificate is good. Closed by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RevocationRules {
    /// A certificate whose issuer has no list, also while no file could be read yet.
    pub unknown_issuer: Rule,
    /// A certificate whose issuer's list has ended.
    pub outdated: Rule,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rule {
    #[default]
    Deny,
    Allow,
}

/// Which end the peer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerRole {
    Client,
    Server,
}

/// What an answer did to the roots of its trust domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Learned {
    /// Others are trusted than before.
    pub changed: bool,
    /// It overlapped with an answer that had other roots, or is behind: both count until a further answer, which must be
    /// asked for.
    pub doubtful: bool,
}

/// What the trust has gone through, for the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TrustCounts {
    /// Roots that were added and withdrawn, over all trust domains.
    pub added: u64,
    pub withdrawn: u64,
}

struct Shared {
    settings: TrustSettings,
    state: ArcSwap<State>,
    /// Held while the state is changed.
    arrivals: Mutex<Arrivals>,
    /// Raised with each change after which a peer may no longer be trusted.
    generation: watch::Sender<u64>,
}

#[derive(Clone, Default)]
struct State {
    bundles: HashMap<TrustDomain, Arc<Bundle>>,
    /// Nothing until a file was read.
    crls: Arc<CrlSet>,
}

#[derive(Default)]
struct Arrivals {
    /// When the last answer with a root came, of the roots that are trusted.
    with: HashMap<TrustDomain, HashMap<CertificateDer<'static>, Instant>>,
    /// Roots that were withdrawn, the last ones, and when the last answer without them came.
    withdrawn: VecDeque<(CertificateDer<'static>, Instant)>,
    counts: TrustCounts,
}

impl Trust {
    pub fn new(settings: TrustSettings) -> Self {
        Self(Arc::new(Shared {
            settings,
            state: ArcSwap::default(),
            arrivals: Mutex::default(),
            generation: watch::Sender::new(0),
        }))
    }

    /// Takes the roots that an answer of the certificate service brought, which was asked for at `asked` and has come
    /// now. `behind`: other roots than these are said to be in force.
    pub fn learn(
        &self,
        domain: &TrustDomain,
        roots: &[CertificateDer<'static>],
        asked: Instant,
        behind: bool,
    ) -> Learned {
        self.learn_at(domain, roots, asked, Instant::now(), behind)
    }

    fn learn_at(
        &self,
        domain: &TrustDomain,
        roots: &[CertificateDer<'static>],
        asked: Instant,
        came: Instant,
        behind: bool,
    ) -> Learned {
        let brought = Bundle::read(domain, roots);
        let mut arrivals = self.0.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.0.state.load_full();
        let held = state.bundles.get(domain).map(Arc::as_ref).unwrap_or(&NO_ROOTS);
        let Arrivals { with, withdrawn, counts } = &mut *arrivals;
        let with = with.entry(domain.clone()).or_default();
        // An answer is later than another one if it was asked for when that one had come.
        let is_left_out = |root: &Root| !behind && with.get(&root.der).is_none_or(|last| asked >= *last);
        let is_back = |root: &Root| {
            let lacked = withdrawn.iter().find(|(der, _)| *der == root.der);
            lacked.is_none_or(|(_, last)| !behind && asked >= *last)
        };
        let kept = held.roots.iter().filter(|root| brought.has(&root.der) || !is_left_out(root));
        let next = Bundle::of(kept.chain(brought.roots.iter().filter(|root| is_back(root))));
        let doubtful = !next.is_same(&brought);
        for root in brought.roots.iter().filter(|root| next.has(&root.der)) {
            let last = with.entry(root.der.clone()).or_insert(came);
            *last = came.max(*last);
        }
        with.retain(|der, _| next.has(der));
        for (_, last) in withdrawn.iter_mut().filter(|(der, _)| !brought.has(der)) {
            *last = came.max(*last);
        }
        if held.is_same(&next) {
            return Learned { changed: false, doubtful };
        }
        let (added, lost) = (held.missing_from(&next), next.missing_from(held));
        // `missing_from` names what the first lacks of the second.
        for root in &added {
            tracing::info!(%domain, root = root.name, ends = super::rfc3339(root.not_after), "a root is trusted");
        }
        for root in &lost {
            tracing::warn!(%domain, root = root.name, "a root was withdrawn: its certificates are trusted no longer");
        }
        withdrawn.retain(|(der, _)| !next.has(der));
        withdrawn.extend(lost.iter().map(|root| (root.der.clone(), came)));
        while withdrawn.len() > MOST_WITHDRAWN {
            withdrawn.pop_front();
        }
        counts.added += added.len() as u64;
        counts.withdrawn += lost.len() as u64;
        let is_loss = !lost.is_empty();
        let mut state = State::clone(&state);
        state.bundles.insert(domain.clone(), Arc::new(next));
        self.0.state.store(Arc::new(state));
        if is_loss {
            self.0.generation.send_modify(|n| *n += 1);
        }
        Learned { changed: true, doubtful }
    }

    /// Takes revocation lists in the place of those before.
    pub fn revoke(&self, crls: CrlSet) {
        let _changing = self.0.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let state = State { crls: Arc::new(crls), ..State::clone(&self.0.state.load()) };
        self.0.state.store(Arc::new(state));
        self.0.generation.send_modify(|n| *n += 1);
    }

    /// Whether a peer's chain holds now: it leads to a root of `domain`, for what the peer does, and is not revoked.
    pub fn verify(
        &self,
        domain: &TrustDomain,
        chain: &[CertificateDer<'_>],
        role: PeerRole,
        now: UnixTime,
    ) -> Result<(), PeerError> {
        self.check(domain, chain, Question { role, time: now, ends_matter: true })
    }

    /// Whether the chain of a peer that was verified at `established` would be trusted still, whatever has ended since.
    pub fn verify_again(
        &self,
        domain: &TrustDomain,
        chain: &[CertificateDer<'_>],
        role: PeerRole,
        established: SystemTime,
    ) -> Result<(), PeerError> {
        let time = UnixTime::since_unix_epoch(established.duration_since(UNIX_EPOCH).unwrap_or_default());
        self.check(domain, chain, Question { role, time, ends_matter: false })
    }

    /// Whether a chain of our own leads to a trusted root still. Revocation of our own is for our peers to find.
    pub fn leads_to_root(&self, domain: &TrustDomain, chain: &[CertificateDer<'_>], issued: SystemTime) -> bool {
        let time = UnixTime::since_unix_epoch(issued.duration_since(UNIX_EPOCH).unwrap_or_default());
        let state = self.0.state.load();
        let bundle = state.bundles.get(domain).map_or(&NO_ROOTS, Arc::as_ref);
        let question = Question { role: PeerRole::Server, time, ends_matter: false };
        check(domain, bundle, None, chain, question).is_ok()
    }

    /// Counts the changes after which peers must be judged again.
    pub fn generation(&self) -> u64 {
        *self.0.generation.borrow()
    }

    /// Changes with the generation.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.generation.subscribe()
    }

    /// The roots of a trust domain as they are trusted now.
    pub fn roots(&self, domain: &TrustDomain) -> Vec<CertificateDer<'static>> {
        let state = self.0.state.load();
        state.bundles.get(domain).map(|b| b.roots.iter().map(|r| r.der.clone()).collect()).unwrap_or_default()
    }

    /// Trust domains, the number of their roots, and when the first of these ends.
    pub fn bundles(&self) -> Vec<(TrustDomain, usize, Option<SystemTime>)> {
        let state = self.0.state.load();
        let row = |(domain, bundle): (&TrustDomain, &Arc<Bundle>)| {
            (domain.clone(), bundle.roots.len(), bundle.roots.iter().map(|r| r.not_after).min())
        };
        state.bundles.iter().map(row).collect()
    }

    /// The revocation lists in force.
    pub fn crls(&self) -> Arc<CrlSet> {
        self.0.state.load().crls.clone()
    }

    pub fn counts(&self) -> TrustCounts {
        self.0.arrivals.lock().unwrap_or_else(PoisonError::into_inner).counts
    }

    /// Whether a workload of trust domain `own` takes peers of `theirs`.
    pub fn accepts(&self, own: &TrustDomain, theirs: &TrustDomain) -> bool {
        own == theirs || self.0.settings.aliases.contains(theirs) || (self.is_ours(own) && self.is_ours(theirs))
    }

    /// All trust domains that a workload of `own` takes peers of.
    pub fn accepted(&self, own: &TrustDomain) -> Vec<TrustDomain> {
        let TrustSettings { domain, aliases, .. } = &self.0.settings;
        let mut all = vec![own.clone()];
        for candidate in std::iter::once(domain).chain(aliases) {
            if self.accepts(own, candidate) && !all.contains(candidate) {
                all.push(candidate.clone());
            }
        }
        all
    }

    /// An identity as policies and expectations see it: with the mesh's own trust domain in the place of an alias.
    pub fn canonical(&self, identity: &Identity) -> Identity {
        let TrustSettings { domain, aliases, .. } = &self.0.settings;
        if aliases.contains(identity.trust_domain()) {
            return Identity::new(domain, identity.namespace(), identity.service_account());
        }
        identity.clone()
    }

    fn is_ours(&self, domain: &TrustDomain) -> bool {
        let TrustSettings { domain: own, aliases, .. } = &self.0.settings;
        domain == own || aliases.contains(domain)
    }

    fn check(&self, domain: &TrustDomain, chain: &[CertificateDer<'_>], question: Question) -> Result<(), PeerError> {
        let state = self.0.state.load();
        let bundle = state.bundles.get(domain).map_or(&NO_ROOTS, Arc::as_ref);
        let rules = self.0.settings.revocation;
        check(domain, bundle, rules.map(|rules| (&*state.crls, rules)), chain, question)
    }
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").field("settings", &self.0.settings).finish_non_exhaustive()
    }
}

/// Withdrawn roots that are remembered.
const MOST_WITHDRAWN: usize = 64;

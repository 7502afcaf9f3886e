//! The tunnels of one thread, for when time or trust changes under them.
//!
//! A tunnel rests on two certificates. When both should have been renewed, new streams go on a tunnel that rests on the
//! new ones: when the root of the old ones is withdrawn, only what has run for long is hurt. When the first certificate
//! ends, the tunnel takes no new streams from the peer either; those that run go on, unless the settings say otherwise or the renewal of our own was denied. When roots are withdrawn or revocation
//! lists change, each peer's chain is verified again as of the handshake, and a tunnel whose peer does not pass ends
//! at once, with its streams.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use super::driver::{Ended, Load};
use super::held::{HeldTls, WeakTls};
use crate::identity::{Certificate, Identity, PeerError, PeerRole, Trust, TrustDomain, first_end, rfc3339};

/// The tunnels of a thread. Cheap to clone; all clones are one.
#[derive(Clone)]
pub struct Tunnels(Rc<Inner>);

struct Inner {
    trust: Trust,
    list: RefCell<Vec<Weak<Load>>>,
    /// Length of the list at which what is gone is taken out next.
    prune_at: Cell<usize>,
}

/// What a tunnel rests on. Small: there is one for each tunnel.
pub(super) struct Proof {
    own: Identity,
    own_end: SystemTime,
    peer_end: SystemTime,
    peer_is: PeerRole,
    established: SystemTime,
    /// Holds the peer's chain.
    tls: WeakTls,
}

/// What a round through the tunnels found.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Round {
    /// Tunnels that were ended, and streams on them.
    pub tunnels: usize,
    pub streams: u32,
    /// Of the tunnels, those that a revocation list was the reason for, by what the peer is to us.
    pub revoked_clients: u64,
    pub revoked_servers: u64,
    /// Why the first one was.
    pub first: Option<Ended>,
}

impl Tunnels {
    pub fn new(trust: Trust) -> Self {
        Self(Rc::new(Inner { trust, list: RefCell::default(), prune_at: Cell::new(FIRST_PRUNE) }))
    }

    /// The trust as it is before a handshake begins; for [`Self::add`] after it.
    pub(super) fn generation(&self) -> u64 {
        self.0.trust.generation()
    }

    /// Takes a tunnel up. If the trust has changed since its handshake began, it is judged at once.
    pub(super) fn add(&self, load: &Rc<Load>, generation: u64) {
        let mut list = self.0.list.borrow_mut();
        if list.len() >= self.0.prune_at.get() {
            list.retain(|load| load.strong_count() > 0);
            self.0.prune_at.set((2 * list.len()).max(FIRST_PRUNE));
        }
        list.push(Rc::downgrade(load));
        drop(list);
        if self.0.trust.generation() != generation
            && let Some(Err(error)) =
                load.proof.as_ref().and_then(|proof| proof.verify(&self.0.trust, &mut HashMap::new()))
        {
            load.cut(Ended::Distrusted(error.into()));
        }
    }

    /// Judges all peers by the trust of now. Gives other tasks their turn in between.
    pub async fn judge(&self) -> Round {
        let mut round = Round::default();
        let mut known = HashMap::new();
        for load in self.all() {
            let Some(proof) = load.proof.as_ref().filter(|_| !load.is_cut()) else { continue };
            let before = known.len();
            match proof.verify(&self.0.trust, &mut known) {
                None | Some(Ok(())) => {}
                Some(Err(error)) => {
                    if error.is_revocation() {
                        match proof.peer_is {
                            PeerRole::Client => round.revoked_clients += 1,
                            PeerRole::Server => round.revoked_servers += 1,
                        }
                    }
                    round.end(&load, Ended::Distrusted(error.into()));
                }
            }
            if known.len() > before && known.len().is_multiple_of(CHAINS_A_TURN) {
                tokio::task::yield_now().await;
            }
        }
        round
    }

    /// Sees to tunnels whose certificates have ended. `cut`: they end with their streams. `denied`: whether the renewal
    /// of an identity of ours was denied. Also says when to look again.
    pub fn tend(&self, now: SystemTime, cut: bool, denied: impl Fn(&Identity) -> bool) -> (Round, Duration) {
        let mut round = Round::default();
        let mut next = LOOK_AGAIN;
        for load in self.all() {
            let Some(proof) = load.proof.as_ref().filter(|_| !load.is_cut()) else { continue };
            if let Ok(left) = proof.end().duration_since(now)
                && !left.is_zero()
            {
                next = next.min(left);
                continue;
            }
            let expired = || Ended::Expired { own: proof.own_end <= proof.peer_end, at: rfc3339(proof.end()) };
            if load.streams() == 0 {
                // In order, if the peer takes part.
                load.drain();
                match (proof.end() + LEAVE).duration_since(now) {
                    Ok(left) if !left.is_zero() => next = next.min(left),
                    _ => load.cut(expired()),
                }
                continue;
            }
            if cut {
                round.end(&load, expired());
            } else if proof.own_end <= now && denied(&proof.own) {
                round.end(&load, Ended::RenewalDenied { own: proof.own.clone(), at: rfc3339(proof.own_end) });
            } else {
                load.drain();
                next = next.min(LOOK_AT_ENDED);
            }
        }
        (round, next)
    }

    /// Puts no new streams of ours on the tunnels that there are: their certificates have been renewed. Those that run on
    /// them go on.
    pub fn retire_ours(&self) {
        for load in self.all() {
            if load.proof.as_ref().is_some_and(|proof| proof.peer_is == PeerRole::Server) {
                load.retire();
            }
        }
    }

    /// Tunnels that are open.
    pub fn len(&self) -> usize {
        self.0.list.borrow().iter().filter(|load| load.strong_count() > 0).count()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn all(&self) -> Vec<Rc<Load>> {
        self.0.list.borrow().iter().filter_map(Weak::upgrade).collect()
    }
}

impl Round {
    fn end(&mut self, load: &Load, why: Ended) {
        self.tunnels += 1;
        self.streams += load.streams();
        self.first.get_or_insert_with(|| why.clone());
        load.cut(why);
    }
}

impl Proof {
    /// Of a handshake that has just ended well.
    pub(super) fn new(own: &Certificate, peer_is: PeerRole, tls: &HeldTls) -> Self {
        let established = SystemTime::now();
        let peer_end = first_end(tls.get().peer_certificates(), established);
        let own_end = first_end(own.chain(), established);
        Self {
            own: own.identity().clone(),
            own_end: own_end.unwrap_or(established),
            peer_end: peer_end.unwrap_or(established),
            peer_is,
            established,
            tls: tls.downgrade(),
        }
    }

    /// When the first of the two certificates ends.
    pub(super) fn end(&self) -> SystemTime {
        self.own_end.min(self.peer_end)
    }

    /// Until when new streams of ours are put on the tunnel: two thirds of what its certificates had left. Renewals come
    /// at 0.4 to 0.6 of it.
    pub(super) fn fresh_until(&self) -> SystemTime {
        fresh_until(self.established, self.end())
    }

    /// Whether the peer passes; nothing if the tunnel is gone. Equal chains are verified once.
    fn verify(&self, trust: &Trust, known: &mut Verdicts) -> Option<Result<(), PeerError>> {
        let tls = self.tls.upgrade()?;
        let tls = tls.get();
        let chain = tls.peer_certificates();
        // Most tunnels share their chain with others, and their handshakes lie within its life.
        let key = (self.own.trust_domain().clone(), self.peer_is, chain.to_vec());
        if let Some(verdict) = known.get(&key) {
            return Some(verdict.clone());
        }
        let verdict = trust.verify_again(self.own.trust_domain(), chain, self.peer_is, self.established);
        known.insert(key, verdict.clone());
        Some(verdict)
    }
}

fn fresh_until(established: SystemTime, end: SystemTime) -> SystemTime {
    let left = end.duration_since(established).unwrap_or_default();
    end.min(established + (left / 3 * 2).max(LEAST_FRESH))
}

type Verdicts = HashMap<(TrustDomain, PeerRole, Vec<CertificateDer<'static>>), Result<(), PeerError>>;

/// Certificates that are about to end are no reason to make ever more tunnels.
const LEAST_FRESH: Duration = Duration::from_secs(1);
/// Tunnels on the list before it is looked through for those that are gone.
const FIRST_PRUNE: usize = 64;
/// Chains that are verified before other tasks have their turn: some milliseconds.
const CHAINS_A_TURN: usize = 16;
/// The clock may have been changed: look again at least this often.
const LOOK_AGAIN: Duration = Duration::from_secs(10);
/// What a peer has to leave an idle tunnel whose certificate has ended.
const LEAVE: Duration = Duration::from_secs(10);
/// While streams run on a tunnel whose certificate has ended.
const LOOK_AT_ENDED: Duration = Duration::from_millis(500);

#[cfg(test)]
#[path = "tunnels_tests.rs"]
mod tests;

//! What is in force: who signs, and what is trusted. Pure: from what was in force, the files and the time follows what is
//! in force now.
//!
//! A root never signs before everybody has had the time to learn of it, and is never withdrawn while certificates below
//! it live, whatever is done to the files; only a word of the operator's (in the record) hurries either.
//!
//! Must never leave out the root that signs, nor trust one that neither the files nor the record name.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use ztunnel::identity::rfc3339;

use super::Bundle;
use super::authority::Authority;
use super::cert::Cert;
use super::layout::Found;
use super::record::{Record, at, seconds};

/// What is in force at one time.
#[derive(Debug)]
pub(super) struct InForce {
    pub authority: Arc<Authority>,
    /// Who will sign, when its root has been announced for long enough.
    pub pending: Option<Pending>,
    /// The root that signs comes first.
    pub roots: Vec<Trusted>,
    pub bundle: Arc<Bundle>,
    /// The bundle as the certificate service hands it out.
    pub pem: Arc<str>,
    pub found: Arc<Found>,
}

#[derive(Debug, Clone)]
pub(super) struct Pending {
    pub authority: Arc<Authority>,
    pub from: SystemTime,
}

#[derive(Debug, Clone)]
pub(super) struct Trusted {
    pub cert: Cert,
    /// It is no longer in the files, and trusted until then.
    pub retired_until: Option<SystemTime>,
}

/// What has changed, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Event {
    Trusted(String),
    Signs(String),
    Waits { name: String, from: String },
    Retired { name: String, until: String },
    Withdrawn { name: String, forced: bool },
    Ended(String),
}

impl InForce {
    /// What is in force now. `held` is what was; nothing at the start. `memory_only`: other processes that sign do not
    /// see the record, nor does a later one.
    pub fn advance(
        held: Option<&Self>,
        found: Arc<Found>,
        record: &mut Record,
        now: SystemTime,
        memory_only: bool,
    ) -> (Self, Vec<Event>) {
        let mut events = Vec::new();
        for root in &found.roots {
            let is_new = record.root(root).is_none();
            let known = record.root_mut(root);
            known.announced.get_or_insert(seconds(now));
            if is_new && held.is_none() {
                // Of a time that nobody remembers.
                let life = record.leaf_life();
                record.root_mut(root).leaves_live_until(now + life);
            }
        }
        let (authority, pending) = choose(held, &found, record, now, memory_only, &mut events);
        let roots = trusted(held, &authority, &found, record, now, &mut events);
        if let Some(held) = held {
            // The one that signs stays, and is warned of as long as it does.
            let is_gone =
                |root: &&Trusted| now >= root.cert.not_after && !roots.iter().any(|kept| kept.cert == root.cert);
            for ended in held.roots.iter().filter(is_gone) {
                events.push(Event::Ended(ended.cert.name.clone()));
            }
            let fresh = roots.iter().filter(|root| !held.roots.iter().any(|known| known.cert == root.cert));
            events.extend(fresh.map(|root| Event::Trusted(root.cert.name.clone())));
        }
        for root in &roots {
            // Another process must know what the files do not tell.
            let in_files = found.roots.contains(&root.cert);
            record.root_mut(&root.cert).retired = (!in_files).then(|| root.cert.pem.clone());
        }
        forget(record, &roots, &found.roots, now);
        let others = roots.iter().map(|root| &root.cert).filter(|cert| *cert != authority.root());
        let bundle = Arc::new(Bundle::new(authority.root().der.clone(), others.map(|cert| cert.der.clone())));
        let pem = roots.iter().map(|root| root.cert.pem.as_str()).collect::<String>().into();
        (Self { authority, pending, bundle, pem, roots, found }, events)
    }
}

/// Who signs, and who will.
fn choose(
    held: Option<&InForce>,
    found: &Found,
    record: &mut Record,
    now: SystemTime,
    memory_only: bool,
    events: &mut Vec<Event>,
) -> (Arc<Authority>, Option<Pending>) {
    let wanted = &found.authority;
    // At the start there is nobody else.
    let Some(held) = held else { return (wanted.clone(), None) };
    if wanted.is_same_as(&held.authority) {
        return (held.authority.clone(), None);
    }
    let (root, adoption) = (wanted.root(), record.adoption());
    let known = record.root_mut(root);
    let from = at(known.announced.unwrap_or_else(|| seconds(now))) + adoption;
    let is_known = *root == *held.authority.root() || known.forced || from <= now;
    let before = held.authority.root();
    let has_no_choice =
        now >= held.authority.not_after() || record.root(before).is_some_and(|known| known.withdrawn.is_some());
    let may_sign = is_known || has_no_choice;
    if !may_sign {
        let is_news = held.pending.as_ref().is_none_or(|pending| !pending.authority.is_same_as(wanted));
        if is_news {
            events.push(Event::Waits { name: wanted.signer().name.clone(), from: rfc3339(from) });
        }
        return (held.authority.clone(), Some(Pending { authority: wanted.clone(), from }));
    }
    if memory_only && before != root {
        let life = record.leaf_life();
        record.root_mut(before).leaves_live_until(now + life + OTHERS_FOLLOW);
    }
    events.push(Event::Signs(wanted.signer().name.clone()));
    (wanted.clone(), None)
}

/// All roots in force.
fn trusted(
    held: Option<&InForce>,
    authority: &Authority,
    found: &Found,
    record: &mut Record,
    now: SystemTime,
    events: &mut Vec<Event>,
) -> Vec<Trusted> {
    let mut roots = vec![Trusted { cert: authority.root().clone(), retired_until: None }];
    for cert in &found.roots {
        let withdrawn = record.root(cert).is_some_and(|known| known.withdrawn.is_some());
        if !withdrawn && now < cert.not_after && roots.iter().all(|root| root.cert != *cert) {
            roots.push(Trusted { cert: cert.clone(), retired_until: None });
        }
    }
    let before: Vec<Cert> = match held {
        Some(held) => held.roots.iter().map(|root| root.cert.clone()).collect(),
        None => record.roots.values().filter_map(|root| from_pem(root.retired.as_deref()?)).collect(),
    };
    for cert in before {
        if roots.iter().any(|root| root.cert == cert) || now >= cert.not_after {
            continue;
        }
        let known = record.root_mut(&cert);
        let until = known.leaves_until.map(at).filter(|until| *until > now && known.withdrawn.is_none());
        match until {
            Some(until) => {
                let is_news =
                    held.is_some_and(|held| held.roots.iter().any(|r| r.cert == cert && r.retired_until.is_none()));
                if is_news {
                    events.push(Event::Retired { name: cert.name.clone(), until: rfc3339(until) });
                }
                roots.push(Trusted { cert, retired_until: Some(until) });
            }
            None => {
                let forced = known.withdrawn.is_some();
                events.push(Event::Withdrawn { name: cert.name, forced });
            }
        }
    }
    roots
}

/// Drops what the record need not know any more.
fn forget(record: &mut Record, roots: &[Trusted], in_files: &[Cert], now: SystemTime) {
    let life = record.leaf_life();
    record.roots.retain(|fingerprint, known| {
        // Other processes must learn of a withdrawal too.
        let lately = known.withdrawn.is_some_and(|since| at(since) + life + REMEMBERED > now);
        let is_used = roots.iter().map(|root| &root.cert).chain(in_files).any(|cert| cert.fingerprint == *fingerprint);
        lately || is_used
    });
}

fn from_pem(text: &str) -> Option<Cert> {
    Cert::new(CertificateDer::from_pem_slice(text.as_bytes()).ok()?).ok()
}

/// How long other replicas may go on with the files of before.
const OTHERS_FOLLOW: Duration = Duration::from_secs(60);
const REMEMBERED: Duration = Duration::from_secs(86400);

//! The certificate authority: signs for workloads and for the control plane's own port, with a root of its own or with
//! keys from outside, and changes from one to the next without a certificate that somebody refuses.
//!
//! Must never sign past its own end, nor take anything but the public key from a request, nor let its key out.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwap;
use rcgen::{ExtendedKeyUsagePurpose, SanType};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;
use ztunnel::identity::{Identity, PrivateKey, TrustDomain};

mod authority;
mod cert;
mod files;
mod folder;
mod in_force;
mod key;
mod layout;
mod record;
mod report;
mod request;
mod rotation;
#[cfg(test)]
mod tests;

use authority::{LeafTerms, workload_usages};
pub use cert::CertReport;
pub use files::write_whole;
pub(crate) use files::{beside, sweep_unfinished};
pub use folder::FolderWatch;
use in_force::{Event, InForce};
pub use layout::Layout;
use record::Recorder;
pub use report::{Report, RootReport};
pub use rotation::{Done, RotateError, Rotation, Stage, Status, rotate, status};

/// The authority.
#[derive(Debug)]
pub struct Ca {
    settings: CaSettings,
    in_force: ArcSwap<InForce>,
    bundles: watch::Sender<Arc<Bundle>>,
    recorder: Recorder,
    looked: Mutex<Looked>,
}

/// How an authority signs.
#[derive(Debug, Clone)]
pub struct CaSettings {
    /// The folder of its files.
    pub dir: PathBuf,
    /// Of the names that it signs.
    pub trust_domain: TrustDomain,
    /// The longest life of what it signs.
    pub longest_life: Duration,
    /// How much earlier than now certificates begin, for clocks that are behind.
    pub backdate: Duration,
}

/// A signed certificate with what belongs to it, all of one moment.
#[derive(Debug, Clone)]
pub struct Issued {
    /// PEM: the leaf, then the intermediates one by one, as the certificate service hands them out.
    pub chain: Vec<String>,
    /// PEM: all roots in force.
    pub roots: Arc<str>,
    pub not_after: SystemTime,
}

/// The roots in force at one time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bundle {
    /// The one that signs first.
    roots: Vec<CertificateDer<'static>>,
    /// All of them, in whatever order.
    set: String,
    version: String,
}

/// Why the authority cannot work or sign.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("{step} {}: {source}", path.display())]
    File { step: &'static str, path: PathBuf, source: io::Error },
    #[error("{} cannot be used: {reason}", path.display())]
    Unusable { path: PathBuf, reason: String },
    #[error("the request cannot be signed: {0}")]
    Request(String),
    #[error("the authority {name} is valid from {begin} to {end}, it is {now} now: nothing can be signed with it")]
    NotValidNow { name: String, begin: String, end: String, now: String },
    #[error("signing: {0}")]
    Sign(String),
}

/// What a look at the folder has changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Another authority signs from now on.
    pub signer: bool,
    /// The roots in force are others.
    pub roots: bool,
    /// Why the files that are there cannot be used. Then those before stay in force.
    pub problem: Option<String>,
}

/// What was in the folder last.
#[derive(Debug, Default)]
struct Looked {
    /// Of the files that are in use.
    stamp: [u8; 32],
    /// Why those that are there now are not.
    problem: Option<String>,
    /// What was said about the record last.
    complaint: Option<String>,
}

impl Ca {
    /// Opens the authority in a folder, or makes a root there if it is empty.
    pub fn open(settings: CaSettings) -> Result<Self, CaError> {
        let now = SystemTime::now();
        let (dir, owner) = (&settings.dir, files::own_user());
        files::sweep_unfinished(dir);
        layout::prepare(dir, now)?;
        let raw = layout::look(dir, owner)?;
        let found = raw.verify(dir, &settings.probe(), now)?;
        let recorder = match found.layout {
            Layout::OwnRoot => Recorder::in_folder(dir, owner)?,
            Layout::PlugIn => Recorder::in_memory(),
        };
        let memory_only = !recorder.is_in_folder();
        let cap = record::whole_seconds(settings.longest_life);
        let (in_force, written) = recorder.update(|record| {
            let lives = record.roots.values().any(|root| root.has_leaves(now));
            record.leaf_life = if lives { record.leaf_life.max(cap) } else { cap };
            InForce::advance(None, Arc::new(found), record, now, memory_only).0
        });
        written?;
        let bundles = watch::Sender::new(in_force.bundle.clone());
        let looked = Mutex::new(Looked { stamp: raw.stamp(), ..Looked::default() });
        Ok(Self { settings, in_force: ArcSwap::from_pointee(in_force), bundles, recorder, looked })
    }

    /// Looks at the folder and the clock. What can be used is taken up in its time; what cannot changes nothing. Reads
    /// and writes files: not for a thread that must not wait.
    pub fn refresh(&self) -> Changes {
        let (now, dir) = (SystemTime::now(), &self.settings.dir);
        let mut looked = self.looked.lock().unwrap_or_else(PoisonError::into_inner);
        let held = self.in_force.load_full();
        let read = layout::look(dir, files::own_user()).and_then(|raw| {
            if raw.layout != held.found.layout {
                let reason =
                    format!("it was of layout {:?} and is of {:?}: restart control", held.found.layout, raw.layout);
                return Err(CaError::Unusable { path: dir.clone(), reason });
            }
            let stamp = raw.stamp();
            if stamp == looked.stamp {
                return Ok(held.found.clone());
            }
            let found = raw.verify(dir, &self.settings.probe(), now)?;
            looked.stamp = stamp;
            Ok(Arc::new(found))
        });
        looked.problem = read.as_ref().err().map(ToString::to_string);
        let found = read.unwrap_or_else(|_| held.found.clone());
        let memory_only = !self.recorder.is_in_folder();
        let ((fresh, events), written) =
            self.recorder.update(|record| InForce::advance(Some(&held), found, record, now, memory_only));
        self.complain(&mut looked, written);
        let changes = Changes {
            signer: !fresh.authority.is_same_as(&held.authority),
            roots: fresh.bundle.set != held.bundle.set,
            problem: looked.problem.clone(),
        };
        let bundle = fresh.bundle.clone();
        // First what is handed out, then what is announced.
        self.in_force.store(Arc::new(fresh));
        self.bundles.send_if_modified(|announced| {
            let is_new = announced.version() != bundle.version();
            *announced = bundle;
            is_new
        });
        events.iter().for_each(Event::log);
        changes
    }

    /// The roots in force, now and from now on.
    pub fn bundles(&self) -> watch::Receiver<Arc<Bundle>> {
        self.bundles.subscribe()
    }

    /// All roots in force, the one that signs first.
    pub fn roots_pem(&self) -> Arc<str> {
        self.in_force.load().pem.clone()
    }

    /// When the first certificate from the one that signs to its root ends.
    pub fn not_after(&self) -> SystemTime {
        self.in_force.load().authority.not_after()
    }

    pub fn dir(&self) -> &Path {
        &self.settings.dir
    }

    /// What is in force, and what is wrong.
    pub fn report(&self) -> Report {
        let problem = self.looked.lock().unwrap_or_else(PoisonError::into_inner).problem.clone();
        Report::of(&self.settings.dir, &self.in_force.load(), &self.recorder.held(), problem, SystemTime::now())
    }

    /// Signs the key of a request (PKCS#10 in PEM) for an identity. A lifetime that would end after the authority is
    /// cut. May write a file: not for a thread that must not wait.
    pub fn sign(&self, identity: &Identity, request: &str, lifetime: Duration) -> Result<Issued, CaError> {
        let key = request::public_key(request).map_err(CaError::Request)?;
        let name = identity.to_string().try_into().map_err(sign_error)?;
        let in_force = self.in_force.load();
        let (leaf, not_after) = self.leaf(&in_force, vec![SanType::URI(name)], workload_usages(), &key, lifetime)?;
        let intermediates = in_force.authority.intermediates().iter().map(|cert| cert.pem.clone());
        let chain = std::iter::once(leaf.pem()).chain(intermediates).collect();
        Ok(Issued { chain, roots: in_force.pem.clone(), not_after })
    }

    /// A certificate with its key for the control plane's own port, leaf first, and when it ends. Names are host names
    /// or addresses.
    pub fn serving(
        &self,
        names: &[String],
        lifetime: Duration,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKey, SystemTime), CaError> {
        let key = PrivateKey::generate().map_err(|e| CaError::Sign(e.to_string()))?;
        let san = |name: &String| match name.parse::<IpAddr>() {
            Ok(address) => Ok(SanType::IpAddress(address)),
            Err(_) => name.as_str().try_into().map(SanType::DnsName),
        };
        let names = names.iter().map(san).collect::<Result<_, _>>().map_err(sign_error)?;
        let in_force = self.in_force.load();
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (leaf, end) = self.leaf(&in_force, names, usages, &key, lifetime)?;
        let mut chain = vec![leaf.der().clone()];
        chain.extend(in_force.authority.intermediates().iter().map(|cert| cert.der.clone()));
        Ok((chain, key, end))
    }

    fn leaf(
        &self,
        in_force: &InForce,
        names: Vec<SanType>,
        usages: Vec<ExtendedKeyUsagePurpose>,
        key: &impl rcgen::PublicKeyData,
        lifetime: Duration,
    ) -> Result<(rcgen::Certificate, SystemTime), CaError> {
        let (authority, now) = (&in_force.authority, SystemTime::now());
        let lifetime = lifetime.min(self.settings.longest_life);
        // Before it exists: nobody may think that the last one has ended.
        let end = authority.end_of(lifetime, now)?;
        let noted = self.recorder.note_leaf(authority.root(), end, lifetime);
        // Without the record only a rotation is kept waiting; without certificates, everybody would be.
        if let Err(error) = noted {
            tracing::debug!(%error, "the record of the roots cannot be written");
        }
        let terms = LeafTerms { names, usages, lifetime, backdate: self.settings.backdate };
        authority.sign(key, terms, now)
    }

    fn complain(&self, looked: &mut Looked, written: Result<(), CaError>) {
        let complaint = written.err().map(|error| error.to_string());
        if complaint.is_some() && complaint != looked.complaint {
            tracing::error!(
                reason = complaint,
                "the record of the roots cannot be kept: `control ca rotate` will not know which certificates live"
            );
        }
        looked.complaint = complaint;
    }
}

impl CaSettings {
    /// A name of the kind that is signed.
    fn probe(&self) -> Identity {
        Identity::new(&self.trust_domain, "probe", "probe")
    }
}

impl Bundle {
    /// `signs` leads to the certificate that signs; it is one of the roots.
    fn new(signs: CertificateDer<'static>, others: impl Iterator<Item = CertificateDer<'static>>) -> Self {
        let roots: Vec<_> = std::iter::once(signs).chain(others).collect();
        let mut sorted: Vec<_> = roots.iter().collect();
        sorted.sort_unstable_by(|a, b| a.as_ref().cmp(b.as_ref()));
        let digest = |roots: &mut dyn Iterator<Item = &CertificateDer<'static>>| {
            let mut hash = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
            roots.for_each(|root| hash.update(root));
            cert::hex(&hash.finish().as_ref()[..8])
        };
        let set = digest(&mut sorted.iter().copied());
        let version = format!("{set}-{}", digest(&mut roots.iter().take(1)));
        Self { roots, set, version }
    }

    /// The one that signs first.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// The root that fresh certificates lead to.
    pub fn signs(&self) -> &CertificateDer<'static> {
        // Never empty.
        &self.roots[0]
    }

    /// Another for other roots, in whatever order, and for another that signs.
    pub fn version(&self) -> &str {
        &self.version
    }
}

impl Event {
    fn log(&self) {
        match self {
            Self::Trusted(name) => tracing::info!(name, "another root is trusted from now on"),
            Self::Signs(name) => tracing::info!(name, "another authority signs from now on"),
            Self::Waits { name, from } => tracing::warn!(
                name,
                from,
                "another authority was put in place whose root is new to the proxies: they learn of it first, the one \
                 before signs until then"
            ),
            Self::Retired { name, until } => tracing::warn!(
                name,
                until,
                "a root was taken out of the files while certificates below it live: it is trusted until they have ended"
            ),
            Self::Withdrawn { name, forced } => tracing::info!(name, forced, "a root is no longer trusted"),
            Self::Ended(name) => tracing::warn!(name, "a root has ended"),
        }
    }
}

fn sign_error(error: rcgen::Error) -> CaError {
    CaError::Sign(error.to_string())
}

//! The rotation of a root of its own, one step at a time: the new root is trusted; it signs; the old one is withdrawn.
//!
//! Each step is one rename of one file, so that whatever process reads the folder finds one step or the next. Must never
//! take a step that cuts somebody off, unless the operator says so.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use ztunnel::identity::{Identity, TrustDomain, rfc3339};

use super::cert::Cert;
use super::files::{Guard, lock, own_user, read_if_there, sync_folder_of, write_as};
use super::in_force::InForce;
use super::key::CaKey;
use super::layout::{Found, Layout, ROOT_KEY, ROOTS, belongs, file_error, look, make_key, make_root};
use super::record::{Record, Recorder, at, seconds};
use super::report::Report;
use super::{CaError, RootReport};

/// Where a rotation stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    #[serde(flatten)]
    pub report: Report,
    pub rotation: Rotation,
}

/// What has been done, and what would be next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rotation {
    pub stage: Stage,
    pub says: String,
    /// What the next step does.
    pub next: String,
    /// Why it is not taken yet, if it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<String>,
}

/// The last step that was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stage {
    /// None: nothing is being rotated.
    Settled,
    /// The new root is trusted, the old one signs.
    NewTrusted,
    /// The new root signs, the old one is trusted.
    NewSigns,
    /// The old root is out of the files, and trusted because certificates below it live.
    OldRetired,
    /// Of a plug-in: it is rotated from outside.
    PlugIn,
}

/// A step that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Done {
    pub step: u8,
    pub did: String,
    pub status: Status,
}

/// Why no step was taken.
#[derive(Debug, thiserror::Error)]
pub enum RotateError {
    #[error(transparent)]
    Ca(#[from] CaError),
    #[error("{dir} holds a plugged-in authority: {PLUG_IN}")]
    PlugIn { dir: String },
    #[error("refused: {reason}. --force does it all the same: {harm}")]
    Refused { reason: String, harm: &'static str },
}

/// The folder as a step finds it.
struct Folder<'a> {
    dir: &'a Path,
    owner: u32,
    now: SystemTime,
    found: Arc<Found>,
    recorder: Recorder,
    step: Step,
}

/// What the next step has to do with.
enum Step {
    /// A key that an earlier try has left.
    Add(Option<CaKey>),
    Switch(Cert),
    /// Roots that have signed before.
    Withdraw(Vec<Cert>),
    /// Their fingerprints.
    EndRetired(Vec<String>),
}

/// Where the authority in a folder stands. Reads it only.
pub fn status(dir: &Path) -> Result<Status, CaError> {
    Ok(Folder::open(dir)?.status())
}

/// Takes the next step of a rotation.
pub fn rotate(dir: &Path, force: bool) -> Result<Done, RotateError> {
    // Before anything is locked or made.
    if Folder::open(dir)?.found.layout == Layout::PlugIn {
        return Err(RotateError::PlugIn { dir: dir.display().to_string() });
    }
    let locked = lock(dir).map_err(file_error("locking", dir))?;
    let folder = Folder::open(dir)?;
    if let Some(reason) = folder.waits().filter(|_| !force) {
        return Err(RotateError::Refused { reason, harm: folder.step.harm() });
    }
    let (step, did) = match &folder.step {
        Step::Add(key) => (1, folder.add(key.as_ref())?),
        Step::Switch(next) => (2, folder.switch(next, &locked)?),
        Step::Withdraw(old) => (3, folder.withdraw(old, &locked)?),
        Step::EndRetired(old) => (3, folder.end_retired(old, &locked)?),
    };
    drop(locked);
    Ok(Done { step, did, status: status(dir)? })
}

impl<'a> Folder<'a> {
    fn open(dir: &'a Path) -> Result<Self, CaError> {
        // For root, whoever owns the folder owns the keys: the user that control runs as.
        let owner = match own_user() {
            0 => fs::metadata(dir).map_err(file_error("looking at", dir))?.uid(),
            user => user,
        };
        let now = SystemTime::now();
        let probe = Identity::new(&TrustDomain::default(), "probe", "probe");
        let found = look(dir, owner)?.verify(dir, &probe, now)?;
        let recorder = match found.layout {
            Layout::OwnRoot => Recorder::in_folder(dir, owner)?,
            Layout::PlugIn => Recorder::in_memory(),
        };
        let step = match found.layout {
            Layout::OwnRoot => next_step(dir, owner, &found, &recorder.held())?,
            Layout::PlugIn => Step::Add(None),
        };
        Ok(Self { dir, owner, now, found: Arc::new(found), recorder, step })
    }

    fn status(&self) -> Status {
        let record = self.recorder.held();
        let (in_force, _) = InForce::advance(None, self.found.clone(), &mut record.clone(), self.now, true);
        let mut report = Report::of(self.dir, &in_force, &record, None, self.now);
        if self.found.layout == Layout::PlugIn {
            // Nothing is known of it here but the files.
            report.roots.iter_mut().for_each(RootReport::forget_times);
            let says = "keys come from outside".to_owned();
            let rotation = Rotation { stage: Stage::PlugIn, says, next: PLUG_IN.into(), waits: None };
            return Status { report, rotation };
        }
        let name = |cert: &Cert| cert.name.clone();
        let names = |certs: &[Cert]| certs.iter().map(name).collect::<Vec<_>>().join(" and ");
        let signs = self.signer();
        let (stage, says, next) = match &self.step {
            Step::Add(_) => (
                Stage::Settled,
                format!("nothing is being rotated, {} signs", signs.name),
                "makes a new root and has it trusted beside the present one".to_owned(),
            ),
            Step::Switch(next) => (
                Stage::NewTrusted,
                format!("step 1 of 3 is done: {} is trusted, {} signs", next.name, signs.name),
                format!("lets {} sign; {} stays trusted", next.name, signs.name),
            ),
            Step::Withdraw(old) => (
                Stage::NewSigns,
                format!("step 2 of 3 is done: {} signs, {} is trusted as well", signs.name, names(old)),
                format!("withdraws {}", names(old)),
            ),
            Step::EndRetired(old) => (
                Stage::OldRetired,
                format!(
                    "{} root(s) are no longer in the files, and trusted while certificates below them live",
                    old.len()
                ),
                "waits for their end".to_owned(),
            ),
        };
        Status { report, rotation: Rotation { stage, says, next, waits: self.waits() } }
    }

    fn signer(&self) -> &Cert {
        self.found.authority.signer()
    }

    /// Why the next step would cut somebody off.
    fn waits(&self) -> Option<String> {
        let record = self.recorder.held();
        match &self.step {
            Step::Add(_) => None,
            Step::Switch(next) => {
                let Some(announced) = record.root(next).and_then(|root| root.announced) else {
                    return Some(format!(
                        "no control has announced {} yet: `control serve` takes it up within seconds when it runs with \
                         this folder",
                        next.name
                    ));
                };
                let (announced, adoption) = (at(announced), record.adoption());
                (announced + adoption > self.now).then(|| {
                    format!(
                        "{} has been announced since {}; not before {} (three quarters of the longest certificate life \
                         later) has every proxy learnt of it",
                        next.name,
                        rfc3339(announced),
                        rfc3339(announced + adoption)
                    )
                })
            }
            Step::Withdraw(old) => old.iter().find_map(|cert| {
                let until = last_leaf(&record, &cert.fingerprint)?;
                (until > self.now)
                    .then(|| format!("certificates below {} may live until {}", cert.name, rfc3339(until)))
            }),
            Step::EndRetired(old) => {
                let until = old.iter().filter_map(|fingerprint| last_leaf(&record, fingerprint)).max()?;
                Some(format!("certificates below it may live until {}, when it ends by itself", rfc3339(until)))
            }
        }
    }

    fn add(&self, left: Option<&CaKey>) -> Result<String, CaError> {
        let path = self.dir.join(NEXT_KEY);
        let made;
        let key = match left {
            Some(key) => key,
            None => {
                made = make_key(&path, Some(self.owner))?;
                &made
            }
        };
        let unusable = |reason| CaError::Unusable { path: self.dir.join(ROOTS), reason };
        let root = make_root(key, self.now).map_err(unusable)?;
        let all = self.found.roots.iter().chain([&root]);
        self.write_roots(all)?;
        Ok(format!(
            "made {} (sha256 {}, until {}) and put it beside {}, which goes on signing. Every control that uses this \
             folder announces both; proxies renew their certificates and trust both from then on",
            root.name,
            root.fingerprint,
            rfc3339(root.not_after),
            self.signer().name
        ))
    }

    fn switch(&self, next: &Cert, locked: &fs::File) -> Result<String, CaError> {
        let (now, old) = (seconds(self.now), self.signer());
        let is_early = self.waits().is_some();
        let ((), written) = self.recorder.update_locked(locked, |record| {
            record.root_mut(old).replaced = Some(now);
            record.root_mut(next).forced |= is_early;
        });
        written?;
        let (from, to) = (self.dir.join(NEXT_KEY), self.dir.join(ROOT_KEY));
        fs::rename(&from, &to).and_then(|()| sync_folder_of(&to)).map_err(file_error("renaming to", &to))?;
        Ok(format!(
            "{} signs from now on; the key of {} is gone. It stays trusted for the certificates below it, the last of \
             which ends within {}",
            next.name,
            old.name,
            words(self.recorder.held().leaf_life())
        ))
    }

    fn withdraw(&self, old: &[Cert], locked: &fs::File) -> Result<String, CaError> {
        let now = seconds(self.now);
        let ((), written) = self.recorder.update_locked(locked, |record| {
            for cert in old {
                if last_leaf(record, &cert.fingerprint).is_some_and(|until| until > self.now) {
                    record.root_mut(cert).withdrawn = Some(now);
                }
            }
        });
        written?;
        self.write_roots(self.found.roots.iter().filter(|root| !old.contains(root)))?;
        let names: Vec<&str> = old.iter().map(|cert| cert.name.as_str()).collect();
        Ok(format!("{} is trusted no more: certificates below it are refused", names.join(" and ")))
    }

    fn end_retired(&self, old: &[String], locked: &fs::File) -> Result<String, CaError> {
        let ((), written) = self.recorder.update_locked(locked, |record| {
            for (_, known) in record.roots.iter_mut().filter(|(fingerprint, _)| old.contains(fingerprint)) {
                known.withdrawn = Some(seconds(self.now));
            }
        });
        written?;
        Ok("roots that were out of the files already are trusted no more: certificates below them are refused".into())
    }

    fn write_roots<'b>(&self, roots: impl Iterator<Item = &'b Cert>) -> Result<(), CaError> {
        let path = self.dir.join(ROOTS);
        let text: String = roots.map(|cert| cert.pem.as_str()).collect();
        write_as(&path, text.as_bytes(), 0o600, Some(self.owner)).map_err(file_error("writing", &path))
    }
}

/// Which step comes next follows from the files; of a root that has signed before, from the record.
fn next_step(dir: &Path, owner: u32, found: &Found, record: &Record) -> Result<Step, CaError> {
    let path = dir.join(NEXT_KEY);
    let unusable = |reason| CaError::Unusable { path: path.clone(), reason };
    let next = match read_if_there(&path, Guard::secret(owner))? {
        Some(text) => Some(CaKey::from_pem(&text).map_err(unusable)?),
        None => None,
    };
    if let Some(key) = next {
        let cert = found.roots.iter().find(|root| belongs(&key, root)).cloned();
        return Ok(cert.map_or(Step::Add(Some(key)), Step::Switch));
    }
    let was_replaced = |root: &&Cert| record.root(root).is_some_and(|known| known.replaced.is_some());
    let signer = found.authority.signer();
    let old: Vec<Cert> = found.roots.iter().filter(|root| *root != signer).filter(was_replaced).cloned().collect();
    if !old.is_empty() {
        return Ok(Step::Withdraw(old));
    }
    let is_retired = |known: &super::record::RootRecord| known.retired.is_some() && known.withdrawn.is_none();
    let retired: Vec<String> =
        record.roots.iter().filter(|(_, known)| is_retired(known)).map(|(print, _)| print.clone()).collect();
    Ok(if retired.is_empty() { Step::Add(None) } else { Step::EndRetired(retired) })
}

/// When the last certificate below a root ends, at the latest.
fn last_leaf(record: &Record, fingerprint: &str) -> Option<SystemTime> {
    let known = record.roots.get(fingerprint)?;
    let replaced = known.replaced.map(|since| at(since) + record.leaf_life());
    known.leaves_until.map(at).or(replaced)
}

impl Step {
    fn harm(&self) -> &'static str {
        match self {
            Self::Add(_) => "nothing is cut off",
            Self::Switch(_) => {
                "proxies that do not know the new root yet refuse the others' new certificates until they have renewed \
                 their own (those of Understory: within --renewal-window)"
            }
            Self::Withdraw(_) | Self::EndRetired(_) => {
                "who still has a certificate below the old root is refused until it is renewed (those of Understory have \
                 renewed within --renewal-window), and what has been open since before it was replaced ends"
            }
        }
    }
}

impl Status {
    /// For people.
    pub fn to_text(&self) -> String {
        let Rotation { says, next, waits, .. } = &self.rotation;
        let waits = waits.as_ref().map(|reason| format!("not yet      {reason}\n")).unwrap_or_default();
        format!("{}rotation   {says}\nnext step  {next}\n{waits}", self.report.to_text())
    }
}

fn words(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds % 3600 == 0 => format!("{} h", seconds / 3600),
        seconds => format!("{seconds} s"),
    }
}

const NEXT_KEY: &str = "next-key.pem";
const PLUG_IN: &str = "to rotate it, put the new root beside the old one in root-cert.pem; when every certificate has been \
                       renewed (three quarters of the longest life), replace ca-key.pem, ca-cert.pem and cert-chain.pem; when the \
                       last old certificate has ended, take the old root out of root-cert.pem";

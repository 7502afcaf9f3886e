//! What was done with the roots and when: the memory of a rotation, shared by all processes that use the folder.
//!
//! Must never forget that certificates of a root may still live.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::CaError;
use super::cert::Cert;
use super::files::{Guard, lock, read_if_there, write_as};
use super::layout::file_error;

/// Times are seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    pub version: u32,
    /// Seconds; the longest life of the certificates that may still live.
    pub leaf_life: u64,
    /// By fingerprint.
    pub roots: BTreeMap<String, RootRecord>,
}

/// What is known of a root beside its certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RootRecord {
    pub name: String,
    /// Since when it has been handed out as trusted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub announced: Option<u64>,
    /// When the last certificate below it ends, at the latest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leaves_until: Option<u64>,
    /// When another one was told to sign in its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<u64>,
    /// It signs although not everybody may know it yet: somebody has said so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub forced: bool,
    /// It is trusted no more although certificates below it may live: somebody has said so, then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub withdrawn: Option<u64>,
    /// Its certificate, while it is trusted and no longer in the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retired: Option<String>,
}

/// Keeps the record, in a file or only in memory.
#[derive(Debug)]
pub(super) struct Recorder {
    file: Option<File>,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    record: Record,
    /// The file lacks something of it, because it could not be written.
    unwritten: bool,
}

#[derive(Debug)]
struct File {
    dir: PathBuf,
    owner: u32,
}

impl Record {
    pub fn root(&self, cert: &Cert) -> Option<&RootRecord> {
        self.roots.get(&cert.fingerprint)
    }

    pub fn root_mut(&mut self, cert: &Cert) -> &mut RootRecord {
        let fresh = || RootRecord { name: cert.name.clone(), ..RootRecord::default() };
        self.roots.entry(cert.fingerprint.clone()).or_insert_with(fresh)
    }

    /// Takes over what another one says of certificates that may live, and roots that it has beside these.
    fn not_less_than(&mut self, other: Self) {
        self.leaf_life = self.leaf_life.max(other.leaf_life);
        for (fingerprint, root) in other.roots {
            let until = root.leaves_until;
            let held = self.roots.entry(fingerprint).or_insert(root);
            held.leaves_until = held.leaves_until.max(until);
        }
    }

    pub fn leaf_life(&self) -> Duration {
        Duration::from_secs(self.leaf_life)
    }

    /// How long a root must have been announced before it may sign: by then every certificate has been renewed at half
    /// of its life, give or take a fifth of that, with time left for further tries.
    pub fn adoption(&self) -> Duration {
        self.leaf_life().mul_f64(0.75)
    }
}

impl Held {
    /// A change that is only known here.
    fn change_unwritten<T>(&mut self, change: impl FnOnce(&mut Record) -> T) -> T {
        self.unwritten = true;
        change(&mut self.record)
    }
}

impl RootRecord {
    /// Whether certificates below it may live.
    pub fn has_leaves(&self, now: SystemTime) -> bool {
        self.leaves_until.is_some_and(|until| at(until) > now)
    }

    pub fn leaves_live_until(&mut self, end: SystemTime) {
        self.leaves_until = self.leaves_until.max(Some(seconds(end)));
    }
}

impl Recorder {
    /// In the folder, where the record of before is gone on with.
    pub fn in_folder(dir: &Path, owner: u32) -> Result<Self, CaError> {
        let file = File { dir: dir.to_owned(), owner };
        let record = file.read()?.unwrap_or_default();
        Ok(Self { file: Some(file), held: Mutex::new(Held { record, unwritten: false }) })
    }

    /// Only for as long as this process lives.
    pub fn in_memory() -> Self {
        Self { file: None, held: Mutex::default() }
    }

    pub fn is_in_folder(&self) -> bool {
        self.file.is_some()
    }

    /// As it was known last.
    pub fn held(&self) -> Record {
        self.held.lock().unwrap_or_else(PoisonError::into_inner).record.clone()
    }

    /// Changes the record, from what is in the file by now. If the file cannot be used, the change is made in memory and
    /// the error tells.
    pub fn update<T>(&self, change: impl FnOnce(&mut Record) -> T) -> (T, Result<(), CaError>) {
        // Nobody who only reads waits for another process.
        let locked = self.file.as_ref().map(|file| lock(&file.dir).map_err(file_error("locking", &file.dir)));
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match (&self.file, locked) {
            (Some(file), Some(Ok(_locked))) => Self::update_file(file, &mut held, change),
            (_, Some(Err(error))) => (held.change_unwritten(change), Err(error)),
            (_, None) | (None, _) => (change(&mut held.record), Ok(())),
        }
    }

    /// The same for who has locked the folder.
    pub fn update_locked<T>(
        &self,
        _: &std::fs::File,
        change: impl FnOnce(&mut Record) -> T,
    ) -> (T, Result<(), CaError>) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.file {
            Some(file) => Self::update_file(file, &mut held, change),
            None => (change(&mut held.record), Ok(())),
        }
    }

    fn update_file<T>(file: &File, held: &mut Held, change: impl FnOnce(&mut Record) -> T) -> (T, Result<(), CaError>) {
        let before = match file.read() {
            Ok(before) => before,
            Err(error) => return (held.change_unwritten(change), Err(error)),
        };
        // Gone: what is known here is written again.
        let is_there = before.is_some();
        let before = before.unwrap_or_else(|| held.record.clone());
        let known = std::mem::replace(&mut held.record, before.clone());
        if held.unwritten {
            held.record.not_less_than(known);
        }
        let result = change(&mut held.record);
        held.record.version = VERSION;
        let written = if held.record == before && is_there { Ok(()) } else { file.write(&held.record) };
        held.unwritten = written.is_err();
        (result, written)
    }

    /// Notes that a certificate below a root ends then, before it is handed out. What is noted is some time ahead, so
    /// that not each certificate costs a write.
    pub fn note_leaf(&self, root: &Cert, end: SystemTime, lifetime: Duration) -> Result<(), CaError> {
        let noted = |held: &Held| held.record.root(root).and_then(|root| root.leaves_until);
        if noted(&self.held.lock().unwrap_or_else(PoisonError::into_inner)) >= Some(seconds(end)) {
            return Ok(());
        }
        self.update(|record| record.root_mut(root).leaves_live_until(end + lifetime / 8)).1
    }
}

impl File {
    fn path(&self) -> PathBuf {
        self.dir.join(RECORD)
    }

    /// Nothing if it is not there, or is none: then every certificate counts as living.
    fn read(&self) -> Result<Option<Record>, CaError> {
        let path = self.path();
        let text = match read_if_there(&path, Guard::public(self.owner)) {
            Ok(Some(text)) => text,
            Ok(None) => return Ok(None),
            Err(error @ CaError::Unusable { .. }) => {
                tracing::warn!(reason = %error, "the record of the roots counts as lost");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let reason = match serde_json::from_slice::<Record>(&text) {
            Ok(record) if record.version == VERSION => return Ok(Some(record)),
            Ok(record) => format!("it is of version {}, expected {VERSION}", record.version),
            Err(error) => error.to_string(),
        };
        tracing::warn!(path = %path.display(), reason, "the record of the roots counts as lost");
        Ok(None)
    }

    fn write(&self, record: &Record) -> Result<(), CaError> {
        let path = self.path();
        // It holds text, numbers and maps with text for keys.
        let text = serde_json::to_vec_pretty(record).map_err(|e| CaError::Sign(e.to_string()))?;
        write_as(&path, &text, 0o600, Some(self.owner)).map_err(file_error("writing", &path))
    }
}

pub(super) fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

pub(super) fn seconds(time: SystemTime) -> u64 {
    // Rounded up: what lives until then still lives in that second.
    whole_seconds(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

pub(super) fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds.min(LATEST))
}

pub(super) const RECORD: &str = "ca-record.json";
const VERSION: u32 = 1;
/// The end of the year 9999, in seconds: a spoilt record may hold any number, and times are added to it.
const LATEST: u64 = 253_402_300_799;

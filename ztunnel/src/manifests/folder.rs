//! The files of one folder: when a file has been written to its end, what is in it, and what of its earlier content
//! still counts.
//!
//! Must never take a file that is being written for one that is done, nor a broken one for an empty one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::document::{self, Document, Fault, Format};
use super::objects::{Object, ObjectKey, Problem};
use super::security::{self, SecurityKind, SecurityPolicy};

/// The state of a folder's files.
#[derive(Debug)]
pub(super) struct Folder {
    dir: PathBuf,
    content: Content,
    files: BTreeMap<Arc<str>, FileState>,
    /// Files with something wrong, for a quick answer.
    faulty: BTreeSet<Arc<str>>,
    /// Why the folder itself cannot be read.
    fault: Option<String>,
    /// Files whose content is to be looked at once their time has come.
    waiting: BTreeMap<Arc<str>, Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Manifests,
    Statuses,
}

/// What is known about why a file is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Hint {
    /// Nothing: a routine look, or something happened to its name.
    Look,
    /// Somebody has it open and wrote to it.
    Writing,
    /// Its writer closed it, or it was renamed into place.
    Complete,
}

/// A file's objects, before and after.
#[derive(Debug)]
pub(super) struct FileChange {
    pub file: Arc<str>,
    pub before: Vec<ObjectKey>,
    /// With the line each is at.
    pub after: Vec<(ObjectKey, Object, usize)>,
    /// What is missing after it is really meant to go: there is nothing to wait for.
    pub settled: bool,
}

#[derive(Debug, Default)]
struct FileState {
    /// As it was when it was last read.
    read: Option<Signature>,
    /// As it was when it was last looked at.
    seen: Option<Signature>,
    /// Changed so shortly before it was read that its time stamps might not tell a further change.
    racy: bool,
    documents: Vec<Document>,
    /// Objects of an earlier version that what is broken now has to say something about.
    kept: Vec<(ObjectKey, Object)>,
    /// What is wrong with the file as a whole.
    fault: Option<Fault>,
    /// Not there any more, or about to come back, as when an editor puts a new file in its place.
    gone: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Signature {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Folder {
    pub fn new(dir: &Path, content: Content) -> Self {
        Self {
            dir: dir.to_owned(),
            content,
            files: BTreeMap::new(),
            faulty: BTreeSet::new(),
            fault: None,
            waiting: BTreeMap::new(),
        }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Reads all that is there, without waiting for anything to settle.
    pub fn load(&mut self) -> Result<Vec<FileChange>, io::Error> {
        let names = self.list()?;
        Ok(names.into_iter().filter_map(|name| self.look(name, Hint::Complete, Instant::now())).collect())
    }

    /// Looks at every file, known or new.
    pub fn scan(&mut self, now: Instant) -> Vec<FileChange> {
        let mut names = match self.list() {
            Ok(names) => names,
            Err(e) => {
                // All that was read stays: a folder that is away for a moment is no folder without files.
                self.fault = Some(format!("the folder cannot be read, its last content stays: {e}"));
                return Vec::new();
            }
        };
        self.fault = None;
        names.extend(self.files.keys().cloned());
        names.into_iter().filter_map(|name| self.look(name, Hint::Look, now)).collect()
    }

    /// Looks at one file of which something was heard.
    pub fn heard(&mut self, name: &str, hint: Hint, now: Instant) -> Option<FileChange> {
        if !self.is_ours(name) {
            return None;
        }
        self.look(name.into(), hint, now)
    }

    /// Looks at the files that were waited for.
    pub fn due(&mut self, now: Instant) -> Vec<FileChange> {
        let due: Vec<_> = self.waiting.iter().filter(|(_, at)| **at <= now).map(|(name, _)| name.clone()).collect();
        due.into_iter().filter_map(|name| self.look(name, Hint::Look, now)).collect()
    }

    /// When [`due`](Self::due) has something to do next.
    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.values().min().copied()
    }

    pub fn problems(&self, into: &mut Vec<Problem>) {
        if let Some(reason) = &self.fault {
            into.push(Problem { file: self.dir.clone(), line: None, object: None, reason: reason.clone() });
        }
        for name in &self.faulty {
            let Some(state) = self.files.get(name) else { continue };
            let faults = state.fault.iter().chain(state.documents.iter().flat_map(|d| &d.faults));
            into.extend(faults.map(|fault| Problem {
                file: self.dir.join(&**name),
                line: fault.line,
                object: fault.object.clone(),
                reason: fault.reason.clone(),
            }));
        }
    }

    /// Names of the files that count.
    pub fn list(&self) -> io::Result<BTreeSet<Arc<str>>> {
        let mut names = BTreeSet::new();
        for entry in std::fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str().filter(|n| self.is_ours(n)) {
                names.insert(name.into());
            }
        }
        Ok(names)
    }

    /// Hidden files, and with them the halves of symlink swaps and most editors' temporary files, are not ours; nor
    /// is anything with another ending.
    fn is_ours(&self, name: &str) -> bool {
        let endings: &[&str] = match self.content {
            Content::Manifests => &[".yaml", ".yml", ".json"],
            Content::Statuses => &[".yaml"],
        };
        !name.starts_with(['.', '#']) && endings.iter().any(|e| name.len() > e.len() && name.ends_with(e))
    }

    fn look(&mut self, name: Arc<str>, hint: Hint, now: Instant) -> Option<FileChange> {
        let path = self.dir.join(&*name);
        let signature = match std::fs::metadata(&path) {
            // A folder is not a file that went wrong, whatever its name.
            Ok(meta) if meta.is_dir() => return self.missing(name, now),
            Ok(meta) => Signature::of(&meta),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return self.missing(name, now),
            Err(e) => return self.refuse(name, None, fault(format!("cannot be looked at: {e}"))),
        };
        let state = self.files.entry(name.clone()).or_default();
        let moved = state.seen != Some(signature);
        (state.seen, state.gone) = (Some(signature), false);
        if state.read == Some(signature) && !state.racy && hint != Hint::Complete {
            self.waiting.remove(&name);
            return None;
        }
        // Read now what is said to be complete, and what has been waited for without a further change.
        let waited = self.waiting.get(&name).is_some_and(|at| *at <= now) && !moved;
        if hint != Hint::Complete && !waited {
            let settle = if hint == Hint::Writing { OPEN_SETTLE } else { SETTLE };
            let at = now + settle;
            if moved || hint == Hint::Writing {
                let earlier = self.waiting.get(&name).copied();
                self.waiting.insert(name, earlier.map_or(at, |e| e.max(at)));
            } else {
                self.waiting.entry(name).or_insert(at);
            }
            return None;
        }
        self.waiting.remove(&name);
        match read_file(&path) {
            Ok((text, signature, racy)) => self.take(name, &text, signature, racy),
            Err(ReadError::Gone) => self.missing(name, now),
            Err(ReadError::Moving) => {
                self.waiting.insert(name, now + SETTLE);
                None
            }
            Err(ReadError::Unusable(fault)) => self.refuse(name, Some(signature), fault),
        }
    }

    /// A new version of the file's text.
    fn take(&mut self, name: Arc<str>, text: &str, signature: Signature, racy: bool) -> Option<FileChange> {
        let (stem, format) = match (self.content, name.rsplit_once('.')) {
            (Content::Statuses, Some((stem, _))) => (stem, Format::Status),
            (Content::Manifests, Some((stem, "json"))) => (stem, Format::Json),
            (Content::Manifests, Some((stem, _))) => (stem, Format::Yaml),
            (_, None) => return None,
        };
        let state = self.files.entry(name.clone()).or_default();
        let documents = document::read(text, format, stem, &state.documents);
        if documents.is_empty() {
            let had = !state.documents.is_empty() || !state.kept.is_empty();
            state.racy = racy;
            let reason = "the file is empty, its last content stays: to delete the objects, delete the file";
            let signature = Some(signature);
            return if had { self.refuse(name, signature, fault(reason.into())) } else { self.accept_empty(name) };
        }
        let before = state.keys();
        let earlier = state.take_objects();
        (state.read, state.racy, state.documents, state.fault) = (Some(signature), racy, documents, None);
        state.kept = kept(&state.documents, earlier);
        self.note(&name);
        self.change(name, before)
    }

    /// The file was there and had nothing in it before either.
    fn accept_empty(&mut self, name: Arc<str>) -> Option<FileChange> {
        let state = self.files.entry(name.clone()).or_default();
        (state.read, state.fault) = (state.seen, None);
        self.note(&name);
        None
    }

    /// The file cannot be used at all: what it gave before stays, and if there are no policies in that, something stands
    /// for those that it seems to hold.
    fn refuse(&mut self, name: Arc<str>, signature: Option<Signature>, fault: Fault) -> Option<FileChange> {
        self.waiting.remove(&name);
        let state = self.files.entry(name.clone()).or_default();
        let before = state.keys();
        state.read = signature;
        state.kept = state.take_objects();
        if !state.kept.iter().any(|(key, _)| SecurityKind::of(key).is_some()) {
            state.kept.extend(stand_ins(&fault));
        }
        (state.documents, state.fault) = (Vec::new(), Some(fault));
        self.note(&name);
        self.change(name, before)
    }

    /// The file is not there: believed after a moment, so that an editor's way of saving deletes nothing. A status is
    /// written in one piece by one writer: there is nothing to wait for.
    fn missing(&mut self, name: Arc<str>, now: Instant) -> Option<FileChange> {
        let Some(state) = self.files.get_mut(&name) else {
            self.waiting.remove(&name);
            return None;
        };
        let waited = state.gone && self.waiting.get(&name).is_some_and(|at| *at <= now);
        if !waited && self.content == Content::Manifests {
            if !state.gone {
                (state.gone, state.seen, state.read) = (true, None, None);
                self.waiting.insert(name, now + GRACE);
            }
            return None;
        }
        let before = state.keys();
        self.waiting.remove(&name);
        self.faulty.remove(&name);
        self.files.remove(&name);
        Some(FileChange { file: name, before, after: Vec::new(), settled: true })
    }

    fn note(&mut self, name: &Arc<str>) {
        let state = self.files.get(name);
        if state.is_some_and(|s| s.fault.is_some() || s.documents.iter().any(|d| !d.faults.is_empty())) {
            self.faulty.insert(name.clone());
        } else {
            self.faulty.remove(name);
        }
    }

    fn change(&self, name: Arc<str>, before: Vec<ObjectKey>) -> Option<FileChange> {
        let state = self.files.get(&name)?;
        let given = state.documents.iter().flat_map(|d| d.objects.iter().map(|(k, o)| (k.clone(), o.clone(), d.line)));
        let kept = state.kept.iter().map(|(k, o)| (k.clone(), o.clone(), 0));
        let after = given.chain(kept).collect();
        Some(FileChange { file: name, before, after, settled: self.content == Content::Statuses })
    }
}

impl FileState {
    fn keys(&self) -> Vec<ObjectKey> {
        let given = self.documents.iter().flat_map(|d| &d.objects);
        given.chain(&self.kept).map(|(key, _)| key.clone()).collect()
    }

    fn take_objects(&mut self) -> Vec<(ObjectKey, Object)> {
        let mut objects = std::mem::take(&mut self.kept);
        objects.extend(self.documents.iter().flat_map(|d| d.objects.iter().cloned()));
        objects
    }
}

/// Which earlier objects stay because something is broken now: those that are named by what is broken, or all that
/// are missing if what is broken cannot be named. A policy of which there is no earlier version has a stand-in.
fn kept(documents: &[Document], earlier: Vec<(ObjectKey, Object)>) -> Vec<(ObjectKey, Object)> {
    let faults: Vec<&Fault> = documents.iter().flat_map(|d| &d.faults).collect();
    if faults.is_empty() {
        return Vec::new();
    }
    let given: BTreeSet<&ObjectKey> = documents.iter().flat_map(|d| d.objects.iter().map(|(k, _)| k)).collect();
    let named: BTreeSet<&ObjectKey> = faults.iter().filter_map(|f| f.object.as_ref()).collect();
    let any = faults.iter().any(|f| f.object.is_none());
    let stays = |(key, object): &(ObjectKey, Object)| {
        !object.is_stand_in() && !given.contains(key) && (any || named.contains(key))
    };
    let mut kept: Vec<_> = earlier.into_iter().filter(stays).collect();
    let was_policy = kept.iter().any(|(key, _)| SecurityKind::of(key).is_some());
    for fault in faults.into_iter().filter(|f| f.object.is_some() || !was_policy) {
        for (key, object) in stand_ins(fault) {
            if !given.contains(&key) && !kept.iter().any(|(held, _)| *held == key) {
                kept.push((key, object));
            }
        }
    }
    kept
}

/// What stands for the policies that a fault hides.
fn stand_ins(fault: &Fault) -> impl Iterator<Item = (ObjectKey, Object)> {
    fault.policies.iter().filter_map(SecurityKind::of).map(|(kind, name)| {
        let policy = SecurityPolicy::stand_in(name, &fault.reason);
        (kind.key(name.clone()), Object::policy(kind, policy))
    })
}

impl Signature {
    fn of(meta: &Metadata) -> Self {
        Self {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.size(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }
}

enum ReadError {
    Gone,
    /// Changed while it was read.
    Moving,
    Unusable(Fault),
}

fn read_file(path: &Path) -> Result<(String, Signature, bool), ReadError> {
    let unusable = |reason: String| ReadError::Unusable(fault(reason));
    // Not blocking, so that a named pipe does not hold up everything.
    let mut file: File = match OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)
    {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(ReadError::Gone),
        Err(e) => return Err(unusable(format!("cannot be opened: {e}"))),
    };
    let meta = file.metadata().map_err(|e| unusable(format!("cannot be looked at: {e}")))?;
    if !meta.is_file() {
        return Err(unusable("is not a regular file".into()));
    }
    let too_large = || unusable(format!("is larger than {} MiB", MAX_FILE >> 20));
    if meta.len() > MAX_FILE {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(meta.len() as usize + 1);
    file.by_ref().take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| unusable(format!("cannot be read: {e}")))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(too_large());
    }
    let signature = Signature::of(&meta);
    if file.metadata().map(|m| Signature::of(&m)).ok() != Some(signature) {
        return Err(ReadError::Moving);
    }
    let racy = meta.modified().is_ok_and(|at| {
        // A clock that went back makes it younger than now: also a reason to look again.
        SystemTime::now().duration_since(at).is_ok_and(|age| age < CLOCK_GRAIN)
    });
    match String::from_utf8(bytes) {
        Ok(text) => Ok((text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text), signature, racy)),
        Err(e) => {
            let good = &e.as_bytes()[..e.utf8_error().valid_up_to()];
            let line = 1 + good.iter().filter(|b| **b == b'\n').count();
            // In UTF-16 every other byte of most texts is zero.
            let text = String::from_utf8_lossy(e.as_bytes()).replace('\0', "");
            let policies = security::stand_ins(&text, &path.to_string_lossy(), line);
            Err(ReadError::Unusable(Fault { line: Some(line), policies, ..fault("is not UTF-8 text".into()) }))
        }
    }
}

fn fault(reason: String) -> Fault {
    Fault { line: None, object: None, reason, policies: Vec::new() }
}

/// How long a file that is not there is still counted on.
pub(super) const GRACE: Duration = Duration::from_millis(100);
/// A file of which only a change of its stamps is known is read when they have been the same for so long.
const SETTLE: Duration = Duration::from_millis(200);
/// A file that somebody writes to and has not closed is read when nothing has been written for so long.
const OPEN_SETTLE: Duration = Duration::from_secs(2);
/// Time stamps of files move in steps of up to so much.
const CLOCK_GRAIN: Duration = Duration::from_millis(20);
/// Room for some 60,000 pods in one file.
const MAX_FILE: u64 = 64 << 20;

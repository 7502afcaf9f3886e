//! Files that are there whole or not at all, and that nobody else can read or replace.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use zeroize::Zeroizing;

use super::CaError;

/// Writes a file whole or not at all: beside, then renamed into place. `mode` holds from the first byte on.
pub fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    write_as(path, bytes, mode, None)
}

/// The same, for another user where it must be readable to him. Only root can.
pub(super) fn write_as(path: &Path, bytes: &[u8], mode: u32, owner: Option<u32>) -> io::Result<()> {
    let fresh = beside(path)?;
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh).and_then(|mut file| {
        if let Some(owner) = owner.filter(|owner| *owner != own_user()) {
            fchown(&file, Some(owner), None)?;
        }
        file.write_all(bytes)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&fresh, path)).and_then(|()| sync_folder_of(path));
    if renamed.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    renamed
}

/// Where a file is written before it is renamed into place: a name that no other process takes, though in containers all
/// may have one number.
pub(crate) fn beside(path: &Path) -> io::Result<PathBuf> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let (process, number) = (std::process::id(), ztunnel::random::next_u64());
    Ok(path.with_file_name(format!(".{name}.{process}-{number:016x}{UNFINISHED}")))
}

/// Removes what processes that were killed have left beside the files of a folder. What is younger than a minute may be
/// in the hands of another process.
pub(crate) fn sweep_unfinished(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let is_ours = entry.file_name().to_str().is_some_and(is_beside);
        let age = entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed().unwrap_or_default());
        if is_ours && age.is_ok_and(|age| age > LONGEST_WRITE) {
            // Only space is lost if it stays.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether it is a name as [`beside`] makes them.
fn is_beside(name: &str) -> bool {
    let parts = name.strip_prefix('.').and_then(|name| name.strip_suffix(UNFINISHED));
    let Some((_, (process, number))) =
        parts.and_then(|name| name.rsplit_once('.')).and_then(|(of, ours)| Some((of, ours.split_once('-')?)))
    else {
        return false;
    };
    process.bytes().all(|b| b.is_ascii_digit()) && number.len() == 16 && number.bytes().all(|b| b.is_ascii_hexdigit())
}

/// A rename lasts once the folder has been written.
pub(super) fn sync_folder_of(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

/// Makes sure that of several processes one at a time changes files in the folder. Held until it is dropped. Who holds it
/// for long (a process that was stopped) is not waited for.
pub(super) fn lock(dir: &Path) -> io::Result<File> {
    lock_within(dir, LOCK_LIMIT)
}

pub(super) fn lock_within(dir: &Path, limit: Duration) -> io::Result<File> {
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .custom_flags(NOFOLLOW)
        .open(dir.join(LOCK))?;
    let started = Instant::now();
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if started.elapsed() < limit => std::thread::sleep(LOCK_PAUSE),
            Err(Errno::WOULDBLOCK) => {
                let reason = format!("another process has held {LOCK} for {limit:?}");
                return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Who may do what with a file of the authority.
#[derive(Debug, Clone, Copy)]
pub(super) struct Guard {
    /// Who must own it; root may as well.
    pub owner: u32,
    /// Mode bits that it must not have.
    pub forbidden: u32,
    /// The mode to tell in an error.
    pub expected: u32,
}

impl Guard {
    /// For a key that only its owner may read.
    pub fn secret(owner: u32) -> Self {
        Self { owner, forbidden: 0o077, expected: 0o600 }
    }

    /// For what others may read and not write. Keys in a mounted Secret are such: nobody else sees the mount.
    pub fn public(owner: u32) -> Self {
        Self { owner, forbidden: 0o022, expected: 0o644 }
    }

    fn check(self, path: &Path, owner: u32, mode: u32) -> Result<(), CaError> {
        let wrong = |reason: String| Err(CaError::Unusable { path: path.to_owned(), reason });
        if owner != self.owner && owner != 0 {
            return wrong(format!("user {owner} owns it, expected user {} or root: chown it", self.owner));
        }
        let mode = mode & 0o7777;
        if mode & self.forbidden != 0 {
            let what = if mode & self.forbidden & 0o022 != 0 { "write" } else { "read" };
            let expected = self.expected;
            return wrong(format!(
                "its mode is {mode:04o}, so that others can {what} it, expected {expected:04o}: chmod it"
            ));
        }
        Ok(())
    }
}

/// Reads a file that is guarded so, to its end.
pub(super) fn read(path: &Path, guard: Guard) -> Result<Zeroizing<Vec<u8>>, CaError> {
    let fail = |source| CaError::File { step: "reading", path: path.to_owned(), source };
    // A named pipe has no end: it is not waited for.
    let file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path).map_err(fail)?;
    // Of the file that is open, whatever the name stands for by now.
    let meta = file.metadata().map_err(fail)?;
    let too_large = || {
        let reason = format!("expected a regular file of at most {MAX_FILE} bytes");
        CaError::Unusable { path: path.to_owned(), reason }
    };
    if !meta.is_file() || meta.len() > MAX_FILE {
        return Err(too_large());
    }
    guard.check(path, meta.uid(), meta.mode())?;
    let mut text = Zeroizing::new(Vec::with_capacity(meta.len() as usize + 1));
    file.take(MAX_FILE + 1).read_to_end(&mut text).map_err(fail)?;
    if text.len() as u64 > MAX_FILE {
        return Err(too_large());
    }
    Ok(text)
}

/// The same of a file that need not be there.
pub(super) fn read_if_there(path: &Path, guard: Guard) -> Result<Option<Zeroizing<Vec<u8>>>, CaError> {
    match read(path, guard) {
        Ok(text) => Ok(Some(text)),
        Err(CaError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A folder in which others can put files is no place for keys.
pub(super) fn check_folder(dir: &Path, owner: u32) -> Result<(), CaError> {
    let meta =
        fs::metadata(dir).map_err(|source| CaError::File { step: "looking at", path: dir.to_owned(), source })?;
    if !meta.is_dir() {
        return Err(CaError::Unusable { path: dir.to_owned(), reason: "expected a folder".into() });
    }
    Guard { owner, forbidden: 0o022, expected: 0o700 }.check(dir, meta.uid(), meta.mode())
}

/// The user that this process runs as.
pub(super) fn own_user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Written by every process that changes files of the folder, and never read.
pub(super) const LOCK: &str = ".lock";
/// Each change takes some milliseconds.
const LOCK_LIMIT: Duration = Duration::from_secs(5);
const LOCK_PAUSE: Duration = Duration::from_millis(5);
/// How the name of a file ends that is not in place yet.
const UNFINISHED: &str = ".new";
/// No write takes longer.
const LONGEST_WRITE: Duration = Duration::from_secs(60);
const MAX_FILE: u64 = 1 << 20;
const NONBLOCK: i32 = (rustix::fs::OFlags::NONBLOCK.bits() | rustix::fs::OFlags::NOCTTY.bits()) as i32;
const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits() as i32;

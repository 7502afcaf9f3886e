//! Files that are there whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file whole or not at all: beside, then renamed into place. `mode` holds from the first byte on.
pub fn write_whole(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    // Of two processes that write at once, each has its own.
    let fresh = path.with_file_name(format!(".{name}.{}.new", std::process::id()));
    let _ = fs::remove_file(&fresh);
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(&fresh).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    let renamed = written.and_then(|()| fs::rename(&fresh, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    renamed
}

/// Makes sure that of several processes one at a time makes files in the folder. Held until it is dropped.
pub(super) fn lock(dir: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(dir.join(".lock"))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
    Ok(file)
}

//! Small files that pass from one process to another: tokens, roots, keys, statuses, records.
//!
//! Must never wait for one (a named pipe has no end), nor take more of one into memory than it can rightly hold, nor show
//! a half-written one.

use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The whole of a regular file of at most `limit` bytes.
///
/// Fails with [`io::ErrorKind::InvalidData`] where it is larger or no regular file.
pub fn read_small(path: &Path, limit: usize) -> io::Result<Vec<u8>> {
    let unusable = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let meta = file.metadata()?;
    if !meta.is_file() {
        return unusable("it is not a regular file".into());
    }
    // Some file systems give no size beforehand.
    let mut bytes = Vec::with_capacity(limit.min(meta.len() as usize + 1));
    file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > limit {
        return unusable(format!("it is larger than {limit} bytes"));
    }
    Ok(bytes)
}

/// The same for text.
pub fn read_small_text(path: &Path, limit: usize) -> io::Result<String> {
    String::from_utf8(read_small(path, limit)?)
        .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is not UTF-8 text"))
}

/// Makes `bytes` the content of a file: beside it, in `temporary`, then renamed into place. A file that has this content
/// is left alone, which needs no room on the disk.
pub fn write_if_changed(path: &Path, temporary: &Path, bytes: &[u8]) -> io::Result<()> {
    if read_small(path, bytes.len()).is_ok_and(|held| held == bytes) {
        return Ok(());
    }
    let renamed = fs::write(temporary, bytes).and_then(|()| fs::rename(temporary, path));
    if renamed.is_err() {
        // What there is of it takes room that may be what is missing.
        let _ = fs::remove_file(temporary);
    }
    renamed
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    #[test]
    fn what_is_no_small_regular_file_is_refused_at_once() {
        let dir = std::env::temp_dir().join(format!("understory-files-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("file");
        std::fs::write(&file, "12345678").unwrap();
        assert_eq!(read_small_text(&file, 8).unwrap(), "12345678");
        assert!(read_small(&file, 7).unwrap_err().to_string().contains("larger than 7"));
        std::fs::write(&file, [0xff]).unwrap();
        assert!(read_small_text(&file, 8).unwrap_err().to_string().contains("UTF-8"));
        let pipe = dir.join("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        for odd in [pipe.as_path(), dir.as_path(), Path::new("/dev/zero")] {
            assert_eq!(read_small(odd, 8).unwrap_err().kind(), io::ErrorKind::InvalidData, "{}", odd.display());
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_file_is_written_whole_and_only_where_it_changes() {
        use std::os::unix::fs::MetadataExt;
        let dir = std::env::temp_dir().join(format!("understory-files-write-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let (file, temporary) = (dir.join("file"), dir.join("file.new"));
        write_if_changed(&file, &temporary, b"one").unwrap();
        let first = std::fs::metadata(&file).unwrap().ino();
        write_if_changed(&file, &temporary, b"one").unwrap();
        assert_eq!(std::fs::metadata(&file).unwrap().ino(), first);
        write_if_changed(&file, &temporary, b"two").unwrap();
        assert_eq!((std::fs::read(&file).unwrap(), temporary.exists()), (b"two".to_vec(), false));
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir_all(file.join("in the way")).unwrap();
        assert!(write_if_changed(&file, &temporary, b"two").is_err() && !temporary.exists());
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

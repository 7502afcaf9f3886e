//! The pins in bpffs that keep maps and links alive without a process: `v<layout version>/maps` and `links`.
//!
//! Must never let go of a link before the one in its place is attached.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ebpf::LAYOUT_VERSION;
use rustix::fs::FlockOperation;

use super::attach::{self, Hook};
use super::bpf::{self, BpfMap, open_pin};
use super::error::CaptureError;
use super::object::MAPS;

/// The pins of this layout version.
#[derive(Debug)]
pub struct Pins {
    dir: PathBuf,
}

/// As long as it lives, no other process sets up the same pins.
#[derive(Debug)]
pub struct Turn {
    _lock: File,
}

/// What a program is attached to.
pub struct Target<'a> {
    pub fd: BorrowedFd<'a>,
    /// Number of the cgroup, or inode of the netns.
    pub id: u64,
    pub name: &'a str,
}

impl Pins {
    /// Makes the folders, also mounts the bpffs where it can; mends what a crash has left half-done.
    pub fn open(bpf_dir: &Path) -> Result<(Self, Turn), CaptureError> {
        need_bpffs(bpf_dir)?;
        let dir = bpf_dir.join(format!("v{LAYOUT_VERSION}"));
        for sub in ["links", "maps"] {
            let path = dir.join(sub);
            fs::create_dir_all(&path).map_err(|e| CaptureError::pin("making", &path, e))?;
        }
        let turn = Turn::wait(&dir)?;
        let pins = Self { dir };
        pins.finish_links()?;
        Ok((pins, turn))
    }

    pub fn maps(&self) -> PathBuf {
        self.dir.join("maps")
    }

    pub fn map<K: bpf::Plain, V: bpf::Plain>(&self, name: &'static str) -> Result<BpfMap<K, V>, CaptureError> {
        BpfMap::open(&self.maps().join(name)).map_err(|source| CaptureError::Map { name, source })
    }

    /// A descriptor of a link, none if there is no such pin.
    pub fn link(&self, name: &str) -> Result<Option<OwnedFd>, CaptureError> {
        let path = self.link_path(name);
        match open_pin(&path) {
            Ok(link) => Ok(Some(link)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(CaptureError::pin("opening", &path, e)),
        }
    }

    /// Names of all links.
    pub fn links(&self) -> Result<Vec<String>, CaptureError> {
        let path = self.dir.join("links");
        let error = |e| CaptureError::pin("listing", &path, e);
        let entries = fs::read_dir(&path).map_err(error)?;
        let names = entries.map(|entry| Ok(entry.map_err(error)?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    /// Lets a link go: what it attached is detached.
    pub fn remove_link(&self, name: &str) -> Result<(), CaptureError> {
        unpin(&self.link_path(name))
    }

    /// Removes the pins of other layout versions.
    pub fn remove_other_versions(&self) -> Result<(), CaptureError> {
        let Some(all) = self.dir.parent() else { return Ok(()) };
        for entry in fs::read_dir(all).map_err(|e| CaptureError::pin("listing", all, e))? {
            let entry = entry.map_err(|e| CaptureError::pin("listing", all, e))?;
            let (name, path) = (entry.file_name(), entry.path());
            // A bpffs has files of its own in its root.
            let is_version = name.to_str().and_then(|name| name.strip_prefix('v')?.parse::<u32>().ok()).is_some();
            if is_version && path != self.dir {
                fs::remove_dir_all(&path).map_err(|e| CaptureError::pin("removing", &path, e))?;
            }
        }
        Ok(())
    }

    /// Makes `program` the one that is attached to the target under this pin: nothing to do, an exchange inside the
    /// link, or a new link that takes the place of one that belongs elsewhere. Gives the link.
    pub fn attach(
        &self,
        pin: &str,
        hook: Hook,
        program: BorrowedFd<'_>,
        target: Target<'_>,
    ) -> Result<OwnedFd, CaptureError> {
        let error = |e| CaptureError::attach(pin, target.name, e);
        let path = self.link_path(pin);
        match open_pin(&path).and_then(|link| Ok((attach::link_state(link.as_fd())?, link))) {
            Ok((state, link)) if state.hook == hook as u32 && state.target == target.id => {
                self.exchange(&link, state.program, program).map_err(error)?;
                return Ok(link);
            }
            Ok(_) => {}
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => {}
            Err(e) => return Err(CaptureError::pin("opening", &path, e)),
        }
        let link = attach::link(program, target.fd, hook).map_err(error)?;
        let fresh = self.link_path(&format!("{UNFINISHED}{pin}"));
        bpf::pin(link.as_fd(), &fresh).map_err(|e| CaptureError::pin("pinning", &fresh, e))?;
        fs::rename(&fresh, &path).map_err(|e| CaptureError::pin("renaming to", &path, e))?;
        Ok(link)
    }

    /// Pins a map again whose pin somebody has removed.
    pub fn put_back_map(&self, name: &str, map: BorrowedFd<'_>) -> Result<(), CaptureError> {
        put_back(&self.maps().join(name), map)
    }

    /// The same for a link that is attached still.
    pub fn put_back_link(&self, name: &str, link: BorrowedFd<'_>) -> Result<(), CaptureError> {
        if attach::link_state(link).is_ok_and(|state| state.target != 0) {
            put_back(&self.link_path(name), link)?;
        }
        Ok(())
    }

    /// Puts `new` into the link, unless what runs there is the same.
    pub fn exchange(&self, link: &OwnedFd, old: u32, new: BorrowedFd<'_>) -> io::Result<()> {
        let old = attach::program_state(attach::program(old)?.as_fd())?;
        let state = attach::program_state(new)?;
        // Maps that are not pinned hold constants.
        let mut pinned = self.map_ids()?.into_iter().filter(|id| state.maps.contains(id));
        let same_maps = pinned.all(|id| old.maps.contains(&id));
        if old.tag == state.tag && same_maps {
            return Ok(());
        }
        attach::update(link.as_fd(), new)
    }

    fn map_ids(&self) -> io::Result<Vec<u32>> {
        MAPS.into_iter().map(|name| bpf::map_id(open_pin(&self.maps().join(name))?.as_fd())).collect()
    }

    fn link_path(&self, name: &str) -> PathBuf {
        self.dir.join("links").join(name)
    }

    /// A crash between pinning and renaming leaves the new link under its first name: it takes its place, unless the
    /// old one still stands.
    fn finish_links(&self) -> Result<(), CaptureError> {
        for unfinished in self.links()? {
            let Some(name) = unfinished.strip_prefix(UNFINISHED) else { continue };
            let (path, place) = (self.link_path(&unfinished), self.link_path(name));
            if place.exists() {
                unpin(&path)?;
            } else {
                fs::rename(&path, &place).map_err(|e| CaptureError::pin("renaming to", &place, e))?;
            }
        }
        Ok(())
    }
}

impl Turn {
    fn wait(dir: &Path) -> Result<Self, CaptureError> {
        let file = File::open(dir).map_err(|e| CaptureError::pin("opening", dir, e))?;
        let until = Instant::now() + TURN_WAIT;
        loop {
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Self { _lock: file }),
                Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => std::thread::sleep(TURN_POLL),
                Err(rustix::io::Errno::WOULDBLOCK) => return Err(CaptureError::InUse(dir.to_owned())),
                Err(e) => return Err(CaptureError::pin("locking", dir, e.into())),
            }
        }
    }
}

fn put_back(path: &Path, object: BorrowedFd<'_>) -> Result<(), CaptureError> {
    match bpf::pin(object, path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => Err(CaptureError::pin("pinning", path, e)),
        _ => Ok(()),
    }
}

fn unpin(path: &Path) -> Result<(), CaptureError> {
    match fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(CaptureError::pin("removing", path, source)),
        _ => Ok(()),
    }
}

pub fn need_cgroup2(root: &Path) -> Result<(), CaptureError> {
    match rustix::fs::statfs(root) {
        Ok(stat) if stat.f_type as u64 == CGROUP2_MAGIC => Ok(()),
        _ => Err(CaptureError::NoCgroup2(root.to_owned())),
    }
}

/// Makes the folder; mounts a bpffs at `/sys/fs/bpf` where that is what is missing.
fn need_bpffs(dir: &Path) -> Result<(), CaptureError> {
    let no_bpffs = |e: io::Error| CaptureError::NoBpffs(dir.to_owned(), e);
    if !is_in_bpffs(dir) {
        if !dir.starts_with(BPFFS) {
            return Err(no_bpffs(io::Error::other("it is not below /sys/fs/bpf")));
        }
        // Two processes that mount one over the other would lose sight of each other's pins.
        let place = File::open(BPFFS).map_err(no_bpffs)?;
        rustix::fs::flock(&place, FlockOperation::LockExclusive).map_err(|e| no_bpffs(e.into()))?;
        if !is_in_bpffs(dir) {
            let none: Option<&std::ffi::CStr> = None;
            rustix::mount::mount("bpf", BPFFS, "bpf", rustix::mount::MountFlags::empty(), none)
                .map_err(|e| no_bpffs(e.into()))?;
        }
    }
    fs::create_dir_all(dir).map_err(no_bpffs)
}

fn is_in_bpffs(dir: &Path) -> bool {
    let above = dir.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    rustix::fs::statfs(above).is_ok_and(|stat| stat.f_type as u64 == BPF_MAGIC)
}

const UNFINISHED: &str = "new-";
const BPFFS: &str = "/sys/fs/bpf";
const BPF_MAGIC: u64 = 0xcafe_4a11;
const CGROUP2_MAGIC: u64 = 0x6367_7270;
const TURN_WAIT: Duration = Duration::from_secs(10);
const TURN_POLL: Duration = Duration::from_millis(20);

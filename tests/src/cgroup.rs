//! cgroup v2 groups of a testbed: nodes, pods and containers, named as kubelet names them.

use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::wait::wait_until;

/// A cgroup v2 directory.
#[derive(Debug, Clone)]
pub struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes the group and all above it.
    pub(crate) fn create(path: PathBuf) -> Self {
        fs::create_dir_all(&path).unwrap_or_else(|e| panic!("make cgroup {}: {e}", path.display()));
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A group below it.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self::create(self.0.join(name))
    }

    /// What a process writes `0` into to join.
    pub(crate) fn procs_file(&self) -> File {
        let path = self.0.join("cgroup.procs");
        OpenOptions::new().write(true).open(&path).unwrap_or_else(|e| panic!("open {}: {e}", path.display()))
    }

    /// The id that `bpf_get_current_cgroup_id` gives for a process in it.
    pub fn id(&self) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(&self.0).unwrap_or_else(|e| panic!("stat cgroup {}: {e}", self.0.display())).ino()
    }

    /// Processes in the group itself.
    pub fn processes(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }

    /// CPU time that everything at and below the group has used.
    pub fn cpu(&self) -> Duration {
        let path = self.0.join("cpu.stat");
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        let usage = text.lines().find_map(|line| line.strip_prefix("usage_usec "));
        Duration::from_micros(usage.and_then(|n| n.parse().ok()).expect("cpu.stat has usage_usec"))
    }

    /// Kills everything at and below the group and waits until it is gone.
    pub(crate) fn kill(&self) {
        if fs::write(self.0.join("cgroup.kill"), "1").is_err() {
            return;
        }
        let _ = wait_until(Duration::from_secs(10), || {
            let events = fs::read_to_string(self.0.join("cgroup.events")).unwrap_or_default();
            (!events.contains("populated 1")).then_some(())
        });
    }

    /// Removes the group and all below it; they must be empty.
    pub(crate) fn remove(&self) {
        remove_tree(&self.0);
    }
}

/// The cgroup v2 mount of this machine.
pub fn cgroup2_root() -> PathBuf {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("/proc/self/mountinfo can be read");
    // Fields: id, parent, device, root, mount point, options, … - type, source, options.
    mounts
        .lines()
        .filter_map(|line| {
            let (front, back) = line.split_once(" - ")?;
            let fields: Vec<&str> = front.split(' ').collect();
            (back.starts_with("cgroup2 ") && fields.get(3) == Some(&"/")).then(|| PathBuf::from(fields[4]))
        })
        .next()
        .expect("no cgroup v2 hierarchy is mounted: `cargo xtask setup` mounts one")
}

fn remove_tree(path: &Path) {
    let Ok(entries) = fs::read_dir(path) else { return };
    for entry in entries.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            remove_tree(&entry.path());
        }
    }
    // A group stays busy for a moment after its last process.
    let _ = wait_until(Duration::from_secs(5), || match fs::remove_dir(path) {
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => None,
        _ => Some(()),
    });
}

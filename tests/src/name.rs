//! The name of a testbed, and what everything that it makes on the machine is called.
//!
//! A name says who owns it (process id and start time), so that what a killed test left behind can be told from
//! what a running one uses. Nothing may be made on the machine under any other name.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Where `ip netns` keeps named network namespaces.
pub(crate) const NETNS_DIR: &str = "/run/netns";
/// Where the BPF file system is expected.
pub(crate) const BPF_DIR: &str = "/sys/fs/bpf";

const NETNS_PREFIX: &str = "us-";
const PREFIX: &str = "understory-";

/// `<pid>-<start time of the process>-<number within the process>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TestbedName {
    pid: u32,
    start: u64,
    number: u32,
}

impl TestbedName {
    /// A name that no other testbed of this machine has.
    pub(crate) fn fresh() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let pid = std::process::id();
        let start = start_time(pid).expect("/proc/self/stat has no start time: is /proc mounted?");
        Self { pid, start, number: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    /// Name of the network namespace of one part (a node, a pod) of this testbed.
    pub fn netns(&self, part: &str) -> String {
        format!("{NETNS_PREFIX}{self}-{part}")
    }

    /// Directory of everything that the testbed writes: manifests, status, logs, keys.
    pub fn dir(&self) -> PathBuf {
        std::env::temp_dir().join(format!("{PREFIX}{self}"))
    }

    /// The testbed's cgroup below the cgroup v2 root.
    pub fn cgroup(&self, root: &Path) -> PathBuf {
        root.join(format!("{PREFIX}{self}"))
    }

    /// Directory of a node's pinned eBPF objects.
    pub fn bpf_dir(&self, node: &str) -> PathBuf {
        Path::new(BPF_DIR).join(format!("{PREFIX}{self}-{node}"))
    }

    /// A uid in the form of Kubernetes, unique on the machine.
    pub(crate) fn uid(&self, counter: u32) -> String {
        let start = self.start & 0xffff_ffff_ffff;
        format!("{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}", self.pid, counter, self.number & 0xfff, counter >> 16, start)
    }

    /// Is the process that made it still there?
    pub(crate) fn owner_lives(&self) -> bool {
        start_time(self.pid) == Some(self.start)
    }

    /// The testbed that a file name of ours belongs to; `None` for everything that is not ours.
    pub fn of_file(name: &str) -> Option<Self> {
        let rest = name.strip_prefix(PREFIX).or_else(|| name.strip_prefix(NETNS_PREFIX))?;
        let mut parts = rest.splitn(4, '-');
        let mut number = || parts.next()?.parse::<u64>().ok();
        Some(Self { pid: number()?.try_into().ok()?, start: number()?, number: number()?.try_into().ok()? })
    }
}

impl fmt::Display for TestbedName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.pid, self.start, self.number)
    }
}

/// Start time of a process in clock ticks since boot: together with the pid it is never used twice.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the command in brackets and may itself hold spaces and brackets.
    let after_command = &stat[stat.rfind(')')? + 2..];
    after_command.split(' ').nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_leads_back_to_its_testbed() {
        let name = TestbedName::fresh();
        let file = |path: PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        for made in [
            name.netns("node1"),
            name.netns("shop.web-1"),
            file(name.dir()),
            file(name.cgroup(Path::new("/x"))),
            file(name.bpf_dir("node1")),
        ] {
            assert_eq!(TestbedName::of_file(&made).as_ref(), Some(&name), "{made}");
        }
        assert!(name.owner_lives());
    }

    #[test]
    fn names_of_others_are_not_ours() {
        for other in ["understory", "us-", "us-1-2", "us-east-1-2", "understory-system", "cni-1-2-3", "v1"] {
            assert_eq!(TestbedName::of_file(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_that_ended_owns_nothing() {
        let mut name = TestbedName::fresh();
        name.start += 1;
        assert!(!name.owner_lives(), "a pid used again must not keep a dead testbed alive");
    }
}

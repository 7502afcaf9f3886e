//! The memory that the process may use, and whether that is about to run out.

use std::fs;
use std::path::{Path, PathBuf};

/// A limit, and how what is in use is found out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Memory {
    most: u64,
    /// The own cgroup, if the limit is its.
    cgroup: Option<PathBuf>,
}

impl Memory {
    /// A limit in bytes, against which the resident memory counts.
    pub fn of(most: u64) -> Self {
        Self { most, cgroup: None }
    }

    /// The limit of the own cgroup, where the kernel counts its sockets' buffers too. Nothing if there is none.
    pub fn of_cgroup() -> Option<Self> {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
        let root = Path::new(CGROUPS);
        // The second is right where only the container's own part is mounted.
        [root.join(own), root.to_owned()].into_iter().find_map(|dir| {
            let most = number(&dir.join("memory.max"))?;
            Some(Self { most, cgroup: Some(dir) })
        })
    }

    /// Bytes.
    pub fn most(&self) -> u64 {
        self.most
    }

    /// Bytes in use now; nothing if that cannot be read. Pages of files that the kernel would give up do not count.
    pub fn used(&self) -> Option<u64> {
        let Some(dir) = &self.cgroup else { return resident() };
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let spare = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok()).unwrap_or(0);
        Some(number(&dir.join("memory.current"))?.saturating_sub(spare))
    }

    /// Whether so much is in use that nothing new should be begun.
    pub fn is_short(&self) -> bool {
        self.used().is_some_and(|used| used / FULL.0 >= self.most / FULL.1)
    }
}

/// The process's memory in RAM, bytes; nothing if it cannot be read.
pub fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(resident.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// Of the memory; what is established needs room to grow into.
const FULL: (u64, u64) = (9, 10);
const CGROUPS: &str = "/sys/fs/cgroup";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_from_nine_tenths_on() {
        let used = Memory::of(u64::MAX).used().unwrap();
        assert!(used > 1 << 20, "{used}");
        assert!(!Memory::of(used * 4).is_short());
        assert!(Memory::of(used / 2).is_short());
        let dir = std::env::temp_dir().join(format!("understory-memory-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let memory = Memory { most: 1000, cgroup: Some(dir.clone()) };
        assert!(!memory.is_short(), "what cannot be read stops nothing");
        for (current, inactive, is_short) in [(800, 0, false), (950, 0, true), (950, 100, false)] {
            fs::write(dir.join("memory.current"), format!("{current}\n")).unwrap();
            fs::write(dir.join("memory.stat"), format!("anon 5\ninactive_file {inactive}\n")).unwrap();
            assert_eq!(memory.is_short(), is_short, "{current} of which {inactive}");
        }
        fs::remove_dir_all(&dir).unwrap();
    }
}

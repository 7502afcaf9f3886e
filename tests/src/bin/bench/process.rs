//! What the kernel says of a process' memory.

use std::fs;

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryStatus {
    pub resident: f64,
    /// The most that was resident since the process began, or since that was forgotten.
    pub highest: f64,
}

/// What a process has in memory, in bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InMemory {
    /// Proportional set size: pages that are shared count in part.
    pub pss: f64,
    /// Its own.
    pub anonymous: f64,
    /// Of files, its program above all, however many share them.
    pub file: f64,
}

pub fn in_memory(pid: u32) -> InMemory {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
    parse_rollup(&text).unwrap_or_else(|| panic!("{path} has no Rss, Pss or Anonymous"))
}

fn parse_rollup(text: &str) -> Option<InMemory> {
    let (pss, anonymous) = (bytes(text, "Pss:")?, bytes(text, "Anonymous:")?);
    Some(InMemory { pss, anonymous, file: bytes(text, "Rss:")? - anonymous })
}

pub fn status(pid: u32) -> MemoryStatus {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
    parse(&text).unwrap_or_else(|| panic!("{path} has no VmRSS or VmHWM"))
}

/// What is highest counts from now on.
pub fn forget_highest(pid: u32) {
    let path = format!("/proc/{pid}/clear_refs");
    fs::write(&path, "5").unwrap_or_else(|e| panic!("write {path}: {e}"));
}

fn parse(text: &str) -> Option<MemoryStatus> {
    Some(MemoryStatus { resident: bytes(text, "VmRSS:")?, highest: bytes(text, "VmHWM:")? })
}

fn bytes(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok().map(|kilobytes| kilobytes * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_this_process_can_be_read() {
        let own = status(std::process::id());
        assert!(own.resident > 0.0 && own.highest >= own.resident, "{own:?}");
        assert_eq!(parse("VmRSS:\t 4 kB\nVmHWM:\t 8 kB\n"), Some(MemoryStatus { resident: 4096.0, highest: 8192.0 }));
        assert_eq!(parse("VmRSS:\t 4 kB\n"), None);
        let rollup = parse_rollup("Rss:  9 kB\nPss:  5 kB\nPss_Anon:  3 kB\nAnonymous:  4 kB\n");
        assert_eq!(rollup, Some(InMemory { pss: 5120.0, anonymous: 4096.0, file: 5120.0 }));
    }
}

//! What the kernel says of a process' memory.

use std::fs;

/// Bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryStatus {
    pub resident: f64,
    /// The most that was resident since the process began, or since that was forgotten.
    pub highest: f64,
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
    let bytes = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.trim().parse::<f64>().ok().map(|kilobytes| kilobytes * 1024.0)
    };
    Some(MemoryStatus { resident: bytes("VmRSS:")?, highest: bytes("VmHWM:")? })
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
    }
}

//! What can be wrong with capture, each with the thing that it is about and what to do.

use std::io;
use std::path::{Path, PathBuf};

use aya::EbpfError;

use super::object::INBOUND;

/// Why capture could not be set up, with what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    #[error("{0} is not in a bpffs and none could be mounted there ({1}); mount one: mount -t bpf bpf /sys/fs/bpf")]
    NoBpffs(PathBuf, io::Error),
    #[error("{0} is not in a cgroup v2 hierarchy; mount one: mount -t cgroup2 none /sys/fs/cgroup/unified")]
    NoCgroup2(PathBuf),
    #[error("{step} {path}: {source}")]
    Pin { step: &'static str, path: PathBuf, source: io::Error },
    #[error("map {name}: {source}")]
    Map { name: &'static str, source: io::Error },
    #[error("loading the eBPF object: {0}")]
    Object(#[source] Box<EbpfError>),
    #[error("{0} is being set up by another process, which does not come to an end")]
    InUse(PathBuf),
    #[error("program {name}: {source}; Linux 5.15 or later with {needs} is needed, and the rights of root")]
    Program { name: &'static str, needs: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("attaching program {name} to {target}: {source}{}", exclusive(source))]
    Attach { name: String, target: String, source: io::Error },
}

fn exclusive(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => {
            "; another program holds that place alone (see bpftool cgroup tree), or rights are missing"
        }
        _ => "",
    }
}

impl CaptureError {
    pub(super) fn pin(step: &'static str, path: &Path, source: io::Error) -> CaptureError {
        CaptureError::Pin { step, path: path.to_owned(), source }
    }

    pub(super) fn attach(name: &str, target: &str, source: io::Error) -> CaptureError {
        CaptureError::Attach { name: name.to_owned(), target: target.to_owned(), source }
    }

    pub(super) fn program(
        name: &'static str,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> CaptureError {
        let needs = if name == INBOUND {
            "CONFIG_BPF_SYSCALL and CONFIG_INET"
        } else {
            "CONFIG_BPF_SYSCALL, CONFIG_CGROUP_BPF and CONFIG_INET"
        };
        CaptureError::Program { name, needs, source: source.into() }
    }
}

//! The process's own bounds.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Serialize;

/// The number of descriptors that the process may have once it is raised.
pub fn descriptors() -> u32 {
    getrlimit(Resource::Nofile).maximum.and_then(|most| most.try_into().ok()).unwrap_or(u32::MAX)
}

/// Numbers of descriptors: what has a higher one is refused. A new descriptor has the lowest number that is free
/// (POSIX), so its number says how many are open at least, and nothing needs to be counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DescriptorBounds {
    /// For what comes in. Lower than the other one: most of it needs a dial.
    pub accepted: u32,
    /// For what is dialled. What is above is kept for the control plane, certificates, the agent and operators.
    pub dialled: u32,
}

impl DescriptorBounds {
    /// An eighth is kept of what the process may have, and an eighth for dials, 16 to 1,024 each.
    pub fn of(most: u32) -> Self {
        let kept = (most / 8).clamp(16, 1024);
        Self { accepted: most.saturating_sub(2 * kept), dialled: most.saturating_sub(kept) }
    }
}

/// Raises the number of descriptors that the process may have to the most that it may ask for: service managers and
/// container runtimes often start with 1,024, and every connection takes two. Logged if it does not go.
pub fn raise_descriptor_limit() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, ?current, ?maximum, "the number of descriptors cannot be raised");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_are_always_kept() {
        let of = |most| (DescriptorBounds::of(most).accepted, DescriptorBounds::of(most).dialled);
        assert_eq!(of(128), (96, 112));
        assert_eq!(of(1024), (768, 896));
        assert_eq!(of(1 << 20), ((1 << 20) - 2048, (1 << 20) - 1024));
        assert_eq!(of(20), (0, 4), "too few for anything");
    }
}

//! The process's own bounds.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The number of descriptors that the process may have once it is raised.
pub fn descriptors() -> u32 {
    getrlimit(Resource::Nofile).maximum.and_then(|most| most.try_into().ok()).unwrap_or(u32::MAX)
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

//! One agent for one run folder.

use std::fs::File;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::{AgentError, run_dir_failed};

/// Held while an agent, or its cleanup, runs. The kernel lets it go with the process.
#[derive(Debug)]
pub struct RunLock {
    _file: File,
}

impl RunLock {
    pub fn take(run_dir: &Path) -> Result<RunLock, AgentError> {
        let path = run_dir.join("agent.lock");
        let file = File::create(&path).map_err(run_dir_failed("make a file in", run_dir))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(RunLock { _file: file }),
            Err(Errno::WOULDBLOCK) => Err(AgentError::AlreadyRunning(run_dir.to_owned())),
            Err(error) => Err(run_dir_failed("lock", run_dir)(error.into())),
        }
    }
}

//! The cgroups of proxies: what their processes open is not captured.
//!
//! Must never exempt a cgroup that anything else than a proxy runs in, and never go by a mark or an address, which a
//! pod can set for itself.

use std::io;
use std::sync::Arc;

use tracing::{info, warn};

use super::cgroups::{self, CgroupRoot, Place, unless_gone};
use super::kernel::Kernel;
use crate::zds::Peer;

#[derive(Debug)]
pub struct Exemptions {
    kernel: Arc<Kernel>,
    root: CgroupRoot,
}

impl Exemptions {
    pub fn new(kernel: Arc<Kernel>, root: CgroupRoot) -> Exemptions {
        Exemptions { kernel, root }
    }

    /// Exempts the cgroup of a connected proxy.
    pub fn exempt(&self, peer: Peer) -> Result<(), String> {
        let path = format!("/proc/{}/cgroup", peer.pid);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("cannot read {path}: {error}"))?;
        let unified = Place::parse(&text).unified.ok_or("it is in no cgroup v2")?;
        let Some(dir) = self.root.dir_of(&unified) else {
            info!(pid = peer.pid, cgroup = unified, "the proxy runs outside of the captured cgroups");
            return Ok(());
        };
        if dir == self.root.dir {
            return Err(format!(
                "it runs in {}, the root of all captured cgroups, where an exemption would let everything through; \
                 start it in a cgroup of its own",
                dir.display()
            ));
        }
        let id = cgroups::id_of(&dir).map_err(|error| format!("cannot see {}: {error}", dir.display()))?;
        self.kernel.exempt(id).map_err(|error| error.to_string())
    }

    /// Forgets cgroups that are gone or empty. One that still has processes may be a proxy that is about to connect
    /// again.
    pub fn sweep(&self) {
        let exempted = match self.kernel.exempted() {
            Ok(exempted) => exempted,
            Err(error) => return warn!(%error, "cannot read which cgroups are exempt"),
        };
        for id in exempted {
            match self.is_over(id) {
                Ok(false) => continue,
                Ok(true) => {}
                // Without its exemption a proxy's own dials would come back to it.
                Err(error) => {
                    warn!(cgroup = id, %error, "cannot see whether anything runs in an exempt cgroup: it stays exempt");
                    continue;
                }
            }
            match self.kernel.unexempt(id) {
                Ok(()) => info!(cgroup = id, "the cgroup of a former proxy is no longer exempt"),
                Err(error) => warn!(cgroup = id, %error, "cannot end the exemption of a cgroup"),
            }
        }
    }

    fn is_over(&self, id: u64) -> io::Result<bool> {
        let Some(dir) = cgroups::find_by_id(&self.root.dir, id)? else { return Ok(true) };
        let processes = unless_gone(std::fs::read_to_string(dir.join("cgroup.procs")))?;
        Ok(processes.is_none_or(|text| text.trim().is_empty()))
    }
}

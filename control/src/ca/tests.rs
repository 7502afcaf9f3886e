//! The authority from outside: what it takes from its folder, what it signs, and how it changes.

use std::fs;

use super::*;

mod changes;
mod folders;
mod pki;
mod requests;
mod rotation;
mod signing;

/// A folder of a test's own, removed at its end.
pub(super) struct Dir(pub PathBuf);

impl Dir {
    pub fn new(name: &str) -> Self {
        let dir = Self(std::env::temp_dir().join(format!("understory-ca-{name}-{}", std::process::id())));
        let _ = fs::remove_dir_all(&dir.0);
        dir
    }

    /// Of a file, or of the folder itself.
    pub fn path(&self, file: &str) -> PathBuf {
        if file.is_empty() { self.0.clone() } else { self.0.join(file) }
    }

    pub fn settings(&self) -> CaSettings {
        CaSettings {
            dir: self.0.clone(),
            trust_domain: TrustDomain::default(),
            longest_life: Duration::from_secs(3600),
            backdate: Duration::from_secs(120),
        }
    }

    pub fn open(&self) -> Result<Ca, CaError> {
        Ca::open(self.settings())
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub(super) fn identity() -> Identity {
    "spiffe://cluster.local/ns/a/sa/b".parse().unwrap()
}

pub(super) fn request() -> String {
    PrivateKey::generate().unwrap().certificate_request(&identity()).unwrap()
}

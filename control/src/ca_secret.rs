//! The certificate authority's files in a Secret, so that all replicas have the same, and a new one as well.
//!
//! Must never make a second root where there is one, nor show a key.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use serde_json::json;
use ztunnel::files::read_small;
use ztunnel::kubernetes::{Api, ApiError};

use crate::ca::{Ca, CaError, CaSettings, write_whole};

/// A Secret and the folder that it is brought into.
#[derive(Debug, Clone)]
pub struct CaSecret {
    pub api: Api,
    pub namespace: String,
    pub name: String,
    pub dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum CaSecretError {
    #[error("Secret {name}: {source}")]
    Api { name: String, source: ApiError },
    #[error("Secret {name}: {reason}")]
    Unusable { name: String, reason: String },
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Ca(#[from] CaError),
}

impl CaSecretError {
    /// Whether it may be otherwise a moment later.
    fn may_pass(&self) -> bool {
        matches!(self, Self::Api { source, .. } if !matches!(source, ApiError::Refused { code: 400 | 401 | 403 | 422, .. }))
    }
}

impl CaSecretError {
    fn is_forbidden(&self) -> bool {
        matches!(self, Self::Api { source: ApiError::Refused { code: 401 | 403, .. }, .. })
    }
}

impl CaSecret {
    /// Opens the authority that is in the Secret; if there is none, makes a root and puts it there. Waits while the API
    /// server is away.
    pub async fn open(&self, settings: CaSettings) -> Result<Ca, CaSecretError> {
        let (mut told, begun) = (false, Instant::now());
        loop {
            match self.try_open(&settings).await {
                Err(error)
                    if error.may_pass()
                        || (error.is_forbidden() && begun.elapsed() < STARTS && self.api_server_starts().await) =>
                {
                    if !told {
                        tracing::warn!(%error, "the authority cannot be read yet, it is tried again and again");
                    }
                    told = true;
                    tokio::time::sleep(RETRY).await;
                }
                done => return done,
            }
        }
    }

    /// Until it has read who may do what, it refuses everything.
    async fn api_server_starts(&self) -> bool {
        match self.api.text("/readyz").await {
            // With its own roles unread, this is forbidden too.
            Err(ApiError::Refused { code, .. }) => code >= 500 || matches!(code, 401 | 403),
            Err(ApiError::Away(_) | ApiError::Slow(_)) => true,
            Err(ApiError::Unreadable(_)) | Ok(_) => false,
        }
    }

    async fn try_open(&self, settings: &CaSettings) -> Result<Ca, CaSecretError> {
        if !self.fetch().await? {
            // Made in the folder first, so that what is put into the Secret is known to work.
            let ca = open(settings).await?;
            if self.create().await? {
                tracing::info!(secret = self.label(), "a new root has been put into the Secret");
                return Ok(ca);
            }
            // Another replica was faster: its root counts.
            drop(ca);
            self.fetch().await?;
        }
        open(settings).await
    }

    /// Follows the Secret: what is changed there goes into the folder, and is put there again if it is gone.
    pub async fn follow(self) {
        let mut told = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let looked = match self.fetch().await {
                Ok(true) => Ok(()),
                Ok(false) => self.create().await.map(|created| {
                    if created {
                        tracing::warn!(
                            secret = self.label(),
                            "the authority's Secret was gone, it has been made again"
                        );
                    }
                }),
                Err(error) => Err(error),
            };
            let now = looked.err().map(|e| e.to_string());
            if let Some(error) = now.as_ref().filter(|_| now != told) {
                tracing::warn!(error, "the authority's Secret cannot be followed, what was in it stays in force");
            }
            told = now;
        }
    }

    /// Brings the folder in line with the Secret; false if there is none.
    async fn fetch(&self) -> Result<bool, CaSecretError> {
        let path = format!("{}/{}", self.folder(), self.name);
        let Some(secret) = self.api.find(&path).await.map_err(|source| self.fail(source))? else { return Ok(false) };
        let unusable = |reason: String| CaSecretError::Unusable { name: self.label(), reason };
        // Not the error's own text, which may hold some of what was read.
        let secret: Secret =
            serde_json::from_value(secret).map_err(|e| unusable(format!("{:?} error", e.classify())))?;
        let mut data = secret.data.unwrap_or_default();
        let files: Vec<_> = FILES.map(|name| (name, data.remove(name).map(|content| content.0))).into();
        if files.iter().all(|(_, content)| content.is_none()) {
            return Err(unusable(format!("it has none of {}", FILES.join(", "))));
        }
        let dir = self.dir.clone();
        let written = tokio::task::spawn_blocking(move || {
            files.iter().try_for_each(|(name, content)| put(&dir.join(name), content.as_deref()))
        });
        written.await.map_err(|e| unusable(e.to_string()))??;
        Ok(true)
    }

    /// Puts what is in the folder into a new Secret; false if there is one.
    async fn create(&self) -> Result<bool, CaSecretError> {
        let dir = self.dir.clone();
        let data = tokio::task::spawn_blocking(move || held_in(&dir)).await;
        let data = data.map_err(|e| CaSecretError::Unusable { name: self.label(), reason: e.to_string() })??;
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": data,
            "metadata": {"name": self.name, "namespace": self.namespace},
        });
        match self.api.create(&self.folder(), &secret).await {
            Ok(_) => Ok(true),
            Err(ApiError::Refused { code: 409, .. }) => Ok(false),
            Err(source) => Err(self.fail(source)),
        }
    }

    fn fail(&self, source: ApiError) -> CaSecretError {
        CaSecretError::Api { name: self.label(), source }
    }

    fn label(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    fn folder(&self) -> String {
        format!("/api/v1/namespaces/{}/secrets", self.namespace)
    }
}

async fn open(settings: &CaSettings) -> Result<Ca, CaSecretError> {
    let settings = settings.clone();
    let opened = tokio::task::spawn_blocking(move || Ca::open(settings)).await;
    Ok(opened.map_err(|e| CaError::Sign(e.to_string()))??)
}

/// The files that are in the folder. Blocks on the file system.
fn held_in(dir: &Path) -> Result<BTreeMap<&'static str, ByteString>, CaSecretError> {
    let mut data = BTreeMap::new();
    for name in FILES {
        let path = dir.join(name);
        match read_small(&path, MAX_FILE) {
            Ok(content) => drop(data.insert(name, ByteString(content))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(CaSecretError::File { path, source }),
        }
    }
    Ok(data)
}

/// Blocks on the file system. A set of which only part is written is not taken into force.
fn put(path: &Path, content: Option<&[u8]>) -> Result<(), CaSecretError> {
    let fail = |source| CaSecretError::File { path: path.to_owned(), source };
    let Some(content) = content else {
        return match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(fail(e)),
            _ => Ok(()),
        };
    };
    if read_small(path, MAX_FILE).is_ok_and(|held| held == content) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        make_private(dir).map_err(fail)?;
    }
    write_whole(path, content, 0o600).map_err(fail)
}

fn make_private(dir: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// What an authority can consist of, keys first.
const FILES: [&str; 5] = ["root-key.pem", "ca-key.pem", "ca-cert.pem", "cert-chain.pem", "root-cert.pem"];
/// Bytes; a Secret cannot hold more.
const MAX_FILE: usize = 1 << 20;
const RETRY: Duration = Duration::from_secs(2);
/// An API server that starts takes no longer.
const STARTS: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use apistub::ApiStub;

    use super::*;
    use crate::kubernetes::tests::api;
    use ztunnel::identity::TrustDomain;

    struct Dir(PathBuf);

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn dir(name: &str) -> Dir {
        let dir = std::env::temp_dir().join(format!("understory-ca-secret-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        Dir(dir)
    }

    fn settings(dir: &Dir) -> CaSettings {
        CaSettings {
            dir: dir.0.clone(),
            trust_domain: TrustDomain::default(),
            longest_life: Duration::from_secs(3600),
            backdate: Duration::from_secs(60),
        }
    }

    fn secret(server: &ApiStub, dir: &Dir) -> CaSecret {
        let (namespace, name) = ("understory-system".into(), "understory-ca".into());
        CaSecret { api: api(server), namespace, name, dir: dir.0.clone() }
    }

    #[tokio::test]
    async fn replicas_have_one_root_whoever_comes_first() {
        let server = ApiStub::start().await;
        let dirs = [dir("a"), dir("b"), dir("c")];
        let of = |index: usize| secret(&server, &dirs[index]);
        let (a, b) = (of(0), of(1));
        let (a, b) = tokio::join!(a.open(settings(&dirs[0])), b.open(settings(&dirs[1])));
        let roots = a.unwrap().roots_pem();
        assert_eq!(b.unwrap().roots_pem(), roots);
        // One that starts later, in a pod that knows nothing.
        assert_eq!(of(2).open(settings(&dirs[2])).await.unwrap().roots_pem(), roots);
        let held = server.state().get("/api/v1/secrets", "understory-system/understory-ca").unwrap().clone();
        assert!(held["data"]["root-key.pem"].is_string() && held["data"]["ca-key.pem"].is_null());
    }

    #[tokio::test]
    async fn what_is_changed_in_the_secret_goes_into_the_folder_and_nothing_else_does() {
        let server = ApiStub::start().await;
        let (ours, other) = (dir("ours"), dir("other"));
        let secret = secret(&server, &ours);
        let ca = secret.open(settings(&ours)).await.unwrap();
        let before = ca.roots_pem();
        // Keys from outside in the place of the root.
        let theirs = Ca::open(settings(&other)).unwrap().roots_pem();
        let path = "/api/v1/secrets";
        let mut held = server.state().get(path, "understory-system/understory-ca").unwrap().clone();
        let file = |name: &str| json!(ByteString(std::fs::read(other.0.join(name)).unwrap()));
        held["data"] = json!({"root-key.pem": file("root-key.pem"), "root-cert.pem": file("root-cert.pem")});
        server.state().put(path, held.clone());
        std::fs::write(ours.0.join("root-cert.pem"), "half-writ").unwrap();
        assert!(secret.fetch().await.unwrap());
        assert_eq!(std::fs::read_to_string(ours.0.join("root-cert.pem")).unwrap(), *theirs);
        assert_ne!(before, theirs);
        held["data"] = json!({"x": file("root-key.pem")});
        server.state().put(path, held);
        let error = secret.fetch().await.unwrap_err().to_string();
        assert!(error.contains("understory-system/understory-ca") && error.contains("root-key.pem"), "{error}");
        assert!(ours.0.join("root-key.pem").exists());
    }

    #[tokio::test]
    async fn a_secret_that_may_not_be_read_stops_the_start_and_makes_no_root() {
        let server = ApiStub::start().await;
        let path = "/api/v1/namespaces/understory-system/secrets/understory-ca";
        let forbidden = json!({"kind": "Status", "code": 403, "message": "forbidden"});
        server.state().answers.insert(path.into(), (403, forbidden));
        let ours = dir("forbidden");
        let error = secret(&server, &ours).open(settings(&ours)).await.unwrap_err().to_string();
        assert!(error.contains("403") && error.contains("understory-ca"), "{error}");
        assert!(!ours.0.exists());
    }
}

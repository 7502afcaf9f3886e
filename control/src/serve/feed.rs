//! Where the cluster's objects come from, and the model that follows them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use ztunnel::kubernetes::{Api, Health, Source, SourceKind};
use ztunnel::manifests::{self, Folders, Objects, Watch};

use super::ServeError;
use crate::kubernetes;
use crate::model::{Model, ModelSettings, Snapshot};
use crate::settings::ServeArgs;

/// Where objects are.
pub enum Origin {
    Folders(Folders),
    Cluster(Api),
}

/// Where objects come from, while they do. Ends when it is dropped.
pub enum Feed {
    Folder(Watch),
    Kubernetes(Source),
}

impl Origin {
    pub async fn of(args: &ServeArgs) -> Result<Self, ServeError> {
        match (args.source, &args.manifests, &args.status_dir) {
            (SourceKind::Manifests, None, _) => Err(ServeError::Required("--manifests")),
            (SourceKind::Manifests, Some(manifests), status) => {
                Ok(Self::Folders(Folders { manifests: manifests.clone(), status: status.clone() }))
            }
            (SourceKind::Kubernetes, _, Some(dir)) => Err(ServeError::StatusDir(dir.clone())),
            (SourceKind::Kubernetes, _, None) => Ok(Self::Cluster(Api::connect(args.kubeconfig.as_deref()).await?)),
        }
    }

    pub fn api(&self) -> Option<&Api> {
        match self {
            Self::Folders(_) => None,
            Self::Cluster(api) => Some(api),
        }
    }
}

impl Feed {
    /// Begins to read. Must be called on a runtime.
    pub async fn start(origin: Origin) -> Result<Self, ServeError> {
        let folders = match origin {
            Origin::Cluster(api) => return Ok(Self::Kubernetes(kubernetes::source(&api))),
            Origin::Folders(folders) => folders,
        };
        // Reads a lot of files.
        let watch = tokio::task::spawn_blocking(move || manifests::watch(folders)).await;
        let ended =
            |e: tokio::task::JoinError| ServeError::Ended { what: "reading the manifests", reason: e.to_string() };
        Ok(Self::Folder(watch.map_err(ended)??))
    }

    pub fn objects(&self) -> watch::Receiver<Arc<Objects>> {
        match self {
            Self::Folder(watch) => watch.objects(),
            Self::Kubernetes(source) => source.objects(),
        }
    }

    pub fn health(&self) -> Option<Arc<Health>> {
        match self {
            Self::Folder(_) => None,
            Self::Kubernetes(source) => Some(source.health()),
        }
    }
}

/// Keeps the model up to date with the objects, from when they are complete: the second value tells when its first
/// snapshot is there. Ends with the objects' source.
pub fn follow(
    settings: ModelSettings,
    mut objects: watch::Receiver<Arc<Objects>>,
    complete: impl Future<Output = ()> + Send + 'static,
) -> (watch::Receiver<Snapshot>, watch::Receiver<bool>) {
    let mut model = Model::new(settings);
    let (publish, snapshots) = watch::channel(model.snapshot());
    let (tell, known) = watch::channel(false);
    tokio::spawn(async move {
        complete.await;
        let first = objects.borrow_and_update().clone();
        model.update(first);
        publish.send_replace(model.snapshot());
        tell.send_replace(true);
        while objects.changed().await.is_ok() {
            gather(&mut objects).await;
            let newer = objects.borrow_and_update().clone();
            let started = Instant::now();
            if let Some(mut snapshot) = model.update(newer) {
                snapshot.published = Some(Instant::now());
                tracing::debug!(generation = snapshot.generation, took = ?started.elapsed(), "the model has changed");
                publish.send_replace(snapshot);
            }
        }
    });
    (snapshots, known)
}

/// A burst of changes is one: waits until it is quiet, or long enough.
async fn gather(objects: &mut watch::Receiver<Arc<Objects>>) {
    let limit = tokio::time::Instant::now() + BURST;
    loop {
        objects.borrow_and_update();
        let quiet = (tokio::time::Instant::now() + QUIET).min(limit);
        match tokio::time::timeout_at(quiet, objects.changed()).await {
            Ok(Ok(())) if tokio::time::Instant::now() < limit => {}
            _ => return,
        }
    }
}

/// Changes that follow each other within this time are one.
const QUIET: Duration = Duration::from_millis(10);
/// No change waits longer for others.
const BURST: Duration = Duration::from_millis(100);

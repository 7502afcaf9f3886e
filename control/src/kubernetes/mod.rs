//! The Kubernetes API server as a source of objects: the counterpart of a folder of manifests, behind the same channel.
//!
//! Must never take away what is known because the API server cannot be asked, nor hand out half of a first reading.

mod api;
#[cfg(test)]
pub(crate) mod fake;
mod follow;
mod health;
mod kind;
mod lease;
mod read;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use ztunnel::manifests::Objects;

pub use api::{Api, ApiError, ConnectError};
pub use health::{Health, State};
pub use kind::Kind;
pub use lease::Candidate;
pub use read::read;

/// The objects of a cluster, kept up to date until it is dropped.
#[derive(Debug)]
pub struct Source {
    objects: watch::Receiver<Arc<Objects>>,
    health: Arc<Health>,
    /// One for each kind; they end with it.
    _tasks: JoinSet<()>,
}

impl Source {
    /// Begins to read. Must be called on a runtime.
    pub fn start(api: &Api) -> Self {
        let (sender, objects) = watch::channel(Arc::new(Objects::default()));
        let (sender, health) = (Arc::new(sender), Health::new());
        let mut tasks = JoinSet::new();
        for kind in Kind::ALL {
            tasks.spawn(follow::Follower::new(api.clone(), kind, sender.clone(), health.clone()).run());
        }
        Self { objects, health, _tasks: tasks }
    }

    /// The objects, now and from now on. Not whole before [`Health::complete`].
    pub fn objects(&self) -> watch::Receiver<Arc<Objects>> {
        self.objects.clone()
    }

    pub fn health(&self) -> Arc<Health> {
        self.health.clone()
    }
}

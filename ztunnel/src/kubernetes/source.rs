//! Which objects are followed, and the channel that they come by.

use std::sync::Arc;

use serde_json::Value;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::api::{Api, encode};
use super::follow::Follower;
use super::health::Health;
use super::kind::Kind;
use crate::manifests::{Object, Objects};

/// Where a program takes the cluster's objects from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SourceKind {
    /// A folder of manifests.
    Manifests,
    /// The API server.
    Kubernetes,
}

/// The objects of a cluster, kept up to date until it is dropped.
#[derive(Debug)]
pub struct Source {
    objects: watch::Receiver<Arc<Objects>>,
    health: Arc<Health>,
    /// One for each kind; they end with it.
    _tasks: JoinSet<()>,
}

/// Which objects of a kind are followed, and how much of each is asked for.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub(super) kind: Kind,
    /// Encoded, each part begins with `&`.
    pub(super) filter: String,
    pub(super) metadata_only: bool,
}

/// From what the API server sends to the object that is kept, which must be of the same kind; or what is wrong with it.
/// The text is the version of the API that it came from, such as `v1`.
pub type Reader = fn(Kind, &str, Value) -> Result<Object, String>;

impl Source {
    /// Begins to read. Each kind may be wanted once. Must be called on a runtime.
    pub fn start(api: &Api, wanted: Vec<Wanted>, read: Reader) -> Self {
        let (sender, objects) = watch::channel(Arc::new(Objects::default()));
        let (sender, health) = (Arc::new(sender), Health::new(wanted.iter().map(|wanted| wanted.kind)));
        let mut tasks = JoinSet::new();
        for wanted in wanted {
            tasks.spawn(Follower::new(api.clone(), wanted, read, sender.clone(), health.clone()).run());
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

impl Wanted {
    /// All objects of the kind, whole.
    pub fn all(kind: Kind) -> Self {
        Self { kind, filter: String::new(), metadata_only: false }
    }

    /// Only those that a field selector matches, such as `spec.nodeName=a`.
    pub fn with_fields(mut self, selector: &str) -> Self {
        self.filter.push_str(&format!("&fieldSelector={}", encode(selector)));
        self
    }

    /// Only those that a label selector matches, such as `app in (a, b)`.
    pub fn with_labels(mut self, selector: &str) -> Self {
        self.filter.push_str(&format!("&labelSelector={}", encode(selector)));
        self
    }

    /// Names, labels and annotations, without the rest.
    pub fn only_metadata(self) -> Self {
        Self { metadata_only: true, ..self }
    }
}

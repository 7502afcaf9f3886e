//! Kubernetes objects: what they are to the mesh, and how they come from a watched folder of manifests, for where there
//! is no API server.
//!
//! Where objects come from has two ends: a source publishes [`Objects`] into a `watch` channel, a consumer takes the
//! `watch::Receiver<Arc<Objects>>` and knows nothing of the source. [`watch`] is the folder as a source.
//!
//! Must never let a broken, half-written or vanishing file take away what was good before.

mod document;
mod entries;
mod fields;
mod files;
mod folder;
mod locate;
mod merge;
mod objects;
mod security;
mod status;
#[cfg(test)]
mod tests;
mod watch;

pub use entries::{
    AllocatedAddress, EntryKind, EntryPort, Resolution, ServiceEntry, ServiceEntrySpec, ServiceEntryStatus,
    WorkloadEntry, WorkloadEntrySpec, WorkloadSelector,
};
pub use files::Files;
pub use locate::FieldPath;
pub(crate) use objects::REDIRECTION;
pub use objects::{Changes, Object, ObjectKey, ObjectName, Objects, Problem};
pub use security::{SecurityKind, SecurityPolicy};
pub use status::{PodRef, PodStatus, Redirection, StatusError, StatusFolder};
pub use watch::{Folders, Watch, WatchError, watch};

/// Of objects that name none.
const DEFAULT_NAMESPACE: &str = "default";

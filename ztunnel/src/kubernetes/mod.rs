//! The Kubernetes API server: requests to it, and its objects as a source behind the same channel as a folder of
//! manifests.
//!
//! Must never take away what is known because the API server cannot be asked, nor hand out half of a first reading.

mod api;
mod follow;
mod health;
mod kind;
mod source;
#[cfg(test)]
mod tests;

pub use api::{Api, ApiError, ConnectError};
pub use health::{Health, State};
pub use kind::{Kind, Place};
pub use source::{Reader, Source, SourceKind, Wanted};

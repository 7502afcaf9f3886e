//! What control reads of the Kubernetes API server, and how much it keeps of it; and which of several replicas leads.

mod lease;
mod read;
#[cfg(test)]
pub(crate) mod tests;

use ztunnel::kubernetes::{Api, Kind, Source, Wanted};
use ztunnel::manifests::{EntryKind, SecurityKind};

pub use lease::Candidate;
pub use read::read;

/// Begins to read all that the model is made of. Must be called on a runtime.
pub fn source(api: &Api) -> Source {
    Source::start(api, wanted(), read)
}

fn wanted() -> Vec<Wanted> {
    vec![
        Wanted::all(Kind::Namespace).only_metadata(),
        Wanted::all(Kind::Node).only_metadata(),
        // The mesh has forgotten those that have ended.
        Wanted::all(Kind::Pod).with_fields("status.phase!=Succeeded,status.phase!=Failed"),
        Wanted::all(Kind::Service),
        Wanted::all(Kind::EndpointSlice),
        Wanted::all(Kind::Entry(EntryKind::ServiceEntry)),
        Wanted::all(Kind::Entry(EntryKind::WorkloadEntry)),
        Wanted::all(Kind::Security(SecurityKind::PeerAuthentication)),
        Wanted::all(Kind::Security(SecurityKind::AuthorizationPolicy)),
    ]
}

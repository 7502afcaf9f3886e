//! Explaining on a running proxy: its admin page, and the facts that it knows.

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use ::http::StatusCode;
use rustls::pki_types::UnixTime;

use super::{CertificateState, NodeFacts, Question, explain};
use crate::identity::{Certificate, Identity, PeerError, PeerRole, State, TrustDomain};
use crate::mesh::Workload;
use crate::proxy::neighbour;
use crate::proxy::route::Hop;
use crate::proxy::state::{Phase, Shared};
use crate::telemetry::http;

/// The admin server's page `/explain`.
pub fn page(shared: &Shared, request: &http::Request) -> http::Response {
    let wrong = |text: String| http::Response::text(StatusCode::BAD_REQUEST, text + "\n");
    let (Some(from), Some(to)) = (request.query("from"), request.query("to")) else {
        return wrong("expected ?from=<client>&to=<destination>:<port>, and output=json if it should be JSON".into());
    };
    let is_json = match request.query("output").as_deref() {
        None | Some("text") => false,
        Some("json") => true,
        Some(other) => return wrong(format!("output {other:?}: expected text or json")),
    };
    match explain(&shared.mesh.load(), &Running(shared), &Question { from, to }) {
        Ok(explanation) if is_json => http::Response::json(&explanation),
        Ok(explanation) => http::Response::text(StatusCode::OK, explanation.to_string()),
        Err(error) => wrong(error.to_string()),
    }
}

/// The facts of a running proxy.
struct Running<'a>(&'a Shared);

impl Running<'_> {
    /// As a peer of the same trust domain here would look at it.
    fn taken_by_its_own(&self, certificate: &Certificate) -> Result<(), PeerError> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (trust, domain) = (self.0.certificates.trust(), certificate.identity().trust_domain());
        let verify = |role| trust.verify(domain, certificate.chain(), role, UnixTime::since_unix_epoch(now));
        verify(PeerRole::Client).and_then(|()| verify(PeerRole::Server))
    }
}

impl NodeFacts for Running<'_> {
    fn phase(&self, workload: &Workload) -> Option<Phase> {
        self.0.pod_of(workload).map(|pod| *pod.phase.borrow())
    }

    fn takes(&self, own: &TrustDomain, theirs: &TrustDomain) -> bool {
        self.0.certificates.trust().accepts(own, theirs)
    }

    fn attests(&self, source: &Workload, hop: &Hop) -> bool {
        neighbour::find(self.0, source, hop).is_some()
    }

    fn certificate(&self, identity: &Identity) -> Option<CertificateState> {
        let state = self.0.certificates.state(identity)?;
        let (is_usable, mut text) = match &state.state {
            State::Initializing => (false, "its certificate has been asked for and is not here yet".to_owned()),
            State::Unavailable(reason) => (false, format!("no certificate: {reason}")),
            State::Available(certificate) if !certificate.is_valid() => {
                (false, "its certificate is not valid now".into())
            }
            State::Available(certificate) => match self.taken_by_its_own(certificate) {
                Ok(()) => (true, "its certificate is good".to_owned()),
                Err(error) => (false, format!("no peer that trusts as this node does takes its certificate: {error}")),
            },
        };
        if let (true, Some(error)) = (is_usable, &state.last_error) {
            let _ = write!(text, ", but the last renewal failed: {error}");
        }
        Some(CertificateState { is_usable, text })
    }
}

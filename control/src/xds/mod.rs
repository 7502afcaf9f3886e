//! Delta discovery: each stream is told what it asks for, and then what changes of it.
//!
//! Must never let a slow node slow another: a stream looks at the newest snapshot when it can send again, and what it
//! missed in between costs nothing.

mod node;
mod session;
mod subscription;
#[cfg(test)]
mod tests;
mod trust;

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use ztunnel::lifecycle::Shutdown;
use ztunnel::proto::discovery::aggregated_discovery_service_server::AggregatedDiscoveryService;
use ztunnel::proto::discovery::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use ztunnel::telemetry::log::Hush;

use crate::metrics::Metrics;
use crate::model::Snapshot;
use crate::tls::Peer;
use crate::tokens::Tokens;
use session::Session;
pub use trust::Trust;

/// The discovery service.
pub struct Discovery {
    pub snapshots: watch::Receiver<Snapshot>,
    pub trust: Trust,
    pub tokens: Arc<Tokens>,
    pub metrics: Arc<Metrics>,
    /// Ends all streams, so that their nodes go to another replica.
    pub shutdown: Shutdown,
    pub hush: Hush,
    /// Accounts of node proxies, `namespace/name`.
    pub proxies: Vec<String>,
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type DeltaAggregatedResourcesStream =
        Pin<Box<dyn Stream<Item = Result<DeltaDiscoveryResponse, Status>> + Send + 'static>>;

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        let from = request.extensions().get::<Peer>().cloned();
        let peer = from.as_ref().map(Peer::address);
        let caller = self.tokens.caller(request.metadata()).await.map_err(|error| {
            self.metrics.stream_refused(error.label());
            // From outside the mesh's own: they must not fill the log.
            if let Some(untold) = self.hush.speak() {
                let untold = Some(untold).filter(|n| *n > 0);
                tracing::warn!(
                    peer = peer.map(tracing::field::display), reason = %error, untold, "refused a discovery stream"
                );
            }
            Status::from(error)
        })?;
        if let Some(from) = from {
            from.is_known(self.proxies.contains(&caller.account()));
        }
        let (send, queue) = mpsc::channel(QUEUE);
        let session =
            Session::new(caller, peer, self.snapshots.clone(), self.trust.clone(), send, self.metrics.clone());
        // Ends with its stream, or by the order to stop.
        tokio::spawn(session.run(request.into_inner(), self.shutdown.clone()));
        Ok(Response::new(Box::pin(ReceiverStream::new(queue))))
    }
}

/// Responses that may wait for a slow node, beside the one that is being sent.
const QUEUE: usize = 1;

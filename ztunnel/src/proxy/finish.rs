//! Carries an established connection to its end, and tells telemetry how it ended.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use super::guard;
use super::relay::{Cut, Meter, Moved, Relay, Side};
use crate::hbone::StreamCount;
use crate::telemetry::flow::{self, CloseReason, Direction, Failure, How, Outcome, ResponseFlag};
use crate::telemetry::{Closing, Connection, LiveConnection};

/// Carries a connection to its end, by its relay or by order, and keeps `kept` until then. `tunnel`: its place there.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn holds its arguments twice, and this is what an idle connection costs"
)]
pub fn carry<K>(
    mut relay: impl Relay,
    connection: Connection,
    tunnel: Option<StreamCount>,
    kept: K,
) -> impl Future<Output = ()> {
    async move {
        let outcome = poll_fn(|cx| match connection.poll_close_ordered(cx) {
            Poll::Ready(closing) => Poll::Ready(ordered(closing)),
            Poll::Pending => relay.poll(cx).map(outcome),
        })
        .await;
        drop(relay);
        connection.finish(&guard::outcome(outcome, tunnel.as_ref().and_then(StreamCount::tunnel_ended)));
        drop((tunnel, kept));
    }
}

/// The same for a connection of which both sides are ours. What ends one of them is a reset of the other's peer.
/// `at_order` follows where the end was ordered.
#[expect(
    clippy::manual_async_fn,
    reason = "an async fn holds its arguments twice, and this is what an idle connection costs"
)]
pub fn carry_both<K>(
    mut relay: impl Relay,
    outbound: Connection,
    inbound: Connection,
    at_order: impl FnOnce(),
    kept: K,
) -> impl Future<Output = ()> {
    async move {
        let (of_client, of_server) = poll_fn(|cx| {
            if let Poll::Ready(closing) = outbound.poll_close_ordered(cx) {
                return Poll::Ready((ordered(closing), Outcome::reset(flow::Side::Client)));
            }
            if let Poll::Ready(closing) = inbound.poll_close_ordered(cx) {
                return Poll::Ready((Outcome::reset(flow::Side::Server), ordered(closing)));
            }
            relay.poll(cx).map(outcome).map(|outcome| (outcome.clone(), outcome))
        })
        .await;
        drop(relay);
        let is_ordered = of_client.how == How::Closed || of_server.how == How::Closed;
        outbound.finish(&of_client);
        inbound.finish(&of_server);
        drop(kept);
        if is_ordered {
            at_order();
        }
    }
}

fn ordered(closing: &Closing) -> Outcome {
    match closing {
        Closing { reason, detail: None } => Outcome::closed(*reason),
        Closing { reason, detail: Some(detail) } => Outcome::closed_because(*reason, detail),
    }
}

/// Counts a relay's bytes on two connections.
pub struct Both(pub LiveConnection, pub LiveConnection);

impl Meter for Both {
    fn up(&self, bytes: u64) {
        self.0.up(bytes);
        self.1.up(bytes);
    }

    fn down(&self, bytes: u64) {
        self.0.down(bytes);
        self.1.down(bytes);
    }

    fn is_over(&self) -> bool {
        self.0.is_ordered_to_end() || self.1.is_ordered_to_end()
    }
}

impl Meter for LiveConnection {
    fn up(&self, bytes: u64) {
        match self.flow().direction {
            Direction::Outbound => self.add_sent(bytes),
            Direction::Inbound => self.add_received(bytes),
        }
    }

    fn down(&self, bytes: u64) {
        match self.flow().direction {
            Direction::Outbound => self.add_received(bytes),
            Direction::Inbound => self.add_sent(bytes),
        }
    }

    fn is_over(&self) -> bool {
        self.is_ordered_to_end()
    }
}

fn outcome(ended: Result<Moved, Cut>) -> Outcome {
    match ended {
        Ok(moved) => Outcome::orderly(side(moved.first_fin.unwrap_or(Side::Client))),
        Err(Cut::Reset(by)) => Outcome::reset(side(by)),
        Err(cut) => {
            let (by, how) = match &cut {
                Cut::Reset(by) | Cut::Io(by, _) | Cut::Tunnel(by, _) => (*by, How::Rst),
                Cut::HalfClosed(by, _) => (*by, How::Timeout),
            };
            Outcome::broken(side(by), how, Failure::new(ResponseFlag::Connect, "relay", cut.to_string()))
        }
    }
}

fn side(side: Side) -> flow::Side {
    match side {
        Side::Client => flow::Side::Client,
        Side::Server => flow::Side::Server,
    }
}

/// Why a pod's connections are cut.
pub fn gone() -> Arc<str> {
    CloseReason::PodRemoved.as_str().into()
}

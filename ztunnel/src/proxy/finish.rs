//! From how a relay ended to what telemetry says about it.

use std::sync::Arc;

use super::relay::{Cut, Meter, Moved, Side};
use crate::telemetry::Connection;
use crate::telemetry::flow::{self, CloseReason, Failure, How, Outcome, ResponseFlag};

/// Counts a relay's bytes on a connection; `local` is the side that the local app is.
pub struct Count<'a> {
    pub connection: &'a Connection,
    pub local: Side,
}

impl Meter for Count<'_> {
    fn up(&self, bytes: u64) {
        match self.local {
            Side::Client => self.connection.sent(bytes),
            Side::Server => self.connection.received(bytes),
        }
    }

    fn down(&self, bytes: u64) {
        match self.local {
            Side::Client => self.connection.received(bytes),
            Side::Server => self.connection.sent(bytes),
        }
    }
}

/// Runs a relay until it ends or is ordered to.
pub async fn relay(connection: &Connection, relay: impl Future<Output = Result<Moved, Cut>>) -> Outcome {
    tokio::select! {
        biased;
        reason = connection.close_ordered() => Outcome::closed(reason),
        ended = relay => outcome(ended),
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

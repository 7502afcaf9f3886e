//! ZDS: how the agent (server) tells the node proxy (client) which pods it serves, over a Unix SEQPACKET socket with
//! descriptors. `proto/zds.proto` has the messages and our extension of them, which a plain peer never sees.
//!
//! Must never take a descriptor for something else than what its sender named, and never keep one that it did not
//! ask for.

mod client;
mod message;
mod server;
mod transport;

pub use client::{AddedPod, Client, ClientConfig, DrainState, PodManager, Removal, Status};
pub use message::{CaptureMapFds, EXTENSION, PodInfo, ProtocolError, Request, Response};
pub use server::{Arrival, HelloError, RequestError, Server, ServerConfig, Session, SessionId};
pub use transport::{MAX_PACKET, Packet, Peer, Seqpacket, SeqpacketListener, TransportError, listen_for_root};

#[cfg(test)]
mod tests;

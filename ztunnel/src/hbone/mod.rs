//! HBONE: HTTP/2 CONNECT over mutual TLS. Client pool and server, headers, codes, windows.
//!
//! Must never carry a byte before both sides' identities are checked. Everything here lives on one thread: a tunnel,
//! its streams and its place in the pool never move.

mod buffers;
pub mod check;
mod client;
mod connection;
mod driver;
mod fields;
mod frame;
mod headers;
mod held;
mod hpack;
mod pool;
mod server;
mod settings;
mod state;
mod stream;
mod tls;
mod tunnels;

pub(crate) use buffers::Buffer;
pub use client::{Opened, StreamError, TunnelError};
pub use driver::{Ended, StreamCount};
pub use fields::Request;
pub use headers::{Authority, BAGGAGE, Baggage, FORWARDED, REASON, TRACEPARENT, baggage_of, forwarded, read_forwarded};
pub use pool::{Dialled, OpenError, Pool, PoolKey};
pub use server::{Abandoned, AcceptError, Accepted, Established, Incoming};
pub use settings::Settings;
pub use state::{Broken, Sink};
pub use stream::Stream;
pub use tls::{TlsError, TlsSocket};
pub use tunnels::{Round, Tunnels};

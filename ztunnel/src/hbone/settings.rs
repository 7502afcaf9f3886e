//! How our ends of HBONE connections are set up.

use std::time::Duration;

/// Settings of both ends. Sizes in bytes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What a peer may send on a stream before the app has read it: with the socket buffers, the bound of bytes in
    /// flight for a stalled reader.
    pub stream_window: u32,
    /// Never limits: a stalled stream must not cost the others anything.
    pub connection_window: u32,
    /// Largest DATA frame that we take.
    pub frame_size: u32,
    /// Streams that a peer may open on a tunnel to us.
    pub max_streams: u32,
    /// Streams on a tunnel of ours from which on a further tunnel is opened.
    pub streams_per_tunnel: u32,
    /// TCP, TLS and HTTP/2 handshake together.
    pub handshake_timeout: Duration,
    /// Answer to a CONNECT, which the peer gives when it has reached the app.
    pub response_timeout: Duration,
    /// Silence on a tunnel with open streams after which it is pinged.
    pub ping_after: Duration,
    /// Silence on a tunnel with open streams after which it is dead.
    pub dead_after: Duration,
    /// Time without a stream after which a tunnel of ours is closed.
    pub idle_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            stream_window: 1024 * 1024,
            connection_window: i32::MAX as u32,
            frame_size: 256 * 1024,
            max_streams: 200,
            streams_per_tunnel: 64,
            handshake_timeout: Duration::from_secs(10),
            response_timeout: Duration::from_secs(15),
            ping_after: Duration::from_secs(5),
            dead_after: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(300),
        }
    }
}

impl Settings {
    pub(super) fn client(&self) -> h2::client::Builder {
        let mut builder = h2::client::Builder::new();
        builder
            .initial_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_frame_size(self.frame_size)
            .max_header_list_size(HEADER_LIST)
            .max_send_buffer_size(SEND_BUFFER)
            .initial_max_send_streams(self.streams_per_tunnel as usize)
            .data_frame_budget(FRAME_BUDGET)
            .enable_push(false);
        builder
    }

    pub(super) fn server(&self) -> h2::server::Builder {
        let mut builder = h2::server::Builder::new();
        builder
            .initial_window_size(self.stream_window)
            .initial_connection_window_size(self.connection_window)
            .max_frame_size(self.frame_size)
            .max_header_list_size(HEADER_LIST)
            .max_send_buffer_size(SEND_BUFFER)
            .data_frame_budget(FRAME_BUDGET)
            .max_concurrent_streams(self.max_streams);
        builder
    }
}

/// Largest header list that is taken, bytes.
const HEADER_LIST: u32 = 16 * 1024;
/// What a stream may hold between the app and the tunnel, bytes.
const SEND_BUFFER: usize = 256 * 1024;
/// Small frames of apps that write byte by byte must not count as an attack: peers are authenticated, and what a
/// stream can hold is bounded by its window.
const FRAME_BUDGET: usize = 1 << 40;

//! How our ends of HBONE connections are set up.

use std::time::Duration;

/// Settings of both ends. Sizes in bytes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// What a peer may send on a stream before the app has read it. It grows up to four times of this while the app keeps
    /// up: with the socket buffers, the bound of bytes in flight for a stalled reader.
    pub stream_window: u32,
    /// What a peer may send on all streams before it has come. It is given back as it comes, not as apps read: a
    /// stalled stream costs the others nothing.
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
            stream_window: 256 * 1024,
            connection_window: 64 << 20,
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

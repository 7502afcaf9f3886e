//! What tests do with a connection: say, hear, ask, half-close, reset, and tell how the other side ended it.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// How a connection ended, seen by its reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// An orderly end: FIN.
    Fin,
    /// RST.
    Reset,
}

/// Conversations in a test. The methods panic with what was said and heard, so that a test reads as a dialogue.
pub trait StreamExt {
    /// Sends all of it.
    fn say(&mut self, bytes: &[u8]);
    /// Receives exactly so many bytes.
    fn hear(&mut self, count: usize) -> Vec<u8>;
    /// Sends bytes to an echo and expects them back.
    fn ask(&mut self, bytes: &[u8]);
    /// Sends bytes to somebody who refuses, and receives until the end. The refusal may come before the bytes are sent.
    fn say_in_vain(&mut self, bytes: &[u8]) -> (Vec<u8>, End);
    /// Ends the own direction; the other stays open.
    fn half_close(&self);
    /// Receives until the other side ends its direction: all bytes, and how it ended.
    fn hear_end(&mut self) -> (Vec<u8>, End);
    /// Ends the connection with RST.
    fn reset(self);
    /// Waits for the end of an idle connection and tells how long it took.
    fn time_to_end(&mut self) -> (End, Duration);
}

impl StreamExt for TcpStream {
    #[track_caller]
    fn say(&mut self, bytes: &[u8]) {
        if let Err(e) = self.write_all(bytes) {
            panic!("{}: send {} bytes: {e}", ends(self), bytes.len());
        }
    }

    #[track_caller]
    fn hear(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        let mut have = 0;
        while have < count {
            match self.read(&mut bytes[have..]) {
                Ok(0) => panic!("{}: the end came after {have} of {count} bytes", ends(self)),
                Ok(n) => have += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => panic!("{}: receive, after {have} of {count} bytes: {e}", ends(self)),
            }
        }
        bytes
    }

    #[track_caller]
    fn ask(&mut self, bytes: &[u8]) {
        self.say(bytes);
        let back = self.hear(bytes.len());
        assert_eq!(String::from_utf8_lossy(&back), String::from_utf8_lossy(bytes), "{}: echo", ends(self));
    }

    #[track_caller]
    fn say_in_vain(&mut self, bytes: &[u8]) -> (Vec<u8>, End) {
        match self.write_all(bytes) {
            // The kernel tells of a RST once; after it, reading finds an end like any other.
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => (Vec::new(), End::Reset),
            Err(e) => panic!("{}: send {} bytes: {e}", ends(self), bytes.len()),
            Ok(()) => self.hear_end(),
        }
    }

    #[track_caller]
    fn half_close(&self) {
        self.shutdown(Shutdown::Write).unwrap_or_else(|e| panic!("{}: half-close: {e}", ends(self)));
    }

    #[track_caller]
    fn hear_end(&mut self) -> (Vec<u8>, End) {
        let mut bytes = Vec::new();
        match read_to_end(self, &mut bytes) {
            Ok(end) => (bytes, end),
            Err(e) => panic!("{}: no end after {} bytes: {e}", ends(self), bytes.len()),
        }
    }

    fn reset(self) {
        let socket = socket2::Socket::from(self);
        socket.set_linger(Some(Duration::ZERO)).expect("set SO_LINGER");
    }

    #[track_caller]
    fn time_to_end(&mut self) -> (End, Duration) {
        let start = Instant::now();
        let (bytes, end) = self.hear_end();
        assert!(bytes.is_empty(), "{}: bytes came before the end: {:?}", ends(self), String::from_utf8_lossy(&bytes));
        (end, start.elapsed())
    }
}

/// Reads until FIN or RST. An error is anything else, such as the timeout.
pub(crate) fn read_to_end(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> io::Result<End> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(End::Fin),
            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(End::Reset),
            Err(e) => return Err(e),
        }
    }
}

/// The two ends of a connection, for messages.
fn ends(stream: &TcpStream) -> String {
    let show = |address: io::Result<std::net::SocketAddr>| address.map_or_else(|_| "?".to_owned(), |a| a.to_string());
    format!("{} → {}", show(stream.local_addr()), show(stream.peer_addr()))
}

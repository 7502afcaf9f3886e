//! The little HTTP that tests need to read admin ports: one request, one answer, connection closed.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(10);

/// An answer: status code and body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub body: String,
}

pub(crate) fn request(method: &str, address: SocketAddr, path: &str) -> io::Result<Response> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    // HTTP/1.0: no chunks, and the end of the connection is the end of the body.
    write!(stream, "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Length: 0\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    let parsed = answer.split_once("\r\n\r\n").and_then(|(head, body)| {
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some(Response { status, body: body.to_owned() })
    });
    parsed.ok_or_else(|| io::Error::other(format!("{address}{path} answered no HTTP: {answer:?}")))
}

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
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    parse(&answer).ok_or_else(|| {
        let start = String::from_utf8_lossy(&answer[..answer.len().min(500)]);
        io::Error::other(format!("{address}{path} answered no HTTP: {start:?}"))
    })
}

/// A whole answer. Without chunks its body ends where the connection did.
fn parse(answer: &[u8]) -> Option<Response> {
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let body = &answer[end + 4..];
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let is_chunked = head.lines().any(|line| line.eq_ignore_ascii_case("transfer-encoding: chunked"));
    let body = if is_chunked { join_chunks(body)? } else { body.to_vec() };
    Some(Response { status, body: String::from_utf8_lossy(&body).into_owned() })
}

fn join_chunks(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest.windows(2).position(|two| two == b"\r\n")?;
        let size =
            usize::from_str_radix(std::str::from_utf8(&rest[..line]).ok()?.split(';').next()?.trim(), 16).ok()?;
        rest = &rest[line + 2..];
        if size == 0 {
            return Some(body);
        }
        body.extend_from_slice(rest.get(..size)?);
        rest = rest.get(size + 2..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_with_and_without_chunks_are_read() {
        let plain = parse(b"HTTP/1.1 503 No\r\nContent-Length: 3\r\n\r\nabc").expect("an answer");
        assert_eq!(plain, Response { status: 503, body: "abc".to_owned() });
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        let whole = parse(&[head.as_slice(), b"3\r\nabc\r\nA\r\n0123456789\r\n0\r\n\r\n"].concat()).expect("an answer");
        assert_eq!(whole.body, "abc0123456789");
        assert_eq!(parse(&[head.as_slice(), b"3\r\nab"].concat()), None, "an end within a chunk");
    }
}

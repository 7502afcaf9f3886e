//! One request and its answer, as bytes or as HTTP/1.1, of the same size either way.
//!
//! The HTTP is no more than a proxy between the two needs to understand it, so that the ends cost little.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{ANSWER, REQUEST, Talk};

/// Longest head with what comes behind it in the same read: a proxy adds headers.
const HEAD: usize = 8192;

/// The client's side.
pub(super) async fn request(stream: &mut TcpStream, talk: Talk) -> io::Result<()> {
    match talk {
        Talk::Bytes => {
            let mut answer = [0; ANSWER];
            stream.write_all(&[b'q'; REQUEST]).await?;
            stream.read_exact(&mut answer).await?;
            Ok(())
        }
        Talk::Http => {
            stream.write_all(&http_request()).await?;
            let mut buffer = [0; HEAD];
            let (head, had) = read_head(stream, &mut buffer).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            let text = String::from_utf8_lossy(&buffer[..head]);
            if !text.starts_with("HTTP/1.1 200 ") {
                return Err(io::Error::other(format!("the answer is {:?}", text.lines().next())));
            }
            let body = content_length(&text).ok_or_else(|| io::Error::other("an answer without a length"))?;
            let missing = (head + body).saturating_sub(had);
            let mut rest = vec![0; missing];
            stream.read_exact(&mut rest).await?;
            Ok(())
        }
    }
}

/// The server's side, until the client ends.
pub(super) async fn answer(mut stream: TcpStream, talk: Talk) -> io::Result<()> {
    match talk {
        Talk::Bytes => {
            let mut request = [0; REQUEST];
            let answer = [b'a'; ANSWER];
            loop {
                stream.read_exact(&mut request).await?;
                stream.write_all(&answer).await?;
            }
        }
        Talk::Http => {
            let answer = http_answer();
            let mut buffer = [0; HEAD];
            // A client sends its next request when it has the answer: nothing of it is behind the head.
            while read_head(&mut stream, &mut buffer).await?.is_some() {
                stream.write_all(&answer).await?;
            }
            Ok(())
        }
    }
}

/// Reads to the end of a head at least: where that is, and how much was read. Nothing at the end of the stream.
async fn read_head(stream: &mut TcpStream, buffer: &mut [u8]) -> io::Result<Option<(usize, usize)>> {
    let mut had = 0;
    loop {
        if let Some(end) = buffer[..had].windows(4).position(|four| four == b"\r\n\r\n") {
            return Ok(Some((end + 4, had)));
        }
        match stream.read(&mut buffer[had..]).await? {
            0 if had == 0 => return Ok(None),
            0 => return Err(io::Error::other("the stream or the room for a head ends within it")),
            n => had += n,
        }
    }
}

fn content_length(head: &str) -> Option<usize> {
    head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().ok())?
    })
}

fn http_request() -> [u8; REQUEST] {
    let (front, back) = ("GET /bench HTTP/1.1\r\nhost: server.bench\r\nx-filling: ", "\r\n\r\n");
    let filling = "q".repeat(REQUEST - front.len() - back.len());
    format!("{front}{filling}{back}").into_bytes().try_into().expect("filled up to the size")
}

fn http_answer() -> [u8; ANSWER] {
    let head = |body: usize| format!("HTTP/1.1 200 OK\r\ncontent-length: {body}\r\n\r\n");
    // The length has three digits.
    let body = ANSWER - head(100).len();
    format!("{}{}", head(body), "a".repeat(body)).into_bytes().try_into().expect("filled up to the size")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn both_ways_to_talk_work_and_have_the_same_size() {
        for talk in [Talk::Bytes, Talk::Http] {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("listen");
            let to = listener.local_addr().expect("an address");
            let server = tokio::spawn(async move {
                let (stream, _) = listener.accept().await.expect("accept");
                answer(stream, talk).await
            });
            let mut stream = TcpStream::connect(to).await.expect("connect");
            for _ in 0..3 {
                request(&mut stream, talk).await.unwrap_or_else(|e| panic!("{talk:?}: {e}"));
            }
            drop(stream);
            let _ = server.await.expect("the server's task");
        }
    }

    #[test]
    fn the_length_of_a_body_is_found() {
        assert_eq!(content_length("HTTP/1.1 200 OK\r\nContent-Length: 12\r\n"), Some(12));
        assert_eq!(content_length("HTTP/1.1 200 OK\r\nserver: x\r\n"), None);
    }
}

//! Asking a proxy's admin server.

use std::net::SocketAddr;
use std::time::Duration;

use http::StatusCode;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

/// Why the proxy gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error("no proxy answers at {address}: {reason} (is this run on the proxy's node, in its network namespace?)")]
    Unreachable { address: SocketAddr, reason: String },
    #[error("{0}")]
    Refused(String),
    #[error("the proxy at {address} answered {path} with {status}: {body}")]
    Status { address: SocketAddr, path: String, status: StatusCode, body: String },
}

/// GETs a page. `parameters` are encoded here.
pub async fn get(address: SocketAddr, path: &str, parameters: &[(&str, &str)]) -> Result<String, AskError> {
    let unreachable = |reason: String| AskError::Unreachable { address, reason };
    let asked = tokio::time::timeout(ANSWER, ask(address, path, parameters)).await;
    let (status, body) =
        asked.map_err(|_| unreachable(format!("nothing came within {ANSWER:?}")))?.map_err(unreachable)?;
    match status {
        StatusCode::OK => Ok(body),
        StatusCode::BAD_REQUEST => Err(AskError::Refused(body.trim_end().to_owned())),
        status => Err(AskError::Status { address, path: path.to_owned(), status, body: body.trim_end().to_owned() }),
    }
}

async fn ask(address: SocketAddr, path: &str, parameters: &[(&str, &str)]) -> Result<(StatusCode, String), String> {
    let socket = TcpStream::connect(address).await.map_err(|e| e.to_string())?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(socket)).await.map_err(|e| e.to_string())?;
    let query: Vec<String> = parameters.iter().map(|(name, value)| format!("{name}={}", encode(value))).collect();
    let request = http::Request::get(format!("{path}?{}", query.join("&")))
        .header(http::header::HOST, address.to_string())
        .body(Empty::<Bytes>::new())
        .map_err(|e| e.to_string())?;
    let answer = async {
        let response = sender.send_request(request).await.map_err(|e| e.to_string())?;
        let status = response.status();
        let body = Limited::new(response.into_body(), LONGEST).collect().await.map_err(|e| e.to_string())?;
        Ok((status, String::from_utf8_lossy(&body.to_bytes()).into_owned()))
    };
    tokio::pin!(answer);
    tokio::select! {
        answer = &mut answer => answer,
        // The connection may end with the answer's last byte.
        _ = connection => answer.await,
    }
}

fn encode(value: &str) -> String {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                encoded.push(byte.into())
            }
            other => encoded.push_str(&format!("%{other:02X}")),
        }
    }
    encoded
}

/// For the whole answer.
const ANSWER: Duration = Duration::from_secs(10);
/// Bytes of an answer.
const LONGEST: usize = 64 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::http::{Response, Router, Server};

    #[tokio::test]
    async fn parameters_arrive_as_they_were_given_and_refusals_in_words() {
        let server = Server::bind("test", "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = server.local_addr();
        let router = Router::new()
            .get("/echo", |request| Response::text(StatusCode::OK, request.query("q").unwrap_or_default()))
            .get("/no", |_| Response::text(StatusCode::BAD_REQUEST, "not so\n"));
        let serving = tokio::spawn(server.serve(router, std::future::pending::<()>()));
        let odd = "spiffe://a/b?c=d&e f%20\u{e9}";
        assert_eq!(get(address, "/echo", &[("q", odd)]).await.unwrap(), odd);
        assert_eq!(get(address, "/no", &[]).await.unwrap_err().to_string(), "not so");
        assert!(matches!(get(address, "/other", &[]).await, Err(AskError::Status { status, .. }) if status == 404));
        serving.abort();
        let _ = serving.await;
        assert!(get(address, "/echo", &[]).await.unwrap_err().to_string().contains("no proxy answers"));
    }
}

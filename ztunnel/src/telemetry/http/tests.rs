use std::io::Write as _;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;

/// A running server and what it answers to raw bytes.
struct Running {
    address: SocketAddr,
    task: tokio::task::JoinHandle<()>,
}

impl Running {
    fn start(router: Router) -> Self {
        let server = Server::bind("test", "127.0.0.1:0".parse().unwrap()).unwrap();
        let address = server.local_addr();
        Self { address, task: tokio::spawn(server.serve(router, std::future::pending())) }
    }

    async fn ask(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        String::from_utf8(answer).unwrap()
    }

    async fn get(&self, path: &str) -> String {
        self.ask(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn pages_answer_by_path_and_method() {
    let router = Router::new()
        .get("/a", |r| Response::text(StatusCode::OK, format!("level={:?}", r.query("level"))))
        .post("/b", |_| Response::json(&["done"]));
    let server = Running::start(router);
    let answer = server.get("/a?level=info%2Caccess%3Ddebug&x").await;
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with(r#"level=Some("info,access=debug")"#), "{answer}");
    assert!(server.get("/a?reset").await.ends_with("level=None"));
    assert!(server.get("/none").await.starts_with("HTTP/1.1 404"));
    let answer = server.get("/b").await;
    assert!(answer.starts_with("HTTP/1.1 405") && answer.contains("allow: POST"), "{answer}");
    let answer = server.ask("POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
    assert!(answer.contains("application/json") && answer.contains("\"done\""), "{answer}");
}

#[tokio::test]
async fn those_who_hold_connections_keep_nobody_out() {
    let server = Running::start(Router::new().get("/a", |_| Response::text(StatusCode::OK, "here")));
    let mut held = Vec::new();
    for host in 1..=8 {
        for _ in 0..MAX_OF_CLIENT {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(format!("127.0.1.{host}:0").parse().unwrap()).unwrap();
            held.push(socket.connect(server.address).await.unwrap());
        }
        assert!(server.get("/a").await.ends_with("here"), "while {} are held", held.len());
    }
}

#[tokio::test]
async fn a_large_page_is_streamed_whole() {
    let server = Running::start(Router::new().get("/large", |_| {
        Response::stream("text/plain", |out| {
            for i in 0..200_000 {
                writeln!(out, "line {i}")?;
            }
            Ok(())
        })
    }));
    let answer = server.get("/large").await;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains("transfer-encoding: chunked"), "{head}");
    assert!(body.contains("line 199999") && body.ends_with("0\r\n\r\n"));
}

#[tokio::test]
async fn a_page_that_fails_half_way_does_not_look_whole() {
    let server = Running::start(Router::new().get("/broken", |_| {
        Response::stream("text/plain", |out| {
            out.write_all(&[b'x'; 200_000])?;
            Err(io::Error::other("no more"))
        })
    }));
    assert!(!server.get("/broken").await.ends_with("0\r\n\r\n"));
}

#[tokio::test]
async fn headers_beyond_the_bound_are_refused() {
    let server = Running::start(Router::new().get("/", |_| Response::html("hi")));
    let request = format!("GET / HTTP/1.1\r\nhost: x\r\nlong: {}\r\n\r\n", "y".repeat(MAX_HEADER_BYTES));
    assert!(server.ask(&request).await.starts_with("HTTP/1.1 431"));
}

/// Anybody can open connections to the port that kubelet probes.
#[tokio::test]
async fn idle_connections_do_not_keep_others_out_and_are_bounded() {
    let server = Running::start(Router::new().alive());
    let mut idle = Vec::new();
    for _ in 0..MAX_CONNECTIONS + 10 {
        idle.push(TcpStream::connect(server.address).await.unwrap());
    }
    let answer = tokio::time::timeout(Duration::from_secs(10), server.get("/healthz")).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    // The oldest made room, the newest may still ask.
    let mut byte = [0];
    assert!(matches!(idle[0].read(&mut byte).await, Ok(0) | Err(_)));
    let newest = idle.last_mut().unwrap();
    newest.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    assert_eq!(newest.read(&mut byte).await.unwrap(), 1);
}

#[tokio::test]
async fn a_taken_port_is_named() {
    let first = Server::bind("metrics", "127.0.0.1:0".parse().unwrap()).unwrap();
    let error = Server::bind("metrics", first.local_addr()).unwrap_err().to_string();
    let port = first.local_addr().port();
    assert_eq!(
        error,
        format!("the metrics server cannot listen on 127.0.0.1:{port}: port {port} is taken by another process")
    );
}

#[tokio::test]
async fn the_unspecified_address_serves_ipv4_too() {
    let server = Server::bind("test", "[::]:0".parse().unwrap()).unwrap();
    let port = server.local_addr().port();
    let task = tokio::spawn(server.serve(Router::new(), std::future::pending()));
    TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
    task.abort();
}

#[tokio::test]
async fn stop_ends_the_server() {
    let server = Server::bind("test", "127.0.0.1:0".parse().unwrap()).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let task = tokio::spawn(server.serve(Router::new(), async {
        let _ = stopped.await;
    }));
    stop.send(()).unwrap();
    task.await.unwrap();
}

#[test]
fn queries_are_decoded() {
    assert_eq!(decode("a%2Cb+c%zz%"), "a,b c%zz%");
}

//! A small HTTP/1 server for the pages of operators: metrics, health, status. Proxy, agent and control use the same.
//!
//! Must never keep more than a bounded number of connections, nor let those who hold theirs keep others out, nor wait
//! for a slow client without limit, nor read a request's body: no page needs one.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::{Method, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

mod body;

use super::log::Hush;
use body::Body;
pub use body::Chunks;

/// What a page's function sees of a request.
#[derive(Debug)]
pub struct Request {
    head: http::request::Parts,
    peer: SocketAddr,
}

/// What a page's function answers.
pub struct Response {
    status: StatusCode,
    content_type: &'static str,
    body: Body,
}

/// Pages by path and method. An unknown path is 404, a known one with another method 405.
#[derive(Default)]
pub struct Router {
    pages: BTreeMap<&'static str, Vec<(Method, Page)>>,
}

type Page = Box<dyn Fn(&Request) -> Response + Send + Sync>;

/// A server that listens but does not answer yet.
#[derive(Debug)]
pub struct Server {
    name: &'static str,
    listener: TcpListener,
    address: SocketAddr,
}

/// A server that could not listen.
#[derive(Debug, thiserror::Error)]
#[error("the {name} server cannot listen on {address}: {reason}")]
pub struct BindError {
    name: &'static str,
    address: SocketAddr,
    reason: String,
    #[source]
    source: io::Error,
}

impl Router {
    pub fn new() -> Self {
        Self::default()
    }

    /// A page that is read. Its function runs on the server's thread: it must be quick; what is long goes into
    /// [`Response::stream`].
    pub fn get(self, path: &'static str, page: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        self.page(Method::GET, path, page)
    }

    /// A page that does something.
    pub fn post(self, path: &'static str, page: impl Fn(&Request) -> Response + Send + Sync + 'static) -> Self {
        self.page(Method::POST, path, page)
    }

    /// `/healthz`: the process answers.
    pub fn alive(self) -> Self {
        self.get("/healthz", |_| Response::text(StatusCode::OK, "ok\n"))
    }

    /// The paths that can be read, in order.
    pub fn paths(&self) -> impl Iterator<Item = &'static str> {
        self.pages.keys().copied()
    }

    fn page(
        mut self,
        method: Method,
        path: &'static str,
        page: impl Fn(&Request) -> Response + Send + Sync + 'static,
    ) -> Self {
        self.pages.entry(path).or_default().push((method, Box::new(page)));
        self
    }

    fn answer(&self, request: &Request) -> hyper::Response<Body> {
        let Some(pages) = self.pages.get(request.path()) else {
            let paths: Vec<&str> = self.pages.keys().copied().collect();
            let text = format!("no such page; there are: {}\n", paths.join(", "));
            return Response::text(StatusCode::NOT_FOUND, text).into();
        };
        if let Some((_, page)) = pages.iter().find(|(method, _)| *method == request.head.method) {
            return page(request).into();
        }
        let mut answer: hyper::Response<Body> =
            Response::text(StatusCode::METHOD_NOT_ALLOWED, "this page does not know the method\n").into();
        let methods: Vec<&str> = pages.iter().map(|(method, _)| method.as_str()).collect();
        if let Ok(methods) = HeaderValue::from_str(&methods.join(", ")) {
            answer.headers_mut().insert(ALLOW, methods);
        }
        answer
    }
}

impl Request {
    /// Who asks.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    pub fn path(&self) -> &str {
        self.head.uri.path()
    }

    /// The value of a parameter of the query; a parameter without `=` has the empty value.
    pub fn query(&self, name: &str) -> Option<String> {
        self.queries().find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// All parameters of the query, decoded.
    pub fn queries(&self) -> impl Iterator<Item = (String, String)> {
        let query = self.head.uri.query().unwrap_or("");
        query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(key), decode(value))
        })
    }

    /// A header's value, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.headers.get(name)?.to_str().ok()
    }
}

impl Response {
    pub fn text(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body: Body::full(text.into()) }
    }

    pub fn html(text: impl Into<String>) -> Self {
        Self { status: StatusCode::OK, content_type: "text/html; charset=utf-8", body: Body::full(text.into()) }
    }

    /// A small value as JSON; for a large one see [`Response::stream`].
    pub fn json(value: &impl serde::Serialize) -> Self {
        match serde_json::to_string_pretty(value) {
            Ok(text) => {
                Self { status: StatusCode::OK, content_type: "application/json", body: Body::full(text + "\n") }
            }
            Err(e) => Self::text(StatusCode::INTERNAL_SERVER_ERROR, format!("the page cannot be written: {e}\n")),
        }
    }

    /// A body of any size, written by `write` on a thread of its own in pieces as the client takes them: memory stays
    /// bounded. If `write` fails, the client sees a broken answer, never a short one that looks whole.
    pub fn stream(
        content_type: &'static str,
        write: impl FnOnce(&mut Chunks) -> io::Result<()> + Send + 'static,
    ) -> Self {
        Self { status: StatusCode::OK, content_type, body: Body::stream(write) }
    }
}

impl From<Response> for hyper::Response<Body> {
    fn from(response: Response) -> Self {
        let mut answer = hyper::Response::new(response.body);
        *answer.status_mut() = response.status;
        answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(response.content_type));
        answer
    }
}

impl Server {
    /// Listens. `[::]` means IPv4 too, and falls back to `0.0.0.0` where there is no IPv6.
    pub fn bind(name: &'static str, address: SocketAddr) -> Result<Self, BindError> {
        let listener = match listen(address) {
            Err(e) if address.ip().is_unspecified() && address.is_ipv6() && no_ipv6(&e) => {
                listen((Ipv4Addr::UNSPECIFIED, address.port()).into())
            }
            other => other,
        };
        let listener = listener.and_then(TcpListener::from_std);
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|source| {
            let reason = match source.kind() {
                io::ErrorKind::AddrInUse => format!("port {} is taken by another process", address.port()),
                io::ErrorKind::AddrNotAvailable => "the address is not on this machine".to_owned(),
                _ => source.to_string(),
            };
            BindError { name, address, reason, source }
        })?;
        Ok(Self { name, listener, address })
    }

    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` is done; then open connections are cut.
    pub async fn serve(self, router: Router, stop: impl Future<Output = ()>) {
        let router = Arc::new(router);
        let mut connections = Connections::default();
        let mut stop = std::pin::pin!(stop);
        loop {
            let accepted = tokio::select! {
                () = &mut stop => return,
                accepted = self.listener.accept() => accepted,
                () = connections.ended() => continue,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (router, used) = (router.clone(), Arc::new(Used::default()));
                    let serve = serve_connection(stream, peer, router, used.clone());
                    connections.add(peer.ip().to_canonical(), used, serve);
                }
                Err(error) => {
                    if let Some(untold) = ACCEPT_HUSH.speak() {
                        let (server, address) = (self.name, self.address);
                        tracing::warn!(server, %address, %error, untold, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// The connections that are open. A new one is never turned away: the one that has been of no use for longest goes.
#[derive(Default)]
struct Connections {
    tasks: JoinSet<()>,
    open: HashMap<tokio::task::Id, Open>,
}

struct Open {
    client: IpAddr,
    used: Arc<Used>,
    task: AbortHandle,
}

/// When a connection last asked for something, counted in requests of the whole process.
struct Used(AtomicU64);

impl Default for Used {
    fn default() -> Self {
        Self(AtomicU64::new(Self::next()))
    }
}

impl Used {
    fn now(&self) {
        self.0.store(Self::next(), Ordering::Relaxed);
    }

    fn next() -> u64 {
        static REQUESTS: AtomicU64 = AtomicU64::new(0);
        REQUESTS.fetch_add(1, Ordering::Relaxed)
    }
}

impl Connections {
    fn add(&mut self, client: IpAddr, used: Arc<Used>, serve: impl Future<Output = ()> + Send + 'static) {
        let of_client = self.open.values().filter(|open| open.client == client).count();
        if of_client >= MAX_OF_CLIENT {
            self.cut(|open| open.client == client);
        } else if self.open.len() >= MAX_CONNECTIONS {
            self.cut(|_| true);
        }
        let task = self.tasks.spawn(serve);
        self.open.insert(task.id(), Open { client, used, task });
    }

    fn cut(&mut self, of: impl Fn(&Open) -> bool) {
        let candidates = self.open.iter().filter(|(_, open)| of(open));
        let longest = candidates.min_by_key(|(_, open)| open.used.0.load(Ordering::Relaxed)).map(|(id, _)| *id);
        if let Some(open) = longest.and_then(|id| self.open.remove(&id)) {
            open.task.abort();
        }
    }

    /// Ready when one has ended; never while there is none.
    async fn ended(&mut self) {
        let id = match self.tasks.join_next_with_id().await {
            Some(Ok((id, ()))) => id,
            Some(Err(error)) => error.id(),
            None => return std::future::pending().await,
        };
        self.open.remove(&id);
    }
}

async fn serve_connection(stream: TcpStream, peer: SocketAddr, router: Arc<Router>, used: Arc<Used>) {
    let _ = stream.set_nodelay(true);
    // A client that does not read its answer is cut by the kernel.
    let _ = socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(WRITE_TIMEOUT));
    let service = hyper::service::service_fn(|request: hyper::Request<hyper::body::Incoming>| {
        used.now();
        let (head, _unread) = request.into_parts();
        let answer = router.answer(&Request { head, peer });
        async move { Ok::<_, std::convert::Infallible>(answer) }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEADER_BYTES)
        .max_headers(MAX_HEADERS)
        .serve_connection(TokioIo::new(stream), service);
    // Whatever the client did wrong is its own trouble.
    let _ = tokio::time::timeout(CONNECTION_LIFE, connection).await;
}

fn listen(address: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(!address.ip().is_unspecified())?;
    }
    socket.bind(&address.into())?;
    socket.listen(128)?;
    Ok(socket.into())
}

fn no_ipv6(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EAFNOSUPPORT | libc::EADDRNOTAVAIL))
}

/// Percent and plus signs of a query; what is not right stays as it is.
fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = (bytes[i] == b'%').then(|| text.get(i + 1..i + 3)).flatten();
        let code = code.filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        match code.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                i += 3;
            }
            None => {
                out.push(if bytes[i] == b'+' { b' ' } else { bytes[i] });
                i += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

const MAX_CONNECTIONS: usize = 64;
/// Of one address.
const MAX_OF_CLIENT: usize = 16;
static ACCEPT_HUSH: Hush = Hush::new(1);
/// From the start of a wait for a request, idle time included, to the end of its header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Sent data without acknowledgement.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection's longest life.
const CONNECTION_LIFE: Duration = Duration::from_secs(600);
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_HEADERS: usize = 64;
/// After a failed accept (mostly: no descriptors left).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;

//! Transport and server against hostile and slow peers, over real socket pairs.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use super::message::{Request, Response, encode_hello};
use super::server::{Arrival, HelloError, RequestError, Server, ServerConfig, Session};
use super::transport::{MAX_PACKET, Seqpacket, TransportError};

/// A socket pair whose one end is raw, so that it can send what our own sender would not.
fn raw_pair() -> (OwnedFd, Seqpacket) {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    (a, Seqpacket::from_fd(b).unwrap())
}

fn send_raw(fd: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    rustix::net::sendmsg(fd, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

/// Open descriptors of this process that point at this file.
fn open_of(marker: &std::path::Path) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    entries.filter(|entry| std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == marker)).count()
}

fn temp(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("understory-zds-{}-{name}-{number}", std::process::id()))
}

#[tokio::test]
async fn packets_keep_their_borders_and_descriptors() {
    let (a, b) = Seqpacket::pair().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    a.send(b"one", &[file.as_fd()]).await.unwrap();
    a.send(&[7; MAX_PACKET], &[]).await.unwrap();
    let first = b.receive().await.unwrap();
    assert_eq!((first.bytes.as_slice(), first.descriptors.len()), (b"one".as_slice(), 1));
    let second = b.receive().await.unwrap();
    assert_eq!((second.bytes.len(), second.descriptors.len()), (MAX_PACKET, 0));
    drop(a);
    assert!(matches!(b.receive().await, Err(TransportError::Closed)));
}

#[tokio::test]
async fn a_packet_that_is_too_long_is_an_error_and_its_descriptors_are_closed() {
    let marker = temp("long");
    let file = std::fs::File::create(&marker).unwrap();
    let (raw, socket) = raw_pair();
    send_raw(&raw, &[1; MAX_PACKET + 1], &[file.as_fd()]);
    assert!(matches!(socket.receive().await, Err(TransportError::Truncated)));
    assert_eq!(open_of(&marker), 1);
    std::fs::remove_file(marker).unwrap();
}

#[tokio::test]
async fn too_many_descriptors_are_an_error_and_all_are_closed() {
    let marker = temp("many");
    let file = std::fs::File::create(&marker).unwrap();
    let (raw, socket) = raw_pair();
    send_raw(&raw, b"x", &[file.as_fd(); 40]);
    assert!(matches!(socket.receive().await, Err(TransportError::ControlTruncated)));
    assert_eq!(open_of(&marker), 1);
    std::fs::remove_file(marker).unwrap();
}

#[tokio::test]
async fn received_descriptors_are_not_inherited_by_children() {
    let (a, b) = Seqpacket::pair().unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    a.send(b"x", &[file.as_fd()]).await.unwrap();
    let packet = b.receive().await.unwrap();
    let flags = rustix::io::fcntl_getfd(&packet.descriptors[0]).unwrap();
    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
}

/// A server, and a proxy that the test plays.
struct Rig {
    server: Server,
    path: PathBuf,
}

impl Rig {
    fn new() -> Rig {
        let path = temp("server").join("deep/zds.sock");
        let mut config = ServerConfig::new([path.clone(), temp("server-2")]);
        config.hello_timeout = Duration::from_millis(100);
        config.request_timeout = Duration::from_millis(100);
        Rig { server: Server::bind(config).unwrap(), path }
    }

    async fn arrival(&self) -> (Seqpacket, Arrival) {
        let proxy = Seqpacket::connect(&self.path).await.unwrap();
        (proxy, self.server.accept().await.unwrap())
    }

    async fn session(&self, extension: u32) -> (Seqpacket, Session) {
        let (proxy, arrival) = self.arrival().await;
        proxy.send(&encode_hello(extension), &[]).await.unwrap();
        (proxy, arrival.hello().await.unwrap())
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if let Some(folder) = self.path.ancestors().nth(2) {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

async fn answer(proxy: &Seqpacket, response: Response) -> Request {
    let request = Request::decode(proxy.receive().await.unwrap()).unwrap();
    let (bytes, descriptors) = response.encode();
    proxy.send(&bytes, &descriptors).await.unwrap();
    request
}

fn keep(uid: &str) -> Request {
    Request::Keep { uid: uid.into() }
}

#[tokio::test]
async fn the_socket_is_roots_alone_and_goes_with_the_server() {
    use std::os::unix::fs::PermissionsExt;
    let rig = Rig::new();
    assert_eq!(std::fs::metadata(&rig.path).unwrap().permissions().mode() & 0o777, 0o600);
    // A restarted agent takes the path; the end of the old one does not take it away again.
    let successor = Server::bind(ServerConfig::new([rig.path.clone()])).unwrap();
    let Rig { server, path } = &rig;
    let _ = server;
    let proxy = Seqpacket::connect(path).await.unwrap();
    let _arrival = successor.accept().await.unwrap();
    drop(proxy);
    drop(successor);
    assert!(!rig.path.exists());
}

#[tokio::test]
async fn a_proxy_that_says_nothing_or_nonsense_is_not_let_in() {
    let rig = Rig::new();
    let (_proxy, arrival) = rig.arrival().await;
    assert!(matches!(arrival.hello().await, Err(HelloError::Timeout(_))));
    let (proxy, arrival) = rig.arrival().await;
    proxy.send(&[8, 9], &[]).await.unwrap();
    assert!(matches!(arrival.hello().await, Err(HelloError::Protocol(_))));
    let (proxy, arrival) = rig.arrival().await;
    drop(proxy);
    assert!(matches!(arrival.hello().await, Err(HelloError::Transport(TransportError::Closed))));
}

#[tokio::test]
async fn requests_are_answered_one_by_one_and_refusals_are_errors() {
    let rig = Rig::new();
    let (proxy, session) = rig.session(1).await;
    assert_eq!(session.peer().pid, std::process::id() as i32);
    assert!(session.process().is_some());
    let asking = tokio::join!(session.request(keep("a")), session.request(keep("b")), async {
        let Request::Keep { uid: first } = answer(&proxy, Response::default()).await else { panic!() };
        let Request::Keep { uid: second } = answer(&proxy, Response::failed("no")).await else { panic!() };
        (first, second)
    });
    assert!(asking.0.is_ok());
    assert_eq!(asking.1.unwrap_err(), RequestError::Refused("no".into()));
    assert_eq!(asking.2, ("a".into(), "b".into()));
}

#[tokio::test]
async fn a_plain_proxy_never_sees_the_extension() {
    let rig = Rig::new();
    let (proxy, session) = rig.session(0).await;
    let drain = Request::Drain { uid: "a".into() };
    assert_eq!(session.request(drain).await.unwrap_err(), RequestError::NoExtension);
    let (kept, _) = tokio::join!(session.request(keep("a")), answer(&proxy, Response::default()));
    kept.unwrap();
}

#[tokio::test]
async fn a_stopped_proxy_costs_a_request_its_timeout_and_a_late_answer_is_not_mistaken() {
    let rig = Rig::new();
    let (proxy, session) = rig.session(1).await;
    assert!(matches!(session.request(keep("a")).await.unwrap_err(), RequestError::Timeout(_)));
    // Still stopped: the next request is not even sent.
    assert!(matches!(session.request(keep("b")).await.unwrap_err(), RequestError::Timeout(_)));
    assert!(!session.is_closed());
    // The answer to "a" comes at last, and must not pass for the answer to "c".
    answer(&proxy, Response::failed("late")).await;
    let (result, request) = tokio::join!(session.request(keep("c")), answer(&proxy, Response::default()));
    result.unwrap();
    assert!(matches!(request, Request::Keep { uid } if uid == "c"));
}

#[tokio::test]
async fn an_unasked_message_or_the_end_closes_the_session_with_a_reason() {
    let rig = Rig::new();
    let (proxy, session) = rig.session(1).await;
    let (bytes, _) = Response::default().encode();
    proxy.send(&bytes, &[]).await.unwrap();
    assert!(session.closed().await.contains("nobody asked"));
    assert!(matches!(session.request(keep("a")).await.unwrap_err(), RequestError::Closed(_)));

    let (proxy, session) = rig.session(1).await;
    drop(proxy);
    assert!(session.closed().await.contains("closed the connection"));
}

#[tokio::test]
async fn the_connection_closes_with_its_last_handle() {
    let rig = Rig::new();
    let (proxy, session) = rig.session(1).await;
    let clone = session.clone();
    drop(session);
    assert!(!clone.is_closed());
    drop(clone);
    assert!(matches!(proxy.receive().await, Err(TransportError::Closed)));
}

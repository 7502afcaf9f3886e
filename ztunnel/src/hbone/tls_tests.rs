use std::io::{Read, Write};
use std::time::Duration;

use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use rustls::{AlertDescription, SignatureScheme};
use tokio::net::TcpListener;

use super::*;
use crate::identity::testing::TestCa;
use crate::identity::{Certificate, Identity};

fn identity(name: &str) -> Identity {
    format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
}

#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

/// A client of rustls' buffered interface, on a thread of its own, that speaks at once as HTTP/2 does.
fn speak(to: std::net::SocketAddr, config: ClientConfig) -> std::thread::JoinHandle<io::Error> {
    std::thread::spawn(move || {
        let name = ServerName::try_from("0.0.0.0").unwrap();
        let mut tls = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
        let mut socket = std::net::TcpStream::connect(to).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let mut stream = rustls::Stream::new(&mut tls, &mut socket);
        let written = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        written.and_then(|()| stream.read_exact(&mut [0; 1])).unwrap_err()
    })
}

async fn refused(server: &Certificate, client: ClientConfig) -> (TlsError, Option<AlertDescription>, io::Error) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let client = speak(listener.local_addr().unwrap(), client);
    let (socket, _) = listener.accept().await.unwrap();
    let error = TlsSocket::accept(socket, server.server_config()).await.err().expect("the client is refused");
    let seen = tokio::task::spawn_blocking(|| client.join().unwrap()).await.unwrap();
    let alert = match seen.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::AlertReceived(alert)) => Some(*alert),
        _ => None,
    };
    (error, alert, seen)
}

#[tokio::test]
async fn a_refused_client_reads_the_alert_that_says_why() {
    let ca = TestCa::new("root");
    let server = ca.certificate(&identity("cart"));
    let mut nobody = (*ca.certificate(&identity("web")).client_config(&[identity("cart")])).clone();
    nobody.client_auth_cert_resolver = Arc::new(NoCertificate);
    let (error, alert, seen) = refused(&server, nobody).await;
    assert_eq!(alert, Some(AlertDescription::CertificateRequired), "{error}, client: {seen}");
}

#[tokio::test]
async fn whatever_a_stranger_sends_ends_in_an_error() {
    let server = TestCa::new("root").certificate(&identity("cart"));
    // A whole handshake record that says nothing, an alert, data before any handshake, another protocol, and nothing.
    let strange: [&[u8]; 7] = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        &[22, 3, 1, 0, 4, 1, 0, 0, 0],
        &[22, 3, 1, 0, 4, 99, 0, 0, 0, 22, 3, 1, 0, 4, 99, 0, 0, 0],
        &[21, 3, 3, 0, 2, 2, 40],
        &[23, 3, 3, 0, 1, 0],
        &[20, 3, 3, 0, 1, 1, 20, 3, 3, 0, 1, 1],
        b"",
    ];
    for bytes in strange {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut stranger = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        stranger.write_all(bytes).unwrap();
        stranger.shutdown(std::net::Shutdown::Write).unwrap();
        let (socket, _) = listener.accept().await.unwrap();
        assert!(TlsSocket::accept(socket, server.server_config()).await.is_err(), "{bytes:?}");
    }
}

/// A server that sends its session tickets in small pieces, and holds the last piece back until it has heard from the
/// client. Answers, in the end, with what it heard.
fn speak_in_pieces(listener: std::net::TcpListener, config: rustls::ServerConfig) {
    let (mut socket, _) = listener.accept().unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut tls = rustls::ServerConnection::new(Arc::new(config)).unwrap();
    let mut out = Vec::new();
    while tls.is_handshaking() {
        while tls.wants_write() {
            tls.write_tls(&mut out).unwrap();
        }
        socket.write_all(&out).unwrap();
        out.clear();
        tls.read_tls(&mut socket).unwrap();
        tls.process_new_packets().unwrap();
    }
    while tls.wants_write() {
        tls.write_tls(&mut out).unwrap();
    }
    let mut last = 0;
    while let Some(record) = out.get(last..).filter(|rest| rest.len() > 5) {
        let length = 5 + usize::from(u16::from_be_bytes([record[3], record[4]]));
        if record.len() == length {
            break;
        }
        last += length;
    }
    assert!(last > 0, "there are several records");
    socket.write_all(&out[..last]).unwrap();
    let mut heard = [0; 4];
    loop {
        tls.read_tls(&mut socket).unwrap();
        tls.process_new_packets().unwrap();
        if tls.reader().read(&mut heard).is_ok() {
            break;
        }
    }
    tls.writer().write_all(&heard).unwrap();
    let mut answer = out[last..].to_vec();
    while tls.wants_write() {
        tls.write_tls(&mut answer).unwrap();
    }
    socket.write_all(&answer).unwrap();
}

#[tokio::test]
async fn bytes_are_sent_also_while_half_of_a_handshake_message_has_come() {
    let ca = TestCa::new("root");
    let mut server = (*ca.certificate(&identity("cart")).server_config()).clone();
    server.send_tls13_tickets = 2;
    server.max_fragment_size = Some(40);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || speak_in_pieces(listener, server));
    let config = ca.certificate(&identity("web")).client_config(&[identity("cart")]);
    let mut tls = TlsSocket::connect(TcpStream::connect(to).await.unwrap(), config).await.unwrap();
    let mut read = Vec::new();
    while tls.inbox.filled_mut().is_empty() {
        tls.socket.readable().await.unwrap();
        let polled =
            std::future::poll_fn(|cx| Poll::Ready(tls.poll_read(cx, |bytes| read.extend_from_slice(bytes)))).await;
        assert!(polled.is_pending(), "{polled:?}");
    }
    assert_eq!(tls.write(b"ping").unwrap(), 4);
    std::future::poll_fn(|cx| tls.poll_send(cx)).await.unwrap();
    std::future::poll_fn(|cx| tls.poll_read(cx, |bytes| read.extend_from_slice(bytes))).await.unwrap();
    assert_eq!(read, b"ping");
    server.join().unwrap();
}

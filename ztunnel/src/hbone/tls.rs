//! A TLS connection over a TCP socket whose writes are held until the owner sends them: many frames of one turn of
//! the loop leave in few records and one system call.
//!
//! Built on rustls' unbuffered interface: records are decrypted in the buffer that the socket was read into, and
//! encrypted straight into the buffer that is written to the socket. Must never send plaintext, and never hand out
//! bytes before the handshake has finished.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Instant;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::{CertificateDer, IpAddr, Ipv4Addr, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, UnbufferedStatus};
use rustls::{AlertDescription, ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::buffers::{BUFFER_SIZE, Buffer, Inbox};
use crate::identity::{PeerError, describe_tls_error, take_refusal};

/// Why a TLS connection failed.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("TLS: {}", describe_tls_error(.0))]
    Protocol(#[from] rustls::Error),
    /// We do not take the peer for who it should be.
    #[error("{0}")]
    Peer(PeerError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("the peer closed the connection during the handshake")]
    ClosedInHandshake,
    #[error("the peer did not agree on h2 (ALPN {0:?})")]
    Alpn(Option<String>),
}

/// A TLS connection. Reads as bytes come; writes when [`TlsSocket::poll_send`] is called.
pub struct TlsSocket {
    socket: TcpStream,
    tls: Tls,
    /// Ciphertext from the socket that is not processed yet.
    inbox: Inbox,
    /// Plaintext that came while nobody read.
    rest: Vec<u8>,
    /// Plaintext that waits to be put into a record with what follows.
    staged: Vec<u8>,
    /// Records that wait for the socket.
    outbox: Option<Buffer>,
    handshaking: bool,
    peer_closed: bool,
    closing: bool,
    /// Reads of what nobody wants, after the end.
    lingered: u32,
    /// TLS cannot go on: what is left to do is to send the alert.
    failed: bool,
    /// When bytes last came from the peer: any frame is a sign of life.
    last_heard: Instant,
    /// By which the peer ended TLS.
    alert: Option<AlertDescription>,
}

enum Tls {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

/// What one step of the TLS machine came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Something was done; there may be more to do.
    Progress,
    /// A record's plaintext was delivered.
    Delivered,
    /// Nothing to do before more bytes come; the handshake is not finished.
    Handshaking,
    /// Nothing to do before more bytes come.
    Open,
    /// The record that was to be written is in the outbox.
    Sealed,
    /// The peer said that it sends nothing more.
    PeerClosed,
}

impl TlsSocket {
    /// Connects as a client. The server's name plays no part: identities are checked by the configuration's verifier.
    pub async fn connect(socket: TcpStream, config: Arc<ClientConfig>) -> Result<Self, TlsError> {
        let name = ServerName::IpAddress(IpAddr::V4(Ipv4Addr::from([0, 0, 0, 0])));
        let tls = Tls::Client(UnbufferedClientConnection::new(config, name)?);
        Self::handshake(socket, tls).await
    }

    /// Accepts as a server.
    pub async fn accept(socket: TcpStream, config: Arc<ServerConfig>) -> Result<Self, TlsError> {
        let tls = Tls::Server(UnbufferedServerConnection::new(config)?);
        Self::handshake(socket, tls).await
    }

    pub fn peer_certificates(&self) -> &[CertificateDer<'static>] {
        match &self.tls {
            Tls::Client(c) => c.peer_certificates(),
            Tls::Server(s) => s.peer_certificates(),
        }
        .unwrap_or_default()
    }

    pub fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The alert by which the peer ended TLS, if it did.
    pub fn alert(&self) -> Option<AlertDescription> {
        self.alert
    }

    pub fn last_heard(&self) -> Instant {
        self.last_heard
    }

    async fn handshake(socket: TcpStream, tls: Tls) -> Result<Self, TlsError> {
        let mut this = Self {
            socket,
            tls,
            inbox: Inbox::default(),
            rest: Vec::new(),
            staged: Vec::new(),
            outbox: None,
            handshaking: true,
            peer_closed: false,
            closing: false,
            lingered: 0,
            failed: false,
            last_heard: Instant::now(),
            alert: None,
        };
        loop {
            let step = match this.step(None, None) {
                Ok(step) => step,
                Err(error) => {
                    // At once: other connections of this thread have refusals of their own.
                    let refusal = take_refusal();
                    this.fail();
                    this.send_alert().await;
                    return Err(refusal.map_or(TlsError::Protocol(error), TlsError::Peer));
                }
            };
            match step {
                Step::Progress => continue,
                // Data comes right behind the peer's Finished; it could not be read before that was verified.
                Step::Open | Step::Sealed | Step::Delivered => break,
                Step::PeerClosed => return Err(TlsError::ClosedInHandshake),
                Step::Handshaking => {}
            }
            std::future::poll_fn(|cx| this.poll_send(cx)).await?;
            if std::future::poll_fn(|cx| this.poll_fill(cx)).await? == 0 {
                return Err(TlsError::ClosedInHandshake);
            }
        }
        std::future::poll_fn(|cx| this.poll_send(cx)).await?;
        this.handshaking = false;
        let alpn = match &this.tls {
            Tls::Client(c) => c.alpn_protocol(),
            Tls::Server(s) => s.alpn_protocol(),
        };
        if alpn != Some(b"h2") {
            return Err(TlsError::Alpn(alpn.map(|a| String::from_utf8_lossy(a).into_owned())));
        }
        Ok(this)
    }

    /// After an error: puts the alert that TLS has ready into the outbox. Once only, and with the inbox as the error
    /// left it: rustls panics when it is made to read on, or misses bytes that it has seen.
    fn fail(&mut self) {
        if !std::mem::replace(&mut self.failed, true) {
            let _ = self.step(None, None);
        }
    }

    fn broken(&mut self, error: rustls::Error) -> io::Error {
        if let rustls::Error::AlertReceived(alert) = error {
            self.alert = Some(alert);
        }
        self.fail();
        io::Error::new(io::ErrorKind::InvalidData, error)
    }

    /// Tells the peer why the handshake failed.
    async fn send_alert(&mut self) {
        let _ = tokio::time::timeout(LINGER, std::future::poll_fn(|cx| self.poll_linger(cx))).await;
    }

    /// Sends the last words, and reads on until the peer has seen the end: unread bytes would at close become a RST that
    /// overtakes them. To be given up after [`LINGER`].
    pub fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if ready!(self.poll_close(cx)).is_err() || ready!(Pin::new(&mut self.socket).poll_shutdown(cx)).is_err() {
            return Poll::Ready(());
        }
        let mut waste = [0; RECORD_SIZE];
        while self.lingered < LINGER_READS {
            let mut into = ReadBuf::new(&mut waste);
            let read = ready!(Pin::new(&mut self.socket).poll_read(cx, &mut into));
            if read.is_err() || into.filled().is_empty() {
                break;
            }
            self.lingered += 1;
        }
        Poll::Ready(())
    }

    /// Gives all that has come, decrypted, to `take`. Ready with `false` at the end of the stream.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, mut take: impl FnMut(&[u8])) -> Poll<io::Result<bool>> {
        let mut delivered = false;
        if !self.rest.is_empty() {
            take(&std::mem::take(&mut self.rest));
            delivered = true;
        }
        loop {
            if self.peer_closed {
                return Poll::Ready(Ok(delivered));
            }
            if self.failed {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            match self.step(Some(&mut take), None) {
                Ok(Step::Progress) => {}
                Ok(Step::Delivered) => delivered = true,
                Ok(Step::PeerClosed) => self.peer_closed = true,
                Ok(Step::Open | Step::Handshaking | Step::Sealed) => {
                    if delivered {
                        return Poll::Ready(Ok(true));
                    }
                    if ready!(self.poll_fill(cx))? == 0 {
                        // Without close_notify an end could have been forged by anybody on the path.
                        return Poll::Ready(Err(io::Error::new(
                            io::ErrorKind::UnexpectedEof,
                            "the connection ended without a TLS close_notify",
                        )));
                    }
                }
                Err(error) => return Poll::Ready(Err(self.broken(error))),
            }
        }
    }

    /// Bytes of streams that may be written now: what comes beyond that would wait behind too much. A reserve is left
    /// for what is not of streams.
    pub fn room(&self) -> usize {
        STREAMS_ROOM.saturating_sub(self.waiting())
    }

    /// Bytes that wait to be sent.
    pub fn waiting(&self) -> usize {
        self.outbox.as_ref().map_or(0, Buffer::len) + self.staged.len()
    }

    /// Takes plaintext to be sent with the next [`TlsSocket::poll_send`]: all that there is room for.
    pub fn write(&mut self, mut bytes: &[u8]) -> io::Result<usize> {
        if self.failed {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let whole = bytes.len();
        while !bytes.is_empty() && !self.is_full() {
            if self.staged.is_empty() && bytes.len() >= RECORD_SIZE {
                self.encrypt(Piece::Bytes(&bytes[..RECORD_SIZE]))?;
                bytes = &bytes[RECORD_SIZE..];
                continue;
            }
            if self.staged.capacity() == 0 {
                self.staged.reserve(FIRST_STAGED);
            }
            let n = bytes.len().min(RECORD_SIZE - self.staged.len());
            self.staged.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.staged.len() == RECORD_SIZE {
                self.encrypt(Piece::Staged)?;
            }
        }
        Ok(whole - bytes.len())
    }

    fn is_full(&self) -> bool {
        self.outbox.as_ref().is_some_and(|o| o.len() > BUFFER_SIZE - OUTBOX_SPARE)
    }

    /// Sends all that was written. Ready when the socket has taken everything.
    pub fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.staged.is_empty() && !self.failed {
            if self.is_full() {
                ready!(self.poll_drain(cx))?;
            }
            self.encrypt(Piece::Staged)?;
        }
        self.poll_drain(cx)
    }

    /// Sends all that was written and the orderly end.
    pub fn poll_close(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_send(cx))?;
        if !std::mem::replace(&mut self.closing, true) && !self.failed {
            self.encrypt(Piece::CloseNotify)?;
        }
        self.poll_drain(cx)
    }

    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(outbox) = &mut self.outbox else { return Poll::Ready(Ok(())) };
        while !outbox.is_empty() {
            let n = ready!(Pin::new(&mut self.socket).poll_write(cx, outbox.filled()))?;
            outbox.take(n);
        }
        self.outbox = None;
        Poll::Ready(Ok(()))
    }

    /// Reads from the socket into the inbox; 0 at its end.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        // Nothing is lent before there is something to read.
        if !self.inbox.is_lent() {
            ready!(self.socket.poll_read_ready(cx))?;
        }
        let mut room = self.inbox.room(RECORD_ROOM);
        if self.handshaking {
            room = &mut room[..RECORD_ROOM];
        }
        let mut room = ReadBuf::new(room);
        let read = Pin::new(&mut self.socket).poll_read(cx, &mut room);
        let n = room.filled().len();
        self.inbox.add(n);
        if self.handshaking {
            // A stranger who sends half a record and waits holds no more memory than that.
            self.inbox.shrink();
        }
        ready!(read)?;
        if n > 0 {
            self.last_heard = Instant::now();
        }
        Poll::Ready(Ok(n))
    }

    /// One step of TLS, with all that came. Where there is nothing else to do for it, `piece` is encrypted.
    fn step(&mut self, into: Taker<'_>, piece: Option<&Piece<'_>>) -> Result<Step, rustls::Error> {
        let Self { tls, inbox, outbox, rest, staged, .. } = self;
        let plain = piece.map(|piece| (piece, &staged[..]));
        let (discard, step) = match tls {
            Tls::Client(c) => advance(c, inbox.filled_mut(), outbox, rest, into, plain),
            Tls::Server(s) => advance(s, inbox.filled_mut(), outbox, rest, into, plain),
        };
        inbox.take(discard);
        step
    }

    /// Encrypts one record into the outbox.
    fn encrypt(&mut self, piece: Piece<'_>) -> io::Result<()> {
        loop {
            match self.step(None, Some(&piece)) {
                Ok(Step::Sealed) => break,
                // For example an answer to a key update; what was read on the way waits for the reader.
                Ok(Step::Progress | Step::Delivered) => {}
                // Told to the reader once it has read the rest; writing goes on.
                Ok(Step::PeerClosed) if !self.peer_closed => self.peer_closed = true,
                Ok(Step::PeerClosed | Step::Open | Step::Handshaking) => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(error) => return Err(self.broken(error)),
            }
        }
        if matches!(piece, Piece::Staged) {
            self.staged.clear();
            if self.staged.capacity() > IDLE_STAGED {
                self.staged = Vec::new();
            }
        }
        Ok(())
    }
}

/// What is encrypted into one record.
enum Piece<'a> {
    Staged,
    Bytes(&'a [u8]),
    CloseNotify,
}

/// Who takes decrypted bytes; without anybody they stay behind in the socket.
type Taker<'a> = Option<&'a mut dyn FnMut(&[u8])>;

/// The one thing that both ends of rustls' unbuffered connections share.
trait Machine {
    type Data;
    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Machine for UnbufferedClientConnection {
    type Data = ClientConnectionData;
    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(records)
    }
}

impl Machine for UnbufferedServerConnection {
    type Data = ServerConnectionData;
    fn process<'c, 'i>(&'c mut self, records: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(records)
    }
}

/// One step of the machine, which must see all that came: how many bytes of `records` are done with, and what came of
/// it. `plain`: what to encrypt where there is nothing else to do, and the staged bytes that it may mean.
fn advance(
    machine: &mut impl Machine,
    records: &mut [u8],
    outbox: &mut Option<Buffer>,
    rest: &mut Vec<u8>,
    mut into: Taker<'_>,
    plain: Option<(&Piece<'_>, &[u8])>,
) -> (usize, Result<Step, rustls::Error>) {
    let UnbufferedStatus { mut discard, state } = machine.process(records);
    let state = match state {
        Ok(state) => state,
        Err(error) => return (discard, Err(error)),
    };
    let step = match state {
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                let record = match record {
                    Ok(record) => record,
                    Err(error) => return (discard, Err(error)),
                };
                discard += record.discard;
                match &mut into {
                    Some(take) => take(record.payload),
                    None => rest.extend_from_slice(record.payload),
                }
            }
            Ok(Step::Delivered)
        }
        ConnectionState::EncodeTlsData(mut data) => {
            let outbox = outbox.get_or_insert_with(Buffer::lend);
            match data.encode(outbox.room(RECORD_ROOM)) {
                Ok(n) => {
                    outbox.add(n);
                    Ok(Step::Progress)
                }
                Err(EncodeError::InsufficientSize(_) | EncodeError::AlreadyEncoded) => {
                    Err(rustls::Error::General("a handshake message larger than a buffer".into()))
                }
            }
        }
        // What was encoded stands in the outbox and is sent in order, so it counts as sent.
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Step::Progress)
        }
        ConnectionState::BlockedHandshake => Ok(Step::Handshaking),
        ConnectionState::WriteTraffic(mut traffic) => match plain {
            None => Ok(Step::Open),
            Some((piece, staged)) => {
                let outbox = outbox.get_or_insert_with(Buffer::lend);
                let room = outbox.room(RECORD_ROOM);
                let written = match piece {
                    Piece::Staged => traffic.encrypt(staged, room),
                    Piece::Bytes(bytes) => traffic.encrypt(bytes, room),
                    Piece::CloseNotify => traffic.queue_close_notify(room),
                };
                written.map_err(|e| rustls::Error::General(e.to_string())).map(|n| {
                    outbox.add(n);
                    Step::Sealed
                })
            }
        },
        ConnectionState::PeerClosed | ConnectionState::Closed => Ok(Step::PeerClosed),
        _ => Err(rustls::Error::General("a state of TLS that is not used here".into())),
    };
    (discard, step)
}

/// How long a peer may take to read our last words.
pub const LINGER: std::time::Duration = std::time::Duration::from_secs(1);
const LINGER_READS: u32 = 64;
/// Plaintext in one record, bytes: the largest that TLS allows.
const RECORD_SIZE: usize = 16 * 1024;
/// A record with its header and tag, and handshake messages, fit into this.
const RECORD_ROOM: usize = 17 * 1024;
/// When less than this is free in the outbox, no more is taken: two records.
const OUTBOX_SPARE: usize = 2 * RECORD_ROOM;
/// Bytes of streams that wait before the socket at most.
const STREAMS_ROOM: usize = 3 * BUFFER_SIZE / 4;
/// Staging space to begin with, bytes.
const FIRST_STAGED: usize = 4 * 1024;
/// Staging space that an idle connection may keep, bytes.
const IDLE_STAGED: usize = 512;

#[cfg(test)]
#[path = "tls_tests.rs"]
mod tests;

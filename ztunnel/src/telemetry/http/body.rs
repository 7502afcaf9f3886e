//! Bodies of answers: whole, or made piece by piece while the client reads.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Frame, SizeHint};
use tokio::sync::mpsc;

/// A body, sent from front to end.
pub enum Body {
    /// Not started yet.
    Full(Option<Bytes>),
    /// The function that writes it, until the first piece is asked for.
    Unstarted(Option<Writer>),
    Streaming(mpsc::Receiver<Piece>),
}

type Writer = Box<dyn FnOnce(&mut Chunks) -> io::Result<()> + Send>;

pub enum Piece {
    Data(Bytes),
    /// The body is whole. Without it, it is broken.
    End,
    Failed(io::Error),
}

/// Where a streamed body is written. Writing waits for the client.
pub struct Chunks {
    filled: Vec<u8>,
    pieces: mpsc::Sender<Piece>,
}

impl Body {
    pub fn full(text: String) -> Self {
        Self::Full(Some(text.into()))
    }

    pub fn stream(write: impl FnOnce(&mut Chunks) -> io::Result<()> + Send + 'static) -> Self {
        Self::Unstarted(Some(Box::new(write)))
    }

    /// Starts the writer on a thread that may block. It ends when it is done or when the client is gone.
    fn start(write: Writer) -> mpsc::Receiver<Piece> {
        let (pieces, receiver) = mpsc::channel(PIECES_IN_FLIGHT);
        tokio::task::spawn_blocking(move || {
            let mut chunks = Chunks { filled: Vec::with_capacity(PIECE_BYTES), pieces };
            let written = write(&mut chunks).and_then(|()| chunks.send());
            let last = written.map_or_else(Piece::Failed, |()| Piece::End);
            let _ = chunks.pieces.blocking_send(last);
        });
        receiver
    }
}

impl hyper::body::Body for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            match &mut *self {
                Self::Full(bytes) => return Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
                Self::Unstarted(write) => match write.take() {
                    Some(write) => *self = Self::Streaming(Self::start(write)),
                    None => return Poll::Ready(None),
                },
                Self::Streaming(pieces) => {
                    return match std::task::ready!(pieces.poll_recv(cx)) {
                        Some(Piece::Data(bytes)) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
                        Some(Piece::End) => {
                            *self = Self::Full(None);
                            Poll::Ready(None)
                        }
                        Some(Piece::Failed(error)) => Poll::Ready(Some(Err(error))),
                        None => Poll::Ready(Some(Err(io::Error::other("the page's writer stopped half-way")))),
                    };
                }
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |b| b.len() as u64)),
            Self::Unstarted(_) | Self::Streaming(_) => SizeHint::default(),
        }
    }
}

impl Chunks {
    fn send(&mut self) -> io::Result<()> {
        if self.filled.is_empty() {
            return Ok(());
        }
        let piece = std::mem::replace(&mut self.filled, Vec::with_capacity(PIECE_BYTES));
        let sent = self.pieces.blocking_send(Piece::Data(piece.into()));
        sent.map_err(|_| io::Error::new(io::ErrorKind::BrokenPipe, "the client is gone"))
    }
}

impl io::Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.filled.extend_from_slice(bytes);
        if self.filled.len() >= PIECE_BYTES - PIECE_BYTES / 8 {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Write for Chunks {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        io::Write::write_all(self, text.as_bytes()).map_err(|_| fmt::Error)
    }
}

const PIECE_BYTES: usize = 64 << 10;
const PIECES_IN_FLIGHT: usize = 2;

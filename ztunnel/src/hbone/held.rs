//! The TLS socket as h2 sees it: writes are taken, a flush does nothing. The task that drives the h2 connection sends
//! at the end of its turn, so that all frames that the turn produced leave together.

use std::cell::{RefCell, RefMut};
use std::io;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::tls::TlsSocket;

/// A handle on a TLS socket; h2 owns one, the connection's driver another. Both are used by one task only.
#[derive(Clone)]
pub struct HeldTls(Rc<RefCell<TlsSocket>>);

/// A handle that does not keep the socket open.
pub(super) struct WeakTls(Weak<RefCell<TlsSocket>>);

impl HeldTls {
    pub fn new(socket: TlsSocket) -> Self {
        Self(Rc::new(RefCell::new(socket)))
    }

    pub(super) fn downgrade(&self) -> WeakTls {
        WeakTls(Rc::downgrade(&self.0))
    }

    /// Never held over a poll of the h2 connection.
    pub fn get(&self) -> RefMut<'_, TlsSocket> {
        self.0.borrow_mut()
    }
}

impl WeakTls {
    pub(super) fn upgrade(&self) -> Option<HeldTls> {
        self.0.upgrade().map(HeldTls)
    }
}

impl AsyncRead for HeldTls {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.get().poll_read(cx, buf)
    }
}

impl AsyncWrite for HeldTls {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.get().poll_write(cx, &[io::IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.get().poll_write(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get().poll_close(cx)
    }
}

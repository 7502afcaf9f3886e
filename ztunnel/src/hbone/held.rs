//! A TLS socket of which the tunnel has the only lasting handle; others can look at it while it is there.

use std::cell::{RefCell, RefMut};
use std::rc::{Rc, Weak};

use super::tls::TlsSocket;

/// A handle on a TLS socket.
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

    pub fn get(&self) -> RefMut<'_, TlsSocket> {
        self.0.borrow_mut()
    }
}

impl WeakTls {
    pub(super) fn upgrade(&self) -> Option<HeldTls> {
        self.0.upgrade().map(HeldTls)
    }
}

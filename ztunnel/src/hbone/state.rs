//! What the two ends of a stream, its tunnel and its user, share.

use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::task::Waker;
use std::time::Instant;

use h2::Reason;

use super::fields::Response;

/// Where a stream's bytes go as soon as they come.
pub trait Sink {
    /// Takes a prefix of `bytes`; 0: nothing for now.
    fn put(&self, bytes: &[u8]) -> io::Result<usize>;
    /// So many bytes more wait for it, in memory of ours.
    fn waits(&self, bytes: usize);
}

/// How a stream ended other than by the end of both directions.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("the peer reset the stream: {0:?}")]
    Reset(Reason),
    /// We reset it, for what the peer did.
    #[error("the peer broke HTTP/2 on the stream: {0:?}")]
    Fault(Reason),
    /// The peer says in GOAWAY that it has not begun with it.
    #[error("the peer left before it took the stream")]
    NotTaken,
    /// With the whole tunnel.
    #[error("{0}")]
    Tunnel(Rc<str>),
}

/// What a stream's two ends, the tunnel and its user, know of it.
pub struct State {
    /// What the peer lets us send.
    pub send_window: i64,
    /// What the peer may still send.
    pub receive_window: u32,
    /// What the window is filled up to.
    pub target: u32,
    /// Taken by the reader, and not told to the peer yet.
    pub taken: u32,
    pub updated: Instant,
    /// Came, and not taken by the reader yet.
    pub waiting: VecDeque<u8>,
    pub sink: Option<Rc<dyn Sink>>,
    pub answer: Option<Response>,
    pub answered: bool,
    pub peer_ended: bool,
    pub we_ended: bool,
    pub broken: Option<Broken>,
    /// The stream is on the list of those that wait for the tunnel to have room.
    pub queued: bool,
    /// What it may still send of its turn while others wait.
    pub allowance: usize,
    pub user: Option<Waker>,
}

impl State {
    /// `send_window`: what the peer lets us send at first; `receive_window`: what we let it send.
    pub fn new(send_window: u32, receive_window: u32) -> Self {
        Self {
            send_window: send_window.into(),
            receive_window,
            target: receive_window,
            taken: 0,
            updated: Instant::now(),
            waiting: VecDeque::new(),
            sink: None,
            answer: None,
            answered: false,
            peer_ended: false,
            we_ended: false,
            broken: None,
            queued: false,
            allowance: 0,
            user: None,
        }
    }

    /// Both directions have ended, or the stream has been reset.
    pub fn is_over(&self) -> bool {
        self.broken.is_some() || (self.peer_ended && self.we_ended)
    }

    /// Who is woken when there is news.
    pub fn set_user(&mut self, waker: &Waker) {
        if self.user.as_ref().is_none_or(|known| !known.will_wake(waker)) {
            self.user = Some(waker.clone());
        }
    }

    pub fn wake(&mut self) {
        if let Some(user) = &self.user {
            user.wake_by_ref();
        }
    }

    pub fn break_off(&mut self, how: Broken) {
        self.broken.get_or_insert(how);
        self.wake();
    }
}

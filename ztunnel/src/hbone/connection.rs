//! The HTTP/2 of a tunnel (RFC 9113): a closed subset that carries CONNECT and nothing else, without input or output of
//! its own. Bytes that came are given to [`Connection::read`], and reach the streams' readers in [`Connection::deliver`];
//! what is to be sent on account of that stands in [`Connection::out`]. DATA of ours is written by the streams
//! themselves.
//!
//! Must never let a stalled stream cost the others anything, nor hold more for a stream than its window.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use h2::Reason;

use super::buffers::Buffer;
use super::fields::{self, Request, Response};
use super::frame::{self, Fault, Reader, flag, kind, setting};
use super::hpack::{self, Decoder};
use super::settings::Settings;
use super::state::{Broken, State};

mod incoming;

/// Which end of a tunnel we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Client,
    Server,
}

/// One end of a tunnel.
pub struct Connection {
    reader: Reader,
    core: Core,
}

/// All but the reading of frames.
struct Core {
    role: Role,
    stream_window: u32,
    connection_window: u32,
    max_streams: u32,
    decoder: Decoder,
    streams: BTreeMap<u32, Rc<RefCell<State>>>,
    /// The newest stream that either side opened: only the client opens any.
    newest: u32,
    /// Requests that nobody has looked at.
    arrived: VecDeque<(u32, Request, Rc<RefCell<State>>)>,
    peer_window: u32,
    peer_frame: u32,
    peer_streams: Option<u32>,
    send_window: i64,
    receive_window: u32,
    out: Vec<u8>,
    /// Streams that wait for window of the connection or for room before the socket, in the order of their turns.
    queue: VecDeque<u32>,
    /// DATA of this turn, and whose it is.
    run: Option<Buffer>,
    parts: Vec<(u32, Range<usize>)>,
    /// Streams that we reset a short while ago: the peer may not know yet.
    reset_by_us: VecDeque<u32>,
    departure: Departure,
    /// The peer opens no more streams, or takes none.
    peer_left: bool,
    peer_fault: Option<Reason>,
    /// What SETTINGS that are being read say of windows.
    next_window: u32,
    first_block: bool,
    unanswered_resets: (Option<Instant>, u32),
    /// Our question for a sign of life has no answer yet.
    asked: bool,
    failed: Option<(Reason, &'static str)>,
}

/// How far we are with leaving.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Departure {
    No,
    /// Said so; streams that the peer opened before it heard it are still taken, until it has answered this ping.
    Announced,
    /// The peer knows which stream is the last.
    Final,
}

impl Connection {
    pub fn new(role: Role, settings: &Settings) -> Self {
        let mut core = Core {
            role,
            stream_window: settings.stream_window,
            connection_window: settings.connection_window.max(DEFAULT_WINDOW),
            max_streams: settings.max_streams,
            decoder: Decoder::default(),
            streams: BTreeMap::new(),
            newest: 0,
            arrived: VecDeque::new(),
            peer_window: DEFAULT_WINDOW,
            peer_frame: DEFAULT_FRAME,
            peer_streams: None,
            send_window: i64::from(DEFAULT_WINDOW),
            receive_window: settings.connection_window.max(DEFAULT_WINDOW),
            out: Vec::new(),
            queue: VecDeque::new(),
            run: None,
            parts: Vec::new(),
            reset_by_us: VecDeque::new(),
            departure: Departure::No,
            peer_left: false,
            peer_fault: None,
            next_window: DEFAULT_WINDOW,
            first_block: true,
            unanswered_resets: (None, 0),
            asked: false,
            failed: None,
        };
        core.greet(settings);
        Self { reader: Reader::new(role == Role::Server, settings.frame_size), core }
    }

    /// Takes bytes from the peer. After a fault the connection is [`Connection::failed`], and what comes is passed over.
    pub fn read(&mut self, bytes: &[u8]) {
        if self.core.failed.is_some() {
            return;
        }
        if let Err(fault) = self.reader.read(bytes, &mut self.core) {
            // A stream's fault is settled where it is found.
            let (reason, what) = match fault {
                Fault::Connection(reason, what) => (reason, what),
                Fault::Stream(_, reason) => (reason, "a stream's fault"),
            };
            self.core.fail(reason, what);
        }
    }

    /// Gives what came to the streams' readers. To be called after the bytes of a turn were read.
    pub fn deliver(&mut self) {
        self.core.deliver();
    }

    /// What is to be sent: taken from the front by whoever sends.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.core.out
    }

    /// What the peer did that the connection cannot go on.
    pub fn failed(&self) -> Option<(Reason, &'static str)> {
        self.core.failed
    }

    /// More to be sent than a peer that reads would leave.
    pub fn check_unsent(&mut self) {
        if self.core.out.len() > MAX_UNSENT {
            self.core.fail(Reason::ENHANCE_YOUR_CALM, "the peer asks for answers and does not read them");
        }
    }

    /// The next request that came, and its stream's number.
    pub fn next_request(&mut self) -> Option<(u32, Request, Rc<RefCell<State>>)> {
        self.core.arrived.pop_front()
    }

    /// Opens a stream with a CONNECT.
    pub fn open(&mut self, request: &Request) -> Option<(u32, Rc<RefCell<State>>)> {
        let core = &mut self.core;
        let id = if core.newest == 0 { 1 } else { core.newest + 2 };
        if core.peer_left || core.failed.is_some() || id > LAST_STREAM {
            return None;
        }
        core.newest = id;
        let state = core.add(id);
        core.write_block(id, false, |block| request.write(block));
        Some((id, state))
    }

    /// Answers a request; `end`: nothing follows.
    pub fn answer(&mut self, id: u32, response: &Response, end: bool) {
        let core = &mut self.core;
        let Some(state) = core.streams.get(&id).cloned() else { return };
        core.write_block(id, end, |block| response.write(block));
        let mut state = state.borrow_mut();
        state.answered = true;
        if end {
            state.we_ended = true;
            if !state.peer_ended {
                // A whole answer: the rest of the request is not wanted (RFC 9113 §8.1).
                drop(state);
                core.reset(id, Reason::NO_ERROR);
                return;
            }
            drop(state);
            core.remove(id);
        }
    }

    /// Resets a stream, if there is something to reset.
    pub fn reset(&mut self, id: u32, reason: Reason) {
        if self.core.streams.contains_key(&id) {
            self.core.reset(id, reason);
        }
    }

    /// How many bytes a stream may send now. It is queued if only the tunnel has no room for it, or if it has had its
    /// turn and others wait.
    pub fn room(&mut self, id: u32, state: &mut State, in_outbox: usize) -> usize {
        let core = &mut self.core;
        let own = usize::try_from(state.send_window).unwrap_or(0);
        if own == 0 {
            // The peer's window update wakes it.
            return 0;
        }
        let tunnel = core.tunnel_room(in_outbox);
        let turn = if state.allowance > 0 || !core.queue.is_empty() { state.allowance } else { usize::MAX };
        let room = own.min(tunnel).min(turn);
        if room == 0 && !state.queued {
            state.queued = true;
            core.queue.push_back(id);
        }
        room
    }

    /// Bytes that fit into one DATA frame.
    pub fn frame_size(&self) -> usize {
        self.core.peer_frame.min(MAX_OWN_FRAME) as usize
    }

    /// Counts DATA that a stream sends.
    pub fn sent(&mut self, state: &mut State, bytes: usize) {
        self.core.send_window -= bytes as i64;
        state.send_window -= bytes as i64;
        state.allowance = state.allowance.saturating_sub(bytes);
    }

    /// Notes that a stream of ours has ended its direction.
    pub fn end_sent(&mut self, id: u32, state: &mut State) {
        state.we_ended = true;
        if state.peer_ended {
            self.core.remove(id);
        }
    }

    /// Counts what a reader took later than it came.
    pub fn taken(&mut self, id: u32, state: &mut State, bytes: usize) {
        self.core.taken(id, state, bytes);
    }

    /// Gives streams that wait for room their turn, as many as there is room for. Whether more could have one once these
    /// have left theirs unused.
    pub fn grant(&mut self, in_outbox: usize) -> bool {
        let core = &mut self.core;
        let room = core.tunnel_room(in_outbox);
        let mut left = room.div_ceil(TURN);
        while left > 0 {
            let Some(id) = core.queue.pop_front() else { return false };
            // Gone by now.
            let Some(state) = core.streams.get(&id) else { continue };
            let mut state = state.borrow_mut();
            state.queued = false;
            if state.send_window > 0 {
                state.allowance = TURN;
                state.wake();
                left -= 1;
            }
        }
        room > 0 && !core.queue.is_empty()
    }

    /// Whether the peer has said how it wants to be spoken to.
    pub fn is_greeted(&self) -> bool {
        self.core.peer_streams.is_some()
    }

    /// The fault for which the peer left, if it named one.
    pub fn peer_fault(&self) -> Option<Reason> {
        self.core.peer_fault
    }

    /// Streams that are open.
    pub fn streams(&self) -> usize {
        self.core.streams.len()
    }

    /// Streams that the peer lets us have open at once; nothing before it has said so.
    pub fn peer_streams(&self) -> Option<u32> {
        self.core.peer_streams
    }

    /// Whether the peer takes no new streams.
    pub fn peer_left(&self) -> bool {
        self.core.peer_left
    }

    /// Tells the peer that no new streams are taken, or opened.
    pub fn leave(&mut self) {
        let core = &mut self.core;
        match (core.role, core.departure) {
            (Role::Client, Departure::No) => {
                core.departure = Departure::Final;
                core.go_away(0, Reason::NO_ERROR);
            }
            (Role::Server, Departure::No) => {
                core.departure = Departure::Announced;
                core.go_away(LAST_STREAM, Reason::NO_ERROR);
                frame::write(&mut core.out, kind::PING, 0, 0, &LEAVING);
            }
            _ => {}
        }
    }

    /// Left, and nothing is under way any more.
    pub fn is_done(&self) -> bool {
        let core = &self.core;
        let leaves = core.departure == Departure::Final || core.peer_left;
        leaves && core.streams.is_empty() && core.arrived.is_empty()
    }

    /// Asks the peer for a sign of life; only one question is under way at a time.
    pub fn ping(&mut self) {
        if !std::mem::replace(&mut self.core.asked, true) {
            frame::write(&mut self.core.out, kind::PING, 0, 0, &ALIVE);
        }
    }

    /// The tunnel is over, with all its streams.
    pub fn end(&mut self, why: &str) {
        let why: Rc<str> = why.into();
        self.core.arrived.clear();
        for state in std::mem::take(&mut self.core.streams).into_values() {
            state.borrow_mut().break_off(Broken::Tunnel(why.clone()));
        }
    }
}

impl Core {
    /// The preface of a client, our settings, and a connection window that never limits.
    fn greet(&mut self, settings: &Settings) {
        let mut payload = Vec::with_capacity(5 * 6);
        let mut add = |name: u16, value: u32| {
            payload.extend_from_slice(&name.to_be_bytes());
            payload.extend_from_slice(&value.to_be_bytes());
        };
        match self.role {
            Role::Client => {
                self.out.extend_from_slice(frame::PREFACE);
                add(setting::ENABLE_PUSH, 0);
            }
            Role::Server => add(setting::MAX_CONCURRENT_STREAMS, self.max_streams),
        }
        add(setting::INITIAL_WINDOW_SIZE, self.stream_window);
        add(setting::MAX_FRAME_SIZE, settings.frame_size);
        add(setting::MAX_HEADER_LIST_SIZE, fields::MAX_LIST as u32);
        frame::write(&mut self.out, kind::SETTINGS, 0, 0, &payload);
        if let Some(more) = self.connection_window.checked_sub(DEFAULT_WINDOW).filter(|more| *more > 0) {
            frame::write(&mut self.out, kind::WINDOW_UPDATE, 0, 0, &more.to_be_bytes());
        }
    }

    fn add(&mut self, id: u32) -> Rc<RefCell<State>> {
        let state = Rc::new(RefCell::new(State::new(self.peer_window, self.stream_window)));
        self.streams.insert(id, state.clone());
        state
    }

    fn remove(&mut self, id: u32) {
        self.streams.remove(&id);
        // A peer that gives no window and resets what waits for it must not make the list grow for ever.
        if self.queue.len() > 2 * self.streams.len() + FEW_WAITING {
            self.queue.retain(|waiting| self.streams.contains_key(waiting));
        }
    }

    fn fail(&mut self, reason: Reason, what: &'static str) {
        if self.failed.is_none() {
            self.failed = Some((reason, what));
            let last = if self.role == Role::Server { self.newest } else { 0 };
            self.go_away(last, reason);
        }
    }

    fn go_away(&mut self, last: u32, reason: Reason) {
        let mut payload = [0; 8];
        payload[..4].copy_from_slice(&last.to_be_bytes());
        payload[4..].copy_from_slice(&u32::from(reason).to_be_bytes());
        frame::write(&mut self.out, kind::GOAWAY, 0, 0, &payload);
    }

    /// Resets a stream that is open; its user is not told.
    fn reset(&mut self, id: u32, reason: Reason) {
        self.remove(id);
        frame::write(&mut self.out, kind::RST_STREAM, 0, id, &u32::from(reason).to_be_bytes());
        if self.reset_by_us.len() == REMEMBERED {
            self.reset_by_us.pop_front();
        }
        self.reset_by_us.push_back(id);
    }

    /// A header block of ours in one HEADERS frame, or more where the peer takes no such large ones.
    fn write_block(&mut self, id: u32, end: bool, write: impl FnOnce(&mut Vec<u8>)) {
        let mut block = Vec::with_capacity(FIRST_BLOCK);
        if std::mem::take(&mut self.first_block) {
            hpack::write_no_table(&mut block);
        }
        write(&mut block);
        let end = if end { flag::END_STREAM } else { 0 };
        let mut parts = block.chunks(self.peer_frame as usize).peekable();
        let mut is_first = true;
        while let Some(part) = parts.next() {
            let kind = if is_first { kind::HEADERS } else { kind::CONTINUATION };
            let last = if parts.peek().is_none() { flag::END_HEADERS } else { 0 };
            let end = if is_first { end } else { 0 };
            frame::write(&mut self.out, kind, end | last, id, part);
            is_first = false;
        }
    }

    /// What all streams together may send.
    fn tunnel_room(&self, in_outbox: usize) -> usize {
        usize::try_from(self.send_window).unwrap_or(0).min(in_outbox)
    }

    /// Whether nobody has opened that stream yet.
    fn is_idle(&self, id: u32) -> bool {
        id.is_multiple_of(2) || id > self.newest
    }

    fn deliver(&mut self) {
        let Some(run) = self.run.take() else { return };
        let mut parts = std::mem::take(&mut self.parts);
        // Small frames of many streams by turns must not cost a system call each.
        parts.sort_by_key(|(id, _)| *id);
        for of_stream in parts.chunk_by(|a, b| a.0 == b.0) {
            let id = of_stream[0].0;
            // What comes for a stream that we have given up is not read by anybody.
            let Some(state) = self.streams.get(&id).cloned() else { continue };
            let state = &mut *state.borrow_mut();
            let gathered;
            let bytes = match of_stream {
                [(_, part)] => &run.filled()[part.clone()],
                parts => {
                    let parts: Vec<&[u8]> = parts.iter().map(|(_, part)| &run.filled()[part.clone()]).collect();
                    gathered = parts.concat();
                    &gathered
                }
            };
            let mut put = 0;
            if let Some(sink) = state.sink.as_ref().filter(|_| state.waiting.is_empty()) {
                while put < bytes.len() {
                    match sink.put(&bytes[put..]) {
                        Ok(0) => break,
                        Ok(n) => put += n,
                        // Its user finds out the same.
                        Err(_) => break,
                    }
                }
            }
            if put < bytes.len() {
                state.waiting.extend(&bytes[put..]);
                if let Some(sink) = &state.sink {
                    sink.waits(bytes.len() - put);
                }
                state.wake();
            }
            self.taken(id, state, put);
        }
    }

    /// The reader took so many bytes: once it is worth a frame the peer is told.
    fn taken(&mut self, id: u32, state: &mut State, bytes: usize) {
        state.taken += bytes as u32;
        if state.peer_ended || state.broken.is_some() || state.taken < state.target / 2 {
            return;
        }
        let now = Instant::now();
        let is_fast = now.duration_since(state.updated) < FAST && state.waiting.is_empty();
        state.updated = now;
        let most = self.stream_window.saturating_mul(GROWTH).min(MAX_WINDOW);
        if is_fast && state.target < most {
            // The reader keeps up, so that the window is all that limits.
            let target = state.target.saturating_mul(2).min(most);
            state.taken += target - state.target;
            state.target = target;
        }
        let more = std::mem::take(&mut state.taken);
        state.receive_window += more;
        if self.streams.contains_key(&id) {
            frame::write(&mut self.out, kind::WINDOW_UPDATE, 0, id, &more.to_be_bytes());
        }
    }
}

/// What a peer may send, and takes, before it is told otherwise (RFC 9113 §6.5.2).
const DEFAULT_WINDOW: u32 = 65_535;
const DEFAULT_FRAME: u32 = 16_384;
const MAX_WINDOW: u32 = u32::MAX >> 1;
const LAST_STREAM: u32 = u32::MAX >> 1;
/// How many times its first size a stream's window may have.
const GROWTH: u32 = 4;
/// A reader that takes half a window in this time is held up by the window, not the other way round.
const FAST: Duration = Duration::from_millis(100);
/// Largest DATA frame of ours, bytes.
const MAX_OWN_FRAME: u32 = 64 * 1024;
/// What a stream sends in one turn while others wait, bytes.
pub const TURN: usize = 64 * 1024;
/// Answers that wait to be sent, bytes.
const MAX_UNSENT: usize = 64 * 1024;
/// Streams of ours that were reset, and that frames of the peer's may still be under way for.
const REMEMBERED: usize = 256;
const FIRST_BLOCK: usize = 512;
/// Streams that have ended and may stand on the list of those that wait.
const FEW_WAITING: usize = 64;
/// What our pings carry.
const ALIVE: [u8; 8] = *b"us-alive";
const LEAVING: [u8; 8] = *b"us-leave";

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;

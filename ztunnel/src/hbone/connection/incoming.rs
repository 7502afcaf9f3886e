//! What each frame of the peer's does to a connection.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use h2::Reason;

use super::super::buffers::{BUFFER_SIZE, Buffer};
use super::super::fields::{self, Malformed, Request, Response};
use super::super::frame::{self, Fault, Frames, flag, kind, setting};
use super::super::hpack::HpackError;
use super::super::state::{Broken, State};
use super::{ALIVE, Core, DEFAULT_FRAME, Departure, LEAVING, MAX_WINDOW, Role};

impl Core {
    /// A message that is no message, or a block that cannot be read.
    fn malformed(stream: u32, malformed: Malformed) -> Fault {
        match malformed {
            Malformed::Block(HpackError::TooLarge) => {
                Fault::Connection(Reason::ENHANCE_YOUR_CALM, "a header block that says far more than is taken")
            }
            Malformed::Block(_) => Fault::Connection(Reason::COMPRESSION_ERROR, "a header block that cannot be read"),
            Malformed::Message => Fault::Stream(stream, Reason::PROTOCOL_ERROR),
            Malformed::TooLarge => Fault::Stream(stream, Reason::ENHANCE_YOUR_CALM),
        }
    }

    fn peer_ends(&mut self, id: u32, state: &mut State) {
        state.peer_ended = true;
        state.wake();
        if state.we_ended {
            self.remove(id);
        }
    }

    /// HEADERS on a stream that is open: an answer, or trailers.
    fn more_headers(
        &mut self,
        id: u32,
        state: &Rc<RefCell<State>>,
        block: &[u8],
        end_stream: bool,
    ) -> Result<(), Fault> {
        let state = &mut *state.borrow_mut();
        if state.peer_ended {
            let _ = fields::pass_over(&mut self.decoder, block);
            return Err(Fault::Stream(id, Reason::STREAM_CLOSED));
        }
        if self.role == Role::Client && !state.answered {
            let response = Response::read(&mut self.decoder, block).map_err(|m| Self::malformed(id, m))?;
            if response.status.is_informational() {
                return if end_stream { Err(Fault::Stream(id, Reason::PROTOCOL_ERROR)) } else { Ok(()) };
            }
            state.answered = true;
            state.answer = Some(response);
            state.wake();
        } else {
            fields::read_trailers(&mut self.decoder, block).map_err(|m| Self::malformed(id, m))?;
            if !end_stream {
                return Err(Fault::Stream(id, Reason::PROTOCOL_ERROR));
            }
        }
        if end_stream {
            self.peer_ends(id, state);
        }
        Ok(())
    }

    fn new_request(&mut self, id: u32, block: &[u8], end_stream: bool) -> Result<(), Fault> {
        if id.is_multiple_of(2) {
            return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "a stream with an even number"));
        }
        self.newest = id;
        let request = Request::read(&mut self.decoder, block);
        if self.departure == Departure::Final {
            return Err(Fault::Stream(id, Reason::REFUSED_STREAM));
        }
        let request = request.map_err(|m| Self::malformed(id, m))?;
        if self.streams.len() >= self.max_streams as usize {
            return Err(Fault::Stream(id, Reason::REFUSED_STREAM));
        }
        let state = self.add(id);
        state.borrow_mut().peer_ended = end_stream;
        self.arrived.push_back((id, request, state));
        Ok(())
    }

    /// A peer that opens streams and resets them before they are answered makes us work for nothing.
    fn count_unanswered(&mut self) -> Result<(), Fault> {
        let now = Instant::now();
        let (since, count) = &mut self.unanswered_resets;
        if since.is_none_or(|since| now.duration_since(since) > RESET_PERIOD) {
            (*since, *count) = (Some(now), 0);
        }
        *count += 1;
        if *count > MAX_UNANSWERED_RESETS {
            return Err(Fault::Connection(Reason::ENHANCE_YOUR_CALM, "streams are opened only to be reset"));
        }
        Ok(())
    }
}

impl Frames for Core {
    fn data_begins(&mut self, id: u32, counted: u32) -> Result<(), Fault> {
        // Also what nobody reads counts, or the two sides would differ.
        let Some(left) = self.receive_window.checked_sub(counted) else {
            return Err(Fault::Connection(Reason::FLOW_CONTROL_ERROR, "more DATA than the connection's window"));
        };
        self.receive_window = left;
        if left < self.connection_window / 2 {
            let more = self.connection_window - left;
            self.receive_window = self.connection_window;
            frame::write(&mut self.out, kind::WINDOW_UPDATE, 0, 0, &more.to_be_bytes());
        }
        let Some(state) = self.streams.get(&id) else {
            if self.is_idle(id) {
                return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "DATA on a stream that is not open"));
            }
            if self.reset_by_us.contains(&id) {
                return Ok(());
            }
            return Err(Fault::Stream(id, Reason::STREAM_CLOSED));
        };
        let mut state = state.borrow_mut();
        if state.peer_ended {
            return Err(Fault::Stream(id, Reason::STREAM_CLOSED));
        }
        if self.role == Role::Client && !state.answered {
            return Err(Fault::Stream(id, Reason::PROTOCOL_ERROR));
        }
        match state.receive_window.checked_sub(counted) {
            Some(left) => {
                state.receive_window = left;
                Ok(())
            }
            None => Err(Fault::Stream(id, Reason::FLOW_CONTROL_ERROR)),
        }
    }

    fn data(&mut self, id: u32, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let run = self.run.get_or_insert_with(Buffer::lend);
            let room = run.room(0);
            let n = bytes.len().min(room.len());
            room[..n].copy_from_slice(&bytes[..n]);
            run.add(n);
            let end = run.len();
            bytes = &bytes[n..];
            match self.parts.last_mut().filter(|(last, _)| *last == id) {
                Some((_, part)) => part.end = end,
                None => self.parts.push((id, end - n..end)),
            }
            if end == BUFFER_SIZE {
                self.deliver();
            }
        }
    }

    fn data_ends(&mut self, id: u32, padding: u32, end_stream: bool) -> Result<(), Fault> {
        if padding == 0 && !end_stream {
            return Ok(());
        }
        // The end comes after the bytes.
        self.deliver();
        let Some(state) = self.streams.get(&id).cloned() else { return Ok(()) };
        let state = &mut *state.borrow_mut();
        self.taken(id, state, padding as usize);
        if end_stream {
            self.peer_ends(id, state);
        }
        Ok(())
    }

    fn headers(&mut self, id: u32, block: &[u8], end_stream: bool) -> Result<(), Fault> {
        // Trailers come after the bytes.
        self.deliver();
        if let Some(state) = self.streams.get(&id).cloned() {
            return self.more_headers(id, &state, block, end_stream);
        }
        if self.role == Role::Server && id > self.newest {
            return self.new_request(id, block, end_stream);
        }
        if self.is_idle(id) {
            return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "HEADERS on a stream that is not open"));
        }
        fields::pass_over(&mut self.decoder, block).map_err(|e| Self::malformed(id, Malformed::Block(e)))?;
        // An answer may be under way to a stream that we have given up.
        if self.role == Role::Client || self.reset_by_us.contains(&id) {
            return Ok(());
        }
        Err(Fault::Connection(Reason::STREAM_CLOSED, "HEADERS on a stream that has ended"))
    }

    fn reset(&mut self, id: u32, reason: Reason) -> Result<(), Fault> {
        if self.is_idle(id) {
            return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "RST_STREAM on a stream that is not open"));
        }
        let Some(state) = self.streams.get(&id).cloned() else {
            // It knows now that the stream is over: nothing more may come on it.
            self.reset_by_us.retain(|ours| *ours != id);
            return Ok(());
        };
        self.deliver();
        self.remove(id);
        let mut state = state.borrow_mut();
        state.break_off(Broken::Reset(reason));
        if self.role == Role::Server && !state.answered {
            drop(state);
            self.arrived.retain(|(arrived, ..)| *arrived != id);
            return self.count_unanswered();
        }
        Ok(())
    }

    fn setting(&mut self, name: u16, value: u32) -> Result<(), Fault> {
        match name {
            setting::ENABLE_PUSH if value > 1 || (self.role == Role::Client && value != 0) => {
                return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "a setting of push that may not be"));
            }
            setting::MAX_CONCURRENT_STREAMS => self.peer_streams = Some(value),
            setting::INITIAL_WINDOW_SIZE if value > MAX_WINDOW => return Err(WINDOW_TOO_LARGE),
            setting::INITIAL_WINDOW_SIZE => self.next_window = value,
            setting::MAX_FRAME_SIZE => {
                if !(DEFAULT_FRAME..1 << 24).contains(&value) {
                    return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "a frame size that may not be"));
                }
                self.peer_frame = value;
            }
            // We keep to no table at all, and our header lists are short. What is unknown means nothing.
            _ => {}
        }
        Ok(())
    }

    fn settings_end(&mut self) -> Result<(), Fault> {
        let change = i64::from(self.next_window) - i64::from(self.peer_window);
        self.peer_window = self.next_window;
        if change != 0 {
            for state in self.streams.values() {
                let mut state = state.borrow_mut();
                state.send_window += change;
                if state.send_window > i64::from(MAX_WINDOW) {
                    return Err(WINDOW_TOO_LARGE);
                }
                state.wake();
            }
        }
        // Without a limit of its own there is none.
        self.peer_streams.get_or_insert(u32::MAX);
        frame::write(&mut self.out, kind::SETTINGS, flag::ACK, 0, &[]);
        Ok(())
    }

    fn ping(&mut self, payload: [u8; 8], is_ack: bool) {
        if !is_ack {
            frame::write(&mut self.out, kind::PING, flag::ACK, 0, &payload);
        } else if payload == ALIVE {
            self.asked = false;
        } else if payload == LEAVING && self.departure == Departure::Announced {
            self.departure = Departure::Final;
            self.go_away(self.newest, Reason::NO_ERROR);
        }
    }

    fn go_away(&mut self, last: u32, reason: Reason) {
        self.peer_left = true;
        if reason != Reason::NO_ERROR {
            self.peer_fault.get_or_insert(reason);
        }
        if self.role == Role::Server {
            return;
        }
        for (_, state) in self.streams.split_off(&last.saturating_add(1)) {
            state.borrow_mut().break_off(Broken::NotTaken);
        }
    }

    fn window(&mut self, id: u32, more: u32) -> Result<(), Fault> {
        if id == 0 {
            self.send_window += i64::from(more);
            if self.send_window > i64::from(MAX_WINDOW) {
                return Err(Fault::Connection(Reason::FLOW_CONTROL_ERROR, "the connection's window grew too large"));
            }
            return Ok(());
        }
        if self.is_idle(id) {
            return Err(Fault::Connection(Reason::PROTOCOL_ERROR, "WINDOW_UPDATE on a stream that is not open"));
        }
        let Some(state) = self.streams.get(&id) else { return Ok(()) };
        let mut state = state.borrow_mut();
        state.send_window += i64::from(more);
        if state.send_window > i64::from(MAX_WINDOW) {
            return Err(Fault::Stream(id, Reason::FLOW_CONTROL_ERROR));
        }
        state.wake();
        Ok(())
    }

    fn stream_fault(&mut self, id: u32, reason: Reason) {
        if self.is_idle(id) {
            // Nothing can be said on a stream that nobody has opened.
            return self.fail(reason, "a fault on a stream that is not open");
        }
        let state = self.streams.get(&id).cloned();
        let is_unanswered = state.as_ref().is_none_or(|state| !state.borrow().answered);
        // A peer can make us reset as well; what is refused because there are too many is no fault of that kind.
        if self.role == Role::Server
            && is_unanswered
            && reason != Reason::REFUSED_STREAM
            && let Err(Fault::Connection(reason, what)) = self.count_unanswered()
        {
            return self.fail(reason, what);
        }
        self.reset(id, reason);
        self.arrived.retain(|(arrived, ..)| *arrived != id);
        if let Some(state) = state {
            state.borrow_mut().break_off(Broken::Fault(reason));
        }
    }
}

const WINDOW_TOO_LARGE: Fault =
    Fault::Connection(Reason::FLOW_CONTROL_ERROR, "a stream's window of more than 2^31 - 1 bytes");
/// Streams that a peer may open and reset before they are answered, within a period.
const MAX_UNANSWERED_RESETS: u32 = 1000;
const RESET_PERIOD: Duration = Duration::from_secs(1);

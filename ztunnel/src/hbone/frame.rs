//! HTTP/2 frames on the wire (RFC 9113 §4 and §6): what comes is cut into frames, whatever pieces it comes in, and
//! given to [`Frames`]; heads of ours are written.
//!
//! Checks what can be told from a frame by itself and from the order of frames. Holds no more than one header block.

use h2::Reason;

/// Bytes of a frame's head.
pub const HEAD: usize = 9;
/// What a client sends before its first frame.
pub const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Largest header block that is taken, bytes.
pub const MAX_BLOCK: usize = 16 * 1024;

/// Kinds of frames.
pub mod kind {
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PUSH_PROMISE: u8 = 5;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// Flags of frames.
pub mod flag {
    pub const ACK: u8 = 0x1;
    pub const END_STREAM: u8 = 0x1;
    pub const END_HEADERS: u8 = 0x4;
    pub const PADDED: u8 = 0x8;
    pub const PRIORITY: u8 = 0x20;
}

/// Names of settings.
pub mod setting {
    pub const ENABLE_PUSH: u16 = 2;
    pub const MAX_CONCURRENT_STREAMS: u16 = 3;
    pub const INITIAL_WINDOW_SIZE: u16 = 4;
    pub const MAX_FRAME_SIZE: u16 = 5;
    pub const MAX_HEADER_LIST_SIZE: u16 = 6;
}

/// What a peer did wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The connection cannot go on.
    Connection(Reason, &'static str),
    /// Only that stream cannot.
    Stream(u32, Reason),
}

/// Takes the frames that come. A fault of a stream is dealt with by [`Frames::stream_fault`], and reading goes on.
pub trait Frames {
    /// A DATA frame begins that counts so many bytes for flow control; its bytes follow, then its end.
    fn data_begins(&mut self, stream: u32, counted: u32) -> Result<(), Fault>;
    fn data(&mut self, stream: u32, bytes: &[u8]);
    fn data_ends(&mut self, stream: u32, padding: u32, end_stream: bool) -> Result<(), Fault>;
    /// A whole header block.
    fn headers(&mut self, stream: u32, block: &[u8], end_stream: bool) -> Result<(), Fault>;
    fn reset(&mut self, stream: u32, reason: Reason) -> Result<(), Fault>;
    fn setting(&mut self, name: u16, value: u32) -> Result<(), Fault>;
    /// All settings of a frame have been given.
    fn settings_end(&mut self) -> Result<(), Fault>;
    fn ping(&mut self, payload: [u8; 8], is_ack: bool);
    fn go_away(&mut self, last_stream: u32, reason: Reason);
    /// `stream` is 0 for the whole connection.
    fn window(&mut self, stream: u32, more: u32) -> Result<(), Fault>;
    fn stream_fault(&mut self, stream: u32, reason: Reason);
}

/// The head of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    pub length: u32,
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
}

impl Head {
    pub fn new(kind: u8, flags: u8, stream: u32, length: usize) -> Self {
        Self { length: length as u32, kind, flags, stream }
    }

    pub fn bytes(self) -> [u8; HEAD] {
        let [_, a, b, c] = self.length.to_be_bytes();
        let [w, x, y, z] = self.stream.to_be_bytes();
        [a, b, c, self.kind, self.flags, w, x, y, z]
    }

    fn read(bytes: [u8; HEAD]) -> Self {
        let [a, b, c, kind, flags, w, x, y, z] = bytes;
        Self {
            length: u32::from_be_bytes([0, a, b, c]),
            kind,
            flags,
            stream: u32::from_be_bytes([w, x, y, z]) & (u32::MAX >> 1),
        }
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// Writes a whole frame.
pub fn write(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
    out.extend_from_slice(&Head::new(kind, flags, stream, payload.len()).bytes());
    out.extend_from_slice(payload);
}

/// Cuts what comes into frames.
#[derive(Debug)]
pub struct Reader {
    /// What is still to come of the client's preface.
    preface: &'static [u8],
    max_frame: u32,
    head: [u8; HEAD],
    /// Bytes of the head that have come.
    have: usize,
    frame: Option<Frame>,
    /// Payload of a frame that is read as a whole.
    buffer: Vec<u8>,
    block: Option<Block>,
    /// The first frame must be SETTINGS.
    begun: bool,
}

/// A frame of which the head has come.
#[derive(Debug, Clone, Copy)]
struct Frame {
    head: Head,
    /// Payload that is to come, without what `data` says.
    left: u32,
    how: How,
}

/// How a payload is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Whole,
    /// DATA whose first byte says how much padding there is.
    PaddedData,
    Data {
        padding: u32,
    },
    Skipped,
}

/// A header block whose end has not come.
#[derive(Debug)]
struct Block {
    stream: u32,
    end_stream: bool,
    bytes: Vec<u8>,
    frames: u32,
}

const fn broken<T>(reason: Reason, what: &'static str) -> Result<T, Fault> {
    Err(Fault::Connection(reason, what))
}

impl Reader {
    /// `max_frame`: the largest payload that we told the peer to send. A server waits for the preface first.
    pub fn new(is_server: bool, max_frame: u32) -> Self {
        Self {
            preface: if is_server { PREFACE } else { &[] },
            max_frame,
            head: [0; HEAD],
            have: 0,
            frame: None,
            buffer: Vec::new(),
            block: None,
            begun: false,
        }
    }

    /// Takes the next bytes. After an error nothing more may be given.
    pub fn read(&mut self, mut bytes: &[u8], frames: &mut impl Frames) -> Result<(), Fault> {
        if !self.preface.is_empty() {
            let n = bytes.len().min(self.preface.len());
            if bytes[..n] != self.preface[..n] {
                return broken(Reason::PROTOCOL_ERROR, "no HTTP/2 preface");
            }
            self.preface = &self.preface[n..];
            bytes = &bytes[n..];
        }
        while !bytes.is_empty() {
            let Some(mut frame) = self.frame else {
                let n = bytes.len().min(HEAD - self.have);
                self.head[self.have..self.have + n].copy_from_slice(&bytes[..n]);
                self.have += n;
                bytes = &bytes[n..];
                if self.have == HEAD {
                    self.have = 0;
                    let begun = self.begin(Head::read(self.head), frames);
                    settle(begun, frames)?;
                    self.end_if_complete(frames)?;
                }
                continue;
            };
            if frame.how == How::PaddedData {
                let padding = u32::from(bytes[0]);
                bytes = &bytes[1..];
                if padding >= frame.head.length {
                    return broken(Reason::PROTOCOL_ERROR, "more padding than DATA");
                }
                frame.left = frame.head.length - 1 - padding;
                frame.how = How::Data { padding };
            } else {
                let n = bytes.len().min(frame.left as usize);
                let (part, rest) = bytes.split_at(n);
                bytes = rest;
                frame.left -= n as u32;
                match frame.how {
                    How::Whole => self.buffer.extend_from_slice(part),
                    How::Data { .. } => frames.data(frame.head.stream, part),
                    How::PaddedData | How::Skipped => {}
                }
            }
            self.frame = Some(frame);
            self.end_if_complete(frames)?;
        }
        Ok(())
    }

    fn begin(&mut self, head: Head, frames: &mut impl Frames) -> Result<(), Fault> {
        if head.length > self.max_frame {
            return broken(Reason::FRAME_SIZE_ERROR, "a frame larger than was agreed");
        }
        if !self.begun && (head.kind != kind::SETTINGS || head.has(flag::ACK)) {
            return broken(Reason::PROTOCOL_ERROR, "the first frame is not SETTINGS");
        }
        self.begun = true;
        match &self.block {
            Some(block) if head.kind != kind::CONTINUATION || head.stream != block.stream => {
                return broken(Reason::PROTOCOL_ERROR, "another frame within a header block");
            }
            None if head.kind == kind::CONTINUATION => {
                return broken(Reason::PROTOCOL_ERROR, "CONTINUATION without a header block");
            }
            _ => {}
        }
        let (how, most) = match head.kind {
            kind::DATA => (if head.has(flag::PADDED) { How::PaddedData } else { How::Data { padding: 0 } }, u32::MAX),
            // With padding and priority.
            kind::HEADERS | kind::CONTINUATION => (How::Whole, MAX_BLOCK as u32 + 262),
            kind::SETTINGS => (How::Whole, MAX_SETTINGS * 6),
            kind::PRIORITY => (How::Whole, 5),
            kind::RST_STREAM | kind::WINDOW_UPDATE => (How::Whole, 4),
            kind::PING => (How::Whole, 8),
            kind::GOAWAY => (How::Whole, MAX_BLOCK as u32),
            kind::PUSH_PROMISE => return broken(Reason::PROTOCOL_ERROR, "PUSH_PROMISE, which nobody allowed"),
            _ => (How::Skipped, u32::MAX),
        };
        let needs_stream =
            matches!(head.kind, kind::DATA | kind::HEADERS | kind::CONTINUATION | kind::PRIORITY | kind::RST_STREAM);
        let needs_none = matches!(head.kind, kind::SETTINGS | kind::PING | kind::GOAWAY);
        if (needs_stream && head.stream == 0) || (needs_none && head.stream != 0) {
            return broken(Reason::PROTOCOL_ERROR, "a frame on the wrong stream");
        }
        if head.kind == kind::DATA && head.has(flag::PADDED) && head.length == 0 {
            return broken(Reason::FRAME_SIZE_ERROR, "padded DATA without a byte");
        }
        self.frame = Some(Frame { head, left: head.length, how });
        if head.length > most {
            return match head.kind {
                // Only that stream suffers; what is sent is passed over.
                kind::PRIORITY => {
                    self.frame = Some(Frame { head, left: head.length, how: How::Skipped });
                    Err(Fault::Stream(head.stream, Reason::FRAME_SIZE_ERROR))
                }
                kind::HEADERS | kind::CONTINUATION => {
                    broken(Reason::ENHANCE_YOUR_CALM, "a header block of more than 16 KiB")
                }
                kind::SETTINGS => broken(Reason::ENHANCE_YOUR_CALM, "more settings than there are"),
                _ => broken(Reason::FRAME_SIZE_ERROR, "a frame of the wrong size"),
            };
        }
        if head.kind == kind::DATA {
            return frames.data_begins(head.stream, head.length);
        }
        Ok(())
    }

    fn end_if_complete(&mut self, frames: &mut impl Frames) -> Result<(), Fault> {
        loop {
            let Some(frame) = self.frame.filter(|frame| frame.left == 0) else { return Ok(()) };
            // Padding is passed over before the frame has ended.
            if let How::Data { padding } = frame.how {
                self.frame = (padding > 0).then_some(Frame { left: padding, how: How::Skipped, ..frame });
                let end_stream = frame.head.has(flag::END_STREAM);
                let padding = if frame.head.has(flag::PADDED) { padding + 1 } else { 0 };
                settle(frames.data_ends(frame.head.stream, padding, end_stream), frames)?;
                continue;
            }
            if frame.how == How::PaddedData {
                // Its first byte is to come.
                return Ok(());
            }
            self.frame = None;
            if frame.how == How::Whole {
                let payload = std::mem::take(&mut self.buffer);
                let done = self.whole(frame.head, &payload, frames);
                settle(done, frames)?;
                if payload.capacity() <= KEPT_BUFFER {
                    self.buffer = payload;
                    self.buffer.clear();
                }
            }
        }
    }

    fn whole(&mut self, head: Head, payload: &[u8], frames: &mut impl Frames) -> Result<(), Fault> {
        let wrong_size = broken(Reason::FRAME_SIZE_ERROR, "a frame of the wrong size");
        match head.kind {
            kind::HEADERS => self.begin_block(head, payload, frames),
            kind::CONTINUATION => self.continue_block(head, payload, frames),
            kind::PRIORITY => match payload.first_chunk::<4>().filter(|_| payload.len() == 5) {
                None => Err(Fault::Stream(head.stream, Reason::FRAME_SIZE_ERROR)),
                Some(on) => depends_on_other(head.stream, *on),
            },
            kind::RST_STREAM => match payload.first_chunk() {
                Some(code) => frames.reset(head.stream, u32::from_be_bytes(*code).into()),
                None => wrong_size,
            },
            kind::SETTINGS if head.has(flag::ACK) => {
                if !payload.is_empty() {
                    return wrong_size;
                }
                Ok(())
            }
            kind::SETTINGS => {
                let (settings, rest) = payload.as_chunks::<6>();
                if !rest.is_empty() {
                    return wrong_size;
                }
                for [a, b, w, x, y, z] in settings {
                    frames.setting(u16::from_be_bytes([*a, *b]), u32::from_be_bytes([*w, *x, *y, *z]))?;
                }
                frames.settings_end()
            }
            kind::PING => {
                let Some(payload) = payload.first_chunk() else { return wrong_size };
                frames.ping(*payload, head.has(flag::ACK));
                Ok(())
            }
            kind::GOAWAY => {
                let Some([a, b, c, d, w, x, y, z]) = payload.first_chunk() else { return wrong_size };
                let last = u32::from_be_bytes([*a, *b, *c, *d]) & (u32::MAX >> 1);
                frames.go_away(last, u32::from_be_bytes([*w, *x, *y, *z]).into());
                Ok(())
            }
            kind::WINDOW_UPDATE => {
                let Some(more) = payload.first_chunk() else { return wrong_size };
                match u32::from_be_bytes(*more) & (u32::MAX >> 1) {
                    0 if head.stream == 0 => broken(Reason::PROTOCOL_ERROR, "a window update of nothing"),
                    0 => Err(Fault::Stream(head.stream, Reason::PROTOCOL_ERROR)),
                    more => frames.window(head.stream, more),
                }
            }
            _ => Ok(()),
        }
    }

    fn begin_block(&mut self, head: Head, mut payload: &[u8], frames: &mut impl Frames) -> Result<(), Fault> {
        let too_short = Fault::Connection(Reason::PROTOCOL_ERROR, "HEADERS shorter than its padding or priority");
        let mut padding = 0;
        if head.has(flag::PADDED) {
            let (first, rest) = payload.split_first().ok_or(too_short)?;
            (padding, payload) = (usize::from(*first), rest);
        }
        let mut depends = Ok(());
        if head.has(flag::PRIORITY) {
            let (priority, rest) = payload.split_first_chunk::<5>().ok_or(too_short)?;
            let [a, b, c, d, _] = *priority;
            (depends, payload) = (depends_on_other(head.stream, [a, b, c, d]), rest);
        }
        let length = payload.len().checked_sub(padding).ok_or(too_short)?;
        let block = &payload[..length];
        let end_stream = head.has(flag::END_STREAM);
        if head.has(flag::END_HEADERS) {
            frames.headers(head.stream, block, end_stream)?;
        } else {
            self.block = Some(Block { stream: head.stream, end_stream, bytes: block.to_vec(), frames: 1 });
        }
        depends
    }

    fn continue_block(&mut self, head: Head, payload: &[u8], frames: &mut impl Frames) -> Result<(), Fault> {
        let Some(mut block) = self.block.take() else { return Ok(()) };
        block.frames += 1;
        if block.bytes.len() + payload.len() > MAX_BLOCK || block.frames > MAX_FRAGMENTS {
            return broken(Reason::ENHANCE_YOUR_CALM, "a header block of more than 16 KiB, or in too many frames");
        }
        block.bytes.extend_from_slice(payload);
        if head.has(flag::END_HEADERS) {
            return frames.headers(block.stream, &block.bytes, block.end_stream);
        }
        self.block = Some(block);
        Ok(())
    }
}

/// A fault of a stream is the connection's to deal with; any other ends it.
fn settle(done: Result<(), Fault>, frames: &mut impl Frames) -> Result<(), Fault> {
    match done {
        Err(Fault::Stream(stream, reason)) => {
            frames.stream_fault(stream, reason);
            Ok(())
        }
        done => done,
    }
}

/// Priorities are not used, but a stream that depends on itself is a fault (RFC 7540 §5.3.1).
fn depends_on_other(stream: u32, on: [u8; 4]) -> Result<(), Fault> {
    if u32::from_be_bytes(on) & (u32::MAX >> 1) == stream {
        return Err(Fault::Stream(stream, Reason::PROTOCOL_ERROR));
    }
    Ok(())
}

/// Settings in one frame.
const MAX_SETTINGS: u32 = 64;
/// Frames of one header block.
const MAX_FRAGMENTS: u32 = 16;
/// Of the space for whole frames, bytes that are kept between them.
const KEPT_BUFFER: usize = 512;

//! Header blocks as messages: what RFC 9113 §8 asks of the fields of a request, an answer and trailers, and our own.

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};

use super::hpack::{self, Decoder, HpackError};

/// A request: of interest are only CONNECTs, whatever else comes is answered as what it is not.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// Empty if there is none.
    pub authority: String,
    pub headers: HeaderMap,
}

/// The head of an answer.
#[derive(Debug)]
pub struct Response {
    pub status: StatusCode,
    pub headers: HeaderMap,
}

/// Why a block is no message: the stream's fault, unless the block cannot be read at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    Block(HpackError),
    Message,
    /// More than is taken.
    TooLarge,
}

/// A block's fields, sorted.
#[derive(Default)]
struct Fields {
    method: Option<Vec<u8>>,
    scheme: Option<Vec<u8>>,
    authority: Option<Vec<u8>>,
    path: Option<Vec<u8>>,
    status: Option<Vec<u8>>,
    headers: HeaderMap,
    size: usize,
    is_bad: bool,
}

impl Fields {
    /// Always reads the whole block, or the tables of both sides would differ from now on.
    fn read(decoder: &mut Decoder, block: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Self::default();
        decoder.decode(block, |name, value| fields.add(name, value)).map_err(Malformed::Block)?;
        if fields.size > MAX_LIST {
            return Err(Malformed::TooLarge);
        }
        if fields.is_bad {
            return Err(Malformed::Message);
        }
        Ok(fields)
    }

    fn add(&mut self, name: &[u8], value: &[u8]) {
        self.size = self.size.saturating_add(name.len() + value.len() + 32);
        if self.size > MAX_LIST || self.is_bad {
            return;
        }
        self.is_bad = self.sort(name, value).is_none();
    }

    /// Nothing if the field may not be there.
    fn sort(&mut self, name: &[u8], value: &[u8]) -> Option<()> {
        if name.first() == Some(&b':') {
            let place = match name {
                b":method" => &mut self.method,
                b":scheme" => &mut self.scheme,
                b":authority" => &mut self.authority,
                b":path" => &mut self.path,
                b":status" => &mut self.status,
                _ => return None,
            };
            // Once each, and before all others.
            let is_fit = place.is_none() && self.headers.is_empty();
            *place = Some(value.to_vec());
            return is_fit.then_some(());
        }
        if name.iter().any(u8::is_ascii_uppercase) {
            return None;
        }
        let of_connection =
            matches!(name, b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade");
        if of_connection || (name == b"te" && value != b"trailers") {
            return None;
        }
        let name = HeaderName::from_bytes(name).ok()?;
        self.headers.append(name, HeaderValue::from_bytes(value).ok()?);
        Some(())
    }
}

impl Request {
    pub fn connect(authority: &str, headers: HeaderMap) -> Self {
        Self { method: Method::CONNECT, authority: authority.to_owned(), headers }
    }

    pub fn read(decoder: &mut Decoder, block: &[u8]) -> Result<Self, Malformed> {
        let fields = Fields::read(decoder, block)?;
        let method = fields.method.as_deref().and_then(|m| Method::from_bytes(m).ok()).ok_or(Malformed::Message)?;
        let is_connect = method == Method::CONNECT;
        let others = [&fields.scheme, &fields.path];
        let is_fit = if is_connect {
            // RFC 9113 §8.5.
            fields.authority.is_some() && others.iter().all(|f| f.is_none())
        } else {
            others.iter().all(|f| f.as_ref().is_some_and(|f| !f.is_empty()))
        };
        if !is_fit || fields.status.is_some() {
            return Err(Malformed::Message);
        }
        let authority = String::from_utf8(fields.authority.unwrap_or_default()).map_err(|_| Malformed::Message)?;
        Ok(Self { method, authority, headers: fields.headers })
    }

    pub fn write(&self, block: &mut Vec<u8>) {
        hpack::write_known(block, ":method", self.method.as_str());
        hpack::write(block, ":authority", self.authority.as_bytes());
        write_headers(block, &self.headers);
    }
}

impl Response {
    pub fn read(decoder: &mut Decoder, block: &[u8]) -> Result<Self, Malformed> {
        let fields = Fields::read(decoder, block)?;
        let of_request = [&fields.method, &fields.scheme, &fields.authority, &fields.path];
        let status = fields.status.as_deref().and_then(|s| StatusCode::from_bytes(s).ok());
        match status.filter(|_| of_request.iter().all(|f| f.is_none())) {
            Some(status) => Ok(Self { status, headers: fields.headers }),
            None => Err(Malformed::Message),
        }
    }

    pub fn write(&self, block: &mut Vec<u8>) {
        hpack::write_known(block, ":status", self.status.as_str());
        write_headers(block, &self.headers);
    }
}

/// Reads trailers, which mean nothing in a tunnel.
pub fn read_trailers(decoder: &mut Decoder, block: &[u8]) -> Result<(), Malformed> {
    let fields = Fields::read(decoder, block)?;
    let pseudo = [&fields.method, &fields.scheme, &fields.authority, &fields.path, &fields.status];
    if pseudo.iter().all(|f| f.is_none()) { Ok(()) } else { Err(Malformed::Message) }
}

/// Reads a block of a stream that is no more, for what it does to the table.
pub fn pass_over(decoder: &mut Decoder, block: &[u8]) -> Result<(), HpackError> {
    decoder.decode(block, |_, _| {})
}

fn write_headers(block: &mut Vec<u8>, headers: &HeaderMap) {
    for (name, value) in headers {
        hpack::write(block, name.as_str(), value.as_bytes());
    }
}

/// Largest header list that is taken, bytes by the rule of RFC 9113 §6.5.2.
pub const MAX_LIST: usize = 16 * 1024;

//! Header compression (HPACK, RFC 7541) for what tunnels need: blocks of any peer are decoded, our own are written
//! without compression, so that the peer keeps no state for us.
//!
//! Our own, since no library fits: of those at hand one fails on truncated input and another builds its tables anew for
//! each string. Input is hostile: nothing here may panic, copy more than a peer sent, or hold more than one table.

use std::collections::VecDeque;

/// What a decoder's dynamic table may hold, bytes by the rule of RFC 7541 §4.1: the default that every peer may use.
const TABLE_SIZE: usize = 4096;
/// What an entry counts beside its bytes.
const ENTRY_COST: usize = 32;

/// Why a header block cannot be read: the connection cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum HpackError {
    #[error("a header block ends in the middle")]
    Truncated,
    #[error("an integer in a header block is too large")]
    Integer,
    #[error("a header block names entry {0}, which is not in the table")]
    Index(usize),
    #[error("a Huffman code in a header block is not valid")]
    Huffman,
    #[error("a table size update to {0} bytes, or at the wrong place")]
    SizeUpdate(usize),
    #[error("a header block says more than {MAX_DECODED} bytes")]
    TooLarge,
}

/// The state of one direction of a connection.
#[derive(Debug)]
pub struct Decoder {
    /// Newest first.
    table: VecDeque<Entry>,
    size: usize,
    limit: usize,
    scratch: Vec<u8>,
}

#[derive(Debug)]
struct Entry {
    name: Box<[u8]>,
    value: Box<[u8]>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { table: VecDeque::new(), size: 0, limit: TABLE_SIZE, scratch: Vec::new() }
    }
}

impl Decoder {
    /// Decodes a whole block and gives each field in turn.
    pub fn decode(&mut self, mut block: &[u8], mut field: impl FnMut(&[u8], &[u8])) -> Result<(), HpackError> {
        let mut may_resize = true;
        let mut left = MAX_DECODED;
        let mut field = |name: &[u8], value: &[u8]| {
            // A few bytes can name a long entry again and again.
            left = left.checked_sub(name.len() + value.len() + ENTRY_COST).ok_or(HpackError::TooLarge)?;
            field(name, value);
            Ok(())
        };
        while let Some(&first) = block.first() {
            if first & 0x80 != 0 {
                let index = integer(&mut block, 7)?;
                let (name, value) = self.entry(index)?;
                field(name, value)?;
            } else if first & 0xe0 == 0x20 {
                let limit = integer(&mut block, 5)?;
                if !may_resize || limit > TABLE_SIZE {
                    return Err(HpackError::SizeUpdate(limit));
                }
                self.limit = limit;
                self.evict(0);
                continue;
            } else {
                self.literal(&mut block, first & 0x40 != 0, &mut field)?;
            }
            may_resize = false;
        }
        if self.scratch.capacity() > KEPT_SCRATCH {
            self.scratch = Vec::new();
        }
        Ok(())
    }

    fn literal(
        &mut self,
        block: &mut &[u8],
        indexed: bool,
        field: &mut impl FnMut(&[u8], &[u8]) -> Result<(), HpackError>,
    ) -> Result<(), HpackError> {
        let index = integer(block, if indexed { 6 } else { 4 })?;
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        if index == 0 {
            string(block, &mut scratch)?;
        } else {
            scratch.extend_from_slice(self.entry(index)?.0);
        }
        let name = scratch.len();
        string(block, &mut scratch)?;
        let (name, value) = scratch.split_at(name);
        field(name, value)?;
        if indexed {
            self.insert(name, value);
        }
        self.scratch = scratch;
        Ok(())
    }

    fn entry(&self, index: usize) -> Result<(&[u8], &[u8]), HpackError> {
        let missing = HpackError::Index(index);
        let Some(place) = index.checked_sub(1) else { return Err(missing) };
        if let Some((name, value)) = STATIC.get(place) {
            return Ok((name.as_bytes(), value.as_bytes()));
        }
        let entry = self.table.get(place - STATIC.len()).ok_or(missing)?;
        Ok((&entry.name, &entry.value))
    }

    fn insert(&mut self, name: &[u8], value: &[u8]) {
        let cost = name.len() + value.len() + ENTRY_COST;
        self.evict(cost);
        if cost <= self.limit {
            self.size += cost;
            self.table.push_front(Entry { name: name.into(), value: value.into() });
        }
    }

    /// Makes room for so many bytes.
    fn evict(&mut self, wanted: usize) {
        while self.size + wanted > self.limit {
            let Some(oldest) = self.table.pop_back() else { return };
            self.size -= oldest.name.len() + oldest.value.len() + ENTRY_COST;
        }
    }
}

/// An integer with a prefix of so many bits (§5.1).
fn integer(block: &mut &[u8], prefix: u32) -> Result<usize, HpackError> {
    let (&first, mut rest) = block.split_first().ok_or(HpackError::Truncated)?;
    let mask = (1usize << prefix) - 1;
    let mut value = usize::from(first) & mask;
    if value == mask {
        for shift in (0..).step_by(7) {
            if shift > MAX_SHIFT {
                return Err(HpackError::Integer);
            }
            let (&next, after) = rest.split_first().ok_or(HpackError::Truncated)?;
            rest = after;
            value += usize::from(next & 0x7f) << shift;
            if next & 0x80 == 0 {
                break;
            }
        }
    }
    *block = rest;
    Ok(value)
}

/// A string (§5.2), put behind what is in `into`.
fn string(block: &mut &[u8], into: &mut Vec<u8>) -> Result<(), HpackError> {
    let is_huffman = block.first().ok_or(HpackError::Truncated)? & 0x80 != 0;
    let length = integer(block, 7)?;
    let (bytes, rest) = block.split_at_checked(length).ok_or(HpackError::Truncated)?;
    *block = rest;
    if is_huffman {
        return unpack(bytes, into);
    }
    into.extend_from_slice(bytes);
    Ok(())
}

/// Reads Huffman code (Appendix B). The code is canonical: of one length, codes follow each other by symbol.
fn unpack(bytes: &[u8], into: &mut Vec<u8>) -> Result<(), HpackError> {
    let (mut window, mut bits) = (0u64, 0u32);
    let mut bytes = bytes.iter();
    loop {
        while bits <= 32 {
            let Some(&byte) = bytes.next() else { break };
            window |= u64::from(byte) << (56 - bits);
            bits += 8;
        }
        if bits < SHORTEST {
            break;
        }
        let found = (SHORTEST..=LONGEST.min(bits)).find_map(|length| {
            let code = (window >> (64 - length)) as u32;
            let row = &CODE.rows[length as usize];
            let offset = code.checked_sub(row.first)?;
            (offset < row.count).then(|| (CODE.symbols[(row.start + offset) as usize], length))
        });
        match found {
            // The end symbol is never sent.
            Some((END, _)) => return Err(HpackError::Huffman),
            Some((symbol, length)) => {
                into.push(symbol as u8);
                window <<= length;
                bits -= length;
            }
            None if bits < 8 => break,
            None => return Err(HpackError::Huffman),
        }
    }
    // What is left is the beginning of the end symbol: ones, fewer than eight.
    let is_padding = bits < 8 && (bits == 0 || window >> (64 - bits) == (1 << bits) - 1);
    if is_padding { Ok(()) } else { Err(HpackError::Huffman) }
}

/// Tells the peer, in the first block of ours, that it needs to keep no table.
pub fn write_no_table(block: &mut Vec<u8>) {
    block.push(0x20);
}

/// Adds a field as a literal that is not indexed (§6.2.2). Names are lower case.
pub fn write(block: &mut Vec<u8>, name: &str, value: &[u8]) {
    match STATIC.iter().position(|(known, _)| *known == name) {
        Some(place) => write_integer(block, 0, 4, place + 1),
        None => {
            block.push(0);
            write_integer(block, 0, 7, name.len());
            block.extend_from_slice(name.as_bytes());
        }
    }
    write_integer(block, 0, 7, value.len());
    block.extend_from_slice(value);
}

/// Adds a field of which name and value stand in the static table, as an index (§6.1); else as a literal.
pub fn write_known(block: &mut Vec<u8>, name: &str, value: &str) {
    match STATIC.iter().position(|known| *known == (name, value)) {
        Some(place) => write_integer(block, 0x80, 7, place + 1),
        None => write(block, name, value.as_bytes()),
    }
}

fn write_integer(block: &mut Vec<u8>, pattern: u8, prefix: u32, value: usize) {
    let mask = (1usize << prefix) - 1;
    if value < mask {
        block.push(pattern | value as u8);
        return;
    }
    block.push(pattern | mask as u8);
    let mut left = value - mask;
    while left >= 0x80 {
        block.push(left as u8 | 0x80);
        left >>= 7;
    }
    block.push(left as u8);
}

/// Codes of one length.
#[derive(Clone, Copy)]
struct Row {
    first: u32,
    count: u32,
    /// Where their symbols begin.
    start: u32,
}

struct Code {
    rows: [Row; LONGEST as usize + 1],
    symbols: [u16; LENGTHS.len()],
}

const fn code() -> Code {
    let mut rows = [Row { first: 0, count: 0, start: 0 }; LONGEST as usize + 1];
    let mut symbols = [0; LENGTHS.len()];
    let (mut next, mut placed, mut length) = (0, 0, 1);
    while length <= LONGEST {
        next <<= 1;
        rows[length as usize] = Row { first: next, count: 0, start: placed };
        let mut symbol = 0;
        while symbol < LENGTHS.len() {
            if LENGTHS[symbol] as u32 == length {
                symbols[placed as usize] = symbol as u16;
                rows[length as usize].count += 1;
                placed += 1;
                next += 1;
            }
            symbol += 1;
        }
        length += 1;
    }
    Code { rows, symbols }
}

static CODE: Code = code();
/// Stands for the end of a string.
const END: u16 = 256;
const SHORTEST: u32 = 5;
const LONGEST: u32 = 30;
/// The largest shift of an integer's part: values stay below 2^28 and a little.
const MAX_SHIFT: u32 = 21;
/// What one block may say in all, bytes: what a peer sends with 16 KiB in plain words, a few times.
const MAX_DECODED: usize = 64 * 1024;
/// Bytes of scratch space that are kept between blocks.
const KEPT_SCRATCH: usize = 512;

/// Bits of the code of each symbol.
#[rustfmt::skip]
const LENGTHS: [u8; 257] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28,
    28, 28, 28, 6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12,
    10, 13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6, 15, 5, 6,
    5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28, 20, 22, 20, 20, 22, 22,
    22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24, 22, 21, 20,
    22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28,
    27, 27, 27, 20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28,
    27, 27, 27, 27, 27, 26, 30,
];

/// Appendix A.
#[rustfmt::skip]
const STATIC: [(&str, &str); 61] = [
    (":authority", ""), (":method", "GET"), (":method", "POST"), (":path", "/"), (":path", "/index.html"),
    (":scheme", "http"), (":scheme", "https"), (":status", "200"), (":status", "204"), (":status", "206"),
    (":status", "304"), (":status", "400"), (":status", "404"), (":status", "500"), ("accept-charset", ""),
    ("accept-encoding", "gzip, deflate"), ("accept-language", ""), ("accept-ranges", ""), ("accept", ""),
    ("access-control-allow-origin", ""), ("age", ""), ("allow", ""), ("authorization", ""), ("cache-control", ""),
    ("content-disposition", ""), ("content-encoding", ""), ("content-language", ""), ("content-length", ""),
    ("content-location", ""), ("content-range", ""), ("content-type", ""), ("cookie", ""), ("date", ""), ("etag", ""),
    ("expect", ""), ("expires", ""), ("from", ""), ("host", ""), ("if-match", ""), ("if-modified-since", ""),
    ("if-none-match", ""), ("if-range", ""), ("if-unmodified-since", ""), ("last-modified", ""), ("link", ""),
    ("location", ""), ("max-forwards", ""), ("proxy-authenticate", ""), ("proxy-authorization", ""), ("range", ""),
    ("referer", ""), ("refresh", ""), ("retry-after", ""), ("server", ""), ("set-cookie", ""),
    ("strict-transport-security", ""), ("transfer-encoding", ""), ("user-agent", ""), ("vary", ""), ("via", ""),
    ("www-authenticate", ""),
];

#[cfg(test)]
mod tests {
    use super::*;

    type Fields = Vec<(String, String)>;

    fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<Fields, HpackError> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut fields = Vec::new();
        decoder.decode(block, |name, value| fields.push((text(name), text(value))))?;
        Ok(fields)
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        digits.chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
    }

    fn fields(pairs: &[(&str, &str)]) -> Fields {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    /// The requests of Appendix C.3 (plain) and C.4 (Huffman), one after the other on one connection.
    #[test]
    fn requests_of_the_standard_are_read() {
        let requests = [
            fields(&[(":method", "GET"), (":scheme", "http"), (":path", "/"), (":authority", "www.example.com")]),
            fields(&[
                (":method", "GET"),
                (":scheme", "http"),
                (":path", "/"),
                (":authority", "www.example.com"),
                ("cache-control", "no-cache"),
            ]),
            fields(&[
                (":method", "GET"),
                (":scheme", "https"),
                (":path", "/index.html"),
                (":authority", "www.example.com"),
                ("custom-key", "custom-value"),
            ]),
        ];
        let plain = [
            "8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
            "8286 84be 5808 6e6f 2d63 6163 6865",
            "8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65",
        ];
        let huffman = [
            "8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff",
            "8286 84be 5886 a8eb 1064 9cbf",
            "8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf",
        ];
        for blocks in [plain, huffman] {
            let mut decoder = Decoder::default();
            for (block, expected) in blocks.iter().zip(&requests) {
                assert_eq!(&decode(&mut decoder, &hex(block)).unwrap(), expected);
            }
            assert_eq!(decoder.size, 164);
        }
    }

    #[test]
    fn a_table_holds_no_more_than_it_may() {
        let mut decoder = Decoder::default();
        // A table of 64 bytes holds one small entry; the second one takes its place.
        assert_eq!(decode(&mut decoder, &hex("3f21 4001 6101 62")).unwrap(), fields(&[("a", "b")]));
        assert_eq!(decode(&mut decoder, &hex("4001 6301 64 be")).unwrap(), fields(&[("c", "d"), ("c", "d")]));
        assert_eq!(decode(&mut decoder, &hex("bf")), Err(HpackError::Index(63)));
        // One that does not fit empties the table.
        let mut large = hex("4001 6540");
        large.extend_from_slice(&[b'x'; 64]);
        assert_eq!(decode(&mut decoder, &large).unwrap().len(), 1);
        assert_eq!((decoder.size, decoder.table.len()), (0, 0));
        // No more than 4096 bytes, and only at the beginning of a block.
        assert_eq!(decode(&mut Decoder::default(), &hex("3fe2 1f")), Err(HpackError::SizeUpdate(4097)));
        assert_eq!(decode(&mut Decoder::default(), &hex("82 20")), Err(HpackError::SizeUpdate(0)));
    }

    #[test]
    fn what_is_not_valid_is_an_error_and_no_panic() {
        let cases = [
            ("80", HpackError::Index(0)),
            ("be", HpackError::Index(62)),
            ("ff", HpackError::Truncated),
            ("ffff ffff ffff ffff", HpackError::Integer),
            ("40", HpackError::Truncated),
            ("4001", HpackError::Truncated),
            ("4001 61", HpackError::Truncated),
            ("4001 6105 62", HpackError::Truncated),
            // Padding of a whole byte, padding that is not of ones, and the end symbol.
            ("0001 6182 1fff", HpackError::Huffman),
            ("0001 6181 18", HpackError::Huffman),
            ("0001 6184 ffff ffff", HpackError::Huffman),
        ];
        for (block, expected) in cases {
            assert_eq!(decode(&mut Decoder::default(), &hex(block)), Err(expected), "{block}");
        }
    }

    #[test]
    fn blocks_of_ours_are_read_back() {
        let mut block = Vec::new();
        write_no_table(&mut block);
        let long = "v".repeat(300);
        write_known(&mut block, ":status", "200");
        write_known(&mut block, ":method", "CONNECT");
        write(&mut block, "baggage", long.as_bytes());
        write(&mut block, "via", b"");
        let mut decoder = Decoder::default();
        let expected = fields(&[(":status", "200"), (":method", "CONNECT"), ("baggage", &long), ("via", "")]);
        assert_eq!(decode(&mut decoder, &block).unwrap(), expected);
        assert!(decoder.table.is_empty() && decoder.limit == 0);
    }

    #[test]
    fn each_symbol_has_the_code_of_its_length() {
        for symbol in 0..=255u8 {
            let length = LENGTHS[usize::from(symbol)];
            let row = &CODE.rows[usize::from(length)];
            let place = (0..row.count).find(|n| CODE.symbols[(row.start + n) as usize] == u16::from(symbol));
            let code = u64::from(row.first + place.expect("its row holds the symbol"));
            let padded = (code << (32 - length)) | ((1 << (32 - length)) - 1);
            let bytes = (padded as u32).to_be_bytes();
            let mut text = Vec::new();
            unpack(&bytes[..usize::from(length).div_ceil(8)], &mut text).unwrap();
            assert_eq!(text, [symbol]);
        }
    }
}

//! Reading certificates and revocation lists from PEM as it is found in the wild: LF, CRLF or CR, a byte order mark,
//! blank lines, indents, comments between blocks, several blocks, blocks put together without a newline in between.
//!
//! Must never skip what might have been a certificate: a broken block, half of one, and what is not text at all make
//! the whole text unusable, and the error names the place.

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Why a text holds no usable certificates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    #[error("no certificate in it (a block that begins with -----BEGIN CERTIFICATE----- is expected)")]
    Empty,
    #[error("no {expected} in it, but {found:?}")]
    OtherKinds { expected: &'static str, found: Vec<String> },
    #[error("certificate number {number} in it is broken: {reason}")]
    Broken { number: usize, reason: String },
    #[error("line {line}: {found:?} belongs to no block: is one cut off?")]
    Stray { line: usize, found: String },
    #[error("line {line}: {reason}")]
    NotText { line: usize, reason: &'static str },
}

/// A block of a text: what stands between a BEGIN and its END.
#[derive(Debug)]
pub(super) struct Block {
    label: String,
    /// Where it begins, counted from 1.
    line: usize,
    /// The block alone, lines trimmed.
    text: String,
    /// What is wrong with its frame.
    fault: Option<String>,
}

/// All certificates of a text, in order. Blocks of other kinds and comments between blocks are skipped; anything that
/// is broken makes the whole text unusable.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let mut found = Vec::new();
    let mut others = Vec::new();
    for block in blocks(text)? {
        if !CERTIFICATE_LABELS.contains(&block.label.as_str()) {
            others.push(block.label);
            continue;
        }
        let number = found.len() + 1;
        let broken = |reason: String| PemError::Broken { number, reason };
        let der = CertificateDer::from(block.content().map_err(broken)?);
        let (rest, _) = x509_parser::parse_x509_certificate(&der).map_err(|e| broken(e.to_string()))?;
        if !rest.is_empty() {
            return Err(broken(format!("{} bytes follow the certificate in its block", rest.len())));
        }
        found.push(der);
    }
    match (found.is_empty(), others.is_empty()) {
        (false, _) => Ok(found),
        (true, true) => Err(PemError::Empty),
        (true, false) => Err(PemError::OtherKinds { expected: "certificate", found: others }),
    }
}

/// The contents of all blocks with a label, in order; the error has the block's first line.
pub(super) fn contents(text: &[u8], label: &str) -> Result<Vec<Vec<u8>>, String> {
    let blocks = blocks(text).map_err(|e| e.to_string())?;
    let wanted = blocks.iter().filter(|b| b.label == label);
    wanted.map(|b| b.content().map_err(|e| format!("the block at line {}: {e}", b.line))).collect()
}

impl Block {
    fn content(&self) -> Result<Vec<u8>, String> {
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            // Whatever the content is: only the frame is read here.
            None => CertificateDer::from_pem_slice(self.text.as_bytes()).map(|c| c.to_vec()).map_err(|e| e.to_string()),
        }
    }
}

/// Cuts a text into its blocks.
fn blocks(text: &[u8]) -> Result<Vec<Block>, PemError> {
    let text = decode(text)?.replace("-----BEGIN ", "\n-----BEGIN ").replace("\r\n", "\n").replace('\r', "\n");
    let mut blocks: Vec<Block> = Vec::new();
    let mut open = false;
    // The newlines that were put in front of each BEGIN are not of the text.
    let mut put_in = 0;
    for (index, line) in text.split('\n').enumerate() {
        let line = line.trim();
        let begin = line.strip_prefix("-----BEGIN ");
        put_in += usize::from(begin.is_some());
        let number = (index + 1).saturating_sub(put_in).max(1);
        if let Some(rest) = begin {
            if let (true, Some(last)) = (open, blocks.last_mut()) {
                last.fault = Some(format!("it has no END before the next BEGIN at line {number}"));
            }
            let Some(label) = rest.strip_suffix("-----") else { return Err(stray(number, line)) };
            let label = label.to_owned();
            let text = format!("-----BEGIN {KIND}-----\n");
            blocks.push(Block { label, line: number, text, fault: None });
            open = true;
        } else if let Some(rest) = line.strip_prefix("-----END ") {
            let (true, Some(last)) = (open, blocks.last_mut()) else { return Err(stray(number, line)) };
            if rest.strip_suffix("-----") != Some(&last.label) {
                last.fault = Some(format!("it ends with {:?} at line {number}", shorten(line)));
            }
            last.text.push_str("-----END ");
            last.text.push_str(KIND);
            last.text.push_str("-----\n");
            open = false;
        } else if let (true, Some(last)) = (open, blocks.last_mut()) {
            last.text.push_str(line);
            last.text.push('\n');
        } else if line.starts_with("-----") || is_payload(line) {
            return Err(stray(number, line));
        }
    }
    if let (true, Some(last)) = (open, blocks.last_mut()) {
        last.fault = Some("it has no END".to_owned());
    }
    Ok(blocks)
}

/// As text, without a byte order mark.
fn decode(bytes: &[u8]) -> Result<&str, PemError> {
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return Err(PemError::NotText { line: 1, reason: "the text is UTF-16, expected ASCII or UTF-8" });
    }
    let line_of = |at: usize| 1 + bytes[..at].iter().filter(|&&b| b == b'\n').count();
    let text = std::str::from_utf8(bytes)
        .map_err(|e| PemError::NotText { line: line_of(e.valid_up_to()), reason: "bytes that are no text" })?;
    if let Some(at) = text.bytes().position(|b| b.is_ascii_control() && !b"\n\r\t\x0c".contains(&b)) {
        return Err(PemError::NotText { line: line_of(at), reason: "bytes that are no text" });
    }
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

/// Whether a line looks like the inside of a block: no comment is that long without a space.
fn is_payload(line: &str) -> bool {
    line.len() >= PAYLOAD && line.bytes().all(|b| b.is_ascii_alphanumeric() || b"+/=".contains(&b))
}

fn stray(line: usize, found: &str) -> PemError {
    PemError::Stray { line, found: shorten(found) }
}

fn shorten(line: &str) -> String {
    line.chars().take(40).collect()
}

/// Blocks with labels of old programs are read as well.
const CERTIFICATE_LABELS: [&str; 2] = ["CERTIFICATE", "X509 CERTIFICATE"];
/// The label that the reader of one block is shown.
const KIND: &str = "CERTIFICATE";
/// Characters in a line.
const PAYLOAD: usize = 40;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::TestCa;

    fn two() -> (String, Vec<CertificateDer<'static>>) {
        let (one, two) = (TestCa::new("one"), TestCa::new("two"));
        let text = format!("# first\n\n{}\r\n\r\nsubject=CN = two\n{}\n\n", one.root_pem(), two.root_pem());
        (text, vec![one.root_der(), two.root_der()])
    }

    #[test]
    fn several_certificates_are_read_whatever_stands_between_them_and_however_lines_end() {
        let (text, expected) = two();
        assert_eq!(certificates(text.as_bytes()).unwrap(), expected);
        let unix = text.replace("\r\n", "\n");
        for ending in ["\r\n", "\r", "\n\n", "  \n\t"] {
            assert_eq!(certificates(unix.replace('\n', ending).as_bytes()).unwrap(), expected, "{ending:?}");
        }
        let joined: String =
            unix.lines().filter(|l| !l.is_empty() && l.find('=') != Some(7)).collect::<Vec<_>>().join("\n");
        let joined = joined.replace("-----\n-----BEGIN", "----------BEGIN");
        assert!(joined.contains("----------BEGIN"));
        assert_eq!(certificates(joined.as_bytes()).unwrap(), expected);
        assert_eq!(certificates(format!("\u{feff}{text}").as_bytes()).unwrap(), expected);
        assert_eq!(certificates(text.replace(" CERTIFICATE", " X509 CERTIFICATE").as_bytes()).unwrap(), expected);
        let key = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        assert_eq!(certificates(format!("{key}{text}{key}").as_bytes()).unwrap(), expected);
    }

    #[test]
    fn nothing_other_things_and_garbage_are_told_apart() {
        assert_eq!(certificates(b""), Err(PemError::Empty));
        assert_eq!(certificates(b"hello\n"), Err(PemError::Empty));
        let key = b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n";
        let found = vec!["PRIVATE KEY".to_owned()];
        assert_eq!(certificates(key), Err(PemError::OtherKinds { expected: "certificate", found }));
        let garbage = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(certificates(garbage), Err(PemError::Broken { number: 1, .. })));
        let utf16: Vec<u8> = "\u{feff}-----BEGIN".encode_utf16().flat_map(u16::to_le_bytes).collect();
        assert!(certificates(&utf16).unwrap_err().to_string().contains("UTF-16"));
    }

    /// Each with the line, counted as an editor counts, or the number of the certificate.
    #[test]
    fn what_is_cut_off_or_follows_is_named() {
        let (text, _) = two();
        let text = text.replace("\r\n", "\n");
        let lines = text.lines().count();
        let says = |text: &str, part: &str| {
            let error = certificates(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(part), "{part:?} in {error:?}");
        };
        let end = "-----END CERTIFICATE-----";
        let last = text.rfind(end).unwrap();
        says(&text[..last], "number 2 in it is broken: it has no END");
        says(&text[..last + 12], "number 2 in it is broken: ");
        says(&text.replacen(end, "", 1), "number 1 in it is broken: it has no END before the next BEGIN at line");
        says(&text.replacen(end, "-----END KEY-----", 1), "number 1 in it is broken: it ends with");
        says(&text.replacen("-----BEGIN CERTIFICATE-----\n", "", 1), "line 3: \"MII");
        says(&format!("{text}-----END CERTIFICATE-----\n"), &format!("line {}: ", lines + 1));
        says(&format!("{text}-----BEGIN CERTIF"), &format!("line {}: ", lines + 1));
        says(&format!("{text}{}", "A".repeat(64)), &format!("line {}: \"AAAA", lines + 1));
        says(&format!("{text}\u{1}\u{2}"), &format!("line {}: bytes that are no text", lines + 1));
        let mut bytes = text.clone().into_bytes();
        bytes.extend([0x30, 0x82, 0xff]);
        let error = certificates(&bytes).unwrap_err();
        assert_eq!(error, PemError::NotText { line: lines + 1, reason: "bytes that are no text" });

        let mut der = TestCa::new("long").root_der().to_vec();
        der.extend([1, 2, 3]);
        let long = format!("-----BEGIN CERTIFICATE-----\n{}\n{end}\n", crate::identity::base64(&der));
        says(&long, "3 bytes follow the certificate");
        assert!(certificates(&b"----------BEGIN ".repeat(200_000)).is_err());
    }
}

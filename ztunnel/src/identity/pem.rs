//! Reading certificates from PEM as it is found in the wild: LF or CRLF, blank lines, comments, several in one text.

use std::borrow::Cow;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// Why a text holds no usable certificates.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PemError {
    #[error("no certificate in it (a block that begins with -----BEGIN CERTIFICATE----- is expected)")]
    Empty,
    #[error("certificate number {number} in it is broken: {reason}")]
    Broken { number: usize, reason: String },
}

/// All certificates of a text, in order. Blocks of other kinds and text between blocks are skipped; a broken
/// certificate makes the whole text unusable.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, PemError> {
    let text = split_joined_blocks(text);
    let mut found = Vec::new();
    for block in CertificateDer::pem_slice_iter(&text) {
        let number = found.len() + 1;
        let certificate = block.map_err(|e| PemError::Broken { number, reason: e.to_string() })?;
        x509_parser::parse_x509_certificate(&certificate)
            .map_err(|e| PemError::Broken { number, reason: e.to_string() })?;
        found.push(certificate);
    }
    if found.is_empty() { Err(PemError::Empty) } else { Ok(found) }
}

/// Files put together without a newline in between have `-----END …----------BEGIN …-----` on one line, of which the
/// reader would see the first half only.
fn split_joined_blocks(text: &[u8]) -> Cow<'_, [u8]> {
    const JOINT: &[u8] = b"----------BEGIN ";
    let next = |rest: &[u8]| rest.windows(JOINT.len()).position(|window| window == JOINT);
    let (mut whole, mut rest) = (Vec::new(), text);
    while let Some(at) = next(rest) {
        let (first, second) = rest.split_at(at + b"-----".len());
        whole.extend_from_slice(first);
        whole.push(b'\n');
        rest = second;
    }
    if whole.is_empty() {
        return text.into();
    }
    whole.extend_from_slice(rest);
    whole.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::testing::TestCa;

    #[test]
    fn several_certificates_with_crlf_blank_lines_and_comments_are_read() {
        let (one, two) = (TestCa::new("one"), TestCa::new("two"));
        let text = format!("# first\n\n{}\r\n\r\nsecond one:\n{}\n\n", one.root_pem(), two.root_pem());
        let expected = vec![one.root_der(), two.root_der()];
        assert_eq!(certificates(text.as_bytes()).unwrap(), expected);
        assert_eq!(certificates(text.replace('\n', "\r\n").as_bytes()).unwrap(), expected);
        let padded: String = text.lines().map(|l| format!("{l}  \n")).collect();
        assert_eq!(certificates(padded.as_bytes()).unwrap(), expected);
        let joined = format!("{}{}", one.root_pem().trim_end(), two.root_pem());
        assert_eq!(certificates(joined.as_bytes()).unwrap(), expected);
    }

    #[test]
    fn nothing_and_garbage_are_told_apart() {
        assert_eq!(certificates(b""), Err(PemError::Empty));
        assert_eq!(certificates(b"hello\n"), Err(PemError::Empty));
        let garbage = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
        assert!(matches!(certificates(garbage), Err(PemError::Broken { number: 1, .. })));
        let cut = TestCa::new("cut").root_pem().replace("-----END CERTIFICATE-----", "");
        assert!(matches!(certificates(cut.as_bytes()), Err(PemError::Broken { number: 1, .. })));
        assert!(certificates(&b"----------BEGIN ".repeat(200_000)).is_err());
    }
}

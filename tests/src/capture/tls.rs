//! Tells TLS 1.3 from everything else, by the records of both directions and the version in the server's hello.

use thiserror::Error;

/// What a TLS 1.3 connection consisted of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Records {
    pub handshake: usize,
    pub application: usize,
    pub alerts: usize,
    /// Cipher suite that the server chose.
    pub cipher: u16,
    /// Key-exchange group that the server chose.
    pub group: u16,
}

/// Why a connection is not TLS 1.3.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TlsError {
    #[error("{side}: no TLS record at byte {at}: {start:02x?}")]
    NotTls { side: &'static str, at: usize, start: Vec<u8> },
    #[error("{side}: nothing was sent")]
    Empty { side: &'static str },
    #[error("{side}: the first record is no hello")]
    NoHello { side: &'static str },
    #[error("the server chose version {0:#06x}, not TLS 1.3")]
    OldVersion(u16),
}

const HANDSHAKE: u8 = 22;
const TLS13: u16 = 0x0304;
const SUPPORTED_VERSIONS: u16 = 43;
const KEY_SHARE: u16 = 51;
/// Payload of a record: 2^14 bytes and the overhead of encryption.
const LONGEST: usize = (1 << 14) + 256;

pub(super) fn check(to_server: &[u8], to_client: &[u8]) -> Result<Records, TlsError> {
    let mut records = Records::default();
    let client = count("client", to_server, &mut records)?;
    let server = count("server", to_client, &mut records)?;
    if client.first() != Some(&1) {
        return Err(TlsError::NoHello { side: "client" });
    }
    let hello = parse_server_hello(server).ok_or(TlsError::NoHello { side: "server" })?;
    if hello.version != TLS13 {
        return Err(TlsError::OldVersion(hello.version));
    }
    Ok(Records { cipher: hello.cipher, group: hello.group, ..records })
}

/// Counts the records of a direction and returns the payload of the first, which must be a handshake.
fn count<'a>(side: &'static str, bytes: &'a [u8], records: &mut Records) -> Result<&'a [u8], TlsError> {
    let mut at = 0;
    let mut first = None;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let not_tls = || TlsError::NotTls { side, at, start: rest[..rest.len().min(16)].to_vec() };
        if rest.len() < 5 {
            // A record that the capture ended in.
            break;
        }
        let length = usize::from(u16::from_be_bytes([rest[3], rest[4]]));
        if !(20..=23).contains(&rest[0]) || rest[1] != 3 || rest[2] > 3 || length == 0 || length > LONGEST {
            return Err(not_tls());
        }
        match rest[0] {
            20 => {}
            21 => records.alerts += 1,
            HANDSHAKE => records.handshake += 1,
            _ => records.application += 1,
        }
        if first.is_none() {
            first = Some((rest[0], &rest[5..rest.len().min(5 + length)]));
        }
        at += 5 + length;
    }
    match first {
        Some((HANDSHAKE, payload)) => Ok(payload),
        Some(_) => Err(TlsError::NoHello { side }),
        None => Err(TlsError::Empty { side }),
    }
}

struct ServerHello {
    version: u16,
    cipher: u16,
    group: u16,
}

fn parse_server_hello(handshake: &[u8]) -> Option<ServerHello> {
    if *handshake.first()? != 2 {
        return None;
    }
    // Type 1, length 3, legacy version 2, random 32, session id 1 + n, cipher 2, compression 1, extensions 2 + n.
    let legacy = be16(handshake, 4)?;
    let after_session = 39 + usize::from(*handshake.get(38)?);
    let cipher = be16(handshake, after_session)?;
    let extensions = handshake.get(after_session + 5..)?;
    let version = extension(extensions, SUPPORTED_VERSIONS).and_then(|body| be16(body, 0)).unwrap_or(legacy);
    let group = extension(extensions, KEY_SHARE).and_then(|body| be16(body, 0)).unwrap_or(0);
    Some(ServerHello { version, cipher, group })
}

/// Key-exchange groups that the client of a flow offered a key for.
pub fn client_hello_key_shares(to_server: &[u8]) -> Option<Vec<u16>> {
    let handshake = to_server.get(5..)?;
    let after_session = 39 + usize::from(*handshake.get(38)?);
    let after_ciphers = after_session + 2 + usize::from(be16(handshake, after_session)?);
    let extensions = handshake.get(after_ciphers + 1 + usize::from(*handshake.get(after_ciphers)?) + 2..)?;
    let mut shares = extension(extensions, KEY_SHARE)?.get(2..)?;
    let mut groups = Vec::new();
    while shares.len() >= 4 {
        groups.push(be16(shares, 0)?);
        shares = shares.get(4 + usize::from(be16(shares, 2)?)..)?;
    }
    Some(groups)
}

fn extension(mut extensions: &[u8], wanted: u16) -> Option<&[u8]> {
    while extensions.len() >= 4 {
        let length = usize::from(be16(extensions, 2)?);
        if be16(extensions, 0)? == wanted {
            return extensions.get(4..4 + length);
        }
        extensions = extensions.get(4 + length..)?;
    }
    None
}

fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Both directions of a real handshake with a few bytes of data.
    fn conversation(versions: &[&'static rustls::SupportedProtocolVersion]) -> (Vec<u8>, Vec<u8>) {
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let cert = rcgen::generate_simple_self_signed(["test".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(cert.signing_key.serialize_der()).unwrap();
        let mut roots = rustls::RootCertStore::empty();
        roots.add(cert.cert.der().clone()).unwrap();
        let server = rustls::ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.cert.der().clone()], key)
            .unwrap();
        let client = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client = rustls::ClientConnection::new(Arc::new(client), "test".try_into().unwrap()).unwrap();
        let mut server = rustls::ServerConnection::new(Arc::new(server)).unwrap();
        let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
        std::io::Write::write_all(&mut client.writer(), b"hello").unwrap();
        while client.wants_write() || server.wants_write() {
            let at = to_server.len();
            while client.wants_write() {
                client.write_tls(&mut to_server).unwrap();
            }
            server.read_tls(&mut &to_server[at..]).unwrap();
            server.process_new_packets().unwrap();
            let at = to_client.len();
            while server.wants_write() {
                server.write_tls(&mut to_client).unwrap();
            }
            if to_client.len() > at {
                client.read_tls(&mut &to_client[at..]).unwrap();
                client.process_new_packets().unwrap();
            }
        }
        (to_server, to_client)
    }

    #[test]
    fn tls_1_3_is_told_from_1_2_and_from_plaintext() {
        let (to_server, to_client) = conversation(&[&rustls::version::TLS13]);
        let records = check(&to_server, &to_client).expect("TLS 1.3");
        assert!(records.application > 0 && records.handshake >= 2, "{records:?}");
        assert!([0x1301, 0x1302].contains(&records.cipher), "{records:?}");
        let shares = client_hello_key_shares(&to_server).expect("the client sends key shares");
        assert!(shares.contains(&records.group), "{shares:?} {records:?}");

        let (to_server, to_client) = conversation(&[&rustls::version::TLS12]);
        assert_eq!(check(&to_server, &to_client), Err(TlsError::OldVersion(0x0303)));

        let plain = check(b"GET / HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n");
        assert!(matches!(plain, Err(TlsError::NotTls { side: "client", at: 0, .. })), "{plain:?}");
    }

    #[test]
    fn plaintext_after_a_handshake_is_seen() {
        let (mut to_server, to_client) = conversation(&[&rustls::version::TLS13]);
        let end = to_server.len();
        to_server.extend_from_slice(b"canary in the clear");
        let found = check(&to_server, &to_client);
        assert!(matches!(found, Err(TlsError::NotTls { at, .. }) if at == end), "{found:?}");
    }
}

//! What the plugin and the agent say to each other: one request and one answer on a connection, each a length of four
//! bytes (most significant first) and that much JSON. With ADD and CHECK comes the pod's network namespace, as a
//! descriptor along with the first byte.
//!
//! Must never be changed so that another version of the other side misreads it: fields are only added, with a default.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::types::{Attachment, PodName};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command")]
pub enum Request {
    /// Let the pod start, in the mesh if it belongs there.
    Add(Attach),
    /// Is the pod as it should be?
    Check(Attach),
    /// The sandbox is going.
    Del { container: String },
    /// Could an ADD be served?
    Status,
    /// There are no others than these.
    Gc { attachments: Vec<Attachment> },
}

/// A pod's sandbox with its network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    pub pod: PodName,
    pub container: String,
    /// Path of the namespace, for people.
    pub netns: String,
    pub addresses: Vec<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer")]
pub enum Answer {
    /// The pod is captured.
    Captured,
    /// The pod does not belong into the mesh.
    Outside { reason: String },
    /// There was nothing else to tell.
    Done,
    /// It cannot be done now.
    Refused { step: String, reason: String },
}

/// A message with its length before it.
pub fn encode(message: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    // Our own plain types can always be written.
    let _ = serde_json::to_writer(&mut bytes, message);
    let length = (bytes.len() - HEADER) as u32;
    bytes[..HEADER].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// The length that a header announces.
///
/// Fails with what it says where that is more than [`MAX_MESSAGE`].
pub fn length(header: [u8; HEADER]) -> Result<usize, String> {
    match u32::from_be_bytes(header) as usize {
        length if length <= MAX_MESSAGE => Ok(length),
        length => Err(format!("a message of {length} bytes is announced, {MAX_MESSAGE} are the most")),
    }
}

/// Bytes before a message.
pub const HEADER: usize = 4;
/// Bytes of a message; a list of all attachments of a node with thousands of pods fits.
pub const MAX_MESSAGE: usize = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_were() {
        let pod = PodName { namespace: "shop".into(), name: "web".into(), uid: "u".into() };
        let attach = Attach {
            pod,
            container: "c".into(),
            netns: "/run/netns/a".into(),
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
        };
        let attachment = Attachment { container: "c".into(), interface: "eth0".into() };
        for request in [
            Request::Add(attach.clone()),
            Request::Check(attach),
            Request::Del { container: "c".into() },
            Request::Status,
            Request::Gc { attachments: vec![attachment] },
        ] {
            let bytes = encode(&request);
            let (header, body) = bytes.split_first_chunk().unwrap();
            assert_eq!(length(*header), Ok(body.len()));
            assert_eq!(serde_json::from_slice::<Request>(body).unwrap(), request);
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_by_its_header() {
        assert_eq!(length((MAX_MESSAGE as u32).to_be_bytes()), Ok(MAX_MESSAGE));
        assert!(length(u32::MAX.to_be_bytes()).unwrap_err().contains("4294967295"));
    }
}

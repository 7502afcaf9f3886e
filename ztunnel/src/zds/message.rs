//! ZDS messages as types: a request that exists is complete and carries exactly the descriptors that belong to it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;

use super::transport::Packet;
use crate::capture::listeners::PodListeners;
use crate::proto::zds;

/// Version of the extension that this program speaks (`ZdsHello.extension`).
pub const EXTENSION: u32 = 1;

/// Who a pod is, as the agent says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodInfo {
    pub uid: String,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
}

/// The eBPF maps that the proxy needs, from the process that loaded them.
#[derive(Debug)]
pub struct CaptureMapFds {
    /// `ebpf::LAYOUT_VERSION` of the sender.
    pub layout_version: u32,
    pub orig_dst: OwnedFd,
    pub pass: OwnedFd,
    pub counters: OwnedFd,
}

/// What the agent asks of the proxy.
#[derive(Debug)]
pub enum Request {
    Add { pod: PodInfo, netns: OwnedFd, listeners: Option<PodListeners> },
    Keep { uid: String },
    Delete { uid: String },
    SnapshotSent,
    CaptureMaps(CaptureMapFds),
    ReturnListeners { uid: String },
    Drain { uid: String },
}

/// The proxy's answer to any request.
#[derive(Debug, Default)]
pub struct Response {
    /// Why the request failed.
    pub error: Option<String>,
    /// Answer to `ReturnListeners`.
    pub listeners: Option<PodListeners>,
    /// Answer to `Drain`: connections of the pod that are still open.
    pub open: u32,
    /// Answer to `Drain`: peers no longer use HBONE to the pod.
    pub followed: bool,
}

/// A message that breaks the protocol.
#[derive(Debug, thiserror::Error)]
pub enum ProtocolError {
    #[error("a packet is not a ZDS message: {0}")]
    Decode(#[from] prost::DecodeError),
    #[error("a message without content")]
    Empty,
    #[error("{message} came without {what}")]
    Missing { message: &'static str, what: &'static str },
    #[error("{message} came with {found} descriptors instead of {expected}")]
    Descriptors { message: &'static str, expected: usize, found: usize },
    #[error("{message} names its listeners as {found:?}, not as each one once")]
    Listeners { message: &'static str, found: Vec<i32> },
    #[error("{message} after the end of the snapshot")]
    AfterSnapshot { message: &'static str },
    #[error("the peer speaks version {0}, not 1")]
    Version(i32),
}

impl Request {
    pub fn decode(packet: Packet) -> Result<Request, ProtocolError> {
        use zds::workload_request::Payload;
        let Packet { bytes, descriptors } = packet;
        match zds::WorkloadRequest::decode(bytes.as_slice())?.payload.ok_or(ProtocolError::Empty)? {
            Payload::Add(add) => decode_add(add, descriptors),
            Payload::Keep(keep) => Ok(Request::Keep { uid: plain("KeepWorkload", keep.uid, &descriptors)? }),
            Payload::Del(del) => Ok(Request::Delete { uid: plain("DelWorkload", del.uid, &descriptors)? }),
            Payload::SnapshotSent(_) => {
                count("SnapshotSent", 0, &descriptors)?;
                Ok(Request::SnapshotSent)
            }
            Payload::CaptureMaps(maps) => {
                let [orig_dst, pass, counters] = exactly("CaptureMaps", descriptors)?;
                let layout_version = maps.layout_version;
                Ok(Request::CaptureMaps(CaptureMapFds { layout_version, orig_dst, pass, counters }))
            }
            Payload::ReturnListeners(which) => {
                Ok(Request::ReturnListeners { uid: plain("ReturnListeners", which.uid, &descriptors)? })
            }
            Payload::Drain(drain) => Ok(Request::Drain { uid: plain("DrainWorkload", drain.uid, &descriptors)? }),
        }
    }

    /// The packet's bytes, and the descriptors that go with them.
    pub fn encode(&self) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        use zds::workload_request::Payload;
        let mut descriptors = Vec::new();
        let payload = match self {
            Request::Add { pod, netns, listeners } => {
                descriptors.push(netns.as_fd());
                Payload::Add(zds::AddWorkload {
                    uid: pod.uid.clone(),
                    workload_info: Some(zds::WorkloadInfo {
                        name: pod.name.clone(),
                        namespace: pod.namespace.clone(),
                        service_account: pod.service_account.clone(),
                    }),
                    listeners: encode_listeners(listeners.as_ref(), &mut descriptors),
                })
            }
            Request::Keep { uid } => Payload::Keep(zds::KeepWorkload { uid: uid.clone() }),
            Request::Delete { uid } => Payload::Del(zds::DelWorkload { uid: uid.clone() }),
            Request::SnapshotSent => Payload::SnapshotSent(zds::SnapshotSent {}),
            Request::CaptureMaps(maps) => {
                descriptors.extend([maps.orig_dst.as_fd(), maps.pass.as_fd(), maps.counters.as_fd()]);
                Payload::CaptureMaps(zds::CaptureMaps { layout_version: maps.layout_version })
            }
            Request::ReturnListeners { uid } => Payload::ReturnListeners(zds::ReturnListeners { uid: uid.clone() }),
            Request::Drain { uid } => Payload::Drain(zds::DrainWorkload { uid: uid.clone() }),
        };
        (zds::WorkloadRequest { payload: Some(payload) }.encode_to_vec(), descriptors)
    }

    /// Whether only a peer that speaks the extension may get it.
    pub fn is_extension(&self) -> bool {
        match self {
            Request::Add { listeners, .. } => listeners.is_some(),
            Request::Keep { .. } | Request::Delete { .. } | Request::SnapshotSent => false,
            Request::CaptureMaps(_) | Request::ReturnListeners { .. } | Request::Drain { .. } => true,
        }
    }
}

impl Response {
    pub fn failed(error: impl Into<String>) -> Response {
        Response { error: Some(error.into()), ..Response::default() }
    }

    pub fn decode(packet: Packet) -> Result<Response, ProtocolError> {
        let Packet { bytes, descriptors } = packet;
        let zds::workload_response::Payload::Ack(ack) =
            zds::WorkloadResponse::decode(bytes.as_slice())?.payload.ok_or(ProtocolError::Empty)?;
        Ok(Response {
            error: (!ack.error.is_empty()).then_some(ack.error),
            listeners: decode_listeners("Ack", &ack.listeners, descriptors)?,
            open: ack.open,
            followed: ack.followed,
        })
    }

    pub fn encode(&self) -> (Vec<u8>, Vec<BorrowedFd<'_>>) {
        let mut descriptors = Vec::new();
        let ack = zds::Ack {
            error: self.error.as_deref().map(short).unwrap_or_default(),
            listeners: encode_listeners(self.listeners.as_ref(), &mut descriptors),
            open: self.open,
            followed: self.followed,
        };
        let response = zds::WorkloadResponse { payload: Some(zds::workload_response::Payload::Ack(ack)) };
        (response.encode_to_vec(), descriptors)
    }
}

/// The proxy's first packet.
pub(super) fn encode_hello(extension: u32) -> Vec<u8> {
    zds::ZdsHello { version: zds::Version::V1.into(), extension }.encode_to_vec()
}

/// The version of the extension that the proxy speaks; 0 for a plain one.
pub(super) fn decode_hello(packet: Packet) -> Result<u32, ProtocolError> {
    count("ZdsHello", 0, &packet.descriptors)?;
    let hello = zds::ZdsHello::decode(packet.bytes.as_slice())?;
    if hello.version != i32::from(zds::Version::V1) {
        return Err(ProtocolError::Version(hello.version));
    }
    Ok(hello.extension)
}

fn decode_add(add: zds::AddWorkload, mut descriptors: Vec<OwnedFd>) -> Result<Request, ProtocolError> {
    const MESSAGE: &str = "AddWorkload";
    let info = add.workload_info.ok_or(ProtocolError::Missing { message: MESSAGE, what: "workload_info" })?;
    count(MESSAGE, 1 + add.listeners.len(), &descriptors)?;
    let netns = descriptors.remove(0);
    let listeners = decode_listeners(MESSAGE, &add.listeners, descriptors)?;
    let pod = PodInfo {
        uid: named(MESSAGE, add.uid)?,
        name: info.name,
        namespace: info.namespace,
        service_account: info.service_account,
    };
    Ok(Request::Add { pod, netns, listeners })
}

fn decode_listeners(
    message: &'static str,
    names: &[i32],
    descriptors: Vec<OwnedFd>,
) -> Result<Option<PodListeners>, ProtocolError> {
    count(message, names.len(), &descriptors)?;
    if names.is_empty() {
        return Ok(None);
    }
    let (mut outbound, mut plaintext, mut hbone) = (None, None, None);
    let wrong = || ProtocolError::Listeners { message, found: names.to_vec() };
    for (name, fd) in names.iter().zip(descriptors) {
        let slot = match zds::Listener::try_from(*name).map_err(|_| wrong())? {
            zds::Listener::Outbound => &mut outbound,
            zds::Listener::PlaintextInbound => &mut plaintext,
            zds::Listener::HboneInbound => &mut hbone,
        };
        if slot.replace(fd).is_some() {
            return Err(wrong());
        }
    }
    match (outbound, plaintext, hbone) {
        (Some(outbound), Some(plaintext), Some(hbone)) => Ok(Some(PodListeners { outbound, plaintext, hbone })),
        _ => Err(wrong()),
    }
}

fn encode_listeners<'a>(listeners: Option<&'a PodListeners>, descriptors: &mut Vec<BorrowedFd<'a>>) -> Vec<i32> {
    let Some(PodListeners { outbound, plaintext, hbone }) = listeners else { return Vec::new() };
    descriptors.extend([outbound.as_fd(), plaintext.as_fd(), hbone.as_fd()]);
    vec![zds::Listener::Outbound.into(), zds::Listener::PlaintextInbound.into(), zds::Listener::HboneInbound.into()]
}

fn plain(message: &'static str, uid: String, descriptors: &[OwnedFd]) -> Result<String, ProtocolError> {
    count(message, 0, descriptors)?;
    named(message, uid)
}

fn named(message: &'static str, uid: String) -> Result<String, ProtocolError> {
    if uid.is_empty() { Err(ProtocolError::Missing { message, what: "a pod uid" }) } else { Ok(uid) }
}

fn count(message: &'static str, expected: usize, descriptors: &[OwnedFd]) -> Result<(), ProtocolError> {
    let found = descriptors.len();
    if found == expected { Ok(()) } else { Err(ProtocolError::Descriptors { message, expected, found }) }
}

fn exactly<const N: usize>(message: &'static str, descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; N], ProtocolError> {
    let found = descriptors.len();
    descriptors.try_into().map_err(|_| ProtocolError::Descriptors { message, expected: N, found })
}

/// An error text that leaves room for the rest of a packet.
fn short(text: &str) -> String {
    const MOST: usize = 800;
    let end = (0..=MOST.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text[..end].to_owned()
}

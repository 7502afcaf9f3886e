//! Parsing of Ethernet frames down to TCP and UDP.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// A TCP or UDP packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// `None` for UDP.
    pub flags: Option<Flags>,
    pub seq: u32,
    pub payload: Vec<u8>,
}

/// Flags of a TCP packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags {
    pub syn: bool,
    pub ack: bool,
    pub fin: bool,
    pub rst: bool,
}

/// The packet in a frame; `None` for everything that is not TCP or UDP.
pub(super) fn parse(frame: &[u8]) -> Option<Packet> {
    let kind = u16::from_be_bytes(frame.get(12..14)?.try_into().ok()?);
    let packet = frame.get(14..)?;
    match kind {
        0x0800 => parse_v4(packet),
        0x86dd => parse_v6(packet),
        _ => None,
    }
}

fn parse_v4(packet: &[u8]) -> Option<Packet> {
    let header = usize::from(packet.first()? & 0x0f) * 4;
    let length = usize::from(u16::from_be_bytes(packet.get(2..4)?.try_into().ok()?));
    let protocol = *packet.get(9)?;
    let from = Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(12..16)?).ok()?);
    let to = Ipv4Addr::from(<[u8; 4]>::try_from(packet.get(16..20)?).ok()?);
    // Frames shorter than 60 bytes are padded; a length of 0 stands for an offloaded large packet.
    let end = if length == 0 { packet.len() } else { length.min(packet.len()) };
    transport(protocol, from.into(), to.into(), packet.get(header..end)?)
}

fn parse_v6(packet: &[u8]) -> Option<Packet> {
    let length = usize::from(u16::from_be_bytes(packet.get(4..6)?.try_into().ok()?));
    let protocol = *packet.get(6)?;
    let from = Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(8..24)?).ok()?);
    let to = Ipv6Addr::from(<[u8; 16]>::try_from(packet.get(24..40)?).ok()?);
    let mut body = packet.get(40..)?;
    if length != 0 {
        body = &body[..length.min(body.len())];
    }
    // Hop-by-hop header: a jumbo payload of an offloaded large packet.
    if protocol == 0 {
        let next = *body.first()?;
        let skip = 8 + usize::from(*body.get(1)?) * 8;
        return transport(next, from.into(), to.into(), packet.get(40 + skip..)?);
    }
    transport(protocol, from.into(), to.into(), body)
}

fn transport(protocol: u8, from: IpAddr, to: IpAddr, segment: &[u8]) -> Option<Packet> {
    let port = |at: usize| Some(u16::from_be_bytes(segment.get(at..at + 2)?.try_into().ok()?));
    let (from, to) = (SocketAddr::from((from, port(0)?)), SocketAddr::from((to, port(2)?)));
    match protocol {
        6 => {
            let seq = u32::from_be_bytes(segment.get(4..8)?.try_into().ok()?);
            let header = usize::from(segment.get(12)? >> 4) * 4;
            let bits = *segment.get(13)?;
            let flags = Flags { fin: bits & 1 != 0, syn: bits & 2 != 0, rst: bits & 4 != 0, ack: bits & 16 != 0 };
            Some(Packet { from, to, flags: Some(flags), seq, payload: segment.get(header..)?.to_vec() })
        }
        17 => Some(Packet { from, to, flags: None, seq: 0, payload: segment.get(8..)?.to_vec() }),
        _ => None,
    }
}

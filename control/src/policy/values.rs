//! The values of matches: what Kubernetes writes as text, as the wire has it.

use std::net::IpAddr;

use ipnet::IpNet;
use ztunnel::proto::security as wire;
use ztunnel::proto::security::string_match::MatchType;

/// `*`, `abc*`, `*abc`, or the whole text. The error says what would be right.
pub(super) fn text(from: &str) -> Result<wire::StringMatch, String> {
    let inner = from.strip_prefix('*').or_else(|| from.strip_suffix('*')).unwrap_or(from);
    if inner.contains('*') {
        return Err("a * can only be its first or its last character".into());
    }
    let kind = match from {
        "" => return Err("empty: write \"*\" for any value".into()),
        "*" => MatchType::Presence(()),
        _ if from.starts_with('*') => MatchType::Suffix(inner.into()),
        _ if from.ends_with('*') => MatchType::Prefix(inner.into()),
        _ => MatchType::Exact(from.into()),
    };
    Ok(wire::StringMatch { match_type: Some(kind) })
}

/// A peer's identity. The wire has it without the scheme.
pub(super) fn principal(from: &str) -> Result<wire::StringMatch, String> {
    text(from.strip_prefix("spiffe://").unwrap_or(from))
}

/// `name`, in the policy's own namespace, or `namespace/name`.
pub(super) fn service_account(from: &str, own_namespace: &str) -> Result<wire::ServiceAccountMatch, String> {
    let (namespace, name) = from.split_once('/').unwrap_or((own_namespace, from));
    let good = |part: &str| !part.is_empty() && !part.contains(['/', '*']);
    if !good(namespace) || !good(name) {
        return Err("expected name or namespace/name of a service account, without *".into());
    }
    Ok(wire::ServiceAccountMatch { namespace: namespace.into(), service_account: name.into() })
}

/// An address or a range. What is IPv4 in the dress of IPv6 is IPv4, as proxies see it.
pub(super) fn range(from: &str) -> Result<wire::Address, String> {
    let net = match from.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => from.parse::<IpNet>().map_err(|_| "expected an address or a range such as 10.0.0.0/8")?,
    };
    let net = match net {
        IpNet::V6(v6) if v6.prefix_len() >= 96 => match v6.addr().to_ipv4_mapped() {
            Some(v4) => IpNet::new(v4.into(), v6.prefix_len() - 96).unwrap_or(net),
            None => net,
        },
        _ => net,
    };
    let net = net.trunc();
    let address = match net.addr() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    Ok(wire::Address { address: address.into(), length: net.prefix_len().into() })
}

pub(super) fn port(from: &str) -> Result<u32, String> {
    let digits = from.bytes().all(|b| b.is_ascii_digit());
    let number = from.parse::<u16>().ok().filter(|p| *p != 0 && digits);
    number.map(u32::from).ok_or_else(|| "expected a port from 1 to 65535".into())
}

/// A Kubernetes name that no object can have: a match for it never holds.
pub(super) fn is_no_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    text.is_empty() || text.len() > 253 || !text.bytes().all(allowed)
}

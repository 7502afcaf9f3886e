//! The headers of a CONNECT and of its answer (form and use: the HBONE protocol, §3).
//!
//! What a peer claims in a header is for telemetry only; it must never decide anything.

use std::fmt::Write;
use std::net::SocketAddr;

use http::{HeaderMap, HeaderName, HeaderValue};

use crate::mesh::Workload;

/// Where a CONNECT wants to go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authority {
    Address(SocketAddr),
    /// A service's host name and port; used across networks.
    Host(String, u16),
}

/// What a peer tells about a workload.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Baggage {
    pub cluster: Option<String>,
    pub namespace: Option<String>,
    pub workload: Option<String>,
    pub workload_type: Option<String>,
    pub service: Option<String>,
    pub revision: Option<String>,
    pub region: Option<String>,
    pub zone: Option<String>,
}

/// Header of our own: why a request was refused.
pub const REASON: HeaderName = HeaderName::from_static("x-understory-reason");
pub const BAGGAGE: HeaderName = HeaderName::from_static("baggage");
pub const FORWARDED: HeaderName = HeaderName::from_static("forwarded");
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

impl Authority {
    /// Reads `address:port` or `host:port`; both parts must be there.
    pub fn parse(text: &str) -> Option<Self> {
        if let Ok(address) = text.parse::<SocketAddr>() {
            let address = SocketAddr::new(address.ip().to_canonical(), address.port());
            return (address.port() != 0).then_some(Self::Address(address));
        }
        let (host, port) = text.rsplit_once(':')?;
        let port: u16 = port.parse().ok().filter(|p| *p != 0)?;
        let valid = !host.is_empty()
            && host.len() <= 253
            && host.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'.' || b == b'_');
        valid.then(|| Self::Host(host.to_ascii_lowercase(), port))
    }
}

/// The `baggage` that describes a workload of ours.
pub fn baggage_of(workload: &Workload) -> Option<HeaderValue> {
    let kind = format!("k8s.{}.name", workload.common.workload_type);
    let pairs: [(&str, &str); 7] = [
        ("k8s.cluster.name", &workload.place.cluster),
        ("k8s.namespace.name", &workload.common.namespace),
        (&kind, &workload.common.workload_name),
        ("service.name", &workload.common.canonical_name),
        ("service.version", &workload.common.canonical_revision),
        ("cloud.region", &workload.place.locality.region),
        ("cloud.availability_zone", &workload.place.locality.zone),
    ];
    let mut text = String::with_capacity(256);
    for (key, value) in pairs {
        if value.is_empty() || value.contains([',', ';']) {
            continue;
        }
        let separator = if text.is_empty() { "" } else { "," };
        // Writing to a String cannot fail.
        let _ = write!(text, "{separator}{key}={value}");
    }
    HeaderValue::from_str(&text).ok().filter(|v| !v.is_empty())
}

impl Baggage {
    /// Merges all `baggage` lines; unknown keys and empty values are left out.
    pub fn read(headers: &HeaderMap) -> Self {
        let mut baggage = Self::default();
        for pair in headers
            .get_all(BAGGAGE)
            .iter()
            .filter_map(|v| v.to_str().ok())
            .flat_map(|line| line.split(','))
            .take(MAX_PAIRS)
        {
            let Some((key, value)) = pair.trim().split_once('=') else { continue };
            if value.is_empty() {
                continue;
            }
            let value = || Some(value.chars().take(MAX_VALUE).collect());
            match key {
                "k8s.cluster.name" => baggage.cluster = value(),
                "k8s.namespace.name" => baggage.namespace = value(),
                "k8s.deployment.name" | "k8s.cronjob.name" | "k8s.pod.name" | "k8s.job.name" => {
                    baggage.workload = value();
                    baggage.workload_type = key.split('.').nth(1).map(str::to_owned);
                }
                "service.name" => baggage.service = value(),
                "service.version" => baggage.revision = value(),
                "cloud.region" => baggage.region = value(),
                "cloud.availability_zone" => baggage.zone = value(),
                _ => {}
            }
        }
        baggage
    }
}

/// `for="<address>"`, with `;host=` where the request is to a service.
pub fn forwarded(source: SocketAddr, service: Option<&str>) -> Option<HeaderValue> {
    let text = match service {
        Some(host) => format!("for=\"{source}\";host={host}"),
        None => format!("for=\"{source}\""),
    };
    HeaderValue::from_str(&text).ok()
}

/// What `forwarded` claims: the client's address and the service's host name.
pub fn read_forwarded(headers: &HeaderMap) -> (Option<SocketAddr>, Option<&str>) {
    let text = headers.get(FORWARDED).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let part = |name: &str| text.split(';').find_map(|p| p.trim().strip_prefix(name)).map(|v| v.trim_matches('"'));
    (part("for=").and_then(|a| a.parse().ok()), part("host="))
}

/// A reason as the header's value: cut, and without what a header cannot hold.
pub fn reason(text: &str) -> HeaderValue {
    let shown = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    let text: String = text.chars().take(MAX_REASON).map(shown).collect();
    HeaderValue::from_str(&text).unwrap_or_else(|_| HeaderValue::from_static("unknown"))
}

/// The reason that a peer gives, cut.
pub fn read_reason(headers: &HeaderMap) -> Option<String> {
    let text = headers.get(REASON)?.to_str().ok()?;
    Some(text.chars().take(MAX_REASON).collect())
}

/// Pairs of baggage that are read at most.
const MAX_PAIRS: usize = 64;
/// Characters of a value that are kept.
const MAX_VALUE: usize = 256;
/// Characters of a reason.
const MAX_REASON: usize = 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn authorities_need_both_parts() {
        assert_eq!(Authority::parse("10.0.0.1:80"), Some(Authority::Address("10.0.0.1:80".parse().unwrap())));
        assert_eq!(Authority::parse("[fd00::1]:80"), Some(Authority::Address("[fd00::1]:80".parse().unwrap())));
        assert_eq!(Authority::parse("[::ffff:10.0.0.1]:80"), Some(Authority::Address("10.0.0.1:80".parse().unwrap())));
        assert_eq!(Authority::parse("A.b.svc:80"), Some(Authority::Host("a.b.svc".into(), 80)));
        for bad in [
            "",
            "10.0.0.1",
            "10.0.0.1:",
            ":80",
            "host",
            "host:",
            "host:0",
            "host:99999",
            "10.0.0.1:0",
            "a b:1",
            "a/b:1",
            "[fd00::1]",
            "u@h:1",
        ] {
            assert_eq!(Authority::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn baggage_is_merged_and_bounded() {
        let mut headers = HeaderMap::new();
        headers.append(BAGGAGE, HeaderValue::from_static("k8s.namespace.name=shop, k8s.deployment.name=cart,x=y"));
        headers.append(BAGGAGE, HeaderValue::from_static("service.name=,service.version=v1"));
        let baggage = Baggage::read(&headers);
        assert_eq!(baggage.namespace.as_deref(), Some("shop"));
        assert_eq!(baggage.workload.as_deref(), Some("cart"));
        assert_eq!(baggage.workload_type.as_deref(), Some("deployment"));
        assert_eq!((baggage.service, baggage.revision.as_deref()), (None, Some("v1")));
    }

    #[test]
    fn a_reason_reads_what_it_writes_and_what_a_header_cannot_hold_is_replaced() {
        let mut headers = HeaderMap::new();
        headers.insert(REASON, reason("denied by shop/p rule 0: a; b"));
        assert_eq!(read_reason(&headers).as_deref(), Some("denied by shop/p rule 0: a; b"));
        headers.insert(REASON, reason("a\r\nb: c\u{e9}"));
        assert_eq!(read_reason(&headers).as_deref(), Some("a??b: c?"));
        headers.insert(REASON, reason(&"x".repeat(5000)));
        assert_eq!(read_reason(&headers).map(|r| r.len()), Some(MAX_REASON));
    }

    #[test]
    fn forwarded_reads_what_it_writes() {
        let source: SocketAddr = "[fd00::7]:4711".parse().unwrap();
        let mut headers = HeaderMap::new();
        headers.insert(FORWARDED, forwarded(source, Some("a.b.svc")).unwrap());
        assert_eq!(read_forwarded(&headers), (Some(source), Some("a.b.svc")));
    }
}

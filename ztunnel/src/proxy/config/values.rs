//! The forms that single settings may have: durations, sizes, addresses, sources of roots and tokens.
//!
//! Must never show a token: neither in an error nor in the dump of the configuration.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use serde::{Serialize, Serializer};

use crate::identity::TrustDomain;

/// A number of bytes, written as `65536`, `64Ki`, `4Mi` or `1Gi`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bytes(pub u64);

/// A server of the control plane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// `https`; `http` is for tests and trusted local links only.
    pub tls: bool,
    /// A DNS name or an IP address, without brackets.
    pub host: String,
    pub port: u16,
}

/// Where trusted root certificates come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RootSource {
    /// PEM, watched for changes.
    File(PathBuf),
    /// The machine's own trust store.
    System,
    /// PEM text.
    Inline(String),
}

/// Where the service account token comes from.
#[derive(Clone, PartialEq, Eq)]
pub enum TokenSource {
    /// Read again for each call.
    File(PathBuf),
    Literal(String),
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str = "expected a duration such as 500ms, 10s, 5m, 24h or 1h30m; a plain number is seconds";
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let (mut rest, mut total) = (text, Duration::ZERO);
    if rest.is_empty() {
        return Err(EXPECTED.into());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or(EXPECTED)?;
        let count: u64 = rest[..digits].parse().map_err(|_| EXPECTED)?;
        rest = &rest[digits..];
        let unit_len = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let milliseconds = match &rest[..unit_len] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            _ => return Err(EXPECTED.into()),
        };
        rest = &rest[unit_len..];
        let part = count.checked_mul(milliseconds).map(Duration::from_millis);
        total = part.and_then(|part| total.checked_add(part)).ok_or("the duration is too large")?;
    }
    Ok(total)
}

pub(super) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("expected more than 0".into()),
        duration => Ok(duration),
    }
}

pub(super) fn size(text: &str) -> Result<Bytes, String> {
    const EXPECTED: &str = "expected a number of bytes, plain or with Ki, Mi or Gi, such as 65536 or 256Ki";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let count: u64 = text[..digits].parse().map_err(|_| EXPECTED)?;
    let shift = match &text[digits..] {
        "" => 0,
        "Ki" => 10,
        "Mi" => 20,
        "Gi" => 30,
        _ => return Err(EXPECTED.into()),
    };
    count.checked_mul(1 << shift).map(Bytes).ok_or_else(|| "the size is too large".into())
}

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "on" | "1" => Ok(true),
        "false" | "f" | "no" | "n" | "off" | "0" => Ok(false),
        _ => Err("expected true or false".into()),
    }
}

pub(super) fn number(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number from 1".into()),
        Ok(number) => Ok(number),
    }
}

pub(super) fn percent_or_count(text: &str) -> Result<usize, String> {
    const EXPECTED: &str = "expected a number of threads from 1 to 1024, or a share of the CPUs from 1% to 100%";
    let count = match text.strip_suffix('%') {
        Some(percent) => match percent.parse::<usize>() {
            Ok(percent @ 1..=100) => (cpus() * percent).div_ceil(100),
            _ => return Err(EXPECTED.into()),
        },
        None => text.parse().map_err(|_| EXPECTED)?,
    };
    if (1..=1024).contains(&count) { Ok(count) } else { Err(EXPECTED.into()) }
}

/// CPUs that this process may use (affinity and cgroup quota count).
pub(super) fn cpus() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

pub(super) fn socket_address(text: &str) -> Result<SocketAddr, String> {
    if let Some(port) = text.strip_prefix("localhost:") {
        return format!("127.0.0.1:{port}").parse().map_err(|_| "expected a port after localhost:".into());
    }
    text.parse().map_err(|_| "expected address:port, such as 127.0.0.1:15000 or [::]:15020".into())
}

pub(super) fn cidr(text: &str) -> Result<IpNet, String> {
    text.trim().parse().map_err(|_| "expected an address range such as 10.0.0.0/8 or fd00::/8".into())
}

/// A word without white space or `/`, as names of Kubernetes objects are.
pub(super) fn words(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > 253 || text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '/') {
        return Err("expected a name: 1 to 253 characters, no white space, no /".into());
    }
    Ok(text.into())
}

pub(super) fn hostname(text: &str) -> Result<String, String> {
    let label =
        |l: &str| (1..=63).contains(&l.len()) && l.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    let name = text.strip_suffix('.').unwrap_or(text);
    if name.len() > 253 || !name.split('.').all(label) {
        return Err("expected a DNS name such as cluster.local".into());
    }
    Ok(name.into())
}

pub(super) fn trust_domain(text: &str) -> Result<TrustDomain, String> {
    let right = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._".contains(&b);
    if text.is_empty() || text.len() > 255 || !text.bytes().all(right) {
        return Err("expected a trust domain such as cluster.local: lower case letters, digits, '-', '.', '_'".into());
    }
    Ok(TrustDomain::new(text))
}

pub(super) fn path(text: &str) -> Result<PathBuf, String> {
    if text.trim().is_empty() { Err("expected the path of a file".into()) } else { Ok(text.into()) }
}

pub(super) fn endpoint(text: &str) -> Result<Endpoint, String> {
    let expected = || "expected https://host:port (http:// only where the link itself is trusted)".to_owned();
    let uri: http::Uri = text.parse().map_err(|_| expected())?;
    let tls = match uri.scheme_str() {
        Some("https") => true,
        Some("http") => false,
        _ => return Err(expected()),
    };
    let authority = uri.authority().ok_or_else(expected)?;
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    if host.is_empty() || uri.path().len() > 1 || uri.query().is_some() {
        return Err(expected());
    }
    // `port()` has nothing for a port that is too large as well as for none.
    let port = match authority.as_str().strip_prefix(authority.host()).ok_or_else(expected)? {
        "" if tls => 443,
        "" => 80,
        rest => match rest.strip_prefix(':').and_then(|port| port.parse().ok()) {
            None | Some(0) => return Err(expected()),
            Some(port) => port,
        },
    };
    Ok(Endpoint { tls, host: host.into(), port })
}

impl RootSource {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        match text {
            "" => Err("expected a PEM file, the word SYSTEM, or PEM text".into()),
            "SYSTEM" => Ok(Self::System),
            _ if text.contains("-----BEGIN") => match text.contains("-----END CERTIFICATE-----") {
                true => Ok(Self::Inline(text.into())),
                false => Err("the PEM text has no end: expected -----END CERTIFICATE-----".into()),
            },
            _ => Ok(Self::File(text.into())),
        }
    }
}

impl TokenSource {
    /// A text of three dot-separated parts that starts as every JWT does is a token; anything else names a file.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("expected a file with a service account token, or the token".into());
        }
        let literal = text.starts_with("eyJ") && text.matches('.').count() == 2 && !text.contains('/');
        Ok(if literal { Self::Literal(text.into()) } else { Self::File(text.into()) })
    }
}

impl Endpoint {
    /// `https://host:port`.
    pub fn uri(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        match self.host.contains(':') {
            true => write!(f, "{scheme}://[{}]:{}", self.host, self.port),
            false => write!(f, "{scheme}://{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for RootSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::System => f.write_str("SYSTEM"),
            Self::Inline(_) => f.write_str("(PEM text)"),
        }
    }
}

impl fmt::Display for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Literal(_) => f.write_str("(literal, not shown)"),
        }
    }
}

impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            b if b != 0 && b % (1 << 30) == 0 => write!(f, "{}Gi", b >> 30),
            b if b != 0 && b % (1 << 20) == 0 => write!(f, "{}Mi", b >> 20),
            b if b != 0 && b % (1 << 10) == 0 => write!(f, "{}Ki", b >> 10),
            b => write!(f, "{b}"),
        }
    }
}

macro_rules! serialize_as_text {
    ($($type:ty),*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }
    )*};
}

serialize_as_text!(Endpoint, RootSource, TokenSource, Bytes);

pub(super) fn display_all<T: fmt::Display, S: Serializer>(values: &[T], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(values.iter().map(ToString::to_string))
}

pub(super) fn display<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// `10s`, `0.5s`.
pub(super) fn seconds<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{}s", duration.as_secs_f64()))
}

pub(super) fn or_kubernetes<S: Serializer>(id: &Option<String>, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(id.as_deref().unwrap_or(super::DEFAULT_CLUSTER))
}

pub(super) fn names_only<S: Serializer>(headers: &BTreeMap<String, String>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(headers.keys())
}

//! Random policies and connections of a small world, so that they meet often.

use std::collections::BTreeSet;

use prost::Message;

use crate::identity::Identity;
use crate::policy::Connection;
use crate::proto::security as wire;

/// Random numbers that a seed repeats (splitmix64).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Short lists more often than long ones.
    fn list<T>(&mut self, most: usize, mut make: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = self.below(most + 1).min(self.below(most + 1));
        (0..count).map(|_| make(self)).collect()
    }
}

/// A policy as it is sent, with the matches that hold a field of a later version.
#[derive(Debug, Clone)]
pub struct Sent {
    pub message: wire::Authorization,
    pub later_fields: BTreeSet<(usize, usize, usize)>,
}

/// The workload that is connected to.
#[derive(Debug)]
pub struct Target {
    pub namespace: &'static str,
    pub names: Vec<std::sync::Arc<str>>,
    pub complete: bool,
}

pub fn policies(random: &mut Random) -> Vec<Sent> {
    let count = random.below(7);
    (0..count).map(|_| policy(random)).collect()
}

pub fn policy(random: &mut Random) -> Sent {
    let mut message = wire::Authorization {
        name: (*random.pick(&["a", "b", "c", "d"])).into(),
        namespace: (*random.pick(&["root", "shop", "bank"])).into(),
        scope: *random.pick(&[0, 0, 1, 1, 1, 2, 2]),
        action: *random.pick(&[0, 0, 0, 0, 1, 1, 1, 1000]),
        dry_run: random.one_in(5),
        rules: random.list(4, rule),
        extensions: vec![],
    };
    // What no server should send, or only a later one.
    match random.below(60) {
        0 => message.action = 2,
        1 => message.scope = 3,
        2 => message.extensions.push(wire::Extension { name: "later".into(), config: None }),
        _ => {}
    }
    let mut later_fields = BTreeSet::new();
    for (r, rule) in message.rules.iter().enumerate() {
        for (c, clause) in rule.clauses.iter().enumerate() {
            for m in 0..clause.matches.len() {
                if random.one_in(40) {
                    later_fields.insert((r, c, m));
                }
            }
        }
    }
    Sent { message, later_fields }
}

fn rule(random: &mut Random) -> wire::Rule {
    wire::Rule { clauses: random.list(3, |r| wire::Clause { matches: r.list(3, one_match) }) }
}

fn one_match(random: &mut Random) -> wire::Match {
    let mut one = wire::Match::default();
    for _ in 0..random.below(4) {
        match random.below(12) {
            0 => one.namespaces = random.list(3, namespace),
            1 => one.not_namespaces = random.list(3, namespace),
            2 => one.principals = random.list(3, principal),
            3 => one.not_principals = random.list(3, principal),
            4 => one.source_ips = random.list(4, range),
            5 => one.not_source_ips = random.list(4, range),
            6 => one.destination_ips = random.list(4, range),
            7 => one.not_destination_ips = random.list(4, range),
            8 => one.destination_ports = random.list(3, port),
            9 => one.not_destination_ports = random.list(3, port),
            10 => one.service_accounts = random.list(3, account),
            _ => one.not_service_accounts = random.list(3, account),
        }
    }
    if random.one_in(60) {
        one.extensions.push(wire::Extension { name: "later".into(), config: None });
    }
    one
}

fn text(random: &mut Random, whole: &str) -> wire::StringMatch {
    use wire::string_match::MatchType;
    let cut = random.below(whole.len() + 1);
    let kind = match random.below(40) {
        0..16 => Some(MatchType::Exact(whole.into())),
        16..24 => Some(MatchType::Prefix(whole[..cut].into())),
        24..32 => Some(MatchType::Suffix(whole[cut..].into())),
        32..38 => Some(MatchType::Presence(())),
        38 => Some(MatchType::Exact(whole[..cut].into())),
        _ => None,
    };
    wire::StringMatch { match_type: kind }
}

fn namespace(random: &mut Random) -> wire::StringMatch {
    let whole = *random.pick(&NAMESPACES);
    text(random, whole)
}

fn principal(random: &mut Random) -> wire::StringMatch {
    let (domain, ns, sa) = (random.pick(&DOMAINS), random.pick(&NAMESPACES), random.pick(&ACCOUNTS));
    let scheme = if random.one_in(30) { "spiffe://" } else { "" };
    let whole = format!("{scheme}{domain}/ns/{ns}/sa/{sa}");
    text(random, &whole)
}

fn account(random: &mut Random) -> wire::ServiceAccountMatch {
    wire::ServiceAccountMatch {
        namespace: (*random.pick(&NAMESPACES)).into(),
        service_account: if random.one_in(10) { String::new() } else { (*random.pick(&ACCOUNTS)).into() },
    }
}

fn range(random: &mut Random) -> wire::Address {
    let address: std::net::IpAddr = random.pick(&ADDRESSES).parse().unwrap();
    let bytes = match address {
        std::net::IpAddr::V4(v4) if random.one_in(3) => v4.to_ipv6_mapped().octets().to_vec(),
        std::net::IpAddr::V4(v4) => v4.octets().to_vec(),
        std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let full = bytes.len() as u32 * 8;
    let length = match random.below(6) {
        0 => 0,
        1 => full,
        2 => full - 8,
        _ => random.below(full as usize + 1) as u32,
    };
    match random.below(400) {
        0 => wire::Address { address: bytes.into(), length: full + 1 },
        1 => wire::Address { address: vec![1, 2, 3].into(), length: 8 },
        _ => wire::Address { address: bytes.into(), length },
    }
}

fn port(random: &mut Random) -> u32 {
    if random.one_in(300) { 70_000 } else { *random.pick(&PORTS) }
}

pub fn target(random: &mut Random) -> Target {
    let mut names = random.list(4, |r| {
        let (ns, name) = (r.pick(&["root", "shop", "bank"]), r.pick(&["a", "b", "c", "d"]));
        format!("{ns}/{name}").into()
    });
    if random.one_in(2) {
        names.clear();
    }
    Target { namespace: ["shop", "bank"][random.below(2)], names, complete: !random.one_in(30) }
}

pub fn connection(random: &mut Random) -> Connection {
    let (domain, ns, sa) = (random.pick(&DOMAINS), random.pick(&NAMESPACES), random.pick(&ACCOUNTS));
    let identity: Identity = format!("spiffe://{domain}/ns/{ns}/sa/{sa}").parse().unwrap();
    let address = |random: &mut Random| {
        let address: std::net::IpAddr = random.pick(&ADDRESSES).parse().unwrap();
        match address {
            std::net::IpAddr::V4(v4) if random.one_in(4) => v4.to_ipv6_mapped().into(),
            other => other,
        }
    };
    Connection {
        identity: (!random.one_in(4)).then_some(identity),
        source: address(random),
        destination: std::net::SocketAddr::new(address(random), *random.pick(&PORTS) as u16),
    }
}

impl Sent {
    /// The bytes, with a field of a later version where there is one.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = wire::Authorization { rules: vec![], ..self.message.clone() }.encode_to_vec();
        for (r, rule) in self.message.rules.iter().enumerate() {
            let mut rule_bytes = Vec::new();
            for (c, clause) in rule.clauses.iter().enumerate() {
                let mut clause_bytes = Vec::new();
                for (m, one) in clause.matches.iter().enumerate() {
                    let mut match_bytes = one.encode_to_vec();
                    if self.later_fields.contains(&(r, c, m)) {
                        field(20, b"later", &mut match_bytes);
                    }
                    field(2, &match_bytes, &mut clause_bytes);
                }
                field(1, &clause_bytes, &mut rule_bytes);
            }
            field(5, &rule_bytes, &mut bytes);
        }
        bytes
    }
}

/// Appends a field with a length.
pub fn field(number: u32, content: &[u8], to: &mut Vec<u8>) {
    prost::encoding::encode_key(number, prost::encoding::WireType::LengthDelimited, to);
    prost::encoding::encode_varint(content.len() as u64, to);
    to.extend_from_slice(content);
}

const NAMESPACES: [&str; 3] = ["shop", "bank", "shopping"];
const ACCOUNTS: [&str; 2] = ["web", "cart"];
const DOMAINS: [&str; 3] = ["cluster.local", "cluster.local", "other.example"];
const ADDRESSES: [&str; 7] = ["10.0.0.7", "10.0.0.8", "10.1.0.7", "192.168.3.1", "fd00::7", "fd00::1:7", "2001:db8::1"];
const PORTS: [u32; 5] = [80, 8080, 443, 0, 65_535];

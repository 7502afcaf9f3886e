//! What the fuzz target checks, without a fuzzer: well-formed policies, and the same with bytes changed.

use prost::Message;
use ztunnel::proto::security;

#[path = "../../tests/fuzz/src/policy.rs"]
mod checks;

/// The same numbers in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
}

fn text(numbers: &mut Numbers) -> security::StringMatch {
    use security::string_match::MatchType;
    let words = ["cluster.local/ns/shop/sa/web", "shop", "", "*", "a/b"];
    let word = words[numbers.below(words.len())].to_owned();
    let match_type = match numbers.below(5) {
        0 => Some(MatchType::Exact(word)),
        1 => Some(MatchType::Prefix(word)),
        2 => Some(MatchType::Suffix(word)),
        3 => Some(MatchType::Presence(())),
        _ => None,
    };
    security::StringMatch { match_type }
}

fn some<T>(numbers: &mut Numbers, make: impl Fn(&mut Numbers) -> T) -> Vec<T> {
    match numbers.below(4) {
        0 => (0..1 + numbers.below(2)).map(|_| make(numbers)).collect(),
        _ => Vec::new(),
    }
}

fn condition(numbers: &mut Numbers) -> security::Match {
    let range = |numbers: &mut Numbers| security::Address {
        address: vec![10; [0, 4, 16, 5][numbers.below(4)]].into(),
        length: [0, 8, 32, 128, 200][numbers.below(5)],
    };
    let port = |numbers: &mut Numbers| [80, 443, 0, 70_000][numbers.below(4)];
    let account = |numbers: &mut Numbers| security::ServiceAccountMatch {
        namespace: ["shop", ""][numbers.below(2)].into(),
        service_account: ["web", ""][numbers.below(2)].into(),
    };
    let extension = |_: &mut Numbers| security::Extension { name: "new".into(), config: None };
    security::Match {
        namespaces: some(numbers, text),
        not_namespaces: some(numbers, text),
        principals: some(numbers, text),
        not_principals: some(numbers, text),
        source_ips: some(numbers, range),
        not_source_ips: some(numbers, range),
        destination_ips: some(numbers, range),
        not_destination_ips: some(numbers, range),
        destination_ports: some(numbers, port),
        not_destination_ports: some(numbers, port),
        service_accounts: some(numbers, account),
        not_service_accounts: some(numbers, account),
        extensions: if numbers.below(20) == 0 { vec![extension(numbers)] } else { Vec::new() },
    }
}

fn policy(numbers: &mut Numbers) -> security::Authorization {
    let matches = |numbers: &mut Numbers| (0..numbers.below(3)).map(|_| condition(numbers)).collect();
    let clauses =
        |numbers: &mut Numbers| (0..numbers.below(3)).map(|_| security::Clause { matches: matches(numbers) }).collect();
    security::Authorization {
        name: ["p", ""][numbers.below(2)].into(),
        namespace: ["shop", "other", "a/b", ""][numbers.below(4)].into(),
        scope: numbers.below(4) as i32,
        action: [0, 1, 1000, 7][numbers.below(4)],
        rules: (0..numbers.below(3)).map(|_| security::Rule { clauses: clauses(numbers) }).collect(),
        dry_run: numbers.below(5) == 0,
        extensions: Vec::new(),
    }
}

#[test]
fn no_bytes_make_a_policy_that_allows_what_is_not_understood() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for _ in 0..20_000 {
        let mut bytes = policy(&mut numbers).encode_to_vec();
        checks::check(&bytes);
        for _ in 0..numbers.below(4) {
            match (numbers.below(3), bytes.len()) {
                (_, 0) => bytes.push(numbers.next() as u8),
                (0, len) => bytes[numbers.below(len)] = numbers.next() as u8,
                (1, len) => bytes.truncate(numbers.below(len)),
                (_, len) => bytes.insert(numbers.below(len), numbers.next() as u8),
            }
        }
        checks::check(&bytes);
    }
}

//! The evaluation against the oracle, over generated policies and connections; and over bytes that were tampered with.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::generate::{self, Random, Sent, Target};
use super::oracle::{self, Answer};
use crate::policy::{self, Connection, PolicyIndex, Undecided, Verdict};

/// Sets of policies, and connections for each.
const ROUNDS: usize = 30_000;
const CONNECTIONS: usize = 5;
const TAMPERED: usize = 60_000;

/// `POLICY_TIMES` lets it go on for longer.
fn times(rounds: usize) -> usize {
    std::env::var("POLICY_TIMES").ok().and_then(|text| text.parse().ok()).unwrap_or(1) * rounds
}

/// Another one in each run; `POLICY_SEED` repeats one.
fn seed() -> u64 {
    std::env::var("POLICY_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or_else(crate::random::next_u64)
}

/// Says the seed if the test fails.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("repeat this with POLICY_SEED={}", self.0);
        }
    }
}

fn take(index: &mut PolicyIndex, bytes: &[u8], name: &str) {
    let policy = match policy::decode(bytes) {
        Ok(decoded) => policy::convert(&decoded).unwrap_or_else(|e| policy::stand_in(&decoded.message, &e.to_string())),
        Err(error) => policy::stand_in_named(name, &error.to_string()),
    };
    index.insert(Arc::new(policy));
}

fn index_of(all: &[Sent], complete: bool) -> PolicyIndex {
    let mut index = PolicyIndex::default();
    for sent in all {
        take(&mut index, &sent.encode(), "unread/able");
    }
    if complete {
        index.complete();
    }
    index
}

fn kind(verdict: &Verdict) -> Answer {
    match verdict {
        Verdict::Allowed { .. } => Answer::Allowed,
        Verdict::Denied { .. } => Answer::Denied,
        Verdict::NotAllowed { .. } => Answer::NotAllowed,
        Verdict::Undecided { .. } => Answer::Undecided,
    }
}

/// What is named as the reason must be one.
fn check_reason(verdict: &Verdict, all: &[Sent], target: &Target, connection: &Connection, with_dry_runs: bool) {
    let applying = oracle::applying(all, target);
    let find = |key: &str| {
        let named = |s: &&&Sent| format!("{}/{}", s.message.namespace, s.message.name) == key;
        let sent = applying.iter().find(named).unwrap_or_else(|| panic!("{key} does not apply"));
        assert!(with_dry_runs || !sent.message.dry_run, "{key} is a dry run");
        *sent
    };
    match verdict {
        Verdict::Allowed { by: Some(by) } => {
            assert_eq!(find(&by.policy).message.action, 0);
            assert_eq!(oracle::rule(find(&by.policy), by.rule, connection), Some(true), "{by}");
        }
        Verdict::Denied { by, matched } => {
            assert_eq!(find(&by.policy).message.action, 1);
            assert_eq!(oracle::rule(find(&by.policy), by.rule, connection), Some(true), "{by}");
            assert!(!matched.is_empty());
        }
        Verdict::NotAllowed { policies, closest } => {
            let allowing = applying.iter().filter(|s| s.message.action == 0 && (with_dry_runs || !s.message.dry_run));
            assert_eq!(*policies, allowing.clone().count());
            let rules = allowing.flat_map(|s| (0..s.message.rules.len()).map(move |r| (s, r)));
            let least = rules.map(|(s, r)| oracle::missing(s, r, connection)).min();
            let named = closest.rule.map(|r| oracle::missing(find(&closest.policy), r, connection));
            assert_eq!(named, least, "{closest}");
            assert_eq!(closest.failed.len(), least.unwrap_or(0), "{closest}");
        }
        Verdict::Undecided { missing: Undecided::UnknownPolicy { policy } } => {
            let known = all.iter().any(|s| format!("{}/{}", s.message.namespace, s.message.name) == **policy);
            assert!(target.names.contains(policy) && !known);
        }
        Verdict::Undecided { missing: Undecided::NotUnderstood { policy, .. } } => {
            find(policy);
        }
        Verdict::Undecided { missing: Undecided::Policies } => assert!(!target.complete),
        Verdict::Allowed { by: None } => {}
    }
    assert!(verdict.to_string().len() < 4096);
}

#[test]
fn the_verdict_is_what_a_slow_reading_of_the_wire_says() {
    let seed = Seed(seed());
    let mut random = Random(seed.0);
    let mut counts: BTreeMap<Answer, usize> = BTreeMap::new();
    for _ in 0..times(ROUNDS) {
        let (all, target) = (generate::policies(&mut random), generate::target(&mut random));
        let set = index_of(&all, target.complete).applying(target.namespace, &target.names);
        for _ in 0..CONNECTIONS {
            let connection = generate::connection(&mut random);
            let decision = policy::evaluate(&set, &connection);
            let context = || format!("{all:#?}\n{target:?}\n{connection:?}\n{decision:#?}");
            let expected = oracle::answer(&all, &target, &connection, false);
            assert_eq!(kind(&decision.verdict), expected, "{}", context());
            check_reason(&decision.verdict, &all, &target, &connection, false);
            match &decision.dry_run {
                Some(verdict) => {
                    assert_eq!(kind(verdict), oracle::answer(&all, &target, &connection, true), "{}", context());
                    check_reason(verdict, &all, &target, &connection, true);
                }
                None => {
                    let dry_runs = oracle::applying(&all, &target).into_iter().filter(|s| s.message.dry_run);
                    let others = dry_runs.filter(|s| s.message.action != 1000);
                    assert_eq!(others.count(), 0, "{}", context());
                }
            }
            let mut audited: Vec<_> = decision.audited.iter().map(|by| by.policy.to_string()).collect();
            audited.sort();
            assert_eq!(audited, oracle::audited(&all, &target, &connection), "{}", context());
            *counts.entry(expected).or_default() += 1;
        }
    }
    let least = counts.values().copied().min().unwrap_or(0);
    assert!(counts.len() == 4 && least > ROUNDS * CONNECTIONS / 50, "the cases do not tell much: {counts:?}");
}

#[test]
fn bytes_that_were_tampered_with_harm_nobody_and_never_open_what_their_reading_does_not() {
    let seed = Seed(seed());
    let mut random = Random(seed.0);
    let mut read = 0;
    for _ in 0..times(TAMPERED) {
        let mut sent = generate::policy(&mut random);
        let mut bytes = sent.encode();
        tamper(&mut bytes, &mut random);
        let mut index = PolicyIndex::default();
        index.complete();
        take(&mut index, &bytes, "some/name");
        let held = index.iter().next().expect("something is held, or something stands in").clone();
        let target = Target { namespace: "shop", names: vec![held.key().clone()], complete: true };
        let set = index.applying(target.namespace, &target.names);
        let connection = generate::connection(&mut random);
        let decision = policy::evaluate(&set, &connection);
        match policy::decode(&bytes) {
            Ok(decoded) => {
                read += 1;
                let unknown_outside = decoded.unknown.is_some() && decoded.message.action != 1000;
                sent = Sent { message: decoded.message, later_fields: decoded.unknown_matches };
                let expected = match unknown_outside && !oracle::is_invalid(&sent) {
                    true if sent.message.dry_run => Answer::Allowed,
                    true => Answer::Undecided,
                    false => oracle::answer(std::slice::from_ref(&sent), &target, &connection, false),
                };
                assert_eq!(kind(&decision.verdict), expected, "{sent:#?}\n{connection:?}\n{decision:#?}");
            }
            Err(_) => assert_eq!(kind(&decision.verdict), Answer::Undecided, "{decision:#?}"),
        }
    }
    assert!(read > TAMPERED / 10, "hardly any bytes can still be read: {read}");
}

fn tamper(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len() + 1);
        match random.below(6) {
            0 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            1 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            2 => bytes.truncate(at),
            3 => bytes.insert(at, random.below(256) as u8),
            4 if at < bytes.len() => {
                bytes.remove(at);
            }
            _ => {
                let other = generate::policy(random).encode();
                let from = random.below(other.len() + 1);
                bytes.extend_from_slice(&other[from..]);
            }
        }
    }
}

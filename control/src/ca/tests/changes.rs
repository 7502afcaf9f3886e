//! What is in force after changes of the files, step by step in a time of our own, and for any course of events.

use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use crate::ca::authority::Authority;
use crate::ca::cert::Cert;
use crate::ca::in_force::Trusted;
use crate::ca::layout::{Found, look};
use crate::ca::record::Record;

const LIFE: u64 = 1000;

/// Three own roots, and a clock.
struct World {
    authorities: &'static [Arc<Authority>],
    record: Record,
    now: SystemTime,
    held: Option<InForce>,
    events: Vec<Event>,
}

impl World {
    fn new() -> Self {
        static AUTHORITIES: LazyLock<Vec<Arc<Authority>>> = LazyLock::new(|| {
            let make = |number| {
                let dir = Dir::new(&format!("world-{number}"));
                dir.open().unwrap();
                let found = look(&dir.0, files::own_user()).unwrap().verify(&dir.0, &identity(), SystemTime::now());
                found.unwrap().authority
            };
            (0..3).map(make).collect()
        });
        let record = Record { leaf_life: LIFE, ..Record::default() };
        // Whole seconds, as in the record.
        let now = record::at(record::seconds(SystemTime::now()));
        Self { authorities: &AUTHORITIES, record, now, held: None, events: Vec::new() }
    }

    fn root(&self, number: usize) -> &Cert {
        self.authorities[number].root()
    }

    /// The files have this one sign, and these roots.
    fn files(&self, signer: usize, roots: &[usize]) -> Arc<Found> {
        let authority = self.authorities[signer].clone();
        let mut roots: Vec<Cert> = roots.iter().map(|number| self.root(*number).clone()).collect();
        if !roots.contains(authority.root()) {
            roots.push(authority.root().clone());
        }
        Arc::new(Found { layout: Layout::OwnRoot, authority, roots })
    }

    fn look(&mut self, found: Arc<Found>) {
        let (fresh, events) = InForce::advance(self.held.as_ref(), found, &mut self.record, self.now, false);
        self.held = Some(fresh);
        self.events = events;
    }

    fn look_after(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        let found = self.held().found.clone();
        self.look(found);
    }

    fn held(&self) -> &InForce {
        self.held.as_ref().unwrap()
    }

    fn signs(&self) -> usize {
        self.number_of(self.held().authority.root())
    }

    fn number_of(&self, root: &Cert) -> usize {
        (0..self.authorities.len()).find(|number| self.root(*number) == root).unwrap()
    }

    /// In the order in which they are handed out.
    fn trusted(&self) -> Vec<usize> {
        self.held().roots.iter().map(|root| self.number_of(&root.cert)).collect()
    }

    /// A certificate is signed now, for so many seconds.
    fn sign(&mut self, seconds: u64) {
        let (root, end) = (self.held().authority.root().clone(), self.now + Duration::from_secs(seconds));
        self.record.root_mut(&root).leaves_live_until(end);
    }
}

#[test]
fn a_root_that_replaces_another_in_one_go_signs_once_everybody_knows_it_and_the_old_one_is_trusted_to_its_last_leaf() {
    let mut world = World::new();
    world.look(world.files(0, &[]));
    assert_eq!((world.signs(), world.trusted()), (0, vec![0]));
    world.look_after(10_000);
    world.look(world.files(1, &[]));
    // Three quarters of the longest life.
    assert!(matches!(&world.events[..], [Event::Waits { .. }, Event::Trusted(_)]), "{:?}", world.events);
    assert_eq!((world.signs(), world.trusted()), (0, vec![0, 1]));
    let pending = world.held().pending.clone().unwrap();
    assert_eq!(pending.from, world.now + Duration::from_secs(750));
    world.look_after(749);
    assert_eq!((world.signs(), world.events.len()), (0, 0));
    world.sign(LIFE);
    world.look_after(1);
    assert_eq!((world.signs(), world.trusted()), (1, vec![1, 0]));
    assert!(matches!(&world.events[..], [Event::Signs(_), Event::Retired { .. }]), "{:?}", world.events);
    world.look_after(LIFE - 2);
    assert_eq!(world.trusted(), [1, 0]);
    world.look_after(1);
    assert_eq!(world.trusted(), [1]);
    assert!(matches!(&world.events[..], [Event::Withdrawn { forced: false, .. }]), "{:?}", world.events);
    assert_eq!(world.record.roots.len(), 1, "the rest is forgotten");
}

#[test]
fn a_root_that_was_announced_for_long_signs_at_once_and_one_without_leaves_goes_at_once() {
    let mut world = World::new();
    world.look(world.files(0, &[]));
    world.look_after(10_000);
    world.look(world.files(0, &[0, 1, 2]));
    assert_eq!((world.signs(), world.trusted()), (0, vec![0, 1, 2]));
    world.look_after(750);
    world.look(world.files(1, &[0, 1, 2]));
    assert_eq!((world.signs(), world.trusted()), (1, vec![1, 0, 2]));
    // The third never signed.
    world.look(world.files(1, &[0, 1]));
    assert_eq!(world.trusted(), [1, 0]);
    world.look_after(LIFE);
    world.look(world.files(1, &[]));
    assert_eq!(world.trusted(), [1]);
}

#[test]
fn a_restart_takes_the_files_as_they_are_and_goes_on_trusting_what_has_leaves() {
    let mut world = World::new();
    world.look(world.files(0, &[]));
    world.look_after(10_000);
    world.sign(LIFE);
    world.look(world.files(1, &[]));
    assert_eq!(world.signs(), 0);
    // The key of before is gone with the process.
    world.record.roots.values_mut().for_each(|root| root.announced = Some(0));
    world.look_after(1);
    assert_eq!((world.signs(), world.trusted()), (1, vec![1, 0]));
    let text = serde_json::to_string(&world.record).unwrap();
    world.record = serde_json::from_str(&text).unwrap();
    world.held = None;
    world.look(world.files(1, &[]));
    assert_eq!((world.signs(), world.trusted()), (1, vec![1, 0]));
    world.look_after(LIFE);
    assert_eq!(world.trusted(), [1]);
}

#[test]
fn what_is_unknown_at_the_start_counts_as_living() {
    let mut world = World::new();
    world.look(world.files(1, &[0, 1]));
    world.look(world.files(1, &[]));
    assert_eq!(world.trusted(), [1, 0]);
    world.look_after(LIFE);
    assert_eq!(world.trusted(), [1]);
}

#[test]
fn the_operators_word_hurries_both_and_only_for_the_root_that_it_names() {
    let mut world = World::new();
    world.look(world.files(0, &[]));
    world.sign(LIFE);
    world.look(world.files(1, &[0, 1, 2]));
    assert_eq!(world.signs(), 0);
    let (old, new) = (world.root(0).clone(), world.root(1).clone());
    world.record.root_mut(&new).forced = true;
    world.look_after(0);
    assert_eq!((world.signs(), world.trusted()), (1, vec![1, 0, 2]));
    world.sign(LIFE);
    world.record.root_mut(&old).withdrawn = Some(record::seconds(world.now));
    world.look_after(0);
    assert_eq!(world.trusted(), [1, 2], "although it is still in the files");
    assert!(matches!(&world.events[..], [Event::Withdrawn { forced: true, .. }]), "{:?}", world.events);
    // Nor does it come back while it stays there, however long.
    world.look_after(LIFE * 1000);
    assert_eq!(world.trusted(), [1, 2]);
}

#[test]
fn another_authority_below_the_same_root_signs_at_once() {
    let (dir, root) = (Dir::new("same-root"), pki::Outside::root("root"));
    root.below("one").plug_into(&dir.0, &[], &[&root]);
    let ca = dir.open().unwrap();
    root.below("two").plug_into(&dir.0, &[], &[&root]);
    assert_eq!(ca.refresh(), Changes { signer: true, roots: false, problem: None });
    assert_eq!(ca.report().signs.name, "CN=two");
    assert_eq!(ca.refresh(), Changes::default());
}

/// Nobody signs with what has ended: then the new one does, although not everybody may know it.
#[test]
fn a_root_that_ends_while_the_next_one_waits_is_replaced_at_once() {
    let end = SystemTime::now() + Duration::from_secs(600);
    let found = |dir: &Dir| look(&dir.0, files::own_user()).unwrap().verify(&dir.0, &identity(), SystemTime::now());
    let of = |name: &str, root: pki::Outside| {
        let dir = Dir::new(&format!("ends-{name}"));
        fs::create_dir_all(&dir.0).unwrap();
        pki::set_mode(&dir.0, 0o700);
        root.put_as_own_root(&dir.0, &[]);
        Arc::new(found(&dir).unwrap())
    };
    let short = of("short", pki::Outside::root_with("short", |params| params.not_after = end.into()));
    let long = of("long", pki::Outside::root("long"));
    let mut record = Record { leaf_life: 86_400, ..Record::default() };
    let mut at = |held: Option<&InForce>, files: &Arc<Found>, seconds: u64| {
        let now = SystemTime::now() + Duration::from_secs(seconds);
        InForce::advance(held, files.clone(), &mut record, now, false)
    };
    let first = at(None, &short, 0).0;
    let (waits, events) = at(Some(&first), &long, 10);
    assert!(waits.pending.is_some() && matches!(events[..], [Event::Waits { .. }, Event::Trusted(_)]), "{events:?}");
    assert_eq!(waits.authority.root().name, "CN=short");
    let (after, events) = at(Some(&waits), &long, 601);
    assert_eq!(after.authority.root().name, "CN=long");
    assert!(after.pending.is_none() && after.roots.len() == 1);
    assert_eq!(events, [Event::Signs("CN=long".into()), Event::Ended("CN=short".into())]);
}

#[derive(Debug, Clone)]
enum Op {
    Files { signer: usize, roots: Vec<usize> },
    Pass(u64),
    Sign(u64),
    ForceSign(usize),
    ForceOut(usize),
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..3usize, proptest::collection::vec(0..3usize, 0..3))
            .prop_map(|(signer, roots)| Op::Files { signer, roots }),
        4 => (0..LIFE).prop_map(Op::Pass),
        3 => (1..=LIFE).prop_map(Op::Sign),
        1 => (0..3usize).prop_map(Op::ForceSign),
        1 => (0..3usize).prop_map(Op::ForceOut),
        1 => Just(Op::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    /// Whatever is done to the files: nobody is cut off but by the operator's word.
    #[test]
    fn no_root_signs_unknown_or_is_withdrawn_while_its_leaves_live(ops in proptest::collection::vec(op(), 1..40)) {
        let mut world = World::new();
        world.look(world.files(0, &[]));
        // What a simpler mind knows: since when each is trusted, when its last leaf ends, what was said of it.
        let mut since = [Some(world.now), None, None];
        let mut leaves = [world.now + Duration::from_secs(LIFE), world.now, world.now];
        let (mut may_sign, mut is_out) = ([false; 3], [false; 3]);
        for op in ops {
            let before = world.signs();
            let mut restarted = false;
            match op {
                Op::Files { signer, roots } => {
                    // Who was put out is not put in again.
                    if !is_out[signer] {
                        world.look(world.files(signer, &roots));
                    }
                }
                Op::Pass(time) => world.look_after(time),
                Op::Sign(life) => {
                    world.sign(life);
                    leaves[before] = leaves[before].max(world.now + Duration::from_secs(life));
                }
                Op::ForceSign(number) => {
                    let root = world.root(number).clone();
                    if world.record.root(&root).is_some() {
                        world.record.root_mut(&root).forced = true;
                        may_sign[number] = true;
                        world.look_after(0);
                    }
                }
                Op::ForceOut(number) => {
                    let wanted = world.number_of(world.held().found.authority.root());
                    if number != wanted {
                        let (root, now) = (world.root(number).clone(), record::seconds(world.now));
                        world.record.root_mut(&root).withdrawn = Some(now);
                        is_out[number] = true;
                        world.look_after(0);
                    }
                }
                Op::Restart => {
                    let found = world.held().found.clone();
                    world.held = None;
                    world.look(found);
                    restarted = true;
                }
            }
            let (signs, trusted) = (world.signs(), world.trusted());
            prop_assert_eq!(trusted[0], signs);
            prop_assert!(world.held().roots.iter().filter(|root| root.cert == *world.root(signs)).count() == 1);
            if signs != before && !restarted {
                let known_for = world.now.duration_since(since[signs].unwrap()).unwrap();
                let in_time = known_for >= Duration::from_secs(LIFE * 3 / 4);
                prop_assert!(may_sign[signs] || in_time || is_out[before], "{:?}", known_for);
            }
            for number in 0..3 {
                let is_trusted = trusted.contains(&number);
                if leaves[number] > world.now && !is_out[number] {
                    prop_assert!(is_trusted, "{number} has leaves");
                }
                let in_files = world.held().found.roots.contains(world.root(number));
                let held: Option<&Trusted> = world.held().roots.iter().find(|r| r.cert == *world.root(number));
                if is_trusted && number != signs && !in_files {
                    prop_assert!(held.unwrap().retired_until.unwrap() > world.now);
                }
                prop_assert!(!(is_trusted && is_out[number] && number != signs));
                since[number] = if is_trusted { since[number].or(Some(world.now)) } else { None };
                may_sign[number] &= world.record.root(world.root(number)).is_some();
            }
        }
    }
}

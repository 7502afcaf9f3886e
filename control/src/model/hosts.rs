//! Which ServiceEntry gives a host name, where several do, and the virtual addresses of those that name none.
//!
//! Must never depend on the order in which objects were heard of: every replica says the same, and says it again after a
//! restart.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use ztunnel::manifests::{ObjectName, Objects, Resolution, ServiceEntry};

use super::entry;
use super::links::Step;
use super::snapshot::content_hash;

#[derive(Debug, Default)]
pub(super) struct Hosts {
    claims: HashMap<Arc<str>, BTreeSet<Claim>>,
    wants: BTreeMap<Age, Wants>,
    /// By `namespace/hostname`.
    given: HashMap<Arc<str>, u16>,
    /// Some host that needs an address has none.
    full: bool,
}

/// The oldest comes first, those that do not tell their age last.
type Age = (bool, Option<Timestamp>, ObjectName);

/// A ServiceEntry that gives a host name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Claim {
    age: Age,
    /// For its own namespace alone.
    private: bool,
}

/// What an object means to the virtual addresses of all.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wants {
    /// `namespace/hostname` of hosts that need one.
    hosts: Vec<Arc<str>>,
    /// Addresses that it has already, as the two bytes in which they differ.
    has: Vec<u16>,
}

impl Hosts {
    /// The ServiceEntries that give a host name, in whatever namespace.
    pub fn claimants(&self, host: &str) -> impl Iterator<Item = &ObjectName> {
        self.claims.get(host).into_iter().flatten().map(|claim| &claim.age.2)
    }

    /// The one whose word counts in a namespace.
    pub fn winner(&self, namespace: &str, host: &str) -> Option<&ObjectName> {
        self.claimants(host).find(|name| *name.namespace == *namespace)
    }

    /// The one whose word counts where the namespace does not decide.
    pub fn oldest(&self, host: &str) -> Option<&ObjectName> {
        self.claims.get(host)?.iter().find(|claim| !claim.private).map(|claim| &claim.age.2)
    }

    /// The virtual addresses of a host that names none.
    pub fn addresses(&self, key: &str) -> Option<[IpAddr; 2]> {
        let last = *self.given.get(key)?;
        let [high, low] = last.to_be_bytes();
        let v6 = Ipv6Addr::new(0x2001, 2, 0, 0, 0, 0, 0, last);
        Some([Ipv4Addr::new(240, 240, high, low).into(), v6.into()])
    }

    /// Whether there are more hosts than virtual addresses.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Takes in a step; the ServiceEntries of which a host has another virtual address now.
    pub fn follow(&mut self, step: &Step<'_>) -> BTreeSet<ObjectName> {
        let mut others = false;
        for name in &step.changes.service_entries {
            if let Some(entry) = step.older.service_entries.get(name) {
                let claim = Claim::of(name, entry);
                for host in entry::hosts(entry) {
                    if let Some(claims) = self.claims.get_mut(&*host) {
                        claims.remove(&claim);
                        if claims.is_empty() {
                            self.claims.remove(&*host);
                        }
                    }
                }
            }
            if let Some(entry) = step.newer.service_entries.get(name) {
                for host in entry::hosts(entry) {
                    self.claims.entry(host).or_default().insert(Claim::of(name, entry));
                }
            }
            let wants =
                |objects: &Objects| objects.service_entries.get(name).map(|e| (age(name, e), Wants::of(name, e)));
            let (before, now) = (wants(step.older), wants(step.newer));
            if before != now {
                others = true;
                before.map(|(age, _)| self.wants.remove(&age));
                now.map(|(age, wants)| self.wants.insert(age, wants));
            }
        }
        if others { self.give() } else { BTreeSet::new() }
    }

    /// From the oldest to the youngest, each host has the address that its name leads to, or the next that is free. So
    /// a host keeps its address whatever host comes after it; only an entry that names an address of these itself takes it.
    fn give(&mut self) -> BTreeSet<ObjectName> {
        let mut taken: HashSet<u16> = self.wants.values().flat_map(|wants| wants.has.iter().copied()).collect();
        let mut given = HashMap::new();
        let (mut others, mut full) = (BTreeSet::new(), false);
        for ((_, _, name), wants) in &self.wants {
            for host in &wants.hosts {
                if !given.contains_key(host) {
                    let first = content_hash(host.as_bytes());
                    let mut slots = (0..SLOTS).map(|step| ((first + step) % SLOTS + 1) as u16);
                    let free = if taken.len() < SLOTS as usize { slots.find(|slot| taken.insert(*slot)) } else { None };
                    match free {
                        Some(slot) => drop(given.insert(host.clone(), slot)),
                        None => full = true,
                    }
                }
                if given.get(host) != self.given.get(host) {
                    others.insert(name.clone());
                }
            }
        }
        (self.given, self.full) = (given, full);
        others
    }
}

impl Claim {
    fn of(name: &ObjectName, entry: &ServiceEntry) -> Self {
        Self { age: age(name, entry), private: entry::is_private(entry) }
    }
}

impl Wants {
    fn of(name: &ObjectName, entry: &ServiceEntry) -> Self {
        let status = entry.status.addresses.iter().map(|a| &a.value);
        let has = status.chain(&entry.spec.addresses).filter_map(|text| slot(text.parse().ok()?)).collect();
        let label = entry.metadata.labels.as_ref().and_then(|labels| labels.get(ALLOCATE));
        let none = !entry.spec.addresses.is_empty()
            || entry.spec.resolution == Resolution::None
            || label.is_some_and(|value| value == "false");
        if none {
            return Self { hosts: Vec::new(), has };
        }
        let without = entry::hosts(entry).filter(|host| entry::allocated(entry, host).next().is_none());
        let hosts = without.map(|host| format!("{}/{host}", name.namespace).into()).collect();
        Self { hosts, has }
    }
}

fn age(name: &ObjectName, entry: &ServiceEntry) -> Age {
    let created = entry.metadata.creation_timestamp.as_ref().map(|time| time.0);
    (created.is_none(), created, name.clone())
}

/// The last two bytes of an address that could be given here.
fn slot(address: IpAddr) -> Option<u16> {
    match address {
        IpAddr::V4(v4) => match v4.octets() {
            [240, 240, high, low] => Some(u16::from_be_bytes([high, low])),
            _ => None,
        },
        IpAddr::V6(v6) => match v6.segments() {
            [0x2001, 2, 0, 0, 0, 0, 0, last] => Some(last),
            _ => None,
        },
    }
}

/// Addresses from 240.240.0.1 on, and from 2001:2::1 on: where istiod takes them from.
const SLOTS: u64 = 65_534;
const ALLOCATE: &str = "networking.istio.io/enable-autoallocate-ip";

//! What a stream wants of one type, and what it must be told: pure, without any waiting.
//!
//! Must never answer with what did not change, nor forget a name that stands for nothing yet: it may come.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use ztunnel::proto::discovery::DeltaDiscoveryRequest;

use crate::model::{Change, Kind, Resource, Set, Snapshot};

/// One type of one stream.
#[derive(Debug)]
pub(super) struct Subscription {
    set: Set,
    /// What the stream has been told of.
    seen: Snapshot,
    /// Names that were asked for, beside `*`.
    names: HashSet<Arc<str>>,
    mode: Mode,
}

#[derive(Debug)]
enum Mode {
    /// Everything. What the peer holds is what `seen` has, so nothing more need be kept.
    Wildcard,
    Demand(Demand),
}

/// What follows from the names, kept so that a change costs what changed.
#[derive(Debug, Default)]
struct Demand {
    /// The peer's own node: its workloads are always wanted.
    node: Arc<str>,
    /// Services that the names stand for: their workloads are wanted.
    services: HashSet<Arc<str>>,
    /// What the peer holds: name → version.
    held: HashMap<Arc<str>, u64>,
}

/// What to send.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub resources: Vec<Arc<Resource>>,
    /// Policies that apply only to who names them from now on: to be told after the records that do, as removals are.
    pub narrowed: Vec<Arc<Resource>>,
    pub removed: Vec<String>,
    /// Whether to tell the further names of resources: only who asks for names has a use for them.
    pub aliases: bool,
}

/// A stream asks for more than is given.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooMuch {
    #[error("more than {MAX_NAMES} names are asked for")]
    Names,
    #[error("a name of {0} bytes is asked for, at most {MAX_NAME} can be one")]
    Name(usize),
}

impl Subscription {
    /// Opens a type with its first request, which is answered always.
    pub fn open(
        set: Set,
        request: DeltaDiscoveryRequest,
        snapshot: &Snapshot,
        node: &str,
    ) -> Result<(Self, Answer), TooMuch> {
        let DeltaDiscoveryRequest { resource_names_subscribe, resource_names_unsubscribe, .. } = request;
        let versions = request.initial_resource_versions;
        let named_all = resource_names_subscribe.iter().any(|n| n == ALL);
        let unnamed_all = resource_names_unsubscribe.iter().any(|n| n == ALL);
        // Without any name: the older way to say `*`.
        let wildcard = !unnamed_all && (named_all || resource_names_subscribe.is_empty());
        let mut this = Self { set, seen: snapshot.clone(), names: HashSet::new(), mode: Mode::Wildcard };
        this.add_names(resource_names_subscribe.iter().chain(versions.keys().filter(|_| !wildcard)))?;
        for name in &resource_names_unsubscribe {
            this.names.remove(name.as_str());
        }
        let versions: HashMap<&str, u64> =
            versions.iter().map(|(name, version)| (name.as_str(), parse_version(version))).collect();
        let answer = if wildcard {
            this.compare_all(|name| versions.get(name).copied(), versions.keys().copied())
        } else {
            this.open_demand(node, &versions)
        };
        Ok((this, answer))
    }

    /// A later request of the same type; `None` if it needs no answer.
    pub fn take(&mut self, request: &DeltaDiscoveryRequest) -> Result<Option<Answer>, TooMuch> {
        let subscribe = &request.resource_names_subscribe;
        let unsubscribe = &request.resource_names_unsubscribe;
        if subscribe.is_empty() && unsubscribe.is_empty() {
            return Ok(None);
        }
        self.add_names(subscribe.iter())?;
        let mut answer = self.answer_names(subscribe);
        if subscribe.iter().any(|n| n == ALL) {
            let all = self.all_wanted();
            answer = Answer { removed: answer.removed, ..all };
        }
        for name in unsubscribe {
            self.names.remove(name.as_str());
        }
        if unsubscribe.iter().any(|n| n == ALL) {
            self.leave_wildcard();
        } else if !unsubscribe.is_empty() {
            self.prune();
        }
        // A request that only lets go needs no answer, and gets none: an empty one could be taken for a deletion.
        Ok((!subscribe.is_empty()).then_some(answer))
    }

    /// What has changed since the stream was told last; `None` if nothing that it wants.
    pub fn push(&mut self, newer: &Snapshot) -> Option<Answer> {
        let older = std::mem::replace(&mut self.seen, newer.clone());
        let changes = newer.changes_since(&older, self.set);
        let answer = match &mut self.mode {
            Mode::Wildcard => {
                let mut answer = Answer::default();
                for change in changes {
                    let is_narrowing = change.is_narrowing();
                    match change {
                        Change::Put { new, .. } if is_narrowing => answer.narrowed.push(new.clone()),
                        Change::Put { new, .. } => answer.resources.push(new.clone()),
                        Change::Gone(old) => answer.removed.push(old.name.to_string()),
                    }
                }
                answer
            }
            Mode::Demand(demand) => demand.follow(self.set, &self.names, newer, changes),
        };
        let is_empty = answer.resources.is_empty() && answer.narrowed.is_empty() && answer.removed.is_empty();
        (!is_empty).then_some(answer)
    }

    fn add_names<'a>(&mut self, names: impl Iterator<Item = &'a String>) -> Result<(), TooMuch> {
        for name in names.filter(|n| *n != ALL) {
            if name.len() > MAX_NAME {
                return Err(TooMuch::Name(name.len()));
            }
            if self.names.len() >= MAX_NAMES {
                return Err(TooMuch::Names);
            }
            self.names.insert(name.as_str().into());
        }
        Ok(())
    }

    /// Everything that the peer has not, and what it has and is no more.
    fn compare_all<'a>(&self, has: impl Fn(&str) -> Option<u64>, names: impl Iterator<Item = &'a str>) -> Answer {
        let fresh = self.seen.all(self.set).filter(|r| has(&r.name) != Some(r.version));
        let gone = names.filter(|name| self.seen.get(self.set, name).is_none());
        let removed = gone.map(str::to_owned).collect();
        Answer { resources: fresh.cloned().collect(), removed, ..Answer::default() }
    }

    fn open_demand(&mut self, node: &str, versions: &HashMap<&str, u64>) -> Answer {
        let mut demand = Demand { node: node.into(), ..Demand::default() };
        let mut wanted = BTreeMap::new();
        let mut removed = Vec::new();
        for name in &self.names {
            let resolved = self.seen.resolve(self.set, name);
            if !resolved.is_exact {
                // Also where a range is told: then who asks knows that nobody has the address itself.
                removed.push(name.to_string());
            }
            for resource in resolved.resources {
                // Asked for by another name and never told: the answer is awaited, though the content may be there.
                let awaited = *name != resource.name && versions.get(&**name) == Some(&0);
                let entry = wanted.entry(resource.name.clone()).or_insert((resource, false));
                entry.1 |= awaited;
            }
            demand.services.extend(resolved.services);
        }
        // Only who asks for addresses has a use for those of its node.
        let (behind, own) = match self.set {
            Set::Addresses | Set::Workloads => (&demand.services, Some(node)),
            Set::Authorizations => (&HashSet::new(), None),
        };
        let behind = behind.iter().flat_map(|service| self.seen.endpoints(service));
        for resource in behind.chain(own.into_iter().flat_map(|node| self.seen.on_node(node))) {
            wanted.entry(resource.name.clone()).or_insert((resource.clone(), false));
        }
        let mut resources = Vec::new();
        for (name, (resource, awaited)) in wanted {
            let has = versions.get(&*name) == Some(&resource.version);
            demand.held.insert(name, resource.version);
            if awaited || !has {
                resources.push(resource);
            }
        }
        self.mode = Mode::Demand(demand);
        Answer { resources, removed, aliases: true, ..Answer::default() }
    }

    /// Answers names that were just asked for, known or not, told before or not.
    fn answer_names(&mut self, asked: &[String]) -> Answer {
        let mut told = BTreeMap::new();
        let mut removed = Vec::new();
        for name in asked.iter().filter(|n| *n != ALL) {
            let resolved = self.seen.resolve(self.set, name);
            if !resolved.is_exact {
                removed.push(name.clone());
            }
            for resource in resolved.resources {
                told.insert(resource.name.clone(), resource);
            }
            let Mode::Demand(demand) = &mut self.mode else { continue };
            for service in resolved.services {
                for endpoint in self.seen.endpoints(&service) {
                    if demand.held.get(&endpoint.name) != Some(&endpoint.version) {
                        told.insert(endpoint.name.clone(), endpoint.clone());
                    }
                }
                demand.services.insert(service);
            }
        }
        let resources: Vec<_> = told.into_values().collect();
        if let Mode::Demand(demand) = &mut self.mode {
            demand.held.extend(resources.iter().map(|r| (r.name.clone(), r.version)));
        }
        Answer { resources, removed, aliases: true, ..Answer::default() }
    }

    /// `*` in the midst of a stream: all that the peer has not yet, or all again.
    fn all_wanted(&mut self) -> Answer {
        let before = std::mem::replace(&mut self.mode, Mode::Wildcard);
        match before {
            Mode::Wildcard => self.compare_all(|_| None, std::iter::empty()),
            Mode::Demand(demand) => self.compare_all(|name| demand.held.get(name).copied(), std::iter::empty()),
        }
    }

    /// `*` is no longer wanted; what was asked for by name is.
    fn leave_wildcard(&mut self) {
        if matches!(self.mode, Mode::Wildcard) {
            self.mode = Mode::Demand(Demand::default());
            if let Mode::Demand(demand) = &mut self.mode {
                demand.held = self.seen.all(self.set).map(|r| (r.name.clone(), r.version)).collect();
            }
        }
        self.prune();
    }

    /// After names have gone: forgets what follows from none that is left.
    fn prune(&mut self) {
        let Mode::Demand(demand) = &mut self.mode else { return };
        demand.services = self.names.iter().flat_map(|name| self.seen.resolve(self.set, name).services).collect();
        let (services, node) = (std::mem::take(&mut demand.services), demand.node.clone());
        let mut held = std::mem::take(&mut demand.held);
        held.retain(|name, _| {
            let resource = self.seen.get(self.set, name);
            resource.is_some_and(|r| is_wanted(r, &self.names, &services, &node))
        });
        (demand.services, demand.held) = (services, held);
    }
}

impl Demand {
    fn follow<'a>(
        &mut self,
        set: Set,
        names: &HashSet<Arc<str>>,
        newer: &'a Snapshot,
        changes: impl Iterator<Item = Change<'a>>,
    ) -> Answer {
        let mut told: BTreeMap<Arc<str>, Arc<Resource>> = BTreeMap::new();
        let mut removed = Vec::new();
        // Names of resources that changed or went: perhaps they stand for nothing now.
        let mut doubtful: HashSet<Arc<str>> = HashSet::new();
        let mut narrowed: HashSet<Arc<str>> = HashSet::new();
        for change in changes {
            let is_narrowing = change.is_narrowing();
            match change {
                Change::Put { old, new } => {
                    if let Some(old) = old {
                        doubtful.extend(asked_for(old, names));
                    }
                    let wanted = is_wanted(new, names, &self.services, &self.node);
                    if !wanted && !self.held.contains_key(&new.name) {
                        continue;
                    }
                    told.insert(new.name.clone(), new.clone());
                    if is_narrowing {
                        narrowed.insert(new.name.clone());
                    }
                    if wanted {
                        self.want_endpoints(new, newer, &mut told);
                    }
                }
                Change::Gone(old) => {
                    doubtful.extend(asked_for(old, names));
                    self.services.remove(&old.name);
                    if self.held.remove(&old.name).is_some() {
                        removed.push(old.name.to_string());
                    }
                }
            }
        }
        for name in doubtful {
            let resolved = newer.resolve(set, &name);
            if !resolved.is_exact {
                removed.push(name.to_string());
            }
            for resource in resolved.resources {
                if self.held.contains_key(&resource.name) {
                    continue;
                }
                self.want_endpoints(&resource, newer, &mut told);
                told.insert(resource.name.clone(), resource);
            }
        }
        self.held.extend(told.values().map(|r| (r.name.clone(), r.version)));
        let (narrowed, resources) = told.into_values().partition(|r| narrowed.contains(&r.name));
        Answer { resources, narrowed, removed, aliases: true }
    }
}

impl Demand {
    /// A service that is wanted from now on brings its workloads.
    fn want_endpoints(&mut self, resource: &Resource, newer: &Snapshot, told: &mut BTreeMap<Arc<str>, Arc<Resource>>) {
        if resource.kind == Kind::Service && self.services.insert(resource.name.clone()) {
            let fresh = newer.endpoints(&resource.name).filter(|e| self.held.get(&e.name) != Some(&e.version));
            told.extend(fresh.map(|e| (e.name.clone(), e.clone())));
        }
    }
}

/// The names asked for by which a resource is found, beside its own.
fn asked_for<'a>(resource: &'a Resource, names: &'a HashSet<Arc<str>>) -> impl Iterator<Item = Arc<str>> + 'a {
    let exact = resource.aliases.iter().filter(|alias| names.contains(*alias));
    // There are few services with ranges, and they rarely change.
    let ranged = (!resource.ranges.is_empty()).then_some(names);
    exact.chain(ranged.into_iter().flatten().filter(|name| resource.has_in_range(name))).cloned()
}

fn is_wanted(resource: &Resource, names: &HashSet<Arc<str>>, services: &HashSet<Arc<str>>, node: &Arc<str>) -> bool {
    names.contains(&resource.name)
        || asked_for(resource, names).next().is_some()
        || resource.services.iter().any(|service| services.contains(service))
        || (!node.is_empty() && resource.node.as_ref() == Some(node))
}

/// 0, which no resource has, for what is not one of our versions.
fn parse_version(text: &str) -> u64 {
    u64::from_str_radix(text, 16).unwrap_or(0)
}

const ALL: &str = "*";
/// Names that a stream may ask for by type.
const MAX_NAMES: usize = 200_000;
/// Bytes of one: a namespace, a host name and room to spare.
const MAX_NAME: usize = 1024;

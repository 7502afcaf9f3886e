//! Tells what becomes of policies: a log line for each change, a file for each policy where a folder is named, and the
//! policy's own status where there is an API server.
//!
//! Must never hold up the model, nor let a reader see half a file.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use imbl::OrdMap;
use imbl::ordmap::DiffItem;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use ztunnel::identity::rfc3339;
use ztunnel::manifests::{ObjectKey, ObjectName, SecurityKind};

use crate::ca::{beside, sweep_unfinished};
use crate::metrics::Metrics;
use crate::model::{PolicyStatus, Snapshot};
use crate::policy::{Condition, State};

mod conditions;

pub use conditions::PolicyConditions;

type Statuses = OrdMap<ObjectKey, Arc<PolicyStatus>>;

/// The folder of status files.
#[derive(Debug, Clone)]
pub struct PolicyStatusFolder {
    dir: PathBuf,
}

impl PolicyStatusFolder {
    /// Makes the folder if it is not there.
    pub fn open(dir: PathBuf) -> io::Result<Self> {
        fs::create_dir_all(&dir)?;
        Ok(Self { dir })
    }
}

/// Follows the snapshots until there are no more.
pub async fn tell(mut snapshots: watch::Receiver<Snapshot>, folder: Option<PolicyStatusFolder>, metrics: Arc<Metrics>) {
    let mut told = Statuses::new();
    let mut pending = BTreeSet::new();
    // What is left from before, of policies that went while nobody looked.
    let mut sweep = true;
    loop {
        let now = snapshots.borrow_and_update().policies.clone();
        let changed = differences(&told, &now);
        log(&told, &now, &changed);
        told = now.clone();
        if let Some(folder) = &folder {
            pending.extend(changed);
            let (folder, keys, sweep_now) = (folder.clone(), pending.clone(), sweep);
            let written = tokio::task::spawn_blocking(move || folder.bring_up_to_date(&now, keys, sweep_now)).await;
            match written {
                Ok(left) => (pending, sweep) = (left, false),
                Err(e) => tracing::error!(error = %e, "writing the status of policies failed"),
            }
            metrics.policy_statuses_unwritten(pending.len());
        }
        let retry = async {
            match pending.is_empty() {
                true => std::future::pending().await,
                false => tokio::time::sleep(RETRY).await,
            }
        };
        tokio::select! {
            changed = snapshots.changed() => if changed.is_err() { return },
            () = retry => {}
        }
    }
}

fn differences(older: &Statuses, newer: &Statuses) -> Vec<ObjectKey> {
    let key = |item| match item {
        DiffItem::Add(key, _) | DiffItem::Remove(key, _) => ObjectKey::clone(key),
        DiffItem::Update { new: (key, _), .. } => ObjectKey::clone(key),
    };
    older.diff(newer).map(key).collect()
}

/// One line for each policy of which something else is to be said, but no flood.
fn log(older: &Statuses, newer: &Statuses, changed: &[ObjectKey]) {
    let says = |statuses: &Statuses, key: &ObjectKey| {
        statuses.get(key).map(|s| (s.state, s.conditions.first().map(|c| c.message.clone()).unwrap_or_default()))
    };
    let mut lines = 0;
    for key in changed {
        let (before, now) = (says(older, key), says(newer, key));
        if before == now {
            continue;
        }
        lines += 1;
        if lines > LINES {
            continue;
        }
        let Some((state, message)) = now else {
            tracing::info!(policy = %key, "a policy is gone");
            continue;
        };
        let before = before.map(|(state, _)| state.label());
        if state.is_error() || state.is_warning() {
            tracing::warn!(policy = %key, state = state.label(), before, meaning = message, "a policy is not enforced as written");
        } else {
            tracing::info!(policy = %key, state = state.label(), before, meaning = message, "a policy is accepted");
        }
    }
    if lines > LINES {
        let by_state: Vec<_> = counts(newer).into_iter().map(|(state, n)| format!("{} {n}", state.label())).collect();
        tracing::info!(
            more = lines - LINES,
            now = by_state.join(", "),
            "more policies changed than are told one by one"
        );
    }
}

fn counts(statuses: &Statuses) -> BTreeMap<State, usize> {
    let mut counts = BTreeMap::new();
    for status in statuses.values() {
        *counts.entry(status.state).or_default() += 1;
    }
    counts
}

/// A status file.
#[derive(Serialize, Deserialize)]
struct File<S> {
    policy: Reference,
    status: S,
}

#[derive(Serialize, Deserialize)]
struct Reference {
    kind: String,
    namespace: String,
    name: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Written<'a> {
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    observed_generation: Option<i64>,
    applies_to: &'a str,
    meaning: &'a [String],
    conditions: Vec<Timed<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Timed<'a> {
    #[serde(flatten)]
    condition: &'a Condition,
    last_transition_time: String,
}

#[derive(Deserialize)]
struct Earlier {
    conditions: Vec<EarlierCondition>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct EarlierCondition {
    #[serde(rename = "type")]
    kind: String,
    status: String,
    last_transition_time: String,
}

impl PolicyStatusFolder {
    /// Writes or removes the files of some policies; those that could not be. Blocks on the file system.
    fn bring_up_to_date(&self, now: &Statuses, keys: BTreeSet<ObjectKey>, sweep: bool) -> BTreeSet<ObjectKey> {
        if sweep {
            self.sweep(now);
        }
        let mut first = None;
        let mut left = BTreeSet::new();
        for key in keys {
            let Some((kind, name)) = SecurityKind::of(&key) else { continue };
            let path = self.dir.join(file_name(kind, name));
            let done = match now.get(&key) {
                Some(status) => write(&path, kind, name, status),
                None => match fs::remove_file(&path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
                    _ => Ok(()),
                },
            };
            if let Err(error) = done {
                first.get_or_insert((path, error));
                left.insert(key);
            }
        }
        if let Some((path, error)) = first {
            tracing::warn!(
                file = %path.display(),
                %error,
                files = left.len(),
                "the status of policies cannot be written, it is tried again"
            );
        }
        left
    }

    fn sweep(&self, now: &Statuses) {
        sweep_unfinished(&self.dir);
        let known = now.keys().filter_map(SecurityKind::of).map(|(kind, name)| file_name(kind, name));
        let known: BTreeSet<String> = known.collect();
        let ours = |name: &str| {
            name.ends_with(".yaml")
                && SecurityKind::ALL.iter().any(|kind| name.starts_with(&format!("{}_", kind.name())))
        };
        for entry in fs::read_dir(&self.dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| ours(name) && !known.contains(name)) {
                // What stays behind is old, and the next start tries again.
                let _ = fs::remove_file(entry.path());
            }
        }
    }
}

fn write(path: &Path, kind: SecurityKind, name: &ObjectName, status: &PolicyStatus) -> io::Result<()> {
    let held = fs::read_to_string(path).ok();
    let earlier = held.as_deref().and_then(|text| serde_yaml_ng::from_str::<File<Earlier>>(text).ok());
    let earlier = earlier.map(|file| file.status.conditions).unwrap_or_default();
    let now = rfc3339(SystemTime::now());
    let timed = status.conditions.iter().map(|condition| {
        let same = earlier.iter().find(|e| e.kind == condition.kind && e.status == condition.status);
        let last_transition_time = same.map_or_else(|| now.clone(), |e| e.last_transition_time.clone());
        Timed { condition, last_transition_time }
    });
    let file = File {
        policy: Reference {
            kind: kind.name().into(),
            namespace: name.namespace.to_string(),
            name: name.name.to_string(),
        },
        status: Written {
            state: status.state.label(),
            observed_generation: status.observed_generation,
            applies_to: &status.applies_to,
            meaning: &status.meaning,
            conditions: timed.collect(),
        },
    };
    let text = serde_yaml_ng::to_string(&file).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))?;
    // Another replica may have written the same.
    if held.as_deref() == Some(text.as_str()) {
        return Ok(());
    }
    // Not synced: after a crash of the machine it is written again.
    let fresh = beside(path)?;
    let renamed = fs::write(&fresh, text).and_then(|()| fs::rename(&fresh, path));
    if renamed.is_err() {
        let _ = fs::remove_file(&fresh);
    }
    renamed
}

/// `<kind>_<namespace>_<name>.yaml`; names have no underscore. One that is too long for a file ends in its hash.
fn file_name(kind: SecurityKind, name: &ObjectName) -> String {
    let whole = format!("{}_{}_{}", kind.name(), name.namespace, name.name);
    if whole.len() <= LONGEST {
        return format!("{whole}.yaml");
    }
    let mut hash = DefaultHasher::new();
    whole.hash(&mut hash);
    format!("{}_{:016x}.yaml", &whole[..LONGEST], hash.finish())
}

/// Lines for policies in one change of the model.
const LINES: usize = 50;
/// After a file could not be written.
const RETRY: Duration = Duration::from_secs(10);
/// Bytes of a file's name before its hash. What names are made of is ASCII.
const LONGEST: usize = 200;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{Cluster, policy};
    use serde_json::{Value, json};

    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("understory-policy-status-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&dir);
            Self(dir)
        }

        fn names(&self) -> Vec<String> {
            let mut names: Vec<String> =
                fs::read_dir(&self.0).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        fn read(&self, name: &str) -> Value {
            serde_yaml_ng::from_str(&fs::read_to_string(self.0.join(name)).unwrap()).unwrap()
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn each_policy_has_a_file_that_follows_it() {
        let dir = Dir::new("files");
        let folder = PolicyStatusFolder::open(dir.0.clone()).unwrap();
        fs::write(dir.0.join("AuthorizationPolicy_shop_old.yaml"), "left behind").unwrap();
        fs::write(dir.0.join("somebody's.yaml"), "else").unwrap();
        let mut cluster = Cluster::new();
        cluster.put(policy("AuthorizationPolicy", "shop/p", json!({"rules": [{}]})));
        cluster.put(policy("PeerAuthentication", "shop/p", json!({"mtls": {"mode": "STRICT"}})));
        let long = "x".repeat(250);
        cluster.put(policy("AuthorizationPolicy", &format!("shop/{long}"), json!({})));
        let mut told = Statuses::new();
        let mut step = |cluster: &mut Cluster, sweep: bool| {
            let now = cluster.snapshot().policies;
            let left = folder.bring_up_to_date(&now, differences(&told, &now).into_iter().collect(), sweep);
            told = now;
            assert!(left.is_empty());
        };
        step(&mut cluster, true);
        let names = dir.names();
        assert_eq!(names.len(), 4, "{names:?}");
        assert_eq!(names[0], "AuthorizationPolicy_shop_p.yaml");
        assert!(names.contains(&"somebody's.yaml".to_owned()));
        let file = dir.read("AuthorizationPolicy_shop_p.yaml");
        assert_eq!(file["policy"], json!({"kind": "AuthorizationPolicy", "namespace": "shop", "name": "p"}));
        let status = &file["status"];
        assert_eq!(
            (&status["state"], &status["appliesTo"]),
            (&json!("enforced"), &json!("all pods in namespace shop"))
        );
        assert_eq!(status["meaning"], json!(["rule 0 allows every connection"]));
        assert_eq!(status["conditions"][0]["type"], "ZtunnelAccepted");
        assert_eq!(status["conditions"][0]["status"], "True");

        // Of what did not change the time stays, of what did it is another.
        let path = dir.0.join("AuthorizationPolicy_shop_p.yaml");
        let old = fs::read_to_string(&path).unwrap();
        let time = status["conditions"][0]["lastTransitionTime"].as_str().unwrap();
        fs::write(&path, old.replace(time, "2001-01-01T00:00:00Z")).unwrap();
        let http = json!({"rules": [{"to": [{"operation": {"paths": ["/x"]}}]}]});
        cluster.put(policy("AuthorizationPolicy", "shop/p", http));
        step(&mut cluster, false);
        let status = dir.read("AuthorizationPolicy_shop_p.yaml")["status"].clone();
        assert_eq!(status["state"], "stricter");
        let [accepted, fully] = [0, 1].map(|i| status["conditions"][i].clone());
        assert_eq!(
            (&accepted["status"], &accepted["lastTransitionTime"]),
            (&json!("True"), &json!("2001-01-01T00:00:00Z"))
        );
        assert_eq!(fully["status"], "False");
        assert_ne!(fully["lastTransitionTime"], "2001-01-01T00:00:00Z");

        cluster.objects.authorization_policies.clear();
        step(&mut cluster, false);
        assert_eq!(dir.names(), ["PeerAuthentication_shop_p.yaml", "somebody's.yaml"]);
    }

    #[test]
    fn what_cannot_be_written_is_left_for_the_next_try() {
        let dir = Dir::new("left");
        let folder = PolicyStatusFolder::open(dir.0.clone()).unwrap();
        let mut cluster = Cluster::new();
        cluster.put(policy("AuthorizationPolicy", "shop/p", json!({})));
        let now = cluster.snapshot().policies;
        fs::remove_dir_all(&dir.0).unwrap();
        let left = folder.bring_up_to_date(&now, now.keys().cloned().collect(), true);
        assert_eq!(left.len(), 1);
        PolicyStatusFolder::open(dir.0.clone()).unwrap();
        assert!(folder.bring_up_to_date(&now, left, false).is_empty());
        assert_eq!(dir.names(), ["AuthorizationPolicy_shop_p.yaml"]);
    }
}

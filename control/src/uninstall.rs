//! `control uninstall`: takes all nodes out of the mesh, before the chart's objects are removed. The agents' DaemonSet is
//! changed twice: to agents that let go of all pods, which peers learn before capture ends; then to one that cleans its
//! node and stays, so that readiness says how many nodes are clean.
//!
//! Must never end well before every node is clean, nor take down agents whose pods are still in the mesh.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};

use crate::settings::{any_time, hostname};
use ztunnel::kubernetes::{Api, ApiError, ConnectError};

/// Flags of `control uninstall`.
#[derive(Debug, Clone, Args)]
pub struct UninstallArgs {
    /// Namespace of the agents.
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_name = "POD_NAMESPACE",
        default_value = "understory-system",
        value_parser = hostname
    )]
    pub namespace: String,
    /// Their DaemonSet.
    #[arg(long, value_name = "DAEMON_SET", default_value = "understory-agent", value_parser = hostname)]
    pub daemon_set: String,
    /// File that tells where the API server is and who we are. Default: what the pod that this runs in is given.
    #[arg(long, env = "KUBECONFIG", value_name = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Longest wait for all nodes, in each of the steps.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = any_time)]
    pub timeout: Duration,
    /// What an agent's pod does when its node is clean: nothing, until it is told to end.
    #[arg(long, hide = true)]
    pub stay: bool,
}

/// Why the nodes may not be clean.
#[derive(Debug, thiserror::Error)]
pub enum UninstallError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("cannot {step}: {source}")]
    Api { step: &'static str, source: ApiError },
    #[error("the DaemonSet {0} has no container \"agent\": it is not the chart's")]
    NotOurs(String),
    #[error(
        "{step}: not done within {timeout:?}; {left}. Try again, or uninstall without hooks and clean them by hand"
    )]
    Timeout { step: &'static str, timeout: Duration, left: String },
    #[error("cannot listen for signals: {0}")]
    Signals(std::io::Error),
}

/// Takes all nodes out of the mesh, and says so on the standard output.
pub async fn run(args: &UninstallArgs) -> Result<(), UninstallError> {
    if args.stay {
        return stay().await;
    }
    let api = Api::connect(args.kubeconfig.as_deref()).await?;
    let agents = Agents { api, args };
    if !agents.change("let the agents leave", let_go).await? {
        println!("there is no DaemonSet {}/{}: nothing to do", args.namespace, args.daemon_set);
        return Ok(());
    }
    println!("the agents let go of all pods");
    agents.wait("wait for the agents that let go of all pods", Agents::not_ready).await?;
    agents.wait("wait for all pods to leave the mesh", Agents::captured).await?;
    println!("no pod is in the mesh; the nodes are cleaned");
    agents.change("let the nodes be cleaned", clean).await?;
    agents.wait("wait for all nodes to be clean", Agents::not_ready).await?;
    println!("all nodes are clean");
    Ok(())
}

async fn stay() -> Result<(), UninstallError> {
    use tokio::signal::unix::{SignalKind, signal};
    let mut terminate = signal(SignalKind::terminate()).map_err(UninstallError::Signals)?;
    println!("this node is clean");
    terminate.recv().await;
    Ok(())
}

struct Agents<'a> {
    api: Api,
    args: &'a UninstallArgs,
}

impl Agents<'_> {
    fn path(&self) -> String {
        format!("/apis/apps/v1/namespaces/{}/daemonsets/{}", self.args.namespace, self.args.daemon_set)
    }

    /// Changes the DaemonSet; whether there is one.
    async fn change(&self, step: &'static str, edit: fn(&mut Value) -> Option<()>) -> Result<bool, UninstallError> {
        let failed = |source| UninstallError::Api { step, source };
        loop {
            let Some(mut found) = self.api.find(&self.path()).await.map_err(failed)? else { return Ok(false) };
            edit(&mut found).ok_or_else(|| UninstallError::NotOurs(self.args.daemon_set.clone()))?;
            match self.api.replace(&self.path(), &found).await {
                Ok(_) => return Ok(true),
                // Its controller writes to it as well.
                Err(ApiError::Refused { code: 409, .. }) => {}
                Err(source) => return Err(failed(source)),
            }
        }
    }

    /// Waits until a question about what is left has the answer nothing. A server that is away meanwhile is asked again.
    async fn wait<'a, F>(&'a self, step: &'static str, left: impl Fn(&'a Self) -> F) -> Result<(), UninstallError>
    where
        F: Future<Output = Result<Option<String>, ApiError>>,
    {
        let begun = Instant::now();
        let mut told = String::new();
        loop {
            let left = match left(self).await {
                Ok(None) => return Ok(()),
                Ok(Some(left)) => left,
                Err(ApiError::Refused { code: code @ (401 | 403), message }) => {
                    return Err(UninstallError::Api { step, source: ApiError::Refused { code, message } });
                }
                Err(error) => error.to_string(),
            };
            if begun.elapsed() > self.args.timeout {
                return Err(UninstallError::Timeout { step, timeout: self.args.timeout, left });
            }
            if told != left {
                println!("{left}");
                told = left;
            }
            tokio::time::sleep(PERIOD).await;
        }
    }

    /// On which nodes the DaemonSet's last change has not come into force yet.
    async fn not_ready(&self) -> Result<Option<String>, ApiError> {
        let Some(set) = self.api.find(&self.path()).await? else { return Ok(None) };
        let Some((done, nodes)) = progress(&set) else { return Ok(None) };
        let selector = set["spec"]["selector"]["matchLabels"].as_object().into_iter().flatten();
        let selector: Vec<String> =
            selector.map(|(key, value)| format!("{key}%3D{}", value.as_str().unwrap_or_default())).collect();
        let path = format!("/api/v1/namespaces/{}/pods", self.args.namespace);
        let pods = self.api.list(&path, &format!("&labelSelector={}", selector.join("%2C"))).await?;
        let mut names: Vec<&str> =
            pods.iter().filter(|pod| !is_ready(pod)).filter_map(|pod| pod["spec"]["nodeName"].as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Ok(Some(format!("{done} of {nodes} nodes are done; not yet: {}", some_of(&names))))
    }

    /// Which pods say that they are captured.
    async fn captured(&self) -> Result<Option<String>, ApiError> {
        let pods = self.api.list("/api/v1/pods", RUNNING).await?;
        let names: Vec<String> = pods.iter().filter(|pod| is_captured(pod)).map(name_of).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Ok((!names.is_empty()).then(|| format!("{} pods are in the mesh still: {}", names.len(), some_of(&names))))
    }
}

/// Makes of the agents such as let go of every pod, all at once.
fn let_go(set: &mut Value) -> Option<()> {
    if is_cleaning(set) {
        return Some(());
    }
    set["spec"]["updateStrategy"] =
        json!({ "type": "RollingUpdate", "rollingUpdate": { "maxUnavailable": "100%", "maxSurge": 0 } });
    let agent = agent(set)?;
    let env = agent.as_object_mut()?.entry("env").or_insert_with(|| json!([])).as_array_mut()?;
    env.retain(|variable| variable["name"] != SELECTORS);
    env.push(json!({ "name": SELECTORS, "value": "[]" }));
    Some(())
}

/// Makes of each agent a clean-up of its node, after which its pod stays and is ready.
fn clean(set: &mut Value) -> Option<()> {
    if is_cleaning(set) {
        return Some(());
    }
    let agent = agent(set)?;
    for field in ["ports", "startupProbe", "readinessProbe", "livenessProbe"] {
        agent.as_object_mut()?.remove(field);
    }
    let mut cleanup = agent.clone();
    cleanup["name"] = json!(CLEANUP);
    cleanup["args"] = json!(["agent", "cleanup"]);
    agent["command"] = json!(["/usr/local/bin/control"]);
    agent["args"] = json!(["uninstall", "--stay"]);
    set["spec"]["template"]["spec"]["initContainers"] = json!([cleanup]);
    Some(())
}

/// Has an earlier call come so far?
fn is_cleaning(set: &Value) -> bool {
    let containers = set["spec"]["template"]["spec"]["initContainers"].as_array().into_iter().flatten();
    containers.into_iter().any(|container| container["name"] == CLEANUP)
}

fn agent(set: &mut Value) -> Option<&mut Value> {
    let containers = set["spec"]["template"]["spec"]["containers"].as_array_mut()?;
    containers.iter_mut().find(|container| container["name"] == "agent")
}

/// How many of how many nodes have a ready pod of the newest kind; nothing once they all have.
fn progress(set: &Value) -> Option<(u64, u64)> {
    let count = |field: &str| set["status"][field].as_u64().unwrap_or(0);
    let seen = count("observedGeneration") >= set["metadata"]["generation"].as_u64().unwrap_or(0);
    let nodes = count("desiredNumberScheduled");
    let done = if seen { count("updatedNumberScheduled").min(count("numberReady")) } else { 0 };
    (!seen || done < nodes).then_some((done, nodes))
}

fn is_ready(pod: &Value) -> bool {
    let mut conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Says a pod that still runs that it is captured?
fn is_captured(pod: &Value) -> bool {
    let has_ended = ["Succeeded", "Failed"].iter().any(|&phase| pod["status"]["phase"] == phase);
    !has_ended && pod["metadata"]["annotations"][REDIRECTION] == "enabled"
}

fn name_of(pod: &Value) -> String {
    let text = |field: &str| pod["metadata"][field].as_str().unwrap_or_default();
    format!("{}/{}", text("namespace"), text("name"))
}

fn some_of(names: &[&str]) -> String {
    match names.len().checked_sub(NAMED) {
        None | Some(0) if names.is_empty() => "their pods are not there".to_owned(),
        None | Some(0) => names.join(", "),
        Some(more) => format!("{} and {more} more", names[..NAMED].join(", ")),
    }
}

const CLEANUP: &str = "cleanup";
const REDIRECTION: &str = "ambient.istio.io/redirection";
const SELECTORS: &str = "ENABLEMENT_SELECTORS";
/// The pods of a large cluster are many to list.
const PERIOD: Duration = Duration::from_secs(3);
const RUNNING: &str = "&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed";
/// Names in a message.
const NAMED: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    fn set() -> Value {
        json!({
            "metadata": { "generation": 3 },
            "spec": {
                "updateStrategy": { "type": "OnDelete" },
                "template": { "spec": { "containers": [
                    { "name": "other" },
                    {
                        "name": "agent",
                        "command": ["/usr/local/bin/ztunnel"],
                        "args": ["agent"],
                        "env": [{ "name": SELECTORS, "value": "[{}]" }, { "name": "NODE_NAME" }],
                        "livenessProbe": {},
                        "volumeMounts": [{ "name": "run" }],
                    },
                ] } },
            },
        })
    }

    #[test]
    fn agents_that_let_go_select_no_pod() {
        let mut set = set();
        let_go(&mut set).expect("it is ours");
        let agent = agent(&mut set).expect("there").clone();
        assert_eq!(agent["env"], json!([{ "name": "NODE_NAME" }, { "name": SELECTORS, "value": "[]" }]));
        assert_eq!(agent["args"], json!(["agent"]));
        assert_eq!(set["spec"]["updateStrategy"]["rollingUpdate"]["maxUnavailable"], "100%");
    }

    #[test]
    fn the_clean_up_sees_what_the_agent_saw_and_the_pod_stays() {
        let mut set = set();
        clean(&mut set).expect("it is ours");
        let cleanup = set["spec"]["template"]["spec"]["initContainers"][0].clone();
        let agent = agent(&mut set).expect("there").clone();
        assert_eq!(cleanup["args"], json!(["agent", "cleanup"]));
        assert_eq!((&cleanup["env"], &cleanup["volumeMounts"]), (&agent["env"], &agent["volumeMounts"]));
        assert!(agent["livenessProbe"].is_null() && cleanup["livenessProbe"].is_null());
        assert_eq!(agent["args"], json!(["uninstall", "--stay"]));
        // Called again after it was interrupted, it changes nothing.
        let before = set.clone();
        let_go(&mut set).and_then(|()| clean(&mut set)).expect("it is ours");
        assert_eq!(set, before);
    }

    #[test]
    fn a_strangers_daemon_set_is_left_alone() {
        let mut strange = json!({ "spec": { "template": { "spec": { "containers": [{ "name": "app" }] } } } });
        assert!(let_go(&mut strange).is_none() && clean(&mut strange).is_none());
    }

    #[test]
    fn a_change_is_in_force_when_every_node_has_a_ready_pod_of_it() {
        let with = |observed: u64, desired: u64, updated: u64, ready: u64| {
            let mut set = set();
            set["status"] = json!({
                "observedGeneration": observed,
                "desiredNumberScheduled": desired,
                "updatedNumberScheduled": updated,
                "numberReady": ready,
            });
            progress(&set)
        };
        assert_eq!(with(2, 5, 5, 5), Some((0, 5)), "not looked at yet");
        assert_eq!(with(3, 5, 5, 4), Some((4, 5)));
        assert_eq!(with(3, 5, 2, 5), Some((2, 5)), "the others are of before");
        assert_eq!(with(3, 5, 5, 5), None);
        assert_eq!(with(3, 0, 0, 0), None, "no nodes");
        assert_eq!(progress(&set()), Some((0, 0)), "no status yet");
    }

    #[test]
    fn pods_that_have_ended_are_not_waited_for() {
        let pod = |phase: &str, mark: &str| {
            is_captured(&json!({ "metadata": { "annotations": { REDIRECTION: mark } }, "status": { "phase": phase } }))
        };
        assert!(pod("Running", "enabled") && pod("Pending", "enabled"));
        assert!(!pod("Succeeded", "enabled") && !pod("Running", "pending"));
    }

    #[test]
    fn messages_stay_short() {
        let many: Vec<String> = (0..12).map(|n| format!("node-{n}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(some_of(&many).ends_with("node-9 and 2 more"), "{}", some_of(&many));
        assert_eq!(some_of(&many[..2]), "node-0, node-1");
        assert!(!some_of(&many[..10]).contains("more"));
    }
}

//! The settings of `ztunnel agent`: read once from flags and environment, checked, then never changed.
//!
//! Must never let a wrong value through with a silent default.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::cni;
use super::decision::{Enablement, Rules};
use super::enrolment::Timings;
use super::probe::ProbeArgs;
use super::selector;
use crate::cni::install::{CniDirs, Entry, Install};
use crate::kubernetes::SourceKind;
use crate::telemetry::log::{Format, Levels};

/// `ztunnel agent`: without a subcommand it runs the agent.
#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct AgentArgs {
    #[command(subcommand)]
    pub command: Option<AgentCommand>,
    #[command(flatten)]
    pub run: RunArgs,
}

#[derive(Clone, Debug, Subcommand)]
pub enum AgentCommand {
    /// Take everything away that the agent has set up on the node, for uninstalling. The agent must not run.
    Cleanup(CleanupArgs),
    /// Started by the agent itself inside a pod.
    #[command(hide = true)]
    Probe(ProbeArgs),
}

/// Flags and environment of the agent. Turn them into an [`AgentConfig`] with [`RunArgs::check`].
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// The Kubernetes node. Required.
    #[arg(long, env = "NODE_NAME", value_name = "NODE_NAME", required = true)]
    pub node_name: Option<String>,
    /// Where the cluster's objects come from. With kubernetes, this pod's service account is used, or --kubeconfig.
    #[arg(long, env = "SOURCE", value_name = "SOURCE", value_enum, default_value = "manifests")]
    pub source: SourceKind,
    /// Folder with the cluster's objects. Required with the source manifests.
    #[arg(
        long,
        env = "MANIFESTS",
        value_name = "MANIFESTS",
        required_unless_present = "source",
        required_if_eq("source", "manifests")
    )]
    pub manifests: Option<PathBuf>,
    /// File that tells where the API server is and who we are, with the source kubernetes; its current context counts.
    /// Default: what the pod that this runs in is given.
    #[arg(long, env = "KUBECONFIG", value_name = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Folder for the pods' status files, with the source manifests. Default: none are written.
    #[arg(long, env = "STATUS_DIR", value_name = "STATUS_DIR")]
    pub status_dir: Option<PathBuf>,
    #[command(flatten)]
    pub place: PlaceArgs,
    /// Sockets for proxies. Default: zds.sock in the run folder, and /var/run/ztunnel/ztunnel.sock.
    #[arg(long, env = "ZDS_SOCKET", value_name = "ZDS_SOCKET", value_delimiter = ',')]
    pub zds_socket: Vec<PathBuf>,
    /// Root of the node's cgroup v2 hierarchy. Default: where it is mounted.
    #[arg(long, env = "CGROUP_ROOT", value_name = "CGROUP_ROOT")]
    pub cgroup_root: Option<PathBuf>,
    /// Metrics, health and status.
    #[arg(long, env = "ADMIN_ADDR", value_name = "ADMIN_ADDR", default_value = "[::]:15014")]
    pub admin_addr: SocketAddr,
    /// Namespaces whose pods stay out.
    #[arg(
        long,
        env = "EXCLUDE_NAMESPACES",
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "kube-system"
    )]
    pub exclude_namespaces: Vec<String>,
    /// Namespace of the node proxy, which stays out.
    #[arg(long, env = "POD_NAMESPACE", value_name = "POD_NAMESPACE", default_value = "understory-system")]
    pub system_namespace: String,
    /// Which pods get in: a YAML or JSON list of {podSelector, namespaceSelector}. Default: the label
    /// istio.io/dataplane-mode=ambient on the pod, or on its namespace unless the pod's own label is none.
    #[arg(long, env = "ENABLEMENT_SELECTORS", value_name = "YAML", value_parser = selectors)]
    pub enablement_selectors: Option<Selectors>,
    /// Let a pod's connections pass uncaptured while nobody listens for them, instead of refusing them.
    #[arg(long, env = "FAIL_OPEN", value_name = "BOOL", num_args = 0..=1, default_value_t = false, default_missing_value = "true")]
    pub fail_open: bool,
    #[command(flatten)]
    pub times: TimeArgs,
    #[command(flatten)]
    pub cni: CniArgs,
    #[command(flatten)]
    pub sizes: SizeArgs,
    /// Shape of log lines.
    #[arg(long, env = "LOG_FORMAT", value_name = "LOG_FORMAT", default_value = "plain")]
    pub log_format: Format,
    /// Log levels: a level, or directives such as info,agent::pod=debug.
    #[arg(long, env = "RUST_LOG", value_name = "RUST_LOG", default_value = "info", value_parser = levels)]
    pub log_levels: Levels,
}

/// Where the agent keeps its things.
#[derive(Clone, Debug, Args)]
pub struct PlaceArgs {
    /// Folder for the agent's socket, its lock, and its record of each pod.
    #[arg(long, env = "RUN_DIR", value_name = "RUN_DIR", default_value = "/var/run/understory")]
    pub run_dir: PathBuf,
    /// Folder in a bpffs for what must outlive the agent.
    #[arg(long, env = "BPF_DIR", value_name = "BPF_DIR", default_value = "/sys/fs/bpf/understory")]
    pub bpf_dir: PathBuf,
}

/// The folders that container runtimes read. Without them the CNI plugin is not installed.
#[derive(Clone, Debug, Args)]
pub struct CniDirArgs {
    /// Folder with the runtime's network configurations, such as /etc/cni/net.d: the CNI plugin is put into the chain of
    /// the first.
    #[arg(long, env = "CNI_CONF_DIR", value_name = "DIR", requires = "cni_bin_dir")]
    pub cni_conf_dir: Option<PathBuf>,
    /// Folder with the runtime's CNI plugins, such as /opt/cni/bin.
    #[arg(long, env = "CNI_BIN_DIR", value_name = "DIR", requires = "cni_conf_dir")]
    pub cni_bin_dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Args)]
pub struct CniArgs {
    #[command(flatten)]
    pub dirs: CniDirArgs,
    /// Do not change the runtime's network configuration, but keep one of our own before it that is made from it: for
    /// networks that write theirs anew whenever the node starts.
    #[arg(long, env = "CNI_OWN_FILE", value_name = "BOOL", num_args = 0..=1, default_value_t = false, default_missing_value = "true")]
    pub cni_own_file: bool,
    /// How long a pod's start may wait until the pod is captured, before it is refused and tried again.
    #[arg(long, env = "CNI_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub cni_timeout: Duration,
}

#[derive(Clone, Debug, Args)]
pub struct TimeArgs {
    /// How often each pod's capture is verified.
    #[arg(long, env = "VERIFY_INTERVAL", value_name = "TIME", default_value = "15s", value_parser = duration)]
    pub verify_interval: Duration,
    /// How long connections wait for a proxy before they are reset.
    #[arg(long, env = "BACKLOG_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub backlog_timeout: Duration,
    /// How long peers may take to learn that a pod leaves the mesh.
    #[arg(long, env = "FOLLOW_TIMEOUT", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub follow_timeout: Duration,
    /// How long the connections of a pod that leaves the mesh may live on.
    #[arg(long, env = "DRAIN_TIMEOUT", value_name = "TIME", default_value = "20s", value_parser = duration)]
    pub drain_timeout: Duration,
    /// How long a probe inside a pod may take.
    #[arg(long, env = "PROBE_TIMEOUT", value_name = "TIME", default_value = "5s", value_parser = duration)]
    pub probe_timeout: Duration,
    /// Longest wait before a failed step is tried again.
    #[arg(long, env = "RETRY_MAX", value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub retry_max: Duration,
}

#[derive(Clone, Debug, Args)]
pub struct SizeArgs {
    /// Enrolled pods of the node at most.
    #[arg(long, env = "MAX_PODS", value_name = "COUNT", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_pods: u32,
    /// Captured connections that wait for the proxy at most.
    #[arg(long, env = "MAX_WAITING", value_name = "COUNT", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_waiting: u32,
}

/// Flags of `ztunnel agent cleanup`.
#[derive(Clone, Debug, Args)]
pub struct CleanupArgs {
    #[command(flatten)]
    pub place: PlaceArgs,
    #[command(flatten)]
    pub cni: CniDirArgs,
    /// Leave the CNI plugin's program: for runtimes that call it also for the end of pods that began with it (CRI-O).
    #[arg(long, env = "CNI_KEEP_PROGRAM", value_name = "BOOL", num_args = 0..=1, default_value_t = false, default_missing_value = "true")]
    pub cni_keep_program: bool,
    /// Folder with the pods' status files; those of the node are removed.
    #[arg(long, env = "STATUS_DIR", value_name = "STATUS_DIR", requires = "node_name")]
    pub status_dir: Option<PathBuf>,
    /// With kubernetes, the annotations of the node's pods are removed.
    #[arg(
        long,
        env = "SOURCE",
        value_name = "SOURCE",
        value_enum,
        default_value = "manifests",
        requires_if("kubernetes", "node_name")
    )]
    pub source: SourceKind,
    /// As for the agent, with the source kubernetes.
    #[arg(long, env = "KUBECONFIG", value_name = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// The Kubernetes node.
    #[arg(long, env = "NODE_NAME", value_name = "NODE_NAME")]
    pub node_name: Option<String>,
}

/// The checked settings.
#[derive(Clone, Debug)]
pub struct AgentConfig {
    pub node_name: String,
    pub source: SourceConfig,
    pub run_dir: PathBuf,
    pub bpf_dir: PathBuf,
    pub zds_sockets: Vec<PathBuf>,
    pub cgroup_root: Option<PathBuf>,
    pub admin_addr: SocketAddr,
    pub rules: Rules,
    pub fail_open: bool,
    pub timings: Timings,
    pub probe_timeout: Duration,
    /// Where the CNI plugin is installed, and how.
    pub cni_install: Option<Install>,
    /// How long an ADD of the CNI plugin may take.
    pub cni_timeout: Duration,
    pub sizes: Sizes,
    /// This program's own executable, which probes are started from.
    pub program: PathBuf,
}

/// Where objects come from, and where it is told what becomes of pods.
#[derive(Clone, Debug)]
pub enum SourceConfig {
    Manifests { folder: PathBuf, status_dir: Option<PathBuf> },
    Kubernetes { kubeconfig: Option<PathBuf> },
}

/// Sizes of the capture maps.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub max_pods: u32,
    pub max_waiting: u32,
}

/// A setting that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("setting {setting}: {value:?}: {expected}")]
pub struct SettingError {
    setting: &'static str,
    value: String,
    expected: &'static str,
}

/// What `--enablement-selectors` holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Selectors(Vec<Enablement>);

impl RunArgs {
    pub fn check(self) -> Result<AgentConfig, SettingError> {
        let wrong = |setting, value: &str, expected| SettingError { setting, value: value.to_owned(), expected };
        let node_name = self.node_name.unwrap_or_default();
        if node_name.trim().is_empty() {
            return Err(wrong("--node-name (NODE_NAME)", &node_name, "expected the name of the Kubernetes node"));
        }
        let source = match self.source {
            SourceKind::Manifests => {
                let folder = self.manifests.unwrap_or_default();
                if !folder.is_dir() {
                    let text = folder.display().to_string();
                    return Err(wrong(
                        "--manifests (MANIFESTS)",
                        &text,
                        "expected a folder with the cluster's objects",
                    ));
                }
                SourceConfig::Manifests { folder, status_dir: self.status_dir }
            }
            SourceKind::Kubernetes => {
                if let Some(dir) = &self.status_dir {
                    let text = dir.display().to_string();
                    let expected = "expected none with --source kubernetes, where annotations of pods say the same";
                    return Err(wrong("--status-dir (STATUS_DIR)", &text, expected));
                }
                SourceConfig::Kubernetes { kubeconfig: self.kubeconfig }
            }
        };
        if self.times.verify_interval < SHORTEST_VERIFY {
            let text = format!("{:?}", self.times.verify_interval);
            return Err(wrong("--verify-interval (VERIFY_INTERVAL)", &text, "expected 100ms or more"));
        }
        if self.cni.cni_timeout > LONGEST_CNI_TIMEOUT {
            let text = format!("{:?}", self.cni.cni_timeout);
            return Err(wrong(
                "--cni-timeout (CNI_TIMEOUT)",
                &text,
                "expected 295s or less: the plugin waits no longer",
            ));
        }
        let mut zds_sockets = self.zds_socket;
        if zds_sockets.is_empty() {
            zds_sockets = vec![self.place.run_dir.join("zds.sock"), UPSTREAM_SOCKET.into()];
        }
        let names = self.exclude_namespaces.into_iter().map(|name| name.trim().to_owned());
        let exclude_namespaces: BTreeSet<String> = names.filter(|name| !name.is_empty()).collect();
        // What a node needs to come up does without the agent.
        let without_agent = exclude_namespaces.iter().chain([&self.system_namespace]).cloned();
        let entry = Entry {
            socket: std::path::absolute(cni::socket(&self.place.run_dir)).unwrap_or_default(),
            exclude_namespaces: without_agent.collect::<BTreeSet<String>>().into_iter().collect(),
            timeout_seconds: self.cni.cni_timeout.as_secs() + CNI_GRACE_SECONDS,
        };
        let program = PathBuf::from("/proc/self/exe");
        let cni_install = self.cni.dirs.check().map(|dirs| Install {
            dirs,
            own_file: self.cni.cni_own_file,
            program: program.clone(),
            entry,
        });
        Ok(AgentConfig {
            node_name,
            source,
            run_dir: self.place.run_dir,
            bpf_dir: self.place.bpf_dir,
            zds_sockets,
            cgroup_root: self.cgroup_root,
            admin_addr: self.admin_addr,
            rules: Rules {
                exclude_namespaces,
                system_namespace: self.system_namespace,
                selectors: self.enablement_selectors.map_or_else(Rules::default_selectors, |selectors| selectors.0),
            },
            fail_open: self.fail_open,
            timings: Timings {
                verify: self.times.verify_interval,
                follow: self.times.follow_timeout,
                drain: self.times.drain_timeout,
                retry: (FIRST_RETRY.min(self.times.retry_max), self.times.retry_max),
                backlog: self.times.backlog_timeout,
            },
            probe_timeout: self.times.probe_timeout,
            cni_install,
            cni_timeout: self.cni.cni_timeout,
            sizes: Sizes { max_pods: self.sizes.max_pods, max_waiting: self.sizes.max_waiting },
            program,
        })
    }
}

impl CniDirArgs {
    pub fn check(&self) -> Option<CniDirs> {
        Some(CniDirs { conf: self.cni_conf_dir.clone()?, bin: self.cni_bin_dir.clone()? })
    }
}

fn duration(text: &str) -> Result<Duration, String> {
    const EXPECTED: &str = "expected a time such as 500ms, 10s or 5m; a plain number is seconds";
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let count: u64 = text[..digits].parse().map_err(|_| EXPECTED)?;
    let time = match &text[digits..] {
        "ms" => Duration::from_millis(count),
        "s" | "" => Duration::from_secs(count),
        "m" => Duration::from_secs(count.checked_mul(60).ok_or(EXPECTED)?),
        _ => return Err(EXPECTED.into()),
    };
    if time.is_zero() { Err("expected more than 0".into()) } else { Ok(time) }
}

fn selectors(text: &str) -> Result<Selectors, String> {
    let list: Vec<Enablement> = serde_yaml_ng::from_str(text)
        .map_err(|error| format!("expected a list of {{podSelector, namespaceSelector}}: {error}"))?;
    for selector in list.iter().flat_map(|one| [&one.pod_selector, &one.namespace_selector]) {
        if let Some(operator) = selector::unknown_operators(selector).next() {
            return Err(format!("operator {operator:?} is not known; expected In, NotIn, Exists or DoesNotExist"));
        }
    }
    Ok(Selectors(list))
}

fn levels(text: &str) -> Result<Levels, String> {
    Levels::parse(text).map_err(|error| error.to_string())
}

/// Where upstream proxies look for their agent.
const UPSTREAM_SOCKET: &str = "/var/run/ztunnel/ztunnel.sock";
/// The plugin waits for so much longer than the agent takes.
const CNI_GRACE_SECONDS: u64 = 5;
const LONGEST_CNI_TIMEOUT: Duration = Duration::from_secs(crate::cni::LONGEST_ANSWER_SECONDS - CNI_GRACE_SECONDS);
const SHORTEST_VERIFY: Duration = Duration::from_millis(100);
const FIRST_RETRY: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        agent: AgentArgs,
    }

    fn parse(flags: &[&str]) -> Result<AgentArgs, String> {
        let all = ["agent"].iter().chain(flags);
        Program::try_parse_from(all).map(|program| program.agent).map_err(|error| error.to_string())
    }

    #[test]
    fn the_defaults() {
        let args = parse(&["--node-name", "a", "--manifests", "/tmp"]).unwrap();
        let config = args.run.check().unwrap();
        assert_eq!(config.zds_sockets[0], PathBuf::from("/var/run/understory/zds.sock"));
        assert_eq!(config.zds_sockets[1], PathBuf::from("/var/run/ztunnel/ztunnel.sock"));
        assert_eq!(config.rules.exclude_namespaces, ["kube-system".to_owned()].into());
        assert_eq!(config.rules.selectors, Rules::default_selectors());
        assert_eq!(config.timings.backlog, Duration::from_secs(10));
        assert!(!config.fail_open);
    }

    #[test]
    fn wrong_values_are_named_with_what_would_be_right() {
        let base = ["--node-name", "a", "--manifests", "/tmp"];
        let table: &[(&[&str], &[&str])] = &[
            (&["--verify-interval", "soon"], &["--verify-interval", "soon", "500ms"]),
            (&["--backlog-timeout", "0"], &["--backlog-timeout", "more than 0"]),
            (&["--enablement-selectors", "nonsense"], &["--enablement-selectors", "podSelector"]),
            (
                &["--enablement-selectors", "[{podSelector: {matchExpressions: [{key: a, operator: Gt}]}}]"],
                &["Gt", "DoesNotExist"],
            ),
            (&["--max-pods", "0"], &["--max-pods", "0"]),
            (&["--admin-addr", "here"], &["--admin-addr", "here"]),
            (&["--log-format", "xml"], &["--log-format", "plain", "json"]),
        ];
        for (flags, parts) in table {
            let all: Vec<&str> = base.iter().chain(*flags).copied().collect();
            let error = parse(&all).unwrap_err();
            for part in *parts {
                assert!(error.contains(part), "{flags:?}: {error}");
            }
        }
        assert!(parse(&[]).unwrap_err().contains("--node-name"));
        let error = parse(&["--node-name", "a", "--manifests", "/nowhere"]).unwrap().run.check().unwrap_err();
        assert!(error.to_string().contains("--manifests (MANIFESTS): \"/nowhere\""), "{error}");
        let kubernetes = ["--node-name", "a", "--source", "kubernetes"];
        assert!(parse(&kubernetes).unwrap().run.check().is_ok(), "needs no folder");
        let with_status = [&kubernetes[..], &["--status-dir", "/x"]].concat();
        let error = parse(&with_status).unwrap().run.check().unwrap_err().to_string();
        assert!(error.contains("--status-dir (STATUS_DIR): \"/x\""), "{error}");
        assert!(parse(&["--node-name", "a", "--source", "manifests"]).unwrap_err().contains("--manifests"));
    }

    #[test]
    fn flags_of_the_decision_reach_the_rules() {
        let args = parse(&[
            "--node-name",
            "a",
            "--manifests",
            "/tmp",
            "--exclude-namespaces",
            "x, y",
            "--fail-open",
            "--enablement-selectors",
            "[{podSelector: {matchLabels: {mesh: 'on'}}}]",
        ]);
        let config = args.unwrap().run.check().unwrap();
        assert_eq!(config.rules.exclude_namespaces, ["x".to_owned(), "y".to_owned()].into());
        assert_eq!(config.rules.selectors.len(), 1);
        assert!(config.fail_open);
    }

    #[test]
    fn the_plugin_is_installed_where_both_folders_are_given() {
        let base = ["--node-name", "a", "--manifests", "/tmp", "--run-dir", "/run/x", "--cni-timeout", "20s"];
        let with = |flags: &[&str]| parse(&[&base[..], flags].concat());
        assert!(with(&[]).unwrap().run.check().unwrap().cni_install.is_none());
        for alone in ["--cni-conf-dir=/c", "--cni-bin-dir=/b"] {
            assert!(with(&[alone]).unwrap_err().contains("--cni-"));
        }
        let config = with(&["--cni-conf-dir=/c", "--cni-bin-dir=/b", "--exclude-namespaces=b,a"]).unwrap().run.check();
        let install = config.unwrap().cni_install.unwrap();
        assert_eq!((install.dirs.conf.as_path(), install.own_file), (std::path::Path::new("/c"), false));
        assert_eq!(install.entry.socket, PathBuf::from("/run/x/cni.sock"));
        assert_eq!(install.entry.exclude_namespaces, ["a", "b", "understory-system"]);
        assert_eq!(install.entry.timeout_seconds, 25, "longer than the agent takes");
    }

    #[test]
    fn cleanup_needs_none_of_the_agents_flags() {
        let args = parse(&["cleanup", "--bpf-dir", "/sys/fs/bpf/x"]).unwrap();
        let Some(AgentCommand::Cleanup(cleanup)) = args.command else { panic!("not cleanup") };
        assert_eq!(cleanup.place.bpf_dir, PathBuf::from("/sys/fs/bpf/x"));
    }
}

//! The settings of `control serve`: read once from flags and environment, checked, then never changed.
//!
//! Must never let a wrong value through: the error names the setting, the value and what would be right.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use ztunnel::identity::{Identity, TrustDomain};
use ztunnel::kubernetes::SourceKind;
use ztunnel::telemetry::log::{Format, Levels};

use crate::ca_command::CaCommand;
use crate::uninstall::UninstallArgs;

/// The control plane for clusters without istiod.
#[derive(Debug, Parser)]
#[command(name = "control", version)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serves discovery and certificates to the nodes
    Serve(Box<ServeArgs>),
    /// Looks at the certificate authority, and rotates its root
    #[command(subcommand)]
    Ca(CaCommand),
    /// Says what policies in manifests mean, and what of them needs a waypoint, without a cluster
    ///
    /// Exit code: 0 if all is enforced at least as strictly as it is written, 1 if something is not understood, ignored
    /// or cannot be read, 2 for wrong arguments.
    Check(CheckArgs),
    /// Takes all nodes out of the mesh, before the chart is removed; its uninstall hook runs this
    Uninstall(UninstallArgs),
}

/// Flags of `control check`.
#[derive(Debug, Clone, Args)]
pub struct CheckArgs {
    /// Files of manifests; folders, of which all *.yaml, *.yml and *.json count; or - for the standard input.
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Shape of the output.
    #[arg(long, value_name = "OUTPUT", value_enum, default_value = "text")]
    pub output: CheckOutput,
    /// The root namespace: policies in it are for the whole mesh.
    #[arg(
        long,
        env = "ROOT_NAMESPACE",
        value_name = "ROOT_NAMESPACE",
        default_value = "understory-system",
        value_parser = hostname
    )]
    pub root_namespace: String,
    /// Trust domain of the mesh's identities.
    #[arg(
        long,
        env = "TRUST_DOMAIN",
        value_name = "TRUST_DOMAIN",
        default_value = "cluster.local",
        value_parser = trust_domain
    )]
    pub trust_domain: TrustDomain,
    /// Exit with 1 also if a policy is stricter or broader than written, or has no effect.
    #[arg(long)]
    pub strict: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum CheckOutput {
    Text,
    Json,
}

/// Flags and environment of `control serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Where the cluster's objects come from. With kubernetes, this pod's service account is used, or --kubeconfig.
    #[arg(long, env = "SOURCE", value_name = "SOURCE", value_enum, default_value = "manifests")]
    pub source: SourceKind,
    /// Folder of Kubernetes manifests, watched. Required with the source manifests.
    #[arg(
        long,
        env = "MANIFESTS",
        value_name = "MANIFESTS",
        value_parser = folder,
        required_unless_present = "source",
        required_if_eq("source", "manifests")
    )]
    pub manifests: Option<PathBuf>,
    /// File that tells where the API server is and who we are, with the source kubernetes; its current context counts.
    /// Default: what the pod that this runs in is given.
    #[arg(long, env = "KUBECONFIG", value_name = "KUBECONFIG")]
    pub kubeconfig: Option<PathBuf>,
    /// Folder of the agents' status files, with the source manifests; it may come later. Default: none, then nothing is
    /// captured but what annotations say.
    #[arg(long, env = "STATUS_DIR", value_name = "STATUS_DIR")]
    pub status_dir: Option<PathBuf>,
    /// Folder that the status of each policy is written to, made if missing; neither of the two others. Default: none,
    /// then it is told by the log, the metrics and the admin page alone.
    #[arg(long, env = "POLICY_STATUS_DIR", value_name = "POLICY_STATUS_DIR")]
    pub policy_status_dir: Option<PathBuf>,
    /// Where discovery and certificates are served, over TLS (IPv4 too; IPv4 only where there is no IPv6).
    #[arg(long, env = "LISTEN", value_name = "LISTEN", default_value = "[::]:15012", value_parser = socket_address)]
    pub listen: SocketAddr,
    /// Folder of the certificate authority: a root of its own (root-key.pem and root-cert.pem, made if the folder is
    /// empty) or one that is plugged in (ca-key.pem, ca-cert.pem, cert-chain.pem and root-cert.pem). Required.
    #[arg(long, env = "CA_DIR", value_name = "CA_DIR")]
    pub ca_dir: PathBuf,
    /// Secret of the mesh's own namespace that the authority's files are in, with the source kubernetes: for all replicas
    /// the same. If it is missing, a root is made and put there. The folder is then its working copy; files that are
    /// changed there count for nothing. Default: none, then the folder is all there is.
    #[arg(long, env = "CA_SECRET", value_name = "CA_SECRET", value_parser = hostname)]
    pub ca_secret: Option<String>,
    /// This replica's own name, unlike that of all others, with the source kubernetes. Default: the host's name, which in
    /// a pod is the pod's.
    #[arg(long, env = "POD_NAME", value_name = "POD_NAME", value_parser = words)]
    pub pod_name: Option<String>,
    /// File that the public roots are written to, for the proxies. Default: none.
    #[arg(long, env = "ROOT_CERT", value_name = "ROOT_CERT")]
    pub root_cert: Option<PathBuf>,
    /// The cluster's public keys for service account tokens: PEM (one or several) or a JWKS. Required with the source
    /// manifests. Default with the source kubernetes: none, then the API server is asked (TokenReview).
    #[arg(
        long,
        env = "SERVICE_ACCOUNT_KEY",
        value_name = "SERVICE_ACCOUNT_KEY",
        required_unless_present = "source",
        required_if_eq("source", "manifests")
    )]
    pub service_account_key: Option<PathBuf>,
    /// The issuer in those tokens, where they are checked by keys.
    #[arg(
        long,
        env = "SERVICE_ACCOUNT_ISSUER",
        value_name = "SERVICE_ACCOUNT_ISSUER",
        default_value = "https://kubernetes.default.svc.cluster.local",
        value_parser = words
    )]
    pub service_account_issuer: String,
    /// The audience in those tokens.
    #[arg(long, env = "TOKEN_AUDIENCE", value_name = "TOKEN_AUDIENCE", default_value = "istio-ca", value_parser = words)]
    pub token_audience: String,
    /// Trust domain of all identities.
    #[arg(
        long,
        env = "TRUST_DOMAIN",
        value_name = "TRUST_DOMAIN",
        default_value = "cluster.local",
        value_parser = trust_domain
    )]
    pub trust_domain: TrustDomain,
    /// DNS suffix of the cluster's services.
    #[arg(
        long,
        env = "CLUSTER_DOMAIN",
        value_name = "CLUSTER_DOMAIN",
        default_value = "cluster.local",
        value_parser = hostname
    )]
    pub cluster_domain: String,
    /// Id of the cluster.
    #[arg(long, env = "CLUSTER_ID", value_name = "CLUSTER_ID", default_value = "Kubernetes", value_parser = cluster_id)]
    pub cluster_id: String,
    /// Host names and addresses in the serving certificate, comma separated.
    #[arg(
        long,
        env = "SERVER_NAME",
        value_name = "SERVER_NAME",
        value_delimiter = ',',
        default_value = "control.understory-system.svc",
        value_parser = server_name
    )]
    pub server_name: Vec<String>,
    /// Accounts of node proxies (namespace/name, comma separated), which may have certificates of their node's pods.
    #[arg(
        long,
        env = "TRUSTED_NODE_ACCOUNT",
        value_name = "TRUSTED_NODE_ACCOUNT",
        value_delimiter = ',',
        default_value = "understory-system/ztunnel",
        value_parser = account
    )]
    pub trusted_node_account: Vec<String>,
    /// The mesh's own namespace, whose label topology.istio.io/network names the cluster's network.
    #[arg(
        long,
        env = "SYSTEM_NAMESPACE",
        value_name = "SYSTEM_NAMESPACE",
        default_value = "understory-system",
        value_parser = words
    )]
    pub system_namespace: String,
    /// The root namespace: policies in it are for the whole mesh. Default: the mesh's own namespace.
    #[arg(long, env = "ROOT_NAMESPACE", value_name = "ROOT_NAMESPACE", value_parser = hostname)]
    pub root_namespace: Option<String>,
    /// Life of workload certificates for which none is asked.
    #[arg(long, env = "LEAF_TTL", value_name = "LEAF_TTL", default_value = "24h", value_parser = lifetime)]
    pub leaf_ttl: Duration,
    /// Longest life of workload certificates; who asks for a longer one gets this. Default: as --leaf-ttl.
    #[arg(long, env = "MAX_LEAF_TTL", value_name = "MAX_LEAF_TTL", value_parser = lifetime)]
    pub max_leaf_ttl: Option<Duration>,
    /// How much earlier than now certificates begin, for clocks that are behind.
    #[arg(long, env = "LEAF_BACKDATE", value_name = "LEAF_BACKDATE", default_value = "120s", value_parser = backdate)]
    pub leaf_backdate: Duration,
    /// Certificates that one node proxy may ask for in a second, on average.
    #[arg(
        long,
        env = "CERTIFICATE_RATE",
        value_name = "CERTIFICATE_RATE",
        default_value = "50",
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    pub certificate_rate: u32,
    /// Certificates that one node proxy may ask for at once, as when it starts.
    #[arg(
        long,
        env = "CERTIFICATE_BURST",
        value_name = "CERTIFICATE_BURST",
        default_value = "500",
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    pub certificate_burst: u32,
    /// When the roots change, proxies renew their certificates at once, spread over this time: longer is gentler,
    /// shorter is quicker.
    #[arg(
        long,
        env = "RENEWAL_WINDOW",
        value_name = "RENEWAL_WINDOW",
        default_value = "60s",
        value_parser = window
    )]
    pub renewal_window: Duration,
    /// Metrics, health and debug pages.
    #[arg(long, env = "ADMIN_ADDR", value_name = "ADMIN_ADDR", default_value = "[::]:15014", value_parser = socket_address)]
    pub admin_addr: SocketAddr,
    /// Shape of log lines.
    #[arg(long, env = "LOG_FORMAT", value_name = "LOG_FORMAT", value_enum, default_value = "plain")]
    pub log_format: Format,
    /// Levels of log lines, such as info or info,control::xds=debug.
    #[arg(long, env = "RUST_LOG", value_name = "RUST_LOG", default_value = "info")]
    pub log_levels: Levels,
}

fn folder(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match std::fs::read_dir(&path) {
        Ok(_) => Ok(path),
        Err(e) => Err(format!("expected a folder that can be read: {e}")),
    }
}

fn socket_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "expected an address with a port, such as [::]:15012 or 127.0.0.1:15012".to_owned())
}

fn words(text: &str) -> Result<String, String> {
    let good = !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control());
    if good { Ok(text.to_owned()) } else { Err("expected text without blanks".into()) }
}

/// Part of a workload's uid, where a slash separates.
fn cluster_id(text: &str) -> Result<String, String> {
    words(text).ok().filter(|t| !t.contains('/')).ok_or_else(|| "expected text without blanks and slashes".into())
}

fn trust_domain(text: &str) -> Result<TrustDomain, String> {
    let identity = format!("spiffe://{text}/ns/a/sa/b").parse::<Identity>();
    identity.map(|id| id.trust_domain().clone()).map_err(|_| "expected a domain such as cluster.local".into())
}

pub fn hostname(text: &str) -> Result<String, String> {
    let is_label = |label: &str| {
        let inner = label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        (1..=63).contains(&label.len()) && inner && !label.starts_with('-') && !label.ends_with('-')
    };
    let good = text.len() <= 253 && text.split('.').all(is_label);
    if good { Ok(text.to_owned()) } else { Err("expected a DNS name in lower case, such as cluster.local".into()) }
}

fn server_name(text: &str) -> Result<String, String> {
    if text.parse::<IpAddr>().is_ok() {
        return Ok(text.to_owned());
    }
    hostname(text).map_err(|_| "expected a DNS name in lower case or an address".into())
}

fn account(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        Some((namespace, name)) if hostname(namespace).is_ok() && hostname(name).is_ok() => Ok(text.to_owned()),
        _ => Err("expected namespace/name of a service account, such as understory-system/ztunnel".into()),
    }
}

fn lifetime(text: &str) -> Result<Duration, String> {
    let within = seconds(text).filter(|s| (10..=90 * 86400).contains(s)).map(Duration::from_secs);
    within.ok_or_else(|| "expected a time from 10s to 2160h (90 days), such as 600, 90m or 24h".into())
}

fn backdate(text: &str) -> Result<Duration, String> {
    let within = seconds(text).filter(|s| *s <= 86400).map(Duration::from_secs);
    within.ok_or_else(|| "expected a time from 0s to 24h, such as 120 or 10m".into())
}

/// Any time at all.
pub fn any_time(text: &str) -> Result<Duration, String> {
    seconds(text).map(Duration::from_secs).ok_or_else(|| "expected a time such as 600, 90m, 24h or 30d".into())
}

fn window(text: &str) -> Result<Duration, String> {
    let within = seconds(text).filter(|s| (1..=86400).contains(s)).map(Duration::from_secs);
    within.ok_or_else(|| "expected a time from 1s to 24h, such as 60 or 10m".into())
}

/// A plain number is seconds.
fn seconds(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..digits].parse().ok()?;
    let unit = match &text[digits..] {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        _ => return None,
    };
    number.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUIRED: [&str; 8] =
        ["control", "serve", "--manifests", "/tmp", "--ca-dir", "/tmp/ca", "--service-account-key", "/tmp/key"];

    fn serve(extra: &[&'static str]) -> ServeArgs {
        let args = REQUIRED.iter().copied().chain(extra.iter().copied());
        match Cli::try_parse_from(args).unwrap().command {
            Command::Serve(args) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_documents() {
        let args = serve(&[]);
        assert_eq!(args.listen, "[::]:15012".parse().unwrap());
        assert_eq!(args.admin_addr, "[::]:15014".parse().unwrap());
        assert_eq!(args.server_name, ["control.understory-system.svc"]);
        assert_eq!(args.trusted_node_account, ["understory-system/ztunnel"]);
        assert_eq!((args.leaf_ttl, args.max_leaf_ttl), (Duration::from_secs(86400), None));
        assert_eq!((args.leaf_backdate, args.renewal_window), (Duration::from_secs(120), Duration::from_secs(60)));
        assert_eq!((args.certificate_rate, args.certificate_burst), (50, 500));
        assert_eq!((args.cluster_id.as_str(), args.trust_domain.as_str()), ("Kubernetes", "cluster.local"));
    }

    #[test]
    fn a_wrong_value_is_named_with_what_would_be_right() {
        for (setting, value, expected) in [
            ("--manifests", "/nowhere/manifests", "a folder"),
            ("--listen", "nonsense", "an address with a port"),
            ("--admin-addr", "15014", "an address with a port"),
            ("--trust-domain", "not a domain", "a domain"),
            ("--cluster-domain", "Cluster", "a DNS name"),
            ("--cluster-id", "a/b", "without blanks and slashes"),
            ("--server-name", "a,b c", "a DNS name in lower case or an address"),
            ("--trusted-node-account", "ztunnel", "namespace/name"),
            ("--trusted-node-account", "a/b/c", "namespace/name"),
            ("--leaf-ttl", "5s", "10s to 2160h"),
            ("--leaf-ttl", "91d", "10s to 2160h"),
            ("--leaf-ttl", "1 day", "10s to 2160h"),
            ("--max-leaf-ttl", "91d", "10s to 2160h"),
            ("--leaf-backdate", "2d", "0s to 24h"),
            ("--certificate-rate", "0", "1..=100000"),
            ("--certificate-burst", "many", "invalid digit"),
            ("--renewal-window", "0s", "1s to 24h"),
            ("--renewal-window", "2d", "1s to 24h"),
            ("--token-audience", "", "without blanks"),
            ("--log-format", "xml", "plain, json"),
            ("--source", "etcd", "manifests, kubernetes"),
        ] {
            let args = REQUIRED.iter().copied().chain([setting, value]);
            let args = args.skip_while(|a| setting == "--manifests" && *a != "serve");
            let args: Vec<&str> = if setting == "--manifests" {
                ["control", "serve", "--ca-dir", "x", "--service-account-key", "y", setting, value].to_vec()
            } else {
                args.collect()
            };
            let error = Cli::try_parse_from(args).unwrap_err().to_string();
            let value = value.rsplit(',').next().unwrap_or(value);
            assert!(error.contains(setting) && error.contains(value) && error.contains(expected), "{setting}: {error}");
        }
        let error = Cli::try_parse_from(["control", "serve"]).unwrap_err().to_string();
        for setting in ["--manifests", "--ca-dir", "--service-account-key"] {
            assert!(error.contains(setting), "{error}");
        }
    }

    #[test]
    fn a_folder_of_manifests_is_wanted_where_they_are_the_source() {
        let parse = |source: &[&'static str]| {
            let rest = ["control", "serve", "--ca-dir", "/x"];
            Cli::try_parse_from(rest.into_iter().chain(source.iter().copied())).map_err(|e| e.to_string())
        };
        for source in [&[][..], &["--source", "manifests"]] {
            let error = parse(source).unwrap_err();
            assert!(error.contains("--manifests") && error.contains("--service-account-key"), "{error}");
        }
        let Command::Serve(args) = parse(&["--source", "kubernetes"]).unwrap().command else { panic!() };
        assert_eq!((args.source, args.manifests, args.kubeconfig), (SourceKind::Kubernetes, None, None));
        assert_eq!((args.service_account_key, args.ca_secret), (None, None));
    }

    #[test]
    fn times_and_lists_are_read() {
        let with = serve;
        assert_eq!(with(&["--leaf-ttl", "600"]).leaf_ttl, Duration::from_secs(600));
        assert_eq!(with(&["--leaf-ttl=90m"]).leaf_ttl, Duration::from_secs(5400));
        assert_eq!(with(&["--server-name", "a.b,10.0.0.1,fd00::1"]).server_name, ["a.b", "10.0.0.1", "fd00::1"]);
        assert_eq!(with(&["--trusted-node-account=a/b", "--trusted-node-account=c/d"]).trusted_node_account.len(), 2);
    }
}

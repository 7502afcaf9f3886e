//! The settings of `control serve`: read once from flags and environment, checked, then never changed.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use ztunnel::telemetry::log::{Format, Levels};

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
}

/// Flags and environment of `control serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Folder of Kubernetes manifests, watched. Required.
    #[arg(long, env = "MANIFESTS", value_name = "DIR")]
    pub manifests: PathBuf,
    /// Folder of the agents' status files. Default: none, nothing is captured.
    #[arg(long, env = "STATUS_DIR", value_name = "DIR")]
    pub status_dir: Option<PathBuf>,
    /// Where discovery and certificates are served, over TLS.
    #[arg(long, env = "LISTEN", default_value = "[::]:15012")]
    pub listen: SocketAddr,
    /// Folder of the root's key and certificate; made with mode 0700 if missing. Required.
    #[arg(long, env = "CA_DIR", value_name = "DIR")]
    pub ca_dir: PathBuf,
    /// Where the public root is written for the proxies. Default: none.
    #[arg(long, env = "ROOT_CERT", value_name = "FILE")]
    pub root_cert: Option<PathBuf>,
    /// The cluster's public keys for service account tokens: PEM (one or several) or a JWKS. Required.
    #[arg(long, env = "SERVICE_ACCOUNT_KEY", value_name = "FILE")]
    pub service_account_key: PathBuf,
    /// The issuer in those tokens.
    #[arg(
        long,
        env = "SERVICE_ACCOUNT_ISSUER",
        value_name = "URL",
        default_value = "https://kubernetes.default.svc.cluster.local"
    )]
    pub service_account_issuer: String,
    /// The audience in those tokens.
    #[arg(long, env = "TOKEN_AUDIENCE", default_value = "istio-ca")]
    pub token_audience: String,
    #[arg(long, env = "TRUST_DOMAIN", default_value = "cluster.local")]
    pub trust_domain: String,
    /// DNS suffix of the cluster's services.
    #[arg(long, env = "CLUSTER_DOMAIN", default_value = "cluster.local")]
    pub cluster_domain: String,
    #[arg(long, env = "CLUSTER_ID", default_value = "Kubernetes")]
    pub cluster_id: String,
    /// DNS names in the serving certificate.
    #[arg(long, env = "SERVER_NAME", value_delimiter = ',', default_value = "control.understory-system.svc")]
    pub server_name: Vec<String>,
    /// Accounts of node proxies, as namespace/name: they may ask for certificates of their node's pods.
    #[arg(long, env = "TRUSTED_NODE_ACCOUNT", value_delimiter = ',', default_value = "understory-system/ztunnel")]
    pub trusted_node_account: Vec<String>,
    /// The mesh's own namespace; its network label names the cluster's network.
    #[arg(long, env = "SYSTEM_NAMESPACE", default_value = "understory-system")]
    pub system_namespace: String,
    /// Lifetime of workload certificates, seconds; a proxy may ask for less.
    #[arg(long, env = "LEAF_TTL", default_value = "86400", value_parser = clap::value_parser!(u64).range(10..=7_776_000))]
    pub leaf_ttl: u64,
    /// Metrics, health and debug pages.
    #[arg(long, env = "ADMIN_ADDR", default_value = "[::]:15014")]
    pub admin_addr: SocketAddr,
    #[arg(long, env = "LOG_FORMAT", value_enum, default_value = "plain")]
    pub log_format: Format,
    #[arg(long, env = "RUST_LOG", default_value = "info")]
    pub log_levels: Levels,
}

/// A setting whose value is wrong.
#[derive(Debug, thiserror::Error)]
#[error("invalid value {value:?} for '{setting}': {expected}")]
pub struct SettingError {
    pub setting: &'static str,
    pub value: String,
    pub expected: String,
}

impl ServeArgs {
    pub fn check(&self) -> Result<(), SettingError> {
        let fail = |setting, value: String, expected: &str| {
            Err(SettingError { setting, value, expected: expected.to_owned() })
        };
        if !self.manifests.is_dir() {
            return fail("--manifests <DIR>", self.manifests.display().to_string(), "expected a folder that exists");
        }
        for account in &self.trusted_node_account {
            if account.split('/').filter(|p| !p.is_empty()).count() != 2 {
                return fail("--trusted-node-account", account.clone(), "expected namespace/name");
            }
        }
        let identity = format!("spiffe://{}/ns/a/sa/b", self.trust_domain);
        if identity.parse::<ztunnel::identity::Identity>().is_err() {
            return fail("--trust-domain", self.trust_domain.clone(), "expected a domain such as cluster.local");
        }
        Ok(())
    }

    pub fn leaf_ttl(&self) -> Duration {
        Duration::from_secs(self.leaf_ttl)
    }
}

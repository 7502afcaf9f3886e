//! Settings of whom the proxy trusts, and for how long.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::values;
use crate::identity::{RevocationRules, Rule, TrustDomain, TrustSettings};

/// Whom the proxy trusts, and for how long.
#[derive(Debug, Clone, Args, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TrustArgs {
    /// Trust domains that mean the mesh's own, comma separated: peers with names in them are accepted, and policies see
    /// these peers as of the mesh's own trust domain (TRUST_DOMAIN). Default: none.
    #[arg(
        long,
        env = "TRUST_DOMAIN_ALIASES",
        value_name = "TRUST_DOMAIN_ALIASES",
        value_delimiter = ',',
        value_parser = values::trust_domain
    )]
    #[serde(serialize_with = "values::display_all")]
    pub trust_domain_aliases: Vec<TrustDomain>,
    /// File with certificate revocation lists: PEM with any number of blocks, or one list in DER. Read again when it
    /// has changed; if it cannot be read, the lists read before stay. Default: none, nothing counts as revoked.
    #[arg(long, env = "CRL_PATH", value_name = "CRL_PATH", value_parser = values::path)]
    pub crl_path: Option<PathBuf>,
    /// With CRL_PATH: a certificate whose issuer has no list there, which is every one while the file was never
    /// readable.
    #[arg(long, env = "CRL_UNKNOWN_ISSUER", value_name = "CRL_UNKNOWN_ISSUER", value_enum, default_value = "deny")]
    pub crl_unknown_issuer: Choice,
    /// With CRL_PATH: a certificate whose issuer's list has ended (its nextUpdate has passed).
    #[arg(long, env = "CRL_EXPIRED", value_name = "CRL_EXPIRED", value_enum, default_value = "deny")]
    pub crl_expired: Choice,
    /// What becomes of open connections when a certificate of their tunnel ends: they keep going on, or are cut. New
    /// connections never use such a tunnel.
    #[arg(
        long,
        env = "CERTIFICATE_EXPIRY_CONNECTIONS",
        value_name = "CERTIFICATE_EXPIRY_CONNECTIONS",
        value_enum,
        default_value = "keep"
    )]
    pub expiry_connections: AtExpiry,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Choice {
    Deny,
    Allow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum AtExpiry {
    Keep,
    Cut,
}

impl TrustArgs {
    /// For a mesh of that trust domain.
    pub fn settings(&self, domain: &TrustDomain) -> TrustSettings {
        let rules =
            RevocationRules { unknown_issuer: self.crl_unknown_issuer.into(), outdated: self.crl_expired.into() };
        TrustSettings {
            domain: domain.clone(),
            aliases: self.trust_domain_aliases.iter().filter(|alias| *alias != domain).cloned().collect(),
            revocation: self.crl_path.as_ref().map(|_| rules),
        }
    }
}

impl From<Choice> for Rule {
    fn from(choice: Choice) -> Self {
        match choice {
            Choice::Deny => Self::Deny,
            Choice::Allow => Self::Allow,
        }
    }
}

//! Policies in the dump's form.

use serde::Serialize;

/// An L4 authorization policy.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Policy {
    pub name: String,
    pub namespace: String,
    /// `Global`, `Namespace` or `WorkloadSelector`.
    pub scope: &'static str,
    /// `Allow`, `Deny` or `Audit`.
    pub action: &'static str,
    pub dry_run: bool,
    /// Why it cannot be understood; then it denies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_understood: Option<String>,
    /// OR of AND of OR.
    pub rules: Vec<Vec<Vec<Match>>>,
}

#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Match {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub namespaces: Vec<TextMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_namespaces: Vec<TextMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub service_accounts: Vec<ServiceAccount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_service_accounts: Vec<ServiceAccount>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub principals: Vec<TextMatch>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_principals: Vec<TextMatch>,
    /// CIDR.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_source_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub destination_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_destination_ips: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub destination_ports: Vec<u16>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_destination_ports: Vec<u16>,
    /// It has a condition that this version does not know.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub not_understood: bool,
}

/// An object with exactly one key, which is capitalised.
#[derive(Debug, Clone, Serialize)]
pub enum TextMatch {
    Exact(String),
    Prefix(String),
    Suffix(String),
    /// Holds an empty array.
    Presence(),
}

#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceAccount {
    pub namespace: String,
    pub service_account: String,
}

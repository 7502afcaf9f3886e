//! ServiceEntry and WorkloadEntry of `networking.istio.io`, as far as the mesh reads them. Fields that it does not look at
//! are left out, also those that Istio knows.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};

use super::objects::{ObjectKey, ObjectName};

/// A service that Kubernetes does not know: host names, their addresses, and who answers for them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEntry {
    pub metadata: ObjectMeta,
    #[serde(default, deserialize_with = "or_default")]
    pub spec: ServiceEntrySpec,
    #[serde(default, deserialize_with = "or_default")]
    pub status: ServiceEntryStatus,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEntrySpec {
    #[serde(default, deserialize_with = "or_default")]
    pub hosts: Vec<String>,
    /// Addresses and ranges.
    #[serde(default, deserialize_with = "or_default")]
    pub addresses: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub ports: Vec<EntryPort>,
    #[serde(default, deserialize_with = "or_default")]
    pub resolution: Resolution,
    /// Who answers, said here. Else it is said by the selector.
    #[serde(default, deserialize_with = "or_default")]
    pub endpoints: Vec<WorkloadEntrySpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload_selector: Option<WorkloadSelector>,
    /// Namespaces that may use it: `*`, `.` for its own, or names. Empty: all.
    #[serde(default, deserialize_with = "or_default")]
    pub export_to: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub subject_alt_names: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceEntryStatus {
    /// Addresses that somebody has set aside for hosts without any.
    #[serde(default, deserialize_with = "or_default")]
    pub addresses: Vec<AllocatedAddress>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedAddress {
    #[serde(default, deserialize_with = "or_default")]
    pub value: String,
    /// Empty: of all hosts.
    #[serde(default, deserialize_with = "or_default")]
    pub host: String,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EntryPort {
    pub number: u32,
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    #[serde(default, deserialize_with = "or_default")]
    pub protocol: String,
    /// 0: as the number.
    #[serde(default, deserialize_with = "or_default")]
    pub target_port: u32,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadSelector {
    #[serde(default, deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
}

/// How an endpoint is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Resolution {
    /// Where the app says.
    #[default]
    None,
    Static,
    Dns,
    DnsRoundRobin,
    /// By the name that the app asks for, below a wildcard.
    DynamicDns,
}

/// A workload that is no pod.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadEntry {
    pub metadata: ObjectMeta,
    #[serde(default, deserialize_with = "or_default")]
    pub spec: WorkloadEntrySpec,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadEntrySpec {
    /// An address or a host name.
    #[serde(default, deserialize_with = "or_default")]
    pub address: String,
    /// By the name of the service's port.
    #[serde(default, deserialize_with = "or_default")]
    pub ports: BTreeMap<String, u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub network: String,
    /// `region/zone/subzone`.
    #[serde(default, deserialize_with = "or_default")]
    pub locality: String,
    /// 0: as if it were 1.
    #[serde(default, deserialize_with = "or_default")]
    pub weight: u32,
    #[serde(default, deserialize_with = "or_default")]
    pub service_account: String,
}

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum EntryKind {
    ServiceEntry,
    WorkloadEntry,
}

impl EntryKind {
    pub const ALL: [Self; 2] = [Self::ServiceEntry, Self::WorkloadEntry];
    /// The API group of both.
    pub const GROUP: &'static str = "networking.istio.io";
    /// The versions of the group that are read; they have the same fields.
    pub const VERSIONS: [&'static str; 3] = ["v1", "v1beta1", "v1alpha3"];

    pub fn name(self) -> &'static str {
        match self {
            Self::ServiceEntry => "ServiceEntry",
            Self::WorkloadEntry => "WorkloadEntry",
        }
    }

    pub fn key(self, name: ObjectName) -> ObjectKey {
        match self {
            Self::ServiceEntry => ObjectKey::ServiceEntry(name),
            Self::WorkloadEntry => ObjectKey::WorkloadEntry(name),
        }
    }
}

/// Null is as good as nothing.
fn or_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

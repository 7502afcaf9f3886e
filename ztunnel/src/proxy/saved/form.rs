//! The shape of a saved `config_dump`, as far as it is read back. Its writer is `telemetry::config_dump`.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Dump {
    pub node: Node,
    pub workloads: Vec<WorkloadText>,
    pub services: Vec<ServiceText>,
    pub policies: Vec<PolicyText>,
    pub staged_services: BTreeMap<String, Vec<EndpointText>>,
    pub certificates: Vec<CertificateText>,
    pub workload_state: HashMap<String, PodText>,
    #[serde(default)]
    pub config: ConfigText,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Node {
    pub name: String,
    pub cluster: String,
    pub policies_complete: bool,
    pub unusable: Vec<UnusableText>,
}

#[derive(Deserialize)]
pub struct UnusableText {
    pub name: String,
    pub addresses: Vec<String>,
    pub reason: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadText {
    pub uid: String,
    pub workload_ips: Vec<IpAddr>,
    pub waypoint: Option<GatewayText>,
    pub network_gateway: Option<GatewayText>,
    pub protocol: String,
    pub name: String,
    pub namespace: String,
    #[serde(default)]
    pub trust_domain: String,
    #[serde(default)]
    pub service_account: String,
    #[serde(default)]
    pub workload_name: String,
    #[serde(default)]
    pub hostname: String,
    #[serde(default)]
    pub network: String,
    #[serde(default)]
    pub node: String,
    pub status: String,
    #[serde(default)]
    pub cluster_id: String,
    pub locality: LocalityText,
    #[serde(default)]
    pub native_tunnel: bool,
    pub capacity: u32,
    pub application_tunnel: Option<TunnelText>,
    #[serde(default)]
    pub authorization_policies: Vec<String>,
    pub network_mode: String,
}

#[derive(Deserialize)]
pub struct LocalityText {
    #[serde(default)]
    pub region: String,
    #[serde(default)]
    pub zone: String,
    #[serde(default)]
    pub subzone: String,
}

#[derive(Deserialize)]
pub struct TunnelText {
    pub protocol: String,
    pub port: Option<u16>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayText {
    pub destination: String,
    pub hbone_mtls_port: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceText {
    pub name: String,
    pub namespace: String,
    pub hostname: String,
    pub vips: Vec<String>,
    #[serde(default)]
    pub cidr_vips: Vec<RangeText>,
    pub ports: BTreeMap<u16, u16>,
    pub endpoints: BTreeMap<String, EndpointText>,
    #[serde(default)]
    pub subject_alt_names: Vec<String>,
    pub waypoint: Option<GatewayText>,
    #[serde(default)]
    pub weighted_waypoints: Vec<WeightedText>,
    pub load_balancer: Option<BalancerText>,
    pub ip_families: Option<String>,
    pub canonical: bool,
    pub visibility: String,
}

#[derive(Deserialize)]
pub struct RangeText {
    pub network: String,
    pub cidr: IpNet,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EndpointText {
    pub workload_uid: String,
    pub port: BTreeMap<u16, u16>,
}

#[derive(Deserialize)]
pub struct WeightedText {
    #[serde(flatten)]
    pub destination: GatewayText,
    pub weight: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BalancerText {
    pub routing_preferences: Vec<String>,
    pub mode: String,
    pub health_policy: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PolicyText {
    pub name: String,
    pub namespace: String,
    pub scope: String,
    pub action: String,
    pub dry_run: bool,
    pub not_understood: Option<String>,
    pub rules: Vec<Vec<Vec<MatchText>>>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default, deny_unknown_fields)]
pub struct MatchText {
    pub namespaces: Vec<Text>,
    pub not_namespaces: Vec<Text>,
    pub service_accounts: Vec<AccountText>,
    pub not_service_accounts: Vec<AccountText>,
    pub principals: Vec<Text>,
    pub not_principals: Vec<Text>,
    pub source_ips: Vec<IpNet>,
    pub not_source_ips: Vec<IpNet>,
    pub destination_ips: Vec<IpNet>,
    pub not_destination_ips: Vec<IpNet>,
    pub destination_ports: Vec<u32>,
    pub not_destination_ports: Vec<u32>,
    pub not_understood: bool,
}

#[derive(Deserialize)]
pub enum Text {
    Exact(String),
    Prefix(String),
    Suffix(String),
    Presence(),
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AccountText {
    pub namespace: String,
    pub service_account: String,
}

#[derive(Deserialize)]
pub struct CertificateText {
    pub identity: String,
    pub state: String,
}

#[derive(Deserialize)]
pub struct PodText {
    pub state: String,
    pub info: PodInfo,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodInfo {
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    #[serde(default)]
    pub by_ebpf: bool,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct ConfigText {
    pub same_node_encryption: bool,
    pub mesh: MeshText,
    pub trust: TrustText,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct MeshText {
    pub trust_domain: String,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
pub struct TrustText {
    pub trust_domain_aliases: Vec<String>,
}

//! Which pods of the node belong into the mesh: a pure function of the pod, its namespace and the settings.
//!
//! Must never enrol a pod that cannot be captured by itself (the node's network, a sidecar, the proxy's own pod).

use std::collections::BTreeSet;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::Deserialize;

use super::sandbox::Sandbox;
use super::selector;
use crate::manifests::PodRef;

/// What enrolment needs to know of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    pub uid: String,
    /// The uid that its cgroups are named by: another one for static pods.
    pub cgroup_uid: String,
    pub name: String,
    pub namespace: String,
    pub service_account: String,
    pub addresses: Vec<IpAddr>,
    /// Its deletion has been ordered; its processes may still run.
    pub leaving: bool,
    /// What the runtime told, if it runs the CNI plugin.
    pub sandbox: Option<Arc<Sandbox>>,
}

/// Whether a pod is to be in the mesh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    In,
    Out(Exclusion),
    /// All its containers have ended for good: to be treated as gone.
    Ended,
}

/// Why a pod stays out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exclusion {
    HostNetwork,
    Sidecar,
    NodeProxy,
    ExcludedNamespace,
    NotSelected,
}

/// The settings that decide.
#[derive(Clone, Debug)]
pub struct Rules {
    pub exclude_namespaces: BTreeSet<String>,
    /// Namespace of the node proxy.
    pub system_namespace: String,
    /// A pod that any of them matches is in.
    pub selectors: Vec<Enablement>,
}

/// A pod is selected if both match; an absent one matches all.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Enablement {
    pub pod_selector: LabelSelector,
    pub namespace_selector: LabelSelector,
}

/// The order of the rules is that of istio-cni.
pub fn decide(pod: &Pod, namespace: Option<&Namespace>, rules: &Rules) -> Decision {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    if matches!(phase, Some("Succeeded" | "Failed")) {
        return Decision::Ended;
    }
    match exclusion(pod, namespace, rules) {
        Some(exclusion) => Decision::Out(exclusion),
        None => Decision::In,
    }
}

/// `None` if the object lacks what makes it a pod of a node (name, uid).
pub fn facts(pod: &Pod) -> Option<PodFacts> {
    let meta = &pod.metadata;
    let uid = meta.uid.clone().filter(|uid| !uid.is_empty())?;
    let static_uid = meta.annotations.as_ref().and_then(|annotations| annotations.get(STATIC_POD).cloned());
    let spec = pod.spec.as_ref();
    Some(PodFacts {
        cgroup_uid: static_uid.unwrap_or_else(|| uid.clone()),
        uid,
        name: meta.name.clone()?,
        namespace: namespace_of(pod).to_owned(),
        service_account: spec
            .and_then(|spec| spec.service_account_name.clone())
            .filter(|name| !name.is_empty())
            .unwrap_or_else(|| "default".into()),
        addresses: addresses(pod),
        leaving: meta.deletion_timestamp.is_some(),
        sandbox: None,
    })
}

impl PodFacts {
    /// With what the runtime told of the pod's sandbox, whose addresses count more than those of the object: it may
    /// have none yet, or those of the sandbox before.
    pub fn with_sandbox(mut self, sandbox: Option<Arc<Sandbox>>) -> PodFacts {
        if let Some(sandbox) = &sandbox {
            self.addresses.clone_from(&sandbox.addresses);
        }
        self.sandbox = sandbox;
        self
    }

    pub fn reference(&self) -> PodRef {
        PodRef { namespace: self.namespace.clone(), name: self.name.clone(), uid: self.uid.clone() }
    }
}

impl Rules {
    /// The field's defaults: label `istio.io/dataplane-mode=ambient` on the pod, or on the namespace of a pod that
    /// does not say `none`.
    pub fn default_selectors() -> Vec<Enablement> {
        let ambient = || LabelSelector {
            match_labels: Some([(DATAPLANE_MODE.to_owned(), "ambient".to_owned())].into()),
            ..LabelSelector::default()
        };
        let not_none = LabelSelector {
            match_expressions: Some(vec![LabelSelectorRequirement {
                key: DATAPLANE_MODE.into(),
                operator: "NotIn".into(),
                values: Some(vec!["none".into()]),
            }]),
            ..LabelSelector::default()
        };
        vec![
            Enablement { pod_selector: ambient(), namespace_selector: LabelSelector::default() },
            Enablement { pod_selector: not_none, namespace_selector: ambient() },
        ]
    }
}

impl fmt::Display for Exclusion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Exclusion::HostNetwork => "it uses the node's network",
            Exclusion::Sidecar => "it has a sidecar",
            Exclusion::NodeProxy => "it is the node proxy",
            Exclusion::ExcludedNamespace => "its namespace is excluded",
            Exclusion::NotSelected => "no label selects it",
        })
    }
}

fn exclusion(pod: &Pod, namespace: Option<&Namespace>, rules: &Rules) -> Option<Exclusion> {
    let meta = &pod.metadata;
    if pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true)) {
        return Some(Exclusion::HostNetwork);
    }
    if meta.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(SIDECAR)) {
        return Some(Exclusion::Sidecar);
    }
    let namespace_name = namespace_of(pod);
    let app = meta.labels.as_ref().and_then(|labels| labels.get("app"));
    if namespace_name == rules.system_namespace && app.is_some_and(|app| app == "ztunnel") {
        return Some(Exclusion::NodeProxy);
    }
    if rules.exclude_namespaces.contains(namespace_name) {
        return Some(Exclusion::ExcludedNamespace);
    }
    let namespace_labels = namespace.and_then(|namespace| namespace.metadata.labels.as_ref());
    let selected = rules.selectors.iter().any(|enablement| {
        selector::matches(&enablement.pod_selector, meta.labels.as_ref())
            && selector::matches(&enablement.namespace_selector, namespace_labels)
    });
    (!selected).then_some(Exclusion::NotSelected)
}

fn namespace_of(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

fn addresses(pod: &Pod) -> Vec<IpAddr> {
    let Some(status) = &pod.status else { return Vec::new() };
    let all = status.pod_ips.iter().flatten().map(|pod_ip| pod_ip.ip.as_str()).chain(status.pod_ip.as_deref());
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in all.filter_map(|text| text.parse().ok()) {
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    addresses
}

const DATAPLANE_MODE: &str = "istio.io/dataplane-mode";
pub(super) const SIDECAR: &str = "sidecar.istio.io/status";
pub(super) const STATIC_POD: &str = "kubernetes.io/config.hash";

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Rules {
        Rules {
            exclude_namespaces: ["kube-system".to_owned()].into(),
            system_namespace: "understory-system".into(),
            selectors: Rules::default_selectors(),
        }
    }

    fn pod(yaml: &str) -> Pod {
        serde_yaml_ng::from_str(yaml).unwrap()
    }

    fn labelled_namespace(mode: Option<&str>) -> Namespace {
        let mut namespace = Namespace::default();
        namespace.metadata.labels = mode.map(|mode| [(DATAPLANE_MODE.to_owned(), mode.to_owned())].into());
        namespace
    }

    #[test]
    fn the_decision_table() {
        use Decision::{Ended, In, Out};
        use Exclusion::*;
        const AMBIENT: &str = "istio.io/dataplane-mode: ambient";
        const NONE: &str = "istio.io/dataplane-mode: none";
        // namespace, its label, the pod's labels, what else the pod says, decision
        let table: &[(&str, Option<&str>, &str, &str, Decision)] = &[
            ("shop", Some("ambient"), "", "", In),
            ("shop", None, "", "", Out(NotSelected)),
            ("shop", Some("none"), "", "", Out(NotSelected)),
            ("shop", Some("sidecar"), "", "", Out(NotSelected)),
            ("shop", None, AMBIENT, "", In),
            ("shop", Some("none"), AMBIENT, "", In),
            ("shop", Some("ambient"), NONE, "", Out(NotSelected)),
            ("shop", Some("ambient"), "", "spec: {hostNetwork: true, containers: []}", Out(HostNetwork)),
            ("shop", Some("ambient"), "", "spec: {hostNetwork: false, containers: []}", In),
            ("kube-system", Some("ambient"), "", "", Out(ExcludedNamespace)),
            ("kube-system", None, AMBIENT, "", Out(ExcludedNamespace)),
            ("understory-system", Some("ambient"), "app: ztunnel", "", Out(NodeProxy)),
            ("understory-system", Some("ambient"), "app: control", "", In),
            ("shop", Some("ambient"), "app: ztunnel", "", In),
            ("shop", Some("ambient"), "", "status: {phase: Succeeded}", Ended),
            ("shop", None, "", "status: {phase: Failed}", Ended),
            ("shop", Some("ambient"), "", "status: {phase: Pending}", In),
        ];
        for (namespace, mode, labels, rest, expected) in table {
            let text = format!("metadata: {{name: p, uid: u, namespace: {namespace}, labels: {{{labels}}}}}\n{rest}");
            let found = decide(&pod(&text), Some(&labelled_namespace(*mode)), &rules());
            assert_eq!(found, *expected, "{text} in a namespace labelled {mode:?}");
        }
    }

    #[test]
    fn a_sidecar_keeps_a_pod_out() {
        let pod = pod("metadata: {name: p, namespace: shop, annotations: {sidecar.istio.io/status: '{}'}}");
        let found = decide(&pod, Some(&labelled_namespace(Some("ambient"))), &rules());
        assert_eq!(found, Decision::Out(Exclusion::Sidecar));
    }

    #[test]
    fn a_namespace_that_is_not_known_selects_nothing() {
        let pod = pod("metadata: {name: p, namespace: shop}");
        assert_eq!(decide(&pod, None, &rules()), Decision::Out(Exclusion::NotSelected));
    }

    #[test]
    fn the_facts_of_a_pod() {
        let pod = pod("
metadata: {name: a, namespace: shop, uid: u1, deletionTimestamp: '2026-01-01T00:00:00Z'}
spec: {serviceAccountName: cart, containers: []}
status: {podIP: 10.0.0.7, podIPs: [{ip: 10.0.0.7}, {ip: 'fd00::7'}, {ip: nonsense}]}");
        let facts = facts(&pod).unwrap();
        assert_eq!(facts.addresses, ["10.0.0.7".parse::<IpAddr>().unwrap(), "fd00::7".parse().unwrap()]);
        assert_eq!((facts.service_account.as_str(), facts.leaving), ("cart", true));
        assert_eq!(facts.cgroup_uid, "u1");
    }

    #[test]
    fn a_static_pod_is_found_by_its_hash_and_a_pod_without_uid_not_at_all() {
        let mirror = pod("metadata: {name: a, uid: u1, annotations: {kubernetes.io/config.hash: 0123abcd}}");
        let found = facts(&mirror).unwrap();
        assert_eq!((found.cgroup_uid.as_str(), found.namespace.as_str()), ("0123abcd", "default"));
        assert_eq!(found.service_account, "default");
        assert_eq!(facts(&pod("metadata: {name: a}")), None);
    }
}

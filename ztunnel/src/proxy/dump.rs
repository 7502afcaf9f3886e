//! The mesh and the certificates as the admin server's dump reads them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::identity::{CertificateInfo, State, Store, base64, rfc3339};
use crate::mesh::{Service, Snapshot, Workload};
use crate::policy::{self, PolicyAction, PolicyScope, Test};
use crate::telemetry::config_dump::{
    CertificateDump, CertificatesDump, Endpoint, Match, Model, Node, Policy, ServiceAccount, TextMatch, Unusable,
};

/// One state of the mesh.
pub struct MeshDump(pub Arc<Snapshot>);

impl Model for MeshDump {
    fn node(&self) -> Node {
        let unusable = self.0.unusable().map(|unusable| Unusable {
            name: unusable.name.to_string(),
            addresses: unusable.addresses.iter().map(|at| format!("{}/{}", at.network, at.address)).collect(),
            reason: unusable.reason.clone(),
        });
        Node {
            name: self.0.node().to_owned(),
            cluster: self.0.cluster().to_owned(),
            policies_complete: self.0.policies().is_complete(),
            unusable: unusable.collect(),
        }
    }

    fn workloads(&self) -> Box<dyn Iterator<Item = &Workload> + '_> {
        Box::new(self.0.workloads().map(|w| &**w))
    }

    fn services(&self) -> Box<dyn Iterator<Item = &Service> + '_> {
        Box::new(self.0.services().map(|s| &**s))
    }

    fn endpoints(&self, service: &Service) -> Vec<Endpoint> {
        self.0.members(service).iter().map(|w| endpoint(w, &service.key)).collect()
    }

    fn policies(&self) -> Box<dyn Iterator<Item = Policy> + '_> {
        Box::new(self.0.policies().iter().map(|p| policy(p)))
    }

    fn staged(&self) -> BTreeMap<String, Vec<Endpoint>> {
        let staged = self.0.staged();
        staged.map(|(key, members)| (key.to_string(), members.iter().map(|w| endpoint(w, key)).collect())).collect()
    }
}

fn endpoint(workload: &Workload, service: &str) -> Endpoint {
    let share = workload.services.iter().find(|s| *s.service == *service);
    Endpoint {
        workload_uid: workload.uid.to_string(),
        port: share.map(|s| s.ports.iter().copied().collect()).unwrap_or_default(),
        healthy: workload.healthy,
    }
}

fn policy(from: &policy::Policy) -> Policy {
    let rules = from.rules.iter().map(|r| r.clauses.iter().map(|c| c.matches.iter().map(one).collect()).collect());
    Policy {
        name: from.name().to_owned(),
        namespace: from.namespace().to_owned(),
        scope: match from.scope {
            PolicyScope::Global => "Global",
            PolicyScope::Namespace => "Namespace",
            PolicyScope::WorkloadSelector => "WorkloadSelector",
        },
        action: match from.action {
            PolicyAction::Allow => "Allow",
            PolicyAction::Audit => "Audit",
            // What is not understood denies.
            PolicyAction::Deny | PolicyAction::NotUnderstood(_) => "Deny",
        },
        dry_run: from.dry_run,
        not_understood: match &from.action {
            PolicyAction::NotUnderstood(reason) => Some(reason.to_string()),
            PolicyAction::Allow | PolicyAction::Deny | PolicyAction::Audit => None,
        },
        rules: rules.collect(),
    }
}

fn one(from: &policy::Match) -> Match {
    let mut to = Match { not_understood: from.not_understood, ..Match::default() };
    for condition in &from.conditions {
        let negative = condition.negative;
        match &condition.test {
            Test::DestinationPorts(ports) if negative => to.not_destination_ports = ports.to_vec(),
            Test::DestinationPorts(ports) => to.destination_ports = ports.to_vec(),
            Test::SourceIps(nets) if negative => to.not_source_ips = ranges(nets),
            Test::SourceIps(nets) => to.source_ips = ranges(nets),
            Test::DestinationIps(nets) if negative => to.not_destination_ips = ranges(nets),
            Test::DestinationIps(nets) => to.destination_ips = ranges(nets),
            Test::Namespaces(texts) if negative => to.not_namespaces = matches(texts),
            Test::Namespaces(texts) => to.namespaces = matches(texts),
            Test::ServiceAccounts(names) if negative => to.not_service_accounts = accounts(names),
            Test::ServiceAccounts(names) => to.service_accounts = accounts(names),
            Test::Principals(texts) if negative => to.not_principals = matches(texts),
            Test::Principals(texts) => to.principals = matches(texts),
        }
    }
    to
}

fn ranges(nets: &policy::Nets) -> Vec<String> {
    nets.as_slice().iter().map(ToString::to_string).collect()
}

fn matches(texts: &policy::Texts) -> Vec<TextMatch> {
    let exact = texts.exact().iter().map(|text| TextMatch::Exact(text.to_string()));
    let patterns = texts.patterns().iter().map(|pattern| match pattern {
        policy::Pattern::Prefix(text) => TextMatch::Prefix(text.to_string()),
        policy::Pattern::Suffix(text) => TextMatch::Suffix(text.to_string()),
        policy::Pattern::Presence => TextMatch::Presence(),
    });
    exact.chain(patterns).collect()
}

fn accounts(paths: &[Box<str>]) -> Vec<ServiceAccount> {
    let parts = |path: &str| path.strip_prefix("ns/")?.split_once("/sa/").map(|(a, b)| (a.to_owned(), b.to_owned()));
    let account = |(namespace, service_account)| ServiceAccount { namespace, service_account };
    paths.iter().filter_map(|path| parts(path)).map(account).collect()
}

/// What the certificate store holds, without any key.
pub fn certificates(store: &Store) -> Vec<CertificatesDump> {
    let states = store.states().into_iter();
    let dump = states.map(|entry| {
        let (state, chain, roots) = match &entry.state {
            State::Initializing => ("Initializing".to_owned(), Vec::new(), Vec::new()),
            State::Unavailable(reason) => (format!("Unavailable: {reason}"), Vec::new(), Vec::new()),
            State::Available(certificate) => {
                ("Available".to_owned(), certificate.chain_info(), certificate.roots_info())
            }
        };
        CertificatesDump {
            identity: entry.identity.to_string(),
            state,
            cert_chain: chain.iter().map(certificate).collect(),
            root_certs: roots.iter().map(certificate).collect(),
        }
    });
    dump.collect()
}

fn certificate(info: &CertificateInfo) -> CertificateDump {
    CertificateDump {
        pem: base64(info.pem.as_bytes()),
        serial_number: info.serial.clone(),
        valid_from: rfc3339(info.not_before),
        expiration_time: rfc3339(info.not_after),
    }
}

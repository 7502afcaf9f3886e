//! The mesh and the certificates as the admin server's dump reads them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::identity::{CertificateInfo, State, Store, base64, rfc3339};
use crate::mesh::{Service, Snapshot, Workload};
use crate::policy::{self, PolicyAction, PolicyScope};
use crate::telemetry::config_dump::{
    CertificateDump, CertificatesDump, Endpoint, Match, Model, Policy, ServiceAccount, TextMatch,
};

/// One state of the mesh.
pub struct MeshDump(pub Arc<Snapshot>);

impl Model for MeshDump {
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
        Box::new(self.0.policies().map(|p| policy(p)))
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
        name: from.name.to_string(),
        namespace: from.namespace.to_string(),
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
        rules: rules.collect(),
    }
}

fn one(from: &policy::Match) -> Match {
    let texts = |list: &[policy::TextMatch]| {
        let text = |t: &policy::TextMatch| match t {
            policy::TextMatch::Exact(text) => TextMatch::Exact(text.to_string()),
            policy::TextMatch::Prefix(text) => TextMatch::Prefix(text.to_string()),
            policy::TextMatch::Suffix(text) => TextMatch::Suffix(text.to_string()),
            policy::TextMatch::Presence => TextMatch::Presence(),
        };
        list.iter().map(text).collect::<Vec<_>>()
    };
    let nets = |list: &[ipnet::IpNet]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
    let accounts = |list: &[(Arc<str>, Arc<str>)]| {
        let account = |(namespace, name): &(Arc<str>, Arc<str>)| ServiceAccount {
            namespace: namespace.to_string(),
            service_account: name.to_string(),
        };
        list.iter().map(account).collect::<Vec<_>>()
    };
    Match {
        namespaces: texts(&from.namespaces),
        not_namespaces: texts(&from.not_namespaces),
        service_accounts: accounts(&from.service_accounts),
        not_service_accounts: accounts(&from.not_service_accounts),
        principals: texts(&from.principals),
        not_principals: texts(&from.not_principals),
        source_ips: nets(&from.source_ips),
        not_source_ips: nets(&from.not_source_ips),
        destination_ips: nets(&from.destination_ips),
        not_destination_ips: nets(&from.not_destination_ips),
        destination_ports: from.destination_ports.clone(),
        not_destination_ports: from.not_destination_ports.clone(),
    }
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

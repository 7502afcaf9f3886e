//! What the stream holds, and how a response changes it and the model.

use std::collections::{HashMap, HashSet};

use prost::Message;

use super::demand::{Answer, Demand};
use crate::mesh::{Mesh, Update, convert_service, convert_workload};
use crate::policy::convert_policy;
use crate::proto::discovery::{DeltaDiscoveryResponse, Resource};
use crate::proto::{security, workload};

pub const ADDRESS: &str = "type.googleapis.com/istio.workload.Address";
pub const AUTHORIZATION: &str = "type.googleapis.com/istio.security.Authorization";

/// Names and versions of what was taken, by type.
#[derive(Debug, Default)]
pub struct Held {
    addresses: HashMap<String, String>,
    authorizations: HashMap<String, String>,
    /// Held from an earlier stream and not mentioned yet by one that was not told what we hold.
    stale: HashSet<(Kind, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Address,
    Authorization,
}

impl Kind {
    pub fn of(type_url: &str) -> Option<Self> {
        match type_url {
            ADDRESS => Some(Self::Address),
            AUTHORIZATION => Some(Self::Authorization),
            _ => None,
        }
    }

    pub fn url(self) -> &'static str {
        match self {
            Self::Address => ADDRESS,
            Self::Authorization => AUTHORIZATION,
        }
    }
}

impl Held {
    fn of(&mut self, kind: Kind) -> &mut HashMap<String, String> {
        match kind {
            Kind::Address => &mut self.addresses,
            Kind::Authorization => &mut self.authorizations,
        }
    }

    /// What to tell a new stream. Nothing where the message would be too large for the server: then everything is
    /// sent again, and what is not mentioned is stale.
    pub fn versions(&mut self, kind: Kind, omit: bool) -> HashMap<String, String> {
        let held = self.of(kind);
        let size: usize = held.iter().map(|(name, version)| name.len() + version.len() + MAP_OVERHEAD).sum();
        if !omit && size < MAX_VERSIONS {
            return held.clone();
        }
        let names: Vec<String> = held.keys().cloned().collect();
        self.stale.extend(names.into_iter().map(|name| (kind, name)));
        HashMap::new()
    }

    /// Applies a response as one change. Gives what could not be taken.
    pub fn apply(
        &mut self,
        kind: Kind,
        response: DeltaDiscoveryResponse,
        mesh: &Mesh,
        demand: &Demand,
    ) -> Vec<(String, String)> {
        let mut refused = Vec::new();
        let mut answers = Vec::new();
        mesh.update(|update| {
            for resource in response.resources {
                self.stale.remove(&(kind, resource.name.clone()));
                match take(kind, &resource, update) {
                    Ok(()) => {
                        answers.extend(resource.aliases.iter().map(|alias| (alias.clone(), Answer::Known)));
                        answers.push((resource.name.clone(), Answer::Known));
                        self.of(kind).insert(resource.name, resource.version);
                    }
                    Err(reason) => refused.push((resource.name, reason)),
                }
            }
            for name in response.removed_resources {
                self.stale.remove(&(kind, name.clone()));
                self.of(kind).remove(&name);
                remove(kind, &name, update);
                answers.push((name, Answer::Absent));
            }
        });
        // Those who wait look into the model, so they are woken when it has the answer.
        for (name, answer) in answers {
            demand.answer(&name, answer);
        }
        refused
    }

    pub fn has_stale(&self) -> bool {
        !self.stale.is_empty()
    }

    /// Removes what the present stream has not mentioned.
    pub fn purge(&mut self, mesh: &Mesh) -> usize {
        let stale = std::mem::take(&mut self.stale);
        let count = stale.len();
        mesh.update(|update| {
            for (kind, name) in stale {
                self.of(kind).remove(&name);
                remove(kind, &name, update);
            }
        });
        count
    }
}

fn take(kind: Kind, resource: &Resource, update: &mut Update<'_>) -> Result<(), String> {
    let any = resource.resource.as_ref().ok_or("it has no content")?;
    if any.type_url != kind.url() {
        return Err(format!("its type is {:?}", any.type_url));
    }
    match kind {
        Kind::Address => {
            let address = workload::Address::decode(&*any.value).map_err(|e| e.to_string())?;
            match address.r#type {
                Some(workload::address::Type::Workload(wire)) => {
                    let workload = convert_workload(&wire, update.strings()).map_err(|e| e.to_string())?;
                    update.workload(workload);
                }
                Some(workload::address::Type::Service(wire)) => {
                    let service = convert_service(&wire, update.strings()).map_err(|e| e.to_string())?;
                    update.service(service);
                }
                None => return Err("it is neither a workload nor a service".into()),
            }
        }
        Kind::Authorization => {
            let wire = security::Authorization::decode(&*any.value).map_err(|e| e.to_string())?;
            update.policy(convert_policy(&wire).map_err(|e| e.to_string())?);
        }
    }
    Ok(())
}

fn remove(kind: Kind, name: &str, update: &mut Update<'_>) {
    match kind {
        Kind::Address => update.remove_address(name),
        Kind::Authorization => update.remove_policy(name),
    };
}

/// istiod takes messages of 4 MiB; bytes.
const MAX_VERSIONS: usize = 3 << 20;
/// Bytes of protobuf around a name and a version.
const MAP_OVERHEAD: usize = 8;

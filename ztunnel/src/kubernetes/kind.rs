//! The kinds that can be read, and where each is found.

use serde_json::Value;

use super::api::{Api, ApiError};
use crate::manifests::{EntryKind, ObjectKey, ObjectName, Objects, SecurityKind};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Namespace,
    Node,
    Pod,
    Service,
    EndpointSlice,
    Entry(EntryKind),
    Security(SecurityKind),
}

/// Where the objects of a kind are, on this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Of the list over all namespaces.
    pub path: String,
    /// As in the objects' `apiVersion`, behind the slash.
    pub version: String,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::Entry(kind) => kind.name(),
            Self::Security(kind) => kind.name(),
        }
    }

    pub fn key(self, namespace: &str, name: &str) -> ObjectKey {
        match self {
            Self::Namespace => ObjectKey::Namespace(name.into()),
            Self::Node => ObjectKey::Node(name.into()),
            Self::Pod => ObjectKey::Pod(ObjectName::new(namespace, name)),
            Self::Service => ObjectKey::Service(ObjectName::new(namespace, name)),
            Self::EndpointSlice => ObjectKey::EndpointSlice(ObjectName::new(namespace, name)),
            Self::Entry(kind) => kind.key(ObjectName::new(namespace, name)),
            Self::Security(kind) => kind.key(ObjectName::new(namespace, name)),
        }
    }

    /// The key of an object, as the API server gives it; nothing if it has no name.
    pub fn key_of(self, object: &Value) -> Option<ObjectKey> {
        let text = |name: &str| object["metadata"][name].as_str().unwrap_or_default();
        (!text("name").is_empty()).then(|| self.key(text("namespace"), text("name")))
    }

    /// Keys of all objects of the kind that are held.
    pub(super) fn keys(self, objects: &Objects) -> Vec<ObjectKey> {
        match self {
            Self::Namespace => objects.namespaces.keys().cloned().map(ObjectKey::Namespace).collect(),
            Self::Node => objects.nodes.keys().cloned().map(ObjectKey::Node).collect(),
            Self::Pod => objects.pods.keys().cloned().map(ObjectKey::Pod).collect(),
            Self::Service => objects.services.keys().cloned().map(ObjectKey::Service).collect(),
            Self::EndpointSlice => objects.endpoint_slices.keys().cloned().map(ObjectKey::EndpointSlice).collect(),
            Self::Entry(EntryKind::ServiceEntry) => {
                objects.service_entries.keys().cloned().map(ObjectKey::ServiceEntry).collect()
            }
            Self::Entry(EntryKind::WorkloadEntry) => {
                objects.workload_entries.keys().cloned().map(ObjectKey::WorkloadEntry).collect()
            }
            Self::Security(SecurityKind::PeerAuthentication) => {
                objects.peer_authentications.keys().cloned().map(ObjectKey::PeerAuthentication).collect()
            }
            Self::Security(SecurityKind::AuthorizationPolicy) => {
                objects.authorization_policies.keys().cloned().map(ObjectKey::AuthorizationPolicy).collect()
            }
        }
    }

    /// Group and plural, of a kind that a cluster need not have.
    pub(super) fn optional(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Entry(EntryKind::ServiceEntry) => Some((EntryKind::GROUP, "serviceentries")),
            Self::Entry(EntryKind::WorkloadEntry) => Some((EntryKind::GROUP, "workloadentries")),
            Self::Security(SecurityKind::PeerAuthentication) => Some((SecurityKind::GROUP, "peerauthentications")),
            Self::Security(SecurityKind::AuthorizationPolicy) => Some((SecurityKind::GROUP, "authorizationpolicies")),
            Self::Namespace | Self::Node | Self::Pod | Self::Service | Self::EndpointSlice => None,
        }
    }

    /// The versions of it that are read, the one that is preferred first.
    pub fn versions(self) -> &'static [&'static str] {
        match self {
            Self::Entry(_) => &EntryKind::VERSIONS,
            Self::Security(_) => &SecurityKind::VERSIONS,
            Self::Namespace | Self::Node | Self::Pod | Self::Service | Self::EndpointSlice => &["v1"],
        }
    }

    /// Where to find it; nothing if the cluster does not have the kind, which is only believed of a server that says
    /// that it has started: before that it may not have read what kinds there are.
    pub async fn place(self, api: &Api) -> Result<Option<Place>, ApiError> {
        let fixed = |path: &str| Ok(Some(Place { path: path.into(), version: "v1".into() }));
        match self {
            Self::Namespace => fixed("/api/v1/namespaces"),
            Self::Node => fixed("/api/v1/nodes"),
            Self::Pod => fixed("/api/v1/pods"),
            Self::Service => fixed("/api/v1/services"),
            Self::EndpointSlice => fixed("/apis/discovery.k8s.io/v1/endpointslices"),
            Self::Entry(_) | Self::Security(_) => {
                if let Some(place) = self.look(api).await? {
                    return Ok(Some(place));
                }
                api.text("/readyz").await?;
                self.look(api).await
            }
        }
    }

    /// The version that is read here, else any that there is: one that is not known must not be taken for none.
    async fn look(self, api: &Api) -> Result<Option<Place>, ApiError> {
        let Some((group, plural)) = self.optional() else { return Ok(None) };
        let Some(found) = api.find(&format!("/apis/{group}")).await? else { return Ok(None) };
        let versions = found["versions"].as_array().into_iter().flatten().filter_map(|v| v["version"].as_str());
        let mut versions: Vec<&str> = versions.collect();
        let rank = |v: &&str| self.versions().iter().position(|known| known == v).unwrap_or(usize::MAX);
        versions.sort_by_key(rank);
        for version in versions {
            let Some(list) = api.find(&format!("/apis/{group}/{version}")).await? else { continue };
            let is_it = |resource: &Value| resource["name"] == plural;
            if list["resources"].as_array().is_some_and(|resources| resources.iter().any(is_it)) {
                let path = format!("/apis/{group}/{version}/{plural}");
                return Ok(Some(Place { path, version: version.to_owned() }));
            }
        }
        Ok(None)
    }
}

impl Place {
    /// The path of one object. It must be of a kind whose objects are in namespaces.
    pub fn object(&self, namespace: &str, name: &str) -> String {
        let (above, plural) = self.path.rsplit_once('/').unwrap_or_default();
        format!("{above}/namespaces/{namespace}/{plural}/{name}")
    }
}

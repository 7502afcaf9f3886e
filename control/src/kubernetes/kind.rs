//! The kinds that are read: where each is found, and how much of it is asked for.

use ztunnel::manifests::{ObjectKey, ObjectName, Objects, SecurityKind};

use super::api::{Api, ApiError, EVENTS_METADATA, ITEMS_METADATA, JSON};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Namespace,
    Node,
    Pod,
    Service,
    EndpointSlice,
    Security(SecurityKind),
}

/// Where the objects of a kind are, on this server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Place {
    pub path: String,
    /// As in the objects' `apiVersion`, behind the slash.
    pub version: String,
}

impl Kind {
    pub const ALL: [Self; 7] = [
        Self::Namespace,
        Self::Node,
        Self::Pod,
        Self::Service,
        Self::EndpointSlice,
        Self::Security(SecurityKind::PeerAuthentication),
        Self::Security(SecurityKind::AuthorizationPolicy),
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Pod => "Pod",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
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
            Self::Security(kind) => kind.key(ObjectName::new(namespace, name)),
        }
    }

    /// Keys of all objects of the kind that are held.
    pub(super) fn keys(self, objects: &Objects) -> Vec<ObjectKey> {
        match self {
            Self::Namespace => objects.namespaces.keys().cloned().map(ObjectKey::Namespace).collect(),
            Self::Node => objects.nodes.keys().cloned().map(ObjectKey::Node).collect(),
            Self::Pod => objects.pods.keys().cloned().map(ObjectKey::Pod).collect(),
            Self::Service => objects.services.keys().cloned().map(ObjectKey::Service).collect(),
            Self::EndpointSlice => objects.endpoint_slices.keys().cloned().map(ObjectKey::EndpointSlice).collect(),
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
            Self::Security(SecurityKind::PeerAuthentication) => Some((SecurityKind::GROUP, "peerauthentications")),
            Self::Security(SecurityKind::AuthorizationPolicy) => Some((SecurityKind::GROUP, "authorizationpolicies")),
            Self::Namespace | Self::Node | Self::Pod | Self::Service | Self::EndpointSlice => None,
        }
    }

    /// Where to find it; nothing if the cluster does not have the kind, which is only believed of a server that says
    /// that it has started: before that it may not have read what kinds there are.
    pub(super) async fn place(self, api: &Api) -> Result<Option<Place>, ApiError> {
        let fixed = |path: &str| Ok(Some(Place { path: path.into(), version: "v1".into() }));
        match self {
            Self::Namespace => fixed("/api/v1/namespaces"),
            Self::Node => fixed("/api/v1/nodes"),
            Self::Pod => fixed("/api/v1/pods"),
            Self::Service => fixed("/api/v1/services"),
            Self::EndpointSlice => fixed("/apis/discovery.k8s.io/v1/endpointslices"),
            Self::Security(_) => {
                if let Some(place) = self.look(api).await? {
                    return Ok(Some(place));
                }
                api.text("/readyz").await?;
                self.look(api).await
            }
        }
    }

    /// Where the objects of a kind that the cluster need not have are, of a version that is read here: the path of its
    /// version and its plural.
    pub async fn folder(self, api: &Api) -> Result<Option<(String, &'static str)>, ApiError> {
        let (Some((group, plural)), Some(place)) = (self.optional(), self.place(api).await?) else { return Ok(None) };
        let known = SecurityKind::VERSIONS.contains(&place.version.as_str());
        Ok(known.then(|| (format!("/apis/{group}/{}", place.version), plural)))
    }

    /// The version that is read here, else any that there is: one that is not known must not be taken for none.
    async fn look(self, api: &Api) -> Result<Option<Place>, ApiError> {
        let Some((group, plural)) = self.optional() else { return Ok(None) };
        let Some(found) = api.find(&format!("/apis/{group}")).await? else { return Ok(None) };
        let versions = found["versions"].as_array().into_iter().flatten().filter_map(|v| v["version"].as_str());
        let mut versions: Vec<&str> = versions.collect();
        let rank = |v: &&str| SecurityKind::VERSIONS.iter().position(|known| known == v).unwrap_or(usize::MAX);
        versions.sort_by_key(rank);
        for version in versions {
            let Some(list) = api.find(&format!("/apis/{group}/{version}")).await? else { continue };
            let is_it = |resource: &serde_json::Value| resource["name"] == plural;
            if list["resources"].as_array().is_some_and(|resources| resources.iter().any(is_it)) {
                let path = format!("/apis/{group}/{version}/{plural}");
                return Ok(Some(Place { path, version: version.to_owned() }));
            }
        }
        Ok(None)
    }

    /// What of it is asked for at all. Encoded.
    pub(super) fn filter(self) -> &'static str {
        match self {
            // The mesh has forgotten them by then.
            Self::Pod => "&fieldSelector=status.phase%21%3DSucceeded%2Cstatus.phase%21%3DFailed",
            _ => "",
        }
    }

    /// For a list and for a watch.
    pub(super) fn accept(self) -> (&'static str, &'static str) {
        match self {
            Self::Namespace | Self::Node => (ITEMS_METADATA, EVENTS_METADATA),
            Self::Pod | Self::Service | Self::EndpointSlice | Self::Security(_) => (JSON, JSON),
        }
    }
}

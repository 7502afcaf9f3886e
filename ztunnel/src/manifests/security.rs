//! Policies of `security.istio.io`, as far as they can be read without knowing what they mean.
//!
//! Must never lose one: whoever wrote it relies on it, so what is a policy and cannot be read gives a stand-in that
//! says why.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::Value;

use super::fields::Fields;
use super::locate::FieldPath;
use super::objects::{ObjectKey, ObjectName};

/// A PeerAuthentication or an AuthorizationPolicy.
#[derive(Debug, Clone, PartialEq)]
pub struct SecurityPolicy {
    pub metadata: ObjectMeta,
    /// As it is written, null if it is missing; or why the document cannot be read at all.
    pub spec: Result<Value, Arc<str>>,
}

/// Which of the two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SecurityKind {
    PeerAuthentication,
    AuthorizationPolicy,
}

impl SecurityPolicy {
    /// What stands for a policy that cannot be read.
    pub fn stand_in(name: &ObjectName, reason: &str) -> Self {
        let metadata = ObjectMeta {
            name: Some(name.name.to_string()),
            namespace: Some(name.namespace.to_string()),
            ..Default::default()
        };
        Self { metadata, spec: Err(reason.into()) }
    }

    /// The object as its fields, `metadata` and `spec` among them; or what is wrong, and where.
    pub(super) fn from_fields(fields: Fields) -> Result<Self, (FieldPath, String)> {
        let Fields { mut value, twice } = fields;
        if let Some(path) = twice {
            let reason = format!("{path} is given twice");
            return Err((path, reason));
        }
        let unknown =
            value.as_object().into_iter().flat_map(|o| o.keys()).find(|name| !FIELDS.contains(&name.as_str()));
        if let Some(name) = unknown {
            let path = FieldPath::default().field(name);
            let reason = format!("{path} is not known, expected one of {}", FIELDS.join(", "));
            return Err((path, reason));
        }
        let mut field = |name: &str| value.get_mut(name).map(Value::take).unwrap_or_default();
        let metadata = serde_json::from_value(field("metadata"));
        let metadata = metadata.map_err(|e| (FieldPath::default().field("metadata"), format!("metadata: {e}")))?;
        Ok(Self { metadata, spec: Ok(field("spec")) })
    }
}

impl SecurityKind {
    pub const ALL: [Self; 2] = [Self::PeerAuthentication, Self::AuthorizationPolicy];
    /// The API group of both.
    pub const GROUP: &'static str = "security.istio.io";
    /// The versions of the group that are read; they have the same fields.
    pub const VERSIONS: [&'static str; 2] = ["v1", "v1beta1"];

    pub fn name(self) -> &'static str {
        match self {
            Self::PeerAuthentication => "PeerAuthentication",
            Self::AuthorizationPolicy => "AuthorizationPolicy",
        }
    }

    pub fn key(self, name: ObjectName) -> ObjectKey {
        match self {
            Self::PeerAuthentication => ObjectKey::PeerAuthentication(name),
            Self::AuthorizationPolicy => ObjectKey::AuthorizationPolicy(name),
        }
    }

    /// The kind of an object, if it is one of these.
    pub fn of(key: &ObjectKey) -> Option<(Self, &ObjectName)> {
        match key {
            ObjectKey::PeerAuthentication(name) => Some((Self::PeerAuthentication, name)),
            ObjectKey::AuthorizationPolicy(name) => Some((Self::AuthorizationPolicy, name)),
            ObjectKey::Namespace(_)
            | ObjectKey::Node(_)
            | ObjectKey::Pod(_)
            | ObjectKey::ServiceAccount(_)
            | ObjectKey::Service(_)
            | ObjectKey::EndpointSlice(_)
            | ObjectKey::ServiceEntry(_)
            | ObjectKey::WorkloadEntry(_)
            | ObjectKey::Status(_) => None,
        }
    }
}

/// The policies that a text seems to hold that is no readable manifest: one for each namespace that it speaks of. `file`
/// and `line` say where it is from, for policies whose name cannot be made out.
pub(super) fn stand_ins(text: &str, file: &str, line: usize) -> Vec<ObjectKey> {
    let kinds = values(text, "kind");
    let mut keys = Vec::new();
    for kind in SecurityKind::ALL {
        let count = kinds.iter().filter(|k| k.eq_ignore_ascii_case(kind.name())).count();
        if count == 0 {
            continue;
        }
        let mut namespaces: BTreeSet<&str> = values(text, "namespace").into_iter().filter(|n| is_name(n)).collect();
        if namespaces.is_empty() {
            namespaces.insert(super::DEFAULT_NAMESPACE);
        }
        let names = values(text, "name");
        let name = names.first().filter(|n| is_name(n) && count == 1 && kinds.len() == 1 && namespaces.len() == 1);
        let mut hash = DefaultHasher::new();
        (file, line).hash(&mut hash);
        // Not a name that an object can have, so that it takes nobody's place.
        let name = name.map_or_else(|| format!("unreadable_{:016x}", hash.finish()), |n| (*n).to_owned());
        keys.extend(namespaces.into_iter().map(|namespace| kind.key(ObjectName::new(namespace, &name))));
    }
    keys
}

/// Whether a kind that is not read here is none at all: of the group, and not one of those that waypoints read.
pub(super) fn is_slip(api_version: &str, kind: &str) -> bool {
    let kind = kind.strip_suffix("List").unwrap_or(kind);
    api_version.split('/').next() == Some(SecurityKind::GROUP) && kind != "RequestAuthentication"
}

/// Whether a text can be the name of an object.
pub(super) fn is_name(text: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    !text.is_empty() && text.len() <= 253 && text.bytes().all(allowed)
}

/// What follows a field's name, wherever it stands, in text that need not be well formed.
fn values<'a>(text: &'a str, field: &str) -> Vec<&'a str> {
    let blank = |c: char| c == ' ' || c == '\t';
    let quote = |c: char| c == '"' || c == '\'';
    let mut found = Vec::new();
    for (at, _) in text.match_indices(field) {
        let starts = text[..at].chars().next_back().is_none_or(|c| c.is_whitespace() || "{,\"'-".contains(c));
        let rest = text[at + field.len()..].trim_start_matches(quote).trim_start_matches(blank);
        let Some(rest) = rest.strip_prefix(':').filter(|_| starts) else { continue };
        let rest = rest.trim_start_matches(blank).trim_start_matches(quote);
        let end = rest.find(|c: char| c.is_whitespace() || ",}\"'".contains(c)).unwrap_or(rest.len());
        if end > 0 {
            found.push(&rest[..end]);
        }
    }
    found
}

/// What an object can have at its top.
const FIELDS: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];

//! From the text of a file to objects: splitting into documents, reading each, saying where one is wrong.
//!
//! Must never fail as a whole: a document that is wrong leaves the others of its file alone.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, LazyLock, Mutex};

use k8s_openapi::api::core::v1::{Pod, Service, ServiceAccount};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::DEFAULT_NAMESPACE;
use super::entries::{EntryKind, ServiceEntry, WorkloadEntry};
use super::fields::Fields;
use super::locate::{self, FieldPath};
use super::objects::{Object, ObjectKey, ObjectName};
use super::security::{self, SecurityKind, SecurityPolicy, is_name};
use super::status::{PodStatus, is_uid};

/// One document of a file, and what became of it.
#[derive(Debug, Clone)]
pub(super) struct Document {
    /// Where it starts, counted from 1.
    pub line: usize,
    fingerprint: (u64, usize),
    pub objects: Vec<(ObjectKey, Object)>,
    pub faults: Vec<Fault>,
}

/// Why a document, or an object in it, cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    pub line: Option<usize>,
    pub object: Option<ObjectKey>,
    pub reason: String,
    /// Policies that it seems to be about, as far as can be made out: something has to stand for them.
    pub policies: Vec<ObjectKey>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Yaml,
    Json,
    /// A status file of the pod with the uid that is the file's name.
    Status,
}

/// Reads a file's text. Documents whose text did not change are taken over from `older`, so that a small change in a
/// large file costs little and unchanged objects stay the same allocation.
pub(super) fn read(text: &str, format: Format, stem: &str, older: &[Document]) -> Vec<Document> {
    let known: HashMap<(u64, usize), &Document> =
        older.iter().filter(|d| d.faults.is_empty()).map(|d| (d.fingerprint, d)).collect();
    let parts = split_as(text, format);
    let mut documents = Vec::with_capacity(parts.len());
    let mut faulty = 0;
    for (line, part) in parts {
        if part.lines().all(says_nothing) {
            continue;
        }
        let fingerprint = (HASHER.hash_one(part), part.len());
        if let Some(&same) = known.get(&fingerprint) {
            documents.push(Document { line, ..same.clone() });
            continue;
        }
        let mut document = Document { line, fingerprint, objects: Vec::new(), faults: Vec::new() };
        match format {
            Format::Status => read_status(part, stem, &mut document),
            Format::Yaml | Format::Json => {
                let exact = faulty < MAX_EXACT;
                read_manifest(&Text { text: part, line, format, exact }, &mut document);
                faulty += usize::from(!document.faults.is_empty());
                for fault in &mut document.faults {
                    fault.policies = match &fault.object {
                        Some(key) => SecurityKind::of(key).map(|_| key.clone()).into_iter().collect(),
                        None => security::stand_ins(part, stem, line),
                    };
                }
            }
        }
        documents.push(document);
    }
    documents
}

/// A document's text with what is needed to name a line of the file.
struct Text<'a> {
    text: &'a str,
    line: usize,
    format: Format,
    /// Name the lines of the file also inside of messages, which costs another reading.
    exact: bool,
}

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "apiVersion")]
    api_version: Option<String>,
    kind: Option<String>,
    #[serde(default)]
    metadata: Option<HeaderMeta>,
}

#[derive(Deserialize, Default)]
struct HeaderMeta {
    name: Option<String>,
    namespace: Option<String>,
}

#[derive(Deserialize)]
struct List {
    #[serde(default)]
    items: Vec<Fields>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Namespace,
    Node,
    Pod,
    ServiceAccount,
    Service,
    EndpointSlice,
    Entry(EntryKind),
    Security(SecurityKind),
}

impl Text<'_> {
    /// The line of the file at which a part of the document stands.
    fn line_of(&self, part: &FieldPath) -> usize {
        let json = self.format == Format::Json;
        locate::line(self.text, json, part).map_or(self.line, |line| self.line + line - 1)
    }

    fn parse<T: DeserializeOwned>(&self) -> Result<T, Fault> {
        if self.format == Format::Json {
            return serde_json::from_str(self.text).map_err(|e| fault(Some(e.line().max(1)), e.to_string()));
        }
        serde_yaml_ng::from_str(self.text).map_err(|first| {
            if !self.exact {
                let line = first.location().map_or(self.line, |l| self.line + l.line() - 1);
                return fault(Some(line), format!("{first} (lines counted from line {})", self.line));
            }
            // The message may name several lines; read again from where they are those of the file.
            let padded = "\n".repeat(self.line - 1) + self.text;
            let error = serde_yaml_ng::from_str::<T>(&padded).err().unwrap_or(first);
            fault(Some(error.location().map_or(self.line, |l| l.line())), error.to_string())
        })
    }
}

fn read_status(text: &str, stem: &str, document: &mut Document) {
    let text = Text { text, line: 1, format: Format::Yaml, exact: true };
    let status = match text.parse::<PodStatus>() {
        Ok(status) => status,
        Err(fault) => {
            let object = is_uid(stem).then(|| ObjectKey::Status(stem.into()));
            return document.faults.push(Fault { object, ..fault });
        }
    };
    if status.pod.uid != stem || !is_uid(stem) {
        let reason = format!("pod.uid is {:?}, but the file is named for {stem:?}", status.pod.uid);
        return document.faults.push(fault(Some(1), reason));
    }
    document.objects.push((ObjectKey::Status(stem.into()), Object::Status(Arc::new(status))));
}

fn read_manifest(text: &Text<'_>, document: &mut Document) {
    let header: Header = match text.parse() {
        Ok(header) => header,
        Err(fault) => return document.faults.push(fault),
    };
    if is_list(&header) {
        match text.parse::<List>() {
            Ok(list) => list.items.into_iter().enumerate().for_each(|item| read_item(item, &header, text, document)),
            Err(fault) => document.faults.push(fault),
        }
        return;
    }
    let known = match recognise(&header, text.line) {
        Ok(Some(known)) => known,
        Ok(None) => return,
        Err(fault) => return document.faults.push(fault),
    };
    let typed = match known.0 {
        Kind::Namespace => text.parse().map(|o| Object::Namespace(Arc::new(o))),
        Kind::Node => text.parse().map(|o| Object::Node(Arc::new(o))),
        Kind::Pod => text.parse().map(|o| Object::Pod(Arc::new(pod(o)))),
        Kind::ServiceAccount => text.parse().map(|o| Object::ServiceAccount(Arc::new(service_account(o)))),
        Kind::Service => text.parse().map(|o| Object::Service(Arc::new(service(o)))),
        Kind::EndpointSlice => text.parse().map(|o| Object::EndpointSlice(Arc::new(endpoint_slice(o)))),
        Kind::Entry(EntryKind::ServiceEntry) => text.parse().map(|o| Object::ServiceEntry(Arc::new(service_entry(o)))),
        Kind::Entry(EntryKind::WorkloadEntry) => {
            text.parse().map(|o| Object::WorkloadEntry(Arc::new(workload_entry(o))))
        }
        Kind::Security(kind) => text.parse::<Fields>().and_then(|fields| {
            let policy = SecurityPolicy::from_fields(fields);
            let policy = policy.map_err(|(path, reason)| fault(Some(text.line_of(&path)), reason))?;
            Ok(Object::policy(kind, security_policy(policy)))
        }),
    };
    match typed {
        Ok(object) => document.objects.push((known.1, object)),
        Err(fault) => document.faults.push(Fault { object: Some(known.1), ..fault }),
    }
}

fn read_item((index, item): (usize, Fields), list: &Header, text: &Text<'_>, document: &mut Document) {
    let header = match header_of_item(&item.value, list) {
        Ok(header) => header,
        Err(e) => return document.faults.push(fault(Some(text.line), format!("an item of the list: {e}"))),
    };
    let known = match recognise(&header, text.line) {
        Ok(Some(known)) => known,
        Ok(None) => return,
        Err(fault) => return document.faults.push(fault),
    };
    let typed = match known.0 {
        Kind::Namespace => serde_json::from_value(item.value).map(|o| Object::Namespace(Arc::new(o))),
        Kind::Node => serde_json::from_value(item.value).map(|o| Object::Node(Arc::new(o))),
        Kind::Pod => serde_json::from_value(item.value).map(|o| Object::Pod(Arc::new(pod(o)))),
        Kind::ServiceAccount => {
            serde_json::from_value(item.value).map(|o| Object::ServiceAccount(Arc::new(service_account(o))))
        }
        Kind::Service => serde_json::from_value(item.value).map(|o| Object::Service(Arc::new(service(o)))),
        Kind::EndpointSlice => {
            serde_json::from_value(item.value).map(|o| Object::EndpointSlice(Arc::new(endpoint_slice(o))))
        }
        Kind::Entry(EntryKind::ServiceEntry) => {
            serde_json::from_value(item.value).map(|o| Object::ServiceEntry(Arc::new(service_entry(o))))
        }
        Kind::Entry(EntryKind::WorkloadEntry) => {
            serde_json::from_value(item.value).map(|o| Object::WorkloadEntry(Arc::new(workload_entry(o))))
        }
        Kind::Security(kind) => match SecurityPolicy::from_fields(item) {
            Ok(policy) => Ok(Object::policy(kind, security_policy(policy))),
            Err((path, reason)) => {
                let line = text.line_of(&FieldPath::default().field("items").item(index).then(&path));
                return document.faults.push(Fault { object: Some(known.1), ..fault(Some(line), reason) });
            }
        },
    };
    match typed {
        Ok(object) => document.objects.push((known.1, object)),
        Err(e) => {
            let reason = format!("an item of the list: {e}");
            document.faults.push(Fault { object: Some(known.1), ..fault(Some(text.line), reason) });
        }
    }
}

fn header_of_item(item: &serde_json::Value, list: &Header) -> Result<Header, serde_json::Error> {
    let mut header = Header::deserialize(item)?;
    // The items of a typed list, as the API server gives it, do not repeat what they are.
    if header.kind.is_none() {
        header.kind = list.kind.as_deref().and_then(|k| k.strip_suffix("List")).map(str::to_owned);
        header.api_version = header.api_version.or_else(|| list.api_version.clone());
    }
    Ok(header)
}

/// What the document says it is; `None` if the mesh does not read that kind.
fn recognise(header: &Header, line: usize) -> Result<Option<(Kind, ObjectKey)>, Fault> {
    let missing = |what: &str| fault(Some(line), format!("{what} is missing"));
    let api_version = header.api_version.as_deref().ok_or_else(|| missing("apiVersion"))?;
    let kind_name = header.kind.as_deref().ok_or_else(|| missing("kind"))?;
    let kind = match (api_version, kind_name) {
        ("v1", "Namespace") => Kind::Namespace,
        ("v1", "Node") => Kind::Node,
        ("v1", "Pod") => Kind::Pod,
        ("v1", "ServiceAccount") => Kind::ServiceAccount,
        ("v1", "Service") => Kind::Service,
        ("discovery.k8s.io/v1", "EndpointSlice") => Kind::EndpointSlice,
        _ => match istio_kind(api_version, kind_name) {
            Some(kind) => kind,
            None if security::is_slip(api_version, kind_name) => {
                let known = SecurityKind::ALL.map(SecurityKind::name).join(" and ");
                let reason =
                    format!("no kind of {} is called {kind_name:?}; {known} are read here", SecurityKind::GROUP);
                return Err(fault(Some(line), reason));
            }
            None => {
                tell_once(api_version, kind_name);
                return Ok(None);
            }
        },
    };
    let empty = HeaderMeta::default();
    let meta = header.metadata.as_ref().unwrap_or(&empty);
    let name = meta.name.as_deref().ok_or_else(|| missing("metadata.name"))?;
    let namespace = meta.namespace.as_deref().filter(|n| !n.is_empty()).unwrap_or(DEFAULT_NAMESPACE);
    for (what, text) in [("metadata.name", name), ("metadata.namespace", namespace)] {
        if !is_name(text) {
            let shown: String = text.chars().take(64).collect();
            let reason = format!("{what} {shown:?} is not a name: expected lower case letters, digits, '-' and '.'");
            return Err(fault(Some(line), reason));
        }
    }
    let key = match kind {
        Kind::Namespace => ObjectKey::Namespace(name.into()),
        Kind::Node => ObjectKey::Node(name.into()),
        Kind::Pod => ObjectKey::Pod(ObjectName::new(namespace, name)),
        Kind::ServiceAccount => ObjectKey::ServiceAccount(ObjectName::new(namespace, name)),
        Kind::Service => ObjectKey::Service(ObjectName::new(namespace, name)),
        Kind::EndpointSlice => ObjectKey::EndpointSlice(ObjectName::new(namespace, name)),
        Kind::Entry(kind) => kind.key(ObjectName::new(namespace, name)),
        Kind::Security(kind) => kind.key(ObjectName::new(namespace, name)),
    };
    let known: &[&str] = match kind {
        Kind::Entry(_) => &EntryKind::VERSIONS,
        Kind::Security(_) => &SecurityKind::VERSIONS,
        Kind::Namespace | Kind::Node | Kind::Pod | Kind::ServiceAccount | Kind::Service | Kind::EndpointSlice => &[],
    };
    if let Some((_, version)) = api_version.split_once('/').filter(|(_, v)| !known.is_empty() && !known.contains(v)) {
        let reason = format!("{kind_name} of version {version:?} is not known, only {known:?}");
        return Err(Fault { object: Some(key), ..fault(Some(line), reason) });
    }
    Ok(Some((kind, key)))
}

/// A kind of Istio of whatever version: a policy of one that is not known must not be taken for none.
fn istio_kind(api_version: &str, kind: &str) -> Option<Kind> {
    match api_version.split('/').next()? {
        SecurityKind::GROUP => SecurityKind::ALL.into_iter().find(|k| k.name() == kind).map(Kind::Security),
        EntryKind::GROUP => EntryKind::ALL.into_iter().find(|k| k.name() == kind).map(Kind::Entry),
        _ => None,
    }
}

fn is_list(header: &Header) -> bool {
    let lists = [
        "List",
        "NamespaceList",
        "NodeList",
        "PodList",
        "ServiceAccountList",
        "ServiceList",
        "EndpointSliceList",
        "PeerAuthenticationList",
        "AuthorizationPolicyList",
        "ServiceEntryList",
        "WorkloadEntryList",
    ];
    header.kind.as_deref().is_some_and(|kind| lists.contains(&kind))
        && header.api_version.as_deref().is_some_and(|version| {
            matches!(version, "v1" | "discovery.k8s.io/v1")
                || matches!(version.split('/').next(), Some(SecurityKind::GROUP | EntryKind::GROUP))
        })
}

fn security_policy(mut object: SecurityPolicy) -> SecurityPolicy {
    default_namespace(&mut object.metadata);
    object
}

fn pod(mut object: Pod) -> Pod {
    default_namespace(&mut object.metadata);
    object
}

fn service_account(mut object: ServiceAccount) -> ServiceAccount {
    default_namespace(&mut object.metadata);
    object
}

fn service(mut object: Service) -> Service {
    default_namespace(&mut object.metadata);
    object
}

fn endpoint_slice(mut object: EndpointSlice) -> EndpointSlice {
    default_namespace(&mut object.metadata);
    object
}

fn service_entry(mut object: ServiceEntry) -> ServiceEntry {
    default_namespace(&mut object.metadata);
    object
}

fn workload_entry(mut object: WorkloadEntry) -> WorkloadEntry {
    default_namespace(&mut object.metadata);
    object
}

fn default_namespace(meta: &mut ObjectMeta) {
    if meta.namespace.as_deref().is_none_or(str::is_empty) {
        meta.namespace = Some(DEFAULT_NAMESPACE.to_owned());
    }
}

/// The documents of a file; each with the line it starts at.
pub(super) fn split_as(text: &str, format: Format) -> Vec<(usize, &str)> {
    match format {
        Format::Yaml => split(text),
        Format::Json | Format::Status => vec![(1, text)],
    }
}

/// The way from a document to a part of an object that it holds, be it itself or an item of its list.
pub(super) fn way_to(text: &str, json: bool, key: &ObjectKey, part: &FieldPath) -> FieldPath {
    let format = if json { Format::Json } else { Format::Yaml };
    let text = Text { text, line: 1, format, exact: false };
    let item = || {
        let list = text.parse::<Header>().ok().filter(is_list)?;
        let items = text.parse::<List>().ok()?.items;
        items.into_iter().position(|item| {
            let known = header_of_item(&item.value, &list).ok().and_then(|header| recognise(&header, 1).ok()?);
            known.is_some_and(|(_, found)| found == *key)
        })
    };
    item().map_or_else(|| part.clone(), |index| FieldPath::default().field("items").item(index).then(part))
}

/// Splits at document markers; each part with the line it starts at.
fn split(text: &str) -> Vec<(usize, &str)> {
    let mut parts = Vec::new();
    let (mut start, mut start_line, mut offset) = (0, 1, 0);
    for (index, line) in text.split_inclusive('\n').enumerate() {
        // A marker is one even inside a block of text, so that no parser is needed to find it.
        if is_marker(line) && offset > start {
            parts.push((start_line, &text[start..offset]));
            (start, start_line) = (offset, index + 1);
        }
        offset += line.len();
    }
    parts.push((start_line, &text[start..]));
    parts
}

/// Blank, a comment, a directive, or a marker that no content follows.
fn says_nothing(line: &str) -> bool {
    let content = if is_marker(line) { line[3..].trim() } else { line.trim() };
    content.is_empty() || line.starts_with('%') || content.starts_with('#')
}

fn is_marker(line: &str) -> bool {
    line.strip_prefix("---").or_else(|| line.strip_prefix("...")).is_some_and(|rest| rest.trim().is_empty())
        || line.strip_prefix("---").is_some_and(|rest| rest.starts_with([' ', '\t']))
}

fn tell_once(api_version: &str, kind: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A poisoned lock only means that a thread died while it held this list; the list is still right.
    let mut told = TOLD.lock().unwrap_or_else(|e| e.into_inner());
    if told.len() < 1000 && told.insert(format!("{api_version} {kind}")) {
        tracing::debug!(api_version, kind, "manifests of this kind are ignored");
    }
}

/// Faulty documents of a file that are read twice for the sake of their messages.
const MAX_EXACT: usize = 32;

fn fault(line: Option<usize>, reason: String) -> Fault {
    Fault { line, object: None, reason, policies: Vec::new() }
}

static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

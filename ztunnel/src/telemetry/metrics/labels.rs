//! The label set of the TCP metrics: read from a flow without copying, kept by a series, written in Istio's order.
//!
//! Must never take a principal from anything but a verified identity.

use std::fmt::{self, Debug};
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use prometheus_client::encoding::{EncodeLabel, EncodeLabelSet, LabelSetEncoder};

use crate::identity::Identity;
use crate::mesh::{Service, Workload};
use crate::telemetry::flow::{Direction, Flow, Peer, PeerClaims, ResponseFlag, Security};

/// The labels of a flow, borrowed.
#[derive(Clone, Copy)]
pub struct View<'a> {
    pub reporter: Direction,
    pub flag: ResponseFlag,
    pub security: Security,
    pub source: PeerView<'a>,
    pub destination: PeerView<'a>,
    pub service: Option<&'a Service>,
    /// All names are replaced by `overflow`.
    pub overflow: bool,
}

/// One end; `None`: not known.
#[derive(Clone, Copy, Default)]
pub struct PeerView<'a> {
    workload: Option<&'a Arc<str>>,
    canonical_service: Option<&'a Arc<str>>,
    canonical_revision: Option<&'a Arc<str>>,
    namespace: Option<&'a Arc<str>>,
    cluster: Option<&'a Arc<str>>,
    region: Option<&'a Arc<str>>,
    zone: Option<&'a Arc<str>>,
    principal: Option<&'a Identity>,
}

impl<'a> View<'a> {
    pub fn of(flow: &'a Flow, flag: ResponseFlag) -> Self {
        Self {
            reporter: flow.direction,
            flag,
            security: flow.security(),
            source: PeerView::of(&flow.source),
            destination: PeerView::of(&flow.destination),
            service: flow.service.as_deref(),
            overflow: false,
        }
    }

    /// The same with all names dropped.
    pub(super) fn without_names(self) -> Self {
        let (source, destination) = (PeerView::default(), PeerView::default());
        View { source, destination, service: None, overflow: true, ..self }
    }

    /// Feeds what tells most label sets apart.
    pub(super) fn hash_into(&self, hasher: &mut impl Hasher) {
        self.reporter.hash(hasher);
        self.flag.hash(hasher);
        for peer in [&self.source, &self.destination] {
            peer.workload.hash(hasher);
            peer.namespace.hash(hasher);
            peer.canonical_revision.hash(hasher);
            peer.principal.map(|id| (id.namespace(), id.service_account())).hash(hasher);
        }
        self.service.map(|service| &service.key).hash(hasher);
    }
}

impl<'a> PeerView<'a> {
    pub fn of(peer: &'a Peer) -> Self {
        let mut view = match (&peer.workload, &peer.claims) {
            (Some(workload), _) => Self::of_workload(workload),
            (None, Some(claims)) => Self::of_claims(claims),
            (None, None) => Self::default(),
        };
        view.principal = peer.identity.as_ref();
        view
    }

    fn of_workload(workload: &'a Workload) -> Self {
        Self {
            workload: known(&workload.common.workload_name),
            canonical_service: known(&workload.common.canonical_name),
            canonical_revision: known(&workload.common.canonical_revision),
            namespace: known(&workload.common.namespace),
            cluster: known(&workload.place.cluster),
            region: known(&workload.place.locality.region),
            zone: known(&workload.place.locality.zone),
            principal: None,
        }
    }

    fn of_claims(claims: &'a PeerClaims) -> Self {
        Self {
            workload: known(&claims.workload),
            canonical_service: known(&claims.canonical_service),
            canonical_revision: known(&claims.canonical_revision),
            namespace: known(&claims.namespace),
            cluster: known(&claims.cluster),
            region: known(&claims.region),
            zone: known(&claims.zone),
            principal: None,
        }
    }
}

fn known(text: &Arc<str>) -> Option<&Arc<str>> {
    (!text.is_empty()).then_some(text)
}

/// The labels of a series, owned. The texts are shared with the mesh's model.
pub(super) struct TcpLabels {
    reporter: Direction,
    flag: ResponseFlag,
    security: Security,
    source: PeerLabels,
    destination: PeerLabels,
    service: Option<ServiceLabels>,
    overflow: bool,
}

struct PeerLabels {
    workload: Option<Arc<str>>,
    canonical_service: Option<Arc<str>>,
    canonical_revision: Option<Arc<str>>,
    namespace: Option<Arc<str>>,
    cluster: Option<Arc<str>>,
    region: Option<Arc<str>>,
    zone: Option<Arc<str>>,
    principal: Option<Identity>,
}

struct ServiceLabels {
    hostname: Arc<str>,
    namespace: Arc<str>,
    name: Arc<str>,
}

impl TcpLabels {
    pub(super) fn is_overflow(&self) -> bool {
        self.overflow
    }

    pub(super) fn matches(&self, view: &View<'_>) -> bool {
        self.reporter == view.reporter
            && self.flag == view.flag
            && self.security == view.security
            && self.overflow == view.overflow
            && self.source.matches(&view.source)
            && self.destination.matches(&view.destination)
            && match (&self.service, view.service) {
                (Some(own), Some(other)) => {
                    own.hostname == other.hostname && own.namespace == other.namespace && own.name == other.name
                }
                (None, None) => true,
                _ => false,
            }
    }
}

impl From<&View<'_>> for TcpLabels {
    fn from(view: &View<'_>) -> Self {
        let service = |s: &Service| ServiceLabels {
            hostname: s.hostname.clone(),
            namespace: s.namespace.clone(),
            name: s.name.clone(),
        };
        Self {
            reporter: view.reporter,
            flag: view.flag,
            security: view.security,
            source: (&view.source).into(),
            destination: (&view.destination).into(),
            service: view.service.map(service),
            overflow: view.overflow,
        }
    }
}

impl PeerLabels {
    fn matches(&self, view: &PeerView<'_>) -> bool {
        self.workload.as_ref() == view.workload
            && self.canonical_service.as_ref() == view.canonical_service
            && self.canonical_revision.as_ref() == view.canonical_revision
            && self.namespace.as_ref() == view.namespace
            && self.cluster.as_ref() == view.cluster
            && self.region.as_ref() == view.region
            && self.zone.as_ref() == view.zone
            && self.principal.as_ref() == view.principal
    }
}

impl From<&PeerView<'_>> for PeerLabels {
    fn from(view: &PeerView<'_>) -> Self {
        Self {
            workload: view.workload.cloned(),
            canonical_service: view.canonical_service.cloned(),
            canonical_revision: view.canonical_revision.cloned(),
            namespace: view.namespace.cloned(),
            cluster: view.cluster.cloned(),
            region: view.region.cloned(),
            zone: view.zone.cloned(),
            principal: view.principal.cloned(),
        }
    }
}

impl EncodeLabelSet for TcpLabels {
    /// The order is Istio's.
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        let unknown = if self.overflow { "overflow" } else { "unknown" };
        let mut label = |key: &str, value: Option<&str>| (key, value.unwrap_or(unknown)).encode(encoder.encode_label());
        fn text(value: &Option<Arc<str>>) -> Option<&str> {
            value.as_deref()
        }
        let principal = |peer: &PeerLabels| peer.principal.as_ref().map(ToString::to_string);
        let (source, destination) = (&self.source, &self.destination);
        label("reporter", Some(self.reporter.reporter()))?;
        label("source_workload", text(&source.workload))?;
        label("source_canonical_service", text(&source.canonical_service))?;
        label("source_canonical_revision", text(&source.canonical_revision))?;
        label("source_workload_namespace", text(&source.namespace))?;
        label("source_principal", principal(source).as_deref())?;
        label("source_app", text(&source.canonical_service))?;
        label("source_version", text(&source.canonical_revision))?;
        label("source_cluster", text(&source.cluster))?;
        let service = self.service.as_ref();
        label("destination_service", service.map(|s| &*s.hostname))?;
        label("destination_service_namespace", service.map(|s| &*s.namespace))?;
        label("destination_service_name", service.map(|s| &*s.name))?;
        label("destination_workload", text(&destination.workload))?;
        label("destination_canonical_service", text(&destination.canonical_service))?;
        label("destination_canonical_revision", text(&destination.canonical_revision))?;
        label("destination_workload_namespace", text(&destination.namespace))?;
        label("destination_principal", principal(destination).as_deref())?;
        label("destination_app", text(&destination.canonical_service))?;
        label("destination_version", text(&destination.canonical_revision))?;
        label("destination_cluster", text(&destination.cluster))?;
        label("request_protocol", Some("tcp"))?;
        label("response_flags", Some(self.flag.as_str()))?;
        label("connection_security_policy", Some(self.security.as_str()))?;
        label("source_region", text(&source.region))?;
        label("source_zone", text(&source.zone))?;
        label("destination_region", text(&destination.region))?;
        label("destination_zone", text(&destination.zone))
    }
}

impl Debug for TcpLabels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TcpLabels")
    }
}

//! Services: virtual addresses that only the mesh gives a meaning to, and their endpoint slices.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::manifests::{Manifests, file_name};
use super::namespace::set;
use super::pod::PodState;
use super::{Cluster, Namespace, split};

/// Where a service port leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Number(u16),
    /// The name of a container port.
    Name(String),
}

impl From<u16> for Target {
    fn from(port: u16) -> Self {
        Self::Number(port)
    }
}

impl From<&str> for Target {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

/// A service to be made.
#[derive(Debug)]
pub struct ServiceSpec {
    cluster: Arc<Cluster>,
    namespace: String,
    name: String,
    selector: BTreeMap<String, String>,
    ports: Vec<(u16, Target)>,
    v4: bool,
    v6: bool,
    headless: bool,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    extra: Value,
}

impl ServiceSpec {
    #[track_caller]
    pub(crate) fn new(cluster: Arc<Cluster>, path: &str) -> Self {
        let (namespace, name) = split(path);
        Self {
            cluster,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            selector: BTreeMap::from([("app".to_owned(), name.to_owned())]),
            ports: Vec::new(),
            v4: true,
            v6: true,
            headless: false,
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            extra: json!({}),
        }
    }

    /// Default: the pods with the label `app` of the service's name.
    pub fn select(mut self, key: &str, value: &str) -> Self {
        self.selector = BTreeMap::from([(key.to_owned(), value.to_owned())]);
        self
    }

    /// A service port and where it leads to: a number or the name of a container port.
    pub fn port(mut self, port: u16, target: impl Into<Target>) -> Self {
        self.ports.push((port, target.into()));
        self
    }

    /// Default: both families.
    pub fn v4_only(mut self) -> Self {
        self.v6 = false;
        self
    }

    pub fn v6_only(mut self) -> Self {
        self.v4 = false;
        self
    }

    pub fn headless(mut self) -> Self {
        self.headless = true;
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// Any further field of the object's `spec`, e.g. `internalTrafficPolicy`.
    pub fn field(mut self, name: &str, value: Value) -> Self {
        self.extra[name] = value;
        self
    }

    pub fn create(self) -> Service {
        Namespace::new(self.cluster.clone(), &self.namespace);
        let number = self.cluster.number();
        let (high, low) = ((number >> 8) as u8, number as u8);
        let mut vips: Vec<IpAddr> = Vec::new();
        if self.v4 && !self.headless {
            vips.push(Ipv4Addr::new(10, 96, 1 + high, low).into());
        }
        if self.v6 && !self.headless {
            vips.push(Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, number as u16).into());
        }
        let families = [(self.v4, "IPv4"), (self.v6, "IPv6")];
        let state = Arc::new(ServiceState {
            uid: self.cluster.name.uid(number),
            namespace: self.namespace,
            name: self.name,
            selector: self.selector,
            ports: self.ports,
            vips,
            families: families.into_iter().filter(|(on, _)| *on).map(|(_, name)| name).collect(),
            extra: self.extra,
            labels: Mutex::new(self.labels),
            annotations: self.annotations,
        });
        self.cluster.services.lock().unwrap().push(state.clone());
        let service = Service { cluster: self.cluster, state };
        service.write();
        service
    }
}

/// A service; it stays when the handle is dropped.
#[derive(Debug, Clone)]
pub struct Service {
    cluster: Arc<Cluster>,
    state: Arc<ServiceState>,
}

#[derive(Debug)]
pub(crate) struct ServiceState {
    uid: String,
    pub(crate) namespace: String,
    name: String,
    selector: BTreeMap<String, String>,
    ports: Vec<(u16, Target)>,
    vips: Vec<IpAddr>,
    families: Vec<&'static str>,
    extra: Value,
    labels: Mutex<BTreeMap<String, String>>,
    annotations: BTreeMap<String, String>,
}

impl Service {
    pub fn namespace(&self) -> &str {
        &self.state.namespace
    }

    pub fn name(&self) -> &str {
        &self.state.name
    }

    /// `name.namespace.svc.cluster.local`
    pub fn hostname(&self) -> String {
        format!("{}.{}.svc.cluster.local", self.state.name, self.state.namespace)
    }

    /// Its IPv4 address, or its IPv6 address if it has no other, with a port.
    #[track_caller]
    pub fn at(&self, port: u16) -> SocketAddr {
        let vip = self.state.vips.first().unwrap_or_else(|| panic!("service {} has no address", self.state.name));
        (*vip, port).into()
    }

    /// Its IPv6 address with a port.
    #[track_caller]
    pub fn at6(&self, port: u16) -> SocketAddr {
        let vip = self.state.vips.iter().find(|ip| ip.is_ipv6());
        (*vip.unwrap_or_else(|| panic!("service {} has no IPv6 address", self.state.name)), port).into()
    }

    pub fn set_label(&self, key: &str, value: Option<&str>) {
        set(&mut self.state.labels.lock().unwrap(), key, value);
        self.write();
    }

    /// Removes the service and its endpoint slices.
    pub fn delete(&self) {
        self.cluster.services.lock().unwrap().retain(|service| service.uid != self.state.uid);
        self.cluster.manifests.remove(&file_name("Service", &self.state.namespace, &self.state.name));
        for family in &self.state.families {
            let name = self.state.slice_name(family);
            self.cluster.manifests.remove(&file_name("EndpointSlice", &self.state.namespace, &name));
        }
    }

    fn write(&self) {
        self.cluster.manifests.put(self.state.object());
        self.cluster.publish_endpoints(&self.state.namespace);
    }
}

impl ServiceState {
    /// One slice per family, as the controller makes them.
    pub(crate) fn write_endpoints(&self, manifests: &Manifests, pods: &[Arc<PodState>]) {
        let pods: Vec<_> = pods.iter().filter(|pod| pod.matches(&self.namespace, &self.selector)).collect();
        for family in &self.families {
            let of_family = |ip: &&IpAddr| ip.is_ipv6() == (*family == "IPv6");
            let endpoints: Vec<Value> = pods
                .iter()
                .filter_map(|pod| {
                    let ip = pod.ips.iter().find(of_family)?;
                    let (ready, terminating) = pod.condition();
                    Some(json!({
                        "addresses": [ip],
                        "conditions": {
                            "ready": ready && !terminating,
                            "serving": ready,
                            "terminating": terminating,
                        },
                        "nodeName": pod.node(),
                        "targetRef": { "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid },
                    }))
                })
                .collect();
            let ports: Vec<Value> = self
                .ports
                .iter()
                .filter_map(|(port, target)| {
                    let number = match target {
                        Target::Number(number) => *number,
                        Target::Name(name) => pods.iter().flat_map(|p| &p.ports).find(|(n, _)| n == name)?.1,
                    };
                    Some(json!({ "name": port_name(*port), "port": number, "protocol": "TCP" }))
                })
                .collect();
            manifests.put(json!({
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {
                    "name": self.slice_name(family),
                    "namespace": self.namespace,
                    "uid": format!("{}-{family}", self.uid),
                    "labels": {
                        "kubernetes.io/service-name": self.name,
                        "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                    },
                },
                "addressType": family,
                "endpoints": endpoints,
                "ports": ports,
            }));
        }
    }

    fn slice_name(&self, family: &str) -> String {
        format!("{}-{}", self.name, family.to_lowercase())
    }

    fn object(&self) -> Value {
        let ports: Vec<Value> = self
            .ports
            .iter()
            .map(|(port, target)| {
                let target = match target {
                    Target::Number(number) => json!(number),
                    Target::Name(name) => json!(name),
                };
                json!({ "name": port_name(*port), "port": port, "targetPort": target, "protocol": "TCP" })
            })
            .collect();
        let mut spec = json!({
            "type": "ClusterIP",
            "selector": self.selector,
            "ports": ports,
            "ipFamilies": self.families,
            "ipFamilyPolicy": if self.families.len() == 2 { "PreferDualStack" } else { "SingleStack" },
        });
        if self.vips.is_empty() {
            spec["clusterIP"] = json!("None");
            spec["clusterIPs"] = json!(["None"]);
        } else {
            spec["clusterIP"] = json!(self.vips[0]);
            spec["clusterIPs"] = json!(self.vips);
        }
        if let (Some(spec), Some(extra)) = (spec.as_object_mut(), self.extra.as_object()) {
            spec.extend(extra.clone());
        }
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "uid": self.uid,
                "labels": *self.labels.lock().unwrap(),
                "annotations": self.annotations,
            },
            "spec": spec,
        })
    }
}

fn port_name(port: u16) -> String {
    format!("port-{port}")
}

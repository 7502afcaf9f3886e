//! Pods: a netns with a veth to the node, cgroups as kubelet names them, a sandbox process, an app, and the object.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::manifests::{file_name, now};
use super::namespace::set;
use super::node::{pod_ip4, pod_ip6};
use super::{Cluster, Namespace, Node, split};
use crate::cgroup::Cgroup;
use crate::netns::{self, Netns};
use crate::place::{Place, binary};

/// Which addresses a pod has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Families {
    #[default]
    Both,
    /// Only IPv4 addresses; IPv6 exists on `lo`.
    V4Only,
    /// No IPv6 at all, as where the kernel has it switched off.
    V4Kernel,
    V6Only,
}

/// Quality-of-service class: it decides the pod's place in the cgroup tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Qos {
    Guaranteed,
    #[default]
    Burstable,
    BestEffort,
}

/// A pod to be started.
#[derive(Debug)]
pub struct PodSpec<'a> {
    cluster: Arc<Cluster>,
    node: &'a Node,
    namespace: String,
    name: String,
    uid: String,
    service_account: String,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    ports: Vec<(String, u16)>,
    families: Families,
    qos: Qos,
    host_network: bool,
    number: Option<u16>,
}

impl<'a> PodSpec<'a> {
    #[track_caller]
    pub(crate) fn new(cluster: Arc<Cluster>, node: &'a Node, path: &str) -> Self {
        let (namespace, name) = split(path);
        let uid = cluster.name.uid(cluster.number());
        Self {
            node,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid,
            service_account: "default".to_owned(),
            labels: BTreeMap::from([("app".to_owned(), name.to_owned())]),
            annotations: BTreeMap::new(),
            ports: Vec::new(),
            families: Families::default(),
            qos: Qos::default(),
            host_network: false,
            number: None,
            cluster,
        }
    }

    /// Default: the first node.
    pub fn on(mut self, node: &'a Node) -> Self {
        self.node = node;
        self
    }

    /// Default: `default`. It is made if it is not there.
    pub fn service_account(mut self, account: &str) -> Self {
        self.service_account = account.to_owned();
        self
    }

    /// Every pod has the label `app` with its name, unless set otherwise.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations.insert(key.to_owned(), value.to_owned());
        self
    }

    /// The uid that an API server has given it. Default: one of the testbed's own.
    pub fn uid(mut self, uid: &str) -> Self {
        self.uid = uid.to_owned();
        self
    }

    /// A named container port.
    pub fn port(mut self, name: &str, port: u16) -> Self {
        self.ports.push((name.to_owned(), port));
        self
    }

    pub fn families(mut self, families: Families) -> Self {
        self.families = families;
        self
    }

    pub fn qos(mut self, qos: Qos) -> Self {
        self.qos = qos;
        self
    }

    /// Lives in the node's netns, with the node's addresses.
    pub fn host_network(mut self) -> Self {
        self.host_network = true;
        self
    }

    /// Takes the addresses that a pod of the same node had, which must be gone.
    pub fn addresses_of(mut self, gone: &Pod) -> Self {
        self.number = Some(gone.state.number);
        self
    }

    /// Makes the sandbox, starts the pod's processes and writes the object.
    pub fn start(self) -> Pod {
        let pod = self.make();
        pod.run_processes();
        pod.announce();
        pod
    }

    /// Makes the sandbox and writes the object, as they are when a runtime calls its CNI plugins: no process runs, and
    /// the object tells no address. [`Pod::run_processes`] and [`Pod::announce`] do the
    /// rest.
    pub fn sandbox(self) -> Pod {
        let pod = self.make();
        pod.write();
        pod
    }

    /// As [`PodSpec::sandbox`], of which the API server does not tell yet: [`Pod::put_object`].
    pub fn without_object(self) -> Pod {
        self.make()
    }

    fn make(self) -> Pod {
        Namespace::new(self.cluster.clone(), &self.namespace).service_account(&self.service_account);
        let number = self.number.unwrap_or_else(|| self.node.next_pod_number());
        let title = format!("{}.{}", self.namespace, self.name);
        let sandbox = (!self.host_network).then(|| make_sandbox(&self, &title, number));
        let ips = self.ips(number);
        let cgroup = pod_cgroup(self.node, self.qos, &self.uid);
        let netns = sandbox.clone().unwrap_or_else(|| self.node.netns().clone());
        let place = Place::new(&title, netns, cgroup.child(&container_id(&self.uid, 1)));
        let state = Arc::new(PodState {
            place,
            cgroup,
            sandbox,
            veth: format!("v{number}"),
            node: self.node.name().to_owned(),
            node_netns: self.node.netns().clone(),
            node_ip: self.node.ip4(),
            number,
            pause: Mutex::new(None),
            namespace: self.namespace,
            name: self.name,
            uid: self.uid,
            ports: self.ports,
            ips,
            host_network: self.host_network,
            service_account: self.service_account,
            object: Mutex::new(Changing {
                labels: self.labels,
                annotations: self.annotations,
                ready: false,
                phase: "Pending",
                deleted_at: None,
                containers_started: 1,
            }),
            qos: self.qos,
            created: now(),
        });
        self.cluster.pods.lock().unwrap().push(state.clone());
        Pod { cluster: self.cluster, state }
    }

    fn ips(&self, number: u16) -> Vec<IpAddr> {
        if self.host_network {
            return vec![self.node.ip4(), self.node.ip6()];
        }
        let index = self.node.index();
        let (v4, v6) = (pod_ip4(index, number).into(), pod_ip6(index, number).into());
        match self.families {
            Families::Both => vec![v4, v6],
            Families::V4Only | Families::V4Kernel => vec![v4],
            Families::V6Only => vec![v6],
        }
    }
}

/// A running pod; it goes on when the handle is dropped. As a [`Place`] it is that of its app container.
#[derive(Debug, Clone)]
pub struct Pod {
    cluster: Arc<Cluster>,
    state: Arc<PodState>,
}

#[derive(Debug)]
pub(crate) struct PodState {
    place: Place,
    cgroup: Cgroup,
    /// `None` for a pod in the node's netns.
    sandbox: Option<Arc<Netns>>,
    veth: String,
    node: String,
    node_netns: Arc<Netns>,
    node_ip: IpAddr,
    number: u16,
    pause: Mutex<Option<Child>>,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) uid: String,
    pub(crate) ports: Vec<(String, u16)>,
    pub(crate) ips: Vec<IpAddr>,
    host_network: bool,
    service_account: String,
    object: Mutex<Changing>,
    qos: Qos,
    created: String,
}

/// The parts of the object that change during a pod's life.
#[derive(Debug)]
struct Changing {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    ready: bool,
    phase: &'static str,
    deleted_at: Option<String>,
    containers_started: u32,
}

impl Deref for Pod {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.state.place
    }
}

impl Pod {
    pub fn namespace(&self) -> &str {
        &self.state.namespace
    }

    /// Its name without the namespace.
    pub fn pod_name(&self) -> &str {
        &self.state.name
    }

    pub fn uid(&self) -> &str {
        &self.state.uid
    }

    /// Name of its node.
    pub fn node(&self) -> &str {
        &self.state.node
    }

    /// Its identity in the mesh.
    pub fn identity(&self) -> String {
        format!("spiffe://cluster.local/ns/{}/sa/{}", self.state.namespace, self.state.service_account)
    }

    /// Its IPv4 address; the IPv6 address of a pod that has no other.
    pub fn ip(&self) -> IpAddr {
        self.state.ips[0]
    }

    pub fn addresses(&self) -> &[IpAddr] {
        &self.state.ips
    }

    #[track_caller]
    pub fn ip6(&self) -> IpAddr {
        *self.state.ips.iter().find(|ip| ip.is_ipv6()).unwrap_or_else(|| panic!("{} has no IPv6 address", self.name()))
    }

    /// Its IPv4 address with a port.
    pub fn at(&self, port: u16) -> SocketAddr {
        (self.ip(), port).into()
    }

    /// Its IPv6 address with a port.
    #[track_caller]
    pub fn at6(&self, port: u16) -> SocketAddr {
        (self.ip6(), port).into()
    }

    /// Name of the host's end of its veth, in the node's netns.
    pub fn veth(&self) -> &str {
        &self.state.veth
    }

    /// The cgroup of the whole pod, with its containers below it.
    pub fn pod_cgroup(&self) -> &Cgroup {
        &self.state.cgroup
    }

    /// Starts the processes of a pod that is only a sandbox; the object does not tell of them yet.
    pub fn run_processes(&self) {
        let place = self.state.place.again(self.state.cgroup.child(&container_id(&self.state.uid, 0)));
        let mut command = place.command(binary("testapp"));
        let pause = command.arg("pause").stdin(Stdio::piped()).spawn();
        let pause = pause.unwrap_or_else(|e| panic!("pod {}: start its sandbox process: {e}", self.name()));
        *self.state.pause.lock().unwrap() = Some(pause);
        // As in a real pod, the app is there before anybody asks for it.
        self.state.place.app();
    }

    /// The object as it is now, for one that nobody has heard of yet.
    pub fn put_object(&self) {
        self.write();
    }

    /// The number that a runtime gives to its sandbox.
    pub fn sandbox_id(&self) -> String {
        container_id(&self.state.uid, 0)
    }

    /// What the kubelet then writes into the object: the pod's addresses, and that it runs.
    pub fn announce(&self) {
        {
            let mut object = self.state.object.lock().unwrap();
            (object.ready, object.phase) = (true, "Running");
        }
        self.write();
    }

    /// Process id of the sandbox process.
    pub fn pause_pid(&self) -> u32 {
        self.state.pause.lock().unwrap().as_ref().expect("the pod runs").id()
    }

    pub fn set_label(&self, key: &str, value: Option<&str>) {
        set(&mut self.state.object.lock().unwrap().labels, key, value);
        self.write();
    }

    pub fn set_annotation(&self, key: &str, value: Option<&str>) {
        set(&mut self.state.object.lock().unwrap().annotations, key, value);
        self.write();
    }

    pub fn set_ready(&self, ready: bool) {
        self.state.object.lock().unwrap().ready = ready;
        self.write();
    }

    /// `Running`, `Succeeded` or `Failed`.
    pub fn set_phase(&self, phase: &'static str) {
        self.state.object.lock().unwrap().phase = phase;
        self.write();
    }

    /// The app container crashes and is started again in a new cgroup, as kubelet does it. The sandbox stays.
    pub fn restart_container(&self) {
        let number = {
            let mut object = self.state.object.lock().unwrap();
            object.containers_started += 1;
            object.containers_started
        };
        let old = self.cgroup();
        self.state.place.end_app(Some(self.state.cgroup.child(&container_id(&self.state.uid, number))));
        old.kill();
        old.remove();
        self.state.place.app();
        self.write();
    }

    /// The API server's part of a deletion: the object carries a deletion time and is not ready any more.
    /// Everything of the pod goes on running.
    pub fn begin_deletion(&self) {
        {
            let mut object = self.state.object.lock().unwrap();
            object.deleted_at = Some(now());
            object.ready = false;
        }
        self.write();
    }

    /// The kubelet's part of a deletion: processes, netns and cgroups go. The object stays.
    pub fn destroy_sandbox(&self) {
        self.state.place.end_app(None);
        if let Some(mut pause) = self.state.pause.lock().unwrap().take() {
            let _ = pause.kill();
            let _ = pause.wait();
        }
        self.state.cgroup.kill();
        self.destroy_netns();
        self.state.cgroup.remove();
    }

    /// The CNI plugin's part of a deletion alone: the link and the name of the netns go.
    pub fn destroy_netns(&self) {
        if let Some(sandbox) = &self.state.sandbox {
            let _ = self.state.node_netns.try_ip(&format!("link del {}", self.state.veth));
            netns::remove(sandbox.name());
        }
    }

    /// Deletes the pod in the order of a real cluster: object marked, sandbox gone, object gone.
    pub fn delete(&self) {
        self.begin_deletion();
        self.destroy_sandbox();
        self.remove_object();
    }

    /// The object is gone from the API server.
    pub fn remove_object(&self) {
        self.cluster.pods.lock().unwrap().retain(|pod| pod.uid != self.state.uid);
        self.cluster.manifests.remove(&file_name("Pod", &self.state.namespace, &self.state.name));
        self.cluster.publish_endpoints(&self.state.namespace);
    }

    /// Writes the object and what the endpoint slice controller makes of it.
    fn write(&self) {
        self.cluster.manifests.put(self.state.object());
        self.cluster.publish_endpoints(&self.state.namespace);
    }
}

impl PodState {
    /// Is it an endpoint of a service with this selector?
    pub(crate) fn matches(&self, namespace: &str, selector: &BTreeMap<String, String>) -> bool {
        let object = self.object.lock().unwrap();
        self.namespace == namespace && selector.iter().all(|(key, value)| object.labels.get(key) == Some(value))
    }

    /// Ready, and being deleted.
    pub(crate) fn condition(&self) -> (bool, bool) {
        let object = self.object.lock().unwrap();
        (object.ready && object.phase == "Running", object.deleted_at.is_some())
    }

    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    fn object(&self) -> Value {
        let object = self.object.lock().unwrap();
        let ready = if object.ready { "True" } else { "False" };
        let ports: Vec<Value> = self
            .ports
            .iter()
            .map(|(name, port)| json!({ "name": name, "containerPort": port, "protocol": "TCP" }))
            .collect();
        let mut value = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "uid": self.uid,
                "labels": object.labels,
                "annotations": object.annotations,
                "creationTimestamp": self.created,
            },
            "spec": {
                "nodeName": self.node,
                "serviceAccountName": self.service_account,
                "hostNetwork": self.host_network,
                "restartPolicy": "Always",
                "containers": [{ "name": "app", "image": "testapp", "ports": ports }],
            },
            "status": {
                "phase": object.phase,
                "hostIP": self.node_ip,
                "startTime": self.created,
                "qosClass": match self.qos {
                    Qos::Guaranteed => "Guaranteed",
                    Qos::Burstable => "Burstable",
                    Qos::BestEffort => "BestEffort",
                },
                "conditions": [
                    { "type": "PodScheduled", "status": "True" },
                    { "type": "Initialized", "status": "True" },
                    { "type": "ContainersReady", "status": ready },
                    { "type": "Ready", "status": ready },
                ],
                "containerStatuses": [{
                    "name": "app",
                    "image": "testapp",
                    "imageID": "testapp",
                    "ready": object.ready,
                    "restartCount": object.containers_started - 1,
                    "containerID": format!("containerd://{}", container_id(&self.uid, object.containers_started)),
                }],
            },
        });
        if object.phase != "Pending" {
            value["status"]["podIP"] = json!(self.ips[0]);
            value["status"]["podIPs"] = self.ips.iter().map(|ip| json!({ "ip": ip })).collect();
        }
        if let Some(time) = &object.deleted_at {
            value["metadata"]["deletionTimestamp"] = json!(time);
            value["metadata"]["deletionGracePeriodSeconds"] = json!(30);
        }
        value
    }
}

impl Drop for PodState {
    fn drop(&mut self) {
        if let Some(mut pause) = self.pause.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner()).take() {
            let _ = pause.kill();
            let _ = pause.wait();
        }
    }
}

/// The pod's cgroup, as kubelet's cgroupfs driver names it.
pub(crate) fn pod_cgroup(node: &Node, qos: Qos, uid: &str) -> Cgroup {
    let kubepods = node.cgroup_root().child("kubepods");
    let class = match qos {
        Qos::Guaranteed => kubepods,
        Qos::Burstable => kubepods.child("burstable"),
        Qos::BestEffort => kubepods.child("besteffort"),
    };
    class.child(&format!("pod{uid}"))
}

/// 64 hexadecimal digits, as containerd's ids.
pub(crate) fn container_id(uid: &str, number: u32) -> String {
    let digits = uid.replace('-', "");
    format!("{digits}{number:032x}")
}

fn make_sandbox(spec: &PodSpec<'_>, title: &str, number: u16) -> Arc<Netns> {
    let off = [("net/ipv6/conf/all/disable_ipv6", "1"), ("net/ipv6/conf/default/disable_ipv6", "1")];
    let sysctls: &[(&str, &str)] = if spec.families == Families::V4Kernel { &off } else { &[] };
    // Unlike its name, a pod's uid is never used twice, so an old netns of that name cannot be in the way.
    let netns = Netns::create(&spec.cluster.name.netns(&format!("{title}.{}", &spec.uid[9..13])), sysctls);
    let index = spec.node.index();
    let (node, own) = (spec.node.netns(), netns.name());
    node.ip(&format!(
        "link add v{number} type veth peer name eth0 netns {own}\n\
         link set v{number} master cni0\n\
         link set v{number} up\n"
    ));
    // Made from the address, as CNI plugins do: neighbours then need not learn a successor's anew.
    let mut lines = format!("link set eth0 address 0a:58:0a:f4:{index:02x}:{number:02x} up\n");
    if spec.families != Families::V6Only {
        lines += &format!("addr add {}/24 dev eth0\nroute add default via 10.244.{index}.1\n", pod_ip4(index, number));
    }
    if matches!(spec.families, Families::Both | Families::V6Only) {
        lines += &format!(
            "addr add {}/64 dev eth0 nodad\nroute add ::/0 via fd00:10:244:{index}::1\n",
            pod_ip6(index, number)
        );
    }
    netns.ip(&lines);
    Arc::new(netns)
}

//! A node: a netns on the testbed's bridge with a bridge for its pods, and a cgroup with kubelet's tree below it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::json;

use crate::cgroup::Cgroup;
use crate::name::TestbedName;
use crate::netns::Netns;
use crate::place::Place;

/// A node. As a [`Place`] it is that of a host process outside kubepods, such as the kubelet.
#[derive(Debug)]
pub struct Node {
    index: usize,
    host: Place,
    cgroup: Cgroup,
    next_pod: AtomicU16,
}

impl Node {
    pub(crate) fn create(testbed: &TestbedName, lan: &Netns, root: &Cgroup, index: usize) -> Self {
        let name = format!("node{index}");
        let sysctls = [("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")];
        let netns = Arc::new(Netns::create(&testbed.netns(&name), &sysctls));
        attach_to_lan(lan, &netns, &format!("n{index}"), node_ip4(index), node_ip6(index));
        // A fixed MAC address: a bridge otherwise takes its ports' lowest, which changes when pods come and go.
        netns.ip(&format!(
            "link add cni0 address 0a:58:0a:f4:{index:02x}:01 type bridge mcast_snooping 0\n\
             addr add 10.244.{index}.1/24 dev cni0\n\
             addr add fd00:10:244:{index}::1/64 dev cni0 nodad\n\
             link set cni0 up\n"
        ));
        let cgroup = root.child(&name);
        let host = Place::new(&name, netns, cgroup.child("system.slice").child("host"));
        Self { index, host, cgroup, next_pod: AtomicU16::new(10) }
    }

    pub fn index(&self) -> usize {
        self.index
    }

    /// The node's own IPv4 address on the network between nodes.
    pub fn ip4(&self) -> IpAddr {
        node_ip4(self.index).into()
    }

    pub fn ip6(&self) -> IpAddr {
        node_ip6(self.index).into()
    }

    /// The node's directory in the cgroup v2 hierarchy, with `kubepods` below it.
    pub fn cgroup_root(&self) -> &Cgroup {
        &self.cgroup
    }

    pub(crate) fn next_pod_number(&self) -> u16 {
        self.next_pod.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn object(&self) -> serde_json::Value {
        let index = self.index;
        json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {
                "name": self.name(),
                "uid": self.name(),
                "labels": {
                    "kubernetes.io/hostname": self.name(),
                    "topology.kubernetes.io/region": "region1",
                    "topology.kubernetes.io/zone": format!("zone{index}"),
                },
            },
            "spec": {
                "podCIDR": format!("10.244.{index}.0/24"),
                "podCIDRs": [format!("10.244.{index}.0/24"), format!("fd00:10:244:{index}::/64")],
            },
            "status": {
                "addresses": [
                    { "type": "InternalIP", "address": self.ip4() },
                    { "type": "InternalIP", "address": self.ip6() },
                    { "type": "Hostname", "address": self.name() },
                ],
                "conditions": [{ "type": "Ready", "status": "True" }],
            },
        })
    }
}

impl Deref for Node {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.host
    }
}

pub(crate) fn node_ip4(index: usize) -> Ipv4Addr {
    Ipv4Addr::new(172, 18, 0, 10 + index as u8)
}

pub(crate) fn node_ip6(index: usize) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x172, 0x18, 0, 0, 0, 0, 0x10 + index as u16)
}

pub(crate) fn pod_ip4(node: usize, number: u16) -> Ipv4Addr {
    Ipv4Addr::new(10, 244, node as u8, number as u8)
}

pub(crate) fn pod_ip6(node: usize, number: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 0x10, 0x244, node as u16, 0, 0, 0, number)
}

/// Connects a netns to the network between the nodes, as `eth0`.
pub(crate) fn attach_to_lan(lan: &Netns, netns: &Netns, port: &str, ip4: Ipv4Addr, ip6: Ipv6Addr) {
    lan.ip(&format!(
        "link add {port} type veth peer name eth0 netns {}\n\
         link set {port} master lan\n\
         link set {port} up\n",
        netns.name()
    ));
    netns.ip(&format!(
        "addr add {ip4}/16 dev eth0\n\
         addr add {ip6}/64 dev eth0 nodad\n\
         link set eth0 up\n"
    ));
}

/// Routes to the pods of all nodes but its own.
pub(crate) fn route_to_pods(netns: &Netns, own: Option<usize>, nodes: usize) {
    let mut lines = String::new();
    for node in (0..nodes).filter(|node| Some(*node) != own) {
        lines += &format!(
            "route add 10.244.{node}.0/24 via {}\nroute add fd00:10:244:{node}::/64 via {}\n",
            node_ip4(node),
            node_ip6(node)
        );
    }
    if !lines.is_empty() {
        netns.ip(&lines);
    }
}

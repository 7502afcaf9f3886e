//! What one pod may take of the proxy: connections, tunnels and handshakes at a time. A flood of one pod, or to one,
//! is that pod's trouble and leaves descriptors and memory for the others.

use std::cell::Cell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::overload::{Limit, Overload};
use super::state::{Pod, Shared};
use crate::telemetry::flow::Failure;

/// What a pod has taken.
#[derive(Debug, Default)]
pub struct Share {
    connections: AtomicU32,
    tunnels: AtomicU32,
    handshakes: Mutex<Handshakes>,
    buffered: AtomicU64,
}

#[derive(Debug, Default)]
struct Handshakes {
    all: u32,
    by_client: HashMap<IpAddr, u32>,
}

/// A connection of a pod that is being set up or relayed.
pub struct OpenConnection(Arc<Pod>);

/// Bytes of one connection that its pod's app has not taken yet, as a part of the pod's.
pub struct Buffered {
    pod: Arc<Pod>,
    bytes: Cell<u64>,
}

/// A tunnel to a pod.
pub struct OpenTunnel(Arc<Pod>);

/// The handshake of a tunnel to a pod.
pub struct Handshake {
    pod: Arc<Pod>,
    client: IpAddr,
}

impl Pod {
    /// Connections that are being set up or relayed.
    pub fn open(&self) -> u32 {
        self.share.connections.load(Ordering::Relaxed)
    }

    /// Bytes that the pod's apps have not taken yet.
    pub fn buffered(&self) -> u64 {
        self.share.buffered.load(Ordering::Relaxed)
    }

    /// Counts a connection, if the pod may have one more and there is memory for it.
    pub fn connection(self: &Arc<Self>, shared: &Shared) -> Result<OpenConnection, Failure> {
        shared.overload.check_memory()?;
        let (waiting, most) = (self.buffered(), shared.config.limits.pod_max_buffer);
        if waiting > most {
            let text = format!(
                "{waiting} bytes wait for apps of the pod that do not take them, the most by --pod-max-buffer is {most}"
            );
            return Err(shared.overload.refuse(Limit::PodBuffer, text));
        }
        let most = shared.config.limits.pod_max_connections;
        take(&self.share.connections, most).ok_or_else(|| {
            too_many(&shared.overload, Limit::PodConnections, most, "connections", "--pod-max-connections")
        })?;
        Ok(OpenConnection(self.clone()))
    }

    /// Counts a tunnel, if there may be one more to the pod and there is memory for it.
    pub fn tunnel(self: &Arc<Self>, shared: &Shared) -> Result<OpenTunnel, Failure> {
        shared.overload.check_memory()?;
        let most = shared.config.limits.pod_max_connections;
        take(&self.share.tunnels, most)
            .ok_or_else(|| too_many(&shared.overload, Limit::PodTunnels, most, "tunnels", "--pod-max-connections"))?;
        Ok(OpenTunnel(self.clone()))
    }

    /// Counts a handshake, if there may be one more: anybody who reaches the pod can begin one.
    pub fn handshake(self: &Arc<Self>, client: IpAddr, shared: &Shared) -> Result<Handshake, Failure> {
        let most = shared.config.limits.pod_max_handshakes;
        let too_many = |limit, most, what, setting| too_many(&shared.overload, limit, most, what, setting);
        let mut handshakes = self.share.handshakes.lock().unwrap_or_else(PoisonError::into_inner);
        if handshakes.all >= most {
            return Err(too_many(Limit::PodHandshakes, most, "handshakes of tunnels", "--pod-max-handshakes"));
        }
        let share = (most / CLIENTS).max(1);
        let of_client = handshakes.by_client.entry(client).or_default();
        if *of_client >= share {
            let (what, setting) = ("handshakes with this client", "a sixteenth of --pod-max-handshakes");
            return Err(too_many(Limit::ClientHandshakes, share, what, setting));
        }
        *of_client += 1;
        handshakes.all += 1;
        Ok(Handshake { pod: self.clone(), client })
    }
}

fn take(count: &AtomicU32, most: u32) -> Option<()> {
    if count.fetch_add(1, Ordering::Relaxed) < most {
        return Some(());
    }
    count.fetch_sub(1, Ordering::Relaxed);
    None
}

fn too_many(overload: &Overload, limit: Limit, most: u32, what: &str, setting: &str) -> Failure {
    overload.refuse(limit, format!("the pod has {most} {what} already, the most by {setting}"))
}

impl OpenConnection {
    /// For counting what its app has not taken yet.
    pub fn buffered(&self) -> Buffered {
        Buffered { pod: self.0.clone(), bytes: Cell::new(0) }
    }
}

impl Buffered {
    pub fn waits(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() + bytes as u64);
        self.pod.share.buffered.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Of what has waited.
    pub fn taken(&self, bytes: usize) {
        self.bytes.set(self.bytes.get() - bytes as u64);
        self.pod.share.buffered.fetch_sub(bytes as u64, Ordering::Relaxed);
    }
}

impl Drop for Buffered {
    fn drop(&mut self) {
        self.pod.share.buffered.fetch_sub(self.bytes.get(), Ordering::Relaxed);
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.share.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for OpenTunnel {
    fn drop(&mut self) {
        self.0.share.tunnels.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let mut handshakes = self.pod.share.handshakes.lock().unwrap_or_else(PoisonError::into_inner);
        handshakes.all -= 1;
        if let Some(count) = handshakes.by_client.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                handshakes.by_client.remove(&self.client);
            }
        }
    }
}

/// One client may have this part of a pod's handshakes.
const CLIENTS: u32 = 16;

//! What one pod may take of the proxy: connections, tunnels and handshakes at a time. A flood of one pod, or to one,
//! is that pod's trouble and leaves descriptors and memory for the others.

use std::collections::HashMap;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::config::Limits;
use super::state::Pod;
use crate::telemetry::flow::{Failure, ResponseFlag};

/// What a pod has taken.
#[derive(Debug, Default)]
pub struct Share {
    connections: AtomicU32,
    tunnels: AtomicU32,
    handshakes: Mutex<Handshakes>,
}

#[derive(Debug, Default)]
struct Handshakes {
    all: u32,
    by_client: HashMap<IpAddr, u32>,
}

/// A connection of a pod that is being set up or relayed.
pub struct OpenConnection(Arc<Pod>);

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

    /// Counts a connection, if the pod may have one more.
    pub fn connection(self: &Arc<Self>, limits: &Limits) -> Result<OpenConnection, Failure> {
        take(&self.share.connections, limits.pod_max_connections, "connections", "--pod-max-connections")?;
        Ok(OpenConnection(self.clone()))
    }

    /// Counts a tunnel, if there may be one more to the pod.
    pub fn tunnel(self: &Arc<Self>, limits: &Limits) -> Result<OpenTunnel, Failure> {
        take(&self.share.tunnels, limits.pod_max_connections, "tunnels", "--pod-max-connections")?;
        Ok(OpenTunnel(self.clone()))
    }

    /// Counts a handshake, if there may be one more: anybody who reaches the pod can begin one.
    pub fn handshake(self: &Arc<Self>, client: IpAddr, limits: &Limits) -> Result<Handshake, Failure> {
        let most = limits.pod_max_handshakes;
        let mut handshakes = self.share.handshakes.lock().unwrap_or_else(PoisonError::into_inner);
        if handshakes.all >= most {
            return Err(too_many(most, "handshakes of tunnels", "--pod-max-handshakes"));
        }
        let share = (most / CLIENTS).max(1);
        let of_client = handshakes.by_client.entry(client).or_default();
        if *of_client >= share {
            return Err(too_many(share, "handshakes with this client", "a sixteenth of --pod-max-handshakes"));
        }
        *of_client += 1;
        handshakes.all += 1;
        Ok(Handshake { pod: self.clone(), client })
    }
}

/// Whether there is a descriptor for a socket that came in, beside those that are kept for what must go on. Without
/// this the process would run out of them, and nobody could reach it any more, nor would it reach its control plane.
pub fn room_for(socket: &impl AsRawFd, limits: &Limits) -> Result<(), Failure> {
    let most = limits.descriptors.accepted;
    if socket.as_raw_fd().unsigned_abs() < most {
        return Ok(());
    }
    let text = format!("the proxy has {most} descriptors open already, the most that connections may take");
    Err(Failure::new(ResponseFlag::Connect, "limit", text))
}

fn take(count: &AtomicU32, most: u32, what: &str, setting: &str) -> Result<(), Failure> {
    if count.fetch_add(1, Ordering::Relaxed) < most {
        return Ok(());
    }
    count.fetch_sub(1, Ordering::Relaxed);
    Err(too_many(most, what, setting))
}

fn too_many(most: u32, what: &str, setting: &str) -> Failure {
    Failure::new(ResponseFlag::Connect, "limit", format!("the pod has {most} {what} already, the most by {setting}"))
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

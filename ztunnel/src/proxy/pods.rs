//! The pods that the agent gives the proxy to serve.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::sync::watch;

use super::state::{Maps, Phase, Pod, Shared};
use crate::capture::listeners::{ListenerPorts, PodListeners};
use crate::capture::maps::{OrigDstMap, PassMap};
use crate::capture::netns::Netns;
use crate::mesh::TunnelProtocol;
use crate::telemetry::flow::CloseReason;
use crate::zds::{AddedPod, CaptureMapFds, DrainState, PodManager, Removal};

/// The agent's requests, carried out. Keeps the runtime on which deadlines of leaving pods run.
pub struct Pods {
    pub shared: Arc<Shared>,
    pub runtime: tokio::runtime::Handle,
}

impl PodManager for Pods {
    fn capture_maps(&self, maps: CaptureMapFds) -> Result<(), String> {
        if maps.layout_version != ebpf::LAYOUT_VERSION {
            return Err(format!(
                "the agent's maps have layout {}, this proxy knows {}; run both from the same release",
                maps.layout_version,
                ebpf::LAYOUT_VERSION
            ));
        }
        let orig_dst = OrigDstMap::new(maps.orig_dst).map_err(|e| format!("map ORIG_DST: {e}"))?;
        let pass = PassMap::new(maps.pass).map_err(|e| format!("map PASS: {e}"))?;
        self.shared.maps.store(Some(Arc::new(Maps { orig_dst, pass: Arc::new(pass) })));
        Ok(())
    }

    fn add(&self, added: AddedPod) -> Result<(), String> {
        let netns = Netns::from_fd(added.netns).map_err(|e| format!("the pod's network namespace: {e}"))?;
        if let Some(known) = self.shared.pods().get(&added.uid) {
            if known.netns == netns && *known.phase.borrow() == Phase::Serving {
                return Ok(());
            }
            known.advance(Phase::Gone);
            self.shared.pods_stopped.fetch_add(1, Ordering::Relaxed);
        }
        let by_ebpf = added.listeners.is_some();
        let listeners = match added.listeners {
            Some(listeners) => listeners,
            None => PodListeners::open(&netns, &ListenerPorts::default()).map_err(|e| e.to_string())?,
        };
        listeners.check(netns.cookie(), &ListenerPorts::default()).map_err(|e| e.to_string())?;
        let pod = Arc::new(Pod {
            uid: added.uid.as_str().into(),
            name: added.name,
            namespace: added.namespace,
            service_account: added.service_account,
            netns,
            listeners,
            by_ebpf,
            phase: watch::Sender::new(Phase::Serving),
            open: 0.into(),
        });
        super::worker::serve(&self.shared, &pod)?;
        tracing::info!(pod = pod.name, namespace = pod.namespace, uid = &*pod.uid, "serving a pod");
        self.shared.pods().insert(added.uid, pod);
        self.shared.pods_changed.send_modify(|n| *n += 1);
        self.shared.pods_started.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self, uid: &str, how: Removal) {
        let Some(pod) = self.shared.pods().remove(uid) else { return };
        self.shared.pods_changed.send_modify(|n| *n += 1);
        tracing::info!(pod = pod.name, namespace = pod.namespace, uid, ?how, "no longer serving a pod");
        self.shared.pods_stopped.fetch_add(1, Ordering::Relaxed);
        let shared = self.shared.clone();
        match how {
            Removal::Gone => cut(&shared, &pod),
            Removal::Drain => {
                pod.advance(Phase::Leaving);
                let deadline = shared.config.timeouts.drain;
                self.runtime.spawn(async move {
                    tokio::time::sleep(deadline).await;
                    cut(&shared, &pod);
                });
            }
        }
    }

    fn listeners(&self, uid: &str) -> Option<PodListeners> {
        let pod = self.shared.pods().get(uid).filter(|p| p.by_ebpf).cloned()?;
        pod.listeners.try_clone().inspect_err(|error| tracing::warn!(%error, uid, "cannot return sockets")).ok()
    }

    fn drain(&self, uid: &str) -> DrainState {
        let Some(pod) = self.shared.pods().get(uid).cloned() else {
            return DrainState { open: 0, followed: true };
        };
        pod.advance(Phase::Draining);
        let mesh = self.shared.mesh.load();
        let record = mesh.local_workload(&pod.namespace, &pod.name, &pod.service_account);
        DrainState {
            open: pod.open.load(Ordering::Relaxed),
            followed: record.is_none_or(|w| w.protocol == TunnelProtocol::None),
        }
    }

    fn pods(&self) -> Vec<String> {
        self.shared.pods().keys().cloned().collect()
    }
}

fn cut(shared: &Shared, pod: &Pod) {
    pod.advance(Phase::Gone);
    for connection in shared.telemetry.connections_of(&pod.uid) {
        connection.close(CloseReason::PodRemoved);
    }
}

//! The pods that the agent gives the proxy to serve.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use super::share::Share;
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
        let known = self.shared.pods().get(&added.uid).cloned();
        if let Some(known) = known {
            if known.netns == netns {
                if known.resume() {
                    self.shared.pods_changed.send_modify(|n| *n += 1);
                }
                return Ok(());
            }
            self.remove(&added.uid, Removal::Gone);
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
            returns: AtomicU64::new(0),
            share: Share::default(),
        });
        super::worker::serve(&self.shared, &pod)?;
        tracing::info!(pod = pod.name, namespace = pod.namespace, uid = &*pod.uid, "serving a pod");
        self.shared.pods().insert(added.uid, pod);
        self.shared.publish_pods();
        self.shared.pods_started.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self, uid: &str, how: Removal) {
        let Some(pod) = self.shared.pods().remove(uid) else { return };
        self.shared.publish_pods();
        tracing::info!(pod = pod.name, namespace = pod.namespace, uid, ?how, "no longer serving a pod");
        self.shared.pods_stopped.fetch_add(1, Ordering::Relaxed);
        let shared = self.shared.clone();
        match how {
            Removal::Gone => cut(&shared, &pod),
            Removal::Drain => {
                pod.advance(Phase::Leaving);
                let deadline = shared.config.timeouts.drain;
                shared.leaving().push(pod.clone());
                self.runtime.spawn(async move {
                    tokio::time::sleep(deadline).await;
                    shared.leaving().retain(|other| !Arc::ptr_eq(other, &pod));
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
        DrainState { open: pod.open(), followed: record.is_none_or(|w| w.common.protocol == TunnelProtocol::None) }
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use clap::Parser;

    use super::*;
    use crate::capture::netns::tests::fresh;
    use crate::discovery::{Discovery, DiscoverySettings};
    use crate::identity::{CaClient, CaClientSettings, ControlPlane, RootSource, Store, StoreSettings, Trust};
    use crate::lifecycle::{Shutdown, Watchdog};
    use crate::mesh::{Mesh, convert_workload};
    use crate::policy;
    use crate::proto::{security, workload};
    use crate::proxy::config::ProxyArgs;
    use crate::telemetry::flow::{Direction, Flow, Protocol};
    use crate::telemetry::metrics::Metrics;
    use crate::telemetry::{Connection, Telemetry};

    const UID: &str = "0b0a7a3a-9a5a-4c3f-8a53-1f4be5d8a111";

    /// With one worker and a control plane that is never reached.
    fn pods(arguments: &[&str]) -> Pods {
        let all = ["ztunnel proxy", "--node-name", "n1", "--threads", "1"];
        let config = ProxyArgs::parse_from(all.iter().chain(arguments)).check([]).unwrap();
        let control_plane = ControlPlane {
            setting: "XDS_ADDRESS",
            roots_setting: "XDS_ROOT_CA",
            address: "http://127.0.0.1:1".parse().unwrap(),
            roots: RootSource::System,
            alternate_name: None,
            token: None,
            cluster_id: String::new(),
            headers: Vec::new(),
        };
        let mesh = Mesh::new("n1", "Kubernetes");
        let discovery = Discovery::start(control_plane.clone(), DiscoverySettings::default(), mesh.clone());
        let trust = Trust::new(config.trust.settings(&config.mesh.trust_domain));
        let authority = CaClient::new(control_plane, CaClientSettings::default(), trust.clone());
        let store = Store::start(Arc::new(authority), trust, StoreSettings::default());
        let (series, idle) = (config.telemetry.series_max as usize, config.telemetry.series_idle);
        let telemetry = Telemetry::new(&Metrics::new(), series, idle);
        let shared = Shared::new(config, mesh, discovery, store, telemetry, Shutdown::new());
        super::super::worker::start(&shared, &Watchdog::new(std::time::Duration::from_secs(60))).unwrap();
        Pods { shared, runtime: tokio::runtime::Handle::current() }
    }

    impl Pods {
        fn give(&self, netns: &Netns, listeners: &PodListeners) -> Result<(), String> {
            self.add(AddedPod {
                uid: UID.into(),
                name: "a".into(),
                namespace: "shop".into(),
                service_account: "a".into(),
                netns: netns.try_clone().unwrap().into(),
                listeners: Some(listeners.try_clone().unwrap()),
            })
        }

        fn served(&self) -> Arc<Pod> {
            self.shared.pods()[UID].clone()
        }

        fn stopped(&self) -> u64 {
            self.shared.pods_stopped.load(Ordering::Relaxed)
        }

        /// A connection of the pod as it is served now.
        fn connection(&self) -> Connection {
            self.connection_to(Direction::Outbound)
        }

        fn connection_to(&self, direction: Direction) -> Connection {
            let any = "192.0.2.1:1".parse().unwrap();
            self.shared.telemetry.open(Flow::new(direction, Protocol::Tcp, self.served().uid.clone(), any, any))
        }
    }

    /// A policy that denies all, in the pod's namespace.
    fn deny_all(pods: &Pods) {
        let record = workload::Workload {
            uid: format!("Kubernetes//Pod/shop/{UID}"),
            name: "a".into(),
            namespace: "shop".into(),
            node: "n1".into(),
            service_account: "a".into(),
            ..Default::default()
        };
        let policy = security::Authorization {
            name: "nobody".into(),
            namespace: "shop".into(),
            scope: security::Scope::Namespace as i32,
            ..Default::default()
        };
        pods.shared.mesh.update(|update| {
            let record = convert_workload(&record, update.strings()).unwrap();
            update.workload(record);
            update.policy(policy::convert(&policy.into()).unwrap());
            update.policies_complete();
        });
    }

    /// A plain peer of the ZDS protocol takes a pod away and lets its connections end in their own time.
    #[tokio::test]
    async fn connections_of_a_pod_that_leaves_are_still_judged_when_policies_change() {
        let pods = pods(&[]);
        let (netns, listeners) = made();
        pods.give(&netns, &listeners).unwrap();
        let rejudging = tokio::spawn(super::super::rejudge::run(pods.shared.clone()));
        let connection = pods.connection_to(Direction::Inbound);
        pods.remove(UID, Removal::Drain);
        assert!(!is_ordered_to_end(&connection).await);
        deny_all(&pods);
        assert_eq!(connection.close_ordered().await, CloseReason::PolicyChange);
        rejudging.abort();
    }

    fn made() -> (Netns, PodListeners) {
        let netns = fresh();
        let listeners = PodListeners::open(&netns, &ListenerPorts::default()).unwrap();
        (netns, listeners)
    }

    async fn is_ordered_to_end(connection: &Connection) -> bool {
        poll_fn(|cx| Poll::Ready(connection.poll_close_ordered(cx).is_ready())).await
    }

    #[tokio::test]
    async fn a_pod_that_has_come_back_does_not_pay_for_the_deadline_of_its_earlier_life() {
        let pods = pods(&["--drain-deadline", "100ms"]);
        let (netns, listeners) = made();
        pods.give(&netns, &listeners).unwrap();
        let old = pods.connection();
        pods.remove(UID, Removal::Drain);
        pods.give(&netns, &listeners).unwrap();
        let new = pods.connection();
        assert_eq!(old.close_ordered().await, CloseReason::PodRemoved);
        assert!(!is_ordered_to_end(&new).await);
        assert_eq!(pods.stopped(), 1);
    }

    #[tokio::test]
    async fn a_pod_that_is_given_again_while_it_drains_serves_on_and_nothing_of_it_is_cut() {
        let pods = pods(&[]);
        let (netns, listeners) = made();
        pods.give(&netns, &listeners).unwrap();
        let (served, connection) = (pods.served(), pods.connection());
        pods.drain(UID);
        assert_eq!(*served.phase.borrow(), Phase::Draining);
        pods.give(&netns, &listeners).unwrap();
        assert!(Arc::ptr_eq(&served, &pods.served()));
        assert_eq!(*served.phase.borrow(), Phase::Serving);
        assert!(!is_ordered_to_end(&connection).await);
        assert_eq!(pods.stopped(), 0);
    }

    #[tokio::test]
    async fn what_was_in_the_namespace_that_a_pod_had_before_ends_also_if_the_new_one_cannot_be_served() {
        let pods = pods(&[]);
        let (old, old_listeners) = made();
        pods.give(&old, &old_listeners).unwrap();
        let (before, connection) = (pods.served(), pods.connection());
        let (new, listeners) = made();
        for _ in 0..2 {
            let error = pods.give(&new, &old_listeners).unwrap_err();
            assert!(error.contains("another network namespace"), "{error}");
            assert_eq!(pods.stopped(), 1);
        }
        assert!(is_ordered_to_end(&connection).await);
        assert_eq!(*before.phase.borrow(), Phase::Gone);
        assert!(pods.pods().is_empty());
        pods.give(&new, &listeners).unwrap();
        assert_eq!(pods.pods(), [UID]);
    }
}

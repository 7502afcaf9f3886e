//! Where it is told what becomes of pods: a folder of status files, or the pods' own annotations and Events.

use std::path::Path;
use std::sync::Arc;

use tracing::{info, warn};

use super::annotations::Annotations;
use super::decision::PodFacts;
use super::events::Events;
use crate::manifests::{ObjectName, PodRef, PodStatus, Redirection, StatusError, StatusFolder};

#[derive(Debug)]
pub enum Reports {
    Nowhere,
    Folder { folder: StatusFolder, node: String },
    Kubernetes { annotations: Arc<Annotations>, events: Arc<Events> },
}

impl Reports {
    pub fn folder(path: &Path, node: &str) -> Result<Reports, StatusError> {
        Ok(Reports::Folder { folder: StatusFolder::open(path)?, node: node.to_owned() })
    }

    /// Says of a pod whether it is captured.
    pub fn set(&self, pod: PodRef, redirection: Redirection, reason: &str) -> Result<(), StatusError> {
        match self {
            Reports::Nowhere => Ok(()),
            Reports::Folder { folder, node } => {
                folder.write(&PodStatus { pod, node: node.clone(), redirection, reason: reason.to_owned() })
            }
            Reports::Kubernetes { annotations, .. } => {
                annotations.set(&pod.uid, ObjectName::new(&pod.namespace, &pod.name), Some(redirection));
                Ok(())
            }
        }
    }

    /// Whether what was said of a pod is still to be read.
    pub fn is_set(&self, uid: &str) -> bool {
        match self {
            Reports::Folder { folder, .. } => folder.path().join(format!("{uid}.yaml")).exists(),
            // They are looked after without being told.
            Reports::Nowhere | Reports::Kubernetes { .. } => true,
        }
    }

    /// Takes back what was said of a pod that is there.
    pub fn clear(&self, facts: &PodFacts) -> Result<(), StatusError> {
        if let Reports::Kubernetes { annotations, .. } = self {
            annotations.set(&facts.uid, ObjectName::new(&facts.namespace, &facts.name), None);
        }
        self.forget_file(&facts.uid)
    }

    /// The pod is gone, and with it its object.
    pub fn forget(&self, uid: &str) -> Result<(), StatusError> {
        if let Reports::Kubernetes { annotations, .. } = self {
            annotations.forget(uid);
        }
        self.forget_file(uid)
    }

    /// A pod that should be captured cannot be.
    pub fn capture_failed(&self, facts: &PodFacts, reason: &str) {
        if let Reports::Kubernetes { events, .. } = self {
            events.capture_failed(facts.reference(), reason);
        }
    }

    /// Removes what is left of pods that are not there.
    pub fn sweep(&self, is_there: impl Fn(&str) -> bool) {
        let Reports::Folder { folder, node } = self else { return };
        match folder.of_node(node) {
            Ok(statuses) => {
                for uid in statuses.into_iter().map(|status| status.pod.uid).filter(|uid| !is_there(uid)) {
                    match folder.remove(&uid) {
                        Ok(_) => info!(uid, "the status of a former pod is removed"),
                        Err(error) => warn!(uid, %error, "the status of a former pod cannot be removed"),
                    }
                }
            }
            Err(error) => warn!(%error, "the status files cannot be read"),
        }
    }

    fn forget_file(&self, uid: &str) -> Result<(), StatusError> {
        match self {
            Reports::Folder { folder, .. } => folder.remove(uid).map(drop),
            Reports::Nowhere | Reports::Kubernetes { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {

    use apistub::{ApiStub, Rights, wait_for};
    use serde_json::{Value, json};
    use tokio::task::JoinSet;

    use super::super::feed::Feed;
    use super::*;
    use crate::kubernetes::Api;

    const PODS: &str = "/api/v1/pods";
    const EVENTS: &str = "/api/v1/events";
    const TOLD: &str = "/api/v1/namespaces/shop/pods/a/status";

    struct Rig {
        server: ApiStub,
        feed: Feed,
        reports: Reports,
        _tasks: JoinSet<()>,
    }

    impl Rig {
        /// An agent's reports on a node with pod a.
        async fn start() -> Rig {
            let server = ApiStub::start().await;
            server.state().put("/api/v1/namespaces", json!({"metadata": {"name": "shop"}}));
            server.state().put(PODS, pod("a", "uid-a", "node"));
            server.state().put(PODS, pod("elsewhere", "uid-b", "other"));
            let api = Api::unprotected(server.address).unwrap();
            let feed = Feed::kubernetes(&api, "node");
            feed.complete().await;
            let annotations = Annotations::new(api.clone(), feed.objects());
            let events = Arc::new(Events::new(api, "node".into()));
            let mut tasks = JoinSet::new();
            tasks.spawn(annotations.clone().keep());
            tasks.spawn(events.clone().keep());
            Rig { server, feed, reports: Reports::Kubernetes { annotations, events }, _tasks: tasks }
        }

        fn annotation(&self) -> Option<Value> {
            let state = self.server.state();
            let annotations = &state.get(PODS, "shop/a")?["metadata"]["annotations"];
            annotations.get("ambient.istio.io/redirection").cloned()
        }

        fn events(&self) -> Vec<Value> {
            self.server.state().all(EVENTS)
        }

        fn patches(&self, of: &str) -> usize {
            self.server.state().requests.iter().filter(|request| **request == format!("PATCH {of}")).count()
        }
    }

    fn pod(name: &str, uid: &str, node: &str) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "shop", "uid": uid},
            "spec": {"nodeName": node, "containers": []},
            "status": {"phase": "Running", "podIP": "10.0.0.1"},
        })
    }

    fn facts(uid: &str) -> PodFacts {
        let pod = serde_json::from_value(pod("a", uid, "node")).unwrap();
        super::super::decision::facts(&pod).unwrap()
    }

    #[tokio::test]
    async fn only_the_pods_of_the_own_node_are_followed() {
        let rig = Rig::start().await;
        let objects = rig.feed.objects().borrow().clone();
        assert_eq!(objects.pods.keys().map(|name| &*name.name).collect::<Vec<_>>(), ["a"]);
        assert!(objects.namespace("shop").is_some());
        // One that has ended is gone.
        let mut ended = pod("a", "uid-a", "node");
        ended["status"]["phase"] = json!("Succeeded");
        rig.server.state().put(PODS, ended);
        wait_for(|| rig.feed.objects().borrow().pods.is_empty()).await;
    }

    #[tokio::test]
    async fn an_annotation_is_brought_to_what_holds_and_kept_there() {
        let rig = Rig::start().await;
        let (reports, facts) = (&rig.reports, facts("uid-a"));
        // There is nothing to take back.
        reports.clear(&facts).unwrap();
        reports.set(facts.reference(), Redirection::Pending, "why").unwrap();
        wait_for(|| rig.annotation() == Some(json!("pending"))).await;
        reports.set(facts.reference(), Redirection::Enabled, "").unwrap();
        wait_for(|| rig.annotation() == Some(json!("enabled"))).await;
        let Reports::Kubernetes { annotations, .. } = reports else { panic!("made so") };
        wait_for(|| annotations.unwritten() == 0).await;
        assert_eq!(rig.patches(TOLD), 2);
        // Said again it is not written again, and somebody else's change does not last.
        reports.set(facts.reference(), Redirection::Enabled, "").unwrap();
        let mut without = pod("a", "uid-a", "node");
        without["metadata"]["labels"] = json!({"a": "b"});
        rig.server.state().put(PODS, without);
        wait_for(|| rig.annotation() == Some(json!("enabled"))).await;
        assert_eq!(rig.patches(TOLD), 3);
        reports.clear(&facts).unwrap();
        wait_for(|| rig.annotation().is_none()).await;
    }

    /// A write that was under way, or not heard of yet, when the pod left does not stand for ever.
    #[tokio::test]
    async fn a_pod_that_leaves_while_it_is_annotated_keeps_no_annotation() {
        let rig = Rig::start().await;
        for round in 0..20 {
            let before = rig.patches(TOLD);
            rig.reports.set(facts("uid-a").reference(), Redirection::Enabled, "").unwrap();
            for _ in 0..round {
                tokio::task::yield_now().await;
            }
            if round % 2 == 0 {
                wait_for(|| rig.patches(TOLD) > before).await;
            }
            rig.reports.clear(&facts("uid-a")).unwrap();
            let Reports::Kubernetes { annotations, .. } = &rig.reports else { panic!("made so") };
            wait_for(|| annotations.is_at_rest() && rig.annotation().is_none()).await;
        }
    }

    #[tokio::test]
    async fn a_refused_write_is_tried_again_and_holds_up_nobody() {
        let rig = Rig::start().await;
        let refused = (500, json!({"kind": "Status", "code": 500, "message": "not now"}));
        rig.server.state().answers.insert(TOLD.into(), refused);
        rig.reports.set(facts("uid-a").reference(), Redirection::Enabled, "").unwrap();
        wait_for(|| rig.patches(TOLD) > 1).await;
        let Reports::Kubernetes { annotations, .. } = &rig.reports else { panic!("made so") };
        assert_eq!((annotations.unwritten(), rig.annotation()), (1, None));
        rig.server.state().answers.clear();
        wait_for(|| rig.annotation() == Some(json!("enabled"))).await;
    }

    #[tokio::test]
    async fn a_successor_of_the_same_name_is_not_taken_for_the_pod() {
        let rig = Rig::start().await;
        rig.reports.set(facts("uid-earlier").reference(), Redirection::Enabled, "").unwrap();
        let api = Api::unprotected(rig.server.address).unwrap();
        let name = ObjectName::new("shop", "a");
        let refused = super::super::annotations::patch(&api, &name, "uid-earlier", Some(Redirection::Enabled)).await;
        assert!(refused.unwrap_err().to_string().contains("409"));
        rig.reports.set(facts("uid-a").reference(), Redirection::Pending, "").unwrap();
        wait_for(|| rig.annotation() == Some(json!("pending"))).await;
        assert_eq!(rig.patches(TOLD), 2, "none for the earlier but that of this test");
    }

    #[tokio::test]
    async fn what_repeats_is_one_event_and_a_flood_is_bounded() {
        let rig = Rig::start().await;
        for _ in 0..20 {
            rig.reports.capture_failed(&facts("uid-a"), "no process");
        }
        wait_for(|| !rig.events().is_empty()).await;
        let event = rig.events()[0].clone();
        assert_eq!((&event["reason"], &event["message"]), (&json!("CaptureFailed"), &json!("no process")));
        assert_eq!((&event["involvedObject"]["uid"], &event["type"]), (&json!("uid-a"), &json!("Warning")));
        let Reports::Kubernetes { events, .. } = &rig.reports else { panic!("made so") };
        for round in 0..100 {
            rig.reports.capture_failed(&facts(&format!("uid-{round}")), "no process");
        }
        // Of 101 pods 25 are told at once, and one more in twelve seconds.
        wait_for(|| events.left_out() >= 70).await;
        assert!(rig.events().len() < 32, "{}", rig.events().len());
    }

    #[tokio::test]
    async fn the_agent_asks_for_what_its_role_allows_and_for_all_of_it() {
        let rig = Rig::start().await;
        let watches = || rig.server.state().requests.iter().filter(|request| request.contains("watch=true")).count();
        wait_for(|| watches() == 2).await;
        rig.reports.set(facts("uid-a").reference(), Redirection::Enabled, "").unwrap();
        wait_for(|| rig.annotation().is_some()).await;
        rig.reports.capture_failed(&facts("uid-a"), "no process");
        wait_for(|| rig.events().len() == 1).await;
        let name = rig.events()[0]["metadata"]["name"].as_str().unwrap().to_owned();
        // As when it repeats after a time.
        let api = Api::unprotected(rig.server.address).unwrap();
        let path = format!("/api/v1/namespaces/shop/events/{name}");
        api.merge(&path, &json!({"count": 2})).await.unwrap();
        let template = include_str!("../../../deploy/helm/templates/agent-rbac.yaml");
        let rights = Rights::parse(&template.replace("{{ .Release.Namespace }}", "understory-system"));
        rights.must_fit(&rig.server.state().requests);
    }
}

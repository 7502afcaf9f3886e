//! The node as a whole: which pods there are, a task for each, and what is left of pods that are gone.
//!
//! Reconciles all the time, not only when told; must never sweep away what a running task has just put in place.

use std::collections::{BTreeSet, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use super::cgroups::{self, CgroupRoot};
use super::decision::{self, Decision, Rules};
use super::enrolment::Context;
use super::kernel::Reload;
use super::pod::{PodTask, Wish};
use super::procs::Scan;
use super::record::{Record, RecordError};
use crate::lifecycle::Pending;
use crate::manifests::Objects;

/// Keeps the tasks of the node's pods.
pub struct NodeTask {
    context: Arc<Context>,
    root: CgroupRoot,
    rules: Rules,
    objects: watch::Receiver<Arc<Objects>>,
    /// Ends when the objects are whole.
    complete: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// They are.
    known: bool,
    wishes: HashMap<String, watch::Sender<Wish>>,
    tasks: JoinSet<String>,
    /// Of pods that an earlier agent worked on and that have no task yet.
    records: HashMap<String, Record>,
}

impl NodeTask {
    pub fn new(
        context: Arc<Context>,
        root: CgroupRoot,
        rules: Rules,
        objects: watch::Receiver<Arc<Objects>>,
        complete: impl Future<Output = ()> + Send + 'static,
    ) -> Result<NodeTask, RecordError> {
        let records = context.records.all()?.into_iter().map(|record| (record.uid.clone(), record)).collect();
        Ok(NodeTask {
            context,
            root,
            rules,
            objects,
            complete: Box::pin(complete),
            known: false,
            wishes: HashMap::new(),
            tasks: JoinSet::new(),
            records,
        })
    }

    /// Runs for ever. Dropping the future ends all tasks and leaves the pods as they are.
    pub async fn run(mut self, first_look: Pending) {
        let every = |period| {
            let mut interval = tokio::time::interval(period);
            interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
            interval
        };
        let (mut reconcile, mut sweep) = (every(RECONCILE), every(SWEEP));
        let mut sandboxes = self.context.sandboxes.changes();
        if tokio::time::timeout(PATIENCE, &mut self.complete).await.is_ok() {
            self.known = true;
            self.reconcile();
        } else {
            self.go_by_records();
        }
        self.context.proxies.set_complete();
        let mut first_look = Some(first_look);
        loop {
            if self.known
                && let Some(first_look) = first_look.take()
            {
                first_look.done();
            }
            tokio::select! {
                () = &mut self.complete, if !self.known => self.known = true,
                changed = self.objects.changed() => if changed.is_err() {
                    warn!("the source of objects has ended, nothing new will be heard");
                    tokio::time::sleep(RECONCILE).await;
                },
                Some(ended) = self.tasks.join_next() => match ended {
                    Ok(uid) => {
                        self.wishes.remove(&uid);
                    }
                    Err(error) => self.task_died(&error),
                },
                // The sender is in the context, which lives on.
                Ok(()) = sandboxes.changed() => {}
                _ = reconcile.tick() => {}
                _ = sweep.tick() => {
                    if self.known {
                        self.reconcile();
                        self.context.sandboxes.keep_pods(|uid| self.wishes.contains_key(uid));
                    }
                    self.sweep().await;
                }
            }
            if self.known {
                self.reconcile();
            }
        }
    }

    /// Takes up the pods that an earlier agent had in the mesh, as it left them. Who else is to get in or out is not known
    /// yet.
    fn go_by_records(&mut self) {
        warn!(
            pods = self.records.len(),
            "which pods there are is not known yet: those of the record are kept as they are"
        );
        for (uid, record) in self.records.clone() {
            match record.facts() {
                Some(facts) => self.tell(&uid, Wish::Pod(facts, Decision::In)),
                None => self.context.proxies.keep(&uid),
            }
        }
    }

    /// Compares what there is with what should be, and tells the tasks.
    fn reconcile(&mut self) {
        let objects = self.objects.borrow_and_update().clone();
        let mut present = BTreeSet::new();
        for pod in objects.pods.values() {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            if node != Some(self.context.node.as_str()) {
                continue;
            }
            let Some(facts) = decision::facts(pod) else { continue };
            let sandbox = self.context.sandboxes.get(&facts.uid);
            let facts = facts.with_sandbox(sandbox);
            let namespace = objects.namespace(&facts.namespace);
            let decision = decision::decide(pod, namespace.map(Arc::as_ref), &self.rules);
            present.insert(facts.uid.clone());
            self.tell(&facts.uid.clone(), Wish::Pod(facts, decision));
        }
        for (uid, wish) in &self.wishes {
            if !present.contains(uid) {
                wish.send_if_modified(|wish| std::mem::replace(wish, Wish::Gone) != Wish::Gone);
            }
        }
        let orphans: Vec<String> = self.records.keys().cloned().collect();
        for uid in orphans {
            info!(uid, "the pod went while no agent was there");
            self.tell(&uid, Wish::Gone);
        }
    }

    fn tell(&mut self, uid: &str, wish: Wish) {
        if let Some(sender) = self.wishes.get(uid) {
            sender.send_if_modified(|old| {
                let new = *old != wish;
                *old = wish;
                new
            });
            return;
        }
        let record = self.records.remove(uid);
        // Before any proxy gets its snapshot, so that it does not drop a pod that is only being looked for.
        let known = record.is_some() || matches!(wish, Wish::Pod(_, Decision::In));
        if known {
            self.context.proxies.keep(uid);
        }
        let (sender, receiver) = watch::channel(wish);
        self.wishes.insert(uid.to_owned(), sender);
        let task = PodTask::new(self.context.clone(), uid.to_owned(), receiver, record, known);
        let uid = uid.to_owned();
        self.tasks.spawn(async move {
            task.run().await;
            uid
        });
    }

    /// A fault of ours in one pod's task: the pod gets a new one, which takes up what the record tells.
    fn task_died(&mut self, error: &tokio::task::JoinError) {
        tracing::error!(%error, "the task of a pod has died");
        self.wishes.retain(|_, wish| !wish.is_closed());
        match self.context.records.all() {
            Ok(records) => {
                let orphans = records.into_iter().filter(|record| !self.wishes.contains_key(&record.uid));
                self.records.extend(orphans.map(|record| (record.uid.clone(), record)));
            }
            Err(error) => warn!(%error, "the records cannot be read"),
        }
    }

    /// Removes what is left of pods that are gone.
    async fn sweep(&mut self) {
        match self.context.kernel.mend() {
            Ok(Reload::NewMaps) => self.context.proxies.reconnect_all(),
            Ok(Reload::SameMaps | Reload::NotNow) => {}
            Err(error) => warn!(%error, "what somebody has taken of the capture programs could not be put back"),
        }
        // While a pod is on its way, what the kernel knows and no record tells of may be that pod's: its record may be
        // lost, and without capture it would speak in the clear. Another version captures its pods until they are ours.
        if self.known && self.context.metrics.all_settled(self.wishes.len()) {
            if let Err(error) = self.sweep_kernel() {
                warn!(%error, "what is left of former pods could not be removed");
            }
            if let Err(error) = self.context.kernel.remove_other_versions() {
                warn!(%error, "the pins of other versions could not be removed");
            }
        }
        if self.known {
            self.context.reports.sweep(|uid| self.wishes.contains_key(uid));
        }
        self.context.proxies.sweep_exemptions();
        let scan = self.context.scanner.within(SWEEP).await;
        let netns = self.context.node_cookie;
        if let Err(error) = self.context.kernel.set_node(describe_node(netns, &self.root, &scan)) {
            warn!(%error, "the programs could not be told where the node's pods are");
        }
    }

    fn sweep_kernel(&self) -> Result<(), super::enrolment::Trouble> {
        // The kernel first: a pod's record is written before the kernel hears of it.
        let known = self.context.kernel.known()?;
        let records = self.context.records.all()?;
        let keep: BTreeSet<u64> = records.iter().map(|record| record.netns_cookie).collect();
        for (cookie, addresses) in known.iter().filter(|(cookie, _)| !keep.contains(cookie)) {
            warn!(netns = cookie, ?addresses, "the kernel knew a pod that is no longer there: forgotten");
            self.context.kernel.take(*cookie, addresses)?;
        }
        Ok(())
    }
}

/// What the programs need to know of the node.
pub fn describe_node(netns: u64, root: &CgroupRoot, scan: &Scan) -> ebpf::Node {
    let known = KUBEPODS.iter().map(|name| format!("{}/{name}", root.path.trim_end_matches('/')));
    let mut places =
        scan.kubepods().filter(|path| root.dir_of(path).is_some()).map(str::to_owned).into_iter().chain(known);
    let found = places.find_map(|path| Some((cgroups::id_of(&root.dir_of(&path)?).ok()?, CgroupRoot::level_of(&path))));
    let (kubepods, kubepods_level) = found.unwrap_or_default();
    ebpf::Node { netns, kubepods, kubepods_level, _pad: 0 }
}

/// How long the first reading of all objects may take before the record is gone by.
const PATIENCE: Duration = Duration::from_secs(3);
const RECONCILE: Duration = Duration::from_secs(5);
const SWEEP: Duration = Duration::from_secs(30);
/// Where kubelet keeps pods, by driver and distribution, until a pod shows it.
const KUBEPODS: [&str; 4] = ["kubepods", "kubepods.slice", "kubelet/kubepods", "kubelet.slice/kubelet-kubepods.slice"];

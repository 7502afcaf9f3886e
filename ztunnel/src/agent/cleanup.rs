//! `ztunnel agent cleanup`: takes away everything that the agent has set up on the node, for uninstalling.
//!
//! Must never run beside an agent, which would put it all back.

use std::path::Path;
use std::time::Duration;

use super::args::CleanupArgs;
use super::lock::RunLock;
use super::procs::Scan;
use super::record::{Record, Records};
use super::{AgentError, annotations, failed, run_dir_failed};
use crate::capture::netns::Netns;
use crate::capture::pod_network;
use crate::capture::programs::Capture;
use crate::cni;
use crate::kubernetes::{Api, ApiError, SourceKind};
use crate::manifests::{ObjectName, REDIRECTION, StatusFolder};

/// Removes it all and prints what it removed. A pod whose network cannot be put back is named and does not stop the
/// rest.
pub async fn run(args: &CleanupArgs) -> Result<(), AgentError> {
    let run_dir = &args.place.run_dir;
    let lock = run_dir.exists().then(|| RunLock::take(run_dir)).transpose()?;
    // First what leads to the agent: from its last step on no pod's start waits for one that is not there.
    if let Some(dirs) = args.cni.check() {
        for what in cni::install::remove(&dirs, args.cni_keep_program)? {
            println!("CNI plugin: {what}");
        }
    }
    // What stands at the API server is the least harm: it stops nothing of what is removed here.
    let annotations = match (args.source, &args.node_name) {
        (SourceKind::Kubernetes, Some(node)) => clear_annotations(args.kubeconfig.as_deref(), node).await,
        _ => Ok(()),
    };
    if let Err(error) = &annotations {
        println!("annotations of the node's pods: NOT removed: {error}");
    }
    if lock.is_none() {
        Capture::remove_all(&args.place.bpf_dir)?;
        println!("capture: removed {}; {} was not there", args.place.bpf_dir.display(), run_dir.display());
        return annotations;
    }
    if let (Some(dir), Some(node)) = (&args.status_dir, &args.node_name) {
        let folder = StatusFolder::open(dir)?;
        for status in folder.of_node(node)? {
            folder.remove(&status.pod.uid)?;
            println!("status of {}/{}: removed", status.pod.namespace, status.pod.name);
        }
    }
    Capture::remove_all(&args.place.bpf_dir)?;
    println!("capture: removed {}", args.place.bpf_dir.display());
    let scan = Scan::take(Path::new("/proc")).map_err(failed("read the processes of the node"))?;
    let records = Records::open(run_dir.join(super::RECORDS))?;
    for record in records.all()? {
        match restore(&scan, &record).await {
            Ok(what) => println!("network of {}: {what}", record.pod()),
            Err(reason) => println!("network of {}: NOT put back: {reason}", record.pod()),
        }
        records.remove(&record.uid)?;
    }
    std::fs::remove_dir_all(run_dir).map_err(run_dir_failed("remove", run_dir))?;
    println!("run folder: removed {}", run_dir.display());
    annotations
}

/// Peers no longer take the node's pods for ones of the mesh.
async fn clear_annotations(kubeconfig: Option<&Path>, node: &str) -> Result<(), AgentError> {
    let api = Api::connect(kubeconfig).await?;
    for pod in api.list("/api/v1/pods", &format!("&fieldSelector=spec.nodeName%3D{node}")).await? {
        let meta = &pod["metadata"];
        let text = |name: &str| meta[name].as_str().unwrap_or_default();
        if meta["annotations"][REDIRECTION].is_null() {
            continue;
        }
        let name = ObjectName::new(text("namespace"), text("name"));
        match annotations::patch(&api, &name, text("uid"), None).await {
            Ok(()) => println!("annotation of {name}: removed"),
            // It is gone by now.
            Err(ApiError::Refused { code: 404 | 409 | 422, .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

async fn restore(scan: &Scan, record: &Record) -> Result<&'static str, String> {
    for process in scan.processes(&record.cgroup_uid) {
        let Ok(netns) = Netns::open(format!("/proc/{}/ns/net", process.pid)) else { continue };
        if netns.cookie() != record.netns_cookie {
            continue;
        }
        let removal = pod_network::remove(&netns, &record.before);
        return match tokio::time::timeout(LONGEST, removal).await {
            Ok(Ok(())) => Ok("put back"),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("not done within {LONGEST:?}")),
        };
    }
    Ok("gone with the pod")
}

const LONGEST: Duration = Duration::from_secs(10);

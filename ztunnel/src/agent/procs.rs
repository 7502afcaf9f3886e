//! Finds a pod's network namespace by its processes.
//!
//! Must never pair a pod with another pod's namespace: its traffic would get the other's identity. So the namespace
//! must hold one of the pod's addresses, and must not be the node's.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::cgroups::{Place, unless_gone};
use crate::capture::netns::{Netns, NetnsId};
use crate::capture::pod_network;

/// A pod's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    /// Start time in clock ticks since boot: tells the process from a later one of the same number.
    pub started: u64,
    pub netns: NetnsId,
    pub place: Place,
}

/// All processes of pods at one moment.
#[derive(Debug, Default)]
pub struct Scan {
    pods: HashMap<String, Vec<Process>>,
}

/// Why a pod's namespace is not known.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    #[error("no process of the pod is visible")]
    NoProcess,
    #[error("its process {pid} ended while it was looked at")]
    Vanished { pid: i32 },
    #[error("the namespace of its process {pid} holds none of the pod's addresses {expected:?} but {found:?}")]
    Addresses { pid: i32, expected: Vec<IpAddr>, found: Vec<IpAddr> },
    #[error("the namespace of its sandbox holds none of its addresses {expected:?} but {found:?}")]
    Sandbox { expected: Vec<IpAddr>, found: Vec<IpAddr> },
    #[error("its processes are in another sandbox than the runtime told")]
    OtherSandbox,
    #[error("cannot open the namespace of its process {pid}: {source}")]
    Open { pid: i32, source: io::Error },
    #[error("cannot see the addresses of its namespace: {0}")]
    Network(#[from] pod_network::PodNetworkError),
}

impl Scan {
    /// Reads the processes below `proc`. Those that end meanwhile are left out; what cannot be read for want of
    /// descriptors or memory is an error, for a process that is not seen is not one that is not there.
    pub fn take(proc: &Path) -> io::Result<Scan> {
        let mut scan = Scan::default();
        for entry in std::fs::read_dir(proc)? {
            let Some(entry) = unless_gone(entry)? else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if let Some((uid, process)) = look_at(&entry.path(), pid)? {
                scan.pods.entry(uid).or_default().push(process);
            }
        }
        Ok(scan)
    }

    pub fn processes(&self, cgroup_uid: &str) -> &[Process] {
        self.pods.get(cgroup_uid).map_or(&[], Vec::as_slice)
    }

    /// The process that tells a pod's namespace: the oldest that is not in one of the node's.
    pub fn leader(&self, cgroup_uid: &str, node: &[NetnsId]) -> Option<&Process> {
        let own = self.processes(cgroup_uid).iter().filter(|process| !node.contains(&process.netns));
        own.min_by_key(|process| (process.started, process.pid))
    }

    /// Whether any process of the pod is in this namespace.
    pub fn runs_in(&self, cgroup_uid: &str, netns: NetnsId) -> bool {
        self.processes(cgroup_uid).iter().any(|process| process.netns == netns)
    }

    /// The directory above all pods, as seen from any of them.
    pub fn kubepods(&self) -> Option<&str> {
        let unified = |process: &Process| process.place.unified.clone();
        self.pods.values().flatten().find_map(|process| {
            let above = process.place.pod.as_ref()?.kubepods.as_str();
            unified(process)?.starts_with(above).then_some(above)
        })
    }
}

/// Opens the namespace of a pod's process, and checks that it is the pod's.
pub async fn open(process: &Process, addresses: &[IpAddr]) -> Result<Netns, FindError> {
    let pid = process.pid;
    let netns = Netns::open(format!("/proc/{pid}/ns/net")).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => FindError::Vanished { pid },
        _ => FindError::Open { pid, source },
    })?;
    // The number may have passed to another process between the scan and now.
    let still = look_at(Path::new(&format!("/proc/{pid}")), pid).map_err(|source| FindError::Open { pid, source })?;
    if netns.id() != process.netns || still.is_none_or(|(_, now)| now.started != process.started) {
        return Err(FindError::Vanished { pid });
    }
    match require_address(&netns, addresses).await {
        Err(FindError::Sandbox { expected, found }) => Err(FindError::Addresses { pid, expected, found }),
        other => other.map(|()| netns),
    }
}

/// A namespace that holds none of the pod's addresses is not the pod's.
pub async fn require_address(netns: &Netns, addresses: &[IpAddr]) -> Result<(), FindError> {
    let found = pod_network::addresses(netns).await?;
    if addresses.iter().any(|address| found.contains(address)) {
        return Ok(());
    }
    Err(FindError::Sandbox { expected: addresses.to_vec(), found })
}

/// A pod's process; nothing if it is none, is gone, or is kept from us.
fn look_at(dir: &Path, pid: i32) -> io::Result<Option<(String, Process)>> {
    let Some(place) = seen(read_lossy(&dir.join("cgroup")))? else { return Ok(None) };
    let place = Place::parse(&place);
    let Some(uid) = place.pod.as_ref().map(|pod| pod.uid.clone()) else { return Ok(None) };
    let Some(stat) = seen(read_lossy(&dir.join("stat")))? else { return Ok(None) };
    let Some(started) = start_time(&stat) else { return Ok(None) };
    let Some(netns) = seen(std::fs::metadata(dir.join("ns/net")))? else { return Ok(None) };
    let netns = NetnsId { dev: netns.dev(), ino: netns.ino() };
    Ok(Some((uid, Process { pid, started, netns, place })))
}

fn seen<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match unless_gone(read) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        other => other,
    }
}

/// A process may give itself, and its cgroups, any name.
fn read_lossy(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&std::fs::read(path)?).into_owned())
}

/// Field 22 of `/proc/<pid>/stat`; the second, in parentheses, may hold anything.
fn start_time(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::cgroups::PodPlace;
    use super::*;
    use crate::capture::netns::tests::fresh;

    fn process(pid: i32, started: u64, ino: u64) -> Process {
        let pod = PodPlace { uid: "u".into(), kubepods: "/node/kubepods".into() };
        let place = Place { unified: Some("/node/kubepods/burstable/podu/c".into()), pod: Some(pod) };
        Process { pid, started, netns: NetnsId { dev: 4, ino }, place }
    }

    fn scan(processes: Vec<Process>) -> Scan {
        Scan { pods: [("u".to_owned(), processes)].into() }
    }

    #[test]
    fn the_oldest_process_outside_the_nodes_namespace_leads() {
        let node = [NetnsId { dev: 4, ino: 1 }];
        let scan = scan(vec![process(30, 300, 7), process(20, 200, 8), process(10, 100, 1)]);
        assert_eq!(scan.leader("u", &node).unwrap().pid, 20);
        assert!(scan.leader("other", &node).is_none());
        assert_eq!(scan.kubepods(), Some("/node/kubepods"));
    }

    #[test]
    fn a_pod_that_has_only_processes_of_the_node_has_no_leader() {
        let node = [NetnsId { dev: 4, ino: 1 }];
        assert!(scan(vec![process(10, 100, 1)]).leader("u", &node).is_none());
    }

    #[test]
    fn the_start_time_is_read_behind_any_name() {
        let stat = "77 (a) b (c)) S 1 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(start_time(stat), Some(4242));
        assert_eq!(start_time("garbage"), None);
    }

    #[test]
    fn a_scan_of_this_machine_leaves_out_what_is_no_pod() {
        let scan = Scan::take(Path::new("/proc")).unwrap();
        let own = std::process::id() as i32;
        assert!(scan.pods.values().flatten().all(|process| process.pid != own));
    }

    /// A folder in the place of /proc with one process of a pod.
    fn played(test: &str) -> std::path::PathBuf {
        let dir = std::env::temp_dir().join(format!("understory-proc-{test}-{}", std::process::id()));
        std::fs::create_dir_all(dir.join("77/ns")).unwrap();
        let cgroup = "0::/kubepods/burstable/pod0b0a7a3a-9a5a-4c3f-8a53-1f4be5d8a111/c\n";
        std::fs::write(dir.join("77/cgroup"), cgroup).unwrap();
        std::fs::write(dir.join("77/stat"), "77 (a) S 1 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 0 0").unwrap();
        std::fs::write(dir.join("77/ns/net"), "").unwrap();
        dir
    }

    #[test]
    fn no_name_hides_a_process() {
        let dir = played("name");
        let stat = b"77 (\xff\xfe) ) S 1 77 77 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        std::fs::write(dir.join("77/stat"), stat).unwrap();
        let cgroup = b"0::/kubepods/burstable/pod0b0a7a3a-9a5a-4c3f-8a53-1f4be5d8a111/\xff\n";
        std::fs::write(dir.join("77/cgroup"), cgroup).unwrap();
        let scan = Scan::take(&dir).unwrap();
        assert_eq!(scan.processes("0b0a7a3a-9a5a-4c3f-8a53-1f4be5d8a111")[0].started, 4242);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn a_process_that_is_gone_is_left_out_and_one_that_cannot_be_read_makes_no_scan() {
        let dir = played("read");
        std::fs::create_dir_all(dir.join("78")).unwrap();
        assert_eq!(Scan::take(&dir).unwrap().pods.len(), 1);
        std::fs::remove_file(dir.join("77/stat")).unwrap();
        // As good as any other error of reading.
        std::fs::create_dir_all(dir.join("77/stat")).unwrap();
        assert!(Scan::take(&dir).is_err());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    /// A pod paired with another pod's namespace would get its identity.
    #[tokio::test]
    async fn a_namespace_without_the_pods_address_is_refused() {
        let netns = fresh();
        netns
            .run(|| {
                let add = ["addr", "add", "10.99.0.1/32", "dev", "lo"];
                assert!(std::process::Command::new("ip").args(add).status().unwrap().success());
            })
            .unwrap();
        let (own, other) = ("10.99.0.1".parse().unwrap(), "10.99.0.2".parse().unwrap());
        require_address(&netns, &[own]).await.unwrap();
        require_address(&netns, &[other, own]).await.unwrap();
        assert!(matches!(require_address(&netns, &[other]).await, Err(FindError::Sandbox { .. })));
        assert!(matches!(require_address(&netns, &[]).await, Err(FindError::Sandbox { .. })));
    }

    #[tokio::test]
    async fn a_process_that_is_gone_or_another_by_now_is_refused() {
        let gone = process(i32::MAX, 1, 1);
        assert!(matches!(open(&gone, &[]).await, Err(FindError::Vanished { .. })));
        // This process runs, but is no pod's.
        let reused = process(std::process::id() as i32, 1, 1);
        assert!(matches!(open(&reused, &[]).await, Err(FindError::Vanished { .. })));
    }
}

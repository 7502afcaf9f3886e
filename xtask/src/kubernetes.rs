//! Kubernetes for the tests: the Go module `tests/kubernetes`, built into `target/tools/kubernetes` beside the
//! definitions of resources (CRDs) that its modules bring.
//!
//! Must never cost a run more than it has to: built once for what it is made of, and behind everything else.

use std::fs;
use std::hash::{DefaultHasher, Hasher};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow, bail};

use crate::build::root;
use crate::golang::{Go, ends_of, remove, requirement};

/// What the one binary runs, by the name that it is called by.
const PROGRAMS: [&str; 5] = ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm"];

/// Without optimisation a build takes 430 s of CPU in place of 1,260, and a whole run of the tests half a minute more.
const COMPILER: &str = "-gcflags=all=-N -l";

/// Definitions of resources, as the modules bring them: name here, module, and where in it.
const DEFINITIONS: [(&str, &str, &str); 2] = [
    ("gateway-api", "sigs.k8s.io/gateway-api", "config/crd/standard"),
    ("istio", "istio.io/api", "kubernetes/customresourcedefinitions.gen.yaml"),
];

/// The file beside the programs that tells from what they were built.
const STAMP: &str = "inputs";

/// A build that goes on in the background.
#[derive(Debug)]
pub struct Build(Option<JoinHandle<Result<()>>>);

/// Begins to build, if that has not been done for what is there now.
pub fn begin(go: Go) -> Build {
    Build(Some(std::thread::spawn(move || build(&go))))
}

impl Build {
    /// There was nothing to do.
    pub fn done() -> Self {
        Self(None)
    }

    /// Waits for its end.
    pub fn finish(self) -> Result<()> {
        let Some(thread) = self.0 else { return Ok(()) };
        if !thread.is_finished() {
            println!("Waiting for Kubernetes; to build it the first time takes five minutes on two idle cores.");
        }
        thread.join().map_err(|_| anyhow!("the thread that builds Kubernetes panicked"))?
    }
}

/// Was it built from what is there now?
pub fn is_built() -> Result<bool> {
    let inputs = inputs(&source())?;
    Ok(fs::read_to_string(place().join(STAMP)).is_ok_and(|built| built == inputs))
}

fn source() -> PathBuf {
    root().join("tests/kubernetes")
}

fn place() -> PathBuf {
    root().join("target/tools/kubernetes")
}

fn build(go: &Go) -> Result<()> {
    let (source, dir) = (source(), place());
    if is_built()? {
        return Ok(());
    }
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
    let output = go
        .command(&source)
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
        let from = go.module_dir(module, &source)?.join(path);
        copy_yaml(&from, &fresh.join("crds").join(name))?;
    }
    fs::write(fresh.join(STAMP), inputs(&source)?).context("write the stamp of the build")?;
    remove(&dir)?;
    fs::rename(&fresh, &dir).with_context(|| format!("move {} to {}", fresh.display(), dir.display()))?;
    println!("Built Kubernetes {version}.");
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

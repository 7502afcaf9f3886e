//! `cargo xtask test`: everything that must hold before a change lands, in the order of how fast it can fail.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::build::{self, Profile, cargo};
use crate::{ebpf, golang, kubernetes, packages, preflight};

/// A step that takes longer is taken for hung.
const STEP_LIMIT: Duration = Duration::from_secs(25 * 60);

/// What became of one step.
struct Step {
    name: &'static str,
    ok: bool,
    took: Duration,
    passed: u32,
    failed: u32,
    skipped: usize,
}

/// Runs the check; with a filter only the kernel and end-to-end tests whose names contain it.
pub fn run(filter: Option<&str>) -> Result<ExitCode> {
    packages::install(packages::ALL)?;
    packages::fetch_envoy()?;
    preflight::check()?;
    // Takes long, and is needed last.
    let kubernetes = golang::begin();
    let mut steps = Vec::new();
    if filter.is_none() {
        steps.push(step("format", cargo(&["fmt", "--all", "--check"]))?);
        steps.push(step("lints", cargo(&["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]))?);
        steps.push(step("unit tests", cargo(&["test", "--workspace", "--no-fail-fast", "--lib", "--bins"]))?);
    }
    if filter.is_none() {
        steps.push(step("kernel tests", cargo(&["test", "-p", "ztunnel", "--no-fail-fast", "--test", "*"]))?);
        let start = Instant::now();
        println!("==== eBPF object");
        let checked = ebpf::run(build::root(), true);
        if let Err(error) = &checked {
            println!("eBPF object: {error:#}");
        }
        if build::interrupted() {
            bail!("interrupted");
        }
        steps.push(Step {
            name: "eBPF object",
            ok: checked.is_ok(),
            took: start.elapsed(),
            passed: 0,
            failed: 0,
            skipped: 0,
        });
    }
    println!("==== build");
    let build_start = Instant::now();
    let built = build::binaries(Profile::Dev).is_ok();
    steps.push(Step { name: "build", ok: built, took: build_start.elapsed(), passed: 0, failed: 0, skipped: 0 });
    if built {
        // Without a name, ztunnel's own have run above.
        let packages: &[&str] = if filter.is_some() { &["ztunnel", "tests"] } else { &["tests"] };
        let files = packages.iter().map(|package| test_files(package)).collect::<Result<Vec<_>>>()?.concat();
        let (with_go, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|file| needs_go(file));
        steps.push(step("end to end", end_to_end(packages, &others, &["--test-threads=2"], filter))?);
        steps.extend(step_with_go(kubernetes, &with_go, filter)?);
    }
    if let Some(filter) = filter
        && steps.iter().all(|step| step.ok && step.passed == 0 && step.skipped == 0)
    {
        bail!("no kernel or end-to-end test has a name with {filter:?} in it");
    }
    Ok(summary(&steps))
}

/// Does this file of tests talk to programs that Go builds? To a real API server, or to h2spec.
fn needs_go(file: &str) -> bool {
    file.starts_with("kubernetes") || file == "h2spec"
}

/// The tests that need what Go builds, most of it in the background. Where it cannot be built they are named and left
/// out; in CI, where nothing may be missing unseen, that is a failure.
fn step_with_go(build: Result<kubernetes::Build>, files: &[String], filter: Option<&str>) -> Result<Option<Step>> {
    const NAME: &str = "with Go";
    let start = Instant::now();
    let output = end_to_end(&["tests"], files, &["--list"], filter).stdout(Stdio::piped()).output();
    let list = output.context("start cargo")?;
    let names = listed(&String::from_utf8_lossy(&list.stdout));
    if list.status.success() && names.is_empty() {
        // None of them has a name that was asked for: nothing to wait for.
        return Ok(None);
    }
    let Err(missing) = build.and_then(kubernetes::Build::finish) else {
        return step(NAME, end_to_end(&["tests"], files, &["--test-threads=2"], filter)).map(Some);
    };
    if build::interrupted() {
        bail!("interrupted");
    }
    println!("==== {NAME}");
    for name in &names {
        println!("skipped: {name}");
    }
    println!("{} tests with a real Kubernetes or h2spec skipped: {missing:#}", names.len());
    let step = Step { name: NAME, ok: !is_ci(), took: start.elapsed(), passed: 0, failed: 0, skipped: names.len() };
    Ok(Some(step))
}

/// Names in the answer of cargo's test runner to `--list`.
fn listed(text: &str) -> Vec<String> {
    text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
}

fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false")
}

/// cargo's test runner on some files of tests.
fn end_to_end(packages: &[&str], files: &[String], args: &[&str], filter: Option<&str>) -> Command {
    let mut all = vec!["test", "--no-fail-fast"];
    all.extend(packages.iter().flat_map(|package| ["-p", package]));
    all.extend(files.iter().flat_map(|file| ["--test", file.as_str()]));
    all.push("--");
    all.extend(args);
    all.extend(filter);
    let mut command = cargo(&all);
    command.env("RUST_BACKTRACE", "0");
    command
}

/// A package's files of kernel and end-to-end tests: `tests/<name>.rs` and `tests/<name>/main.rs`.
fn test_files(package: &str) -> Result<Vec<String>> {
    let dir = build::root().join(package).join("tests");
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&dir).with_context(|| format!("read {}", dir.display()))? {
        let path = entry.with_context(|| format!("read {}", dir.display()))?.path();
        if path.extension().is_some_and(|extension| extension == "rs") || path.join("main.rs").exists() {
            names.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
        }
    }
    names.sort();
    Ok(names)
}

fn summary(steps: &[Step]) -> ExitCode {
    println!();
    for step in steps {
        let counts = match (step.passed, step.failed, step.skipped) {
            (0, 0, 0) => String::new(),
            (0, 0, skipped) => format!("{skipped} skipped"),
            (passed, failed, _) => format!("{passed} passed, {failed} failed"),
        };
        let verdict = if step.ok { "ok" } else { "FAILED" };
        println!("{:<14} {verdict:<7} {:>6.1} s  {counts}", step.name, step.took.as_secs_f64());
    }
    let passed: u32 = steps.iter().map(|step| step.passed).sum();
    let failed: u32 = steps.iter().map(|step| step.failed).sum();
    // A step may fail without a test that failed: it counts as one.
    let broken = steps.iter().filter(|step| !step.ok && step.failed == 0).count() as u32;
    println!("{passed} passed, {} failed", failed + broken);
    if failed + broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs a command with its output shown, and counts the results of cargo's test runner in it.
fn step(name: &'static str, mut command: Command) -> Result<Step> {
    println!("==== {name}");
    let start = Instant::now();
    let mut child = command.stdout(Stdio::piped()).spawn().with_context(|| format!("{name}: start cargo"))?;
    let stdout = child.stdout.take().expect("piped");
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
            if sender.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                return;
            }
        }
    });
    let (mut passed, mut failed) = (0, 0);
    let mut hung = false;
    loop {
        match lines.recv_timeout(STEP_LIMIT.saturating_sub(start.elapsed())) {
            Ok(line) => {
                let mut out = std::io::stdout().lock();
                let _ = writeln!(out, "{line}");
                if let Some((good, bad)) = counts(&line) {
                    passed += good;
                    failed += bad;
                }
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                println!("{name}: no end after {STEP_LIMIT:?}, given up");
                hung = true;
                end_tree(child.id());
                break;
            }
        }
    }
    let status = child.wait().with_context(|| format!("{name}: wait for cargo"))?;
    if build::interrupted() {
        bail!("interrupted");
    }
    Ok(Step { name, ok: status.success() && !hung, took: start.elapsed(), passed, failed, skipped: 0 })
}

/// Asks a process and all below it to end, lowest first; the tests then clean up after themselves.
fn end_tree(pid: u32) {
    let parent_of = |entry: &std::fs::DirEntry| {
        let stat = std::fs::read_to_string(entry.path().join("stat")).ok()?;
        stat[stat.rfind(')')? + 2..].split(' ').nth(1)?.parse::<u32>().ok()
    };
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let child = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
        if let (Some(child), Some(parent)) = (child, parent_of(&entry))
            && parent == pid
        {
            end_tree(child);
        }
    }
    if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
}

/// `test result: ok. 12 passed; 0 failed; …`
fn counts(line: &str) -> Option<(u32, u32)> {
    let rest = line.strip_prefix("test result: ")?.split_once(". ")?.1;
    let mut parts = rest.split("; ");
    let passed = parts.next()?.strip_suffix(" passed")?.parse().ok()?;
    let failed = parts.next()?.strip_suffix(" failed")?.parse().ok()?;
    Some((passed, failed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_tests_is_run() {
        let files = test_files("tests").expect("there are tests");
        let with_go: Vec<_> = files.iter().filter(|file| needs_go(file)).collect();
        assert!(with_go.len() >= 2 && with_go.len() < files.len(), "{files:?}");
        let files = test_files("ztunnel").expect("there are tests");
        assert!(files.contains(&"capture".to_owned()) && files.contains(&"policy".to_owned()), "{files:?}");
    }

    #[test]
    fn names_of_tests_are_read_from_the_list() {
        assert_eq!(
            listed("one: test\nmod::two: test\nthree: benchmark\n\n2 tests, 1 benchmark\n"),
            ["one", "mod::two"]
        );
    }

    #[test]
    fn results_of_the_test_runner_are_counted() {
        let line = "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s";
        assert_eq!(counts(line), Some((12, 0)));
        let line = "test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1s";
        assert_eq!(counts(line), Some((3, 2)));
        assert_eq!(counts("test something ... ok"), None);
    }
}

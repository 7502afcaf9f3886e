//! A long-running process of a testbed (control, agent, proxy, a peer such as Envoy): start, signals, log, figures.

use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::wait::{wait_for, wait_for_within};

/// A process with its log. It is ended with the testbed.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    log: PathBuf,
    child: Mutex<Option<Child>>,
}

impl Daemon {
    /// A process that has not been started yet; its output will go to `logs/<name>.log`.
    pub(crate) fn new(name: &str, logs: &Path) -> Self {
        Self { name: name.to_owned(), log: logs.join(format!("{name}.log")), child: Mutex::new(None) }
    }

    /// Starts it, or starts it again; the log goes on.
    #[track_caller]
    pub(crate) fn start(&self, mut command: Command) {
        command.stdout(self.open_log());
        self.start_to(command);
    }

    /// The same with an output that nobody reads.
    #[track_caller]
    pub(crate) fn start_unread(&self, mut command: Command) {
        command.stdout(Stdio::piped());
        self.start_to(command);
    }

    fn open_log(&self) -> fs::File {
        let log = OpenOptions::new().create(true).append(true).open(&self.log);
        log.unwrap_or_else(|e| panic!("open {}: {e}", self.log.display()))
    }

    #[track_caller]
    fn start_to(&self, mut command: Command) {
        command.stderr(self.open_log());
        let child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", self.name));
        let previous = self.child.lock().unwrap().replace(child);
        if let Some(mut previous) = previous {
            let _ = previous.kill();
            let _ = previous.wait();
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    #[track_caller]
    pub fn pid(&self) -> u32 {
        let child = self.child.lock().unwrap();
        child.as_ref().unwrap_or_else(|| panic!("{} does not run", self.name)).id()
    }

    pub fn runs(&self) -> bool {
        self.child.lock().unwrap().as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Ends it as a crash does, and waits until it is gone.
    pub fn kill9(&self) {
        self.signal(Signal::KILL);
        self.wait_end();
    }

    /// Ends it if it runs.
    pub(crate) fn end(&self) {
        if let Some(mut child) = self.child.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Asks it to end, and waits until it is gone.
    pub fn terminate(&self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait_end()
    }

    /// Stops it in its place (SIGSTOP); [`Daemon::thaw`] lets it go on.
    pub fn freeze(&self) {
        self.signal(Signal::STOP);
        let state = || fs::read_to_string(format!("/proc/{}/stat", self.pid())).ok()?.contains(") T ").then_some(());
        wait_for(&format!("{} to stop", self.name), state);
    }

    pub fn thaw(&self) {
        self.signal(Signal::CONT);
    }

    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).expect("a pid is not 0");
        kill_process(pid, signal).unwrap_or_else(|e| panic!("send {signal:?} to {}: {e}", self.name));
    }

    /// Waits until it ends by itself.
    #[track_caller]
    pub fn wait_end(&self) -> ExitStatus {
        wait_for(&format!("{} to end", self.name), || {
            let mut child = self.child.lock().unwrap();
            let status = child.as_mut()?.try_wait().expect("wait for a child")?;
            *child = None;
            Some(status)
        })
    }

    /// All that it has printed so far, in all its lives.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// A mark in the log, to look only at what comes later.
    pub fn log_mark(&self) -> LogMark<'_> {
        LogMark { daemon: self, from: self.log().len() }
    }

    /// Waits for a line that holds all the given texts, and returns it.
    #[track_caller]
    pub fn wait_log(&self, texts: &[&str]) -> String {
        LogMark { daemon: self, from: 0 }.wait(texts)
    }

    /// Proportional set size in bytes.
    pub fn pss(&self) -> u64 {
        let path = format!("/proc/{}/smaps_rollup", self.pid());
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("smaps_rollup has Pss");
        line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number of kB") * 1024
    }

    /// Number of open descriptors.
    pub fn open_fds(&self) -> usize {
        let path = format!("/proc/{}/fd", self.pid());
        fs::read_dir(&path).unwrap_or_else(|e| panic!("read {path}: {e}")).count()
    }

    /// CPU time used by this life of the process.
    pub fn cpu(&self) -> Duration {
        let path = format!("/proc/{}/stat", self.pid());
        let stat = fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {path}: {e}"));
        let fields: Vec<&str> = stat[stat.rfind(')').expect("a command in brackets") + 2..].split(' ').collect();
        // utime and stime, in ticks of 10 ms.
        let ticks: u64 = fields[11..13].iter().map(|f| f.parse::<u64>().expect("a number")).sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end();
    }
}

/// A place in a process' log.
#[derive(Debug)]
pub struct LogMark<'a> {
    daemon: &'a Daemon,
    from: usize,
}

impl LogMark<'_> {
    /// Lines after the mark that hold all the given texts.
    pub fn lines(&self, texts: &[&str]) -> Vec<String> {
        let log = self.daemon.log();
        let new = log.get(self.from..).unwrap_or_default();
        new.lines().filter(|line| texts.iter().all(|text| line.contains(text))).map(str::to_owned).collect()
    }

    /// Waits for a line after the mark that holds all the given texts.
    #[track_caller]
    pub fn wait(&self, texts: &[&str]) -> String {
        let what = format!("a log line of {} with {texts:?}", self.daemon.name);
        wait_for_within(Duration::from_secs(15), &what, || self.lines(texts).into_iter().next())
    }
}

/// How a process ended, in words.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".to_owned(),
    }
}

/// The last lines of all logs in a directory, for the report of a failing test.
pub(crate) fn log_tails(logs: &Path) -> String {
    const LINES: usize = 40;
    let mut text = String::new();
    let Ok(entries) = fs::read_dir(logs) else { return text };
    let mut files: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    for file in files {
        let log = fs::read_to_string(&file).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LINES)..];
        let _ = writeln!(text, "---- {} ({} of {} lines)", file.display(), tail.len(), lines.len());
        for line in tail {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

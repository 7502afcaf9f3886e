//! Removes a testbed from the machine, always in the same way: by name. Used when a testbed is dropped, when the
//! test's process is told to end, and for what processes left behind that were killed without a chance.
//!
//! Must never touch anything whose name is not a testbed's, nor a testbed whose owner lives (but for its own).

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, Once};
use std::thread::ThreadId;
use std::time::Duration;

use crate::cgroup::{Cgroup, cgroup2_root};
use crate::daemon;
use crate::name::{BPF_DIR, NETNS_DIR, TestbedName};
use crate::netns;

/// A living testbed of this process.
struct Entry {
    name: TestbedName,
    owner: ThreadId,
}

static LIVING: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

/// Announces a testbed before anything of it is made. From then on it is removed whatever happens to the process,
/// but for SIGKILL, after which the next [`sweep`] does it.
pub(crate) fn register(name: &TestbedName) {
    wait_if_ending();
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        catch_signals();
        print_logs_on_panic();
        // SAFETY: the function may be called at exit, when the process still has all its threads and memory.
        unsafe { libc::atexit(at_exit) };
    });
    LIVING.lock().unwrap().push(Entry { name: name.clone(), owner: std::thread::current().id() });
}

/// Removes one testbed.
pub(crate) fn remove(name: &TestbedName) {
    let cgroup = name.cgroup(&cgroup2_root());
    if cgroup.exists() {
        let cgroup = Cgroup::create(cgroup);
        cgroup.kill();
        cgroup.remove();
    }
    for file in files_of(Path::new(NETNS_DIR), |owner| owner == name) {
        netns::remove(&file);
    }
    for file in files_of(Path::new(BPF_DIR), |owner| owner == name) {
        let _ = fs::remove_dir_all(Path::new(BPF_DIR).join(file));
    }
    let _ = fs::remove_dir_all(name.dir());
    LIVING.lock().unwrap().retain(|entry| entry.name != *name);
}

/// Removes what testbeds of dead processes left. Returns their names.
pub fn sweep() -> Vec<TestbedName> {
    let root = cgroup2_root();
    let places = [Path::new(NETNS_DIR), Path::new(BPF_DIR), &root, &std::env::temp_dir()];
    let mut dead = HashSet::new();
    for place in places {
        for file in files_of(place, |owner| !owner.owner_lives()) {
            dead.extend(TestbedName::of_file(&file));
        }
    }
    dead.iter().for_each(remove);
    dead.into_iter().collect()
}

/// Everything on the machine that belongs to a testbed, for tests of the clean-up itself.
pub fn traces(name: &TestbedName) -> Vec<String> {
    let root = cgroup2_root();
    let places = [Path::new(NETNS_DIR), Path::new(BPF_DIR), &root, &std::env::temp_dir()];
    let found = |place: &&Path| files_of(place, |owner| owner == name).into_iter().map(|f| place.join(f)).collect();
    places.iter().flat_map(|place| -> Vec<_> { found(place) }).map(|path| path.display().to_string()).collect()
}

fn files_of(dir: &Path, belongs: impl Fn(&TestbedName) -> bool) -> Vec<String> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|file| TestbedName::of_file(file).is_some_and(|owner| belongs(&owner))).collect()
}

fn remove_living() {
    let names: Vec<_> = LIVING.lock().map(|l| l.iter().map(|e| e.name.clone()).collect()).unwrap_or_default();
    names.iter().for_each(remove);
}

extern "C" fn at_exit() {
    wait_if_ending();
    remove_living();
}

/// Set when a signal ends the process: the thread that handles it removes everything and raises the signal again.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Keeps every other thread from making anything new, or from ending the process in another way, meanwhile.
fn wait_if_ending() {
    while ENDING.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Where the signal handler tells the thread that waits for it which signal came.
static SIGNAL_PIPE: std::sync::OnceLock<std::os::fd::OwnedFd> = std::sync::OnceLock::new();

extern "C" fn on_signal(signal: libc::c_int) {
    use std::os::fd::AsRawFd;
    if let Some(pipe) = SIGNAL_PIPE.get() {
        let byte = signal as u8;
        // SAFETY: write(2) is async-signal-safe; the pipe is never closed; the buffer is one byte on the stack.
        unsafe { libc::write(pipe.as_raw_fd(), (&raw const byte).cast(), 1) };
    }
}

fn catch_signals() {
    let (mut read, write) = std::io::pipe().expect("make a pipe");
    SIGNAL_PIPE.set(write.into()).expect("set once");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only calls write(2); the structure is zeroed, which is a valid empty mask and flags.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as *const () as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
    std::thread::spawn(move || {
        let mut byte = [0u8];
        while !matches!(read.read(&mut byte), Ok(1)) {}
        ENDING.store(true, Ordering::Release);
        remove_living();
        // SAFETY: the default action is restored and the signal raised again, so that the exit status tells it.
        unsafe {
            libc::signal(byte[0].into(), libc::SIG_DFL);
            libc::raise(byte[0].into());
        }
    });
}

/// A failing test prints the ends of the logs of its own testbed, or, if it has none of its own, of all.
fn print_logs_on_panic() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        previous(info);
        let thread = std::thread::current().id();
        let Ok(living) = LIVING.try_lock() else { return };
        let own = living.iter().any(|entry| entry.owner == thread);
        let is_test = std::thread::current().name().is_some_and(|name| !name.starts_with("testbed "));
        let dirs: Vec<_> =
            living.iter().filter(|e| e.owner == thread || (!own && is_test)).map(|e| e.name.dir()).collect();
        drop(living);
        // The processes write their logs a moment later.
        std::thread::sleep(Duration::from_millis(300));
        for dir in dirs {
            eprint!("{}", daemon::log_tails(&dir.join("logs")));
        }
    }));
}

//! The queue between the threads that log and the one thread that writes.
//!
//! Must never make a producer wait for the reader of stdout: a full queue drops the line and counts it, and the writer
//! says how many were lost as soon as it can write again.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use super::{Format, line};

/// Lines on their way to the writer thread.
pub struct Queue {
    state: Mutex<State>,
    /// There is something to write.
    filled: Condvar,
    /// Everything is written.
    drained: Condvar,
    lost: AtomicU64,
    limit: usize,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// The writer holds lines that are not written yet.
    writing: bool,
    /// Somebody waits: do not gather.
    hurry: bool,
}

impl Queue {
    /// A queue of at most `limit` bytes in front of stdout.
    pub fn stdout(format: Format, limit: usize) -> io::Result<Arc<Self>> {
        let stdout = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        Self::start(stdout, format, limit)
    }

    /// Starts the writer thread. It lives as long as the process.
    pub(super) fn start(out: impl Write + Send + 'static, format: Format, limit: usize) -> io::Result<Arc<Self>> {
        let queue = Arc::new(Self {
            state: Mutex::default(),
            filled: Condvar::new(),
            drained: Condvar::new(),
            lost: AtomicU64::new(0),
            limit,
        });
        let writer = queue.clone();
        thread::Builder::new().name("log".into()).spawn(move || writer.write_to(out, format))?;
        Ok(queue)
    }

    /// Appends a line (with its newline), or drops and counts it.
    pub fn push(&self, line: &str) {
        let mut state = self.lock();
        if state.waiting.len() + line.len() > self.limit {
            drop(state);
            self.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let first = state.waiting.is_empty();
        state.waiting.extend_from_slice(line.as_bytes());
        drop(state);
        if first {
            self.filled.notify_one();
        }
    }

    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Waits until everything is written, at most `limit`.
    pub fn flush(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        while state.writing || !state.waiting.is_empty() {
            state.hurry = true;
            self.filled.notify_one();
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.drained.wait_timeout(state, left).unwrap_or_else(|e| e.into_inner()).0;
        }
    }

    fn write_to(&self, mut out: impl Write, format: Format) {
        let mut batch = Vec::new();
        let (mut reported, mut failed) = (0, 0);
        loop {
            self.next_batch(&mut batch);
            if write_all(&mut out, &batch).is_err() {
                failed += 1;
                self.lost.fetch_add(batch.iter().filter(|&&b| b == b'\n').count() as u64, Ordering::Relaxed);
            }
            let lost = self.lost();
            if lost != reported && failed < GIVE_UP_AFTER {
                let _ = write_all(&mut out, line::loss(format, lost - reported).as_bytes());
                reported = lost;
            }
            batch.clear();
            batch.shrink_to(KEPT_BATCH);
            let mut state = self.lock();
            state.writing = false;
            if state.waiting.is_empty() {
                state.hurry = false;
                self.drained.notify_all();
            }
        }
    }

    /// Waits for lines; gives them a moment to gather, so that a burst costs one wake-up and one write.
    fn next_batch(&self, batch: &mut Vec<u8>) {
        let mut state = self.lock();
        while state.waiting.is_empty() {
            state = self.filled.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        if !state.hurry {
            let gathered = self.filled.wait_timeout_while(state, GATHER, |state| !state.hurry);
            state = gathered.unwrap_or_else(|e| e.into_inner()).0;
        }
        std::mem::swap(&mut state.waiting, batch);
        state.writing = true;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// As `Write::write_all`, but also for a stdout that somebody made non-blocking.
fn write_all(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => bytes = &bytes[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => thread::sleep(RETRY),
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// How long the writer waits for more lines after the first one.
const GATHER: Duration = Duration::from_millis(20);
/// Between tries on a non-blocking stdout.
const RETRY: Duration = Duration::from_millis(10);
/// After so many failed writes (nobody reads stdout any more) losses are only counted.
const GIVE_UP_AFTER: u32 = 3;
/// The writer keeps a buffer up to this size for the next batch.
const KEPT_BATCH: usize = 64 << 10;

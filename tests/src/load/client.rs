//! The clients of the benches. All of them run on one thread, so that most of a small machine is left to what is
//! measured.

use std::cell::{Cell, RefCell};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::LocalSet;
use tokio::time::{sleep_until, timeout};

use super::exchange::request;
use super::{Measured, Talk};

const BLOCK: usize = 256 * 1024;
const PATIENCE: Duration = Duration::from_secs(10);

/// Counts of all tasks of a run.
struct Tally {
    start: Instant,
    count: Cell<u64>,
    errors: Cell<u64>,
    first_error: RefCell<Option<String>>,
    by_second: RefCell<Vec<u64>>,
    latency: RefCell<Histogram<u64>>,
}

impl Tally {
    fn new() -> Rc<Self> {
        Rc::new(Self {
            start: Instant::now(),
            count: Cell::new(0),
            errors: Cell::new(0),
            first_error: RefCell::default(),
            by_second: RefCell::default(),
            latency: RefCell::new(Histogram::new(3).expect("3 digits")),
        })
    }

    fn done(&self, since: Instant) {
        self.count.set(self.count.get() + 1);
        let _ = self.latency.borrow_mut().record(since.elapsed().as_nanos() as u64);
        let second = self.start.elapsed().as_secs() as usize;
        let mut by_second = self.by_second.borrow_mut();
        if by_second.len() <= second {
            by_second.resize(second + 1, 0);
        }
        by_second[second] += 1;
    }

    fn failed(&self, error: &io::Error) {
        self.errors.set(self.errors.get() + 1);
        self.first_error.borrow_mut().get_or_insert_with(|| error.to_string());
    }

    fn measured(&self) -> Measured {
        let latency = self.latency.borrow();
        let seconds = self.start.elapsed();
        let mut by_second = self.by_second.borrow().clone();
        by_second.truncate(seconds.as_secs() as usize);
        Measured {
            count: self.count.get(),
            seconds: seconds.as_secs_f64(),
            errors: self.errors.get(),
            first_error: self.first_error.borrow().clone(),
            p50_us: latency.value_at_quantile(0.5) as f64 / 1000.0,
            p99_us: latency.value_at_quantile(0.99) as f64 / 1000.0,
            by_second,
            ..Measured::default()
        }
    }
}

async fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let stream =
        timeout(PATIENCE, TcpStream::connect(to)).await.map_err(|_| io::Error::other("connect: no answer"))??;
    stream.set_nodelay(true)?;
    Ok(stream)
}

async fn one(stream: &mut TcpStream, talk: Talk) -> io::Result<()> {
    timeout(PATIENCE, request(stream, talk)).await.map_err(|_| io::Error::other("request: no answer"))?
}

/// Connections that have had one answer: what comes later measures no set-up.
async fn warm(to: SocketAddr, talk: Talk, connections: usize) -> io::Result<Vec<TcpStream>> {
    let mut streams = Vec::new();
    for _ in 0..connections {
        let mut stream = connect(to).await?;
        one(&mut stream, talk).await?;
        streams.push(stream);
    }
    Ok(streams)
}

pub(super) async fn saturate(to: SocketAddr, talk: Talk, connections: usize, time: Duration) -> io::Result<Measured> {
    let streams = warm(to, talk, connections).await?;
    let tally = Tally::new();
    let tasks = LocalSet::new();
    for mut stream in streams {
        let tally = tally.clone();
        tasks.spawn_local(async move {
            while tally.start.elapsed() < time {
                let sent = Instant::now();
                match one(&mut stream, talk).await {
                    Ok(()) => tally.done(sent),
                    Err(e) => return tally.failed(&e),
                }
            }
        });
    }
    tasks.await;
    Ok(tally.measured())
}

pub(super) async fn rate(
    to: SocketAddr,
    talk: Talk,
    connections: usize,
    per_second: u32,
    time: Duration,
) -> io::Result<Measured> {
    let streams = warm(to, talk, connections).await?;
    let tally = Tally::new();
    let tasks = LocalSet::new();
    let interval = Duration::from_secs(1) / per_second;
    for (i, mut stream) in streams.into_iter().enumerate() {
        let tally = tally.clone();
        tasks.spawn_local(async move {
            // Every connection has its share of the beats.
            let mut due = tally.start + interval * i as u32;
            while due < tally.start + time {
                wait_exactly(due).await;
                match one(&mut stream, talk).await {
                    // From when it was due: an answer that comes late delays the next ones, and they count it.
                    Ok(()) => tally.done(due),
                    Err(e) => return tally.failed(&e),
                }
                due += interval * connections as u32;
            }
        });
    }
    tasks.await;
    Ok(tally.measured())
}

/// tokio's timers have a granularity of a millisecond: the rest is waited by yielding.
async fn wait_exactly(due: Instant) {
    let early = due.checked_sub(Duration::from_micros(1200));
    if let Some(early) = early.filter(|early| *early > Instant::now()) {
        sleep_until(early.into()).await;
    }
    while Instant::now() < due {
        tokio::task::yield_now().await;
    }
}

pub(super) async fn upload(to: SocketAddr, flows: usize, time: Duration) -> io::Result<Measured> {
    bulk(flows, time, move |start| async move {
        let mut stream = connect(to).await?;
        let block = vec![b'u'; BLOCK];
        while start.elapsed() < time {
            stream.write_all(&block).await?;
        }
        stream.shutdown().await?;
        // The server says how much it has had.
        timeout(PATIENCE, stream.read_u64()).await.map_err(|_| io::Error::other("upload: no count"))?
    })
    .await
}

pub(super) async fn download(to: SocketAddr, flows: usize, time: Duration) -> io::Result<Measured> {
    bulk(flows, time, move |start| async move {
        let mut stream = connect(to).await?;
        let mut block = vec![0; BLOCK];
        let mut total = 0;
        while start.elapsed() < time {
            match stream.read(&mut block).await? {
                0 => return Err(io::Error::other("download: the server ended")),
                n => total += n as u64,
            }
        }
        Ok(total)
    })
    .await
}

async fn bulk<F>(flows: usize, _time: Duration, flow: impl Fn(Instant) -> F) -> io::Result<Measured>
where
    F: Future<Output = io::Result<u64>> + 'static,
{
    let tally = Tally::new();
    let tasks = LocalSet::new();
    let handles: Vec<_> = (0..flows).map(|_| tasks.spawn_local(flow(tally.start))).collect();
    tasks.await;
    let mut bytes_by_flow = Vec::new();
    for handle in handles {
        match handle.await.map_err(io::Error::other)? {
            Ok(bytes) => bytes_by_flow.push(bytes),
            Err(e) => tally.failed(&e),
        }
    }
    Ok(Measured { bytes: bytes_by_flow.iter().sum(), bytes_by_flow, ..tally.measured() })
}

pub(super) async fn new_connections(to: SocketAddr, at_once: usize, time: Duration) -> io::Result<Measured> {
    drop(warm(to, Talk::Bytes, 1).await?);
    let tally = Tally::new();
    let tasks = LocalSet::new();
    for _ in 0..at_once {
        let tally = tally.clone();
        tasks.spawn_local(async move {
            while tally.start.elapsed() < time {
                let start = Instant::now();
                let short = async {
                    let mut stream = connect(to).await?;
                    one(&mut stream, Talk::Bytes).await
                };
                match short.await {
                    Ok(()) => tally.done(start),
                    Err(e) => {
                        tally.failed(&e);
                        // A fault must not turn into a busy loop.
                        tokio::time::sleep(Duration::from_millis(10)).await;
                    }
                }
            }
        });
    }
    tasks.await;
    Ok(tally.measured())
}

pub(super) async fn idle(to: SocketAddr, connections: usize) -> io::Result<Measured> {
    let streams = warm(to, Talk::Bytes, connections).await?;
    println!("ready");
    // Held until the bench closes the other end.
    let _ = tokio::io::copy(&mut stdin()?, &mut tokio::io::sink()).await;
    drop(streams);
    Ok(Measured::default())
}

fn stdin() -> io::Result<tokio::net::unix::pipe::Receiver> {
    use std::os::fd::AsFd;
    tokio::net::unix::pipe::Receiver::from_owned_fd_unchecked(io::stdin().as_fd().try_clone_to_owned()?)
}

//! Load for the benches: servers, clients and the plain relay that is the yardstick of a machine. Each runs as a
//! process of its own inside a pod, started with a [`Job`], and prints what it measured as JSON.

mod client;
mod exchange;
mod relay;
mod server;

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::place::{Place, binary};

/// Bytes of a request and of its answer.
pub(crate) const REQUEST: usize = 128;
pub(crate) const ANSWER: usize = 1024;

/// Ports of a load server.
pub const REQUESTS_PORT: u16 = 8080;
pub const SINK_PORT: u16 = 8081;
pub const SOURCE_PORT: u16 = 8082;
/// Requests and answers of the same size, in HTTP/1.1.
pub const HTTP_PORT: u16 = 8083;

/// What requests look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Talk {
    /// Bytes that mean nothing.
    #[default]
    Bytes,
    Http,
}

/// What a load process does.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Job {
    /// Serves all ports until it is killed.
    Serve,
    /// Accepts on a port of all addresses and connects each connection on, until it is killed.
    Relay { listen: u16, to: SocketAddr },
    /// So many connections, each sends its next request when the answer to the last has come.
    Saturate { to: SocketAddr, talk: Talk, connections: usize, time: Duration },
    /// Requests at a fixed rate over so many connections. Times count from when a request was due.
    Rate { to: SocketAddr, talk: Talk, connections: usize, per_second: u32, time: Duration },
    /// Sends as fast as it can over so many flows.
    Upload { to: SocketAddr, flows: usize, time: Duration },
    /// Receives as fast as it can over so many flows.
    Download { to: SocketAddr, flows: usize, time: Duration },
    /// Connect, one request, close; so many at once.
    NewConnections { to: SocketAddr, at_once: usize, time: Duration },
    /// Opens connections with one request each, says `ready`, and holds them until its input ends.
    Idle { to: SocketAddr, connections: usize },
}

/// What a load client measured.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Measured {
    /// Requests, or connections.
    pub count: u64,
    /// Bytes that the receiver had.
    pub bytes: u64,
    /// Of each flow.
    pub bytes_by_flow: Vec<u64>,
    pub seconds: f64,
    pub errors: u64,
    pub first_error: Option<String>,
    pub p50_us: f64,
    pub p99_us: f64,
    /// Connections or requests in each whole second.
    pub by_second: Vec<u64>,
}

/// Runs a job in this process. Called by the `testapp` binary.
pub fn run(job: &str) -> std::io::Result<()> {
    let job: Job = serde_json::from_str(job).map_err(std::io::Error::other)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let measured = runtime.block_on(async {
        match job {
            Job::Serve => server::run().await,
            Job::Relay { listen, to } => relay::run(listen, to).await,
            Job::Saturate { to, talk, connections, time } => client::saturate(to, talk, connections, time).await,
            Job::Rate { to, talk, connections, per_second, time } => {
                client::rate(to, talk, connections, per_second, time).await
            }
            Job::Upload { to, flows, time } => client::upload(to, flows, time).await,
            Job::Download { to, flows, time } => client::download(to, flows, time).await,
            Job::NewConnections { to, at_once, time } => client::new_connections(to, at_once, time).await,
            Job::Idle { to, connections } => client::idle(to, connections).await,
        }
    })?;
    println!("{}", serde_json::to_string(&measured).map_err(std::io::Error::other)?);
    Ok(())
}

impl Place {
    fn load_command(&self, job: &Job) -> Command {
        let mut command = self.command(binary("testapp"));
        command.arg("load").arg(serde_json::to_string(job).expect("a job is plain data"));
        if self.gives_way() {
            // SAFETY: between fork and exec only sched_setscheduler(2) is called, with a parameter of its own.
            unsafe { command.pre_exec(give_way) };
        }
        command
    }

    /// Runs a load client in this place to its end.
    #[track_caller]
    pub fn load(&self, job: &Job) -> Measured {
        let output = self.load_command(job).stderr(Stdio::inherit()).output();
        let output = output.unwrap_or_else(|e| panic!("{}: start a load client: {e}", self.name()));
        assert!(output.status.success(), "{}: {job:?} failed: {}", self.name(), output.status);
        serde_json::from_slice(&output.stdout).expect("a load client prints what it measured")
    }

    /// The same netns, with a cgroup of its own beside the app's, so that CPU time can be told apart.
    pub fn beside(&self, name: &str) -> Place {
        let app = self.cgroup();
        self.again(crate::cgroup::Cgroup::create(app.path().with_file_name(name)))
    }

    /// Starts a load server or a relay; it ends with the testbed.
    #[track_caller]
    pub fn start_load(&self, job: &Job) -> LoadProcess {
        let mut command = self.load_command(job);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().unwrap_or_else(|e| panic!("{}: start {job:?}: {e}", self.name()));
        let mut process = LoadProcess { child };
        process.wait_ready();
        process
    }
}

/// Leaves the cores to every other process that wants one.
fn give_way() -> std::io::Result<()> {
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the parameter lives through the call.
    match unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const priority) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// A load process that runs until it is dropped.
#[derive(Debug)]
pub struct LoadProcess {
    child: Child,
}

impl LoadProcess {
    /// Every long job says `ready` when it is.
    #[track_caller]
    fn wait_ready(&mut self) {
        use std::io::{BufRead, BufReader};
        let mut line = String::new();
        let output = self.child.stdout.as_mut().expect("piped");
        BufReader::new(output).read_line(&mut line).expect("read");
        assert_eq!(line, "ready\n", "the load process ended before it was ready");
    }
}

impl Drop for LoadProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

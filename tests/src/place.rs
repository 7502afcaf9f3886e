//! A place: a network namespace with a cgroup, in which processes and sockets live. Pods, nodes' host processes,
//! the control plane and machines outside the cluster are all places.

use std::ffi::OsStr;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::app::{App, Churn, ChurnReport, Connect, Order};
use crate::cgroup::Cgroup;
use crate::netns::Netns;
use crate::server::{Behaviour, Server};
use crate::stream::{End, StreamExt};

/// Reads and writes of sockets that a test holds give up after this, so that a fault fails a test and never hangs it.
pub const SOCKET_TIMEOUT: Duration = Duration::from_secs(20);

/// Longest wait for an app beyond what its order itself allows.
const APP_GRACE: Duration = Duration::from_secs(10);

/// A network namespace with a cgroup.
#[derive(Debug)]
pub struct Place {
    name: String,
    netns: Arc<Netns>,
    cgroup: Mutex<Cgroup>,
    app: Mutex<Option<Arc<App>>>,
    gives_way: bool,
}

impl Place {
    pub(crate) fn new(name: &str, netns: Arc<Netns>, cgroup: Cgroup) -> Self {
        Self { name: name.to_owned(), netns, cgroup: Mutex::new(cgroup), app: Mutex::new(None), gives_way: false }
    }

    /// The same netns with another cgroup.
    pub(crate) fn again(&self, cgroup: Cgroup) -> Self {
        Self::new(&self.name, self.netns.clone(), cgroup)
    }

    /// The same netns and cgroup, for load whose processes take no core that another process wants.
    pub fn at_leisure(&self) -> Self {
        Self { gives_way: true, ..self.again(self.cgroup()) }
    }

    pub(crate) fn gives_way(&self) -> bool {
        self.gives_way
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn netns(&self) -> &Arc<Netns> {
        &self.netns
    }

    /// The cgroup that new processes of this place join.
    pub fn cgroup(&self) -> Cgroup {
        self.cgroup.lock().unwrap().clone()
    }

    /// A command that will run in this place. Its standard input is empty.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let procs = self.cgroup().procs_file();
        let netns = self.netns.open();
        // SAFETY: between fork and exec only write(2) and setns(2) on descriptors opened before are called.
        unsafe {
            command.pre_exec(move || {
                if libc::write(procs.as_raw_fd(), c"0".as_ptr().cast(), 1) != 1
                    || libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) != 0
                {
                    return Err(io::Error::last_os_error());
                }
                Ok(())
            });
        }
        // Not in the terminal's foreground group: Ctrl-C is for the test, which then ends its processes itself.
        command.process_group(0).stdin(std::process::Stdio::null());
        command
    }

    /// Runs a program in this place to its end.
    #[track_caller]
    pub fn run(&self, program: &str, args: &[&str]) -> Output {
        let output = self.command(program).args(args).output();
        output.unwrap_or_else(|e| panic!("{}: start {program}: {e}", self.name))
    }

    /// Connects from this place, as a plain blocking app does.
    pub fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        self.dial(to).connect()
    }

    /// Whether a connection is reset before anything comes on it, which it may be while this still connects.
    #[track_caller]
    pub fn is_refused(&self, to: SocketAddr) -> bool {
        match self.connect(to) {
            Ok(mut stream) => stream.hear_end() == (Vec::new(), End::Reset),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => true,
            Err(error) => panic!("{}: connect to {to}: {error}", self.name),
        }
    }

    /// A connection with particulars: see [`Dial`].
    pub fn dial(&self, to: SocketAddr) -> Dial<'_> {
        let order = Connect {
            to,
            from: None,
            mapped: false,
            mptcp: false,
            fast_open: None,
            nonblocking: false,
            mark: None,
            timeout: SOCKET_TIMEOUT,
        };
        Dial { place: self, order }
    }

    /// Listens on a port of all addresses of both families, or of IPv4 where there is no IPv6.
    #[track_caller]
    pub fn listen(&self, port: u16) -> TcpListener {
        let dual = self.listen_on((Ipv6Addr::UNSPECIFIED, port).into());
        let listener = dual.or_else(|_| self.listen_on((Ipv4Addr::UNSPECIFIED, port).into()));
        listener.unwrap_or_else(|e| panic!("{}: listen on port {port}: {e}", self.name))
    }

    /// Listens on one address.
    pub fn listen_on(&self, address: SocketAddr) -> io::Result<TcpListener> {
        self.app().order_fd(&Order::Listen { address, mptcp: false }, APP_GRACE).map(Into::into)
    }

    /// Serves a port until the server is dropped. The server runs in the test; its socket is the pod's.
    #[track_caller]
    pub fn serve(&self, port: u16, behaviour: Behaviour) -> Server {
        Server::start(self.listen(port), behaviour)
    }

    /// As [`Place::serve`], on one address.
    #[track_caller]
    pub fn serve_on(&self, address: SocketAddr, behaviour: Behaviour) -> Server {
        let listener = self.listen_on(address).unwrap_or_else(|e| panic!("{}: listen on {address}: {e}", self.name));
        Server::start(listener, behaviour)
    }

    /// A UDP socket of this place.
    #[track_caller]
    pub fn udp(&self, address: SocketAddr) -> UdpSocket {
        let fd = self.app().order_fd(&Order::Udp { address }, APP_GRACE);
        let socket = UdpSocket::from(fd.unwrap_or_else(|e| panic!("{}: UDP on {address}: {e}", self.name)));
        socket.set_read_timeout(Some(SOCKET_TIMEOUT)).expect("set a timeout");
        socket
    }

    /// Many short connections from inside this place, each to the next of the given addresses: connect, send a
    /// line, expect it back, close first. The servers must echo.
    #[track_caller]
    pub fn churn(&self, to: &[SocketAddr], connections: u32, threads: u32) -> ChurnReport {
        let order = Order::Churn(Churn { to: to.to_vec(), connections, threads });
        let answer = self.app().order(&order, Duration::from_secs(900));
        let (answer, _) = answer.unwrap_or_else(|e| panic!("{}: short connections: {e}", self.name));
        answer.churn.expect("the app reports")
    }

    /// HTTP GET from the test's process, made inside the netns; for admin ports, never for a pod's own traffic.
    pub fn http_get(&self, address: SocketAddr, path: &str) -> io::Result<crate::http::Response> {
        self.netns.run(|| crate::http::request("GET", address, path))
    }

    /// As [`Place::http_get`], with POST.
    pub fn http_post(&self, address: SocketAddr, path: &str) -> io::Result<crate::http::Response> {
        self.netns.run(|| crate::http::request("POST", address, path))
    }

    /// Process id of this place's app.
    pub fn app_pid(&self) -> u32 {
        self.app().pid()
    }

    /// Kills the app; its sockets that the test holds stay open. The next order starts a new one, in `cgroup` if given.
    pub(crate) fn end_app(&self, cgroup: Option<Cgroup>) {
        *self.app.lock().unwrap() = None;
        if let Some(cgroup) = cgroup {
            *self.cgroup.lock().unwrap() = cgroup;
        }
    }

    /// Starts the app if it is not there.
    pub(crate) fn app(&self) -> Arc<App> {
        let mut app = self.app.lock().unwrap();
        if let Some(app) = &*app {
            return app.clone();
        }
        let started = App::start(self.command(binary("testapp")));
        let started = Arc::new(started.unwrap_or_else(|e| panic!("{}: start the app: {e}", self.name)));
        *app = Some(started.clone());
        started
    }
}

/// A connection with particulars, made by [`Dial::connect`].
#[derive(Debug, Clone)]
pub struct Dial<'a> {
    place: &'a Place,
    order: Connect,
}

impl Dial<'_> {
    /// Bind to this address first; port 0 lets the kernel choose.
    pub fn from(mut self, address: SocketAddr) -> Self {
        self.order.from = Some(address);
        self
    }

    /// Bind to this address first.
    pub fn from_ip(self, address: IpAddr) -> Self {
        self.from((address, 0).into())
    }

    /// Dial an IPv4 address through an IPv6 socket (`::ffff:a.b.c.d`).
    pub fn mapped(mut self) -> Self {
        self.order.mapped = true;
        self
    }

    pub fn mptcp(mut self) -> Self {
        self.order.mptcp = true;
        self
    }

    /// TCP Fast Open: the first bytes go with `sendto(MSG_FASTOPEN)` instead of a `connect`.
    pub fn fast_open(mut self, first: &[u8]) -> Self {
        self.order.fast_open = Some(first.to_vec());
        self
    }

    pub fn nonblocking(mut self) -> Self {
        self.order.nonblocking = true;
        self
    }

    /// Sets `SO_MARK` on the socket, as a pod with NET_RAW or NET_ADMIN can.
    pub fn mark(mut self, mark: u32) -> Self {
        self.order.mark = Some(mark);
        self
    }

    /// How long `connect` may take.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.order.timeout = timeout;
        self
    }

    pub fn connect(self) -> io::Result<TcpStream> {
        let timeout = self.order.timeout + APP_GRACE;
        let fd: OwnedFd = self.place.app().order_fd(&Order::Connect(self.order), timeout)?;
        let stream = TcpStream::from(fd);
        stream.set_read_timeout(Some(SOCKET_TIMEOUT))?;
        stream.set_write_timeout(Some(SOCKET_TIMEOUT))?;
        Ok(stream)
    }
}

/// Where the running test, demo or bench was built, and the project's binaries beside it.
pub(crate) fn built_in() -> PathBuf {
    let own = std::env::current_exe().expect("the path of the running program is known");
    let mut dir = own.parent().expect("a program lies in a directory");
    if dir.ends_with("deps") || dir.ends_with("examples") {
        dir = dir.parent().expect("deps lies in the target directory");
    }
    dir.to_owned()
}

/// A binary of this project, built beside the running test, demo or bench.
pub fn binary(name: &str) -> PathBuf {
    let dir = built_in();
    let path = dir.join(name);
    let release = if dir.ends_with("release") { " --release" } else { "" };
    assert!(
        path.exists(),
        "{} is not there: run `cargo build{release} --workspace --bins` (`cargo xtask test` does it before the tests)",
        path.display()
    );
    path
}

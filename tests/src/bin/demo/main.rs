//! `cargo xtask demo`: a two-node cluster on this machine, put into the mesh and taken out again, with every claim
//! checked and measured. Nothing here is mocked: eBPF in the kernel, mutual TLS, the real processes.

mod report;

use std::net::{SocketAddr, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use report::Report;
use testbed::{
    AccessLine, Authority, Behaviour, End, HboneClient, Mesh, MeshOptions, Pod, Server, Service, StreamExt, Testbed,
    TunnelError, wait_for,
};

/// Sent on connections from before the label: it must be seen on the wire.
const OPEN: &[u8] = b"sent-in-the-clear";
/// Sent on connections from after the label: it must never be seen on the wire.
const SECRET: &[u8] = b"sent-in-the-mesh";
/// Port of the HBONE listener of every pod in the mesh.
const HBONE: u16 = 15008;
/// Time within which proxies renew their certificates when the root changes. A minute by default.
const RENEWAL_WINDOW: &str = "1s";
/// For a step of a root's rotation.
const ROTATION_STEP: Duration = Duration::from_secs(30);

#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask demo",
    bin_name = "cargo xtask demo",
    about = "Shows the mesh at work in a two-node cluster on this machine"
)]
struct Cli {
    /// Leave the cluster running until Ctrl-C, and print how to look around
    #[arg(long)]
    keep: bool,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Err(reason) = testbed::can_run() {
        eprintln!("error: {reason}");
        return ExitCode::FAILURE;
    }
    let mut report = Report::new();
    let mut kept = None;
    // A step that cannot even be tried counts as failed; what the testbed says is printed by then.
    let whole = catch_unwind(AssertUnwindSafe(|| {
        let demo = Demo::set_up(&mut report);
        demo.run(&mut report, cli.keep);
        if cli.keep {
            kept = Some(demo);
        }
    }));
    if whole.is_err() {
        report.broken();
    }
    let code = report.finish();
    if let Some(demo) = kept {
        demo.explain();
        println!("\nThe cluster runs. Ctrl-C takes it down.");
        loop {
            std::thread::park();
        }
    }
    code
}

/// The cluster and what runs in it.
struct Demo {
    /// Listening from before the label to the end.
    cart_servers: [Server; 2],
    db_server: Server,
    frontend: Pod,
    cart: Pod,
    cart_near: Pod,
    db: Pod,
    outsider: Pod,
    cart_service: Service,
    db_service: Service,
    // Last, so that it goes last.
    tb: Testbed,
}

impl Demo {
    fn set_up(report: &mut Report) -> Self {
        report.title("Two nodes, four pods of namespace shop, two services, a pod outside the mesh");
        let start = Instant::now();
        let tb = Testbed::new();
        let pod = |name: &str, node: usize, port: u16| {
            let spec = tb.pod(name).on(tb.node(node)).port("tcp", port);
            spec.service_account(name.rsplit('/').next().expect("a name"))
        };
        let frontend = pod("shop/frontend", 0, 8080).start();
        let cart = pod("shop/cart", 1, 8080).start();
        let cart_near = pod("shop/cart-near", 0, 8080).label("app", "cart").start();
        let db = pod("shop/db", 1, 5432).start();
        let outsider = pod("legacy/outsider", 0, 8080).start();
        let cart_service = tb.service("shop/cart").port(80, "tcp").create();
        let db_service = tb.service("shop/db").port(5432, 5432).v4_only().create();
        let demo = Self {
            cart_servers: [&cart, &cart_near].map(|pod| pod.serve(8080, Behaviour::Echo)),
            db_server: db.serve(5432, Behaviour::Banner("db ready\n")),
            frontend,
            cart,
            cart_near,
            db,
            outsider,
            cart_service,
            db_service,
            tb,
        };
        report.done("network namespaces, cgroups and pods are there", start);
        for pod in demo.pods() {
            let ip6 = pod.ip6();
            let name = format!("{}/{}", pod.namespace(), pod.pod_name());
            report.note(&format!("{name:<16} {}  {:<12} {ip6}", pod.node(), pod.ip()));
        }
        report.note(&format!("{:<16} {}", "service cart", both(&demo.cart_service)));
        report.note(&format!("{:<16} {}", "service db", demo.db_service.at(5432)));
        report.wait("control, and an agent and a proxy per node, to become ready");
        let start = Instant::now();
        demo.tb.start_mesh_with(MeshOptions::default().control_arg("--renewal-window").control_arg(RENEWAL_WINDOW));
        report.done("control plane, agents and proxies are ready", start);
        demo
    }

    fn pods(&self) -> [&Pod; 5] {
        [&self.frontend, &self.cart, &self.cart_near, &self.db, &self.outsider]
    }

    fn enrolled(&self) -> [&Pod; 4] {
        [&self.frontend, &self.cart, &self.cart_near, &self.db]
    }

    fn mesh(&self) -> &Mesh {
        self.tb.mesh()
    }

    fn run(&self, report: &mut Report, keep: bool) {
        let mut old = self.before(report);
        let processes = self.processes();
        self.label(report, &mut old);
        report.check("no pod was restarted", self.processes() == processes, "same process ids");
        self.after(report);
        self.outside(report);
        self.policy(report, &mut old);
        self.rotate(report);
        if !keep {
            self.unlabel(report, &processes);
        }
    }

    /// Plain connections; two of them stay open.
    fn before(&self, report: &mut Report) -> Vec<TcpStream> {
        report.title("Before the label");
        let wire = self.tb.wire();
        let mut stream = self.connect(&self.frontend, self.cart.at(8080));
        stream.ask(OPEN);
        report.check("frontend → cart is plaintext on the wire", wire.contains(OPEN), "what was sent was seen");
        let mut second = self.connect(&self.frontend, self.db.at(5432));
        second.hear(b"db ready\n".len());
        second.ask(OPEN);
        vec![stream, second]
    }

    /// The processes of all pods: sandbox and app.
    fn processes(&self) -> Vec<(u32, u32)> {
        self.pods().map(|pod| (pod.pause_pid(), pod.app_pid())).to_vec()
    }

    fn label(&self, report: &mut Report, old: &mut [TcpStream]) {
        report.title("Label the namespace: istio.io/dataplane-mode=ambient");
        report.wait("all four pods to be in the mesh");
        let start = Instant::now();
        self.tb.namespace("shop").enrol();
        self.mesh().wait_in_mesh(&self.enrolled());
        report.done("four pods are in the mesh", start);
        report.check("the pod outside is not", self.mesh().status(&self.outsider).is_none(), "no status file for it");
        let wire = self.tb.wire();
        let alive = old.iter_mut().map(|stream| stream.try_ask(OPEN)).filter(|ok| *ok).count();
        let of = old.len();
        report.check("no connection was broken", alive == of, &format!("{alive} of {of} older ones go on"));
        let plain = wire.flows().iter().filter(|flow| flow.to_server.windows(OPEN.len()).any(|w| w == OPEN)).count();
        report.check("they stay plaintext until they end", plain == of, &format!("{plain} of {of} seen on the wire"));
    }

    fn after(&self, report: &mut Report) {
        report.title("New connections");
        let wire = self.tb.wire();
        let paths = [
            ("frontend → service cart, IPv4", self.cart_service.at(80)),
            ("frontend → service cart, IPv6", self.cart_service.at6(80)),
            ("frontend → cart's own address", self.cart.at(8080)),
        ];
        for (what, to) in paths {
            let before = self.cart_seen();
            let start = Instant::now();
            let mut stream = self.connect(&self.frontend, to);
            stream.ask(SECRET);
            let took = start.elapsed();
            let peer = stream.peer_addr().expect("connected");
            report.check(what, peer == to, &format!("answered in {:.1} ms", took.as_secs_f64() * 1000.0));
            let seen = self.cart_seen().into_iter().find(|peer| !before.contains(peer));
            let own = seen.is_some_and(|peer| [self.frontend.ip(), self.frontend.ip6()].contains(&peer.ip()));
            let shown = seen.map_or("nothing".to_owned(), |peer| peer.ip().to_string());
            report.check("    cart sees frontend's own address", own, &shown);
        }
        let start = Instant::now();
        let mut stream = self.connect(&self.frontend, self.db_service.at(5432));
        let banner = stream.hear(b"db ready\n".len());
        let heard = format!("heard in {}", millis(start));
        report.check("frontend → service db, which speaks first", banner == b"db ready\n", &heard);
        stream.ask(SECRET);
        drop(stream);
        let flows = wire.flows();
        let hbone: Vec<_> = flows.iter().filter(|flow| flow.server.port() == HBONE).collect();
        let others = flows.iter().filter(|f| self.is_pod(f.client) && self.is_pod(f.server)).count() - hbone.len();
        let tls: Vec<_> = hbone.iter().map(|flow| flow.tls13()).collect();
        for error in tls.iter().filter_map(|tls| tls.as_ref().err()) {
            report.note(&format!("not TLS 1.3: {error}"));
        }
        let all_tls = !tls.is_empty() && tls.iter().all(Result::is_ok) && others == 0;
        let counts = format!("{} tunnels, {others} other connections", tls.len());
        report.check("only TLS 1.3 between the nodes", all_tls, &counts);
        report.check("what was sent is not readable on the wire", !wire.contains(SECRET), "in no packet");
        self.identities(report);
    }

    fn identities(&self, report: &mut Report) {
        let to_db = |line: &AccessLine| line.get("dst.workload") == "db" && line.get("src.workload") == "frontend";
        for (side, direction, pod) in [("client", "outbound", &self.frontend), ("server", "inbound", &self.db)] {
            let node = self.mesh().node_of(pod);
            let wanted = |line: &AccessLine| to_db(line) && line.get("direction") == direction;
            let line = node.wait_access_line("frontend → db", wanted);
            let count = node.access_log().into_iter().filter(wanted).count();
            report.check(&format!("frontend → db: one log line at the {side}'s node"), count == 1, &format!("{count}"));
            let (field, identity) = match direction {
                "inbound" => ("src.identity", self.frontend.identity()),
                _ => ("dst.identity", self.db.identity()),
            };
            report.check("    it names the peer", line.get(field) == identity, line.get(field));
            report.note(line.text.trim());
        }
    }

    fn outside(&self, report: &mut Report) {
        report.title("A client outside the mesh");
        let before = self.cart_servers[0].seen().len();
        let mut stream = self.connect(&self.outsider, self.cart.at(8080));
        stream.ask(b"plain client");
        let peer = self.cart_servers[0].wait_seen(before + 1)[before].peer.ip();
        report.check("outsider → cart, plaintext, is still served", peer == self.outsider.ip(), &peer.to_string());
        let reply = self.outsider.serve(9000, Behaviour::Echo);
        self.connect(&self.frontend, self.outsider.at(9000)).ask(b"to the outside");
        let peer = reply.seen()[0].peer.ip();
        report.check("frontend → outsider passes with its own address", peer == self.frontend.ip(), &peer.to_string());
    }

    /// The root of all certificates is replaced, in the three steps of `control ca rotate`, while connections are made.
    fn rotate(&self, report: &mut Report) {
        report.title("Replace the root of all certificates, under traffic");
        let mesh = self.mesh();
        let old = mesh.authority();
        let (stop, made, failed) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            // At both nodes, and also where a step below panics.
            let stop = StopOnDrop(&stop);
            for to in [self.cart_service.at(80), self.cart.at(8080)] {
                let (stop, made, failed) = (stop.0, &made, &failed);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let asked = self.frontend.connect(to).is_ok_and(|mut stream| stream.try_ask(SECRET));
                        made.fetch_add(1, Ordering::Relaxed);
                        failed.fetch_add(u32::from(!asked), Ordering::Relaxed);
                    }
                });
            }
            self.rotate_step(report, "1: all certificates came with old and new root", || {
                mesh.wait_roots(2, ROTATION_STEP);
            });
            let before = mesh.serial_numbers();
            self.rotate_step(report, "2: the new root signs, all certificates are renewed", || {
                mesh.wait_renewed(&before, ROTATION_STEP);
            });
            let both = self.takes(&old) && self.takes(&mesh.authority());
            report.check("    tunnels with certificates of either are taken", both, "of old and new root");
            self.rotate_step(report, "3: the old root is withdrawn", || mesh.wait_roots(1, ROTATION_STEP));
        });
        let (made, failed) = (made.into_inner(), failed.into_inner());
        let counts = format!("{made} connections, {failed} failed");
        report.check("no connection failed meanwhile", failed == 0 && made > 0, &counts);
        report.check("    a certificate of the old root is refused now", !self.takes(&old), "TLS alert UnknownCA");
    }

    /// Takes the next step of the rotation, without the hours of waiting that a mesh with proxies of other makes needs.
    fn rotate_step(&self, report: &mut Report, text: &str, done: impl FnOnce()) {
        report.wait("all proxies to follow");
        let start = Instant::now();
        let output = self.mesh().control_ca(&["rotate", "--force"]);
        assert!(output.status.success(), "control ca rotate: {}", String::from_utf8_lossy(&output.stderr));
        done();
        report.done(text, start);
    }

    /// Whether cart takes a tunnel with a certificate of this authority; the refusal must be for its root.
    fn takes(&self, authority: &Authority) -> bool {
        let leaf = authority.issue(self.frontend.identity().as_str());
        match HboneClient::open(&self.outsider, self.cart.at(HBONE), Some(&leaf)) {
            Ok(_) => true,
            Err(TunnelError::Alert(rustls::AlertDescription::UnknownCA)) => false,
            Err(other) => panic!("a tunnel to cart: {other}"),
        }
    }

    fn policy(&self, report: &mut Report, old: &mut [TcpStream]) {
        report.title("Policies: only frontend may call cart");
        let cart = self.cart.at(8080);
        let node = self.mesh().node_of(&self.cart);
        let mut of_db = self.connect(&self.db, cart);
        of_db.ask(SECRET);
        let mut of_frontend = self.connect(&self.frontend, cart);
        of_frontend.ask(SECRET);
        let before = self.cart_seen().len();
        let allow =
            "{selector: {matchLabels: {app: cart}}, rules: [{from: [{source: {serviceAccounts: [frontend]}}]}]}";
        let start = Instant::now();
        self.put_policy("AuthorizationPolicy", "cart-callers", "", allow);
        let (_, end) = of_db.hear_end();
        let took = format!("{} after the policy was written", millis(start));
        report.check("an open connection of db to cart is ended", end == End::Reset, &took);
        report.check("one of frontend goes on", of_frontend.try_ask(SECRET), "not touched");
        let allowed = self.connect(&self.frontend, self.cart_service.at(80)).try_ask(SECRET);
        report.check("frontend → service cart is allowed", allowed, "answered");
        let refused = !self.connect(&self.db, cart).try_ask(SECRET);
        let came = self.cart_seen().len() - before - usize::from(allowed);
        report.check("db → cart is refused", refused && came == 0, &format!("{came} connections came to the app"));
        let why =
            |line: &AccessLine| line.get("direction") == "inbound" && line.get("error").starts_with("not allowed");
        let line = node.wait_access_line("the refusal", why);
        let named = line.get("error").contains("shop/cart-callers rule 0");
        report.check("    the log names the rule that came closest", named, "");
        report.note(line.get("error"));
        let asked = self.mesh().node_of(&self.db).ztunnel(&["explain", "--from", "shop/db", "--to", "shop/cart:80"]);
        let said = asked.unwrap_or_else(|error| error);
        report.check("    ztunnel explain says the same beforehand", said.contains(line.get("error")), "");
        for text in said.lines().filter(|text| !text.is_empty()) {
            report.note(text);
        }

        let dry = "annotations: {istio.io/dry-run: 'true'}";
        self.put_policy(
            "AuthorizationPolicy",
            "db-nobody",
            dry,
            "{selector: {matchLabels: {app: db}}, action: DENY, rules: [{}]}",
        );
        let node = self.mesh().node_of(&self.db);
        let mut passed = 0;
        let labels = [("mode", "dry_run"), ("policy", "shop/db-nobody"), ("result", "denied")];
        wait_for("the dry run to be counted", || {
            let mut stream = self.connect(&self.frontend, self.db_service.at(5432));
            passed += u32::from(stream.hear(b"db ready\n".len()) == b"db ready\n");
            (node.proxy_metrics().sum("understory_policy_verdicts_total", &labels) > 0.0).then_some(())
        });
        let text = format!("{passed} connections passed, and are counted as denied");
        report.check("a dry run denies nothing and is seen in the metrics", passed > 0, &text);

        let start = Instant::now();
        let mut plain = self.connect(&self.outsider, self.db.at(5432));
        plain.hear(b"db ready\n".len());
        self.put_policy("PeerAuthentication", "strict", "", "{mtls: {mode: STRICT}}");
        let (_, end) = plain.hear_end();
        report.check("STRICT ends outsider's open connection to db", end == End::Reset, &millis(start));
        let ended = old.iter_mut().filter_map(|stream| (stream.hear_end().1 == End::Reset).then_some(())).count();
        let text = format!("{ended} of {} in the clear", old.len());
        report.check("    and those from before the label", ended == old.len(), &text);
        let (bytes, end) = self.connect(&self.outsider, self.db.at(5432)).hear_end();
        report.check("outsider → db is refused", bytes.is_empty() && end == End::Reset, "reset, without a byte");
        let mut meshed = self.connect(&self.frontend, self.db_service.at(5432));
        let banner = meshed.hear(b"db ready\n".len());
        report.check("frontend → service db is served", banner == b"db ready\n", "over mutual TLS");
        for name in ["cart-callers", "db-nobody", "strict"] {
            self.tb.remove_manifest(&format!("{name}.yaml"));
        }
        wait_for("outsider to be served again", || {
            self.connect(&self.outsider, self.db.at(5432)).try_hear().then_some(())
        });
    }

    fn put_policy(&self, kind: &str, name: &str, metadata: &str, spec: &str) {
        let comma = if metadata.is_empty() { "" } else { ", " };
        let text = format!(
            "apiVersion: security.istio.io/v1\nkind: {kind}\n\
             metadata: {{name: {name}, namespace: shop{comma}{metadata}}}\nspec: {spec}\n"
        );
        self.tb.put_manifest(&format!("{name}.yaml"), &text);
    }

    fn unlabel(&self, report: &mut Report, processes: &[(u32, u32)]) {
        report.title("Remove the label");
        report.wait("all four pods to be out of the mesh");
        let start = Instant::now();
        self.tb.namespace("shop").unenrol();
        self.mesh().wait_out_of_mesh(&self.enrolled());
        report.done("four pods are out of the mesh", start);
        let wire = self.tb.wire();
        let mut stream = self.connect(&self.frontend, self.db.at(5432));
        stream.hear(b"db ready\n".len());
        stream.ask(SECRET);
        report.check("new connections are plaintext again", wire.contains(SECRET), "what was sent was seen");
        report.check("no pod was restarted", self.processes() == processes, "same process ids");
        let peer = self.db_server.seen().last().map(|seen| seen.peer.ip());
        report.check("db sees frontend's own address", peer == Some(self.frontend.ip()), "no proxy between");
    }

    /// Peers of all connections that the cart pods have had.
    fn cart_seen(&self) -> Vec<SocketAddr> {
        self.cart_servers.iter().flat_map(Server::seen).map(|seen| seen.peer).collect()
    }

    fn is_pod(&self, address: SocketAddr) -> bool {
        self.enrolled().iter().any(|pod| pod.ip() == address.ip() || pod.ip6() == address.ip())
    }

    /// Connects. Where that fails the demo cannot go on.
    fn connect(&self, from: &Pod, to: SocketAddr) -> TcpStream {
        from.connect(to).unwrap_or_else(|e| panic!("{} → {to}: {e}", from.name()))
    }

    /// How to look around in a cluster that is left running.
    fn explain(&self) {
        let dir = self.tb.path("enter");
        std::fs::create_dir_all(&dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
        for pod in self.pods() {
            write_script(&dir.join(pod.pod_name()), pod.netns().name(), Some(pod.cgroup().path()));
        }
        for node in self.tb.nodes() {
            write_script(&dir.join(node.name()), node.netns().name(), None);
        }
        write_script(&dir.join("control"), self.tb.control_place().netns().name(), None);

        println!("\nLook around, from another terminal, as root:\n");
        println!("  cd {}", self.tb.name().dir().display());
        let say = |what: &str, command: &str| println!("  {what}\n      {command}");
        let others = self.pods().map(Pod::pod_name)[1..].join(", ");
        say(&format!("a shell in a pod, or a command after it; likewise {others}"), "enter/frontend");
        let cart = self.cart_service.at(80);
        let talk = format!("exec 3<>/dev/tcp/{}/{}; echo hello >&3; head -1 <&3", cart.ip(), cart.port());
        say("a connection to service cart, which echoes", &format!("enter/frontend bash -c '{talk}'"));
        say("one line per connection; the other processes' logs are there, too", "grep access logs/proxy-node0.log");
        for (what, place, page) in [
            ("what the proxy of node0 knows; node1 likewise", "node0", "15000/config_dump"),
            ("its metrics", "node0", "15020/metrics"),
            ("the agent's list of the node's pods, with reasons", "node0", "15014/status"),
            ("what control serves", "control", "15014/debug/resources"),
            ("which roots there are, and what signs", "control", "15014/debug/ca"),
        ] {
            say(what, &format!("enter/{place} curl -s 127.0.0.1:{page}"));
        }
        let namespace = "manifests/namespace-shop.yaml";
        say(
            "the pods out of the mesh; s/none/ambient/ brings them back",
            &format!("sed -i s/ambient/none/ {namespace}"),
        );
        say("the cluster's objects: edit them, agents and control follow", "ls manifests");
    }
}

/// A script that runs a shell, or the command that it is given, in a network namespace and, for a pod, in its cgroup.
fn write_script(path: &Path, netns: &str, cgroup: Option<&Path>) {
    use std::os::unix::fs::PermissionsExt;
    let join = cgroup.map_or(String::new(), |cgroup| format!("echo $$ > {}/cgroup.procs\n", cgroup.display()));
    let text = format!("#!/bin/sh\n{join}[ $# -gt 0 ] || set -- bash\nexec ip netns exec {netns} \"$@\"\n");
    let written = std::fs::write(path, text)
        .and_then(|()| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)));
    written.unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}

fn both(service: &Service) -> String {
    format!("{} and {}", service.at(80), service.at6(80))
}

fn millis(start: Instant) -> String {
    format!("{:.1} ms", start.elapsed().as_secs_f64() * 1000.0)
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What may fail.
trait TryAsk {
    /// An echo.
    fn try_ask(&mut self, bytes: &[u8]) -> bool;
    /// The first byte of whoever speaks first.
    fn try_hear(&mut self) -> bool;
}

impl TryAsk for TcpStream {
    fn try_ask(&mut self, bytes: &[u8]) -> bool {
        use std::io::{Read, Write};
        let mut back = vec![0; bytes.len()];
        self.write_all(bytes).and_then(|()| self.read_exact(&mut back)).is_ok() && back == bytes
    }

    fn try_hear(&mut self) -> bool {
        use std::io::Read;
        matches!(self.read(&mut [0]), Ok(1))
    }
}

//! The testbed keeps its own promises: what it builds works without a mesh, and it leaves nothing behind.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use testbed::{Behaviour, End, Families, Qos, StreamExt, Testbed, TestbedName, traces, wait_for};

#[test]
fn pods_reach_each_other_over_both_families_with_their_own_addresses() {
    let tb = Testbed::new();
    let client = tb.pod("shop/client").start();
    let near = tb.pod("shop/near").start();
    let far = tb.pod("shop/far").on(tb.node(1)).start();
    for server_pod in [&near, &far] {
        let server = server_pod.serve(8080, Behaviour::Echo);
        for to in [server_pod.at(8080), server_pod.at6(8080)] {
            let mut stream = client.connect(to).expect("connect");
            stream.ask(b"hello");
            assert_eq!(stream.peer_addr().unwrap(), to);
            let from = if to.is_ipv4() { client.ip() } else { client.ip6() };
            assert_eq!(stream.local_addr().unwrap().ip(), from);
            let seen = server.seen().pop().expect("the server saw it");
            assert_eq!((seen.peer, seen.local), (stream.local_addr().unwrap(), to));
        }
        // An IPv4 address dialled through an IPv6 socket.
        let mut mapped = client.dial(server_pod.at(8080)).mapped().connect().expect("connect");
        mapped.ask(b"mapped");
        assert_eq!(mapped.peer_addr().unwrap().to_string(), format!("[::ffff:{}]:8080", server_pod.ip()));
    }
}

#[test]
fn hosts_and_machines_outside_reach_pods_and_are_reached() {
    let tb = Testbed::new();
    let pod = tb.pod("shop/web").on(tb.node(1)).start();
    let outside = tb.outside("db");
    let server = pod.serve(8080, Behaviour::Echo);
    outside.connect(pod.at(8080)).expect("connect").ask(b"from outside");
    outside.connect(pod.at6(8080)).expect("connect").ask(b"from outside");
    tb.node(1).connect(pod.at(8080)).expect("connect").ask(b"from the own node");
    let peers: Vec<IpAddr> = server.seen().iter().map(|seen| seen.peer.ip()).collect();
    assert_eq!(peers[..2], [outside.ip4(), outside.ip6()]);
    assert_eq!(peers[2].to_string(), "10.244.1.1", "a host process talks to a pod from the pod bridge's address");
    let back = outside.serve(5432, Behaviour::Echo);
    pod.connect((outside.ip4(), 5432).into()).expect("connect").ask(b"to outside");
    assert_eq!(back.seen()[0].peer.ip(), pod.ip());
}

#[test]
fn a_sandbox_looks_as_kubelet_makes_it() {
    let tb = Testbed::new();
    for (qos, class) in [(Qos::Guaranteed, ""), (Qos::Burstable, "burstable/"), (Qos::BestEffort, "besteffort/")] {
        let pod = tb.pod(&format!("shop/{}", format!("{qos:?}").to_lowercase())).qos(qos).start();
        let root = format!("/understory-{}/node0", tb.name());
        for pid in [pod.pause_pid(), pod.app_pid()] {
            let line = fs::read_to_string(format!("/proc/{pid}/cgroup")).expect("read");
            let path = line.lines().find_map(|line| line.strip_prefix("0::")).expect("a cgroup v2 line");
            let start = format!("{root}/kubepods/{class}pod{}/", pod.uid());
            let container = path.strip_prefix(&start).unwrap_or_else(|| panic!("{path} lies not below {start}"));
            assert!(container.len() == 64 && container.bytes().all(|b| b.is_ascii_hexdigit()), "{container}");
            let netns = |path: &str| fs::metadata(path).map(|m| std::os::unix::fs::MetadataExt::ino(&m)).unwrap();
            let own = netns(&format!("/proc/{pid}/ns/net"));
            assert_eq!(own, netns(pod.netns().path().to_str().unwrap()));
            assert_ne!(own, netns("/proc/self/ns/net"));
        }
        let old = pod.app_pid();
        let old_cgroup = pod.cgroup();
        pod.restart_container();
        assert_ne!((pod.app_pid(), pod.cgroup().path()), (old, old_cgroup.path()));
        assert!(!old_cgroup.path().exists(), "the old container's cgroup is gone");
    }
}

#[test]
fn pods_without_ipv6_have_none() {
    let tb = Testbed::with_nodes(1);
    let v4 = tb.pod("shop/v4").families(Families::V4Only).start();
    let off = tb.pod("shop/off").families(Families::V4Kernel).start();
    let loopback = |pod: &testbed::Pod| pod.netns().ip_output(&["-6", "addr", "show", "dev", "lo"]);
    assert!(loopback(&v4).contains("::1/128"));
    assert!(!loopback(&off).contains("::1"));
    let server = off.serve(8080, Behaviour::Echo);
    v4.connect(off.at(8080)).expect("connect").ask(b"over IPv4");
    assert_eq!(server.seen()[0].peer.ip(), v4.ip());
}

#[test]
fn a_capture_sees_what_was_sent_and_nothing_else() {
    let tb = Testbed::new();
    let client = tb.pod("shop/client").start();
    let near = tb.pod("shop/near").start();
    let far = tb.pod("shop/far").on(tb.node(1)).start();
    let (near_server, far_server) = (near.serve(8080, Behaviour::Echo), far.serve(8080, Behaviour::Echo));
    let wire = tb.wire();
    let veth = testbed::Capture::interface(tb.node(0).netns(), near.veth());
    client.connect(far.at(8080)).expect("connect").ask(b"canary for the other node");
    client.connect(far.at6(8080)).expect("connect").ask(b"canary over IPv6");
    client.connect(near.at(8080)).expect("connect").ask(b"canary for the same node");
    assert!(wire.contains(b"canary for the other node"));
    assert!(wire.contains(b"canary over IPv6"));
    assert!(!wire.contains(b"canary for the same node"), "it never left the node");
    assert!(veth.contains(b"canary for the same node"));
    assert!(!veth.contains(b"canary for the other node"));
    assert!(!wire.contains(b"never sent"));
    let flows = wire.flows_to_port(8080);
    assert_eq!(flows.len(), 2, "{flows:?}");
    assert_eq!((flows[0].client.ip(), flows[0].server), (client.ip(), far.at(8080)));
    assert_eq!(flows[0].to_server, b"canary for the other node");
    assert_eq!(flows[0].to_client, b"canary for the other node");
    assert!(flows[0].tls13().is_err(), "plaintext is not taken for TLS");
    drop((near_server, far_server));
}

#[test]
fn ends_of_connections_are_told_apart() {
    let tb = Testbed::with_nodes(1);
    let client = tb.pod("shop/client").start();
    let web = tb.pod("shop/web").start();
    let _servers = (web.serve(1, Behaviour::Close), web.serve(2, Behaviour::Reset));
    let echo = web.serve(3, Behaviour::Echo);
    assert_eq!(client.connect(web.at(1)).expect("connect").time_to_end().0, End::Fin);
    assert_eq!(client.connect(web.at(2)).expect("connect").time_to_end().0, End::Reset);
    let mut half = client.connect(web.at(3)).expect("connect");
    half.say(b"last words");
    half.half_close();
    assert_eq!(half.hear_end(), (b"last words".to_vec(), End::Fin));
    assert_eq!(echo.wait_last_end(), End::Fin);
    client.connect(web.at(3)).expect("connect").reset();
    echo.wait_seen(2);
    assert_eq!(echo.wait_last_end(), End::Reset);
    let refused = client.connect(web.at(4)).expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}

#[test]
fn programs_and_short_connections_run_inside_pods() {
    let tb = Testbed::with_nodes(1);
    let client = tb.pod("shop/client").start();
    let web = tb.pod("shop/web").start();
    let output = client.run("ip", &["-4", "-o", "addr", "show", "dev", "eth0"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains(&client.ip().to_string()), "{output:?}");
    let _server = web.serve(8080, Behaviour::Echo);
    let report = client.churn(&[web.at(8080)], 200, 4);
    assert_eq!((report.done, report.errors.len()), (200, 0), "{report:?}");
    assert_eq!(report.rates.len(), 10, "{report:?}");
    let refused = client.churn(&[web.at(8081)], 20, 2);
    assert_eq!((refused.done, refused.errors.values().sum::<u32>()), (0, 20), "{refused:?}");
}

#[test]
fn udp_goes_from_pod_to_pod() {
    let tb = Testbed::new();
    let client = tb.pod("shop/client").start();
    let dns = tb.pod("shop/dns").on(tb.node(1)).start();
    let server = dns.udp((dns.ip(), 53).into());
    let socket = client.udp((client.ip(), 0).into());
    socket.send_to(b"question", (dns.ip(), 53)).expect("send");
    let mut buffer = [0; 64];
    let (n, from) = server.recv_from(&mut buffer).expect("receive");
    assert_eq!((&buffer[..n], from), (&b"question"[..], socket.local_addr().unwrap()));
}

#[test]
fn a_deleted_pod_leaves_its_node() {
    let tb = Testbed::with_nodes(1);
    let pod = tb.pod("shop/web").start();
    let again = tb.pod("shop/other").start();
    let (netns, cgroup) = (pod.netns().path(), pod.pod_cgroup().path().to_owned());
    let manifest = tb.path("manifests/pod-shop-web.yaml");
    assert!(netns.exists() && cgroup.exists() && manifest.exists());
    pod.delete();
    assert!(!netns.exists() && !cgroup.exists() && !manifest.exists());
    assert!(!tb.node(0).netns().ip_output(&["link", "show"]).contains(&format!("{}@", pod.veth())));
    let successor = tb.pod("shop/web").addresses_of(&pod).start();
    assert_eq!(successor.ip(), pod.ip());
    let _server = successor.serve(80, Behaviour::Echo);
    again.connect(successor.at(80)).expect("connect").ask(b"same address, another pod");
}

#[test]
fn endpoint_slices_follow_the_pods() {
    let tb = Testbed::new();
    let slice = || fs::read_to_string(tb.path("manifests/endpointslice-shop-web-ipv4.yaml")).expect("a slice");
    let _service = tb.service("shop/web").port(80, "http").create();
    let a = tb.pod("shop/web-a").label("app", "web").port("http", 8080).start();
    let b = tb.pod("shop/web-b").label("app", "web").port("http", 8080).on(tb.node(1)).start();
    assert!(slice().contains(&a.ip().to_string()) && slice().contains(&b.ip().to_string()));
    assert!(slice().contains("port: 8080"), "{}", slice());
    b.begin_deletion();
    assert!(slice().contains("terminating: true"), "{}", slice());
    b.destroy_sandbox();
    b.remove_object();
    assert!(!slice().contains(&b.ip().to_string()));
}

#[test]
fn several_testbeds_run_at_once_without_meeting() {
    let (one, two) = (Testbed::new(), Testbed::new());
    let pods = [&one, &two].map(|tb| tb.pod("shop/web").on(tb.node(1)).start());
    let clients = [&one, &two].map(|tb| tb.pod("shop/client").start());
    assert_eq!(pods[0].ip(), pods[1].ip(), "they use the same addresses");
    let servers = pods.each_ref().map(|pod| pod.serve(8080, Behaviour::Echo));
    clients[0].connect(pods[0].at(8080)).expect("connect").ask(b"in the first");
    assert_eq!((servers[0].seen().len(), servers[1].seen().len()), (1, 0));
    drop(clients);
    let name = one.name().clone();
    drop(one);
    assert_eq!(traces(&name), Vec::<String>::new());
    let late = two.pod("shop/late").start();
    late.connect(pods[1].at(8080)).expect("the other goes on").ask(b"in the second");
}

#[test]
fn the_host_is_left_as_it_was() {
    let snapshot = || {
        let ip = |args: &[&str]| {
            let output = Command::new("ip").args(args).output().expect("start ip");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let sysctl = |key: &str| fs::read_to_string(format!("/proc/sys/{key}")).unwrap_or_default();
        [
            ip(&["-o", "link", "show"]),
            ip(&["-o", "addr", "show"]),
            ip(&["route", "show", "table", "all"]),
            ip(&["-6", "route", "show", "table", "all"]),
            ip(&["rule", "show"]),
            sysctl("net/ipv4/ip_forward"),
            sysctl("net/ipv4/tcp_fwmark_accept"),
            sysctl("net/ipv6/conf/all/forwarding"),
            sysctl("net/ipv6/conf/all/accept_dad"),
            sysctl("net/ipv6/conf/all/disable_ipv6"),
        ]
    };
    let before = snapshot();
    let tb = Testbed::new();
    let pod = tb.pod("shop/web").families(Families::V4Kernel).start();
    tb.node(0).connect(pod.at(1)).expect_err("nobody listens");
    assert_eq!(snapshot(), before, "with a testbed");
    let name = tb.name().clone();
    drop(tb);
    assert_eq!(snapshot(), before, "after a testbed");
    assert_eq!(traces(&name), Vec::<String>::new());
}

/// How the process that owns a testbed ends.
const VICTIM: &str = "UNDERSTORY_VICTIM";

/// Not a test of its own: the process that the next three start and end. Without its variable it does nothing.
#[test]
fn victim() {
    let Ok(way) = std::env::var(VICTIM) else { return };
    let tb = Testbed::new();
    let pod = tb.pod("shop/web").start();
    let _server = pod.serve(8080, Behaviour::Echo);
    // A process that would outlive its parent.
    let mut sleeper = pod.command("sleep").arg("1000").spawn().expect("start sleep");
    fs::create_dir_all(tb.name().bpf_dir("node0")).expect("make a directory in the BPF file system");
    eprintln!("VICTIM {}", tb.name().netns("x"));
    if way == "panic" {
        panic!("as a failing test does");
    }
    let _ = sleeper.wait();
}

/// Starts a process that makes a testbed and waits until it is there.
fn start_victim(way: &str) -> (Child, TestbedName, BufReader<std::process::ChildStderr>) {
    let mut child = Command::new(std::env::current_exe().expect("own path"))
        .args(["victim", "--exact", "--nocapture"])
        .env(VICTIM, way)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("start a victim");
    let mut lines = BufReader::new(child.stderr.take().expect("piped"));
    let name = loop {
        let mut line = String::new();
        assert_ne!(lines.read_line(&mut line).expect("read"), 0, "the victim ended early");
        if let Some(name) = line.trim().strip_prefix("VICTIM ") {
            break TestbedName::of_file(name).expect("a testbed's name");
        }
    };
    (child, name, lines)
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(child.id() as i32).expect("a pid");
    rustix::process::kill_process(pid, signal).expect("signal the victim");
}

#[test]
fn after_kill_9_the_next_testbed_sweeps() {
    let (mut child, name, _lines) = start_victim("kill");
    assert!(traces(&name).len() > 4, "{:?}", traces(&name));
    let cgroup = name.cgroup(&testbed::cgroup2_root());
    signal(&child, rustix::process::Signal::KILL);
    child.wait().expect("wait");
    assert!(!traces(&name).is_empty(), "nobody has swept yet");
    let living = Testbed::with_nodes(1);
    assert_eq!(traces(&name), Vec::<String>::new());
    assert!(!cgroup.exists(), "its processes are gone too");
    let own = living.name().clone();
    testbed::sweep();
    assert!(!traces(&own).is_empty(), "a sweep leaves the living alone");
}

#[test]
fn signals_and_panics_clean_up_at_once() {
    for end in [rustix::process::Signal::INT, rustix::process::Signal::TERM] {
        let (mut child, name, _lines) = start_victim("signal");
        signal(&child, end);
        let status = child.wait().expect("wait");
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(end.as_raw()));
        assert_eq!(traces(&name), Vec::<String>::new(), "after {end:?}");
    }
    let (mut child, name, mut lines) = start_victim("panic");
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut lines, &mut rest).expect("read");
    assert!(!child.wait().expect("wait").success());
    assert_eq!(traces(&name), Vec::<String>::new(), "after a panic");
    wait_for("the panic's message", || rest.contains("as a failing test does").then_some(()));
}

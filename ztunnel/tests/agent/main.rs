//! The agent as a process, with real pods: namespaces, cgroups, eBPF in the kernel, and a proxy that the test plays.
//! Needs root.

mod ground;

use std::collections::BTreeSet;
use std::fs;
use std::io::{ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ground::{Ground, Proxy, ip, socket_inode, sockets_of, wait};
use ztunnel::capture::maps::OrigDstMap;

#[test]
fn a_labelled_pod_is_captured_and_an_unlabelled_one_is_not() {
    let mut ground = Ground::new("label");
    ground.label(true);
    let pod = ground.pod("a");
    let before = pod.picture();
    ground.start_agent();
    // Nothing happens to a running pod before there is a proxy for it.
    ground.wait_state(&pod, "pending");
    wait("the reason is given", || {
        ground.status(&pod)["reason"].as_str().unwrap_or("").contains("no proxy is connected")
    });
    assert!(ground.status_file(&pod).unwrap().contains("redirection: pending"));
    let direct = ground.netns.run(|| TcpListener::bind("10.88.1.1:80").unwrap()).unwrap();
    pod.dial("10.88.1.1:80").unwrap();
    direct.accept().unwrap();

    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    assert!(ground.is_enabled(&pod));
    assert!(ground.status(&pod)["capturedVerified"].as_u64().unwrap() > 0);
    assert!(proxy.has(&pod));
    assert_ne!(pod.picture(), before);

    // Outbound, with the original destination for the proxy.
    let app = pod.dial("10.88.1.1:80").unwrap();
    assert_eq!(app.peer_addr().unwrap().to_string(), "10.88.1.1:80");
    let (_stream, client) = proxy.accept(&pod, |listeners| &listeners.outbound);
    let maps = OrigDstMap::new(proxy.manager.maps.lock().unwrap().as_ref().unwrap().orig_dst.try_clone().unwrap());
    let original = maps.unwrap().take(pod.netns().cookie(), client).unwrap();
    assert_eq!(original.unwrap().to_string(), "10.88.1.1:80");
    direct.set_nonblocking(true).unwrap();
    assert_eq!(direct.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    // Inbound from elsewhere: any port goes to the proxy. (The test process is in no pod and not of the node.)
    let elsewhere = std::thread::scope(|scope| {
        scope.spawn(|| ground.netns.run(|| TcpStream::connect("10.88.1.2:8080")).unwrap().unwrap()).join().unwrap()
    });
    let (_stream, peer) = proxy.accept(&pod, |listeners| &listeners.plaintext);
    assert_eq!(split(peer), split(elsewhere.local_addr().unwrap()));

    ground.label(false);
    ground.wait_state(&pod, "out");
    assert_eq!(ground.status_file(&pod), None);
    assert!(!proxy.has(&pod));
    assert_eq!(pod.picture(), before);
    assert!(!ground.pins().iter().any(|name| name.starts_with("inbound")));
    pod.dial("10.88.1.1:80").unwrap();
    let mut events = proxy.events();
    // The snapshot and the pod's own task may both have told of it.
    events.dedup();
    assert_eq!(events, ["maps", "add a", "drain a", "remove a Gone"]);
}

#[test]
fn twenty_times_in_and_out_leaves_nothing_behind() {
    let mut ground = Ground::new("twenty");
    ground.label(false);
    let pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    wait("the proxy is connected", || ground.metric("understory_agent_proxies") == 1.0);
    ground.wait_state(&pod, "out");
    let picture = || {
        let entries = ["PODS", "POD_IPS", "LISTENERS"];
        let entries = entries.map(|map| ground.metric(&format!("understory_capture_map_entries{{map=\"{map}\"}}")));
        (pod.picture(), ground.pins(), entries, fs::read_dir(ground.folder.join("run/pods")).unwrap().count())
    };
    let (before, mut fds) = (picture(), BTreeSet::new());
    for round in 0..20 {
        ground.label(true);
        ground.wait_state(&pod, "enrolled");
        assert!(ground.is_enabled(&pod), "round {round}");
        ground.label(false);
        ground.wait_state(&pod, "out");
        assert_eq!(picture(), before, "round {round}");
        assert_eq!(ground.status_file(&pod), None);
        assert!(!proxy.has(&pod));
        fds.insert(ground.agent_fds());
    }
    assert!(fds.last().unwrap() - fds.first().unwrap() <= 4, "the agent's open files grew: {fds:?}");
    assert_eq!(ground.metric("understory_agent_enrolments_total"), 20.0);
    assert_eq!(ground.metric("understory_agent_unenrolments_total"), 20.0);
}

#[test]
fn a_restarted_agent_changes_nothing_for_the_pods_and_gets_the_sockets_back() {
    let mut ground = Ground::new("restart");
    ground.label(true);
    let pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    let held = {
        let pods = proxy.manager.pods.lock().unwrap();
        pods[&pod.uid].listeners.as_ref().unwrap().named().map(|(_, fd)| socket_inode(&fd))
    };
    let (picture, pins) = (pod.picture(), ground.pins());

    for kill in [true, false] {
        ground.stop_agent(kill);
        // With no agent at all.
        let _app = pod.dial("10.88.1.1:80").unwrap();
        proxy.accept(&pod, |listeners| &listeners.outbound);
        assert!(ground.is_enabled(&pod));

        ground.start_agent();
        ground.wait_state(&pod, "enrolled");
        let own = sockets_of(ground.agent_pid());
        assert!(held.iter().all(|inode| own.contains(inode)), "{held:?} are not among {own:?}");
        assert_eq!((pod.picture(), ground.pins()), (picture.clone(), pins.clone()));
        let _app = pod.dial("10.88.1.1:81").unwrap();
        proxy.accept(&pod, |listeners| &listeners.outbound);
    }
    // It has kept the pod; that it is given again undoes what an agent that meant it to leave may have begun.
    assert_eq!(proxy.events(), ["maps", "add a", "maps", "add a", "maps", "add a"]);
}

#[test]
fn a_pod_that_lost_its_label_while_no_agent_was_there_leaves_when_one_is() {
    let mut ground = Ground::new("unlabelled");
    ground.label(true);
    let (pod, mut gone) = (ground.pod("a"), ground.pod("b"));
    let before = pod.picture();
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    // (The picture of `a` was taken before any enrolment only if none had begun.)
    ground.wait_state(&pod, "enrolled");
    ground.wait_state(&gone, "enrolled");
    ground.stop_agent(true);
    ground.label(false);
    ground.delete_object(&gone);
    gone.vanish();
    ground.start_agent();
    ground.wait_state(&pod, "out");
    assert_eq!(pod.picture(), before);
    wait("the vanished pod is cleaned up", || !ground.pins().iter().any(|name| name.starts_with("inbound")));
    wait("no status is left", || fs::read_dir(ground.folder.join("status")).unwrap().count() == 0);
    wait("no record is left", || fs::read_dir(ground.folder.join("run/pods")).unwrap().count() == 0);
    wait("the proxy has none of them", || !proxy.has(&pod) && !proxy.has(&gone));
}

#[test]
fn an_enrolment_that_did_not_get_far_is_undone() {
    let mut ground = Ground::new("half");
    ground.label(true);
    let pod = ground.pod("a");
    let before = pod.picture();
    let prepared = |ground: &Ground| {
        wait("the pod is prepared", || pod.picture().contains("0x539"));
        ground.wait_state(&pod, "pending");
    };
    ground.start_agent();
    prepared(&ground);
    ground.label(false);
    ground.wait_state(&pod, "out");
    assert_eq!(pod.picture(), before);
    assert_eq!(ground.status_file(&pod), None);

    // The agent dies with the work half done.
    ground.label(true);
    prepared(&ground);
    ground.stop_agent(true);
    ground.label(false);
    ground.start_agent();
    ground.wait_state(&pod, "out");
    assert_eq!(pod.picture(), before);
    assert_eq!(fs::read_dir(ground.folder.join("run/pods")).unwrap().count(), 0);

    // The pod ends before a proxy was ever there.
    ground.label(true);
    prepared(&ground);
    let text = fs::read_to_string(ground.manifests().join("a.yaml")).unwrap();
    ground.write("a.yaml", &text.replace("phase: Running", "phase: Failed"));
    ground.wait_state(&pod, "out");
    assert_eq!(ground.status_file(&pod), None);
    assert_eq!(pod.picture(), before);
}

#[test]
fn a_proxys_own_cgroup_is_exempt_and_the_root_of_all_never() {
    let mut ground = Ground::new("exempt");
    ground.label(true);
    let pod = ground.pod("a");
    ground.start_agent();
    {
        let _proxy = ground::in_cgroup(&ground.cgroup, || ProxyProcess::start(&ground));
        wait("the proxy is refused", || ground.log().contains("the root of all captured cgroups"));
        assert_eq!(ground.status(&pod)["state"], "pending");
        assert_eq!(ground.metric("understory_agent_proxies"), 0.0);
    }
    let own = ground.cgroup.join("kubepods/burstable/proxy");
    fs::create_dir_all(&own).unwrap();
    let _proxy = ground::in_cgroup(&own, || ProxyProcess::start(&ground));
    ground.wait_state(&pod, "enrolled");
    // What a process of the proxy's cgroup opens inside the pod goes straight out.
    let direct = ground.netns.run(|| TcpListener::bind("10.88.1.1:80").unwrap()).unwrap();
    ground::in_cgroup(&own, || pod.netns().run(|| TcpStream::connect("10.88.1.1:80").unwrap()).unwrap());
    direct.accept().unwrap();
    direct.set_nonblocking(true).unwrap();
    let _app = pod.dial("10.88.1.1:80").unwrap();
    assert_eq!(direct.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
}

#[test]
fn without_a_proxy_connections_wait_for_the_bound_and_are_reset() {
    let mut ground = Ground::new("backlog");
    ground.flags.extend(["--backlog-timeout".into(), "1s".into()]);
    ground.label(true);
    let pod = ground.pod("a");
    ground.start_agent();
    let mut proxy = ProxyProcess::start(&ground);
    ground.wait_state(&pod, "enrolled");

    // A stopped proxy keeps them waiting.
    proxy.signal(rustix::process::Signal::STOP);
    let mut patient = pod.dial("10.88.1.1:80").unwrap();
    patient.set_read_timeout(Some(Duration::from_millis(2500))).unwrap();
    assert_eq!(patient.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);

    // None at all: never in the clear, and not for ever.
    proxy.kill();
    wait("the agent has noticed", || ground.metric("understory_agent_proxies") == 0.0);
    let direct = ground.netns.run(|| TcpListener::bind("10.88.1.1:80").unwrap()).unwrap();
    direct.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let mut waiting = pod.dial("10.88.1.1:80").unwrap();
    waiting.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(waiting.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_millis(900) && waited < Duration::from_secs(4), "{waited:?}");
    assert_eq!(direct.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(ground.metric("understory_agent_backlog_resets_total") >= 1.0);
    assert!(ground.is_enabled(&pod), "peers must not fall back to plaintext");

    // The next proxy takes what waits.
    let app = pod.dial("10.88.1.1:80").unwrap();
    let next = Proxy::start(&ground);
    wait("the next proxy has the pod", || next.has(&pod));
    let (_stream, client) = next.accept(&pod, |listeners| &listeners.outbound);
    assert_eq!(split(client), split(app.local_addr().unwrap()));
}

#[test]
fn a_pod_that_outlives_its_object_stays_captured_until_its_end() {
    let mut ground = Ground::new("forced");
    ground.label(true);
    let mut pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    ground.delete_object(&pod);
    wait("peers are told", || proxy.events().contains(&"drain a".to_owned()));
    let _app = pod.dial("10.88.1.1:80").unwrap();
    proxy.accept(&pod, |listeners| &listeners.outbound);
    assert!(ground.pins().contains(&format!("inbound-{}", pod.netns().cookie())));
    pod.vanish();
    wait("the proxy drops the pod", || !proxy.has(&pod));
    wait("its pins are gone", || !ground.pins().iter().any(|name| name.starts_with("inbound")));
}

/// Field case B61, and whatever else somebody may break.
#[test]
fn what_is_broken_is_repaired_and_said() {
    let mut ground = Ground::new("repair");
    ground.label(true);
    let pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    let whole = pod.picture();
    let repairs = |part: &str| ground.metric(&format!("understory_agent_repairs_total{{part=\"{part}\"}}"));

    ip(pod.netns(), "rule del priority 32764");
    wait("the rule is back", || repairs("network") == 1.0);
    assert_eq!(pod.picture(), whole);

    let links = ground.bpf.join(format!("v{}/links", ebpf::LAYOUT_VERSION));
    fs::remove_file(links.join(format!("inbound-{}", pod.netns().cookie()))).unwrap();
    wait("the inbound program is back", || repairs("inbound") == 1.0);

    // All of the node's hooks, and the maps with them.
    for folder in ["links", "maps"] {
        fs::remove_dir_all(ground.bpf.join(format!("v{}", ebpf::LAYOUT_VERSION)).join(folder)).unwrap();
    }
    wait("the hooks are back", || {
        links.join("us_connect4").exists() && links.join(format!("inbound-{}", pod.netns().cookie())).exists()
    });
    ground.wait_state(&pod, "enrolled");
    let _app = pod.dial("10.88.1.1:80").unwrap();
    proxy.accept(&pod, |listeners| &listeners.outbound);
    // The agent had kept hold of all of it: the maps are the same.
    assert_eq!(proxy.events().iter().filter(|event| *event == "maps").count(), 1);
    assert!(ground.log().contains("capture was broken and is repaired"));
}

/// Field cases B80 and B93: pods that the hooks do not reach.
#[test]
fn a_pod_outside_of_the_attached_cgroups_is_not_said_to_be_captured() {
    let mut ground = Ground::new("outside");
    ground.label(true);
    let pod = ground.pod("a");
    let strayed = ground.elsewhere().join(format!("kubepods/pod{}/c", pod.uid));
    fs::create_dir_all(&strayed).unwrap();
    fs::write(strayed.join("cgroup.procs"), pod.leader.id().to_string()).unwrap();
    ground.start_agent();
    let _proxy = Proxy::start(&ground);
    wait("the reason is given", || ground.status(&pod)["reason"].as_str().unwrap_or("").contains("is not under"));
    assert!(!ground.is_enabled(&pod));

    // It comes back under the root, and all is well; it strays again, and that is said.
    fs::write(pod.cgroup.join("cgroup.procs"), pod.leader.id().to_string()).unwrap();
    ground.wait_state(&pod, "enrolled");
    fs::write(strayed.join("cgroup.procs"), pod.leader.id().to_string()).unwrap();
    ground.wait_state(&pod, "enrolled but not captured");
    assert_eq!(ground.metric("understory_agent_pods_not_captured"), 1.0);
    fs::write(pod.cgroup.join("cgroup.procs"), pod.leader.id().to_string()).unwrap();
    ground.wait_state(&pod, "enrolled");
}

#[test]
fn one_pods_trouble_stays_its_own() {
    let mut ground = Ground::new("trouble");
    ground.label(true);
    let fine = ground.pod("fine");
    // The object says other addresses than the namespace has.
    let wrong = ground.pod_without_object("wrong", true);
    ground.write_pod_as(&wrong, 77, "");
    // A port of ours is taken by the app.
    let taken = ground.pod("taken");
    let _app = taken.netns().run(|| TcpListener::bind("0.0.0.0:15008").unwrap()).unwrap();
    // The namespace has no IPv6 at all, though the object has an address of it.
    let plain = ground.pod_without_object("plain", false);
    plain.netns().run(|| fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap()).unwrap();
    ground.write("plain.yaml", &v4_only(&plain));
    // No process.
    let mut empty = ground.pod("empty");
    empty.vanish();

    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&fine, "enrolled");
    ground.wait_state(&plain, "enrolled");
    for (pod, reason) in [(&wrong, "none of the pod's addresses"), (&taken, "port 15008"), (&empty, "no process")] {
        wait(reason, || ground.status(pod)["reason"].as_str().unwrap_or("").contains(reason));
        assert_eq!(ground.status(pod)["state"], "pending");
        assert!(!ground.is_enabled(pod) && !proxy.has(pod));
    }
    drop(_app);
    ground.wait_state(&taken, "enrolled");
}

#[test]
fn a_pod_that_ends_is_announced_and_then_forgotten() {
    let mut ground = Ground::new("end");
    ground.label(true);
    let (mut pod, job) = (ground.pod("a"), ground.pod("job"));
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    ground.wait_state(&job, "enrolled");

    // Deletion is ordered: peers are told while the pod still runs, captured as before.
    ground.write_pod(&pod, ", deletionTimestamp: '2026-01-01T00:00:00Z'");
    ground.wait_state(&pod, "ending");
    assert!(proxy.events().contains(&"drain a".to_owned()));
    assert!(ground.is_enabled(&pod));
    let _app = pod.dial("10.88.1.1:80").unwrap();
    proxy.accept(&pod, |listeners| &listeners.outbound);

    let id = pod.netns().id();
    pod.vanish();
    ground.delete_object(&pod);
    wait("the proxy drops the pod", || !proxy.has(&pod));
    wait("its status is gone", || ground.status_file(&pod).is_none());
    wait("its pins are gone", || ground.pins().iter().filter(|name| name.starts_with("inbound")).count() == 1);
    // Nothing of ours keeps the namespace alive.
    wait("the agent lets its namespace go", || {
        let fds = fs::read_dir(format!("/proc/{}/fd", ground.agent_pid())).unwrap();
        let own = format!("net:[{}]", id.ino);
        !fds.flatten().any(|entry| fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == own.as_str()))
    });

    // A Job that is done is treated as gone.
    let text = fs::read_to_string(ground.manifests().join("job.yaml")).unwrap();
    ground.write("job.yaml", &text.replace("phase: Running", "phase: Succeeded"));
    wait("the job is out", || !proxy.has(&job) && ground.status_file(&job).is_none());
    ground.wait_state(&job, "out");
}

#[test]
fn a_pod_whose_sandbox_was_made_anew_is_enrolled_in_its_new_namespace() {
    let mut ground = Ground::new("sandbox");
    ground.label(true);
    let mut pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    let old = pod.netns().cookie();
    ip(&ground.netns, "link del v1");
    pod.vanish();
    let fresh = ground::fresh_netns();
    pod.leader = ground.furnish(&fresh, 1, true, &pod.cgroup);
    let new = fresh.cookie();
    pod.netns = Some(fresh);
    wait("the new namespace has its program", || ground.pins().contains(&format!("inbound-{new}")));
    wait("the old one has none", || !ground.pins().contains(&format!("inbound-{old}")));
    ground.wait_state(&pod, "enrolled");
    let _app = pod.dial("10.88.1.1:80").unwrap();
    proxy.accept(&pod, |listeners| &listeners.outbound);
}

#[test]
fn a_drain_waits_for_open_connections_and_no_longer_than_its_bound() {
    let mut ground = Ground::new("drain");
    ground.flags.extend(["--drain-timeout".into(), "1500ms".into()]);
    ground.flags.retain(|flag| flag != "5s");
    let at = ground.flags.iter().position(|flag| flag == "--drain-timeout").unwrap();
    ground.flags.remove(at);
    ground.label(true);
    let pod = ground.pod("a");
    ground.start_agent();
    let proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    *proxy.manager.drain.lock().unwrap() = ztunnel::zds::DrainState { open: 2, followed: false };
    let begun = Instant::now();
    ground.label(false);
    // Peers do not follow within two seconds; until then new connections are still captured.
    ground.wait_state(&pod, "leaving");
    assert_eq!(ground.status_file(&pod), None);
    let _app = pod.dial("10.88.1.1:80").unwrap();
    proxy.accept(&pod, |listeners| &listeners.outbound);
    // Then new ones pass, while old ones may go on.
    let direct = ground.netns.run(|| TcpListener::bind("10.88.1.1:80").unwrap()).unwrap();
    direct.set_nonblocking(true).unwrap();
    wait("new connections pass", || {
        let _app = pod.dial("10.88.1.1:80").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        direct.accept().is_ok()
    });
    assert!(begun.elapsed() >= Duration::from_secs(2));
    assert!(proxy.has(&pod));
    assert!(pod.picture().contains("0x539"));
    ground.wait_state(&pod, "out");
    assert!(begun.elapsed() >= Duration::from_millis(3400), "{:?}", begun.elapsed());
    assert!(!proxy.has(&pod) && !pod.picture().contains("0x539"));
}

#[test]
fn cleanup_removes_everything_and_only_without_an_agent() {
    let mut ground = Ground::new("cleanup");
    ground.label(true);
    let pod = ground.pod("a");
    let before = pod.picture();
    ground.start_agent();
    let mut proxy = Proxy::start(&ground);
    ground.wait_state(&pod, "enrolled");
    let cleanup = |ground: &Ground| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ztunnel"));
        command.args(["agent", "cleanup", "--node-name", ground::NODE]);
        command.arg("--run-dir").arg(ground.folder.join("run")).arg("--bpf-dir").arg(&ground.bpf);
        command.arg("--status-dir").arg(ground.folder.join("status")).output().unwrap()
    };
    let refused = cleanup(&ground);
    assert!(!refused.status.success());
    assert!(String::from_utf8_lossy(&refused.stderr).contains("another agent runs"));

    ground.stop_agent(false);
    proxy.disconnect();
    proxy.manager.pods.lock().unwrap().clear();
    let done = cleanup(&ground);
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    assert_eq!(pod.picture(), before);
    assert!(!ground.bpf.exists() && !ground.folder.join("run").exists());
    assert_eq!(ground.status_file(&pod), None);
    let direct = ground.netns.run(|| TcpListener::bind("10.88.1.1:80").unwrap()).unwrap();
    pod.dial("10.88.1.1:80").unwrap();
    direct.accept().unwrap();
}

/// A proxy as a process of its own, so that it can be stopped and killed: this test binary again.
struct ProxyProcess(std::process::Child);

impl ProxyProcess {
    fn start(ground: &Ground) -> ProxyProcess {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_process_of_a_proxy", "--nocapture"]).env("US_TEST_ZDS_SOCKET", ground.socket());
        ProxyProcess(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap())
    }

    fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.0), signal).unwrap();
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for ProxyProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: what [`ProxyProcess`] runs. Without the variable it does nothing.
#[test]
fn the_process_of_a_proxy() {
    let Ok(socket) = std::env::var("US_TEST_ZDS_SOCKET") else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let manager = std::sync::Arc::<ground::Manager>::default();
    runtime.block_on(ztunnel::zds::Client::new(ztunnel::zds::ClientConfig::new(socket)).run(manager));
}

/// An address without the form that a dual-stack socket shows it in.
fn split(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

fn v4_only(pod: &ground::Pod) -> String {
    format!(
        "apiVersion: v1\nkind: Pod\nmetadata: {{name: {}, namespace: shop, uid: {}}}\n\
         spec: {{nodeName: {}, containers: [{{name: c}}]}}\nstatus: {{phase: Running, podIP: {}}}\n",
        pod.name,
        pod.uid,
        ground::NODE,
        pod.ip()
    )
}

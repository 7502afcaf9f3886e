//! Going into the mesh and out of it, again and again: the same result each time, and nothing is left behind.

use std::collections::BTreeMap;
use std::fs;

use testbed::{Behaviour, DATAPLANE_MODE, Families, Pod, Qos, Shop, StreamExt, Testbed, wait_for};

const CANARY: &[u8] = b"canary-of-enrolment";

/// Everything that can leak, counted.
fn count(shop: &Shop, pods: &[&Pod]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for node in shop.mesh().nodes() {
        let name = node.name();
        counts.insert(format!("{name}: descriptors of the proxy"), node.proxy.open_fds());
        counts.insert(format!("{name}: descriptors of the agent"), node.agent.open_fds());
        let mut pins = Vec::new();
        files(node.bpf_dir(), &mut pins);
        counts.insert(format!("{name}: pins"), pins.len());
        let metrics = node.proxy_metrics();
        let gauge = |metric: &str| metrics.sum(metric, &[]) as usize;
        counts.insert(format!("{name}: pods of the proxy"), gauge("workload_manager_active_proxy_count"));
        counts.insert(format!("{name}: pending pods"), gauge("workload_manager_pending_proxy_count"));
        counts.insert(format!("{name}: open sockets"), gauge("istio_tcp_sockets_open"));
        counts.insert(format!("{name}: threads"), threads(node.proxy.pid()));
        for sample in node.agent_metrics().samples().iter().filter(|s| s.name.contains("map_entries")) {
            counts.insert(format!("{name}: {} {:?}", sample.name, sample.labels), sample.value as usize);
        }
    }
    for pod in pods {
        let netns = pod.netns();
        let lines = |args: &[&str]| netns.ip_output(args).lines().count();
        counts.insert(format!("{}: rules", pod.name()), lines(&["rule"]) + lines(&["-6", "rule"]));
        let routes = lines(&["route", "show", "table", "all"]) + lines(&["-6", "route", "show", "table", "all"]);
        counts.insert(format!("{}: routes", pod.name()), routes);
        // In any state but TIME_WAIT (06), which is nobody's.
        let sockets = netns.run(|| {
            let tables = ["tcp", "tcp6"].map(|file| fs::read_to_string(format!("/proc/thread-self/net/{file}")));
            let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
            lines.filter(|line| line.split_whitespace().nth(3) != Some("06")).count()
        });
        counts.insert(format!("{}: sockets", pod.name()), sockets);
    }
    counts
}

fn sysctls(pods: &[&Pod]) -> Vec<String> {
    let keys = [
        "net/ipv4/tcp_fwmark_accept",
        "net/ipv4/fwmark_reflect",
        "net/ipv6/fwmark_reflect",
        "net/ipv4/tcp_tw_reuse",
        "net/ipv4/conf/all/route_localnet",
        "net/ipv4/conf/all/rp_filter",
    ];
    let of = |pod: &&Pod| keys.map(|key| format!("{}: {key} = {}", pod.name(), pod.netns().read_sysctl(key)));
    pods.iter().flat_map(of).collect()
}

fn files(dir: &std::path::Path, names: &mut Vec<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files(&entry.path(), names);
        } else {
            names.push(entry.path().display().to_string());
        }
    }
}

fn threads(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count)
}

#[test]
fn twenty_times_in_and_out_gives_the_same_result_and_leaves_nothing() {
    let shop = Shop::outside_mesh();
    let pods = shop.pods();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let never = (count(&shop, &pods), sysctls(&pods));
    let mut after_two = None;
    for round in 0..20 {
        shop.enrol();
        let wire = shop.tb.wire();
        for to in [shop.far_service.at(80), shop.far.at6(8080)] {
            shop.client.connect(to).unwrap_or_else(|e| panic!("round {round}: {to}: {e}")).ask(CANARY);
        }
        assert!(!wire.contains(CANARY), "round {round}: in the clear while enrolled");
        shop.unenrol();
        shop.client.connect(shop.far.at(8080)).unwrap_or_else(|e| panic!("round {round}: {e}")).ask(CANARY);
        assert!(wire.contains(CANARY), "round {round}: not in the clear while not enrolled");
        if round == 1 {
            // First uses may have set up pools, runtimes and connections that stay.
            after_two = Some(settled(&shop, &pods));
        }
    }
    let after_two = after_two.expect("two rounds were made");
    let last = wait_for_counts(&shop, &pods, &after_two);
    for (what, number) in &last {
        assert!(*number <= after_two[what] + slack(what), "{what}: {} after two rounds, {number} now", after_two[what]);
    }
    for (what, number) in &never.0 {
        let kept = ["rules", "routes", "sockets", "pods of the proxy", "pending pods"];
        if kept.iter().any(|kept| what.ends_with(kept)) {
            assert_eq!(last[what], *number, "{what} is not as it was before the pod was ever enrolled");
        }
    }
    assert_eq!(sysctls(&pods), never.1);
    assert_eq!(server.seen().len(), 60);
}

/// Counts, once they have come to rest.
fn settled(shop: &Shop, pods: &[&Pod]) -> BTreeMap<String, usize> {
    let mut last = count(shop, pods);
    wait_for("the counts to come to rest", || {
        std::thread::sleep(std::time::Duration::from_millis(500));
        let now = count(shop, pods);
        (std::mem::replace(&mut last, now.clone()) == now).then_some(now)
    })
}

/// What may come and go by itself, such as a connection to the control plane, or a thread of the pool for work that
/// blocks; 18 rounds would leak 18 of a thing.
fn slack(what: &str) -> usize {
    if what.ends_with("threads") || what.contains("descriptors") { 3 } else { 0 }
}

/// Counts, as soon as none is above what it was; or the last ones.
fn wait_for_counts(shop: &Shop, pods: &[&Pod], wanted: &BTreeMap<String, usize>) -> BTreeMap<String, usize> {
    let equal = || {
        let now = count(shop, pods);
        now.iter().all(|(what, number)| *number <= wanted[what] + slack(what)).then_some(now)
    };
    testbed::wait_until(testbed::DEADLINE, equal).unwrap_or_else(|| count(shop, pods))
}

#[test]
fn labels_decide_and_a_pods_label_beats_its_namespaces() {
    let tb = Testbed::new();
    let plain = tb.pod("shop/plain").start();
    let not = tb.pod("shop/not").label(DATAPLANE_MODE, "none").start();
    let sidecar = tb.pod("shop/sidecar").annotation("sidecar.istio.io/status", "{}").start();
    let host = tb.pod("shop/host").host_network().start();
    let single = tb.pod("other/single").label(DATAPLANE_MODE, "ambient").on(tb.node(1)).start();
    let system = tb.pod("kube-system/dns").start();
    tb.namespace("kube-system").enrol();
    tb.namespace("shop").enrol();
    let mesh = tb.start_mesh();
    mesh.wait_in_mesh(&[&plain, &single]);
    for pod in [&not, &sidecar, &host, &system] {
        assert!(mesh.status(pod).is_none_or(|s| s["redirection"] != "enabled"), "{} is in the mesh", pod.name());
        assert!(mesh.node_of(pod).pod_state(pod).is_none());
    }
    // Labels of pods change, too.
    not.set_label(DATAPLANE_MODE, None);
    mesh.wait_in_mesh(&[&not]);
    plain.set_label(DATAPLANE_MODE, Some("none"));
    mesh.wait_out_of_mesh(&[&plain]);
    single.set_label(DATAPLANE_MODE, None);
    mesh.wait_out_of_mesh(&[&single]);
}

#[test]
fn every_form_of_pod_is_found_and_captured() {
    let tb = Testbed::new();
    let pods = [
        tb.pod("shop/guaranteed").qos(Qos::Guaranteed).start(),
        tb.pod("shop/burstable").qos(Qos::Burstable).start(),
        tb.pod("shop/besteffort").qos(Qos::BestEffort).on(tb.node(1)).start(),
        tb.pod("shop/v4").families(Families::V4Only).start(),
        tb.pod("shop/v4-kernel").families(Families::V4Kernel).on(tb.node(1)).start(),
        tb.pod("shop/v6").families(Families::V6Only).start(),
    ];
    tb.namespace("shop").enrol();
    let mesh = tb.start_mesh();
    mesh.wait_in_mesh(&pods.iter().collect::<Vec<_>>());
    let _servers: Vec<_> = pods.iter().map(|pod| pod.serve(8080, Behaviour::Echo)).collect();
    let wire = tb.wire();
    for from in &pods {
        for to in pods.iter().filter(|to| to.uid() != from.uid() && to.ip().is_ipv4() == from.ip().is_ipv4()) {
            let stream = from.connect(to.at(8080));
            stream.unwrap_or_else(|e| panic!("{} → {}: {e}", from.name(), to.name())).ask(CANARY);
        }
    }
    assert!(!wire.contains(CANARY));
}

#[test]
fn enrolment_breaks_no_open_connection_and_restarts_nothing() {
    let shop = Shop::outside_mesh();
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let mut old: Vec<_> = [shop.far.at(8080), shop.far.at6(8080), shop.near.at(8080)]
        .into_iter()
        .map(|to| shop.client.connect(to).expect("connect"))
        .collect();
    let outside = shop.tb.outside("laptop");
    old.push(outside.connect(shop.far.at(8080)).expect("connect"));
    let ask = |old: &mut Vec<std::net::TcpStream>| old.iter_mut().for_each(|stream| stream.ask(CANARY));
    ask(&mut old);
    let processes = shop.pods().map(|pod| (pod.pause_pid(), pod.app_pid()));
    shop.enrol();
    ask(&mut old);
    shop.unenrol();
    ask(&mut old);
    assert_eq!(shop.pods().map(|pod| (pod.pause_pid(), pod.app_pid())), processes);
}

/// The label goes and comes back at once, at any moment of the way out: the pod is served as before.
#[test]
fn a_label_that_comes_back_while_its_pods_leave_is_followed() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let namespace = shop.tb.namespace("shop");
    let node = shop.mesh().node(0);
    for round in 0..12 {
        namespace.unenrol();
        wait_for("the pod to be on its way out", || {
            let reached = match round % 3 {
                0 => shop.mesh().status(&shop.client).is_none(),
                1 => node.pod_state(&shop.client).is_none_or(|pod| pod["state"] != "Up"),
                _ => !node.agent_status().to_string().contains("enrolled"),
            };
            reached.then_some(())
        });
        namespace.enrol();
        shop.mesh().wait_in_mesh(&shop.pods());
        shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"in the mesh again");
    }
}

#[test]
fn connections_of_the_mesh_outlive_the_label_or_are_drained_not_cut_in_mid_word() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Sink);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.say(&[1; 1000]);
    std::thread::scope(|scope| {
        scope.spawn(|| shop.tb.namespace("shop").unenrol());
        stream.say(&[1; 1000]);
        stream.half_close();
        let (answer, end) = stream.hear_end();
        assert_eq!((answer.len(), end), (16, testbed::End::Fin));
        assert_eq!(u64::from_be_bytes(answer[..8].try_into().unwrap()), 2000);
    });
    shop.mesh().wait_out_of_mesh(&shop.pods());
}

#[test]
fn a_pod_that_ends_leaves_nothing_on_its_node() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let first = count(&shop, &[]);
    for round in 0..5 {
        let pod = shop.tb.pod(&format!("shop/job-{round}")).start();
        shop.mesh().wait_in_mesh(&[&pod]);
        pod.connect(shop.far_service.at(80)).expect("connect").ask(CANARY);
        pod.delete();
        let node = shop.mesh().node(0);
        wait_for("the proxy to drop the pod", || node.pod_state(&pod).is_none().then_some(()));
        wait_for("the status file to go", || shop.mesh().status(&pod).is_none().then_some(()));
        assert!(!pod.netns().path().exists());
    }
    wait_for("the pins to be as before", || {
        let pins = |counts: &BTreeMap<String, usize>| counts["node0: pins"];
        (pins(&count(&shop, &[])) == pins(&first)).then_some(())
    });
}

#[test]
fn a_successor_with_the_same_address_is_another_pod() {
    // B04, B96: nothing may be keyed by an address.
    let shop = Shop::in_mesh();
    let old = shop.tb.pod("shop/old").service_account("old").on(shop.tb.node(1)).start();
    shop.mesh().wait_in_mesh(&[&old]);
    let server = old.serve(8080, Behaviour::Echo);
    shop.client.connect(old.at(8080)).expect("connect").ask(b"to the old");
    drop(server);
    old.delete();
    let new = shop.tb.pod("shop/new").service_account("new").on(shop.tb.node(1)).addresses_of(&old).start();
    shop.mesh().wait_in_mesh(&[&new]);
    let _server = new.serve(8080, Behaviour::Echo);
    shop.client.connect(new.at(8080)).expect("connect").ask(b"to the new");
    let line = shop.mesh().node(0).wait_access_line("to the new", |line| line.get("dst.workload") == "new");
    assert_eq!(line.get("dst.identity"), new.identity(), "{}", line.text);
}

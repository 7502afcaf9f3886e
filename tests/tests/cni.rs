//! The CNI plugin, called as a container runtime does: a pod of the mesh is captured before its first process runs, or
//! does not start.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use testbed::{
    Behaviour, DATAPLANE_MODE, MeshOptions, Pod, Runtime, Shop, StreamExt, Testbed, first_configuration, holds_for,
    wait_for,
};

const CANARY: &[u8] = b"canary-at-the-start";

/// Waits until the agent captures the pod without having been asked.
fn captured(tb: &Testbed, pod: &Pod) {
    wait_for("the agent to have captured the pod", || {
        (tb.mesh().status(pod)?["redirection"] == "enabled").then_some(())
    });
}

#[test]
fn a_pod_is_captured_before_its_first_process_runs() {
    let shop = Shop::in_mesh();
    let server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    let runtime = Runtime::new(shop.tb.node(0), &node.cni_socket());
    let wire = shop.tb.wire();
    for round in 0..4 {
        let pod = shop.tb.pod(&format!("shop/job-{round}")).service_account(&format!("job-{round}")).sandbox();
        let add = runtime.call("ADD", &pod);
        assert_eq!(add.run().expect("ADD"), add.result(), "the result is handed on as it came");
        pod.run_processes();
        // Nobody has heard of the pod's address yet: its first connection waits, and does not go in the clear.
        let mut stream = pod.connect(shop.far_service.at(80)).expect("connect");
        stream.say(CANARY);
        pod.announce();
        assert_eq!(stream.hear(CANARY.len()), CANARY);
        drop(stream);
        assert_eq!(server.seen().len(), round + 1);
        node.wait_access_line("its identity", |line| line.get("src.identity") == pod.identity());
        // And in the other direction, as soon as others know of it.
        shop.mesh().wait_in_mesh(&[&pod]);
        let _server = pod.serve(8080, Behaviour::Echo);
        shop.far.connect(pod.at(8080)).expect("connect").ask(CANARY);
        shop.far.connect(pod.at6(8080)).expect("connect").ask(CANARY);
        runtime.call("CHECK", &pod).run().expect("CHECK");
        pod.begin_deletion();
        runtime.call("DEL", &pod).run().expect("DEL");
        pod.destroy_sandbox();
        pod.remove_object();
    }
    assert!(!wire.contains(CANARY), "nothing went in the clear");
    assert_eq!(node.agent_metrics().sum("understory_agent_cni_add_seconds_count", &[("outcome", "captured")]), 4.0);
    node.wait_agent_count(4.0, "understory_agent_cni_requests_total", &[("command", "DEL"), ("outcome", "done")]);
}

#[test]
fn pods_that_do_not_belong_into_the_mesh_start_as_ever() {
    let shop = Shop::in_mesh();
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket());
    let plain = shop.tb.pod("legacy/plain").sandbox();
    let not = shop.tb.pod("shop/not").label(DATAPLANE_MODE, "none").sandbox();
    let system = shop.tb.pod("kube-system/dns").sandbox();
    for pod in [&plain, &not, &system] {
        let add = runtime.call("ADD", pod);
        assert_eq!(add.run().expect("ADD"), add.result());
        runtime.call("CHECK", pod).run().expect("CHECK");
        pod.run_processes();
        pod.announce();
        assert!(shop.mesh().status(pod).is_none_or(|status| status["redirection"] != "enabled"));
    }
    // What the runtime told serves a label that comes later.
    not.set_label(DATAPLANE_MODE, None);
    shop.mesh().wait_in_mesh(&[&not]);
    runtime.call("CHECK", &not).run().expect("CHECK");
    // What is no pod of Kubernetes is nobody's here.
    let add = runtime.call("ADD", &plain).env("CNI_ARGS", "IgnoreUnknown=1");
    assert_eq!(add.run().expect("ADD of a plain container"), add.result());
}

#[test]
fn a_node_comes_up_from_nothing_and_its_pods_captured_or_not_at_all() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    let runtime = Runtime::new(shop.tb.node(0), &node.cni_socket());
    shop.client.delete();
    shop.near.delete();
    node.proxy.kill9();
    node.agent.kill9();
    // What a node forgets when it starts anew.
    fs::remove_dir_all(node.bpf_dir()).expect("the pins go");
    fs::remove_dir_all(node.run_dir()).expect("the run folder goes");
    let wire = shop.tb.wire();
    let pod = shop.tb.pod("shop/app").service_account("app").sandbox();
    let socket = node.cni_socket();
    let named = ["shop/app", "step: connect to the agent", "No such file", socket.to_str().expect("a plain path")];
    runtime.call("ADD", &pod).run().fails(11, &named);
    runtime.call("DEL", &pod).run().expect("DEL without the agent");
    // Without these two there would never be one.
    for name in ["kube-system/dns", "understory-system/agent"] {
        let system = shop.tb.pod(name).sandbox();
        runtime.call("ADD", &system).run().expect("ADD of what the node needs");
        runtime.call("DEL", &system).run().expect("DEL of what the node needs");
    }
    let runtime = runtime.with("timeoutSeconds", 60);
    shop.mesh().start_agent(node);
    shop.mesh().start_proxy(node);
    // The runtime tries again, as it does until it succeeds.
    wait_for("the pod to start", || (runtime.call("ADD", &pod).run().code == Some(0)).then_some(()));
    pod.run_processes();
    let mut stream = pod.connect(shop.far_service.at(80)).expect("connect");
    stream.say(CANARY);
    pod.announce();
    assert_eq!(stream.hear(CANARY.len()), CANARY);
    assert!(!wire.contains(CANARY));
}

#[test]
fn without_a_proxy_a_pod_of_the_mesh_waits_for_one_and_others_start() {
    let shop = Shop::in_mesh_with(MeshOptions::default().agent_arg("--cni-timeout=1s"));
    let node = shop.mesh().node(0);
    let runtime = Runtime::new(shop.tb.node(0), &node.cni_socket());
    node.proxy.kill9();
    wait_for("the agent to notice", || {
        (node.agent_metrics().sum("understory_agent_proxies", &[]) == 0.0).then_some(())
    });
    let pod = shop.tb.pod("shop/app").sandbox();
    runtime.call("ADD", &pod).run().fails(11, &["shop/app", "no proxy is connected", "bring the pod into the mesh"]);
    node.agent.wait_log(&["CNI ADD: refused", "shop/app", "no proxy is connected"]);
    let plain = shop.tb.pod("legacy/plain").sandbox();
    runtime.call("ADD", &plain).run().expect("ADD of a pod outside");
    shop.mesh().start_proxy(node);
    wait_for("the pod to start", || (runtime.call("ADD", &pod).run().code == Some(0)).then_some(()));
}

#[test]
fn an_object_that_comes_late_is_waited_for_and_another_pods_is_not_taken_for_it() {
    let shop = Shop::in_mesh_with(MeshOptions::default().agent_arg("--cni-timeout=20s"));
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket()).with("timeoutSeconds", 25);
    // A StatefulSet's pod is made anew under its old name: the agent may still know the old one.
    let old = shop.tb.pod("shop/web-0").start();
    shop.mesh().wait_in_mesh(&[&old]);
    let successor = shop.tb.pod("shop/web-0").without_object();
    std::thread::scope(|scope| {
        let add = scope.spawn(|| runtime.call("ADD", &successor).run());
        holds_for(Duration::from_millis(300), "the pod does not start", || !add.is_finished());
        old.delete();
        holds_for(Duration::from_millis(300), "the pod does not start", || !add.is_finished());
        successor.put_object();
        add.join().expect("the thread").expect("ADD");
    });
    successor.run_processes();
    successor.announce();
    shop.mesh().wait_in_mesh(&[&successor]);
    runtime.call("CHECK", &successor).run().expect("CHECK");
}

#[test]
fn a_pod_whose_object_never_comes_does_not_start() {
    let shop = Shop::in_mesh_with(MeshOptions::default().agent_arg("--cni-timeout=500ms"));
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket());
    let pod = shop.tb.pod("shop/ghost").without_object();
    runtime.call("ADD", &pod).run().fails(11, &["shop/ghost", "not known yet", "wait for the pod's object"]);
    runtime.call("CHECK", &pod).run().fails(100, &["shop/ghost", "not known yet"]);
    runtime.call("DEL", &pod).run().expect("DEL of a pod that nobody knows");
}

#[test]
fn a_sandbox_that_is_made_anew_takes_the_place_of_the_old_one() {
    let shop = Shop::in_mesh();
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket());
    let pod = shop.tb.pod("shop/app").sandbox();
    runtime.call("ADD", &pod).run().expect("ADD");
    // The same pod in another namespace, with other addresses and another number of the runtime's.
    let second = shop.tb.pod("legacy/second-sandbox").sandbox();
    let args = format!("K8S_POD_NAME=app;K8S_POD_NAMESPACE=shop;K8S_POD_UID={}", pod.uid());
    let again = |command| runtime.call(command, &second).env("CNI_ARGS", args.clone()).env("CNI_CONTAINERID", "second");
    again("ADD").run().expect("ADD of the second");
    again("CHECK").run().expect("CHECK of the second");
    runtime.call("CHECK", &pod).run().fails(100, &["shop/app", "not captured"]);
    // A late farewell to the first is none to the second.
    runtime.call("DEL", &pod).run().expect("DEL of the first");
    again("CHECK").run().expect("CHECK of the second");
}

#[test]
fn every_version_and_command_of_the_specification() {
    let shop = Shop::in_mesh();
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket());
    let answer: Value = serde_json::from_str(runtime.bare_call("VERSION").run().expect("VERSION")).expect("JSON");
    assert_eq!(answer["cniVersion"], "1.0.0");
    let versions: Vec<String> = serde_json::from_value(answer["supportedVersions"].clone()).expect("a list");
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        assert!(versions.iter().any(|known| known == version), "{version}");
        let runtime = runtime.clone().with("cniVersion", version);
        let pod = shop.tb.pod(&format!("shop/v{}", version.replace('.', "-"))).sandbox();
        let add = runtime.call("ADD", &pod);
        assert_eq!(add.run().expect("ADD"), add.result());
        let check = runtime.call("CHECK", &pod).run();
        let (status, gc) = (runtime.bare_call("STATUS").run(), gc(&runtime, &[&pod]));
        if version == "0.3.1" {
            check.fails(1, &["0.3.1", "CHECK"]);
        } else {
            assert_eq!(check.expect("CHECK"), "");
        }
        if version == "1.1.0" {
            assert_eq!(status.expect("STATUS"), "");
            assert_eq!(gc.expect("GC"), "");
            runtime.call("CHECK", &pod).run().expect("CHECK of an attachment that is valid");
        } else {
            status.fails(1, &[version, "STATUS"]);
            gc.fails(1, &[version, "GC"]);
        }
        for _ in 0..2 {
            assert_eq!(runtime.call("DEL", &pod).run().expect("DEL"), "");
        }
        // As after a start of the node: without a namespace, and without a result.
        let bare = runtime.call("DEL", &pod).without("CNI_NETNS").config("prevResult", Value::Null);
        bare.run().expect("DEL of what is long gone");
    }
    // For a runtime all is well again as soon as the agent is there.
    let node = shop.mesh().node(0);
    node.agent.kill9();
    std::thread::scope(|scope| {
        let status = scope.spawn(|| runtime.clone().with("cniVersion", "1.1.0").bare_call("STATUS").run());
        shop.mesh().start_agent(node);
        status.join().expect("the thread").expect("STATUS over a restart of the agent");
    });
}

fn gc(runtime: &Runtime<'_>, pods: &[&Pod]) -> testbed::CniAnswer {
    let attachments: Vec<Value> =
        pods.iter().map(|pod| json!({"containerID": pod.sandbox_id(), "ifname": "eth0"})).collect();
    runtime.bare_call("GC").config("cni.dev/valid-attachments", attachments).run()
}

#[test]
fn garbage_is_answered_with_an_error_of_the_specification() {
    let tb = Testbed::with_nodes(1);
    // Nothing of this needs an agent.
    let runtime = Runtime::new(tb.node(0), &tb.path("no-agent.sock"));
    let pod = tb.pod("shop/app").sandbox();
    let add = runtime.call("ADD", &pod);
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(2 << 20));
    let deep = "[".repeat(100_000);
    let table = [
        ("no command", add.clone().without("CNI_COMMAND"), 4),
        ("an unknown command", add.clone().env("CNI_COMMAND", "EXPLODE"), 4),
        ("no container", add.clone().without("CNI_CONTAINERID"), 4),
        ("no namespace", add.clone().without("CNI_NETNS"), 4),
        ("no interface", add.clone().without("CNI_IFNAME"), 4),
        ("odd arguments", add.clone().env("CNI_ARGS", "=;;;K8S_POD_NAME"), 4),
        ("a namespace that is none", add.clone().env("CNI_NETNS", "/nowhere"), 5),
        ("nothing on standard input", add.clone().input(""), 6),
        ("no JSON", add.clone().input("{\"cniVersion\": "), 6),
        ("no text", add.clone().input([0xff, 0xfe, 0x00]), 6),
        ("too much", add.clone().input(long), 6),
        ("too deep", add.clone().input(deep), 6),
        ("a list", add.clone().input("[]"), 6),
        ("no version", add.clone().config("cniVersion", Value::Null), 6),
        ("an old version", add.clone().config("cniVersion", "0.2.0"), 1),
        ("a future version", add.clone().config("cniVersion", "9.9.9"), 1),
        ("no result before it", add.clone().config("prevResult", Value::Null), 7),
        ("a result that is none", add.clone().config("prevResult", json!({"ips": [{"address": "here"}]})), 7),
        ("no socket", add.clone().config("socket", ""), 7),
    ];
    for (what, call, code) in table {
        let answer = call.run();
        assert_eq!(answer.error(what)["code"], code, "{what}: {answer:?}");
        assert_eq!(answer.stderr, "", "{what}");
    }
}

#[test]
fn an_agent_that_is_stopped_holds_nobody_up_for_long() {
    let shop = Shop::in_mesh();
    let node = shop.mesh().node(0);
    let runtime = Runtime::new(shop.tb.node(0), &node.cni_socket()).with("timeoutSeconds", 1);
    let pod = shop.tb.pod("shop/app").sandbox();
    node.agent.freeze();
    runtime.call("ADD", &pod).run().fails(11, &["shop/app", "nothing came within 1s", "wait for the agent's answer"]);
    runtime.call("DEL", &pod).run().expect("DEL");
    node.agent.thaw();
    wait_for("the pod to start", || (runtime.call("ADD", &pod).run().code == Some(0)).then_some(()));
}

#[test]
fn many_pods_that_start_at_once_are_all_captured() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let runtime = Runtime::new(shop.tb.node(0), &shop.mesh().node(0).cni_socket());
    let wire = shop.tb.wire();
    let pods: Vec<Pod> = (0..24).map(|i| shop.tb.pod(&format!("shop/many-{i}")).sandbox()).collect();
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| {
                let add = runtime.call("ADD", pod);
                assert_eq!(add.run().expect("ADD"), add.result());
                pod.run_processes();
                let mut stream = pod.connect(shop.far_service.at(80)).expect("connect");
                stream.say(CANARY);
                pod.announce();
                assert_eq!(stream.hear(CANARY.len()), CANARY);
                runtime.call("CHECK", pod).run().expect("CHECK");
            });
        }
    });
    assert!(!wire.contains(CANARY));
    std::thread::scope(|scope| {
        for pod in &pods {
            scope.spawn(|| runtime.call("DEL", pod).run().expect("DEL").to_owned());
        }
    });
}

#[test]
fn a_restart_of_the_agent_in_mid_start_leaves_the_pod_captured() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let node = shop.mesh().node(0);
    let runtime = Runtime::new(shop.tb.node(0), &node.cni_socket());
    let wire = shop.tb.wire();
    let pod = shop.tb.pod("shop/app").sandbox();
    runtime.call("ADD", &pod).run().expect("ADD");
    // The new agent was told of no sandbox; what the old one has captured stays captured until the pod shows itself.
    node.agent.kill9();
    shop.mesh().start_agent(node);
    node.wait_agent_ready();
    pod.run_processes();
    let mut stream = pod.connect(shop.far_service.at(80)).expect("connect");
    stream.say(CANARY);
    pod.announce();
    assert_eq!(stream.hear(CANARY.len()), CANARY);
    captured(&shop.tb, &pod);
    assert!(!wire.contains(CANARY));
}

/// A node with the folders of its runtime, and an agent that installs the plugin there.
struct Installed {
    tb: Testbed,
    conf: PathBuf,
    bin: PathBuf,
}

const LIST: &str =
    "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"net\",\n  \"plugins\": [\n    {\"type\": \"bridge\"}\n  ]\n}\n";

impl Installed {
    fn new(further: &[&str]) -> Self {
        let tb = Testbed::with_nodes(1);
        let (conf, bin) = (tb.path("cni/net.d"), tb.path("cni/bin"));
        let mut options = MeshOptions::default();
        for arg in [format!("--cni-conf-dir={}", conf.display()), format!("--cni-bin-dir={}", bin.display())] {
            options = options.agent_arg(&arg);
        }
        for arg in further {
            options = options.agent_arg(arg);
        }
        tb.start_mesh_with(options);
        Self { tb, conf, bin }
    }

    /// What the network's own agent does.
    fn put(&self, name: &str, text: &str) {
        fs::create_dir_all(&self.conf).expect("the folder");
        fs::write(self.conf.join(name), text).expect("write a configuration");
    }

    fn wait_in_chain(&self, name: &str) -> Runtime<'_> {
        wait_for(&format!("the plugin to be in the chain of {name}"), || {
            (first_configuration(&self.conf)? == self.conf.join(name)).then_some(())?;
            Runtime::installed(self.tb.node(0), &self.conf, &self.bin)
        })
    }

    fn cleanup(&self) -> String {
        let node = self.tb.mesh().node(0);
        let arg = |name: &str, path: &PathBuf| format!("--{name}={}", path.display());
        let args = [
            arg("run-dir", node.run_dir()),
            arg("bpf-dir", node.bpf_dir()),
            arg("cni-conf-dir", &self.conf),
            arg("cni-bin-dir", &self.bin),
        ];
        let args: Vec<&str> = ["agent", "cleanup"].into_iter().chain(args.iter().map(String::as_str)).collect();
        node.ztunnel(&args).expect("cleanup")
    }
}

#[test]
fn the_plugin_is_installed_kept_in_the_chain_and_removed_without_a_trace() {
    let node = Installed::new(&[]);
    let mesh = node.tb.mesh();
    let agent = &mesh.node(0).agent;
    agent.wait_log(&["there is no CNI configuration yet"]);
    // The network comes later than the mesh.
    node.put("10-net.conflist", LIST);
    let runtime = node.wait_in_chain("10-net.conflist");
    node.tb.namespace("shop").enrol();
    let pod = node.tb.pod("shop/app").sandbox();
    let add = runtime.call("ADD", &pod);
    assert_eq!(add.run().expect("ADD by the installed plugin"), add.result());
    let dns = node.tb.pod("kube-system/dns").sandbox();
    runtime.call("ADD", &dns).run().expect("ADD of what is excluded");
    drop(runtime);
    // It writes its file anew, by halves; then gives it another name; then has one of the old kind.
    node.put("10-net.conflist", &LIST[..LIST.len() / 2]);
    node.put("10-net.conflist", &LIST.replace("bridge", "ptp"));
    node.wait_in_chain("10-net.conflist");
    fs::rename(node.conf.join("10-net.conflist"), node.conf.join("20-net.conflist")).expect("rename");
    node.put("05-new.conflist", LIST);
    node.wait_in_chain("05-new.conflist");
    let single = "{\"cniVersion\": \"0.4.0\", \"name\": \"net\", \"type\": \"bridge\"}";
    node.put("01-single.conf", single);
    node.wait_in_chain("01-single-understory.conflist");
    fs::remove_file(node.conf.join("01-single.conf")).expect("remove");
    node.wait_in_chain("05-new.conflist");
    // Somebody clears the folder of plugins.
    fs::remove_file(node.bin.join("understory-cni")).expect("remove the plugin");
    node.put("05-new.conflist", LIST);
    wait_for("the program to be back", || node.bin.join("understory-cni").exists().then_some(()));
    node.wait_in_chain("05-new.conflist");
    assert_eq!(mesh.node(0).agent_metrics().sum("understory_agent_cni_installed", &[]), 1.0);
    // While the agent is away the entry stays: no pod of the mesh starts past it.
    agent.terminate();
    let runtime = Runtime::installed(node.tb.node(0), &node.conf, &node.bin).expect("the entry stays");
    let late = node.tb.pod("shop/late").sandbox();
    runtime.call("ADD", &late).run().fails(11, &["shop/late", "connect to the agent"]);
    let said = node.cleanup();
    let places = ["entry removed from", "understory-cni", "run folder"].map(|text| said.find(text));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{said}");
    assert_eq!(fs::read_to_string(node.conf.join("05-new.conflist")).expect("it stays"), LIST);
    assert_eq!(
        fs::read_to_string(node.conf.join("20-net.conflist")).expect("it stays"),
        LIST.replace("bridge", "ptp"),
        "also where it was left behind in one that is no longer in use"
    );
    assert!(!node.bin.join("understory-cni").exists() && !mesh.node(0).cni_socket().exists());
}

#[test]
fn a_network_that_writes_its_file_anew_at_every_start_of_the_node_cannot_take_the_plugin_out() {
    let node = Installed::new(&["--cni-own-file"]);
    node.put("10-net.conflist", LIST);
    node.wait_in_chain("10-net-understory.conflist");
    assert_eq!(fs::read_to_string(node.conf.join("10-net.conflist")).expect("it stays"), LIST);
    let agent = &node.tb.mesh().node(0).agent;
    agent.terminate();
    // The node starts anew, and the network is there before the mesh.
    node.put("10-net.conflist", LIST);
    node.tb.namespace("shop").enrol();
    let pod = node.tb.pod("shop/app").sandbox();
    let runtime = Runtime::installed(node.tb.node(0), &node.conf, &node.bin).expect("the plugin is still in the chain");
    runtime.call("ADD", &pod).run().fails(11, &["shop/app"]);
    node.tb.mesh().start_agent(node.tb.mesh().node(0));
    let runtime = runtime.with("timeoutSeconds", 60);
    wait_for("the pod to start", || (runtime.call("ADD", &pod).run().code == Some(0)).then_some(()));
    drop(runtime);
    agent.terminate();
    node.cleanup();
    assert_eq!(first_configuration(&node.conf), Some(node.conf.join("10-net.conflist")));
}

#[test]
fn another_program_that_keeps_taking_the_plugin_out_is_not_fought_with() {
    let node = Installed::new(&[]);
    node.put("10-net.conflist", LIST);
    let agent = &node.tb.mesh().node(0).agent;
    wait_for("the agent to say so", || {
        let text = fs::read_to_string(node.conf.join("10-net.conflist")).expect("it is there");
        if text != LIST {
            node.put("10-net.conflist", LIST);
        }
        let log = agent.log();
        log.contains("another program keeps taking the CNI plugin out").then_some(())
    });
    let metrics = node.tb.mesh().node(0).agent_metrics();
    assert_eq!(metrics.sum("understory_agent_cni_installed", &[]), 0.0);
    // It has its peace then, and in the end the plugin.
    node.wait_in_chain("10-net.conflist");
}

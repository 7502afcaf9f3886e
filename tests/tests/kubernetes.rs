//! The real API server that tests talk to keeps its own promises.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};
use testbed::kubernetes::ApiServer;
use testbed::{Testbed, TestbedName, traces, wait_for};

#[test]
fn it_is_ready_and_serves_the_kinds_of_gateway_api_and_istio() {
    let server = ApiServer::shared();
    assert_eq!(server.kubectl(&["get", "--raw", "/readyz"]), "ok");
    let version: Value = serde_json::from_str(&server.kubectl(&["get", "--raw", "/version"])).expect("JSON");
    assert_ne!(version["gitVersion"], "v0.0.0-master+$Format:%H$", "charts look at it");
    let shop = server.namespace("kinds");
    shop.apply(
        "apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: waypoint}
spec:
  gatewayClassName: istio-waypoint
  listeners: [{name: mesh, port: 15008, protocol: HBONE}]
---
apiVersion: security.istio.io/v1
kind: PeerAuthentication
metadata: {name: strict}
spec: {mtls: {mode: STRICT}}
",
    );
    assert_eq!(shop.get(&["gateway", "waypoint"])["spec"]["listeners"][0]["port"], 15008);
    assert_eq!(shop.get(&["peerauthentication", "strict"])["spec"]["mtls"]["mode"], "STRICT");
    // Their schemas count.
    let wrong = json!({ "spec": { "mtls": { "mode": "SOMETIMES" } } }).to_string();
    let args = ["patch", "peerauthentication", "strict", "-n", shop.name(), "--type", "merge", "-p", &wrong];
    let refused = server.try_kubectl(&server.kubeconfig(), &args);
    assert!(!refused.status.success() && stderr(&refused).contains("mtls.mode"), "{}", stderr(&refused));
}

#[test]
fn a_watch_sees_pods_come_and_go_and_controllers_make_endpoint_slices() {
    let server = ApiServer::shared();
    let shop = server.namespace("watch");
    let mut command = server.kubectl_command();
    command.args(["-n", shop.name(), "get", "pods", "--watch", "--output-watch-events", "-o"]);
    command.arg("jsonpath={.type} {.object.metadata.name} {.object.status.phase} {.object.status.podIP}{'\\n'}");
    let mut watch = Ended(command.stdout(Stdio::piped()).spawn().expect("start kubectl"));
    let mut lines = BufReader::new(watch.0.stdout.take().expect("piped")).lines().map(|line| line.expect("read"));

    shop.run_pod("web", "node-a", "10.244.0.7", &[("app", "web")]);
    assert!(lines.any(|line| line == "MODIFIED web Running 10.244.0.7"), "the watch ended before the pod ran");
    shop.kubectl(&["expose", "pod", "web", "--port", "80", "--target-port", "8080"]);
    let address = shop.get(&["service", "web"])["spec"]["clusterIP"].as_str().expect("an address").to_owned();
    assert!(address.starts_with("10.96."), "{address}");
    let endpoint = |slices: &Value| {
        let slice = slices["items"].as_array()?.first()?;
        let endpoint = slice["endpoints"].as_array()?.first()?;
        let ready = endpoint["conditions"]["ready"] == true;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        ready
            .then(|| (text(&endpoint["addresses"][0]), text(&endpoint["nodeName"]), slice["ports"][0]["port"].as_u64()))
    };
    let made = wait_for("an endpoint slice", || endpoint(&shop.get(&["endpointslices"])));
    assert_eq!(made, (Some("10.244.0.7".to_owned()), Some("node-a".to_owned()), Some(8080)));

    shop.delete_pod("web");
    assert!(lines.any(|line| line.starts_with("DELETED web ")), "the watch ended before the pod was gone");
    wait_for("the endpoint to go", || endpoint(&shop.get(&["endpointslices"])).is_none().then_some(()));
}

#[test]
fn tokens_of_pods_are_minted_and_reviewed() {
    let server = ApiServer::shared();
    let shop = server.namespace("tokens");
    let account = shop.account("cart");
    let pod = shop.run_pod_with("cart", "node-a", "10.244.0.8", &[], |pod| {
        pod["spec"]["serviceAccountName"] = json!("cart");
    });
    let token = account.token_of_pod("istio-ca", &pod);
    let review = |audience: &str, token: &str| -> Value {
        let review = json!({
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": { "token": token, "audiences": [audience] },
        });
        let text = server.feed(&["create", "-o", "json", "-f", "-"], &review.to_string());
        serde_json::from_str::<Value>(&text).expect("JSON")["status"].clone()
    };
    let status = review("istio-ca", &token);
    assert_eq!(status["authenticated"], true, "{status}");
    assert_eq!(status["user"]["username"], format!("system:serviceaccount:{}:cart", shop.name()));
    let extra = &status["user"]["extra"];
    assert_eq!(extra["authentication.kubernetes.io/pod-name"][0], "cart");
    assert_eq!(extra["authentication.kubernetes.io/pod-uid"][0], pod["metadata"]["uid"]);
    assert_eq!(extra["authentication.kubernetes.io/node-name"][0], "node-a");
    let other = review("vault", &token);
    assert_ne!(other["authenticated"], true, "a token for another audience: {other}");
    let (_, signature) =
        account.token("istio-ca").rsplit_once('.').map(|(a, b)| (a.to_owned(), b.to_owned())).expect("a JWT");
    let forged = format!("{}.{signature}", token.rsplit_once('.').expect("a JWT").0);
    assert_ne!(review("istio-ca", &forged)["authenticated"], true);
    shop.delete_pod("cart");
    // The server remembers a token that was right for ten seconds.
    wait_for("the token of a pod that is gone to be refused", || {
        (review("istio-ca", &token)["authenticated"] != true).then_some(())
    });
}

#[test]
fn an_account_may_do_what_its_role_says_and_nothing_else() {
    let server = ApiServer::shared();
    let shop = server.namespace("rights");
    let account = shop.account("reader");
    let config = account.kubeconfig();
    let refused = server.try_kubectl(&config, &["get", "pods", "-A"]);
    assert!(stderr(&refused).contains("is forbidden"), "without a role: {}", stderr(&refused));
    account.allow(json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }]));
    wait_for("the role to count", || {
        server.try_kubectl(&config, &["get", "pods", "-A"]).status.success().then_some(())
    });
    for args in [&["get", "secrets", "-A"][..], &["delete", "pod", "web", "-n", shop.name()]] {
        let refused = server.try_kubectl(&config, args);
        assert!(stderr(&refused).contains("is forbidden"), "{args:?}: {}", stderr(&refused));
    }
    // Nobody comes in without a token, nor with a wrong one.
    let nobody = config.with_extension("nobody");
    let text = fs::read_to_string(&config).expect("read");
    let mut parsed: Value = serde_json::from_str(&text).expect("JSON");
    parsed["users"][0]["user"] = json!({ "token": "0123456789abcdef" });
    fs::write(&nobody, parsed.to_string()).expect("write");
    let refused = server.try_kubectl(&nobody, &["get", "--raw", "/readyz"]);
    assert!(!refused.status.success() && stderr(&refused).contains("nauthorized"), "{}", stderr(&refused));
}

#[test]
fn helm_installs_upgrades_and_uninstalls_a_chart() {
    let server = ApiServer::shared();
    let shop = server.namespace("chart");
    let chart = server.path("chart");
    fs::create_dir_all(chart.join("templates")).expect("make the chart");
    fs::write(chart.join("Chart.yaml"), "{apiVersion: v2, name: probe, version: 0.1.0, kubeVersion: '>= 1.30.0'}")
        .expect("write");
    fs::write(chart.join("values.yaml"), "{colour: green}").expect("write");
    let template = "{apiVersion: v1, kind: ConfigMap, metadata: {name: probe}, data: {colour: '{{ .Values.colour }}'}}";
    fs::write(chart.join("templates/probe.yaml"), template).expect("write");
    let chart = chart.to_str().expect("UTF-8");
    let colour = || shop.get(&["configmap", "probe"])["data"]["colour"].clone();
    server.helm(&["install", "probe", chart, "-n", shop.name()]);
    assert_eq!(colour(), "green");
    server.helm(&["upgrade", "probe", chart, "-n", shop.name(), "--set", "colour=blue"]);
    assert_eq!(colour(), "blue");
    server.helm(&["uninstall", "probe", "-n", shop.name()]);
    let gone = server.try_kubectl(&server.kubeconfig(), &["get", "configmap", "probe", "-n", shop.name()]);
    assert!(stderr(&gone).contains("not found"), "{}", stderr(&gone));
}

#[test]
fn namespaces_of_a_test_are_removed_with_it() {
    let server = ApiServer::shared();
    let shop = server.namespace("gone");
    shop.run_pod("web", "node-a", "10.244.0.9", &[]);
    let name = shop.name().to_owned();
    drop(shop);
    wait_for("the namespace to go", || {
        let found = server.try_kubectl(&server.kubeconfig(), &["get", "namespace", &name]);
        stderr(&found).contains("not found").then_some(())
    });
}

#[test]
fn one_in_a_testbed_is_reached_from_its_nodes_and_survives_its_own_crash() {
    let tb = Testbed::with_nodes(1);
    let server = ApiServer::in_testbed(&tb);
    let shop = server.namespace("shop");
    let ca = server.ca();
    let ask = || {
        let url = format!("https://{}/readyz", server.address());
        let output = tb.node(0).run("curl", &["-s", "--cacert", ca.to_str().expect("UTF-8"), &url]);
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(ask().contains("Unauthorized"), "{}", ask());
    server.apiserver.kill9();
    let away = server.try_kubectl(&server.kubeconfig(), &["get", "--raw", "/readyz"]);
    assert!(!away.status.success());
    server.start_apiserver();
    assert_eq!(shop.get(&["namespace", shop.name()])["metadata"]["name"], shop.name(), "etcd has kept it");
}

#[test]
fn nothing_is_left_of_a_server_whose_test_was_killed() {
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command.args(["victim", "--exact", "--nocapture"]).env(VICTIM, "1").process_group(0);
    let mut victim = Ended(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("start a victim"));
    let lines = BufReader::new(victim.0.stderr.take().expect("piped")).lines();
    let name = lines.map_while(Result::ok).find_map(|line| line.strip_prefix("VICTIM ").map(str::to_owned));
    let name = TestbedName::of_file(&name.expect("the victim ended early")).expect("a name of ours");
    drop(victim);
    assert!(traces(&name).len() >= 3, "{:?}", traces(&name));
    // Any testbed and any server sweeps first, so another test may have been quicker.
    testbed::sweep();
    wait_for("the sweep", || traces(&name).is_empty().then_some(()));
}

const VICTIM: &str = "UNDERSTORY_TEST_KUBERNETES_VICTIM";

/// Not a test of its own: what the test above starts as a process, and kills.
#[test]
fn victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let server = ApiServer::start();
    let dir = server.path("..").canonicalize().expect("it is there");
    eprintln!("VICTIM {}", dir.file_name().and_then(|name| name.to_str()).expect("UTF-8"));
    loop {
        std::thread::park();
    }
}

/// A process that is killed when it is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn stderr(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

//! The agent on a real API server, with the rights that the chart gives it and no others.

use serde_json::{Value, json};
use testbed::kubernetes::{ApiServer, Namespace};
use testbed::{Behaviour, DATAPLANE_MODE, MeshOptions, Node, NodeMesh, Pod, StreamExt, Testbed, wait_for};

const CANARY: &[u8] = b"canary-of-the-agent-on-kubernetes";
const REDIRECTION: &str = "ambient.istio.io/redirection";

/// A pod as in a cluster: first the object, then the sandbox, then the status.
fn run(tb: &Testbed, server: &ApiServer, shop: &Namespace<'_>, name: &str, node: &Node, change: fn(&mut Value)) -> Pod {
    server.node(node.name());
    let mut object = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": shop.name() },
        "spec": { "nodeName": node.name(), "containers": [{ "name": "app", "image": "app" }] },
    });
    change(&mut object);
    shop.apply(&object.to_string());
    let uid = shop.get(&["pod", name])["metadata"]["uid"].as_str().expect("a uid").to_owned();
    let pod = tb.pod(&format!("{}/{name}", shop.name())).uid(&uid).on(node).start();
    let ips = [pod.ip(), pod.ip6()];
    let status = json!({ "phase": "Running", "podIP": ips[0], "podIPs": ips.map(|ip| json!({ "ip": ip })) });
    shop.set_pod_status(name, &status);
    pod
}

fn annotation(shop: &Namespace<'_>, name: &str) -> Option<String> {
    shop.get(&["pod", name])["metadata"]["annotations"][REDIRECTION].as_str().map(str::to_owned)
}

/// Waits for the annotation, and tells it to control, which reads manifests here.
fn wait_annotated(shop: &Namespace<'_>, pods: &[&Pod], wanted: Option<&str>) {
    for pod in pods {
        wait_for(&format!("the annotation of {} to be {wanted:?}", pod.name()), || {
            (annotation(shop, pod.pod_name()).as_deref() == wanted).then_some(())
        });
        pod.set_annotation(REDIRECTION, wanted);
    }
}

fn entry(node: &NodeMesh, name: &str) -> Option<Value> {
    node.agent_status().as_array()?.iter().find(|pod| pod["name"] == name).cloned()
}

#[test]
fn a_label_on_the_api_server_brings_pods_in_and_an_outage_takes_none_out() {
    let tb = Testbed::new();
    let server = ApiServer::in_testbed(&tb);
    server.kubectl(&["create", "namespace", "understory-system"]);
    let account = server.account("understory-system", "understory-agent");
    let role = include_str!("../../deploy/helm/templates/agent-rbac.yaml");
    let role: Value = serde_yaml_ng::from_str(role.split("\n---\n").next().expect("a role")).expect("YAML");
    account.allow(role["rules"].clone());
    let shop = server.namespace("shop");
    let client = run(&tb, &server, &shop, "client", tb.node(0), |_| {});
    let far = run(&tb, &server, &shop, "far", tb.node(1), |_| {});
    let sidecar = run(&tb, &server, &shop, "sidecar", tb.node(0), |pod| {
        pod["metadata"]["annotations"] = json!({ "sidecar.istio.io/status": "{}" });
    });
    // Nothing runs for it: as with a runtime whose processes the node does not see.
    shop.run_pod("hidden", tb.node(0).name(), "10.244.0.250", &[]);
    let options = MeshOptions { agent_kubeconfig: Some(account.kubeconfig()), ..MeshOptions::default() };
    let mesh = tb.start_mesh_with(options);
    let node = mesh.node(0);
    assert_eq!(entry(node, "client").expect("it is listed")["reason"], "no label selects it");
    assert!(entry(node, "far").is_none(), "pods of other nodes are not ours");

    shop.label(DATAPLANE_MODE, "ambient");
    wait_annotated(&shop, &[&client, &far], Some("enabled"));
    mesh.wait_in_mesh(&[&client, &far]);
    let listed = entry(node, "client").expect("it is listed");
    assert!(listed["state"] == "enrolled" && listed["capturedVerified"].is_u64(), "{listed}");
    let out = entry(node, sidecar.pod_name()).expect("it is listed");
    assert_eq!((&out["state"], &out["reason"]), (&json!("out"), &json!("it has a sidecar")));
    let event = wait_for("an Event of the pod that cannot be captured", || {
        let events = shop.get(&["events", "--field-selector", "reason=CaptureFailed"]);
        events["items"].as_array()?.first().cloned()
    });
    assert_eq!((&event["involvedObject"]["name"], &event["type"]), (&json!("hidden"), &json!("Warning")));
    assert!(event["message"].as_str().expect("text").contains("no process of the pod is visible"), "{event}");
    assert_eq!(annotation(&shop, "hidden").as_deref(), Some("pending"));
    let _server = far.serve(8080, Behaviour::Echo);
    let wire = tb.wire();
    client.connect(far.at(8080)).expect("connect").ask(CANARY);

    // The API server goes away, and the agent is started again meanwhile: it goes by what it wrote down.
    let mut old = client.connect(far.at(8080)).expect("connect");
    server.apiserver.kill9();
    node.agent.terminate();
    mesh.start_agent(node);
    wait_for("the agent to take up the pod of its record", || {
        (node.agent.runs() && node.agent.log().contains("those of the record are kept")).then_some(())
    });
    wait_for("the pod to be verified again", || (entry(node, "client")?["state"] == "enrolled").then_some(()));
    old.ask(CANARY);
    client.connect(far.at(8080)).expect("connect").ask(CANARY);
    // A proxy that starts now gets the pod from this agent.
    node.proxy.kill9();
    mesh.start_proxy(node);
    wait_for("the new proxy to have the pod", || (node.pod_state(&client)?["state"] == "Up").then_some(()));
    client.connect(far.at(8080)).expect("connect").ask(CANARY);

    server.start_apiserver();
    node.wait_ready();
    assert_eq!(annotation(&shop, "client").as_deref(), Some("enabled"));
    let late = run(&tb, &server, &shop, "late", tb.node(0), |_| {});
    wait_annotated(&shop, &[&late], Some("enabled"));
    mesh.wait_in_mesh(&[&late]);
    late.connect(far.at(8080)).expect("connect").ask(CANARY);
    assert!(!wire.contains(CANARY), "it left the node in the clear");

    shop.kubectl(&["label", "namespace", shop.name(), &format!("{DATAPLANE_MODE}-")]);
    wait_annotated(&shop, &[&client, &far, &late], None);
    wait_for("the pod to be out", || (entry(node, "client")?["state"] == "out").then_some(()));
    let refused = [node, mesh.node(1)].map(|node| node.agent.log().contains("forbidden"));
    assert_eq!(refused, [false, false], "the chart gives all rights that are needed");
}

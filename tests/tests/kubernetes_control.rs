//! `control` on a real API server, with its own role: what it reads, what it writes there, and what becomes of it while
//! the API server is slow, away, or has forgotten what happened.

use std::fs;

use serde_json::{Value, json};
use testbed::kubernetes::{ApiServer, Namespace, Replica};
use testbed::{wait_for, wait_for_within};

const POLICY: &str = "apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata: {name: ports}
spec: {action: DENY, selector: {matchLabels: {app: web}}, rules: [{to: [{operation: {ports: ['81']}}]}]}
";
const ENTRIES: &str = "apiVersion: networking.istio.io/v1
kind: ServiceEntry
metadata: {name: api}
spec:
  hosts: [api.example.com]
  ports: [{number: 443, name: https, protocol: TLS}]
  resolution: STATIC
  workloadSelector: {labels: {app: vm}}
---
apiVersion: networking.istio.io/v1
kind: WorkloadEntry
metadata: {name: vm, labels: {app: vm}}
spec: {address: 203.0.113.7, weight: 3, serviceAccount: vm, ports: {https: 8443}}
";

#[test]
fn replicas_serve_the_cluster_and_one_of_them_writes_what_is_written_once() {
    let server = ApiServer::start();
    let system = server.namespace("understory-system");
    let shop = server.namespace("shop");
    let web = web(&shop);
    let replicas = ["control-a", "control-b"].map(|name| Replica::start(&server, &system, name));
    replicas.iter().for_each(Replica::wait_ready);

    // The kinds of Istio are missing, which is said and in nobody's way.
    for replica in &replicas {
        for kind in ["ServiceEntry", "WorkloadEntry", "PeerAuthentication", "AuthorizationPolicy"] {
            let page = replica.readiness().body;
            assert!(page.contains(&format!("{kind}: the cluster has no such kind")), "{page}");
        }
        let host = format!("web.{}.svc.cluster.local", shop.name());
        let key = format!("{}/{host}", shop.name());
        let pod = replica.wait_served(&web, |pod| pod["workload"]["services"][&key]["80"] == 8080);
        assert_eq!(pod["workload"]["addresses"], json!(["10.244.0.5"]));
        assert_eq!(replica.wait_served(&key, |_| true)["service"]["hostname"], host.as_str());
    }

    // They are taken up when they come.
    server.install_istio();
    shop.apply(POLICY);
    shop.apply(ENTRIES);
    let (key, policy) = (format!("{}/api.example.com", shop.name()), format!("{}/ports", shop.name()));
    let vm = format!("Kubernetes/networking.istio.io/WorkloadEntry/{}/vm", shop.name());
    let addresses: Vec<Value> = replicas
        .iter()
        .map(|replica| {
            let named = replica.wait_served(&web, |pod| pod["workload"]["authorizationPolicies"] == json!([policy]));
            assert_eq!(named["workload"]["protocol"], "HBONE");
            replica.wait_served(&vm, |vm| vm["workload"]["services"][&key]["443"] == 8443);
            let entry = replica.wait_served(&key, |_| true);
            wait_for("nothing to be missing", || (replica.readiness().body == "ready\n").then_some(()));
            entry["service"]["addresses"].clone()
        })
        .collect();
    assert!(addresses[0][0].as_str().expect("an address").starts_with("/240.240."), "{addresses:?}");
    assert_eq!(addresses[0], addresses[1], "both replicas say the same");

    // Written once, for all.
    let accepted = |name: &str| {
        let policy = shop.get(&["authorizationpolicy", name]);
        let conditions = policy["status"]["conditions"].as_array()?.iter();
        conditions.clone().find(|c| c["type"] == "ZtunnelAccepted" && c["status"] == "True").cloned()
    };
    wait_for("the policy's status", || accepted("ports"));
    let root = fs::read_to_string(replicas[0].ca_dir().join("root-cert.pem")).expect("a root");
    assert_eq!(fs::read_to_string(replicas[1].ca_dir().join("root-cert.pem")).expect("a root"), root);
    wait_for("the roots in the namespace", || (root_in(&server, &shop)? == root).then_some(()));

    // The one that leads dies without a word; the other takes over, with the same root.
    let holder = || {
        let lease = server.try_kubectl(
            &server.kubeconfig(),
            &["-n", system.name(), "get", "lease", "understory-control", "-o", "json"],
        );
        serde_json::from_slice::<Value>(&lease.stdout).ok()?["spec"]["holderIdentity"].as_str().map(str::to_owned)
    };
    let leads = wait_for("one to lead", || holder().filter(|name| !name.is_empty()));
    let (dead, other) = match replicas[0].name() == leads {
        true => (&replicas[0], &replicas[1]),
        false => (&replicas[1], &replicas[0]),
    };
    dead.daemon().kill9();
    wait_for_within(3 * testbed::DEADLINE, "the other one to lead", || (holder()? == other.name()).then_some(()));
    let late = server.namespace("late");
    wait_for("the roots in a new namespace", || (root_in(&server, &late)? == root).then_some(()));
    dead.start_again();
    dead.wait_ready();
    assert_eq!(fs::read_to_string(dead.ca_dir().join("root-cert.pem")).expect("a root"), root);

    tokens_are_reviewed(&server, &system, other);
    broken_objects_leave_the_others_alone(&server, &shop, other, &vm);
}

/// Only a node proxy's own token gets as far as its request being looked at.
fn tokens_are_reviewed(server: &ApiServer, system: &Namespace<'_>, control: &Replica<'_>) {
    let account = system.account("ztunnel");
    let pod = system.run_pod_with("ztunnel", "node-a", "10.244.0.6", &[], |pod| {
        pod["spec"]["serviceAccountName"] = json!("ztunnel");
    });
    control.wait_served(&format!("Kubernetes//Pod/{}/ztunnel", system.name()), |_| true);
    let empty = server.path("empty-request");
    fs::write(&empty, [0; 5]).expect("write");
    let ask = |token: &str| {
        let url = format!("https://{}/istio.v1.auth.IstioCertificateService/CreateCertificate", control.address());
        let (body, token) = (format!("@{}", empty.display()), format!("authorization: Bearer {token}"));
        let headers = ["-H", "content-type: application/grpc", "-H", "te: trailers", "-H", &token];
        let args =
            [&["-sk", "--http2", "-D", "-", "-o", "/dev/null", "--data-binary", &body], &headers[..], &[&url]].concat();
        let answer = String::from_utf8_lossy(&server.place().run("curl", &args).stdout).into_owned();
        let status =
            answer.lines().find_map(|line| line.strip_prefix("grpc-status: ").map(|code| code.trim().to_owned()));
        status.unwrap_or_else(|| panic!("no status in {answer:?}"))
    };
    assert_eq!(ask(&account.token_of_pod("istio-ca", &pod)), "3", "the request itself is empty");
    for (what, token) in [
        ("for another audience", account.token_of_pod("vault", &pod)),
        ("of another account", server.account("default", "default").token("istio-ca")),
        ("made up", "x.y.z".to_owned()),
    ] {
        assert_eq!(ask(&token), "16", "a token {what}");
    }
}

/// With the schema out of the way, as it is where another version of the kinds is installed.
fn broken_objects_leave_the_others_alone(server: &ApiServer, shop: &Namespace<'_>, control: &Replica<'_>, vm: &str) {
    let kind = server.get(&["crd", "workloadentries.networking.istio.io"]);
    let versions = kind["spec"]["versions"].as_array().expect("versions").len();
    let anything = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let patch: Vec<Value> = (0..versions)
        .map(|index| json!({ "op": "replace", "path": format!("/spec/versions/{index}/schema/openAPIV3Schema"), "value": anything }))
        .collect();
    let patch = Value::from(patch).to_string();
    server.kubectl(&["patch", "crd", "workloadentries.networking.istio.io", "--type", "json", "-p", &patch]);
    let entry = |name: &str, spec: &str| {
        format!("apiVersion: networking.istio.io/v1\nkind: WorkloadEntry\nmetadata: {{name: {name}}}\nspec: {spec}\n")
    };
    wait_for("the other schema to count", || {
        let broken = server.path("broken.yaml");
        fs::write(&broken, entry("broken", "{address: [1, 2]}")).expect("write");
        let args = ["-n", shop.name(), "apply", "-f", broken.to_str().expect("UTF-8")];
        server.try_kubectl(&server.kubeconfig(), &args).status.success().then_some(())
    });
    let object = format!("WorkloadEntry {}/broken", shop.name());
    wait_for("the broken one to be named", || {
        control.admin("/debug/problems").as_array()?.iter().any(|p| p["object"] == object.as_str()).then_some(())
    });
    shop.apply(&entry("good", "{address: 203.0.113.8}"));
    control.wait_served(&format!("Kubernetes/networking.istio.io/WorkloadEntry/{}/good", shop.name()), |_| true);
    assert!(control.served(vm).is_some());
    shop.apply(&entry("broken", "{address: 203.0.113.9}"));
    wait_for("nothing to be broken", || control.admin("/debug/problems").as_array()?.is_empty().then_some(()));
}

#[test]
fn what_is_known_is_served_while_the_api_server_is_slow_away_or_forgetful() {
    let server = ApiServer::start();
    let system = server.namespace("understory-system");
    let shop = server.namespace("shop");
    let web = web(&shop);
    let control = Replica::start(&server, &system, "control");
    control.wait_ready();
    control.wait_served(&web, |_| true);
    let uid = |name: &str| format!("Kubernetes//Pod/{}/{name}", shop.name());
    let heard = || wait_for("all to be heard again", || (!control.readiness().body.contains("as known")).then_some(()));

    // It does not answer for a while.
    server.apiserver.freeze();
    assert_eq!(control.readiness().status, 200);
    assert!(control.served(&web).is_some());
    server.apiserver.thaw();
    shop.run_pod("after-ice", "node-a", "10.244.0.10", &[]);
    control.wait_served(&uid("after-ice"), |_| true);

    // It is away. One that starts meanwhile serves nobody until it is there.
    server.apiserver.kill9();
    wait_for("it to be said", || {
        let page = control.readiness();
        assert_eq!(page.status, 200);
        (page.body.contains("Pod: as known ") && page.body.contains("cannot be reached")).then_some(())
    });
    assert!(control.served(&web).is_some());
    let late = control.another("late");
    wait_for("the late one to wait", || late.daemon().log().contains("cannot be read yet").then_some(()));
    server.start_apiserver();
    shop.run_pod("after-away", "node-a", "10.244.0.11", &[]);
    control.wait_served(&uid("after-away"), |_| true);
    late.wait_ready();
    late.wait_served(&uid("after-away"), |_| true);
    heard();

    // It comes back without the changes that control has missed: all is read again.
    let mark = control.daemon().log_mark();
    control.daemon().freeze();
    // What is on the way to it ends with the server.
    server.apiserver.kill9();
    server.start_apiserver();
    shop.delete_pod("after-ice");
    shop.run_pod("after-gap", "node-a", "10.244.0.12", &[]);
    server.apiserver.kill9();
    server.forget_history();
    server.start_apiserver();
    control.daemon().thaw();
    control.wait_served(&uid("after-gap"), |_| true);
    wait_for("the deleted pod to go", || control.served(&uid("after-ice")).is_none().then_some(()));
    assert!(control.served(&web).is_some());
    mark.wait(&["changes were missed", "Pod"]);
    heard();
}

/// A captured pod behind a service, on node-a.
fn web(shop: &Namespace<'_>) -> String {
    shop.run_pod_with("web", "node-a", "10.244.0.5", &[("app", "web")], |pod| {
        pod["metadata"]["annotations"] = json!({ "ambient.istio.io/redirection": "enabled" });
    });
    shop.kubectl(&["expose", "pod", "web", "--port", "80", "--target-port", "8080"]);
    format!("Kubernetes//Pod/{}/web", shop.name())
}

/// What the namespace is told to trust.
fn root_in(server: &ApiServer, namespace: &Namespace<'_>) -> Option<String> {
    let args = ["-n", namespace.name(), "get", "configmap", "istio-ca-root-cert", "-o", "json"];
    let map = server.try_kubectl(&server.kubeconfig(), &args);
    serde_json::from_slice::<Value>(&map.stdout).ok()?["data"]["root-cert.pem"].as_str().map(str::to_owned)
}

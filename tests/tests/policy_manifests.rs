//! From manifests of policies, through the control plane, to what proxies let pass: also of what they cannot judge.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use testbed::{Behaviour, MeshOptions, Place, Shop, wait_for};

/// Whether bytes come back from an echo.
fn reaches(from: &Place, to: SocketAddr) -> bool {
    let Ok(mut stream) = from.connect(to) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    let mut back = [0; 5];
    stream.write_all(b"hello").is_ok() && stream.read_exact(&mut back).is_ok()
}

/// A manifest of `security.istio.io`, in a file of its own.
fn put(shop: &Shop, kind: &str, namespace: &str, name: &str, spec: &str) {
    let text = format!(
        "apiVersion: security.istio.io/v1\nkind: {kind}\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {spec}\n"
    );
    shop.tb.put_manifest(&format!("{kind}-{namespace}-{name}.yaml"), &text);
}

fn remove(shop: &Shop, kind: &str, namespace: &str, name: &str) {
    shop.tb.remove_manifest(&format!("{kind}-{namespace}-{name}.yaml"));
}

/// What control writes about a policy, once it says a state.
fn wait_status(shop: &Shop, file: &str, state: &str) -> Value {
    let path = shop.tb.path("policy-status").join(file);
    wait_for(&format!("{file} to say {state}"), || {
        let status: Value = serde_yaml_ng::from_str(&std::fs::read_to_string(&path).ok()?).ok()?;
        (status["status"]["state"] == state).then(|| status["status"].clone())
    })
}

fn set_up(on_demand: bool) -> Shop {
    let shop = Shop::without_mesh();
    let dir = shop.tb.path("policy-status").display().to_string();
    let options = MeshOptions { on_demand, ..Default::default() };
    shop.tb.start_mesh_with(options.control_arg("--policy-status-dir").control_arg(&dir));
    shop.enrol();
    shop
}

fn deny_and_strict(on_demand: bool) {
    let shop = set_up(on_demand);
    let plain = shop.tb.pod("legacy/plain").start();
    let servers = [8080, 8081].map(|port| shop.far.serve(port, Behaviour::Echo));
    let (web, other, service) = (shop.far.at(8080), shop.far.at(8081), shop.far_service.at(80));
    for from in [&*shop.client, &*shop.near, &*plain] {
        assert!(reaches(from, web) && reaches(from, other), "{}: nothing is denied yet", from.name());
    }
    assert!(reaches(&shop.client, service));

    // STRICT for the mesh; an exception for a port of one workload.
    put(&shop, "PeerAuthentication", "understory-system", "mesh", "{mtls: {mode: STRICT}}");
    wait_for("the plain client to be refused", || (!reaches(&plain, web)).then_some(()));
    wait_for("also at the other port", || (!reaches(&plain, other)).then_some(()));
    assert!(reaches(&shop.client, service) && reaches(&shop.near, web));
    let exception = "{selector: {matchLabels: {app: far}}, portLevelMtls: {8081: {mode: PERMISSIVE}}}";
    put(&shop, "PeerAuthentication", "shop", "ports", exception);
    wait_for("the excepted port to open", || reaches(&plain, other).then_some(()));
    assert!(!reaches(&plain, web) && reaches(&shop.client, service));

    // DENY one account one port of the app, which the service has as another one.
    let rule = "{from: [{source: {serviceAccounts: [client]}}], to: [{operation: {ports: ['8080']}}]}";
    let deny = format!("{{action: DENY, selector: {{matchLabels: {{app: far}}}}, rules: [{rule}]}}");
    put(&shop, "AuthorizationPolicy", "shop", "no-client", &deny);
    wait_for("the client to be refused", || (!reaches(&shop.client, service)).then_some(()));
    assert!(!reaches(&shop.client, web), "also without the service");
    assert!(reaches(&shop.client, other) && reaches(&shop.near, web) && reaches(&shop.near, service));
    let line = shop.mesh().node(1).wait_access_line("the refusal", |line| {
        line.get("direction") == "inbound" && line.get("error").contains("shop/no-client")
    });
    assert_eq!(line.get("src.identity"), shop.client.identity(), "{}", line.text);
    let status = wait_status(&shop, "AuthorizationPolicy_shop_no-client.yaml", "enforced");
    assert_eq!(status["conditions"][0]["type"], "ZtunnelAccepted");
    assert_eq!(status["appliesTo"], "pods with app=far in namespace shop");

    // No app got a byte of what was refused.
    let before: Vec<usize> = servers.iter().map(|s| s.seen().len()).collect();
    assert!(!reaches(&shop.client, web) && !reaches(&plain, web));
    let after: Vec<usize> = servers.iter().map(|s| s.seen().len()).collect();
    assert_eq!(before, after);

    remove(&shop, "AuthorizationPolicy", "shop", "no-client");
    wait_for("the client to be let in again", || reaches(&shop.client, service).then_some(()));
    remove(&shop, "PeerAuthentication", "understory-system", "mesh");
    wait_for("the plain client to be let in again", || reaches(&plain, web).then_some(()));
}

#[test]
fn deny_and_strict_written_as_manifests_are_enforced() {
    deny_and_strict(false);
}

#[test]
fn deny_and_strict_are_enforced_on_demand_too() {
    deny_and_strict(true);
}

/// B100: never weaker than written, whatever of it a node proxy cannot judge or nobody can understand.
#[test]
fn what_cannot_be_enforced_as_written_denies_and_says_so() {
    let shop = set_up(false);
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let web = shop.far.at(8080);
    assert!(reaches(&shop.client, web) && reaches(&shop.near, web));

    let http = "{selector: {matchLabels: {app: far}}, action: DENY, rules: [{from: [{source: {serviceAccounts: [client]}}], to: [{operation: {paths: [/admin]}}]}]}";
    put(&shop, "AuthorizationPolicy", "shop", "p", http);
    let status = wait_status(&shop, "AuthorizationPolicy_shop_p.yaml", "broader");
    assert!(
        status["conditions"][1]["message"].as_str().is_some_and(|m| m.contains("spec.rules[0].to[0].operation.paths"))
    );
    wait_for("the client to be refused for every path", || (!reaches(&shop.client, web)).then_some(()));
    assert!(reaches(&shop.near, web), "what can be judged of the rule still counts");

    put(&shop, "AuthorizationPolicy", "shop", "p", "{selector: {matchLabels: {app: far}}, action: Allow, rules: [{}]}");
    wait_status(&shop, "AuthorizationPolicy_shop_p.yaml", "invalid");
    wait_for("everybody to be refused", || (!reaches(&shop.near, web)).then_some(()));
    // A file that nobody can read, of a policy that nobody had read before.
    put(&shop, "AuthorizationPolicy", "shop", "unread", "{action: ALLOW, rules: [{");
    wait_status(&shop, "AuthorizationPolicy_shop_unread.yaml", "invalid");
    remove(&shop, "AuthorizationPolicy", "shop", "p");
    wait_for("the first one to be gone", || {
        let dump = shop.mesh().node(1).config_dump();
        let names = dump["policies"].as_array()?.iter().map(|p| p["name"].as_str().unwrap_or_default());
        (names.collect::<Vec<_>>() == ["unread"]).then_some(())
    });
    assert!(!reaches(&shop.near, web), "the unreadable one denies its namespace");
    let metrics = shop.mesh().control_metrics();
    let labels = [("kind", "AuthorizationPolicy"), ("state", "invalid")];
    assert_eq!(metrics.sum("understory_policies", &labels), 1.0);
    remove(&shop, "AuthorizationPolicy", "shop", "unread");
    wait_for("everybody to be let in again", || (reaches(&shop.near, web) && reaches(&shop.client, web)).then_some(()));
}

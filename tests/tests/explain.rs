//! `ztunnel explain`: says beforehand what then happens to a connection, on a node and from a saved dump.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::Value;
use testbed::{Behaviour, MeshOptions, NodeMesh, Shop, StreamExt, binary, wait_for};

fn explain(shop: &Shop, args: &[&str]) -> Result<String, String> {
    shop.mesh().node(0).ztunnel(&[&["explain"], args].concat())
}

/// The same question to the proxy and to its dump; both give the same but for the certificate's words.
#[track_caller]
fn both(shop: &Shop, node: &NodeMesh, from: &str, to: &str) -> Value {
    let asked = ["--from", from, "--to", to, "--output", "json"];
    let live: Value = serde_json::from_str(&explain(shop, &asked).expect("an answer")).expect("JSON");
    let file = shop.tb.path("dump.json");
    std::fs::write(&file, node.config_dump().to_string()).expect("save the dump");
    let file = file.display().to_string();
    let saved = explain(shop, &[&asked[..], &["--dump", &file]].concat()).expect("an answer of the dump");
    let saved: Value = serde_json::from_str(&saved).expect("JSON");
    for part in ["from", "to", "outcome"] {
        assert_eq!(live[part], saved[part], "{part}");
    }
    let verdicts = |answer: &Value| {
        let endpoints = answer["endpoints"].as_array().expect("endpoints").iter();
        endpoints.map(|e| (e["workload"].clone(), e["leftOut"].clone(), e["policy"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(verdicts(&live), verdicts(&saved));
    live
}

#[test]
fn what_is_said_beforehand_is_what_then_happens() {
    let shop = Shop::in_mesh();
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let node = shop.mesh().node(0);
    let to = "shop/far:80";
    let answer = both(&shop, node, "shop/client", to);
    assert_eq!(answer["outcome"], "allowed", "{answer:#}");
    shop.client.connect(shop.far_service.at(80)).expect("connect").ask(b"allowed");
    let route = answer["steps"].as_array().unwrap().iter().find(|s| s["step"] == "route").unwrap();
    let tunnel = format!("HBONE to {}, CONNECT {}", shop.far.at(15008), shop.far.at(8080));
    assert!(route["text"].as_str().unwrap().contains(&tunnel), "{route}");

    shop.tb.put_manifest(
        "deny.yaml",
        "apiVersion: security.istio.io/v1\nkind: AuthorizationPolicy\nmetadata: {name: no-client, namespace: shop}\n\
         spec: {action: DENY, rules: [{from: [{source: {serviceAccounts: [client]}}]}]}\n",
    );
    wait_for("the policy to be known", || {
        explain(&shop, &["--from", "shop/client", "--to", to]).ok()?.contains("outcome: refused").then_some(())
    });
    let answer = both(&shop, node, "shop/client", to);
    let decision = &answer["endpoints"][0]["policy"];
    assert_eq!(decision["verdict"]["by"]["policy"], "shop/no-client", "{answer:#}");
    let told = explain(&shop, &["--from", "shop/client", "--to", to]).unwrap();
    let said = told.lines().find_map(|line| line.strip_prefix("FAILS  policy     ")).expect("the verdict").to_owned();
    let mut refused = shop.client.connect(shop.far_service.at(80)).expect("connect");
    let _ = refused.write_all(b"refused");
    refused.hear_end();
    shop.mesh().node(1).wait_access_line("the same words", |line| line.get("error") == said);
    // Others, and other ways to name the two.
    assert_eq!(both(&shop, node, "shop/near", to)["outcome"], "allowed");
    assert_eq!(both(&shop, node, &shop.client.identity(), &shop.far.at(8080).to_string())["outcome"], "refused");
    assert_eq!(
        both(&shop, node, &shop.client.ip().to_string(), &format!("{}:80", shop.far_service.hostname()))["outcome"],
        "refused"
    );
    assert_eq!(
        both(&shop, node, "192.0.2.9", "shop/far:8080")["outcome"],
        "allowed",
        "a DENY of accounts is not for it"
    );

    shop.far.set_ready(false);
    wait_for("the endpoint to leave", || {
        let answer = explain(&shop, &["--from", "shop/near", "--to", to]).ok()?;
        answer.contains("no usable endpoint").then_some(())
    });
    assert_eq!(both(&shop, node, "shop/near", to)["outcome"], "refused");
}

#[test]
fn a_question_without_an_answer_fails_with_the_reason() {
    let shop = Shop::in_mesh_with(MeshOptions::default());
    let fails = |args: &[&str]| explain(&shop, args).expect_err("no answer");
    let error = fails(&["--from", "shop/nobody", "--to", "shop/far:80"]);
    assert!(error.contains("shop/nobody") && error.contains("no workload"), "{error}");
    let error = fails(&["--from", "shop/client", "--to", "shop/far"]);
    assert!(error.contains("with :port"), "{error}");
    let error = fails(&["--from", "shop/client", "--to", "shop/far:80", "--admin", "127.0.0.1:1"]);
    assert!(error.contains("no proxy answers at 127.0.0.1:1"), "{error}");
    let mut child = Command::new(binary("ztunnel"))
        .args(["explain", "--from", "a/b", "--to", "c/d:1", "--dump", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("run");
    child.stdin.take().expect("piped").write_all(b"{\"workloads\": 1}").expect("write");
    let output = child.wait_with_output().expect("its end");
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("no config_dump of this proxy"), "{error}");
}

/// As under `| head`: an error, no crash.
#[test]
fn whoever_stops_reading_the_answer_gets_an_error() {
    let shop = Shop::in_mesh();
    let file = shop.tb.path("dump.json");
    std::fs::write(&file, shop.mesh().node(0).config_dump().to_string()).expect("save the dump");
    let commands = [
        ("ztunnel", vec!["explain", "--from", "shop/client", "--to", "shop/far:80", "--dump"], file),
        ("control", vec!["ca", "status", "--ca-dir"], shop.tb.path("ca")),
        ("control", vec!["ca", "rotate", "--ca-dir"], shop.tb.path("ca")),
    ];
    for (program, args, path) in commands {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = Command::new(binary(program)).args(&args).arg(path).stdout(writer).output().expect("run");
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
        assert!(error.contains("cannot write the answer: Broken pipe"), "{args:?}: {error}");
    }
}

//! Wrong settings and surroundings: said at once, with the name, the value and what would be right.

use std::process::{Command, Output};
use std::time::Duration;

use testbed::{MeshOptions, Testbed, binary, describe, wait_for};

/// A mesh of which only the control plane runs.
fn control_only() -> Testbed {
    let tb = Testbed::with_nodes(1);
    tb.start_mesh_with(MeshOptions { control_only: true, ..MeshOptions::default() });
    tb
}

/// Runs a command that should end by itself, soon.
fn ends(mut command: Command) -> (Output, String) {
    let output = std::thread::scope(|scope| {
        let run = scope.spawn(move || command.output().expect("start"));
        wait_for("the process to end by itself", || run.is_finished().then_some(()));
        run.join().expect("the thread")
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output, text)
}

#[test]
fn a_wrong_setting_stops_the_proxy_with_its_name_and_value() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    for (name, value) in [
        ("XDS_ADDRESS", "ftp://nowhere"),
        ("CA_ADDRESS", "https://"),
        ("ZTUNNEL_WORKER_THREADS", "many"),
        ("SECRET_TTL", "-5"),
        ("XDS_ON_DEMAND", "perhaps"),
        ("CLUSTER_CIDRS", "10.0.0.0/99"),
        ("TRUST_DOMAIN", "not a domain"),
        ("LOG_FORMAT", "xml"),
        ("ADMIN_ADDR", "localhost"),
    ] {
        let (output, text) = ends(tb.mesh().proxy_command(node, &[(name, value)]));
        assert!(!output.status.success(), "{name}={value}: {}", describe(output.status));
        assert!(text.contains(name) && text.contains(value), "{name}={value} is not named: {text}");
    }
}

#[test]
fn wrong_settings_stop_agent_and_control_with_name_and_value() {
    let tb = control_only();
    let host = tb.node(0);
    let manifests = tb.path("manifests");
    let (manifests, run) = (manifests.to_str().expect("a plain path"), tb.path("run"));
    let run = run.to_str().expect("a plain path");
    let agent = ["agent", "--node-name", "node0", "--manifests", manifests, "--run-dir", run];
    let control =
        ["serve", "--manifests", manifests, "--ca-dir", "/nowhere/ca", "--service-account-key", "/nowhere/key"];
    for (program, args, named) in [
        ("ztunnel", [&agent[..], &["--cgroup-root", "/nowhere/cgroup"]].concat(), "/nowhere/cgroup"),
        ("ztunnel", [&agent[..], &["--bpf-dir", "/nowhere/bpf"]].concat(), "/nowhere/bpf"),
        ("ztunnel", [&agent[..], &["--verify-interval", "often"]].concat(), "often"),
        ("ztunnel", vec!["agent", "--node-name", "node0"], "--manifests"),
        ("control", vec!["serve"], "--manifests"),
        ("control", vec!["serve", "--listen", "nonsense"], "nonsense"),
        ("control", [&control[..], &["--leaf-ttl", "2h", "--max-leaf-ttl", "1h"]].concat(), "--leaf-ttl 7200s"),
        ("control", vec!["ca", "status", "--ca-dir", "/nowhere/ca"], "/nowhere/ca"),
        ("control", vec!["ca", "rotate"], "--ca-dir"),
    ] {
        let mut command = host.command(binary(program));
        command.args(&args);
        let (output, text) = ends(command);
        assert!(!output.status.success(), "{program} {args:?}: {}", describe(output.status));
        assert!(text.contains(named), "{program} {args:?} does not name {named}: {text}");
    }
}

/// Said at once, and not for each pod when one comes.
#[test]
fn a_proxy_without_the_rights_that_it_needs_says_which() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    for (capability, name) in [("-sys_admin", "CAP_SYS_ADMIN"), ("-net_admin", "CAP_NET_ADMIN")] {
        let proxy = tb.mesh().proxy_command(node, &[]);
        let mut command = tb.node(0).command("setpriv");
        command.arg(format!("--bounding-set={capability}")).arg(proxy.get_program()).args(proxy.get_args());
        command.envs(proxy.get_envs().filter_map(|(key, value)| Some((key, value?))));
        let (output, text) = ends(command);
        assert!(!output.status.success() && text.contains(&format!("lacks {name}")), "{text}");
    }
}

#[test]
fn an_unreadable_root_keeps_the_proxy_unready_until_it_is_there() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    tb.mesh().start_agent(node);
    let missing = tb.path("missing-root.pem");
    let path = missing.to_str().expect("a plain path").to_owned();
    tb.mesh().start_proxy_with(node, &[("XDS_ROOT_CA", &path), ("CA_ROOT_CA", &path)]);
    node.proxy.wait_log(&[&path]);
    let answer = wait_for("readiness to answer", || node.readiness().ok());
    assert_eq!(answer.status, 500, "{answer:?}");
    std::fs::copy(tb.mesh().root_cert(), &missing).expect("put the root there");
    node.wait_proxy_ready();
}

#[test]
fn an_unreachable_control_is_named_and_tried_again() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    tb.mesh().start_agent(node);
    // An address that answers nothing: the port is closed.
    tb.mesh().start_proxy_with(node, &[("XDS_ADDRESS", "https://172.18.1.2:4444"), ("RUST_LOG", "debug")]);
    node.proxy.wait_log(&["172.18.1.2:4444"]);
    let count = || node.proxy.log().matches("172.18.1.2:4444").count();
    let first = count();
    wait_for("another try", || (count() > first).then_some(()));
    assert_eq!(node.readiness().expect("an answer").status, 500);
    assert!(node.proxy.runs());
}

#[test]
fn a_wrong_root_is_told_from_an_unreachable_control() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    tb.mesh().start_agent(node);
    let foreign = tb.path("foreign-root.pem");
    std::fs::write(&foreign, testbed::Authority::foreign().root_pem).expect("write a root");
    tb.mesh().start_proxy_with(
        node,
        &[("XDS_ROOT_CA", foreign.to_str().unwrap()), ("CA_ROOT_CA", foreign.to_str().unwrap())],
    );
    let line = node.proxy.wait_log(&["172.18.1.2:15012", "certificate"]);
    assert!(!line.is_empty());
    assert_eq!(node.readiness().expect("an answer").status, 500);
}

#[test]
fn a_wrong_token_is_named_and_read_again() {
    let tb = control_only();
    let node = tb.mesh().node(0);
    tb.mesh().start_agent(node);
    let good = std::fs::read_to_string(node.token_file()).expect("the token");
    std::fs::write(node.token_file(), "not a token").expect("write");
    tb.mesh().start_proxy(node);
    wait_for("a line about the refusal", || {
        let log = node.proxy.log();
        (log.contains("Unauthenticated") || log.contains("unauthenticated")).then_some(())
    });
    assert_eq!(node.readiness().expect("an answer").status, 500);
    std::fs::write(node.token_file(), good).expect("write");
    testbed::wait_for_within(Duration::from_secs(60), "the proxy to read the token again", || {
        (node.readiness().ok()?.status == 200).then_some(())
    });
}

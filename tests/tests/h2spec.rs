//! Our end of a tunnel, asked by h2spec whether it keeps to HTTP/2 and HPACK.

use std::process::Command;

use testbed::{Plaintext, Shop, h2spec_binary};

const PEER: &str = "spiffe://cluster.local/ns/legacy/sa/default";

/// What h2spec cannot ask a server that carries CONNECT only. It sends GET and POST, which are answered with 400 at once
/// and without a body; that there are never more streams than was agreed is tested with CONNECTs.
const NOT_FOR_US: [&str; 5] = [
    // These wait for the answer's body.
    "2: Sends a WINDOW_UPDATE frame on half-closed (remote) stream",
    "3: Sends a PRIORITY frame on half-closed (remote) stream",
    // Each is answered before the next one comes.
    "1: Sends HEADERS frames that causes their advertised concurrent stream limit to be exceeded",
    // The request is answered before its body comes.
    "1: Sends a HEADERS frame with the \"content-length\" header field which does not equal the DATA frame payload length",
    "2: Sends a HEADERS frame with the \"content-length\" header field which does not equal the sum of the multiple \
     DATA frames payload length",
];

#[test]
fn our_server_keeps_to_http_2() {
    let shop = Shop::in_mesh();
    let plain = shop.tb.pod("legacy/plain").start();
    let leaf = shop.mesh().authority().issue(PEER);
    let tunnel = Plaintext::open(&plain, shop.far.at(15008), &leaf);
    let program = h2spec_binary();
    let output = Command::new(&program)
        .args(["--host", "127.0.0.1", "--port", &tunnel.port.to_string(), "--timeout", "3"])
        .output()
        .unwrap_or_else(|e| panic!("start {}: {e}; `cargo xtask setup` builds it", program.display()));
    let report = String::from_utf8_lossy(&output.stdout).into_owned();
    let (results, failures) = report.split_once("Failures:").unwrap_or((&report, ""));
    let passed = results.matches('✔').count();
    let mut failed: Vec<&str> = failures.lines().filter_map(|line| line.trim().strip_prefix("× ")).collect();
    failed.retain(|name| !NOT_FOR_US.contains(name));
    assert!(passed > 130 && failed.is_empty(), "{passed} passed, failed: {failed:#?}\n{report}");
}

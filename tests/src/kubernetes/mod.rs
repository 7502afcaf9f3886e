//! A real Kubernetes API server: etcd, kube-apiserver and kube-controller-manager, with no node behind them.
//!
//! ```no_run
//! use serde_json::json;
//! use testbed::kubernetes::ApiServer;
//!
//! let server = ApiServer::shared(); // one for all tests of a file, with the kinds of Gateway API and Istio
//! let shop = server.namespace("shop"); // `shop-<n>`, of this test alone; removed when it is dropped
//! shop.run_pod("web", "node-a", "10.244.0.7", &[("app", "web")]); // as if a kubelet had started it
//! shop.kubectl(&["expose", "pod", "web", "--port", "80"]);
//! let slices = shop.get(&["endpointslices"]); // made by the real controller
//!
//! let account = shop.account("reader"); // a service account
//! account.allow(json!([{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }]));
//! let pods = server.kubectl_as(&account.kubeconfig(), &["get", "pods", "-A"]);
//! ```
//!
//! | to | use |
//! |---|---|
//! | have one of one's own, to restart it or without kinds of others | [`ApiServer::start`] |
//! | end and start its parts | `server.apiserver.kill9()`, [`ApiServer::start_apiserver`], and so on |
//! | have one inside a testbed, where its nodes reach it | [`ApiServer::in_testbed`] |
//! | run a program that talks to it | `server.place().command(..)` with [`ApiServer::kubeconfig`] or an account's |
//! | be a client in the test's own process | `server.place().netns().run(..)`, [`ApiServer::address`], [`ApiServer::ca`] |
//! | add kinds later | [`ApiServer::install_gateway_api`], [`ApiServer::install_istio`] |
//! | expect that something is refused | [`ApiServer::try_kubectl`] |
//! | run `control` on it, with its own role | [`Replica`] |
//! | render and install charts | [`ApiServer::helm`] |
//!
//! It lives in a network namespace of its own (or the testbed's), so that its ports are always free. Controllers run for
//! namespaces, service accounts, the cluster's root ConfigMap, endpoint slices, deployments and garbage; a pod is never
//! scheduled nor started: tests say what became of it. `cargo xtask setup` builds the programs. Files of tests that use
//! this are called `kubernetes*.rs`, by which `cargo xtask test` knows that they need it.

mod account;
mod control;
mod namespace;
mod server;
mod start;

use std::path::PathBuf;

use crate::place::built_in;

pub use account::Account;
pub use control::Replica;
pub use namespace::Namespace;
pub use server::ApiServer;

/// A program of Kubernetes, or `crds`, where `cargo xtask setup` and `test` put them.
pub(crate) fn tool(name: &str) -> PathBuf {
    let path = built_in().parent().expect("a target directory").join("tools/kubernetes").join(name);
    assert!(path.exists(), "{} is not there: `cargo xtask setup` builds it", path.display());
    path
}

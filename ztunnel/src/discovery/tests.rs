//! Discovery against a server in this process that can do everything wrong.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::apply::{ADDRESS, AUTHORIZATION, Kind};
use super::trust::BUNDLE;
use super::*;
use crate::identity::{ControlPlane, RootSource, TokenSource};
use crate::mesh::Mesh;
use crate::proto::discovery::DeltaDiscoveryRequest;

mod policies;
mod server;

use server::{Server, Stream, authorization, pod, service};

/// For what must come.
const SOON: Duration = Duration::from_secs(5);
/// For what must not come.
const WHILE: Duration = Duration::from_millis(150);

fn settings() -> DiscoverySettings {
    DiscoverySettings { node_name: "node-a".into(), wait: Duration::from_secs(2), ..DiscoverySettings::default() }
}

fn on_demand() -> DiscoverySettings {
    DiscoverySettings { on_demand: true, cluster_cidrs: vec!["10.0.0.0/8".parse().unwrap()], ..settings() }
}

fn start(server: &Server, settings: DiscoverySettings) -> (Discovery, Arc<Mesh>) {
    let mesh = Mesh::new("node-a", "Kubernetes");
    (Discovery::start(server.control_plane(), settings, mesh.clone()), mesh)
}

fn at(ip: &str) -> NetworkAddress {
    NetworkAddress { network: "".into(), address: ip.parse().unwrap() }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < end, "not in time: {what}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// Answers the first requests of a stream with nothing held.
async fn open(server: &mut Server) -> Stream {
    let mut stream = server.stream().await;
    let (address, authorization) = (stream.request().await, stream.request().await);
    assert_eq!((address.type_url.as_str(), authorization.type_url.as_str()), (ADDRESS, AUTHORIZATION));
    stream.first = vec![address, authorization];
    stream
}

/// The same, with both types answered.
async fn open_with(server: &mut Server, resources: Vec<server::Resource>) -> Stream {
    let mut stream = open(server).await;
    stream.answer(resources, vec![]).await;
    stream
}

fn subscribed(request: &DeltaDiscoveryRequest) -> (Vec<&str>, Vec<&str>) {
    let mut sub: Vec<_> = request.resource_names_subscribe.iter().map(String::as_str).collect();
    let mut unsub: Vec<_> = request.resource_names_unsubscribe.iter().map(String::as_str).collect();
    sub.sort_unstable();
    unsub.sort_unstable();
    (sub, unsub)
}

#[tokio::test]
async fn the_whole_mesh_is_asked_for_applied_and_acknowledged() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    let node = stream.first[0].node.clone().unwrap();
    assert_eq!(node.id, "ztunnel~1.1.1.1~ztunnel.understory-system~understory-system.svc.cluster.local");
    let fields = node.metadata.unwrap().fields;
    assert!(format!("{:?}", fields["NODE_NAME"]).contains("node-a"));
    assert!(format!("{:?}", fields["UNDERSTORY_FEATURES"]).contains("audit"));
    assert_eq!(subscribed(&stream.first[0]), (vec![], vec![]));
    assert_eq!(stream.token.as_deref(), Some("Bearer token"));

    let nonce = stream.send(Kind::Address, vec![pod("a", "10.0.0.1"), service("web", "10.1.0.1")], &[]).await;
    let ack = stream.request().await;
    assert_eq!((ack.response_nonce, ack.error_detail), (nonce, None));
    assert!(!discovery.is_synced(), "policies are missing");
    stream.send(Kind::Authorization, vec![authorization("p")], &[]).await;
    timeout(SOON, discovery.synced()).await.unwrap();
    assert!(mesh.load().workload_at(&at("10.0.0.1")).is_some() && mesh.load().policies().len() == 1);
    assert_eq!(discovery.need(&at("10.1.0.1")).await, Need::Known);
    assert_eq!(discovery.need(&at("10.9.9.9")).await, Need::Unknown);

    stream.acked().await;
    stream.send(Kind::Address, vec![], &["Kubernetes//Pod/shop/a"]).await;
    stream.acked().await;
    assert!(mesh.load().workload_at(&at("10.0.0.1")).is_none());
    let status = discovery.status();
    assert!(status.connected && status.last_error.is_none() && status.messages[ADDRESS].0 == 2);
}

#[tokio::test]
async fn a_bad_resource_is_refused_by_name_and_the_good_ones_are_taken() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    let mut legacy = pod("legacy", "10.0.0.2");
    legacy.workload_mut().tunnel_protocol = 2;
    let mut odd = pod("odd", "10.0.0.3");
    odd.workload_mut().addresses = vec![vec![1, 2, 3].into()];
    let mut misnamed = pod("misnamed", "10.0.0.4");
    misnamed.name = "Kubernetes//Pod/shop/other".into();
    let garbage = server::Resource::garbage("garbage");
    let all = vec![legacy, pod("good", "10.0.0.1"), odd, misnamed, garbage];
    let nonce = stream.send(Kind::Address, all, &[]).await;
    let nack = stream.request().await;
    assert_eq!(nack.response_nonce, nonce);
    let error = nack.error_detail.unwrap();
    assert_eq!(error.code, tonic::Code::InvalidArgument as i32);
    for part in ["Pod/shop/legacy: tunnel_protocol", "Pod/shop/odd: addresses", "Pod/shop/other: its", "garbage: "] {
        assert!(error.message.contains(part), "{part:?} in {:?}", error.message);
    }
    let snapshot = mesh.load_full();
    assert_eq!(snapshot.workloads().map(|w| w.name()).collect::<Vec<_>>(), ["good"]);
    assert_eq!(discovery.status().refused, 4);
    // Nobody knows whether these must be protected: what cannot be used is not taken for unknown.
    for address in ["10.0.0.2", "10.0.0.4"] {
        assert!(snapshot.unusable_at(&at(address)).is_some(), "{address}");
    }
    assert!(snapshot.unusable_at(&at("10.0.0.1")).is_none());
    stream.send(Kind::Address, vec![pod("legacy", "10.0.0.2")], &["Kubernetes//Pod/shop/other"]).await;
    stream.acked().await;
    for address in ["10.0.0.2", "10.0.0.4"] {
        assert!(mesh.load().unusable_at(&at(address)).is_none(), "{address}");
    }
}

#[tokio::test]
async fn a_refused_change_keeps_the_last_good_one_and_is_asked_for_again() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let mut stream = open_with(&mut server, vec![pod("a", "10.0.0.1")]).await;
    let mut bad = pod("a", "10.0.0.2");
    bad.version = "2".into();
    bad.workload_mut().status = 77;
    stream.send(Kind::Address, vec![bad], &[]).await;
    assert!(stream.request().await.error_detail.is_some());
    assert!(mesh.load().workload_at(&at("10.0.0.1")).is_some());
    drop(stream);
    let stream = open(&mut server).await;
    assert_eq!(stream.first[0].initial_resource_versions["Kubernetes//Pod/shop/a"], "");
}

#[tokio::test]
async fn after_a_cut_what_is_held_is_told_and_what_is_gone_leaves() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, settings());
    let mut stream = open_with(&mut server, vec![pod("stays", "10.0.0.1"), pod("goes", "10.0.0.2")]).await;
    stream.send(Kind::Authorization, vec![authorization("p")], &[]).await;
    stream.acked().await;
    // B128: planned recycling is no error.
    stream.end(Err(Status::unavailable("transport is closing: received prior GOAWAY"))).await;
    let mut stream = open(&mut server).await;
    let versions = &stream.first[0].initial_resource_versions;
    assert_eq!(versions.keys().collect::<Vec<_>>(), ["Kubernetes//Pod/shop/goes", "Kubernetes//Pod/shop/stays"]);
    assert!(versions.values().all(|v| v == "1"));
    assert_eq!(stream.first[1].initial_resource_versions.keys().collect::<Vec<_>>(), ["shop/p"]);
    assert!(mesh.load().workload_at(&at("10.0.0.2")).is_some(), "the last state goes on");
    stream.send(Kind::Address, vec![], &["Kubernetes//Pod/shop/goes"]).await;
    assert!(stream.is_silent().await, "both first answers are applied at once");
    stream.send(Kind::Authorization, vec![], &["shop/p"]).await;
    stream.request().await;
    stream.acked().await;
    assert!(mesh.load().workload_at(&at("10.0.0.1")).is_some());
    assert!(mesh.load().workload_at(&at("10.0.0.2")).is_none() && mesh.load().policies().is_empty());
    let status = discovery.status();
    assert_eq!(status.terminations.get("Reconnect"), Some(&1));
    assert_eq!(status.last_error, None);

    stream.end(Ok(())).await;
    open(&mut server).await;
    until("the end is counted", || discovery.status().terminations.get("Complete") == Some(&1)).await;
}

#[tokio::test]
async fn what_does_not_fit_into_the_first_request_is_sent_again_and_purged_if_not() {
    let mut server = Server::start().await;
    let quiet = Duration::from_millis(300);
    let one = "Kubernetes//Pod/shop/p0".len() + 1 + 12;
    let settings =
        DiscoverySettings { versions_limit: 3 * one, quiet, answer_limit: Duration::from_secs(1), ..settings() };
    let (_discovery, mesh) = start(&server, settings);
    let pods: Vec<_> = (0..8).map(|i| pod(&format!("p{i}"), &format!("10.0.0.{i}"))).collect();
    let stream = open_with(&mut server, pods.clone()).await;
    drop(stream);
    let mut stream = open(&mut server).await;
    let told = stream.first[0].initial_resource_versions.clone();
    assert_eq!(told.len(), 3);
    // Of the others, two are gone; they come in several messages.
    let rest: Vec<_> = pods.into_iter().filter(|p| !told.contains_key(&p.name)).collect();
    let (gone, present) = rest.split_at(2);
    stream.answer(vec![], vec![]).await;
    for resource in present {
        assert_eq!(mesh.load().workloads().count(), 8);
        stream.send(Kind::Address, vec![resource.clone()], &[]).await;
        stream.acked().await;
        sleep(quiet / 2).await;
    }
    until("the purge", || mesh.load().workloads().count() == 6).await;
    assert!(gone.iter().all(|g| mesh.load().workload(&g.name).is_none()));
}

#[tokio::test]
async fn a_server_that_finds_the_first_request_too_large_gets_a_smaller_one() {
    let mut server = Server::start().await;
    let (_discovery, mesh) = start(&server, settings());
    let stream = open_with(&mut server, vec![pod("a", "10.0.0.1")]).await;
    drop(stream);
    let stream = open(&mut server).await;
    assert_eq!(stream.first[0].initial_resource_versions.len(), 1);
    stream.end(Err(Status::resource_exhausted("received message larger than max"))).await;
    let stream = open(&mut server).await;
    assert!(stream.first[0].initial_resource_versions.is_empty());
    assert_eq!(mesh.load().workloads().count(), 1);
}

#[tokio::test]
async fn a_server_that_never_answers_is_left() {
    // B127: the stream is open, but nothing comes.
    let mut server = Server::start().await;
    let settings = DiscoverySettings { answer_limit: Duration::from_millis(300), ..settings() };
    let (discovery, _mesh) = start(&server, settings);
    let _silent = open(&mut server).await;
    let _again = open(&mut server).await;
    let error = discovery.status().last_error.unwrap();
    assert!(error.contains("no first answer") && error.contains("istio.workload.Address"), "{error}");
}

#[tokio::test]
async fn a_dead_link_is_noticed_by_pings() {
    // B125: the link drops everything in both directions.
    let mut server = Server::start().await;
    let link = server.through_link().await;
    let timings = LinkTimings {
        ping_interval: Duration::from_millis(200),
        ping_timeout: Duration::from_millis(200),
        ..LinkTimings::default()
    };
    let mesh = Mesh::new("node-a", "Kubernetes");
    let discovery = Discovery::start(link.control_plane(), DiscoverySettings { timings, ..settings() }, mesh.clone());
    let _dead = open_with(&mut server, vec![pod("a", "10.0.0.1")]).await;
    sleep(Duration::from_millis(700)).await;
    assert!(discovery.status().connected, "answered pings keep a quiet stream alive");
    link.freeze();
    until("the end of the dead stream", || !discovery.status().connected).await;
    assert!(mesh.load().workload_at(&at("10.0.0.1")).is_some());
    link.mend();
    open(&mut server).await;
}

#[tokio::test]
async fn an_old_stream_is_opened_anew_so_that_nothing_stays_wrong_for_ever() {
    let mut server = Server::start().await;
    let settings = DiscoverySettings {
        max_stream_age: Duration::from_millis(400),
        answer_limit: Duration::from_millis(200),
        ..settings()
    };
    let (discovery, _mesh) = start(&server, settings);
    let _first = open_with(&mut server, vec![pod("a", "10.0.0.1")]).await;
    let second = open(&mut server).await;
    assert_eq!(second.first[0].initial_resource_versions.len(), 1);
    assert_eq!(discovery.status().terminations.get("Reconnect"), Some(&1));
}

#[tokio::test]
async fn a_server_that_cuts_every_stream_is_not_hurried() {
    let mut server = Server::start().await;
    let (_discovery, _mesh) = start(&server, settings());
    let end = Instant::now() + Duration::from_secs(1);
    let mut streams = 0;
    while let Ok(stream) = tokio::time::timeout_at(end, open_with(&mut server, vec![])).await {
        streams += 1;
        stream.end(Ok(())).await;
    }
    assert!((2..10).contains(&streams), "{streams} streams in a second");
}

#[tokio::test]
async fn trouble_with_the_link_is_said_with_its_step_and_cured_without_help() {
    let mut server = Server::start().await;
    let dir = std::env::temp_dir().join(format!("understory-discovery-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let token = dir.join("token");
    let control_plane = ControlPlane { token: Some(TokenSource::File(token.clone())), ..server.control_plane() };
    let backoff = (Duration::from_millis(10), Duration::from_millis(50));
    let discovery =
        Discovery::start(control_plane, DiscoverySettings { backoff, ..settings() }, Mesh::new("node-a", "Kubernetes"));
    let error = || discovery.status().last_error.unwrap_or_default();
    until("the reason", || error().contains("cannot read the token from")).await;
    std::fs::write(&token, "fresh").unwrap();
    let stream = open_with(&mut server, vec![]).await;
    assert_eq!(stream.token.as_deref(), Some("Bearer fresh"));
    assert!(discovery.is_synced());
    stream.end(Err(Status::unauthenticated("request authenticate failure"))).await;
    until("the reason", || error().contains("request authenticate failure")).await;
    std::fs::write(&token, "renewed").unwrap();
    until_token(&mut server, "Bearer renewed").await;
    std::fs::remove_dir_all(dir).unwrap();
}

async fn until_token(server: &mut Server, token: &str) {
    loop {
        let stream = server.stream().await;
        if stream.token.as_deref() == Some(token) {
            return;
        }
        stream.end(Err(Status::unauthenticated("request authenticate failure"))).await;
    }
}

#[tokio::test]
async fn the_control_planes_roots_are_polled_and_a_change_opens_a_new_stream() {
    let mut server = Server::start_tls().await;
    let dir = std::env::temp_dir().join(format!("understory-discovery-roots-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("root.pem");
    std::fs::write(&file, server.root_pem()).unwrap();
    let control_plane = ControlPlane { roots: RootSource::File(file.clone()), ..server.control_plane() };
    let settings = DiscoverySettings { answer_limit: Duration::from_millis(500), ..settings() };
    let discovery = Discovery::start(control_plane, settings, Mesh::new("node-a", "Kubernetes"));
    let _first = open_with(&mut server, vec![]).await;
    std::fs::write(&file, "").unwrap();
    sleep(Duration::from_millis(600)).await;
    assert!(discovery.status().connected, "an unreadable file changes nothing");
    let other = crate::identity::testing::TestCa::new("other").root_pem();
    std::fs::write(&file, format!("{}{other}", server.root_pem())).unwrap();
    let _second = open_with(&mut server, vec![]).await;
    std::fs::write(&file, other).unwrap();
    let error = || discovery.status().last_error.unwrap_or_default();
    until("the refusal of the server", || error().contains("TLS with")).await;
    std::fs::remove_dir_all(dir).unwrap();
}

mod needs;

/// What a stream was not told and could not purge any more is no longer doubtful when the next one is told.
#[tokio::test]
async fn what_an_earlier_stream_was_not_told_is_compared_by_the_next_and_not_purged() {
    let mut server = Server::start().await;
    let quiet = Duration::from_millis(100);
    let settings = DiscoverySettings { quiet, answer_limit: Duration::from_secs(1), ..settings() };
    let (_discovery, mesh) = start(&server, settings);
    let stream = open_with(&mut server, vec![pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]).await;
    drop(stream);
    open(&mut server).await.end(Err(Status::resource_exhausted("received message larger than max"))).await;
    let untold = open(&mut server).await;
    assert!(untold.first[0].initial_resource_versions.is_empty());
    drop(untold);
    let mut stream = open(&mut server).await;
    assert_eq!(stream.first[0].initial_resource_versions.len(), 2);
    stream.answer(vec![], vec![]).await;
    sleep(quiet + Duration::from_millis(900)).await;
    assert_eq!(mesh.load().workloads().count(), 2, "unchanged, and therefore not mentioned");
}

/// B128: servers spread their clients by ending connections now and then.
#[tokio::test]
async fn planned_recycling_brings_a_new_stream_and_loses_nothing() {
    let age = Duration::from_millis(300);
    let builder = tonic::transport::Server::builder().max_connection_age(age).max_connection_age_grace(age);
    let mut server = Server::start_with(builder).await;
    let (discovery, mesh) = start(&server, settings());
    let mut streams = vec![open_with(&mut server, vec![pod("a", "10.0.0.1")]).await];
    for _ in 0..2 {
        streams.push(open_with(&mut server, vec![]).await);
        assert_eq!(streams.last().unwrap().first[0].initial_resource_versions.len(), 1);
    }
    assert_eq!(mesh.load().workloads().count(), 1);
    assert!(discovery.is_synced());
}

#[tokio::test]
async fn a_connection_that_waits_for_the_first_answer_gets_it() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, settings());
    let mut stream = open(&mut server).await;
    let of = discovery.clone();
    let waiting = tokio::spawn(async move { (of.need(&at("10.0.0.1")).await, of.need_name("shop/none").await) });
    sleep(WHILE).await;
    stream.send(Kind::Address, vec![pod("a", "10.0.0.1")], &[]).await;
    stream.send(Kind::Authorization, vec![], &[]).await;
    assert_eq!(waiting.await.unwrap(), (Need::Known, Need::Unknown));
}

#[tokio::test]
async fn a_refused_token_and_a_foreign_root_are_told_with_the_address() {
    let mut server = Server::start_tls().await;
    let backoff = (Duration::from_millis(10), Duration::from_millis(50));
    let foreign = crate::identity::testing::TestCa::new("foreign").root_pem();
    let mut control_plane = server.control_plane();
    let address = control_plane.address.to_string();
    control_plane.roots = RootSource::Pem(foreign);
    let settings = DiscoverySettings { backoff, ..settings() };
    let discovery = Discovery::start(control_plane.clone(), settings.clone(), Mesh::new("node-a", "Kubernetes"));
    until("the reason", || discovery.status().last_error.is_some()).await;
    let error = discovery.status().last_error.unwrap();
    assert!(error.contains("TLS") && error.contains(&address), "{error}");

    control_plane.roots = RootSource::Pem(server.root_pem());
    let discovery = Discovery::start(control_plane, settings, Mesh::new("node-a", "Kubernetes"));
    open(&mut server).await.end(Err(Status::unauthenticated("request authenticate failure"))).await;
    until("the reason", || discovery.status().last_error.is_some()).await;
    let error = discovery.status().last_error.unwrap();
    assert!(error.contains("request authenticate failure") && error.contains(&address), "{error}");
}

#[tokio::test]
async fn announced_roots_are_passed_on_when_they_change_and_are_not_needed_for_anything() {
    let mut server = Server::start().await;
    let (discovery, _) = start(&server, DiscoverySettings { hear_roots: true, ..settings() });
    let mut heard = discovery.announced_roots();
    let mut stream = open(&mut server).await;
    assert_eq!(stream.request().await.type_url, BUNDLE);
    stream.send(Kind::Address, vec![], &[]).await;
    stream.acked().await;
    stream.send(Kind::Authorization, vec![], &[]).await;
    stream.acked().await;
    timeout(SOON, discovery.synced()).await.expect("synced without any announcement");

    let nonce = stream.announce(&[b"one"], b"", 1500).await;
    let ack = stream.request().await;
    assert_eq!((ack.type_url.as_str(), ack.response_nonce, ack.error_detail), (BUNDLE, nonce, None));
    let announced = heard.borrow_and_update().clone().unwrap();
    let der = |bytes: &'static [u8]| rustls::pki_types::CertificateDer::from(bytes);
    assert_eq!((announced.roots, announced.signs), (vec![der(b"one")], None));
    assert_eq!(announced.renew_within, Duration::from_millis(1500));

    stream.announce(&[b"one"], b"", 1500).await;
    stream.acked().await;
    assert!(!heard.has_changed().unwrap(), "the same again is no news");
    stream.announce(&[], b"", 1500).await;
    let nack = stream.request().await;
    assert!(nack.error_detail.unwrap().message.contains("cluster.local: it has 0 roots"));
    stream.announce(&[b"one"], b"two", 1500).await;
    let nack = stream.request().await;
    assert!(nack.error_detail.unwrap().message.contains("what signs is none of its roots"));
    assert!(!heard.has_changed().unwrap());

    stream.announce(&[b"one", b"two"], b"two", 1500).await;
    stream.acked().await;
    assert_eq!(heard.borrow_and_update().clone().unwrap().signs, Some(der(b"two")));
    stream.announce(&[b"one", b"two"], b"one", 1500).await;
    stream.acked().await;
    assert!(heard.has_changed().unwrap(), "another one signs");
}

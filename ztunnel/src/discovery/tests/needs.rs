//! On demand: what connections need, and what becomes of it.

use super::server::{pod_of, service_key, service_of_range};
use super::*;

/// What a connection would be told, from a task of its own.
fn need(discovery: &Discovery, ip: &str) -> tokio::task::JoinHandle<Need> {
    let (discovery, address) = (discovery.clone(), at(ip));
    tokio::spawn(async move { discovery.need(&address).await })
}

#[tokio::test]
async fn the_type_is_opened_without_the_whole_mesh_and_names_are_asked_for_once() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let mut stream = open(&mut server).await;
    assert_eq!(subscribed(&stream.first[0]), (vec!["*"], vec!["*"]));
    assert_eq!(subscribed(&stream.first[1]), (vec![], vec![]), "policies are always asked for as a whole");
    stream.send(Kind::Address, vec![], &[]).await;
    stream.acked().await;
    let asked: Vec<_> = (0..20).map(|_| need(&discovery, "10.1.0.1")).collect();
    let request = stream.request().await;
    assert_eq!(subscribed(&request), (vec!["/10.1.0.1"], vec![]));
    assert!(request.response_nonce.is_empty() && request.node.is_none());
    let vip = service("web", "10.1.0.1").alias("/10.1.0.1");
    stream.send(Kind::Address, vec![vip, pod_of("a", "10.0.0.1", &["web"])], &[]).await;
    stream.acked().await;
    for one in asked {
        assert_eq!(one.await.unwrap(), Need::Known);
    }
    assert_eq!(discovery.need(&at("10.0.0.1")).await, Need::Known, "its endpoints came along");
    assert!(stream.is_silent().await);
    assert_eq!((discovery.status().names, discovery.status().pending_names), (2, 0));
}

/// A range around an address does not say that nobody has it: else its traffic would go past its owner's identity.
#[tokio::test]
async fn an_address_in_a_range_is_asked_for_as_any_other() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, on_demand());
    let mut stream = open_with(&mut server, vec![]).await;
    let vip = need(&discovery, "10.1.0.1");
    stream.request().await;
    stream
        .send(
            Kind::Address,
            vec![service_of_range("wide", "10.0.0.0", 8), service("web", "10.1.0.1").alias("/10.1.0.1")],
            &[],
        )
        .await;
    stream.acked().await;
    assert_eq!(vip.await.unwrap(), Need::Known);
    assert!(mesh.load().service_at("shop", &at("10.2.0.2")).is_some(), "the range is there");

    let pod = need(&discovery, "10.0.0.2");
    assert_eq!(subscribed(&stream.request().await), (vec!["/10.0.0.2"], vec![]));
    stream.send(Kind::Address, vec![pod_of("a", "10.0.0.2", &[])], &[]).await;
    stream.acked().await;
    assert_eq!(pod.await.unwrap(), Need::Known);
    assert!(mesh.load().service_at("shop", &at("10.0.0.2")).is_none(), "the pod has the address");
    // Nobody has it: then the range counts.
    let nobody = need(&discovery, "10.2.0.2");
    stream.request().await;
    stream.send(Kind::Address, vec![], &["/10.2.0.2"]).await;
    stream.acked().await;
    assert_eq!(nobody.await.unwrap(), Need::Unknown);
}

#[tokio::test]
async fn an_unknown_address_passes_and_is_asked_for_again_later_in_a_way_that_gets_an_answer() {
    let mut server = Server::start().await;
    let absent_for = (Duration::from_millis(200), Duration::from_secs(60));
    let (discovery, _mesh) = start(&server, DiscoverySettings { absent_for, ..on_demand() });
    let mut stream = open_with(&mut server, vec![]).await;
    let first = need(&discovery, "10.1.0.1");
    assert_eq!(subscribed(&stream.request().await), (vec!["/10.1.0.1"], vec![]));
    stream.send(Kind::Address, vec![], &["/10.1.0.1"]).await;
    stream.acked().await;
    assert_eq!(first.await.unwrap(), Need::Unknown);
    assert_eq!(discovery.need(&at("10.1.0.1")).await, Need::Unknown);
    assert!(stream.is_silent().await, "the answer is good for a while");

    sleep(absent_for.0).await;
    let second = need(&discovery, "10.1.0.1");
    let (one, two) = (stream.request().await, stream.request().await);
    let filler = one.resource_names_subscribe.clone();
    assert_eq!(one.resource_names_unsubscribe, ["/10.1.0.1"]);
    assert_eq!(
        (&two.resource_names_subscribe[..], &two.resource_names_unsubscribe),
        (&["/10.1.0.1".into()][..], &filler)
    );
    stream.send(Kind::Address, vec![], &[&filler[0]]).await;
    stream.acked().await;
    stream.send(Kind::Address, vec![service("web", "10.1.0.1").alias("/10.1.0.1")], &[]).await;
    assert_eq!(second.await.unwrap(), Need::Known);
}

#[tokio::test]
async fn with_the_control_plane_away_known_stays_unknown_is_refused_inside_and_passes_outside() {
    let mut server = Server::start().await;
    let wait = Duration::from_millis(300);
    let (discovery, _mesh) = start(&server, DiscoverySettings { wait, ..on_demand() });
    let mut stream = open_with(&mut server, vec![]).await;
    let (known, absent) = (need(&discovery, "10.1.0.1"), need(&discovery, "10.1.0.2"));
    for _ in 0..2 {
        let request = stream.request().await;
        let names = request.resource_names_subscribe;
        let both = names.len() == 2;
        if names.contains(&"/10.1.0.1".to_owned()) {
            stream.send(Kind::Address, vec![service("web", "10.1.0.1")], &[]).await;
            stream.acked().await;
        }
        if names.contains(&"/10.1.0.2".to_owned()) {
            stream.send(Kind::Address, vec![], &["/10.1.0.2"]).await;
            stream.acked().await;
        }
        if both {
            break;
        }
    }
    assert_eq!((known.await.unwrap(), absent.await.unwrap()), (Need::Known, Need::Unknown));

    // The connection attempt of the next stream hangs: nobody takes it.
    stream.end(Err(Status::internal("control is going away"))).await;
    until("the loss", || !discovery.status().connected || discovery.status().terminations.contains_key("Error")).await;
    let silent = server.stream().await;
    until("the next stream", || discovery.status().connected).await;
    assert_eq!(discovery.need(&at("10.1.0.1")).await, Need::Known);
    assert_eq!(discovery.need(&at("192.0.2.1")).await, Need::Outside);
    let started = Instant::now();
    let Need::Unreachable(reason) = discovery.need(&at("10.1.0.3")).await else { panic!("not refused") };
    assert!(reason.contains("10.1.0.3") && reason.contains("does not answer"), "{reason}");
    assert!(started.elapsed() >= wait && started.elapsed() < wait * 3);
    drop(silent);
}

#[tokio::test]
async fn a_control_plane_that_has_been_away_for_long_is_not_waited_for() {
    let server = Server::start().await;
    let mut control_plane = server.control_plane();
    control_plane.address.port = 1;
    let wait = Duration::from_millis(300);
    let discovery =
        Discovery::start(control_plane, DiscoverySettings { wait, ..on_demand() }, Mesh::new("node-a", "Kubernetes"));
    let started = Instant::now();
    assert_eq!(discovery.need(&at("192.0.2.1")).await, Need::Outside);
    assert!(started.elapsed() < wait, "outside is not waited for");
    assert!(matches!(discovery.need(&at("10.0.0.1")).await, Need::Unreachable(_)));
    sleep(wait).await;
    let started = Instant::now();
    let Need::Unreachable(reason) = discovery.need(&at("10.0.0.1")).await else { panic!("not refused") };
    assert!(reason.contains("cannot connect to"), "{reason}");
    assert!(started.elapsed() < wait);
}

#[tokio::test]
async fn a_new_stream_asks_for_what_is_in_use_and_answers_those_who_wait() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let mut stream = open_with(&mut server, vec![]).await;
    let known = need(&discovery, "10.1.0.1");
    stream.request().await;
    stream.send(Kind::Address, vec![service("web", "10.1.0.1"), pod_of("a", "10.0.0.1", &["web"])], &[]).await;
    stream.acked().await;
    known.await.unwrap();
    let waiting = need(&discovery, "10.1.0.2");
    stream.request().await;
    stream.end(Ok(())).await;
    let mut stream = open(&mut server).await;
    assert_eq!(subscribed(&stream.first[0]), (vec!["*", "/10.1.0.1", "/10.1.0.2"], vec!["*"]));
    let held: Vec<_> = stream.first[0].initial_resource_versions.keys().cloned().collect();
    assert_eq!(held, ["Kubernetes//Pod/shop/a".to_owned(), service_key("web")]);
    stream.answer(vec![service("db", "10.1.0.2")], vec![]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
}

#[tokio::test]
async fn what_is_not_used_for_long_is_given_up_with_the_next_question_and_what_is_shared_stays() {
    let mut server = Server::start().await;
    let forget_after = Duration::from_millis(300);
    let (discovery, mesh) = start(&server, DiscoverySettings { forget_after, ..on_demand() });
    let mut local = pod("local", "10.0.1.1");
    local.workload_mut().node = "node-a".into();
    let mut stream = open_with(&mut server, vec![local]).await;
    for (name, vip, pods) in [
        ("old", "10.1.0.1", vec![pod_of("a", "10.0.0.1", &["old"]), pod_of("both", "10.0.0.2", &["old", "used"])]),
        ("used", "10.1.0.2", vec![pod_of("b", "10.0.0.3", &["used"])]),
    ] {
        let waiting = need(&discovery, vip);
        stream.request().await;
        let mut all = pods;
        all.push(service(name, vip));
        stream.send(Kind::Address, all, &[]).await;
        stream.acked().await;
        waiting.await.unwrap();
    }
    sleep(forget_after).await;
    assert_eq!(discovery.need(&at("10.1.0.2")).await, Need::Known);
    assert!(stream.is_silent().await, "nothing is only given up");
    assert_eq!(mesh.load().workloads().count(), 4);

    let waiting = need(&discovery, "10.1.0.3");
    let request = stream.request().await;
    let old = service_key("old");
    assert_eq!(subscribed(&request), (vec!["/10.1.0.3"], vec!["/10.1.0.1", "Kubernetes//Pod/shop/a", old.as_str()]));
    let mut left: Vec<_> = mesh.load().workloads().map(|w| w.name().to_string()).collect();
    left.sort();
    assert_eq!(left, ["b", "both", "local"]);
    assert!(mesh.load().service(&old).is_none());
    stream.send(Kind::Address, vec![], &["/10.1.0.3"]).await;
    stream.acked().await;
    waiting.await.unwrap();

    // Needed again: asked for anew.
    let waiting = need(&discovery, "10.1.0.1");
    assert_eq!(subscribed(&stream.request().await), (vec!["/10.1.0.1"], vec![]));
    stream.send(Kind::Address, vec![service("old", "10.1.0.1")], &[]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
}

#[tokio::test]
async fn an_answer_that_everything_is_gone_is_checked_on_a_new_stream() {
    let mut server = Server::start().await;
    let (discovery, mesh) = start(&server, on_demand());
    let names = ["Kubernetes//Pod/shop/a", "Kubernetes//Pod/shop/b"];
    let mut stream = open_with(&mut server, vec![pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]).await;
    stream.send(Kind::Address, vec![], &names).await;
    let mut stream = open(&mut server).await;
    assert_eq!(stream.first[0].initial_resource_versions.len(), 2);
    assert_eq!(mesh.load().workloads().count(), 2, "nothing was dropped on its word");
    stream.send(Kind::Address, vec![], &names).await;
    stream.send(Kind::Authorization, vec![], &[]).await;
    stream.request().await;
    stream.acked().await;
    assert_eq!(mesh.load().workloads().count(), 0, "a new stream is believed");
    assert_eq!(discovery.status().terminations.get("Reconnect"), Some(&1));
}

#[tokio::test]
async fn an_address_whose_pod_is_gone_is_asked_for_again_before_anything_goes_there() {
    // B108, B13: an address changes hands; what is remembered of the old owner must not let the new one be missed.
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let mut stream = open_with(&mut server, vec![pod("other", "10.0.9.9")]).await;
    let waiting = need(&discovery, "10.0.0.1");
    stream.request().await;
    stream.send(Kind::Address, vec![pod("a", "10.0.0.1").alias("/10.0.0.1")], &[]).await;
    stream.acked().await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
    stream.send(Kind::Address, vec![], &["Kubernetes//Pod/shop/a"]).await;
    stream.acked().await;

    let waiting = need(&discovery, "10.0.0.1");
    let (one, two) = (stream.request().await, stream.request().await);
    assert_eq!(one.resource_names_unsubscribe, ["/10.0.0.1"]);
    assert_eq!(two.resource_names_subscribe, ["/10.0.0.1"]);
    stream.send(Kind::Address, vec![pod("new", "10.0.0.1").alias("/10.0.0.1")], &[]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
}

#[tokio::test]
async fn a_name_without_an_answer_makes_for_a_new_stream() {
    let mut server = Server::start().await;
    let settings =
        DiscoverySettings { wait: Duration::from_secs(4), answer_limit: Duration::from_millis(400), ..on_demand() };
    let (discovery, _mesh) = start(&server, settings);
    let mut silent = open_with(&mut server, vec![]).await;
    let waiting = need(&discovery, "10.1.0.1");
    silent.request().await;
    let mut stream = open(&mut server).await;
    stream.answer(vec![service("web", "10.1.0.1")], vec![]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
}

#[tokio::test]
async fn names_are_needed_too() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let mut stream = open_with(&mut server, vec![]).await;
    let key = service_key("waypoint");
    let waiting = tokio::spawn({
        let (discovery, key) = (discovery.clone(), key.clone());
        async move { discovery.need_name(&key).await }
    });
    assert_eq!(stream.request().await.resource_names_subscribe, std::slice::from_ref(&key));
    stream.send(Kind::Address, vec![service("waypoint", "10.1.0.9")], &[]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
    assert_eq!(discovery.need_name(&key).await, Need::Known);
}

#[tokio::test]
async fn a_record_that_cannot_be_used_refuses_the_connection_with_the_reason() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let mut stream = open_with(&mut server, vec![]).await;
    let waiting = need(&discovery, "10.1.0.1");
    stream.request().await;
    let garbage = server::Resource::garbage(&service_key("web")).alias("/10.1.0.1");
    stream.send(Kind::Address, vec![garbage], &[]).await;
    assert!(stream.request().await.error_detail.is_some());
    let Need::Unreachable(reason) = waiting.await.unwrap() else { panic!("it is of the mesh") };
    assert!(reason.contains("/10.1.0.1") && reason.contains("cannot be used"), "{reason}");
    stream.send(Kind::Address, vec![service("web", "10.1.0.1").alias("/10.1.0.1")], &[]).await;
    stream.acked().await;
    assert_eq!(discovery.need(&at("10.1.0.1")).await, Need::Known);
}

#[tokio::test]
async fn in_the_moment_of_a_renewal_a_name_of_the_mesh_does_not_pass_for_one_outside() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, on_demand());
    let stream = open_with(&mut server, vec![]).await;
    stream.end(Ok(())).await;
    until("the end", || !discovery.status().connected).await;
    let waiting = need(&discovery, "192.0.2.1");
    let mut stream = open(&mut server).await;
    stream.answer(vec![service("external", "192.0.2.1")], vec![]).await;
    assert_eq!(waiting.await.unwrap(), Need::Known);
}

/// Workers are runtimes of their own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_threads_ask_and_each_name_is_asked_for_once() {
    let mut server = Server::start().await;
    let (discovery, _mesh) = start(&server, DiscoverySettings { wait: SOON, ..on_demand() });
    let mut stream = open_with(&mut server, vec![]).await;
    let work = move |discovery: Discovery| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let mut needs = Vec::new();
            for last in 0..200 {
                needs.push(discovery.need(&at(&format!("10.1.0.{last}"))).await);
            }
            needs
        })
    };
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let discovery = discovery.clone();
            std::thread::spawn(move || work(discovery))
        })
        .collect();
    let mut asked = std::collections::HashSet::new();
    while asked.len() < 200 {
        let request = stream.request().await;
        let (mut resources, mut absent) = (Vec::new(), Vec::new());
        for name in &request.resource_names_subscribe {
            assert!(asked.insert(name.clone()), "{name} twice");
            let ip = name.trim_start_matches('/');
            let last: u8 = ip.rsplit('.').next().unwrap().parse().unwrap();
            match last % 2 {
                0 => resources.push(service(&format!("s{last}"), ip)),
                _ => absent.push(name.as_str()),
            }
        }
        if !request.resource_names_subscribe.is_empty() {
            stream.send(Kind::Address, resources, &absent).await;
        }
    }
    for thread in threads {
        let needs = tokio::task::spawn_blocking(|| thread.join().unwrap()).await.unwrap();
        for (last, need) in needs.into_iter().enumerate() {
            assert_eq!(need, if last % 2 == 0 { Need::Known } else { Need::Unknown }, "{last}");
        }
    }
}

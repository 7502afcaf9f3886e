//! Faults of links, peers and surroundings: found in bounded time, told with a reason, repaired where that is
//! possible.

use std::io::Write;
use std::time::{Duration, Instant};

use testbed::{Behaviour, End, MeshOptions, Pod, Shop, StreamExt, holds_for, wait_for, wait_for_within};

const CANARY: &[u8] = b"canary-in-a-fault";

/// Sockets of a pod in any state but TIME_WAIT.
fn sockets(pod: &Pod) -> usize {
    pod.netns().run(|| {
        let tables = ["tcp", "tcp6"].map(|file| std::fs::read_to_string(format!("/proc/thread-self/net/{file}")));
        let lines = tables.iter().flatten().flat_map(|table| table.lines().skip(1));
        lines.filter(|line| !matches!(line.split_whitespace().nth(3), Some("06"))).count()
    })
}

/// B19, B20, B24: one side has ended and the other never does: the half that is left has a deadline of its own, and
/// no socket stays behind.
#[test]
fn a_half_closed_connection_ends_at_its_own_deadline() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("HALF_CLOSE_DEADLINE", "2s"));
    // Ends its own direction at once and then neither reads nor closes.
    let behaviour = Behaviour::custom(|stream| {
        stream.half_close();
        std::thread::sleep(Duration::from_secs(20));
    });
    let _server = shop.far.serve(8080, behaviour);
    let before = (sockets(&shop.client), sockets(&shop.far));
    let mut streams: Vec<_> = (0..20).map(|_| shop.client.connect(shop.far_service.at(80)).expect("connect")).collect();
    for stream in &mut streams {
        assert_eq!(stream.hear_end(), (Vec::new(), End::Fin));
    }
    // The client holds its end open: what is left of it is its own socket, not the proxy's.
    let proxy_side = || sockets(&shop.client).saturating_sub(before.0 + streams.len());
    wait_for_within(Duration::from_secs(15), "the proxy to give up its ends", || (proxy_side() <= 4).then_some(()));
    drop(streams);
    wait_for("every socket in the client's pod to go", || (sockets(&shop.client) <= before.0 + 4).then_some(()));
}

/// B15: a node loses power. Nobody sends RST; the peer is found dead by pings in 10 to 20 s.
#[test]
fn a_node_that_vanishes_is_noticed_in_bounded_time() {
    let shop = Shop::in_mesh();
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.ask(b"hello");
    shop.tb.set_link(1, false);
    let start = Instant::now();
    stream.set_read_timeout(Some(Duration::from_secs(40))).expect("set a timeout");
    let _ = stream.write_all(b"anybody there?");
    assert_eq!(stream.hear_end().1, End::Reset);
    let took = start.elapsed();
    assert!(took < Duration::from_secs(25), "noticed after {took:?}");
    let line = shop.mesh().node(0).wait_access_line("the lost connection", |line| line.get("dst.workload") == "far");
    assert_ne!(line.get("error"), "", "{}", line.text);
    shop.client.connect(shop.near_service.at(80)).expect("connect").ask(b"the rest goes on");
    shop.tb.set_link(1, true);
    wait_for("the way to be found again", || {
        let mut stream = shop.client.connect(shop.far_service.at(80)).ok()?;
        use std::io::Read;
        stream.write_all(b"hello").and_then(|()| stream.read_exact(&mut [0; 5])).ok()
    });
}

/// B36, gap of keepalives that are not aware of data: a link that is busy or idle for long is not taken for dead.
#[test]
fn a_quiet_connection_outlives_all_pings() {
    // Many rounds of pings: each answer must begin a new wait.
    let pings = MeshOptions::default().proxy_env("HBONE_PING_AFTER", "1s").proxy_env("HBONE_PING_TIMEOUT", "5s");
    let shop = Shop::in_mesh_with(pings);
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    stream.ask(b"hello");
    stream.set_read_timeout(Some(Duration::from_millis(100))).expect("set a timeout");
    holds_for(Duration::from_secs(18), "a quiet connection stays", || {
        use std::io::Read;
        let error = (&stream).read(&mut [0; 1]).expect_err("nobody speaks");
        matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
    });
    stream.set_read_timeout(Some(Duration::from_secs(5))).expect("set a timeout");
    stream.ask(b"still here");
}

/// B113, B114: a network policy that does not allow the tunnel port: failure in bounded time, with a hint.
#[test]
fn a_dropped_tunnel_port_fails_with_a_hint_at_network_policies() {
    let shop = Shop::in_mesh_with(MeshOptions::default().proxy_env("CONNECT_TIMEOUT", "2s"));
    let _server = shop.far.serve(8080, Behaviour::Echo);
    shop.tb.node(1).netns().nft(
        "table inet np {
            chain f { type filter hook forward priority 0; tcp dport 15008 drop
            }
        }",
    );
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("the proxy accepts");
    let (end, took) = stream.time_to_end();
    assert_eq!(end, End::Reset);
    assert!(took < Duration::from_secs(10), "{took:?}");
    let labels = [("response_flags", "NETWORK_POLICY")];
    let node = shop.mesh().node(0);
    node.wait_proxy_count(1.0, "istio_tcp_connections_failed_total", &labels);
    let line =
        node.wait_access_line("the failed tunnel", |line| line.get("dst.service") == shop.far_service.hostname());
    assert_ne!(line.get("error"), "", "{}", line.text);
}

/// B12, B16: an endpoint that is gone for good takes its open connections along, in bounded time.
#[test]
fn connections_to_a_deleted_pod_are_ended() {
    let shop = Shop::in_mesh();
    let gone = shop.tb.pod("shop/gone").on(shop.tb.node(1)).start();
    shop.mesh().wait_in_mesh(&[&gone]);
    let _server = gone.serve(8080, Behaviour::Echo);
    let mut stream = shop.client.connect(gone.at(8080)).expect("connect");
    stream.ask(b"hello");
    gone.delete();
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("set a timeout");
    let start = Instant::now();
    stream.hear_end();
    assert!(start.elapsed() < Duration::from_secs(25), "{:?}", start.elapsed());
}

/// B06, B02: a pod that leaves tells its peers while the link is up: new connections go elsewhere at once, open ones
/// are finished.
#[test]
fn a_pod_that_is_being_deleted_gets_no_new_connections_and_finishes_the_open_ones() {
    let shop = Shop::in_mesh();
    let pods = ["pair-a", "pair-b"]
        .map(|name| shop.tb.pod(&format!("shop/{name}")).label("app", "pair").on(shop.tb.node(1)).start());
    let service = shop.tb.service("shop/pair").port(80, 8080).create();
    shop.mesh().wait_in_mesh(&[&pods[0], &pods[1]]);
    shop.mesh().wait_endpoints(&service, 2);
    let servers = pods.each_ref().map(|pod| pod.serve(8080, Behaviour::Echo));
    let mut open = shop.client.connect(pods[0].at(8080)).expect("connect");
    open.ask(b"hello");
    pods[0].begin_deletion();
    wait_for("new connections to go to the other pod", || {
        let before = servers[0].seen().len();
        for _ in 0..8 {
            shop.client.connect(service.at(80)).expect("connect").ask(b"no error meanwhile");
        }
        (servers[0].seen().len() == before).then_some(())
    });
    open.ask(b"the open one is finished");
    open.half_close();
    assert_eq!(open.hear_end(), (Vec::new(), End::Fin));
    let [leaving, staying] = servers;
    drop(leaving);
    pods[0].destroy_sandbox();
    pods[0].remove_object();
    for _ in 0..20 {
        shop.client.connect(service.at(80)).expect("connect").ask(b"still no error");
    }
    drop(staying);
}

/// B48, B50: a pod that connects as soon as it starts is held until its identity is there, never sent without.
#[test]
fn the_first_connection_of_a_new_pod_waits_for_its_identity() {
    let shop = Shop::in_mesh();
    let _server = shop.far.serve(8080, Behaviour::Echo);
    let wire = shop.tb.wire();
    for i in 0..5 {
        let job = shop.tb.pod(&format!("shop/job-{i}")).service_account(&format!("job-{i}")).start();
        wait_for("the agent to have captured the pod", || {
            (shop.mesh().status(&job)?["redirection"] == "enabled").then_some(())
        });
        job.connect(shop.far_service.at(80)).expect("connect").ask(CANARY);
        shop.mesh().node(1).wait_access_line("the job's identity", |line| line.get("src.identity") == job.identity());
    }
    assert!(!wire.contains(CANARY));
}

/// B61: what is flushed in a pod's netns under a running mesh is found and put back.
#[test]
fn rules_that_somebody_flushes_are_put_back() {
    let shop = Shop::in_mesh_with(MeshOptions::default().agent_arg("--verify-interval=1s"));
    let _server = shop.near.serve(8080, Behaviour::Echo);
    let rules = || shop.near.netns().ip_output(&["rule"]) + &shop.near.netns().ip_output(&["-6", "rule"]);
    let before = rules();
    let marked: Vec<_> = before.lines().filter(|line| line.contains("fwmark")).collect();
    assert!(!marked.is_empty(), "{before}");
    for line in marked {
        let (priority, _) = line.split_once(':').expect("a priority");
        let _ = shop.near.netns().try_ip(&format!("rule del pref {priority}\n"));
        let _ = shop.near.netns().try_ip(&format!("-6 rule del pref {priority}\n"));
    }
    wait_for("the rules to be put back", || (rules() == before).then_some(()));
    shop.client.connect(shop.near_service.at(80)).expect("connect").ask(b"hello");
    shop.mesh().node(0).wait_agent_count(1.0, "understory_agent_repairs_total", &[]);
}

/// Somebody clears bpffs, all of it or one pin: it is put back, and until then nothing passes by the mesh.
#[test]
fn pins_that_somebody_removes_are_put_back_and_no_connection_suffers() {
    let shop = Shop::in_mesh_with(MeshOptions::default().agent_arg("--verify-interval=1s"));
    let _servers = [shop.far.serve(8080, Behaviour::Echo), shop.near.serve(8080, Behaviour::Echo)];
    let wire = shop.tb.wire();
    let pins = shop.mesh().node(0).bpf_dir().join(format!("v{}", ebpf_layout(shop.mesh().node(0).bpf_dir())));
    let all = || {
        let list = |sub: &str| std::fs::read_dir(pins.join(sub)).map(|dir| dir.count()).unwrap_or_default();
        (list("links"), list("maps"))
    };
    let works = |when: &str| {
        for to in [shop.far.at(8080), shop.far.at6(8080)] {
            shop.client.connect(to).unwrap_or_else(|e| panic!("{when}: {e}")).ask(CANARY);
        }
        shop.far.connect(shop.near.at(8080)).unwrap_or_else(|e| panic!("{when}: {e}")).ask(CANARY);
    };
    let before = all();
    for what in ["links/us_sock_ops", "links/us_connect6", "maps/ORIG_DST", "maps/PODS"] {
        let mark = shop.mesh().node(0).agent.log_mark();
        std::fs::remove_file(pins.join(what)).unwrap_or_else(|e| panic!("remove {what}: {e}"));
        works(&format!("without {what}"));
        wait_for(&format!("{what} to be put back"), || (all() == before).then_some(()));
        // The next one is removed when the agent is done with this one, and not in the middle of it.
        mark.wait(&["loaded anew", what.split_once('/').expect("a folder and a name").1]);
        works(&format!("with {what} again"));
    }
    std::fs::remove_dir_all(&pins).expect("remove all pins");
    works("without any pin");
    wait_for("all pins to be put back", || (all() == before).then_some(()));
    // They serve their purpose: capture outlives both processes.
    let node = shop.mesh().node(0);
    node.agent.kill9();
    node.proxy.kill9();
    let alone = shop.client.dial(shop.far.at(8080)).timeout(Duration::from_secs(1)).connect();
    if let Ok(mut stream) = alone {
        let _ = stream.write_all(CANARY);
    }
    shop.mesh().start_agent(node);
    shop.mesh().start_proxy(node);
    node.wait_ready();
    shop.mesh().wait_in_mesh(&shop.pods());
    works("after a restart");
    assert!(!wire.contains(CANARY));
}

/// The layout version in the path of the pins.
fn ebpf_layout(dir: &std::path::Path) -> u32 {
    let names = std::fs::read_dir(dir).expect("the folder of pins").flatten();
    let versions = names.filter_map(|entry| entry.file_name().to_str()?.strip_prefix('v')?.parse().ok());
    versions.max().expect("pins of a version")
}

/// B125: the way to the control plane is cut without a RST; the proxy finds out by itself and comes back.
#[test]
fn a_dead_control_stream_is_found_and_opened_again() {
    let shop = Shop::in_mesh();
    let node = shop.mesh().node(0);
    let netns = shop.tb.node(0).netns();
    netns.nft(
        "table inet cut {
            chain o { type filter hook output priority 0; tcp dport 15012 drop
            }
            chain i { type filter hook input priority 0; tcp sport 15012 drop
            }
        }",
    );
    let new = shop.tb.pod("shop/new").on(shop.tb.node(1)).start();
    wait_for_within(Duration::from_secs(45), "the proxy to say that the stream is dead", || {
        let terminated = node.proxy_metrics().sum("istio_xds_connection_terminations_total", &[]);
        (terminated >= 1.0).then_some(())
    });
    netns.nft("delete table inet cut");
    wait_for("the proxy to know the new pod", || {
        testbed::workload_of(&node.config_dump(), &new).is_some().then_some(())
    });
}

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::config_dump::{Endpoint, Model, Node, Policy};
use super::super::connections::tests::new;
use super::super::http::Server;
use super::super::log::tests::detached;
use super::*;
use crate::mesh::{Service, Workload};

struct Nothing;

impl Model for Nothing {
    fn node(&self) -> Node {
        Node { name: "n1".into(), cluster: "Kubernetes".into(), policies_complete: true, unusable: Vec::new() }
    }

    fn workloads(&self) -> Box<dyn Iterator<Item = &Workload> + '_> {
        Box::new(std::iter::empty())
    }
    fn services(&self) -> Box<dyn Iterator<Item = &Service> + '_> {
        Box::new(std::iter::empty())
    }
    fn endpoints(&self, _: &Service) -> Vec<Endpoint> {
        vec![]
    }
    fn policies(&self) -> Box<dyn Iterator<Item = Policy> + '_> {
        Box::new(std::iter::empty())
    }
    fn staged(&self) -> std::collections::BTreeMap<String, Vec<Endpoint>> {
        Default::default()
    }
}

async fn ask(router: Router, requests: &[(&str, &str)]) -> Vec<(u16, String)> {
    let server = Server::bind("test", "127.0.0.1:0".parse().unwrap()).unwrap();
    let address = server.local_addr();
    let task = tokio::spawn(server.serve(router, std::future::pending()));
    let mut answers = Vec::new();
    for (method, path) in requests {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        answers.push((head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned()));
    }
    task.abort();
    answers
}

fn pages(logging: Logging, shutdown: Shutdown) -> Router {
    let dump = Sources {
        model: Box::new(|| Box::new(Nothing)),
        certificates: Box::new(Vec::new),
        pods: Box::new(Vec::new),
        telemetry: new().1,
        config: serde_json::json!({}),
    };
    admin_pages(dump, logging, shutdown)
}

#[tokio::test]
async fn log_levels_are_shown_set_and_reset() {
    let (logging, shutdown) = (detached("info"), Shutdown::new());
    let answers = ask(
        pages(logging.clone(), shutdown),
        &[
            ("POST", "/logging"),
            ("POST", "/logging?level=debug"),
            ("POST", "/logging?level=info%2Caccess%3Ddebug"),
            ("POST", "/logging?level=loud"),
            ("POST", "/logging?reset"),
            ("POST", "/logging?reset&level=warn"),
            ("POST", "/logging?lvl=warn"),
            ("GET", "/logging"),
        ],
    )
    .await;
    let expected = [
        (200, "current log level is info\n\nusage:"),
        (200, "current log level is debug\n"),
        (200, "current log level is info,access=debug\n"),
        (400, "\"loud\" is not a log level"),
        (200, "current log level is info\n"),
        (200, "current log level is warn\n"),
        (400, "unknown parameter \"lvl\""),
        (405, ""),
    ];
    for ((status, body), (expected_status, start)) in answers.iter().zip(expected) {
        assert_eq!(*status, expected_status, "{body}");
        assert!(body.starts_with(start), "{body}");
    }
    assert_eq!(logging.levels(), "warn");
}

#[tokio::test]
async fn quitquitquit_orders_the_stop_only_by_post() {
    let shutdown = Shutdown::new();
    let answers = ask(pages(detached("info"), shutdown.clone()), &[("GET", "/quitquitquit")]).await;
    assert_eq!((answers[0].0, shutdown.is_ordered()), (405, None));
    let answers = ask(pages(detached("info"), shutdown.clone()), &[("POST", "/quitquitquit")]).await;
    assert_eq!((answers[0].0, shutdown.is_ordered()), (200, Some("quitquitquit")));
}

#[tokio::test]
async fn the_index_names_the_pages_and_the_dump_is_served() {
    let router = pages(detached("info"), Shutdown::new());
    let answers = ask(router, &[("GET", "/"), ("GET", "/config_dump"), ("GET", "/nothing")]).await;
    for (path, ..) in PAGES {
        assert!(answers[0].1.contains(path), "{path}");
    }
    assert!(answers[1].1.contains("\"workloadState\": {}"), "{}", answers[1].1);
    assert_eq!(answers[2].0, 404);
}

#[tokio::test]
async fn readiness_names_what_is_pending() {
    let readiness = Readiness::new();
    let state = readiness.pending("state manager");
    let pods = readiness.pending("proxy workload manager");
    let watchdog = Watchdog::new(Duration::from_secs(10));
    let requests = [("GET", "/healthz/ready"), ("POST", "/healthz/ready"), ("GET", "/healthz/live")];
    let answers = ask(readiness_pages(readiness.clone(), watchdog.clone()), &requests).await;
    assert_eq!(answers[0], (500, "not ready, pending: state manager, proxy workload manager\n".into()));
    assert_eq!(answers[1].0, 405);
    assert_eq!(answers[2], (200, "alive\n".into()));
    state.done();
    pods.done();
    let answers = ask(readiness_pages(readiness, watchdog), &requests).await;
    assert_eq!(answers[0], (200, "ready\n".into()));
}

#[tokio::test]
async fn a_stuck_worker_fails_liveness_by_name() {
    let watchdog = Watchdog::new(Duration::ZERO);
    let beat = Arc::new(watchdog.worker("worker-3"));
    while watchdog.stuck().is_empty() {
        tokio::task::yield_now().await;
    }
    let answers = ask(readiness_pages(Readiness::new(), watchdog), &[("GET", "/healthz/live")]).await;
    assert_eq!(answers[0], (500, "not alive, stuck: worker-3 (0 s)\n".into()));
    drop(beat);
}

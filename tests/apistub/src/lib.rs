//! An API server for tests of what a real one cannot be made to do at will: lists and watches of what it is given.
//!
//! It knows no kinds: an object is what was put under a path. Errors are panics, as it is for tests.

mod rights;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

pub use rights::Rights;

/// The server. Dropped, it ends.
pub struct ApiStub {
    pub address: SocketAddr,
    state: Arc<Mutex<State>>,
    /// Ends all connections when it is dropped.
    _serving: JoinSet<()>,
}

/// What it holds, and how it behaves.
#[derive(Default)]
pub struct State {
    version: u64,
    /// By path of the list, then namespace/name.
    objects: BTreeMap<String, BTreeMap<String, Value>>,
    watches: Vec<Watch>,
    /// Watches from before this version are told that it is gone.
    oldest: u64,
    /// Group → version → plurals.
    groups: HashMap<String, BTreeMap<String, Vec<String>>>,
    starting: bool,
    /// Answers by path, in place of what would be answered.
    pub answers: HashMap<String, (u16, Value)>,
    /// Requests get no answer for as long as it is set.
    pub silent: bool,
    /// Path and query of each; those that change something begin with their method.
    pub requests: Vec<String>,
}

struct Watch {
    path: String,
    fields: Fields,
    to: mpsc::UnboundedSender<String>,
}

/// A field selector.
#[derive(Clone, Default)]
struct Fields(Vec<Field>);

#[derive(Clone)]
struct Field {
    pointer: String,
    value: String,
    equal: bool,
}

/// Waits until something holds, and fails the test after a minute.
pub async fn wait_for(holds: impl Fn() -> bool) {
    let look = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), look).await.expect("it comes to hold");
}

impl ApiStub {
    pub async fn start() -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), Arc::default()).await
    }

    async fn start_at(address: SocketAddr, state: Arc<Mutex<State>>) -> Self {
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let listener: TcpListener = socket.listen(64).unwrap();
        let address = listener.local_addr().unwrap();
        let mut serving = JoinSet::new();
        let of = state.clone();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.spawn(serve(stream, of.clone()));
            }
        });
        Self { address, state, _serving: serving }
    }

    /// Away for as long as `meanwhile` takes.
    pub async fn restart(self, meanwhile: impl AsyncFnOnce(&Mutex<State>)) -> Self {
        let (address, state) = (self.address, self.state.clone());
        drop(self);
        state.lock().unwrap().watches.clear();
        meanwhile(&state).await;
        Self::start_at(address, state).await
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl State {
    pub fn put(&mut self, path: &str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let before = self.objects.entry(path.into()).or_default().insert(name_of(&object), object.clone());
        self.tell(path, if before.is_some() { "MODIFIED" } else { "ADDED" }, &object);
    }

    pub fn delete(&mut self, path: &str, name: &str) {
        self.version += 1;
        let mut object = self.objects.get_mut(path).unwrap().remove(name).unwrap();
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.tell(path, "DELETED", &object);
    }

    /// Forgets what changed until now: who has not heard of it never will.
    pub fn compact(&mut self) {
        self.version += 1;
        self.oldest = self.version;
    }

    /// Ends all watches.
    pub fn end_watches(&mut self) {
        self.watches.clear();
    }

    pub fn serve_kind(&mut self, group: &str, version: &str, plural: &str) {
        self.groups.entry(group.into()).or_default().entry(version.into()).or_default().push(plural.into());
    }

    pub fn is_starting(&mut self, starting: bool) {
        self.starting = starting;
    }

    fn tell(&mut self, path: &str, kind: &str, object: &Value) {
        let line = json!({"type": kind, "object": object}).to_string() + "\n";
        let gone = json!({"type": "DELETED", "object": object}).to_string() + "\n";
        self.watches.retain(|watch| {
            // What is selected no longer is gone, for whoever selected it.
            let line = if watch.fields.match_all(object) { &line } else { &gone };
            watch.path != path || watch.to.send(line.clone()).is_ok()
        });
    }

    /// All objects of a list.
    pub fn all(&self, path: &str) -> Vec<Value> {
        self.objects.get(path).into_iter().flat_map(|objects| objects.values().cloned()).collect()
    }

    pub fn get(&self, path: &str, name: &str) -> Option<&Value> {
        self.objects.get(path)?.get(name)
    }

    /// Creates, replaces or changes an object.
    fn write(&mut self, method: &str, path: &str, body: Value) -> (u16, Value) {
        if let Some(answer) = self.answers.get(path) {
            return answer.clone();
        }
        let (list, namespace, name) = locate(path);
        let status = |code: u16| (code, json!({"kind": "Status", "code": code, "message": "no"}));
        let mut object = body;
        if method == "POST" {
            object["metadata"]["namespace"] = json!(namespace);
            if self.get(&list, &name_of(&object)).is_some() {
                return status(409);
            }
        } else {
            let Some(held) = self.get(&list, &format!("{namespace}/{name}")).cloned() else { return status(404) };
            let uid = &object["metadata"]["uid"];
            if !uid.is_null() && *uid != held["metadata"]["uid"] {
                return status(409);
            }
            if method == "PATCH" {
                object = merged(held, &object);
            } else if held["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
                return status(409);
            }
        }
        self.put(&list, object.clone());
        (if method == "POST" { 201 } else { 200 }, object)
    }

    fn answer(&self, path: &str, query: &HashMap<String, String>) -> (u16, Value) {
        if let Some(answer) = self.answers.get(path) {
            return answer.clone();
        }
        if path == "/readyz" {
            return if self.starting { (500, json!("starting")) } else { (200, json!("ok")) };
        }
        let not_found = (404, json!({"kind": "Status", "code": 404, "message": "not found", "reason": "NotFound"}));
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        match parts[..] {
            ["apis", group] => match self.groups.get(group) {
                Some(versions) => {
                    let versions: Vec<_> = versions.keys().map(|v| json!({"version": v})).collect();
                    (200, json!({"kind": "APIGroup", "versions": versions}))
                }
                None => not_found,
            },
            ["apis", group, version] => match self.groups.get(group).and_then(|versions| versions.get(version)) {
                Some(plurals) => {
                    let resources: Vec<_> = plurals.iter().map(|p| json!({"name": p})).collect();
                    (200, json!({"kind": "APIResourceList", "resources": resources}))
                }
                None => not_found,
            },
            _ if parts.contains(&"namespaces") && parts.last() != Some(&"namespaces") => {
                let (list, namespace, name) = locate(path);
                self.get(&list, &format!("{namespace}/{name}")).map_or(not_found, |object| (200, object.clone()))
            }
            _ => {
                let from: usize = query.get("continue").map_or(0, |from| from.parse().unwrap());
                let fields = Fields::of(query);
                let all = self.objects.get(path).into_iter().flat_map(|o| o.values());
                let all: Vec<&Value> = all.filter(|object| fields.match_all(object)).collect();
                let page: Vec<&Value> = all.iter().skip(from).take(PAGE).copied().collect();
                let more = if from + PAGE < all.len() { (from + PAGE).to_string() } else { String::new() };
                let meta = json!({"resourceVersion": self.version.to_string(), "continue": more});
                (200, json!({"kind": "List", "metadata": meta, "items": page}))
            }
        }
    }
}

async fn serve(stream: TcpStream, state: Arc<Mutex<State>>) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut length = 0;
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                return;
            }
            if line == "\r\n" {
                break;
            }
            if let Some((_, value)) =
                line.split_once(':').filter(|(name, _)| name.eq_ignore_ascii_case("content-length"))
            {
                length = value.trim().parse().unwrap();
            }
            head.push(line);
        }
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).await.is_err() {
            return;
        }
        let (method, target) = head[0].split_once(' ').unwrap();
        let target = target.split(' ').next().unwrap().to_owned();
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let query: HashMap<String, String> =
            query.split('&').filter_map(|pair| pair.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect();
        state.lock().unwrap().requests.push(if method == "GET" {
            target.clone()
        } else {
            format!("{method} {target}")
        });
        while state.lock().unwrap().silent {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if query.contains_key("watch") {
            return watch(stream, path, &query, &state).await;
        }
        let (code, body) = match method {
            "GET" => state.lock().unwrap().answer(path, &query),
            _ => state.lock().unwrap().write(method, path, serde_json::from_slice(&body).unwrap()),
        };
        let body = body.to_string();
        let text = format!(
            "HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        if stream.write_all(text.as_bytes()).await.is_err() {
            return;
        }
    }
}

async fn watch(mut stream: BufReader<TcpStream>, path: &str, query: &HashMap<String, String>, state: &Mutex<State>) {
    let (send, mut lines) = mpsc::unbounded_channel();
    {
        let mut state = state.lock().unwrap();
        let from: u64 = query["resourceVersion"].parse().unwrap();
        if from < state.oldest {
            let status = json!({"kind": "Status", "code": 410, "message": "too old", "reason": "Expired"});
            let _ = send.send(json!({"type": "ERROR", "object": status}).to_string() + "\n");
        } else {
            // What came since; it does not remember what went.
            let fields = Fields::of(query);
            let all = state.objects.get(path).into_iter().flat_map(|o| o.values());
            for object in all {
                let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
                if version > from {
                    let kind = if fields.match_all(object) { "ADDED" } else { "DELETED" };
                    let _ = send.send(json!({"type": kind, "object": object}).to_string() + "\n");
                }
            }
            state.watches.push(Watch { path: path.to_owned(), fields, to: send });
        }
    }
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n";
    if stream.write_all(head.as_bytes()).await.is_err() {
        return;
    }
    while let Some(line) = lines.recv().await {
        if stream.write_all(format!("{:x}\r\n{line}\r\n", line.len()).as_bytes()).await.is_err() {
            return;
        }
    }
    let _ = stream.write_all(b"0\r\n\r\n").await;
}

/// The list over all namespaces, the namespace and the name that a path is about.
pub fn locate(path: &str) -> (String, String, String) {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.iter().position(|part| *part == "namespaces").filter(|at| at + 2 < parts.len()) {
        Some(at) => {
            let list = [&parts[..at], &parts[at + 2..at + 3]].concat().join("/");
            (list, parts[at + 1].into(), parts.get(at + 3).copied().unwrap_or_default().into())
        }
        None => (path.to_owned(), String::new(), String::new()),
    }
}

/// Merge as of RFC 7396.
pub fn merged(mut target: Value, change: &Value) -> Value {
    let (Value::Object(into), Value::Object(from)) = (&mut target, change) else { return change.clone() };
    for (key, value) in from {
        if value.is_null() {
            into.remove(key);
        } else {
            let old = into.remove(key).unwrap_or(Value::Null);
            into.insert(key.clone(), merged(old, value));
        }
    }
    target
}

impl Fields {
    fn of(query: &HashMap<String, String>) -> Self {
        let text = query.get("fieldSelector").map(String::as_str).unwrap_or_default();
        let text = text.replace("%3D", "=").replace("%21", "!").replace("%2C", ",");
        let fields = text.split(',').filter_map(|part| part.split_once('=')).map(|(field, value)| Field {
            pointer: format!("/{}", field.trim_end_matches('!').replace('.', "/")),
            value: value.trim_start_matches('=').to_owned(),
            equal: !field.ends_with('!'),
        });
        Self(fields.collect())
    }

    fn match_all(&self, object: &Value) -> bool {
        let holds = |field: &Field| {
            let found = object.pointer(&field.pointer).and_then(Value::as_str).unwrap_or_default();
            (found == field.value) == field.equal
        };
        self.0.iter().all(holds)
    }
}

fn name_of(object: &Value) -> String {
    let meta = &object["metadata"];
    format!("{}/{}", meta["namespace"].as_str().unwrap_or_default(), meta["name"].as_str().unwrap_or_default())
}

/// Objects in an answer: few, so that lists have several.
const PAGE: usize = 2;

//! The client against a hand-driven agent on a real socket.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Mutex;

use super::super::message::{Request, Response, decode_hello};
use super::super::transport::{Packet, SeqpacketListener};
use super::*;
use crate::capture::listeners::ListenerPorts;
use crate::capture::netns::Netns;
use crate::capture::netns::tests::fresh;

/// What the proxy would do, written down.
#[derive(Default)]
struct Fake {
    pods: Mutex<BTreeMap<String, bool>>,
    refuse: Mutex<BTreeSet<String>>,
    events: Mutex<Vec<String>>,
    maps: Mutex<Option<CaptureMapFds>>,
    held: Mutex<BTreeMap<String, PodListeners>>,
}

impl Fake {
    fn event(&self, text: String) {
        self.events.lock().unwrap().push(text);
    }

    fn take_events(&self) -> Vec<String> {
        std::mem::take(&mut self.events.lock().unwrap())
    }
}

impl PodManager for Fake {
    fn capture_maps(&self, maps: CaptureMapFds) -> Result<(), String> {
        *self.maps.lock().unwrap() = Some(maps);
        Ok(())
    }

    fn add(&self, pod: AddedPod) -> Result<(), String> {
        let netns = Netns::from_fd(pod.netns).map_err(|error| error.to_string())?;
        if self.refuse.lock().unwrap().contains(&pod.uid) {
            return Err("refused by the test".into());
        }
        self.event(format!("add {} {}/{} {}", pod.uid, pod.namespace, pod.name, pod.service_account));
        if let Some(listeners) = pod.listeners {
            listeners.check(netns.cookie(), &ListenerPorts::default()).map_err(|error| error.to_string())?;
            self.held.lock().unwrap().insert(pod.uid.clone(), listeners);
        }
        self.pods.lock().unwrap().insert(pod.uid, true);
        Ok(())
    }

    fn remove(&self, uid: &str, how: Removal) {
        self.event(format!("remove {uid} {how:?}"));
        self.pods.lock().unwrap().remove(uid);
    }

    fn listeners(&self, uid: &str) -> Option<PodListeners> {
        self.held.lock().unwrap().get(uid).map(|listeners| listeners.try_clone().unwrap())
    }

    fn drain(&self, uid: &str) -> DrainState {
        self.event(format!("drain {uid}"));
        DrainState { open: 7, followed: true }
    }

    fn pods(&self) -> Vec<String> {
        self.pods.lock().unwrap().keys().cloned().collect()
    }
}

/// The agent's end, driven packet by packet.
struct Agent {
    listener: SeqpacketListener,
    _folder: tempfolder::Folder,
}

struct Link(Seqpacket);

impl Agent {
    fn new() -> Agent {
        let folder = tempfolder::Folder::new();
        let listener = SeqpacketListener::bind(&folder.path().join("zds.sock")).unwrap();
        Agent { listener, _folder: folder }
    }

    async fn accept(&self) -> Link {
        let socket = within(self.listener.accept()).await.unwrap();
        let hello = within(socket.receive()).await.unwrap();
        assert_eq!(decode_hello(hello).unwrap(), EXTENSION);
        Link(socket)
    }

    fn client(&self) -> (Arc<Fake>, Arc<Client>, tokio::task::JoinHandle<()>) {
        let mut config = ClientConfig::new(self.listener.path());
        config.retry_pending = Duration::from_millis(20);
        config.reconnect.1 = Duration::from_millis(50);
        config.snapshot_silence = Duration::from_millis(300);
        let (fake, client) = (Arc::new(Fake::default()), Arc::new(Client::new(config)));
        let task = tokio::spawn({
            let (fake, client) = (fake.clone(), client.clone());
            async move { client.run(fake).await }
        });
        (fake, client, task)
    }
}

impl Link {
    async fn ask(&self, request: Request) -> Response {
        let (bytes, descriptors) = request.encode();
        self.raw(&bytes, &descriptors).await
    }

    async fn raw(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Response {
        self.0.send(bytes, descriptors).await.unwrap();
        Response::decode(within(self.0.receive()).await.unwrap()).unwrap()
    }

    async fn is_closed(&self) -> bool {
        matches!(within(self.0.receive()).await, Err(TransportError::Closed))
    }
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(10), future).await.expect("nothing came within ten seconds")
}

async fn until(client: &Client, what: impl FnMut(&Status) -> bool) -> Status {
    *within(client.status().wait_for(what)).await.unwrap()
}

fn add(uid: &str, netns: &Netns, listeners: Option<PodListeners>) -> Request {
    let pod = PodInfo {
        uid: uid.into(),
        name: format!("pod-{uid}"),
        namespace: "shop".into(),
        service_account: "default".into(),
    };
    Request::Add { pod, netns: netns.as_fd().try_clone_to_owned().unwrap(), listeners }
}

fn uid(uid: &str) -> String {
    uid.to_owned()
}

#[tokio::test]
async fn a_plain_agent_is_served_by_the_book() {
    let agent = Agent::new();
    let (fake, client, _task) = agent.client();
    let link = agent.accept().await;
    let pod = fresh();

    assert_eq!(link.ask(add("a", &pod, None)).await.error, None);
    assert_eq!(link.ask(Request::Keep { uid: uid("b") }).await.error, None);
    assert!(!until(&client, |status| status.connected).await.snapshot);
    assert_eq!(link.ask(Request::SnapshotSent).await.error, None);
    until(&client, |status| status.snapshot).await;
    assert_eq!(fake.take_events(), ["add a shop/pod-a default"]);

    // A plain agent deletes without a drain before, so the proxy drains.
    assert_eq!(link.ask(Request::Delete { uid: uid("a") }).await.error, None);
    assert_eq!(link.ask(Request::Delete { uid: uid("never-seen") }).await.error, None);
    assert_eq!(fake.take_events(), ["remove a Drain", "remove never-seen Drain"]);
}

#[tokio::test]
async fn our_agent_hands_over_maps_and_sockets_and_gets_them_back() {
    let agent = Agent::new();
    let (fake, _client, _task) = agent.client();
    let link = agent.accept().await;
    let file = || std::fs::File::open("/dev/null").unwrap().into();
    let maps = CaptureMapFds { layout_version: 1, orig_dst: file(), pass: file(), counters: file() };
    assert_eq!(link.ask(Request::CaptureMaps(maps)).await.error, None);
    assert!(fake.maps.lock().unwrap().is_some());

    let pod = fresh();
    let listeners = PodListeners::open(&pod, &ListenerPorts::default()).unwrap();
    assert_eq!(link.ask(add("a", &pod, Some(listeners))).await.error, None);
    assert_eq!(link.ask(Request::SnapshotSent).await.error, None);

    let back = link.ask(Request::ReturnListeners { uid: uid("a") }).await.listeners.unwrap();
    back.check(pod.cookie(), &ListenerPorts::default()).unwrap();
    assert!(link.ask(Request::ReturnListeners { uid: uid("b") }).await.listeners.is_none());

    let drain = link.ask(Request::Drain { uid: uid("a") }).await;
    assert_eq!((drain.open, drain.followed), (7, true));
    link.ask(Request::Delete { uid: uid("a") }).await;
    assert_eq!(fake.take_events().last().unwrap(), "remove a Gone");
}

#[tokio::test]
async fn pods_outlive_a_lost_connection_and_unnamed_ones_leave_with_the_next_snapshot() {
    let agent = Agent::new();
    let (fake, client, _task) = agent.client();
    let link = agent.accept().await;
    let pod = fresh();
    for name in ["a", "b", "c"] {
        link.ask(add(name, &pod, None)).await;
    }
    link.ask(Request::SnapshotSent).await;
    fake.take_events();
    drop(link);

    until(&client, |status| !status.connected).await;
    let link = agent.accept().await;
    assert_eq!(fake.take_events(), Vec::<String>::new());
    link.ask(add("a", &pod, None)).await;
    link.ask(Request::Keep { uid: uid("b") }).await;
    fake.take_events();
    link.ask(Request::SnapshotSent).await;
    assert_eq!(fake.take_events(), ["remove c Gone"]);
    assert_eq!(fake.pods(), ["a", "b"]);
}

#[tokio::test]
async fn a_pod_that_cannot_start_is_reported_and_tried_again_without_the_agent() {
    let agent = Agent::new();
    let (fake, client, _task) = agent.client();
    fake.refuse.lock().unwrap().insert(uid("a"));
    let link = agent.accept().await;
    let error = link.ask(add("a", &fresh(), None)).await.error.unwrap();
    assert!(error.contains("refused by the test"), "{error}");
    link.ask(Request::SnapshotSent).await;
    assert_eq!(until(&client, |status| status.snapshot).await.pending, 1);

    // Also while the agent is away.
    drop(link);
    fake.refuse.lock().unwrap().clear();
    until(&client, |status| status.pending == 0).await;
    assert_eq!(fake.pods(), ["a"]);
}

#[tokio::test]
async fn a_pending_pod_that_is_deleted_is_not_tried_again() {
    let agent = Agent::new();
    let (fake, client, _task) = agent.client();
    fake.refuse.lock().unwrap().insert(uid("a"));
    let link = agent.accept().await;
    link.ask(add("a", &fresh(), None)).await;
    link.ask(Request::Delete { uid: uid("a") }).await;
    assert_eq!(until(&client, |status| status.pending == 0).await.pending, 0);
    fake.refuse.lock().unwrap().clear();
    tokio::time::sleep(Duration::from_millis(60)).await;
    assert!(fake.pods().is_empty());
}

#[tokio::test]
async fn what_breaks_the_protocol_is_answered_and_ends_the_connection_but_no_pod() {
    let agent = Agent::new();
    let (fake, _client, _task) = agent.client();
    let pod = fresh();
    let plain_add = add("a", &pod, None);
    let (good, _) = plain_add.encode();
    let keep = Request::Keep { uid: uid("a") };
    let no_info = {
        use prost::Message;
        let add = crate::proto::zds::AddWorkload { uid: uid("x"), ..Default::default() };
        let payload = Some(crate::proto::zds::workload_request::Payload::Add(add));
        crate::proto::zds::WorkloadRequest { payload }.encode_to_vec()
    };
    let fd = pod.as_fd();
    let hostile: [(&str, &[u8], &[BorrowedFd<'_>]); 6] = [
        ("an add without a descriptor", &good, &[]),
        ("an add with two descriptors", &good, &[fd, fd]),
        ("a keep with a descriptor", &keep.encode().0, &[fd]),
        ("an add without workload_info", &no_info, &[fd]),
        ("no protobuf", &[0xff; 40], &[]),
        ("a cut message", &good[..good.len() - 3], &[fd]),
    ];
    for (what, bytes, descriptors) in hostile {
        let link = agent.accept().await;
        assert_eq!(link.ask(add("a", &pod, None)).await.error, None, "{what}");
        assert!(link.raw(bytes, descriptors).await.error.is_some(), "{what}");
        assert!(link.is_closed().await, "{what}");
        assert_eq!(fake.pods(), ["a"], "{what}");
    }
    // Late Keep and a second end of the snapshot.
    for late in [Request::SnapshotSent, Request::Keep { uid: uid("a") }] {
        let link = agent.accept().await;
        link.ask(add("a", &pod, None)).await;
        link.ask(Request::SnapshotSent).await;
        assert!(link.ask(late).await.error.is_some());
        assert!(link.is_closed().await);
    }
    assert_eq!(fake.pods(), ["a"]);
}

#[tokio::test]
async fn an_unknown_request_is_refused_and_the_connection_goes_on() {
    let agent = Agent::new();
    let (_fake, _client, _task) = agent.client();
    let link = agent.accept().await;
    // Field 1999, a message.
    assert_eq!(link.raw(&[0xfa, 0x7c, 0x00], &[]).await.error.as_deref(), Some("unknown request"));
    assert_eq!(link.ask(Request::SnapshotSent).await.error, None);
}

/// Field case B53: a snapshot that never ends.
#[tokio::test]
async fn a_silent_agent_is_dialled_again() {
    let agent = Agent::new();
    let (_fake, client, _task) = agent.client();
    let link = agent.accept().await;
    assert!(link.is_closed().await);
    let link = agent.accept().await;
    link.ask(Request::SnapshotSent).await;
    until(&client, |status| status.snapshot).await;
}

#[tokio::test]
async fn hostile_packets_leak_no_descriptor() {
    let agent = Agent::new();
    let (_fake, _client, _task) = agent.client();
    let pod = fresh();
    let fd = pod.as_fd();
    let link = agent.accept().await;
    link.raw(&[0xff; 10], &[fd, fd, fd, fd]).await;
    drop(link);
    // Files of the namespace's kind that are open in this process: ours, none of the client's.
    let link = agent.accept().await;
    let count = || {
        let path = format!("net:[{}]", pod.id().ino);
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter(|entry| {
                std::fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|link| link.as_os_str() == path.as_str())
            })
            .count()
    };
    assert_eq!(count(), 1);
    let too_long = vec![0u8; 1025];
    assert!(matches!(link.0.send(&too_long, &[]).await, Err(TransportError::TooLong(1025))));
}

/// A packet as [`Link::raw`] would send it, decoded.
#[test]
fn an_add_of_the_longest_names_fits_into_a_packet() {
    let pod = fresh();
    let mut request = add(&"u".repeat(36), &pod, Some(PodListeners::open(&pod, &ListenerPorts::default()).unwrap()));
    let Request::Add { pod: info, .. } = &mut request else { unreachable!("just made") };
    (info.name, info.namespace, info.service_account) = ("p".repeat(253), "n".repeat(63), "s".repeat(253));
    let (bytes, descriptors) = request.encode();
    assert!(bytes.len() <= super::super::transport::MAX_PACKET, "{}", bytes.len());
    let descriptors = descriptors.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
    let Request::Add { pod, listeners, .. } = Request::decode(Packet { bytes, descriptors }).unwrap() else {
        panic!("not an add")
    };
    assert_eq!(pod.name.len(), 253);
    assert!(listeners.is_some());
}

mod tempfolder {
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// A folder of its own, removed at the end.
    pub(super) struct Folder(PathBuf);

    impl Folder {
        pub(super) fn new() -> Folder {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("understory-zds-{}-{number}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }

        pub(super) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

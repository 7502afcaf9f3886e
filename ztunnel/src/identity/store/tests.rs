use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;

use super::*;
use crate::identity::testing::{Leaf, TestCa};
use crate::identity::{CertificateError, TrustSettings};

/// Answers as the test tells it to.
struct FakeAuthority {
    ca: TestCa,
    /// Roots that come with each certificate beside its own.
    further_roots: Mutex<Vec<CertificateDer<'static>>>,
    lifetime: Duration,
    delay: Duration,
    calls: Mutex<Vec<Identity>>,
    running: AtomicUsize,
    most_running: AtomicUsize,
    /// Service accounts that are denied, and those that never get an answer.
    denied: Mutex<Vec<String>>,
    hangs: Mutex<Vec<String>>,
}

impl FakeAuthority {
    fn new() -> Arc<Self> {
        Self::with(Duration::from_secs(3600), Duration::from_millis(10))
    }

    fn with(lifetime: Duration, delay: Duration) -> Arc<Self> {
        Arc::new(Self {
            ca: TestCa::new("root"),
            further_roots: Mutex::default(),
            lifetime,
            delay,
            calls: Mutex::default(),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            denied: Mutex::default(),
            hangs: Mutex::default(),
        })
    }

    fn calls_for(&self, identity: &Identity) -> usize {
        self.calls.lock().unwrap().iter().filter(|i| *i == identity).count()
    }
}

impl CertificateAuthority for FakeAuthority {
    fn issue(&self, identity: Identity) -> Pin<Box<dyn Future<Output = Result<Certificate, IssueError>> + Send + '_>> {
        Box::pin(async move {
            self.calls.lock().unwrap().push(identity.clone());
            let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
            self.most_running.fetch_max(running, Ordering::SeqCst);
            tokio::time::sleep(self.delay).await;
            self.running.fetch_sub(1, Ordering::SeqCst);
            if self.hangs.lock().unwrap().iter().any(|sa| sa == identity.service_account()) {
                std::future::pending::<()>().await;
            }
            if self.denied.lock().unwrap().iter().any(|sa| sa == identity.service_account()) {
                let reason = "not on this node".to_owned();
                return Err(IssueError::Refused { identity, authority: "https://ca:15012".into(), reason });
            }
            let leaf = Leaf::of(&identity).lives(self.lifetime);
            let key = crate::identity::PrivateKey::generate().unwrap();
            let chain = vec![self.ca.sign(&leaf, &key)];
            let mut roots = vec![self.ca.root_der()];
            roots.extend(self.further_roots.lock().unwrap().clone());
            Certificate::new(&identity, Arc::new(key), chain, roots, Arc::new(TrustSettings::default())).map_err(
                |reason: CertificateError| IssueError::Unusable {
                    identity,
                    authority: "https://ca:15012".into(),
                    reason,
                },
            )
        })
    }
}

fn identity(name: &str) -> Identity {
    format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
}

const SOON: Duration = Duration::from_secs(5);

#[tokio::test]
async fn a_wanted_identity_is_fetched_once_for_all_who_wait() {
    let authority = FakeAuthority::new();
    let store = Store::start(authority.clone(), StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    let waits: Vec<_> = (0..50)
        .map(|_| {
            let (store, cart) = (store.clone(), cart.clone());
            tokio::spawn(async move { store.wait(&cart, SOON).await.unwrap() })
        })
        .collect();
    let mut serials = Vec::new();
    for wait in waits {
        serials.push(wait.await.unwrap().serial().to_owned());
    }
    serials.dedup();
    assert_eq!(serials.len(), 1);
    assert_eq!(authority.calls_for(&cart), 1);
    assert_eq!(store.get(&cart).unwrap().identity(), &cart);
    assert!(matches!(store.states()[0].state, State::Available(_)));
    assert_eq!(store.counters().issued.load(Ordering::Relaxed), 1);
}

/// A waker that looks, at the moment of the news, whether what they are about is there.
struct Looks {
    store: Store,
    identity: Identity,
    found: Mutex<Vec<bool>>,
}

impl std::task::Wake for Looks {
    fn wake(self: Arc<Self>) {
        self.found.lock().unwrap().push(self.store.get(&self.identity).is_some());
    }
}

#[tokio::test]
async fn who_is_told_of_a_certificate_finds_it() {
    let authority = FakeAuthority::new();
    let store = Store::start(authority, StoreSettings::default());
    let cart = identity("cart");
    let looks = Arc::new(Looks { store: store.clone(), identity: cart.clone(), found: Mutex::default() });
    let waker = looks.clone().into();
    let mut waiting = Box::pin(store.wait(&cart, SOON));
    assert!(waiting.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    store.wait(&cart, SOON).await.unwrap();
    assert_eq!(*looks.found.lock().unwrap(), [true]);
}

#[tokio::test]
async fn one_denied_or_hanging_identity_does_not_slow_others_and_recovers_by_itself() {
    let authority = FakeAuthority::new();
    authority.denied.lock().unwrap().push("denied".into());
    authority.hangs.lock().unwrap().push("hangs".into());
    let settings = StoreSettings { request_timeout: Duration::from_millis(300), ..StoreSettings::default() };
    let store = Store::start(authority.clone(), settings);
    for name in ["denied", "hangs", "good"] {
        store.want(&identity(name));
    }
    store.wait(&identity("good"), SOON).await.unwrap();

    let error = store.wait(&identity("denied"), Duration::from_millis(20)).await.unwrap_err().to_string();
    for part in ["sa/denied", "https://ca:15012", "not on this node"] {
        assert!(error.contains(part), "{part} in {error}");
    }
    let error = store.wait(&identity("hangs"), Duration::from_millis(400)).await.unwrap_err().to_string();
    assert!(error.contains("sa/hangs") && error.contains("no answer within"), "{error}");
    let denied = store.states().into_iter().find(|s| s.identity == identity("denied")).unwrap();
    assert!(matches!(&denied.state, State::Unavailable(reason) if reason.contains("not on this node")));
    let tries = authority.calls_for(&identity("denied"));
    assert!(tries < 6, "{tries} tries are a hot loop");

    authority.denied.lock().unwrap().clear();
    authority.hangs.lock().unwrap().clear();
    store.wait(&identity("denied"), SOON).await.unwrap();
    store.wait(&identity("hangs"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_connection_waits_over_a_denial_that_is_retried_in_time() {
    let authority = FakeAuthority::new();
    authority.denied.lock().unwrap().push("early".into());
    let store = Store::start(authority.clone(), StoreSettings::default());
    let early = identity("early");
    store.want(&early);
    let waiting = tokio::spawn({
        let (store, early) = (store.clone(), early.clone());
        async move { store.wait(&early, SOON).await }
    });
    tokio::time::sleep(Duration::from_millis(50)).await;
    authority.denied.lock().unwrap().clear();
    assert!(waiting.await.unwrap().is_ok());
}

#[tokio::test]
async fn certificates_are_renewed_before_they_expire_and_never_handed_out_after() {
    let authority = FakeAuthority::with(Duration::from_secs(3), Duration::from_millis(1));
    let store = Store::start(authority.clone(), StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    let first = store.wait(&cart, SOON).await.unwrap();
    let mut changes = store.changes();
    tokio::time::timeout(SOON, async {
        while store.get(&cart).is_none_or(|c| c.serial() == first.serial()) {
            changes.changed().await.unwrap();
        }
    })
    .await
    .expect("a renewal");
    assert!(first.is_valid(), "the renewal came before the end");

    authority.denied.lock().unwrap().push("cart".into());
    let last = store.get(&cart).unwrap();
    assert!(store.wait(&cart, Duration::ZERO).await.is_ok(), "an old one serves on while renewal is denied");
    while last.is_valid() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(store.get(&cart).is_none());
    assert!(matches!(store.states()[0].state, State::Unavailable(_)));
    let error = store.wait(&cart, Duration::from_millis(1)).await.unwrap_err();
    assert!(error.to_string().contains("not on this node"), "{error}");
}

#[tokio::test]
async fn the_number_of_requests_in_flight_is_bounded_and_who_waits_goes_first() {
    let authority = FakeAuthority::with(Duration::from_secs(3600), Duration::from_millis(20));
    let store = Store::start(authority.clone(), StoreSettings { in_flight: 2, ..StoreSettings::default() });
    for i in 0..30 {
        store.want(&identity(&format!("w{i}")));
    }
    store.wait(&identity("w29"), SOON).await.unwrap();
    let position = authority.calls.lock().unwrap().iter().position(|i| *i == identity("w29")).unwrap();
    assert!(position <= 4, "asked for as number {position}");
    for i in 0..30 {
        store.wait(&identity(&format!("w{i}")), SOON).await.unwrap();
    }
    assert_eq!(authority.most_running.load(Ordering::SeqCst), 2);
    assert_eq!(authority.calls.lock().unwrap().len(), 30);
}

#[tokio::test]
async fn an_identity_is_dropped_with_its_last_workload() {
    let store = Store::start(FakeAuthority::new(), StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    store.want(&cart);
    store.wait(&cart, SOON).await.unwrap();
    store.forget(&cart);
    assert!(store.get(&cart).is_some());
    store.forget(&cart);
    assert!(store.get(&cart).is_none() && store.states().is_empty());
    store.forget(&cart);

    let waiting = tokio::spawn({
        let (store, gone) = (store.clone(), identity("gone"));
        store.want(&gone);
        async move { store.wait(&gone, SOON).await }
    });
    tokio::task::yield_now().await;
    store.forget(&identity("gone"));
    assert!(matches!(waiting.await.unwrap(), Err(StoreError::Forgotten(_))));
}

#[tokio::test]
async fn the_worker_ends_with_the_store() {
    let authority = FakeAuthority::new();
    let store = Store::start(authority.clone(), StoreSettings::default());
    store.wait(&identity("cart"), SOON).await.unwrap();
    drop(store);
    tokio::time::timeout(SOON, async {
        while Arc::strong_count(&authority) > 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the worker let go of the authority");
}

#[tokio::test]
async fn certificates_with_other_roots_than_announced_are_renewed_early_and_others_are_not() {
    let authority = FakeAuthority::new();
    let store = Store::start(authority.clone(), StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    let first = store.wait(&cart, SOON).await.unwrap();
    let mut changes = store.changes();
    changes.borrow_and_update();

    let within = Duration::from_millis(50);
    store.expect_roots(vec![authority.ca.root_der()], within);
    assert!(tokio::time::timeout(Duration::from_millis(200), changes.changed()).await.is_err(), "nothing has changed");

    let next = TestCa::new("next").root_der();
    *authority.further_roots.lock().unwrap() = vec![next.clone()];
    store.expect_roots(vec![next.clone(), authority.ca.root_der()], within);
    tokio::time::timeout(SOON, changes.changed()).await.unwrap().unwrap();
    let second = store.get(&cart).unwrap();
    assert_ne!(second.serial(), first.serial());
    assert!(second.roots().contains(&next));
    assert_eq!(authority.calls_for(&cart), 2);
}

/// A replica of the authority that is behind is asked again, ever more rarely.
#[tokio::test]
async fn an_authority_that_is_behind_its_announcement_is_asked_again_until_it_is_not() {
    let authority = FakeAuthority::new();
    let store = Store::start(authority.clone(), StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    store.wait(&cart, SOON).await.unwrap();
    let next = TestCa::new("next").root_der();
    store.expect_roots(vec![next.clone(), authority.ca.root_der()], Duration::from_millis(10));
    let end = Instant::now() + SOON;
    while authority.calls_for(&cart) < 3 {
        assert!(Instant::now() < end, "asked only {} times", authority.calls_for(&cart));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    *authority.further_roots.lock().unwrap() = vec![next.clone()];
    while !store.get(&cart).unwrap().roots().contains(&next) {
        assert!(Instant::now() < end + SOON, "the new root never came");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let calls = authority.calls_for(&cart);
    assert!(calls < 10, "{calls} requests are a hot loop");
}

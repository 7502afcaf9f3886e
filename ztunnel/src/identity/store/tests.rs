use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::*;
use crate::identity::testing::{Leaf, TestCa};
use crate::identity::{CertificateError, LinkError, TrustSettings};

/// Answers as the test tells it to.
struct FakeAuthority {
    /// The one that signs is the first; all are handed out as roots.
    cas: Mutex<Vec<Arc<TestCa>>>,
    trust: Trust,
    /// While set, nothing reaches it.
    away: AtomicBool,
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
            cas: Mutex::new(vec![Arc::new(TestCa::new("root"))]),
            trust: Trust::new(TrustSettings::default()),
            away: AtomicBool::new(false),
            lifetime,
            delay,
            calls: Mutex::default(),
            running: AtomicUsize::new(0),
            most_running: AtomicUsize::new(0),
            denied: Mutex::default(),
            hangs: Mutex::default(),
        })
    }

    fn store(self: &Arc<Self>, settings: StoreSettings) -> Store {
        Store::start(self.clone(), self.trust.clone(), settings)
    }

    fn root(&self) -> CertificateDer<'static> {
        self.cas.lock().unwrap()[0].root_der()
    }

    /// One more that comes with each certificate.
    fn add_root(&self, name: &str) -> CertificateDer<'static> {
        let ca = Arc::new(TestCa::new(name));
        self.cas.lock().unwrap().push(ca.clone());
        ca.root_der()
    }

    fn calls_for(&self, identity: &Identity) -> usize {
        self.calls.lock().unwrap().iter().filter(|i| *i == identity).count()
    }
}

impl CertificateAuthority for FakeAuthority {
    fn address(&self) -> String {
        "https://ca:15012".into()
    }

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
                return Err(IssueError::Refused {
                    identity,
                    authority: "https://ca:15012".into(),
                    reason,
                    denied: true,
                });
            }
            if self.away.load(Ordering::SeqCst) {
                let reason = LinkError::Connect { address: "ca:15012".into(), reason: "refused".into() };
                return Err(IssueError::Link { identity, authority: "https://ca:15012".into(), reason });
            }
            let leaf = Leaf::of(&identity).lives(self.lifetime);
            let cas = self.cas.lock().unwrap().clone();
            let roots = cas.iter().map(|ca| ca.root_der()).collect();
            cas[0].certificate_with_roots(&identity, &leaf, roots, self.trust.clone()).map_err(
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
    let store = authority.store(StoreSettings::default());
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
    let store = authority.store(StoreSettings::default());
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
    let store = authority.store(settings);
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
    let store = authority.store(StoreSettings::default());
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
    let store = authority.store(StoreSettings::default());
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
    let store = authority.store(StoreSettings { in_flight: 2, ..StoreSettings::default() });
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
    let store = FakeAuthority::new().store(StoreSettings::default());
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
    let store = authority.store(StoreSettings::default());
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
    let store = authority.store(StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    let first = store.wait(&cart, SOON).await.unwrap();
    let mut changes = store.changes();
    changes.borrow_and_update();

    let within = Duration::from_millis(50);
    store.expect_roots(vec![authority.root()], None, within);
    assert!(tokio::time::timeout(Duration::from_millis(200), changes.changed()).await.is_err(), "nothing has changed");

    let next = authority.add_root("next");
    store.expect_roots(vec![next.clone(), authority.root()], None, within);
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
    let store = authority.store(StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    store.wait(&cart, SOON).await.unwrap();
    let ca = Arc::new(TestCa::new("next"));
    let next = ca.root_der();
    store.expect_roots(vec![next.clone(), authority.root()], None, Duration::from_millis(10));
    let end = Instant::now() + SOON;
    while authority.calls_for(&cart) < 3 {
        assert!(Instant::now() < end, "asked only {} times", authority.calls_for(&cart));
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    authority.cas.lock().unwrap().push(ca);
    while !store.get(&cart).unwrap().roots().contains(&next) {
        assert!(Instant::now() < end + SOON, "the new root never came");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let calls = authority.calls_for(&cart);
    assert!(calls < 10, "{calls} requests are a hot loop");
}

#[tokio::test]
async fn identities_that_never_get_an_answer_leave_room_for_others() {
    let authority = FakeAuthority::with(Duration::from_secs(3600), Duration::ZERO);
    let store = authority.store(StoreSettings { in_flight: 2, ..StoreSettings::default() });
    let hung: Vec<String> = (0..10).map(|i| format!("hangs-{i}")).collect();
    authority.hangs.lock().unwrap().extend(hung.iter().cloned());
    hung.iter().for_each(|name| store.want(&identity(name)));
    // Their requests take 15 s; two at a time would be all that goes on for more than a minute.
    store.want(&identity("good"));
    store.wait(&identity("good"), Duration::from_secs(10)).await.unwrap();
}

#[tokio::test]
async fn those_that_could_not_reach_the_authority_ask_again_as_soon_as_somebody_has() {
    let authority = FakeAuthority::new();
    authority.away.store(true, Ordering::SeqCst);
    let settings = StoreSettings { first_backoff: Duration::from_secs(100), ..StoreSettings::default() };
    let store = authority.store(settings);
    store.want(&identity("cart"));
    let error = store.wait(&identity("cart"), SOON).await.unwrap_err();
    assert!(error.to_string().contains("cannot connect"), "{error}");
    authority.away.store(false, Ordering::SeqCst);
    store.wait(&identity("web"), SOON).await.unwrap();
    store.wait(&identity("cart"), SOON).await.unwrap();
}

#[tokio::test]
async fn a_denial_is_remembered_until_the_next_certificate() {
    let authority = FakeAuthority::new();
    authority.denied.lock().unwrap().push("cart".into());
    let store = authority.store(StoreSettings::default());
    let cart = identity("cart");
    assert!(store.wait(&cart, Duration::from_millis(100)).await.is_err());
    assert!(store.is_denied(&cart) && !store.is_denied(&identity("web")));
    authority.denied.lock().unwrap().clear();
    store.wait(&cart, SOON).await.unwrap();
    assert!(!store.is_denied(&cart));
}

/// The roots of one identity's answer count for all, and a certificate of a root that was withdrawn is replaced at once.
#[tokio::test]
async fn a_withdrawn_root_makes_its_certificates_be_renewed_at_once() {
    let authority = FakeAuthority::new();
    let store = authority.store(StoreSettings::default());
    let (cart, web) = (identity("cart"), identity("web"));
    store.want(&cart);
    let first = store.wait(&cart, SOON).await.unwrap();
    assert!(first.is_trusted());

    let (old, new) = (authority.cas.lock().unwrap()[0].clone(), Arc::new(TestCa::new("new root")));
    *authority.cas.lock().unwrap() = vec![new.clone(), old.clone()];
    store.want(&web);
    store.wait(&web, SOON).await.unwrap();
    assert!(first.is_trusted(), "both roots count while they overlap");
    assert_eq!(store.get(&cart).unwrap().serial(), first.serial(), "and nothing is renewed early");

    *authority.cas.lock().unwrap() = vec![new.clone()];
    let mut changes = store.changes();
    store.wait(&identity("bank"), SOON).await.unwrap();
    assert!(!first.is_trusted());
    let renewed = tokio::time::timeout(SOON, async {
        loop {
            if let Some(now) = store.get(&cart).filter(|now| now.serial() != first.serial()) {
                return now;
            }
            changes.changed().await.unwrap();
        }
    });
    assert!(renewed.await.expect("a renewal long before half of an hour").is_trusted());
    let roots = [new.root_der()];
    assert_eq!(authority.trust.roots(cart.trust_domain()), roots);
    assert_eq!(authority.calls_for(&web), 1, "its certificate was of the new root already");
}

/// The authority has changed its root without overlap or announcement; strangers come at any time.
#[tokio::test]
async fn a_peer_of_another_root_makes_us_ask_once_whether_the_roots_have_changed() {
    let authority = FakeAuthority::new();
    let store = authority.store(StoreSettings::default());
    let (cart, web) = (identity("cart"), identity("web"));
    for identity in [&cart, &web] {
        store.want(identity);
        store.wait(identity, SOON).await.unwrap();
    }
    let new = Arc::new(TestCa::new("new root"));
    *authority.cas.lock().unwrap() = vec![new.clone()];
    let mut changes = store.changes();
    store.doubt_roots(&cart);
    (0..100).for_each(|_| store.doubt_roots(&web));
    let all_renewed = async {
        // The answer for one withdraws the root of the other.
        while ![&cart, &web].iter().all(|identity| store.get(identity).is_some_and(|c| c.roots() == [new.root_der()])) {
            changes.changed().await.unwrap();
        }
    };
    tokio::time::timeout(SOON, all_renewed).await.expect("both certificates are of the new root");
    assert_eq!((authority.calls_for(&cart), authority.calls_for(&web)), (2, 2));
    store.doubt_roots(&cart);
    assert!(
        tokio::time::timeout(Duration::from_millis(200), changes.changed()).await.is_err(),
        "not asked again so soon"
    );
    store.doubt_roots(&identity("unknown"));
}

#[test]
fn renewal_is_at_half_life_with_jitter_and_never_a_hot_loop() {
    let ca = TestCa::new("root");
    let cart = identity("cart");
    let waits = |lifetime: Duration| {
        let leaf = Leaf::of(&cart).lives(lifetime);
        let certificate = ca.try_certificate(&cart, &leaf, Trust::new(TrustSettings::default())).unwrap();
        let now = SystemTime::now();
        (0..200).map(|_| renew_in(&certificate, now)).collect::<Vec<_>>()
    };
    let hour = waits(Duration::from_secs(3600));
    let (least, most) = (hour.iter().min().unwrap(), hour.iter().max().unwrap());
    assert!(*least >= Duration::from_secs(1438) && *most <= Duration::from_secs(2161), "{least:?} to {most:?}");
    assert!(*most - *least > Duration::from_secs(300), "{least:?} to {most:?} is no jitter");
    assert!(waits(Duration::from_secs(2)).into_iter().all(|wait| wait >= SOONEST_RENEWAL));
}

/// Of two replicas of the authority the one that is behind the announcement withdraws nothing.
#[tokio::test]
async fn an_answer_that_contradicts_the_announced_roots_takes_no_trust_away() {
    let authority = FakeAuthority::new();
    let store = authority.store(StoreSettings::default());
    let old = authority.root();
    let next = Arc::new(TestCa::new("next"));
    store.expect_roots(vec![next.root_der(), old.clone()], None, Duration::from_secs(60));
    authority.cas.lock().unwrap().push(next.clone());
    store.wait(&identity("cart"), SOON).await.unwrap();
    authority.cas.lock().unwrap().pop();
    store.wait(&identity("web"), SOON).await.unwrap();
    let roots = authority.trust.roots(&identity("web").trust_domain().clone());
    assert!(roots.contains(&next.root_der()) && roots.contains(&old));
}

/// So that the other root can be withdrawn soon: nothing is below it any more.
#[tokio::test]
async fn certificates_below_a_root_that_no_longer_signs_are_renewed_early() {
    let authority = FakeAuthority::new();
    let store = authority.store(StoreSettings::default());
    let cart = identity("cart");
    store.want(&cart);
    let (old, new) = (authority.root(), authority.add_root("next"));
    let both = || vec![old.clone(), new.clone()];
    let first = store.wait(&cart, SOON).await.unwrap();
    assert!(first.leads_to(&old) && !first.leads_to(&new));
    let within = Duration::from_millis(10);
    store.expect_roots(both(), Some(old.clone()), within);
    authority.cas.lock().unwrap().swap(0, 1);
    store.expect_roots(both(), None, within);
    let mut changes = store.changes();
    changes.borrow_and_update();
    store.expect_roots(both(), Some(new.clone()), within);
    tokio::time::timeout(SOON, changes.changed()).await.unwrap().unwrap();
    let second = store.get(&cart).unwrap();
    assert!(second.leads_to(&new) && !second.leads_to(&old));
    assert_eq!(authority.calls_for(&cart), 2, "neither of the announcements before brought a renewal");
}

/// When peers should have renewed theirs too.
#[tokio::test]
async fn after_twice_the_time_for_renewals_a_change_of_the_root_that_signs_is_said_to_be_over() {
    let authority = FakeAuthority::new();
    let store = authority.store(StoreSettings::default());
    store.want(&identity("cart"));
    let (old, new) = (authority.root(), authority.add_root("next"));
    let both = || vec![old.clone(), new.clone()];
    let settles = || store.0.expected.lock().unwrap().as_ref().and_then(|expected| expected.settles);
    let mut settled = store.settled();
    let within = Duration::from_secs(1);
    store.expect_roots(both(), None, within);
    store.expect_roots(both(), Some(old.clone()), within);
    store.expect_roots(vec![old.clone()], Some(old.clone()), within);
    assert_eq!(settles(), None, "nobody else signs");

    let begun = Instant::now();
    store.expect_roots(both(), Some(new.clone()), within);
    // The same again, as a stream that comes back says it.
    let at = settles();
    store.expect_roots(both(), Some(new.clone()), within);
    assert_eq!(settles(), at);
    tokio::time::timeout(SOON, settled.changed()).await.unwrap().unwrap();
    assert!(begun.elapsed() >= 2 * within);
    assert_eq!((settles(), *settled.borrow_and_update()), (None, 1));
}

//! Who gets a certificate and who does not, asked for as a node proxy does.

use prost_types::{Struct, Value};
use rcgen::KeyPair;
use serde_json::json;
use tonic::Code;
use x509_parser::prelude::*;
use ztunnel::identity::{PrivateKey, certificates_from_pem};
use ztunnel::manifests::ObjectName;

use super::*;
use crate::ca::CaSettings;
use crate::tokens::tests::{Issuer, tokens};

/// Two nodes; on node-a a proxy and `shop/cart`, on node-b a proxy and `shop/till`.
struct Rig {
    issuer: Issuer,
    objects: watch::Sender<Arc<Objects>>,
    service: Certificates,
    _dir: Dir,
}

struct Dir(std::path::PathBuf);

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Rig {
    fn new(name: &str) -> Self {
        let dir = Dir(std::env::temp_dir().join(format!("understory-certificates-{name}-{}", std::process::id())));
        let settings = CaSettings {
            dir: dir.0.clone(),
            trust_domain: TrustDomain::default(),
            longest_life: Duration::from_secs(7200),
            backdate: Duration::from_secs(120),
        };
        let issuer = Issuer::p256();
        let (objects, receiver) = watch::channel(Arc::default());
        let service = Certificates {
            ca: Arc::new(Ca::open(settings).unwrap()),
            tokens: Arc::new(tokens(&issuer)),
            objects: receiver,
            rules: Rules {
                trust_domain: TrustDomain::default(),
                trusted: vec!["understory-system/ztunnel".into(), "other/proxy".into()],
                leaf_ttl: Duration::from_secs(3600),
                longest_life: Duration::from_secs(7200),
            },
            metrics: Metrics::new(),
            rates: Rates::new(Rate { burst: 100, per_second: 1 }, 100),
            strangers: Rates::new(Rate { burst: 30, per_second: 1 }, 100),
            signing: Arc::new(Semaphore::new(2)),
            hush: Hush::new(10),
        };
        let rig = Self { issuer, objects, service, _dir: dir };
        for (namespace, name, account, node) in [
            ("understory-system", "ztunnel-a", "ztunnel", "node-a"),
            ("understory-system", "ztunnel-b", "ztunnel", "node-b"),
            ("shop", "cart-1", "cart", "node-a"),
            ("shop", "till-1", "till", "node-b"),
        ] {
            rig.pod(namespace, name, account, node, "Running");
        }
        rig
    }

    fn pod(&self, namespace: &str, name: &str, account: &str, node: &str, phase: &str) {
        let pod = json!({
            "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{name}")},
            "spec": {"nodeName": node, "serviceAccountName": account, "containers": []},
            "status": {"phase": phase},
        });
        self.objects.send_modify(|objects| {
            let pods = &mut Arc::make_mut(objects).pods;
            pods.insert(ObjectName::new(namespace, name), Arc::new(serde_json::from_value(pod).unwrap()));
        });
    }

    async fn ask(&self, token: &str, request: IstioCertificateRequest) -> Result<Vec<String>, Status> {
        let mut request = Request::new(request);
        request.metadata_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        self.service.create_certificate(request).await.map(|r| r.into_inner().cert_chain)
    }

    /// As the proxy of node-a.
    async fn ask_for(&self, identity: &str) -> Result<Vec<String>, Status> {
        self.ask(&self.proxy_token(), request(Some(identity), 0)).await
    }

    fn proxy_token(&self) -> String {
        self.issuer.token("understory-system", "ztunnel", Some(("ztunnel-a", "uid-ztunnel-a")))
    }
}

fn request(identity: Option<&str>, seconds: i64) -> IstioCertificateRequest {
    let id: Identity = "spiffe://evil/ns/evil/sa/evil".parse().unwrap();
    let text = |t: &str| Value { kind: Some(Kind::StringValue(t.to_owned())) };
    let metadata = identity.map(|i| Struct { fields: [("ImpersonatedIdentity".to_owned(), text(i))].into() });
    // The names in the request never count.
    let csr = PrivateKey::generate().unwrap().certificate_request(&id).unwrap();
    IstioCertificateRequest { csr, validity_duration: seconds, metadata }
}

const CART: &str = "spiffe://cluster.local/ns/shop/sa/cart";

#[tokio::test]
async fn a_pod_of_the_callers_node_gets_a_certificate_of_the_agreed_form() {
    let rig = Rig::new("form");
    let chain = rig.ask_for(CART).await.unwrap();
    let [leaf, roots] = &chain[..] else { panic!("{chain:?}") };
    assert!(leaf.ends_with("-----END CERTIFICATE-----\n") && **roots == *rig.service.ca.roots_pem());
    let (leaf, root) =
        (certificates_from_pem(leaf.as_bytes()).unwrap(), certificates_from_pem(roots.as_bytes()).unwrap());
    assert_eq!((leaf.len(), root.len()), (1, 1));
    let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
    let (_, root) = parse_x509_certificate(&root[0]).unwrap();
    leaf.verify_signature(Some(root.public_key())).unwrap();
    assert_eq!(leaf.subject().iter().count(), 0);
    let san = leaf.subject_alternative_name().unwrap().unwrap();
    assert!(san.critical);
    assert_eq!(san.value.general_names, [GeneralName::URI(CART)]);
    let eku = leaf.extended_key_usage().unwrap().unwrap().value;
    assert!(eku.server_auth && eku.client_auth && !eku.any && !leaf.is_ca());
    assert!(leaf.key_usage().unwrap().unwrap().value.digital_signature());
    let validity = leaf.validity();
    let now = ASN1Time::now().timestamp();
    assert!((115..=130).contains(&(now - validity.not_before.timestamp())), "{validity:?}");
    assert!((3590..=3600).contains(&(validity.not_after.timestamp() - now)), "{validity:?}");
    assert_eq!(leaf.raw_serial().len(), 16);
}

#[tokio::test]
async fn the_lifetime_is_what_was_asked_within_the_limits() {
    let rig = Rig::new("lifetime");
    for (asked, expected) in [(0, 3600), (-5, 3600), (600, 600), (7000, 7000), (86400, 7200), (90 * 86400, 7200)] {
        let chain = rig.ask(&rig.proxy_token(), request(Some(CART), asked)).await.unwrap();
        let leaf = certificates_from_pem(chain[0].as_bytes()).unwrap();
        let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
        let left = leaf.validity().not_after.timestamp() - ASN1Time::now().timestamp();
        assert!((expected - 10..=expected).contains(&left), "{asked}: {left}");
    }
    let error = rig.ask(&rig.proxy_token(), request(Some(CART), 90 * 86400 + 1)).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
}

#[tokio::test]
async fn the_proxy_gets_its_own_identity_with_or_without_its_name() {
    let rig = Rig::new("own");
    assert!(rig.ask_for("spiffe://cluster.local/ns/understory-system/sa/ztunnel").await.is_ok());
    let chain = rig.ask(&rig.proxy_token(), request(None, 0)).await.unwrap();
    let leaf = certificates_from_pem(chain[0].as_bytes()).unwrap();
    let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
    let san = leaf.subject_alternative_name().unwrap().unwrap().value;
    assert_eq!(san.general_names, [GeneralName::URI("spiffe://cluster.local/ns/understory-system/sa/ztunnel")]);
}

/// Field case B59: which identity, which node, why; and the reason is counted.
#[tokio::test]
async fn each_wrong_request_is_refused_for_its_reason() {
    let rig = Rig::new("refusals");
    rig.pod("shop", "done-1", "done", "node-a", "Succeeded");
    rig.pod("shop", "failed-1", "failed", "node-a", "Failed");
    rig.pod("shop", "pending-1", "pending", "node-a", "Pending");
    rig.pod("understory-system", "ztunnel-gone", "ztunnel", "node-a", "Failed");
    rig.pod("understory-system", "ztunnel-nowhere", "ztunnel", "", "Pending");
    rig.pod("understory-system", "impostor", "other", "node-a", "Running");
    let proxy = |pod: Option<(&str, &str)>| rig.issuer.token("understory-system", "ztunnel", pod);
    let good = proxy(Some(("ztunnel-a", "uid-ztunnel-a")));
    let cart = rig.issuer.token("shop", "cart", Some(("cart-1", "uid-cart-1")));
    let stranger = Issuer::p256().token("understory-system", "ztunnel", Some(("ztunnel-a", "uid-ztunnel-a")));
    let id = |account: &str| format!("spiffe://cluster.local/ns/shop/sa/{account}");
    let cases = [
        ("another node's pod", &good, id("till"), "not_on_node", "node-a"),
        ("a pod that has ended", &good, id("done"), "not_on_node", "shop/sa/done"),
        ("a pod that has failed", &good, id("failed"), "not_on_node", "shop/sa/failed"),
        ("nobody's identity", &good, id("nobody"), "not_on_node", "shop/sa/nobody"),
        ("another namespace's", &good, "spiffe://cluster.local/ns/shop2/sa/cart".into(), "not_on_node", "shop2"),
        ("another trust domain", &good, "spiffe://other/ns/shop/sa/cart".into(), "trust_domain", "other"),
        ("no identity", &good, "shop/cart".into(), "bad_identity", "spiffe://"),
        ("an empty identity", &good, String::new(), "bad_identity", "spiffe://"),
        ("more than an identity", &good, format!("{CART}/../../sa/till"), "bad_identity", "spiffe://"),
        ("a plain workload", &cart, id("cart"), "not_trusted", "shop/cart"),
        ("a proxy of another cluster", &stranger, id("cart"), "signature", "request authenticate failure"),
        ("not bound to a pod", &proxy(None), id("cart"), "not_bound", "not bound"),
        ("an unknown pod", &proxy(Some(("ztunnel-z", "u"))), id("cart"), "unknown_caller", "ztunnel-z"),
        ("an earlier pod of that name", &proxy(Some(("ztunnel-a", "old"))), id("cart"), "other_caller", "uid"),
        (
            "a pod of another account",
            &proxy(Some(("impostor", "uid-impostor"))),
            id("cart"),
            "other_caller",
            "service account",
        ),
        (
            "a pod that has ended",
            &proxy(Some(("ztunnel-gone", "uid-ztunnel-gone"))),
            id("cart"),
            "caller_gone",
            "ended",
        ),
        (
            "a pod on no node",
            &proxy(Some(("ztunnel-nowhere", "uid-ztunnel-nowhere"))),
            id("cart"),
            "caller_gone",
            "no node",
        ),
    ];
    for (what, token, identity, reason, told) in cases {
        let before = refusals(&rig, reason);
        let error = rig.ask(token, request(Some(&identity), 0)).await.expect_err(what);
        assert_eq!(error.code(), Code::Unauthenticated, "{what}: {error}");
        assert!(error.message().contains(told), "{what}: {error}");
        assert_eq!(refusals(&rig, reason), before + 1, "{what}");
    }
    // Starting pods are served.
    assert!(rig.ask_for(&id("pending")).await.is_ok());
    let mut odd = request(Some(CART), 0);
    let fields = &mut odd.metadata.as_mut().unwrap().fields;
    fields.insert("ImpersonatedIdentity".into(), Value { kind: Some(Kind::NumberValue(1.0)) });
    assert_eq!(rig.ask(&rig.proxy_token(), odd).await.unwrap_err().code(), Code::Unauthenticated);
}

#[tokio::test]
async fn a_pod_that_moves_away_takes_its_identity_with_it() {
    let rig = Rig::new("moves");
    assert!(rig.ask_for(CART).await.is_ok());
    rig.pod("shop", "cart-1", "cart", "node-b", "Running");
    assert!(rig.ask_for(CART).await.is_err());
}

#[tokio::test]
async fn requests_that_are_no_good_csr_are_refused() {
    let rig = Rig::new("csr");
    let good = request(Some(CART), 0);
    let p521 = {
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap();
        rcgen::CertificateParams::default().serialize_request(&key).unwrap().pem().unwrap()
    };
    // The signature is the end of the DER: changed, it holds no longer.
    let (_, pem) = parse_x509_pem(good.csr.as_bytes()).unwrap();
    let encode = |der: &[u8]| {
        format!(
            "-----BEGIN CERTIFICATE REQUEST-----\n{}\n-----END CERTIFICATE REQUEST-----\n",
            ztunnel::identity::base64(der)
        )
    };
    let mut forged = pem.contents.clone();
    *forged.last_mut().unwrap() ^= 1;
    let mut longer = pem.contents.clone();
    longer.push(0);
    for (what, csr) in [
        ("empty", String::new()),
        ("text", "hello".into()),
        ("a certificate", rig.service.ca.roots_pem().to_string()),
        ("garbage", encode(b"garbage")),
        ("a forged signature", encode(&forged)),
        ("trailing bytes", encode(&longer)),
        ("another curve", p521),
        ("huge", good.csr.repeat(100)),
    ] {
        let error = rig.ask(&rig.proxy_token(), IstioCertificateRequest { csr, ..good.clone() }).await.expect_err(what);
        assert_eq!(error.code(), Code::InvalidArgument, "{what}: {error}");
    }
}

#[tokio::test]
async fn who_asks_too_often_is_told_when_to_come_again_and_others_are_served() {
    let mut rig = Rig::new("rates");
    rig.service.rates = Rates::new(Rate { burst: 2, per_second: 1 }, 100);
    let codes = [rig.ask_for(CART).await, rig.ask_for(CART).await, rig.ask_for(CART).await];
    let message = codes[2].as_ref().unwrap_err().message().to_owned();
    for part in ["understory-system/ztunnel (pod ztunnel-a, uid-ztunnel-a)", "more than 1 ", "(2 at once)", "again in "]
    {
        assert!(message.contains(part), "{part} in {message}");
    }
    assert_eq!(codes.map(|answer| answer.err().map(|e| e.code())), [None, None, Some(Code::ResourceExhausted)]);
    assert_eq!(refusals(&rig, "too_often"), 1);
    let other = rig.issuer.token("understory-system", "ztunnel", Some(("ztunnel-b", "uid-ztunnel-b")));
    assert!(rig.ask(&other, request(Some("spiffe://cluster.local/ns/shop/sa/till"), 0)).await.is_ok());
}

/// Workloads' own tokens are good for nothing here; they take neither room nor turns from the proxies.
#[tokio::test]
async fn a_flood_from_those_who_get_nothing_does_not_reach_the_proxies() {
    let mut rig = Rig::new("flood");
    rig.service.rates = Rates::new(Rate { burst: 2, per_second: 1 }, 3);
    rig.service.strangers = Rates::new(Rate { burst: 1, per_second: 1 }, 3);
    for n in 0..20 {
        let (name, uid) = (format!("pod-{n}"), format!("uid-{n}"));
        let token = rig.issuer.token("shop", "cart", Some((&name, &uid)));
        assert!(rig.ask(&token, request(Some(CART), 0)).await.is_err());
    }
    assert_eq!((refusals(&rig, "not_trusted"), refusals(&rig, "too_often")), (3, 17));
    assert!(rig.ask_for(CART).await.is_ok());
}

/// Many at once: all are served, and none is signed by more than its turn allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_once_are_all_answered() {
    let rig = Rig::new("at-once");
    let answers = futures_util::future::join_all((0..50).map(|_| rig.ask_for(CART))).await;
    let serials: std::collections::HashSet<String> = answers
        .into_iter()
        .map(|answer| {
            let leaf = certificates_from_pem(answer.unwrap()[0].as_bytes()).unwrap();
            parse_x509_certificate(&leaf[0]).unwrap().1.raw_serial_as_string()
        })
        .collect();
    assert_eq!(serials.len(), 50);
    assert_eq!(rig.service.signing.available_permits(), 2);
}

#[tokio::test]
async fn a_pod_gets_its_identity_from_when_it_is_there_to_when_it_is_gone() {
    let rig = Rig::new("life");
    let late = "spiffe://cluster.local/ns/shop/sa/late";
    let error = rig.ask_for(late).await.unwrap_err();
    assert!(error.message().contains("(yet)"), "{error}");
    rig.pod("shop", "late-1", "late", "node-a", "Pending");
    assert!(rig.ask_for(late).await.is_ok());
    // Not scheduled any more, as a pod that was made again under its name.
    rig.pod("shop", "late-1", "late", "", "Pending");
    assert!(rig.ask_for(late).await.is_err());
    rig.pod("shop", "late-1", "late", "node-a", "Running");
    // Told to end, and still there: it may have connections to end well.
    rig.objects.send_modify(|objects| {
        let pods = &mut Arc::make_mut(objects).pods;
        let pod = Arc::make_mut(pods.get_mut(&ObjectName::new("shop", "late-1")).unwrap());
        pod.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    });
    assert!(rig.ask_for(late).await.is_ok());
    rig.objects.send_modify(|objects| {
        Arc::make_mut(objects).pods.remove(&ObjectName::new("shop", "late-1"));
    });
    assert_eq!(rig.ask_for(late).await.unwrap_err().code(), Code::Unauthenticated);
    // The same for the proxy's own pod.
    rig.objects.send_modify(|objects| {
        Arc::make_mut(objects).pods.remove(&ObjectName::new("understory-system", "ztunnel-a"));
    });
    assert!(rig.ask_for(CART).await.unwrap_err().message().contains("ztunnel-a is not known"));
}

fn refusals(rig: &Rig, reason: &'static str) -> u64 {
    rig.service.metrics.refusals(reason)
}

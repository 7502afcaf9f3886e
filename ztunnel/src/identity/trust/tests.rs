use std::time::Duration;

use super::*;
use crate::identity::PrivateKey;
use crate::identity::testing::{Leaf, TestCa};

const HOUR: Duration = Duration::from_secs(3600);

fn identity(name: &str) -> Identity {
    format!("spiffe://cluster.local/ns/shop/sa/{name}").parse().unwrap()
}

fn domain() -> TrustDomain {
    TrustDomain::default()
}

fn trust(revocation: Option<RevocationRules>) -> Trust {
    Trust::new(TrustSettings { revocation, ..TrustSettings::default() })
}

fn leaf(ca: &TestCa, name: &str) -> CertificateDer<'static> {
    ca.sign(&Leaf::of(&identity(name)), &PrivateKey::generate().unwrap())
}

fn verify(trust: &Trust, chain: &[CertificateDer<'_>]) -> Result<(), PeerError> {
    trust.verify(&domain(), chain, PeerRole::Client, UnixTime::now())
}

fn again(trust: &Trust, chain: &[CertificateDer<'_>]) -> Result<(), PeerError> {
    trust.verify_again(&domain(), chain, PeerRole::Client, SystemTime::now())
}

/// The answers of a service, at times in milliseconds from the first request.
struct Answers {
    trust: Trust,
    start: Instant,
}

impl Answers {
    fn new() -> Self {
        Self { trust: trust(None), start: Instant::now() }
    }

    fn come(&self, roots: &[&TestCa], asked: u64, came: u64) -> Learned {
        let roots: Vec<_> = roots.iter().map(|ca| ca.root_der()).collect();
        let at = |ms| self.start + Duration::from_millis(ms);
        self.trust.learn_at(&domain(), &roots, at(asked), at(came), false)
    }
}

const SAME: Learned = Learned { changed: false, doubtful: false };
const CHANGED: Learned = Learned { changed: true, doubtful: false };
const DOUBTFUL: Learned = Learned { changed: false, doubtful: true };

#[test]
fn a_later_answer_replaces_the_roots_for_everybody() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let answers = Answers::new();
    let trust = &answers.trust;
    assert!(matches!(verify(trust, &[leaf(&old, "web")]), Err(PeerError::NoRoots { .. })));
    assert_eq!(answers.come(&[&old], 0, 1), CHANGED);
    assert_eq!(answers.come(&[&old], 2, 3), SAME);
    verify(trust, &[leaf(&old, "web")]).unwrap();
    assert!(matches!(verify(trust, &[leaf(&new, "web")]), Err(PeerError::Untrusted { .. })));

    let before = trust.generation();
    assert_eq!(answers.come(&[&new, &old], 4, 5), CHANGED);
    assert_eq!(trust.generation(), before, "nobody has lost trust");
    verify(trust, &[leaf(&old, "web")]).unwrap();
    verify(trust, &[leaf(&new, "web")]).unwrap();

    let web = leaf(&old, "web");
    again(trust, std::slice::from_ref(&web)).unwrap();
    assert_eq!(answers.come(&[&new], 6, 7), CHANGED);
    assert_eq!(trust.generation(), before + 1);
    let error = again(trust, &[web]).unwrap_err().to_string();
    for part in ["sa/web", "CN=old", "none of the 1 trusted root(s) of cluster.local"] {
        assert!(error.contains(part), "{part:?} in {error:?}");
    }
    assert_eq!(trust.counts(), TrustCounts { added: 2, withdrawn: 1 });
    let other = TrustDomain::new("elsewhere");
    let verdict = trust.verify(&other, &[leaf(&new, "web")], PeerRole::Client, UnixTime::now());
    assert!(matches!(verdict, Err(PeerError::NoRoots { .. })), "each trust domain has its own roots");
}

/// Two answers under way at once come in either order: neither can be told to be the later one.
#[test]
fn answers_that_overlap_add_up_until_a_later_one_settles_it() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    for settled in [&old, &new] {
        let answers = Answers::new();
        assert_eq!(answers.come(&[&old], 0, 1), CHANGED);
        assert_eq!(answers.come(&[&old], 2, 5), SAME);
        assert_eq!(answers.come(&[&new], 3, 6), Learned { changed: true, doubtful: true });
        verify(&answers.trust, &[leaf(&old, "web")]).unwrap();
        verify(&answers.trust, &[leaf(&new, "web")]).unwrap();
        assert_eq!(answers.come(&[settled], 6, 7), CHANGED);
        for ca in [&old, &new] {
            assert_eq!(verify(&answers.trust, &[leaf(ca, "web")]).is_ok(), std::ptr::eq(ca, settled));
        }
    }
}

/// While answers that agree come all the time, one that was asked for after the last one with a root withdraws it.
#[test]
fn a_root_goes_although_answers_overlap_without_end() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let answers = Answers::new();
    assert_eq!(answers.come(&[&old, &new], 0, 5), CHANGED);
    assert_eq!(answers.come(&[&new], 1, 6), DOUBTFUL);
    assert_eq!(answers.come(&[&new], 4, 9), DOUBTFUL);
    assert!(verify(&answers.trust, &[leaf(&old, "web")]).is_ok());
    assert_eq!(answers.come(&[&new], 7, 12), CHANGED);
    assert!(verify(&answers.trust, &[leaf(&old, "web")]).is_err());
    assert_eq!(answers.come(&[&new], 8, 13), SAME);
    assert_eq!(answers.come(&[&new, &old], 10, 14), DOUBTFUL, "asked for before the last one without it came");
    assert!(verify(&answers.trust, &[leaf(&old, "web")]).is_err());
}

/// An answer that was slow must not bring back what a later one has left out.
#[test]
fn an_overlapping_answer_brings_no_withdrawn_root_back() {
    let (old, new) = (TestCa::new("old"), TestCa::new("new"));
    let answers = Answers::new();
    assert_eq!(answers.come(&[&old, &new], 0, 1), CHANGED);
    assert_eq!(answers.come(&[&new], 3, 4), CHANGED);
    assert_eq!(answers.come(&[&old, &new], 2, 5), DOUBTFUL);
    assert!(verify(&answers.trust, &[leaf(&old, "web")]).is_err());
    // But one that was asked for later does.
    assert_eq!(answers.come(&[&old, &new], 6, 7), CHANGED);
    verify(&answers.trust, &[leaf(&old, "web")]).unwrap();
}

#[test]
fn times_are_both_in_the_reason_and_an_end_is_no_reason_for_an_open_tunnel() {
    let ca = TestCa::new("root");
    let trust = ca.trust(&identity("web"), TrustSettings::default());
    let now = SystemTime::now();
    let key = PrivateKey::generate().unwrap();
    let hour_long = Leaf { not_before: now - HOUR, not_after: now + HOUR, ..Leaf::of(&identity("web")) };
    let chain = [ca.sign(&hour_long, &key)];
    let at = |time: SystemTime| UnixTime::since_unix_epoch(time.duration_since(UNIX_EPOCH).unwrap());
    for (time, word) in [(now + 2 * HOUR, "was valid from"), (now - 2 * HOUR, "is valid from")] {
        let error = trust.verify(&domain(), &chain, PeerRole::Client, at(time)).unwrap_err();
        let text = error.to_string();
        for part in
            [word, "sa/web", &super::super::rfc3339(time)[..16], &super::super::rfc3339(now + HOUR)[..16], "clock"]
        {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
    }
    again(&trust, &chain).unwrap();

    let ended = TestCa::ending("ended", now - Duration::from_secs(60));
    let trust = Trust::new(TrustSettings::default());
    trust.learn(&domain(), &[ended.root_der(), ca.root_der()], Instant::now(), false);
    let chain = [leaf(&ended, "web")];
    let text = verify(&trust, &chain).unwrap_err().to_string();
    assert!(text.contains("CN=ended, which ended at"), "{text}");
    again(&trust, &chain).unwrap();
    verify(&trust, &[leaf(&ca, "web")]).unwrap();
}

#[test]
fn a_certificate_must_be_good_for_what_the_peer_does() {
    let ca = TestCa::new("root");
    let trust = ca.trust(&identity("web"), TrustSettings::default());
    let key = PrivateKey::generate().unwrap();
    let chain = [ca.sign_for(&Leaf::of(&identity("web")), &key, rcgen::ExtendedKeyUsagePurpose::ServerAuth)];
    trust.verify(&domain(), &chain, PeerRole::Server, UnixTime::now()).unwrap();
    assert!(matches!(verify(&trust, &chain), Err(PeerError::Chain { .. })));
}

struct Revoking {
    root: TestCa,
    below: TestCa,
    web: CertificateDer<'static>,
    cart: CertificateDer<'static>,
}

impl Revoking {
    fn new() -> Self {
        let root = TestCa::new("root");
        let below = root.intermediate("below");
        let (web, cart) = (leaf(&below, "web"), leaf(&below, "cart"));
        Self { root, below, web, cart }
    }

    fn trust(&self, rules: RevocationRules) -> Trust {
        let trust = trust(Some(rules));
        trust.learn(&domain(), &[self.root.root_der()], Instant::now(), false);
        trust
    }

    fn web(&self) -> [CertificateDer<'static>; 2] {
        [self.web.clone(), self.below.root_der()]
    }

    fn cart(&self) -> [CertificateDer<'static>; 2] {
        [self.cart.clone(), self.below.root_der()]
    }
}

fn lists(lists: &[Vec<u8>]) -> CrlSet {
    let block = |der: &Vec<u8>| {
        format!("a comment\r\n-----BEGIN X509 CRL-----\r\n{}\r\n-----END X509 CRL-----\r\n", super::super::base64(der))
    };
    CrlSet::read(lists.iter().map(block).collect::<String>().as_bytes()).unwrap()
}

#[test]
fn the_whole_chain_is_asked_about_and_what_is_not_known_is_refused() {
    let pki = Revoking::new();
    let trust = pki.trust(RevocationRules::default());
    let now = SystemTime::now();
    let error = verify(&trust, &pki.web()).unwrap_err();
    assert!(matches!(error, PeerError::RevocationUnknown { .. }), "{error}");

    let of_root = pki.root.crl(&[], now - HOUR, now + HOUR);
    let of_below = pki.below.crl(&[&pki.web], now - HOUR, now + HOUR);
    trust.revoke(lists(std::slice::from_ref(&of_below)));
    let error = verify(&trust, &pki.cart()).unwrap_err().to_string();
    assert!(error.contains("no revocation list of CN=root is loaded"), "{error}");

    let before = trust.generation();
    trust.revoke(lists(&[of_root, of_below]));
    assert!(trust.generation() > before);
    verify(&trust, &pki.cart()).unwrap();
    for error in [verify(&trust, &pki.web()).unwrap_err(), again(&trust, &pki.web()).unwrap_err()] {
        assert!(error.is_revocation());
        let text = error.to_string();
        let serial = x509_parser::parse_x509_certificate(&pki.web).unwrap().1.raw_serial_as_string().replace(':', "");
        for part in ["sa/web", "CN=below", &format!("serial {serial}"), &super::super::rfc3339(now - HOUR)[..16]] {
            assert!(text.contains(part), "{part:?} in {text:?}");
        }
    }

    // The intermediate itself.
    let of_root = pki.root.crl(&[&pki.below.root_der()], now - HOUR, now + HOUR);
    trust.revoke(lists(&[of_root, pki.below.crl(&[], now - HOUR, now + HOUR)]));
    let text = verify(&trust, &pki.cart()).unwrap_err().to_string();
    assert!(text.contains("sa/cart") && text.contains("issuer CN=root"), "{text}");
}

#[test]
fn each_rule_can_be_opened_and_a_revoked_certificate_is_refused_all_the_same() {
    let pki = Revoking::new();
    let now = SystemTime::now();
    let outdated =
        [pki.root.crl(&[], now - 2 * HOUR, now - HOUR), pki.below.crl(&[&pki.web], now - 2 * HOUR, now - HOUR)];
    let closed = pki.trust(RevocationRules::default());
    closed.revoke(lists(&outdated));
    let error = verify(&closed, &pki.cart()).unwrap_err();
    assert!(matches!(error, PeerError::RevocationOutdated { .. }), "{error}");
    assert!(error.to_string().contains(&super::super::rfc3339(now - HOUR)[..16]), "{error}");
    again(&closed, &pki.cart()).unwrap();

    let open = pki.trust(RevocationRules { unknown_issuer: Rule::Allow, outdated: Rule::Allow });
    verify(&open, &pki.web()).unwrap();
    open.revoke(lists(&outdated));
    verify(&open, &pki.cart()).unwrap();
    assert!(matches!(verify(&open, &pki.web()), Err(PeerError::Revoked { .. })));
    assert!(matches!(verify(&closed, &pki.web()), Err(PeerError::Revoked { .. })));
}

/// During a rotation two authorities may share a name; only a list with the issuer's own signature counts.
#[test]
fn a_list_counts_only_with_the_signature_of_the_certificates_issuer_and_the_newest_of_several_does() {
    let now = SystemTime::now();
    let (one, two) = (TestCa::new("root"), TestCa::new("root"));
    let trust = trust(Some(RevocationRules::default()));
    trust.learn(&domain(), &[one.root_der(), two.root_der()], Instant::now(), false);
    let (of_one, of_two) = (leaf(&one, "web"), leaf(&two, "web"));
    trust.revoke(lists(&[one.crl(&[&of_one, &of_two], now - HOUR, now + HOUR)]));
    assert!(matches!(verify(&trust, std::slice::from_ref(&of_one)), Err(PeerError::Revoked { .. })));
    assert!(matches!(verify(&trust, std::slice::from_ref(&of_two)), Err(PeerError::RevocationUnknown { .. })));
    let older = two.crl(&[&of_two], now - 2 * HOUR, now + HOUR);
    let newer = two.crl(&[], now - HOUR, now + HOUR);
    trust.revoke(lists(&[one.crl(&[&of_one], now - HOUR, now + HOUR), older, newer]));
    assert!(matches!(verify(&trust, &[of_one]), Err(PeerError::Revoked { .. })));
    verify(&trust, &[of_two]).unwrap();
}

//! Tokens as the API server mints them, and all that can be wrong with one.

use std::fs;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::encoding::{AsDer, Pkcs8V1Der, PublicKeyX509Der};
use aws_lc_rs::rsa::{KeyPair as RsaKeyPair, KeySize};
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use futures_util::FutureExt;
use jsonwebtoken::{EncodingKey, Header, encode};
use serde_json::{Value, json};
use ztunnel::identity::base64;

use super::*;

/// A signer as the API server has one.
pub(crate) struct Issuer {
    key: EncodingKey,
    algorithm: Algorithm,
    public_der: Vec<u8>,
}

impl Issuer {
    pub(crate) fn p256() -> Self {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).unwrap();
        let public: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
        Self {
            key: EncodingKey::from_ec_der(pair.to_pkcs8v1().unwrap().as_ref()),
            algorithm: Algorithm::ES256,
            public_der: public.as_ref().to_vec(),
        }
    }

    fn rsa() -> Self {
        let pair = RsaKeyPair::generate(KeySize::Rsa2048).unwrap();
        let private: Pkcs8V1Der<'_> = pair.as_der().unwrap();
        let public: PublicKeyX509Der<'_> = pair.public_key().as_der().unwrap();
        let pem = pem("PRIVATE KEY", private.as_ref());
        Self {
            key: EncodingKey::from_rsa_pem(pem.as_bytes()).unwrap(),
            algorithm: Algorithm::RS256,
            public_der: public.as_ref().to_vec(),
        }
    }

    pub(crate) fn public_pem(&self) -> String {
        pem("PUBLIC KEY", &self.public_der)
    }

    pub(crate) fn sign(&self, claims: &Value) -> String {
        encode(&Header::new(self.algorithm), claims, &self.key).unwrap()
    }

    /// A good token of a pod.
    pub(crate) fn token(&self, namespace: &str, account: &str, pod: Option<(&str, &str)>) -> String {
        self.sign(&claims(namespace, account, pod))
    }
}

pub(crate) fn claims(namespace: &str, account: &str, pod: Option<(&str, &str)>) -> Value {
    let mut claims = json!({
        "aud": ["istio-ca"], "iss": ISSUER, "iat": now(), "nbf": now(), "exp": now() + 3600,
        "sub": format!("system:serviceaccount:{namespace}:{account}"),
        "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": account, "uid": "sa-uid"}},
    });
    if let Some((name, uid)) = pod {
        claims["kubernetes.io"]["pod"] = json!({"name": name, "uid": uid});
    }
    claims
}

pub(crate) fn settings() -> TokenSettings {
    TokenSettings { issuer: ISSUER.into(), audience: "istio-ca".into(), cluster_id: "Kubernetes".into() }
}

/// Checks tokens of one issuer; the file is gone afterwards.
pub(crate) fn tokens(issuer: &Issuer) -> Tokens {
    let file = TempFile::new(&issuer.public_pem());
    Tokens::new(Check::Keys(KeyFile::open(&file.0).unwrap()), settings())
}

/// Checking by keys waits for nothing.
fn verify(tokens: &Tokens, token: &str) -> Result<Caller, TokenError> {
    tokens.verify(token).now_or_never().unwrap()
}

#[test]
fn a_good_token_names_its_account_and_pod() {
    for issuer in [Issuer::p256(), Issuer::rsa()] {
        let tokens = tokens(&issuer);
        let bound = verify(&tokens, &issuer.token("ns", "sa", Some(("p-1", "u-1")))).unwrap();
        let pod = Some(BoundPod { name: "p-1".into(), uid: "u-1".into(), node: None });
        assert_eq!(bound, Caller { namespace: "ns".into(), service_account: "sa".into(), pod });
        assert_eq!(verify(&tokens, &issuer.token("ns", "sa", None)).unwrap().pod, None);
    }
}

#[test]
fn each_wrong_token_is_refused_for_its_reason() {
    let (issuer, stranger, rsa) = (Issuer::p256(), Issuer::p256(), Issuer::rsa());
    let tokens = tokens(&issuer);
    let good = claims("ns", "sa", Some(("p-1", "u-1")));
    let with = |change: fn(&mut Value)| {
        let mut claims = good.clone();
        change(&mut claims);
        issuer.sign(&claims)
    };
    let none = format!("{}.{}.", b64(br#"{"alg":"none"}"#), b64(good.to_string().as_bytes()));
    let public_as_secret = {
        let key = EncodingKey::from_secret(issuer.public_pem().as_bytes()).unwrap();
        encode(&Header::new(Algorithm::HS256), &good, &key).unwrap()
    };
    let mut cut = issuer.sign(&good);
    cut.truncate(cut.len() - 10);
    let forged = {
        let (token, other) = (issuer.sign(&good), issuer.token("ns", "other", None));
        let parts: Vec<&str> = token.split('.').collect();
        format!("{}.{}.{}", parts[0], other.split('.').nth(1).unwrap(), parts[2])
    };
    let cases: Vec<(&str, String, &str)> = vec![
        ("other key", stranger.sign(&good), "signature"),
        ("other kind of key", rsa.sign(&good), "signature"),
        ("claims of another token", forged, "signature"),
        ("no signature", none, "malformed"),
        ("public key as shared secret", public_as_secret, "signature"),
        ("cut", cut, "signature"),
        ("nonsense", "nonsense".into(), "malformed"),
        ("empty", String::new(), "malformed"),
        ("expired", with(|c| c["exp"] = json!(now() - 60)), "expired"),
        ("not yet", with(|c| c["nbf"] = json!(now() + 60)), "too_early"),
        ("without an end", with(|c| drop(c.as_object_mut().unwrap().remove("exp"))), "malformed"),
        ("other issuer", with(|c| c["iss"] = json!("https://elsewhere")), "issuer"),
        ("without issuer", with(|c| drop(c.as_object_mut().unwrap().remove("iss"))), "malformed"),
        ("for the API server", with(|c| c["aud"] = json!(["https://kubernetes.default.svc"])), "audience"),
        ("without audience", with(|c| drop(c.as_object_mut().unwrap().remove("aud"))), "malformed"),
        ("subject of another account", with(|c| c["sub"] = json!("system:serviceaccount:ns:root")), "contradiction"),
        ("a user", with(|c| c["sub"] = json!("system:node:a")), "contradiction"),
        ("namespace of another", with(|c| c["kubernetes.io"]["namespace"] = json!("kube-system")), "contradiction"),
        (
            "names that make another subject",
            with(|c| {
                c["sub"] = json!("system:serviceaccount:a:b:c");
                c["kubernetes.io"]["namespace"] = json!("a:b");
                c["kubernetes.io"]["serviceaccount"]["name"] = json!("c");
            }),
            "contradiction",
        ),
        ("not of Kubernetes", with(|c| drop(c.as_object_mut().unwrap().remove("kubernetes.io"))), "malformed"),
        ("pod without uid", with(|c| c["kubernetes.io"]["pod"] = json!({"name": "p"})), "malformed"),
    ];
    for (what, token, reason) in cases {
        let error = verify(&tokens, &token).expect_err(what);
        assert_eq!(error.label(), reason, "{what}: {error}");
        if token.len() > 20 {
            assert!(!error.to_string().contains(&token[token.len() - 10..]), "{what} is told: {error}");
        }
    }
    assert!(verify(&tokens, &with(|c| c["aud"] = json!("istio-ca"))).is_ok());
    assert!(verify(&tokens, &with(|c| c["aud"] = json!(["x", "istio-ca"]))).is_ok());
}

#[test]
fn the_headers_must_hold_a_bearer_token_for_our_cluster() {
    let issuer = Issuer::p256();
    let tokens = tokens(&issuer);
    let token = issuer.token("ns", "sa", None);
    let cases = [
        (Some(format!("Bearer {token}")), None, "ok"),
        (Some(format!("bearer {token}")), Some(""), "ok"),
        (Some(format!("Bearer {token}")), Some("Kubernetes"), "ok"),
        (Some(format!("Bearer {token}")), Some("other"), "cluster"),
        (Some(format!("Basic {token}")), None, "missing"),
        (Some(token.clone()), None, "missing"),
        (None, None, "missing"),
    ];
    for (authorization, cluster, expected) in cases {
        let mut headers = MetadataMap::new();
        if let Some(value) = &authorization {
            headers.insert("authorization", value.parse().unwrap());
        }
        if let Some(value) = cluster {
            headers.insert("clusterid", value.parse().unwrap());
        }
        let label = tokens.caller(&headers).now_or_never().unwrap().map_or_else(|e| e.label(), |_| "ok");
        assert_eq!(label, expected, "{authorization:?} {cluster:?}");
    }
}

#[test]
fn keys_are_read_from_pem_and_jwks_and_what_is_wrong_is_said() {
    let (ec, rsa) = (Issuer::p256(), Issuer::rsa());
    let point = &ec.public_der[ec.public_der.len() - 64..];
    let jwk =
        json!({"kty": "EC", "crv": "P-256", "kid": "x", "use": "sig", "x": b64(&point[..32]), "y": b64(&point[32..])});
    for text in [
        format!("# first\n{}\n\n{}", ec.public_pem(), rsa.public_pem()),
        format!("{}{}", rsa.public_pem().replace('\n', "\r\n"), ec.public_pem()),
        json!({"keys": [jwk, {"kty": "OKP", "crv": "Ed25519", "x": b64(&[0; 32])}]}).to_string(),
    ] {
        let file = TempFile::new(&text);
        let tokens = Tokens::new(Check::Keys(KeyFile::open(&file.0).unwrap()), settings());
        assert!(verify(&tokens, &ec.token("ns", "sa", None)).is_ok(), "{text}");
    }
    for (text, told) in [
        ("", "expected public keys"),
        ("hello", "expected public keys"),
        ("{}", "expected a JWKS"),
        (r#"{"keys": []}"#, "no RSA or P-256 key"),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "PRIVATE KEY"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "broken"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n", "does not end"),
    ] {
        let file = TempFile::new(text);
        let error = KeyFile::open(&file.0).unwrap_err().to_string();
        assert!(error.contains(told) && error.contains(file.0.to_str().unwrap()), "{text:?}: {error}");
    }
    assert!(KeyFile::open("/nowhere/keys".as_ref()).unwrap_err().to_string().contains("/nowhere/keys"));
}

#[test]
fn a_changed_key_file_is_taken_up_and_a_broken_one_is_not() {
    let (old, new) = (Issuer::p256(), Issuer::p256());
    let file = TempFile::new(&old.public_pem());
    let tokens = Tokens::new(Check::Keys(KeyFile::open(&file.0).unwrap()), settings());
    assert_eq!(verify(&tokens, &new.token("ns", "sa", None)), Err(TokenError::Signature));
    fs::write(&file.0, "half-writ").unwrap();
    std::thread::sleep(keys::LOOK_SOON);
    assert_eq!(verify(&tokens, &new.token("ns", "sa", None)), Err(TokenError::Signature));
    assert!(verify(&tokens, &old.token("ns", "sa", None)).is_ok());
    fs::write(&file.0, new.public_pem()).unwrap();
    std::thread::sleep(keys::LOOK_SOON);
    assert!(verify(&tokens, &new.token("ns", "sa", None)).is_ok());
    assert_eq!(verify(&tokens, &old.token("ns", "sa", None)), Err(TokenError::Signature));
}

pub(crate) const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

fn pem(label: &str, der: &[u8]) -> String {
    format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", base64(der))
}

/// Base64 as JWTs want it.
fn b64(bytes: &[u8]) -> String {
    base64(bytes).replace('+', "-").replace('/', "_").trim_end_matches('=').to_owned()
}

pub(crate) struct TempFile(pub PathBuf);

impl TempFile {
    pub(crate) fn new(text: &str) -> Self {
        use std::sync::atomic::{AtomicU32, Ordering};
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("understory-control-{}-{count}", std::process::id()));
        fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

//! Tokens, reviewed by the API server, and what it said about them for a while.
//!
//! Must never believe a token that the API server does not believe, nor ask it without limit for those who send anything.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use tokio::sync::Semaphore;
use ztunnel::kubernetes::Api;

use super::{BoundPod, Caller, TokenError, account_of};

#[derive(Debug)]
pub struct Reviews {
    api: Api,
    asking: Semaphore,
    known: Mutex<HashMap<Digest, Known>>,
}

/// Of the token: it is not kept.
type Digest = [u8; 32];

#[derive(Debug, Clone)]
struct Known {
    verdict: Result<Caller, TokenError>,
    at: Instant,
    /// Seconds since 1970: the token's own end.
    ends: u64,
}

/// What a token says of itself. Believed only where it speaks against it.
struct Claims {
    ends: u64,
}

impl Reviews {
    pub fn new(api: Api) -> Self {
        Self { api, asking: Semaphore::new(AT_ONCE), known: Mutex::default() }
    }

    pub async fn verify(&self, token: &str, audience: &str) -> Result<Caller, TokenError> {
        let Claims { ends } = precheck(token, audience)?;
        let digest = digest(token);
        if let Some(known) = self.known(&digest).filter(Known::is_fresh) {
            return known.verdict;
        }
        let turn = tokio::time::timeout(TURN, self.asking.acquire()).await;
        let Ok(Ok(_turn)) = turn else {
            return Err(TokenError::Unavailable("too many tokens wait for the API server".into()));
        };
        // Somebody else may have asked for the same meanwhile.
        let before = self.known(&digest);
        if let Some(known) = before.clone().filter(Known::is_fresh) {
            return known.verdict;
        }
        let request = json!({
            "apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
            "spec": {"token": token, "audiences": [audience]},
        });
        let verdict = match self.api.create(PATH, &request).await {
            Ok(review) => judge(&review["status"], audience),
            Err(error) => {
                // Who was good goes on while nobody can be asked.
                return match before.map(|known| known.verdict) {
                    Some(Ok(caller)) if ends > now() => Ok(caller),
                    _ => Err(TokenError::Unavailable(error.to_string())),
                };
            }
        };
        self.keep(digest, Known { verdict: verdict.clone(), at: Instant::now(), ends });
        verdict
    }

    fn known(&self, digest: &Digest) -> Option<Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(digest).cloned()
    }

    fn keep(&self, digest: Digest, known: Known) {
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_KNOWN {
            let time = now();
            all.retain(|_, known| known.is_fresh() || (known.verdict.is_ok() && known.ends > time));
        }
        // Full of good ones: then this one is asked for again.
        if all.len() < MAX_KNOWN {
            all.insert(digest, known);
        }
    }
}

impl Known {
    fn is_fresh(&self) -> bool {
        let life = if self.verdict.is_ok() { GOOD_FOR } else { BAD_FOR };
        self.at.elapsed() < life && (self.verdict.is_err() || self.ends > now())
    }
}

/// Refuses without asking what the API server would refuse anyway.
fn precheck(token: &str, audience: &str) -> Result<Claims, TokenError> {
    let malformed = |what: &str| TokenError::Malformed(what.into());
    if token.len() > MAX_TOKEN {
        return Err(malformed("it is too long"));
    }
    let claims = jsonwebtoken::dangerous::insecure_decode_claims::<Value>(token);
    let claims = claims.map_err(|_| malformed("it is no JWT"))?;
    let ends = claims["exp"].as_u64().ok_or_else(|| malformed("claim exp is missing"))?;
    if ends <= now() {
        return Err(TokenError::Expired);
    }
    let named = match &claims["aud"] {
        Value::String(one) => one == audience,
        Value::Array(several) => several.iter().any(|one| one == audience),
        _ => false,
    };
    if named { Ok(Claims { ends }) } else { Err(TokenError::Audience(audience.to_owned())) }
}

fn judge(status: &Value, audience: &str) -> Result<Caller, TokenError> {
    if status["authenticated"] != true {
        let why = status["error"].as_str().unwrap_or("no reason given");
        return Err(TokenError::Reviewed(why.chars().take(256).collect()));
    }
    // A server that does not look at audiences names none: then it would be as good for anything else.
    if !status["audiences"].as_array().is_some_and(|list| list.iter().any(|one| one == audience)) {
        return Err(TokenError::Audience(audience.to_owned()));
    }
    let user = &status["user"];
    let name = user["username"].as_str().unwrap_or_default();
    let (namespace, service_account) = account_of(name)?;
    let extra = |key: &str| {
        let values = user["extra"][format!("authentication.kubernetes.io/{key}")].as_array();
        values.and_then(|v| v.first()).and_then(Value::as_str).filter(|v| !v.is_empty()).map(str::to_owned)
    };
    let pod = match (extra("pod-name"), extra("pod-uid")) {
        (Some(name), Some(uid)) => Some(BoundPod { name, uid, node: extra("node-name") }),
        _ => None,
    };
    Ok(Caller { namespace, service_account, pod })
}

fn digest(token: &str) -> Digest {
    let mut digest = [0; 32];
    digest.copy_from_slice(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, token.as_bytes()).as_ref());
    digest
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

const PATH: &str = "/apis/authentication.k8s.io/v1/tokenreviews";
/// How long the API server is not asked again.
const GOOD_FOR: Duration = Duration::from_secs(60);
const BAD_FOR: Duration = Duration::from_secs(10);
/// A cluster has fewer nodes.
const MAX_KNOWN: usize = 20_000;
const AT_ONCE: usize = 16;
/// For how long a token waits for its turn to be asked for.
const TURN: Duration = Duration::from_secs(5);
/// Bytes.
const MAX_TOKEN: usize = 16 << 10;

#[cfg(test)]
mod tests {
    use apistub::ApiStub;

    use super::*;
    use crate::kubernetes::tests::api;
    use crate::tokens::tests::{Issuer, claims};

    fn review(authenticated: bool) -> Value {
        let extra = json!({
            "authentication.kubernetes.io/pod-name": ["p-1"], "authentication.kubernetes.io/pod-uid": ["u-1"],
            "authentication.kubernetes.io/node-name": ["node-a"],
        });
        json!({"status": {
            "authenticated": authenticated, "audiences": ["istio-ca"], "error": "because",
            "user": {"username": "system:serviceaccount:ns:sa", "extra": extra},
        }})
    }

    fn asked(server: &ApiStub) -> usize {
        server.state().requests.iter().filter(|r| **r == format!("POST {PATH}")).count()
    }

    fn answer(server: &ApiStub, code: u16, review: Value) {
        server.state().answers.insert(PATH.into(), (code, review));
    }

    #[tokio::test]
    async fn a_good_token_names_account_pod_and_node_and_is_asked_for_once() {
        let server = ApiStub::start().await;
        answer(&server, 201, review(true));
        let (reviews, token) = (Reviews::new(api(&server)), Issuer::p256().token("ns", "sa", None));
        let pod = BoundPod { name: "p-1".into(), uid: "u-1".into(), node: Some("node-a".into()) };
        let caller = Caller { namespace: "ns".into(), service_account: "sa".into(), pod: Some(pod) };
        for _ in 0..3 {
            assert_eq!(reviews.verify(&token, "istio-ca").await, Ok(caller.clone()));
        }
        assert_eq!(asked(&server), 1);
    }

    #[tokio::test]
    async fn each_wrong_answer_is_refused_for_its_reason() {
        let server = ApiStub::start().await;
        let reviews = Reviews::new(api(&server));
        let with = |path: &str, value: Value| {
            let mut review = review(true);
            *review.pointer_mut(path).unwrap() = value;
            review
        };
        for (answered, label) in [
            (review(false), "reviewed"),
            (json!({"status": {}}), "reviewed"),
            (with("/status/audiences", json!(["other"])), "audience"),
            (with("/status/audiences", Value::Null), "audience"),
            (with("/status/user/username", json!("admin")), "contradiction"),
            (with("/status/user/username", json!("system:serviceaccount:a:b:c")), "contradiction"),
        ] {
            answer(&server, 201, answered.clone());
            let token = Issuer::p256().token("ns", "sa", None);
            let error = reviews.verify(&token, "istio-ca").await.expect_err(label);
            assert_eq!(error.label(), label, "{answered}");
        }
    }

    #[tokio::test]
    async fn nobody_is_asked_about_what_is_wrong_by_itself() {
        let server = ApiStub::start().await;
        let (reviews, issuer) = (Reviews::new(api(&server)), Issuer::p256());
        let with = |key: &str, value: Value| {
            let mut claims = claims("ns", "sa", None);
            claims[key] = value;
            issuer.sign(&claims)
        };
        for (token, label) in [
            ("x".to_owned(), "malformed"),
            ("x.y.z".to_owned(), "malformed"),
            ("x".repeat(MAX_TOKEN + 1), "malformed"),
            (with("exp", json!(now() - 1)), "expired"),
            (with("exp", Value::Null), "malformed"),
            (with("aud", json!("kubernetes")), "audience"),
        ] {
            assert_eq!(reviews.verify(&token, "istio-ca").await.expect_err(label).label(), label);
        }
        assert_eq!(asked(&server), 0);
    }

    #[tokio::test]
    async fn while_nobody_can_be_asked_the_known_go_on_and_others_are_told_to_come_again() {
        let server = ApiStub::start().await;
        answer(&server, 201, review(true));
        let reviews = Reviews::new(api(&server));
        let (known, unknown) = (Issuer::p256().token("ns", "sa", None), Issuer::p256().token("ns", "sa", None));
        reviews.verify(&known, "istio-ca").await.unwrap();
        answer(&server, 500, json!({"kind": "Status", "code": 500, "message": "away"}));
        let old = Instant::now().checked_sub(GOOD_FOR * 2).expect("the machine runs for longer");
        reviews.known.lock().unwrap().values_mut().for_each(|known| known.at = old);
        assert!(reviews.verify(&known, "istio-ca").await.is_ok());
        let error = reviews.verify(&unknown, "istio-ca").await.unwrap_err();
        assert_eq!(error.label(), "unavailable");
        assert_eq!(tonic::Status::from(error).code(), tonic::Code::Unavailable);
        // Once it says no, it is no.
        answer(&server, 201, review(false));
        assert_eq!(reviews.verify(&known, "istio-ca").await.unwrap_err().label(), "reviewed");
    }
}

//! Service account tokens as the API server mints them: ES256, bound to a pod and its node.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::KeyPair;
use serde_json::{Value, json};

/// Issuer of the testbed's tokens.
pub const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// Audience that the control plane expects.
pub const AUDIENCE: &str = "istio-ca";

/// The signing key of a cluster.
#[derive(Debug)]
pub struct TokenKey {
    pair: KeyPair,
}

/// Whom a token is for, and how it is made. Every field can be set wrong on purpose.
#[derive(Debug, Clone)]
pub struct TokenSpec {
    pub issuer: String,
    pub audience: String,
    pub namespace: String,
    pub service_account: String,
    /// Name and uid of the pod that the token is bound to.
    pub pod: Option<(String, String)>,
    /// Name of the node of that pod.
    pub node: Option<String>,
    /// Counted from now; `None`: one that expired a minute ago.
    pub valid_for: Option<Duration>,
}

impl TokenKey {
    pub fn generate() -> Self {
        Self { pair: KeyPair::generate().expect("make a P-256 key") }
    }

    pub(crate) fn write_public(&self, path: &Path) {
        std::fs::write(path, self.pair.public_key_pem()).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
    }

    /// Mints a token.
    pub fn mint(&self, spec: &TokenSpec) -> String {
        let key = EncodingKey::from_ec_pem(self.pair.serialize_pem().as_bytes()).expect("rcgen writes PKCS#8");
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").as_secs();
        let (from, until) = match spec.valid_for {
            Some(span) => (now, now + span.as_secs()),
            None => (now - 3600, now - 60),
        };
        let mut kubernetes = json!({
            "namespace": spec.namespace,
            "serviceaccount": { "name": spec.service_account, "uid": "00000000-0000-4000-8000-000000000001" },
        });
        if let Some((name, uid)) = &spec.pod {
            kubernetes["pod"] = json!({ "name": name, "uid": uid });
        }
        if let Some(node) = &spec.node {
            kubernetes["node"] = json!({ "name": node, "uid": node });
        }
        let claims: Value = json!({
            "aud": [spec.audience],
            "iss": spec.issuer,
            "sub": format!("system:serviceaccount:{}:{}", spec.namespace, spec.service_account),
            "iat": from,
            "nbf": from,
            "exp": until,
            "jti": format!("{from}-{}", spec.service_account),
            "kubernetes.io": kubernetes,
        });
        let header = Header { alg: Algorithm::ES256, kid: Some("testbed".to_owned()), ..Header::default() };
        encode(&header, &claims, &key).expect("sign a token")
    }
}

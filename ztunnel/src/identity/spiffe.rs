//! SPIFFE ids of the one form that the mesh uses: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A trust domain, for example `cluster.local`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrustDomain(Arc<str>);

/// The identity of a workload. One pointer: cheap to clone, to keep and to compare.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity(Arc<Parts>);

#[derive(PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Parts {
    /// The whole URI.
    uri: Box<str>,
    trust_domain: TrustDomain,
    /// Where the namespace ends in `uri`; it starts after `/ns/`.
    namespace_end: usize,
}

/// Why a text is not an identity.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an identity: {reason}, expected spiffe://<trust domain>/ns/<namespace>/sa/<service account>")]
pub struct ParseIdentityError {
    text: String,
    reason: &'static str,
}

impl TrustDomain {
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<Arc<str>> for TrustDomain {
    fn from(name: Arc<str>) -> Self {
        Self(name)
    }
}

impl Default for TrustDomain {
    /// `cluster.local`, Kubernetes' and the wire's default.
    fn default() -> Self {
        Self::new("cluster.local")
    }
}

impl Identity {
    pub fn new(trust_domain: &TrustDomain, namespace: &str, service_account: &str) -> Self {
        let uri = format!("{SCHEME}{trust_domain}/ns/{namespace}/sa/{service_account}").into_boxed_str();
        let namespace_end = SCHEME.len() + trust_domain.as_str().len() + "/ns/".len() + namespace.len();
        Self(Arc::new(Parts { uri, trust_domain: trust_domain.clone(), namespace_end }))
    }

    pub fn trust_domain(&self) -> &TrustDomain {
        &self.0.trust_domain
    }

    pub fn namespace(&self) -> &str {
        let start = SCHEME.len() + self.0.trust_domain.as_str().len() + "/ns/".len();
        &self.0.uri[start..self.0.namespace_end]
    }

    pub fn service_account(&self) -> &str {
        &self.0.uri[self.0.namespace_end + "/sa/".len()..]
    }

    /// `ns/<namespace>/sa/<service account>`.
    pub fn path(&self) -> &str {
        &self.0.uri[SCHEME.len() + self.0.trust_domain.as_str().len() + 1..]
    }

    /// The whole `spiffe://…`.
    pub fn as_str(&self) -> &str {
        &self.0.uri
    }

    /// The form that policies compare: without `spiffe://`.
    pub fn principal(&self) -> &str {
        &self.0.uri[SCHEME.len()..]
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| ParseIdentityError { text: text.chars().take(256).collect(), reason };
        // SPIFFE-ID §2.3.
        if text.len() > 2048 {
            return Err(fail("longer than 2048 bytes"));
        }
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| fail("no spiffe:// in front"))?;
        let parts: Vec<&str> = rest.split('/').collect();
        let [trust_domain, "ns", namespace, "sa", service_account] = parts[..] else {
            return Err(fail("wrong path"));
        };
        if [trust_domain, namespace, service_account].iter().any(|p| p.is_empty()) {
            return Err(fail("an empty part"));
        }
        if !rest.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._/".contains(&b)) {
            return Err(fail("a character that is not allowed"));
        }
        Ok(Self::new(&TrustDomain::new(trust_domain), namespace, service_account))
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for TrustDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

const SCHEME: &str = "spiffe://";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_reads_what_it_writes() {
        let text = "spiffe://cluster.local/ns/shop/sa/cart";
        let id: Identity = text.parse().unwrap();
        assert_eq!(
            (id.trust_domain().as_str(), id.namespace(), id.service_account()),
            ("cluster.local", "shop", "cart")
        );
        assert_eq!(id.to_string(), text);
        assert_eq!((id.principal(), id.path()), ("cluster.local/ns/shop/sa/cart", "ns/shop/sa/cart"));
    }

    #[test]
    fn any_other_form_is_refused() {
        for text in [
            "",
            "cluster.local/ns/a/sa/b",
            "spiffe://cluster.local/ns/a",
            "spiffe://cluster.local/ns/a/sa/b/c",
            "spiffe://cluster.local/ns//sa/b",
            "spiffe:///ns/a/sa/b",
            "spiffe://cluster.local/sa/a/ns/b",
            "spiffe://cluster.local/ns/a/sa/b?x",
            "spiffe://cluster.local/ns/a/sa/b\n",
        ] {
            assert!(text.parse::<Identity>().is_err(), "{text:?}");
        }
        let long = |length| format!("spiffe://cluster.local/ns/a/sa/{}", "b".repeat(length));
        let most = 2048 - long(0).len();
        assert!(long(most).parse::<Identity>().is_ok());
        let error = long(most + 1).parse::<Identity>().unwrap_err().to_string();
        assert!(error.contains("2048") && error.len() < 500, "{error}");
    }
}

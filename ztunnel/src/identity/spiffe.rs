//! SPIFFE ids of the one form that the mesh uses: `spiffe://<trust domain>/ns/<namespace>/sa/<service account>`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// A trust domain, for example `cluster.local`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TrustDomain(Arc<str>);

/// The identity of a workload. Cheap to clone.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    trust_domain: TrustDomain,
    namespace: Arc<str>,
    service_account: Arc<str>,
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

impl Default for TrustDomain {
    /// `cluster.local`, Kubernetes' and the wire's default.
    fn default() -> Self {
        Self::new("cluster.local")
    }
}

impl Identity {
    pub fn new(trust_domain: &TrustDomain, namespace: &str, service_account: &str) -> Self {
        Self {
            trust_domain: trust_domain.clone(),
            namespace: namespace.into(),
            service_account: service_account.into(),
        }
    }

    pub fn trust_domain(&self) -> &TrustDomain {
        &self.trust_domain
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn service_account(&self) -> &str {
        &self.service_account
    }
}

impl FromStr for Identity {
    type Err = ParseIdentityError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = |reason| ParseIdentityError { text: text.chars().take(256).collect(), reason };
        let rest = text.strip_prefix("spiffe://").ok_or_else(|| fail("no spiffe:// in front"))?;
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
        write!(f, "spiffe://{}/ns/{}/sa/{}", self.trust_domain.0, self.namespace, self.service_account)
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
    }
}

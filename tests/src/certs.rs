//! Certificates for peers that are not our processes: of the mesh's own authority, of a foreign one, expired, with
//! other names.

use std::fs;
use std::path::Path;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType, date_time_ymd,
};

/// A certificate authority.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub root_pem: String,
}

/// A certificate with its key.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// Leaf first.
    pub chain_pem: String,
    pub key_pem: String,
}

impl Authority {
    /// One that the mesh does not know.
    pub fn foreign() -> Self {
        let key = KeyPair::generate().expect("make a P-256 key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::OrganizationName, "foreign");
        let root = params.self_signed(&key).expect("sign a root");
        Self { root_pem: root.pem(), issuer: Issuer::new(params, key) }
    }

    /// The mesh's own, from the files of the control plane.
    #[track_caller]
    pub(crate) fn load(dir: &Path) -> Self {
        let (mut key, mut cert) = (None, None);
        for entry in fs::read_dir(dir).unwrap_or_else(|e| panic!("read {}: {e}", dir.display())).flatten() {
            let Ok(text) = fs::read_to_string(entry.path()) else { continue };
            if text.contains("PRIVATE KEY") {
                key = Some(KeyPair::from_pem(&text).unwrap_or_else(|e| panic!("{}: {e}", entry.path().display())));
            } else if text.contains("BEGIN CERTIFICATE") {
                cert = Some(text);
            }
        }
        let root_pem = cert.unwrap_or_else(|| panic!("no certificate in {}", dir.display()));
        let key = key.unwrap_or_else(|| panic!("no key in {}", dir.display()));
        let issuer = Issuer::from_ca_cert_pem(&root_pem, key).expect("the authority's certificate can be read");
        Self { issuer, root_pem }
    }

    /// A certificate as the control plane issues them, for any identity.
    pub fn issue(&self, identity: &str) -> Leaf {
        self.issue_with(identity, |_| {})
    }

    /// One that ended in the year 2000.
    pub fn issue_expired(&self, identity: &str) -> Leaf {
        self.issue_with(identity, |params| {
            params.not_before = date_time_ymd(1999, 1, 1);
            params.not_after = date_time_ymd(2000, 1, 1);
        })
    }

    /// One with particulars.
    pub fn issue_with(&self, identity: &str, change: impl FnOnce(&mut CertificateParams)) -> Leaf {
        let key = KeyPair::generate().expect("make a P-256 key");
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.subject_alt_names = vec![SanType::URI(identity.try_into().expect("an identity is ASCII"))];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyEncipherment];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let cert = params.signed_by(&key, &self.issuer).expect("sign a leaf");
        Leaf { chain_pem: cert.pem(), key_pem: key.serialize_pem() }
    }
}

//! Certificates for peers that are not our processes: of the mesh's own authority, of a foreign one, expired, with
//! other names.

use std::fs;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertificateSigningRequestParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
    date_time_ymd,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// A certificate authority.
#[derive(Debug)]
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    /// Its own certificate.
    pub root_pem: String,
}

fn authority(name: &str) -> (CertificateParams, KeyPair) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    (params, KeyPair::generate().expect("make a P-256 key"))
}

/// A certificate with its key.
#[derive(Debug, Clone)]
pub struct Leaf {
    /// Leaf first.
    pub chain_pem: String,
    pub key_pem: String,
    /// Big-endian.
    pub serial: Vec<u8>,
}

impl Authority {
    /// One that the mesh does not know.
    pub fn foreign() -> Self {
        Self::root("foreign")
    }

    /// A root.
    pub fn root(name: &str) -> Self {
        let (params, key) = authority(name);
        let root = params.self_signed(&key).expect("sign a root");
        Self { root_pem: root.pem(), issuer: Issuer::new(params, key) }
    }

    /// An authority below this one.
    pub fn below(&self, name: &str) -> Self {
        let (params, key) = authority(name);
        let cert = params.signed_by(&key, &self.issuer).expect("sign an intermediate");
        Self { root_pem: cert.pem(), issuer: Issuer::new(params, key) }
    }

    /// Writes the files of a plugged-in authority directly below the first of the roots, one after the other.
    #[track_caller]
    pub fn plug_into(&self, dir: &Path, roots: &[&Self]) {
        let roots: String = roots.iter().map(|root| root.root_pem.as_str()).collect();
        let key = self.issuer.key().serialize_pem();
        fs::create_dir_all(dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
        for (file, text) in [
            ("ca-key.pem", &key),
            ("ca-cert.pem", &self.root_pem),
            ("cert-chain.pem", &self.root_pem),
            ("root-cert.pem", &roots),
        ] {
            fs::write(dir.join(file), text).unwrap_or_else(|e| panic!("write {}: {e}", dir.join(file).display()));
        }
    }

    /// The mesh's own root, from the files of the control plane: the one that signs now.
    #[track_caller]
    pub(crate) fn load(dir: &Path) -> Self {
        let read = |file: &str| {
            let path = dir.join(file);
            fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
        };
        let key = KeyPair::from_pem(&read("root-key.pem")).expect("the authority's key can be read");
        let public = key.public_key_raw();
        let roots = read("root-cert.pem");
        let is_ours = |root: &&CertificateDer<'_>| root.windows(public.len()).any(|bytes| bytes == public);
        let all: Vec<_> = CertificateDer::pem_slice_iter(roots.as_bytes()).map_while(Result::ok).collect();
        let root = all.iter().find(is_ours).expect("one of the roots has the authority's key");
        let number = all.iter().position(|one| one == root).expect("it is one of them");
        let root_pem = roots.split_inclusive("-----END CERTIFICATE-----\n").nth(number).expect("a root").to_owned();
        let issuer = Issuer::from_ca_cert_der(root, key).expect("the authority's certificate can be read");
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
        let serial = rand_serial();
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        change(&mut params);
        let cert = params.signed_by(&key, &self.issuer).expect("sign a leaf");
        Leaf { chain_pem: cert.pem(), key_pem: key.serialize_pem(), serial }
    }

    /// Signs the key of a request for an identity; a certificate in PEM.
    pub(crate) fn sign_request(&self, csr: &str, identity: &str, begin: SystemTime, end: SystemTime) -> String {
        let request = CertificateSigningRequestParams::from_pem(csr).expect("a request that can be read");
        let params = leaf_params(identity, begin, end);
        params.signed_by(&request.public_key, &self.issuer).expect("sign a leaf").pem()
    }

    /// The same for a key that nobody has asked with.
    pub(crate) fn sign_other_key(&self, identity: &str, begin: SystemTime, end: SystemTime) -> String {
        let key = KeyPair::generate().expect("make a P-256 key");
        leaf_params(identity, begin, end).signed_by(&key, &self.issuer).expect("sign a leaf").pem()
    }

    /// A revocation list (PEM) with the serial numbers of these leaves, that ends in an hour.
    pub fn revoke(&self, leaves: &[&Leaf]) -> String {
        let now = SystemTime::now();
        let revoked = |leaf: &&Leaf| RevokedCertParams {
            serial_number: SerialNumber::from_slice(&leaf.serial),
            revocation_time: now.into(),
            reason_code: None,
            invalidity_date: None,
        };
        let params = CertificateRevocationListParams {
            this_update: now.into(),
            next_update: (now + Duration::from_secs(3600)).into(),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: leaves.iter().map(revoked).collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        params.signed_by(&self.issuer).expect("sign a list").pem().expect("write a list")
    }
}

/// 16 bytes, positive.
fn rand_serial() -> Vec<u8> {
    let mut serial = vec![0; 16];
    aws_lc_rs::rand::fill(&mut serial).expect("randomness");
    serial[0] = serial[0] & 0x3f | 0x40;
    serial
}

fn leaf_params(identity: &str, begin: SystemTime, end: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.subject_alt_names = vec![SanType::URI(identity.try_into().expect("an identity is ASCII"))];
    params.not_before = begin.into();
    params.not_after = end.into();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params
}

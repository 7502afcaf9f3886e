//! A certificate authority for tests of this crate.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::Stream;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose, PublicKeyData, SanType,
};
use rustls::pki_types::CertificateDer;
use tokio::io::DuplexStream;
use tokio::net::TcpListener;

use super::{Certificate, Identity, PrivateKey, Trust, TrustSettings};

pub(crate) struct TestCa(CertifiedIssuer<'static, KeyPair>);

/// What a leaf is like. Times are relative to now.
#[derive(Debug, Clone)]
pub(crate) struct Leaf {
    pub names: Vec<String>,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

impl Leaf {
    pub(crate) fn of(identity: &Identity) -> Self {
        let now = SystemTime::now();
        Self {
            names: vec![identity.to_string()],
            not_before: now - Duration::from_secs(120),
            not_after: now + Duration::from_secs(3600),
        }
    }

    pub(crate) fn lives(self, lifetime: Duration) -> Self {
        Self { not_after: SystemTime::now() + lifetime, ..self }
    }

    fn params(&self) -> CertificateParams {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.serial_number = Some(crate::random::next_u64().into());
        params.subject_alt_names = self.names.iter().map(|n| SanType::URI(n.as_str().try_into().unwrap())).collect();
        params.not_before = self.not_before.into();
        params.not_after = self.not_after.into();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params
    }
}

impl TestCa {
    pub(crate) fn new(name: &str) -> Self {
        Self(CertifiedIssuer::self_signed(ca_params(name), KeyPair::generate().unwrap()).unwrap())
    }

    /// One that ended or will end then.
    pub(crate) fn ending(name: &str, end: SystemTime) -> Self {
        let mut params = ca_params(name);
        params.not_after = end.into();
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    /// An authority below this one, and its certificate.
    pub(crate) fn intermediate(&self, name: &str) -> Self {
        Self(CertifiedIssuer::signed_by(ca_params(name), KeyPair::generate().unwrap(), &self.0).unwrap())
    }

    pub(crate) fn root_pem(&self) -> String {
        self.0.pem()
    }

    pub(crate) fn root_der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// Trust in this authority alone.
    pub(crate) fn trust(&self, identity: &Identity, settings: TrustSettings) -> Trust {
        let trust = Trust::new(settings);
        trust.learn(identity.trust_domain(), &[self.root_der()], tokio::time::Instant::now(), false);
        trust
    }

    pub(crate) fn certificate(&self, identity: &Identity) -> Arc<Certificate> {
        self.certificate_with(identity, self.trust(identity, TrustSettings::default()))
    }

    pub(crate) fn certificate_with(&self, identity: &Identity, trust: Trust) -> Arc<Certificate> {
        Arc::new(self.try_certificate(identity, &Leaf::of(identity), trust).unwrap())
    }

    pub(crate) fn try_certificate(
        &self,
        identity: &Identity,
        leaf: &Leaf,
        trust: Trust,
    ) -> Result<Certificate, super::CertificateError> {
        self.certificate_with_roots(identity, leaf, vec![self.root_der()], trust)
    }

    /// One that came with these roots.
    pub(crate) fn certificate_with_roots(
        &self,
        identity: &Identity,
        leaf: &Leaf,
        roots: Vec<CertificateDer<'static>>,
        trust: Trust,
    ) -> Result<Certificate, super::CertificateError> {
        let key = PrivateKey::generate().unwrap();
        let chain = vec![self.sign(leaf, &key)];
        Certificate::new(identity, Arc::new(key), chain, roots, trust)
    }

    pub(crate) fn sign(&self, leaf: &Leaf, key: &impl PublicKeyData) -> CertificateDer<'static> {
        leaf.params().signed_by(key, &self.0).unwrap().der().clone()
    }

    /// For one use only.
    pub(crate) fn sign_for(
        &self,
        leaf: &Leaf,
        key: &impl PublicKeyData,
        usage: ExtendedKeyUsagePurpose,
    ) -> CertificateDer<'static> {
        let mut params = leaf.params();
        params.extended_key_usages = vec![usage];
        params.signed_by(key, &self.0).unwrap().der().clone()
    }

    /// As the certificate service does: only the public key of the request counts.
    pub(crate) fn sign_request(&self, request: &str, leaf: &Leaf) -> String {
        let request = CertificateSigningRequestParams::from_pem(request).unwrap();
        leaf.params().signed_by(&request.public_key, &self.0).unwrap().pem()
    }

    /// A certificate for a host name, with its key in PKCS#8.
    pub(crate) fn server(&self, name: &str) -> (CertificateDer<'static>, Vec<u8>) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        (params.signed_by(&key, &self.0).unwrap().der().clone(), key.serialize_der())
    }
}

/// A revocation list. Times are relative to now.
impl TestCa {
    pub(crate) fn crl(&self, revoked: &[&CertificateDer<'_>], made: SystemTime, ends: SystemTime) -> Vec<u8> {
        let entry = |certificate: &&CertificateDer<'_>| {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate).unwrap();
            rcgen::RevokedCertParams {
                serial_number: rcgen::SerialNumber::from_slice(parsed.raw_serial()),
                revocation_time: made.into(),
                reason_code: None,
                invalidity_date: None,
            }
        };
        let params = rcgen::CertificateRevocationListParams {
            this_update: made.into(),
            next_update: ends.into(),
            crl_number: rcgen::SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: revoked.iter().map(entry).collect(),
            key_identifier_method: rcgen::KeyIdMethod::Sha256,
        };
        params.signed_by(&self.0).unwrap().der().to_vec()
    }
}

/// Accepts TLS connections with a certificate of `ca` for `name`; the plain ends go to a gRPC server.
pub(crate) fn serve_tls(
    listener: TcpListener,
    ca: &TestCa,
    name: &str,
) -> impl Stream<Item = std::io::Result<DuplexStream>> + use<> {
    let (certificate, key) = ca.server(name);
    let mut config = rustls::ServerConfig::builder_with_provider(super::tls::provider())
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], rustls::pki_types::PrivateKeyDer::Pkcs8(key.into()))
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let (sender, plain) = tokio::sync::mpsc::channel(8);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let (mut near, far) = tokio::io::duplex(64 * 1024);
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut stream, &mut near).await });
            if sender.send(Ok(far)).await.is_err() {
                return;
            }
        }
    });
    tokio_stream::wrappers::ReceiverStream::new(plain)
}

fn ca_params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

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

use super::{Certificate, Identity, PrivateKey, TrustSettings};

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

    pub(crate) fn certificate(&self, identity: &Identity) -> Arc<Certificate> {
        self.certificate_with(identity, TrustSettings::default())
    }

    pub(crate) fn certificate_with(&self, identity: &Identity, settings: TrustSettings) -> Arc<Certificate> {
        Arc::new(self.try_certificate(identity, &Leaf::of(identity), settings).unwrap())
    }

    pub(crate) fn try_certificate(
        &self,
        identity: &Identity,
        leaf: &Leaf,
        settings: TrustSettings,
    ) -> Result<Certificate, super::CertificateError> {
        let key = PrivateKey::generate().unwrap();
        let chain = vec![self.sign(leaf, &key)];
        Certificate::new(identity, Arc::new(key), chain, vec![self.root_der()], Arc::new(settings))
    }

    pub(crate) fn sign(&self, leaf: &Leaf, key: &impl PublicKeyData) -> CertificateDer<'static> {
        leaf.params().signed_by(key, &self.0).unwrap().der().clone()
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

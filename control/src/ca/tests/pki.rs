//! Authorities that operators bring along, right and wrong ones, and workloads that shake hands with what they sign.

use std::io::{Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use aws_lc_rs::encoding::AsDer;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, KeyUsagePurpose, SigningKey as _,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{ServerName, UnixTime};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, ServerConfig, SignatureScheme};
use ztunnel::identity::{base64, certificates_from_pem};

use super::*;

/// An authority whose key is known.
pub struct Outside(CertifiedIssuer<'static, KeyPair>);

impl Outside {
    pub fn root(name: &str) -> Self {
        Self::root_with(name, |_| {})
    }

    pub fn root_with(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = params(name);
        change(&mut params);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub fn below(&self, name: &str) -> Self {
        self.below_with(name, |_| {})
    }

    pub fn below_with(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        self.below_with_key(name, KeyPair::generate().unwrap(), change)
    }

    pub fn below_with_key(&self, name: &str, key: KeyPair, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let mut params = params(name);
        change(&mut params);
        Self(CertifiedIssuer::signed_by(params, key, &self.0).unwrap())
    }

    pub fn pem(&self) -> String {
        self.0.pem()
    }

    pub fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    /// PKCS#8.
    pub fn key_pem(&self) -> String {
        self.0.key().serialize_pem()
    }

    /// Puts it in place as a plugged-in authority.
    pub fn plug_into(&self, dir: &Path, chain: &[&Self], roots: &[&Self]) {
        let text = |all: &[&Self]| all.iter().map(|one| one.pem()).collect::<String>();
        fs::create_dir_all(dir).unwrap();
        put(dir, "ca-key.pem", &self.key_pem());
        put(dir, "ca-cert.pem", &self.pem());
        put(dir, "cert-chain.pem", &text(chain));
        put(dir, "root-cert.pem", &text(roots));
    }

    /// Puts it in place as an own root, the further ones as trusted.
    pub fn put_as_own_root(&self, dir: &Path, further: &[CertificateDer<'_>]) {
        let further: String = further.iter().map(|der| pem("CERTIFICATE", der)).collect();
        put(dir, "root-cert.pem", &(self.pem() + &further));
        put(dir, "root-key.pem", &self.key_pem());
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

/// Writes a file as an operator does: in place, readable by the owner only.
pub fn put(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    let mut file = fs::OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(&path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

pub fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

pub fn pem(label: &str, der: &[u8]) -> String {
    let body = base64(der);
    let lines: String = body.as_bytes().chunks(64).map(|l| String::from_utf8(l.to_vec()).unwrap() + "\n").collect();
    format!("-----BEGIN {label}-----\n{lines}-----END {label}-----\n")
}

/// The forms in which a key of each kind comes, each with the key itself.
pub fn keys_of_all_forms() -> Vec<(&'static str, KeyPair, String)> {
    let mut all = Vec::new();
    for (name, algorithm, signing) in [
        ("P-256", &rcgen::PKCS_ECDSA_P256_SHA256, &aws_lc_rs::signature::ECDSA_P256_SHA256_ASN1_SIGNING),
        ("P-384", &rcgen::PKCS_ECDSA_P384_SHA384, &aws_lc_rs::signature::ECDSA_P384_SHA384_ASN1_SIGNING),
    ] {
        let key = KeyPair::generate_for(algorithm).unwrap();
        let pair = aws_lc_rs::signature::EcdsaKeyPair::from_pkcs8(signing, key.serialized_der()).unwrap();
        let sec1 = pair.private_key().as_der().unwrap();
        // As `openssl ecparam -genkey` writes it.
        let text = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n".to_owned();
        all.push((name, KeyPair::from_pem(&key.serialize_pem()).unwrap(), key.serialize_pem()));
        all.push((name, key, text + &pem("EC PRIVATE KEY", sec1.as_ref())));
    }
    let key = KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, rcgen::RsaKeySize::_2048).unwrap();
    // PKCS#8 of an RSA key has 26 bytes before the key of PKCS#1.
    let pkcs1 = key.serialized_der()[26..].to_vec();
    all.push(("RSA", KeyPair::from_pem(&key.serialize_pem()).unwrap(), key.serialize_pem()));
    all.push(("RSA", key, pem("RSA PRIVATE KEY", &pkcs1)));
    assert!(all.iter().all(|(_, key, _)| key.sign(b"it works").is_ok()));
    all
}

/// A workload with a certificate, as a proxy holds it.
#[derive(Debug)]
pub struct Workload {
    key: Arc<CertifiedKey>,
    roots: Arc<RootCertStore>,
}

impl Workload {
    /// Has a certificate signed now.
    pub fn new(ca: &Ca) -> Self {
        let key = PrivateKey::generate().unwrap();
        let csr = key.certificate_request(&identity()).unwrap();
        let issued = ca.sign(&identity(), &csr, Duration::from_secs(3600)).unwrap();
        let chain = issued.chain.iter().flat_map(|part| certificates_from_pem(part.as_bytes()).unwrap()).collect();
        let mut roots = RootCertStore::empty();
        for root in certificates_from_pem(issued.roots.as_bytes()).unwrap() {
            roots.add(root).unwrap();
        }
        Self { key: Arc::new(CertifiedKey::new(chain, Arc::new(key))), roots: Arc::new(roots) }
    }

    pub fn trusts(&self, root: &CertificateDer<'_>) -> bool {
        let mut store = RootCertStore::empty();
        store.add(root.clone().into_owned()).unwrap();
        self.roots.roots.contains(&store.roots[0])
    }

    /// A full handshake with mutual authentication, and a byte each way.
    pub fn connects_to(&self, server: &Self) -> Result<(), String> {
        let mut server_side = rustls::ServerConnection::new(Arc::new(server.server())).unwrap();
        let name = ServerName::try_from("mesh").unwrap();
        let mut client_side = rustls::ClientConnection::new(Arc::new(self.client()), name).unwrap();
        client_side.writer().write_all(b"c").unwrap();
        server_side.writer().write_all(b"s").unwrap();
        let (mut to_server, mut to_client) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            client_side.write_tls(&mut to_server).unwrap();
            if !to_server.is_empty() {
                server_side.read_tls(&mut to_server.as_slice()).unwrap();
                to_server.clear();
            }
            server_side.process_new_packets().map_err(|e| format!("the server refuses: {e}"))?;
            server_side.write_tls(&mut to_client).unwrap();
            if !to_client.is_empty() {
                client_side.read_tls(&mut to_client.as_slice()).unwrap();
                to_client.clear();
            }
            client_side.process_new_packets().map_err(|e| format!("the client refuses: {e}"))?;
        }
        let mut byte = [0];
        server_side.reader().read_exact(&mut byte).map_err(|e| format!("nothing came to the server: {e}"))?;
        assert_eq!(byte, *b"c");
        client_side.reader().read_exact(&mut byte).map_err(|e| format!("nothing came to the client: {e}"))?;
        assert_eq!(byte, *b"s");
        Ok(())
    }

    fn server(&self) -> ServerConfig {
        let verifier = WebPkiClientVerifier::builder_with_provider(self.roots.clone(), provider()).build().unwrap();
        ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::new(SingleCertAndKey::from(self.key.clone())))
    }

    fn client(&self) -> ClientConfig {
        ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(ChainOnly(self.roots.clone())))
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(self.key.clone())))
    }
}

/// Every workload connects to every other.
#[track_caller]
pub fn all_connect(workloads: &[&Workload]) {
    for (i, client) in workloads.iter().enumerate() {
        for (j, server) in workloads.iter().enumerate() {
            client.connects_to(server).unwrap_or_else(|e| panic!("{i} to {j}: {e}"));
        }
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// Workloads have no host names.
#[derive(Debug)]
struct ChainOnly(Arc<RootCertStore>);

impl ServerCertVerifier for ChainOnly {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(leaf)?;
        rustls::client::verify_server_cert_signed_by_trust_anchor(&parsed, &self.0, intermediates, now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not offered".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = provider().signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, signature, &algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        provider().signature_verification_algorithms.supported_schemes()
    }
}

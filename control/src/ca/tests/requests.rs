//! Which requests are signed.

use rcgen::{CertificateParams, KeyPair, RsaKeySize};
use x509_parser::parse_x509_certificate;
use ztunnel::identity::{base64, certificates_from_pem};

use super::pki::pem;
use super::*;

fn from(key: &KeyPair) -> String {
    CertificateParams::default().serialize_request(key).unwrap().pem().unwrap()
}

#[test]
fn keys_that_are_in_use_are_signed_and_nothing_else_of_the_request_counts() {
    let dir = Dir::new("requests");
    let ca = dir.open().unwrap();
    let rsa = |size| KeyPair::generate_rsa_for(&rcgen::PKCS_RSA_SHA256, size).unwrap();
    for (kind, key) in [
        ("P-256", KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).unwrap()),
        ("P-384", KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap()),
        ("RSA 2048", rsa(RsaKeySize::_2048)),
        ("RSA 3072", rsa(RsaKeySize::_3072)),
    ] {
        let mut params = CertificateParams::new(vec!["evil.example".to_owned()]).unwrap();
        params.distinguished_name.push(rcgen::DnType::CommonName, "evil");
        let request = params.serialize_request(&key).unwrap().pem().unwrap();
        let issued = ca.sign(&identity(), &request, Duration::from_secs(60)).unwrap_or_else(|e| panic!("{kind}: {e}"));
        let leaf = certificates_from_pem(issued.chain[0].as_bytes()).unwrap();
        let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
        assert_eq!(leaf.public_key().subject_public_key.data, key.public_key_raw(), "{kind}");
        assert_eq!(leaf.subject().iter().count(), 0, "{kind}");
        assert!(!leaf.is_ca(), "{kind}");
        let names = &leaf.subject_alternative_name().unwrap().unwrap().value.general_names;
        assert_eq!(format!("{names:?}"), format!("[URI({:?})]", identity().to_string()), "{kind}");
    }
}

#[test]
fn requests_with_weak_keys_or_without_a_valid_signature_are_refused_for_their_reason() {
    let dir = Dir::new("refused-requests");
    let ca = dir.open().unwrap();
    let good = request();
    let (_, parsed) = x509_parser::pem::parse_x509_pem(good.as_bytes()).unwrap();
    let encode = |der: &[u8]| pem("CERTIFICATE REQUEST", der);
    // The signature is the end of the DER: changed, it holds no longer.
    let mut forged = parsed.contents.clone();
    *forged.last_mut().unwrap() ^= 1;
    let mut longer = parsed.contents.clone();
    longer.push(0);
    let p521 = from(&KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap());
    let ed25519 = from(&KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap());
    for (what, request, reason) in [
        ("empty", String::new(), "PKCS#10 in PEM"),
        ("text", "hello".into(), "PKCS#10 in PEM"),
        ("a certificate", ca.roots_pem().to_string(), "PKCS#10 in PEM"),
        ("garbage", encode(b"garbage"), "expected a PKCS#10"),
        ("base64 without end", format!("-----BEGIN CERTIFICATE REQUEST-----\n{}", base64(&forged)), "PKCS#10 in PEM"),
        ("a forged signature", encode(&forged), "its own signature does not hold"),
        ("trailing bytes", encode(&longer), "something follows"),
        ("P-521", p521, "P-256 or P-384"),
        ("Ed25519", ed25519, "P-256 or P-384"),
        ("RSA 1024", include_str!("requests/rsa-1024.pem").into(), "has 1024 bits"),
        ("RSA with exponent 3", include_str!("requests/exponent-3.pem").into(), "expected 65537"),
        ("SHA-1", include_str!("requests/sha-1.pem").into(), "signed with SHA-1"),
        ("huge", good.repeat(100), "at most 16384 are read"),
    ] {
        let error = ca.sign(&identity(), &request, Duration::from_secs(60)).map(|_| what).unwrap_err();
        assert!(matches!(error, CaError::Request(_)) && error.to_string().contains(reason), "{what}: {error}");
    }
}

proptest::proptest! {
    /// Whatever comes: never a panic, and never another key than the one that has signed.
    #[test]
    fn any_bytes_are_refused_with_a_reason(bytes: Vec<u8>, at in 0..400usize, bit in 0..8u32) {
        let refuse = |der: &[u8]| request::public_key(&pem("CERTIFICATE REQUEST", der)).map(|_| ());
        proptest::prop_assert!(refuse(&bytes).is_err());
        proptest::prop_assert!(request::public_key(&String::from_utf8_lossy(&bytes)).is_err());
        // One bit of a good request.
        let good = request();
        let (_, parsed) = x509_parser::pem::parse_x509_pem(good.as_bytes()).unwrap();
        let mut flipped = parsed.contents.clone();
        let at = at % flipped.len();
        flipped[at] ^= 1 << bit;
        // What is not signed itself, such as the signature's own header, may be odd.
        if let Ok(key) = request::public_key(&pem("CERTIFICATE REQUEST", &flipped)) {
            proptest::prop_assert_eq!(key, request::public_key(&good).unwrap(), "byte {}", at);
        }
    }
}

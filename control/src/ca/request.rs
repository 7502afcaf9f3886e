//! Requests for certificates (PKCS#10): untrusted bytes, of which nothing but the public key is taken.
//!
//! Must never take a key whose holder has not shown that he has the private one.

use rcgen::SubjectPublicKeyInfo;
use rustls::pki_types::CertificateSigningRequestDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::{OID_PKCS1_SHA1WITHRSA, OID_SHA1_WITH_RSA};
use x509_parser::prelude::FromDer;
use x509_parser::public_key::{PublicKey, RSAPublicKey};

/// The public key of a request (PEM) whose own signature holds. Names and extensions in it count for nothing: what is
/// signed comes from who asks.
pub(super) fn public_key(request: &str) -> Result<SubjectPublicKeyInfo, String> {
    if request.len() > MAX_REQUEST {
        return Err(format!("it has {} bytes, at most {MAX_REQUEST} are read", request.len()));
    }
    let der = CertificateSigningRequestDer::from_pem_slice(request.as_bytes())
        .map_err(|e| format!("expected a PKCS#10 in PEM: {e}"))?;
    let (rest, parsed) = X509CertificationRequest::from_der(&der).map_err(|e| format!("expected a PKCS#10: {e}"))?;
    if !rest.is_empty() {
        return Err("something follows the PKCS#10".into());
    }
    let info = &parsed.certification_request_info.subject_pki;
    let key = SubjectPublicKeyInfo::from_der(info.raw).map_err(|_| format!("its public key: {EXPECTED}"))?;
    let algorithm = rcgen::PublicKeyData::algorithm(&key);
    if [&rcgen::PKCS_RSA_SHA256, &rcgen::PKCS_RSA_SHA384, &rcgen::PKCS_RSA_SHA512].contains(&algorithm) {
        match info.parsed() {
            Ok(PublicKey::RSA(rsa)) => check_rsa(&rsa)?,
            _ => return Err("its RSA key cannot be read".into()),
        }
    } else if ![&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384].contains(&algorithm) {
        return Err(format!("its public key: {EXPECTED}"));
    }
    let signed_with = &parsed.signature_algorithm.algorithm;
    if [&OID_PKCS1_SHA1WITHRSA, &OID_SHA1_WITH_RSA].contains(&signed_with) {
        return Err("it is signed with SHA-1".into());
    }
    parsed.verify_signature().map_err(|_| "its own signature does not hold".to_owned())?;
    Ok(key)
}

/// Checked before anything is computed with it.
fn check_rsa(key: &RSAPublicKey<'_>) -> Result<(), String> {
    let bits = key.key_size();
    if !(2048..=4096).contains(&bits) {
        return Err(format!("its RSA key has {bits} bits: {EXPECTED}"));
    }
    match key.try_exponent() {
        Ok(exponent) if (65537..1 << 32).contains(&exponent) && exponent % 2 == 1 => Ok(()),
        _ => Err("its RSA key has an exponent that is not in use: expected 65537".into()),
    }
}

/// Bytes.
const MAX_REQUEST: usize = 16 * 1024;
const EXPECTED: &str = "expected ECDSA on P-256 or P-384, or RSA of 2048 to 4096 bits";

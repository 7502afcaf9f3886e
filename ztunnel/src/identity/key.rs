//! A workload's private key: made here, used for signing, never written anywhere.
//!
//! The key lives only inside the crypto library, which wipes it when it is dropped; there is no way to export it.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair};
use rustls::pki_types::{SubjectPublicKeyInfoDer, alg_id};
use rustls::sign::{Signer, SigningKey, public_key_to_spki};
use rustls::{SignatureAlgorithm, SignatureScheme};

use super::Identity;

/// An ECDSA key on P-256.
#[derive(Clone)]
pub struct PrivateKey(Arc<EcdsaKeyPair>);

/// The crypto library failed to make a key or a request.
#[derive(Debug, Clone, thiserror::Error)]
#[error("cannot make a {what}: {reason}")]
pub struct KeyError {
    what: &'static str,
    reason: String,
}

impl PrivateKey {
    pub fn generate() -> Result<Self, KeyError> {
        let pair = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING)
            .map_err(|e| KeyError { what: "P-256 key", reason: e.to_string() })?;
        Ok(Self(Arc::new(pair)))
    }

    /// A certificate request (PKCS#10 in PEM) with an empty subject and the identity as its only name.
    pub fn certificate_request(&self, identity: &Identity) -> Result<String, KeyError> {
        let fail = |e: rcgen::Error| KeyError { what: "certificate request", reason: e.to_string() };
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.subject_alt_names = vec![rcgen::SanType::URI(identity.as_str().try_into().map_err(fail)?)];
        params.serialize_request(self).and_then(|request| request.pem()).map_err(fail)
    }
}

impl rcgen::PublicKeyData for PrivateKey {
    fn der_bytes(&self) -> &[u8] {
        self.0.public_key().as_ref()
    }

    fn algorithm(&self) -> &'static rcgen::SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

impl rcgen::SigningKey for PrivateKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let signature = self.0.sign(&SystemRandom::new(), message).map_err(|_| rcgen::Error::RemoteKeyError)?;
        Ok(signature.as_ref().to_vec())
    }
}

impl SigningKey for PrivateKey {
    fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
        offered.contains(&SignatureScheme::ECDSA_NISTP256_SHA256).then(|| Box::new(self.clone()) as Box<dyn Signer>)
    }

    fn public_key(&self) -> Option<SubjectPublicKeyInfoDer<'_>> {
        Some(public_key_to_spki(&alg_id::ECDSA_P256, self.0.public_key()))
    }

    fn algorithm(&self) -> SignatureAlgorithm {
        SignatureAlgorithm::ECDSA
    }
}

impl Signer for PrivateKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rustls::Error> {
        let signature = self
            .0
            .sign(&SystemRandom::new(), message)
            .map_err(|_| rustls::Error::General("the crypto library failed to sign".into()))?;
        Ok(signature.as_ref().to_vec())
    }

    fn scheme(&self) -> SignatureScheme {
        SignatureScheme::ECDSA_NISTP256_SHA256
    }
}

impl fmt::Debug for PrivateKey {
    /// Says nothing about the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrivateKey")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use x509_parser::prelude::*;

    #[test]
    fn a_request_carries_only_the_identity_marked_critical_and_a_valid_signature() {
        let identity: Identity = "spiffe://cluster.local/ns/shop/sa/cart".parse().unwrap();
        let key = PrivateKey::generate().unwrap();
        let text = key.certificate_request(&identity).unwrap();
        let (_, pem) = parse_x509_pem(text.as_bytes()).unwrap();
        assert_eq!(pem.label, "CERTIFICATE REQUEST");
        let (_, request) = X509CertificationRequest::from_der(&pem.contents).unwrap();
        assert_eq!(request.certification_request_info.subject.iter().count(), 0);
        let names: Vec<_> = request
            .requested_extensions()
            .unwrap()
            .filter_map(|e| match e {
                ParsedExtension::SubjectAlternativeName(san) => Some(san.general_names.clone()),
                _ => None,
            })
            .flatten()
            .collect();
        assert_eq!(names, [GeneralName::URI(identity.as_str())]);
        // SEQUENCE { OID subjectAltName, BOOLEAN TRUE, ... }
        let critical_san = [0x06, 0x03, 0x55, 0x1d, 0x11, 0x01, 0x01, 0xff];
        assert!(pem.contents.windows(critical_san.len()).any(|w| w == critical_san));
        rcgen::CertificateSigningRequestParams::from_pem(&text).expect("the signature holds");
    }

    /// Looks through the memory of this process. What is looked for is held masked, so that it is not found itself.
    fn copies_in_memory(masked: &[u8], mask: u8) -> usize {
        use std::io::{Read, Seek, SeekFrom};
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mut memory = std::fs::File::open("/proc/self/mem").unwrap();
        let first = masked[0] ^ mask;
        let mut copies = 0;
        let mut chunk = vec![0u8; 1 << 20];
        for line in maps.lines().filter(|line| line.split_whitespace().nth(1).is_some_and(|p| p.starts_with("rw"))) {
            let range = line.split_whitespace().next().unwrap();
            let (from, to) = range.split_once('-').unwrap();
            let (mut at, to) = (u64::from_str_radix(from, 16).unwrap(), u64::from_str_radix(to, 16).unwrap());
            while at < to {
                let size = chunk.len().min((to - at) as usize);
                // A mapping may be gone by now, and what stands in our own buffer would be counted twice.
                let seen = memory.seek(SeekFrom::Start(at)).and_then(|_| memory.read(&mut chunk[..size]));
                let Ok(n @ 1..) = seen else { break };
                let own = chunk.as_ptr() as u64..chunk.as_ptr() as u64 + chunk.len() as u64;
                for start in 0..n.saturating_sub(masked.len() - 1) {
                    let here = chunk[start] == first
                        && chunk[start..].iter().zip(masked).all(|(byte, masked)| *byte == *masked ^ mask);
                    copies += usize::from(here && !own.contains(&(at + start as u64)));
                }
                // The next piece overlaps, so that nothing is missed between two.
                at += (n.saturating_sub(masked.len() - 1)).max(1) as u64;
            }
        }
        chunk.fill(0);
        copies
    }

    #[test]
    fn a_dropped_key_leaves_no_copy_in_memory() {
        use aws_lc_rs::encoding::{AsBigEndian, EcPrivateKeyBin};
        const MASK: u8 = 0xa5;
        let key = PrivateKey::generate().unwrap();
        let other_owner = key.clone();
        let mut scalar =
            AsBigEndian::<EcPrivateKeyBin<'_>>::as_be_bytes(&key.0.private_key()).unwrap().as_ref().to_vec();
        let masked: Vec<u8> = scalar.iter().map(|b| b ^ MASK).collect();
        let reversed: Vec<u8> = masked.iter().rev().copied().collect();
        zeroize::Zeroize::zeroize(&mut scalar);
        let copies = || copies_in_memory(&masked, MASK) + copies_in_memory(&reversed, MASK);
        assert!(copies() > 0, "the search finds a key that is there");
        drop(key);
        assert!(copies() > 0, "it lives as long as its last owner");
        drop(other_owner);
        assert_eq!(copies(), 0);
    }
}

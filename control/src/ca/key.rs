//! The authority's private key: read from PEM, used for signing, never shown.
//!
//! It lives inside the crypto library, which wipes it when it is dropped.

use std::fmt;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair, EcdsaSigningAlgorithm, KeyPair as _,
    RSA_PKCS1_SHA256, RsaKeyPair,
};
use rcgen::SignatureAlgorithm;
use rustls::pki_types::PrivateKeyDer;
use rustls::pki_types::pem::PemObject;
use x509_parser::certificate::X509Certificate;
use zeroize::{Zeroize, Zeroizing};
use ztunnel::identity::base64;

/// A private key that signs certificates.
pub(super) enum CaKey {
    Ecdsa(EcdsaKeyPair, &'static SignatureAlgorithm),
    Rsa(RsaKeyPair),
}

impl CaKey {
    /// A fresh one (ECDSA on P-256), and its file (PKCS#8 in PEM).
    pub fn generate() -> Result<(Self, Zeroizing<String>), String> {
        let fail = |_| "the crypto library cannot make a key".to_owned();
        let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_ASN1_SIGNING).map_err(fail)?;
        let pkcs8 = key.to_pkcs8v1().map_err(fail)?;
        let body = Zeroizing::new(base64(pkcs8.as_ref()));
        let mut text = Zeroizing::new(String::with_capacity(body.len() + 64));
        text.push_str("-----BEGIN PRIVATE KEY-----\n");
        for line in body.as_bytes().chunks(64) {
            // base64 is ASCII.
            text.extend(line.iter().map(|b| char::from(*b)));
            text.push('\n');
        }
        text.push_str("-----END PRIVATE KEY-----\n");
        Ok((Self::Ecdsa(key, &rcgen::PKCS_ECDSA_P256_SHA256), text))
    }

    /// From PEM: PKCS#8, PKCS#1 (RSA) or SEC 1 (EC). The first private key counts. The error says nothing of the content.
    pub fn from_pem(text: &[u8]) -> Result<Self, String> {
        if text.windows(ENCRYPTED.len()).any(|w| w == ENCRYPTED) {
            return Err("the key is encrypted: expected one without a password".into());
        }
        let mut der =
            PrivateKeyDer::from_pem_slice(text).map_err(|_| format!("it holds no private key: {EXPECTED}"))?;
        let key = match &der {
            PrivateKeyDer::Pkcs1(der) => rsa(RsaKeyPair::from_der(der.secret_pkcs1_der())),
            PrivateKeyDer::Sec1(der) => ecdsa(der.secret_sec1_der()),
            PrivateKeyDer::Pkcs8(der) => {
                let der = der.secret_pkcs8_der();
                ecdsa(der).or_else(|| rsa(RsaKeyPair::from_pkcs8(der)))
            }
            _ => None,
        };
        der.zeroize();
        key.ok_or_else(|| format!("the key cannot be used: {EXPECTED}"))
    }

    /// Whether a certificate is for this key.
    pub fn belongs_to(&self, certificate: &X509Certificate<'_>) -> bool {
        use rcgen::PublicKeyData as _;
        certificate.public_key().subject_public_key.data == self.der_bytes()
    }
}

fn ecdsa(der: &[u8]) -> Option<CaKey> {
    let curves: [(&'static EcdsaSigningAlgorithm, &'static SignatureAlgorithm); 2] = [
        (&ECDSA_P256_SHA256_ASN1_SIGNING, &rcgen::PKCS_ECDSA_P256_SHA256),
        (&ECDSA_P384_SHA384_ASN1_SIGNING, &rcgen::PKCS_ECDSA_P384_SHA384),
    ];
    curves
        .iter()
        .find_map(|(signing, named)| Some(CaKey::Ecdsa(EcdsaKeyPair::from_private_key_der(signing, der).ok()?, named)))
}

/// The library takes keys of 2048 to 8192 bits.
fn rsa(key: Result<RsaKeyPair, aws_lc_rs::error::KeyRejected>) -> Option<CaKey> {
    key.ok().map(CaKey::Rsa)
}

impl rcgen::PublicKeyData for CaKey {
    fn der_bytes(&self) -> &[u8] {
        match self {
            Self::Ecdsa(key, _) => key.public_key().as_ref(),
            Self::Rsa(key) => key.public_key().as_ref(),
        }
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        match self {
            Self::Ecdsa(_, algorithm) => algorithm,
            Self::Rsa(_) => &rcgen::PKCS_RSA_SHA256,
        }
    }
}

impl rcgen::SigningKey for CaKey {
    fn sign(&self, message: &[u8]) -> Result<Vec<u8>, rcgen::Error> {
        let random = SystemRandom::new();
        match self {
            Self::Ecdsa(key, _) => {
                let signature = key.sign(&random, message).map_err(|_| rcgen::Error::RemoteKeyError)?;
                Ok(signature.as_ref().to_vec())
            }
            Self::Rsa(key) => {
                let mut signature = vec![0; key.public_modulus_len()];
                key.sign(&RSA_PKCS1_SHA256, &random, message, &mut signature)
                    .map_err(|_| rcgen::Error::RemoteKeyError)?;
                Ok(signature)
            }
        }
    }
}

impl fmt::Debug for CaKey {
    /// Says nothing about the key but its kind.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ecdsa(..) => "ECDSA",
            Self::Rsa(_) => "RSA",
        })
    }
}

const ENCRYPTED: &[u8] = b"ENCRYPTED";
const EXPECTED: &str =
    "expected one in PEM (PKCS#8, PKCS#1 or SEC 1), ECDSA on P-256 or P-384, or RSA of 2048 to 8192 bits";

//! Certificates in the dump's form.

use serde::Serialize;

/// What an identity holds.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificatesDump {
    pub identity: String,
    /// `Available`, `Initializing` or `Unavailable: <reason>`.
    pub state: String,
    pub cert_chain: Vec<CertificateDump>,
    pub root_certs: Vec<CertificateDump>,
}

/// One certificate.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertificateDump {
    /// The PEM text in base64.
    pub pem: String,
    /// Decimal.
    pub serial_number: String,
    /// RFC 3339.
    pub valid_from: String,
    pub expiration_time: String,
}

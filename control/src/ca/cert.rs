//! A certificate of an authority, with what people want to know of it.

use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use serde::Serialize;
use x509_parser::certificate::X509Certificate;
use ztunnel::identity::{certificates_from_pem, describe, rfc3339};

/// An authority's certificate, readable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cert {
    pub der: CertificateDer<'static>,
    pub pem: String,
    /// Its subject.
    pub name: String,
    /// Decimal.
    pub serial: String,
    /// SHA-256 over all of it, in hex.
    pub fingerprint: String,
    pub not_before: SystemTime,
    pub not_after: SystemTime,
}

/// A certificate, for people and scripts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CertReport {
    pub name: String,
    /// Decimal.
    pub serial_number: String,
    /// SHA-256, in hex.
    pub fingerprint: String,
    pub not_before: String,
    pub not_after: String,
    /// Seconds; 0 when it is over.
    pub seconds_left: u64,
}

impl Cert {
    pub fn new(der: CertificateDer<'static>) -> Result<Self, String> {
        let info = describe(&der).map_err(|e| e.to_string())?;
        let name = parse(&der)?.subject().to_string();
        Ok(Self {
            pem: info.pem,
            serial: info.serial,
            name: if name.is_empty() { "(no name)".into() } else { name },
            fingerprint: fingerprint(&der),
            not_before: info.not_before,
            not_after: info.not_after,
            der,
        })
    }

    /// All of a file, each once. The error names the one that is wrong.
    pub fn all_from_pem(text: &[u8]) -> Result<Vec<Self>, String> {
        let mut all: Vec<Self> = Vec::new();
        let certificates = certificates_from_pem(text).map_err(|e| e.to_string())?;
        if certificates.len() > MAX_CERTIFICATES {
            let number = certificates.len();
            return Err(format!("it holds {number} certificates, at most {MAX_CERTIFICATES} are taken"));
        }
        for (index, der) in certificates.into_iter().enumerate() {
            let cert = Self::new(der).map_err(|e| format!("certificate number {} in it: {e}", index + 1))?;
            if !all.contains(&cert) {
                all.push(cert);
            }
        }
        Ok(all)
    }

    pub fn parsed(&self) -> Result<X509Certificate<'_>, String> {
        parse(&self.der)
    }

    /// What is wrong with the time, if something is.
    pub fn check_time(&self, now: SystemTime) -> Result<(), String> {
        let (name, at) = (&self.name, rfc3339(now));
        if now < self.not_before {
            return Err(format!("{name} begins at {}, and it is {at} here", rfc3339(self.not_before)));
        }
        if now >= self.not_after {
            return Err(format!("{name} ended at {}, and it is {at} here", rfc3339(self.not_after)));
        }
        Ok(())
    }

    pub fn report(&self, now: SystemTime) -> CertReport {
        CertReport {
            name: self.name.clone(),
            serial_number: self.serial.clone(),
            fingerprint: self.fingerprint.clone(),
            not_before: rfc3339(self.not_before),
            not_after: rfc3339(self.not_after),
            seconds_left: self.not_after.duration_since(now).unwrap_or_default().as_secs(),
        }
    }
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], parsed)) => Ok(parsed),
        Ok(_) => Err("something follows the certificate".into()),
        Err(e) => Err(format!("it cannot be read: {e}")),
    }
}

fn fingerprint(der: &[u8]) -> String {
    hex(aws_lc_rs::digest::digest(&aws_lc_rs::digest::SHA256, der).as_ref())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const MAX_CERTIFICATES: usize = 50;

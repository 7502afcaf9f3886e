//! The authority's folder: which files make an authority, in which of two layouts.
//!
//! A root of its own: `root-key.pem` and `root-cert.pem`, which holds all trusted roots; the one that the key belongs to
//! signs. Plugged in (Istio's `cacerts`): `ca-key.pem`, `ca-cert.pem`, `cert-chain.pem` and `root-cert.pem`.
//!
//! Must never take a set of files of which one does not fit the others: it may be half of a change.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rcgen::{BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyUsagePurpose};
use serde::Serialize;
use zeroize::Zeroizing;
use ztunnel::identity::Identity;

use super::CaError;
use super::authority::{Authority, Fault, Names, serial};
use super::cert::Cert;
use super::files::{Guard, check_folder, lock, own_user, read, read_if_there, write_as};
use super::key::CaKey;

/// What the folder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Layout {
    /// A root that control has made, with its key.
    OwnRoot,
    /// Keys from outside, usually an intermediate's.
    PlugIn,
}

/// The files, as they are.
pub(super) struct Raw {
    pub layout: Layout,
    key: Zeroizing<Vec<u8>>,
    /// Of a plug-in.
    cert: Vec<u8>,
    chain: Vec<u8>,
    roots: Vec<u8>,
}

/// The files, when they fit.
#[derive(Debug)]
pub(super) struct Found {
    pub layout: Layout,
    pub authority: Arc<Authority>,
    /// All of `root-cert.pem` that have not ended.
    pub roots: Vec<Cert>,
}

/// Reads the folder. `owner` is who must own what is secret.
pub(super) fn look(dir: &Path, owner: u32) -> Result<Raw, CaError> {
    let there = |names: &[&str]| names.iter().any(|name| dir.join(name).exists());
    let layout = match (there(&[ROOT_KEY]), there(&[CA_KEY, CA_CERT, CHAIN])) {
        (true, true) => {
            let reason =
                format!("it holds {ROOT_KEY} and files of a plugged-in authority ({CA_KEY}): expected one of both");
            return Err(CaError::Unusable { path: dir.to_owned(), reason });
        }
        (_, true) => Layout::PlugIn,
        (_, false) => Layout::OwnRoot,
    };
    match layout {
        Layout::OwnRoot => {
            check_folder(dir, owner)?;
            let key = read(&dir.join(ROOT_KEY), Guard::secret(owner))?;
            let roots = read(&dir.join(ROOTS), Guard::public(owner))?.to_vec();
            Ok(Raw { layout, key, cert: Vec::new(), chain: Vec::new(), roots })
        }
        Layout::PlugIn => {
            let guard = Guard::public(owner);
            let text = |name: &str| read(&dir.join(name), guard).map(|text| text.to_vec());
            Ok(Raw {
                layout,
                key: read(&dir.join(CA_KEY), guard)?,
                cert: text(CA_CERT)?,
                chain: read_if_there(&dir.join(CHAIN), guard)?.map(|text| text.to_vec()).unwrap_or_default(),
                roots: text(ROOTS)?,
            })
        }
    }
}

impl Raw {
    /// Tells one set of files from another.
    pub fn stamp(&self) -> [u8; 32] {
        let mut hash = aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256);
        for part in [&self.key[..], &self.cert, &self.chain, &self.roots] {
            hash.update(&(part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let mut stamp = [0; 32];
        stamp.copy_from_slice(hash.finish().as_ref());
        stamp
    }

    /// Checks that the files fit each other, and that peers will take what is signed with them.
    pub fn verify(&self, dir: &Path, probe: &Identity, now: SystemTime) -> Result<Found, CaError> {
        let found = match self.layout {
            Layout::OwnRoot => self.own_root(probe, now),
            Layout::PlugIn => self.plug_in(probe, now),
        };
        found.map_err(|Fault { file, reason }| CaError::Unusable { path: dir.join(file), reason })
    }

    fn own_root(&self, probe: &Identity, now: SystemTime) -> Result<Found, Fault> {
        let (key, roots) = (self.key(ROOT_KEY)?, self.roots()?);
        let Some(signer) = roots.iter().find(|root| belongs(&key, root)).cloned() else {
            let reason = format!("it is the key of none of the certificates in {ROOTS}");
            return Err(Fault { file: ROOT_KEY, reason });
        };
        let names = Names { key: ROOT_KEY, cert: ROOTS, chain: ROOTS, roots: ROOTS };
        let authority = Authority::new(key, signer, &[], &roots, names, probe, now)?;
        Ok(Found::new(self.layout, authority, roots, now))
    }

    fn plug_in(&self, probe: &Identity, now: SystemTime) -> Result<Found, Fault> {
        let (key, roots) = (self.key(CA_KEY)?, self.roots()?);
        let mut chain = certs(CA_CERT, &self.cert)?;
        // Never empty.
        let signer = chain.remove(0);
        if !self.chain.trim_ascii().is_empty() {
            chain.extend(certs(CHAIN, &self.chain)?);
        }
        let names = Names { key: CA_KEY, cert: CA_CERT, chain: CHAIN, roots: ROOTS };
        let authority = Authority::new(key, signer, &chain, &roots, names, probe, now)?;
        Ok(Found::new(self.layout, authority, roots, now))
    }

    fn key(&self, file: &'static str) -> Result<CaKey, Fault> {
        CaKey::from_pem(&self.key).map_err(|reason| Fault { file, reason })
    }

    fn roots(&self) -> Result<Vec<Cert>, Fault> {
        let roots = certs(ROOTS, &self.roots)?;
        for root in &roots {
            let is_ca = root.parsed().is_ok_and(|parsed| parsed.is_ca());
            if !is_ca {
                let reason = format!("{} is not the certificate of an authority", root.name);
                return Err(Fault { file: ROOTS, reason });
            }
        }
        Ok(roots)
    }
}

impl Found {
    fn new(layout: Layout, authority: Authority, roots: Vec<Cert>, now: SystemTime) -> Self {
        let (roots, ended): (Vec<_>, Vec<_>) = roots.into_iter().partition(|root| now < root.not_after);
        for root in ended {
            tracing::warn!(name = root.name, "a root in {ROOTS} has ended: it is left out");
        }
        Self { layout, authority: Arc::new(authority), roots }
    }
}

fn certs(file: &'static str, text: &[u8]) -> Result<Vec<Cert>, Fault> {
    Cert::all_from_pem(text).map_err(|reason| Fault { file, reason })
}

pub(super) fn belongs(key: &CaKey, cert: &Cert) -> bool {
    cert.parsed().is_ok_and(|parsed| key.belongs_to(&parsed))
}

/// Makes the folder, and in it a root of its own if there is none and nothing else either.
pub(super) fn prepare(dir: &Path, now: SystemTime) -> Result<(), CaError> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(file_error("making", dir))?;
    let there = |name: &str| dir.join(name).exists();
    if [CA_KEY, CA_CERT, CHAIN, ROOTS].iter().any(|name| there(name)) {
        return Ok(());
    }
    check_folder(dir, own_user())?;
    let _locked = lock(dir).map_err(file_error("locking", dir))?;
    if there(ROOTS) {
        // Somebody else was quicker.
        return Ok(());
    }
    let (key_path, cert_path) = (dir.join(ROOT_KEY), dir.join(ROOTS));
    let unusable = |path: &Path| {
        let path = path.to_owned();
        move |reason| CaError::Unusable { path, reason }
    };
    // A key without its certificate: the process that made it ended in between. Nothing is signed by it yet.
    let key = match read_if_there(&key_path, Guard::secret(own_user()))? {
        Some(text) => CaKey::from_pem(&text).map_err(unusable(&key_path))?,
        None => make_key(&key_path, None)?,
    };
    let root = make_root(&key, now).map_err(unusable(&cert_path))?;
    write_as(&cert_path, root.pem.as_bytes(), 0o600, None).map_err(file_error("writing", &cert_path))?;
    tracing::info!(path = %cert_path.display(), name = root.name, fingerprint = root.fingerprint, "made a root");
    Ok(())
}

/// Makes a key in its file.
pub(super) fn make_key(path: &Path, owner: Option<u32>) -> Result<CaKey, CaError> {
    let (key, text) = CaKey::generate().map_err(CaError::Sign)?;
    write_as(path, text.as_bytes(), 0o600, owner).map_err(file_error("writing", path))?;
    Ok(key)
}

/// Makes a root's certificate.
pub(super) fn make_root(key: &CaKey, now: SystemTime) -> Result<Cert, String> {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "Understory");
    // Two roots that overlap must not have one name: verifiers find the issuer by it.
    let number = serial().map_err(|e| e.to_string())?;
    let name: String = number.to_bytes().iter().take(6).map(|byte| format!("{byte:02x}")).collect();
    params.distinguished_name.push(DnType::CommonName, format!("root {name}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = (now - CLOCKS_DIFFER).into();
    params.not_after = (now + LIFETIME).into();
    params.serial_number = Some(number);
    Cert::new(params.self_signed(key).map_err(|e| e.to_string())?.der().clone())
}

pub(super) fn file_error(step: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> CaError + use<> {
    let path = path.to_owned();
    move |source| CaError::File { step, path, source }
}

pub(super) const ROOT_KEY: &str = "root-key.pem";
pub(super) const ROOTS: &str = "root-cert.pem";
const CA_KEY: &str = "ca-key.pem";
const CA_CERT: &str = "ca-cert.pem";
const CHAIN: &str = "cert-chain.pem";
const CLOCKS_DIFFER: Duration = Duration::from_secs(120);
const LIFETIME: Duration = Duration::from_secs(10 * 365 * 86400);

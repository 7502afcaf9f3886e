//! The root's life: made once, kept, replaced.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use rcgen::{BasicConstraints, KeyPair};
use x509_parser::parse_x509_certificate;
use ztunnel::identity::certificates_from_pem;

use super::*;

#[test]
fn a_root_is_made_once_and_only_its_owner_reads_it() {
    let dir = Dir::new("made");
    let first = Ca::open(&dir.0).unwrap();
    for (file, mode) in [("root-key.pem", 0o600), ("root-cert.pem", 0o600), ("", 0o700)] {
        let found = fs::metadata(dir.0.join(file)).unwrap().permissions().mode();
        assert_eq!(found & 0o777, mode, "{file}");
    }
    let again = Ca::open(&dir.0).unwrap();
    assert_eq!(first.roots_pem(), again.roots_pem());
    let years = first.not_after().duration_since(SystemTime::now()).unwrap().as_secs() / (365 * 86400);
    assert!((9..=10).contains(&years));
    let text = format!("{first:?}");
    assert!(!text.to_lowercase().contains("key"), "{text}");
}

#[test]
fn processes_that_start_at_once_make_one_root() {
    let dir = Dir::new("race");
    let roots: Vec<String> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| Ca::open(&dir.0).unwrap().roots_pem())).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    assert!(roots.iter().all(|root| *root == roots[0]));
}

#[test]
fn a_start_that_was_cut_off_between_key_and_certificate_is_gone_on_with() {
    let dir = Dir::new("cut");
    Ca::open(&dir.0).unwrap();
    let key = fs::read(dir.0.join("root-key.pem")).unwrap();
    fs::remove_file(dir.0.join("root-cert.pem")).unwrap();
    Ca::open(&dir.0).unwrap();
    assert_eq!(fs::read(dir.0.join("root-key.pem")).unwrap(), key);
}

#[test]
fn a_folder_that_cannot_be_used_is_named_and_left_as_it_is() {
    let (dir, other) = (Dir::new("unusable"), Dir::new("unusable-other"));
    Ca::open(&dir.0).unwrap();
    Ca::open(&other.0).unwrap();
    let (key, cert) = (dir.0.join("root-key.pem"), dir.0.join("root-cert.pem"));
    let good_key = fs::read(&key).unwrap();
    let told = |path: &std::path::Path| {
        let error = Ca::open(&dir.0).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        error
    };
    fs::copy(other.0.join("root-key.pem"), &key).unwrap();
    assert!(told(&cert).contains("not the key"));
    fs::write(&key, "nonsense").unwrap();
    told(&key);
    fs::remove_file(&key).unwrap();
    told(&key);
    assert!(!key.exists(), "a new key would not be that of the certificate");
    fs::write(&key, &good_key).unwrap();
    fs::write(&cert, "").unwrap();
    told(&cert);
    assert!(Ca::open("/proc/nowhere".as_ref()).unwrap_err().to_string().contains("/proc/nowhere"));
}

#[test]
fn nothing_is_signed_past_the_roots_end() {
    let dir = Dir::new("end");
    Ca::open(&dir.0).unwrap();
    let end = SystemTime::now() + Duration::from_secs(600);
    replace(&dir, end);
    let ca = Ca::open(&dir.0).unwrap();
    let leaf = certificates_from_pem(ca.sign(&identity(), &request(), Duration::from_secs(3600)).unwrap().as_bytes());
    let leaf = leaf.unwrap();
    let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
    let limit = end.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    assert_eq!(leaf.validity().not_after.timestamp(), i64::try_from(limit).unwrap());

    replace(&dir, SystemTime::now() - Duration::from_secs(60));
    let error = Ca::open(&dir.0).unwrap_err();
    assert!(matches!(error, CaError::Expired { .. }), "{error}");
    assert!(matches!(ca.refresh(), Err(CaError::Expired { .. })));
    assert!(ca.sign(&identity(), &request(), Duration::from_secs(60)).is_ok(), "the one before goes on");
}

/// Field cases B129 and B133: leaves of the root before are in use until they end.
#[test]
fn a_replaced_root_signs_from_now_on_and_the_one_before_stays_trusted() {
    let dir = Dir::new("replaced");
    let ca = Ca::open(&dir.0).unwrap();
    let before = ca.roots_pem();
    assert_eq!(ca.refresh().unwrap(), Refreshed::Same);
    replace(&dir, SystemTime::now() + Duration::from_secs(86400));
    assert_eq!(ca.refresh().unwrap(), Refreshed::Changed);
    assert_eq!(ca.refresh().unwrap(), Refreshed::Same);
    let roots = certificates_from_pem(ca.roots_pem().as_bytes()).unwrap();
    assert_eq!(roots.len(), 2);
    assert_eq!(roots[1], certificates_from_pem(before.as_bytes()).unwrap()[0]);
    let leaf = ca.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
    let leaf = certificates_from_pem(leaf.as_bytes()).unwrap();
    let ((_, leaf), (_, root)) =
        (parse_x509_certificate(&leaf[0]).unwrap(), parse_x509_certificate(&roots[0]).unwrap());
    leaf.verify_signature(Some(root.public_key())).unwrap();
    fs::write(dir.0.join("root-cert.pem"), "half").unwrap();
    assert!(ca.refresh().is_err());
    assert!(ca.sign(&identity(), &request(), Duration::from_secs(60)).is_ok());
}

#[test]
fn a_file_is_written_whole_with_its_mode() {
    let dir = Dir::new("whole");
    fs::create_dir_all(&dir.0).unwrap();
    let path = dir.0.join("file");
    for text in ["one", "two"] {
        write_whole(&path, text.as_bytes(), 0o640).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
    assert!(write_whole(&dir.0.join("missing/file"), b"", 0o600).is_err());
}

/// Puts a root of another key in place, that ends then.
fn replace(dir: &Dir, end: SystemTime) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params.not_before = (end - Duration::from_secs(86400 * 7)).into();
    params.not_after = end.into();
    write_whole(&dir.0.join("root-cert.pem"), params.self_signed(&key).unwrap().pem().as_bytes(), 0o600).unwrap();
    write_whole(&dir.0.join("root-key.pem"), key.serialize_pem().as_bytes(), 0o600).unwrap();
}

fn identity() -> Identity {
    "spiffe://cluster.local/ns/a/sa/b".parse().unwrap()
}

fn request() -> String {
    PrivateKey::generate().unwrap().certificate_request(&identity()).unwrap()
}

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        Self(std::env::temp_dir().join(format!("understory-ca-{name}-{}", std::process::id())))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

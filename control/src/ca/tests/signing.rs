//! What is signed: its times and what comes with it.

use x509_parser::parse_x509_certificate;
use ztunnel::identity::certificates_from_pem;

use super::pki::{Outside, put};
use super::*;

fn times(issued: &Issued) -> (i64, i64) {
    let leaf = certificates_from_pem(issued.chain[0].as_bytes()).unwrap();
    let (_, leaf) = parse_x509_certificate(&leaf[0]).unwrap();
    (leaf.validity().not_before.timestamp(), leaf.validity().not_after.timestamp())
}

fn now() -> i64 {
    x509_parser::time::ASN1Time::now().timestamp()
}

/// Field case B131.
#[test]
fn nothing_is_signed_past_the_end_of_any_certificate_above_it() {
    let end = SystemTime::now() + Duration::from_secs(600);
    let seconds = i64::try_from(record::seconds(end)).unwrap();
    let short = |params: &mut rcgen::CertificateParams| params.not_after = end.into();
    let long = Outside::root("long");
    let short_root = Outside::root_with("short root", short);
    let short_between = long.below_with("short between", short);
    for (name, authority, chain, root) in [
        ("signer", long.below_with("signer", short), vec![], &long),
        ("between", short_between.below("signer"), vec![&short_between], &long),
        ("root", short_root.below("signer"), vec![], &short_root),
    ] {
        let dir = Dir::new(&format!("end-{name}"));
        authority.plug_into(&dir.0, &chain, &[root]);
        let ca = dir.open().unwrap();
        let issued = ca.sign(&identity(), &request(), Duration::from_secs(3600)).unwrap();
        let (_, until) = times(&issued);
        assert!((seconds - 1..=seconds).contains(&until), "{name}: {until} {seconds}");
    }
}

#[test]
fn an_authority_that_has_ended_says_so_with_all_times() {
    let dir = Dir::new("ended");
    dir.open().unwrap();
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3600));
    let raw = layout::look(&dir.0, files::own_user()).unwrap();
    let authority = raw.verify(&dir.0, &identity(), now).unwrap().authority;
    let error = authority.end_of(hour, authority.not_after()).unwrap_err();
    assert!(matches!(error, CaError::NotValidNow { .. }), "{error}");
    assert!(error.to_string().matches("20").count() >= 3, "{error}");
    assert!(authority.end_of(hour, now - hour).is_err(), "before it begins");
    assert!(authority.end_of(hour, authority.not_after() - Duration::from_secs(1)).is_ok());
}

#[test]
fn certificates_begin_earlier_for_clocks_that_are_behind_and_live_no_longer_than_is_allowed() {
    let dir = Dir::new("times");
    let root = Outside::root("root");
    fs::create_dir_all(&dir.0).unwrap();
    root.plug_into(&dir.0, &[], &[&root]);
    for (backdate, lifetime, expected) in [(120, 60, 60), (0, 60, 60), (7200, 86400, 3600)] {
        let settings = CaSettings { backdate: Duration::from_secs(backdate), ..dir.settings() };
        let ca = Ca::open(settings).unwrap();
        let issued = ca.sign(&identity(), &request(), Duration::from_secs(lifetime)).unwrap();
        let (from, until) = times(&issued);
        let backdate = i64::try_from(backdate).unwrap();
        assert!((backdate..backdate + 10).contains(&(now() - from)), "{backdate}: {}", now() - from);
        assert!((expected - 10..=expected).contains(&(until - now())), "{lifetime}: {}", until - now());
    }
}

#[test]
fn serial_numbers_are_long_random_and_positive() {
    let mut seen = std::collections::HashSet::new();
    for _ in 0..1000 {
        let serial = authority::serial().unwrap().to_bytes();
        assert!(serial.len() == 16 && serial[0] & 0x80 == 0 && serial[0] != 0, "{serial:?}");
        assert!(seen.insert(serial));
    }
}

#[test]
fn the_serving_certificate_comes_with_what_is_between_it_and_the_root() {
    let dir = Dir::new("serving");
    let root = Outside::root("root");
    let signer = root.below("signer");
    signer.plug_into(&dir.0, &[], &[&root]);
    let ca = dir.open().unwrap();
    let (chain, _, end) = ca.serving(&["control.test".into(), "10.0.0.1".into()], Duration::from_secs(60)).unwrap();
    assert_eq!(chain.len(), 2);
    assert_eq!(chain[1], signer.der());
    assert!(end <= SystemTime::now() + Duration::from_secs(61));
    let (_, leaf) = parse_x509_certificate(&chain[0]).unwrap();
    assert_eq!(leaf.subject_alternative_name().unwrap().unwrap().value.general_names.len(), 2);
}

#[test]
fn a_file_is_written_whole_with_its_mode() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new("whole");
    fs::create_dir_all(&dir.0).unwrap();
    let path = dir.path("file");
    put(&dir.0, "file", "before");
    for text in ["one", "two"] {
        write_whole(&path, text.as_bytes(), 0o640).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640);
    }
    assert_eq!(fs::read_dir(&dir.0).unwrap().count(), 1);
    assert!(write_whole(&dir.path("missing/file"), b"", 0o600).is_err());
}

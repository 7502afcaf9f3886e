//! Which folders are taken, and with which words the others are refused.

use std::os::unix::fs::PermissionsExt;

use rcgen::{BasicConstraints, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};

use super::pki::{Outside, Workload, all_connect, keys_of_all_forms, put, set_mode};
use super::*;

#[test]
fn a_root_is_made_once_and_only_its_owner_reads_it() {
    let dir = Dir::new("made");
    let first = dir.open().unwrap();
    for (file, mode) in [("root-key.pem", 0o600), ("root-cert.pem", 0o600), ("ca-record.json", 0o600), ("", 0o700)] {
        let found = fs::metadata(dir.path(file)).unwrap().permissions().mode();
        assert_eq!(found & 0o777, mode, "{file}");
    }
    let again = dir.open().unwrap();
    assert_eq!(first.roots_pem(), again.roots_pem());
    let years = first.not_after().duration_since(SystemTime::now()).unwrap().as_secs() / (365 * 86400);
    assert!((9..=10).contains(&years));
    let (text, key) = (format!("{first:?}"), fs::read_to_string(dir.path("root-key.pem")).unwrap());
    assert!(key.lines().filter(|line| !line.contains("PRIVATE")).all(|line| !text.contains(line)), "{text}");
}

#[test]
fn processes_that_start_at_once_make_one_root() {
    let dir = Dir::new("race");
    let roots: Vec<Arc<str>> = std::thread::scope(|scope| {
        let starts: Vec<_> = (0..8).map(|_| scope.spawn(|| dir.open().unwrap().roots_pem())).collect();
        starts.into_iter().map(|s| s.join().unwrap()).collect()
    });
    assert!(roots.iter().all(|root| *root == roots[0]));
}

#[test]
fn a_start_that_was_cut_off_between_key_and_certificate_is_gone_on_with() {
    let dir = Dir::new("cut");
    dir.open().unwrap();
    let key = fs::read(dir.path("root-key.pem")).unwrap();
    fs::remove_file(dir.path("root-cert.pem")).unwrap();
    dir.open().unwrap();
    assert_eq!(fs::read(dir.path("root-key.pem")).unwrap(), key);
}

#[test]
fn an_own_root_that_cannot_be_used_is_named_and_left_as_it_is() {
    let (dir, other) = (Dir::new("unusable"), Dir::new("unusable-other"));
    dir.open().unwrap();
    other.open().unwrap();
    let told = |file: &str, reason: &str| {
        let error = dir.open().unwrap_err().to_string();
        assert!(error.contains(dir.path(file).to_str().unwrap()) && error.contains(reason), "{error}");
    };
    let good_key = fs::read_to_string(dir.path("root-key.pem")).unwrap();
    put(&dir.0, "root-key.pem", &fs::read_to_string(other.path("root-key.pem")).unwrap());
    told("root-key.pem", "the key of none of the certificates in root-cert.pem");
    put(&dir.0, "root-key.pem", "nonsense");
    told("root-key.pem", "holds no private key");
    fs::remove_file(dir.path("root-key.pem")).unwrap();
    told("root-key.pem", "No such file");
    assert!(!dir.path("root-key.pem").exists(), "a new key would not be that of the certificate");
    put(&dir.0, "root-key.pem", &good_key);
    let good_cert = fs::read_to_string(dir.path("root-cert.pem")).unwrap();
    put(&dir.0, "root-cert.pem", "");
    told("root-cert.pem", "no certificate in it");
    put(&dir.0, "root-cert.pem", &good_cert);
    put(&dir.0, "ca-key.pem", &good_key);
    told("", "root-key.pem and files of a plugged-in authority");
    fs::remove_file(dir.path("ca-key.pem")).unwrap();
    dir.open().unwrap();
    let nowhere = CaSettings { dir: "/proc/nowhere".into(), ..dir.settings() };
    assert!(Ca::open(nowhere).unwrap_err().to_string().contains("/proc/nowhere"));
}

#[test]
fn files_that_others_can_read_or_write_are_refused_with_mode_and_owner() {
    let dir = Dir::new("modes");
    dir.open().unwrap();
    for (file, mode, reason) in [
        ("root-key.pem", 0o640, "its mode is 0640, so that others can read it, expected 0600"),
        ("root-key.pem", 0o604, "its mode is 0604, so that others can read it, expected 0600"),
        ("root-key.pem", 0o620, "its mode is 0620, so that others can write it, expected 0600"),
        ("root-cert.pem", 0o666, "its mode is 0666, so that others can write it, expected 0644"),
        ("", 0o777, "its mode is 0777, so that others can write it, expected 0700"),
    ] {
        let path = dir.path(file);
        let before = fs::metadata(&path).unwrap().permissions().mode();
        set_mode(&path, mode);
        let error = dir.open().unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()) && error.contains(reason), "{file}: {error}");
        set_mode(&path, before);
    }
    dir.open().unwrap();
    // Only root can give files away; for whoever else runs this, the file of another user is one that he cannot make.
    if files::own_user() == 0 {
        std::os::unix::fs::chown(dir.path("root-key.pem"), Some(1234), None).unwrap();
        let error = dir.open().unwrap_err().to_string();
        assert!(error.contains("root-key.pem") && error.contains("user 1234 owns it, expected user 0"), "{error}");
    }
}

#[test]
fn an_intermediate_is_plugged_in_with_keys_of_every_form() {
    let root = Outside::root("root");
    let mut workloads = Vec::new();
    for (number, (kind, key, text)) in keys_of_all_forms().into_iter().enumerate() {
        let dir = Dir::new(&format!("forms-{number}"));
        let between = root.below("between");
        let signer = between.below_with_key("signer", key, |_| {});
        signer.plug_into(&dir.0, &[&signer, &between, &root], &[&root]);
        put(&dir.0, "ca-key.pem", &text);
        let ca = dir.open().unwrap_or_else(|e| panic!("{kind}, {}: {e}", text.lines().next().unwrap()));
        let report = ca.report();
        assert_eq!((report.layout, report.roots.len()), (Layout::PlugIn, 1));
        let issued = ca.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
        // The leaf, then what is between it and the root, which is not among them.
        let shown: Vec<_> = issued.chain.iter().skip(1).cloned().collect();
        assert_eq!(shown, [signer.pem(), between.pem()]);
        assert_eq!(*issued.roots, root.pem());
        workloads.push(Workload::new(&ca));
    }
    // All below one root.
    all_connect(&workloads.iter().collect::<Vec<_>>());
}

#[test]
fn a_chain_is_found_in_whatever_order_and_with_or_without_what_is_not_needed() {
    let (root, stranger) = (Outside::root("root"), Outside::root("stranger"));
    let between = root.below("between");
    let signer = between.below("signer");
    for (name, chain) in [
        ("order", vec![&signer, &between, &root]),
        ("reversed", vec![&root, &between, &signer]),
        ("short", vec![&between]),
        ("strangers", vec![&stranger, &between]),
    ] {
        let dir = Dir::new(&format!("chain-{name}"));
        signer.plug_into(&dir.0, &chain, &[&stranger, &root]);
        let ca = dir.open().unwrap_or_else(|e| panic!("{name}: {e}"));
        let issued = ca.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
        assert_eq!(issued.chain[1..], [signer.pem(), between.pem()], "{name}");
        assert_eq!(*issued.roots, root.pem() + &stranger.pem(), "{name}: the root that signs comes first");
    }
    // Directly below the root no chain is needed, and a root may sign itself.
    let dir = Dir::new("chain-none");
    root.below("signer").plug_into(&dir.0, &[], &[&root]);
    fs::remove_file(dir.path("cert-chain.pem")).unwrap();
    dir.open().unwrap();
    let dir = Dir::new("chain-root");
    root.plug_into(&dir.0, &[], &[&root]);
    let issued = dir.open().unwrap().sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
    assert_eq!(issued.chain.len(), 1);
}

/// Each mistake that an operator can make with the files, and what he is told.
#[test]
fn each_mistake_in_a_plugged_in_authority_is_named_with_its_file() {
    let (root, other_root) = (Outside::root("root"), Outside::root("other root"));
    let namesake = Outside::root("root");
    let between = root.below("between");
    let signer = between.below("signer");
    let leaf = between.below_with("no authority", |params| params.is_ca = IsCa::ExplicitNoCa);
    let days = |days: i64| SystemTime::now() - Duration::from_secs(days.unsigned_abs() * 86400);
    let ended = between.below_with("ended", |params| {
        (params.not_before, params.not_after) = (days(10).into(), days(1).into());
    });
    let early = between.below_with("early", |params| {
        params.not_before = (SystemTime::now() + Duration::from_secs(86400)).into();
    });
    let no_sign = between.below_with("no sign", |params| params.key_usages = vec![KeyUsagePurpose::DigitalSignature]);
    let mail = between.below_with("mail", |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::EmailProtection];
    });
    let servers = between.below_with("servers", |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    let last = root.below_with("last", |params| params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0)));
    let too_deep = last.below("too deep");
    let ended_root = Outside::root_with("ended root", |params| {
        (params.not_before, params.not_after) = (days(10).into(), days(1).into());
    });
    let below_ended = ended_root.below("below ended");
    let named = root.below_with("named", |params| {
        let uri = rcgen::CustomExtension::from_oid_content(&[2, 5, 29, 30], URI_CONSTRAINT.to_vec());
        params.custom_extensions.push(uri);
    });
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let p521 = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P521_SHA512).unwrap().serialize_pem();
    let cut = &signer.pem()[..200];
    // What it is, authority, chain, roots, a further change, the file and the words of the error.
    type Case<'a> = (&'a str, &'a Outside, &'a [&'a Outside], &'a [&'a Outside], &'a dyn Fn(&Dir), &'a str, &'a str);
    let cases: [Case; 24] = [
        (
            "another key",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-key.pem", &between.key_pem()),
            "ca-key.pem",
            "not the key of the certificate in ca-cert.pem (CN=signer)",
        ),
        (
            "no key",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-key.pem", &signer.pem()),
            "ca-key.pem",
            "holds no private key",
        ),
        (
            "a key with a password",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-key.pem", encrypted),
            "ca-key.pem",
            "encrypted",
        ),
        (
            "a key of another kind",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-key.pem", &p521),
            "ca-key.pem",
            "ECDSA on P-256 or P-384, or RSA",
        ),
        (
            "a cut key",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-key.pem", &signer.key_pem()[..100]),
            "ca-key.pem",
            "holds no private key",
        ),
        (
            "a missing key",
            &signer,
            &[&between],
            &[&root],
            &|d| fs::remove_file(d.path("ca-key.pem")).unwrap(),
            "ca-key.pem",
            "No such file",
        ),
        (
            "a missing certificate",
            &signer,
            &[&between],
            &[&root],
            &|d| fs::remove_file(d.path("ca-cert.pem")).unwrap(),
            "ca-cert.pem",
            "No such file",
        ),
        (
            "missing roots",
            &signer,
            &[&between],
            &[&root],
            &|d| fs::remove_file(d.path("root-cert.pem")).unwrap(),
            "root-cert.pem",
            "No such file",
        ),
        (
            "a cut certificate",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-cert.pem", cut),
            "ca-cert.pem",
            "number 1 in it is broken",
        ),
        (
            "no certificate",
            &signer,
            &[&between],
            &[&root],
            &|d| put(&d.0, "ca-cert.pem", ""),
            "ca-cert.pem",
            "no certificate in it",
        ),
        ("no roots", &signer, &[&between], &[], &|_| {}, "root-cert.pem", "no certificate in it"),
        (
            "a broken chain",
            &signer,
            &[],
            &[&root],
            &|d| put(&d.0, "cert-chain.pem", cut),
            "cert-chain.pem",
            "is broken",
        ),
        (
            "no chain",
            &signer,
            &[],
            &[&root],
            &|_| {},
            "ca-cert.pem",
            "the issuer of CN=signer, CN=between, is in neither cert-chain.pem nor root-cert.pem",
        ),
        (
            "another root",
            &signer,
            &[&between],
            &[&other_root],
            &|_| {},
            "cert-chain.pem",
            "the issuer of CN=between, CN=root, is in neither",
        ),
        (
            "a root of the same name",
            &signer,
            &[&between],
            &[&namesake],
            &|_| {},
            "cert-chain.pem",
            "CN=between is not signed by the key of CN=root",
        ),
        (
            "a leaf for an authority",
            &leaf,
            &[&between],
            &[&root],
            &|_| {},
            "ca-cert.pem",
            "CN=no authority is not the certificate of an authority",
        ),
        (
            "a leaf for a root",
            &signer,
            &[&between],
            &[&root, &leaf],
            &|_| {},
            "root-cert.pem",
            "CN=no authority is not the certificate of an authority",
        ),
        ("ended", &ended, &[&between], &[&root], &|_| {}, "ca-cert.pem", "CN=ended ended at 20"),
        ("early", &early, &[&between], &[&root], &|_| {}, "ca-cert.pem", "CN=early begins at 20"),
        ("an ended root", &below_ended, &[], &[&ended_root], &|_| {}, "root-cert.pem", "CN=ended root ended at 20"),
        ("not for signing", &no_sign, &[&between], &[&root], &|_| {}, "ca-cert.pem", "keyCertSign"),
        ("for mail", &mail, &[&between], &[&root], &|_| {}, "ca-cert.pem", "extended key usage"),
        (
            "too deep",
            &too_deep,
            &[&last],
            &[&root],
            &|_| {},
            "cert-chain.pem",
            "CN=last allows 0 authorities below it (path length), and there are 1",
        ),
        ("for other names", &named, &[], &[&root], &|_| {}, "ca-cert.pem", "would be refused by peers"),
    ];
    for (number, (what, authority, chain, roots, change, file, reason)) in cases.into_iter().enumerate() {
        let dir = Dir::new(&format!("mistake-{number}"));
        authority.plug_into(&dir.0, chain, roots);
        change(&dir);
        let error = dir.open().map(|_| what).unwrap_err().to_string();
        let path = dir.path(file);
        assert!(error.contains(path.to_str().unwrap()) && error.contains(reason), "{what}: {error}");
    }
    let dir = Dir::new("mistake-servers");
    servers.plug_into(&dir.0, &[&between], &[&root]);
    assert!(dir.open().unwrap_err().to_string().contains("without serverAuth and clientAuth"));
    let dir = Dir::new("mistake-pipe");
    signer.plug_into(&dir.0, &[&between], &[&root]);
    fs::remove_file(dir.path("ca-key.pem")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(dir.path("ca-key.pem")).status().unwrap().success());
    set_mode(&dir.path("ca-key.pem"), 0o600);
    assert!(dir.open().unwrap_err().to_string().contains("expected a regular file"), "it is not waited for");
    let dir = Dir::new("mistake-mode");
    signer.plug_into(&dir.0, &[&between], &[&root]);
    set_mode(&dir.path("ca-key.pem"), 0o666);
    assert!(dir.open().unwrap_err().to_string().contains("others can write it"));
    // As the kubelet mounts it by default; nobody else sees that mount.
    set_mode(&dir.path("ca-key.pem"), 0o644);
    dir.open().unwrap();
}

#[test]
fn a_root_that_has_ended_is_left_out_where_others_are_there() {
    let (root, dir) = (Outside::root("root"), Dir::new("one-ended"));
    let long_ago = SystemTime::now() - Duration::from_secs(86400);
    let ended = Outside::root_with("ended", |params| {
        (params.not_before, params.not_after) = ((long_ago - Duration::from_secs(86400)).into(), long_ago.into());
    });
    root.below("signer").plug_into(&dir.0, &[], &[&ended, &root]);
    assert_eq!(*dir.open().unwrap().roots_pem(), root.pem());
}

/// Permitted: URIs of example.com.
const URI_CONSTRAINT: &[u8] =
    &[0x30, 0x11, 0xa0, 0x0f, 0x30, 0x0d, 0x86, 0x0b, b'e', b'x', b'a', b'm', b'p', b'l', b'e', b'.', b'c', b'o', b'm'];

proptest::proptest! {
    #![proptest_config(proptest::prelude::ProptestConfig::with_cases(300))]
    /// Files that somebody has cut, or that a disk has spoilt: either they are refused with their names, or what is left
    /// of them signs certificates that peers take.
    #[test]
    fn spoilt_files_are_refused_by_name_or_are_good_all_the_same(
        file in 0..4usize, at: proptest::sample::Index, change in 0..3u8, bit in 0..8u32
    ) {
        static GOOD: std::sync::LazyLock<[(&str, String); 4]> = std::sync::LazyLock::new(|| {
            let root = Outside::root("root");
            let between = root.below("between");
            let signer = between.below("signer");
            let chain = [signer.pem(), between.pem()].concat();
            let key = signer.key_pem();
            [("ca-key.pem", key), ("ca-cert.pem", signer.pem()), ("cert-chain.pem", chain), ("root-cert.pem", root.pem())]
        });
        let dir = Dir::new("spoilt");
        fs::create_dir_all(&dir.0).unwrap();
        for (number, (name, text)) in GOOD.iter().enumerate() {
            let mut text = text.clone().into_bytes();
            let at = at.index(text.len());
            match change {
                _ if number != file => {}
                0 => text.truncate(at),
                1 => text[at] ^= 1 << bit,
                _ => drop(text.remove(at)),
            }
            fs::write(dir.path(name), text).unwrap();
        }
        match dir.open() {
            Ok(ca) => all_connect(&[&Workload::new(&ca)]),
            Err(error) => {
                let text = error.to_string();
                proptest::prop_assert!(GOOD.iter().any(|(name, _)| text.contains(name)), "{text}");
                proptest::prop_assert!(!text.contains(GOOD[0].1.lines().nth(1).unwrap()), "a key in {text}");
            }
        }
    }
}

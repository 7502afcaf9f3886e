//! Rotation by command and by replacing files, seen by workloads that shake hands before and after each step.

use super::pki::{Outside, Workload, all_connect, put};
use super::*;
use crate::ca::record::{Record, Recorder};

/// Changes what is remembered, as time would.
fn remember(dir: &Dir, change: impl FnOnce(&mut Record)) {
    Recorder::in_folder(&dir.0, files::own_user()).unwrap().update(change).1.unwrap();
}

/// Everybody has had the time to learn of all roots.
fn known_for_long(record: &mut Record) {
    record.roots.values_mut().for_each(|root| root.announced = Some(0));
}

/// All leaves that there were have ended, but those of what signs now.
fn leaves_have_ended(record: &mut Record) {
    record.roots.values_mut().for_each(|root| root.leaves_until = Some(1));
}

fn stage(dir: &Dir) -> Stage {
    status(&dir.0).unwrap().rotation.stage
}

fn refused(dir: &Dir, reason: &str) {
    let files = || ["root-key.pem", "root-cert.pem", "next-key.pem"].map(|file| fs::read(dir.path(file)).ok());
    let before = files();
    let error = rotate(&dir.0, false).map(|done| done.did).unwrap_err();
    assert!(matches!(error, RotateError::Refused { .. }) && error.to_string().contains(reason), "{error}");
    assert!(error.to_string().contains("--force"));
    assert_eq!(files(), before);
}

/// Field cases B129 and B133.
#[test]
fn rotation_by_command_cuts_nobody_off_and_refuses_to_be_hurried() {
    let dir = Dir::new("rotate");
    let ca = dir.open().unwrap();
    // A second control on the same folder, and a second rotation after the first.
    let other = dir.open().unwrap();
    for round in 0..2 {
        let old = ca.bundles().borrow().roots()[0].clone();
        let before = Workload::new(&ca);
        assert_eq!(stage(&dir), Stage::Settled, "{round}");

        let done = rotate(&dir.0, false).unwrap();
        assert_eq!((done.step, done.status.rotation.stage), (1, Stage::NewTrusted));
        refused(&dir, "no control has announced");
        assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
        assert_eq!(other.refresh(), Changes { signer: false, roots: true, problem: None });
        assert_eq!(ca.refresh(), Changes::default());
        let new = ca.bundles().borrow().roots().iter().find(|root| **root != old).unwrap().clone();
        let between = [Workload::new(&ca), Workload::new(&other)];
        assert!(between.iter().all(|w| w.trusts(&old) && w.trusts(&new)) && !before.trusts(&new));
        all_connect(&[&before, &between[0], &between[1]]);

        refused(&dir, "three quarters of the longest certificate life");
        remember(&dir, known_for_long);
        let mut announced = ca.bundles();
        assert_eq!(*announced.borrow_and_update().signs(), old);
        let done = rotate(&dir.0, false).unwrap();
        assert_eq!((done.step, done.status.rotation.stage), (2, Stage::NewSigns));
        assert!(!dir.path("next-key.pem").exists());
        assert_eq!(ca.refresh(), Changes { signer: true, roots: false, problem: None });
        // Proxies are told, and renew what is below the old root.
        assert!(announced.has_changed().unwrap());
        assert_eq!(*announced.borrow_and_update().signs(), new);
        assert_eq!(ca.refresh(), Changes::default());
        assert!(!announced.has_changed().unwrap());
        let after = Workload::new(&ca);
        // The other control has not looked yet, and signs with the old root.
        let late = Workload::new(&other);
        assert_eq!(other.refresh(), Changes { signer: true, roots: false, problem: None });
        all_connect(&[&between[0], &between[1], &after, &late]);
        // This is why the step had to wait.
        assert!(before.connects_to(&after).is_err());

        refused(&dir, "may live until");
        remember(&dir, leaves_have_ended);
        let done = rotate(&dir.0, false).unwrap();
        assert_eq!((done.step, done.status.rotation.stage), (3, Stage::Settled));
        assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
        other.refresh();
        let last = [Workload::new(&ca), Workload::new(&other)];
        assert!(last.iter().all(|w| w.trusts(&new) && !w.trusts(&old)));
        all_connect(&[&after, &last[0], &last[1]]);
        for (client, server) in [(&between[0], &last[0]), (&last[1], &between[1]), (&late, &last[0])] {
            let error = client.connects_to(server).unwrap_err();
            assert!(error.contains("UnknownIssuer"), "{error}");
        }
    }
}

#[test]
fn force_takes_every_step_at_once_and_what_is_running_follows() {
    let dir = Dir::new("force");
    let ca = dir.open().unwrap();
    let before = Workload::new(&ca);
    let old = ca.bundles().borrow().roots()[0].clone();
    for step in 1..=3 {
        assert_eq!(rotate(&dir.0, true).unwrap().step, step);
        let changes = ca.refresh();
        assert_eq!(changes, Changes { signer: step == 2, roots: step != 2, problem: None }, "{step}");
    }
    let after = Workload::new(&ca);
    assert!(!after.trusts(&old));
    assert!(before.connects_to(&after).is_err());
    let roots = ca.roots_pem();
    drop(ca);
    // The same for one that starts.
    assert_eq!(dir.open().unwrap().roots_pem(), roots);
}

#[test]
fn steps_at_once_are_taken_one_after_the_other() {
    let dir = Dir::new("at-once");
    dir.open().unwrap();
    let mut steps: Vec<u8> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..3).map(|_| scope.spawn(|| rotate(&dir.0, true).unwrap().step)).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    steps.sort_unstable();
    assert_eq!(steps, [1, 2, 3]);
    assert_eq!(dir.open().unwrap().report().roots.len(), 1);
}

#[test]
fn a_first_step_that_was_cut_off_is_gone_on_with_and_others_are_whole() {
    let dir = Dir::new("cut-off");
    dir.open().unwrap();
    let cert = fs::read_to_string(dir.path("root-cert.pem")).unwrap();
    assert_eq!(rotate(&dir.0, false).unwrap().step, 1);
    let key = fs::read(dir.path("next-key.pem")).unwrap();
    // As if it had ended between the key and its certificate.
    put(&dir.0, "root-cert.pem", &cert);
    assert_eq!(stage(&dir), Stage::Settled);
    assert_eq!(rotate(&dir.0, false).unwrap().step, 1);
    assert_eq!(fs::read(dir.path("next-key.pem")).unwrap(), key);
    put(&dir.0, "next-key.pem", "nonsense");
    assert!(rotate(&dir.0, true).unwrap_err().to_string().contains("next-key.pem"));
    assert!(dir.open().is_ok(), "what signs does not depend on it");
}

/// Files replaced by hand, all at once: control itself takes the time that everybody needs.
#[test]
fn an_own_root_replaced_by_files_signs_when_it_is_known_and_the_old_one_stays_for_its_leaves() {
    let dir = Dir::new("replaced");
    let ca = dir.open().unwrap();
    let before = Workload::new(&ca);
    let old = ca.bundles().borrow().roots()[0].clone();
    let new = Outside::root("new");
    new.put_as_own_root(&dir.0, &[]);
    assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
    let waits = ca.report().waits.unwrap();
    assert_eq!(waits.cert.name, "CN=new");
    let between = Workload::new(&ca);
    assert!(between.trusts(&old) && between.trusts(&new.der()));
    all_connect(&[&before, &between]);

    remember(&dir, known_for_long);
    assert_eq!(ca.refresh(), Changes { signer: true, roots: false, problem: None });
    let after = Workload::new(&ca);
    assert!(after.trusts(&old));
    all_connect(&[&between, &after]);
    assert_eq!(stage(&dir), Stage::OldRetired);
    refused(&dir, "when it ends by itself");
    // A restart changes nothing of that.
    let again = dir.open().unwrap();
    all_connect(&[&between, &after, &Workload::new(&again)]);

    remember(&dir, leaves_have_ended);
    assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
    let last = Workload::new(&ca);
    assert!(!last.trusts(&old));
    all_connect(&[&after, &last]);
    assert!(between.connects_to(&last).is_err());
}

/// The key of before is compromised: there is no time.
#[test]
fn a_root_that_still_signs_after_its_files_were_replaced_can_be_ended_by_force() {
    let dir = Dir::new("compromised");
    let ca = dir.open().unwrap();
    let old = ca.bundles().borrow().roots()[0].clone();
    Outside::root("new").put_as_own_root(&dir.0, &[]);
    assert!(!ca.refresh().signer);
    assert_eq!(stage(&dir), Stage::OldRetired);
    rotate(&dir.0, true).unwrap();
    assert_eq!(ca.refresh(), Changes { signer: true, roots: true, problem: None });
    assert!(!Workload::new(&ca).trusts(&old));
}

#[test]
fn a_retired_root_can_be_ended_by_force() {
    let dir = Dir::new("end-retired");
    let ca = dir.open().unwrap();
    let old = ca.bundles().borrow().roots()[0].clone();
    assert_eq!(rotate(&dir.0, true).unwrap().step, 1);
    ca.refresh();
    assert_eq!(rotate(&dir.0, true).unwrap().step, 2);
    ca.refresh();
    // Taken out by hand, too early.
    let roots = ca.roots_pem();
    let end = "-----END CERTIFICATE-----\n";
    put(&dir.0, "root-cert.pem", &roots[..roots.find(end).unwrap() + end.len()]);
    assert_eq!(ca.refresh(), Changes::default());
    assert!(Workload::new(&ca).trusts(&old));
    assert_eq!(rotate(&dir.0, true).unwrap().status.rotation.stage, Stage::Settled);
    assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
    assert!(!Workload::new(&ca).trusts(&old));
}

#[test]
fn a_plugged_in_authority_is_rotated_by_its_files_in_three_steps() {
    let dir = Dir::new("plug-in");
    let (old, new) = (Outside::root("old"), Outside::root("new"));
    old.below("first").plug_into(&dir.0, &[], &[&old]);
    let ca = dir.open().unwrap();
    assert!(matches!(rotate(&dir.0, true), Err(RotateError::PlugIn { .. })));
    assert_eq!(stage(&dir), Stage::PlugIn);
    let start = Workload::new(&ca);

    // Another intermediate below the same root: nobody need learn anything.
    old.below("second").plug_into(&dir.0, &[], &[&old]);
    assert_eq!(ca.refresh(), Changes { signer: true, roots: false, problem: None });
    let second = Workload::new(&ca);
    all_connect(&[&start, &second]);

    put(&dir.0, "root-cert.pem", &(old.pem() + &new.pem()));
    assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
    let both = Workload::new(&ca);
    all_connect(&[&start, &second, &both]);

    new.below("third").plug_into(&dir.0, &[], &[&old, &new]);
    assert!(!ca.refresh().signer, "too early");
    ca.recorder.update(known_for_long).1.unwrap();
    assert_eq!(ca.refresh(), Changes { signer: true, roots: false, problem: None });
    let third = Workload::new(&ca);
    all_connect(&[&both, &third]);

    put(&dir.0, "root-cert.pem", &new.pem());
    assert_eq!(ca.refresh(), Changes::default(), "certificates below the old root live");
    all_connect(&[&both, &third, &Workload::new(&ca)]);
    ca.recorder.update(leaves_have_ended).1.unwrap();
    assert_eq!(ca.refresh(), Changes { signer: false, roots: true, problem: None });
    let last = Workload::new(&ca);
    all_connect(&[&third, &last]);
    assert!(both.connects_to(&last).is_err());
}

/// Files are written one after the other, and not at once.
#[test]
fn half_of_a_change_leaves_the_last_good_set_in_force_and_says_what_is_wrong() {
    let (dir, next) = (Dir::new("half"), Dir::new("half-next"));
    let (old, new) = (Outside::root("old"), Outside::root("new"));
    old.below("first").plug_into(&dir.0, &[], &[&old, &new]);
    let ca = dir.open().unwrap();
    ca.recorder.update(known_for_long).1.unwrap();
    new.below("second").plug_into(&next.0, &[], &[&old, &new]);
    let text = |file: &str| fs::read_to_string(next.path(file)).unwrap();
    let mut seen = Vec::new();
    for file in ["ca-key.pem", "ca-cert.pem"] {
        let (half, whole) = (text(file)[..60].to_owned(), text(file));
        for content in [String::new(), half, whole] {
            put(&dir.0, file, &content);
            let changes = ca.refresh();
            assert!(!changes.roots);
            let issued = ca.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
            assert_eq!(issued.chain.len(), 2);
            assert_eq!(ca.report().problem, changes.problem);
            if let Some(problem) = changes.problem {
                assert!(!changes.signer && problem.contains(dir.0.to_str().unwrap()), "{problem}");
                assert_eq!(ca.report().signs.name, "CN=first");
                seen.push(problem);
            }
        }
    }
    assert_eq!(seen.len(), 5, "{seen:#?}");
    assert!(seen[2].contains("not the key of the certificate in ca-cert.pem"), "{seen:#?}");
    assert_eq!(ca.report().signs.name, "CN=second");
    // All gone, then there again.
    fs::rename(&dir.0, dir.0.with_extension("away")).unwrap();
    assert!(ca.refresh().problem.is_some());
    ca.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
    fs::rename(dir.0.with_extension("away"), &dir.0).unwrap();
    assert_eq!(ca.refresh(), Changes::default());
    // Another layout is not taken up by a running control.
    for file in ["ca-key.pem", "ca-cert.pem", "cert-chain.pem"] {
        fs::remove_file(dir.path(file)).unwrap();
    }
    pki::set_mode(&dir.0, 0o700);
    new.put_as_own_root(&dir.0, &[]);
    assert!(ca.refresh().problem.unwrap().contains("restart control"));
}

#[test]
fn what_is_noted_of_leaves_is_ahead_of_them_and_shared_by_all_who_sign() {
    let dir = Dir::new("leaves");
    let (one, two) = (dir.open().unwrap(), dir.open().unwrap());
    remember(&dir, leaves_have_ended);
    one.refresh();
    two.refresh();
    let until = |ca: &Ca| ca.recorder.held().roots.values().next().unwrap().leaves_until.unwrap();
    let first = one.sign(&identity(), &request(), Duration::from_secs(600)).unwrap();
    assert!(until(&one) >= record::seconds(first.not_after));
    assert_eq!(until(&two), 1);
    let second = two.sign(&identity(), &request(), Duration::from_secs(60)).unwrap();
    // From what the other one wrote.
    assert!(until(&two) >= record::seconds(first.not_after) && first.not_after > second.not_after);
    // While the note is ahead, no file is written.
    let written = || fs::metadata(dir.path("ca-record.json")).unwrap().modified().unwrap();
    let before = written();
    one.sign(&identity(), &request(), Duration::from_secs(600)).unwrap();
    assert_eq!(written(), before);
    // A record that is none is as good as none: everything counts as living.
    put(&dir.0, "ca-record.json", "{ broken");
    let three = dir.open().unwrap();
    assert!(until(&three) > record::seconds(SystemTime::now()));
}

/// A `control ca rotate` that was stopped in the middle of its step, or a disk that hangs.
#[test]
fn who_holds_the_lock_for_long_keeps_nobody_from_certificates() {
    let dir = Dir::new("locked");
    let ca = dir.open().unwrap();
    ca.sign(&identity(), &request(), Duration::from_secs(600)).unwrap();
    let held = files::lock(&dir.0).unwrap();
    let error = files::lock_within(&dir.0, Duration::from_millis(20)).unwrap_err();
    assert!(error.to_string().contains("another process has held .lock"), "{error}");
    std::thread::scope(|scope| {
        let look = scope.spawn(|| ca.refresh());
        for _ in 0..10 {
            ca.sign(&identity(), &request(), Duration::from_secs(600)).unwrap();
            assert_eq!(ca.report().roots.len(), 1);
        }
        drop(held);
        assert_eq!(look.join().unwrap(), Changes::default());
    });
}

#[test]
fn for_root_the_keys_belong_to_whom_the_folder_belongs() {
    use std::os::unix::fs::{MetadataExt, chown};
    let dir = Dir::new("owner");
    dir.open().unwrap();
    // Who is not root can have no other user's folder to rotate.
    if files::own_user() != 0 {
        assert_eq!(rotate(&dir.0, false).unwrap().step, 1);
        return;
    }
    for file in ["", "root-key.pem", "root-cert.pem", "ca-record.json", ".lock"] {
        chown(dir.path(file), Some(1234), None).unwrap();
    }
    assert!(dir.open().is_err(), "another user could change what root signs with");
    assert_eq!(rotate(&dir.0, false).unwrap().step, 1);
    for file in ["next-key.pem", "root-cert.pem", "ca-record.json"] {
        assert_eq!(fs::metadata(dir.path(file)).unwrap().uid(), 1234, "{file}");
    }
}

#[test]
fn a_status_is_for_people_and_for_scripts() {
    let dir = Dir::new("status");
    let ca = dir.open().unwrap();
    rotate(&dir.0, false).unwrap();
    ca.refresh();
    let status = status(&dir.0).unwrap();
    let json: serde_json::Value = serde_json::from_str(&serde_json::to_string(&status).unwrap()).unwrap();
    assert_eq!(json["layout"], "own-root");
    assert_eq!(json["rotation"]["stage"], "new-trusted");
    assert_eq!(json["roots"].as_array().unwrap().len(), 2);
    assert_eq!(json["roots"][0]["fingerprint"], json["signs"]["fingerprint"]);
    assert!(json["roots"][1]["announced"].is_string());
    let text = status.to_text();
    for part in ["a root of its own", "signs ", "trusted ", "step 1 of 3 is done", "next step", "not yet "] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let all: Vec<_> = status.report.certificates().map(|(what, _)| what).collect();
    assert_eq!(all, ["root", "root"]);
    let missing = crate::ca::status(&dir.path("missing")).unwrap_err().to_string();
    assert!(missing.contains("missing"), "{missing}");
}

/// A certificate that was handed out while the record could not be written counts once it can be again.
#[test]
fn what_could_not_be_noted_is_noted_later() {
    let dir = Dir::new("unwritten");
    let ca = dir.open().unwrap();
    let root = ca.in_force.load().roots[0].cert.clone();
    let recorder = Recorder::in_folder(&dir.0, files::own_user()).unwrap();
    let record = dir.path(crate::ca::record::RECORD);
    // Nothing can be renamed onto a folder.
    fs::remove_file(&record).unwrap();
    fs::create_dir(&record).unwrap();
    let end = SystemTime::now() + Duration::from_secs(90 * 24 * 3600);
    assert!(recorder.note_leaf(&root, end, Duration::ZERO).is_err());
    fs::remove_dir(&record).unwrap();
    // Meanwhile another process has written what it knows.
    remember(&dir, |record| record.root_mut(&root).leaves_until = Some(1));
    let until = |record: &Record| record.root(&root).and_then(|root| root.leaves_until);
    recorder.update(|_| ()).1.unwrap();
    assert!(until(&recorder.held()) >= Some(crate::ca::record::seconds(end)));
    let written = Recorder::in_folder(&dir.0, files::own_user()).unwrap().held();
    assert_eq!(until(&written), until(&recorder.held()));
    // From then on the file is believed, also where it says less.
    remember(&dir, |record| record.root_mut(&root).leaves_until = Some(1));
    recorder.update(|_| ()).1.unwrap();
    assert_eq!(until(&recorder.held()), Some(1));
}

#[test]
fn what_a_killed_process_left_half_written_goes_at_the_next_start() {
    let dir = Dir::new("unfinished");
    drop(dir.open().unwrap());
    let old = ".root-key.pem.7-00000000000000aa.new";
    let (young, other) = (".root-key.pem.8-00000000000000ab.new", ".notes.new");
    for name in [old, young, other] {
        fs::write(dir.path(name), "half").unwrap();
    }
    let hour = SystemTime::now() - Duration::from_secs(3600);
    for name in [old, other] {
        fs::File::options().write(true).open(dir.path(name)).unwrap().set_modified(hour).unwrap();
    }
    drop(dir.open().unwrap());
    assert_eq!([old, young, other].map(|name| dir.path(name).exists()), [false, true, true]);
}

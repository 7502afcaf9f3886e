//! The folder as its users treat it: editors, `cat >`, symlink swaps, half-written and broken files.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::*;

/// A large file full of faults must not hold up the others.
#[test]
fn thousands_of_faults_in_a_file_are_each_named_with_their_line() {
    let dir = Dir::new();
    let faults = 20_000;
    dir.put("bad.yaml", &"apiVersion: v1\nkind: Pod\nmetadata: [\n---\n".repeat(faults));
    dir.put("good.yaml", "apiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n");
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    assert!(now.namespace("shop").is_some());
    assert_eq!(now.problems().len(), faults);
    for (index, problem) in now.problems().iter().enumerate() {
        let line = problem.line.expect("a line");
        assert!((4 * index + 1..=4 * index + 5).contains(&line), "{index}: {line} {}", problem.reason);
    }
}

#[test]
fn objects_of_all_kinds_are_read_from_yaml_json_and_lists() {
    let dir = Dir::new();
    dir.put(
        "all.yaml",
        "---\n# a comment\napiVersion: v1\nkind: Namespace\nmetadata: {name: shop}\n--- # another\napiVersion: v1\n\
         kind: Node\nmetadata: {name: node-a}\n---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n---\n",
    );
    dir.put(
        "pod.json",
        &serde_json::json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "cart-1", "namespace": "shop"}})
            .to_string(),
    );
    dir.put(
        "list.yml",
        "apiVersion: v1\nkind: List\nitems:\n- apiVersion: v1\n  kind: Service\n  metadata: {name: cart, namespace: shop}\n\
         - apiVersion: discovery.k8s.io/v1\n  kind: EndpointSlice\n  metadata: {name: cart-x, namespace: shop}\n  addressType: IPv6\n  endpoints: []\n",
    );
    dir.put("typed.json", r#"{"apiVersion":"v1","kind":"ServiceAccountList","items":[{"metadata":{"name":"cart"}}]}"#);
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    assert_eq!(now.problems(), []);
    assert!(now.namespace("shop").is_some() && now.node("node-a").is_some());
    assert!(now.pod("shop", "cart-1").is_some() && now.service("shop", "cart").is_some());
    assert_eq!(now.endpoint_slices_in("shop").count(), 1);
    assert!(now.service_accounts.contains_key(&ObjectName::new("default", "cart")));
    assert_eq!(now.pods_in("sho").count(), 0);
}

#[test]
fn entries_are_read_of_every_version_and_no_other() {
    let dir = Dir::new();
    let entry = |kind: &str, version: &str, name: &str, spec: &str| {
        format!(
            "apiVersion: networking.istio.io/{version}\nkind: {kind}\nmetadata: {{name: {name}}}\nspec: {spec}\n---\n"
        )
    };
    let service = "{hosts: [a.example], ports: [{number: 80}], resolution: DNS_ROUND_ROBIN, location: MESH_EXTERNAL}";
    let versions = ["v1", "v1beta1", "v1alpha3"];
    let good: String = versions.iter().map(|v| entry("ServiceEntry", v, &format!("s-{v}"), service)).collect();
    dir.put("services.yaml", &good);
    let good: String =
        versions.iter().map(|v| entry("WorkloadEntry", v, &format!("w-{v}"), "{address: 192.0.2.1}")).collect();
    dir.put("workloads.yaml", &(good + &entry("VirtualService", "v9", "x", "{}")));
    dir.put(
        "list.json",
        r#"{"apiVersion": "networking.istio.io/v1", "kind": "ServiceEntryList", "items": [{"metadata": {"name": "listed"}, "spec": null}]}"#,
    );
    dir.put("z-version.yaml", &entry("ServiceEntry", "v2", "new", service));
    dir.put("z-wrong.yaml", &entry("ServiceEntry", "v1", "wrong", "{resolution: SOMETIMES}"));
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    let names: Vec<_> = now.service_entries_in("default").map(|(name, _)| &*name.name).collect();
    assert_eq!(names, ["listed", "s-v1", "s-v1alpha3", "s-v1beta1"]);
    assert_eq!(now.workload_entries_in("default").count(), 3);
    let read = &now.service_entries[&ObjectName::new("default", "s-v1")];
    assert_eq!((read.spec.resolution, read.spec.ports[0].number), (Resolution::DnsRoundRobin, 80));
    let problems: Vec<_> = now.problems().iter().map(|p| (p.object.clone(), p.reason.as_str())).collect();
    let [(new, version), (wrong, value)] = &problems[..] else { panic!("{problems:?}") };
    let key = |name: &str| Some(ObjectKey::ServiceEntry(ObjectName::new("default", name)));
    assert_eq!((new.clone(), wrong.clone()), (key("new"), key("wrong")));
    assert!(version.contains("\"v2\"") && value.contains("SOMETIMES") && value.contains("STATIC"), "{problems:?}");
}

#[test]
fn a_broken_manifest_is_named_and_its_last_good_version_stays() {
    let dir = Dir::new();
    dir.put("pods.yaml", &(pod("a", "10.0.0.1") + &pod("b", "10.0.0.2") + &pod("c", "10.0.0.3")));
    let (_watch, mut objects) = dir.watch();
    // `b` has a wrong type, `c` is gone from the file and `a` has changed.
    dir.put("pods.yaml", &(pod("a", "10.0.0.9") + &pod("b", "10.0.0.2").replace("phase: Running", "phase: [Running]")));
    let now = wait(&mut objects, |o| ip(o, "a").as_deref() == Some("10.0.0.9") && o.pod("shop", "c").is_none());
    assert_eq!(ip(&now, "b").as_deref(), Some("10.0.0.2"));
    let [problem] = now.problems() else { panic!("{:?}", now.problems()) };
    assert_eq!((problem.file.as_path(), problem.line), (dir.path("pods.yaml").as_path(), Some(24)));
    assert_eq!(problem.object, Some(ObjectKey::Pod(ObjectName::new("shop", "b"))));
    assert!(problem.reason.contains("phase") && problem.reason.contains("line 24"), "{}", problem.reason);

    // Not even YAML: nobody can say which object it was, so all stay.
    dir.put("pods.yaml", "apiVersion: v1\nkind: Pod\n  metadata: [\n");
    let now = wait(&mut objects, |o| o.problems().iter().any(|p| p.object.is_none()));
    assert_eq!((ip(&now, "a").as_deref(), ip(&now, "b").as_deref()), (Some("10.0.0.9"), Some("10.0.0.2")));
    assert!(now.problems()[0].line.is_some());

    dir.put("pods.yaml", &pod("b", "10.0.0.7"));
    let now = wait(&mut objects, |o| o.problems().is_empty() && o.pod("shop", "a").is_none());
    assert_eq!(ip(&now, "b").as_deref(), Some("10.0.0.7"));
}

#[test]
fn an_empty_file_keeps_its_objects_and_a_deleted_one_does_not() {
    let dir = Dir::new();
    dir.put("pod.yaml", &pod("a", "10.0.0.1"));
    let (_watch, mut objects) = dir.watch();
    File::create(dir.path("pod.yaml")).unwrap();
    let now = wait(&mut objects, |o| !o.problems().is_empty());
    assert!(now.pod("shop", "a").is_some());
    assert!(now.problems()[0].reason.contains("empty"), "{:?}", now.problems());
    fs::remove_file(dir.path("pod.yaml")).unwrap();
    let now = wait(&mut objects, |o| o.pod("shop", "a").is_none());
    assert_eq!(now.problems(), []);
}

#[test]
fn a_file_is_not_read_while_it_is_being_written() {
    let dir = Dir::new();
    dir.put("pods.yaml", &(pod("a", "10.0.0.1") + &pod("b", "10.0.0.2")));
    let (_watch, mut objects) = dir.watch();
    let text = pod("a", "10.0.0.5") + &pod("b", "10.0.0.6");
    // What is there half-way is a valid manifest with one pod less.
    let half = pod("a", "10.0.0.5").len();
    let mut file = File::create(dir.path("pods.yaml")).unwrap();
    file.write_all(&text.as_bytes()[..half]).unwrap();
    file.flush().unwrap();
    let until = Instant::now() + Duration::from_millis(700);
    while Instant::now() < until {
        assert_eq!(ip(&objects.borrow(), "b").as_deref(), Some("10.0.0.2"));
        assert_eq!(ip(&objects.borrow(), "a").as_deref(), Some("10.0.0.1"));
        std::thread::sleep(Duration::from_millis(20));
    }
    file.write_all(&text.as_bytes()[half..]).unwrap();
    drop(file);
    let now = wait(&mut objects, |o| ip(o, "b").as_deref() == Some("10.0.0.6"));
    assert_eq!(ip(&now, "a").as_deref(), Some("10.0.0.5"));
}

#[test]
fn an_editor_that_moves_the_file_away_and_writes_a_new_one_deletes_nothing() {
    let dir = Dir::new();
    dir.put("pod.yaml", &pod("a", "10.0.0.1"));
    let (_watch, mut objects) = dir.watch();
    fs::rename(dir.path("pod.yaml"), dir.path("pod.yaml~")).unwrap();
    fs::write(dir.path(".pod.yaml.swp"), "x").unwrap();
    std::thread::sleep(Duration::from_millis(30));
    // Saved broken: the version from before the save still counts.
    fs::write(dir.path("pod.yaml"), "kind: [").unwrap();
    let now = wait(&mut objects, |o| !o.problems().is_empty());
    assert_eq!(ip(&now, "a").as_deref(), Some("10.0.0.1"));
    fs::write(dir.path("pod.yaml"), pod("a", "10.0.0.2")).unwrap();
    wait(&mut objects, |o| o.problems().is_empty() && ip(o, "a").as_deref() == Some("10.0.0.2"));
}

#[test]
fn an_object_that_moves_to_another_file_never_goes_away() {
    let dir = Dir::new();
    dir.put("a.yaml", &(pod("a", "10.0.0.1") + &pod("b", "10.0.0.2")));
    let (_watch, mut objects) = dir.watch();
    let mut moments = objects.clone();
    let seen = std::thread::spawn(move || {
        let until = Instant::now() + Duration::from_millis(500);
        while Instant::now() < until {
            assert!(moments.borrow_and_update().pod("shop", "b").is_some());
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    dir.put("a.yaml", &pod("a", "10.0.0.1"));
    std::thread::sleep(Duration::from_millis(20));
    dir.put("z.yaml", &pod("b", "10.0.0.3"));
    wait(&mut objects, |o| ip(o, "b").as_deref() == Some("10.0.0.3"));
    seen.join().unwrap();
}

#[test]
fn of_two_files_with_one_object_the_first_by_name_counts_and_the_other_is_named() {
    let dir = Dir::new();
    dir.put("b.yaml", &pod("a", "10.0.0.2"));
    let (_watch, mut objects) = dir.watch();
    dir.put("c.yaml", &pod("a", "10.0.0.3"));
    let now = wait(&mut objects, |o| !o.problems().is_empty());
    assert_eq!(ip(&now, "a").as_deref(), Some("10.0.0.2"));
    assert_eq!(now.problems()[0].file, dir.path("c.yaml"));
    dir.put("a.yaml", &pod("a", "10.0.0.1"));
    wait(&mut objects, |o| ip(o, "a").as_deref() == Some("10.0.0.1") && o.problems().len() == 2);
    fs::remove_file(dir.path("a.yaml")).unwrap();
    fs::remove_file(dir.path("b.yaml")).unwrap();
    let now = wait(&mut objects, |o| ip(o, "a").as_deref() == Some("10.0.0.3"));
    assert_eq!(now.problems(), []);
}

#[test]
fn a_swap_of_the_symlink_behind_the_files_is_one_change() {
    let dir = Dir::new();
    for (version, address) in [("..1", "10.0.0.1"), ("..2", "10.0.0.2")] {
        fs::create_dir(dir.path(version)).unwrap();
        fs::write(dir.path(version).join("pod.yaml"), pod("a", address)).unwrap();
    }
    std::os::unix::fs::symlink("..1", dir.path("..data")).unwrap();
    std::os::unix::fs::symlink("..data/pod.yaml", dir.path("pod.yaml")).unwrap();
    let (_watch, mut objects) = dir.watch();
    assert_eq!(ip(&objects.borrow(), "a").as_deref(), Some("10.0.0.1"));
    std::os::unix::fs::symlink("..2", dir.path("..new")).unwrap();
    fs::rename(dir.path("..new"), dir.path("..data")).unwrap();
    fs::remove_dir_all(dir.path("..1")).unwrap();
    wait(&mut objects, |o| ip(o, "a").as_deref() == Some("10.0.0.2"));
}

#[test]
fn files_that_are_none_or_no_text_are_named_and_hold_up_nothing() {
    let dir = Dir::new();
    fs::write(dir.path("latin.yaml"), b"kind: Pod\nname: \xff\n").unwrap();
    fs::create_dir(dir.path("folder.yaml")).unwrap();
    let pipe = std::ffi::CString::new(dir.path("pipe.yaml").to_str().unwrap()).unwrap();
    // SAFETY: the string is NUL-terminated and lives through the call.
    assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
    let huge = File::create(dir.path("huge.yaml")).unwrap();
    huge.set_len(65 << 20).unwrap();
    dir.put("name.yaml", "apiVersion: v1\nkind: Pod\nmetadata: {name: ../../etc}\n");
    dir.put("bomb.yaml", &bomb());
    dir.put("good.yaml", &pod("a", "fd00::1"));
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    let named: Vec<_> = now.problems().iter().map(|p| p.file.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(named, ["bomb.yaml", "huge.yaml", "latin.yaml", "name.yaml", "pipe.yaml"]);
    assert_eq!(now.problems()[2].line, Some(2));
    assert_eq!(ip(&now, "a").as_deref(), Some("fd00::1"));
}

#[test]
fn a_folder_that_goes_away_takes_nothing_with_it() {
    let dir = Dir::new();
    dir.put("pod.yaml", &pod("a", "10.0.0.1"));
    let (_watch, mut objects) = dir.watch();
    let away = dir.0.with_extension("away");
    fs::rename(&dir.0, &away).unwrap();
    let now = wait(&mut objects, |o| !o.problems().is_empty());
    assert!(now.pod("shop", "a").is_some(), "{:?}", now.problems());
    fs::create_dir(&dir.0).unwrap();
    dir.put("pod.yaml", &pod("a", "10.0.0.2"));
    wait(&mut objects, |o| o.problems().is_empty() && ip(o, "a").as_deref() == Some("10.0.0.2"));
    // The new folder is heard as well.
    dir.put("pod.yaml", &pod("a", "10.0.0.3"));
    wait(&mut objects, |o| ip(o, "a").as_deref() == Some("10.0.0.3"));
    fs::remove_dir_all(away).unwrap();
}

#[test]
fn a_change_leaves_the_other_objects_the_same_allocation() {
    let dir = Dir::new();
    let many = |changed: usize| -> String {
        (0..300).map(|n| pod(&format!("p{n}"), if n == changed { "10.0.1.1" } else { "10.0.0.1" })).collect()
    };
    dir.put("pods.yaml", &many(999));
    let (_watch, mut objects) = dir.watch();
    let before = objects.borrow().clone();
    dir.put("pods.yaml", &many(7));
    let after = wait(&mut objects, |o| ip(o, "p7").as_deref() == Some("10.0.1.1"));
    assert!(Arc::ptr_eq(before.pod("shop", "p8").unwrap(), after.pod("shop", "p8").unwrap()));
    let changes = after.changes_since(&before);
    assert_eq!(changes.pods, [ObjectName::new("shop", "p7")]);
    assert!(changes.services.is_empty() && !changes.is_empty());
}

#[test]
fn a_status_stands_in_place_of_the_annotation_if_it_is_of_that_pod_and_node() {
    let (dir, status) = (Dir::new(), Dir::new());
    dir.put("pod.yaml", &pod("a", "10.0.0.1"));
    let folder = StatusFolder::open(&status.0).unwrap();
    let watch = watch(Folders { manifests: dir.0.clone(), status: Some(status.0.clone()) }).unwrap();
    let mut objects = watch.objects();
    let redirection = |o: &Objects| o.redirection(o.pod("shop", "a").unwrap());
    assert_eq!(redirection(&objects.borrow()), None);

    let mut wanted = PodStatus {
        pod: PodRef { namespace: "shop".into(), name: "a".into(), uid: "uid-a".into() },
        node: "node-a".into(),
        redirection: Redirection::Enabled,
        reason: String::new(),
    };
    folder.write(&wanted).unwrap();
    wait(&mut objects, |o| redirection(o) == Some(Redirection::Enabled));
    assert_eq!(folder.of_node("node-a").unwrap(), [wanted.clone()]);
    assert_eq!(folder.of_node("node-b").unwrap(), []);

    fs::write(status.path("uid-a.yaml"), "pod: {").unwrap();
    let now = wait(&mut objects, |o| !o.problems().is_empty());
    assert_eq!(redirection(&now), Some(Redirection::Enabled));

    wanted.node = "node-b".into();
    folder.write(&wanted).unwrap();
    wait(&mut objects, |o| redirection(o).is_none() && o.problems().is_empty());

    assert!(folder.remove("uid-a").unwrap());
    assert!(!folder.remove("uid-a").unwrap());
    wait(&mut objects, |o| o.statuses.is_empty());
    wanted.pod.uid = "../x".into();
    assert!(folder.write(&wanted).is_err());
}

#[test]
fn a_missing_folder_stops_the_start_with_its_name() {
    let error = watch(Folders { manifests: "/nowhere/at/all".into(), status: None }).unwrap_err();
    assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
}

#[test]
fn policies_of_both_versions_are_read_with_what_they_say() {
    let dir = Dir::new();
    dir.put("p.yaml", &(policy("AuthorizationPolicy", "v1", "a") + &policy("PeerAuthentication", "v1beta1", "a")));
    dir.put(
        "list.json",
        r#"{"apiVersion":"security.istio.io/v1","kind":"AuthorizationPolicyList","items":[{"metadata":{"name":"b"}}]}"#,
    );
    dir.put("ports.yaml", "apiVersion: security.istio.io/v1\nkind: PeerAuthentication\nmetadata: {name: p}\nspec: {portLevelMtls: {8080: {mode: STRICT}}}\n--- {apiVersion: security.istio.io/v1, kind: PeerAuthentication, metadata: {name: beside-the-marker}}\n");
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    assert_eq!(now.problems(), []);
    assert_eq!((now.authorization_policies.len(), now.peer_authentications.len()), (2, 3));
    let spec = |policy: &SecurityPolicy| policy.spec.clone().unwrap();
    assert_eq!(spec(&now.authorization_policies[&ObjectName::new("shop", "a")]), serde_json::json!({"x": 1}));
    assert_eq!(spec(&now.authorization_policies[&ObjectName::new("default", "b")]), serde_json::Value::Null);
    let ports = serde_json::json!({"portLevelMtls": {"8080": {"mode": "STRICT"}}});
    assert_eq!(spec(&now.peer_authentications[&ObjectName::new("default", "p")]), ports);
}

/// Somebody relies on it: not even a policy that cannot be read may be taken for none.
#[test]
fn a_policy_that_cannot_be_read_has_a_stand_in_unless_an_earlier_version_stays() {
    let broken = [
        ("twice.yaml", policy("AuthorizationPolicy", "v1", "twice") + "  x: 2\n", "shop/twice"),
        ("version.yaml", policy("AuthorizationPolicy", "v7", "version"), "shop/version"),
        ("syntax.yaml", policy("AuthorizationPolicy", "v1", "syntax") + "  rules: [{\n", "shop/syntax"),
        (
            "labels.yaml",
            policy("AuthorizationPolicy", "v1", "labels").replace("spec:", "  labels: [x]\nspec:"),
            "shop/labels",
        ),
        ("name.yaml", policy("AuthorizationPolicy", "v1", "Not_A_Name"), "shop/unreadable_"),
        ("none.yaml", "kind: AuthorizationPolicy\nmetadata: {namespace: yard}\n".into(), "yard/unreadable_"),
        ("case.yaml", policy("authorizationpolicy", "v1", "case"), "shop/case"),
        ("top.yaml", policy("AuthorizationPolicy", "v1", "top").replace("spec:", "Spec:"), "shop/top"),
        (
            "number.yaml",
            policy("AuthorizationPolicy", "v1", "number").replace("x: 1", "x: {8080: a, '8080': b}"),
            "shop/number",
        ),
        (
            "list.yaml",
            format!(
                "apiVersion: v1\nkind: List\nitems:\n- {}",
                policy("AuthorizationPolicy", "v1", "item").replace("---\n", "").replace('\n', "\n  ") + "x: 2\n"
            )
            .replace("\n  x: 2", "\n    x: 2"),
            "shop/item",
        ),
        (
            "twice.json",
            r#"{"apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy", "metadata": {"name": "twice"},
                "spec": {"action": "DENY", "rules": [{}], "action": "ALLOW"}}"#
                .into(),
            "default/twice",
        ),
        ("json.json", r#"{"kind": "AuthorizationPolicy", "metadata": {"name": "json", "#.into(), "default/json"),
        ("pod.yaml", pod("a", "10.0.0.1") + "  - {", ""),
    ];
    for (file, text, stands) in broken {
        let dir = Dir::new();
        dir.put(file, &text);
        let (_watch, mut objects) = dir.watch();
        let now = objects.borrow_and_update().clone();
        assert_eq!(now.problems().len(), 1, "{file}");
        let names: Vec<String> = now.authorization_policies.keys().map(ToString::to_string).collect();
        assert!(
            if stands.is_empty() { names.is_empty() } else { names[0].starts_with(stands) && names.len() == 1 },
            "{file}: {names:?}"
        );
        for policy in now.authorization_policies.values() {
            assert_eq!(policy.spec.as_ref().unwrap_err().as_ref(), now.problems()[0].reason, "{file}");
        }
        if stands.is_empty() {
            continue;
        }
        // Mended, the stand-in goes; broken again, the mended one stays.
        dir.put(file, &if file.ends_with("json") {
            serde_json::json!({"apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy", "metadata": {"name": "json"}}).to_string()
        } else {
            policy("AuthorizationPolicy", "v1", "good")
        });
        let good = |o: &Objects| {
            o.authorization_policies.len() == 1 && o.authorization_policies.values().all(|p| p.spec.is_ok())
        };
        wait(&mut objects, |o| good(o) && o.problems().is_empty());
        dir.put(file, "kind: AuthorizationPolicy\n  spec: [");
        wait(&mut objects, |o| good(o) && !o.problems().is_empty());
    }
}

#[test]
fn for_the_policies_of_a_file_that_is_no_utf_8_something_stands() {
    let dir = Dir::new();
    let text = policy("AuthorizationPolicy", "v1", "a") + "  # caf";
    fs::write(dir.path("latin.yaml"), [text.as_bytes(), b"\xe9\n"].concat()).unwrap();
    let wide: Vec<u8> = text.replace("name: a", "name: b").encode_utf16().flat_map(u16::to_le_bytes).collect();
    fs::write(dir.path("wide.yaml"), [b"\xff\xfe", &*wide].concat()).unwrap();
    let (_watch, mut objects) = dir.watch();
    let now = objects.borrow_and_update().clone();
    assert_eq!(now.problems().len(), 2);
    let stand_ins = |o: &Objects| o.authorization_policies.values().filter(|p| p.spec.is_err()).count();
    assert_eq!((now.authorization_policies.len(), stand_ins(&now)), (2, 2));
    assert!(now.authorization_policies.contains_key(&ObjectName::new("shop", "a")));
    dir.put("latin.yaml", &text);
    wait(&mut objects, |o| stand_ins(o) == 1 && o.authorization_policies.len() == 2);
    // What was good stays, whatever becomes of its file.
    fs::write(dir.path("latin.yaml"), b"kind: AuthorizationPolicy\n\xe9").unwrap();
    wait(&mut objects, |o| o.problems().len() == 2 && stand_ins(o) == 1 && o.authorization_policies.len() == 2);
    fs::remove_file(dir.path("wide.yaml")).unwrap();
    wait(&mut objects, |o| stand_ins(o) == 0 && o.authorization_policies.len() == 1);
}

#[test]
fn a_kind_of_the_policies_group_that_is_none_is_named() {
    let dir = Dir::new();
    let kinds = ["AuthorizationPolicies", "PeerAuthentications", "RequestAuthentication"];
    dir.put("kinds.yaml", &kinds.map(|kind| policy(kind, "v1", "a")).concat());
    let (_watch, objects) = dir.watch();
    let now = objects.borrow().clone();
    let reasons: Vec<_> = now.problems().iter().map(|p| &p.reason).collect();
    assert_eq!(reasons.len(), 2, "{reasons:?}");
    assert!(reasons.iter().all(|reason| reason.contains("PeerAuthentication and AuthorizationPolicy")), "{reasons:?}");
}

#[test]
fn files_tell_where_each_part_of_an_object_stands() {
    let dir = Dir::new();
    dir.put("a.yaml", &(pod("p", "10.0.0.1") + &policy("AuthorizationPolicy", "v1", "a") + "--- {\n"));
    dir.put("b.yaml", &policy("AuthorizationPolicy", "v1", "a"));
    let list = "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: Secret, metadata: {name: s}}\n- apiVersion: security.istio.io/v1\n  kind: PeerAuthentication\n  metadata: {name: in-list}\n  spec:\n    mtls: {}\n";
    let mut files = Files::default();
    files.read(&dir.0, &mut std::io::empty());
    files.read(Path::new("-"), &mut list.as_bytes());
    files.read(&dir.path("none.yaml"), &mut std::io::empty());
    let key = ObjectKey::AuthorizationPolicy(ObjectName::new("shop", "a"));
    let in_list = ObjectKey::PeerAuthentication(ObjectName::new("default", "in-list"));
    assert_eq!(files.keys().into_iter().skip(1).collect::<Vec<_>>(), [&key, &in_list]);
    assert_eq!(files.place(&key), Some((dir.path("a.yaml").as_path(), 13)));
    let spec = FieldPath::default().field("spec");
    assert_eq!(files.place_of(&key, &spec.field("x")), Some((dir.path("a.yaml").as_path(), 20)));
    assert_eq!(files.place_of(&in_list, &spec.field("mtls").field("mode")), Some((Path::new("(stdin)"), 9)));
    let problems: Vec<String> = files.problems().iter().map(ToString::to_string).collect();
    assert_eq!(problems.len(), 3, "{problems:?}");
    assert!(problems[0].contains("none.yaml: cannot be read") && problems[1].contains("a.yaml:22"), "{problems:?}");
    assert!(problems[2].contains("b.yaml:1: AuthorizationPolicy shop/a: given twice"), "{problems:?}");
}

fn policy(kind: &str, version: &str, name: &str) -> String {
    format!(
        "---\napiVersion: security.istio.io/{version}\nkind: {kind}\nmetadata:\n  name: {name}\n  namespace: shop\nspec:\n  x: 1\n"
    )
}

fn pod(name: &str, address: &str) -> String {
    format!(
        "---\napiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  namespace: shop\n  uid: uid-{name}\nspec:\n  \
         nodeName: node-a\nstatus:\n  podIP: \"{address}\"\n  phase: Running\n"
    )
}

fn ip(objects: &Objects, name: &str) -> Option<String> {
    objects.pod("shop", name)?.status.as_ref()?.pod_ip.clone()
}

/// Aliases of aliases: small on disk, huge in memory.
fn bomb() -> String {
    let mut text = "apiVersion: v1\nkind: Pod\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for n in 1..12 {
        let before = format!("*a{}", n - 1);
        text += &format!("a{n}: &a{n} [{}]\n", vec![before; 10].join(", "));
    }
    text
}

fn wait(objects: &mut tokio::sync::watch::Receiver<Arc<Objects>>, holds: impl Fn(&Objects) -> bool) -> Arc<Objects> {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let now = objects.borrow_and_update().clone();
        if holds(&now) {
            return now;
        }
        assert!(Instant::now() < until, "did not come to hold: {now:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder for one test.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("understory-manifests-{}-{count}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn put(&self, name: &str, text: &str) {
        let temporary = self.0.join(".new");
        fs::write(&temporary, text).unwrap();
        fs::rename(temporary, self.path(name)).unwrap();
    }

    fn watch(&self) -> (Watch, tokio::sync::watch::Receiver<Arc<Objects>>) {
        let watch = watch(Folders { manifests: Path::new(&self.0).to_owned(), status: None }).unwrap();
        let objects = watch.objects();
        (watch, objects)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

use super::*;

const LIST: &str =
    "{\n  \"cniVersion\": \"1.0.0\",\n  \"name\": \"net\",\n  \"plugins\": [\n    {\"type\": \"bridge\"}\n  ]\n}\n";
const SINGLE: &str = "{\"cniVersion\": \"0.4.0\", \"name\": \"net\", \"type\": \"bridge\"}\n";

struct Node {
    root: PathBuf,
    install: Install,
}

impl Node {
    fn new(test: &str, own_file: bool) -> Node {
        let root = std::env::temp_dir().join(format!("understory-cni-install-{test}-{}", std::process::id()));
        let dirs = CniDirs { conf: root.join("net.d"), bin: root.join("bin") };
        fs::create_dir_all(&dirs.conf).unwrap();
        let program = root.join("program");
        fs::write(&program, "the program").unwrap();
        let entry = Entry {
            socket: "/run/cni.sock".into(),
            exclude_namespaces: vec!["kube-system".into()],
            timeout_seconds: 15,
        };
        Node { install: Install { dirs, own_file, program, entry }, root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.install.dirs.conf.join(name)
    }

    fn put(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.install.dirs.conf).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn look(&self) -> Standing {
        install_entry(&self.install, true).unwrap()
    }

    fn has_entry(&self, name: &str) -> bool {
        chain::with_entry(&self.text(name), &self.install.entry.to_json()).unwrap().is_none()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

#[test]
fn the_program_is_copied_whole_and_only_where_it_changes() {
    let node = Node::new("program", false);
    let (program, bin) = (&node.install.program, &node.install.dirs.bin);
    assert!(install_program(program, bin).unwrap());
    let installed = bin.join(PLUGIN);
    assert_eq!(fs::metadata(&installed).unwrap().permissions().mode() & 0o777, 0o755);
    assert!(!install_program(program, bin).unwrap());
    for broken in ["the pr0gram", "short"] {
        fs::write(&installed, broken).unwrap();
        assert!(install_program(program, bin).unwrap());
        assert_eq!(fs::read_to_string(&installed).unwrap(), "the program");
    }
    assert_eq!(fs::read_dir(bin).unwrap().count(), 1, "nothing is left beside it");
}

#[test]
fn the_first_list_gets_the_entry_and_gives_it_back_as_it_was() {
    let node = Node::new("list", false);
    assert_eq!(node.look(), Standing::NoChain);
    node.put("20-other.conflist", LIST);
    node.put("10-net.conflist", LIST);
    node.put("05-not.txt", "nonsense");
    fs::set_permissions(node.path("10-net.conflist"), fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(install_entry(&node.install, false).unwrap(), Standing::Missing(node.path("10-net.conflist")));
    assert_eq!(node.text("10-net.conflist"), LIST);
    assert_eq!(node.look(), Standing::Put(node.path("10-net.conflist")));
    assert_eq!(node.look(), Standing::InPlace(node.path("10-net.conflist")));
    assert!(node.has_entry("10-net.conflist"));
    assert_eq!(fs::metadata(node.path("10-net.conflist")).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(node.text("20-other.conflist"), LIST, "only the one in use is changed");
    // Another takes its place by its name.
    node.put("00-new.conflist", LIST);
    assert_eq!(node.look(), Standing::Put(node.path("00-new.conflist")));
    install_program(&node.install.program, &node.install.dirs.bin).unwrap();
    remove(&node.install.dirs, true).unwrap();
    assert!(node.install.dirs.bin.join(PLUGIN).exists(), "it was to stay");
    remove(&node.install.dirs, false).unwrap();
    for name in ["00-new.conflist", "10-net.conflist", "20-other.conflist"] {
        assert_eq!(node.text(name), LIST);
    }
    assert!(!node.install.dirs.bin.join(PLUGIN).exists());
    assert_eq!(remove(&node.install.dirs, false).unwrap(), Vec::<String>::new(), "once more is no error");
}

#[test]
fn a_single_configuration_gets_a_list_before_it_that_follows_it() {
    let node = Node::new("single", false);
    node.put("10-net.conf", SINGLE);
    let own = "10-net-understory.conflist";
    assert_eq!(node.look(), Standing::Put(node.path(own)));
    assert_eq!(node.names()[0], own, "runtimes take the first");
    assert_eq!(node.text("10-net.conf"), SINGLE);
    node.put("10-net.conf", &SINGLE.replace("bridge", "ptp"));
    assert_eq!(node.look(), Standing::Put(node.path(own)));
    assert!(node.text(own).contains("ptp"));
    // The network is replaced by one with another name.
    fs::remove_file(node.path("10-net.conf")).unwrap();
    node.put("30-new.conflist", LIST);
    assert_eq!(node.look(), Standing::Put(node.path("30-new.conflist")));
    assert_eq!(node.names(), ["30-new.conflist"]);
    fs::remove_file(node.path("30-new.conflist")).unwrap();
    assert_eq!(node.look(), Standing::NoChain);
}

#[test]
fn a_file_of_our_own_outlives_a_rewriting_of_the_one_it_is_made_from() {
    let node = Node::new("own", true);
    node.put("10-net.conflist", LIST);
    let own = "10-net-understory.conflist";
    assert_eq!(node.look(), Standing::Put(node.path(own)));
    assert!(node.has_entry(own));
    assert_eq!(node.text("10-net.conflist"), LIST);
    // The node starts anew: the network's own agent writes its file before ours is there.
    node.put("10-net.conflist", LIST);
    assert_eq!(node.names()[0], own);
    assert_eq!(node.look(), Standing::InPlace(node.path(own)));
    // The other way of installing, from one day to the next.
    let other = Install { own_file: false, ..node.install.clone() };
    assert_eq!(install_entry(&other, true).unwrap(), Standing::Put(node.path("10-net.conflist")));
    assert_eq!(node.names(), ["10-net.conflist"]);
    assert_eq!(node.look(), Standing::Put(node.path(own)));
    remove(&node.install.dirs, false).unwrap();
    assert_eq!((node.names(), node.text("10-net.conflist")), (vec!["10-net.conflist".to_owned()], LIST.to_owned()));
}

#[test]
fn what_cannot_be_extended_is_named_and_left_alone() {
    let node = Node::new("wrong", false);
    for text in ["{ half", &LIST.replace("1.0.0", "0.1.0"), "{}"] {
        node.put("10-net.conflist", text);
        let error = install_entry(&node.install, true).unwrap_err();
        assert!(error.to_string().contains("10-net.conflist"), "{error}");
        assert_eq!(node.text("10-net.conflist"), text);
        assert_eq!(remove(&node.install.dirs, false).unwrap(), Vec::<String>::new());
    }
    node.put("10-net.conflist", LIST);
    assert_eq!(node.look(), Standing::Put(node.path("10-net.conflist")));
}

/// Some runtimes stop at a broken one, and then nothing starts; others take the next.
#[test]
fn a_broken_configuration_does_not_keep_the_entry_out_of_the_next() {
    let node = Node::new("broken", false);
    node.put("10-net.conflist", LIST);
    std::fs::create_dir(node.path("00-folder.conflist")).unwrap();
    for text in ["", "{ half", "\u{0}"] {
        node.put("05-broken.conflist", text);
        node.put("10-net.conflist", LIST);
        assert_eq!(node.look(), Standing::Put(node.path("10-net.conflist")));
        assert!(node.has_entry("10-net.conflist"));
        assert_eq!(node.text("05-broken.conflist"), text);
    }
}

#[test]
fn what_another_writes_in_the_same_moment_is_not_lost() {
    let node = Node::new("moment", false);
    node.put("10-net.conflist", LIST);
    let path = node.path("10-net.conflist");
    let theirs = LIST.replace("bridge", "ptp");
    let meanwhile = || {
        node.put("10-net.conflist", &theirs);
        node.text("10-net.conflist") == LIST
    };
    assert!(!replace_if(&path, 0o644, |file| file.write_all(b"ours"), meanwhile).unwrap());
    assert_eq!((node.text("10-net.conflist"), node.names().len()), (theirs, 1));
}

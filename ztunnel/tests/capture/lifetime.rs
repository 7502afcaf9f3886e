//! What outlives the agent, what its successor makes of it, and what is left in the end.

use std::fs;
use std::os::fd::AsFd;
use std::path::PathBuf;

use ztunnel::capture::programs::{Capture, CaptureConfig};

use crate::ground::*;

/// An app's connection is captured and known.
fn assert_captured(ground: &Ground) {
    let app = ground.connect_from_pod("10.1.2.3:80").unwrap();
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:80");
    assert_eq!(app.peer_addr().unwrap().to_string(), "10.1.2.3:80");
    ground.assert_steered(&ground.connect_from_outside("10.99.0.2:7000").unwrap());
}

#[test]
fn capture_outlives_its_owner_and_a_successor_changes_nothing() {
    let mut ground = Ground::new("adopt");
    let app = ground.connect_from_pod("10.1.2.3:80").unwrap();
    let links = ground.links();
    assert_eq!(links.len(), 6, "{links:?}");
    ground.capture = None;
    // The connection of before the end is accepted, and there are new ones.
    let (_proxy, original) = ground.accept_outbound();
    assert_eq!(original.unwrap().to_string(), "10.1.2.3:80");
    assert_captured(&ground);
    ground.capture = Some(Capture::open(ground.config.clone()).unwrap());
    assert_eq!(ground.links(), links, "same links, same programs");
    assert_eq!(ground.capture().pods().unwrap(), [ground.pod.cookie()]);
    assert_eq!(ground.capture().inbound_links().unwrap(), [ground.pod.cookie()]);
    assert!(ground.capture().inbound_attached(ground.pod.cookie()));
    assert!(ground.capture().has_listener(ground.pod.cookie(), ebpf::HBONE_PORT).unwrap());
    assert_eq!(app.peer_addr().unwrap().to_string(), "10.1.2.3:80");
    assert_captured(&ground);
}

#[test]
fn pins_that_somebody_removes_are_missed_and_put_back_and_capture_goes_on() {
    let mut ground = Ground::new("pins");
    let before = ground.links();
    assert!(ground.capture().missing().is_empty());
    fs::remove_file(ground.pins().join("links/us_sock_ops")).unwrap();
    fs::remove_file(ground.pins().join("maps/PODS")).unwrap();
    assert_eq!(ground.capture().missing(), ["us_sock_ops", "PODS"]);
    fs::remove_dir_all(ground.pins()).unwrap();
    assert_eq!(ground.capture().missing().len(), 16);
    assert_captured(&ground);
    let again = Capture::open_again(ground.config.clone(), ground.capture()).unwrap();
    assert!(again.missing().is_empty() && again.has_maps_of(ground.capture()));
    ground.capture = Some(again);
    assert_eq!(ground.links(), before);
    assert_captured(&ground);
}

#[test]
fn a_start_mends_what_a_crash_has_left_half_done() {
    let mut ground = Ground::new("crash");
    let links = ground.pins().join("links");
    let cookie = ground.pod.cookie();
    ground.capture = None;
    // Pinned and not yet renamed; with and without an older link in its place; not pinned at all.
    fs::rename(links.join("us_connect4"), links.join("new-us_connect4")).unwrap();
    fs::rename(links.join("us_connect6"), links.join("new-us_getpeername6")).unwrap();
    fs::remove_file(links.join("us_sock_ops")).unwrap();
    fs::remove_file(links.join(format!("inbound-{cookie}"))).unwrap();
    ground.capture = Some(Capture::open(ground.config.clone()).unwrap());
    ground.capture().attach_inbound(ground.pod.as_fd(), cookie).unwrap();
    let names: Vec<_> = ground.links().into_iter().map(|(name, ..)| name).collect();
    let inbound = format!("inbound-{cookie}");
    assert_eq!(names, [&inbound, "us_connect4", "us_connect6", "us_getpeername4", "us_getpeername6", "us_sock_ops"]);
    assert_captured(&ground);
    let _app = ground.connect_from_pod("[fd01::5]:80").unwrap();
    assert_eq!(ground.accept_outbound().1.unwrap().to_string(), "[fd01::5]:80");
}

#[test]
fn programs_are_exchanged_inside_their_links() {
    let mut ground = Ground::new("exchange");
    let before = ground.links();
    let app = ground.connect_from_pod("10.1.2.3:80").unwrap();
    let (_proxy, _) = ground.accept_outbound();
    ground.capture = None;
    // Maps that the programs do not use, as after a crash that lost them, stand for any other change of a program.
    for name in ["PODS", "ORIG_DST", "LISTENERS"] {
        fs::remove_file(ground.pins().join("maps").join(name)).unwrap();
    }
    let capture = Capture::open(ground.config.clone()).unwrap();
    let fds = capture.map_fds().unwrap();
    ground.orig_dst = ztunnel::capture::maps::OrigDstMap::new(fds.orig_dst).unwrap();
    ground.capture = Some(capture);
    let after = ground.links();
    for ((name, link, program), (_, link_then, program_then)) in after.iter().zip(&before) {
        assert_eq!(link, link_then, "{name}");
        let uses_the_maps = !name.contains("getpeername");
        assert_eq!(program != program_then, uses_the_maps, "{name}");
    }
    assert_eq!(app.peer_addr().unwrap().to_string(), "10.1.2.3:80", "old sockets are known to new programs");
    assert!(ground.capture().pods().unwrap().is_empty());
    ground.listeners = None;
    ground.enrol();
    assert_captured(&ground);
}

#[test]
fn links_of_another_cgroup_are_made_anew() {
    let mut ground = Ground::new("moved");
    let before = ground.links();
    ground.capture = None;
    ground.config.cgroup_root = ground.cgroup.join("app");
    ground.capture = Some(Capture::open(ground.config.clone()).unwrap());
    for ((name, link, _), (_, link_then, _)) in ground.links().iter().zip(&before) {
        assert_eq!(link != link_then, !name.starts_with("inbound"), "{name}");
    }
    // The kernel frees a link's id a moment before it takes the program off the hook: until then both cgroups have one.
    let _app = wait("the old hook to end", || ground.connect_from_pod("10.1.2.3:80").ok());
    let _ = ground.accept_outbound();
    assert_captured(&ground);
}

#[test]
fn what_belonged_to_a_netns_that_is_gone_is_swept() {
    let mut ground = Ground::new("gone");
    let gone = fresh_netns();
    let cookie = gone.cookie();
    ground.capture().attach_inbound(gone.as_fd(), cookie).unwrap();
    assert!(ground.capture().inbound_attached(cookie));
    drop(gone);
    wait("the kernel to end the netns", || (!ground.capture().inbound_attached(cookie)).then_some(()));
    assert_eq!(ground.capture().inbound_links().unwrap().len(), 2);
    ground.capture = None;
    ground.capture = Some(Capture::open(ground.config.clone()).unwrap());
    assert_eq!(ground.capture().inbound_links().unwrap(), [ground.pod.cookie()]);
}

#[test]
fn a_released_pod_is_as_before() {
    let mut ground = Ground::new("release");
    ground.release();
    let app = ground.listen_in_pod("10.99.0.2:7000");
    ground.connect_from_outside("10.99.0.2:7000").unwrap();
    app.accept().unwrap();
    let there = ground.listen_outside("10.99.0.1:7000");
    ground.connect_from_pod("10.99.0.1:7000").unwrap();
    assert_eq!(there.accept().unwrap().1.ip(), POD);
    for (name, entries, _) in ground.capture().fill().unwrap() {
        assert_eq!(entries, 0, "{name}");
    }
    assert!(ground.capture().inbound_links().unwrap().is_empty());
}

#[test]
fn enrolled_and_released_twenty_times_a_pod_leaves_nothing() {
    let mut ground = Ground::new("twenty");
    let open_fds = || fs::read_dir("/proc/self/fd").unwrap().count();
    ground.release();
    let before = open_fds();
    for _ in 0..20 {
        ground.enrol();
        assert_captured(&ground);
        ground.release();
    }
    assert_eq!(open_fds(), before);
    assert_eq!(ground.links().len(), 5);
    for (name, entries, _) in ground.capture().fill().unwrap() {
        assert_eq!(entries, 0, "{name}");
    }
}

#[test]
fn removal_leaves_no_pin_and_no_link() {
    let mut ground = Ground::new("remove");
    let links = ground.links();
    ground.capture = None;
    Capture::remove_all(&ground.config.bpf_dir).unwrap();
    assert!(!ground.config.bpf_dir.exists());
    for (name, link, _) in links {
        wait(&format!("link {name} to end"), || (!link_exists(link)).then_some(()));
    }
    let there = ground.listen_outside("10.99.0.1:7000");
    // The kernel frees a link's id a moment before it takes the program off the hook.
    there.set_nonblocking(true).unwrap();
    wait("a connection that is not captured", || {
        let _app = ground.connect_from_pod("10.99.0.1:7000").ok()?;
        there.accept().ok()
    });
    Capture::remove_all(&ground.config.bpf_dir).unwrap();
}

#[test]
fn opened_again_and_at_once_by_many_it_stays_as_it_is() {
    let ground = Ground::new("many");
    let links = ground.links();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| Capture::open(ground.config.clone()).unwrap());
        }
    });
    assert_eq!(ground.links(), links);
    assert_captured(&ground);
}

#[test]
fn a_missing_file_system_is_named_with_the_remedy() {
    let ground = Ground::new("missing");
    let config = |bpf_dir: &str, cgroup_root: &str| CaptureConfig::new(bpf_dir.into(), PathBuf::from(cgroup_root));
    let cgroup_root = ground.config.cgroup_root.to_str().unwrap();
    let error = Capture::open(config("/tmp/us-no-bpffs", cgroup_root)).unwrap_err().to_string();
    assert!(error.contains("/tmp/us-no-bpffs") && error.contains("mount -t bpf"), "{error}");
    let error = Capture::open(config("/sys/fs/bpf/us-capture-never", "/tmp")).unwrap_err().to_string();
    assert!(error.contains("/tmp") && error.contains("mount -t cgroup2"), "{error}");
}

fn link_exists(id: u32) -> bool {
    const BPF_LINK_GET_FD_BY_ID: u32 = 30;
    let attr = [id, 0, 0];
    // SAFETY: the attribute outlives the call and its size is passed.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_LINK_GET_FD_BY_ID, attr.as_ptr(), size_of_val(&attr)) };
    if fd < 0 {
        return false;
    }
    // SAFETY: the call has made this descriptor for us.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd as i32) });
    true
}

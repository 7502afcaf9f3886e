//! Large transfers: complete, in order, and bounded where a reader stalls.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use testbed::{Behaviour, Shop, StreamExt, read_checksum, send_pattern};

const GIB: u64 = 1 << 30;

/// Largest number of bytes that may be on their way to a reader that does not read: the socket buffers of the three
/// hops (a few MB each, as the kernel tunes them) and the stream's window in the proxies (256 KB at the start).
const IN_FLIGHT: u64 = 24 << 20;

#[test]
fn a_gibibyte_each_way_arrives_unchanged() {
    let shop = Shop::in_mesh();
    let up = shop.far.serve(8080, Behaviour::Sink);
    let mut stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    let sum = send_pattern(&mut stream, GIB).expect("send");
    stream.half_close();
    let answer = stream.hear(16);
    assert_eq!(u64::from_be_bytes(answer[..8].try_into().unwrap()), GIB, "bytes");
    assert_eq!(u64::from_be_bytes(answer[8..].try_into().unwrap()), sum, "checksum");
    drop((up, stream));

    let _down = shop.far.serve(8080, Behaviour::Source(GIB));
    let mut stream = shop.client.connect(shop.far.at6(8080)).expect("connect");
    assert_eq!(read_checksum(&mut stream).expect("receive"), (GIB, sum));
}

/// Both directions of one connection at once.
#[test]
fn both_directions_at_once_arrive_unchanged() {
    const SIZE: u64 = 64 << 20;
    let shop = Shop::in_mesh();
    let behaviour = Behaviour::custom(|mut stream: TcpStream| {
        let mut writer = stream.try_clone().expect("duplicate");
        let sending = std::thread::spawn(move || {
            send_pattern(&mut writer, SIZE).expect("send");
            writer.half_close();
        });
        let (bytes, _) = read_checksum(&mut stream).expect("receive");
        assert_eq!(bytes, SIZE);
        sending.join().expect("the writer");
    });
    for (pod, to) in [(&shop.near, shop.near_service.at(80)), (&shop.far, shop.far_service.at(80))] {
        let _server = pod.serve(8080, behaviour.clone());
        let mut stream = shop.client.connect(to).expect("connect");
        let mut writer = stream.try_clone().expect("duplicate");
        let sending = std::thread::spawn(move || {
            let sum = send_pattern(&mut writer, SIZE).expect("send");
            writer.half_close();
            sum
        });
        let received = read_checksum(&mut stream).expect("receive");
        assert_eq!(received, (SIZE, sending.join().expect("the writer")));
    }
}

/// B36: a slow reader must press back to the sender, not fill the proxies' memory; and it must not hold up another
/// stream of the same tunnel.
#[test]
fn a_stalled_reader_bounds_the_bytes_in_flight_and_slows_nobody_else() {
    let shop = Shop::in_mesh();
    let stalled = shop.far.serve(8081, Behaviour::Stall);
    let _echo = shop.far.serve(8080, Behaviour::Echo);
    let mut other = shop.client.connect(shop.far.at(8080)).expect("connect");
    let round_trips = |other: &mut TcpStream| {
        let start = Instant::now();
        for _ in 0..200 {
            other.ask(&[b'x'; 1024]);
        }
        start.elapsed()
    };
    round_trips(&mut other);
    let before = round_trips(&mut other);
    let rss_before: u64 = shop.mesh().nodes().iter().map(|node| node.proxy.pss()).sum();

    let mut accepted = Vec::new();
    for _ in 0..4 {
        let mut stream = shop.client.connect(shop.far.at(8081)).expect("connect");
        stream.set_write_timeout(Some(Duration::from_secs(2))).expect("set a timeout");
        let mut sent = 0u64;
        let block = [1u8; 64 * 1024];
        let end = loop {
            match stream.write(&block) {
                Ok(n) => sent += n as u64,
                Err(e) => break e,
            }
            assert!(sent <= IN_FLIGHT, "{sent} bytes were taken for a reader that never read");
        };
        assert_eq!(end.kind(), ErrorKind::WouldBlock, "the sender is held, not cut off: {end}");
        accepted.push((stream, sent));
    }
    let after = round_trips(&mut other);
    assert!(after < before * 5 + Duration::from_millis(200), "{before:?} before, {after:?} with stalled neighbours");
    let rss_after: u64 = shop.mesh().nodes().iter().map(|node| node.proxy.pss()).sum();
    assert!(rss_after < rss_before + (32 << 20), "the proxies grew from {rss_before} to {rss_after} bytes");
    assert_eq!(stalled.seen().len(), 4);
}

/// The same the other way: a client that does not read.
#[test]
fn a_client_that_does_not_read_bounds_the_bytes_in_flight() {
    let shop = Shop::in_mesh();
    let sent = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let counter = sent.clone();
    let _server = shop.far.serve(
        8080,
        Behaviour::custom(move |mut stream| {
            let block = [1u8; 64 * 1024];
            while let Ok(n) = stream.write(&block) {
                counter.fetch_add(n as u64, std::sync::atomic::Ordering::Relaxed);
            }
        }),
    );
    let stream = shop.client.connect(shop.far_service.at(80)).expect("connect");
    let mut last = 0;
    testbed::wait_for("the sender to be held", || {
        std::thread::sleep(Duration::from_millis(500));
        let now = sent.load(std::sync::atomic::Ordering::Relaxed);
        assert!(now <= IN_FLIGHT, "{now} bytes were taken for a client that never read");
        (now > 0 && std::mem::replace(&mut last, now) == now).then_some(())
    });
    drop(stream);
}

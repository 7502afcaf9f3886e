//! What must hold of a tunnel's HTTP/2 whatever a peer sends. Used by the fuzz target, and by a test that goes through
//! made-up input without a fuzzer.

use std::cell::RefCell;
use std::rc::Rc;

use h2::Reason;
use http::{HeaderMap, StatusCode};

use super::connection::{Connection, Role};
use super::fields::{Request, Response};
use super::frame::{self, kind};
use super::settings::Settings;
use super::state::State;

const WINDOW: u32 = 1000;
const STREAMS: u32 = 4;

/// Gives bytes to either end of a tunnel, in pieces that the first bytes say. Panics where something does not hold.
pub fn check(bytes: &[u8]) {
    let Some(([how, piece], bytes)) = bytes.split_first_chunk() else { return };
    let role = if how & 1 == 0 { Role::Client } else { Role::Server };
    let settings =
        Settings { stream_window: WINDOW, connection_window: 1 << 20, max_streams: STREAMS, ..Settings::default() };
    let mut connection = Connection::new(role, &settings);
    let mut open: Vec<(u32, Rc<RefCell<State>>)> = Vec::new();
    if how & 2 == 0 {
        // What comes before anything of interest.
        let mut hello = if role == Role::Server { frame::PREFACE.to_vec() } else { Vec::new() };
        frame::write(&mut hello, kind::SETTINGS, 0, 0, &[]);
        connection.read(&hello);
    }
    if role == Role::Client {
        let request = Request::connect("192.0.2.1:80", HeaderMap::new());
        open.extend((0..3).filter_map(|_| connection.open(&request)));
    }
    for (turn, part) in bytes.chunks(usize::from(*piece).max(1)).enumerate() {
        connection.read(part);
        connection.deliver();
        while let Some((id, _, state)) = connection.next_request() {
            let status = if how & 4 == 0 || turn % 2 == 0 { StatusCode::OK } else { StatusCode::BAD_REQUEST };
            connection.answer(id, &Response { status, headers: HeaderMap::new() }, status != StatusCode::OK);
            if status == StatusCode::OK {
                open.push((id, state));
            }
        }
        for (id, state) in &open {
            use_stream(&mut connection, *id, &mut state.borrow_mut(), how & 8 == 0);
        }
        open.retain(|(_, state)| !state.borrow().is_over());
        if how & 16 != 0
            && turn % 7 == 6
            && let Some((id, _)) = open.pop()
        {
            connection.reset(id, Reason::CANCEL);
        }
        if how & 32 != 0 && turn == 20 {
            connection.leave();
        }
        connection.check_unsent();
        connection.grant(1000);
        assert!(connection.streams() <= STREAMS as usize, "{} streams", connection.streams());
        if how & 64 == 0 {
            connection.out().clear();
        }
        // What a peer that does not read may make us hold, and what one turn adds to it.
        assert!(connection.out().len() < 128 << 10, "{} bytes wait to be sent", connection.out().len());
        if connection.failed().is_some() {
            connection.end("the peer broke HTTP/2");
            assert!(open.iter().all(|(_, state)| state.borrow().is_over()), "a stream outlives its tunnel");
            return;
        }
    }
}

fn use_stream(connection: &mut Connection, id: u32, state: &mut State, reads: bool) {
    let waiting = state.waiting.len();
    assert!(waiting <= 4 * WINDOW as usize, "{waiting} bytes wait for a reader");
    let taken = if reads { waiting } else { 0 };
    state.waiting.drain(..taken);
    connection.taken(id, state, taken);
    if !state.is_over() && !state.we_ended {
        let n = connection.room(id, state, 100).min(connection.frame_size());
        connection.sent(state, n);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::super::frame::flag;
    use super::*;

    /// Mostly frames, so that what lies behind the first fault is reached as well.
    fn input() -> impl Strategy<Value = Vec<u8>> {
        let payload = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            Just(vec![0; 8]),
            prop::collection::vec(any::<u8>(), 4),
            (1u32..200_000).prop_map(|n| n.to_be_bytes().to_vec()),
            Just(connect()),
            (0usize..3000).prop_map(|n| vec![0; n]),
        ];
        let flags = prop_oneof![Just(0), Just(flag::END_HEADERS), Just(flag::END_HEADERS | 1), any::<u8>()];
        let framed = (0u8..11, flags, 0u32..12, payload).prop_map(|(kind, flags, stream, payload)| {
            let mut bytes = Vec::new();
            frame::write(&mut bytes, kind, flags, stream, &payload);
            bytes
        });
        let opened = (0u32..6).prop_map(|n| {
            let mut bytes = Vec::new();
            frame::write(&mut bytes, kind::HEADERS, flag::END_HEADERS, 2 * n + 1, &connect());
            bytes
        });
        let sent = (0u32..6, 0usize..1500, any::<bool>()).prop_map(|(n, length, end)| {
            let mut bytes = Vec::new();
            frame::write(&mut bytes, kind::DATA, u8::from(end), 2 * n + 1, &vec![1; length]);
            bytes
        });
        let part = prop_oneof![3 => opened, 3 => sent, 2 => framed, 1 => prop::collection::vec(any::<u8>(), 0..30)];
        (any::<[u8; 2]>(), prop::collection::vec(part, 0..40))
            .prop_map(|(how, parts)| [how.to_vec(), parts.concat()].concat())
    }

    fn connect() -> Vec<u8> {
        let mut block = Vec::new();
        Request::connect("10.0.0.1:80", HeaderMap::new()).write(&mut block);
        block
    }

    #[test]
    fn whatever_a_peer_sends_is_bounded_and_ends_in_no_panic() {
        let config = Config { cases: 20_000, failure_persistence: None, ..Config::default() };
        let held = TestRunner::new(config).run(&input(), |bytes| {
            check(&bytes);
            Ok(())
        });
        held.unwrap();
    }
}

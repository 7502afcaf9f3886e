//! Our HTTP/2 against the h2 crate's, over a pipe that delivers in pieces of any size; and against frames that no good
//! peer sends.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::super::frame::{Head, flag, kind};
use super::super::state::Sink;
use super::*;

/// Takes what it is given, up to what it has been told to.
#[derive(Default)]
struct Cup {
    held: RefCell<Vec<u8>>,
    room: Cell<usize>,
}

impl Sink for Cup {
    fn put(&self, bytes: &[u8]) -> io::Result<usize> {
        let n = bytes.len().min(self.room.get());
        self.room.set(self.room.get() - n);
        self.held.borrow_mut().extend_from_slice(&bytes[..n]);
        Ok(n)
    }

    fn waits(&self, _: usize) {}
}

fn settings() -> Settings {
    Settings { stream_window: 70_000, connection_window: 200_000, frame_size: 20_000, ..Settings::default() }
}

/// What both sides do with one stream, as bytes of either direction and how it ends.
#[derive(Debug, Clone)]
struct Exchange {
    up: usize,
    down: usize,
    /// Bytes of one write.
    piece: usize,
    /// Reset by us (or by the peer) when so many bytes have come.
    reset: Option<(bool, usize)>,
    /// How much the reader takes at a time.
    sip: usize,
}

fn exchange() -> impl Strategy<Value = Exchange> {
    let size = prop_oneof![0usize..4, 1usize..3_000, 60_000usize..250_000];
    let reset = prop_oneof![4 => Just(None), 1 => (any::<bool>(), 0usize..100_000).prop_map(Some)];
    (size.clone(), size, 1usize..40_000, reset, 500usize..90_000).prop_map(|(up, down, piece, reset, sip)| Exchange {
        up,
        down,
        piece,
        reset,
        sip,
    })
}

fn pattern(stream: usize, from: usize, length: usize) -> Vec<u8> {
    (from..from + length).map(|n| (n.wrapping_mul(31) ^ (n >> 8) ^ stream.wrapping_mul(77)) as u8).collect()
}

/// Nothing comes for so long only where both sides wait for each other.
const STALL: Duration = Duration::from_secs(10);

/// One of our streams in the making, with what is left to do.
struct Ours {
    number: usize,
    id: u32,
    state: Rc<RefCell<State>>,
    cup: Rc<Cup>,
    plan: Exchange,
    /// What we send, and what we are sent.
    send: usize,
    receive: usize,
    sent: usize,
    ended: bool,
    answered: bool,
    gone: bool,
}

impl std::fmt::Debug for Ours {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state.borrow();
        let ends = (self.answered, self.ended, state.peer_ended, self.gone);
        let windows = (state.send_window, state.receive_window, state.taken, state.target);
        let moved = (self.sent, self.send, self.cup.held.borrow().len(), self.receive);
        write!(f, "{}: {:?} ends {ends:?} windows {windows:?} moved {moved:?}", self.number, self.plan)
    }
}

impl Ours {
    fn new(role: Role, number: usize, id: u32, state: Rc<RefCell<State>>, plan: Exchange) -> Self {
        let (send, receive) = if role == Role::Client { (plan.up, plan.down) } else { (plan.down, plan.up) };
        let cup = Rc::new(Cup::default());
        state.borrow_mut().sink = Some(cup.clone());
        let answered = role == Role::Server;
        Self { number, id, state, cup, plan, send, receive, sent: 0, ended: false, answered, gone: false }
    }

    /// One turn; whether it is over.
    fn turn(&mut self, connection: &mut Connection) -> bool {
        if self.gone {
            return true;
        }
        let mut state = self.state.borrow_mut();
        self.cup.room.set(self.plan.sip);
        while !state.waiting.is_empty() {
            let front = state.waiting.as_slices().0.to_vec();
            let n = self.cup.put(&front).unwrap();
            if n == 0 {
                break;
            }
            state.waiting.drain(..n);
            connection.taken(self.id, &mut state, n);
        }
        let held = self.cup.held.borrow().len();
        assert!(held <= self.receive, "more came than was sent");
        if state.broken.is_some() {
            self.gone = true;
            return true;
        }
        if let Some((true, after)) = self.plan.reset
            && held >= after.min(self.receive)
        {
            drop(state);
            connection.reset(self.id, Reason::CANCEL);
            self.gone = true;
            return true;
        }
        self.answered |= state.answer.take().is_some_and(|answer| answer.status == StatusCode::OK);
        if self.answered && !self.ended {
            loop {
                let room = connection.room(self.id, &mut state, 50_000).min(connection.frame_size());
                let n = room.min(self.plan.piece).min(self.send - self.sent);
                let last = self.sent + n == self.send;
                if n == 0 && !last {
                    break;
                }
                let head = Head::new(kind::DATA, if last { flag::END_STREAM } else { 0 }, self.id, n);
                connection.out().extend_from_slice(&head.bytes());
                connection.out().extend_from_slice(&pattern(self.number, self.sent, n));
                connection.sent(&mut state, n);
                self.sent += n;
                if last {
                    self.ended = true;
                    connection.end_sent(self.id, &mut state);
                    break;
                }
            }
        }
        self.ended && state.peer_ended && state.waiting.is_empty()
    }

    fn check(&self) {
        let held = self.cup.held.borrow();
        assert_eq!(*held, pattern(self.number, 0, held.len()), "stream {}", self.number);
        if !self.gone {
            assert_eq!((held.len(), self.sent), (self.receive, self.send), "stream {}", self.number);
        }
        let may_be_cut = self.plan.reset.is_some();
        assert!(
            !self.gone || may_be_cut,
            "stream {} was broken off: {:?}",
            self.number,
            self.state.borrow().broken.as_ref()
        );
    }
}

/// The h2 crate's end of a stream.
async fn theirs(
    number: usize,
    plan: Exchange,
    is_client: bool,
    mut send: h2::SendStream<Bytes>,
    mut receive: h2::RecvStream,
) {
    let (to_send, to_receive) = if is_client { (plan.up, plan.down) } else { (plan.down, plan.up) };
    let sender = async {
        let mut sent = 0;
        loop {
            let mut n = plan.piece.min(to_send - sent);
            if n > 0 {
                send.reserve_capacity(n);
                // Streams that each held a part of the connection's window and waited for the rest would wait for ever.
                while send.capacity() == 0 {
                    match poll_fn(|cx| send.poll_capacity(cx)).await {
                        Some(Ok(_)) => {}
                        _ => return,
                    }
                }
                n = n.min(send.capacity());
            }
            let last = sent + n == to_send;
            if send.send_data(pattern(number, sent, n).into(), last).is_err() {
                return;
            }
            sent += n;
            if last {
                if plan.reset.is_some() {
                    let _ = poll_fn(|cx| send.poll_reset(cx)).await;
                }
                return;
            }
        }
    };
    let receiver = async {
        let mut heard = Vec::new();
        while let Some(piece) = receive.data().await {
            let Ok(piece) = piece else { return };
            heard.extend_from_slice(&piece);
            if receive.flow_control().release_capacity(piece.len()).is_err() {
                return;
            }
            if let Some((false, after)) = plan.reset
                && heard.len() >= after.min(to_receive)
            {
                return;
            }
        }
        assert!(plan.reset.is_some() || heard.len() == to_receive, "{} of {to_receive}", heard.len());
        assert_eq!(heard, pattern(number, 0, heard.len()));
    };
    if plan.reset.is_some() {
        // Dropping either half resets the stream.
        tokio::select! { () = sender => {}, () = receiver => {} }
    } else {
        tokio::join!(sender, receiver);
    }
}

fn request(number: usize) -> Request {
    let mut headers = HeaderMap::new();
    headers.insert("baggage", HeaderValue::from_str(&"k8s.namespace.name=shop,".repeat(number % 40)).unwrap());
    Request::connect(&format!("10.0.0.1:{}", number + 1), headers)
}

/// Moves bytes between our connection and the pipe, until all of ours are over.
async fn drive(role: Role, pipe: &mut DuplexStream, plans: &[Exchange], chunk: usize) -> Vec<Ours> {
    let mut connection = Connection::new(role, &settings());
    let mut ours = Vec::new();
    if role == Role::Client {
        for (number, plan) in plans.iter().enumerate() {
            let (id, state) = connection.open(&request(number)).expect("a stream");
            ours.push(Ours::new(role, number, id, state, plan.clone()));
        }
    }
    let mut buffer = vec![0; chunk];
    loop {
        while let Some((id, request, state)) = connection.next_request() {
            let number: usize = request.authority.rsplit(':').next().unwrap().parse::<usize>().unwrap() - 1;
            assert_eq!(request.headers, self::request(number).headers, "read as it was written");
            connection.answer(id, &Response { status: StatusCode::OK, headers: HeaderMap::new() }, false);
            ours.push(Ours::new(role, number, id, state, plans[number].clone()));
        }
        connection.grant(50_000);
        let mut all_over = true;
        for stream in &mut ours {
            all_over &= stream.turn(&mut connection);
        }
        assert_eq!(connection.failed(), None);
        let out = std::mem::take(connection.out());
        pipe.write_all(&out).await.expect("the peer reads");
        if all_over && ours.len() == plans.len() {
            assert_eq!(connection.streams(), 0, "nothing is left behind");
            return ours;
        }
        if !out.is_empty() || ours.iter().any(|stream| !stream.gone && !stream.state.borrow_mut().waiting.is_empty()) {
            // The reader takes more by and by; the peer may go on meanwhile.
            tokio::task::yield_now().await;
        } else {
            let read = tokio::time::timeout(STALL, pipe.read(&mut buffer)).await;
            let n = read.unwrap_or_else(|_| panic!("nothing moves: {ours:#?}")).expect("a pipe");
            assert!(n > 0, "the peer closed the connection");
            connection.read(&buffer[..n]);
        }
        connection.deliver();
    }
}

async fn against_h2_server(plans: &[Exchange], chunk: usize) {
    let (mut pipe, far) = tokio::io::duplex(16 << 20);
    let theirs_plans = plans.to_vec();
    let server = tokio::task::spawn_local(async move {
        let mut builder = h2::server::Builder::new();
        builder.initial_window_size(90_000).max_frame_size(30_000).data_frame_budget(1 << 40);
        let mut connection = builder.handshake::<_, Bytes>(far).await.expect("our greeting is good");
        while let Some(accepted) = connection.accept().await {
            let (request, mut respond) = accepted.expect("no error on the connection");
            let number = request.uri().authority().unwrap().port_u16().unwrap() as usize - 1;
            let send = respond.send_response(http::Response::new(()), false);
            let Ok(send) = send else { continue };
            let plan = theirs_plans[number].clone();
            tokio::task::spawn_local(theirs(number, plan, false, send, request.into_body()));
        }
    });
    let ours = drive(Role::Client, &mut pipe, plans, chunk).await;
    ours.iter().for_each(Ours::check);
    drop(pipe);
    let _ = server.await;
}

async fn against_h2_client(plans: &[Exchange], chunk: usize) {
    let (mut pipe, far) = tokio::io::duplex(16 << 20);
    let theirs_plans = plans.to_vec();
    let client = tokio::task::spawn_local(async move {
        let mut builder = h2::client::Builder::new();
        builder.initial_window_size(90_000).max_frame_size(30_000).data_frame_budget(1 << 40).enable_push(false);
        let (mut send, connection) = builder.handshake::<_, Bytes>(far).await.expect("a greeting");
        let driver = tokio::task::spawn_local(connection);
        let mut streams = Vec::new();
        for (number, plan) in theirs_plans.into_iter().enumerate() {
            let mut head = http::Request::connect(format!("10.0.0.1:{}", number + 1)).body(()).unwrap();
            *head.headers_mut() = request(number).headers;
            send = send.ready().await.expect("room for a stream");
            let (answer, body) = send.send_request(head, false).expect("send");
            streams.push(tokio::task::spawn_local(async move {
                if let Ok(answer) = answer.await {
                    assert_eq!(answer.status(), StatusCode::OK);
                    theirs(number, plan, true, body, answer.into_body()).await;
                }
            }));
        }
        for stream in streams {
            stream.await.expect("no panic");
        }
        // Our side closes.
        let _ = driver.await;
        drop(send);
    });
    let ours = drive(Role::Server, &mut pipe, plans, chunk).await;
    ours.iter().for_each(Ours::check);
    drop(pipe);
    client.await.expect("no panic");
}

#[test]
fn any_exchange_with_the_h2_crate_ends_as_planned() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut runner =
        TestRunner::new(Config { cases: 1000, max_shrink_iters: 0, failure_persistence: None, ..Config::default() });
    let plans = (prop::collection::vec(exchange(), 1..12), prop_oneof![1usize..40, 1000usize..70_000]);
    runner
        .run(&plans, |(plans, chunk)| {
            let both = async {
                // Large exchanges in tiny pieces would take long.
                let chunk =
                    if plans.iter().map(|p| p.up + p.down).sum::<usize>() > 50_000 { chunk.max(500) } else { chunk };
                let limit = std::time::Duration::from_secs(20);
                tokio::time::timeout(limit, against_h2_server(&plans, chunk)).await.expect("no end with a server");
                tokio::time::timeout(limit, against_h2_client(&plans, chunk)).await.expect("no end with a client");
            };
            tokio::task::LocalSet::new().block_on(&runtime, both);
            Ok(())
        })
        .unwrap();
}

/// A connection of ours that has greeted and been greeted; what it wrote is taken.
fn server() -> Connection {
    let mut connection = Connection::new(Role::Server, &settings());
    let mut hello = frame::PREFACE.to_vec();
    frame::write(&mut hello, kind::SETTINGS, 0, 0, &[]);
    connection.read(&hello);
    connection.out().clear();
    connection
}

/// A CONNECT as it comes.
fn opened(id: u32) -> Vec<u8> {
    let (mut block, mut bytes) = (Vec::new(), Vec::new());
    Request::connect("10.0.0.1:80", HeaderMap::new()).write(&mut block);
    frame::write(&mut bytes, kind::HEADERS, flag::END_HEADERS, id, &block);
    bytes
}

fn connect(connection: &mut Connection, id: u32) -> Rc<RefCell<State>> {
    connection.read(&opened(id));
    let (arrived, _, state) = connection.next_request().expect("a request");
    assert_eq!(arrived, id);
    connection.answer(id, &Response { status: StatusCode::OK, headers: HeaderMap::new() }, false);
    connection.out().clear();
    state
}

fn data(connection: &mut Connection, id: u32, length: usize, flags: u8) {
    let mut bytes = Vec::new();
    frame::write(&mut bytes, kind::DATA, flags, id, &vec![7; length]);
    connection.read(&bytes);
    connection.deliver();
}

/// Kinds, streams and last four bytes of the frames that were written.
fn written(connection: &mut Connection) -> Vec<(u8, u32, u32)> {
    let out = std::mem::take(connection.out());
    let (mut rest, mut frames) = (&out[..], Vec::new());
    while let [a, b, c, kind, _, w, x, y, z, ..] = *rest {
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let payload = &rest[9..9 + length];
        let last = payload.last_chunk::<4>().map_or(0, |last| u32::from_be_bytes(*last));
        frames.push((kind, u32::from_be_bytes([w, x, y, z]), last));
        rest = &rest[9 + length..];
    }
    frames
}

#[test]
fn a_reader_that_stalls_is_sent_no_more_than_its_window_and_others_are_not_held_up() {
    let mut connection = server();
    let (stalled, read) = (connect(&mut connection, 1), connect(&mut connection, 3));
    let cup = Rc::new(Cup::default());
    cup.room.set(usize::MAX);
    read.borrow_mut().sink = Some(cup.clone());
    for _ in 0..7 {
        data(&mut connection, 1, 10_000, 0);
    }
    // Its window is used up; that of the connection is not.
    assert_eq!(written(&mut connection), []);
    assert_eq!(stalled.borrow_mut().waiting.len(), 70_000);
    for _ in 0..50 {
        data(&mut connection, 3, 10_000, 0);
        assert_eq!(connection.failed(), None);
    }
    assert_eq!(cup.held.borrow().len(), 500_000);
    let windows = written(&mut connection);
    assert!(windows.iter().all(|(kind, stream, _)| *kind == kind::WINDOW_UPDATE && *stream != 1), "{windows:?}");
    assert!(read.borrow().target == 4 * 70_000, "the window of one that keeps up has grown");
    // One byte more costs the stream, and the stream only.
    data(&mut connection, 1, 1, 0);
    assert_eq!(written(&mut connection), [(kind::RST_STREAM, 1, Reason::FLOW_CONTROL_ERROR.into())]);
    assert_eq!(stalled.borrow().broken.as_ref(), Some(&Broken::Fault(Reason::FLOW_CONTROL_ERROR)));
    data(&mut connection, 3, 1, flag::END_STREAM);
    assert_eq!(connection.failed(), None);
}

#[test]
fn what_is_under_way_to_a_stream_that_we_reset_is_passed_over() {
    let mut connection = server();
    connect(&mut connection, 1);
    connection.reset(1, Reason::CANCEL);
    assert_eq!(written(&mut connection), [(kind::RST_STREAM, 1, Reason::CANCEL.into())]);
    data(&mut connection, 1, 10_000, 0);
    data(&mut connection, 1, 10_000, flag::END_STREAM);
    assert_eq!((written(&mut connection), connection.failed()), (vec![], None));
    // Once the peer has reset it as well, nothing can be under way any more.
    let mut bytes = Vec::new();
    frame::write(&mut bytes, kind::RST_STREAM, 0, 1, &[0, 0, 0, 8]);
    connection.read(&bytes);
    data(&mut connection, 1, 1, 0);
    assert_eq!(written(&mut connection), [(kind::RST_STREAM, 1, Reason::STREAM_CLOSED.into())]);
}

#[test]
fn streams_that_are_opened_only_to_be_reset_end_the_connection() {
    let mut connection = server();
    let mut streams = 0;
    while connection.failed().is_none() && streams < 5000 {
        let id = 2 * streams + 1;
        let mut bytes = opened(id);
        frame::write(&mut bytes, kind::RST_STREAM, 0, id, &[0, 0, 0, 8]);
        connection.read(&bytes);
        streams += 1;
    }
    assert_eq!(connection.failed().map(|(reason, _)| reason), Some(Reason::ENHANCE_YOUR_CALM));
    assert!(streams > 900 && connection.next_request().is_none(), "{streams}");
}

#[test]
fn answers_that_are_not_read_are_bounded() {
    let mut connection = server();
    let mut pings = Vec::new();
    (0..5000).for_each(|_| frame::write(&mut pings, kind::PING, 0, 0, &[1; 8]));
    connection.read(&pings);
    connection.check_unsent();
    assert_eq!(connection.failed().map(|(reason, _)| reason), Some(Reason::ENHANCE_YOUR_CALM));
}

#[test]
fn more_streams_than_agreed_are_refused_and_may_be_tried_again() {
    let mut connection = Connection::new(Role::Server, &Settings { max_streams: 2, ..settings() });
    let mut hello = frame::PREFACE.to_vec();
    frame::write(&mut hello, kind::SETTINGS, 0, 0, &[]);
    connection.read(&hello);
    connect(&mut connection, 1);
    connect(&mut connection, 3);
    connection.read(&opened(5));
    assert_eq!(written(&mut connection), [(kind::RST_STREAM, 5, Reason::REFUSED_STREAM.into())]);
    assert!(connection.next_request().is_none());
}

#[test]
fn a_server_that_leaves_takes_what_was_under_way_and_nothing_after_that() {
    let mut connection = server();
    connection.leave();
    let said = written(&mut connection);
    assert_eq!(said.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>(), [kind::GOAWAY, kind::PING]);
    let state = connect(&mut connection, 1);
    let mut ack = Vec::new();
    frame::write(&mut ack, kind::PING, flag::ACK, 0, &LEAVING);
    connection.read(&ack);
    assert_eq!(written(&mut connection).len(), 1, "the last stream is named");
    connection.read(&opened(3));
    assert_eq!(written(&mut connection), [(kind::RST_STREAM, 3, Reason::REFUSED_STREAM.into())]);
    assert!(!connection.is_done());
    data(&mut connection, 1, 3, flag::END_STREAM);
    connection.end_sent(1, &mut state.borrow_mut());
    assert!(connection.is_done());
}

#[test]
fn a_client_tells_what_a_leaving_server_has_not_begun_with() {
    let mut connection = Connection::new(Role::Client, &settings());
    let mut hello = Vec::new();
    frame::write(&mut hello, kind::SETTINGS, 0, 0, &[]);
    connection.read(&hello);
    let (_, first) = connection.open(&request(0)).unwrap();
    let (_, second) = connection.open(&request(1)).unwrap();
    let mut bytes = Vec::new();
    frame::write(&mut bytes, kind::GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]);
    connection.read(&bytes);
    assert_eq!((first.borrow().broken.as_ref(), second.borrow().broken.as_ref()), (None, Some(&Broken::NotTaken)));
    assert!(connection.open(&request(2)).is_none() && connection.peer_left());
}

/// Sends as much as it may, as a relay with much to send does.
fn send_all(connection: &mut Connection, id: u32, state: &Rc<RefCell<State>>, outbox: &mut usize) -> usize {
    let (state, mut sent) = (&mut *state.borrow_mut(), 0);
    loop {
        let room = connection.room(id, state, *outbox);
        if room == 0 {
            return sent;
        }
        connection.sent(state, room);
        *outbox -= room;
        sent += room;
    }
}

#[test]
fn streams_that_wait_for_room_take_turns_and_those_that_cannot_use_theirs_hold_up_nobody() {
    let mut connection = server();
    let mut hello = Vec::new();
    frame::write(&mut hello, kind::WINDOW_UPDATE, 0, 0, &(1u32 << 30).to_be_bytes());
    connection.read(&hello);
    let states: Vec<_> = (0..6).map(|n| connect(&mut connection, 2 * n + 1)).collect();
    for state in &states {
        state.borrow_mut().send_window = 1 << 30;
    }
    let mut outbox = 0;
    for (n, state) in states.iter().enumerate() {
        assert_eq!(send_all(&mut connection, 2 * n as u32 + 1, state, &mut outbox), 0);
    }
    // One has been reset meanwhile, and one has used up its own window.
    connection.reset(1, Reason::CANCEL);
    states[1].borrow_mut().send_window = 0;
    let mut sent = [0; 6];
    for _ in 0..40 {
        // Room for three turns: whoever is woken sends all it can.
        outbox = 3 * TURN;
        let waiting: Vec<usize> = connection.core.queue.iter().map(|id| *id as usize / 2).filter(|n| *n > 1).collect();
        connection.grant(outbox);
        for n in waiting.into_iter().filter(|n| !states[*n].borrow().queued) {
            sent[n] += send_all(&mut connection, 2 * n as u32 + 1, &states[n], &mut outbox);
        }
    }
    assert_eq!(sent[..2], [0, 0]);
    assert_eq!(sent[2..], [30 * TURN; 4], "each has had as many turns as the others");
    // It comes back on its own when the peer gives it window.
    let mut more = Vec::new();
    frame::write(&mut more, kind::WINDOW_UPDATE, 0, 3, &100u32.to_be_bytes());
    connection.read(&more);
    assert_eq!(connection.room(3, &mut states[1].borrow_mut(), 3 * TURN), 0, "others wait");
    connection.grant(6 * TURN);
    assert_eq!(connection.room(3, &mut states[1].borrow_mut(), 3 * TURN), 100);
}

/// The peer reads, but gives no window, and resets what waits for it.
#[test]
fn streams_that_are_reset_while_they_wait_for_room_are_forgotten() {
    let mut connection = server();
    let kept = connect(&mut connection, 1);
    assert_eq!(connection.room(1, &mut kept.borrow_mut(), 0), 0);
    for n in 1..1000 {
        let id = 2 * n + 1;
        let state = connect(&mut connection, id);
        connection.answer(id, &Response { status: StatusCode::OK, headers: HeaderMap::new() }, false);
        assert_eq!(connection.room(id, &mut state.borrow_mut(), 0), 0);
        let mut reset = Vec::new();
        frame::write(&mut reset, kind::RST_STREAM, 0, id, &u32::from(Reason::CANCEL).to_be_bytes());
        connection.read(&reset);
        connection.out().clear();
    }
    assert_eq!(connection.failed(), None);
    let waiting = &connection.core.queue;
    assert!(waiting.len() < 100 && waiting.front() == Some(&1), "{waiting:?}");
}

#[test]
fn faults_on_streams_that_are_not_answered_end_the_connection_too() {
    let mut connection = server();
    for n in 0..2000 {
        let id = 2 * n + 1;
        let mut bytes = opened(id);
        frame::write(&mut bytes, kind::WINDOW_UPDATE, 0, id, &[0; 4]);
        connection.read(&bytes);
        connection.out().clear();
    }
    assert_eq!(connection.failed().map(|(reason, _)| reason), Some(Reason::ENHANCE_YOUR_CALM));
}

#[test]
fn a_block_that_names_a_long_entry_again_and_again_is_cut_short() {
    let mut block = Vec::new();
    hpack::write(&mut block, &"n".repeat(4000), b"v");
    // To be put into the table.
    block[0] = 0x40;
    block.extend_from_slice(&[0xbe; 12_000]);
    let mut connection = server();
    let mut bytes = Vec::new();
    frame::write(&mut bytes, kind::HEADERS, flag::END_HEADERS, 1, &block);
    connection.read(&bytes);
    assert_eq!(connection.failed().map(|(reason, _)| reason), Some(Reason::ENHANCE_YOUR_CALM));
}

#[test]
fn a_tunnel_that_the_peer_has_left_is_done_once_its_streams_are_and_says_why() {
    let mut connection = Connection::new(Role::Client, &settings());
    let mut bytes = Vec::new();
    frame::write(&mut bytes, kind::SETTINGS, 0, 0, &[]);
    frame::write(&mut bytes, kind::GOAWAY, 0, 0, &[0, 0, 0, 0, 0, 0, 0, 1]);
    connection.read(&bytes);
    assert!(connection.is_done());
    assert_eq!(connection.peer_fault(), Some(Reason::PROTOCOL_ERROR));
}

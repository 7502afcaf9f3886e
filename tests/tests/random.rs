//! Random traffic: connections of all sizes, with half-closes and resets at random moments. What was sent arrives
//! unchanged and whole, or the end says that it did not.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use testbed::{Behaviour, Pod, Shop, StreamExt, read_checksum, send_pattern};

const LARGEST: u64 = 10 << 20;
const CLIENTS: u64 = 8;

/// What a connection is to do; sent to the server in front of everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    number: u64,
    up: u64,
    down: u64,
    end: Ending,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Both directions at once, each closed when it is done.
    Both,
    /// The client is done before it reads.
    ClientFirst,
    /// The server is done before the client speaks.
    ServerFirst,
    /// The client resets after so much of what it was to send.
    ClientResets,
    /// The server resets after so much of what it was to send.
    ServerResets,
}

const ENDINGS: [Ending; 5] =
    [Ending::Both, Ending::ClientFirst, Ending::ServerFirst, Ending::ClientResets, Ending::ServerResets];

/// When a side sends: while it receives, before, or after.
enum Order {
    AtOnce,
    First,
    Last,
}

/// What a side received: bytes, their checksum, and whether an orderly end came behind them.
type Received = (u64, u64, bool);

/// Steele's splitmix64.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From one byte to the largest size, each magnitude as likely as the others.
    fn size(&mut self) -> u64 {
        let bound = 1 << (1 + self.roll() % 24);
        1 + self.roll() % bound.min(LARGEST)
    }

    fn plan(&mut self, number: u64) -> Plan {
        let end = ENDINGS[(self.roll() % ENDINGS.len() as u64) as usize];
        Plan { number, up: self.size(), down: self.size(), end }
    }
}

impl Plan {
    fn bytes(self) -> [u8; 25] {
        let mut bytes = [0; 25];
        for (place, number) in [self.number, self.up, self.down].into_iter().enumerate() {
            bytes[8 * place..8 * place + 8].copy_from_slice(&number.to_be_bytes());
        }
        bytes[24] = ENDINGS.iter().position(|end| *end == self.end).unwrap_or_default() as u8;
        bytes
    }

    fn read(bytes: &[u8; 25]) -> Self {
        let number =
            |place: usize| u64::from_be_bytes(bytes[8 * place..8 * place + 8].try_into().expect("eight bytes"));
        Self { number: number(0), up: number(1), down: number(2), end: ENDINGS[usize::from(bytes[24])] }
    }
}

/// Reads to the end, however that comes. Without one in order the bytes are counted but not summed up.
fn receive(stream: &mut TcpStream) -> Received {
    match read_checksum(stream) {
        Ok((bytes, sum)) => (bytes, sum, true),
        Err(_) => (0, 0, false),
    }
}

/// Sends in the background what it is to send, and closes this direction.
fn send(stream: &TcpStream, bytes: u64) -> std::thread::JoinHandle<u64> {
    let mut stream = stream.try_clone().expect("duplicate a descriptor");
    std::thread::spawn(move || {
        let sum = send_pattern(&mut stream, bytes).expect("send");
        stream.half_close();
        sum
    })
}

/// Sends and receives, in this side's order: what was received, and the checksum of what was sent.
fn talk(stream: &mut TcpStream, bytes: u64, sends: Order) -> (Received, u64) {
    match sends {
        Order::AtOnce => {
            let sending = send(stream, bytes);
            let received = receive(stream);
            (received, sending.join().expect("the sender"))
        }
        Order::First => {
            let sum = send(stream, bytes).join().expect("the sender");
            (receive(stream), sum)
        }
        Order::Last => {
            let received = receive(stream);
            (received, send(stream, bytes).join().expect("the sender"))
        }
    }
}

fn serve(mut stream: TcpStream, seen: &Mutex<HashMap<u64, (Received, u64)>>) {
    let mut head = [0; 25];
    // A reset may overtake everything.
    if stream.read_exact(&mut head).is_err() {
        return;
    }
    let plan = Plan::read(&head);
    let account = match plan.end {
        Ending::Both => talk(&mut stream, plan.down, Order::AtOnce),
        Ending::ClientFirst => talk(&mut stream, plan.down, Order::Last),
        Ending::ServerFirst => talk(&mut stream, plan.down, Order::First),
        Ending::ClientResets => (receive(&mut stream), 0),
        Ending::ServerResets => {
            let _ = send_pattern(&mut stream, plan.down);
            stream.reset();
            return;
        }
    };
    seen.lock().expect("no panic").insert(plan.number, account);
}

/// One connection from the client's side; bytes that came through whole.
fn exchange(client: &Pod, to: SocketAddr, plan: Plan, seen: &Mutex<HashMap<u64, (Received, u64)>>) -> u64 {
    let mut stream = client.connect(to).unwrap_or_else(|e| panic!("{plan:?}: connect: {e}"));
    stream.write_all(&plan.bytes()).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let (received, sent) = match plan.end {
        Ending::Both => talk(&mut stream, plan.up, Order::AtOnce),
        Ending::ClientFirst => talk(&mut stream, plan.up, Order::First),
        Ending::ServerFirst => talk(&mut stream, plan.up, Order::Last),
        Ending::ClientResets => {
            let _ = send_pattern(&mut stream, plan.up);
            stream.reset();
            return 0;
        }
        Ending::ServerResets => {
            let (_, _, orderly) = receive(&mut stream);
            assert!(!orderly, "{plan:?}: a reset looks like an orderly end");
            return 0;
        }
    };
    // The server notes what it has seen before it closes, but its direction may end earlier than that.
    let (seen, sum) = testbed::wait_for("the server's account", || seen.lock().expect("no panic").remove(&plan.number));
    assert_eq!(seen, (plan.up, sent, true), "{plan:?}: from client to server");
    assert_eq!(received, (plan.down, sum, true), "{plan:?}: from server to client");
    plan.up + plan.down
}

/// `UNDERSTORY_RANDOM_GIB` gives another amount.
#[test]
fn random_traffic_with_half_closes_and_resets_arrives_unchanged_or_says_so() {
    let gib: u64 = std::env::var("UNDERSTORY_RANDOM_GIB").map_or(1, |text| text.parse().expect("a number of GiB"));
    let shop = Shop::in_mesh();
    let seen = Arc::new(Mutex::new(HashMap::new()));
    let behaviour = || {
        let seen = seen.clone();
        Behaviour::custom(move |stream| serve(stream, &seen))
    };
    let _servers = (shop.far.serve(8080, behaviour()), shop.near.serve(8080, behaviour()));
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (shop, moved, seen) = (&shop, &moved, &seen);
            scope.spawn(move || {
                let mut dice = Dice(0x5eed + client);
                let mut number = client;
                while moved.load(Ordering::Relaxed) < gib << 30 {
                    number += CLIENTS;
                    // Mostly through tunnels, at times to a pod of the same node.
                    let to = if dice.roll().is_multiple_of(8) { shop.near.at(8080) } else { shop.far_service.at(80) };
                    let bytes = exchange(&shop.client, to, dice.plan(number), seen);
                    moved.fetch_add(bytes, Ordering::Relaxed);
                }
            });
        }
    });
    // What the client reset, the server must not have taken for whole: there the number of bytes was less, or no end came.
    for (number, ((bytes, _, orderly), _)) in seen.lock().expect("no panic").drain() {
        assert!(!orderly, "connection {number}: a reset after {bytes} bytes looks like an orderly end");
    }
}

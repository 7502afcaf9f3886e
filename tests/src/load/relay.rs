//! The plainest relay: no TLS, no HTTP/2, one thread, one task per connection. What three hops cost at least on a
//! machine when each event is handled by itself; the mesh is measured against two of these.

use std::io;
use std::net::{Ipv6Addr, SocketAddr};

use socket2::{Domain, Socket, Type};
use tokio::net::{TcpListener, TcpStream};

use super::Measured;

/// As the proxies' buffers when they are busy.
const BUFFER: usize = 64 * 1024;

pub(super) async fn run(port: u16, to: SocketAddr) -> io::Result<Measured> {
    let listener = listen((Ipv6Addr::UNSPECIFIED, port).into())?;
    println!("ready");
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        tokio::spawn(relay(stream, to));
    }
}

async fn relay(mut client: TcpStream, to: SocketAddr) -> io::Result<()> {
    let mut server = TcpStream::connect(to).await?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER, BUFFER).await?;
    Ok(())
}

/// A dual-stack listener with a long backlog.
pub(super) fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::IPV6, Type::STREAM.nonblocking(), None)?;
    socket.set_only_v6(false)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(4096)?;
    TcpListener::from_std(socket.into())
}

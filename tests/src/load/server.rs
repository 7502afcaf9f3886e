//! The server of the benches: answers requests, takes bulk, gives bulk.

use std::io;
use std::net::Ipv6Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::exchange::answer;
use super::{HTTP_PORT, Measured, REQUESTS_PORT, SINK_PORT, SOURCE_PORT, Talk};

const BLOCK: usize = 256 * 1024;

pub(super) async fn run() -> io::Result<Measured> {
    let listen = |port| super::relay::listen((Ipv6Addr::UNSPECIFIED, port).into());
    let (requests, sink, source) = (listen(REQUESTS_PORT)?, listen(SINK_PORT)?, listen(SOURCE_PORT)?);
    let http = listen(HTTP_PORT)?;
    println!("ready");
    tokio::join!(
        accept(requests, |stream| tokio::spawn(answer(stream, Talk::Bytes))),
        accept(http, |stream| tokio::spawn(answer(stream, Talk::Http))),
        accept(sink, |stream| tokio::spawn(take(stream))),
        accept(source, |stream| tokio::spawn(give(stream))),
    );
    Ok(Measured::default())
}

async fn accept(listener: TcpListener, serve: impl Fn(TcpStream) -> tokio::task::JoinHandle<io::Result<()>>) {
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            serve(stream);
        }
    }
}

/// Takes everything, then says how much it was.
async fn take(mut stream: TcpStream) -> io::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut total = 0u64;
    loop {
        match stream.read(&mut block).await? {
            0 => break,
            n => total += n as u64,
        }
    }
    stream.write_all(&total.to_be_bytes()).await
}

/// Gives until the client has had enough.
async fn give(mut stream: TcpStream) -> io::Result<()> {
    let block = vec![b'd'; BLOCK];
    loop {
        stream.write_all(&block).await?;
    }
}

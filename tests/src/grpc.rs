//! gRPC services of a test or bench, in the place of a control plane's.

use std::io;

use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::transport::server::Router;

use crate::testbed::Outside;

/// Serves in the clear on a port of that machine, until the runtime is dropped.
pub fn serve_grpc(place: &Outside, port: u16, router: Router) -> Runtime {
    let listener = place.listen(port);
    listener.set_nonblocking(true).expect("make a listener non-blocking");
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("start a runtime");
    runtime.spawn(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("take over a listener");
        let connections = TcpListenerStream::new(listener).map(|accepted| accepted.and_then(at_once));
        // Ends with the runtime.
        let _ = router.serve_with_incoming(connections).await;
    });
    runtime
}

/// Small answers do not wait for the caller's acknowledgement of what came before.
fn at_once(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    Ok(stream)
}

//! Connections to a pod that come in the clear.
//!
//! Must never let a byte reach the app before the policies have been judged without an identity.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use socket2::SockRef;
use tokio::net::TcpStream;

use super::finish::carry;
use super::inbound::{App, ILLEGAL_PORTS, dial};
use super::judge::judge;
use super::rejudge;
use super::relay::{PlainRelay, Resetting};
use super::state::{Phase, Pod};
use super::worker::{Counted, Worker};
use crate::capture::sockets::redirected_from;
use crate::mesh::NetworkAddress;
use crate::policy;
use crate::telemetry::flow::{Direction, Failure, Flow, Peer, Protocol, ResponseFlag};

/// Serves a connection to its end.
pub async fn serve(worker: Rc<Worker>, pod: Arc<Pod>, socket: TcpStream, client: SocketAddr, counted: Counted) {
    let work = worker.shared.shutdown.work();
    let Ok(local) = socket.local_addr() else { return };
    let redirected = if pod.by_ebpf { None } else { redirected_from(SockRef::from(&socket)) };
    let local = redirected.unwrap_or(SocketAddr::new(local.ip().to_canonical(), local.port()));
    let client_socket = Resetting::new(socket);
    let mut flow = Flow::new(Direction::Inbound, Protocol::Tcp, pod.uid.clone(), client, local);
    let open = match pod.connection(&worker.shared) {
        Ok(open) => open,
        Err(failure) => {
            worker.shared.telemetry.failed(&flow, &failure);
            return;
        }
    };
    let reached = Box::pin(async {
        tokio::select! {
            biased;
            () = pod.reached(Phase::Gone) => {
                Err(Failure::new(ResponseFlag::Connect, "source", super::finish::gone().to_string()))
            }
            result = reach(&worker, &pod, client, local, &mut flow) => result,
        }
    });
    match reached.await {
        Ok(app) => {
            let connection = worker.shared.open(&pod, flow);
            rejudge::established(&worker.shared, &pod, &connection, &app.judged_by);
            let half_close = worker.shared.config.timeouts.half_close;
            let relay = PlainRelay::new(client_socket, app.socket, connection.live(), half_close);
            tokio::task::spawn_local(carry(relay, connection, None, (counted, open, work)));
        }
        Err(failure) => worker.shared.telemetry.failed(&flow, &failure),
    }
}

async fn reach(
    worker: &Worker,
    pod: &Pod,
    client: SocketAddr,
    local: SocketAddr,
    flow: &mut Flow,
) -> Result<App, Failure> {
    let own = worker.shared.own_workload(pod).await?;
    {
        let mesh = worker.shared.mesh.load();
        let address = NetworkAddress { network: own.place.network.clone(), address: client.ip() };
        flow.source = Peer::of(mesh.workload_at(&address).cloned(), None);
        flow.service = own.services.iter().find_map(|s| mesh.service(&s.service)).cloned();
        flow.destination = Peer::of(Some(own), None);
    }
    if ILLEGAL_PORTS.contains(&local.port()) {
        let text = format!("port {} is the proxy's own", local.port());
        return Err(Failure::new(ResponseFlag::Connect, "destination", text));
    }
    let judged = policy::Connection { identity: None, source: client.ip(), destination: local };
    let judged_by = judge(worker, pod, &judged, flow).await?;
    // Another port than the client's: a SYN from that one would hit the client's own connection in this namespace.
    let socket = dial(worker, pod, SocketAddr::new(client.ip(), 0), local).await?;
    Ok(App { socket, judged_by })
}

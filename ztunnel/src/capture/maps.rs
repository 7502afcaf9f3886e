//! The maps that the proxy uses for each connection, on descriptors that the agent hands over.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use ebpf::{ConnKey, Endpoint, Tuple};

use super::bpf::{BpfMap, monotonic_ns};

/// Where captured connections wanted to go.
#[derive(Debug)]
pub struct OrigDstMap(BpfMap<ConnKey, Endpoint>);

/// The proxy's own dials to apps, which `sk_lookup` lets through.
#[derive(Debug)]
pub struct PassMap(BpfMap<Tuple, u64>);

impl OrigDstMap {
    pub fn new(map: OwnedFd) -> io::Result<Self> {
        BpfMap::new(map).map(Self)
    }

    /// The destination that the socket with this address in this netns dialled, taken out of the map. Nothing: the
    /// connection was not captured.
    pub fn take(&self, netns: u64, client: SocketAddr) -> io::Result<Option<SocketAddr>> {
        let key = ConnKey { netns, source: endpoint(client) };
        Ok(self.0.take(&key)?.map(|to| address(&to)))
    }
}

impl PassMap {
    pub fn new(map: OwnedFd) -> io::Result<Self> {
        BpfMap::new(map).map(Self)
    }

    /// Lets the connection from `remote` to the app at `local` in this netns through, until [`PassMap::remove`], at
    /// most for [`ebpf::PASS_TTL_NS`]: the dial must be given up earlier. `AddrInUse`: another dial has this entry.
    pub fn insert(&self, netns: u64, remote: SocketAddr, local: SocketAddr) -> io::Result<()> {
        match self.0.add(&tuple(netns, remote, local), &monotonic_ns())? {
            true => Ok(()),
            false => Err(io::ErrorKind::AddrInUse.into()),
        }
    }

    /// Whether the connection has come to this netns.
    pub fn remove(&self, netns: u64, remote: SocketAddr, local: SocketAddr) -> io::Result<bool> {
        Ok(self.0.take(&tuple(netns, remote, local))?.is_some_and(|value| value & ebpf::PASSED != 0))
    }
}

/// An address as the maps hold it.
pub fn addr(ip: IpAddr) -> ebpf::Addr {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// An address and port as the maps hold them.
pub fn endpoint(address: SocketAddr) -> Endpoint {
    Endpoint::new(addr(address.ip()), address.port())
}

fn address(endpoint: &Endpoint) -> SocketAddr {
    SocketAddr::new(Ipv6Addr::from(endpoint.addr).to_canonical(), endpoint.port)
}

fn tuple(netns: u64, remote: SocketAddr, local: SocketAddr) -> Tuple {
    Tuple { remote: endpoint(remote), local: endpoint(local), netns }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_keep_their_family() {
        for text in ["10.0.0.1:80", "[fd00::1]:443", "[::ffff:10.0.0.1]:80"] {
            let original: SocketAddr = text.parse().unwrap();
            let canonical = SocketAddr::new(original.ip().to_canonical(), original.port());
            assert_eq!(address(&endpoint(original)), canonical);
        }
    }
}

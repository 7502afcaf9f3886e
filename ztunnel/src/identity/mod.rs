//! Who a workload is: SPIFFE ids, keys and certificates, trust bundles, TLS configurations.
//!
//! Must never hand out a certificate for an identity that was not asked for, nor one that has expired.

mod base64;
mod ca_client;
mod certificate;
mod control_plane;
mod crl;
mod crl_file;
mod key;
mod peer;
mod pem;
mod spiffe;
mod store;
#[cfg(test)]
pub(crate) mod testing;
mod tls;
mod trust;

pub use base64::base64;
pub use ca_client::{CaClient, CaClientSettings, CertificateAuthority, IssueError};
pub use certificate::{Certificate, CertificateError, CertificateInfo, describe, rfc3339};
pub use control_plane::{
    AddressError, ControlPlane, ControlPlaneAddress, LinkError, LinkTimings, RootSource, Roots, TokenSource,
    describe_status,
};
pub use crl::{CrlError, CrlSet};
pub use crl_file::CrlFile;
pub use key::{KeyError, PrivateKey};
pub use peer::{Names, PeerError, check_handshake, first_end, peer_identity};
pub use pem::{PemError, certificates as certificates_from_pem};
pub use spiffe::{Identity, ParseIdentityError, TrustDomain};
pub use store::{IdentityState, State, Store, StoreCounters, StoreError, StoreSettings};
pub use tls::{ALPN_H2, describe_alert, describe_tls_error, take_refusal};
pub use trust::{Learned, PeerRole, RevocationRules, Rule, Trust, TrustCounts, TrustSettings};

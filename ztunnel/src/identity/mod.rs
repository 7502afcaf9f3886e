//! Who a workload is: SPIFFE ids, keys and certificates, trust bundles, TLS configurations.
//!
//! Must never hand out a certificate for an identity that was not asked for, nor one that has expired.

mod spiffe;

pub use spiffe::{Identity, ParseIdentityError, TrustDomain};

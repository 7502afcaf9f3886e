//! From start to end of a process: what it still waits for, whether its workers move, how it stops.
//!
//! Must never say ready while something that traffic needs is missing.

mod limits;
mod memory;
mod readiness;
mod shutdown;
mod watchdog;

pub use limits::{DescriptorBounds, descriptors, raise_descriptor_limit};
pub use memory::{Memory, resident};
pub use readiness::{Pending, Readiness};
pub use shutdown::{Drained, Shutdown, Work};
pub use watchdog::{Beat, Watchdog};

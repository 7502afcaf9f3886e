//! The L7 proxy of a namespace. It does not exist yet: this binary only says so, and must never pretend to work.

use std::process::ExitCode;

fn main() -> ExitCode {
    eprintln!("waypoint: there is no L7 proxy yet; the mesh carries L4 traffic only (ztunnel proxy)");
    ExitCode::FAILURE
}

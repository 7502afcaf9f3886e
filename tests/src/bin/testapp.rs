//! The processes that run inside a testbed's pods. Started by the testbed only.

use std::process::ExitCode;

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("app") => testbed::testapp::run_executor(),
        Some("pause") => testbed::testapp::pause(),
        Some("load") => testbed::load::run(&std::env::args().nth(2).unwrap_or_default()),
        _ => {
            eprintln!(
                "testapp: the testbed starts this in its pods, as `testapp app`, `pause` or `load`; see tests/src"
            );
            return ExitCode::FAILURE;
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("testapp: {e}");
            ExitCode::FAILURE
        }
    }
}

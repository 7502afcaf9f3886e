//! What the demo prints: one line per step with its measured result, and the count at the end.

use std::io::{IsTerminal, Write, stdout};
use std::process::ExitCode;
use std::time::Instant;

/// The running count.
#[derive(Debug)]
pub struct Report {
    start: Instant,
    passed: u32,
    failed: u32,
    terminal: bool,
}

impl Report {
    pub fn new() -> Self {
        Self { start: Instant::now(), passed: 0, failed: 0, terminal: stdout().is_terminal() }
    }

    pub fn title(&self, text: &str) {
        println!("\n{text}");
    }

    /// Says what is waited for; on a terminal the line is replaced by the result.
    pub fn wait(&self, what: &str) {
        if self.terminal {
            print!("  … waiting for {what}");
            let _ = stdout().flush();
        } else {
            println!("  … waiting for {what}");
        }
    }

    /// A step that holds because it came to its end, with the time that it took.
    pub fn done(&mut self, text: &str, since: Instant) {
        self.check(text, true, &format!("{:.2} s", since.elapsed().as_secs_f64()));
    }

    /// A claim, whether it holds, and what was measured.
    pub fn check(&mut self, text: &str, holds: bool, measured: &str) {
        let verdict = match (holds, self.terminal) {
            (true, true) => "\r\x1b[K  \x1b[32mok\x1b[0m    ",
            (true, false) => "  ok    ",
            (false, true) => "\r\x1b[K  \x1b[31mFAILED\x1b[0m",
            (false, false) => "  FAILED",
        };
        println!("{verdict} {text:<52} {measured}");
        if holds {
            self.passed += 1;
        } else {
            self.failed += 1;
        }
    }

    pub fn note(&self, text: &str) {
        println!("           {text}");
    }

    /// A step could not be tried at all.
    pub fn broken(&mut self) {
        self.failed += 1;
        println!("\n  FAILED   the demo could not go on, see above");
    }

    /// The last lines.
    pub fn finish(&self) -> ExitCode {
        println!("\ntook {:.1} s", self.start.elapsed().as_secs_f64());
        println!("{} passed, {} failed", self.passed, self.failed);
        if self.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

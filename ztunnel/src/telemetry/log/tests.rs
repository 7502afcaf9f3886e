use std::sync::Mutex;
use std::sync::mpsc;

use tracing::{debug, error, event, info, info_span};

use super::*;

/// A stdout that a test can read.
#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lines that are written while `log` runs.
pub(crate) fn lines_of(format: Format, levels: &str, log: impl FnOnce(&Logging)) -> Vec<String> {
    let out = Captured::default();
    let queue = Queue::start(out.clone(), format, 1 << 20).unwrap();
    let (logging, subscriber) = Logging::with_queue(format, Levels::parse(levels).unwrap(), queue);
    tracing::subscriber::with_default(subscriber, || log(&logging));
    logging.flush(Duration::from_secs(10));
    String::from_utf8(out.0.lock().unwrap().clone()).unwrap().lines().map(str::to_owned).collect()
}

fn one_event() {
    let span = info_span!("inbound", id = "00-ab");
    let _entered = span.enter();
    let none: Option<&str> = None;
    let (addr, workload) = ("10.0.0.1:80", "a \"b\"");
    event!(target: "access", Level::INFO, src.addr = %addr, src.workload = workload, why = %"no way", none, bytes_sent = 7u64, "connection complete");
}

#[test]
fn a_plain_line_has_tabs_between_columns_and_quotes_around_texts() {
    let lines = lines_of(Format::Plain, "info", |_| one_event());
    let columns: Vec<&str> = lines[0].split('\t').collect();
    assert_eq!(columns[0].len(), "2026-03-01T10:11:12.123456Z".len());
    assert_eq!(
        columns[1..],
        [
            "info",
            "access{id=\"00-ab\"}",
            "connection complete",
            r#"src.addr=10.0.0.1:80 src.workload="a \"b\"" why="no way" bytes_sent=7"#
        ]
    );
}

#[test]
fn libraries_that_read_what_peers_send_speak_only_where_they_are_named() {
    let frames = |_: &Logging| {
        for _ in 0..3 {
            event!(target: "h2::proto::ping_pong", Level::WARN, "a frame that nobody expected");
        }
    };
    assert_eq!(lines_of(Format::Plain, "info", frames).len(), 0);
    assert_eq!(lines_of(Format::Plain, "trace", frames).len(), 0);
    assert_eq!(lines_of(Format::Plain, "info,h2=warn", frames).len(), 3);
    assert_eq!(lines_of(Format::Plain, "h2::proto=debug,info", frames).len(), 3);
}

#[test]
fn a_json_line_has_the_fields_at_top_level() {
    let lines = lines_of(Format::Json, "info", |_| one_event());
    let line: serde_json::Value = serde_json::from_str(&lines[0]).unwrap();
    assert_eq!(line["level"], "info");
    assert_eq!(line["scope"], "access");
    assert_eq!(line["message"], "connection complete");
    assert_eq!(line["src.addr"], "10.0.0.1:80");
    assert_eq!(line["src.workload"], "a \"b\"");
    assert_eq!(line["bytes_sent"], 7);
    assert_eq!(line["id"], "00-ab");
    assert!(line["time"].as_str().unwrap().ends_with('Z'));
    assert!(line.get("none").is_none());
}

#[test]
fn no_value_can_forge_a_line() {
    let evil = "x\n2026-01-01T00:00:00Z\terror\tforged";
    for format in [Format::Plain, Format::Json] {
        let lines = lines_of(format, "info", |_| info!(shown = %evil, quoted = evil, "{evil}"));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(!lines[0].contains("Z\terror"), "{lines:?}");
    }
}

#[test]
fn levels_are_per_target_and_change_while_running() {
    let lines = lines_of(Format::Plain, "warn,access=off", |logging| {
        info!("one");
        error!(target: "access", "two");
        logging.set_levels(Levels::parse("debug").unwrap());
        debug!("three");
        error!(target: "access", "four");
        logging.reset_levels();
        debug!("five");
        assert_eq!(logging.levels(), "warn,access=off");
    });
    let texts: Vec<&str> = lines.iter().map(|l| l.split('\t').nth(3).unwrap()).collect();
    assert_eq!(texts, ["three", "four"]);
}

#[test]
fn own_modules_are_shown_and_named_without_the_crate() {
    let lines = lines_of(Format::Plain, "off,telemetry=debug", |_| debug!("seen"));
    assert_eq!(lines[0].split('\t').nth(2).unwrap(), "telemetry::log::tests");
}

#[test]
fn a_wrong_level_is_named() {
    for text in ["", "loud", "info,access", "access=", "=info", "info,,debug", "a b=info"] {
        let error = Levels::parse(text).unwrap_err().to_string();
        assert!(error.contains("expected trace, debug, info"), "{text}: {error}");
    }
    for text in ["info", "DEBUG", "info,access=debug", "info,access:debug", "off,ztunnel::proxy=trace"] {
        Levels::parse(text).unwrap();
    }
}

#[test]
fn a_blocked_reader_costs_lines_and_never_time() {
    let (gate, opened) = mpsc::channel();
    let out = Captured::default();
    struct Gated(mpsc::Receiver<()>, Captured, bool);
    impl io::Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            if !self.2 {
                self.0.recv().unwrap();
                self.2 = true;
            }
            self.1.write(bytes)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let queue = Queue::start(Gated(opened, out.clone(), false), Format::Plain, 10_000).unwrap();
    let began = std::time::Instant::now();
    for i in 0..10_000 {
        queue.push(&format!("line {i}\n"));
    }
    assert!(began.elapsed() < Duration::from_secs(2), "pushing waited for the reader");
    let lost = queue.lost();
    assert!(lost > 5_000, "{lost}");
    gate.send(()).unwrap();
    queue.flush(Duration::from_secs(10));
    let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
    let written = text.lines().filter(|l| l.starts_with("line ")).count() as u64;
    assert_eq!(written + lost, 10_000);
    let told: u64 = text.lines().filter_map(|l| l.split_once("lost=")).map(|(_, n)| n.parse::<u64>().unwrap()).sum();
    assert_eq!(told, lost, "{text}");
}

/// A logger whose lines go nowhere, for tests of what changes its levels.
pub(crate) fn detached(levels: &str) -> Logging {
    let queue = Queue::start(io::sink(), Format::Plain, 1 << 20).unwrap();
    let (logging, subscriber) = Logging::with_queue(Format::Plain, Levels::parse(levels).unwrap(), queue);
    // The handle works as long as the filter lives.
    std::mem::forget(subscriber);
    logging
}

#[test]
fn a_text_is_quoted_as_rust_and_as_json_do_it() {
    for text in ["", "plain", "it's", "a \"b\"", "back\\slash", "über", "tab\t", "line\nline", "\u{7f}", "\u{2028}"] {
        let event = |_: &Logging| info!(value = text, number = 7u64, shown = %text, "m");
        let line = lines_of(Format::Plain, "info", event).concat();
        let start = format!("value={text:?} number=7 shown=");
        assert!(line.split('\t').nth(4).is_some_and(|fields| fields.starts_with(&start)), "{line}");
        let line = lines_of(Format::Json, "info", event).concat();
        let line: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["value"], &line["number"], &line["shown"]), (&text.into(), &7.into(), &text.into()));
    }
}

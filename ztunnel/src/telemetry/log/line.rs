//! The two shapes of a log line.

use std::cell::RefCell;
use std::fmt::{Debug, Write};
use std::time::SystemTime;

use tracing::field::{Field, Visit};

use super::{Format, Head, is_message, write_escaped};
use crate::telemetry::time;

/// Runs `f` with an empty buffer of this thread.
pub(super) fn with_buffer(f: impl FnOnce(&mut String)) {
    thread_local!(static BUFFER: RefCell<String> = const { RefCell::new(String::new()) });
    BUFFER.with(|buffer| match buffer.try_borrow_mut() {
        Ok(mut buffer) => {
            buffer.clear();
            f(&mut buffer);
            if buffer.capacity() > KEPT_BUFFER {
                *buffer = String::new();
            }
        }
        // A value that logs while it is formatted.
        Err(_) => f(&mut String::new()),
    });
}

/// `time \t level \t scope{span fields} \t message \t key=value key="text"`
pub(super) fn plain(
    out: &mut String,
    head: Head<'_>,
    spans: impl FnOnce(&mut dyn FnMut(&str)),
    record: impl FnOnce(&mut dyn Visit),
) {
    time::write_micros(out, head.time);
    let _ = write!(out, "\t{}\t{}", head.level, head.scope);
    spans(&mut |fields| {
        if !fields.is_empty() {
            let _ = write!(out, "{{{fields}}}");
        }
    });
    let mut fields = String::with_capacity(USUAL_FIELDS);
    let mut visitor = Plain::new(&mut fields);
    record(&mut visitor);
    out.push('\t');
    write_escaped(out, &visitor.message);
    if !fields.is_empty() {
        out.push('\t');
        out.push_str(&fields);
    }
    out.push('\n');
}

/// `{"level":…,"time":…,"scope":…,"message":…,"key":value}`
pub(super) fn json(
    out: &mut String,
    head: Head<'_>,
    spans: impl FnOnce(&mut dyn FnMut(&str)),
    record: impl FnOnce(&mut dyn Visit),
) {
    let _ = write!(out, "{{\"level\":\"{}\",\"time\":\"", head.level);
    time::write_micros(out, head.time);
    out.push_str("\",\"scope\":");
    write_json_text(out, head.scope);
    let mut fields = String::with_capacity(USUAL_FIELDS);
    let mut visitor = Json::new(&mut fields);
    record(&mut visitor);
    out.push_str(",\"message\":");
    write_json_text(out, &visitor.message);
    let mut append = |fields: &str| {
        if !fields.is_empty() {
            out.push(',');
            out.push_str(fields);
        }
    };
    spans(&mut append);
    append(&fields);
    out.push_str("}\n");
}

/// The line that says how many lines are missing.
pub(super) fn loss(format: Format, lost: u64) -> String {
    let mut time = String::new();
    time::write_micros(&mut time, SystemTime::now());
    let text = "lines were lost: the reader of stdout is too slow";
    match format {
        Format::Plain => format!("{time}\twarn\tlog\t{text}\tlost={lost}\n"),
        Format::Json => {
            format!(
                "{{\"level\":\"warn\",\"time\":\"{time}\",\"scope\":\"log\",\"message\":\"{text}\",\"lost\":{lost}}}\n"
            )
        }
    }
}

/// Writes fields as `key=value`, texts in quotes.
pub(super) struct Plain<'a> {
    out: &'a mut String,
    message: String,
}

/// Writes fields as `"key":value`.
pub(super) struct Json<'a> {
    out: &'a mut String,
    message: String,
}

impl<'a> Plain<'a> {
    pub(super) fn new(out: &'a mut String) -> Self {
        Self { out, message: String::new() }
    }

    fn key(&mut self, field: &Field) {
        if !self.out.is_empty() {
            self.out.push(' ');
        }
        self.out.push_str(field.name());
        self.out.push('=');
    }
}

impl Visit for Plain<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if is_message(field) {
            self.message.push_str(value);
            return;
        }
        self.key(field);
        write_quoted(self.out, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if is_message(field) {
            let _ = write!(self.message, "{value:?}");
            return;
        }
        self.key(field);
        let start = self.out.len();
        let _ = write!(self.out, "{value:?}");
        let text = &self.out[start..];
        // A text that was formatted: without quotes nobody could tell where it ends.
        if text.contains(' ') && !text.starts_with('"') {
            let text = self.out.split_off(start);
            write_quoted(self.out, &text);
        } else if text.contains(char::is_control) {
            let text = self.out.split_off(start);
            write_escaped(self.out, &text);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.key(field);
        let _ = write!(self.out, "{value}");
    }
}

impl<'a> Json<'a> {
    pub(super) fn new(out: &'a mut String) -> Self {
        Self { out, message: String::new() }
    }

    fn key(&mut self, field: &Field) {
        if !self.out.is_empty() {
            self.out.push(',');
        }
        write_json_text(self.out, field.name());
        self.out.push(':');
    }
}

impl Visit for Json<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if is_message(field) {
            self.message.push_str(value);
            return;
        }
        self.key(field);
        write_json_text(self.out, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        if is_message(field) {
            let _ = write!(self.message, "{value:?}");
            return;
        }
        self.key(field);
        write_json_text(self.out, &format!("{value:?}"));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.key(field);
        let _ = write!(self.out, "{value}");
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.key(field);
        let _ = write!(self.out, "{value}");
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.key(field);
        let _ = write!(self.out, "{value}");
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.key(field);
        // JSON has no NaN and no infinity.
        let _ = if value.is_finite() { write!(self.out, "{value}") } else { write!(self.out, "\"{value}\"") };
    }
}

/// Appends a text in quotes, as Rust writes it.
fn write_quoted(out: &mut String, text: &str) {
    if is_plain(text) {
        out.extend(["\"", text, "\""]);
    } else {
        let _ = write!(out, "{text:?}");
    }
}

/// Whether nothing of it has to be escaped, in either format.
fn is_plain(text: &str) -> bool {
    text.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\')
}

fn write_json_text(out: &mut String, text: &str) {
    if is_plain(text) {
        out.extend(["\"", text, "\""]);
        return;
    }
    match serde_json::to_string(text) {
        Ok(text) => out.push_str(&text),
        Err(_) => out.push_str("\"\""),
    }
}

/// Fields of a line of the access log, bytes.
const USUAL_FIELDS: usize = 1 << 10;
/// A thread keeps a buffer up to this size for its next line.
const KEPT_BUFFER: usize = 16 << 10;

//! Log lines: levels that can be changed while running, two shapes, one bounded queue.
//!
//! Must never block a thread that logs: a line that finds the queue full is dropped and counted.

use std::fmt::Write;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Registry;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload;

mod hush;
mod line;
mod queue;

pub use hush::Hush;
use line::{Json, Plain};
pub use queue::Queue;

/// The shape of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `time \t level \t scope \t message \t key=value …`
    #[default]
    Plain,
    /// One object a line: level, time, scope, message, then the fields.
    Json,
}

/// Which lines are written: a level for all, others for single targets.
#[derive(Debug, Clone, PartialEq)]
pub struct Levels {
    text: String,
    targets: Targets,
}

/// Why a text is not a set of levels.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{directive:?} is not a log level: expected trace, debug, info, warn, error or off, or target=level, \
     several with commas, such as info,access=debug"
)]
pub struct ParseLevelsError {
    directive: String,
}

/// The process's logger. Clones are handles of the same one.
#[derive(Clone)]
pub struct Logging {
    reload: reload::Handle<Targets, Registry>,
    current: Arc<std::sync::Mutex<Levels>>,
    start: Arc<Levels>,
    queue: Arc<Queue>,
}

impl Levels {
    /// The libraries that read what peers and servers send speak only where they are named.
    pub fn parse(text: &str) -> Result<Self, ParseLevelsError> {
        let mut targets = Targets::new().with_targets(WIRE.map(|library| (library, LevelFilter::OFF)));
        for directive in text.split(',') {
            let directive = directive.trim();
            let wrong = || ParseLevelsError { directive: directive.chars().take(128).collect() };
            let Some((target, level)) = split(directive) else {
                targets = targets.with_default(parse_level(directive).ok_or_else(wrong)?);
                continue;
            };
            let level = parse_level(level).ok_or_else(wrong)?;
            if target.is_empty() || target.contains(char::is_whitespace) {
                return Err(wrong());
            }
            // Lines show our own modules without the crate's name, so they are also named without it.
            targets = targets.with_target(format!("{OWN_CRATE}{target}"), level).with_target(target, level);
        }
        Ok(Self { text: text.trim().to_owned(), targets })
    }
}

impl std::str::FromStr for Levels {
    type Err = ParseLevelsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

impl std::fmt::Display for Levels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl Logging {
    /// Makes the logger of the process: lines go to stdout, panics are logged. Call once, before anything is logged.
    pub fn start(format: Format, levels: Levels, queue_bytes: usize) -> io::Result<Self> {
        let queue = Queue::stdout(format, queue_bytes)?;
        let (logging, subscriber) = Self::with_queue(format, levels, queue);
        tracing::subscriber::set_global_default(subscriber).map_err(io::Error::other)?;
        let queue = logging.queue.clone();
        std::panic::set_hook(Box::new(move |panic| {
            let payload = panic.payload();
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)");
            let place = panic.location().map(ToString::to_string).unwrap_or_default();
            let thread = std::thread::current();
            tracing::error!(target: "panic", thread = thread.name().unwrap_or(""), place, "{text}");
            queue.flush(Duration::from_secs(1));
        }));
        Ok(logging)
    }

    fn with_queue(format: Format, levels: Levels, queue: Arc<Queue>) -> (Self, impl Subscriber + Send + Sync) {
        let (filter, reload) = reload::Layer::new(levels.targets.clone());
        let subscriber = Registry::default().with(filter).with(Lines { format, queue: queue.clone() });
        let current = Arc::new(std::sync::Mutex::new(levels.clone()));
        (Self { reload, current, start: Arc::new(levels), queue }, subscriber)
    }

    /// The levels in force, as they were given.
    pub fn levels(&self) -> String {
        self.lock().text.clone()
    }

    pub fn set_levels(&self, levels: Levels) {
        let mut current = self.lock();
        if self.reload.reload(levels.targets.clone()).is_ok() {
            *current = levels;
        }
    }

    /// Back to the levels of the start.
    pub fn reset_levels(&self) {
        self.set_levels((*self.start).clone());
    }

    /// Lines dropped so far because the queue was full.
    pub fn lost(&self) -> u64 {
        self.queue.lost()
    }

    /// Waits until all lines so far are written, at most `limit` (a blocked stdout must not block the exit).
    pub fn flush(&self, limit: Duration) {
        self.queue.flush(limit);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Levels> {
        self.current.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// `target=level`, or istioctl's `target:level`.
fn split(directive: &str) -> Option<(&str, &str)> {
    directive.split_once('=').or_else(|| {
        let (target, level) = directive.rsplit_once(':')?;
        (!target.ends_with(':')).then_some((target, level))
    })
}

fn parse_level(text: &str) -> Option<LevelFilter> {
    Some(match text.to_ascii_lowercase().as_str() {
        "off" => LevelFilter::OFF,
        "error" => LevelFilter::ERROR,
        "warn" | "warning" => LevelFilter::WARN,
        "info" => LevelFilter::INFO,
        "debug" => LevelFilter::DEBUG,
        "trace" => LevelFilter::TRACE,
        _ => return None,
    })
}

/// Turns events into lines.
struct Lines {
    format: Format,
    queue: Arc<Queue>,
}

/// A span's fields, ready to be written.
struct SpanFields(String);

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Lines {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut fields = String::new();
        self.visit(&mut fields, |visitor| attributes.record(visitor));
        span.extensions_mut().insert(SpanFields(fields));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut extensions = span.extensions_mut();
        let Some(SpanFields(fields)) = extensions.get_mut() else { return };
        self.visit(fields, |visitor| values.record(visitor));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        line::with_buffer(|line| {
            let spans = |each: &mut dyn FnMut(&str)| {
                let Some(scope) = context.event_scope(event) else { return };
                for span in scope.from_root() {
                    if let Some(SpanFields(fields)) = span.extensions().get() {
                        each(fields);
                    }
                }
            };
            match self.format {
                Format::Plain => line::plain(line, head(event.metadata()), spans, |v| event.record(v)),
                Format::Json => line::json(line, head(event.metadata()), spans, |v| event.record(v)),
            }
            self.queue.push(line);
        });
    }
}

impl Lines {
    fn visit(&self, out: &mut String, record: impl FnOnce(&mut dyn Visit)) {
        match self.format {
            Format::Plain => record(&mut Plain::new(out)),
            Format::Json => record(&mut Json::new(out)),
        }
    }
}

/// What every line starts with.
struct Head<'a> {
    time: SystemTime,
    level: &'static str,
    scope: &'a str,
}

fn head<'a>(metadata: &Metadata<'a>) -> Head<'a> {
    let level = match *metadata.level() {
        Level::ERROR => "error",
        Level::WARN => "warn",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    };
    let target = metadata.target();
    Head { time: SystemTime::now(), level, scope: target.strip_prefix(OWN_CRATE).unwrap_or(target) }
}

/// Appends text with control characters escaped, so that no value can forge a line.
fn write_escaped(out: &mut String, text: &str) {
    if text.bytes().all(|byte| matches!(byte, b' '..=b'~')) {
        out.push_str(text);
        return;
    }
    for c in text.chars() {
        if c.is_control() {
            let _ = write!(out, "{}", c.escape_default());
        } else {
            out.push(c);
        }
    }
}

/// Field names that hold the text of an event.
fn is_message(field: &Field) -> bool {
    field.name() == "message"
}

const OWN_CRATE: &str = "ztunnel::";
/// Their lines are about single frames and requests, so that a peer could fill the log with them, also at `warn`, and may
/// hold what they carry. What goes wrong is told by our own lines.
const WIRE: [&str; 4] = ["h2", "hyper", "kube_client", "rustls"];

#[cfg(test)]
pub(crate) mod tests;

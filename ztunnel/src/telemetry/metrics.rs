//! The registry behind `/metrics`: what modules count, and what is read when somebody scrapes.
//!
//! Must never hold a lock while a client reads: a slow scraper would stall the others.

use std::fmt::{self, Debug};
use std::sync::{Arc, Mutex};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::encoding::{
    CounterValueEncoder, DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabel, EncodeLabelSet,
    GaugeValueEncoder, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Metric, Registry};

use super::http::{Request, Response, Router};

mod labels;
mod process;
mod series;

pub use labels::{PeerView, View};
pub use series::{Series, SeriesTable};

/// The metrics of a process. Names are given without `_total`, which counters get when they are written.
#[derive(Default)]
pub struct Metrics {
    sources: Mutex<Vec<Arc<Source>>>,
}

/// Takes the samples of one metric, one for each set of labels.
pub struct Samples<'a, 'b> {
    encoder: &'a mut MetricEncoder<'b>,
    kind: Kind,
    result: fmt::Result,
}

impl Metrics {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A value that may go up and down, read at each scrape.
    pub fn gauge(&self, name: &'static str, help: &'static str, read: impl Fn() -> f64 + Send + Sync + 'static) {
        self.gauges(name, help, move |samples| samples.add(&[], read()));
    }

    /// A value that only grows, read at each scrape.
    pub fn counter(&self, name: &'static str, help: &'static str, read: impl Fn() -> u64 + Send + Sync + 'static) {
        self.counters(name, help, move |samples| samples.add(&[], read() as f64));
    }

    /// Gauges that differ in labels, read at each scrape.
    pub fn gauges(
        &self,
        name: &'static str,
        help: &'static str,
        read: impl Fn(&mut Samples<'_, '_>) + Send + Sync + 'static,
    ) {
        self.add(name, help, Form::Read(Kind::Gauge, Box::new(read)));
    }

    /// Counters that differ in labels, read at each scrape.
    pub fn counters(
        &self,
        name: &'static str,
        help: &'static str,
        read: impl Fn(&mut Samples<'_, '_>) + Send + Sync + 'static,
    ) {
        self.add(name, help, Form::Read(Kind::Counter, Box::new(read)));
    }

    /// A metric of prometheus-client, of which the caller keeps a clone: a histogram, a family.
    pub fn register(&self, name: &'static str, help: &'static str, metric: impl Metric) {
        self.add(name, help, Form::Metric(Box::new(metric)));
    }

    /// Several metrics that are written together.
    pub fn collect(&self, name: &'static str, collector: impl Collector) {
        self.add(name, "", Form::Collector(Box::new(collector)));
    }

    /// The whole exposition (OpenMetrics text).
    pub fn write(&self, out: &mut impl fmt::Write) -> fmt::Result {
        let sources = self.lock().clone();
        let mut registry = Registry::default();
        for source in sources {
            registry.register_collector(Box::new(source));
        }
        text::encode(out, &registry)
    }

    /// The pages `/metrics` and `/stats/prometheus`.
    pub fn pages(self: &Arc<Self>, router: Router) -> Router {
        let page = |metrics: Arc<Self>| move |request: &Request| metrics.answer(request);
        router.get("/metrics", page(self.clone())).get("/stats/prometheus", page(self.clone()))
    }

    fn answer(self: &Arc<Self>, request: &Request) -> Response {
        // The body is the same; old scrapers read it as plain text too.
        let open_metrics =
            request.header("accept").is_some_and(|accept| accept.contains("application/openmetrics-text"));
        let content_type = if open_metrics { OPEN_METRICS } else { PLAIN };
        let metrics = self.clone();
        Response::stream(content_type, move |out| metrics.write(out).map_err(std::io::Error::other))
    }

    fn add(&self, name: &'static str, help: &'static str, form: Form) {
        let mut sources = self.lock();
        if sources.iter().any(|source| source.name == name) {
            drop(sources);
            tracing::error!(name, "a metric is registered twice, the second one is left out");
            return;
        }
        sources.push(Arc::new(Source { name, help, form }));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Source>>> {
        self.sources.lock().unwrap_or_else(|e| e.into_inner())
    }
}

impl Samples<'_, '_> {
    /// One sample. Label values are escaped.
    pub fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        if self.result.is_ok() {
            self.result = self.encode(labels, value);
        }
    }

    fn encode(&mut self, labels: &[(&str, &str)], value: f64) -> fmt::Result {
        match labels {
            [] => self.kind.encode(self.encoder, Number(value)),
            _ => self.kind.encode(&mut self.encoder.encode_family(&Labels(labels))?, Number(value)),
        }
    }
}

struct Source {
    name: &'static str,
    help: &'static str,
    form: Form,
}

enum Form {
    Read(Kind, Box<dyn Fn(&mut Samples<'_, '_>) + Send + Sync>),
    Metric(Box<dyn Metric>),
    Collector(Box<dyn Collector>),
}

#[derive(Clone, Copy)]
enum Kind {
    Gauge,
    Counter,
}

impl Kind {
    fn encode(self, encoder: &mut MetricEncoder<'_>, value: Number) -> fmt::Result {
        match self {
            Self::Gauge => encoder.encode_gauge(&value),
            Self::Counter => encoder.encode_counter::<NoLabelSet, _, f64>(&value, None),
        }
    }

    fn metric_type(self) -> MetricType {
        match self {
            Self::Gauge => MetricType::Gauge,
            Self::Counter => MetricType::Counter,
        }
    }
}

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        match &self.form {
            Form::Read(kind, read) => {
                let mut encoder = encoder.encode_descriptor(self.name, self.help, None, kind.metric_type())?;
                let mut samples = Samples { encoder: &mut encoder, kind: *kind, result: Ok(()) };
                read(&mut samples);
                samples.result
            }
            Form::Metric(metric) => {
                metric.encode(encoder.encode_descriptor(self.name, self.help, None, metric.metric_type())?)
            }
            Form::Collector(collector) => collector.encode(encoder),
        }
    }
}

impl Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Written without a fraction where it has none.
struct Number(f64);

impl Number {
    fn whole(&self) -> Option<i64> {
        (self.0.fract() == 0.0 && self.0.abs() < (1u64 << 53) as f64).then_some(self.0 as i64)
    }
}

impl EncodeGaugeValue for Number {
    fn encode(&self, encoder: &mut GaugeValueEncoder<'_>) -> fmt::Result {
        match self.whole() {
            Some(whole) => EncodeGaugeValue::encode(&whole, encoder),
            None => EncodeGaugeValue::encode(&self.0, encoder),
        }
    }
}

impl EncodeCounterValue for Number {
    fn encode(&self, encoder: &mut CounterValueEncoder<'_>) -> fmt::Result {
        match self.whole().and_then(|whole| u64::try_from(whole).ok()) {
            Some(whole) => EncodeCounterValue::encode(&whole, encoder),
            None => EncodeCounterValue::encode(&self.0.max(0.0), encoder),
        }
    }
}

struct Labels<'a>(&'a [(&'a str, &'a str)]);

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|label| label.encode(encoder.encode_label()))
    }
}

const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PLAIN: &str = "text/plain; version=0.0.4; charset=utf-8";

#[cfg(test)]
mod tests;

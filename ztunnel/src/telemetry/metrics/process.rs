//! Metrics of the process itself: build, descriptors, runtimes, lost log lines.

use rustix::process::{Resource, getrlimit};
use tokio::runtime::Handle;

use super::Metrics;
use crate::lifecycle::resident;
use crate::telemetry::log::Logging;

impl Metrics {
    /// Build, descriptors and the log's losses of this process.
    pub fn process(&self, component: &'static str, logging: Option<Logging>) {
        self.gauges("istio_build", "The running build", move |samples| {
            samples.add(&[("component", component), ("tag", env!("CARGO_PKG_VERSION"))], 1.0);
        });
        self.gauge("process_open_fds", "Open file descriptors", || {
            std::fs::read_dir("/proc/self/fd").map_or(f64::NAN, |entries| entries.count() as f64)
        });
        self.gauge("process_max_fds", "File descriptors that may be open", || {
            getrlimit(Resource::Nofile).current.map_or(f64::INFINITY, |limit| limit as f64)
        });
        self.gauge("process_resident_memory_bytes", "Memory in RAM", || {
            resident().map_or(f64::NAN, |bytes| bytes as f64)
        });
        if let Some(logging) = logging {
            self.counter(
                "understory_log_lines_lost",
                "Log lines dropped because stdout was read too slowly",
                move || logging.lost(),
            );
        }
    }

    /// The tokio runtimes of the workers, each with one thread.
    pub fn runtimes(&self, workers: Vec<Handle>) {
        let counted = workers.clone();
        self.gauge("tokio_num_workers", "Worker threads", move || counted.len() as f64);
        let counted = workers.clone();
        self.gauge("tokio_num_alive_tasks", "Tasks that are not done, without those of connections", move || {
            counted.iter().map(|worker| worker.metrics().num_alive_tasks() as f64).sum()
        });
        let counted = workers.clone();
        self.gauge("tokio_global_queue_depth", "Tasks that wait in the shared queues", move || {
            counted.iter().map(|worker| worker.metrics().global_queue_depth() as f64).sum()
        });
        let per_worker = |name, help, read: fn(&Handle) -> f64| {
            let workers = workers.clone();
            self.counters(name, help, move |samples| {
                for (i, worker) in workers.iter().enumerate() {
                    samples.add(&[("worker", &i.to_string())], read(worker));
                }
            });
        };
        per_worker("tokio_worker_total_busy_duration_seconds", "Time spent running tasks", |worker| {
            worker.metrics().worker_total_busy_duration(0).as_secs_f64()
        });
        per_worker("tokio_worker_park_count", "Times the worker went to sleep", |worker| {
            worker.metrics().worker_park_count(0) as f64
        });
        per_worker("tokio_worker_park_unpark_count", "Times the worker went to sleep or woke up", |worker| {
            worker.metrics().worker_park_unpark_count(0) as f64
        });
    }
}

//! What was measured on, and with what: a figure without it means nothing.

use std::fs;
use std::sync::LazyLock;

use serde_json::{Value, json};

/// As it goes into the JSON.
pub fn machine() -> &'static Value {
    &MACHINE
}

/// In one line, for people.
pub fn line() -> String {
    let text = |key: &str| MACHINE[key].as_str().unwrap_or_default();
    format!(
        "{} cores, {}, {} GB, Linux {}, TCP {}, {} build of {}, Envoy {}, load before {}",
        MACHINE["cores"],
        text("cpu"),
        MACHINE["memory_gb"],
        text("kernel"),
        text("tcp_congestion_control"),
        text("build"),
        text("understory"),
        text("envoy"),
        text("load_before"),
    )
}

static MACHINE: LazyLock<Value> = LazyLock::new(|| {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let cpus = read("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let memory = read("/proc/meminfo");
    let total =
        memory.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    json!({
        "cores": std::thread::available_parallelism().map_or(0, usize::from),
        "cpu": model.trim_start_matches([' ', '\t', ':']),
        "memory_gb": (total.unwrap_or(0.0_f64) / 1e6).round(),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "tcp_congestion_control": read("/proc/sys/net/ipv4/tcp_congestion_control"),
        // As it was before the first measurement: this is read then.
        "load_before": read("/proc/loadavg").split(' ').next().unwrap_or_default(),
        "build": if cfg!(debug_assertions) { "debug" } else { "release" },
        "understory": env!("CARGO_PKG_VERSION"),
        "envoy": testbed::envoy_version().unwrap_or_else(|| "not there".to_owned()),
    })
});

//! The folder of manifests that stands for the API server: one YAML file per object, replaced atomically.
//!
//! A reader must never see a half-written object.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

#[derive(Debug)]
pub(crate) struct Manifests {
    dir: PathBuf,
    /// Where files are written before they are moved into `dir`; the same file system.
    staging: PathBuf,
    version: AtomicU64,
}

impl Manifests {
    pub(crate) fn create(dir: PathBuf, staging: PathBuf) -> Self {
        for dir in [&dir, &staging] {
            fs::create_dir_all(dir).unwrap_or_else(|e| panic!("make {}: {e}", dir.display()));
        }
        Self { dir, staging, version: AtomicU64::new(1) }
    }

    /// Writes an object. Fills in the resource version.
    pub(crate) fn put(&self, mut object: Value) {
        let version = self.version.fetch_add(1, Ordering::Relaxed);
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        let text = serde_yaml_ng::to_string(&object).expect("an object can be written as YAML");
        let file = file_of(&object);
        self.put_text(&file, &text);
    }

    /// Writes a file as it is, also one that is no valid object.
    pub(crate) fn put_text(&self, file: &str, text: &str) {
        let version = self.version.fetch_add(1, Ordering::Relaxed);
        let staged = self.staging.join(format!("{version}-{file}"));
        fs::write(&staged, text).unwrap_or_else(|e| panic!("write {}: {e}", staged.display()));
        let path = self.dir.join(file);
        fs::rename(&staged, &path).unwrap_or_else(|e| panic!("move {} to {}: {e}", staged.display(), path.display()));
    }

    pub(crate) fn remove(&self, file: &str) {
        let path = self.dir.join(file);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => panic!("remove {}: {e}", path.display()),
            _ => {}
        }
    }
}

/// `<kind>-<namespace>-<name>.yaml`, in lower case.
pub(crate) fn file_name(kind: &str, namespace: &str, name: &str) -> String {
    let middle = if namespace.is_empty() { String::new() } else { format!("{namespace}-") };
    format!("{}-{middle}{name}.yaml", kind.to_lowercase())
}

fn file_of(object: &Value) -> String {
    let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default().to_owned();
    file_name(&text("/kind"), &text("/metadata/namespace"), &text("/metadata/name"))
}

/// The time now as Kubernetes writes it.
pub(crate) fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970").as_secs();
    rfc3339(seconds)
}

fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days to date: https://howardhinnant.github.io/date_algorithms.html#civil_from_days
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (day, month) = (doy - (153 * mp + 2) / 5 + 1, if mp < 10 { mp + 3 } else { mp - 9 });
    let year = yoe + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_kubernetes_does() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(rfc3339(1_790_812_799), "2026-09-30T23:59:59Z");
    }
}

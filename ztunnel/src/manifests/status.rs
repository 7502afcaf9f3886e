//! What an agent reports about a pod when there is no API server to annotate it: one small file for each pod.
//!
//! A reader must never see half a file: it is written beside and renamed into place.

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::files::{read_small_text, write_if_changed};

/// The content of `<status folder>/<pod uid>.yaml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodStatus {
    pub pod: PodRef,
    /// The node whose agent says so.
    pub node: String,
    pub redirection: Redirection,
    /// Why it is so, for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodRef {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// Whether the pod's traffic is captured. Stands in place of the annotation `ambient.istio.io/redirection`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Redirection {
    /// Captured: peers may use HBONE.
    Enabled,
    /// Wanted, not there yet.
    Pending,
}

/// The folder of status files, for its writer.
#[derive(Debug, Clone)]
pub struct StatusFolder {
    dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum StatusError {
    #[error("status file {file}: {step}: {source}")]
    Io { file: PathBuf, step: &'static str, source: io::Error },
    #[error("status of pod {pod}: uid {uid:?} cannot name a file: expected letters, digits and '-'")]
    Uid { pod: String, uid: String },
}

impl StatusFolder {
    /// Creates the folder if it is not there.
    pub fn open(dir: impl Into<PathBuf>) -> Result<Self, StatusError> {
        let dir = dir.into();
        std::fs::create_dir_all(&dir).map_err(|e| io_error(&dir, "create the folder", e))?;
        Ok(Self { dir })
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// Writes the pod's file, atomically, unless it is there with the same content. Blocks for a moment on the file
    /// system.
    pub fn write(&self, status: &PodStatus) -> Result<(), StatusError> {
        let file = self.file(&status.pod.uid).ok_or_else(|| StatusError::Uid {
            pod: format!("{}/{}", status.pod.namespace, status.pod.name),
            uid: status.pod.uid.clone(),
        })?;
        let text = serde_yaml_ng::to_string(status)
            .map_err(|e| io_error(&file, "serialise", io::Error::new(io::ErrorKind::InvalidData, e)))?;
        // Only the agent of the pod's node writes the file of a uid, so the name needs no more to be its own.
        let temporary = self.dir.join(format!(".{}.yaml.tmp", status.pod.uid));
        write_if_changed(&file, &temporary, text.as_bytes()).map_err(|e| io_error(&file, "write", e))
    }

    /// Removes the pod's file; whether there was one.
    pub fn remove(&self, uid: &str) -> Result<bool, StatusError> {
        let Some(file) = self.file(uid) else { return Ok(false) };
        match std::fs::remove_file(&file) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(io_error(&file, "remove", e)),
        }
    }

    /// The statuses that were written for a node, for an agent that starts again and sweeps. Files that cannot be
    /// read as a status are left out.
    pub fn of_node(&self, node: &str) -> Result<Vec<PodStatus>, StatusError> {
        let entries = std::fs::read_dir(&self.dir).map_err(|e| io_error(&self.dir, "list the folder", e))?;
        let read = |path: PathBuf| {
            let uid = path.file_name()?.to_str()?.strip_suffix(".yaml")?.to_owned();
            if !is_uid(&uid) {
                return None;
            }
            let status: PodStatus = serde_yaml_ng::from_str(&read_small_text(&path, MAX_FILE).ok()?).ok()?;
            (status.pod.uid == uid && status.node == node).then_some(status)
        };
        Ok(entries.filter_map(|entry| read(entry.ok()?.path())).collect())
    }

    fn file(&self, uid: &str) -> Option<PathBuf> {
        is_uid(uid).then(|| self.dir.join(format!("{uid}.yaml")))
    }
}

/// Whether a text can be a pod's uid, and so the name of a file.
pub(super) fn is_uid(text: &str) -> bool {
    !text.is_empty() && text.len() <= 128 && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
}

/// Bytes of a status.
const MAX_FILE: usize = 64 << 10;

fn io_error(file: &Path, step: &'static str, source: io::Error) -> StatusError {
    StatusError::Io { file: file.to_owned(), step, source }
}

//! What the agent must remember of a pod over its own restart: a small file for each pod in the run directory.
//!
//! Must never be written after the change that it describes: a crash in between would take our own settings for the
//! pod's.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::capture::pod_network::Before;
use crate::files::{read_small_text, write_if_changed};

/// What was done to a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub uid: String,
    pub cgroup_uid: String,
    pub name: String,
    pub namespace: String,
    /// Earlier versions did not write it down.
    #[serde(default)]
    pub service_account: Option<String>,
    /// Which namespace it was done to.
    pub netns_cookie: u64,
    pub addresses: Vec<IpAddr>,
    pub before: Before,
    /// Which boot of the machine it was done in: namespaces are numbered from the start after each.
    pub boot: String,
}

/// The folder of records.
#[derive(Clone, Debug)]
pub struct Records {
    dir: PathBuf,
    boot: String,
}

#[derive(Debug, thiserror::Error)]
#[error("cannot {step} {path}: {source}")]
pub struct RecordError {
    step: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl Records {
    /// Makes the folder if it is not there.
    pub fn open(dir: PathBuf) -> Result<Records, RecordError> {
        std::fs::create_dir_all(&dir).map_err(failed("make", &dir))?;
        let boot = Path::new("/proc/sys/kernel/random/boot_id");
        let boot = std::fs::read_to_string(boot).map_err(failed("read", boot))?.trim().to_owned();
        Ok(Records { dir, boot })
    }

    /// The present boot of the machine.
    pub fn boot(&self) -> &str {
        &self.boot
    }

    /// All records of this boot; what an earlier one did went with it. A file that holds no record is left out with a
    /// warning: what it described is found again by the sweep. One that cannot be read now, as without descriptors, is
    /// an error: a record that is not seen is not one that is not there.
    pub fn all(&self) -> Result<Vec<Record>, RecordError> {
        let mut records = Vec::new();
        for entry in std::fs::read_dir(&self.dir).map_err(failed("list", &self.dir))? {
            let path = entry.map_err(failed("list", &self.dir))?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let text = read_small_text(&path, MAX_FILE);
            match text.and_then(|text| Ok(serde_json::from_str::<Record>(&text)?)) {
                Ok(record) if record.boot == self.boot => records.push(record),
                Ok(record) => self.remove(&record.uid)?,
                // Removed meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof) => {
                    tracing::warn!(file = %path.display(), %error, "a file in the place of a pod's record holds none");
                }
                Err(error) => return Err(failed("read", &path)(error)),
            }
        }
        Ok(records)
    }

    /// What is written already is left alone: an agent that starts again on a full disk goes on with its pods.
    pub fn write(&self, record: &Record) -> Result<(), RecordError> {
        let path = self.path(&record.uid);
        let text =
            serde_json::to_string(record).map_err(|error| failed("serialise", &path)(io::Error::other(error)))?;
        write_if_changed(&path, &path.with_extension("new"), text.as_bytes()).map_err(failed("write", &path))
    }

    pub fn remove(&self, uid: &str) -> Result<(), RecordError> {
        let path = self.path(uid);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    fn path(&self, uid: &str) -> PathBuf {
        // A uid comes from outside: nothing of it may lead to another folder.
        let safe: String = uid.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
        self.dir.join(format!("{safe}.json"))
    }
}

/// Bytes of a record.
const MAX_FILE: usize = 64 << 10;

fn failed<'a>(step: &'static str, path: &'a Path) -> impl Fn(io::Error) -> RecordError + 'a {
    move |source| RecordError { step, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capture::pod_network::Families;

    #[test]
    fn records_come_back_as_written_and_go() {
        let dir = std::env::temp_dir().join(format!("understory-records-{}", std::process::id()));
        let records = Records::open(dir.clone()).unwrap();
        let record = Record {
            uid: "../evil".into(),
            cgroup_uid: "u".into(),
            name: "a".into(),
            namespace: "shop".into(),
            service_account: Some("cart".into()),
            netns_cookie: 4711,
            addresses: vec!["10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap()],
            before: Before {
                families: Families { v4: true, v6: false },
                sysctls: vec![("ipv4/tcp_tw_reuse".into(), "2".into())],
            },
            boot: records.boot().to_owned(),
        };
        records.write(&record).unwrap();
        let earlier = Record { uid: "earlier".into(), boot: "another".into(), ..record.clone() };
        records.write(&earlier).unwrap();
        std::fs::write(dir.join("broken.json"), "{").unwrap();
        assert_eq!(records.all().unwrap(), [record]);
        assert!(!dir.join("earlier.json").exists());
        records.remove("../evil").unwrap();
        records.remove("../evil").unwrap();
        assert_eq!(records.all().unwrap(), []);
        std::fs::remove_dir_all(dir).unwrap();
    }
}

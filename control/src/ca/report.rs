//! Where the authority stands, for people and scripts.
//!
//! Must never hold anything of a key.

use std::fmt::Write as _;
use std::path::Path;
use std::time::SystemTime;

use serde::Serialize;
use ztunnel::identity::rfc3339;

use super::cert::CertReport;
use super::in_force::InForce;
use super::layout::Layout;
use super::record::{Record, RootRecord, at};

/// What is in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub dir: String,
    pub layout: Layout,
    /// What signs.
    pub signs: CertReport,
    /// Between it and its root, the one below the root last. Empty if the root signs.
    pub chain: Vec<CertReport>,
    /// All that are trusted, the root of what signs first.
    pub roots: Vec<RootReport>,
    /// What will sign, once its root has been known for long enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waits: Option<Waiting>,
    /// Why the files that are there now are not used; then those before are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Seconds.
    pub longest_life: u64,
}

/// A root in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RootReport {
    #[serde(flatten)]
    pub cert: CertReport,
    pub signs: bool,
    /// Since when it has been handed out as trusted, as far as is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub announced: Option<String>,
    /// When the last certificate below it ends, at the latest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leaves_until: Option<String>,
    /// It is no longer in the files, and trusted until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retired_until: Option<String>,
}

impl RootReport {
    pub(super) fn forget_times(&mut self) {
        (self.announced, self.leaves_until) = (None, None);
    }
}

/// What does not sign yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    pub cert: CertReport,
    pub from: String,
}

impl Report {
    pub(super) fn of(
        dir: &Path,
        in_force: &InForce,
        record: &Record,
        problem: Option<String>,
        now: SystemTime,
    ) -> Self {
        let authority = &in_force.authority;
        let root_of = |root: &super::in_force::Trusted| {
            let known = record.root(&root.cert);
            let time = |of: fn(&RootRecord) -> Option<u64>| known.and_then(of).map(|seconds| rfc3339(at(seconds)));
            RootReport {
                cert: root.cert.report(now),
                signs: root.cert == *authority.root(),
                announced: time(|known| known.announced),
                leaves_until: time(|known| known.leaves_until),
                retired_until: root.retired_until.map(rfc3339),
            }
        };
        Self {
            dir: dir.display().to_string(),
            layout: in_force.found.layout,
            signs: authority.signer().report(now),
            chain: authority.intermediates().iter().skip(1).map(|cert| cert.report(now)).collect(),
            roots: in_force.roots.iter().map(root_of).collect(),
            waits: in_force
                .pending
                .as_ref()
                .map(|pending| Waiting { cert: pending.authority.signer().report(now), from: rfc3339(pending.from) }),
            problem,
            longest_life: record.leaf_life,
        }
    }

    /// Every certificate in force once, with what it is: `signing`, `intermediate` or `root`.
    pub fn certificates(&self) -> impl Iterator<Item = (&'static str, &CertReport)> {
        let is_root = self.roots.iter().any(|root| root.cert.fingerprint == self.signs.fingerprint);
        let signing = (!is_root).then_some(("signing", &self.signs));
        let between = self.chain.iter().map(|cert| ("intermediate", cert));
        signing.into_iter().chain(between).chain(self.roots.iter().map(|root| ("root", &root.cert)))
    }

    /// The same for people.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        let layout = match self.layout {
            Layout::OwnRoot => "a root of its own",
            Layout::PlugIn => "plugged in",
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "authority  {} ({layout})", self.dir);
        let _ = writeln!(text, "signs      {}", line(&self.signs));
        for cert in &self.chain {
            let _ = writeln!(text, "below      {}", line(cert));
        }
        for root in &self.roots {
            let _ = writeln!(text, "trusted    {}", line(&root.cert));
            let mut more = |what: &str, time: &Option<String>| {
                if let Some(time) = time {
                    let _ = writeln!(text, "             {what} {time}");
                }
            };
            more("trusted since", &root.announced);
            more("certificates below it may live until", &root.leaves_until);
            more("no longer in the files, trusted until", &root.retired_until);
        }
        if let Some(waits) = &self.waits {
            let _ = writeln!(text, "waits      {}\n             signs from {} on", line(&waits.cert), waits.from);
        }
        if let Some(problem) = &self.problem {
            let _ = writeln!(text, "problem    {problem}");
        }
        text
    }
}

fn line(cert: &CertReport) -> String {
    let days = cert.seconds_left / 86400;
    format!("{}, sha256 {}…, until {} ({days} days)", cert.name, &cert.fingerprint[..16], cert.not_after)
}

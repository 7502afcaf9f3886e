//! What policies refused, what dry runs would do and what audits saw: counts by policy and rule, bounded in number.
//!
//! Must never cost a connection anything that is allowed without a dry run or an audit.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::metrics::Metrics;
use crate::policy::{Decision, Verdict};

/// Counts decisions.
pub struct PolicyCounts {
    table: Mutex<HashMap<Key, Count>>,
    limit: usize,
    idle: Duration,
}

/// The labels of a count.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Key {
    mode: Mode,
    /// Nothing where none decided.
    policy: Option<Arc<str>>,
    rule: Option<usize>,
    result: &'static str,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Mode {
    Enforced,
    DryRun,
    Audit,
}

struct Count {
    count: u64,
    used: Instant,
}

impl PolicyCounts {
    /// At most `limit` sets of labels (more are counted under the policy `overflow`), each kept for `idle` after its
    /// last count.
    pub fn new(limit: usize, idle: Duration) -> Self {
        Self { table: Mutex::default(), limit, idle }
    }

    pub fn count(&self, decision: &Decision) {
        if !decision.is_allowed() {
            self.add(Mode::Enforced, &decision.verdict);
        }
        if let Some(verdict) = &decision.dry_run {
            self.add(Mode::DryRun, verdict);
        }
        for by in &decision.audited {
            let (policy, rule) = (Some(by.policy.clone()), Some(by.rule));
            self.add_key(Key { mode: Mode::Audit, policy, rule, result: "matched" });
        }
    }

    pub fn register(self: &Arc<Self>, metrics: &Metrics) {
        let counts = self.clone();
        metrics.counters(
            "understory_policy_verdicts",
            "Connections that a policy refused (mode enforced), that dry-run policies would allow or refuse (dry_run), \
             or that an audit saw (audit), by the policy and rule that decided or came closest to allowing",
            move |samples| {
                for (key, count) in counts.swept() {
                    let rule = key.rule.map(|rule| rule.to_string());
                    let labels = [
                        ("mode", key.mode.as_str()),
                        ("policy", key.policy.as_deref().unwrap_or("none")),
                        ("rule", rule.as_deref().unwrap_or("none")),
                        ("result", key.result),
                    ];
                    samples.add(&labels, count as f64);
                }
            },
        );
    }

    fn add(&self, mode: Mode, verdict: &Verdict) {
        let (policy, rule) = verdict.policy();
        self.add_key(Key { mode, policy: policy.cloned(), rule, result: verdict.as_str() });
    }

    fn add_key(&self, key: Key) {
        let mut table = self.lock();
        let is_new = !table.contains_key(&key);
        let key = match is_new && table.len() >= self.limit {
            true => Key { policy: Some("overflow".into()), rule: None, ..key },
            false => key,
        };
        let count = table.entry(key).or_insert(Count { count: 0, used: Instant::now() });
        count.count += 1;
        count.used = Instant::now();
    }

    /// All counts; those that have been idle for long are dropped before.
    fn swept(&self) -> Vec<(Key, u64)> {
        let mut table = self.lock();
        table.retain(|_, count| count.used.elapsed() < self.idle);
        table.iter().map(|(key, count)| (key.clone(), count.count)).collect()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Count>> {
        // Every change is one entry: a panic leaves the table whole.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mode {
    fn as_str(self) -> &'static str {
        match self {
            Self::Enforced => "enforced",
            Self::DryRun => "dry_run",
            Self::Audit => "audit",
        }
    }
}

impl fmt::Debug for PolicyCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyCounts").field("limit", &self.limit).field("idle", &self.idle).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::RuleRef;

    fn denied(policy: &str, rule: usize) -> Verdict {
        Verdict::Denied { by: RuleRef { policy: policy.into(), rule }, matched: String::new() }
    }

    fn text(counts: &Arc<PolicyCounts>) -> String {
        let metrics = Metrics::new();
        counts.register(&metrics);
        let mut text = String::new();
        metrics.write(&mut text).unwrap();
        text
    }

    #[test]
    fn refusals_dry_runs_and_audits_are_counted_and_what_is_allowed_is_not() {
        let counts = Arc::new(PolicyCounts::new(10, Duration::from_secs(60)));
        let allowed = Verdict::Allowed { by: None };
        counts.count(&Decision { verdict: allowed.clone(), dry_run: None, audited: vec![] });
        assert!(counts.lock().is_empty());
        let audited = vec![RuleRef { policy: "n/watch".into(), rule: 0 }];
        counts.count(&Decision { verdict: allowed, dry_run: Some(denied("n/next", 1)), audited });
        for _ in 0..2 {
            counts.count(&Decision { verdict: denied("n/deny", 3), dry_run: None, audited: vec![] });
        }
        let text = text(&counts);
        for line in [
            r#"understory_policy_verdicts_total{mode="enforced",policy="n/deny",rule="3",result="denied"} 2"#,
            r#"understory_policy_verdicts_total{mode="dry_run",policy="n/next",rule="1",result="denied"} 1"#,
            r#"understory_policy_verdicts_total{mode="audit",policy="n/watch",rule="0",result="matched"} 1"#,
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }

    #[test]
    fn label_sets_are_bounded_and_expire() {
        let counts = Arc::new(PolicyCounts::new(3, Duration::from_secs(60)));
        for rule in 0..10 {
            counts.count(&Decision { verdict: denied("n/p", rule), dry_run: None, audited: vec![] });
        }
        let overflow =
            r#"understory_policy_verdicts_total{mode="enforced",policy="overflow",rule="none",result="denied"} 7"#;
        assert!(text(&counts).contains(overflow), "{}", text(&counts));
        let counts = Arc::new(PolicyCounts::new(3, Duration::ZERO));
        counts.count(&Decision { verdict: denied("n/p", 0), dry_run: None, audited: vec![] });
        assert!(counts.swept().is_empty());
    }
}

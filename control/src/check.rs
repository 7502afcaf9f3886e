//! `control check`: what the policies in some files mean and what of them node proxies cannot enforce, without a
//! cluster, by the same translation that `control serve` does.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::path::Path;

use serde_json::{Value, json};
use ztunnel::manifests::{Files, ObjectKey, ObjectName, Objects, Problem, SecurityKind};

use crate::model::is_enrolled;
use crate::policy::{self, Condition, Finding, FindingKind, MeshNames, PeerAuthentications, State, Translation};
use crate::settings::{CheckArgs, CheckOutput};

/// Reads the files, says what is in them, and whether it can stay so.
pub fn check(args: &CheckArgs, stdin: &mut dyn Read, out: &mut dyn Write) -> io::Result<bool> {
    let mut files = Files::default();
    for path in &args.files {
        files.read(path, stdin);
    }
    let report = Report::new(&files, args);
    match args.output {
        CheckOutput::Text => report.text(out)?,
        CheckOutput::Json => {
            serde_json::to_writer_pretty(&mut *out, &report.json())?;
            writeln!(out)?;
        }
    }
    Ok(report.is_good())
}

struct Report<'a> {
    files: &'a Files,
    strict: bool,
    policies: Vec<Checked<'a>>,
    problems: Vec<Problem>,
}

struct Checked<'a> {
    kind: SecurityKind,
    name: &'a ObjectName,
    key: &'a ObjectKey,
    translation: Translation,
    conditions: Vec<Condition>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    Note,
    Warning,
    Error,
}

impl<'a> Report<'a> {
    fn new(files: &'a Files, args: &CheckArgs) -> Self {
        let objects = files.objects();
        let mesh =
            MeshNames { root_namespace: args.root_namespace.clone(), trust_domain: args.trust_domain.to_string() };
        let mut peers = PeerAuthentications::new(&mesh.root_namespace);
        for (name, object) in &objects.peer_authentications {
            peers.set(name, Some(object));
        }
        let check = |key: &'a ObjectKey| {
            let (kind, name) = SecurityKind::of(key)?;
            let translation = match kind {
                SecurityKind::PeerAuthentication => peers.translate(name)?,
                SecurityKind::AuthorizationPolicy => {
                    let object = objects.authorization_policies.get(name)?;
                    policy::authorization_policy(&mesh, object)
                }
            };
            let conditions = conditions(&translation, objects, name, &args.root_namespace);
            Some(Checked { kind, name, key, translation, conditions })
        };
        let policies = files.keys().into_iter().filter_map(check).collect();
        Self { files, strict: args.strict, policies, problems: files.problems() }
    }

    fn is_good(&self) -> bool {
        let bad = |state: State| state.is_error() || (self.strict && state.is_warning());
        self.problems.is_empty() && !self.policies.iter().any(|p| bad(p.translation.outcome.state))
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        for policy in &self.policies {
            let outcome = &policy.translation.outcome;
            let (file, line) = self.files.place(policy.key).unwrap_or((Path::new(""), 0));
            writeln!(out, "{}:{line}: {} {}", file.display(), policy.kind.name(), policy.name)?;
            writeln!(out, "    for   {}", policy.translation.target)?;
            for meaning in &outcome.meaning {
                writeln!(out, "    does  {meaning}")?;
            }
            writeln!(out, "    is    {}", outcome.state.words())?;
            for finding in &outcome.findings {
                let (file, line) = self.files.place_of(policy.key, &finding.path).unwrap_or((file, line));
                writeln!(out, "{}:{line}: {}: {finding}", file.display(), severity(outcome.state, finding).label())?;
            }
            for condition in policy.conditions.iter().filter(|c| c.kind == "NamespaceEnrolled" && c.status != "True") {
                writeln!(out, "{}:{line}: note: {}", file.display(), condition.message)?;
            }
            writeln!(out)?;
        }
        for problem in &self.problems {
            let line = problem.line.map_or(String::new(), |line| format!("{line}:"));
            let object = problem.object.as_ref().map_or(String::new(), |object| format!("{object}: "));
            writeln!(out, "{}:{line} error: {object}{}", problem.file.display(), problem.reason)?;
        }
        writeln!(out, "{}", self.summary())
    }

    fn summary(&self) -> String {
        let mut counts: BTreeMap<State, usize> = BTreeMap::new();
        for policy in &self.policies {
            *counts.entry(policy.translation.outcome.state).or_default() += 1;
        }
        let counts: Vec<_> = counts.into_iter().map(|(state, count)| format!("{count} {}", state.label())).collect();
        let of = if counts.is_empty() { String::new() } else { format!(": {}", counts.join(", ")) };
        let unread = match self.problems.len() {
            0 => String::new(),
            count => format!("; {count} cannot be read"),
        };
        format!("{} policies{of}{unread}", self.policies.len())
    }

    fn json(&self) -> Value {
        let shown = |path: Option<(&Path, usize)>| {
            path.map_or((Value::Null, Value::Null), |(file, line)| (json!(file.display().to_string()), json!(line)))
        };
        let policies = self.policies.iter().map(|policy| {
            let outcome = &policy.translation.outcome;
            let findings = outcome.findings.iter().map(|finding| {
                let (file, line) = shown(self.files.place_of(policy.key, &finding.path));
                json!({
                    "file": file, "line": line, "path": finding.path.to_string(), "kind": finding.kind.label(),
                    "severity": severity(outcome.state, finding).label(), "text": finding.text,
                })
            });
            let (file, line) = shown(self.files.place(policy.key));
            json!({
                "file": file, "line": line, "kind": policy.kind.name(), "namespace": *policy.name.namespace,
                "name": *policy.name.name, "state": outcome.state.label(),
                "appliesTo": policy.translation.target.to_string(), "meaning": outcome.meaning,
                "findings": findings.collect::<Vec<_>>(), "conditions": policy.conditions,
                "sent": policy.translation.resource.as_ref().map(policy::json),
            })
        });
        let problems = self.problems.iter().map(|problem| {
            json!({
                "file": problem.file.display().to_string(), "line": problem.line,
                "object": problem.object.as_ref().map(ToString::to_string), "reason": problem.reason,
            })
        });
        json!({
            "ok": self.is_good(), "policies": policies.collect::<Vec<_>>(), "problems": problems.collect::<Vec<_>>(),
        })
    }
}

/// Those of its status; whether the namespace is in the mesh is said if the files tell.
fn conditions(translation: &Translation, objects: &Objects, name: &ObjectName, root: &str) -> Vec<Condition> {
    let mut conditions = translation.outcome.conditions();
    let node_proxies = !matches!(translation.outcome.state, State::Waypoint | State::Unsupported);
    if *name.namespace != *root && node_proxies && objects.namespace(&name.namespace).is_some() {
        conditions.push(policy::enrolment(&name.namespace, is_enrolled(objects, &name.namespace)));
    }
    conditions
}

fn severity(state: State, finding: &Finding) -> Severity {
    match finding.kind {
        FindingKind::Note => Severity::Note,
        FindingKind::Invalid => Severity::Error,
        FindingKind::Ignored | FindingKind::NotAtL4 if state.is_error() && state != State::Invalid => Severity::Error,
        FindingKind::Ignored | FindingKind::NotAtL4 => Severity::Warning,
    }
}

impl Severity {
    fn label(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    const POLICIES: &str = "\
apiVersion: v1
kind: Namespace
metadata: {name: shop}
---
apiVersion: security.istio.io/v1
kind: AuthorizationPolicy
metadata:
  name: admin
  namespace: shop
spec:
  action: DENY
  selector:
    matchLabels: {app: cart}
  rules:
  - from:
    - source:
        namespaces: [yard]
    to:
    - operation:
        paths: [/admin]
---
apiVersion: security.istio.io/v1beta1
kind: PeerAuthentication
metadata: {name: strict, namespace: shop}
spec:
  mtls:
    mode: STRICT
";

    fn args(files: &[&Path], json: bool) -> CheckArgs {
        CheckArgs {
            files: files.iter().map(|f| f.to_path_buf()).collect(),
            output: if json { CheckOutput::Json } else { CheckOutput::Text },
            root_namespace: "understory-system".into(),
            trust_domain: Default::default(),
            strict: false,
        }
    }

    fn run(args: &CheckArgs, stdin: &str) -> (bool, String) {
        let mut out = Vec::new();
        let good = check(args, &mut stdin.as_bytes(), &mut out).unwrap();
        (good, String::from_utf8(out).unwrap())
    }

    #[test]
    fn each_object_is_explained_with_what_is_not_enforced_and_where() {
        let (good, text) = run(&args(&[Path::new("-")], false), POLICIES);
        let expected = "\
(stdin):4: AuthorizationPolicy shop/admin
    for   pods with app=cart in namespace shop
    does  rule 0 denies connections where the peer's namespace is yard
    is    broader than written: node proxies cannot judge a part and take it as met
(stdin):20: warning: spec.rules[0].to[0].operation.paths: not at L4, only a waypoint can see this
(stdin):4: note: namespace shop has not the label istio.io/dataplane-mode: ambient: it is enforced only for pods that have it themselves

(stdin):21: PeerAuthentication shop/strict
    for   all pods in namespace shop
    does  only mutual TLS is taken
    is    enforced by node proxies as written
(stdin):21: note: namespace shop has not the label istio.io/dataplane-mode: ambient: it is enforced only for pods that have it themselves

2 policies: 1 enforced, 1 broader
";
        assert_eq!((good, &*text), (true, expected));
        let strict = CheckArgs { strict: true, ..args(&[Path::new("-")], false) };
        assert!(!run(&strict, POLICIES).0);
    }

    #[test]
    fn what_is_wrong_is_an_error_with_file_and_line() {
        let dir = std::env::temp_dir().join(format!("understory-check-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        let path = |name: &str| dir.join(name);
        fs::write(path("a.yaml"), POLICIES.replace("[yard]", "[\"y*rd\"]").replace("DENY", "ALLOW")).unwrap();
        let custom = r#"{"apiVersion": "security.istio.io/v1", "kind": "AuthorizationPolicy",
            "metadata": {"name": "ext", "namespace": "shop"},
            "spec": {
              "action": "CUSTOM"}}"#;
        fs::write(path("b.json"), custom).unwrap();
        fs::write(path("c.yaml"), "kind: AuthorizationPolicy\nspec: [").unwrap();
        fs::write(path("notes.txt"), "kind: [").unwrap();
        let missing = path("missing.yaml");
        for (files, errors) in [
            (vec![path("a.yaml")], vec!["a.yaml:17: error: spec.rules[0].from[0].source.namespaces[0]: invalid"]),
            (vec![path("b.json")], vec!["b.json:4: error: spec.action: not at L4, an external authorizer"]),
            (vec![path("c.yaml")], vec!["c.yaml:3: error: did not find"]),
            (vec![missing.clone()], vec!["missing.yaml: error: cannot be read"]),
            (vec![dir.clone()], vec!["a.yaml:17: error", "b.json:4: error", "c.yaml:3: error"]),
            (
                vec![path("a.yaml"), path("a.yaml")],
                vec!["a.yaml:4: error: AuthorizationPolicy shop/admin: given twice"],
            ),
        ] {
            let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
            let (good, text) = run(&args(&files, false), "");
            assert!(!good, "{text}");
            for error in errors {
                assert!(text.contains(error), "{error} in\n{text}");
            }
        }
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn json_says_the_same() {
        let bad = POLICIES.replace("STRICT", "strict");
        let (good, text) = run(&args(&[Path::new("-")], true), &bad);
        let json: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((good, &json["ok"], &json["problems"]), (false, &json!(false), &json!([])));
        let [admin, strict] = &json["policies"].as_array().unwrap()[..] else { panic!("{text}") };
        assert_eq!(
            (&admin["kind"], &admin["name"], &admin["line"]),
            (&json!("AuthorizationPolicy"), &json!("admin"), &json!(4))
        );
        assert_eq!(admin["state"], "broader");
        assert_eq!(admin["sent"]["rules"], json!([[[{"namespaces": ["yard"]}]]]));
        let finding = json!({
            "file": "(stdin)", "line": 20, "path": "spec.rules[0].to[0].operation.paths", "kind": "not at L4",
            "severity": "warning", "text": "only a waypoint can see this",
        });
        assert_eq!(admin["findings"], json!([finding]));
        assert_eq!(admin["conditions"][1]["reason"], "BroaderThanWritten");
        assert_eq!((&strict["state"], &strict["findings"][0]["line"]), (&json!("invalid"), &json!(27)));
        let (good, text) = run(&args(&[Path::new("-")], true), "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n");
        assert_eq!((good, serde_json::from_str::<Value>(&text).unwrap()["ok"].clone()), (true, json!(true)));
    }
}

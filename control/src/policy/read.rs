//! Reading of a spec, field by field: what is found wrong is noted with its place and never stops the reading.

use serde_json::Value;
use ztunnel::manifests::FieldPath;

/// Something about a part of a policy that its author should know.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub path: FieldPath,
    pub kind: FindingKind,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingKind {
    /// Enforced as written, but perhaps not as meant.
    Note,
    /// It has no effect.
    Ignored,
    /// A node proxy cannot see what this speaks of.
    NotAtL4,
    /// It cannot be understood.
    Invalid,
}

impl FindingKind {
    pub fn label(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Ignored => "ignored",
            Self::NotAtL4 => "not at L4",
            Self::Invalid => "invalid",
        }
    }
}

/// What has been found so far.
#[derive(Debug, Default)]
pub(super) struct Findings(pub Vec<Finding>);

/// A part of a spec.
#[derive(Debug, Clone)]
pub(super) struct Node<'a> {
    pub path: FieldPath,
    pub value: &'a Value,
}

impl Findings {
    pub fn add(&mut self, path: &FieldPath, kind: FindingKind, text: impl Into<String>) {
        self.0.push(Finding { path: path.clone(), kind, text: text.into() });
    }

    pub fn invalid(&mut self, path: &FieldPath, text: impl Into<String>) {
        self.add(path, FindingKind::Invalid, text);
    }

    pub fn mark(&self) -> usize {
        self.0.len()
    }

    /// Whether something that was read since the mark is not enforced as it is written.
    pub fn gap_since(&self, mark: usize) -> bool {
        self.0[mark..].iter().any(|f| f.kind >= FindingKind::NotAtL4)
    }

    pub fn worst(&self) -> Option<FindingKind> {
        self.0.iter().map(|f| f.kind).max()
    }
}

impl<'a> Node<'a> {
    /// A field that is set; null is not.
    pub fn get(&self, name: &str) -> Option<Node<'a>> {
        let value = self.value.get(name).filter(|v| !v.is_null())?;
        Some(Node { path: self.path.field(name), value })
    }

    /// Whether this has fields at all; those that are not known are noted.
    pub fn expect_fields(&self, known: &[&str], out: &mut Findings) -> bool {
        let Some(fields) = self.value.as_object() else {
            out.invalid(&self.path, format!("expected fields ({}), found {}", known.join(", "), kind_of(self.value)));
            return false;
        };
        for name in fields.keys().filter(|name| !known.contains(&name.as_str())) {
            let known = known.join(", ");
            out.invalid(&self.path.field(name), format!("unknown field, expected one of {known}"));
        }
        true
    }

    /// The fields of a map whose keys are the author's.
    pub fn entries(&self, out: &mut Findings) -> Vec<(&'a str, Node<'a>)> {
        let Some(fields) = self.value.as_object() else {
            out.invalid(&self.path, format!("expected a map, found {}", kind_of(self.value)));
            return Vec::new();
        };
        let entry =
            |(name, value): (&'a String, &'a Value)| (name.as_str(), Node { path: self.path.field(name), value });
        fields.iter().map(entry).collect()
    }

    pub fn items(&self, out: &mut Findings) -> Option<Vec<Node<'a>>> {
        let Some(items) = self.value.as_array() else {
            out.invalid(&self.path, format!("expected a list, found {}", kind_of(self.value)));
            return None;
        };
        let item = |(index, value): (usize, &'a Value)| Node { path: self.path.item(index), value };
        Some(items.iter().enumerate().map(item).collect())
    }

    pub fn text(&self, out: &mut Findings) -> Option<&'a str> {
        let text = self.value.as_str();
        if text.is_none() {
            let quoted = if self.value.is_number() || self.value.is_boolean() {
                format!(", write \"{}\"", self.value)
            } else {
                String::new()
            };
            out.invalid(&self.path, format!("expected text, found {}{quoted}", kind_of(self.value)));
        }
        text
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "fields",
    }
}

//! Where in a file a part of an object stands, for messages to people.

use std::fmt;

use serde::Deserializer;
use serde::de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The way from an object to a part of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FieldPath(Vec<Step>);

#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Step {
    Field(String),
    Item(usize),
}

impl FieldPath {
    pub fn field(&self, name: &str) -> Self {
        self.with(Step::Field(name.to_owned()))
    }

    pub fn item(&self, index: usize) -> Self {
        self.with(Step::Item(index))
    }

    /// The way on from here.
    pub(super) fn then(&self, further: &Self) -> Self {
        Self(self.0.iter().chain(&further.0).cloned().collect())
    }

    fn with(&self, step: Step) -> Self {
        Self(self.0.iter().cloned().chain([step]).collect())
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.0.iter().enumerate() {
            match step {
                Step::Item(item) => write!(f, "[{item}]")?,
                Step::Field(name) if name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') => {
                    write!(f, "{}{name}", if index == 0 { "" } else { "." })?;
                }
                Step::Field(name) => write!(f, "[{name:?}]")?,
            }
        }
        Ok(())
    }
}

/// The line, counted from 1, at which the part stands, or what is nearest above it. `text` is one document.
pub(super) fn line(text: &str, json: bool, path: &FieldPath) -> Option<usize> {
    (0..=path.0.len()).rev().find_map(|length| {
        let seek = Seek(&path.0[..length]);
        if json {
            let error = seek.deserialize(&mut serde_json::Deserializer::from_str(text)).err()?;
            (error.to_string().starts_with(HERE) && error.line() > 0).then_some(error.line())
        } else {
            let error = seek.deserialize(serde_yaml_ng::Deserializer::from_str(text)).err()?;
            // The message may begin with the way that serde went.
            error.to_string().contains(HERE).then(|| error.location().map(|l| l.line()))?
        }
    })
}

/// Goes down the path and fails where it ends: the error knows the line.
struct Seek<'a>(&'a [Step]);

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seek<'_> {
    fn scalar<E: Error>(&self) -> Result<(), E> {
        if self.0.is_empty() { Err(E::custom(HERE)) } else { Ok(()) }
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("anything")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.scalar()
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.scalar()
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        self.scalar()
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_none<E: Error>(self) -> Result<(), E> {
        self.scalar()
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.0.split_first() else { return Err(A::Error::custom(HERE)) };
        let mut index = 0;
        loop {
            let wanted = *first == Step::Item(index);
            let more = if wanted {
                items.next_element_seed(Seek(rest))?.is_some()
            } else {
                items.next_element::<IgnoredAny>()?.is_some()
            };
            if !more {
                return Ok(());
            }
            index += 1;
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let Some((first, rest)) = self.0.split_first() else { return Err(A::Error::custom(HERE)) };
        while let Some(Key(name)) = fields.next_key_seed(KeySeed)? {
            if *first == Step::Field(name) {
                fields.next_value_seed(Seek(rest))?;
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

/// A key as text; in YAML it may be a number.
struct Key(String);

struct KeySeed;

impl<'de> DeserializeSeed<'de> for KeySeed {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for KeySeed {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Key, E> {
        Ok(Key(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Key, E> {
        Ok(Key(number.to_string()))
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Key, E> {
        Ok(Key(number.to_string()))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Key, E> {
        Ok(Key(value.to_string()))
    }
}

const HERE: &str = "the wanted place";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_found_at_its_line_and_a_missing_one_at_what_is_nearest() {
        let yaml = "kind: X\nspec:\n  rules:\n  - from:\n    - source:\n        namespaces: [a, b]\n    to: []\n  - when:\n    - key: x\n  ports:\n    8080: {mode: STRICT}\n    a.b/c:\n      mode: 7\n";
        let json = "{\"kind\": \"X\",\n\"spec\": {\n\"rules\": [\n{\"from\": [{\"source\":\n{\"namespaces\": [\n\"a\",\n\"b\"]}}],\n\"to\": []},\n{\"when\": [\n{\"key\": \"x\"}]}]}}";
        let spec = FieldPath::default().field("spec");
        let source = spec.field("rules").item(0).field("from").item(0).field("source").field("namespaces");
        for (path, in_yaml, in_json) in [
            (source.item(1), 6, 7),
            (spec.field("rules").item(1).field("when").item(0).field("key"), 9, 10),
            (spec.field("rules").item(1).field("when").item(0).field("values"), 9, 10),
            (spec.field("ports").field("8080").field("mode"), 11, 0),
            (spec.field("ports").field("a.b/c").field("mode"), 13, 0),
            (spec.field("rules").item(0).field("to"), 7, 8),
        ] {
            assert_eq!(line(yaml, false, &path), Some(in_yaml), "{path}");
            assert!(in_json == 0 || line(json, true, &path) == Some(in_json), "{path}: {:?}", line(json, true, &path));
        }
        assert_eq!(spec.field("ports").field("a.b/c").item(1).to_string(), "spec.ports[\"a.b/c\"][1]");
    }
}

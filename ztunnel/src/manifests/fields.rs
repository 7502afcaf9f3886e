//! A document as its fields, where it is not known beforehand which there are.
//!
//! Must never choose between two values of one field: they may well contradict each other.

use std::fmt;

use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Number, Value};

use super::locate::FieldPath;

/// What is written, and the first field that is given more than once. Of those the last value stands.
#[derive(Debug)]
pub(super) struct Fields {
    pub value: Value,
    pub twice: Option<FieldPath>,
}

impl From<Value> for Fields {
    fn from(value: Value) -> Self {
        Self { value, twice: None }
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Read)
    }
}

struct Read;

impl<'de> Visitor<'de> for Read {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("fields, a list, text, a number, true, false or nothing")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Fields, E> {
        Ok(Value::Bool(value).into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Fields, E> {
        Ok(Value::Number(value.into()).into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Fields, E> {
        Ok(Value::Number(value.into()).into())
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Fields, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom(format!("{value} is not a finite number")))?;
        Ok(Value::Number(number).into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Fields, E> {
        Ok(Value::String(value.to_owned()).into())
    }

    fn visit_unit<E>(self) -> Result<Fields, E> {
        Ok(Value::Null.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Fields, A::Error> {
        let (mut items, mut twice) = (Vec::new(), None);
        while let Some(item) = from.next_element::<Fields>()? {
            let index = items.len();
            twice = twice.or_else(|| Some(FieldPath::default().item(index).then(&item.twice?)));
            items.push(item.value);
        }
        Ok(Fields { value: Value::Array(items), twice })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Fields, A::Error> {
        let (mut fields, mut twice) = (Map::new(), None);
        // In YAML the number 80 and the text "80" are two keys, and one field.
        while let Some((name, field)) = from.next_entry::<String, Fields>()? {
            let path = || FieldPath::default().field(&name);
            twice = twice
                .or_else(|| if fields.contains_key(&name) { Some(path()) } else { Some(path().then(&field.twice?)) });
            fields.insert(name, field.value);
        }
        Ok(Fields { value: Value::Object(fields), twice })
    }
}

//! Reading of the proxies' access log.

use std::collections::BTreeMap;

/// One line of a proxy's access log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccessLine {
    pub text: String,
    pub fields: BTreeMap<String, String>,
}

impl AccessLine {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('\t');
        let scope = parts.nth(2)?;
        if scope != "access" && !scope.starts_with("access{") {
            return None;
        }
        let mut fields = BTreeMap::new();
        let mut rest = parts.next_back()?;
        while let Some((key, after)) = rest.trim_start().split_once('=') {
            let key = key.rsplit(' ').next().unwrap_or(key);
            let (value, left) = match after.strip_prefix('"') {
                Some(quoted) => quoted.split_once('"')?,
                None => after.split_once(' ').unwrap_or((after, "")),
            };
            fields.insert(key.to_owned(), value.to_owned());
            rest = left;
        }
        Some(Self { text: text.to_owned(), fields })
    }

    /// A field, or nothing.
    pub fn get(&self, field: &str) -> &str {
        self.fields.get(field).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_line_is_read_field_by_field() {
        let text = "2026-09-30T12:00:00.000000Z\tinfo\taccess{conn=1}\tconnection complete \
                    src.addr=10.244.0.10:1234 src.workload=\"a b\" direction=\"outbound\" bytes_sent=12";
        let line = AccessLine::parse(text).expect("an access line");
        assert_eq!(line.get("src.addr"), "10.244.0.10:1234");
        assert_eq!(line.get("src.workload"), "a b");
        assert_eq!(line.get("direction"), "outbound");
        assert_eq!(line.get("bytes_sent"), "12");
        assert_eq!(line.get("error"), "");
        assert_eq!(AccessLine::parse("2026-09-30T12:00:00Z\tinfo\tzds\tconnected"), None);
    }
}

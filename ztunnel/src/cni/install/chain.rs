//! The text of a network configuration with our entry and without it.
//!
//! Must never change another byte of it.

use serde_json::Value;

use super::super::PLUGIN;
use super::super::spans::Json;
use super::super::types::{VERSIONS, position};

/// Why a configuration cannot have the entry.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ChainError {
    #[error("it is no JSON: {0}")]
    NotJson(String),
    #[error("it has no {0}")]
    Lacks(&'static str),
    #[error("its cniVersion {:?} is not one of {}, which the plugin speaks", .0, VERSIONS.join(", "))]
    Version(String),
}

/// The list with the entry behind all others, or `None` if it has it: anywhere but at the front, where there would be no
/// result to hand on.
pub fn with_entry(text: &str, entry: &str) -> Result<Option<String>, ChainError> {
    let json = parse(text)?;
    require_version(json)?;
    let plugins = plugins(json)?;
    let ours = |span: &std::ops::Range<usize>| is_ours(json.text(span));
    let places: Vec<usize> = (0..plugins.len()).filter(|index| ours(&plugins[*index])).collect();
    if places.len() == plugins.len() {
        return Err(ChainError::Lacks("plugin but ours"));
    }
    if let [place] = places[..]
        && place > 0
        && same(json.text(&plugins[place]), entry)
    {
        return Ok(None);
    }
    let bare = without_entry(text)?;
    let bare = bare.as_deref().unwrap_or(text);
    let json = parse(bare)?;
    let array = array(json)?;
    let elements = json.elements(&array).unwrap_or_default();
    let (Some(first), Some(last)) = (elements.first(), elements.last()) else {
        return Err(ChainError::Lacks("plugin but ours"));
    };
    // Set out as the others are.
    let space = json.text(&(array.start + 1..first.start));
    let space = if space.trim().is_empty() { space } else { "" };
    Ok(Some(format!("{},{space}{entry}{}", &bare[..last.end], &bare[last.end..])))
}

/// The list without any entry of ours, or `None` if it has none.
pub fn without_entry(text: &str) -> Result<Option<String>, ChainError> {
    let json = parse(text)?;
    let plugins = plugins(json)?;
    let mut kept = String::new();
    let mut from = 0;
    for (index, plugin) in plugins.iter().enumerate().filter(|(_, span)| is_ours(json.text(span))) {
        // With the comma before it, or, of the first, with the one behind it.
        let others_before = plugins[..index].iter().any(|span| !is_ours(json.text(span)));
        let (start, end) = match (index.checked_sub(1).map(|before| plugins[before].end), plugins.get(index + 1)) {
            (Some(before), _) if others_before => (before, plugin.end),
            (_, Some(next)) => (plugin.start, next.start),
            (_, None) => (plugin.start, plugin.end),
        };
        kept.push_str(text.get(from..start.max(from)).unwrap_or_default());
        from = end;
    }
    if from == 0 {
        return Ok(None);
    }
    kept.push_str(&text[from..]);
    Ok(Some(kept))
}

/// A list made from the configuration of one plugin.
pub fn list_of(text: &str, entry: &str) -> Result<String, ChainError> {
    let json = parse(text)?;
    let root = json.root();
    json.member(&root, "type").ok_or(ChainError::Lacks("type of plugin"))?;
    require_version(json)?;
    let name = json.member(&root, "name").ok_or(ChainError::Lacks("name"))?;
    let version = json.member(&root, "cniVersion").ok_or(ChainError::Lacks("cniVersion"))?;
    let (version, name, only) = (json.text(&version), json.text(&name), json.text(&root));
    Ok(format!(
        "{{\n  \"cniVersion\": {version},\n  \"name\": {name},\n  \"plugins\": [\n{only},\n    {entry}\n  ]\n}}\n"
    ))
}

fn parse(text: &str) -> Result<Json<'_>, ChainError> {
    Json::new(text).map_err(|error| ChainError::NotJson(error.to_string()))
}

fn array(json: Json<'_>) -> Result<std::ops::Range<usize>, ChainError> {
    json.member(&json.root(), "plugins").ok_or(ChainError::Lacks("list of plugins"))
}

fn plugins(json: Json<'_>) -> Result<Vec<std::ops::Range<usize>>, ChainError> {
    json.elements(&array(json)?).ok_or(ChainError::Lacks("list of plugins"))
}

/// A plugin that does not speak the configuration's version would fail every pod of the node.
fn require_version(json: Json<'_>) -> Result<(), ChainError> {
    let root = json.root();
    let text = |span: &std::ops::Range<usize>| serde_json::from_str::<String>(json.text(span)).unwrap_or_default();
    let version = json.member(&root, "cniVersion").map(|span| text(&span)).unwrap_or_default();
    let others = json.member(&root, "cniVersions").and_then(|span| json.elements(&span)).unwrap_or_default();
    for version in std::iter::once(version).chain(others.iter().map(text)) {
        if position(&version).is_none() {
            return Err(ChainError::Version(version));
        }
    }
    Ok(())
}

fn is_ours(plugin: &str) -> bool {
    serde_json::from_str::<Value>(plugin).is_ok_and(|plugin| plugin["type"] == PLUGIN)
}

fn same(a: &str, b: &str) -> bool {
    matches!((serde_json::from_str::<Value>(a), serde_json::from_str::<Value>(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENTRY: &str = r#"{"type":"understory-cni","socket":"/run/s"}"#;
    const PRETTY: &str = "{\n  \"cniVersion\": \"1.0.0\",\n\t\"name\" : \"net\",  \"plugins\": [\n    {\n      \"type\": \"bridge\", \"mtu\": 1.4e3\n    },\n    {\"type\":\"portmap\"}\n  ],\n  \"odd\": [ 1 ]\n}\n\n";

    #[test]
    fn the_entry_comes_last_and_goes_without_a_trace() {
        let compact = r#"{"cniVersion":"0.3.1","name":"n","plugins":[{"type":"ptp"}]}"#;
        for text in [PRETTY, compact, &compact.replace("0.3.1", "1.1.0")] {
            let with = with_entry(text, ENTRY).unwrap().unwrap();
            let value: Value = serde_json::from_str(&with).unwrap();
            assert_eq!(value["plugins"].as_array().unwrap().last().unwrap()["socket"], "/run/s");
            assert_eq!(with.replace(ENTRY, "").len() + ENTRY.len(), with.len(), "once");
            assert_eq!(with_entry(&with, ENTRY).unwrap(), None, "it stays as it is");
            assert_eq!(without_entry(&with).unwrap().unwrap(), text);
            assert_eq!(without_entry(text).unwrap(), None);
        }
        assert!(with_entry(PRETTY, ENTRY).unwrap().unwrap().contains(&format!("\"portmap\"}},\n    {ENTRY}\n  ],")));
    }

    #[test]
    fn an_entry_that_is_another_or_not_where_it_should_be_is_put_right() {
        let right = with_entry(PRETTY, ENTRY).unwrap().unwrap();
        let other = with_entry(PRETTY, r#"{"type":"understory-cni","socket":"/old"}"#).unwrap().unwrap();
        assert_eq!(with_entry(&other, ENTRY).unwrap().unwrap(), right);
        let twice = right.replace(ENTRY, &format!("{ENTRY},{ENTRY}"));
        assert_eq!(with_entry(&twice, ENTRY).unwrap().unwrap(), right);
        let front = format!(r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{ENTRY}, {{"type":"ptp"}}]}}"#);
        let moved: Value = serde_json::from_str(&with_entry(&front, ENTRY).unwrap().unwrap()).unwrap();
        assert_eq!((&moved["plugins"][0]["type"], &moved["plugins"][1]["type"]), (&"ptp".into(), &PLUGIN.into()));
        // Behind ours somebody may have put one of theirs: nobody fights over the last place.
        let middle =
            format!(r#"{{"cniVersion":"1.0.0","name":"n","plugins":[{{"type":"ptp"}},{ENTRY},{{"type":"x"}}]}}"#);
        assert_eq!(with_entry(&middle, ENTRY).unwrap(), None);
        let bare = without_entry(&middle).unwrap().unwrap();
        assert_eq!(bare, r#"{"cniVersion":"1.0.0","name":"n","plugins":[{"type":"ptp"},{"type":"x"}]}"#);
        let both = format!(r#"{{"plugins":[{ENTRY},{ENTRY}, {{"type":"ptp"}}]}}"#);
        assert_eq!(without_entry(&both).unwrap().unwrap(), r#"{"plugins":[{"type":"ptp"}]}"#);
    }

    #[test]
    fn a_single_configuration_becomes_a_list() {
        let text = "{\n \"cniVersion\": \"0.4.0\", \"name\": \"n\", \"type\": \"bridge\", \"mtu\": 1500.0 }\n";
        let list = list_of(text, ENTRY).unwrap();
        assert!(list.contains(text.trim()), "as it was: {list}");
        let value: Value = serde_json::from_str(&list).unwrap();
        assert_eq!((&value["cniVersion"], &value["name"]), (&"0.4.0".into(), &"n".into()));
        assert_eq!((&value["plugins"][0]["type"], &value["plugins"][1]["type"]), (&"bridge".into(), &PLUGIN.into()));
        assert_eq!(with_entry(&list, ENTRY).unwrap(), None);
    }

    #[test]
    fn a_chain_that_could_not_be_served_is_left_alone() {
        let list = |version: &str| format!(r#"{{"cniVersion":"{version}","name":"n","plugins":[{{"type":"ptp"}}]}}"#);
        assert_eq!(with_entry(&list("0.2.0"), ENTRY), Err(ChainError::Version("0.2.0".into())));
        let many = r#"{"cniVersion":"1.0.0","cniVersions":["1.0.0","9.9.9"],"plugins":[{"type":"ptp"}]}"#;
        assert_eq!(with_entry(many, ENTRY), Err(ChainError::Version("9.9.9".into())));
        assert_eq!(with_entry(r#"{"plugins":[{"type":"x"}]}"#, ENTRY), Err(ChainError::Version(String::new())));
        assert!(matches!(with_entry("{\"cniVersion\": \"1.0", ENTRY), Err(ChainError::NotJson(_))));
        for text in [r#"{"cniVersion":"1.0.0"}"#, r#"{"cniVersion":"1.0.0","plugins":{}}"#] {
            assert_eq!(with_entry(text, ENTRY), Err(ChainError::Lacks("list of plugins")));
        }
        assert!(with_entry(r#"{"cniVersion":"1.0.0","plugins":[]}"#, ENTRY).is_err());
        let alone = format!(r#"{{"cniVersion":"1.0.0","plugins":[{ENTRY}]}}"#);
        assert!(with_entry(&alone, ENTRY).is_err());
        assert_eq!(list_of(r#"{"cniVersion":"1.0.0","plugins":[]}"#, ENTRY), Err(ChainError::Lacks("type of plugin")));
        assert!(list_of(r#"{"type":"bridge","name":"n"}"#, ENTRY).is_err());
    }
}

//! Kubernetes label selectors: all `matchLabels` and all `matchExpressions` must hold; an empty selector matches all.
//!
//! Must never match by an operator that it does not know.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

type Labels = BTreeMap<String, String>;

pub fn matches(selector: &LabelSelector, labels: Option<&Labels>) -> bool {
    let get = |key: &str| labels.and_then(|labels| labels.get(key));
    selector.match_labels.iter().flatten().all(|(key, value)| get(key) == Some(value))
        && selector.match_expressions.iter().flatten().all(|requirement| holds(requirement, get(&requirement.key)))
}

/// The operators that cannot be evaluated, for the check of settings.
pub fn unknown_operators(selector: &LabelSelector) -> impl Iterator<Item = &str> {
    let operators = selector.match_expressions.iter().flatten().map(|requirement| requirement.operator.as_str());
    operators.filter(|operator| !["In", "NotIn", "Exists", "DoesNotExist"].contains(operator))
}

fn holds(requirement: &LabelSelectorRequirement, value: Option<&String>) -> bool {
    let listed = || value.is_some_and(|value| requirement.values.iter().flatten().any(|one| one == value));
    match requirement.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_as_kubernetes_reads_them() {
        let table = [
            ("{}", true),
            ("{matchLabels: {a: '1'}}", true),
            ("{matchLabels: {a: '1', b: '2'}}", false),
            ("{matchExpressions: [{key: a, operator: In, values: ['0', '1']}]}", true),
            ("{matchExpressions: [{key: b, operator: In, values: ['1']}]}", false),
            ("{matchExpressions: [{key: a, operator: NotIn, values: ['1']}]}", false),
            ("{matchExpressions: [{key: b, operator: NotIn, values: ['1']}]}", true),
            ("{matchExpressions: [{key: a, operator: Exists}]}", true),
            ("{matchExpressions: [{key: a, operator: DoesNotExist}]}", false),
            ("{matchExpressions: [{key: a, operator: Gt, values: ['0']}]}", false),
            ("{matchLabels: {a: '1'}, matchExpressions: [{key: b, operator: Exists}]}", false),
        ];
        let labels = Labels::from([("a".to_owned(), "1".to_owned())]);
        for (text, expected) in table {
            let selector: LabelSelector = serde_yaml_ng::from_str(text).unwrap();
            assert_eq!(matches(&selector, Some(&labels)), expected, "{text}");
        }
    }

    #[test]
    fn a_selector_of_labels_does_not_match_an_object_without_any() {
        let selector: LabelSelector = serde_yaml_ng::from_str("{matchLabels: {a: '1'}}").unwrap();
        assert!(!matches(&selector, None));
        assert!(matches(&LabelSelector::default(), None));
    }

    #[test]
    fn unknown_operators_are_named() {
        let selector: LabelSelector =
            serde_yaml_ng::from_str("{matchExpressions: [{key: a, operator: Gt}, {key: a, operator: In}]}").unwrap();
        assert_eq!(unknown_operators(&selector).collect::<Vec<_>>(), ["Gt"]);
    }
}

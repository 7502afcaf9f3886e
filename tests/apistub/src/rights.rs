//! Whether what a program asks of an API server is just what its role allows.

use std::collections::BTreeSet;

use serde_json::Value;

use super::locate;

/// What roles allow.
pub struct Rights(Vec<Grant>);

/// One verb on one resource, or on what is none: allowed by a role, or asked for. Empty is any name, any namespace.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Grant {
    verb: String,
    group: String,
    resource: String,
    namespace: String,
    name: String,
    path: String,
}

impl Grant {
    fn allows(&self, wanted: &Self) -> bool {
        let fits = |of: &str, asked: &str| of.is_empty() || of == asked;
        let path = match self.path.strip_suffix('*') {
            Some(prefix) => wanted.path.starts_with(prefix),
            None => self.path == wanted.path,
        };
        (&self.verb, &self.group, &self.resource) == (&wanted.verb, &wanted.group, &wanted.resource)
            && fits(&self.namespace, &wanted.namespace)
            && fits(&self.name, &wanted.name)
            && path
    }
}

impl Rights {
    /// Of the roles in a file of manifests.
    pub fn parse(text: &str) -> Self {
        let mut all = Vec::new();
        for document in text.split("\n---\n") {
            let document: Value = serde_yaml_ng::from_str(document).unwrap();
            let namespace = document["metadata"]["namespace"].as_str().unwrap_or_default();
            for rule in document["rules"].as_array().into_iter().flatten() {
                let list = |key: &str| -> Vec<String> {
                    rule[key].as_array().into_iter().flatten().map(|v| v.as_str().unwrap().to_owned()).collect()
                };
                let or_any = |list: Vec<String>| if list.is_empty() { vec![String::new()] } else { list };
                for verb in list("verbs") {
                    for path in list("nonResourceURLs") {
                        all.push(Grant { verb: verb.clone(), path, ..Grant::default() });
                    }
                    for (group, resource) in
                        list("apiGroups").iter().flat_map(|g| list("resources").into_iter().map(|r| (g.clone(), r)))
                    {
                        for name in or_any(list("resourceNames")) {
                            all.push(Grant {
                                verb: verb.clone(),
                                group: group.clone(),
                                resource: resource.clone(),
                                namespace: namespace.to_owned(),
                                name,
                                path: String::new(),
                            });
                        }
                    }
                }
            }
        }
        Self(all)
    }

    /// Panics unless each request is allowed, and each right is used by one.
    pub fn must_fit(&self, requests: &[String]) {
        let mut used = BTreeSet::new();
        for request in requests {
            let wanted = wanted(request);
            let by: Vec<_> = self.0.iter().filter(|grant| grant.allows(&wanted)).collect();
            assert!(!by.is_empty(), "{request} is not allowed: {wanted:?}");
            used.extend(by);
        }
        let unused: Vec<_> = self.0.iter().filter(|grant| !used.contains(grant)).collect();
        assert!(unused.is_empty(), "never asked for: {unused:?}");
    }
}

/// What a request needs, as the API server sees it.
fn wanted(request: &str) -> Grant {
    let (method, target) = request.split_once(' ').unwrap_or(("GET", request));
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let (list, namespace, name) = locate(path);
    let parts: Vec<&str> = list.split('/').collect();
    let (group, resource) = match parts[..] {
        ["", "api", _, resource] if path.ends_with("/status") => ("", format!("{resource}/status")),
        ["", "api", _, resource] => ("", resource.to_owned()),
        ["", "apis", group, _, resource] if path.ends_with("/status") => (group, format!("{resource}/status")),
        ["", "apis", group, _, resource] => (group, resource.to_owned()),
        _ => return Grant { verb: "get".into(), path: path.into(), ..Grant::default() },
    };
    let verb = match method {
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        _ if query.contains("watch=true") => "watch",
        _ if name.is_empty() => "list",
        _ => "get",
    };
    // Kubernetes takes the selector of one name for that name.
    let selected = query.split('&').find_map(|part| part.strip_prefix("fieldSelector=metadata.name%3D"));
    let name = selected.map_or(name, str::to_owned);
    let path = String::new();
    Grant { verb: verb.into(), group: group.into(), resource, namespace, name, path }
}

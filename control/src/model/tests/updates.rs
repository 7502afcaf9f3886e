//! That an update gives what a fresh start would give, and nothing where nothing matters.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use super::*;

#[test]
fn what_does_not_matter_changes_nothing() {
    let mut cluster = Cluster::new();
    cluster.node("node-a", json!({"topology.kubernetes.io/zone": "z1"}));
    cluster.put(pod("a", json!({"app": "cart"})));
    cluster.put(cart(json!([])));
    assert!(cluster.update().is_some());
    cluster.put(merged(pod("a", json!({"app": "cart"})), &json!({"status": {"message": "hello"}})));
    cluster.put(json!({"kind": "Node", "metadata": {"name": "node-a", "labels": {"topology.kubernetes.io/zone": "z1", "beat": "1"}}}));
    assert!(cluster.update().is_none());
    cluster.node("node-a", json!({"topology.kubernetes.io/zone": "z2"}));
    assert_eq!(workload(&cluster.snapshot(), "Kubernetes//Pod/shop/a").locality.unwrap().zone, "z2");
}

#[test]
fn versions_are_the_same_after_a_restart() {
    let snapshots = [(); 2].map(|()| {
        let mut cluster = Cluster::new();
        cluster.put(pod("a", json!({"app": "cart", "tier": "x"})));
        for name in ["one", "two", "three", "four"] {
            cluster.put(merged(cart(json!([{"port": 80}])), &json!({"metadata": {"name": name}})));
        }
        cluster.snapshot()
    });
    let [first, second] = snapshots;
    assert_eq!(first.changes_since(&second, Set::Addresses).count(), 0);
    assert_eq!(workload(&first, "Kubernetes//Pod/shop/a").services.len(), 4);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever comes in whatever order: the incremental model is the one that a fresh start would build.
    #[test]
    fn an_update_gives_what_a_fresh_start_gives(steps in proptest::collection::vec((0..10u8, 0..4u8, 0..6u8), 1..40)) {
        let mut cluster = Cluster::new();
        for (kind, which, how) in steps {
            cluster.step(kind, which, how);
            cluster.update();
        }
        let mut fresh = Model::new(settings());
        fresh.update(Arc::new(cluster.objects.clone()));
        let (grown, fresh) = (cluster.model.snapshot(), fresh.snapshot());
        prop_assert_eq!(grown.changes_since(&fresh, Set::Addresses).count(), 0);
        prop_assert_eq!(grown.changes_since(&fresh, Set::Authorizations).count(), 0);
        prop_assert_eq!(&grown.policies, &fresh.policies);
        for (key, names) in &fresh.by_alias {
            prop_assert_eq!(Some(names), grown.by_alias.get(key));
        }
        prop_assert_eq!(&grown.by_alias, &fresh.by_alias);
        prop_assert_eq!(&grown.endpoints, &fresh.endpoints);
        prop_assert_eq!(&grown.by_node, &fresh.by_node);
        prop_assert_eq!(grown.ranged.keys().collect::<Vec<_>>(), fresh.ranged.keys().collect::<Vec<_>>());
        prop_assert_eq!(&grown.problems, &fresh.problems);
    }
}

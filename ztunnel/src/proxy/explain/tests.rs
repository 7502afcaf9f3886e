use std::collections::HashMap;

use super::*;
use crate::mesh::{Mesh, convert_service, convert_workload};
use crate::policy::convert as convert_policy;
use crate::proto::security as policy_wire;
use crate::proto::workload as wire;

/// What a node's proxy holds, by the pod's name.
#[derive(Default)]
struct Node(HashMap<&'static str, (Phase, bool)>);

impl NodeFacts for Node {
    fn phase(&self, workload: &Workload) -> Option<Phase> {
        self.0.get(workload.name()).map(|(phase, _)| *phase)
    }

    fn takes(&self, own: &TrustDomain, theirs: &TrustDomain) -> bool {
        own == theirs
    }

    fn attests(&self, _: &Workload, _: &Hop) -> bool {
        false
    }

    fn certificate(&self, identity: &Identity) -> Option<CertificateState> {
        let (_, is_usable) = self.0.get(identity.service_account())?;
        Some(CertificateState { is_usable: *is_usable, text: format!("usable: {is_usable}") })
    }
}

fn node() -> Node {
    Node(HashMap::from([("client", (Phase::Serving, true))]))
}

fn pod(
    name: &str,
    address: u8,
    protocol: wire::TunnelProtocol,
    change: impl FnOnce(&mut wire::Workload),
) -> wire::Workload {
    let mut pod = wire::Workload {
        uid: format!("Kubernetes//Pod/shop/{name}"),
        name: name.into(),
        namespace: "shop".into(),
        service_account: name.into(),
        trust_domain: "cluster.local".into(),
        node: if name == "client" { "n1".into() } else { "n2".into() },
        addresses: vec![vec![10, 0, 0, address].into()],
        tunnel_protocol: protocol as i32,
        ..Default::default()
    };
    change(&mut pod);
    pod
}

/// A client on this node; a service with two servers, one of them unhealthy; a pod outside of the mesh.
fn mesh(policies: Vec<policy_wire::Authorization>) -> Arc<Mesh> {
    let mesh = Mesh::new("n1", "Kubernetes");
    let hbone = wire::TunnelProtocol::Hbone;
    let served = |pod: &mut wire::Workload| {
        let ports =
            wire::PortList { ports: vec![wire::Port { service_port: 80, target_port: 8080, ..Default::default() }] };
        pod.services = HashMap::from([("shop/web.shop.svc.cluster.local".into(), ports)]).into_iter().collect();
    };
    let pods = [
        pod("client", 1, hbone, |_| {}),
        pod("web-a", 2, hbone, served),
        pod("web-b", 3, hbone, |pod| {
            served(pod);
            pod.status = wire::WorkloadStatus::Unhealthy as i32;
        }),
        pod("plain", 4, wire::TunnelProtocol::None, |_| {}),
    ];
    let service = wire::Service {
        name: "web".into(),
        namespace: "shop".into(),
        hostname: "web.shop.svc.cluster.local".into(),
        addresses: vec![wire::NetworkAddress {
            network: String::new(),
            address: vec![10, 1, 0, 1].into(),
            ..Default::default()
        }],
        ports: vec![wire::Port { service_port: 80, target_port: 8080, ..Default::default() }],
        ..Default::default()
    };
    mesh.update(|update| {
        for pod in pods {
            let pod = convert_workload(&pod, update.strings()).unwrap();
            update.workload(pod);
        }
        let service = convert_service(&service, update.strings()).unwrap();
        update.service(service);
        for policy in &policies {
            update.policy(convert_policy(&policy.clone().into()).unwrap());
        }
        update.policies_complete();
    });
    mesh
}

fn deny_the_client() -> policy_wire::Authorization {
    let exact = policy_wire::string_match::MatchType::Exact("cluster.local/ns/shop/sa/client".into());
    let matches = policy_wire::Match {
        principals: vec![policy_wire::StringMatch { match_type: Some(exact) }],
        ..Default::default()
    };
    policy_wire::Authorization {
        name: "no-client".into(),
        namespace: "shop".into(),
        scope: policy_wire::Scope::Namespace as i32,
        action: policy_wire::Action::Deny as i32,
        rules: vec![policy_wire::Rule { clauses: vec![policy_wire::Clause { matches: vec![matches] }] }],
        ..Default::default()
    }
}

fn ask(mesh: &Mesh, node: &Node, from: &str, to: &str) -> Result<Explanation, BadQuestion> {
    explain(&mesh.load(), node, &Question { from: from.into(), to: to.into() })
}

fn step<'a>(explanation: &'a Explanation, name: &str) -> &'a Step {
    explanation.steps.iter().find(|s| s.step == name).unwrap_or_else(|| panic!("no step {name}: {explanation}"))
}

#[test]
fn a_connection_to_a_service_shows_its_way_and_why_endpoints_are_left_out() {
    let mesh = mesh(Vec::new());
    for to in ["shop/web:80", "web.shop.svc.cluster.local:80", "10.1.0.1:80"] {
        let answer = ask(&mesh, &node(), "shop/client", to).unwrap();
        assert_eq!(answer.outcome, Outcome::Allowed, "{answer}");
        let route = &step(&answer, "route").text;
        assert!(route.contains("HBONE to 10.0.0.2:15008, CONNECT 10.0.0.2:8080"), "{route}");
        assert!(route.contains("spiffe://cluster.local/ns/shop/sa/web-a"), "{route}");
        let [a, b] = &answer.endpoints[..] else { panic!("{answer}") };
        assert_eq!((&*a.workload, a.left_out.as_deref()), ("shop/web-a", None));
        assert_eq!((&*b.workload, b.left_out.as_deref()), ("shop/web-b", Some("it is not healthy")));
    }
}

#[test]
fn a_policy_that_denies_is_named_with_its_rule() {
    let mesh = mesh(vec![deny_the_client()]);
    let answer = ask(&mesh, &node(), "shop/client", "shop/web:80").unwrap();
    assert_eq!(answer.outcome, Outcome::Refused);
    let text = answer.to_string();
    assert!(text.contains("FAILS  policy     denied by shop/no-client rule 0"), "{text}");
    let json = serde_json::to_value(&answer).unwrap();
    assert_eq!(json["outcome"], "refused");
    assert_eq!(json["endpoints"][0]["policy"]["verdict"]["by"]["policy"], "shop/no-client");
    // The same identity, asked for by its name; and somebody else.
    let answer = ask(&mesh, &node(), "spiffe://cluster.local/ns/shop/sa/client", "10.0.0.2:8080").unwrap();
    assert_eq!(answer.outcome, Outcome::Refused, "{answer}");
    let answer = ask(&mesh, &node(), "spiffe://cluster.local/ns/shop/sa/other", "10.0.0.2:8080").unwrap();
    assert_eq!(answer.outcome, Outcome::Allowed, "{answer}");
}

#[test]
fn an_endpoint_that_would_not_take_the_peer_or_has_no_certificate_is_left_out() {
    let mesh = mesh(Vec::new());
    let left_out = |node: &Node, from: &str| {
        let answer = ask(&mesh, node, from, "10.0.0.2:8080").unwrap();
        (answer.outcome, answer.endpoints[0].left_out.clone().unwrap_or_default())
    };
    let (outcome, why) = left_out(&node(), "spiffe://elsewhere/ns/shop/sa/client");
    assert_eq!(outcome, Outcome::Refused);
    assert!(why.contains("trust domain elsewhere"), "{why}");
    let usable =
        |is_usable| Node(HashMap::from([("client", (Phase::Serving, true)), ("web-a", (Phase::Serving, is_usable))]));
    assert_eq!(left_out(&usable(true), "shop/client"), (Outcome::Allowed, String::new()));
    assert_eq!(left_out(&usable(false), "shop/client"), (Outcome::Refused, "its certificate cannot be used".into()));
}

#[test]
fn a_missing_certificate_and_a_leaving_pod_refuse() {
    let mesh = mesh(Vec::new());
    let without = Node(HashMap::from([("client", (Phase::Serving, false))]));
    let answer = ask(&mesh, &without, "shop/client", "shop/web:80").unwrap();
    assert_eq!(answer.outcome, Outcome::Refused);
    assert!(!step(&answer, "identity").passes);
    let leaving = Node(HashMap::from([("client", (Phase::Leaving, true))]));
    let answer = ask(&mesh, &leaving, "shop/client", "shop/web:80").unwrap();
    assert!(!step(&answer, "capture").passes);
}

#[test]
fn unknown_ports_are_refused_with_the_routes_own_reason() {
    let answer = ask(&mesh(Vec::new()), &node(), "shop/client", "shop/web:81").unwrap();
    assert_eq!(answer.outcome, Outcome::Refused);
    assert_eq!(step(&answer, "route").text, "service shop/web.shop.svc.cluster.local has no port 81");
}

#[test]
fn outside_the_mesh_connections_go_and_come_in_the_clear() {
    let mesh = mesh(vec![deny_the_client()]);
    let answer = ask(&mesh, &node(), "shop/client", "192.0.2.1:443").unwrap();
    assert_eq!(answer.outcome, Outcome::Allowed);
    assert!(step(&answer, "route").text.contains("in the clear"), "{answer}");
    let answer = ask(&mesh, &node(), "shop/client", "shop/plain:80").unwrap();
    assert!(step(&answer, "route").text.contains("not in the mesh"), "{answer}");
    assert!(answer.endpoints[0].policy.is_none(), "nobody judges there");
    // Without an identity the DENY does not match.
    let answer = ask(&mesh, &node(), "192.0.2.9", "shop/web:80").unwrap();
    assert!(step(&answer, "source").text.contains("in the clear"), "{answer}");
    assert_eq!(answer.endpoints[0].address, Some("10.0.0.2:8080".parse().unwrap()));
    assert_eq!(answer.outcome, Outcome::Allowed, "{answer}");
}

#[test]
fn the_proxys_own_ports_are_refused_and_a_pod_reaches_itself() {
    let mesh = mesh(vec![]);
    for (from, to) in [("shop/client", "10.0.0.2:15008"), ("192.0.2.1", "shop/web-a:15006")] {
        let explanation = ask(&mesh, &node(), from, to).unwrap();
        assert_eq!(explanation.outcome, Outcome::Refused, "{explanation}");
        let reason = explanation.endpoints[0].left_out.as_deref().unwrap();
        assert!(reason.ends_with("is the proxy's own"), "{reason}");
    }
    for to in ["0.0.0.0:80", "[::]:80", "127.0.0.1:80", "10.0.0.1:15008"] {
        let explanation = ask(&mesh, &node(), "shop/client", to).unwrap();
        assert!(step(&explanation, "route").text.contains("stays in the pod"), "{explanation}");
    }
}

#[test]
fn questions_that_cannot_be_answered_say_why() {
    let mesh = mesh(Vec::new());
    let refused = |from: &str, to: &str| ask(&mesh, &node(), from, to).unwrap_err();
    assert_eq!(refused("client", "shop/web:80"), BadQuestion::From("client".into()));
    assert_eq!(refused("spiffe://", "shop/web:80"), BadQuestion::From("spiffe://".into()));
    assert_eq!(refused("shop/nobody", "shop/web:80"), BadQuestion::UnknownSource("shop/nobody".into()));
    assert_eq!(refused("shop/client", "shop/web"), BadQuestion::To("shop/web".into()));
    assert_eq!(refused("shop/client", "shop/web:0"), BadQuestion::To("shop/web:0".into()));
    assert_eq!(refused("shop/client", "shop/other:80"), BadQuestion::UnknownDestination("shop/other".into()));
}

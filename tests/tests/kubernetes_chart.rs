//! The Helm chart: what it renders is valid for a real API server and for our own programs, wrong values are refused by
//! name, and what was installed has the rights that it needs, no more, and goes again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

use serde::Deserialize;
use serde_json::{Value, json};
use testbed::kubernetes::{ApiServer, Namespace};
use testbed::{Response, Shop, binary, wait_for};

/// What a user may choose, by name: values, and whether control is part of it.
const PROFILES: [(&str, &[&str], bool); 7] = [
    ("standalone", &[], true),
    ("with-istiod", &["profile=with-istiod"], false),
    ("gke", &["platform=gke"], true),
    ("eks", &["platform=eks"], true),
    ("k3s", &["platform=k3s"], true),
    ("openshift", &["platform=openshift"], true),
    ("with-istiod on openshift", &["profile=with-istiod", "platform=openshift"], false),
];

/// Whatever can be turned on that needs no kinds of others.
const ALL_ON: [&str; 8] = [
    "dashboards.enabled=true",
    "proxy.threads=50%",
    "proxy.onDemand=true",
    "proxy.env.POOL_UNUSED_RELEASE_TIMEOUT=1m",
    "mesh.clusterCidrs={10.96.0.0/16,10.244.0.0/16}",
    "agent.excludeNamespaces={kube-system,vault}",
    "imagePullSecrets[0].name=registry",
    "log.format=json",
];

#[test]
fn every_profile_passes_lint_and_the_api_server_takes_all_of_it() {
    let server = ApiServer::shared();
    for (name, values, with_control) in PROFILES {
        let namespace = server.namespace("dry");
        for more in [&[][..], &ALL_ON] {
            let values = [values, more].concat();
            let chart = chart();
            let linted = server.try_helm(&[&["lint", "--strict", &chart], &set(&values)[..]].concat());
            assert!(linted.status.success(), "{name} {values:?}: {}", text(&linted));
            let rendered = render(namespace.name(), &values);
            let parts = objects(&rendered);
            let has = |kind: &str, name: &str| {
                parts.iter().any(|object| object["kind"] == kind && object["metadata"]["name"] == name)
            };
            // Names that istiod, istioctl, CNIs and our own proxies rely on.
            assert!(has("DaemonSet", "ztunnel") && has("ServiceAccount", "ztunnel"), "{name}");
            assert_eq!(has("Service", "control") && has("Deployment", "control"), with_control, "{name}");
            let stranger = parts.iter().find(|object| object["metadata"]["name"].as_str().is_some_and(is_of_control));
            assert!(with_control || stranger.is_none(), "{name}: {stranger:?}");
            // Another test may have installed it: the cluster's objects are then helm's.
            let args = ["apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", "-"];
            server.feed(&args, &rendered);
        }
    }
}

#[test]
fn wrong_values_are_refused_by_name() {
    let server = ApiServer::shared();
    for (value, name) in [
        ("profile=sidecar", "/profile"),
        ("platform=mainframe", "/platform"),
        ("replicas=3", "replicas"),
        ("control.replica=3", "replica"),
        ("control.replicas=0", "/control/replicas"),
        ("control.replicas=many", "/control/replicas"),
        ("control.certificateTtl=soon", "/control/certificateTtl"),
        ("proxy.onDemand=perhaps", "/proxy/onDemand"),
        ("proxy.threads=0", "/proxy/threads"),
        ("proxy.terminationGracePeriodSeconds=0", "/proxy/terminationGracePeriodSeconds"),
        ("proxy.env.A-B=c", "A-B"),
        ("agent.cni.binDir=opt/cni/bin", "/agent/cni/binDir"),
        ("agent.cgroupRoot=", "/agent/cgroupRoot"),
        ("agent.excludeNamespaces={Kube_System}", "/agent/excludeNamespaces/0"),
        ("mesh.trustDomain=a b", "/mesh/trustDomain"),
        ("mesh.clusterCidrs={10.96.0.0}", "/mesh/clusterCidrs/0"),
        ("istiod.address=istiod:15012", "/istiod/address"),
        ("image.digest=latest", "/image/digest"),
        ("image.pullPolicy=Sometimes", "/image/pullPolicy"),
        ("log.format=xml", "/log/format"),
    ] {
        let named = name.trim_start_matches('/');
        for command in ["lint", "template"] {
            let refused = server.try_helm(&[&[command, &chart()], &set(&[value])[..]].concat());
            let said = text(&refused);
            // Both forms in which helm writes where a value is.
            let names = said.contains(name) || said.contains(&named.replace('/', "."));
            assert!(!refused.status.success() && names, "{command} with {value}: {said}");
        }
    }
}

#[test]
fn every_value_is_documented_and_checked() {
    let text = std::fs::read_to_string(PathBuf::from(chart()).join("values.yaml")).expect("read");
    let schema = std::fs::read_to_string(PathBuf::from(chart()).join("values.schema.json")).expect("read");
    let schema: Value = serde_json::from_str(&schema).expect("JSON");
    let values: Value = serde_yaml_ng::from_str(&text).expect("YAML");
    check_schema(&values, &schema, "");
    for (number, line) in text.lines().enumerate() {
        // Names at the first two levels; what is below them speaks for itself.
        let depth = line.len() - line.trim_start().len();
        let is_name = depth == 2 && line.trim_end().ends_with(|c| c != ':') && line.contains(": ");
        if !is_name || line.trim_start().starts_with('#') || OBVIOUS.iter().any(|name| line.trim().starts_with(name)) {
            continue;
        }
        let above = text.lines().nth(number - 1).unwrap_or_default().trim();
        assert!(above.starts_with('#'), "line {} says nothing of {line:?}", number + 1);
    }
}

/// Kubernetes' own names and such as speak for themselves.
const OBVIOUS: [&str; 8] =
    ["nodeSelector", "affinity", "podLabels", "podAnnotations", "tolerations", "priorityClass", "enabled", "label"];

#[test]
fn our_programs_know_every_setting_of_the_chart() {
    for (name, values, _) in PROFILES {
        for more in [&[][..], &ALL_ON] {
            let values = [values, more].concat();
            for (workload, container) in containers(&objects(&render("understory-system", &values))) {
                check_settings(&format!("{workload}, {name}"), &container);
            }
        }
    }
}

#[test]
fn probes_ports_and_selectors_fit_each_other() {
    let on =
        ["metrics.podMonitor.enabled=true", "metrics.podMonitor.interval=30s", "metrics.prometheusRule.enabled=true"];
    for (name, values, _) in PROFILES {
        let parts = objects(&render("understory-system", &[values, &on[..]].concat()));
        let mut served = BTreeMap::new();
        for (workload, container) in containers(&parts) {
            let ports: BTreeMap<String, u64> = list(&container["ports"])
                .iter()
                .map(|port| (string(&port["name"]), port["containerPort"].as_u64().expect("a port")))
                .collect();
            for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
                let port = &container[probe]["httpGet"]["port"];
                assert!(port.is_null() || ports.contains_key(&string(port)), "{name}: {workload}: {probe}");
            }
            assert!(container["livenessProbe"].is_object() && container["readinessProbe"].is_object(), "{workload}");
            assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true, "{name}: {workload}");
            served.insert(workload, ports);
        }
        for object in &parts {
            let spec = &object["spec"];
            let app = |selector: &Value| string(&selector["app"]);
            match object["kind"].as_str().expect("a kind") {
                "DaemonSet" | "Deployment" => {
                    let template = &spec["template"];
                    assert_eq!(template["metadata"]["labels"]["app"], spec["selector"]["matchLabels"]["app"]);
                    assert_eq!(template["metadata"]["labels"]["istio.io/dataplane-mode"], "none", "not in the mesh");
                    assert_eq!(spec["selector"]["matchLabels"]["app"], object["metadata"]["name"]);
                    let scraped = string(&template["metadata"]["annotations"]["prometheus.io/port"]);
                    let ports = &served[&string(&object["metadata"]["name"])];
                    assert!(ports.values().any(|port| port.to_string() == scraped), "{name}: {scraped}");
                }
                "Service" => {
                    let ports = &served[&app(&spec["selector"])];
                    assert!(ports.contains_key(&string(&spec["ports"][0]["targetPort"])), "{name}");
                }
                "NetworkPolicy" => {
                    let ports = &served[&app(&spec["podSelector"]["matchLabels"])];
                    let open: BTreeSet<u64> = list(&spec["ingress"])
                        .iter()
                        .flat_map(|rule| list(&rule["ports"]))
                        .map(|port| port["port"].as_u64().expect("a port"))
                        .collect();
                    assert_eq!(open, ports.values().copied().collect(), "{name}: what is served, and only that");
                }
                "PodDisruptionBudget" => {
                    assert!(served.contains_key(&app(&spec["selector"]["matchLabels"])));
                }
                "PodMonitor" => {
                    let ports = &served[&app(&spec["selector"]["matchLabels"])];
                    let endpoint = &spec["podMetricsEndpoints"][0];
                    assert!(ports.contains_key(&string(&endpoint["port"])) && endpoint["interval"] == "30s");
                    served
                        .get_mut(&app(&spec["selector"]["matchLabels"]))
                        .expect("there")
                        .insert("monitored".into(), 0);
                }
                "PrometheusRule" => assert!(list(&spec["groups"][0]["rules"]).len() > 5),
                _ => {}
            }
        }
        assert!(served.values().all(|ports| ports.contains_key("monitored")), "{name}: {served:?}");
    }
}

#[test]
fn rights_on_the_node_are_as_narrow_as_the_parts_need() {
    for (name, values, _) in PROFILES {
        let parts = objects(&render("understory-system", values));
        for (workload, container) in containers(&parts) {
            let pod = parts
                .iter()
                .find(|object| object["metadata"]["name"] == workload.as_str() && !object["spec"]["template"].is_null())
                .map(|object| &object["spec"]["template"]["spec"])
                .expect("it has pods");
            let security = &container["securityContext"];
            let added = json!(["NET_ADMIN", "SYS_ADMIN", "NET_RAW"]);
            match workload.as_str() {
                "ztunnel" => {
                    assert_eq!((&security["privileged"], &security["capabilities"]["add"]), (&json!(false), &added));
                    assert_eq!(security["capabilities"]["drop"], json!(["ALL"]));
                    assert_eq!(security["seccompProfile"]["type"], "RuntimeDefault");
                    assert_eq!(pod["automountServiceAccountToken"], false, "it needs no API server");
                    assert!(pod["hostNetwork"].is_null() && pod["hostPID"].is_null());
                    let of_host: Vec<&Value> =
                        list(&pod["volumes"]).iter().map(|v| &v["hostPath"]["path"]).filter(|p| !p.is_null()).collect();
                    assert_eq!(of_host, ["/var/run/ztunnel"]);
                }
                "understory-agent" => {
                    assert_eq!((&pod["hostNetwork"], &pod["hostPID"]), (&json!(true), &json!(true)));
                    assert_eq!(security["privileged"], true);
                }
                "control" => {
                    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
                    assert_eq!(security["allowPrivilegeEscalation"], false);
                    assert_eq!(security["capabilities"], json!({ "drop": ["ALL"] }));
                    assert!(list(&pod["volumes"]).iter().all(|volume| volume["hostPath"].is_null()));
                }
                other => panic!("{name}: {other} is not known here"),
            }
            let expected =
                if name.contains("openshift") && workload != "control" { json!("spc_t") } else { Value::Null };
            assert_eq!(security["seLinuxOptions"]["type"], expected, "{name}: {workload}");
        }
    }
}

#[test]
fn folders_of_the_cni_plugin_are_the_platforms_or_the_users() {
    let folders = |values: &[&str]| {
        let parts = objects(&render("understory-system", values));
        let agent = parts.iter().find(|o| o["kind"] == "DaemonSet" && o["metadata"]["name"] == "understory-agent");
        let spec = agent.expect("the agent")["spec"]["template"]["spec"].clone();
        let of = |name: &str| {
            let volume = list(&spec["volumes"]).iter().find(|volume| volume["name"] == name)?;
            Some(string(&volume["hostPath"]["path"]))
        };
        of("cni-conf").zip(of("cni-bin"))
    };
    let both = |conf: &str, bin: &str| Some((conf.to_owned(), bin.to_owned()));
    assert_eq!(folders(&[]), both("/etc/cni/net.d", "/opt/cni/bin"));
    assert_eq!(folders(&["platform=eks"]), both("/etc/cni/net.d", "/opt/cni/bin"));
    assert_eq!(folders(&["platform=gke"]), both("/etc/cni/net.d", "/home/kubernetes/bin"));
    let k3s = "/var/lib/rancher/k3s";
    assert_eq!(folders(&["platform=k3s"]), both(&format!("{k3s}/agent/etc/cni/net.d"), &format!("{k3s}/data/cni")));
    assert_eq!(folders(&["platform=openshift"]), None);
    assert_eq!(folders(&["agent.cni.enabled=false"]), None);
    assert_eq!(
        folders(&["platform=gke", "agent.cni.confDir=/a", "agent.cni.binDir=/b"]),
        both("/a", "/b"),
        "what the user says counts"
    );
}

#[test]
fn installed_it_has_its_rights_and_uninstalled_it_leaves_nothing() {
    let _alone = alone();
    let server = ApiServer::shared();
    let namespace = server.namespace("mesh");
    let shop = server.namespace("shop");
    let before = everything(server, namespace.name());
    let chart = chart();
    let install = |command: &str, values: &[&str]| {
        let args = [&[command, "understory", &chart, "-n", namespace.name()], &set(values)[..]].concat();
        server.helm(&args)
    };
    let notes = install("install", &["control.podLabels.team=mesh"]);
    assert!(notes.contains("istio.io/dataplane-mode=ambient") && notes.contains(namespace.name()), "{notes}");

    let control = format!("system:serviceaccount:{}:control", namespace.name());
    let (own, other) = (namespace.name(), shop.name());
    wait_for("control's role to count", || {
        may(server, &control, &["list pods"], "").iter().all(|&may| may).then_some(())
    });
    for (allowed, place, calls) in [
        (true, "", &ALLOWED_EVERYWHERE[..]),
        (true, own, &ALLOWED_AT_HOME),
        (false, "", &DENIED_EVERYWHERE),
        (false, own, &DENIED_AT_HOME),
        (false, other, &[&ALLOWED_AT_HOME[..], &DENIED_AT_HOME].concat()),
    ] {
        let answers = may(server, &control, calls, place);
        let wrong: Vec<_> = calls.iter().zip(&answers).filter(|&(_, &answer)| answer != allowed).collect();
        assert!(wrong.is_empty(), "in {place:?}, should be {allowed}: {wrong:?}");
    }
    let agent = format!("system:serviceaccount:{}:understory-agent", namespace.name());
    let rights =
        ["list pods", "watch pods", "list namespaces", "watch namespaces", "patch pods/status", "create events"];
    assert_eq!(may(server, &agent, &rights, other), [true; 6]);
    for place in ["", own, other] {
        let calls = [&DENIED_EVERYWHERE[..], &DENIED_AT_HOME, &ALLOWED_AT_HOME].concat();
        assert!(may(server, &agent, &calls, place).iter().all(|&may| !may), "the agent, in {place:?}");
    }
    // The proxy faces the network: it may ask the API server for nothing.
    let proxy = format!("system:serviceaccount:{}:ztunnel", namespace.name());
    for place in ["", own, other] {
        let calls = [&ALLOWED_EVERYWHERE[..], &ALLOWED_AT_HOME, &DENIED_EVERYWHERE].concat();
        assert!(may(server, &proxy, &calls, place).iter().all(|&may| !may), "the proxy, in {place:?}");
    }

    install("upgrade", &["control.replicas=3", "proxy.onDemand=true"]);
    assert_eq!(namespace.get(&["deployment", "control"])["spec"]["replicas"], 3);
    install("upgrade", &["profile=with-istiod"]);
    let gone = server.try_kubectl(&server.kubeconfig(), &["-n", own, "get", "deployment", "control"]);
    assert!(text(&gone).contains("not found"), "{}", text(&gone));
    install("upgrade", &[]);
    // A pod that says that it is captured is waited for.
    shop.run_pod_with("cart", "node-a", "10.244.0.7", &[], |pod| {
        pod["metadata"]["annotations"] = json!({ "ambient.istio.io/redirection": "enabled" });
    });
    let mut command = server.helm_command();
    command.args(["uninstall", "understory", "-n", own]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut uninstall = Ended(command.spawn().expect("start helm"));
    run_uninstall_job(&namespace, &shop);
    let ended = wait_for("helm to end", || uninstall.0.try_wait().expect("wait"));
    assert!(ended.success(), "{ended}");
    wait_for("all of it to go", || (everything(server, own) == before).then_some(()));
}

/// Does what a cluster's nodes would do in the hook: runs its Job with the Job's account, and the agents as it tells them.
fn run_uninstall_job(namespace: &Namespace<'_>, shop: &Namespace<'_>) {
    let server = ApiServer::shared();
    let pod = wait_for("the hook's pod", || {
        let pods = namespace.get(&["pods", "-l", "job-name=understory-uninstall"]);
        list(&pods["items"]).first().cloned()
    });
    let container = &pod["spec"]["containers"][0];
    assert_eq!(string(&container["command"][0]), "/usr/local/bin/control");
    let account = namespace.account(&string(&pod["spec"]["serviceAccountName"]));
    let mut command = server.place().command(binary("control"));
    command.args(list(&container["args"]).iter().map(string)).env("POD_NAMESPACE", namespace.name());
    command.arg("--kubeconfig").arg(account.kubeconfig());
    let mut job = Ended(command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().expect("start control"));
    let mut lines = BufReader::new(job.0.stdout.take().expect("piped")).lines().map(|line| line.expect("read"));

    let agents = || namespace.get(&["daemonset", "understory-agent"]);
    let roll_out = |nodes: u64, ready: u64| {
        let status = json!({ "status": {
            "observedGeneration": agents()["metadata"]["generation"],
            "currentNumberScheduled": nodes,
            "desiredNumberScheduled": nodes,
            "updatedNumberScheduled": nodes,
            "numberMisscheduled": 0,
            "numberReady": ready,
        } });
        let patch = status.to_string();
        let args =
            ["patch", "daemonset", "understory-agent", "--subresource", "status", "--type", "merge", "-p", &patch];
        namespace.kubectl(&args);
    };
    let mut expect = |text: &str| assert!(lines.any(|line| line.contains(text)), "it ended without {text:?}");
    expect("the agents let go of all pods");
    let spec = agents()["spec"]["template"]["spec"].clone();
    let env = list(&spec["containers"][0]["env"]);
    assert!(env.iter().any(|variable| variable["name"] == "ENABLEMENT_SELECTORS" && variable["value"] == "[]"));
    assert!(spec["initContainers"].is_null(), "nothing is cleaned while pods are in the mesh");
    roll_out(2, 1);
    expect("1 of 2 nodes are done");
    roll_out(2, 2);
    expect(&format!("1 pods are in the mesh still: {}/cart", shop.name()));
    assert!(agents()["spec"]["template"]["spec"]["initContainers"].is_null(), "a pod is in the mesh still");
    shop.kubectl(&["annotate", "pod", "cart", "ambient.istio.io/redirection-"]);
    expect("the nodes are cleaned");
    wait_for("the clean-up", || (!agents()["spec"]["template"]["spec"]["initContainers"].is_null()).then_some(()));
    let spec = agents()["spec"]["template"]["spec"].clone();
    check_command("the clean-up", &spec["initContainers"][0]);
    check_command("what stays", &spec["containers"][0]);
    assert_eq!(spec["containers"][0]["args"], json!(["uninstall", "--stay"]));
    roll_out(2, 2);
    expect("all nodes are clean");
    assert!(job.0.wait().expect("wait").success());
    namespace.set_pod_status(&string(&pod["metadata"]["name"]), &json!({ "phase": "Succeeded" }));
}

/// In all namespaces.
const ALLOWED_EVERYWHERE: [&str; 17] = [
    "list pods",
    "watch pods",
    "list services",
    "watch services",
    "list namespaces",
    "watch namespaces",
    "list nodes",
    "watch nodes",
    "list endpointslices.discovery.k8s.io",
    "watch endpointslices.discovery.k8s.io",
    "list authorizationpolicies.security.istio.io",
    "watch peerauthentications.security.istio.io",
    "patch authorizationpolicies.security.istio.io/status",
    "create tokenreviews.authentication.k8s.io",
    "create configmaps",
    "patch configmaps istio-ca-root-cert",
    "list configmaps istio-ca-root-cert",
];

const DENIED_EVERYWHERE: [&str; 16] = [
    "get secrets",
    "list secrets",
    "watch secrets",
    "get secrets understory-ca",
    "create secrets",
    "create pods",
    "create pods/exec",
    "delete pods",
    "patch pods",
    "list configmaps",
    "patch configmaps kube-root-ca.crt",
    "create serviceaccounts/token",
    "update authorizationpolicies.security.istio.io",
    "create clusterrolebindings.rbac.authorization.k8s.io",
    "impersonate users",
    "patch nodes",
];

const ALLOWED_AT_HOME: [&str; 5] = [
    "get secrets understory-ca",
    "create secrets",
    "get leases.coordination.k8s.io understory-control",
    "update leases.coordination.k8s.io understory-control",
    "create leases.coordination.k8s.io",
];

const DENIED_AT_HOME: [&str; 6] = [
    "get secrets registry",
    "list secrets",
    "delete secrets understory-ca",
    "update leases.coordination.k8s.io other",
    "patch daemonsets.apps ztunnel",
    "create pods/exec",
];

#[test]
fn alerts_and_dashboards_ask_for_what_is_there() {
    let shop = Shop::in_mesh();
    let _ = shop.near.dial(shop.far.at(9)).connect();
    let mut known: BTreeSet<String> = BTreeSet::new();
    let mut add = |page: Response| known.extend(page.body.lines().filter_map(family));
    for node in 0..2 {
        for port in [15020, 15014] {
            let address = SocketAddr::from(([127, 0, 0, 1], port));
            add(shop.tb.node(node).http_get(address, "/metrics").expect("metrics"));
        }
    }
    // control's are those that it has with an API server.
    let server = ApiServer::shared();
    let mut command = server.place().command(binary("control"));
    command.args(["serve", "--source", "kubernetes", "--kubeconfig"]).arg(server.kubeconfig());
    command.arg("--ca-dir").arg(server.path("metrics-ca")).stdout(Stdio::null());
    let control = Ended(command.spawn().expect("start control"));
    let admin = SocketAddr::from(([127, 0, 0, 1], 15014));
    add(wait_for("control's metrics", || server.place().http_get(admin, "/metrics").ok()));
    drop(control);

    let mut asked = BTreeSet::new();
    let dir = PathBuf::from(chart());
    let mut files = vec![dir.join("alerts.yaml")];
    files.extend(std::fs::read_dir(dir.join("dashboards")).expect("read").map(|entry| entry.expect("read").path()));
    for file in files {
        let text = std::fs::read_to_string(&file).expect("read");
        let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        asked.extend(words.filter(|word| word.starts_with("understory_") || word.starts_with("istio_tcp")).map(bare));
    }
    assert!(asked.len() > 20, "{asked:?}");
    let missing: Vec<_> = asked.difference(&known).collect();
    assert!(missing.is_empty(), "{missing:?} of {known:?}");
}

/// A process that is killed when it is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The family that a line of a scrape tells of.
fn family(line: &str) -> Option<String> {
    let name = line.strip_prefix("# TYPE ")?.split(' ').next()?;
    Some(bare(name))
}

/// Without what a family's samples are called by.
fn bare(name: &str) -> String {
    let ends = ["_total", "_bucket", "_count", "_sum"];
    ends.iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name).to_owned()
}

/// Runs a container's program with its settings and one more that is wrong and is looked at last: if that is what it
/// complains of, it has taken all others.
fn check_settings(whose: &str, container: &Value) {
    let command: Vec<String> = list(&container["command"]).iter().chain(list(&container["args"])).map(string).collect();
    let program = command[0].strip_prefix("/usr/local/bin/").unwrap_or_else(|| panic!("{whose}: {command:?}"));
    let help = Command::new(binary(program)).args(&command[1..]).arg("--help").output().expect("start");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let mut run = Command::new(binary(program));
    run.args(&command[1..]).env_clear().stdin(Stdio::null());
    for variable in list(&container["env"]) {
        let name = string(&variable["name"]);
        assert!(help.contains(&format!("[env: {name}=")), "{whose}: {program} knows no {name}");
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("status.podIP") => "10.244.0.7".to_owned(),
            Some(_) => "some-name".to_owned(),
            None => string(&variable["value"]),
        };
        run.env(name, value);
    }
    let last = if help.contains("[env: METRIC_SERIES_MAX=") { "METRIC_SERIES_MAX" } else { "RUST_LOG" };
    let output = run.env(last, "=wrong=").output().expect("start");
    let said = text(&output);
    assert!(!output.status.success() && said.contains("=wrong=") && !said.contains("required"), "{whose}: {said}");
    let complaints = said.matches("invalid value").count();
    assert_eq!(complaints, 1, "{whose}: {said}");
}

/// Does a container's program have such a command?
fn check_command(whose: &str, container: &Value) {
    let command: Vec<String> = list(&container["command"]).iter().chain(list(&container["args"])).map(string).collect();
    let program = command[0].strip_prefix("/usr/local/bin/").unwrap_or_else(|| panic!("{whose}: {command:?}"));
    let help = Command::new(binary(program)).args(&command[1..]).arg("--help").output().expect("start");
    assert!(help.status.success(), "{whose}: {}", text(&help));
}

fn check_schema(value: &Value, schema: &Value, path: &str) {
    let (Some(values), Some(properties)) = (value.as_object(), schema["properties"].as_object()) else { return };
    if path.ends_with(".resources") {
        // Kubernetes' own.
        return;
    }
    assert_eq!(schema["additionalProperties"], false, "{path}: unknown names are let through");
    for (name, value) in values {
        let path = format!("{path}.{name}");
        check_schema(value, properties.get(name).unwrap_or_else(|| panic!("{path} is not in the schema")), &path);
    }
    for name in properties.keys().filter(|name| *name != "global") {
        assert!(values.contains_key(name), "{path}.{name} is in the schema and not in values.yaml");
    }
}

/// What an account may do, asked in one call: verbs with resources, as kubectl writes them.
fn may(server: &ApiServer, account: &str, calls: &[&str], namespace: &str) -> Vec<bool> {
    let reviews: Vec<Value> = calls.iter().map(|call| review(account, call, namespace)).collect();
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": reviews });
    let answers = server.feed(&["create", "-o", "json", "-f", "-"], &list.to_string());
    let items: Vec<Value> =
        serde_json::Deserializer::from_str(&answers).into_iter().map(|one| one.expect("JSON")).collect();
    assert_eq!(items.len(), calls.len());
    items.iter().map(|item| item["status"]["allowed"] == true).collect()
}

fn review(account: &str, call: &str, namespace: &str) -> Value {
    let mut words = call.split(' ');
    let verb = words.next().expect("a verb");
    let (what, subresource) = words.next().expect("a resource").split_once('/').unwrap_or((call, ""));
    let what = if subresource.is_empty() { call.split(' ').nth(1).expect("a resource") } else { what };
    let (resource, group) = what.split_once('.').unwrap_or((what, ""));
    let attributes = json!({
        "verb": verb,
        "group": group,
        "resource": resource,
        "subresource": subresource,
        "name": words.next().unwrap_or_default(),
        "namespace": namespace,
    });
    json!({
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": { "user": account, "groups": ["system:serviceaccounts", "system:authenticated"], "resourceAttributes": attributes },
    })
}

/// All objects of a namespace, and those of the cluster that could be the chart's.
fn everything(server: &ApiServer, namespace: &str) -> BTreeSet<String> {
    let kinds = server.kubectl(&["api-resources", "--verbs=list", "--namespaced", "-o", "name"]);
    let ours: Vec<&str> = kinds.lines().filter(|kind| !kind.starts_with("events")).collect();
    let own = server.kubectl(&["-n", namespace, "get", &ours.join(","), "-o", "name", "--ignore-not-found"]);
    let kinds = "clusterroles,clusterrolebindings,priorityclasses,validatingwebhookconfigurations,\
                 mutatingwebhookconfigurations,customresourcedefinitions,namespaces";
    let cluster = server.kubectl(&["get", kinds, "-o", "name"]);
    // Other tests' namespaces come and go meanwhile.
    let cluster = cluster.lines().filter(|line| !line.starts_with("namespace/"));
    own.lines().chain(cluster).map(str::to_owned).collect()
}

/// One installation at a time: some of its objects are the cluster's, and have fixed names.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn render(namespace: &str, values: &[&str]) -> String {
    let chart = chart();
    let args = [&["template", "understory", &chart, "-n", namespace], &set(values)[..]].concat();
    ApiServer::shared().helm(&args)
}

fn objects(rendered: &str) -> Vec<Value> {
    let documents = serde_yaml_ng::Deserializer::from_str(rendered);
    documents.map(|one| Value::deserialize(one).expect("YAML")).filter(|object| !object.is_null()).collect()
}

/// All containers of our own programs, with the names of their workloads.
fn containers(objects: &[Value]) -> Vec<(String, Value)> {
    let workloads = objects.iter().filter(|object| object["kind"] == "DaemonSet" || object["kind"] == "Deployment");
    workloads
        .flat_map(|object| {
            let containers = list(&object["spec"]["template"]["spec"]["containers"]);
            containers.iter().map(|container| (string(&object["metadata"]["name"]), container.clone()))
        })
        .collect()
}

fn is_of_control(name: &str) -> bool {
    name.split('-').any(|part| part == "control")
}

fn set<'a>(values: &[&'a str]) -> Vec<&'a str> {
    values.iter().flat_map(|value| ["--set", value]).collect()
}

fn chart() -> String {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("in the workspace").join("deploy/helm");
    dir.to_str().expect("UTF-8").to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

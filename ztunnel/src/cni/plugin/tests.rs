use std::collections::HashMap;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread::JoinHandle;

use serde_json::Value;

use super::super::protocol::{HEADER, encode, length};
use super::*;

const RESULT: &str = r#"{ "cniVersion": "1.0.0", "interfaces":[{"name":"eth0","mac":"c6:e4:78:c0:87:63","sandbox":"/x"}],
 "ips":[{"interface":0,"address":"10.244.1.7/24"},{"interface":0,"address":"fd00::7/64"}], "routes" : [ ],
 "dns":{}, "other": 1.50e2, "unknown": null }"#;

/// A folder of one test, with an agent's socket in it.
struct Rig {
    dir: PathBuf,
}

impl Rig {
    fn new(test: &str) -> Rig {
        let dir = std::env::temp_dir().join(format!("understory-cni-plugin-{test}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Rig { dir }
    }

    fn socket(&self) -> PathBuf {
        self.dir.join("cni.sock")
    }

    /// An agent that takes one request and gives this answer.
    fn agent(&self, answer: Answer) -> JoinHandle<Request> {
        self.raw_agent(encode(&answer))
    }

    fn raw_agent(&self, answer: Vec<u8>) -> JoinHandle<Request> {
        let listener = UnixListener::bind(self.socket()).unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut header = [0; HEADER];
            stream.read_exact(&mut header).unwrap();
            let mut body = vec![0; length(header).unwrap()];
            stream.read_exact(&mut body).unwrap();
            stream.write_all(&answer).unwrap();
            serde_json::from_slice(&body).unwrap()
        })
    }

    fn config(&self, version: &str) -> Value {
        serde_json::json!({
            "cniVersion": version, "name": "cluster", "type": "understory-cni", "socket": self.socket(),
            "excludeNamespaces": ["kube-system"], "timeoutSeconds": 1,
        })
    }

    fn with_result(&self, version: &str, result: &str) -> String {
        let config = self.config(version).to_string();
        format!("{},\"prevResult\":{result}}}", config.strip_suffix('}').unwrap())
    }

    fn call(&self, command: &str, pod: &str, input: &str) -> Result<String, CniError> {
        let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={pod};K8S_POD_NAME=web;K8S_POD_UID=u");
        let env: HashMap<&str, &str> = [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_NETNS", "/proc/self/ns/net"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_ARGS", &args),
        ]
        .into();
        let mut file = std::fs::File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .open(self.dir.join("stdin"))
            .unwrap();
        file.write_all(input.as_bytes()).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        answer(|name| env.get(name).map(OsString::from), file.as_fd()).map_err(|(error, _)| error)
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

#[test]
fn add_hands_the_result_on_byte_for_byte_and_the_pod_to_the_agent() {
    for version in VERSIONS {
        let rig = Rig::new(&format!("add-{version}"));
        let agent = rig.agent(Answer::Captured);
        let output = rig.call("ADD", "shop", &rig.with_result(version, RESULT)).unwrap();
        assert_eq!(output, RESULT);
        let Request::Add(attach) = agent.join().unwrap() else { panic!("another request") };
        assert_eq!(attach.pod.to_string(), "shop/web");
        assert_eq!(attach.addresses, ["10.244.1.7", "fd00::7"].map(|text| text.parse::<std::net::IpAddr>().unwrap()));
    }
}

#[test]
fn a_result_without_a_version_gets_that_of_the_configuration() {
    assert_eq!(with_version("{}", "0.4.0").unwrap(), r#"{"cniVersion":"0.4.0"}"#);
    assert_eq!(with_version(r#"{ "ips":[]}"#, "0.4.0").unwrap(), r#"{"cniVersion":"0.4.0", "ips":[]}"#);
}

#[test]
fn a_pod_of_an_excluded_namespace_and_what_is_no_pod_need_no_agent() {
    let rig = Rig::new("excluded");
    let input = rig.with_result("1.0.0", RESULT);
    assert_eq!(rig.call("ADD", "kube-system", &input).unwrap(), RESULT);
    assert_eq!(rig.call("CHECK", "kube-system", &input).unwrap(), "");
    let no_pod: HashMap<&str, &str> =
        [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c"), ("CNI_NETNS", "/nowhere"), ("CNI_IFNAME", "eth0")].into();
    let file = std::fs::File::open(rig.dir.join("stdin")).unwrap();
    assert_eq!(answer(|name| no_pod.get(name).map(OsString::from), file.as_fd()).unwrap(), RESULT);
}

#[test]
fn a_refusal_and_every_way_of_no_answer_fail_the_sandbox_for_a_later_try() {
    let refused = Answer::Refused { step: "capture".into(), reason: "no proxy is connected".into() };
    let table = [
        ("refused", Some(encode(&refused)), ["no proxy is connected", "step: capture"]),
        ("away", None, ["No such file", "step: connect to the agent"]),
        ("closed", Some(vec![]), ["closed the connection", "step: wait for the agent's answer"]),
        ("long", Some(vec![255; 4]), ["4294967295", "wait for the agent's answer"]),
        ("garbage", Some(vec![0, 0, 0, 2, b'{', b'{']), ["not understood", "wait for the agent's answer"]),
    ];
    for (case, reply, texts) in table {
        let rig = Rig::new(case);
        let agent = reply.map(|reply| rig.raw_agent(reply));
        let error = rig.call("ADD", "shop", &rig.with_result("1.0.0", RESULT)).unwrap_err();
        assert_eq!(error.code, Code::TryAgainLater, "{case}");
        let text = error.to_json("1.0.0");
        for part in texts.iter().chain(&["shop/web", "cni.sock", "/proc/self/ns/net"]) {
            assert!(text.contains(part), "{case}: {part} is not in {text}");
        }
        if let Some(agent) = agent {
            agent.join().unwrap();
        }
    }
}

#[test]
fn an_agent_that_does_not_answer_is_given_up_in_time() {
    let rig = Rig::new("silent");
    // Connections are queued, and nobody takes them.
    let _listener = UnixListener::bind(rig.socket()).unwrap();
    let error = rig.call("ADD", "shop", &rig.with_result("1.0.0", RESULT)).unwrap_err();
    assert_eq!(error.code, Code::TryAgainLater);
    assert!(error.message.contains("nothing came within 1s"), "{}", error.message);
    assert_eq!(rig.call("DEL", "shop", &rig.config("1.0.0").to_string()).unwrap(), "");
}

#[test]
fn del_and_gc_succeed_with_and_without_the_agent() {
    let rig = Rig::new("del");
    let config = rig.config("1.1.0").to_string();
    assert_eq!(rig.call("DEL", "shop", &config).unwrap(), "");
    let gc = format!(
        "{},\"cni.dev/valid-attachments\":[{{\"containerID\":\"c1\",\"ifname\":\"eth0\"}}]}}",
        config.strip_suffix('}').unwrap()
    );
    assert_eq!(rig.call("GC", "shop", &gc).unwrap(), "");
    assert_eq!(rig.call("GC", "shop", &config).unwrap_err().code, Code::InvalidConfig);
    let agent = rig.agent(Answer::Done);
    assert_eq!(rig.call("GC", "shop", &gc).unwrap(), "");
    let Request::Gc { attachments } = agent.join().unwrap() else { panic!("another request") };
    assert_eq!((attachments[0].container.as_str(), attachments.len()), ("c1", 1));
}

#[test]
fn check_and_status_say_what_the_agent_says() {
    let refused = || Answer::Refused { step: "look".into(), reason: "its maps are gone".into() };
    let rig = Rig::new("check");
    let agent = rig.agent(refused());
    let error = rig.call("CHECK", "shop", &rig.with_result("1.0.0", RESULT)).unwrap_err();
    assert_eq!(error.code, Code::NotCaptured);
    assert!(error.message.contains("its maps are gone"));
    agent.join().unwrap();
    for (answer, code) in [(Answer::Done, None), (refused(), Some(Code::NotAvailable))] {
        let rig = Rig::new("status");
        let agent = rig.agent(answer);
        let result = rig.call("STATUS", "shop", &rig.config("1.1.0").to_string());
        assert_eq!(result.err().map(|error| error.code), code);
        assert_eq!(agent.join().unwrap(), Request::Status);
    }
}

#[test]
fn version_answers_whatever_version_is_asked_for() {
    let rig = Rig::new("version");
    for (input, told) in
        [("", "1.1.0"), ("{\"cniVersion\":\"0.4.0\"}", "0.4.0"), ("{\"cniVersion\":\"9.0.0\"}", "1.1.0")]
    {
        let answer: Value = serde_json::from_str(&rig.call("VERSION", "shop", input).unwrap()).unwrap();
        assert_eq!(answer["cniVersion"], told);
        assert_eq!(answer["supportedVersions"], serde_json::json!(VERSIONS));
    }
}

#[test]
fn wrong_input_is_an_error_of_its_kind() {
    let rig = Rig::new("wrong");
    let long = format!("{{\"a\": \"{}\"}}", "x".repeat(MAX_STDIN));
    let table: &[(&str, String, Code)] = &[
        ("ADD", String::new(), Code::DecodingFailure),
        ("ADD", "nonsense".into(), Code::DecodingFailure),
        ("ADD", "[1]".into(), Code::DecodingFailure),
        ("ADD", long, Code::DecodingFailure),
        ("ADD", rig.config("0.2.0").to_string(), Code::IncompatibleVersion),
        ("ADD", rig.config("1.0.0").to_string(), Code::InvalidConfig),
        ("ADD", rig.with_result("1.0.0", "null"), Code::InvalidConfig),
        ("ADD", rig.with_result("1.0.0", r#"{"ips": 7}"#), Code::InvalidConfig),
        ("CHECK", rig.config("1.0.0").to_string(), Code::InvalidConfig),
        ("CHECK", rig.with_result("0.3.1", RESULT), Code::IncompatibleVersion),
        ("STATUS", rig.config("1.0.0").to_string(), Code::IncompatibleVersion),
        ("VERSION", "nonsense".into(), Code::DecodingFailure),
        ("RESTART", rig.config("1.0.0").to_string(), Code::InvalidEnvironment),
    ];
    for (command, input, code) in table {
        let error = rig.call(command, "shop", input).unwrap_err();
        assert_eq!(error.code, *code, "{command} with {:.80}: {}", input, error.message);
    }
}

//! The words of the CNI specification (1.1.0): commands, environment, network configuration, results, errors.
//!
//! Must never take a wrong input for a right one: a pod would start without its place in the mesh.

use std::ffi::OsString;
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::spans::Json;

/// Versions of the specification whose configurations and results are understood, oldest first. All of them have results
/// of one form.
pub const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// `CNI_COMMAND`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    Add,
    Check,
    Del,
    Status,
    Version,
    Gc,
}

/// What the runtime tells by its environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub command: Command,
    /// `CNI_CONTAINERID`, empty where the command has none.
    pub container: String,
    /// `CNI_NETNS`, empty where the runtime gives none.
    pub netns: PathBuf,
    /// The pod, of `CNI_ARGS`; none for what is no pod of Kubernetes.
    pub pod: Option<PodName>,
}

/// A pod, as a runtime names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodName {
    pub namespace: String,
    pub name: String,
    /// Empty where the runtime does not tell it. A static pod's is another one than that of its object.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub uid: String,
}

/// The plugin's part of a network configuration; what else is there is nobody's business here.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Config {
    pub cni_version: String,
    /// The agent's socket.
    pub socket: PathBuf,
    /// Namespaces whose pods do without the agent.
    pub exclude_namespaces: Vec<String>,
    /// Seconds for which the agent may take its time.
    pub timeout_seconds: Option<u64>,
    #[serde(rename = "cni.dev/valid-attachments")]
    pub valid_attachments: Option<Vec<Attachment>>,
}

/// An interface of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attachment {
    #[serde(rename = "containerID")]
    pub container: String,
    #[serde(rename = "ifname", default)]
    pub interface: String,
}

/// An error as a plugin tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniError {
    pub code: Code,
    pub message: String,
    pub details: String,
}

/// The specification's numbers of errors, and one of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    IncompatibleVersion = 1,
    InvalidEnvironment = 4,
    IoFailure = 5,
    DecodingFailure = 6,
    InvalidConfig = 7,
    TryAgainLater = 11,
    NotAvailable = 50,
    /// CHECK: the pod should be captured and is not.
    NotCaptured = 100,
}

/// The parts of `prevResult` that are read.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PreviousResult {
    interfaces: Option<Vec<Interface>>,
    ips: Option<Vec<Ip>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Interface {
    sandbox: String,
}

#[derive(Debug, Deserialize)]
struct Ip {
    /// Some plugins write -1 for none.
    interface: Option<i64>,
    address: String,
}

impl Command {
    fn parse(text: &str) -> Option<Command> {
        Some(match text {
            "ADD" => Command::Add,
            "CHECK" => Command::Check,
            "DEL" => Command::Del,
            "STATUS" => Command::Status,
            "VERSION" => Command::Version,
            "GC" => Command::Gc,
            _ => return None,
        })
    }

    /// The first version that has the command.
    pub fn since(self) -> &'static str {
        match self {
            Command::Add | Command::Del | Command::Version => VERSIONS[0],
            Command::Check => "0.4.0",
            Command::Status | Command::Gc => "1.1.0",
        }
    }
}

impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Command::Add => "ADD",
            Command::Check => "CHECK",
            Command::Del => "DEL",
            Command::Status => "STATUS",
            Command::Version => "VERSION",
            Command::Gc => "GC",
        })
    }
}

impl Call {
    /// Reads the environment.
    pub fn read(env: impl Fn(&str) -> Option<OsString>) -> Result<Call, CniError> {
        let wrong = |message: String| CniError::new(Code::InvalidEnvironment, message);
        let text = |name: &str| match env(name).map(OsString::into_string) {
            None => Ok(String::new()),
            Some(Ok(text)) => Ok(text),
            Some(Err(bytes)) => Err(wrong(format!("{name} is no UTF-8 text: {bytes:?}"))),
        };
        let named = text("CNI_COMMAND")?;
        let command = match Command::parse(&named) {
            Some(command) => command,
            None if named.is_empty() => return Err(wrong("CNI_COMMAND is not set".into())),
            None => return Err(wrong(format!("CNI_COMMAND: {named:?} is not a command of CNI"))),
        };
        let required: &[&str] = match command {
            Command::Add | Command::Check => &["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"],
            Command::Del => &["CNI_CONTAINERID", "CNI_IFNAME"],
            Command::Status | Command::Version | Command::Gc => &[],
        };
        for name in required {
            if text(name)?.is_empty() {
                return Err(wrong(format!("{name} is not set, which {command} needs")));
            }
        }
        let (container, interface) = (text("CNI_CONTAINERID")?, text("CNI_IFNAME")?);
        if !required.is_empty() && !is_container_id(&container) {
            return Err(wrong(format!("CNI_CONTAINERID: {container:?} is not the id of a container")));
        }
        if !required.is_empty() && !is_interface_name(&interface) {
            return Err(wrong(format!("CNI_IFNAME: {interface:?} is not the name of an interface")));
        }
        let netns = env("CNI_NETNS").map(PathBuf::from).unwrap_or_default();
        let pod = if required.is_empty() { None } else { PodName::parse(&text("CNI_ARGS")?).map_err(wrong)? };
        Ok(Call { command, container, netns, pod })
    }
}

impl PodName {
    /// Reads `CNI_ARGS`: `key=value` with `;` between, in any order.
    fn parse(args: &str) -> Result<Option<PodName>, String> {
        let mut pod = PodName { namespace: String::new(), name: String::new(), uid: String::new() };
        for pair in args.split(';').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("CNI_ARGS: {pair:?} is not key=value"))?;
            let field = match key {
                "K8S_POD_NAMESPACE" => &mut pod.namespace,
                "K8S_POD_NAME" => &mut pod.name,
                "K8S_POD_UID" => &mut pod.uid,
                _ => continue,
            };
            value.clone_into(field);
        }
        match (pod.namespace.is_empty(), pod.name.is_empty()) {
            (false, false) => Ok(Some(pod)),
            (true, true) => Ok(None),
            _ => Err(format!("CNI_ARGS: {args:?} names only one of K8S_POD_NAMESPACE and K8S_POD_NAME")),
        }
    }
}

impl fmt::Display for PodName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl Config {
    /// Reads standard input, and checks that the version and the command go together.
    pub fn read(json: Json<'_>, command: Command) -> Result<Config, CniError> {
        let root = json.text(&json.root());
        let wrong = |reason: String| {
            CniError::new(Code::DecodingFailure, format!("standard input is no network configuration: {reason}"))
        };
        // A list would pass for an object whose fields come in order.
        if !root.starts_with('{') {
            return Err(wrong("it is no object".into()));
        }
        let config: Config = serde_json::from_str(root).map_err(|error| wrong(error.to_string()))?;
        if command == Command::Version {
            return Ok(config);
        }
        let version = position(&config.cni_version).ok_or_else(|| {
            let known = VERSIONS.join(", ");
            let message = format!("cniVersion {:?} is not supported, only {known}", config.cni_version);
            CniError::new(Code::IncompatibleVersion, message)
        })?;
        if position(command.since()).is_some_and(|since| version < since) {
            let message = format!("cniVersion {} has no {command}, {} has it", config.cni_version, command.since());
            return Err(CniError::new(Code::IncompatibleVersion, message));
        }
        if !config.socket.is_absolute() {
            let message = format!("socket: {:?} is not the absolute path of the agent's socket", config.socket);
            return Err(CniError::new(Code::InvalidConfig, message));
        }
        Ok(config)
    }
}

impl CniError {
    pub fn new(code: Code, message: impl Into<String>) -> CniError {
        CniError { code, message: message.into(), details: String::new() }
    }

    pub fn details(mut self, details: impl Into<String>) -> CniError {
        self.details = details.into();
        self
    }

    /// As it is printed. `version` is the configuration's, if it could be read.
    pub fn to_json(&self, version: &str) -> String {
        let version = if position(version).is_some() { version } else { VERSIONS[VERSIONS.len() - 1] };
        serde_json::json!({
            "cniVersion": version,
            "code": self.code as u32,
            "msg": self.message,
            "details": self.details,
        })
        .to_string()
    }
}

/// The pod's addresses in a result: those of interfaces inside the sandbox, in the order of the result.
pub fn addresses(result: &str) -> Result<Vec<IpAddr>, CniError> {
    let wrong = |reason: String| CniError::new(Code::InvalidConfig, format!("prevResult: {reason}"));
    let result: PreviousResult = serde_json::from_str(result).map_err(|error| wrong(error.to_string()))?;
    let mut addresses = Vec::new();
    let interfaces = result.interfaces.unwrap_or_default();
    for ip in result.ips.unwrap_or_default() {
        let interface = ip.interface.and_then(|index| interfaces.get(usize::try_from(index).ok()?));
        if interface.is_some_and(|interface| interface.sandbox.is_empty()) {
            continue;
        }
        let bare = ip.address.split('/').next().unwrap_or_default();
        let address = bare.parse().map_err(|_| wrong(format!("{:?} is not an address", ip.address)))?;
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
    Ok(addresses)
}

/// Where a version stands in [`VERSIONS`].
pub fn position(version: &str) -> Option<usize> {
    VERSIONS.iter().position(|known| *known == version)
}

fn is_container_id(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

fn is_interface_name(text: &str) -> bool {
    let odd = |c: char| c == '/' || c == ':' || c.is_whitespace();
    !text.is_empty() && text.len() < 16 && text != "." && text != ".." && !text.contains(odd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn read(pairs: &[(&str, &str)]) -> Result<Call, CniError> {
        let env: HashMap<&str, &str> = pairs.iter().copied().collect();
        Call::read(|name| env.get(name).map(OsString::from))
    }

    const ADD: [(&str, &str); 4] =
        [("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_NETNS", "/run/netns/a"), ("CNI_IFNAME", "eth0")];

    fn with<'a>(key: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
        ADD.into_iter().filter(|(name, _)| *name != key).chain([(key, value)]).collect()
    }

    #[test]
    fn the_pod_is_read_from_arguments_in_any_order() {
        let parts = [
            "IgnoreUnknown=1",
            "K8S_POD_NAMESPACE=shop",
            "K8S_POD_NAME=web",
            "K8S_POD_UID=u",
            "K8S_POD_INFRA_CONTAINER_ID=i",
        ];
        for turn in 0..parts.len() {
            let mut turned = parts;
            turned.rotate_left(turn);
            let call = read(&with("CNI_ARGS", &turned.join(";"))).unwrap();
            let pod = call.pod.unwrap();
            assert_eq!((pod.to_string().as_str(), pod.uid.as_str()), ("shop/web", "u"));
        }
        assert_eq!(read(&with("CNI_ARGS", "IgnoreUnknown=1;")).unwrap().pod, None);
        assert_eq!(read(&ADD).unwrap().pod, None);
    }

    #[test]
    fn a_wrong_environment_is_named() {
        let table: &[(Vec<(&str, &str)>, &str)] = &[
            (vec![], "CNI_COMMAND"),
            (with("CNI_COMMAND", "FETCH"), "FETCH"),
            (with("CNI_COMMAND", "add"), "add"),
            (with("CNI_CONTAINERID", ""), "CNI_CONTAINERID"),
            (with("CNI_CONTAINERID", "../x"), "CNI_CONTAINERID"),
            (with("CNI_NETNS", ""), "CNI_NETNS"),
            (with("CNI_IFNAME", ""), "CNI_IFNAME"),
            (with("CNI_IFNAME", "a/b"), "a/b"),
            (with("CNI_IFNAME", "sixteen-letters-"), "CNI_IFNAME"),
            (with("CNI_ARGS", "nonsense"), "nonsense"),
            (with("CNI_ARGS", "K8S_POD_NAME=web"), "K8S_POD_NAMESPACE"),
        ];
        for (env, named) in table {
            let error = read(env).unwrap_err();
            assert_eq!(error.code, Code::InvalidEnvironment, "{env:?}");
            assert!(error.message.contains(named), "{env:?}: {}", error.message);
        }
        // What a command does not need may be missing.
        for command in ["VERSION", "STATUS", "GC"] {
            assert!(read(&[("CNI_COMMAND", command)]).is_ok());
        }
        assert!(read(&[("CNI_COMMAND", "DEL"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")]).is_ok());
    }

    #[test]
    fn versions_and_commands_go_together() {
        let read = |version: &str, command| {
            let text = format!(r#"{{"cniVersion": "{version}", "socket": "/run/s"}}"#);
            Config::read(Json::new(&text).unwrap(), command).map_err(|error| error.code)
        };
        for (index, version) in VERSIONS.iter().enumerate() {
            assert!(read(version, Command::Add).is_ok() && read(version, Command::Del).is_ok());
            assert_eq!(read(version, Command::Check).is_ok(), index >= 2, "{version}");
            assert_eq!(read(version, Command::Status).is_ok(), index == 4, "{version}");
            assert_eq!(read(version, Command::Gc).is_ok(), index == 4, "{version}");
        }
        for version in ["", "0.2.0", "1.2.0", "latest"] {
            assert_eq!(read(version, Command::Add).unwrap_err(), Code::IncompatibleVersion, "{version}");
        }
        let bad = |text: &str| Config::read(Json::new(text).unwrap(), Command::Add).unwrap_err().code;
        assert_eq!(bad("[]"), Code::DecodingFailure);
        assert_eq!(bad(r#"{"cniVersion": 1}"#), Code::DecodingFailure);
        assert_eq!(bad(r#"{"cniVersion": "1.0.0"}"#), Code::InvalidConfig);
        assert_eq!(bad(r#"{"cniVersion": "1.0.0", "socket": "cni.sock"}"#), Code::InvalidConfig);
    }

    #[test]
    fn the_pods_own_addresses_are_taken_from_a_result() {
        for odd in [r#"{"interfaces": null, "ips": null}"#, r#"{"ips": [{"interface": -1, "address": "10.9.9.9/32"}]}"#]
        {
            assert_eq!(addresses(odd).unwrap().len(), usize::from(odd.contains("10.9.9.9")));
        }
        let result = r#"{"interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": "/run/netns/a"}], "ips": [
            {"interface": 0, "address": "10.244.0.1/24"}, {"interface": 1, "address": "10.244.0.7/24"},
            {"version": "6", "interface": 1, "address": "fd00::7/64"}, {"address": "10.9.9.9/32"}]}"#;
        let expected: Vec<IpAddr> = ["10.244.0.7", "fd00::7", "10.9.9.9"].map(|text| text.parse().unwrap()).into();
        assert_eq!(addresses(result).unwrap(), expected);
        assert_eq!(addresses("{}").unwrap(), Vec::<IpAddr>::new());
        assert_eq!(addresses(r#"{"ips": [{"address": "here"}]}"#).unwrap_err().code, Code::InvalidConfig);
    }

    #[test]
    fn an_error_has_the_specifications_form() {
        let error = CniError::new(Code::TryAgainLater, "not \"now\"").details("later");
        let value: serde_json::Value = serde_json::from_str(&error.to_json("0.4.0")).unwrap();
        assert_eq!(
            value,
            serde_json::json!({"cniVersion": "0.4.0", "code": 11, "msg": "not \"now\"", "details": "later"})
        );
        assert!(error.to_json("nonsense").contains("1.1.0"));
    }
}

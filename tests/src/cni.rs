//! A container runtime's calls of the CNI plugin, as containerd makes them: environment, standard input, one process
//! for each call in the node's network namespace.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::cluster::{Node, Pod};
use crate::place::binary;

/// The runtime of a node, with a network configuration that has the plugin at its end.
#[derive(Debug, Clone)]
pub struct Runtime<'a> {
    node: &'a Node,
    program: PathBuf,
    /// The plugin's object in the configuration, with its version and name.
    config: Value,
}

/// A call that is being put together.
#[derive(Debug, Clone)]
pub struct CniCall<'a> {
    runtime: &'a Runtime<'a>,
    env: Vec<(String, OsString)>,
    config: Value,
    input: Option<Vec<u8>>,
}

/// What became of a call.
#[derive(Debug, Clone)]
pub struct CniAnswer {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl<'a> Runtime<'a> {
    /// With the plugin from the build, and a configuration by hand.
    pub fn new(node: &'a Node, socket: &Path) -> Self {
        let config = json!({
            "cniVersion": "1.0.0",
            "name": "cluster",
            "type": "understory-cni",
            "socket": socket,
            "excludeNamespaces": ["kube-system", "understory-system"],
        });
        Self { node, program: binary("ztunnel"), config }
    }

    /// With the first configuration of a folder, and the plugin of another, as a runtime that was not told about the
    /// mesh. `None` if the plugin is not at the end of that chain.
    pub fn installed(node: &'a Node, conf_dir: &Path, bin_dir: &Path) -> Option<Self> {
        let list: Value = serde_json::from_str(&std::fs::read_to_string(first_configuration(conf_dir)?).ok()?).ok()?;
        let mut config = list["plugins"].as_array()?.last()?.clone();
        let program = bin_dir.join(config["type"].as_str().filter(|name| *name == "understory-cni")?);
        config["cniVersion"] = list["cniVersion"].clone();
        config["name"] = list["name"].clone();
        Some(Self { node, program, config })
    }

    /// Sets a field of the plugin's configuration.
    pub fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config[key] = value.into();
        self
    }

    /// A call for a pod. ADD, CHECK and DEL get the result that the plugins before would have made.
    pub fn call(&'a self, command: &str, pod: &Pod) -> CniCall<'a> {
        let id = pod.sandbox_id();
        let args = format!(
            "K8S_POD_UID={};IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={id}",
            pod.uid(),
            pod.namespace(),
            pod.pod_name()
        );
        let call = CniCall { runtime: self, env: Vec::new(), config: self.config.clone(), input: None };
        let call = call
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", id)
            .env("CNI_NETNS", pod.netns().path())
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", args);
        call.config("prevResult", result(pod))
    }

    /// A call for no pod: VERSION, STATUS, GC.
    pub fn bare_call(&'a self, command: &str) -> CniCall<'a> {
        let call = CniCall { runtime: self, env: Vec::new(), config: self.config.clone(), input: None };
        call.env("CNI_COMMAND", command).env("CNI_PATH", "/opt/cni/bin")
    }
}

impl CniCall<'_> {
    /// Sets a variable.
    pub fn env(mut self, key: &str, value: impl Into<OsString>) -> Self {
        self = self.without(key);
        self.env.push((key.to_owned(), value.into()));
        self
    }

    pub fn without(mut self, key: &str) -> Self {
        self.env.retain(|(name, _)| name != key);
        self
    }

    /// Sets a field of standard input.
    pub fn config(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.config[key] = value.into();
        self
    }

    /// Standard input, whatever it be.
    pub fn input(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.input = Some(bytes.into());
        self
    }

    /// The text of `prevResult` as it is handed to the plugin.
    pub fn result(&self) -> String {
        self.config["prevResult"].to_string()
    }

    /// Runs the plugin to its end.
    #[track_caller]
    pub fn run(&self) -> CniAnswer {
        let mut command: Command = self.runtime.node.command(&self.runtime.program);
        command.arg0("understory-cni").env_clear().envs(self.env.iter().map(|(key, value)| (key, value)));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("start {}: {e}", self.runtime.program.display()));
        let input = self.input.clone().unwrap_or_else(|| self.config.to_string().into_bytes());
        let mut stdin = child.stdin.take().expect("it was piped");
        let output = std::thread::scope(|scope| {
            // A plugin need not read it all.
            scope.spawn(move || drop(stdin.write_all(&input)));
            child.wait_with_output().unwrap_or_else(|e| panic!("wait for the plugin: {e}"))
        });
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the plugin speaks UTF-8");
        CniAnswer { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl CniAnswer {
    /// What a successful call printed.
    #[track_caller]
    pub fn expect(&self, what: &str) -> &str {
        assert_eq!(self.code, Some(0), "{what}: {self:?}");
        &self.stdout
    }

    /// The error of a call that failed in the specification's way.
    #[track_caller]
    pub fn error(&self, what: &str) -> Value {
        assert_eq!(self.code, Some(1), "{what}: {self:?}");
        let error: Value = serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{what}: {e}: {self:?}"));
        assert!(
            error["code"].is_u64() && error["msg"].is_string() && error["cniVersion"].is_string(),
            "{what}: {error}"
        );
        error
    }

    /// As [`CniAnswer::error`], with its code and with texts that it must hold.
    #[track_caller]
    pub fn fails(&self, code: u64, texts: &[&str]) {
        let error = self.error(&format!("code {code}"));
        assert_eq!(error["code"], code, "{error}");
        let text = error.to_string();
        for part in texts {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}

/// The configuration that a runtime takes from a folder: the first by its name.
pub fn first_configuration(conf_dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(conf_dir).ok()?.flatten().map(|entry| entry.path());
    let known = |path: &PathBuf| path.extension().is_some_and(|e| e == "conf" || e == "conflist" || e == "json");
    entries.filter(known).min()
}

/// What the plugins for bridge and addresses print of a pod.
fn result(pod: &Pod) -> Value {
    let index = pod.node().trim_start_matches("node");
    let ips: Vec<Value> = pod
        .addresses()
        .iter()
        .map(|ip| match ip.is_ipv4() {
            true => json!({ "interface": 2, "address": format!("{ip}/24"), "gateway": format!("10.244.{index}.1") }),
            false => {
                json!({ "interface": 2, "address": format!("{ip}/64"), "gateway": format!("fd00:10:244:{index}::1") })
            }
        })
        .collect();
    json!({
        "cniVersion": "1.0.0",
        "interfaces": [
            { "name": "cni0", "mac": "9a:70:60:a3:a0:84" },
            { "name": pod.veth(), "mac": "3a:e7:05:cb:c6:ff" },
            { "name": "eth0", "mac": "c6:e4:78:c0:87:63", "sandbox": pod.netns().path() },
        ],
        "ips": ips,
        "routes": [{ "dst": "0.0.0.0/0" }],
        "dns": {},
    })
}

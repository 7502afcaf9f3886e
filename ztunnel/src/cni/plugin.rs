//! One call of the plugin: environment and standard input in, a result or an error on standard output.
//!
//! Must never change a byte of the result that the plugin before it has made, nor fail a DEL.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::LONGEST_ANSWER_SECONDS;
use super::client::{AskError, Deadline, Patience, ask};
use super::protocol::{Answer, Attach, Request};
use super::spans::Json;
use super::types::{self, Call, CniError, Code, Command, Config, PodName, VERSIONS};

/// The plugin as a process.
pub fn main() -> ExitCode {
    let (output, code) = match answer(|name| std::env::var_os(name), io::stdin().as_fd()) {
        Ok(output) => (output, ExitCode::SUCCESS),
        // Whatever is wrong with the call, a pod must be able to end.
        Err((error, version)) if std::env::var_os("CNI_COMMAND").is_some_and(|command| command == "DEL") => {
            eprintln!("{}", error.to_json(&version));
            (String::new(), ExitCode::SUCCESS)
        }
        Err((error, version)) => (error.to_json(&version), ExitCode::FAILURE),
    };
    let mut stdout = io::stdout();
    // A runtime that does not listen has no use for the other code either.
    match stdout.write_all(output.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// What is printed. With an error comes the version of the configuration, as far as it is known.
fn answer(env: impl Fn(&str) -> Option<OsString>, stdin: BorrowedFd<'_>) -> Result<String, (CniError, String)> {
    let early = |error| (error, String::new());
    let call = Call::read(env).map_err(early)?;
    let input = read(stdin).map_err(early)?;
    if call.command == Command::Version && input.trim().is_empty() {
        return Ok(version(&Config::default()));
    }
    let json = Json::new(&input)
        .map_err(|error| early(CniError::new(Code::DecodingFailure, format!("standard input is no JSON: {error}"))))?;
    let told = json.member(&json.root(), "cniVersion").map(|span| json.text(&span));
    let told: String = told.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
    let config = Config::read(json, call.command).map_err(|error| (error, told.clone()))?;
    let result = match call.command {
        Command::Version => Ok(version(&config)),
        Command::Add => add(&call, &config, json),
        Command::Check => check(&call, &config, json),
        Command::Del => Ok(del(&call, &config)),
        Command::Status => status(&config),
        Command::Gc => gc(config),
    };
    result.map_err(|error| (error, told))
}

fn add(call: &Call, config: &Config, json: Json<'_>) -> Result<String, CniError> {
    let previous = previous(json)?;
    let result = with_version(previous, &config.cni_version)?;
    let Some(pod) = asked_for(call, config) else { return Ok(result) };
    match call_agent(call, config, pod, types::addresses(previous)?, Request::Add)? {
        Answer::Captured | Answer::Outside { .. } => Ok(result),
        Answer::Refused { step, reason } => {
            let message = format!("pod {pod} does not start outside the mesh: {reason}");
            Err(CniError::new(Code::TryAgainLater, message).details(details(call, config, &step)))
        }
        Answer::Done => Err(CniError::new(Code::TryAgainLater, "the agent answered something else than asked for")
            .details(details(call, config, "wait for the agent's answer"))),
    }
}

fn check(call: &Call, config: &Config, json: Json<'_>) -> Result<String, CniError> {
    let previous = previous(json)?;
    let Some(pod) = asked_for(call, config) else { return Ok(String::new()) };
    match call_agent(call, config, pod, types::addresses(previous)?, Request::Check)? {
        Answer::Captured | Answer::Outside { .. } | Answer::Done => Ok(String::new()),
        Answer::Refused { step, reason } => {
            let message = format!("pod {pod} is not captured: {reason}");
            Err(CniError::new(Code::NotCaptured, message).details(details(call, config, &step)))
        }
    }
}

/// Never fails: what the agent is not told, it finds out.
fn del(call: &Call, config: &Config) -> String {
    if asked_for(call, config).is_some() {
        let request = Request::Del { container: call.container.clone() };
        if let Err(error) = ask(&config.socket, &request, None, FAREWELL) {
            eprintln!("{}: the agent is not told that {} goes: {error}", config.socket.display(), call.container);
        }
    }
    String::new()
}

fn gc(config: Config) -> Result<String, CniError> {
    let attachments = config
        .valid_attachments
        .ok_or_else(|| CniError::new(Code::InvalidConfig, "cni.dev/valid-attachments is missing, which GC needs"))?;
    if let Err(error) = ask(&config.socket, &Request::Gc { attachments }, None, FAREWELL) {
        eprintln!("{}: the agent is not told which attachments are valid: {error}", config.socket.display());
    }
    Ok(String::new())
}

fn status(config: &Config) -> Result<String, CniError> {
    let unable = |message: String, step: &str| {
        let details = format!("socket {}, step: {step}", config.socket.display());
        CniError::new(Code::NotAvailable, message).details(details)
    };
    match ask(&config.socket, &Request::Status, None, STATUS) {
        Ok(Answer::Refused { step, reason }) => Err(unable(format!("the agent cannot serve pods: {reason}"), &step)),
        Ok(_) => Ok(String::new()),
        Err(error) => Err(unable(format!("the agent cannot be asked: {}", error.source), error.step)),
    }
}

fn version(config: &Config) -> String {
    let told = types::position(&config.cni_version).map_or(VERSIONS[VERSIONS.len() - 1], |index| VERSIONS[index]);
    serde_json::json!({ "cniVersion": told, "supportedVersions": VERSIONS }).to_string()
}

/// The pod, where the agent has to be asked for it.
fn asked_for<'a>(call: &'a Call, config: &Config) -> Option<&'a PodName> {
    call.pod.as_ref().filter(|pod| !config.exclude_namespaces.contains(&pod.namespace))
}

fn call_agent(
    call: &Call,
    config: &Config,
    pod: &PodName,
    addresses: Vec<std::net::IpAddr>,
    request: impl FnOnce(Attach) -> Request,
) -> Result<Answer, CniError> {
    // Without waiting: whatever else may lie at the path.
    let netns = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&call.netns).map_err(|error| {
        let message = format!("CNI_NETNS: cannot open {}: {error}", call.netns.display());
        CniError::new(Code::IoFailure, message)
    })?;
    let request = request(Attach {
        pod: pod.clone(),
        container: call.container.clone(),
        netns: call.netns.display().to_string(),
        addresses,
    });
    let answer = config.timeout_seconds.unwrap_or(ANSWER_SECONDS).clamp(1, LONGEST_ANSWER_SECONDS);
    let patience = Patience { connect: CONNECT, answer: Duration::from_secs(answer) };
    ask(&config.socket, &request, Some(netns.as_fd()), patience).map_err(|error: AskError| {
        let message = format!("the agent of this node cannot be asked for pod {pod}: {}", error.source);
        CniError::new(Code::TryAgainLater, message).details(details(call, config, error.step))
    })
}

fn details(call: &Call, config: &Config, step: &str) -> String {
    let (command, socket, netns) = (call.command, config.socket.display(), call.netns.display());
    format!("{command}: step: {step}, socket {socket}, network namespace {netns}, container {}", call.container)
}

fn previous(json: Json<'_>) -> Result<&str, CniError> {
    let span = json.member(&json.root(), "prevResult");
    let text = span.map(|span| json.text(&span)).filter(|text| text.starts_with('{'));
    text.ok_or_else(|| {
        CniError::new(Code::InvalidConfig, "there is no prevResult: the plugin must stand behind another in the chain")
    })
}

/// The result as it came; only where it does not tell its version, as some runtimes leave it, that is added.
fn with_version(result: &str, version: &str) -> Result<String, CniError> {
    let json = Json::new(result).map_err(|error| CniError::new(Code::DecodingFailure, error.to_string()))?;
    if json.member(&json.root(), "cniVersion").is_some() {
        return Ok(result.to_owned());
    }
    let rest = &result[1..];
    let comma = if rest.trim_start().starts_with('}') { "" } else { "," };
    Ok(format!("{{\"cniVersion\":\"{version}\"{comma}{rest}"))
}

fn read(stdin: BorrowedFd<'_>) -> Result<String, CniError> {
    let failed = |error: io::Error| CniError::new(Code::IoFailure, format!("cannot read standard input: {error}"));
    let deadline = Deadline::after(STDIN);
    let mut bytes = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        deadline.wait(stdin, PollFlags::IN).map_err(failed)?;
        match rustix::io::read(stdin, &mut buffer) {
            Ok(0) => break,
            Ok(taken) => bytes.extend_from_slice(&buffer[..taken]),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(failed(error.into())),
        }
        if bytes.len() > MAX_STDIN {
            let message = format!("standard input is longer than {MAX_STDIN} bytes");
            return Err(CniError::new(Code::DecodingFailure, message));
        }
    }
    String::from_utf8(bytes).map_err(|_| CniError::new(Code::DecodingFailure, "standard input is no UTF-8 text"))
}

/// Until standard input has come to its end.
const STDIN: Duration = Duration::from_secs(10);
/// Bytes of standard input.
const MAX_STDIN: usize = 1 << 20;
/// Until the agent is there: it may just be starting again.
const CONNECT: Duration = Duration::from_secs(3);
/// Until the agent has answered, where the configuration does not tell.
const ANSWER_SECONDS: u64 = 15;
/// A runtime that hears no takes the whole node for not ready: an upgrade of the agent is waited for.
const STATUS: Patience = Patience { connect: Duration::from_secs(10), answer: Duration::from_secs(5) };
/// For what the agent finds out by itself as well.
const FAREWELL: Patience = Patience { connect: Duration::ZERO, answer: Duration::from_secs(2) };

#[cfg(test)]
mod tests;

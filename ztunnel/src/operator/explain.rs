//! `ztunnel explain`: what would happen to a connection, and why.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::anyhow;
use clap::{Args, ValueEnum};

use super::admin;
use crate::proxy::explain::Question;
use crate::proxy::saved::Saved;

#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// The client: namespace/pod, a SPIFFE ID, or an IP address
    #[arg(long, value_name = "CLIENT")]
    from: String,
    /// The destination: namespace/service, namespace/pod, a host name or an IP address, with its port
    #[arg(long, value_name = "DESTINATION:PORT")]
    to: String,
    #[arg(long, short, value_enum, default_value_t)]
    output: Output,
    /// The proxy's admin address; the answer is what the proxy of that node knows
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:15000")]
    admin: SocketAddr,
    /// A saved /config_dump to be asked in the running proxy's place; - for the standard input
    #[arg(long, value_name = "FILE", conflicts_with = "admin")]
    dump: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

/// Asks and prints. The answer alone decides nothing about the exit code: a refused connection is an answer too.
pub fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    let answer = ask(args).map_err(|error| anyhow!(printable(&error.to_string())))?;
    let answer = printable(&answer);
    std::io::stdout().write_all(answer.as_bytes()).map_err(|error| anyhow!("cannot write the answer: {error}"))
}

fn ask(args: &ExplainArgs) -> anyhow::Result<String> {
    match &args.dump {
        Some(path) => ask_dump(args, path),
        None => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            let output = match args.output {
                Output::Text => "text",
                Output::Json => "json",
            };
            let parameters = [("from", &*args.from), ("to", &*args.to), ("output", output)];
            Ok(runtime.block_on(admin::get(args.admin, "/explain", &parameters))?)
        }
    }
}

/// Names come from whoever wrote the dump: none may steer the reader's terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && c != '\n' { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn ask_dump(args: &ExplainArgs, path: &Path) -> anyhow::Result<String> {
    let text = match path.to_str() {
        Some("-") => std::io::read_to_string(std::io::stdin()),
        _ => std::fs::read_to_string(path),
    };
    let text = text.map_err(|error| anyhow!("cannot read {}: {error}", path.display()))?;
    let saved = Saved::read(&text).map_err(|error| anyhow!("{}: {error}", path.display()))?;
    let explanation = saved.explain(&Question { from: args.from.clone(), to: args.to.clone() })?;
    Ok(match args.output {
        Output::Text => explanation.to_string(),
        Output::Json => serde_json::to_string_pretty(&explanation)? + "\n",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_holds_no_control_characters() {
        assert_eq!(printable("ok\n\u{1b}[2J\u{9b}1m\r\u{e9}"), "ok\n\u{fffd}[2J\u{fffd}1m\u{fffd}\u{e9}");
    }
}

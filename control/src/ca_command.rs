//! `control ca …`: looks at the authority's folder, and takes the steps of a rotation.
//!
//! Must never touch a folder that another process is changing: each step holds the folder's lock.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use clap::{Args, Subcommand, ValueEnum};

use crate::ca::{self, Status};
use crate::settings::any_time;

#[derive(Debug, Subcommand)]
pub enum CaCommand {
    /// Shows what signs, what is trusted, and where a rotation stands
    Status(StatusArgs),
    /// Takes the next step of a root's rotation: the new root is trusted; it signs; the old one is withdrawn
    Rotate(RotateArgs),
}

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// End with an error if one of the authority's certificates ends within this time, such as 30d. Not looked at by default.
    #[arg(long, value_name = "TIME", value_parser = any_time)]
    fail_within: Option<Duration>,
}

#[derive(Debug, Args)]
pub struct RotateArgs {
    #[command(flatten)]
    folder: FolderArgs,
    /// Take the step although it cuts off who has not followed yet
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct FolderArgs {
    /// Folder of the authority's files, as given to `control serve`. Required.
    #[arg(long, env = "CA_DIR", value_name = "CA_DIR")]
    ca_dir: PathBuf,
    /// Shape of the answer.
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

impl CaCommand {
    /// Does what is asked, and prints what came of it.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Status(args) => show(&args),
            Self::Rotate(args) => {
                let done = ca::rotate(&args.folder.ca_dir, args.force)?;
                let said = say(&match args.folder.output {
                    Output::Json => serde_json::to_string_pretty(&done)? + "\n",
                    Output::Text => format!("step {} of 3: {}\n\n{}", done.step, done.did, done.status.to_text()),
                });
                said.map_err(|error| anyhow!("step {} is done, but {error}", done.step))?;
                Ok(ExitCode::SUCCESS)
            }
        }
    }
}

fn show(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let status = ca::status(&args.folder.ca_dir)?;
    say(&match args.folder.output {
        Output::Json => serde_json::to_string_pretty(&status)? + "\n",
        Output::Text => status.to_text(),
    })?;
    let ends = args.fail_within.map(|within| ending(&status, within)).unwrap_or_default();
    for line in &ends {
        eprintln!("error: {line}");
    }
    Ok(if ends.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Who reads it may go away at any time.
fn say(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).map_err(|error| anyhow!("cannot write the answer: {error}"))
}

fn ending(status: &Status, within: Duration) -> Vec<String> {
    let soon = status.report.certificates().filter(|(_, cert)| cert.seconds_left < within.as_secs());
    soon.map(|(what, cert)| format!("{what} certificate {} ends at {}", cert.name, cert.not_after)).collect()
}
